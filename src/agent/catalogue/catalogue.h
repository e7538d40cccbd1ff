/*
 * catalogue.h - the agent's data: jobs, their sessions, their versions and files, and the memory tier.
 *
 * A job is a storage path without links (location.h), and a name. A version is one writing of one tag: it
 * collects files from the ranks (parts) and becomes complete once. After its memory was given back it
 * stays as a small tombstone, so that handles of it still get answers. A session is one trainer (its
 * nonce); it may have several connections.
 *
 * One lock, `catalogue_lock`, guards everything here. Slow work (files, sealing, page allocation) is done
 * without the lock, on pinned versions: a pinned version is not freed and keeps its images.
 *
 * No file is opened or changed under the lock; builds with tests check that (os/lock.h). Survival logs, publish
 * lists and the agent's own log describe what the catalogue holds. So their bytes are made under the lock, and
 * catalogue_unlock writes them after it has released the lock and before its caller can answer a client
 * (memory_files.h). A change of a version marks it. catalogue_unlock makes the survival log's record of each marked
 * version, and wakes the threads and clients that wait for a change: once for all changes under the lock.
 *
 * The catalogue knows no other room. job.h and version.h hold the fields that several rooms use. Each room keeps
 * the rest in a slot, a struct that only its own files see: other rooms call the room's functions.
 * The catalogue makes the slots, and calls the rooms when a job or a version begins and ends (room.h).
 *
 * The threads that wait, and what each waits for:
 *
 *     waiter   a state of one version; the thread that changes the state answers
 *     moved    any other change that a client waits for
 *     work     the persist worker of a lane (job.h): something to write
 *     clock    the thread that keeps the clock and starts the workers
 *     pages    the page maker: spare images, pages to give back
 *     copy     the copy sender: copies on other nodes
 *     event    clients that follow the events of a lane's jobs (WATCH)
 *
 * They are woken when the lock is released (catalogue_unlock, catalogue_wait). When every rank of a node
 * saves at once, a thread that wakes up while the lock is still held costs as much as its request.
 */
#ifndef NB_AGENT_CATALOGUE_CATALOGUE_H
#define NB_AGENT_CATALOGUE_CATALOGUE_H

#include <pthread.h>

#include "agent/catalogue/job.h"
#include "agent/catalogue/version.h"
#include "ipc/ipc.h"
#include "os/lock.h"
#include "store/document.h"

#define WORLD_MAX DOCUMENT_WORLD_MAX /* documents in storage cannot describe more ranks */
#define SESSION_MAX 4096  /* connections */
#define REACHED_COUNT 8   /* few versions are waited for at the same time; if two share a slot, the waiters of both are checked */

#define SESSION_HINTS_MAX 64 /* files; images for more are made when they are saved */
struct evictions;
struct memory;
struct place;
struct replica;
struct room;

struct session {
        struct session *next; /* of its job */
        struct job *job;
        uint64_t nonce;
        uint32_t pid; /* as the client reports it, for people */
        uint32_t seen_pid; /* the pid as the agent sees it, for os->alive; 0: not visible in the agent's pid namespace */
        uint32_t rank, world, role;
        uint32_t connection_count;
        uint64_t number; /* larger for a later session */
        uint32_t hint_count;
        bool are_foreseen; /* the hints are the agent's own (policy_foresee): those of the session replace them */
        int64_t foreseen_ns; /* from then on they count; 0: they do, or there are none */
        uint64_t leased; /* of a reader: the version that it found last; 0: none */
        bool has_begun;  /* has begun a version; until then it may be about to load the version that the agent has named to it */
        uint64_t given_way_reported; /* the job's given_way_count that was reported to it */
        int64_t left_ns; /* when its last connection ended */
        double since;
        char run[IPC_NAME_MAX];
        struct lineage_base loaded;
        uint64_t hinted[SESSION_HINTS_MAX]; /* capacities of images for the files that it has hinted, until its job's next commit */
        struct keep_rule rule;
};
/* A client that waits for a state of a version. Its thread is not woken to check: the thread that changes the
 * version checks and answers. */
struct waiter {
        struct waiter *next;
        uint32_t wakes; /* the signals that concern it */
        bool (*is_over)(struct waiter *waiter); /* called with the lock held; true: it leaves the list, and `notify` follows */
        void (*notify)(struct waiter *waiter);  /* usually called after the lock was released */
};
struct catalogue {
        struct lock catalogue_lock;
        pthread_cond_t moved, clock, pages, copy;
        struct waiter *waiters;
        uint32_t wakes; /* the conditions that were signalled while the lock is held */
        struct lane *woken; /* those of this lane; NULL: of all */
        struct version *marked; /* the versions that were marked while the lock is held */
        const struct room *const *rooms; /* the rooms, NULL at the end (room.h) */
        struct memory *memory;           /* the memory tier */
        struct evictions *evictions;     /* used by evictions.h */
        struct job *jobs;
        struct lane *lanes;
        struct place *places; /* used by location.h */
        uint32_t lane_count; /* lanes whose worker runs, and searches in storage on threads of their own */
        uint64_t session_number; /* number of the last session */
        uint64_t agent_nonce;
        double last_moment;
        uint64_t change_count; /* counts catalogue_signal: a thread that worked without the lock sees a change by it */
        uint32_t connection_count;
        struct replica *replica; /* NULL: copies are not possible */
        bool serves_jobs;        /* some job may be served (job.h) */
        uint32_t peer_count;     /* connections from other agents */
        bool stopping;   /* all threads end */
        uint32_t draining; /* so many ask for that: all committed versions must be persisted */
        bool ends_itself; /* the agent has asked its process to end, because no client needed it */
        bool dropping;   /* a request came to end at once and to drop the memory tier */
        uint64_t doubted_count; /* versions whose bytes in storage are not trusted */
        bool has_readers; /* a reader has come: commits are events */
        bool in_process; /* it never ends the process: see agent_start */
        bool broken;
        int64_t started_ns, idle_since_ns, verdict_at_ns; /* verdict_at_ns: no verdict is computed before this time (verdict.h) */
        double started;
        uint64_t linger_s, give_up_s, memory_wait_s, quiet_s, sweep_age_s, takeover_s;
        enum catalogue_values { CATALOGUE_VALUES_OFF, CATALOGUE_VALUES_SAMPLE, CATALOGUE_VALUES_ALL } check_values; /* NaNs and equal versions */
        uint64_t check_memory_s; /* each image is compared with its checksums so often; 0: never */
        int64_t scrub_look_ns;   /* no image is due before */
        bool is_scrubbing;       /* a thread does so */
        uint64_t hang_s; /* the least time without a step after which a job counts as hung; 0: never */
        uint64_t hang_count;
        const char *runtime_dir; /* of the files with stacks; not NULL if hang_s is not 0 */
        void (*end)(struct catalogue *catalogue); /* asks the process to end; NULL: there is no process to end */
};

