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
 * What one room keeps of a version or a job is a struct of that room, in <room>/..._state.h. Other rooms read it, and
 * change it by the room's functions. The catalogue begins and ends it, and the survival log restores it.
 *
 * The threads that wait, and what each waits for:
 *
 *     waiter   a state of one version; the thread that changes the state answers
 *     moved    any other change that a client waits for
 *     work     the persist workers: something to write
 *     clock    the thread that keeps the clock and starts the workers
 *     pages    the page maker: spare images, pages to give back
 *     copy     the copy sender: copies on other nodes
 *     event    clients that follow the events of a job or a cloud (WATCH)
 *
 * They are woken when the lock is released (catalogue_unlock, catalogue_wait). When every rank of a node
 * saves at once, a thread that wakes up while the lock is still held costs as much as its request.
 */
#ifndef NB_AGENT_CATALOGUE_CATALOGUE_H
#define NB_AGENT_CATALOGUE_CATALOGUE_H

#include <pthread.h>

#include "agent/catalogue/lifecycle.h"
#include "agent/clients/evictions.h"
#include "agent/commit/commit_state.h"
#include "agent/memory/memory.h"
#include "agent/memory/survival_state.h"
#include "agent/peers/copies_state.h"
#include "agent/persist/persist_state.h"
#include "ipc/ipc.h"
#include "os/lock.h"
#include "store/document.h"
#include "store/manifest.h"

#define WORLD_MAX DOCUMENT_WORLD_MAX /* documents in storage cannot describe more ranks */
#define TOMBSTONE_MAX 256 /* per job; a tombstone takes a few KiB */
#define TAG_SLOTS 2048    /* many more than tombstones, so that few tags share a slot */
#define SESSION_MAX 4096  /* connections */
#define REACHED_COUNT 8   /* few versions are waited for at the same time; if two share a slot, the waiters of both are checked */

/* The version that a rank has loaded from. */
struct lineage_base {
        uint64_t read_at; /* a sequence, later than that of all versions committed before; 0: the rank loaded none */
        int64_t step;
        struct line line;
        enum ipc_source source; /* the slowest tier that a file came from */
        bool has_source;        /* false: the agent does not know the tier: a survival log without it described the version */
};
struct agent_file {
        char name[IPC_NAME_MAX];
        uint32_t rank;
        enum ipc_format format;
        uint64_t size, generation;  /* generation: the one that wrote the file */
        struct image *image;        /* NULL: only storage has the file */
        struct image *sparse;       /* has the chunks of the stored file that trainers asked for; NULL: none (restore_chunks.c) */
        uint64_t *chunks;           /* checksums of its chunks; NULL until sealed */
        size_t chunk_count;
        bool stored;                /* storage is known to have the file of that generation; the number alone may be another run's */
        bool reading;               /* a thread is reading it back from storage */
        bool lent;                  /* a trainer has read it from storage by itself */
};
/* An image that a trainer copies into. */
struct image_loan {
        struct image_loan *next;
        struct image *image;
        char name[IPC_NAME_MAX];
        uint64_t size, nonce;
        enum ipc_format format;
        uint32_t rank;
        bool commits; /* the rank's part closes when this image is complete */
};
/* One rank's share of a version. */
struct part {
        uint32_t rank, pid, seen_pid, file_count; /* seen_pid: as in struct session */
        uint64_t nonce;
        bool closed;       /* no more files come from this rank */
        bool spoken_for;   /* closed before this generation began, without a file */
        double begun, captured;
        int64_t blocked_ns, copy_ns, cpu_ns;
        uint64_t fault_count;
};
/* One writing of one tag. State that only one room needs is in that room's struct. */
struct version {
        struct version *next, *next_live, *next_marked;
        char tag[IPC_NAME_MAX], run[IPC_NAME_MAX]; /* kept here because loops over all versions compare them */
        struct job *job;
        uint64_t id, generation, sequence;
        struct line line;         /* its line of history, from its commit on (lineage.h) */
        struct lineage_base base; /* the version that its ranks had loaded */
        double stopped;           /* as job.runs.stopped, when its ranks began to save it */
        int64_t step, file_goal;  /* file_goal: > 0, NEBULA_FILES_OPEN or NEBULA_FILES_ALL_RANKS */
        int64_t next_goal;        /* file_goal of a request that begins this complete tag again; 0: there is none */
        uint32_t world;
        struct lifecycle life;
        bool is_deserted; /* failed because another rank than rank 0 had ended: rank 0, which writes the log, learns that from an event alone */
        struct part *parts;
        size_t part_count;
        struct part *idle_parts; /* ranks that closed this complete tag again without writing (commit.c) */
        size_t idle_count;
        struct agent_file *files; /* files.c adds and finds them */
        uint32_t *slots;          /* the hash table of names */
        size_t file_count, slot_count;
        struct image_loan *loans;
        uint32_t pins;
        uint32_t leases; /* of readers: retention leaves it, in storage too, unless a save needs its memory */
        bool in_memory;    /* it holds its images */
        bool stored;       /* a manifest in storage names it */
        bool is_gone;      /* was durable, and another program has removed it from storage: searches for the newest skip it */
        bool line_due;     /* its line was given before storage was read */
        bool superseded;   /* left memory before it was due to be persisted, or was replaced by a later writing of its tag */
        bool recorded;     /* the history has its line */
        bool is_marked;    /* catalogue_unlock describes it in the survival log */
        bool files_changed; /* the next description has all files again */
        bool is_tombstone; /* it is not in job->live */
        bool adopted;      /* adopted from an earlier agent's survival log */
        int64_t adopted_ns; /* when it was adopted */
        int64_t activity_ns;
        double late_at;    /* when it was found to wait long for other ranks; 0: it was not */
        struct nebula_error error;
        struct version_survival survival;
        struct version_persist persist;
        struct version_ancestry ancestry;
        struct version_nodes nodes;
        struct version_copies copies;
};
/* The jobs of one storage path ("" is one too) share a worker, so that a storage that hangs holds up no other path (worker.h). */
struct lane {
        struct lane *next;
        struct catalogue *catalogue;
        bool is_running;
        bool waited_in_vain; /* a save of its jobs waited for memory until its time limit, and no version has become durable there since */
};
/* A rule for the versions that stay in storage (store/order.h). */
struct keep_rule {
        uint32_t last;    /* 0: no rule */
        uint32_t best;    /* so many with the best `metric`; 0: none */
        bool best_is_largest;
        uint64_t every;   /* 0: none */
        char metric[IPC_NAME_MAX];
};
#define KEEP_RULES_MAX 8 /* of one job: sessions of one process may have different ones */

