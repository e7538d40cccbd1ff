/*
 * make_version - writes one complete version to storage, the way the agent does: files, record, manifest.
 *
 *      make_version DIR TAG [--generation N] [--rank R] [--waits] [--job J] [--chunk BYTES] [--raw NAME]
 *              NAME=FLOATS...
 *
 * Each NAME becomes a torch file: a dict with the float32 tensors "a" (FLOATS values 0, 1, 2, ... plus the
 * generation) and "b" (3 values). --raw NAME adds a file that is no zip. A generation above 1 carries over what it does
 * not write. --waits leaves rewritten files in .nebula/gN, as after a crash before they were moved.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "os/os.h"
#include "store/manifest.h"
#include "sum/sum.h"

#define FILES_MAX 16

struct maker {
        struct store *store;
        const char *tag;
        char directory[256];
        uint64_t generation;
        uint32_t chunk_bytes; /* small, so that small files have several */
        bool waits;
        struct record record;
        struct record_file files[FILES_MAX];
};

static void demand(enum nebula_status status, const struct nebula_error *error)
{
        if (!status)
                return;
        fprintf(stderr, "make_version: %s\n", error->message);
        exit(1);
}

static void write_file(struct maker *maker, const char *name, void *data, uint64_t size, bool is_zip)
{
        struct record_file *file = &maker->files[maker->record.file_count++];
        struct nebula_error error;
        char key[1200];

        snprintf(file->name, sizeof file->name, "%s", name);
        demand(name_encode(name, file->path, &error), &error);
        file->size = size;
        file->is_zip = is_zip;
        file->chunk_bytes = maker->chunk_bytes;
        demand(image_seal(data, size, is_zip, maker->chunk_bytes, &file->chunks, &file->chunk_count, &error), &error);
        if (maker->waits)
                snprintf(key, sizeof key, "%s/.nebula/g%" PRIu64 "/%s", maker->directory, maker->generation, file->path);
        else
                snprintf(key, sizeof key, "%s/%s", maker->directory, file->path);
        demand(maker->store->ops->old_write(maker->store, key, data, size, &error), &error);
}

static void write_torch(struct maker *maker, const char *name, uint64_t count)
{
        float few[3] = { 1, 2, (float)maker->generation };
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
                many[i] = (float)(i + maker->generation);
        demand(pickle_flat_dict(tensors, 2, &pickle, &pickle_size, &error), &error);
        demand(zip_layout_init(&layout, pickle_size, sizes, 2, &error), &error);
        image = aligned_alloc(4096, (layout.size + 4095) & ~(uint64_t)4095);
        zip_layout_write(&layout, pickle, image);
        memcpy((char *)image + layout.storage_offsets[0], many, sizes[0]);
        memcpy((char *)image + layout.storage_offsets[1], few, sizes[1]);
        write_file(maker, name, image, layout.size, true);
        zip_layout_done(&layout);
        free(image);
        free(pickle);
        free(many);
}