double catalogue_now(void); /* seconds since 1970 */
/* catalogue_now, but always later than its last result, even if the clock is set back. */
double catalogue_moment(struct catalogue *catalogue);

/* `rooms`: as in struct catalogue. `memory` is the caller's, and need not be ready yet. */
void catalogue_init(struct catalogue *catalogue, const struct room *const *rooms, struct memory *memory);
void catalogue_done(struct catalogue *catalogue);
void catalogue_lock(struct catalogue *catalogue);
void catalogue_unlock(struct catalogue *catalogue);
/* Something changed: wakes waiters, workers and the clock. */
void catalogue_signal(struct catalogue *catalogue);
/* Wakes only the workers and the clock. */
void catalogue_signal_work(struct catalogue *catalogue);
/* Wakes only the worker of the job's storage path; catalogue_signal_job_work: and the clock. */
void catalogue_signal_worker(struct catalogue *catalogue, const struct job *job);
void catalogue_signal_job_work(struct catalogue *catalogue, const struct job *job);
/* catalogue_signal, but of the workers only that of the lane, or of the job's storage path, is woken. */
void catalogue_signal_lane(struct catalogue *catalogue, struct lane *lane);
void catalogue_signal_job(struct catalogue *catalogue, const struct job *job);
/* Wakes only the page maker. */
void catalogue_signal_pages(struct catalogue *catalogue);
/* Wakes the clients that watch the jobs of this one's storage path: there is an event (events.h). job NULL: those of all jobs. */
void catalogue_signal_event(struct catalogue *catalogue, const struct job *job);
/* catalogue_unlock, for a thread after which the catalogue may be freed. It writes no files, so nothing may be due. */
void catalogue_unlock_last(struct catalogue *catalogue);
/* Releases the lock and waits. `cond`: one of the catalogue's; timeout_ms < 0: no limit. It may return early and without
 * a signal, so callers check again what they wait for. */
void catalogue_wait(struct catalogue *catalogue, pthread_cond_t *cond, int64_t timeout_ms);
/* catalogue_await lists a waiter for a state of this version; catalogue_forget_waiter removes it. */
void catalogue_await(struct catalogue *catalogue, struct waiter *waiter, uint64_t version_id, enum nebula_state state);
void catalogue_forget_waiter(struct catalogue *catalogue, struct waiter *waiter);
/* Call after a change that the survival log records: catalogue_unlock describes the version there, once for all changes under the lock. */
void version_mark(struct catalogue *catalogue, struct version *version);
/* Describes a marked version at once: it will not be there when the lock is released. */
void version_describe(struct catalogue *catalogue, struct version *version);
/* version_mark, if a file changed that the log already describes. */
void version_mark_files(struct catalogue *catalogue, struct version *version);
/* version_mark and catalogue_signal_job, but of the waiters for versions only those of this version are checked. */
void version_changed(struct catalogue *catalogue, struct version *version);
/* A rank has captured and nothing else changed: only waiters for that are checked. */
void version_signal_captured(struct catalogue *catalogue, const struct version *version);
/* Call when an invariant is broken. A daemon aborts; an agent inside a trainer closes its listeners instead. */
void catalogue_panic(struct catalogue *catalogue, const char *what);

/* The reader's session leases that version in place of the one before; 0: none. */
void catalogue_lease(struct catalogue *catalogue, struct session *session, uint64_t version_id);
struct session *catalogue_session(struct catalogue *catalogue, uint64_t nonce);
/* Sets these fields, which the job's list and counts of sessions follow. `job` NULL: the session is over, and the caller frees it. */
void catalogue_session_set(struct session *session, struct job *job, uint32_t role, uint32_t connection_count);
/* Whether this node waits as a spare of the job: no trainer is here. */
bool catalogue_is_spare(const struct job *job);

/* Whether trainers are connected and none has begun a version yet. The version that they found, or agreed on with
 * other nodes, must then stay. */
bool catalogue_resumes(const struct job *job);
/* Whether the process `seen_pid`  may be alive. Also true if the agent cannot see the process; its
 * connection then shows when it ends. */
bool catalogue_may_live(uint32_t seen_pid);

#endif
