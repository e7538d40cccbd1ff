/* All versions of a storage path. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "image/image.h"
#include "os/os.h"
#include "store/index.h"
#include "store/manifest.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"
#include "store/scan.h"
#include "store/scan_private.h"

#define SCAN_ROUNDS 20 /* if versions come and go faster than a scan reads them */

bool manifest_tag_of(const struct store_entry *entry, char ret_tag[256])
{
        char again[256];

        /* root owns one at each mount point. A user cannot enter it, so it would count as an unreadable checkpoint. */
        if (entry->is_foreign && !strcmp(entry->key, "lost+found"))
                return false;
        /* Skips a directory that another program named: it may decode, but that tag is encoded differently. */
        return entry->is_prefix && !entry->is_link && !name_decode(entry->key, ret_tag, NULL) && !name_encode(ret_tag, again, NULL) &&
               !strcmp(again, entry->key);
}

static void note_broken(struct manifest_scan *scan, const char *tag, const struct nebula_error *failure)
{
        if (scan->broken_count == 0)
                snprintf(scan->broken, sizeof scan->broken, "%s", failure->message);
        if (scan->broken_count < MANIFEST_BROKEN_MAX) {
                snprintf(scan->broken_list[scan->broken_count].tag, sizeof scan->broken_list[0].tag, "%s", tag);
                snprintf(scan->broken_list[scan->broken_count].reason, sizeof scan->broken_list[0].reason, "%s", failure->message);
        }
        scan->broken_count++;
}

static void note_bare(struct manifest_scan *scan, const char *tag)
{
        size_t at = scan->bare_count;

        if (!name_follows_step(tag))
                return;
        while (at && name_step(scan->bare[at - 1]) < name_step(tag))
                at--;
        if (at == MANIFEST_BROKEN_MAX)
                return;
        scan->bare_count += scan->bare_count < MANIFEST_BROKEN_MAX;
        memmove(scan->bare[at + 1], scan->bare[at], (scan->bare_count - at - 1) * sizeof scan->bare[0]);
        snprintf(scan->bare[at], sizeof scan->bare[at], "%s", tag);
}

int scan_compare(const void *a, const void *b)
{
        const struct manifest *x = a, *y = b;

        if (x->sequence != y->sequence)
                return x->sequence < y->sequence ? -1 : 1;
        return strcmp(x->tag, y->tag);
}

static bool add_rest(struct store_list *rest, struct store_entry *entry)
{
        struct store_entry *grown = rest->count & (rest->count - 1) ? rest->entries :
                                    realloc(rest->entries, (rest->count ? 2 * rest->count : 1) * sizeof *grown);

        if (!grown)
                return false;
        rest->entries = grown;
        rest->entries[rest->count++] = *entry;
        *entry = (struct store_entry){ 0 };
        return true;
}

/* Lists the tags by name, and counts the links, which are not followed. */
static enum nebula_status list_tags(struct store *store, struct store_list *ret_list, struct manifest_scan *scan, struct nebula_error *error)
{
        struct store_list list;
        struct os_stat root;
        char tag[256];
        size_t kept = 0;
        enum nebula_status status = store_list_all(store, "", false, &list, error);

        if (status)
                return status;
        if (!list.count && store->ops->features(store) & STORE_PATHS && os->stat(store->root, true, &root) == -ENOENT) {
                store_list_done(&list);
                return error_set(error, NEBULA_NOT_FOUND, ENOENT, "%s does not exist", store->root);
        }
        scan->link_count = 0;
        store_list_done(&scan->rest);
        for (size_t i = 0; i < list.count; i++) {
                if (list.entries[i].is_link && scan->link_count++ == 0)
                        snprintf(scan->link, sizeof scan->link, "%s", list.entries[i].key);
                if (manifest_tag_of(&list.entries[i], tag))
                        list.entries[kept++] = list.entries[i];
                else if (list.entries[i].is_prefix || !store_is_temporary(list.entries[i].key) || !add_rest(&scan->rest, &list.entries[i]))
                        store_entry_done(&list.entries[i]);
        }
        list.count = kept;
        *ret_list = list;
        return NEBULA_OK;
}

