/*
 * client.h - internals of the client: sessions, their connections, the handles of
 * checkpoints.
 *
 *     options.c     checks the caller's options and puts them into a hello
 *     start.c       finds the agent's program and starts it
 *     wire.c        one connection: finds or starts the agent, greets it, sends requests
 *     session.c     the session, its settings, requests about all checkpoints, forks
 *     call.c        a request, repeated at the next agent if its agent dies
 *     checkpoint.c  handles: begin, commit, wait
 *     find.c        handles of complete checkpoints
 *     save.c        layout, image, capture
 *     copies.c      captures that go on after save returned
 *     prepare.c     hints files
 *     spares.c      maps the images that were made for them
 *     map.c         loads files
 *     watch.c       events of the background work
 *     stored.c      files in storage that this process reads itself
 *     partial.c      files in storage of which the agent reads the parts that this process needs
 *     publish.c     files at paths that the program chose
 *     pulse.c       steps and phases, which the agent reads
 *
 * Every request goes through session_call, on the session's own connection under
 * request_lock. A request that may wait for long goes through session_call_alone:
 * on a connection of its own, which is kept for the next such request. If the
 * agent is gone, both find or start another, find the checkpoint there by its
 * tag, and send the request again. If two agents die during one request, the
 * request fails.
 *
 * Threads: any thread may use a handle. request_lock is held while the agent
 * works on a request and while values are copied. settings_lock, which also
 * guards the kept connection, copies_lock and spares_lock are held for a few
 * instructions only. Order: request_lock, then settings_lock; copies_lock and
 * spares_lock may be taken while any other is held.
 */
#ifndef NB_CLIENT_CLIENT_H
#define NB_CLIENT_CLIENT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/vars.h"
#include "capture/cow.h"
#include "ipc/ipc.h"
#include "os/lock.h"

/* An agent answers within this time unless the request asks it to wait. */
#define CLIENT_ANSWER_MS 60000
/* After this time without an answer, the client writes a line into the agent's log. */
#define CLIENT_SILENT_MS 5000
/* The agent decides how long a save waits for a full memory tier; this is the client's own limit. */
#define CLIENT_IMAGE_MS 900000
/* How long an agent may exceed the time that a request allows it to wait. */
#define CLIENT_GRACE_MS 10000
/* Files of one process that are copied in the background: more would only compete for the same memory bus. One more
 * save waits for the oldest copy. */
#define CLIENT_COPY_MAX 32u
/* NEBULA_CAPTURE=auto: smaller ranges are copied faster than a background copy is started and ended. */
#define CLIENT_COW_BYTES (4u << 20)

/* $NEBULA_CAPTURE. */
enum client_capture {
        CLIENT_CAPTURE_AUTO = 0, /* copy-on-write for large ranges in huge pages if the machine allows it; else a copy */
        CLIENT_CAPTURE_COPY,
        CLIENT_CAPTURE_COW, /* copy-on-write; an error if the machine does not allow it */
};

/* How to reach the agent, and the settings of the session. */
struct client_settings {
        struct ipc_hello hello;
        struct vars *variables;        /* of clouds, for the agent; NULL: none */
        struct ipc_place place;
        char agent_path[IPC_PATH_MAX]; /* "": search for it */
        bool is_idle;                  /* if no agent runs there is nothing to ask, so start none */
        enum client_capture capture;
};

struct client_wire {
        int fd; /* -1: not connected */
        uint64_t device, inode; /* of the socket: the program may close the number and use it again */
        unsigned fork_count; /* fork_count when it was opened */
        uint64_t agent_nonce;
        uint32_t agent_pid;
        const char *log;        /* the agent's log, for a line about its silence; NULL: written already, or no log */
        struct ipc_frame frame; /* the last answer */
};

