/*
 * versions.h - versions for tests of stores. An author writes them with store/writer.h, a stage at a time.
 *
 *      ON_EACH_STORE(promise) { ... }          a test that runs on files and on mem, each time with an empty `store` (kinds.h)
 *      struct author writer = { .tag = "t", .run = "a", .names = { "x", "y" } };
 *      while (author_goes_on(&writer)) author_step(&writer);
 *      author_done(&writer);
 */
#ifndef NB_TESTS_UNIT_STORE_VERSIONS_H
#define NB_TESTS_UNIT_STORE_VERSIONS_H

#include <inttypes.h>

#include "base/error.h"
#include "kinds.h"
#include "store/manifest.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_remove.h"
#include "store/record.h"
#include "store/tag_log.h"
#include "store/verify.h"
#include "store/writer_private.h"
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

/* ---- an author: a program that writes versions of one file per name, by the steps of store/writer.h ---- */

/* A rule that the author breaks, to show that the test finds it. */
enum author_mistake { NO_MISTAKE, WRITES_IN_PLACE, TRUSTS_ITS_FILES, GIVES_NO_WAY };
enum author_at { AT_BEGIN, AT_PLACE, AT_RECORD, AT_FILES, AT_COMMIT, AT_CHECK, AT_SHOW, AT_END, AT_GAVE_WAY, AT_GAVE_UP };
#define AUTHOR_TRIES 4

/* The test sets the fields before `attempt`. */
struct author {
        const char *tag, *run;
        const char *after;            /* the run before its own; NULL: none */
        const char *names[NAMES_MAX]; /* of its files */
        uint64_t sequence;            /* 0: the run's first letter */
        bool is_blind;                /* its first try knows of no version of the tag */
        bool carries;                 /* carries over the other files of the version before */
        enum author_mistake mistake;
        enum author_at at;
        uint32_t attempt;
        bool is_durable; /* it says so */
        char writing[WRITING_MAX];
        struct writer real;
        bool is_begun;   /* `real` is in use */
        enum writer_way way;
        size_t steps;    /* that were taken of the way */
        struct nebula_error error; /* of the last step that failed */
};

/* The file's content, which is different for each run. */
static inline void fill(char *data, size_t size, const struct author *writer, const char *name)
{
        unsigned seed = (unsigned)sum_crc64(sum_crc64(0, writer->run, strlen(writer->run)), name, strlen(name));

        for (size_t i = 0; i < size; i++)
                data[i] = (char)(i * 31 + seed + i / 251);
}

static inline size_t author_file_count(const struct author *writer)
{
        size_t count = 0;

        while (count < NAMES_MAX && writer->names[count])
                count++;
        return count;
}

static inline void author_done(struct author *writer)
{
        if (writer->is_begun)
                writer_done(&writer->real);
        writer->is_begun = false;
}

static inline bool author_may_follow(const struct author *writer, const char *run)
{
        return !strcmp(run, writer->run) || (writer->after && !strcmp(run, writer->after)) || writer->mistake == GIVES_NO_WAY;
}

static inline enum nebula_status author_judge(void *argument, const struct manifest *before, struct nebula_error *failure)
{
        if (!before->sequence || author_may_follow(argument, before->run))
                return NEBULA_OK;
        return error_set(failure, NEBULA_INVALID, 0, "another run has written \"%s\"", before->tag);
}

static inline enum nebula_status author_upload(void *argument, struct nebula_error *failure)
{
        (void)argument;
        (void)failure;
        return NEBULA_OK;
}

static inline enum nebula_status author_place(struct author *writer, struct record_file *file, struct nebula_error *failure)
{
        struct store_entry entry;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status;

        if (writer->mistake != WRITES_IN_PLACE)
                return writer_is_apart(&writer->real, file->name, &file->is_apart, failure);
        status = file_key(writer->real.directory, NULL, file->name, key, failure);
        if (!status)
                status = store->ops->stat(store, key, &entry, failure);
        file->is_apart = !status;
        if (!status)
                store_entry_done(&entry);
        return status == NEBULA_NOT_FOUND ? NEBULA_OK : status;
}

static inline enum nebula_status author_describe(void *argument, struct nebula_error *failure)
{
        struct author *writer = argument;
        const struct manifest *manifest = &writer->real.manifest, *before = &writer->real.before.manifest;
        struct writer_share *share = writer_add_share(&writer->real, NULL);
        struct record *record = share ? &share->record : NULL;
        enum nebula_status status = NEBULA_OK;

        if (!record || !(record->files = calloc(NAMES_MAX, sizeof *record->files)) || !(record->ranks = calloc(1, sizeof *record->ranks)) ||
            !(writer->real.is_carried = calloc(before->file_count + 1, sizeof *writer->real.is_carried)))
                abort();
        strcpy(record->tag, writer->tag);
        strcpy(record->run, writer->run);
        strcpy(record->writing, writer->writing);
        record->number = manifest->number;
        record->world = 1;
        record->ranks[0] = (struct record_rank){ 0, 1, 2 };
        record->rank_count = 1;
        for (size_t i = 0; i < author_file_count(writer) && !status; i++) {
                struct record_file *file = &record->files[record->file_count++];
                char data[FILE_BYTES];

                fill(data, sizeof data, writer, writer->names[i]);
                *file = (struct record_file){ .size = FILE_BYTES, .chunk_bytes = CHUNK_BYTES, .chunks = malloc(sizeof *file->chunks), .chunk_count = 1 };
                if (!file->chunks)
                        abort();
                file->chunks[0] = sum_crc64(0, data, sizeof data);
                strcpy(file->name, writer->names[i]);
                status = author_place(writer, file, failure);
        }
        for (size_t i = 0; i < before->file_count; i++) {
                bool is_new = false;

                for (size_t j = 0; j < author_file_count(writer); j++)
                        is_new = is_new || !strcmp(before->files[i].name, writer->names[j]);
                writer->real.is_carried[i] = writer->carries && !is_new;
        }
        return status;
}