static bool same_names(const struct store_list *a, const struct store_list *b)
{
        if (a->count != b->count)
                return false;
        for (size_t i = 0; i < a->count; i++)
                if (strcmp(a->entries[i].key, b->entries[i].key))
                        return false;
        return true;
}

/* Lists Nebula's own objects of a tag. */
static bool list_private(struct store *store, const char *directory, struct store_list *ret_list)
{
        char prefix[MANIFEST_KEY_MAX];

        return !manifest_key(prefix, directory, MANIFEST_DIRECTORY "/", NULL) && !store_list_all(store, prefix, true, ret_list, NULL);
}

/* Whether a tag without a version has objects of Nebula's: it is being written or removed, or its agent died meanwhile. */
static bool is_open(struct store *store, const char *directory)
{
        struct store_list list;
        bool result;

        if (!list_private(store, directory, &list))
                return false;
        result = list.count > 0;
        store_list_done(&list);
        return result;
}

/* Whether a tag has records and no sign of a running writing. */
static bool has_records_alone(const struct store_list *list, const char *directory)
{
        bool has_record = false;

        for (size_t i = 0; i < list->count; i++) {
                enum manifest_entry_kind kind = manifest_entry(manifest_behind_private(list->entries[i].key, directory)).kind;

                if (kind == ENTRY_CLAIM || kind == ENTRY_TEMPORARY || kind == ENTRY_COMMITTING || kind == ENTRY_MANIFEST)
                        return false;
                has_record = has_record || kind == ENTRY_RECORD;
        }
        return has_record;
}

static bool has_files(struct store *store, const char *directory)
{
        struct store_list list;
        char prefix[MANIFEST_KEY_MAX];
        bool result = false;

        if (manifest_key(prefix, directory, "", NULL) || store_list_all(store, prefix, false, &list, NULL))
                return false;
        for (size_t i = 0; i < list.count && !result; i++)
                result = !list.entries[i].is_prefix;
        store_list_done(&list);
        return result;
}

bool manifest_is_bare(struct store *store, const char *tag, struct manifest_broken *ret_broken)
{
        struct store_list list;
        char directory[256];
        bool is_ours, is_bare;

        if (name_encode(tag, directory, NULL) || !has_files(store, directory) || !list_private(store, directory, &list))
                return false;
        is_ours = list.count > 0;
        is_bare = !is_ours || has_records_alone(&list, directory);
        store_list_done(&list);
        if (!is_bare)
                return false;
        snprintf(ret_broken->tag, sizeof ret_broken->tag, "%s", tag);
        snprintf(ret_broken->reason, sizeof ret_broken->reason, "%.150s/%.150s has files, but no %s: %s", store->root, directory,
                 is_ours ? "manifest" : MANIFEST_DIRECTORY " directory",
                 is_ours ? "it was never completed, or the manifest was removed" :
                           "it was copied without hidden files, or is not of Nebula");
        return true;
}

/* Takes over the manifests into the scan, in the order of the listing. Returns whether some tags were neither complete nor another
 * program's, and at least one more has no version. */
static bool take_loaded(struct loading *loading, struct manifest_scan *scan)
{
        const struct store_list *list = loading->list;
        size_t absent = 0;
        bool has_open = false;
        char tag[256];

        for (size_t i = 0; i < list->count; i++) {
                const struct nebula_error *failure = loading->failures[i];

                if (!manifest_tag_of(&list->entries[i], tag))
                        continue;
                if (!failure) {
                        scan->manifests[scan->count++] = loading->manifests[i];
                        loading->manifests[i] = (struct manifest){ 0 };
                } else if (failure->status == NEBULA_NOT_FOUND) { /* another program's, incomplete, or gone */
                        has_open = has_open || is_open(loading->store, list->entries[i].key);
                        absent++;
                        note_bare(scan, tag);
                } else {
                        note_broken(scan, tag, failure);
                }
        }
        return has_open && absent > 1;
}

/* After a failure: adds the manifests that were read, and those that were known and not reached. */
static void keep_known(struct loading *loading, struct manifest_scan *known, struct manifest_scan *scan)
{
        for (size_t i = 0; i < loading->list->count; i++)
                if (loading->states[i] == LOAD_HAS_MANIFEST) {
                        scan->manifests[scan->count++] = loading->manifests[i];
                        loading->manifests[i] = (struct manifest){ 0 };
                }
        for (size_t i = 0; i < known->count; i++)
                if (known->manifests[i].sequence) {
                        scan->manifests[scan->count++] = known->manifests[i];
                        known->manifests[i] = (struct manifest){ 0 };
                }
}

