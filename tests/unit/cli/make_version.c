/*
 * make_version - writes one complete version to storage, the way the agent does: files, record, manifest, views.
 *
 *      make_version PATH TAG [--writing N] [--rank R] [--waits] [--job J] [--chunk BYTES] [--age SECONDS] [--count N [--threads T]] [--raw NAME]
 *              [--file NAME=PATH] NAME=FLOATS...
 *
 * Each NAME becomes a torch file: a dict with the float32 tensors "a" (FLOATS values 0, 1, 2, ... plus the
 * number of the writing) and "b" (3 values). --raw NAME adds a file that is not a zip. --file adds a file with the
 * bytes of another, as a zip if its name ends in .pt. A writing above 1 carries over the files that it does
 * not write. --count makes N versions, whose tags are TAG with the numbers 1 to N behind it, by T threads. They count as committed one
 * millisecond after each other, the last one now. --waits ends after the manifest, as an agent that dies there: TAG/NAME still shows the
 * version before. PATH is a directory or a URL.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "os/os.h"
#include "store/cloud.h"
#include "store/index.h"
#include "store/manifest.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_publish.h"
#include "store/record.h"
#include "store/tag_log.h"
#include "sum/sum.h"

#define FILES_MAX 16
#define THREADS_MAX 64

struct maker {
        struct store *store;
        const char *tag;
        char directory[256];
        uint64_t writing;
        uint32_t chunk_bytes; /* small, so that small files have several */
        unsigned count;       /* 0: one version, whose tag has no number */
        unsigned thread_count;
        uint64_t sequence, age_s; /* age_s: it was committed so many seconds ago */
        bool waits;
        struct tag_log log;   /* as it was before */
        struct record record;
        struct record_rank rank;
        struct record_file files[FILES_MAX];
};

static void demand(enum nebula_status status, const struct nebula_error *error)
{
        if (!status)
                return;
        fprintf(stderr, "make_version: %s\n", error->message);
        exit(1);
}

/* `data` begins at a page. is_sealed: its CRC-32s are there already. */
static void write_file(struct maker *maker, const char *name, void *data, uint64_t size, bool is_zip, bool is_sealed)
{
        struct record_file *file = &maker->files[maker->record.file_count++];
        struct store_object object = { .data = data, .size = size };
        struct store_upload *upload;
        struct store_entry there;
        struct nebula_error error;
        char key[MANIFEST_KEY_MAX];

        snprintf(file->name, sizeof file->name, "%s", name);
        file->rank = maker->rank.rank;
        file->size = size;
        file->is_zip = is_zip;
        file->chunk_bytes = maker->chunk_bytes;
        demand(image_seal(data, size, is_zip && !is_sealed, maker->chunk_bytes, &file->chunks, &file->chunk_count, &error), &error);
        demand(file_key(maker->directory, NULL, name, key, &error), &error);
        file->is_apart = !maker->store->ops->stat(maker->store, key, &there, NULL);
        if (file->is_apart) {
                store_entry_done(&there);
                demand(file_key(maker->directory, maker->record.writing, name, key, &error), &error);
        }
        object.key = key;
        demand(maker->store->ops->upload(maker->store, &object, 1, &upload, &error), &error);
        demand(maker->store->ops->publish(maker->store, upload, &error), &error);
}

static void write_torch(struct maker *maker, const char *name, uint64_t count)
{
        float few[3] = { 1, 2, (float)maker->writing };
        float *many = malloc((count + 1) * sizeof *many);
        struct nebula_tensor tensors[2] = {
                { .name = "a", .dtype = NEBULA_DTYPE_F32, .dim_count = 1, .shape = { count }, .data = many },
                { .name = "b", .dtype = NEBULA_DTYPE_F32, .dim_count = 1, .shape = { 3 }, .data = few },
        };
        uint64_t sizes[2] = { count * sizeof *many, sizeof few };
        struct zip_layout layout;
        struct nebula_error error;
        size_t pickle_size;
        void *image;
        char *pickle;

        for (uint64_t i = 0; i < count; i++)
                many[i] = (float)(i + maker->writing);
        demand(pickle_flat_dict(tensors, 2, &pickle, &pickle_size, &error), &error);
        demand(zip_layout_init(&layout, pickle_size, sizes, 2, &error), &error);
        image = aligned_alloc(4096, (layout.size + 4095) & ~(uint64_t)4095);
        zip_layout_write(&layout, pickle, image);
        memcpy((char *)image + layout.storage_offsets[0], many, sizes[0]);
        memcpy((char *)image + layout.storage_offsets[1], few, sizes[1]);
        write_file(maker, name, image, layout.size, true, false);
        zip_layout_done(&layout);
        free(image);
        free(pickle);
        free(many);
}

/* Its index; it may be there already. */
static uint32_t add_record(struct manifest *manifest, const struct manifest_record *record)
{
        size_t at = 1;

        while (at < manifest->record_count && (manifest->records[at].rank != record->rank || strcmp(manifest->records[at].writing, record->writing)))
                at++;
        if (at == manifest->record_count)
                manifest->records[manifest->record_count++] = *record;
        return (uint32_t)at;
}

