/*
 * nebula.h - the public C interface of Nebula, the checkpoint engine.
 *
 * A program that computes for days saves its state now and then. Nebula copies that state in memory,
 * returns, and writes it to storage in the background. After a crash Nebula loads the newest complete
 * version from the fastest place that still has it.
 *
 * Calling sequence
 *
 *      struct nebula_options options;
 *      nebula_options_init(&options);
 *      options.persist_path = "/scratch/run7";
 *      nebula_session_open(&options, &session, &error);
 *
 *      if (nebula_checkpoint_latest(session, NULL, &checkpoint, &error) == NEBULA_OK) {
 *              nebula_checkpoint_map(checkpoint, "state.pt", &map, &error);
 *              nebula_map_tensor(map, "u", &tensor, &error);       // read-only
 *              ... copy tensor.data into place ...
 *              nebula_map_free(map);
 *              nebula_checkpoint_free(checkpoint);
 *      }
 *      for (...) {
 *              nebula_checkpoint_begin(session, "step100", NEBULA_FILES_ALL_RANKS, &checkpoint, &error);
 *              nebula_checkpoint_save_tensors(checkpoint, "state.pt", tensors, count, &error);
 *              nebula_checkpoint_commit(checkpoint, &error);
 *              nebula_checkpoint_free(checkpoint);
 *      }
 *      nebula_session_close(session);
 *
 * Ownership: the caller owns every handle that a call returns, and frees it with the matching _free or
 * _close; NULL is allowed there. A call reads its strings and arrays before it returns and keeps none of
 * them. The one exception is the memory of the ranges of the calls that end in _kept. Freeing a
 * checkpoint handle does not change the checkpoint.
 *
 * Values: the file holds the values of the moment when the save call was made. After the call returns,
 * the program may change its memory.
 *
 * Threads: any thread may make any call. Calls on one session run one after the other; waits do not
 * block other calls. Do not cancel a thread that is in a call (pthread_cancel): it keeps the locks of the session,
 * and other calls wait for them without end.
 *
 * Errors: every call that can fail returns a status. If `ret_error` is not NULL, the call describes the
 * failure there in one sentence. Outputs are last, named ret_..., and written only on success. The
 * library never prints and never exits. It raises only signals that it has held back (see Ends).
 *
 * Ends: after a call that ends in _kept has returned, its copies may still run.
 * * exit and quick_exit wait for them, 300 s at most.
 * * A signal that would end the process because its action is the default waits for them, 30 s at most;
 *   the program runs on meanwhile.
 * * abort and a fault stop their own thread until the copies are done, 30 s at most.
 * * _exit and exec do not wait: call nebula_session_settle before.
 * * SIGKILL loses the bytes that are not copied yet.
 * In a forked process that has not called exec, every save returns after its bytes are copied.
 *
 * Signals: the first save that is large enough for copy-on-write (capture "auto" or "cow") installs a
 * handler for SIGSEGV and SIGBUS, even if that save copies. The handler ends a copy whose source is
 * freed meanwhile. It leaves every other fault to the previous handler, or to the default. See
 * docs/capture.md, No crash. The first copy that goes on after its save installs handlers for SIGABRT,
 * SIGFPE, SIGILL and SIGSYS, which pass the signal on when the copies are done. Other signals that end a
 * process by default are handled only while a copy is running, and only if their action is the default
 * then.
 */
#ifndef NEBULA_H
#define NEBULA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define NEBULA_API __attribute__((visibility("default")))
#else
#define NEBULA_API
#endif

#define NEBULA_VERSION "0.2.0"

/* The result of a call. The groups say what the failure affects. */
enum nebula_status {
        NEBULA_OK = 0,
        /* Nothing is lost: try again, or wait longer. */
        NEBULA_TIMEOUT = 10,
        NEBULA_BUSY = 11,
        /* One file or path is affected. */
        NEBULA_NOT_FOUND = 20,
        NEBULA_STORAGE = 21,
        NEBULA_NO_SPACE = 22,
        NEBULA_CORRUPT = 23,
        /* This checkpoint is lost. */
        NEBULA_FAILED = 30,
        NEBULA_NO_MEMORY = 31,
        /* The session cannot go on: no agent answers, or an invariant broke. */
        NEBULA_UNAVAILABLE = 40,
        NEBULA_INTERNAL = 41,
        /* The caller made an error. */
        NEBULA_INVALID = 50,
};