static int by_tag(const void *a, const void *b)
{
        return strcmp((*(struct manifest *const *)a)->tag, (*(struct manifest *const *)b)->tag);
}

/* Moves the version of the row out of the known ones, which have its whole line. */
static void take_row(struct manifest **known, size_t known_count, const struct manifest *row, struct manifest *ret_manifest)
{
        const struct manifest *key = row;
        struct manifest **found = bsearch(&key, known, known_count, sizeof(struct manifest *), by_tag);

        if (found && (*found)->is_brief && (*found)->number == row->number && (*found)->sequence == row->sequence && !strcmp((*found)->run, row->run)) {
                *ret_manifest = **found;
                **found = (struct manifest){ 0 };
                strcpy((*found)->tag, ret_manifest->tag); /* the list stays sorted */
        } else {
                *ret_manifest = *row;
        }
}

static bool is_doubted(const struct manifest_scan *scan, const char *directory)
{
        for (size_t i = 0; i < scan->doubted.count; i++)
                if (!strcmp(scan->doubted.entries[i].key, directory))
                        return true;
        return false;
}

/* Adds the versions that the index describes to `loaded`. *ret_open: the other tags; the entries stay those of `list`. */
static bool take_rows(const struct store_list *list, const struct index *index, struct manifest_scan *scan, struct manifest_scan *loaded,
                      struct store_list *ret_open)
{
        struct manifest **known = calloc(scan->count + 1, sizeof *known), row;

        for (size_t i = 0; known && i < scan->count; i++)
                known[i] = &scan->manifests[i];
        if (known && scan->count)
                qsort(known, scan->count, sizeof(struct manifest *), by_tag);
        for (size_t i = 0; known && i < list->count; i++)
                if (index && !is_doubted(scan, list->entries[i].key) && index_find(index, list->entries[i].key, &row))
                        take_row(known, scan->count, &row, &loaded->manifests[loaded->count++]);
                else
                        ret_open->entries[ret_open->count++] = list->entries[i];
        free(known);
        return known;
}

static int by_line(const void *a, const void *b)
{
        const struct manifest *x = *(struct manifest *const *)a, *y = *(struct manifest *const *)b;
        uint64_t x_began = line_began(&x->line), y_began = line_began(&y->line);

        if (x_began != y_began)
                return x_began < y_began ? -1 : 1;
        return strcmp(x->job, y->job);
}

static bool lacks_line(const struct manifest *manifest)
{
        return manifest->line.count == 1 && manifest->line.forks[0].after == INDEX_AFTER;
}

/* All versions of a line have the same forks, so one manifest of each line is read. Versions whose manifests cannot be read get the sequence 0. */
static enum nebula_status complete_line(struct store *store, struct manifest **list, size_t count, struct manifest_scan *scan, struct nebula_error *error)
{
        const uint64_t began = line_began(&list[0]->line);
        const struct line *line = NULL;
        char job[256];

        memcpy(job, list[0]->job, sizeof job);
        for (size_t i = 0; i < count && !line; i++)
                line = lacks_line(list[i]) ? NULL : &list[i]->line;
        for (size_t i = 0; i < count && !line; i++) {
                struct nebula_error failure = { 0 };
                struct manifest read = { 0 };
                enum nebula_status status = manifest_load(store, list[i]->tag, &read, &failure);

                if (status && loading_ends(&failure)) {
                        if (error)
                                *error = failure;
                        return status;
                }
                if (status) {
                        if (status == NEBULA_NOT_FOUND)
                                note_bare(scan, list[i]->tag);
                        else
                                note_broken(scan, list[i]->tag, &failure);
                        list[i]->sequence = 0;
                        continue;
                }
                manifest_make_brief(&read);
                *list[i] = read;
                if (line_began(&read.line) == began && !strcmp(read.job, job))
                        line = &list[i]->line;
        }
        for (size_t i = 0; i < count && line; i++)
                if (lacks_line(list[i]))
                        list[i]->line = *line;
        return NEBULA_OK;
}