/* The new files, and the files of the version before that the new one lacks. */
static void fill_manifest(struct maker *maker, struct manifest *manifest, const char *record_text, size_t record_size)
{
        const struct manifest *before = &maker->log.manifest;
        struct nebula_error error;

        demand(manifest_reserve(manifest, maker->record.file_count + before->file_count, 1 + before->record_count, &error), &error);
        manifest->records[manifest->record_count++] = (struct manifest_record){
                .size = record_size, .sequence = maker->sequence, .rank = maker->rank.rank, .crc64 = sum_crc64(0, record_text, record_size),
        };
        strcpy(manifest->records[0].writing, maker->record.writing);
        for (size_t i = 0; i < maker->record.file_count; i++) {
                const struct record_file *own = &maker->files[i];
                const struct manifest_file file = {
                        .name = own->name, .size = own->size, .rank = own->rank, .is_apart = own->is_apart,
                };

                demand(manifest_add_file(manifest, &file, &error), &error);
        }
        for (size_t i = 0; i < before->file_count; i++) {
                struct manifest_file file = before->files[i];

                if (manifest_find_file(manifest, file.name))
                        continue;
                file.record = add_record(manifest, &before->records[file.record]);
                demand(manifest_add_file(manifest, &file, &error), &error);
        }
}

static void write_manifest(struct maker *maker, const char *record_text, size_t record_size)
{
        struct manifest manifest = { .writing = maker->writing, .world = maker->record.world, .step = name_step(maker->tag),
                                     .sequence = maker->sequence };
        struct nebula_error error;
        char *text;
        size_t size;

        strcpy(manifest.tag, maker->tag);
        strcpy(manifest.job, maker->record.job);
        fill_manifest(maker, &manifest, record_text, record_size);
        demand(tag_log_next(maker->store, maker->tag, maker->log.number, &manifest.number, &error), &error);
        demand(manifest_format(&manifest, &text, &size, &error), &error);
        if (maker->log.manifest.sequence)
                demand(index_remove(maker->store, &maker->log.manifest, &error), &error);
        demand(tag_log_create(maker->store, maker->tag, manifest.number, text, size, &error), &error);
        free(text);
        if (!maker->waits)
                demand(manifest_publish(maker->store, &manifest, &maker->log.manifest, &error), &error);
        demand(index_put(maker->store, &manifest, &error), &error);
        manifest_done(&manifest);
}

/* After the options, before the files. */
static void start(struct maker *maker)
{
        struct nebula_error error;

        demand(name_encode(maker->tag, maker->directory, &error), &error);
        memset(maker->files, 0, sizeof maker->files);
        maker->record.file_count = 0;
        strcpy(maker->record.tag, maker->tag);
        maker->record.files = maker->files;
        maker->record.ranks = &maker->rank;
        maker->record.rank_count = 1;
        maker->record.number = maker->writing;
        maker->record.world = maker->rank.rank + 1;
        writing_name(maker->record.job, maker->record.run, maker->writing, (uint32_t)os->wall_ns(), maker->record.writing);
        demand(tag_log_head(maker->store, maker->tag, &maker->log, &error), &error);
        if (maker->log.is_unsound && maker->log.unsound.status != NEBULA_CORRUPT) /* as the agent, which writes a damaged version anew */
                demand(maker->log.unsound.status, &maker->log.unsound);
}

static void finish(struct maker *maker)
{
        struct nebula_error error;
        char key[MANIFEST_KEY_MAX], *text;
        int64_t now = os->wall_ns();
        size_t size;

        maker->record.persisted = (double)now / 1e9;
        maker->rank.captured = (double)(now / 1000000) / 1000 - 0.75; /* whole milliseconds: a trace shows them exactly */
        maker->rank.begun = maker->rank.captured - 0.012;
        demand(record_format(&maker->record, &text, &size, &error), &error);
        demand(record_key(maker->directory, maker->record.writing, maker->rank.rank, key, &error), &error);
        demand(maker->store->ops->put(maker->store, key, text, size, STORE_IF_ABSENT, NULL, NULL, &error), &error);
        write_manifest(maker, text, size);
        free(text);
        for (size_t i = 0; i < maker->record.file_count; i++)
                record_file_done(&maker->files[i]);
        tag_log_done(&maker->log);
}

static void take_option(struct maker *maker, const char *option, const char *value)
{
        if (!strcmp(option, "--age"))
                maker->age_s = strtoul(value, NULL, 10);
        else if (!strcmp(option, "--writing"))
                maker->writing = strtoull(value, NULL, 10);
        else if (!strcmp(option, "--rank"))
                maker->rank.rank = (uint32_t)strtoul(value, NULL, 10);
        else if (!strcmp(option, "--chunk"))
                maker->chunk_bytes = (uint32_t)strtoul(value, NULL, 10);
        else if (!strcmp(option, "--count"))
                maker->count = (unsigned)strtoul(value, NULL, 10);
        else if (!strcmp(option, "--threads"))
                maker->thread_count = (unsigned)strtoul(value, NULL, 10);
        else if (!strcmp(option, "--job"))
                snprintf(maker->record.job, sizeof maker->record.job, "%s", value);
}

