#include "store/order.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "image/image.h"
#include "os/os.h"

#define HOUR_S 3600
#define DAY_S UINT64_C(86400)

struct order_entry order_entry(const char *tag, uint64_t sequence, const struct line *line)
{
        return (struct order_entry){ .tag = tag, .step = name_step(tag), .follows_step = name_follows_step(tag), .sequence = sequence,
                                     .began = line_began(line), .line = line, .counts = true };
}

static int compare_numbers(uint64_t a, uint64_t b)
{
        return (a > b) - (a < b);
}

/* > 0: `a` is newer. Both follow their steps, or neither does. */
static int compare_of_kind(const struct order_entry *a, const struct order_entry *b)
{
        int order = 0;

        if (a->is_abandoned != b->is_abandoned)
                return b->is_abandoned ? 1 : -1;
        if (a->follows_step)
                order = compare_numbers(a->began, b->began);
        if (!order && a->follows_step)
                order = (a->step > b->step) - (a->step < b->step);
        if (!order)
                order = compare_numbers(a->sequence, b->sequence);
        return order ? order : strcmp(a->tag, b->tag);
}

/* Whether `stepped` comes first, of the newest of both kinds. */
static bool stepped_first(const struct order_entry *stepped, const struct order_entry *other)
{
        if (stepped->is_abandoned != other->is_abandoned)
                return other->is_abandoned;
        return stepped->sequence >= other->sequence;
}

void order_add(struct order_best *best, const struct order_entry *entry, const void *what)
{
        size_t kind = !entry->follows_step;

        if (!entry->counts || (best->what[kind] && compare_of_kind(entry, &best->entries[kind]) <= 0))
                return;
        best->entries[kind] = *entry;
        best->what[kind] = what;
}

const void *order_best(const struct order_best *best, struct order_entry *ret_entry)
{
        size_t kind = !best->what[0] || (best->what[1] && !stepped_first(&best->entries[0], &best->entries[1]));

        if (ret_entry && best->what[kind])
                *ret_entry = best->entries[kind];
        return best->what[kind];
}

int64_t order_newest(const struct order_entry *entries, size_t count)
{
        struct order_best best = { 0 };
        const struct order_entry *newest;

        for (size_t i = 0; i < count; i++)
                order_add(&best, &entries[i], &entries[i]);
        newest = order_best(&best, NULL);
        return newest ? newest - entries : -1;
}

bool order_is_newest_of(const struct order_entry *one, const struct order_entry *other)
{
        struct order_entry both[2] = { *one, *other };

        return order_newest(both, 2) == 0;
}

/* Lists of versions mostly come in their order. */
static void sort(void *list, size_t count, size_t size, int (*compare)(const void *a, const void *b))
{
        const char *at = list;
        size_t i = 1;

        while (i < count && compare(at + (i - 1) * size, at + i * size) <= 0)
                i++;
        if (i < count)
                qsort(list, count, size, compare);
}

static int by_job(const void *a, const void *b)
{
        const char *x = (*(struct order_entry *const *)a)->job, *y = (*(struct order_entry *const *)b)->job;

        return x && y ? strcmp(x, y) : (x != NULL) - (y != NULL);
}

/* Marks the entries of one job. */
static void mark_job(struct order_entry **entries, size_t count)
{
        const struct order_entry *head = entries[0];

        for (size_t i = 1; i < count; i++)
                if (compare_of_kind(entries[i], head) > 0)
                        head = entries[i];
        for (size_t i = 0; i < count; i++)
                entries[i]->is_abandoned = !line_holds(head->line, entries[i]->line, entries[i]->step);
}