static enum nebula_status complete_lines(struct store *store, struct manifest_scan *scan, struct nebula_error *error)
{
        struct manifest **list = calloc(scan->count + 1, sizeof *list);
        enum nebula_status status = list ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to order %zu checkpoints", scan->count);
        size_t count = 0;

        for (size_t i = 0; list && i < scan->count; i++)
                if (scan->manifests[i].line.count)
                        list[count++] = &scan->manifests[i];
        if (count)
                qsort(list, count, sizeof(struct manifest *), by_line);
        for (size_t first = 0, end; !status && first < count; first = end) {
                for (end = first + 1; end < count && !by_line(&list[first], &list[end]); end++)
                        ;
                status = complete_line(store, list + first, end - first, scan, error);
        }
        free(list);
        count = 0;
        for (size_t i = 0; !status && i < scan->count; i++)
                if (scan->manifests[i].sequence)
                        scan->manifests[count++] = scan->manifests[i];
        if (!status)
                scan->count = count;
        return status;
}

/* `scan`: the known manifests, and then the result. `index`: NULL, or where to find versions without a read of their manifests. */
static enum nebula_status load_listed(struct store *store, const struct store_list *list, const struct index *index,
                                      const struct manifest_scan_options *options, struct manifest_scan *scan, bool *ret_has_open,
                                      struct nebula_error *error)
{
        struct manifest_scan loaded = { .manifests = calloc(list->count + scan->count + 1, sizeof *loaded.manifests) };
        struct store_list open = { .entries = calloc(list->count + 1, sizeof *open.entries) };
        const struct nebula_error *failure;
        struct loading loading;
        enum nebula_status status = NEBULA_OK;

        if (!loaded.manifests || !open.entries || !take_rows(list, index, scan, &loaded, &open) || loading_init(&loading, store, &open, options, scan, NULL)) {
                manifest_scan_done(&loaded);
                free(open.entries);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to list %zu checkpoints", list->count);
        }
        loading_run(&loading);
        failure = loading_failure(&loading);
        if (failure)
                keep_known(&loading, scan, &loaded);
        else
                *ret_has_open = take_loaded(&loading, &loaded);
        if (failure)
                status = failure->status;
        if (failure && error)
                *error = *failure;
        loading_done(&loading);
        loaded.doubted = scan->doubted;
        scan->doubted = (struct store_list){ 0 };
        manifest_scan_done(scan);
        *scan = loaded;
        free(open.entries);
        return status;
}

/* Versions come and go during a scan. The newest of the listing may be removed before it is read, and its successor may be in no listing
 * of this scan. So the root is listed again afterwards, and a difference forces another pass. Two equal listings can hide a replacement
 * by a tag that existed but was not complete yet, so an unfinished tag forces a second pass. */
static enum nebula_status scan_logs(struct store *store, const struct manifest_scan_options *options, struct manifest_scan *links,
                                    struct manifest_scan *scan, struct nebula_error *error)
{
        struct store_list list, later = { 0 };
        bool is_same = false, has_open = false;
        enum nebula_status status = list_tags(store, &list, links, error);

        if (status)
                return status;
        for (int round = 0; round < SCAN_ROUNDS && (!is_same || (has_open && round == 1)); round++) {
                status = load_listed(store, &list, NULL, options, scan, &has_open, error);
                if (!status)
                        status = list_tags(store, &later, links, error);
                if (status)
                        break;
                is_same = same_names(&list, &later);
                store_list_done(&list);
                list = later;
        }
        store_list_done(&list);
        return status;
}

static bool is_listed(const struct store_list *tags, const struct index_row *row)
{
        char directory[256];

        snprintf(directory, sizeof directory, "%.*s", (int)row->length, row->directory);
        return store_list_find(tags, directory);
}

static bool has_absent(const struct index *index, const struct store_list *tags)
{
        for (size_t i = 0; i < index->count; i++)
                if (!is_listed(tags, &index->rows[i]))
                        return true;
        return false;
}

