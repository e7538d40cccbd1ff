/*
 * nebula.h - the public C interface of Nebula, the checkpoint engine.
 *
 * A program that computes for days saves its state now and then. Nebula takes
 * a copy of that state in memory, returns, and writes it to storage in the
 * background; after a crash the newest complete version comes back from the
 * fastest place that still has it.
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
 * Ownership: every handle that a call returns belongs to the caller, who frees
 * it with the matching _free or _close; NULL is fine there. Strings and arrays
 * given to a call are read during the call and not kept, but for the ranges of
 * the calls that end in _kept. Freeing a checkpoint handle does not
 * touch the checkpoint.
 *
 * Values: when a save call returns, the file holds the values of that moment,
 * whatever the program does with its memory next.
 *
 * Threads: every call may be made from any thread; calls on one session are
 * serialised inside, except waits, which do not hold others up.
 *
 * Errors: every call that can fail returns a status and, when `ret_error` is
 * not NULL, describes the failure there in one sentence. Outputs are last,
 * named ret_..., and written only on success. The library never prints or
 * exits, and raises no signal but those that it has held up (see Ends).
 *
 * Ends: copies that go on behind a save that has returned (the calls that end
 * in _kept) are waited for by exit and quick_exit, for 300 s at most, and,
 * for 30 s, behind a signal that would end the process because its action is
 * the default: the program runs on until they are done. abort and a fault hold
 * up their thread likewise. _exit and exec ask nobody: call
 * nebula_session_settle before. SIGKILL loses what is not copied yet. In a
 * process that was forked and has called no exec since every save returns
 * when its bytes are copied.
 *
 * Signals: the first save that is large enough to return before its values are
 * copied (capture "auto" or "cow"), whether it does or not, installs a handler
 * for SIGSEGV and SIGBUS. It ends a copy whose source is freed meanwhile, and
 * leaves every other fault to the handler that was there before, or to the
 * default. See docs/capture.md, No crash. With the first copy that goes on
 * behind its save come handlers for SIGABRT, SIGFPE, SIGILL and SIGSYS, which
 * pass everything on once the copies are done. Other signals that end a
 * process by default are handled only while something is being copied, and
 * only those whose action is the default then.
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

#define NEBULA_VERSION "0.1.0"

/* What failed, grouped by what is lost. */
enum nebula_status {
        NEBULA_OK = 0,
        /* Nothing: try again, or wait longer. */
        NEBULA_TIMEOUT = 10,
        NEBULA_BUSY = 11,
        /* This file or path. */
        NEBULA_NOT_FOUND = 20,
        NEBULA_STORAGE = 21,
        NEBULA_NO_SPACE = 22,
        NEBULA_CORRUPT = 23,
        /* This checkpoint. */
        NEBULA_FAILED = 30,
        NEBULA_NO_MEMORY = 31,
        /* The session: no agent answers, or an invariant broke. */
        NEBULA_UNAVAILABLE = 40,
        NEBULA_INTERNAL = 41,
        /* The caller. */
        NEBULA_INVALID = 50,
};

/* One failure, owned by the caller. `sys_errno` and `http_status` are 0 when they play no part. */
struct nebula_error {
        enum nebula_status status;
        int sys_errno;
        int http_status;
        char message[512];
};

/* The life of a checkpoint; each state is a promise (see docs/durability.md). */
enum nebula_state {
        NEBULA_STATE_CAPTURING = 0, /* values are fixed, copying goes on */
        NEBULA_STATE_CAPTURED = 1,  /* this rank's files survive the death of the trainer */
        NEBULA_STATE_COMMITTED = 2, /* every rank has captured: can be loaded */
        NEBULA_STATE_REPLICATED = 3,/* a copy is in another node's memory */
        NEBULA_STATE_DURABLE = 4,   /* survives power loss */
        NEBULA_STATE_FAILED = 5,    /* see the reason; older checkpoints are untouched */
};

/* What to do when the memory tier is full. */
enum nebula_on_full {
        NEBULA_ON_FULL_WAIT = 0,   /* wait until something durable can be freed */
        NEBULA_ON_FULL_STREAM = 1, /* write straight to storage */
        NEBULA_ON_FULL_SKIP = 2,   /* fail this checkpoint, say so, go on */
};