/* One failure; the caller owns the struct. `sys_errno` and `http_status` are 0 if they do not apply. */
struct nebula_error {
        enum nebula_status status;
        int sys_errno;
        int http_status;
        char message[512];
};

/* The life of a checkpoint; each state is a promise (see docs/durability.md). */
enum nebula_state {
        NEBULA_STATE_CAPTURING = 0, /* values are fixed, the copy is not complete */
        NEBULA_STATE_CAPTURED = 1,  /* this rank's files survive the death of the trainer */
        NEBULA_STATE_COMMITTED = 2, /* every rank has captured: the checkpoint can be loaded */
        NEBULA_STATE_REPLICATED = 3,/* a copy is in another node's memory */
        NEBULA_STATE_DURABLE = 4,   /* survives power loss */
        NEBULA_STATE_FAILED = 5,    /* the error says why; older checkpoints are unchanged */
};

/* How a save goes on if the memory tier is full. */
enum nebula_on_full {
        NEBULA_ON_FULL_WAIT = 0,   /* wait until a durable version can leave memory */
        NEBULA_ON_FULL_STREAM = 1, /* keep it in a file on disk instead, until it is durable */
        NEBULA_ON_FULL_SKIP = 2,   /* fail this checkpoint, report it, go on */
};

struct nebula_options {
        size_t struct_size;            /* set by nebula_options_init */
        const char *persist_path;      /* absolute path; NULL: memory tier only. persist_path, job and run are UTF-8 */
        const char *job;               /* distinguishes two jobs on one path; NULL: "" */
        const char *output_dir;        /* directory for checkpointHistories.csv; NULL: no file */
        const char *run;               /* one incarnation of the job, the same on all ranks; NULL: "" */
        double persist_interval_s;     /* 0: persist every version */
        uint32_t retention_count;      /* versions kept in memory, that of a running save among them, >= 1 */
        uint32_t rank, world;          /* default: rank 0 of 1 */
        uint32_t local_rank, local_world;
        uint64_t memory_bytes;         /* budget of the node's memory tier; 0: a safe share of the free memory */
        enum nebula_on_full on_full;
        uint32_t keep_last;            /* storage retention: how many of the newest versions to keep; 0: all */
        uint64_t keep_every;           /* storage retention: also keep versions whose step is a multiple; 0: none */
        uint32_t replica_count;        /* copies in other nodes' memory, each on a different node; at most 8 */
        const char *agent_path;        /* path of the `nebula` program; NULL: search for it */
        const char *keep_best;         /* storage retention: also keep the versions with the best value of this metric; NULL: none */
        uint32_t keep_best_count;      /* so many of them */
        uint32_t keep_best_is_largest; /* not 0: the largest value is the best, else the smallest */
        uint32_t is_reader;            /* 1: a reader, see below */
        uint32_t is_spare;             /* 1: a spare node, see below */
        const char *keep_items;        /* storage retention: "PATTERN=COUNT,...": only the newest COUNT versions keep the files of that name; NULL: all do */
        /* storage retention: also keep the newest version of each of the newest so many hours, days and weeks (UTC) that have one, and all that were
         * committed no longer than so many seconds before the latest; 0: none. As the rules of `nebula prune` */
        uint32_t keep_hourly, keep_daily, keep_weekly, keep_within_s;
        uint32_t has_spares;           /* 1: spare nodes may wait for this job: they are the first choice for copies */
};

/*
 * A reader has no rank and changes nothing, so any number may run beside the trainers of a path, on their node or elsewhere. It sees the
 * checkpoints of all jobs of the path. A search finds what this node's memory has, else what storage has. The checkpoint that was found last
 * stays in memory and storage until the next search or the end of the session, unless a save needs its memory; for the agents of other nodes
 * the reader's agent writes a lease into storage, if it may. A watch reports commits, too.
 * Calls that would save, publish or remove return NEBULA_INVALID.
 *
 * A spare node has no rank yet. As long as its session is open, the agent of its node keeps copies of the job's versions for other nodes
 * (replica_count). The session finds, saves and removes nothing: such calls return NEBULA_INVALID.
 */
