/*
 * catalogue.h - what the agent knows: jobs, their sessions, their versions and
 * files, and the memory that these use.
 *
 * A job is a storage path, without links (location.h), and a name. A version is one writing of one tag: it
 * gathers files from the ranks (parts), becomes complete once, and stays as a
 * small tombstone after its memory was given back, so that handles to it still
 * get answers. A session is one trainer (its nonce); it may hold several
 * connections.
 *
 * One lock, `catalogue_lock`, guards everything here. Slow work (files, sealing,
 * page allocation) is done without it on versions that are pinned: a pinned
 * version is not freed and its images are not dropped.
 *
 * Who waits, and for what:
 *
 *      waiter   a state of one version; the thread that brings it about answers
 *      moved    anything else that a client waits for
 *      work     the persist workers: something to write
 *      clock    the thread that keeps the clock and starts them
 *      keep     the page maker: spare images, pages to give back
 *      copy     the one that makes copies on other nodes
 *      event    who follows a job's events (WATCH)
 *
 * They are told when the lock is given back (catalogue_unlock, catalogue_wait): with every rank of a node
 * saving at once, a thread that wakes only to find it taken costs as much again as its request.
 */
#ifndef NB_AGENT_CATALOGUE_CATALOGUE_H
#define NB_AGENT_CATALOGUE_CATALOGUE_H

#include <pthread.h>

#include "agent/catalogue/lifecycle.h"
#include "agent/memory/memory.h"
#include "ipc/ipc.h"
#include "os/lock.h"
#include "store/document.h"
#include "store/manifest.h"

#define WORLD_MAX DOCUMENT_WORLD_MAX /* a larger one could not be told of in storage */
#define TOMBSTONE_MAX 256 /* per job; a tombstone is a few KiB */
#define TAG_SLOTS 2048    /* many more than tombstones, so that few tags share one */
#define SESSION_MAX 4096  /* connections */
#define REACHED_COUNT 8   /* versions that are waited for at one time are few; the waiters of two that share one all look */
#define REPLICA_MAX 8     /* copies of a version; each costs its size in another node's memory and on the network */