struct nebula_options {
        size_t struct_size;            /* set by nebula_options_init */
        const char *persist_path;      /* absolute path, or NULL: memory tier only; this, job and run are UTF-8 */
        const char *job;               /* NULL: "" ; keeps two jobs on one path apart */
        const char *output_dir;        /* folder for checkpointHistories.csv; NULL: none is written */
        const char *run;               /* one incarnation of the job, same on all ranks; NULL: "" */
        double persist_interval_s;     /* 0: persist every version */
        uint32_t retention_count;      /* versions kept in memory, >= 1 */
        uint32_t rank, world;          /* default 0 of 1 */
        uint32_t local_rank, local_world;
        uint64_t memory_bytes;         /* budget of the node's memory tier; 0: a safe share of what is free */
        enum nebula_on_full on_full;
        uint32_t keep_last;            /* storage retention: newest versions kept; 0: all */
        uint64_t keep_every;           /* storage retention: also every version whose step is a multiple; 0: none */
        uint32_t replica_count;        /* copies in other nodes' memory, each on another node; 8 at most */
        const char *agent_path;        /* the `nebula` executable; NULL: found by itself */
};

typedef struct nebula_session nebula_session;
typedef struct nebula_checkpoint nebula_checkpoint;
typedef struct nebula_map nebula_map;

/* How many files complete a checkpoint: a positive number over all ranks, or one of these. */
#define NEBULA_FILES_OPEN (-1)      /* a rank's part closes at its commit, at its first save to the next tag, flush or exit */
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

/* A piece of memory that becomes a storage of a torch file. */
struct nebula_range {
        const void *data;
        uint64_t size; /* bytes */
};

/* Rank 0 of 1, two versions in memory, every version persisted, nothing removed; no storage path. NULL: nothing. */
NEBULA_API void nebula_options_init(struct nebula_options *options);

/* Connects to this node's agent, starting it if there is none. */
NEBULA_API enum nebula_status nebula_session_open(const struct nebula_options *options,
        nebula_session **ret_session, struct nebula_error *ret_error);
/* New settings for everything that follows; equal settings change nothing. NEBULA_INVALID: one that cannot be meant,
 * or another live process is this rank of this job. Another path or job: waits for running copies first, and what was begun
 * there and not committed is closed as at the end of the session. */
NEBULA_API enum nebula_status nebula_session_configure(nebula_session *session,
        const struct nebula_options *options, struct nebula_error *ret_error);
/* Waits for running copies and disconnects. The agent finishes the rest. Called in a `release` (see nebula_keep) on a thread of the
 * session it returns at once, and the same happens when the last copy has ended. */
NEBULA_API void nebula_session_close(nebula_session *session);
/* Every save that has returned is complete in memory, or has failed, on return. timeout_ms < 0: no limit. */
NEBULA_API enum nebula_status nebula_session_settle(nebula_session *session, int64_t timeout_ms,
        struct nebula_error *ret_error);
/* `unmapping` is called before an image that a `fill` may have seen leaves this process's memory, on any thread that makes
 * a call on the session: what was registered for it with a device is to be taken back. No call on this session may be made there. */
NEBULA_API void nebula_session_watch_images(nebula_session *session, void (*unmapping)(void *argument, void *image),
        void *argument);
/* Everything committed (tag NULL) or one tag is durable on return. What this rank has committed, and other ranks have not, is waited
 * for; without a tag until nothing has come for NEBULA_TAKEOVER_S (docs/cli.md): then NEBULA_TIMEOUT names the ranks that are missing.
 * timeout_ms < 0: no other limit but NEBULA_PERSIST_GIVE_UP. */
NEBULA_API enum nebula_status nebula_session_flush(nebula_session *session, const char *tag,
        int64_t timeout_ms, struct nebula_error *ret_error);

/* Attaches to `tag`, or starts it. A tag that is already whole starts a new generation at its first save. The agent hears of it
 * with the first save or commit; of NEBULA_FILES_OPEN, where there are more ranks, at once: their commits wait for this one. */
