/*
 * retention.h - which versions stay, and which is written next: pure functions
 * over an array of facts, so that every rule can be tested without an agent.
 *
 * Newest: of the tags global_step<n>, the largest (n, sequence) of the line
 * that began last; of the others, the largest sequence; between these two,
 * the later sequence. What a later line has abandoned is older than all else.
 */
#ifndef NB_AGENT_CATALOGUE_RETENTION_H
#define NB_AGENT_CATALOGUE_RETENTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "store/line.h"

struct retain_entry {
        int64_t step;      /* -1: none */
        bool follows_step; /* global_step<n>: comes by its step, where others come by their commits */
        uint64_t sequence; /* order of commits */
        uint64_t line_began;     /* of those that follow their steps */
        const struct line *line; /* for retain_mark alone; NULL: the first */
        const char *job;         /* likewise: entries of one job are compared, those without make up one, too */
        bool abandoned;    /* by a later line: retain_mark finds that out */
        bool complete;     /* can be loaded */
        bool durable;      /* storage has it */
        bool unsaved;      /* is to be persisted and is not durable */
        bool busy;         /* being read or written */
};

/* An entry of a version that can be loaded. `line` stays the caller's. */
struct retain_entry retain_complete(const char *tag, uint64_t sequence, const struct line *line);
/* Of the complete entries those that the line of the newest one of their job has abandoned. */
void retain_mark(struct retain_entry *entries, size_t count);
/* Of two complete entries. */
bool retain_is_newer(const struct retain_entry *a, const struct retain_entry *b);
/* Index of the newest complete entry, -1 when there is none. */
int64_t retain_newest(const struct retain_entry *entries, size_t count);
/* How many complete entries were committed after it: 0, unless the job was rolled back to an earlier step. */
size_t retain_later_than_newest(const struct retain_entry *entries, size_t count);
/*
 * Memory: sets drop[i] for complete versions beyond the `keep` latest commits. Never one that is busy or
 * unsaved, never the newest complete one.
 */
void retain_memory(const struct retain_entry *entries, size_t count, size_t keep, bool *drop);
/*
 * Memory that must be found: the one version whose loss costs least, or -1. Versions that storage has go first,
 * the oldest commit first, even the newest; then superseded ones that nobody asked to persist. Never the
 * newest complete one unless storage has it.
 */
int64_t retain_victim(const struct retain_entry *entries, size_t count);
/*
 * Storage: keeps the newest `keep_last` and steps that are multiples of `keep_every`; keep_last 0 keeps all. Never
 * drops the newest complete one, the latest commit, or a busy one. What is marked as abandoned takes nobody's place: it goes when
 * `keep_last` others have been committed after it.
 */
void retain_storage(const struct retain_entry *entries, size_t count, uint32_t keep_last, uint64_t keep_every, bool *drop);

struct persist_entry {
        uint64_t sequence;
        bool committed; /* complete, in memory, not durable, not failed */
        bool wanted;    /* somebody waits for it */
};
/*
 * The version to persist now, or -1; then *ret_due_ns is when to ask again (INT64_MAX: when something changes).
 * Wanted ones go first, oldest first. interval_ns 0: every committed one, oldest first. Otherwise the newest
 * committed one once interval_ns have passed since last_start_ns (INT64_MIN: never started).
 */
int64_t persist_due(const struct persist_entry *entries, size_t count, int64_t interval_ns, int64_t last_start_ns,
                    int64_t now_ns, int64_t *ret_due_ns);

#endif
