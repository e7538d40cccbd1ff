/*
 * retention.h - decides which versions stay and which is written next. Pure
 * functions over an array of facts, so that every rule can be tested without an
 * agent.
 *
 * The newest version is decided so:
 * * Of the tags global_step<n>, the largest (n, sequence) of the line of
 *   history that began last.
 * * Of all other tags, the largest sequence.
 * * Of these two, the one with the later sequence.
 * Versions that a later line has abandoned are older than all others.
 */
#ifndef NB_AGENT_CATALOGUE_RETENTION_H
#define NB_AGENT_CATALOGUE_RETENTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "store/line.h"

struct retain_entry {
        int64_t step;      /* -1: none */
        bool follows_step; /* global_step<n>: ordered by step; others are ordered by commit */
        uint64_t sequence; /* the order of commits */
        uint64_t line_began;     /* if it follows its step: when its line began */
        const struct line *line; /* only for retain_mark; NULL: the first line */
        const char *job;         /* only for retain_mark: compares entries of one job; entries without a job are one job too */
        bool abandoned;    /* a later line has abandoned it; set by retain_mark */
        bool complete;     /* can be loaded */
        bool durable;      /* storage has it */
        bool unsaved;      /* should be persisted and is not durable */
        bool busy;         /* being read or written */
};

/* The entry of a complete version. The caller keeps `line`. */
struct retain_entry retain_complete(const char *tag, uint64_t sequence, const struct line *line);
/* Marks complete entries that the line of their job's newest entry has abandoned. */
void retain_mark(struct retain_entry *entries, size_t count);
/* Whether `a` is newer than `b`; both must be complete. */
bool retain_is_newer(const struct retain_entry *a, const struct retain_entry *b);
/* Index of the newest complete entry; -1 if there is none. */
int64_t retain_newest(const struct retain_entry *entries, size_t count);
/* How many complete entries were committed after the newest: 0, unless the job was rolled back to an earlier step. */
size_t retain_later_than_newest(const struct retain_entry *entries, size_t count);
/*
 * Memory: sets drop[i] for complete versions beyond the `keep` latest commits. Never drops one that is
 * busy or unsaved, or the newest complete one.
 */
void retain_memory(const struct retain_entry *entries, size_t count, size_t keep, bool *drop);
/*
 * Finds the version whose loss costs least when memory is needed; -1: none. First those that storage has, the
 * oldest commit first, even the newest version. Then superseded ones that no client asked to persist. Never the
 * newest complete one unless storage has it.
 */
int64_t retain_victim(const struct retain_entry *entries, size_t count);
/*
 * Storage: keeps the newest `keep_last` versions and those whose step is a multiple of `keep_every`; keep_last 0 keeps
 * all. Never drops the newest complete one, the latest commit, or a busy one. An abandoned version does not count among
 * the newest: it is dropped when `keep_last` others have been committed after it.
 */
void retain_storage(const struct retain_entry *entries, size_t count, uint32_t keep_last, uint64_t keep_every, bool *drop);

struct persist_entry {
        uint64_t sequence;
        bool committed; /* complete, in memory, not durable, not failed */
        bool wanted;    /* a client waits for it */
};
/*
 * The version to persist now, or -1. Then *ret_due_ns is when to ask again (INT64_MAX: after a change). Wanted
 * versions go first, oldest first. interval_ns 0: every committed version, oldest first. Otherwise: the newest
 * committed version, when interval_ns have passed since last_start_ns (INT64_MIN: never started).
 */
int64_t persist_due(const struct persist_entry *entries, size_t count, int64_t interval_ns, int64_t last_start_ns,
                    int64_t now_ns, int64_t *ret_due_ns);

#endif