/* The settings that the job's trainers sent. */
struct job_settings {
        uint32_t umask, group; /* those of its trainers (os_create.h) */
        double persist_interval_s;
        uint32_t retention_count, on_full, world, local_world;
        struct keep_rule rules[KEEP_RULES_MAX]; /* a version stays in storage if one of them keeps it */
        uint32_t rule_count;                    /* 0: all stay */
        uint32_t awaited_rules; /* the agent before had so many rules of this run: all versions stay until its sessions are back */
};
struct job {
        struct job *next;
        struct lane *lane;
        char persist_path[IPC_PATH_MAX], name[IPC_NAME_MAX];
        char spelling[IPC_PATH_MAX]; /* the storage path as the last trainer spelled it: other nodes may mount it elsewhere */
        char output_dir[IPC_PATH_MAX], run[IPC_NAME_MAX];
        struct job_settings settings;
        struct version *versions; /* newest first */
        struct version *live; /* the same without tombstones: work at every request must not grow with the past */
        size_t tombstone_count;
        uint64_t last_sequence; /* the largest of its versions' sequences, in memory and storage. Other jobs have sequences of their own */
        uint32_t tag_counts[TAG_SLOTS]; /* versions, including tombstones, by the hash of their tag: see job_may_have */
        bool may_have_idle; /* some version may have idle_parts */
        struct job_storage storage;
        struct job_runs runs;
        struct job_persist persist;
        struct job_copies copies;
        bool history_broken, latest_reported;
        bool spare_due;
        struct publish *publishes; /* oldest request first (publish.h) */
        uint32_t publish_attempt; /* failed attempts since the last success */
        int64_t idle_since_ns; /* when the last session left */
        uint32_t pins;         /* threads that use the job without the lock or while they wait, and hold no other part of it */
        int64_t left_ns;       /* since when catalogue_forget_jobs knows that the job is not needed; 0: it is needed */
        uint64_t last_guest;   /* sessions of other jobs up to this number may hold handles of its versions */
};
#define SESSION_HINTS_MAX 64 /* files; images for more are made when they are saved */

