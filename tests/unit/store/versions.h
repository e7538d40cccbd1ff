/*
 * versions.h - versions for tests of stores. A writer writes one step at a time, in the order of docs/formats.md, as one node's agent does.
 *
 *      ON_EACH_STORE(promise) { ... }          a test that runs on files and on mem, each time with an empty `store` (kinds.h)
 *      struct writer writer = { .tag = "t", .run = "a", .names = { "x", "y" } };
 *      while (writer_goes_on(&writer)) writer_step(&writer);
 *      writer_done(&writer);
 */
#ifndef NB_TESTS_UNIT_STORE_VERSIONS_H
#define NB_TESTS_UNIT_STORE_VERSIONS_H

#include <inttypes.h>

#include "base/error.h"
#include "kinds.h"
#include "store/manifest.h"
#include "store/tag_log.h"
#include "sum/sum.h"

#define HOUR_NS (INT64_C(3600) * 1000000000)
#define ANY_AGE (-2 * HOUR_NS) /* for a sweep: every object is old enough */
#define NAMES_MAX 8
#define FILE_BYTES 60u
#define CHUNK_BYTES 4096u

#define ON_ALL_STORES(promise) \
        static void promise##_here(void); \
        static void promise(void) \
        { \
                each(promise##_here); \
        } \
        static void promise##_here(void)
/* Skips slow stores, because versions need many calls, and stores with stale lists, because a test checks its writes at once. */
#define ON_EACH_STORE(promise) \
        static void promise##_if_fresh(void); \
        ON_ALL_STORES(promise) \
        { \
                if ((features & STORE_LISTS_FRESH) && strcmp(kind->name, "slow mem")) \
                        promise##_if_fresh(); \
        } \
        static void promise##_if_fresh(void)

/* Replaces the store by an empty one of the same kind. */
static inline void begin_anew(void)
{
        store_close(store);
        kind->end();
        store = kind->begin();
}

/* ---- objects ---- */

static inline void have(const char *key, const char *text)
{
        if (put(key, text, STORE_ALWAYS))
                abort();
}

static inline bool has(const char *key)
{
        struct store_entry entry;

        if (store->ops->stat(store, key, &entry, NULL))
                return false;
        store_entry_done(&entry);
        return true;
}

static inline void drop(const char *key)
{
        if (store_remove_one(store, key, NULL))
                abort();
}

/* The bytes of an object, which the caller frees. NULL: absent. */
static inline char *bytes_of(const char *key, size_t *ret_size)
{
        char *text;

        return store->ops->get(store, key, 64u << 20, &text, ret_size, NULL, NULL) ? NULL : text;
}

/* Acts as a program that writes a new file and renames it over the old one. */
static inline void replace(const char *key, const char *data, size_t size)
{
        if (store->ops->put(store, key, data, size, STORE_ALWAYS, NULL, NULL, NULL))
                abort();
}

static inline void flip(const char *key, size_t offset)
{
        size_t size;
        char *text = bytes_of(key, &size);

        if (!text || offset >= size)
                abort();
        text[offset] = (char)(text[offset] ^ 4);
        replace(key, text, size);
        free(text);
}

static inline void copy_object(const char *from, const char *to)
{
        size_t size;
        char *text = bytes_of(from, &size);

        if (!text)
                abort();
        replace(to, text, size);
        free(text);
}

static inline size_t count_objects(const char *prefix)
{
        struct store_list list;
        size_t count;

        if (store_list_all(store, prefix, true, &list, NULL))
                abort();
        count = list.count;
        store_list_done(&list);
        return count;
}

/* ---- a writer ---- */

/* A rule that the writer breaks, to show that the test finds it. */
enum writer_mistake { NO_MISTAKE, WRITES_IN_PLACE, TRUSTS_ITS_FILES, GIVES_NO_WAY };
enum writer_at { AT_BEGIN, AT_PLACE, AT_RECORD, AT_FILES, AT_COMMIT, AT_CHECK, AT_SHOW, AT_END, AT_GAVE_WAY, AT_GAVE_UP };
#define WRITER_TRIES 4

/* The test sets the fields before `attempt`. */
struct writer {
        const char *tag, *run;
        const char *after;            /* the run before its own; NULL: none */
        const char *names[NAMES_MAX]; /* of its files */
        uint64_t sequence;            /* 0: the run's first letter */
        bool carries;                 /* carries over the other files of the version before */
        enum writer_mistake mistake;
        enum writer_at at;
        uint32_t attempt;
        uint64_t base; /* the newest entry that it has seen */
        uint64_t next; /* the number of its own entry */
        bool is_made;    /* this try has made its entry */
        bool is_durable; /* it says so */
        char directory[256], writing[WRITING_MAX], *record_text;
        size_t record_size;
        bool is_apart[NAMES_MAX];
        struct manifest before, manifest;
        struct nebula_error error; /* of the last step that failed */
};

/* The file's content, which is different for each run. */
static inline void fill(char *data, size_t size, const struct writer *writer, const char *name)
{
        unsigned seed = (unsigned)sum_crc64(sum_crc64(0, writer->run, strlen(writer->run)), name, strlen(name));

        for (size_t i = 0; i < size; i++)
                data[i] = (char)(i * 31 + seed + i / 251);
}

static inline size_t writer_file_count(const struct writer *writer)
{
        size_t count = 0;

        while (count < NAMES_MAX && writer->names[count])
                count++;
        return count;
}

static inline void writer_forget(struct writer *writer)
{
        free(writer->record_text);
        writer->record_text = NULL;
        manifest_done(&writer->before);
        manifest_done(&writer->manifest);
        writer->before = writer->manifest = (struct manifest){ 0 };
}

static inline void writer_done(struct writer *writer)
{
        writer_forget(writer);
}

static inline bool writer_may_follow(const struct writer *writer, const char *run)
{
        return !strcmp(run, writer->run) || (writer->after && !strcmp(run, writer->after)) || writer->mistake == GIVES_NO_WAY;
}

static inline void writer_begin_manifest(struct writer *writer)
{
        struct manifest *manifest = &writer->manifest;

        strcpy(manifest->tag, writer->tag);
        strcpy(manifest->run, writer->run);
        manifest->generation = writer->before.generation + 1;
        manifest->sequence = writer->sequence;
        if (manifest->sequence <= writer->before.sequence)
                manifest->sequence = writer->before.sequence + 1;
        manifest->step = name_step(writer->tag);
        manifest->world = 1;
}

static inline enum nebula_status writer_read_log(struct writer *writer)
{
        struct tag_log log;
        enum nebula_status status;

        writer_forget(writer);
        if (!writer->sequence)
                writer->sequence = (unsigned char)writer->run[0];
        if (name_encode(writer->tag, writer->directory, NULL))
                abort();
        writing_name("", writer->run, writer->sequence, writer->attempt, writer->writing);
        status = tag_log_head(store, writer->tag, &log, &writer->error);
        if (status)
                return status;
        writer->is_made = false;
        writer->base = log.number;
        writer->before = log.manifest;
        status = tag_log_next(store, writer->tag, writer->base, &writer->next, &writer->error);
        if (status)
                return status;
        writer_begin_manifest(writer);
        writer->at = AT_PLACE;
        if (!strcmp(writer->before.run, writer->run) && writer->before.sequence == writer->sequence) {
                manifest_done(&writer->manifest);
                writer->manifest = writer->before;
                writer->before = (struct manifest){ 0 };
                writer->at = AT_CHECK;
        } else if (writer->before.generation && !writer_may_follow(writer, writer->before.run)) {
                writer->at = AT_GAVE_WAY;
        }
        return NEBULA_OK;
}

static inline enum nebula_status writer_find_places(struct writer *writer)
{
        struct store_entry entry;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < writer_file_count(writer) && !status; i++) {
                if (file_key(writer->directory, NULL, writer->names[i], key, NULL))
                        abort();
                status = store->ops->stat(store, key, &entry, &writer->error);
                writer->is_apart[i] = !status || (writer->next > 1 && writer->mistake != WRITES_IN_PLACE);
                if (!status)
                        store_entry_done(&entry);
                if (status == NEBULA_NOT_FOUND)
                        status = NEBULA_OK;
        }
        writer->at = AT_RECORD;
        return status;
}

