/*
 * slots_private.h - the way to storage of a version and of a job. The catalogue's lock
 * guards it. Only the files of this room see these structs (catalogue/room.h).
 */
#ifndef NB_AGENT_PERSIST_SLOTS_PRIVATE_H
#define NB_AGENT_PERSIST_SLOTS_PRIVATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "agent/persist/records.h"
#include "agent/persist/retain.h"
#include "agent/persist/storage.h"
#include "agent/persist/unfinished.h"
#include "base/vars.h"
#include "nebula.h"
#include "store/manifest.h"
#include "store/store.h"

struct store;
struct version;

struct version_persist {
        bool tried_ahead;       /* a write before it was complete was tried; that is done once */
        bool recorded_here;     /* this node's records of it are in storage */
        uint64_t log_number;    /* of the log's entry for which they were written; 0: not known */
        int64_t retry_at_ns, failing_since_ns;
        int64_t failed_ns;      /* when the last attempt failed; 0: none has */
        uint32_t attempt;       /* number of failed attempts */
        struct unfinished unfinished; /* uploads with which the next attempt goes on */
        struct records records; /* as far as they are known */
        double seconds;
        uint64_t bytes;
        atomic_ullong moved_bytes; /* that the running attempt, or the last one, has brought to storage */
        uint64_t written_bytes; /* that this agent has sent to storage for it: less than the size where storage had some of them already */
};

struct job_persist {
        int64_t last_start_ns, failing_since_ns;
        uint32_t attempt;              /* failed attempts since the last success, of any version */
        uint64_t failure_count;
        const struct version *version; /* the one that the worker is writing; NULL: none */
        bool is_busy;                  /* the worker is at work for this job */
        struct store_stamp latest;     /* of the hint "latest" that this agent wrote last; "": none. Used by the worker */
        bool has_values, was_not_finite; /* of the version before, whose values have that sum (persist_values.c) */
        uint64_t values_sum;
        int64_t values_step;
        uint64_t looks;                /* versions with a step that it has written; LOOK_EVERY counts them. Used by the worker */
        uint64_t settings_sum;         /* of the settings that this agent wrote last; 0: none. Used by the worker */
        bool settings_failed;          /* the log has said that they could not be written */
        uint32_t source_vain;          /* so many versions in a row had nothing in common with those before (persist_source.c) */
        uint32_t source_pause;         /* so many versions are written before the worker looks for sources again */
};

/* The job's storage, beside the list of its versions (job.h). The worker and FIND write it (storage.h). */
struct job_storage {
        struct store *store;
        struct vars *variables, *opened_with; /* of the newest session that brought some; those of `store`. NULL: the agent's own */
        struct store **former;                /* opened with earlier variables: threads may still use them */
        size_t former_count;
        struct manifest **half_removed; /* versions whose removal left files behind; used by the worker */
        size_t half_removed_count;
        int64_t rests_at_ns;           /* when documents that stay for a week are swept again; used by the worker */
        struct json_t *metrics;        /* of versions in the list, by tag, for rules that name a metric; used by the worker */
        bool metric_reported;              /* the log has said that no version has the metric of a rule */
        int64_t retain_at_ns;          /* the rules are not applied before this time: the last attempt has failed, or was work */
        int64_t rules_ns;              /* that it took to decide which versions stay; used by the worker */
        uint32_t retain_attempt;       /* failed attempts since the last success */
        struct lease *leases;          /* in storage, of the readers of this node; used by the worker (lease.c) */
        bool refuses_leases;           /* the storage does: this agent may not write there */
        bool has_taken_leases;         /* the storage has */
        struct asked_removal *asked;         /* removals that clients wait for */
        struct removed *removed;       /* a ring of the last REMOVED_MAX; NULL: none was removed */
        uint64_t removed_count;        /* since this agent began */
        struct unfinished ended;       /* uploads of versions that are not written any more, for the worker to end */
        int64_t scan_at_ns;            /* not before this time: the last scan has failed */
        uint32_t scan_attempt;         /* failed scans since the last success */
        int64_t asked_ns;              /* since when the first scan of a run is due; 0: it is not */
        uint32_t searches;             /* searches that list the path now, and leave their list to the scan that is due */
        int64_t search_ns;             /* when the first of them began */
        struct manifest_scan *found;   /* such a list; NULL: none */
        struct search_begun found_begun;
        bool is_scanning;
        bool was_scanned;              /* scanned by any run */
        uint32_t mount_length;         /* as in struct store, for the next agent */
        struct nebula_error error;
        double error_at;
        char damage[512];              /* the first damaged version that the last scan found; "": none */
};

#endif