/* A version that a rank has read a file of. */
struct lineage_base {
        uint64_t read_at; /* a sequence: later than that of all that was committed before; 0: none was read */
        int64_t step;
        struct line line;
};
struct agent_file {
        char name[IPC_NAME_MAX];
        uint32_t rank;
        enum ipc_format format;
        uint64_t size, generation;  /* the writing it comes from */
        struct image *image;        /* NULL: only storage has it */
        uint64_t *chunks;           /* checksums; NULL until sealed */
        size_t chunk_count;
        bool stored;                /* storage is known to hold that writing of it; its number alone may be that of another run */
        bool reading;               /* somebody brings it back from storage */
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
        bool commits; /* its rank's part will be closed when it is whole */
};
/* One rank's share of a version. */
struct part {
        uint32_t rank, pid, seen_pid, file_count; /* seen_pid: as session's */
        uint64_t nonce;
        bool closed;       /* nothing more comes */
        bool spoken_for;   /* closed without a file before this generation began */
        double begun, captured;
        int64_t blocked_ns, copy_ns, cpu_ns;
        uint64_t fault_count;
};
struct version {
        struct version *next, *next_live;
        char tag[IPC_NAME_MAX], run[IPC_NAME_MAX]; /* here, for whoever walks all versions compares them */
        struct job *job;
        uint64_t id, generation, sequence;
        struct line line;        /* of history, from its commit on (lineage.h) */
        struct lineage_base base; /* what its ranks had loaded when they saved it */
        int64_t step, file_goal; /* file_goal: > 0, NEBULA_FILES_OPEN or NEBULA_FILES_ALL_RANKS */
        int64_t next_goal;       /* asked for by who began this whole tag again; 0: nobody has */
        uint32_t world;
        struct lifecycle life;
        struct part *parts;
        size_t part_count;
        struct agent_file *files; /* they are added and found by files.c */
        uint32_t *slots;          /* of its table of names */
        size_t file_count, slot_count;
        struct image_loan *loans;
        uint32_t pins;
        bool in_memory;    /* its images are held; cleared when memory gave it up */
        bool stored;       /* a manifest in storage names it */
        bool is_gone;      /* was durable, and somebody has taken it out of storage since: a search for the newest leaves it */
        bool line_due;     /* its line was given without knowing what lies in storage */
        bool wanted;       /* somebody asked for it to be durable */
        bool tried_ahead;  /* to write it before it was complete; that is tried once */
        bool superseded;   /* gave its memory up before it was due to be persisted, or gave way to a later writing of its tag */
        bool noted;        /* a survival log about it lies in the memory directory */
        uint64_t note_bytes; /* of that note, as far as this agent has written it; 0: it begins a new one */
        uint64_t note_begun_bytes; /* of its first record */
        size_t noted_count; /* files at the head of the list that the survival log holds as they are */
        bool recorded;     /* has its line in the history */
        bool is_tombstone; /* not in job->live */
        bool adopted;      /* found in the memory directory: an earlier agent's */
        int64_t adopted_ns; /* when */
        bool failed_by_storage; /* failed, but whole in memory */
        bool gives_way;         /* storage has another run's writing of the tag, which stays (ancestry.h) */
        uint64_t beginning;     /* the job's, when it was begun */
        uint64_t base_sequence; /* of the writing in storage that this one may replace, whoever made it; 0: of none but its run's and ancestry.h's */
        int64_t rival_ns;       /* since when another run has been seen to write the same writing of the tag; 0: none has */
        bool remote;            /* peers hold it, and this node does not (replica.h) */
        uint32_t world_heard;   /* of a remote one: so many members, this one among them, have said what they have */
        bool replica_wanted;    /* somebody waits for its copies on other nodes */
        uint64_t replica_nonces[REPLICA_MAX]; /* of the agents that hold the first copy, the second, ...; 0: none does */
        int64_t activity_ns;
        double late_at;          /* when it was found to wait for other ranks for long; 0: it was not */
        /* tries to persist it that failed; the worker's */
        int64_t retry_at_ns, failing_since_ns, failed_ns; /* failed_ns: when the last one did; 0: none has */
        uint32_t attempt;                                 /* so many of them */
        struct nebula_error error;
        double persist_seconds;
        uint64_t persist_bytes;
        /* several nodes (world.c) */
        uint64_t writing;           /* the n-th of this tag in this run */
        bool is_counted;            /* by what storage says of earlier ones, too */
        bool spread;                /* ranks on other nodes: documents in storage are exchanged */
        bool to_announce, wanted_told, tell_failed, recorded_here, leads; /* leads: this node writes committed.json and the manifest; recorded_here: this node's records are in storage */
        bool withdrawn;             /* its documents were taken away */
        size_t announced_size, carried_parts; /* carried_parts: so many had begun when files of theirs were carried over */
        uint64_t announce_sequence, heard;
        int64_t poll_at_ns, waiting_since_ns, heard_ns, behind_ns;
        uint32_t poll_count;
        uint32_t *decided;          /* the ranks of committed.json, as it was adopted; NULL: an agent before this one did that */
        size_t decided_count;
        uint8_t *covered;           /* per rank of the world: its captured document was seen; NULL: not looked */
        struct part *idle_parts; /* ranks that closed this whole tag again with nothing written (see commit.c) */
        size_t idle_count;
};
/* A run that the newest one of a job came after, or that writes beside it (ancestry.h). */
struct ancestor {
        char run[IPC_NAME_MAX];
        uint64_t until; /* the sequences up to this one; 0: none of what it has written */
        bool is_rival;
};
/* A rank that has left its job. */
struct gone {
        uint32_t rank, pid;
};
/* A storage path, "" included: its jobs share a worker, so that storage that hangs holds up nobody else (worker.h). */
struct lane {
        struct lane *next;
        struct catalogue *catalogue;
        bool is_running;
        bool waited_in_vain; /* a save of its jobs, so long, for memory; nothing has become durable there since */
};
struct job {
        struct job *next;
        struct lane *lane;
        char persist_path[IPC_PATH_MAX], name[IPC_NAME_MAX];
        char spelling[IPC_PATH_MAX]; /* of the storage path, by the trainer that came last: other nodes may mount it elsewhere */
        char output_dir[IPC_PATH_MAX], run[IPC_NAME_MAX];
        uint32_t umask, group; /* of its trainers (os_create.h) */
        double persist_interval_s;
        uint32_t retention_count, keep_last, on_full, world, local_world;
        uint64_t keep_every;
        struct version *versions; /* newest creation first */
        struct version *live; /* likewise, without tombstones: what is asked at every request must not grow with the past */
        size_t tombstone_count;
        uint64_t last_sequence; /* of its versions, here and in storage: of this job alone, since other jobs' storage is in other hands */
        uint32_t tag_counts[TAG_SLOTS]; /* versions, tombstones too, by the hash of their tag: see job_may_have */
        bool may_have_idle; /* some version may have idle_parts */
        /* storage, as far as this agent knows; written by the worker and by FIND */
        struct store *store;
        struct manifest_scan stored;
        struct manifest *half_removed; /* versions of which a removal left files behind; the worker's */
        size_t half_removed_count;
        bool scan_due, scanned; /* scanned: since this run came, whose forerunner may have been on another node */
        bool was_scanned;       /* at any time */
        char newest_run[IPC_NAME_MAX];
        bool has_newest_run;
        uint64_t beginning;      /* how many runs have begun here: the name of one may be that of the one before */
        uint64_t begun_sequence; /* when that began, among the sequences of what was committed */
        int64_t begun_ns;
        struct ancestor *ancestors;
        size_t ancestor_count;
        uint64_t given_way_count; /* versions that gave way to another run's */
        /* the persist worker's */
        int64_t last_start_ns, failing_since_ns;
        uint32_t attempt; /* tries that failed since one that did not, whichever version they were of */
        const struct version *written; /* the version that the worker is writing; NULL: none */
        uint64_t failure_count;
        struct nebula_error store_error;
        double store_error_at;
        double notice_at; /* when it was seen that another agent has versions of it in memory; 0: it was not */
        uint32_t replica_count;     /* copies in other nodes' memory that are asked for */
        char peer_identity[2 * 16 + 1]; /* of the secret (tls.h) with which other nodes may read its versions; "": they may not */
        bool announce_due;          /* trainers have come anew: this node's record is to be there, whoever took it away */
        struct nebula_error replica_error; /* why there is none yet */
        bool persisting;
        int64_t spread_start_ns; /* when a version of several nodes was last chosen to be persisted; 0: never */
        bool history_broken, latest_told;
        bool spare_due;
        struct publish *publishes; /* oldest request first (publish.h) */
        uint32_t publish_attempt; /* tries in vain since one that was not */
        int64_t idle_since_ns; /* when the last session left */
        struct gone *gone;     /* of run gone_run; who comes back is taken off */
        size_t gone_count;
        char gone_run[IPC_NAME_MAX];
        uint32_t pins;         /* threads that use it without the lock, or while they wait, and hold nothing else of it */
        int64_t left_ns;       /* since when catalogue_forget_jobs knows that it is not needed; 0: it is */
        bool has_peers;        /* replica.h knows it: it stays */
        uint64_t last_guest;   /* sessions of other jobs up to this number may hold handles of its versions */
};
struct session {
        struct session *next;
        struct job *job;
        uint64_t nonce;
        uint32_t pid; /* as the client calls itself, for people */
        uint32_t seen_pid; /* as the agent can see that process, for os->alive; 0: it cannot, from its pid namespace */
        uint32_t rank, world, role;
        char run[IPC_NAME_MAX];
        uint32_t connection_count;
        uint64_t number; /* the later it came the larger */
        struct lineage_base loaded;
        bool has_begun;  /* a version; until then it may be about to load what it was told of */
        uint64_t given_way_told; /* of the job's given_way_count */
        int64_t left_ns; /* when the last connection ended */
        double since;
};
/* A client that waits for a state of a version. Its thread is not woken to find out: whoever moved the version looks and tells. */
struct waiter {
        struct waiter *next;
        uint32_t wakes; /* which signals concern it */
        bool (*is_over)(struct waiter *waiter); /* called with the lock held; true: it leaves the list, and `tell` follows */
        void (*tell)(struct waiter *waiter);    /* mostly after the lock was given back */
};
struct catalogue {
        struct lock catalogue_lock;
        pthread_cond_t moved, work, clock, keep, copy, event;
        struct waiter *waiters;
        uint32_t wakes; /* who is to be told of what was done under the lock */
        struct memory memory;
        struct job *jobs;
        struct lane *lanes;
        struct place *places; /* of location.h */
        uint32_t lane_count; /* whose worker runs */
        struct session *sessions;
        uint64_t session_number; /* of the last one */
        uint64_t agent_nonce;
        double last_moment;
        int note_fd; /* of version survival_log_id, which was noted last (survival_log.c); -1: none */
        uint64_t survival_log_id;
        uint64_t change_count; /* of catalogue_signal: who worked without the lock sees that something moved */
        uint32_t connection_count;
        struct replica *replica; /* NULL: none can be made */
        uint32_t peer_count;     /* connections of other agents */
        bool stopping;   /* threads end */
        bool draining;   /* everything committed is wanted */
        bool dropping;   /* told to end at once, and to let the memory tier go */
        bool in_process; /* on threads of a trainer: never ends the process */
        bool broken;
        int64_t started_ns, idle_since_ns;
        double started;
        uint64_t linger_s, give_up_s, memory_wait_s, quiet_s, sweep_age_s, takeover_s;
        bool publish_links; /* published files are the stored ones under another name, and not copies of them */
        void (*end)(struct catalogue *catalogue); /* asks the process to end; NULL: nothing to end */
};