NEBULA_API enum nebula_status nebula_checkpoint_begin(nebula_session *session, const char *tag,
        int64_t file_count, nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error);
/* A file that torch.load reads as a dict of tensors. */
NEBULA_API enum nebula_status nebula_checkpoint_save_tensors(nebula_checkpoint *checkpoint, const char *name,
        const struct nebula_tensor *tensors, size_t count, struct nebula_error *ret_error);
/* A torch file from its finished pickle and its storages, in the order of their keys "0", "1", ... */
NEBULA_API enum nebula_status nebula_checkpoint_save_pickle(nebula_checkpoint *checkpoint, const char *name,
        const void *pickle, size_t pickle_size, const struct nebula_range *storages, size_t count,
        struct nebula_error *ret_error);
/*
 * The same for memory that stays allocated until `release` is called: then the bytes may follow after the save has
 * returned, by copy-on-write (docs/capture.md; NEBULA_CAPTURE=auto|copy|cow). The file has the values of the call in
 * any case; the program may change the memory, but not unmap, move or empty it: that fails the checkpoint.
 * `release` is called once for each save that succeeds, perhaps before it returns, on any thread, with no lock of
 * the library held; `failure` is NULL, or says why the file will never be whole, and its checkpoint has failed.
 * It may make any call; one that would wait there for later copies, of which it is called by the thread that makes
 * them, says NEBULA_BUSY instead: settle, flush, report, a search, a map.
 */
struct nebula_keep {
        void (*release)(void *argument, const struct nebula_error *failure);
        void *argument;
        const unsigned char *is_unprotectable; /* one per range: a device or running I/O may write to it; NULL: none */
        /*
         * Both or neither. A range without an address is written by the caller, say by a device: `fill` begins that in
         * the image, which is shared memory of image_bytes, range i at image + offsets[i]; `filled` returns when every
         * such byte is there. `fill` is called inside the save, where no other call on this session may be made (and again
         * when the agent died: with another image); `filled` once for each `fill` that succeeded: before the save
         * returns, or, if may_overlap is not 0, perhaps later, on a thread of the session. When either fails, so does
         * the save, or later the checkpoint.
         */
        enum nebula_status (*fill)(void *argument, void *image, uint64_t image_bytes, const uint64_t *offsets,
                                   struct nebula_error *ret_error);
        enum nebula_status (*filled)(void *argument, struct nebula_error *ret_error);
        int may_overlap;
};
NEBULA_API enum nebula_status nebula_checkpoint_save_pickle_kept(nebula_checkpoint *checkpoint, const char *name,
        const void *pickle, size_t pickle_size, const struct nebula_range *storages, size_t count,
        const struct nebula_keep *keep, struct nebula_error *ret_error);
/* A file that is the concatenation of the ranges (safetensors, any other format). */
NEBULA_API enum nebula_status nebula_checkpoint_save_bytes(nebula_checkpoint *checkpoint, const char *name,
        const struct nebula_range *ranges, size_t count, struct nebula_error *ret_error);
NEBULA_API enum nebula_status nebula_checkpoint_save_bytes_kept(nebula_checkpoint *checkpoint, const char *name,
        const struct nebula_range *ranges, size_t count, const struct nebula_keep *keep, struct nebula_error *ret_error);
/* Closes this rank's part. Never waits for another rank. While files of this handle are still being copied it returns at once, and the
 * agent hears of it with the last: what then fails is told to that one's `release`. */
NEBULA_API enum nebula_status nebula_checkpoint_commit(nebula_checkpoint *checkpoint, struct nebula_error *ret_error);
/* Gives this checkpoint up; what was whole before stays. `reason`: for people. NEBULA_INVALID: it is complete already. */
NEBULA_API enum nebula_status nebula_checkpoint_fail(nebula_checkpoint *checkpoint, const char *reason,
        struct nebula_error *ret_error);
/* Returns when `state` is reached. Waiting for durable asks for it. timeout_ms < 0: no limit. NEBULA_TIMEOUT: not yet;
 * otherwise what made the checkpoint fail. */