/* A file that is still being copied into its image. */
struct client_copy {
        struct client_copy *next;
        struct nebula_checkpoint *checkpoint; /* the copy holds a reference */
        struct cow_capture *capture;          /* NULL: the copy is complete, and not reported to the agent */
        const void *image;                    /* stays mapped while the copy is in the list */
        uint64_t image_id, size, agent_nonce; /* agent_nonce: of the agent that lent the image */
        uint64_t copied_size;                 /* the progress that was reported to the agent */
        /* is_reported: the agent knows that the file is complete. brings_commit: also that it was the last. Guarded by copies_lock. */
        bool is_reported, brings_commit;
        bool is_replaced;                     /* the file is saved again; guarded by copies_lock */
        int64_t added_ns;
        enum ipc_format format;
        char name[IPC_NAME_MAX];
        struct ipc_captured captured; /* the message about the copy, as far as it is known */
        struct capture_part *large;   /* memory for which to ask for huge pages after the copy; or NULL */
        size_t large_count;
        void (*release)(void *argument, const struct nebula_error *failure);
        /* Waits for the caller's own writes; NULL: there are none. */
        enum nebula_status (*filled)(void *argument, struct nebula_error *ret_error);
        void *argument;
        struct nebula_error failure; /* status NEBULA_OK: the copy is complete */
};

struct client_copies {
        struct lock copies_lock; /* guards all members below */
        pthread_cond_t moved;
        struct client_copy *first; /* the oldest copy; one thread works on it */
        struct client_copy *released; /* copies that left the first list: the other thread runs their `release` in order */
        size_t count; /* length of both lists */
        pthread_t maker, releaser;
        bool has_maker, has_releaser, is_ending;
        bool closes_session; /* the release thread closes the session when it ends */
};

/* The thread that maps spare images (spares.c). */
struct client_spares {
        struct lock spares_lock; /* guards all members below */
        pthread_cond_t moved;
        pthread_t thread;
        uint64_t image_id; /* the image that the thread works on; 0: none */
        bool has_thread;   /* it must be joined */
        bool is_running;   /* it has not decided to end */
        bool is_awaited;   /* a save waits for the image on which the thread works */
        bool is_hinted;  /* a file was hinted while the thread ran */
        bool is_ending;
        bool closes_session; /* the thread closes the session when it ends */
};

/* The flushes that have succeeded: if the agent ends later, nothing that they cover is lost. */
struct client_flushed {
        uint64_t begun;                      /* number of flushes begun */
        uint64_t all, all_nonce;             /* the last flush of everything that succeeded, and its agent */
        uint64_t one, one_nonce;             /* the same for `tag` alone */
        char tag[IPC_NAME_MAX];
};

struct nebula_session {
        struct nebula_session *next; /* next session of this process */

        struct lock settings_lock; /* guards settings, idle_wire and flushed */
        struct client_flushed flushed;
        struct client_settings settings;
        struct client_wire idle_wire;  /* the last connection of session_call_alone, for its next call */

        struct lock request_lock; /* guards all members below and orders the requests */
        struct client_wire wire;
        struct capture_pool *pool;        /* NULL until the first image */
        void (*unmapping)(void *argument, void *image); /* called before an image is unmapped; or NULL */
        void *unmapping_argument;
        void (*mapped)(void *argument, void *image, uint64_t capacity_bytes); /* called after a spare image was mapped; or NULL */
        void *mapped_argument;
        int (*is_interrupted)(void *argument); /* asked while a save waits for memory; or NULL */
        void *interrupted_argument;
        bool is_broken;                   /* an invariant failed: all further calls return `failure` */
        struct nebula_error failure;      /* the failure of the last attempt to connect */
        int64_t retry_at_ns, retry_pause_ms; /* until then, calls return `failure` at once instead of waiting for another attempt */
        bool was_locked;                  /* request_lock was taken by before_fork */
        /* A file that is complete in its image and not reported to the agent: that goes with its commit
         * or before the next request, whichever comes first. NULL: none. Read without the lock only to see whether
         * there is one. */
        struct client_copy *_Atomic unsent;

        struct client_copies copies;
        struct client_spares spares;
};