typedef struct nebula_session nebula_session;
typedef struct nebula_checkpoint nebula_checkpoint;
typedef struct nebula_map nebula_map;

/* How many files complete a checkpoint: a positive number counted over all ranks, or one of these. */
#define NEBULA_FILES_OPEN (-1)      /* a rank's part closes at its commit, its first save to the next tag, its flush or its exit */
#define NEBULA_FILES_ALL_RANKS (-2) /* complete when every rank has committed */

enum nebula_dtype {
        NEBULA_DTYPE_U8, NEBULA_DTYPE_I8, NEBULA_DTYPE_I16, NEBULA_DTYPE_I32, NEBULA_DTYPE_I64,
        NEBULA_DTYPE_F16, NEBULA_DTYPE_BF16, NEBULA_DTYPE_F32, NEBULA_DTYPE_F64,
        NEBULA_DTYPE_C64, NEBULA_DTYPE_C128, NEBULA_DTYPE_BOOL,
};

#define NEBULA_DIM_MAX 16

/* A dense array in row-major order. */
struct nebula_tensor {
        const char *name;
        enum nebula_dtype dtype;
        uint32_t dim_count;
        uint64_t shape[NEBULA_DIM_MAX];
        const void *data;
};

/* A piece of memory that becomes one storage of a torch file. */
struct nebula_range {
        const void *data;
        uint64_t size; /* bytes */
};

/* Sets the defaults: rank 0 of 1, two versions in memory, every version persisted, none removed from storage, no
 * storage path. NULL is allowed. */
NEBULA_API void nebula_options_init(struct nebula_options *options);

/* Connects to this node's agent. Starts the agent if none runs. */
NEBULA_API enum nebula_status nebula_session_open(const struct nebula_options *options,
        nebula_session **ret_session, struct nebula_error *ret_error);
/* Sets new options for all further calls; equal options change nothing. NEBULA_INVALID: an option is impossible, or
 * another live process is this rank of this job. Changing the path or the job waits for running copies, then closes
 * uncommitted checkpoints as closing the session would. */
NEBULA_API enum nebula_status nebula_session_configure(nebula_session *session,
        const struct nebula_options *options, struct nebula_error *ret_error);
/* Waits for running copies and disconnects. The agent finishes its work in the background. If a `release` (see
 * nebula_keep) calls this on a thread of the session, it returns at once, and the session closes after the last
 * copy. */
NEBULA_API void nebula_session_close(nebula_session *session);
/* Waits for running copies and disconnects, so that another process can be this rank, and keeps the session for the
 * checkpoints and maps that are still open. The next call on one of them, or on the session, connects again. On a
 * thread of the session it does nothing. */
NEBULA_API void nebula_session_leave(nebula_session *session);
/* Waits until every save that has returned is complete in memory or has failed. timeout_ms < 0: no limit. */
NEBULA_API enum nebula_status nebula_session_settle(nebula_session *session, int64_t timeout_ms,
        struct nebula_error *ret_error);
/*
 * Foretells a file of the next checkpoints, so that the first save finds memory as the later ones do. The agent makes images for two versions. This
 * process maps them, asks for huge pages for the ranges and starts its copying threads. All of that happens in the background; the call returns at once.
 * `pickle_size`: bytes of the pickle that will be saved with nebula_checkpoint_save_pickle; 0: nebula_checkpoint_save_bytes will save the ranges.
 * A range with data NULL hints memory that does not exist yet. Call it once for each file, before the first save. The memory tier's budget
 * bounds the images; other saves take their room if they need it. A file that turns out larger is saved as one that was not hinted.
 */
NEBULA_API enum nebula_status nebula_session_prepare(nebula_session *session, size_t pickle_size, const struct nebula_range *ranges,
        size_t count, struct nebula_error *ret_error);
/*
 * Steps, so that the agent of this node notices a job that hangs. A session has one pulse. The agent reads it about once a second; a step or a
 * phase costs the program no system call and no lock. Before the first step, and after nebula_pulse_rest until the next one, nothing is watched.
 */