/* Moves the tags that are not at rest, and entries of such tags and of absent ones. False: no memory. */
static bool add_open(struct store_list *rest, const struct index *index, struct store_list *tags)
{
        bool *is_misplaced = calloc(index->count + 1, sizeof *is_misplaced), is_done = is_misplaced;
        struct manifest row;

        for (size_t i = 0; is_done && i < index->count; i++)
                is_misplaced[i] = !is_listed(tags, &index->rows[i]) || !index_takes(index, i);
        for (size_t i = 0; is_done && i < tags->count; i++)
                if (!index_find(index, tags->entries[i].key, &row))
                        is_done = add_rest(rest, &tags->entries[i]);
        for (size_t i = 0; is_done && i < index->count; i++)
                if (is_misplaced[i])
                        is_done = add_rest(rest, index->rows[i].entry);
        free(is_misplaced);
        return is_done;
}

/* The index is listed before the root, and the root before a log is read. So a version that was there at the beginning and that nobody removed is
 * found, and so is each one for which it was removed. Two cases force another pass: the root lacks a tag of the index, and several tags have no
 * version. */
static enum nebula_status scan_index(struct store *store, const struct manifest_scan_options *options, struct manifest_scan *links,
                                     struct manifest_scan *scan, struct nebula_error *error)
{
        struct store_list former = { 0 }, tags = { 0 };
        bool is_over = false, has_open = false;
        enum nebula_status status = NEBULA_OK;

        for (int round = 0; !status && !is_over && round < SCAN_ROUNDS; round++) {
                struct index index;

                status = index_load(store, &index, error);
                if (status)
                        break;
                status = list_tags(store, &tags, links, error);
                if (!status)
                        status = load_listed(store, &tags, &index, options, scan, &has_open, error);
                if (!status)
                        status = complete_lines(store, scan, error);
                is_over = !status && ((!has_open && !has_absent(&index, &tags)) || (round && same_names(&former, &tags)));
                if (is_over && !add_open(&links->rest, &index, &tags))
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to list %zu checkpoints", scan->count);
                index_done(&index);
                store_list_done(&former);
                former = tags;
                tags = (struct store_list){ 0 };
        }
        store_list_done(&former);
        return status;
}

enum nebula_status manifest_scan_again(struct store *store, const struct manifest_scan_options *options, struct manifest_scan *scan,
                                       struct nebula_error *error)
{
        struct manifest_scan links = { 0 };
        enum nebula_status status = (options && options->by_index ? scan_index : scan_logs)(store, options, &links, scan, error);

        if (!status && scan->count)
                qsort(scan->manifests, scan->count, sizeof *scan->manifests, scan_compare);
        if (!status && !manifest_scan_mark(scan))
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to order %zu checkpoints", scan->count);
        if (status) {
                manifest_scan_done(&links);
                return status;
        }
        scan->link_count = links.link_count;
        memcpy(scan->link, links.link, sizeof scan->link);
        scan->rest = links.rest;
        return NEBULA_OK;
}

static enum nebula_status scan_anew(struct store *store, const struct manifest_scan_options *options, struct manifest_scan *ret_scan,
                                    struct nebula_error *error)
{
        struct manifest_scan scan = { 0 };
        enum nebula_status status = manifest_scan_again(store, options, &scan, error);

        if (status)
                manifest_scan_done(&scan);
        else
                *ret_scan = scan;
        return status;
}

enum nebula_status manifest_scan(struct store *store, struct manifest_scan *ret_scan, struct nebula_error *error)
{
        return scan_anew(store, NULL, ret_scan, error);
}

enum nebula_status manifest_scan_index(struct store *store, struct manifest_scan *ret_scan, struct nebula_error *error)
{
        return scan_anew(store, &(struct manifest_scan_options){ .by_index = true }, ret_scan, error);
}

void manifest_scan_done(struct manifest_scan *scan)
{
        for (size_t i = 0; i < scan->count; i++)
                manifest_done(&scan->manifests[i]);
        free(scan->manifests);
        scan->manifests = NULL;
        scan->count = 0;
        store_list_done(&scan->rest);
        store_list_done(&scan->doubted);
}

static struct order_entry entry_of(const struct manifest *manifest)
{
        struct order_entry entry = order_entry(manifest->tag, manifest->sequence, &manifest->line);

        entry.job = manifest->job;
        entry.counts = !manifest->is_damaged;
        entry.is_abandoned = manifest->is_abandoned;
        return entry;
}

struct order_entry *manifest_scan_entries(const struct manifest_scan *scan)
{
        struct order_entry *entries = calloc(scan->count + 1, sizeof *entries);