/* The new manifest: our files, and what the older one has beside them. */
static void write_manifest(struct maker *maker, const char *record_text, size_t record_size)
{
        static struct manifest_file files[2 * FILES_MAX];
        static struct manifest_record records[2 * FILES_MAX];
        struct manifest manifest = { .generation = maker->generation, .world = maker->record.world, .files = files,
                                     .records = records, .step = name_step(maker->tag),
                                     .sequence = (uint64_t)os->wall_ns() };
        struct manifest older = { 0 };
        struct nebula_error error;
        char key[1200], *text;
        size_t size;

        strcpy(manifest.tag, maker->tag);
        strcpy(manifest.job, maker->record.job);
        for (size_t i = 0; i < maker->record.file_count; i++) {
                struct manifest_file *file = &files[manifest.file_count++];

                strcpy(file->name, maker->files[i].name);
                strcpy(file->path, maker->files[i].path);
                file->size = maker->files[i].size;
                file->rank = maker->record.rank;
                file->generation = maker->generation;
        }
        records[manifest.record_count] = (struct manifest_record){
                .size = record_size, .generation = maker->generation, .rank = maker->record.rank,
                .crc64 = sum_crc64(0, record_text, record_size),
        };
        record_path(maker->record.rank, maker->generation, records[manifest.record_count++].path);
        if (!manifest_load(maker->store, maker->tag, &older, NULL)) {
                for (size_t i = 0; i < older.file_count; i++)
                        if (!manifest_find_file(&manifest, older.files[i].name))
                                files[manifest.file_count++] = older.files[i];
                for (size_t i = 0; i < older.record_count; i++)
                        records[manifest.record_count++] = older.records[i];
                manifest_done(&older);
        }
        demand(manifest_format(&manifest, &text, &size, &error), &error);
        snprintf(key, sizeof key, "%s/" MANIFEST_DIRECTORY "/manifest.json", maker->directory);
        demand(maker->store->ops->old_write(maker->store, key, text, size, &error), &error);
        if (!maker->waits)
                demand(maker->store->ops->old_write(maker->store, "latest", maker->tag, strlen(maker->tag), &error), &error);
        free(text);
}

static void finish(struct maker *maker)
{
        struct nebula_error error;
        char path[64], key[1200], *text;
        size_t size;

        maker->record.files = maker->files;
        maker->record.generation = maker->generation;
        maker->record.world = maker->record.rank + 1;
        maker->record.persisted = (double)os->wall_ns() / 1e9;
        maker->record.captured = maker->record.persisted - 0.75;
        maker->record.begun = maker->record.captured - 0.012;
        strcpy(maker->record.tag, maker->tag);
        demand(record_format(&maker->record, &text, &size, &error), &error);
        record_path(maker->record.rank, maker->generation, path);
        snprintf(key, sizeof key, "%s/%s", maker->directory, path);
        demand(maker->store->ops->old_write(maker->store, key, text, size, &error), &error);
        write_manifest(maker, text, size);
        free(text);
        for (size_t i = 0; i < maker->record.file_count; i++)
                record_file_done(&maker->files[i]);
}

static void take_option(struct maker *maker, const char *option, const char *value)
{
        if (!strcmp(option, "--generation"))
                maker->generation = strtoull(value, NULL, 10);
        else if (!strcmp(option, "--rank"))
                maker->record.rank = (uint32_t)strtoul(value, NULL, 10);
        else if (!strcmp(option, "--chunk"))
                maker->chunk_bytes = (uint32_t)strtoul(value, NULL, 10);
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

int main(int argc, char **argv)
{
        char raw[] = "a file that is no zip\n";
        struct maker maker = { .generation = 1, .chunk_bytes = 64u << 10 };
        struct nebula_error error;

        if (argc < 4) {
                fprintf(stderr, "usage: make_version DIR TAG [--generation N] [--rank R] [--waits] [--job J] [--chunk BYTES] [--raw NAME] NAME=FLOATS...\n");
                return 2;
        }
        demand(store_open(argv[1], &maker.store, &error), &error);
        maker.tag = argv[2];
        demand(name_encode(maker.tag, maker.directory, &error), &error);
        for (int i = 3; i < argc; i++)
                if (!strcmp(argv[i], "--waits"))
                        maker.waits = true;
                else if (!strncmp(argv[i], "--", 2) && i + 1 < argc) {
                        take_option(&maker, argv[i], argv[i + 1]);
                        i++;
                }
        for (int i = 3; i < argc; i++)
                if (!strcmp(argv[i], "--raw"))
                        write_file(&maker, argv[++i], raw, sizeof raw - 1, false);
                else if (!strncmp(argv[i], "--", 2))
                        i += strcmp(argv[i], "--waits") != 0;
                else
                        write_described(&maker, argv[i]);
        finish(&maker);
        store_close(maker.store);
        return 0;
}