typedef struct nebula_pulse nebula_pulse;
struct nebula_pulse_options {
        uint32_t stack_signal; /* this signal makes the program append the stacks of its threads to stack_fd; 0: none does */
        int32_t stack_fd;
        uint32_t ends_hung;    /* not 0: the agent kills this process when the job hangs, for a launcher that starts it again */
};
NEBULA_API enum nebula_status nebula_pulse_open(nebula_session *session, const struct nebula_pulse_options *options, nebula_pulse **ret_pulse,
        struct nebula_error *ret_error);
NEBULA_API void nebula_pulse_step(nebula_pulse *pulse, uint64_t step); /* from any thread */
/* The program begins work that takes another time than a step, for example "evaluate". NULL: it makes steps again. One thread at a time. */
NEBULA_API void nebula_pulse_phase(nebula_pulse *pulse, const char *phase);
NEBULA_API void nebula_pulse_rest(nebula_pulse *pulse);
NEBULA_API void nebula_pulse_close(nebula_pulse *pulse); /* before nebula_session_close */
/* Sets a callback for programs that register images with a device in `fill`. `unmapping` is called before such an
 * image is unmapped, on any thread that makes a call on the session, and must take the registration back. It must
 * not make a call on this session. */
NEBULA_API void nebula_session_watch_images(nebula_session *session, void (*unmapping)(void *argument, void *image),
        void *argument);
/* Sets a callback for such programs. After nebula_session_prepare, a thread of the session maps the images that the agent makes for the hinted
 * files, and calls `mapped` for each: it may register the image, so that the first saves need not. A save that is lent the image waits until
 * `mapped` has returned. NULL: the thread makes pages until a save is lent the image. The rules of `unmapping` hold. */
NEBULA_API void nebula_session_watch_spares(nebula_session *session, void (*mapped)(void *argument, void *image, uint64_t capacity_bytes),
        void *argument);
/* Sets a callback that a save asks every 200 ms while it waits for memory. If it returns not 0, that save ends with
 * NEBULA_UNAVAILABLE. It must not make a call on this session. */
NEBULA_API void nebula_session_watch_waits(nebula_session *session, int (*is_interrupted)(void *argument), void *argument);
/* Waits until all committed checkpoints (tag NULL), or the one of `tag`, are durable. A checkpoint that this rank
 * has committed and other ranks have not is waited for too. Without a tag, that wait ends if no rank has committed
 * anything for NEBULA_TAKEOVER_S (docs/cli.md): NEBULA_TIMEOUT then names the missing ranks. timeout_ms < 0: no
 * other limit, except NEBULA_PERSIST_GIVE_UP. Without a tag it then waits, 10 s at most, until the versions that no rule keeps are removed. */
NEBULA_API enum nebula_status nebula_session_flush(nebula_session *session, const char *tag,
        int64_t timeout_ms, struct nebula_error *ret_error);

/*
 * Pins and removals, beside the rules keep_last, keep_every and keep_best of the options. The agent removes a version that no rule of the
 * job's sessions keeps, when a newer one has become durable. It reads the metrics of keep_best from the file nebula-metadata.json of a
 * version (docs/formats.md). If no version has the metric, all stay.
 *
 * A pin keeps a tag against all rules, also one that storage does not have yet. reason: for people; NULL: "". Pinning again sets the reason.
 */
NEBULA_API enum nebula_status nebula_session_pin(nebula_session *session, const char *tag, const char *reason, struct nebula_error *ret_error);
/* Removes the pin of a tag, if there is one. */
NEBULA_API enum nebula_status nebula_session_unpin(nebula_session *session, const char *tag, struct nebula_error *ret_error);
/* Removes the version of a tag from storage. NEBULA_INVALID: it is the newest, which a restart would load, it is pinned, it is in use, or
 * another job's. NEBULA_NOT_FOUND: storage has none. */
NEBULA_API enum nebula_status nebula_session_remove(nebula_session *session, const char *tag, struct nebula_error *ret_error);

/* Attaches to `tag`, or begins it. If the tag is already complete, the first save begins another writing. The
 * library reports that to the agent with the first save or commit. Exception: NEBULA_FILES_OPEN with several ranks is
 * reported at once, because their commits wait for this rank's. */