double catalogue_now(void); /* seconds since 1970 */
/* Likewise, but later than what this said before, whatever becomes of the clock: of two moments the later one is larger. */
double catalogue_moment(struct catalogue *catalogue);

void catalogue_init(struct catalogue *catalogue);
void catalogue_done(struct catalogue *catalogue);
void catalogue_lock(struct catalogue *catalogue);
void catalogue_unlock(struct catalogue *catalogue);
/* Something moved: waiters look again, and so do the workers and the clock. */
void catalogue_signal(struct catalogue *catalogue);
/* The workers and the clock alone have something to look at. */
void catalogue_signal_work(struct catalogue *catalogue);
/* So do the workers alone. */
void catalogue_signal_workers(struct catalogue *catalogue);
/* Who watches a job has something to be told (events.h). */
void catalogue_signal_event(struct catalogue *catalogue);
/* catalogue_unlock for a thread after which the catalogue may be gone. */
void catalogue_unlock_last(struct catalogue *catalogue);
/* Gives the lock back and waits. `cond`: one of the catalogue's; timeout_ms < 0: no limit. */
void catalogue_wait(struct catalogue *catalogue, pthread_cond_t *cond, int64_t timeout_ms);
/* Lists who waits for a state of this version, and takes it from the list again. */
void catalogue_await(struct catalogue *catalogue, struct waiter *waiter, uint64_t version_id, enum nebula_state state);
void catalogue_forget_waiter(struct catalogue *catalogue, struct waiter *waiter);
/* An invariant broke. A daemon aborts; inside a trainer the agent closes its listeners instead. */
void catalogue_panic(struct catalogue *catalogue, const char *what);

