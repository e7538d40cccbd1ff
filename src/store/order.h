/*
 * order.h - the order of versions: which one is the newest, which ones are abandoned, and which ones stay in storage. Nothing else decides
 * this. Pure functions over an array of facts.
 *
 * Newest first:
 * * Versions that a later line of history has abandoned come after all others (line.h).
 * * Of the tags global_step<n>: the line that began last, then the largest n, then the later commit.
 * * Of all other tags: the later commit.
 * * These two lists are merged: the later commit of their heads comes first, and of equal ones the tag with a step.
 *
 * The merged list is an order of a whole list. It is no comparison of two versions: a version may be older than another by its step, and
 * newer than it by a third one between them. So these functions take lists.
 *
 * Threads: no shared state. A function that returns bool returns false if there is no memory.
 */
#ifndef NB_STORE_ORDER_H
#define NB_STORE_ORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "store/line.h"

struct order_entry {
        const char *tag;
        int64_t step;            /* -1: none */
        bool follows_step;       /* global_step<n> */
        uint64_t sequence;       /* the order of commits */
        uint64_t began;          /* the sequence with which its line began */
        const struct line *line; /* for order_mark; NULL: the first line */
        const char *job;         /* for order_mark, which compares versions of one job. NULL: another job */
        bool counts;             /* can be loaded; the others are left out */
        bool is_abandoned;       /* set by order_mark */
};
/* The entry of a version that can be loaded. The caller keeps `tag` and `line`. */
struct order_entry order_entry(const char *tag, uint64_t sequence, const struct line *line);

/* Index of the newest; -1: none counts. */
int64_t order_newest(const struct order_entry *entries, size_t count);
/* Whether `one` is the newer of both, or the same; both must count. */
bool order_is_newest_of(const struct order_entry *one, const struct order_entry *other);
/* Marks those that the line of their job's newest version has abandoned. */
bool order_mark(struct order_entry *entries, size_t count);
/* Puts the indices of all entries that count into `ret_indices`, newest first, and their number into *ret_count. */
bool order_sort(const struct order_entry *entries, size_t count, size_t *ret_indices, size_t *ret_count);

/* The newest of a list that grows. Start with a zeroed struct. */
struct order_best {
        struct order_entry entries[2]; /* by step, by commit */
        const void *what[2];
};
/* `what`: the caller's object, never NULL. */
void order_add(struct order_best *best, const struct order_entry *entry, const void *what);
/* The object of the newest; NULL: none was added. *ret_entry may be NULL. */
const void *order_best(const struct order_best *best, struct order_entry *ret_entry);

/* A rule for the versions of one job in storage. */
struct order_rule {
        uint32_t last;         /* the newest `last`, 1 or more */
        uint64_t every;        /* those whose step is a multiple; 0: none */
        uint32_t best;         /* so many with the best metric; 0: none */
        bool best_is_largest;  /* else the smallest is the best */
        const double *metrics; /* of each entry, if `best`; NaN: it has none */
        /* The newest version of each of the newest so many hours, days and weeks that have one; 0: none. By the times of the commits, in UTC; a
         * week begins on Monday. */
        uint32_t hourly, daily, weekly;
        double within_s; /* those committed no longer than this before the latest commit; 0: none */
};
/* Why a version stays. */
enum order_why {
        ORDER_WHY_NEWEST = 1, ORDER_WHY_LAST = 2, ORDER_WHY_EVERY = 4, ORDER_WHY_BEST = 8, ORDER_WHY_HOURLY = 16, ORDER_WHY_DAILY = 32,
        ORDER_WHY_WEEKLY = 64, ORDER_WHY_WITHIN = 128, ORDER_WHY_ABANDONED = 256, /* abandoned, and not for long enough */
};
/*
 * Sets stay[i] for those that a rule names, and for those that do not count. Without rules all stay. These stay, too:
 * * the newest version, and the latest commit;
 * * an abandoned version, until `last` versions that are not abandoned were committed after it;
 * * all, if no version has the metric of a rule with `best`: then the rule does not know which is the best.
 * An abandoned version takes no other one's place among the newest. Of the rules for steps, hours, days and weeks, none names it. Call order_mark
 * before. `why`: of each entry, a sum of enum order_why; NULL: not asked.
 */
bool order_stay(const struct order_entry *entries, size_t count, const struct order_rule *rules, size_t rule_count, bool *stay, unsigned *why);

#endif
