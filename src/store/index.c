#include "store/index.h"
#include "store/manifest_load.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/document.h"
#include "store/manifest_private.h"
#include "sum/sum.h"

#define ORDER_FROM DOCUMENT_SEQUENCE_MAX /* 19 digits */

struct index_entry {
        char tag[256];
        uint64_t sequence, began, job;
        bool is_stale;
};
struct index {
        struct index_entry *entries;
        size_t count;
};

static uint64_t job_sum(const char *job)
{
        return sum_crc64(0, job, strlen(job));
}

static enum nebula_status entry_key(const struct manifest *manifest, char ret_key[MANIFEST_KEY_MAX], struct nebula_error *error)
{
        char directory[256];
        enum nebula_status status = name_encode(manifest->tag, directory, error);

        if (!status)
                snprintf(ret_key, MANIFEST_KEY_MAX, INDEX_PREFIX "%019" PRIu64 "-%019" PRIu64 "-%016" PRIx64 "/%s",
                         ORDER_FROM - manifest->sequence, line_began(&manifest->line), job_sum(manifest->job), directory);
        return status;
}

enum nebula_status index_put(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = entry_key(manifest, key, error);

        return status ? status : store_put_text(store, key, "\n", STORE_ALWAYS, error);
}

enum nebula_status index_remove(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = entry_key(manifest, key, error);

        return status ? status : store_remove_one(store, key, error);
}

/* Parses a key of the index; false: it is not an entry. */
static bool parse_key(const char *key, struct index_entry *ret_entry)
{
        struct index_entry entry = { 0 };
        char again[256];
        int used = 0;
        uint64_t order;
        const char *text = key + sizeof INDEX_PREFIX - 1;

        if (strspn(text, "0123456789") != 19 || sscanf(text, "%19" SCNu64 "-%19" SCNu64 "-%16" SCNx64 "/%n", &order, &entry.began, &entry.job, &used) != 3 ||
            used != 19 + 1 + 19 + 1 + 16 + 1 || order > ORDER_FROM)
                return false;
        entry.sequence = ORDER_FROM - order;
        if (name_decode(text + used, entry.tag, NULL) || name_encode(entry.tag, again, NULL) || strcmp(again, text + used))
                return false;
        *ret_entry = entry;
        return true;
}

static enum nebula_status load(struct store *store, struct index *ret_index, struct nebula_error *error)
{
        struct store_list list;
        struct index index = { 0 };
        enum nebula_status status = store_list_all(store, INDEX_PREFIX, true, &list, error);

        if (status)
                return status;
        index.entries = calloc(list.count + 1, sizeof *index.entries);
        if (!index.entries)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for an index of %zu versions", list.count);
        for (size_t i = 0; i < list.count && !status; i++)
                index.count += parse_key(list.entries[i].key, &index.entries[index.count]);
        store_list_done(&list);
        if (status)
                free(index.entries);
        else
                *ret_index = index;
        return status;
}

static int by_tag(const void *a, const void *b)
{
        return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static void mark_stale(struct index *index, const struct store_list *tags)
{
        char directory[256];

        for (size_t i = 0; i < index->count; i++)
                index->entries[i].is_stale = name_encode(index->entries[i].tag, directory, NULL) || !store_list_find(tags, directory);
}

/* *ret_covers: whether each tag of the path has an entry. Marks the entries of absent tags as stale. *ret_count: the number of tags. */
static enum nebula_status covers_all(struct store *store, struct index *index, size_t *ret_count, bool *ret_covers, struct nebula_error *error)
{
        const char **tags = calloc(index->count + 1, sizeof *tags);
        struct store_list list;
        char tag[256];
        enum nebula_status status;

        if (!tags)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for %zu tags", index->count);
        for (size_t i = 0; i < index->count; i++)
                tags[i] = index->entries[i].tag;
        qsort(tags, index->count, sizeof *tags, by_tag);
        status = store_list_all(store, "", false, &list, error);
        *ret_count = 0;
        *ret_covers = true;
        for (size_t i = 0; !status && i < list.count; i++) {
                const char *one = tag;

                if (!manifest_tag_of(&list.entries[i], tag))
                        continue;
                ++*ret_count;
                *ret_covers = *ret_covers && bsearch(&one, tags, index->count, sizeof *tags, by_tag);
        }
        if (!status) {
                mark_stale(index, &list);
                store_list_done(&list);
        }
        free(tags);
        return status;
}

static const struct index_entry *choose(const struct index *index, const char *job)
{
        uint64_t wanted = job ? job_sum(job) : 0;
        struct order_best best = { 0 };

        for (size_t i = 0; i < index->count; i++) {
                const struct index_entry *one = &index->entries[i];
                struct order_entry entry = order_entry(one->tag, one->sequence, NULL);

                entry.began = one->began;
                entry.counts = !one->is_stale && (!job || one->job == wanted);
                order_add(&best, &entry, one);
        }
        return order_best(&best, NULL);
}

static enum nebula_status load_entry(struct store *store, const struct index_entry *entry, const char *job, struct manifest *ret_manifest,
                                     struct nebula_error *error)
{
        struct manifest manifest;
        enum nebula_status status = manifest_load(store, entry->tag, &manifest, error);

        if (!status && manifest.sequence == entry->sequence && (!job || !strcmp(manifest.job, job))) {
                *ret_manifest = manifest;
                return NEBULA_OK;
        }
        if (!status)
                manifest_done(&manifest);
        if (status && status != NEBULA_NOT_FOUND && status != NEBULA_CORRUPT)
                return status;
        return error_set(error, NEBULA_BUSY, 0, "the index of %s and the log of \"%.200s\" differ", store->root, entry->tag);
}

enum nebula_status index_newest(struct store *store, const char *job, struct manifest *ret_manifest, struct nebula_error *error)
{
        struct index index;
        const struct index_entry *entry;
        size_t tag_count = 0;
        bool covers = false;
        enum nebula_status status = load(store, &index, error);

        if (status)
                return status;
        status = covers_all(store, &index, &tag_count, &covers, error);
        if (!status && !tag_count)
                status = error_set(error, NEBULA_NOT_FOUND, 0, "%s holds no checkpoint", store->root);
        else if (!status && !covers)
                status = error_set(error, NEBULA_BUSY, 0, "%s holds tags that its index does not name", store->root);
        entry = status ? NULL : choose(&index, job);
        if (!status)
                status = entry ? load_entry(store, entry, job, ret_manifest, error) :
                                 error_set(error, NEBULA_BUSY, 0, "the index of %s names no version of this job", store->root);
        free(index.entries);
        return status;
}

enum nebula_status index_sweep(struct store *store, int64_t before_ns, struct nebula_error *error)
{
        struct store_list tags, list;
        struct index_entry entry;
        char directory[256];
        enum nebula_status status = store_list_all(store, INDEX_PREFIX, true, &list, error);

        if (status)
                return status;
        status = store_list_all(store, "", false, &tags, error);
        for (size_t i = 0; !status && i < list.count; i++) {
                if (list.entries[i].time_ns > before_ns || !parse_key(list.entries[i].key, &entry) || name_encode(entry.tag, directory, NULL) ||
                    store_list_find(&tags, directory))
                        continue;
                status = store_remove_one(store, list.entries[i].key, error);
        }
        store_list_done(&list);
        if (!status)
                store_list_done(&tags);
        return status;
}