struct job *catalogue_job(struct catalogue *catalogue, const char *persist_path, const char *name);
struct job *catalogue_job_get(struct catalogue *catalogue, const char *persist_path, const char *name); /* or new; NULL: no memory */
/* What a trainer said of it, or, with what a survival log does not hold left 0, the trainer of an earlier agent. */
void catalogue_job_configure(struct catalogue *catalogue, struct job *job, const struct ipc_hello *settings, const char *spelling);
/* Lock held. What the calling thread makes in file systems from here on is made as the job's trainers would. */
void catalogue_create_as(const struct job *job);
/* Forgets jobs, and lanes without any, that nobody has come to for as long as an agent with nothing to do stays, and of which nothing
 * is left but what storage has: an agent that always has something to do would gather them. When to call again. */
int64_t catalogue_forget_jobs(struct catalogue *catalogue, int64_t now_ns);
struct session *catalogue_session(struct catalogue *catalogue, uint64_t nonce);
uint32_t catalogue_session_count(const struct catalogue *catalogue, const struct job *job); /* connected trainers; job NULL: all */

/* Trainers are there and none has begun a version yet: what they found, or agreed on with other nodes, has to stay. */
bool catalogue_resumes(const struct catalogue *catalogue, const struct job *job);

/* False: no version has this tag, and nobody needs to walk past hundreds of tombstones to find none. Most saves begin a new tag. */
bool job_may_have(const struct job *job, const char *tag);
/* A new version of `tag` in state capturing. */
struct version *version_new(struct catalogue *catalogue, struct job *job, const char *tag, struct nebula_error *error);
void version_free(struct catalogue *catalogue, struct version *version);
struct version *catalogue_version(struct catalogue *catalogue, uint64_t id);
struct version *catalogue_version_of_image(struct catalogue *catalogue, uint64_t image_id, struct image_loan **ret_loan);
/* The only way a state changes: checks the table, keeps the time, wakes waiters. Failed ones carry version->error. */
void version_move(struct catalogue *catalogue, struct version *version, enum nebula_state state);
/* As catalogue_signal, but of those who wait for versions only those who wait for this one. */
void version_signal(struct catalogue *catalogue, const struct version *version);
/* A rank has captured, and that is all: nobody but who waits for just that. */
void version_signal_captured(struct catalogue *catalogue, const struct version *version);
void version_fail(struct catalogue *catalogue, struct version *version, enum nebula_status status, const char *format, ...)
        __attribute__((format(printf, 4, 5)));