NEBULA_API enum nebula_status nebula_checkpoint_begin(nebula_session *session, const char *tag,
        int64_t file_count, nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error);
/* Saves a file that torch.load reads as a dict of tensors. A name has 1 to 1,000 bytes of UTF-8. */
NEBULA_API enum nebula_status nebula_checkpoint_save_tensors(nebula_checkpoint *checkpoint, const char *name,
        const struct nebula_tensor *tensors, size_t count, struct nebula_error *ret_error);
/* Saves a torch file, made of its finished pickle and its storages in the order of their keys "0", "1", ... */
NEBULA_API enum nebula_status nebula_checkpoint_save_pickle(nebula_checkpoint *checkpoint, const char *name,
        const void *pickle, size_t pickle_size, const struct nebula_range *storages, size_t count,
        struct nebula_error *ret_error);
/*
 * The calls that end in _kept are for memory that stays allocated until `release` is called. The save may then
 * return before the bytes are copied, by copy-on-write (docs/capture.md; NEBULA_CAPTURE=auto|copy|cow). The file has
 * the values of the call in any case. Until `release`, the program may change the memory. If it unmaps, moves or
 * empties the memory, the checkpoint fails.
 *
 * `release` is called once for each save that succeeds, on any thread, perhaps before the save returns, while the
 * library holds no lock. `failure` is NULL, or says why the file will never be complete; its checkpoint has then
 * failed. `release` may make any call. A call that would wait for later copies, and so for the thread that runs this
 * `release`, returns NEBULA_BUSY instead: settle, flush, report, a search, a map.
 */
struct nebula_keep {
        void (*release)(void *argument, const struct nebula_error *failure);
        void *argument;
        const unsigned char *is_unprotectable; /* one byte per range, not 0 if a device or running I/O may write to it; NULL: none */
        /*
         * Set both or neither. The caller itself writes a range whose address is NULL, for example by a device. `fill`
         * starts these writes into the image, which is shared memory of image_bytes; range i is at image + offsets[i].
         * `filled` returns when all these bytes are there.
         *
         * `fill` is called inside the save and must make no other call on this session. If the agent dies, `fill` is
         * called again with another image. `filled` is called once for each successful `fill`, before the save returns; if
         * may_overlap is not 0, it may be called later, on a thread of the session. If either fails, the save fails, or
         * later the checkpoint.
         */
        enum nebula_status (*fill)(void *argument, void *image, uint64_t image_bytes, const uint64_t *offsets,
                                   struct nebula_error *ret_error);
        enum nebula_status (*filled)(void *argument, struct nebula_error *ret_error);
        int may_overlap;
};
NEBULA_API enum nebula_status nebula_checkpoint_save_pickle_kept(nebula_checkpoint *checkpoint, const char *name,
        const void *pickle, size_t pickle_size, const struct nebula_range *storages, size_t count,
        const struct nebula_keep *keep, struct nebula_error *ret_error);
/* Saves a file that is the concatenation of the ranges (safetensors or any other format). */
NEBULA_API enum nebula_status nebula_checkpoint_save_bytes(nebula_checkpoint *checkpoint, const char *name,
        const struct nebula_range *ranges, size_t count, struct nebula_error *ret_error);
NEBULA_API enum nebula_status nebula_checkpoint_save_bytes_kept(nebula_checkpoint *checkpoint, const char *name,
        const struct nebula_range *ranges, size_t count, const struct nebula_keep *keep, struct nebula_error *ret_error);
/* Closes this rank's part. Never waits for another rank. While files of this handle are still being copied, it
 * returns at once, and the library reports it to the agent after the last copy. A failure after that is reported to
 * that file's `release`. */
NEBULA_API enum nebula_status nebula_checkpoint_commit(nebula_checkpoint *checkpoint, struct nebula_error *ret_error);
/* Gives this checkpoint up; earlier complete versions stay. `reason` is for people. NEBULA_INVALID: it is complete already. */
NEBULA_API enum nebula_status nebula_checkpoint_fail(nebula_checkpoint *checkpoint, const char *reason,
        struct nebula_error *ret_error);
