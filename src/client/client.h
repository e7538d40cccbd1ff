/*
 * client.h - inside the trainer's half: sessions, their connections, and the
 * handles of checkpoints.
 *
 *      options.c     what the caller asked for, checked, as the agent wants it
 *      start.c       finding the agent's program and starting it
 *      wire.c        one connection: found or started, greeted, asked
 *      session.c     the session, what is asked of it as a whole, forks
 *      call.c        a request with everything that makes it survive an agent
 *      checkpoint.c  handles: begin, commit, wait
 *      find.c        handles of what is complete
 *      save.c        layout, image, capture
 *      copies.c      captures that go on after save returned
 *      map.c         reading back
 *      watch.c       what becomes of checkpoints in the background
 *      stored.c      what is read from storage by this process itself
 *      publish.c     files under paths that the program chose
 *
 * Every request goes through session_call: on the session's own connection
 * under request_lock, or, when it may wait for long, on a connection that
 * belongs to that call alone and is kept for the next. If the agent is gone,
 * session_call finds or starts another, finds the checkpoint there again by its
 * tag and asks once more; two agents that die during one request are a failure.
 *
 * Threads: a handle may be used from any thread. request_lock is held while
 * the agent works on a request and while values are copied; settings_lock, which
 * also guards the connection that is kept, only for a few instructions, and so is
 * copies_lock, which may be taken while any other is held.
 * The order is request_lock, then settings_lock.
 */
#ifndef NB_CLIENT_CLIENT_H
#define NB_CLIENT_CLIENT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "capture/cow.h"
#include "ipc/ipc.h"
#include "os/lock.h"

/* An agent that is alive answers at once, unless it was asked to wait. */
#define CLIENT_ANSWER_MS 60000
/* One that is stopped, or hangs, is named in its log after so long. */
#define CLIENT_SILENT_MS 5000
/* A full memory tier is waited for: the agent decides for how long, this is only the limit of patience with it. */
#define CLIENT_IMAGE_MS 900000
/* How long an agent may take beyond the time that it was told to wait. */
#define CLIENT_GRACE_MS 10000
/* Files of one process that are being copied in the background: more would only queue for the same memory bus. A save
 * that would be one more waits for the oldest. */
#define CLIENT_COPY_MAX 32u
/* NEBULA_CAPTURE=auto: less is copied sooner than a background copy is begun and ended. */
#define CLIENT_COW_BYTES (4u << 20)

/* $NEBULA_CAPTURE. */
enum client_capture {
        CLIENT_CAPTURE_AUTO = 0, /* cow for large ranges in huge pages where the machine allows it, copy for the rest */
        CLIENT_CAPTURE_COPY,
        CLIENT_CAPTURE_COW, /* the same, and an error where it does not */
};

/* How to reach the agent, and what to tell it. */
struct client_settings {
        struct ipc_hello hello;
        struct ipc_place place;
        char agent_path[IPC_PATH_MAX]; /* "": find it */
        bool is_inline;                /* the agent is a thread of this process */
        bool is_idle;                  /* with no agent there is nothing to ask: none is started */
        enum client_capture capture;
};

struct client_wire {
        int fd; /* -1: not connected */
        unsigned fork_count; /* of the process that opened it */
        uint64_t agent_nonce;
        uint32_t agent_pid;
        const char *log;        /* the agent's, to say there that it is silent; NULL: said, or none */
        struct ipc_frame frame; /* the last answer */
};

/* A file whose bytes are still on their way into its image. */
struct client_copy {
        struct client_copy *next;
        struct nebula_checkpoint *checkpoint; /* held */
        struct cow_capture *capture;          /* NULL: the copy is whole, and the agent not told */
        const void *image;                    /* stays mapped while the copy is listed */
        uint64_t image_id, size, agent_nonce; /* of the agent that lent the image */
        uint64_t copied_size;                 /* that the agent has heard of */
        bool is_told, brings_commit;          /* the agent is told that it is whole; and that it was the last; guarded by copies_lock */
        bool is_replaced;                     /* the file is being saved again, or was; likewise */
        int64_t added_ns;
        enum ipc_format format;
        char name[IPC_NAME_MAX];
        struct ipc_captured captured; /* what is known of it so far */
        struct capture_part *large;   /* what huge pages are asked for, once the bytes are copied; or NULL */
        size_t large_count;
        void (*release)(void *argument, const struct nebula_error *failure);
        enum nebula_status (*filled)(void *argument, struct nebula_error *ret_error); /* NULL: nobody else writes */
        void *argument;
        struct nebula_error failure; /* status NEBULA_OK: it is whole */
};