struct nebula_checkpoint {
        struct nebula_session *session;
        /* version_id at the agent with this nonce. Writers set the id first; readers read the nonce first */
        _Atomic uint64_t version_id, agent_nonce;
        /* The same for a version with files that are saved and not committed. 0: none, or a version with a file
         * count, which is never complete too early */
        _Atomic uint64_t saved_version_id, saved_agent_nonce;
        _Atomic uint64_t saved_flush;    /* flushes.begun at the last save */
        _Atomic uint64_t begun_writing;  /* its number among the writings of the tag by this run, from the agent */
        /* The same once the version is committed, or may be because it has a file count. Requests then only
         * look it up and begin nothing. 0: not since the last save */
        _Atomic uint64_t done_writing;
        atomic_bool is_torn;             /* files were lost: an agent ended, and the next one does not know them */
        int64_t file_count;
        atomic_bool is_found;            /* a search found it; this session did not begin it */
        atomic_bool is_given_up;         /* nebula_checkpoint_fail was called since the last save */
        atomic_bool is_uncommitted;      /* a file was saved since the last commit */
        bool commit_is_due;              /* the last copy in progress sends the commit; guarded by copies_lock */
        /* Open-ended and of several ranks, whose commits wait for all ranks that have begun: the client reports them to the agent at once. */
        bool is_open_ended;
        _Atomic uint32_t user_count;     /* the caller, and each copy in progress */
        char persist_path[IPC_PATH_MAX]; /* the storage path where it was found; "": the session's */
        uint64_t sequence;               /* of the version that was found */
        struct ipc_passed *passed;       /* checkpoints that the search skipped; NULL: none */
        uint32_t passed_count;
        char tag[IPC_NAME_MAX];
};

/* options.c */
enum nebula_status client_settings_read(const struct nebula_options *options, struct client_settings *settings,
                                        struct nebula_error *error);
/* Copies `value` (NULL: "") into an array of `size` bytes. If it is too long, the error names `what`. */
enum nebula_status client_text(char *to, size_t size, const char *value, const char *what, struct nebula_error *error);
/* Converts a storage path to the agent's form: absolute or a URL, and UTF-8. NULL: "". */
enum nebula_status client_persist_path(char to[IPC_PATH_MAX], const char *value, struct nebula_error *error);

/* start.c */
/* Runs `nebula agent --daemon`, which returns when the agent listens. *ret_final: another attempt cannot succeed. */
enum nebula_status client_start_agent(const struct client_settings *settings, bool *ret_final,
                                      struct nebula_error *error);

/* wire.c */
/* The payload of HELLO and CONFIGURE. The caller passes it to client_forget_greeting: it has secrets. */
enum nebula_status client_make_greeting(const struct ipc_hello *hello, const struct vars *variables, char **ret_greeting, size_t *ret_size,
                                        struct nebula_error *error);
void client_forget_greeting(char *greeting, size_t size);
enum nebula_status client_wire_open(struct client_wire *wire, const struct client_settings *settings,
                                    struct nebula_error *error);
/* Sends a request and receives the answer into wire->frame. If the connection can no longer be used, closes it and sets *ret_broken. */
enum nebula_status client_wire_call(struct client_wire *wire, enum ipc_type type, const void *request, size_t size,
                                    int64_t timeout_ms, bool *ret_broken, struct nebula_error *error);
/* The two halves of client_wire_call, for a caller that works in between. */
enum nebula_status client_wire_send(struct client_wire *wire, enum ipc_type type, const void *request, size_t size, bool *ret_broken,
                                    struct nebula_error *error);
/* Whether `is_interrupted` is true before an answer comes. Then the connection is closed, and the agent gives up the request. */
bool client_wire_is_interrupted(struct client_wire *wire, int64_t timeout_ms, int (*is_interrupted)(void *argument), void *argument);
enum nebula_status client_wire_await(struct client_wire *wire, enum ipc_type type, int64_t timeout_ms, bool *ret_broken,
                                     struct nebula_error *error);
