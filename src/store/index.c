#include "store/index.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/document.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"

#define NAME_MAX_BYTES 255u
#define PLACE_PREFIX_BYTES 4u /* "job-", "run-" */

/* False: the name is too long for an entry. */
static bool encode(const char *name, char ret_text[256])
{
        *ret_text = 0;
        return !*name || (!name_encode(name, ret_text, NULL) && strlen(ret_text) + PLACE_PREFIX_BYTES <= NAME_MAX_BYTES);
}

static bool decode(const char *text, size_t length, char ret_name[256])
{
        char copy[256];

        *ret_name = 0;
        if (length > NAME_MAX_BYTES)
                return false;
        memcpy(copy, text, length);
        copy[length] = 0;
        return !length || !name_decode(copy, ret_name, NULL);
}

/* False: the names are too long. */
static bool entry_key(const struct manifest *manifest, char ret_key[MANIFEST_KEY_MAX])
{
        char job[256], run[256], tag[256], thinned[256], row[600];
        int length;

        if (!encode(manifest->job, job) || !encode(manifest->run, run) || !encode(manifest->thinned, thinned) || name_encode(manifest->tag, tag, NULL))
                return false;
        length = snprintf(row, sizeof row, "%019" PRIu64 "-%" PRIu64 "-%" PRIu64 "-%" PRIu64 "-%" PRIu32 "-%zu-%" PRIu64 "-%" PRIu64 "%s%s",
                          manifest->sequence, line_began(&manifest->line), manifest->number, manifest->writing, manifest->world, manifest_count(manifest),
                          manifest_size(manifest), manifest_written(manifest), *thinned ? "-" : "", thinned);
        if (length > (int)NAME_MAX_BYTES)
                return false;
        return snprintf(ret_key, MANIFEST_KEY_MAX, INDEX_PREFIX "job-%s/run-%s/%s/%s", job, run, tag, row) < MANIFEST_KEY_MAX;
}

enum nebula_status index_put(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = entry_key(manifest, key) ? store_put_text(store, key, "\n", STORE_ALWAYS, error) : NEBULA_OK;

        return status == NEBULA_INVALID ? NEBULA_OK : status;
}

enum nebula_status index_remove(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = entry_key(manifest, key) ? store_remove_one(store, key, error) : NEBULA_OK;

        return status == NEBULA_INVALID ? NEBULA_OK : status;
}

void index_mend(struct store *store, const char *tag)
{
        struct manifest manifest = { 0 };

        if (!manifest_load(store, tag, &manifest, NULL))
                index_put(store, &manifest, NULL);
        manifest_done(&manifest);
}

static bool take_numbers(const char *row, struct manifest *manifest)
{
        uint64_t began, files;
        char thinned[256] = "";
        int used = 0;

        if (sscanf(row, "%19" SCNu64 "-%19" SCNu64 "-%15" SCNu64 "-%15" SCNu64 "-%7" SCNu32 "-%9" SCNu64 "-%19" SCNu64 "-%19" SCNu64 "%n",
                   &manifest->sequence, &began, &manifest->number, &manifest->writing, &manifest->world, &files, &manifest->size, &manifest->written,
                   &used) != 8)
                return false;
        if (began > manifest->sequence || !manifest->number || manifest->number > DOCUMENT_NUMBER_MAX || !manifest->world ||
            manifest->world > DOCUMENT_WORLD_MAX || (manifest->size | manifest->written) > INT64_MAX || document_check_numbers(manifest->tag, manifest->writing, manifest->sequence, NULL))
                return false;
        manifest->all_files = files;
        if (began)
                manifest->line = (struct line){ .count = 1, .forks = { { began, INDEX_AFTER } } };
        if (row[used] && (row[used] != '-' || !decode(row + used + 1, strlen(row + used + 1), thinned) || strlen(thinned) >= sizeof manifest->thinned))
                return false;
        strcpy(manifest->thinned, thinned);
        return true;
}

/* False: no agent has made this key. */
static bool parse(const struct index_row *row, struct manifest *ret_manifest)
{
        const char *job = row->entry->key + sizeof INDEX_PREFIX - 1, *run = strchr(job, '/') + 1;
        struct manifest manifest = { .is_brief = true };
        char key[MANIFEST_KEY_MAX];

        if (strncmp(job, "job-", 4) || strncmp(run, "run-", 4) || !decode(job + 4, (size_t)(run - 1 - job - 4), manifest.job) ||
            !decode(run + 4, (size_t)(row->directory - 1 - run - 4), manifest.run) || !decode(row->directory, row->length, manifest.tag))
                return false;
        if (!take_numbers(row->directory + row->length + 1, &manifest) || !entry_key(&manifest, key) || strcmp(key, row->entry->key))
                return false;
        manifest.step = name_step(manifest.tag);
        *ret_manifest = manifest;
        return true;
}

static int compare(const char *a, size_t a_length, const char *b, size_t b_length)
{
        int order = memcmp(a, b, a_length < b_length ? a_length : b_length);

        return order ? order : (a_length > b_length) - (a_length < b_length);
}

static int compare_rows(const void *a, const void *b)
{
        const struct index_row *x = a, *y = b;

        return compare(x->directory, x->length, y->directory, y->length);
}

/* Finds the third part of a key. */
static bool find_directory(struct store_entry *entry, struct index_row *ret_row)
{
        const char *at = entry->key + sizeof INDEX_PREFIX - 1, *end;

        for (int part = 0; part < 2 && at; part++)
                at = strchr(at, '/') ? strchr(at, '/') + 1 : NULL;
        end = at ? strchr(at, '/') : NULL;
        if (!end || entry->is_prefix)
                return false;
        *ret_row = (struct index_row){ at, (size_t)(end - at), entry };
        return true;
}

enum nebula_status index_load(struct store *store, struct index *ret_index, struct nebula_error *error)
{
        struct index index = { 0 };
        enum nebula_status status = store_list_all(store, INDEX_PREFIX, true, &index.keys, error);

        if (status)
                return status;
        index.rows = calloc(index.keys.count + 1, sizeof *index.rows);
        if (!index.rows) {
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for an index of %zu versions", index.keys.count);
                store_list_done(&index.keys);
                return status;
        }
        for (size_t i = 0; i < index.keys.count; i++)
                index.count += find_directory(&index.keys.entries[i], &index.rows[index.count]);
        if (index.count)
                qsort(index.rows, index.count, sizeof *index.rows, compare_rows);
        *ret_index = index;
        return NEBULA_OK;
}

/* The first row that is not before the directory. */
static size_t place(const struct index *index, const char *directory)
{
        size_t low = 0, high = index->count, length = strlen(directory);

        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (compare(index->rows[middle].directory, index->rows[middle].length, directory, length) < 0)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

static bool is_at(const struct index *index, size_t at, const char *directory)
{
        return at < index->count && !compare(index->rows[at].directory, index->rows[at].length, directory, strlen(directory));
}

bool index_takes(const struct index *index, size_t row)
{
        struct manifest manifest;

        return (!row || compare_rows(&index->rows[row - 1], &index->rows[row])) &&
               (row + 1 == index->count || compare_rows(&index->rows[row], &index->rows[row + 1])) && parse(&index->rows[row], &manifest);
}

bool index_find(const struct index *index, const char *directory, struct manifest *ret_manifest)
{
        size_t at = place(index, directory);

        return is_at(index, at, directory) && !is_at(index, at + 1, directory) && parse(&index->rows[at], ret_manifest);
}

void index_done(struct index *index)
{
        free(index->rows);
        store_list_done(&index->keys);
        *index = (struct index){ 0 };
}
