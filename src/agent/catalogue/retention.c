#include <stdlib.h>

#include "agent/catalogue/retention.h"

int64_t retain_newest(const struct retain_entry *entries, size_t count)
{
        struct order_best best = { 0 };
        const struct retain_entry *newest;

        for (size_t i = 0; i < count; i++)
                order_add(&best, &entries[i].order, &entries[i]);
        newest = order_best(&best, NULL);
        return newest ? newest - entries : -1;
}

static int later_first(const void *a, const void *b)
{
        uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;

        return (left < right) - (left > right);
}

/* The sequence of the complete entry that was committed as the `keep`th last; 0: there are fewer, or there is no memory to find it. */
static uint64_t first_kept(const struct retain_entry *entries, size_t count, size_t keep)
{
        uint64_t *sequences = keep && keep <= count ? malloc(count * sizeof *sequences) : NULL, first = 0;
        size_t used = 0;

        for (size_t i = 0; sequences && i < count; i++)
                if (entries[i].order.counts)
                        sequences[used++] = entries[i].order.sequence;
        if (sequences && used >= keep) {
                qsort(sequences, used, sizeof *sequences, later_first);
                first = sequences[keep - 1];
        }
        free(sequences);
        return first;
}

void retain_memory(const struct retain_entry *entries, size_t count, size_t keep, bool *drop)
{
        int64_t newest = retain_newest(entries, count);
        uint64_t first = first_kept(entries, count, keep);

        for (size_t i = 0; i < count; i++)
                drop[i] = entries[i].order.counts && !entries[i].busy && !entries[i].unsaved &&
                          ((int64_t)i != newest || (!keep && entries[i].durable)) && (!keep || entries[i].order.sequence < first);
}

int64_t retain_victim(const struct retain_entry *entries, size_t count)
{
        int64_t newest = retain_newest(entries, count);
        int64_t victim = -1;

        for (size_t i = 0; i < count; i++) {
                const struct retain_entry *entry = &entries[i];
                const struct retain_entry *best = victim < 0 ? NULL : &entries[victim];

                if (!entry->order.counts || entry->busy || entry->unsaved || ((int64_t)i == newest && !entry->durable))
                        continue;
                if (!best || entry->durable > best->durable ||
                    (entry->durable == best->durable && entry->order.sequence < best->order.sequence))
                        victim = (int64_t)i;
        }
        return victim;
}

int64_t persist_due(const struct persist_entry *entries, size_t count, int64_t interval_ns, int64_t last_start_ns,
                    int64_t now_ns, int64_t *ret_due_ns)
{
        int64_t wanted = -1, oldest = -1, newest = -1;

        for (size_t i = 0; i < count; i++) {
                if (!entries[i].committed)
                        continue;
                if (entries[i].wanted && (wanted < 0 || entries[i].sequence < entries[wanted].sequence))
                        wanted = (int64_t)i;
                if (oldest < 0 || entries[i].sequence < entries[oldest].sequence)
                        oldest = (int64_t)i;
                if (newest < 0 || entries[i].sequence > entries[newest].sequence)
                        newest = (int64_t)i;
        }
        *ret_due_ns = INT64_MAX;
        if (wanted >= 0 || oldest < 0)
                return wanted;
        if (interval_ns <= 0)
                return oldest;
        if (last_start_ns == INT64_MIN || now_ns - last_start_ns >= interval_ns)
                return newest;
        *ret_due_ns = last_start_ns + interval_ns;
        return -1;
}
