/*
 * retention.h - decides which versions stay in memory and which is written next. Pure
 * functions over an array of facts, so that every rule can be tested without an
 * agent. Which versions stay in storage: store/order.h.
 */
#ifndef NB_AGENT_CATALOGUE_RETENTION_H
#define NB_AGENT_CATALOGUE_RETENTION_H

#include "store/order.h"

struct retain_entry {
        struct order_entry order; /* counts: it is complete */
        bool durable;             /* storage has it, and is not known to have damaged it */
        bool unsaved;             /* should be persisted and is not durable */
        bool busy;                /* being read or written */
};

/* Index of the newest complete entry; -1 if there is none. */
int64_t retain_newest(const struct retain_entry *entries, size_t count);
/*
 * Sets drop[i] for complete versions beyond the `keep` latest commits. Never drops one that is
 * busy or unsaved. Drops the newest complete one only if `keep` is 0 and storage has it.
 */
void retain_memory(const struct retain_entry *entries, size_t count, size_t keep, bool *drop);
/*
 * Finds the version whose loss costs least when memory is needed; -1: none. First those that storage has, the
 * oldest commit first, even the newest version. Then superseded ones that no client asked to persist. Never the
 * newest complete one unless storage has it.
 */
int64_t retain_victim(const struct retain_entry *entries, size_t count);

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