struct client_copies {
        struct lock copies_lock; /* guards all that follows */
        pthread_cond_t moved;
        struct client_copy *first; /* the oldest; one thread works on it */
        struct client_copy *released; /* off the list: its `release` is running, on the other thread, or will be, as those behind it */
        size_t count; /* of both lists */
        pthread_t maker, releaser;
        bool has_maker, has_releaser, is_ending;
        bool closes_session; /* the releaser does, when it ends */
};

/* What is known to be durable, so that an agent that ends loses nothing of it. */
struct client_flushed {
        uint64_t begun;                      /* flushes, all that there were */
        uint64_t all, all_nonce;             /* the last that made everything durable, of this agent */
        uint64_t one, one_nonce;             /* likewise, `tag` alone */
        char tag[IPC_NAME_MAX];
};

struct nebula_session {
        struct nebula_session *next; /* of all sessions in this process */

        struct lock settings_lock; /* guards settings, idle_wire and flushed */
        struct client_flushed flushed;
        struct client_settings settings;
        struct client_wire idle_wire;  /* of the last request that had one of its own, for the next */

        struct lock request_lock; /* guards all that follows, and puts requests in order */
        struct client_wire wire;
        struct capture_pool *pool;        /* NULL until the first save */
        void (*unmapping)(void *argument, void *image); /* whom the pool tells; or NULL */
        void *unmapping_argument;
        bool is_broken;                   /* an invariant failed: `failure` answers everything from now on */
        struct nebula_error failure;      /* of the last attempt to connect */
        int64_t retry_at_ns, retry_pause_ms; /* before then, `failure` is the answer: no save waits for a hopeless start */
        bool was_locked;                  /* between the halves of a fork */
        /* A file that lies whole in its image, of which the agent hears with its commit or before the next request, whichever comes
         * first; NULL: none. Looked at without the lock only to see whether there is one. */
        struct client_copy *_Atomic untold;

        struct client_copies copies;
};

struct nebula_checkpoint {
        struct nebula_session *session;
        /* version_id as the agent with this nonce knows it; written id first, read nonce first */
        _Atomic uint64_t version_id, agent_nonce;
        /* Likewise of files that are saved and not committed; 0: none, or counted ones, which are never called whole too early */
        _Atomic uint64_t saved_version_id, saved_agent_nonce;
        _Atomic uint64_t saved_flush;    /* flushes that had begun then */
        _Atomic uint64_t begun_generation; /* the writing of the tag that it is, as the agent began it */
        /* The same once that is committed, or may be, being counted: to look at it begins nothing any more. 0: not so since the last save */
        _Atomic uint64_t done_generation;
        atomic_bool is_torn;             /* such files were lost: an agent ended, and the next one does not know of them */
        int64_t file_count;
        atomic_bool is_found;            /* by a search: not begun by this session */
        atomic_bool is_given_up;         /* since the last save */
        bool commit_is_due;              /* the last copy that is under way brings it; guarded by copies_lock */
        bool is_open_ended;              /* and of several ranks, who wait for those that have begun: the agent hears of all at once */
        _Atomic uint32_t user_count;     /* the caller, and each copy that is under way */
        char persist_path[IPC_PATH_MAX]; /* where it was found; "": the session's */
        uint64_t generation;             /* of what was found */
        struct ipc_passed *passed;       /* what that search has passed over; NULL: nothing */
        uint32_t passed_count;
        char tag[IPC_NAME_MAX];
};

/* options.c */
enum nebula_status client_settings_read(const struct nebula_options *options, struct client_settings *settings,
                                        struct nebula_error *error);
/* Copies `value` (NULL: "") into an array of `size`, or says that `what` is too long. */
enum nebula_status client_text(char *to, size_t size, const char *value, const char *what, struct nebula_error *error);
/* A storage path as the agent takes it: absolute, or a URL, and UTF-8. NULL: "". */
enum nebula_status client_persist_path(char to[IPC_PATH_MAX], const char *value, struct nebula_error *error);

/* start.c */
/* Runs `nebula agent --daemon`, which returns once somebody listens. *ret_hopeless: trying again is of no use. */
enum nebula_status client_start_agent(const struct client_settings *settings, bool *ret_hopeless,
                                      struct nebula_error *error);