static inline enum nebula_status author_publish(void *argument, struct nebula_error *failure)
{
        struct author *writer = argument;
        const struct record *record = &writer->real.shares[0].record;
        struct store_upload *upload;
        char key[MANIFEST_KEY_MAX], data[FILE_BYTES];
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < record->file_count && !status; i++) {
                struct store_object object = { key, data, sizeof data, NULL };

                fill(data, sizeof data, writer, record->files[i].name);
                if (file_key(writer->real.directory, record->files[i].is_apart ? writer->writing : NULL, record->files[i].name, key, NULL))
                        abort();
                status = store->ops->upload(store, &object, 1, &upload, failure);
                if (!status)
                        status = store->ops->publish(store, upload, failure);
        }
        writer->real.is_overtaken = status == NEBULA_BUSY;
        return status;
}

static inline void author_fill_head(struct author *writer)
{
        struct manifest *manifest = &writer->real.manifest;
        const struct manifest *before = &writer->real.before.manifest;

        strcpy(manifest->run, writer->run);
        manifest->writing = writer->sequence; /* that of its name */
        manifest->sequence = writer->sequence <= before->sequence ? before->sequence + 1 : writer->sequence;
        manifest->step = name_step(writer->tag);
        manifest->world = 1;
}

static inline enum nebula_status author_begin(struct author *writer)
{
        static const struct writer_source source = { author_judge, author_upload, author_describe, author_publish, NULL };
        const struct manifest *before = &writer->real.before.manifest;
        enum nebula_status status;

        author_done(writer);
        if (!writer->sequence)
                writer->sequence = (unsigned char)writer->run[0];
        writing_name("", writer->run, writer->sequence, writer->attempt, writer->writing);
        if (writer_init(&writer->real, store, &source, writer, writer->tag, NULL))
                abort();
        writer->is_begun = true;
        writer->steps = 0;
        strcpy(writer->real.manifest.tag, writer->tag);
        if (writer->is_blind && !writer->attempt) {
                author_fill_head(writer);
                writer->way = WRITER_FIRST;
                writer->at = AT_PLACE;
                return NEBULA_OK;
        }
        status = writer_begin(&writer->real, &writer->error);
        if (status)
                return status;
        if (!strcmp(before->run, writer->run) && before->sequence == writer->sequence) {
                writer_take_found(&writer->real);
                writer->way = WRITER_REPEAT;
                writer->at = AT_CHECK;
                return NEBULA_OK;
        }
        status = author_judge(writer, before, &writer->error);
        author_fill_head(writer);
        writer->way = WRITER_ALONE;
        writer->at = AT_PLACE;
        if (!status) /* the number comes with the look at the log, as for the tests of sleepers */
                writer_step(&writer->real, writer->way, writer->steps++, &status, &writer->error);
        return status;
}

static inline bool author_goes_on(const struct author *writer)
{
        return writer->at < AT_END;
}

/* Takes the steps of the writer up to the next stage. A failed step ends the try. */
static inline void author_step(struct author *writer)
{
        /* so many steps of the way are taken when the stage is over */
        static const size_t alone[] = { [AT_PLACE] = 3, [AT_RECORD] = 7, [AT_FILES] = 9, [AT_COMMIT] = 13, [AT_CHECK] = 14, [AT_SHOW] = 15 };
        static const size_t first[] = { [AT_PLACE] = 2, [AT_RECORD] = 5, [AT_FILES] = 6, [AT_COMMIT] = 9, [AT_CHECK] = 10, [AT_SHOW] = 10 };
        static const size_t repeat[] = { [AT_CHECK] = 2, [AT_SHOW] = 3 };
        enum nebula_status status = NEBULA_OK;
        size_t end;

        if (writer->at == AT_BEGIN) {
                status = author_begin(writer);
        } else {
                end = (writer->way == WRITER_REPEAT ? repeat : writer->way == WRITER_FIRST ? first : alone)[writer->at];
                if (writer->at == AT_CHECK && writer->mistake == TRUSTS_ITS_FILES)
                        writer->steps = end;
                while (writer->steps < end && !status && writer_step(&writer->real, writer->way, writer->steps, &status, &writer->error))
                        writer->steps++;
                writer->is_durable = writer->is_durable || (writer->at == AT_CHECK && !status);
                writer->at++;
        }
        if (status == NEBULA_INVALID)
                writer->at = AT_GAVE_WAY;
        else if (status)
                writer->at = ++writer->attempt < AUTHOR_TRIES ? AT_BEGIN : AT_GAVE_UP;
}

static inline void author_run(struct author *writer)
{
        while (author_goes_on(writer))
                author_step(writer);
}

/* Runs its first try up to a step, without that step. */
static inline void author_run_to(struct author *writer, enum author_at at)
{
        while (writer->at < at && !writer->attempt)
                author_step(writer);
        if (writer->attempt)
                abort();
}

/* Writes a version to its end; it must succeed. */
static inline void write_version(struct author writer)
{
        author_run(&writer);
        CHECK(writer.at == AT_END && writer.is_durable);
        if (writer.at != AT_END)
                printf("# writer of \"%s\": %s\n", writer.tag, writer.error.message);
        author_done(&writer);
}

/* Leaves the objects of a writer that died after its files and before its manifest. */
static inline void write_torn(struct author writer)
{
        author_run_to(&writer, AT_COMMIT);
        author_done(&writer);
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
        struct author writer = { .run = run };
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