/* Waits until `state` is reached. Waiting for durable also makes the agent persist the checkpoint. timeout_ms < 0:
 * no limit. NEBULA_TIMEOUT: not reached yet. Any other status is the reason why the checkpoint failed. */
NEBULA_API enum nebula_status nebula_checkpoint_wait(nebula_checkpoint *checkpoint, enum nebula_state state,
        int64_t timeout_ms, struct nebula_error *ret_error);
NEBULA_API enum nebula_status nebula_checkpoint_state(nebula_checkpoint *checkpoint,
        enum nebula_state *ret_state, struct nebula_error *ret_error);
/* Valid until the handle is freed. */
NEBULA_API const char *nebula_checkpoint_tag(const nebula_checkpoint *checkpoint);
NEBULA_API void nebula_checkpoint_free(nebula_checkpoint *checkpoint);

/* Finds the newest complete checkpoint, or the one named `tag`. persist_path NULL: the session's. NEBULA_NOT_FOUND if there is none.
 * On several nodes it first waits up to 5 s to hear that other ranks have committed what this process has: ranks that search after the
 * same saves find the same one. */
NEBULA_API enum nebula_status nebula_checkpoint_latest(nebula_session *session, const char *persist_path,
        nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error);
/* Lists the checkpoints that the search for this one skipped although they may be newer, and the reason, such as
 * damage. Returns 0 if there is no entry `index`. The texts belong to the checkpoint. */
NEBULA_API int nebula_checkpoint_passed_over(const nebula_checkpoint *checkpoint, uint32_t index, const char **ret_tag,
        const char **ret_reason);
NEBULA_API enum nebula_status nebula_checkpoint_find(nebula_session *session, const char *tag,
        const char *persist_path, nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error);
/* Finds only that version of the tag: `sequence` as NEBULA_REPORT_VERSIONS gives it; 0: any. The
 * ranks of several nodes use it to load the version that they agreed on, even if one node has a later version of the
 * tag. */
NEBULA_API enum nebula_status nebula_checkpoint_find_version(nebula_session *session, const char *tag,
        uint64_t sequence, const char *persist_path, nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error);
/* The sequence of a version that a search has found: with its tag it names the version. 0: the program has begun this checkpoint. */
NEBULA_API uint64_t nebula_checkpoint_sequence(const nebula_checkpoint *checkpoint);

/*
 * Events of the background work on checkpoints, for a program's own log, and of the cloud. A watch has a connection of its
 * own, and does not count as a rank. One thread uses it. `at`: seconds since 1970. `seconds`: how long the write took, 0:
 * another node wrote; for NEBULA_EVENT_EVICTION: how long the machine stays. `size`: bytes. `tag`: "" if the event concerns
 * no checkpoint. `text`: the reason; "" for NEBULA_EVENT_DURABLE.
 */