/* What trainers still copy is not to be of it; they are told when they have. */
void version_drop_loans(struct catalogue *catalogue, struct version *version);
/* Gives its images back; the version soon becomes a tombstone. */
void version_forget_memory(struct catalogue *catalogue, struct version *version);
/* Storage holds this writing of its tag: if that is a later one, this version never follows it there. */
void version_give_way(struct catalogue *catalogue, struct version *version, uint64_t generation, uint64_t sequence);
struct part *version_part(struct version *version, uint32_t rank); /* or NULL */
struct part *version_part_get(struct version *version, uint32_t rank); /* or new; NULL: no memory */
/* Whether it is that writing of its tag: a tag that was removed may be written again with the same generation. */
bool version_is(const struct version *version, uint64_t generation, uint64_t sequence);
/* Whether a version of these numbers is one that is looked for. */
bool version_wanted(const struct ipc_find *wanted, uint64_t generation, uint64_t sequence);
/* Complete, and every file's image is held. */
bool version_whole_in_memory(const struct version *version);
/* Is to become durable by the job's settings, and is not. */
bool version_unsaved(const struct version *version);
uint64_t version_size(const struct version *version);
/* How it ended, as the history says it; NULL: not yet. */
const char *version_result(const struct version *version);
/* A later number, since storage turned out to hold that one; files that this version wrote follow. */
void version_set_generation(struct version *version, uint64_t generation);
/* files.c; pointers hold until the next file is added. */
struct agent_file *version_file(struct version *version, const char *name); /* or NULL */
struct agent_file *version_file_add(struct version *version, const char *name); /* a name that is not there; all else zero. NULL: no memory */
void version_file_done(struct catalogue *catalogue, struct agent_file *file); /* its image and checksums; it stays in the list */
void version_file_change(struct catalogue *catalogue, struct version *version, struct agent_file *file); /* likewise, and it is described anew */
void version_files_done(struct catalogue *catalogue, struct version *version);

/* Applies the job's retention to its memory, finds who is a tombstone now, and drops those beyond their number. `keep`:
 * complete versions to keep. */
void catalogue_retain(struct catalogue *catalogue, struct job *job, size_t keep);
/* Of versions that were found in storage: drops those beyond the tombstones' number, and images of all but the last few. */
void catalogue_tidy(struct catalogue *catalogue, struct job *job);
/* Frees what is lost most cheaply, over all jobs. False when nothing can go now. */
bool catalogue_reclaim(struct catalogue *catalogue);
/* Gives back the memory of those versions that storage has, but for the newest if that is to stay. Of a job that has ended: what it could
 * load is there still. False: it holds none that could go. */
bool catalogue_release(struct catalogue *catalogue, struct job *job, bool keeps_newest);
/* Gives back one image that was read from storage and is not being read. */
bool catalogue_drop_restored(struct catalogue *catalogue);
/* Capacity of the next spare image that the job should have ready; 0: none. */
uint64_t catalogue_spare_bytes(struct catalogue *catalogue, struct job *job);
/* One that serves again and whose pages can be joined now: nobody writes to it, nor from it to storage. NULL: none. */
struct image *catalogue_small_image(const struct catalogue *catalogue);

/* Storage's manifest as a version (found again, or a new tombstone in state durable). NULL: no memory. */
struct version *catalogue_stored(struct catalogue *catalogue, struct job *job, const struct manifest *manifest);

#endif