bool order_mark(struct order_entry *entries, size_t count)
{
        struct order_entry **stepped = calloc(count + 1, sizeof *stepped);
        size_t stepped_count = 0;

        if (!stepped)
                return false;
        for (size_t i = 0; i < count; i++) {
                entries[i].is_abandoned = false;
                if (entries[i].counts && entries[i].follows_step)
                        stepped[stepped_count++] = &entries[i];
        }
        sort(stepped, stepped_count, sizeof *stepped, by_job);
        for (size_t first = 0, end; first < stepped_count; first = end) {
                for (end = first + 1; end < stepped_count && !by_job(&stepped[first], &stepped[end]); end++)
                        ;
                mark_job(&stepped[first], end - first);
        }
        free(stepped);
        return true;
}

/* Abandoned ones last, then by kind, and the newest of a kind first. */
static int by_kind(const void *a, const void *b)
{
        const struct order_entry *x = *(const struct order_entry *const *)a, *y = *(const struct order_entry *const *)b;

        if (x->is_abandoned != y->is_abandoned)
                return x->is_abandoned ? 1 : -1;
        if (x->follows_step != y->follows_step)
                return x->follows_step ? -1 : 1;
        return -compare_of_kind(x, y);
}

bool order_sort(const struct order_entry *entries, size_t count, size_t *ret_indices, size_t *ret_count)
{
        const struct order_entry **sorted = calloc(count + 1, sizeof *sorted);
        size_t used = 0, taken = 0;

        if (!sorted)
                return false;
        for (size_t i = count; i--;) /* the newest are mostly the last */
                if (entries[i].counts)
                        sorted[used++] = &entries[i];
        sort(sorted, used, sizeof *sorted, by_kind);
        while (taken < used) { /* one part that is not abandoned, and one that is */
                size_t stepped = taken, other, end;

                for (other = stepped; other < used && sorted[other]->follows_step && sorted[other]->is_abandoned == sorted[stepped]->is_abandoned; other++)
                        ;
                for (end = other; end < used && !sorted[end]->follows_step && sorted[end]->is_abandoned == sorted[taken]->is_abandoned; end++)
                        ;
                for (size_t stepped_end = other; stepped < stepped_end || other < end; taken++) {
                        bool is_stepped = stepped < stepped_end && (other == end || stepped_first(sorted[stepped], sorted[other]));

                        ret_indices[taken] = (size_t)((is_stepped ? sorted[stepped++] : sorted[other++]) - entries);
                }
        }
        free(sorted);
        *ret_count = used;
        return true;
}

struct ranked {
        double key;  /* the smallest first */
        size_t place; /* in the order, newest first */
};

static int by_rank(const void *a, const void *b)
{
        const struct ranked *x = a, *y = b;

        if (x->key < y->key || x->key > y->key)
                return x->key < y->key ? -1 : 1;
        return compare_numbers(x->place, y->place);
}

/* Names the best ones in why[i]. *ret_none: no version has the metric. */
static bool keep_best(const struct order_rule *rule, const size_t *newest_first, size_t count, unsigned *why, bool *ret_none)
{
        struct ranked *ranked = calloc(count + 1, sizeof *ranked);
        size_t used = 0;

        if (!ranked)
                return false;
        for (size_t place = 0; place < count; place++) {
                double metric = rule->metrics[newest_first[place]];

                if (!isnan(metric))
                        ranked[used++] = (struct ranked){ rule->best_is_largest ? -metric : metric, place };
        }
        sort(ranked, used, sizeof *ranked, by_rank);
        for (size_t i = 0; i < used && i < rule->best; i++)
                why[newest_first[ranked[i].place]] |= ORDER_WHY_BEST;
        free(ranked);
        *ret_none = !used;
        return true;
}

static int latest_first(const void *a, const void *b)
{
        return compare_numbers(*(const uint64_t *)b, *(const uint64_t *)a);
}

/* The commits of the versions that are not abandoned, the latest first. */
static size_t commits_of_current(const struct order_entry *entries, const size_t *newest_first, size_t count, uint64_t *ret_commits)
{
        size_t used = 0;

        while (used < count && !entries[newest_first[used]].is_abandoned) {
                ret_commits[used] = entries[newest_first[used]].sequence;
                used++;
        }
        sort(ret_commits, used, sizeof *ret_commits, latest_first);
        return used;
}

