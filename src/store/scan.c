/* All versions of a storage path. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "image/image.h"
#include "store/manifest.h"
#include "store/manifest_private.h"

bool manifest_tag_of(const struct store_entry *entry, char ret_tag[256])
{
        char again[256];

        /* A directory that some other program named: even if it decodes, it is not where that tag lives. */
        return entry->is_directory && !name_decode(entry->name, ret_tag, NULL) && !name_encode(ret_tag, again, NULL) &&
               !strcmp(again, entry->name);
}

static void note_broken(struct manifest_scan *scan, const struct nebula_error *failure)
{
        if (scan->broken_count++ == 0)
                snprintf(scan->broken, sizeof scan->broken, "%s", failure->message);
}

static int compare_sequences(const void *a, const void *b)
{
        const struct manifest *x = a, *y = b;

        if (x->sequence != y->sequence)
                return x->sequence < y->sequence ? -1 : 1;
        return strcmp(x->tag, y->tag);
}

enum nebula_status manifest_scan(struct store *store, struct manifest_scan *ret_scan, struct nebula_error *error)
{
        struct manifest_scan scan = { 0 };
        struct nebula_error failure;
        struct store_list list;
        char tag[256];
        enum nebula_status status = store->ops->list(store, "", &list, error);

        if (status)
                return status;
        scan.manifests = calloc(list.count + 1, sizeof *scan.manifests);
        if (!scan.manifests)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to list %zu checkpoints", list.count);
        for (size_t i = 0; i < list.count && !status; i++) {
                if (!manifest_tag_of(&list.entries[i], tag))
                        continue;
                switch (manifest_load(store, tag, &scan.manifests[scan.count], &failure)) {
                case NEBULA_OK:
                        scan.count++;
                        break;
                case NEBULA_NOT_FOUND: /* foreign, or not complete */
                        break;
                case NEBULA_NO_MEMORY:
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "%s", failure.message);
                        break;
                default:
                        note_broken(&scan, &failure);
                }
        }
        store_list_done(&list);
        if (status) {
                manifest_scan_done(&scan);
                return status;
        }
        if (scan.count)
                qsort(scan.manifests, scan.count, sizeof *scan.manifests, compare_sequences);
        *ret_scan = scan;
        return NEBULA_OK;
}

void manifest_scan_done(struct manifest_scan *scan)
{
        for (size_t i = 0; i < scan->count; i++)
                manifest_done(&scan->manifests[i]);
        free(scan->manifests);
        scan->manifests = NULL;
        scan->count = 0;
}

int64_t manifest_scan_newest(const struct manifest_scan *scan, const char *job)
{
        const struct manifest *stepped = NULL, *other = NULL;

        for (size_t i = 0; i < scan->count; i++) {
                const struct manifest *one = &scan->manifests[i];

                if (job && strcmp(one->job, job))
                        continue;
                /* Oldest first, so that of equals the later one wins. */
                if (!name_follows_step(one->tag))
                        other = one;
                else if (!stepped || one->step >= stepped->step)
                        stepped = one;
        }
        if (!stepped && !other)
                return -1;
        if (!stepped || (other && other->sequence > stepped->sequence))
                stepped = other;
        return stepped - scan->manifests;
}