enum nebula_event_kind {
        NEBULA_EVENT_DURABLE = 0, /* a checkpoint of this job is durable */
        NEBULA_EVENT_LOST = 1,    /* a complete checkpoint will not become durable */
        NEBULA_EVENT_STORAGE = 2, /* storage fails; the agent tries again */
        NEBULA_EVENT_LATE = 3,    /* ranks of this node have committed; the ranks or nodes in `text` have not for NEBULA_TAKEOVER_S */
        NEBULA_EVENT_OTHER_AGENT = 4, /* another agent of this user, named in `text`, has checkpoints of the path in memory */
        NEBULA_EVENT_HUNG = 9,        /* the trainers of this node have stopped making steps; `text`: which, and where their stacks are */
        NEBULA_EVENT_ROTTEN = 10,     /* bytes of a checkpoint in memory have changed; it left memory */
        NEBULA_EVENT_STALE = 11,      /* a checkpoint has the values of the one before, though its step is larger */
        NEBULA_EVENT_NOT_FINITE = 12, /* a tensor of a checkpoint has a NaN or an infinite value */
        NEBULA_EVENT_LEFT_MEMORY = 13, /* a durable checkpoint left memory, because the machine was short of memory: it loads from storage */
        NEBULA_EVENT_REMOVED = 7,     /* the agent has removed a checkpoint from storage; `text`: the rules that no longer kept it */
        /* Only of nebula_watch_open_cloud: */
        NEBULA_EVENT_EVICTION = 5, /* the cloud takes this machine; `text`: how it calls that */
        NEBULA_EVENT_METADATA = 6, /* the metadata service has failed 30 times in a row, so no eviction is noticed; the agent goes on asking */
        /* Only of the watch of a reader: */
        NEBULA_EVENT_COMMITTED = 8, /* a checkpoint is complete in this node's memory */
};
struct nebula_event {
        enum nebula_event_kind kind;
        double at, seconds;
        uint64_t size;
        char tag[256], text[512];
};
typedef struct nebula_watch nebula_watch;
/* Watches the session's present job from now on, and starts no agent. The session may be closed before the watch. */
NEBULA_API enum nebula_status nebula_watch_open(nebula_session *session, nebula_watch **ret_watch, struct nebula_error *ret_error);
enum nebula_cloud {
        NEBULA_CLOUD_AZURE = 0, /* Scheduled Events: Preempt, Terminate, Reboot, Redeploy of this machine */
        NEBULA_CLOUD_AWS = 1,   /* the spot instance-action */
        NEBULA_CLOUD_GCE = 2,   /* preempted */
};
/* Watches for the cloud's notice that it takes this machine. While a nebula_watch_next waits, the agent asks the metadata
 * service once a second, for all watches of the node together. Starts the agent if none runs. A notice that is there already
 * is an event, too. After another agent has started, the notice comes again. */
NEBULA_API enum nebula_status nebula_watch_open_cloud(nebula_session *session, enum nebula_cloud cloud, nebula_watch **ret_watch,
        struct nebula_error *ret_error);
/* Returns the next event. NEBULA_TIMEOUT: none within timeout_ms (< 0: no limit). NEBULA_UNAVAILABLE: no agent runs, or
 * it has ended: a later call may reach another one. */
NEBULA_API enum nebula_status nebula_watch_next(nebula_watch *watch, int64_t timeout_ms, struct nebula_event *ret_event,
        struct nebula_error *ret_error);
NEBULA_API void nebula_watch_close(nebula_watch *watch);

/*
 * Publishes a file: once the checkpoint is durable, the file also appears at `path` (absolute), by a link or a verified
 * copy and one rename. name NULL: publishes all files as a directory. They are added to the files in `staging`, which
 * then becomes `path`. The agent publishes even if this process has died. Waiting for durable and flushing wait for
 * publishing too.
 */
NEBULA_API enum nebula_status nebula_checkpoint_publish(nebula_checkpoint *checkpoint, const char *name, const char *path,
        const char *staging, struct nebula_error *ret_error);
/* Removes a published file or directory after all earlier publishes have taken effect. A publish to this path that
 * has not happened yet is cancelled. If a whole directory was published, its checkpoint is removed too.
 * NEBULA_INVALID: the path is, or contains, a job's storage path. */
NEBULA_API enum nebula_status nebula_session_unpublish(nebula_session *session, const char *path,
        struct nebula_error *ret_error);
/* Finds the checkpoint that was published as `path`, even if it has not appeared yet. ret_name: the file; "" for a
 * directory. NEBULA_NOT_FOUND: Nebula has published nothing there; an ordinary file may exist. */
NEBULA_API enum nebula_status nebula_session_find_published(nebula_session *session, const char *path,
        nebula_checkpoint **ret_checkpoint, char ret_name[256], struct nebula_error *ret_error);

/* The verified bytes of a file, valid until nebula_map_free. The memory is private to this process: changing it does
 * not change the checkpoint. */
NEBULA_API enum nebula_status nebula_checkpoint_map(nebula_checkpoint *checkpoint, const char *name,
        nebula_map **ret_map, struct nebula_error *ret_error);
/* nebula_checkpoint_map, but bytes that only storage has are not read yet and are zero until then. nebula_map_fetch
 * reads a range into the map and verifies it. nebula_map_read reads ranges, which the program must not have changed in the
 * map, to other addresses, without a copy in the map. One call at a time. */
NEBULA_API enum nebula_status nebula_checkpoint_map_lazily(nebula_checkpoint *checkpoint, const char *name,
        nebula_map **ret_map, struct nebula_error *ret_error);