void client_wire_close(struct client_wire *wire);
/* False: the program has closed the number, or a fork has, and it may belong to another file now. */
bool client_wire_is_open(const struct client_wire *wire);
/* Call these around a fork: the child closes the connections of its parent. */
void client_wires_before_fork(void);
void client_wires_after_fork(bool is_child);

/* call.c */
struct client_call {
        enum ipc_type type;
        void *request;
        size_t size;
        uint64_t *version_id;                /* a field of the request; set to the id of `checkpoint` before each send */
        struct nebula_checkpoint *checkpoint; /* NULL: the request is not about a checkpoint */
        bool begins;                         /* the request begins the checkpoint itself if the agent does not know it */
        int64_t timeout_ms;                  /* < 0: no timeout */
        void (*meanwhile)(void *argument);   /* called after each send, while the agent works on the request; or NULL */
        void *argument;
};
/* Connects the session's wire if it is not connected. The caller holds request_lock. */
enum nebula_status session_connect(struct nebula_session *session, struct nebula_error *error);
enum client_capture session_capture_setting(struct nebula_session *session);
/* How long to wait for the answer to a request that may wait for timeout_ms. */
int64_t client_patience_ms(int64_t timeout_ms);
/* Sends a request on the session's wire. The caller holds request_lock, and finds the answer in session->wire.frame. */
enum nebula_status session_call(struct nebula_session *session, const struct client_call *call,
                                struct nebula_error *error);
/* Takes over `copy`, which was allocated by malloc and is complete. The client reports it to the agent later. Holds the checkpoint.
 * The caller holds request_lock here and in the next two; no other copy may be unsent. */
void session_report_later(struct nebula_session *session, struct client_copy *copy);
/* Tells the agent of the unsent copy, if there is one. `commits`: also that it was the last of its checkpoint.
 * NEBULA_NOT_FOUND: the agent does not know the image. If a new agent has replaced the one that lent the image,
 * copies.c saves the file again there. */
enum nebula_status session_report_unsent(struct nebula_session *session, bool commits, struct nebula_error *error);
void session_forget_unsent(struct nebula_session *session);
/* session_report_unsent for a caller without request_lock, before it asks on another connection. */
void session_report_all(struct nebula_session *session);
/* Sends a request on `wire`, which the caller has set to { .fd = -1 } and releases with session_wire_done. The caller holds no lock. */
enum nebula_status session_call_alone(struct nebula_session *session, struct client_wire *wire,
                                      const struct client_call *call, struct nebula_error *error);
/* Keeps the connection for the next session_call_alone, or closes it. Frees the last answer. */
void session_wire_done(struct nebula_session *session, struct client_wire *wire);
/* Locks, calls, unlocks: for requests whose answer has no payload. */
enum nebula_status session_report(struct nebula_session *session, const struct client_call *call,
                                struct nebula_error *error);
/* Copies the answer's text; the caller frees it. */
enum nebula_status client_take_text(const struct ipc_frame *frame, char **ret_text, struct nebula_error *error);
/* Turns the session off after a broken invariant, because all further results would be doubtful. The caller holds request_lock. */
enum nebula_status session_break(struct nebula_session *session, struct nebula_error *error, const char *format, ...)
        __attribute__((format(printf, 3, 4)));

/* checkpoint.c */
/* Makes version_id valid for the agent behind `wire`. */
enum nebula_status checkpoint_renew(struct nebula_checkpoint *checkpoint, struct client_wire *wire, bool *ret_broken,
                                    struct nebula_error *error);
void checkpoint_know(struct nebula_checkpoint *checkpoint, uint64_t version_id, uint64_t agent_nonce);
/* Fills in a request for an image for file `name`, and its call, which begins the checkpoint if the agent does not know it. */
void checkpoint_image_call(struct nebula_checkpoint *checkpoint, const char name[IPC_NAME_MAX], struct ipc_image *request,
                           struct client_call *ret_call);