/* NAME=FLOATS */
static void write_described(struct maker *maker, const char *description)
{
        const char *equals = strrchr(description, '=');
        char name[256];

        if (!equals || equals - description >= (int)sizeof name) {
                fprintf(stderr, "make_version: \"%s\" is not NAME=FLOATS\n", description);
                exit(2);
        }
        memcpy(name, description, (size_t)(equals - description));
        name[equals - description] = '\0';
        write_torch(maker, name, strtoull(equals + 1, NULL, 10));
}

/* NAME=PATH */
static void write_copy(struct maker *maker, const char *description)
{
        const char *equals = strchr(description, '=');
        char name[256], *data;
        size_t size;
        void *image;

        if (!equals || equals - description >= (int)sizeof name || os_read_file(equals + 1, 64u << 20, &data, &size)) {
                fprintf(stderr, "make_version: \"%s\" is not NAME=PATH\n", description);
                exit(2);
        }
        memcpy(name, description, (size_t)(equals - description));
        name[equals - description] = '\0';
        image = aligned_alloc(4096, (size + 4096) & ~(size_t)4095);
        memcpy(image, data, size);
        write_file(maker, name, image, size, strlen(name) > 3 && !strcmp(name + strlen(name) - 3, ".pt"), true);
        free(image);
        free(data);
}

static void make(struct maker *maker, char **descriptions)
{
        static _Alignas(4096) char raw[] = "a file that is no zip\n";

        start(maker);
        for (char **one = descriptions; *one; one++)
                if (!strcmp(*one, "--file"))
                        write_copy(maker, *++one);
                else if (!strcmp(*one, "--raw"))
                        write_file(maker, *++one, raw, sizeof raw - 1, false, false);
                else if (!strncmp(*one, "--", 2))
                        one += strcmp(*one, "--waits") != 0;
                else
                        write_described(maker, *one);
        finish(maker);
}

struct making {
        const struct maker *like;
        char **descriptions;
        atomic_uint next; /* number of a version */
        uint64_t begun;   /* the sequence before the first one */
};

static void *make_some(void *argument)
{
        struct making *making = argument;
        struct maker *maker = malloc(sizeof *maker);
        char tag[256];
        unsigned n;

        while ((n = atomic_fetch_add(&making->next, 1)) <= making->like->count) {
                *maker = *making->like;
                snprintf(tag, sizeof tag, "%s%u", making->like->tag, n);
                maker->tag = tag;
                maker->sequence = making->begun + n * UINT64_C(1000000);
                make(maker, making->descriptions);
        }
        free(maker);
        return NULL;
}

static void make_many(const struct maker *like, char **descriptions)
{
        struct making making = { .like = like, .descriptions = descriptions, .next = 1, .begun = like->sequence - like->count * UINT64_C(1000000) };
        pthread_t threads[THREADS_MAX];
        unsigned count = 0;

        while (count + 1 < like->thread_count && count < THREADS_MAX && !pthread_create(&threads[count], NULL, make_some, &making))
                count++;
        make_some(&making);
        for (unsigned i = 0; i < count; i++)
                pthread_join(threads[i], NULL);
}

int main(int argc, char **argv)
{
        static struct maker maker = { .writing = 1, .chunk_bytes = 64u << 10 };
        struct nebula_error error;
        char latest[300];

        if (argc < 4) {
                fprintf(stderr, "usage: make_version PATH TAG [--writing N] [--rank R] [--waits] [--job J] [--chunk BYTES] [--count N [--threads T]] "
                                "[--raw NAME] NAME=FLOATS...\n");
                return 2;
        }
        cloud_offer();
        demand(store_open(argv[1], &maker.store, &error), &error);
        maker.tag = argv[2];
        for (int i = 3; i < argc; i++)
                if (!strcmp(argv[i], "--waits"))
                        maker.waits = true;
                else if (!strncmp(argv[i], "--", 2) && i + 1 < argc) {
                        take_option(&maker, argv[i], argv[i + 1]);
                        i++;
                }
        maker.sequence = (uint64_t)os->wall_ns() - maker.age_s * UINT64_C(1000000000);
        if (maker.count)
                make_many(&maker, argv + 3);
        else
                make(&maker, argv + 3);
        snprintf(latest, sizeof latest, maker.count ? "%.255s%u" : "%.255s", maker.tag, maker.count);
        if (!maker.waits)
                demand(store_put_text(maker.store, "latest", latest, STORE_ALWAYS, &error), &error);
        store_close(maker.store);
        return 0;
}