/* Reads `size` bytes at `offset` of the file. NEBULA_CORRUPT names file and offset. */
NEBULA_API enum nebula_status nebula_map_fetch(nebula_map *map, uint64_t offset, uint64_t size,
        struct nebula_error *ret_error);
/* Reads the directory and the header of each record of a torch file, many at a time: a reader of the format needs
 * them before any values. For other files it does nothing. */
NEBULA_API enum nebula_status nebula_map_fetch_headers(nebula_map *map, struct nebula_error *ret_error);
/* Reads the directory of a torch file, and its headers only if the places of its records do not follow from the directory.
 * *ret_has_headers: 0 if it has left the headers out. Then nebula_map_tensor needs nebula_map_fetch_headers before. */
NEBULA_API enum nebula_status nebula_map_fetch_directory(nebula_map *map, int *ret_has_headers, struct nebula_error *ret_error);
/* `size` bytes at `offset` of the file, and their target address. */
struct nebula_part {
        uint64_t offset, size;
        void *data;
};
/* nebula_map_fetch for several ranges, which are read at the same time. Targets are not used. */
NEBULA_API enum nebula_status nebula_map_fetch_parts(nebula_map *map, const struct nebula_part *parts, size_t count,
        struct nebula_error *ret_error);
/* Parts must be sorted by offset and must not overlap. After a failure the contents of the targets are undefined. */
NEBULA_API enum nebula_status nebula_map_read(nebula_map *map, const struct nebula_part *parts, size_t count,
        struct nebula_error *ret_error);
/* The bytes of the whole file, and their number. */
NEBULA_API const void *nebula_map_data(const nebula_map *map);
NEBULA_API uint64_t nebula_map_size(const nebula_map *map);
/* Finds a tensor in a file of nebula_checkpoint_save_tensors or torch.save. Of nested dicts and lists the keys on the path to it are joined
 * with '.': "model.0.weight". ret_tensor->name is `name`; its data lie in the map. NEBULA_NOT_FOUND: no tensor of that name. NEBULA_INVALID:
 * another kind of file, two tensors of that name, or one that is not contiguous or that struct nebula_tensor cannot describe. */
NEBULA_API enum nebula_status nebula_map_tensor(const nebula_map *map, const char *name,
        struct nebula_tensor *ret_tensor, struct nebula_error *ret_error);
/* For a program that keeps the map and will write to it. Bytes from the memory tier are mapped, and the first write to a page copies the
 * page. From this call on a thread copies the pages ahead of the writes, as long as twice as much memory is free as they take. */
NEBULA_API void nebula_map_own(nebula_map *map);
NEBULA_API void nebula_map_free(nebula_map *map);

/* Reports of the agent, as JSON; the caller frees the text with nebula_text_free. */
enum nebula_report {
        NEBULA_REPORT_VERSIONS = 0, /* versions in memory and in storage (see docs/formats.md) */
        NEBULA_REPORT_STATUS = 1,   /* the agent, its sessions, its queue */
        NEBULA_REPORT_HISTORY = 2,  /* one object per version, as in checkpointHistories.csv */
        NEBULA_REPORT_MEMORY = 3,   /* NEBULA_REPORT_VERSIONS without those that are only in storage: the agent does not read storage for it */
        NEBULA_REPORT_PINS = 4,     /* the pinned tags, with reasons and times */
};
NEBULA_API enum nebula_status nebula_session_report(nebula_session *session, enum nebula_report report,
        const char *persist_path, char **ret_text, struct nebula_error *ret_error);
/* One checkpoint as JSON: tag, step, state, error, sequence, source, files. */
NEBULA_API enum nebula_status nebula_checkpoint_report(nebula_checkpoint *checkpoint,
        char **ret_text, struct nebula_error *ret_error);
NEBULA_API void nebula_text_free(char *text);

/* Constant texts such as "no_space" and "durable"; "unknown" for a number that this version does not know. */
NEBULA_API const char *nebula_status_name(enum nebula_status status);
NEBULA_API const char *nebula_state_name(enum nebula_state state);

#ifdef __cplusplus
}
#endif
#endif