/* Call when the agent knows that a file is complete. is_committed: all files are, and the agent has the commit. */
void checkpoint_saved(struct nebula_checkpoint *checkpoint, bool is_committed);
/* NEBULA_FAILED if files of the checkpoint were lost, so that the rest must not count as complete. */
enum nebula_status checkpoint_check(const struct nebula_checkpoint *checkpoint, struct nebula_error *error);
/* Remembers the version id in the answer on `wire`, which may be an error answer. */
void checkpoint_know_image(struct nebula_checkpoint *checkpoint, const struct client_wire *wire);
/* Whether the agent behind `wire` has given `checkpoint` its version id. */
bool checkpoint_is_known(const struct nebula_checkpoint *checkpoint, const struct client_wire *wire);

/* find.c: a handle of the version that the agent behind `wire` has found; NULL: an allocation failed. */
struct nebula_checkpoint *checkpoint_found(nebula_session *session, const struct client_wire *wire, const struct ipc_found *found);

/* session.c */
/* Makes session->pool if it is not there yet. The caller holds request_lock. */
enum nebula_status session_make_pool(struct nebula_session *session, struct nebula_error *error);

/* spares.c */
void spares_init(struct nebula_session *session); /* in the child of a fork too: drops the parent's thread */
/* Maps the images for the files that were hinted, in the background. */
void spares_start(struct nebula_session *session);
/* The image that is being made ready, which must stay mapped; 0: none. */
uint64_t spares_image(struct nebula_session *session);
/* Returns when no work on that image is in progress. The caller may hold request_lock. */
void spares_await(struct nebula_session *session, uint64_t image_id);
/* On this thread: returns true, and the thread closes the session when it ends. */
bool spares_close_later(struct nebula_session *session);
/* Ends the thread, unless this is the thread. */
void spares_end(struct nebula_session *session);
void spares_done(struct nebula_session *session);

/* copies.c */
void copies_init(struct nebula_session *session);
void copies_fork(struct nebula_session *session); /* call it in the child of a fork: drops the parent's copies */
/* Starts the threads. Any other result than OK: copies cannot be made in the background, or the list is full. Does
 * not wait for room: the caller holds request_lock, which a `release` on that thread may need. */
enum nebula_status copies_ready(struct nebula_session *session);
/* Takes over `copy`, which was allocated by malloc. Holds its checkpoint. */
void copies_add(struct nebula_session *session, struct client_copy *copy);
/* Whether there is a copy of `checkpoint` that was not reported to the agent. */
bool copies_are_under_way(struct nebula_session *session, const struct nebula_checkpoint *checkpoint);
/* True: the last copy of `checkpoint` in progress will report to the agent that this rank's part is closed. */
bool copies_commit(struct nebula_session *session, struct nebula_checkpoint *checkpoint);
/* Takes request_lock when no commit of this tag is left to a copy, so that the next request comes after that commit.
 * Until then other threads may send requests, including a `release`. */
void copies_lock_after_commit(struct nebula_session *session, const char *tag);
/* The beginning of a save: copies_lock_after_commit. When the agent has lent an image for it, the agent forgets a copy of that file in progress. */
void copies_begin(struct nebula_session *session, const char *tag, const char *name);
/* What a save needs to know of the copies in progress, once it has an image. */
struct client_way {
        uint64_t images[CLIENT_COPY_MAX]; /* that must stay mapped */
        size_t image_count;
        bool has_file; /* one of them is of that file: the save must not overtake it */
};
/* Waits until no copy writes into the image, as copies_await does. */
enum nebula_status copies_make_way(struct nebula_session *session, const char *tag, const char *name, uint64_t image_id, struct client_way *ret_way,
                                   struct nebula_error *error);
/* Waits until all copies in progress have ended and were released; with an image_id, only those into that image.
 * NEBULA_BUSY: this thread releases the copies and more are waiting, or this thread makes the copies. */