/* Starts the agent on threads of this process, unless that has been done, and says where it listens. */
enum nebula_status client_start_inline(struct ipc_place *place, struct nebula_error *error);
void client_inline_forked(void); /* called in the child */

/* wire.c */
enum nebula_status client_wire_open(struct client_wire *wire, const struct client_settings *settings,
                                    struct nebula_error *error);
/* The answer is in wire->frame. Closes the wire, and sets *ret_broken, when it can be of no more use. */
enum nebula_status client_wire_call(struct client_wire *wire, enum ipc_type type, const void *request, size_t size,
                                    int64_t timeout_ms, bool *ret_broken, struct nebula_error *error);
/* Its two halves, for who has something to do in between. */
enum nebula_status client_wire_send(struct client_wire *wire, enum ipc_type type, const void *request, size_t size, bool *ret_broken,
                                    struct nebula_error *error);
enum nebula_status client_wire_await(struct client_wire *wire, enum ipc_type type, int64_t timeout_ms, bool *ret_broken,
                                     struct nebula_error *error);
void client_wire_close(struct client_wire *wire);
/* Around a fork: the child closes what its parent has open. */
void client_wires_before_fork(void);
void client_wires_after_fork(bool is_child);

/* call.c */
struct client_call {
        enum ipc_type type;
        void *request;
        size_t size;
        uint64_t *version_id;                /* inside the request: filled in for `checkpoint` before it is sent */
        struct nebula_checkpoint *checkpoint; /* NULL: the request names none */
        bool begins;                         /* the request does so itself when the agent does not know `checkpoint` */
        int64_t timeout_ms;                  /* < 0: none */
        void (*meanwhile)(void *argument);   /* NULL, or called while the agent works on it: once for each time that it was sent */
        void *argument;
};
/* Connects the session's wire, unless it is; request_lock is held. */
enum nebula_status session_connect(struct nebula_session *session, struct nebula_error *error);
/* How long to wait for an answer to a request that may itself wait for timeout_ms. */
int64_t client_patience_ms(int64_t timeout_ms);
/* On the session's wire; request_lock is held, and the answer is in session->wire.frame. */
enum nebula_status session_call(struct nebula_session *session, const struct client_call *call,
                                struct nebula_error *error);
/* Takes over `copy`, which malloc made and which is whole, to be told later; holds its checkpoint. request_lock is held, and nothing
 * untold; it is held for the next two. */
void session_tell_later(struct nebula_session *session, struct client_copy *copy);
/* Tells what is untold, if anything is; `commits`: and that it was the last of its checkpoint. NEBULA_NOT_FOUND: the agent does not
 * know the image. One that has taken over from who lent it is given the file once more, by copies.c. */
enum nebula_status session_tell_untold(struct nebula_session *session, bool commits, struct nebula_error *error);
void session_forget_untold(struct nebula_session *session);
/* session_tell_untold for who does not hold request_lock: before a question on another connection. */
void session_tell_all(struct nebula_session *session);
/* On `wire`, which the caller has set to { .fd = -1 } and ends with session_wire_done. No lock is held. */
enum nebula_status session_call_alone(struct nebula_session *session, struct client_wire *wire,
                                      const struct client_call *call, struct nebula_error *error);
/* Keeps the connection for the next call alone, or closes it; the last answer is gone. */
void session_wire_done(struct nebula_session *session, struct client_wire *wire);
/* Locks, asks, unlocks: for requests whose answer has no payload. */
enum nebula_status session_tell(struct nebula_session *session, const struct client_call *call,
                                struct nebula_error *error);
/* The answer's text as the caller's own copy. */
enum nebula_status client_take_text(const struct ipc_frame *frame, char **ret_text, struct nebula_error *error);
/* Switches the session off: what was found to be wrong makes everything after it doubtful. request_lock is held. */
enum nebula_status session_break(struct nebula_session *session, struct nebula_error *error, const char *format, ...)
        __attribute__((format(printf, 3, 4)));

/* checkpoint.c */
/* Makes version_id valid at the agent behind `wire`. */
enum nebula_status checkpoint_renew(struct nebula_checkpoint *checkpoint, struct client_wire *wire, bool *ret_broken,
                                    struct nebula_error *error);