        for (size_t i = 0; entries && i < scan->count; i++)
                entries[i] = entry_of(&scan->manifests[i]);
        return entries;
}

bool manifest_scan_mark(struct manifest_scan *scan)
{
        struct order_entry *entries = manifest_scan_entries(scan);
        bool is_done = entries && order_mark(entries, scan->count);

        for (size_t i = 0; is_done && i < scan->count; i++)
                scan->manifests[i].is_abandoned = entries[i].is_abandoned;
        free(entries);
        return is_done;
}

int64_t manifest_scan_newest(const struct manifest_scan *scan, const char *job)
{
        struct order_best best = { 0 };
        const struct manifest *newest;

        for (size_t i = 0; i < scan->count; i++) {
                struct order_entry entry = entry_of(&scan->manifests[i]);

                entry.counts = entry.counts && (!job || !strcmp(job, entry.job));
                order_add(&best, &entry, &scan->manifests[i]);
        }
        newest = order_best(&best, NULL);
        return newest ? newest - scan->manifests : -1;
}

/* The log of the version's tag has another version, or none (`read` NULL). */
static bool correct(struct manifest_scan *scan, size_t index, struct manifest *read)
{
        struct manifest *one = &scan->manifests[index];

        manifest_done(one);
        if (read) {
                *one = *read;
                manifest_make_brief(one);
        } else {
                memmove(one, one + 1, (--scan->count - index) * sizeof *one);
        }
        if (scan->count)
                qsort(scan->manifests, scan->count, sizeof *scan->manifests, scan_compare);
        return manifest_scan_mark(scan);
}

enum nebula_status manifest_scan_confirm(struct store *store, struct manifest_scan *scan, size_t index, struct manifest *ret_manifest,
                                         struct nebula_error *error)
{
        const struct manifest *one = &scan->manifests[index];
        struct nebula_error failure = { 0 };
        struct manifest read = { 0 };
        enum nebula_status status = manifest_load(store, one->tag, &read, &failure);

        if (!status && read.number == one->number && read.sequence == one->sequence) {
                *ret_manifest = read;
                return NEBULA_OK;
        }
        if (status && status != NEBULA_NOT_FOUND && status != NEBULA_CORRUPT) {
                if (error)
                        *error = failure;
                return status;
        }
        if (status == NEBULA_CORRUPT)
                note_broken(scan, one->tag, &failure);
        else if (status)
                note_bare(scan, one->tag);
        if (!correct(scan, index, status ? NULL : &read))
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to order %zu checkpoints", scan->count);
        return error_set(error, NEBULA_BUSY, 0, "the index of %s and the log of a tag differ", store->root);
}

static bool doubt(struct manifest_scan *scan, const char *tag)
{
        struct store_entry entry = { 0 };
        char directory[256];

        if (name_encode(tag, directory, NULL) || !(entry.key = strdup(directory)))
                return false;
        if (add_rest(&scan->doubted, &entry))
                return true;
        free(entry.key);
        return false;
}

enum nebula_status manifest_scan_load_newest(struct store *store, struct manifest_scan *scan, const char *job, struct manifest *ret_manifest,
                                             int64_t *ret_index, struct nebula_error *error)
{
        static const struct manifest_scan_options by_index = { .by_index = true };
        enum nebula_status status = NEBULA_BUSY;

        for (int round = 0; round < SCAN_ROUNDS && status == NEBULA_BUSY;) {
                int64_t index = manifest_scan_newest(scan, job);
                char tag[256];
                size_t broken = scan->broken_count;

                if (index < 0)
                        return error_set(error, NEBULA_NOT_FOUND, 0, "%s holds no checkpoint that can be read", store->root);
                memcpy(tag, scan->manifests[index].tag, sizeof tag);
                status = manifest_scan_confirm(store, scan, (size_t)index, ret_manifest, error);
                *ret_index = index;
                if (status != NEBULA_BUSY || scan->broken_count != broken)
                        continue;
                round++;
                if (!doubt(scan, tag))
                        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to search %s", store->root);
                if ((status = manifest_scan_again(store, &by_index, scan, error)))
                        return status;
                status = NEBULA_BUSY;
        }
        return status;
}