NEBULA_API enum nebula_status nebula_checkpoint_wait(nebula_checkpoint *checkpoint, enum nebula_state state,
        int64_t timeout_ms, struct nebula_error *ret_error);
NEBULA_API enum nebula_status nebula_checkpoint_state(nebula_checkpoint *checkpoint,
        enum nebula_state *ret_state, struct nebula_error *ret_error);
/* Valid until the handle is freed. */
NEBULA_API const char *nebula_checkpoint_tag(const nebula_checkpoint *checkpoint);
NEBULA_API void nebula_checkpoint_free(nebula_checkpoint *checkpoint);

/* The newest complete checkpoint, or the one named `tag`; persist_path NULL: the session's.
 * NEBULA_NOT_FOUND when there is none. */
NEBULA_API enum nebula_status nebula_checkpoint_latest(nebula_session *session, const char *persist_path,
        nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error);
/* What the search that has found this checkpoint has passed over, though it may be newer, and why: a damaged one, say. 0: no more.
 * The texts belong to the checkpoint. */
NEBULA_API int nebula_checkpoint_passed_over(const nebula_checkpoint *checkpoint, uint32_t index, const char **ret_tag,
        const char **ret_reason);
NEBULA_API enum nebula_status nebula_checkpoint_find(nebula_session *session, const char *tag,
        const char *persist_path, nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error);
/* That version of the tag and no other: `generation` and `sequence` as NEBULA_REPORT_VERSIONS gives them, 0: any. So
 * the ranks of several nodes load what they agreed on, also when one of them has a later version of the tag. */
NEBULA_API enum nebula_status nebula_checkpoint_find_version(nebula_session *session, const char *tag, uint64_t generation,
        uint64_t sequence, const char *persist_path, nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error);

/*
 * What becomes of checkpoints in the background, for a program's own log. A watch has a connection of its own, counts as no rank,
 * asks for nothing and starts no agent; one thread uses it. `at`: seconds since 1970. `seconds`: what writing took; 0: another
 * node wrote. `size`: bytes. `tag`: "" for NEBULA_EVENT_STORAGE. `text`: why, "" for NEBULA_EVENT_DURABLE.
 */
enum nebula_event_kind {
        NEBULA_EVENT_DURABLE = 0, /* a checkpoint of this job is durable */
        NEBULA_EVENT_LOST = 1,    /* one was complete, and will not become durable */
        NEBULA_EVENT_STORAGE = 2, /* storage fails; it is tried again */
        NEBULA_EVENT_LATE = 3,    /* ranks of this node have committed, and what `text` names has not come for NEBULA_TAKEOVER_S */
        NEBULA_EVENT_OTHER_AGENT = 4, /* another agent of this user has checkpoints of the path in memory; `text`: which */
};
struct nebula_event {
        enum nebula_event_kind kind;
        double at, seconds;
        uint64_t size;
        char tag[256], text[512];
};
typedef struct nebula_watch nebula_watch;
/* Of the session's job, as it is called now; what happens from now on. The session may end before the watch. */
NEBULA_API enum nebula_status nebula_watch_open(nebula_session *session, nebula_watch **ret_watch, struct nebula_error *ret_error);
/* The next event. NEBULA_TIMEOUT: none within timeout_ms (< 0: no limit); NEBULA_UNAVAILABLE: no agent runs. */
NEBULA_API enum nebula_status nebula_watch_next(nebula_watch *watch, int64_t timeout_ms, struct nebula_event *ret_event,
        struct nebula_error *ret_error);
NEBULA_API void nebula_watch_close(nebula_watch *watch);

/*
 * A file also appears at `path` (absolute), by link or verified copy and one rename, once the checkpoint is durable; name
 * NULL: all files, as a directory: they join what lies in `staging`, which then becomes `path`. The agent does it, so
 * it happens also when this process has died. Waiting for durable and flush include it.
 */
NEBULA_API enum nebula_status nebula_checkpoint_publish(nebula_checkpoint *checkpoint, const char *name, const char *path,
        const char *staging, struct nebula_error *ret_error);