struct session {
        struct session *next;
        struct job *job;
        uint64_t nonce;
        uint32_t pid; /* as the client reports it, for people */
        uint32_t seen_pid; /* the pid as the agent sees it, for os->alive; 0: not visible in the agent's pid namespace */
        uint32_t rank, world, role;
        char run[IPC_NAME_MAX];
        uint32_t connection_count;
        uint64_t number; /* larger for a later session */
        struct lineage_base loaded;
        uint64_t hinted[SESSION_HINTS_MAX]; /* capacities of images for the files that it has hinted, until its job's next commit */
        uint32_t hint_count;
        uint64_t leased; /* of a reader: the version that it found last; 0: none */
        struct keep_rule rule;
        bool has_begun;  /* has begun a version; until then it may be about to load the version that it was told of */
        uint64_t given_way_reported; /* the job's given_way_count that it was told */
        int64_t left_ns; /* when its last connection ended */
        double since;
};
/* A client that waits for a state of a version. Its thread is not woken to check: the thread that changes the
 * version checks and answers. */
struct waiter {
        struct waiter *next;
        uint32_t wakes; /* the signals that concern it */
        bool (*is_over)(struct waiter *waiter); /* called with the lock held; true: it leaves the list, and `tell` follows */
        void (*tell)(struct waiter *waiter);    /* usually called after the lock was released */
};
struct catalogue {
        struct lock catalogue_lock;
        pthread_cond_t moved, work, clock, pages, copy, event;
        struct waiter *waiters;
        uint32_t wakes; /* the conditions that were signalled while the lock is held */
        struct version *marked; /* the versions that were marked while the lock is held */
        struct memory memory;
        struct evictions evictions[NOTICE_CLOUDS];
        struct job *jobs;
        struct lane *lanes;
        struct place *places; /* used by location.h */
        uint32_t lane_count; /* lanes whose worker runs, and searches in storage on threads of their own */
        struct session *sessions;
        uint64_t session_number; /* number of the last session */
        uint64_t agent_nonce;
        double last_moment;
        uint64_t change_count; /* counts catalogue_signal: a thread that worked without the lock sees a change by it */
        uint32_t connection_count;
        struct replica *replica; /* NULL: copies are not possible */
        uint32_t peer_count;     /* connections from other agents */
        bool stopping;   /* all threads end */
        uint32_t draining; /* so many ask for that: all committed versions must be persisted */
        bool ends_itself; /* the agent has asked its process to end, because no client needed it */
        bool dropping;   /* the agent was told to end at once and to drop the memory tier */
        bool has_readers; /* a reader has come: commits are events */
        bool in_process; /* it never ends the process: see agent_start */
        bool broken;
        int64_t started_ns, idle_since_ns;
        double started;
        uint64_t linger_s, give_up_s, memory_wait_s, quiet_s, sweep_age_s, takeover_s;
        bool publish_links; /* published files are hard links of the stored ones */
        void (*end)(struct catalogue *catalogue); /* asks the process to end; NULL: there is no process to end */
};

double catalogue_now(void); /* seconds since 1970 */
/* catalogue_now, but always later than its last result, even if the clock is set back. */
double catalogue_moment(struct catalogue *catalogue);

void catalogue_init(struct catalogue *catalogue);
void catalogue_done(struct catalogue *catalogue);
void catalogue_lock(struct catalogue *catalogue);
void catalogue_unlock(struct catalogue *catalogue);
/* Something changed: wakes waiters, workers and the clock. */
void catalogue_signal(struct catalogue *catalogue);
/* Wakes only the workers and the clock. */
void catalogue_signal_work(struct catalogue *catalogue);
/* Wakes only the workers. */
void catalogue_signal_workers(struct catalogue *catalogue);
/* Wakes the clients that watch a job: there is an event (events.h). */
void catalogue_signal_event(struct catalogue *catalogue);
/* catalogue_unlock, for a thread after which the catalogue may be freed. It writes no files, so nothing may be due. */
void catalogue_unlock_last(struct catalogue *catalogue);
/* Releases the lock and waits. `cond`: one of the catalogue's; timeout_ms < 0: no limit. It may return early and without
 * a signal, so callers check again what they wait for. */