/* A newer entry than the one that the writer has read ends the try. */
static inline enum nebula_status writer_look_again(struct writer *writer)
{
        uint64_t newest;
        enum nebula_status status = tag_log_number(store, writer->tag, &newest, &writer->error);

        if (!status && newest != writer->base)
                status = error_set(&writer->error, NEBULA_BUSY, 0, "the log has gone on");
        return status;
}

static inline enum nebula_status writer_put_record(struct writer *writer)
{
        struct record_file files[NAMES_MAX] = { 0 };
        uint64_t sums[NAMES_MAX];
        struct record_rank rank = { 0, 1, 2 };
        struct record record = { .number = writer->next, .generation = writer->manifest.generation, .world = 1, .ranks = &rank, .rank_count = 1, .files = files,
                                 .file_count = writer_file_count(writer) };
        char key[MANIFEST_KEY_MAX], data[FILE_BYTES];
        enum nebula_status status = writer_look_again(writer);

        if (status)
                return status;
        strcpy(record.tag, writer->tag);
        strcpy(record.run, writer->run);
        strcpy(record.writing, writer->writing);
        for (size_t i = 0; i < record.file_count; i++) {
                fill(data, sizeof data, writer, writer->names[i]);
                sums[i] = sum_crc64(0, data, sizeof data);
                files[i] = (struct record_file){ .size = FILE_BYTES, .chunk_bytes = CHUNK_BYTES, .is_apart = writer->is_apart[i], .chunks = &sums[i],
                                                 .chunk_count = 1 };
                strcpy(files[i].name, writer->names[i]);
        }
        if (record_format(&record, &writer->record_text, &writer->record_size, NULL) || record_key(writer->directory, writer->writing, 0, key, NULL))
                abort();
        writer->at = AT_FILES;
        return store->ops->put(store, key, writer->record_text, writer->record_size, STORE_IF_ABSENT, NULL, NULL, &writer->error);
}

