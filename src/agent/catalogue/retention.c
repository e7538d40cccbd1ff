#include <string.h>

#include "agent/catalogue/retention.h"
#include "image/image.h"

struct retain_entry retain_complete(const char *tag, uint64_t sequence, const struct line *line)
{
        return (struct retain_entry){ .step = name_step(tag), .follows_step = name_follows_step(tag), .sequence = sequence,
                                      .line_began = line_began(line), .line = line, .complete = true };
}

bool retain_is_newer(const struct retain_entry *a, const struct retain_entry *b)
{
        struct retain_entry both[2] = { *b, *a };

        return retain_newest(both, 2) == 1;
}

static bool later_of_kind(const struct retain_entry *a, const struct retain_entry *b)
{
        if (a->follows_step && a->abandoned != b->abandoned)
                return b->abandoned;
        if (a->follows_step && a->line_began != b->line_began)
                return a->line_began > b->line_began;
        if (a->follows_step && a->step != b->step)
                return a->step > b->step;
        return a->sequence > b->sequence;
}

static bool newer(const struct retain_entry *a, const struct retain_entry *b)
{
        if (a->follows_step != b->follows_step && a->abandoned != b->abandoned)
                return b->abandoned;
        return a->follows_step == b->follows_step ? later_of_kind(a, b) : a->sequence > b->sequence;
}

static bool same_job(const struct retain_entry *a, const struct retain_entry *b)
{
        return a->job && b->job ? !strcmp(a->job, b->job) : a->job == b->job;
}

static void mark_job(struct retain_entry *entries, size_t count, size_t first)
{
        const struct retain_entry *head = NULL;

        for (size_t i = first; i < count; i++)
                if (same_job(&entries[i], &entries[first]) && entries[i].complete && entries[i].follows_step &&
                    (!head || later_of_kind(&entries[i], head)))
                        head = &entries[i];
        for (size_t i = first; head && i < count; i++)
                if (same_job(&entries[i], &entries[first]) && entries[i].complete && entries[i].follows_step)
                        entries[i].abandoned = !line_holds(head->line, entries[i].line, entries[i].step);
}

void retain_mark(struct retain_entry *entries, size_t count)
{
        for (size_t i = 0; i < count; i++)
                entries[i].abandoned = false;
        for (size_t i = 0; i < count; i++) {
                size_t first = 0;

                while (!same_job(&entries[first], &entries[i]))
                        first++;
                if (first == i)
                        mark_job(entries, count, first);
        }
}

int64_t retain_newest(const struct retain_entry *entries, size_t count)
{
        int64_t best[2] = { -1, -1 }; /* by step, and by commit */

        for (size_t i = 0; i < count; i++) {
                int64_t *of_kind = &best[!entries[i].follows_step];

                if (entries[i].complete && (*of_kind < 0 || later_of_kind(&entries[i], &entries[*of_kind])))
                        *of_kind = (int64_t)i;
        }
        if (best[0] < 0 || best[1] < 0)
                return best[0] < 0 ? best[1] : best[0];
        return newer(&entries[best[0]], &entries[best[1]]) ? best[0] : best[1];
}

/* How many complete entries were committed after entries[index]. */
static size_t later_commits(const struct retain_entry *entries, size_t count, size_t index)
{
        size_t later = 0;

        for (size_t i = 0; i < count; i++)
                later += entries[i].complete && entries[i].sequence > entries[index].sequence;
        return later;
}

size_t retain_later_than_newest(const struct retain_entry *entries, size_t count)
{
        int64_t newest = retain_newest(entries, count);

        return newest < 0 ? 0 : later_commits(entries, count, (size_t)newest);
}

void retain_memory(const struct retain_entry *entries, size_t count, size_t keep, bool *drop)
{
        int64_t newest = retain_newest(entries, count);

        for (size_t i = 0; i < count; i++)
                drop[i] = entries[i].complete && !entries[i].busy && !entries[i].unsaved && (int64_t)i != newest &&
                          later_commits(entries, count, i) >= keep;
}

int64_t retain_victim(const struct retain_entry *entries, size_t count)
{
        int64_t newest = retain_newest(entries, count);
        int64_t victim = -1;

        for (size_t i = 0; i < count; i++) {
                const struct retain_entry *entry = &entries[i];
                const struct retain_entry *best = victim < 0 ? NULL : &entries[victim];

                if (!entry->complete || entry->busy || entry->unsaved || ((int64_t)i == newest && !entry->durable))
                        continue;
                if (!best || entry->durable > best->durable ||
                    (entry->durable == best->durable && entry->sequence < best->sequence))
                        victim = (int64_t)i;
        }
        return victim;
}

void retain_storage(const struct retain_entry *entries, size_t count, uint32_t keep_last, uint64_t keep_every, bool *drop)
{
        int64_t newest = retain_newest(entries, count);

        for (size_t i = 0; i < count; i++) {
                const struct retain_entry *entry = &entries[i];
                bool is_multiple = keep_every && entry->step >= 0 && (uint64_t)entry->step % keep_every == 0;
                size_t newer_count = 0;

                for (size_t j = 0; j < count; j++)
                        newer_count += j != i && entries[j].complete &&
                                       (entry->abandoned ? !entries[j].abandoned && entries[j].sequence > entry->sequence :
                                                           newer(&entries[j], entry));
                drop[i] = keep_last && entry->complete && !entry->busy && (int64_t)i != newest &&
                          later_commits(entries, count, i) && newer_count >= keep_last && (entry->abandoned || !is_multiple);
        }
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