/* The file or directory goes once everything published before has appeared; what was to appear there does not. A
 * directory that was published takes its checkpoint with it. NEBULA_INVALID: it is, or holds, a job's storage path. */
NEBULA_API enum nebula_status nebula_session_unpublish(nebula_session *session, const char *path,
        struct nebula_error *ret_error);
/* What was published as `path`, whether it has appeared already or not; ret_name: the file, "" for a directory.
 * NEBULA_NOT_FOUND: nothing that Nebula knows of; a plain file may be there. */
NEBULA_API enum nebula_status nebula_session_find_published(nebula_session *session, const char *path,
        nebula_checkpoint **ret_checkpoint, char ret_name[256], struct nebula_error *ret_error);

/* The verified bytes of a file, valid until nebula_map_free. The memory is this process's own: whatever is done to it
 * changes no checkpoint. */
NEBULA_API enum nebula_status nebula_checkpoint_map(nebula_checkpoint *checkpoint, const char *name,
        nebula_map **ret_map, struct nebula_error *ret_error);
/* The same, but what only storage has is not read yet, and zeros until then: nebula_map_fetch brings a range, verified, and
 * nebula_map_read brings ranges to where they belong, with no copy of them in the map. One call at a time. */
NEBULA_API enum nebula_status nebula_checkpoint_map_lazily(nebula_checkpoint *checkpoint, const char *name,
        nebula_map **ret_map, struct nebula_error *ret_error);
/* `size` bytes from `offset` of the file on, both in bytes. NEBULA_CORRUPT names file and offset. */
NEBULA_API enum nebula_status nebula_map_fetch(nebula_map *map, uint64_t offset, uint64_t size,
        struct nebula_error *ret_error);
/* Brings what a reader of torch's file format looks at before any values: the directory and each record's header, many reads at a time. Of what
 * is no such file, nothing. */
NEBULA_API enum nebula_status nebula_map_fetch_headers(nebula_map *map, struct nebula_error *ret_error);
/* `size` bytes from `offset` of the file on, and where they go. */
struct nebula_part {
        uint64_t offset, size;
        void *data;
};
/* Parts come in the order of their offsets and do not overlap. After a failure their contents are undefined. */
NEBULA_API enum nebula_status nebula_map_read(nebula_map *map, const struct nebula_part *parts, size_t count,
        struct nebula_error *ret_error);
/* The whole file, and its bytes. */
NEBULA_API const void *nebula_map_data(const nebula_map *map);
NEBULA_API uint64_t nebula_map_size(const nebula_map *map);
/* A tensor of a file that nebula_checkpoint_save_tensors wrote; its name is `name`, its data lie in the map. NEBULA_NOT_FOUND:
 * no tensor of that name; NEBULA_INVALID: a file of another kind. */
NEBULA_API enum nebula_status nebula_map_tensor(const nebula_map *map, const char *name,
        struct nebula_tensor *ret_tensor, struct nebula_error *ret_error);
NEBULA_API void nebula_map_free(nebula_map *map);

/* What the agent knows, as JSON text; the caller frees it with nebula_text_free. */
enum nebula_report {
        NEBULA_REPORT_VERSIONS = 0, /* versions in memory and in storage (see docs/formats.md) */
        NEBULA_REPORT_STATUS = 1,   /* the agent, its sessions, its queue */
        NEBULA_REPORT_HISTORY = 2,  /* one object per version: what checkpointHistories.csv holds */
};
NEBULA_API enum nebula_status nebula_session_report(nebula_session *session, enum nebula_report report,
        const char *persist_path, char **ret_text, struct nebula_error *ret_error);
/* One checkpoint as JSON: tag, step, state, error, generation, source, files. */
NEBULA_API enum nebula_status nebula_checkpoint_report(nebula_checkpoint *checkpoint,
        char **ret_text, struct nebula_error *ret_error);
NEBULA_API void nebula_text_free(char *text);

/* "no_space", "durable": constant text, "unknown" for a number that this version does not know. */
NEBULA_API const char *nebula_status_name(enum nebula_status status);
NEBULA_API const char *nebula_state_name(enum nebula_state state);

#ifdef __cplusplus
}
#endif
#endif