static inline enum nebula_status writer_put_files(struct writer *writer)
{
        enum nebula_status status = writer_look_again(writer);
        struct store_upload *upload;
        char key[MANIFEST_KEY_MAX], data[FILE_BYTES];

        for (size_t i = 0; i < writer_file_count(writer) && !status; i++) {
                struct store_object object = { key, data, sizeof data, NULL };

                fill(data, sizeof data, writer, writer->names[i]);
                if (file_key(writer->directory, writer->is_apart[i] ? writer->writing : NULL, writer->names[i], key, NULL))
                        abort();
                status = store->ops->upload(store, &object, 1, &upload, &writer->error);
                if (!status)
                        status = store->ops->publish(store, upload, &writer->error);
        }
        writer->at = AT_COMMIT;
        return status;
}

static inline void writer_name_files(struct writer *writer)
{
        struct manifest *manifest = &writer->manifest;
        const struct manifest *before = &writer->before;
        struct manifest_record *record;

        if (manifest_reserve(manifest, writer_file_count(writer) + before->file_count, 1 + before->record_count, NULL))
                abort();
        record = &manifest->records[manifest->record_count++];
        *record = (struct manifest_record){ .size = writer->record_size, .crc64 = sum_crc64(0, writer->record_text, writer->record_size),
                                            .generation = manifest->generation };
        strcpy(record->writing, writer->writing);
        for (size_t i = 0; i < writer_file_count(writer); i++) {
                struct manifest_file file = { .name = writer->names[i], .size = FILE_BYTES, .generation = manifest->generation,
                                              .is_apart = writer->is_apart[i] };

                manifest_add_file(manifest, &file, NULL);
        }
        for (size_t i = 0; writer->carries && i < before->file_count; i++) {
                struct manifest_file file = before->files[i];

                if (manifest_find_file(manifest, file.name))
                        continue;
                record = &manifest->records[manifest->record_count];
                *record = before->records[file.record];
                for (file.record = 0; strcmp(manifest->records[file.record].writing, record->writing); file.record++)
                        continue;
                manifest->record_count += file.record == manifest->record_count;
                manifest_add_file(manifest, &file, NULL);
        }
}

static inline enum nebula_status writer_commit(struct writer *writer)
{
        char *text;
        size_t size;
        enum nebula_status status = writer_look_again(writer);

        if (status)
                return status;
        writer->manifest.number = writer->next;
        writer_name_files(writer);
        if (manifest_format(&writer->manifest, &text, &size, NULL))
                abort();
        status = tag_log_create(store, writer->tag, writer->manifest.number, text, size, &writer->error);
        free(text);
        writer->is_made = !status;
        writer->at = AT_CHECK;
        return status;
}