void checkpoint_know(struct nebula_checkpoint *checkpoint, uint64_t version_id, uint64_t agent_nonce);
/* A request for an image for file `name`, and the call that makes it, which begins the checkpoint where it is not known. */
void checkpoint_image_call(struct nebula_checkpoint *checkpoint, const char name[IPC_NAME_MAX], struct ipc_image *request,
                           struct client_call *ret_call);
/* A file is whole at the agent; or all of them are, and the commit told. */
void checkpoint_saved(struct nebula_checkpoint *checkpoint, bool is_committed);
/* NEBULA_FAILED: what is left of it must not be called whole. */
enum nebula_status checkpoint_check(const struct nebula_checkpoint *checkpoint, struct nebula_error *error);
/* Remembers which version the answer on `wire`, a refusal perhaps, speaks of. */
void checkpoint_know_image(struct nebula_checkpoint *checkpoint, const struct client_wire *wire);
/* Whether the agent behind `wire` has given `checkpoint` its number. */
bool checkpoint_is_known(const struct nebula_checkpoint *checkpoint, const struct client_wire *wire);

/* find.c: a handle of what the agent behind `wire` has found; NULL: no memory. */
struct nebula_checkpoint *checkpoint_found(nebula_session *session, const struct client_wire *wire, const struct ipc_found *found);

/* copies.c */
void copies_init(struct nebula_session *session);
void copies_fork(struct nebula_session *session); /* in the child: the parent's copies are none of its business */
/* Starts the threads. Not OK: nothing can be copied in the background, or the list is full. Nobody waits for room: request_lock is held, for
 * which a `release` on that thread may wait. */
enum nebula_status copies_ready(struct nebula_session *session);
/* Takes over `copy`, which malloc made; holds its checkpoint. */
void copies_add(struct nebula_session *session, struct client_copy *copy);
/* Whether the agent is still to hear of a copy of `checkpoint`. */
bool copies_are_under_way(struct nebula_session *session, const struct nebula_checkpoint *checkpoint);
/* True: the last copy of `checkpoint` that is under way tells the agent that this rank's part is closed. */
bool copies_commit(struct nebula_session *session, struct nebula_checkpoint *checkpoint);
/* Takes request_lock when no such commit of this tag is under way: what follows is to come after it. Until then others may ask,
 * a `release` among them. */
void copies_lock_settled(struct nebula_session *session, const char *tag);
/* Whether that file is on its way: its successor must not overtake it. */
bool copies_has(struct nebula_session *session, const char *tag, const char *name);
/* That file is about to be saved again: once the agent has lent an image for that, it knows no more of what is on its way. */
void copies_replace(struct nebula_session *session, const char *tag, const char *name);
/* The images that must stay mapped. */
size_t copies_images(struct nebula_session *session, uint64_t ret_ids[CLIENT_COPY_MAX]);
/* Returns when the copies that are under way have ended, well or not, and were released; with an image_id: when those into that image have
 * ended. NEBULA_BUSY: this is the thread that releases them, and others follow; or the one that makes them. */
enum nebula_status copies_settle(struct nebula_session *session, uint64_t image_id, int64_t timeout_ms,
                                 struct nebula_error *error);
/* Whether this is one of their threads, inside a `release` mostly. */
bool copies_are_on_this_thread(struct nebula_session *session);
/* There: true, and the releaser closes the session when the last copy has ended. */
bool copies_close_later(struct nebula_session *session);
/* Waits for all of them and ends the threads. */
void copies_done(struct nebula_session *session);

/* stored.c: false means that a read failed or that bytes are damaged. */
struct client_stored;
/* Takes over `fd`, unless it returns NULL: no memory. */
struct client_stored *stored_new(int fd, const struct ipc_opened *opened);
void stored_free(struct client_stored *stored);
/* The chunks of ranges of the file into their places at `data`, which has the whole file's size, in whole pages. Parts may overlap; where
 * they go does not matter. */
bool stored_fetch(struct client_stored *stored, void *data, const struct nebula_part *parts, size_t count);
bool stored_fetch_all(struct client_stored *stored, void *data);
/* The chunks that are not at `data` yet, from all of the file: the program may have changed the others. */
void stored_fill(const struct client_stored *stored, void *data, const void *file);
/* Copies ranges of a file to where they belong, on a few threads: from `data`, and what was not fetched there from storage, through
 * one buffer for each thread. stored NULL: all of it is at `data`. Parts are in the order of their offsets and do not overlap. */
bool stored_scatter(const struct client_stored *stored, const void *data, uint64_t size, const struct nebula_part *parts,
                    size_t count);

#endif
