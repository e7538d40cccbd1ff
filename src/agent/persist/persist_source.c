/*
 * The files of earlier versions that may have some of the bytes already. Of each file it is the newest one of the same name; its record has
 * the checksum of each chunk, and the mark by which the driver knows the object again. A chunk with the same checksum at the same offset
 * counts as the same bytes: two different chunks have one CRC-64 by a chance of 2^-64, with which a reader would not find damage either.
 */
#include <stdlib.h>
#include <string.h>

#include "agent/persist/persist_private.h"
#include "agent/persist/slots_private.h"
#include "image/image.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/record.h"

#define SOURCE_MIN (2 * IMAGE_CHUNK_BYTES) /* files below it are sent: asking costs as much */
#define RECORDS_MAX 16  /* to load; of a job whose ranks stay where they are, it is one */
#define VERSIONS_MAX KNOWN_WHOLE /* to look through for a name: the files of a job may take turns */
#define PAUSE_MAX 15    /* versions */
#define COMMON_MIN 64   /* 1/64 of the bytes is worth it */
#define ATTEMPTS_MAX 2  /* then all is sent, in case the storage takes no references and does not say so */

/* Records of earlier versions, each as a manifest names it. */
struct earlier {
        size_t count;
        struct {
                char tag[256];
                struct manifest_record record;
        } records[RECORDS_MAX];
};

void plan_drop_source(struct plan_file *file)
{
        if (!file->source)
                return;
        free(file->source->chunks);
        free(file->source);
        file->source = NULL;
}

static uint64_t chunk_size(uint64_t size, uint64_t offset)
{
        return size - offset < IMAGE_CHUNK_BYTES ? size - offset : IMAGE_CHUNK_BYTES;
}

bool plan_source_has(const struct plan_file *file, uint64_t offset, uint64_t crc64)
{
        const struct plan_source *source = file->source;
        uint64_t index = offset / IMAGE_CHUNK_BYTES;

        return source && index < source->chunk_count && source->chunks[index] == crc64 &&
               chunk_size(source->object.size, offset) == chunk_size(file->size, offset);
}

/* Returns its place in the list; RECORDS_MAX: there is no room. */
static size_t add_record(struct earlier *earlier, const struct manifest *manifest, const struct manifest_record *record)
{
        size_t at = 0;

        while (at < earlier->count && (strcmp(earlier->records[at].tag, manifest->tag) || earlier->records[at].record.rank != record->rank ||
                                       strcmp(earlier->records[at].record.writing, record->writing)))
                at++;
        if (at == RECORDS_MAX || at < earlier->count)
                return at;
        strcpy(earlier->records[at].tag, manifest->tag);
        earlier->records[at].record = *record;
        earlier->count++;
        return at;
}

/* Of the versions of an earlier agent, the list has the files of the newest alone. */
static void choose_source(const struct catalogue *catalogue, const struct job *job, struct plan_file *file, struct earlier *earlier)
{
        size_t looked = 0;

        for (size_t i = job->known.count; i-- && looked < VERSIONS_MAX && !file->source;) {
                const struct manifest *manifest = job->known.list[i];
                const struct manifest_file *found;
                size_t at;

                if (strcmp(manifest->job, job->name) || manifest->is_damaged || catalogue_doubts(catalogue, job->persist_path, manifest))
                        continue;
                looked++;
                found = manifest_find_file(manifest, file->name);
                at = found ? add_record(earlier, manifest, &manifest->records[found->record]) : RECORDS_MAX;
                if (at == RECORDS_MAX)
                        continue;
                file->source = calloc(1, sizeof *file->source);
                if (!file->source)
                        return;
                file->source->named = *found;
                file->source->named.name = file->name;
                file->source->earlier = at;
        }
}

/* False: it cannot be used. */
static bool fill_source(struct plan_file *file, const char *directory, struct record *record)
{
        struct plan_source *source = file->source;
        struct record_file recorded;

        if (record_take_file(record, &source->named, &recorded, NULL))
                return false;
        source->chunks = recorded.chunks;
        source->chunk_count = recorded.chunk_count;
        if (recorded.chunk_bytes != IMAGE_CHUNK_BYTES || !*recorded.mark.text ||
            file_key(directory, recorded.is_apart ? record->writing : NULL, file->name, source->key, NULL))
                return false;
        source->object = (struct store_source){ .key = source->key, .size = recorded.size, .mark = recorded.mark };
        return true;
}

static void load_record(struct plan *plan, struct earlier *earlier, size_t at)
{
        struct manifest manifest = { .records = &earlier->records[at].record, .record_count = 1 };
        struct record record = { 0 };
        char directory[256];
        bool is_loaded;

        strcpy(manifest.tag, earlier->records[at].tag);
        is_loaded = !name_encode(manifest.tag, directory, NULL) && !manifest_load_record(plan->writer.store, &manifest, 0, &record, NULL);
        for (size_t i = 0; i < plan->file_count; i++) {
                struct plan_file *file = &plan->files[i];

                if (file->source && file->source->earlier == at && !(is_loaded && fill_source(file, directory, &record)))
                        plan_drop_source(file);
        }
        record_done(&record);
}

/* Most jobs change everything at each step. Looking costs requests, and writes of sizes that are not the best, so it is done ever more seldom. */
static bool is_to_look(struct job_persist *persist)
{
        if (!persist->source_pause)
                return true;
        persist->source_pause--;
        return false;
}

void plan_report_common(struct job *job, const struct plan *plan)
{
        struct job_persist *persist = job->persist;
        uint64_t size = 0, referred = 0;

        for (size_t i = 0; i < plan->file_count; i++) {
                size += plan->files[i].source ? plan->files[i].size : 0;
                referred += plan->files[i].written.referred;
        }
        if (!size)
                return;
        persist->source_vain = referred >= size / COMMON_MIN ? 0 : persist->source_vain + 1;
        if (persist->source_vain > 1)
                persist->source_pause = persist->source_vain > 5 ? PAUSE_MAX : (1u << (persist->source_vain - 1)) - 1;
}

void plan_find_sources(struct plan *plan)
{
        struct version *version = plan->version;
        struct store *store = plan->writer.store;
        struct earlier *earlier;
        bool looks;

        if (!(store->ops->features(store) & STORE_REFERS))
                return;
        earlier = calloc(1, sizeof *earlier);
        if (!earlier)
                return;
        catalogue_lock(plan->catalogue);
        looks = version->persist->attempt < ATTEMPTS_MAX && is_to_look(version->job->persist);
        for (size_t i = 0; i < plan->file_count && looks; i++)
                if (!plan->files[i].carried && plan->files[i].size >= SOURCE_MIN)
                        choose_source(plan->catalogue, version->job, &plan->files[i], earlier);
        catalogue_unlock(plan->catalogue);
        for (size_t i = 0; i < earlier->count; i++)
                load_record(plan, earlier, i);
        free(earlier);
}