static inline enum nebula_status writer_check(struct writer *writer)
{
        enum nebula_status status = writer->mistake == TRUSTS_ITS_FILES ? NEBULA_OK : manifest_check_all(store, &writer->manifest, &writer->error);

        if ((status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT || (status == NEBULA_BUSY && writer->is_made)) && !manifest_is_gone(store, &writer->manifest))
                tag_log_take_back(store, writer->tag, writer->manifest.number, NULL);
        writer->is_durable = writer->is_durable || !status;
        writer->at = AT_SHOW;
        return status;
}

static inline bool writer_goes_on(const struct writer *writer)
{
        return writer->at < AT_END;
}

/* A failed step ends the try. */
static inline void writer_step(struct writer *writer)
{
        enum nebula_status status = NEBULA_OK;

        switch (writer->at) {
        case AT_BEGIN:
                status = writer_read_log(writer);
                break;
        case AT_PLACE:
                status = writer_find_places(writer);
                break;
        case AT_RECORD:
                status = writer_put_record(writer);
                break;
        case AT_FILES:
                status = writer_put_files(writer);
                break;
        case AT_COMMIT:
                status = writer_commit(writer);
                break;
        case AT_CHECK:
                status = writer_check(writer);
                break;
        case AT_SHOW: /* the version is durable, even if this fails */
                manifest_publish(store, &writer->manifest, &writer->before, &writer->error);
                writer->at = AT_END;
                break;
        default:
                break;
        }
        if (status)
                writer->at = ++writer->attempt < WRITER_TRIES ? AT_BEGIN : AT_GAVE_UP;
}

static inline void writer_run(struct writer *writer)
{
        while (writer_goes_on(writer))
                writer_step(writer);
}

/* Runs its first try up to a step, without that step. */
static inline void writer_run_to(struct writer *writer, enum writer_at at)
{
        while (writer->at < at && !writer->attempt)
                writer_step(writer);
        if (writer->attempt)
                abort();
}

/* Writes a version to its end; it must succeed. */
static inline void write_version(struct writer writer)
{
        writer_run(&writer);
        CHECK(writer.at == AT_END && writer.is_durable);
        if (writer.at != AT_END)
                printf("# writer of \"%s\": %s\n", writer.tag, writer.error.message);
        writer_done(&writer);
}

/* Leaves the objects of a writer that died after its files and before its manifest. */
static inline void write_torn(struct writer writer)
{
        writer_run_to(&writer, AT_COMMIT);
        writer_done(&writer);
}

/* ---- the stored versions ---- */

/* Whether the tag holds a version of that run, with all of its bytes. */
static inline bool holds(const char *tag, const char *run)
{
        struct manifest manifest;
        bool result;

        if (manifest_load(store, tag, &manifest, &error))
                return false;
        result = !strcmp(manifest.run, run) && !manifest_verify(store, &manifest, NULL, NULL, NULL, &error);
        manifest_done(&manifest);
        return result;
}

static inline bool holds_nothing(const char *tag)
{
        struct manifest manifest;
        enum nebula_status status = manifest_load(store, tag, &manifest, &error);

        if (!status)
                manifest_done(&manifest);
        return status == NEBULA_NOT_FOUND;
}

static inline void load(const char *tag, struct manifest *ret_manifest)
{
        if (manifest_load(store, tag, ret_manifest, &error)) {
                printf("# %s\n", error.message);
                abort();
        }
}

/* Removes the version that the tag holds. */
static inline enum nebula_status remove_version(const char *tag)
{
        struct manifest manifest;
        enum nebula_status status;

        load(tag, &manifest);
        status = manifest_remove(store, &manifest, &error);
        manifest_done(&manifest);
        return status;
}

/* Whether <tag>/<name> has the bytes of that run's file. */
static inline bool shows(const char *tag, const char *name, const char *run)
{
        struct writer writer = { .run = run };
        char key[MANIFEST_KEY_MAX], expected[FILE_BYTES], *found;
        size_t size;
        bool result;

        snprintf(key, sizeof key, "%s/%s", tag, name);
        found = bytes_of(key, &size);
        fill(expected, sizeof expected, &writer, name);
        result = found && size == sizeof expected && !memcmp(found, expected, sizeof expected);
        free(found);
        return result;
}

#endif