enum nebula_status copies_await(struct nebula_session *session, uint64_t image_id, int64_t timeout_ms,
                                 struct nebula_error *error);
/* Whether this is one of the two threads, for example inside a `release`. */
bool copies_are_on_this_thread(struct nebula_session *session);
/* On these threads: returns true, and the release thread closes the session after the last copy. */
bool copies_close_later(struct nebula_session *session);
/* Waits for all copies and ends the threads. */
void copies_done(struct nebula_session *session);

/* stored.c. False: a read failed or bytes are damaged. */
struct client_stored;
/* Takes over `fd`, unless it returns NULL because an allocation failed. */
struct client_stored *stored_new(int fd, const struct ipc_opened *opened);
void stored_free(struct client_stored *stored);
bool stored_is_direct(const struct client_stored *stored);
/* Bytes that this process has read from stored files, those of running reads included. */
uint64_t stored_read_bytes(void);
/* Reads the chunks that contain these ranges into their places at `data`, which has room for the whole file, in
 * whole pages. Parts may overlap; their targets are not used. */
bool stored_fetch(struct client_stored *stored, void *data, const struct nebula_part *parts, size_t count);
bool stored_fetch_all(struct client_stored *stored, void *data);
/* Copies the chunks that are not at `data` yet from `file`, the whole file. Chunks that are there stay, because the
 * program may have changed them. False: `file` has other bytes than the file whose chunks these are. */
bool stored_fill(const struct client_stored *stored, void *data, const void *file);
/* Copies ranges of a file to their targets, on a few threads. Bytes that are at `data` come from there, all others
 * from storage through one buffer per thread. stored NULL: all bytes are at `data`, and in the file of `image_fd`, unless
 * that is -1: large parts are read from it, as the map's pages take longer to make and free. Parts are sorted by offset
 * and do not overlap. */
bool stored_scatter(const struct client_stored *stored, int image_fd, const void *data, uint64_t size, const struct nebula_part *parts,
                    size_t count);
/* Reads a record to part->data and compares its CRC-32. Spans go to the readers, so no reader has more than 1 MiB to do alone, and no byte
 * beside the record is read. False also if the file is read directly, or the map has all bytes of the record: stored_scatter reads these. */
bool stored_read_record(const struct client_stored *stored, const struct nebula_part *part, uint32_t crc32);

/* partial.c. */
struct client_partial;
struct client_partial *partial_new(const struct ipc_opened *opened); /* NULL: an allocation failed */
void partial_free(struct client_partial *partial);
/* Has the agent read the chunks that contain these ranges; then they are at `data`, the map of the image. Parts may overlap; their targets
 * are not used. */
enum nebula_status partial_fetch(struct client_partial *partial, nebula_checkpoint *checkpoint, const char *name, void *data,
                                const struct nebula_part *parts, size_t count, struct nebula_error *error);

/* map.c. nebula_map_read for one record, which no other call has fetched. */
enum nebula_status map_read_record(nebula_map *map, const struct nebula_part *part, uint32_t crc32, struct nebula_error *error);
/* Where the bytes are that a map does not have yet. CACHED: in a file that this process reads through the page cache. */
enum map_rest { MAP_REST_NONE, MAP_REST_CACHED, MAP_REST_ELSEWHERE };
enum map_rest map_rest(const nebula_map *map);

/* map_own.c. NULL: a small mapping, or no thread could be started. */
struct map_own;
struct map_own *map_own_start(void *data, uint64_t size);
void map_own_stop(struct map_own *own); /* before the mapping goes; NULL is fine */

/* map.c. Asks the agent to open a file; the caller calls session_wire_done. */
enum nebula_status map_open_file(nebula_checkpoint *checkpoint, const char *name, enum ipc_reads reads, struct client_wire *wire,
                                 struct nebula_error *error);

/* From any thread, before nebula_watch_close begins: nebula_watch_next fails with NEBULA_UNAVAILABLE, at once if it waits. */
void client_watch_stop(nebula_watch *watch);

#endif