void catalogue_wait(struct catalogue *catalogue, pthread_cond_t *cond, int64_t timeout_ms);
/* catalogue_await lists a waiter for a state of this version; catalogue_forget_waiter removes it. */
void catalogue_await(struct catalogue *catalogue, struct waiter *waiter, uint64_t version_id, enum nebula_state state);
void catalogue_forget_waiter(struct catalogue *catalogue, struct waiter *waiter);
/* Call when an invariant is broken. A daemon aborts; an agent inside a trainer closes its listeners instead. */
void catalogue_panic(struct catalogue *catalogue, const char *what);

struct job *catalogue_job(struct catalogue *catalogue, const char *persist_path, const char *name);
/* Makes it if needed; NULL: an allocation failed. */
struct job *catalogue_job_get(struct catalogue *catalogue, const char *persist_path, const char *name);
/* Applies a trainer's settings to the job. Settings that come from a survival log have zeros where the log has no value. */
void catalogue_job_configure(struct catalogue *catalogue, struct job *job, const struct ipc_hello *settings, const char *spelling);
/* The rule that a trainer's settings give. */
struct keep_rule catalogue_rule(const struct ipc_hello *settings);
/* The job's versions stay by the rules of its newest run's connected sessions. Call it when one has got another rule. */
void catalogue_gather_rules(const struct catalogue *catalogue, struct job *job);
/* Files and directories that the calling thread makes from now on get the permissions that the job's trainers would give. Lock held. */
void catalogue_create_as(const struct job *job);
/* Whether a session, a thread or memory needs the job, other than for copies on other nodes. */
bool catalogue_job_is_needed(const struct catalogue *catalogue, const struct job *job);
/* Forgets jobs, and lanes without jobs, that no client has used for as long as an idle agent stays, and whose
 * versions are only in storage. Without this an agent that is never idle would collect them. Returns when to call
 * again. */
int64_t catalogue_forget_jobs(struct catalogue *catalogue, int64_t now_ns);
/* The reader's session leases that version in place of the one before; 0: none. */
void catalogue_lease(struct catalogue *catalogue, struct session *session, uint64_t version_id);
struct session *catalogue_session(struct catalogue *catalogue, uint64_t nonce);
uint32_t catalogue_session_count(const struct catalogue *catalogue, const struct job *job); /* connected trainers; job NULL: of all jobs */

/* Whether trainers are connected and none has begun a version yet. The version that they found, or agreed on with
 * other nodes, must then stay. */
bool catalogue_resumes(const struct catalogue *catalogue, const struct job *job);

/* False: no version has this tag, so the caller need not walk over hundreds of tombstones. Most saves begin a new tag. */
bool job_may_have(const struct job *job, const char *tag);
/* Makes a version of `tag` in state capturing. */
struct version *version_new(struct catalogue *catalogue, struct job *job, const char *tag, struct nebula_error *error);
void version_free(struct catalogue *catalogue, struct version *version);
struct version *catalogue_version(struct catalogue *catalogue, uint64_t id);
struct version *catalogue_version_of_image(struct catalogue *catalogue, uint64_t image_id, struct image_loan **ret_loan);
/* The only way to change a state: checks the table, records the time, wakes waiters. A version that fails must have version->error set. */
void version_move(struct catalogue *catalogue, struct version *version, enum nebula_state state);
/* Call after a change that the survival log records: catalogue_unlock describes the version there, once for all changes under the lock. */
void version_mark(struct catalogue *catalogue, struct version *version);
/* Describes a marked version at once: it will not be there when the lock is released. */
void version_describe(struct catalogue *catalogue, struct version *version);
/* version_mark, if a file changed that the log already describes. */
void version_mark_files(struct catalogue *catalogue, struct version *version);
/* version_mark and catalogue_signal, but of the waiters for versions only those of this version are checked. */
void version_changed(struct catalogue *catalogue, struct version *version);
/* A rank has captured and nothing else changed: only waiters for that are checked. */
void version_signal_captured(struct catalogue *catalogue, const struct version *version);
void version_fail(struct catalogue *catalogue, struct version *version, enum nebula_status status, const char *format, ...)
        __attribute__((format(printf, 4, 5)));
/* Gives up the loans of the version: files that trainers are still copying do not become part of it, and the
 * trainers learn that when they report them. */