/* Names the newest version of each of the newest `most` periods that have one. */
static void keep_periods(const struct order_entry *entries, const size_t *newest_first, size_t count, uint64_t seconds, uint64_t shift, uint32_t most,
                         enum order_why reason, unsigned *why)
{
        uint64_t last = UINT64_MAX;

        for (size_t place = 0; place < count && most; place++) {
                const struct order_entry *entry = &entries[newest_first[place]];
                uint64_t period = (entry->sequence / SECOND_NS + shift) / seconds;

                if (entry->is_abandoned || period >= last) /* a later commit of an older step opens no period again */
                        continue;
                last = period;
                why[newest_first[place]] |= reason;
                most--;
        }
}

static bool apply(const struct order_entry *entries, const struct order_rule *rule, const size_t *newest_first, size_t count,
                  const uint64_t *commits, size_t commit_count, uint64_t latest, unsigned *why)
{
        size_t last = rule->last ? rule->last : 1;
        bool is_none = false;

        if (rule->best && !keep_best(rule, newest_first, count, why, &is_none))
                return false;
        keep_periods(entries, newest_first, count, HOUR_S, 0, rule->hourly, ORDER_WHY_HOURLY, why);
        keep_periods(entries, newest_first, count, DAY_S, 0, rule->daily, ORDER_WHY_DAILY, why);
        keep_periods(entries, newest_first, count, 7 * DAY_S, 3 * DAY_S, rule->weekly, ORDER_WHY_WEEKLY, why); /* 1970 began on a Thursday */
        for (size_t place = 0; place < count; place++) {
                const struct order_entry *entry = &entries[newest_first[place]];
                bool is_multiple = rule->every && entry->step >= 0 && (uint64_t)entry->step % rule->every == 0;
                unsigned *one = &why[newest_first[place]];

                if (is_none)
                        *one |= ORDER_WHY_BEST;
                if (entry->is_abandoned && (commit_count < last || commits[last - 1] <= entry->sequence))
                        *one |= ORDER_WHY_ABANDONED;
                if (!entry->is_abandoned && place < last)
                        *one |= ORDER_WHY_LAST;
                if (!entry->is_abandoned && is_multiple)
                        *one |= ORDER_WHY_EVERY;
                if (rule->within_s > 0 && (double)(latest - entry->sequence) / SECOND_NS <= rule->within_s)
                        *one |= ORDER_WHY_WITHIN;
        }
        return true;
}

bool order_stay(const struct order_entry *entries, size_t count, const struct order_rule *rules, size_t rule_count, bool *stay, unsigned *why)
{
        size_t *newest_first = calloc(count + 1, sizeof *newest_first), used = 0, commit_count, latest = 0;
        uint64_t *commits = calloc(count + 1, sizeof *commits);
        unsigned *reasons = calloc(count + 1, sizeof *reasons);
        bool is_done = newest_first && commits && reasons && order_sort(entries, count, newest_first, &used);

        for (size_t place = 1; place < used; place++)
                if (entries[newest_first[place]].sequence > entries[newest_first[latest]].sequence)
                        latest = place;
        if (used)
                reasons[newest_first[0]] = reasons[newest_first[latest]] = ORDER_WHY_NEWEST;
        commit_count = is_done ? commits_of_current(entries, newest_first, used, commits) : 0;
        for (size_t i = 0; i < rule_count && is_done && used; i++)
                is_done = apply(entries, &rules[i], newest_first, used, commits, commit_count, entries[newest_first[latest]].sequence, reasons);
        for (size_t i = 0; i < count; i++) {
                stay[i] = !entries[i].counts || !rule_count || !is_done || reasons[i];
                if (why)
                        why[i] = is_done ? reasons[i] : 0;
        }
        free(newest_first);
        free(commits);
        free(reasons);
        return is_done;
}
