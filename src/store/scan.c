/* All versions of a storage path. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "image/image.h"
#include "os/os.h"
#include "store/manifest.h"
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
        for (size_t i = 0; i < list.count; i++) {
                if (list.entries[i].is_link && scan->link_count++ == 0)
                        snprintf(scan->link, sizeof scan->link, "%s", list.entries[i].key);
                if (manifest_tag_of(&list.entries[i], tag))
                        list.entries[kept++] = list.entries[i];
                else
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
 * program's. */
static bool take_loaded(struct loading *loading, struct manifest_scan *scan)
{
        const struct store_list *list = loading->list;
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
                        note_bare(scan, tag);
                } else {
                        note_broken(scan, tag, failure);
                }
        }
        return has_open;
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
                if (*known->manifests[i].tag) {
                        scan->manifests[scan->count++] = known->manifests[i];
                        known->manifests[i] = (struct manifest){ 0 };
                }
}

/* `scan`: the known manifests, and then the result. */
static enum nebula_status load_listed(struct store *store, const struct store_list *list, const struct manifest_scan_options *options,
                                      struct manifest_scan *scan, bool *ret_has_open, struct nebula_error *error)
{
        struct manifest_scan loaded = { .manifests = calloc(list->count + scan->count + 1, sizeof *loaded.manifests) };
        const struct nebula_error *failure;
        struct loading loading;
        enum nebula_status status = NEBULA_NO_MEMORY;

        if (loaded.manifests)
                status = loading_init(&loading, store, list, options, scan, error);
        if (status) {
                free(loaded.manifests);
                return loaded.manifests ? status : error_set(error, status, 0, "no memory to list %zu checkpoints", list->count);
        }
        loading_run(&loading);
        failure = loading_failure(&loading);
        if (failure) {
                status = failure->status;
                if (error)
                        *error = *failure;
                keep_known(&loading, scan, &loaded);
        } else {
                *ret_has_open = take_loaded(&loading, &loaded);
        }
        loading_done(&loading);
        manifest_scan_done(scan);
        *scan = loaded;
        return status;
}

/* Versions come and go during a scan. The newest of the listing may be removed before it is read, and its successor may be in no listing
 * of this scan. So the root is listed again afterwards, and a difference forces another pass. Two equal listings can hide a replacement
 * by a tag that existed but was not complete yet, so an unfinished tag forces a second pass. */
enum nebula_status manifest_scan_again(struct store *store, const struct manifest_scan_options *options, struct manifest_scan *scan,
                                       struct nebula_error *error)
{
        struct manifest_scan links = { 0 };
        struct store_list list, later = { 0 };
        bool is_same = false, has_open = false;
        enum nebula_status status = list_tags(store, &list, &links, error);

        if (status)
                return status;
        for (int round = 0; round < SCAN_ROUNDS && (!is_same || (has_open && round == 1)); round++) {
                status = load_listed(store, &list, options, scan, &has_open, error);
                if (!status)
                        status = list_tags(store, &later, &links, error);
                if (status)
                        break;
                is_same = same_names(&list, &later);
                store_list_done(&list);
                list = later;
        }
        store_list_done(&list);
        if (status)
                return status;
        if (scan->count)
                qsort(scan->manifests, scan->count, sizeof *scan->manifests, scan_compare);
        if (!manifest_scan_mark(scan))
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to order %zu checkpoints", scan->count);
        scan->link_count = links.link_count;
        memcpy(scan->link, links.link, sizeof scan->link);
        return NEBULA_OK;
}

enum nebula_status manifest_scan(struct store *store, struct manifest_scan *ret_scan, struct nebula_error *error)
{
        struct manifest_scan scan = { 0 };
        enum nebula_status status = manifest_scan_again(store, NULL, &scan, error);

        if (status)
                manifest_scan_done(&scan);
        else
                *ret_scan = scan;
        return status;
}

void manifest_scan_done(struct manifest_scan *scan)
{
        for (size_t i = 0; i < scan->count; i++)
                manifest_done(&scan->manifests[i]);
        free(scan->manifests);
        scan->manifests = NULL;
        scan->count = 0;
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