void version_drop_loans(struct catalogue *catalogue, struct version *version);
/* Gives its images back; the version then becomes a tombstone. */
void version_forget_memory(struct catalogue *catalogue, struct version *version);
/* The failure of a version for a client: that of storage if storage failed it, else NEBULA_FAILED. Returns the status. */
enum nebula_status version_failure(const struct version *version, struct nebula_error *error);
/* Call when storage has a later writing of the tag. Searches, loads and take-overs skip the version from then on. */
void version_replaced(struct catalogue *catalogue, struct version *version);
/* Call when storage holds this generation of the version's tag. If it is the later one, the version will never be written to storage. */
void version_give_way(struct catalogue *catalogue, struct version *version, uint64_t generation, uint64_t sequence);
struct part *version_part(struct version *version, uint32_t rank); /* NULL: there is none */
struct part *version_part_get(struct version *version, uint32_t rank); /* makes it if needed; NULL: an allocation failed */
/* Whether the version is this writing of its tag. The generation alone is not enough: a tag that was removed may be
 * written again with the same generation. */
bool version_is(const struct version *version, uint64_t generation, uint64_t sequence);
/* Whether a version with these numbers is the one that FIND asks for. */
bool version_wanted(const struct ipc_find *wanted, uint64_t generation, uint64_t sequence);
/* Whether it is complete and holds every file's image. */
bool version_whole_in_memory(const struct version *version);
/* Whether it should become durable by the job's settings and is not durable yet. */
bool version_unsaved(const struct version *version);
uint64_t version_size(const struct version *version);
/* The result in the history; NULL: it has not ended yet. */
const char *version_result(const struct version *version);
/* Sets a later generation, because storage already has this one. The files that this version wrote get the new number too. */
void version_set_generation(struct catalogue *catalogue, struct version *version, uint64_t generation);
/* files.c. Pointers are valid until the next file is added. */
struct agent_file *version_file(struct version *version, const char *name); /* NULL: there is none */
/* The name must be new; the file is zeroed. NULL: an allocation failed. */
struct agent_file *version_file_add(struct version *version, const char *name);
void version_file_done(struct catalogue *catalogue, struct agent_file *file); /* frees its image and checksums; the file stays in the list */
/* version_file_done and version_mark_files: another file takes its place. */
void version_file_change(struct catalogue *catalogue, struct version *version, struct agent_file *file);
void version_files_done(struct catalogue *catalogue, struct version *version);

/* Applies the job's retention to its memory, turns versions into tombstones, and drops tombstones beyond
 * TOMBSTONE_MAX. `keep`: complete versions to keep. */
void catalogue_retain(struct catalogue *catalogue, struct job *job, size_t keep);
/* For versions that were found in storage: drops those beyond TOMBSTONE_MAX, and the images of all but the last few. */
void catalogue_tidy(struct catalogue *catalogue, struct job *job);
/* Frees the version, of any job, whose loss costs least. False: none can leave memory now. */
bool catalogue_reclaim(struct catalogue *catalogue);
/* Gives back the memory of the versions that storage has; keeps the newest if keeps_newest. For a job that has
 * ended: it can still load them from storage. False: there is no such version. */
bool catalogue_release(struct catalogue *catalogue, struct job *job, bool keeps_newest);
/* Gives back one restored image that no thread is reading. */
bool catalogue_drop_restored(struct catalogue *catalogue);
/* The session's next versions will have a file of `size` bytes: images for two versions are made in the background. */
void catalogue_hint(struct catalogue *catalogue, struct session *session, uint64_t size);
/* A finished free image for a file which this session has hinted. No process that lives has it mapped. NULL: none.
 * *ret_left_count: how many the session still waits for, without this one. */
struct image *catalogue_spare_image(struct catalogue *catalogue, const struct session *session, uint32_t *ret_left_count);
/* Versions of the job tell now how much memory it needs. */
void catalogue_forget_hints(struct catalogue *catalogue, const struct job *job);
/* Size of the next spare image to make for the job; 0: none. */
uint64_t catalogue_spare_bytes(struct catalogue *catalogue, struct job *job);
/* An image that is reused and whose pages can be joined now: no thread writes to it or writes it to storage. NULL: none. */
struct image *catalogue_small_image(const struct catalogue *catalogue);

/* The version of a manifest in storage: an existing one, or a new tombstone in state durable. NULL: an allocation failed. */
struct version *catalogue_stored(struct catalogue *catalogue, struct job *job, const struct manifest *manifest);

#endif
