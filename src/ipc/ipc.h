/*
 * ipc.h - what a trainer and the agent of its node say to each other.
 *
 * A Unix stream socket carries frames: a header, then `size` bytes of payload,
 * then at most one file descriptor by SCM_RIGHTS. The client asks, the agent
 * answers; one request is one struct below, an answer is the struct named
 * beside it, or, when `status` is not NEBULA_OK, the text of the error, which
 * a NUL and a number may follow: that of the version that an IMAGE has begun
 * and was refused for. The header stays as it is in every version, as does the
 * beginning of HELLO. Both ends are of one machine and one build family, so
 * structs travel as they lie in memory; HELLO settles the version. Strings end in NUL inside their
 * array (the receiver checks). A frame that breaks a rule ends the connection.
 *
 * A request that waits (WAIT, FLUSH, OPEN from storage) occupies its connection: clients
 * open one of their own for it.
 *
 * Threads: one thread per end of a connection at a time.
 */
#ifndef NB_IPC_IPC_H
#define NB_IPC_IPC_H

#include <stdbool.h>

#include "nebula.h"

#define IPC_VERSION 7u
#define IPC_OTHER_VERSION 71 /* EPROTO, the errno of the refusal of a greeting of another version */
#define IPC_MAGIC 0x3142454eu /* "NEB1" */
#define IPC_PAYLOAD_MAX (16u << 20)
#define IPC_REQUEST_MAX (64u << 10) /* no request is as large, nor will a greeting of another version be */
#define IPC_REPORT_MAX (1u << 30) /* bytes of a JSON text */
#define IPC_PATH_MAX 4096
#define IPC_NAME_MAX 256
#define IPC_TEXT_MAX 512
#define IPC_LIVE_MAX 512

enum ipc_type {
        IPC_HELLO = 1,  /* ipc_hello     -> ipc_welcome */
        IPC_CONFIGURE,  /* ipc_hello     -> nothing */
        IPC_BEGIN,      /* ipc_begin     -> ipc_begun */
        IPC_IMAGE,      /* ipc_image     -> ipc_granted + fd */
        IPC_CAPTURED,   /* ipc_captured  -> nothing */
        IPC_ABANDON,    /* ipc_abandon   -> nothing: this image will not be completed; its version fails */
        IPC_COMMIT,     /* ipc_version   -> nothing: this rank's part is closed */
        IPC_FAIL,       /* ipc_fail      -> nothing */
        IPC_WAIT,       /* ipc_wait      -> nothing */
        IPC_STATE,      /* ipc_version   -> ipc_state */
        IPC_FIND,       /* ipc_find      -> ipc_found */
        IPC_OPEN,       /* ipc_open      -> ipc_opened, its checksums + fd (read-only) */
        IPC_FLUSH,      /* ipc_flush     -> nothing */
        IPC_REPORT,     /* ipc_report    -> JSON text; of more than IPC_PAYLOAD_MAX bytes, as a file: nothing + fd */
        IPC_DESCRIBE,   /* ipc_version   -> the same */
        IPC_STOP,       /* ipc_stop      -> nothing, then the agent ends */
        IPC_PUBLISH,    /* ipc_publish   -> nothing: it happens once the version is durable */
        IPC_UNPUBLISH,  /* ipc_path      -> nothing: it happens once every earlier publish of the job has */
        IPC_FIND_PATH,  /* ipc_path      -> ipc_found_path */
        IPC_WATCH,      /* ipc_watch     -> ipc_event: the next one of the session's job; NEBULA_TIMEOUT: none so far */
        IPC_COPIED,     /* ipc_copied    -> nothing: the beginning of an image may be written to storage; more follows */
        IPC_TYPE_LAST = IPC_COPIED,
};

struct ipc_header {
        uint32_t magic;
        uint16_t type;
        uint16_t has_fd;
        uint32_t size;      /* of the payload, bytes */
        int32_t status;     /* answers: enum nebula_status */
        int32_t sys_errno;
        int32_t http_status;
};

enum ipc_role { IPC_ROLE_TRAINER = 0, IPC_ROLE_TOOL = 1 }; /* tools do not count as a job's ranks */

/* The same for a process and the children that it forked, which have sessions of their own and are no rivals. */
#define IPC_NONCE_FAMILY(nonce) ((nonce) & ((UINT64_C(1) << 40) - 1))

struct ipc_hello {
        uint32_t version, role, pid, rank, world, local_rank, local_world;
        uint32_t retention_count, on_full, keep_last, replica_count;
        uint32_t umask, group, unused; /* of the trainer, for what the agent makes for it; UINT32_MAX: not known */
        uint64_t memory_bytes, keep_every;
        uint64_t session_nonce; /* the same when a client comes back after the agent died; IPC_NONCE_FAMILY tells whose child it is */
        double persist_interval_s;
        char persist_path[IPC_PATH_MAX]; /* "" = memory only */
        char output_dir[IPC_PATH_MAX];   /* "" = no history file */
        char job[IPC_NAME_MAX];
        char run[IPC_NAME_MAX];
};
struct ipc_welcome {
        uint64_t agent_nonce; /* differs for each agent process */
        uint32_t agent_pid, version;
};
struct ipc_begin {
        int64_t file_count;
        uint64_t generation; /* not 0: begins nothing, and means a version that the agent has, of this writing of the tag or a later one */
        char tag[IPC_NAME_MAX];
};
struct ipc_begun {
        uint64_t version_id;
        uint64_t generation; /* so far: what storage turns out to have may raise it */
};
enum ipc_format { IPC_FORMAT_ZIP = 0, IPC_FORMAT_RAW = 1 };
struct ipc_image {
        uint64_t version_id; /* 0: of a version that this request begins, as BEGIN would */
        int64_t file_count;  /* of what is begun, as is the tag */
        uint64_t size; /* bytes of the finished file */
        uint32_t format, unused;
        char name[IPC_NAME_MAX];
        char tag[IPC_NAME_MAX];
};
struct ipc_granted {
        uint64_t image_id;
        uint64_t version_id;     /* differs from the request's when it, or a new generation, began */
        uint64_t generation;     /* as begun */
        uint64_t capacity_bytes; /* of the fd, >= size, whole pages */
        uint32_t live_count, unused;
        uint64_t live_ids[IPC_LIVE_MAX]; /* images of this session that still exist: unmap all others */
};
struct ipc_captured {
        uint64_t image_id;
        int64_t blocked_ns; /* how long save() held the trainer */
        int64_t copy_ns;    /* from save() to the last byte */
        int64_t cpu_ns;     /* of the copying threads */
        uint64_t fault_count; /* copy-on-write faults taken */
        uint32_t commits;     /* this rank's part is closed too, as by COMMIT */
        uint32_t sum_count;   /* so many sums lie behind the file (image.h) */
};
struct ipc_copied {
        uint64_t image_id;
        uint64_t size;            /* so many bytes from the beginning are as they will be, and so is a zip's directory; at most the file's */
        uint32_t commits;         /* CAPTURED will say so too, as far as is known */
        uint32_t sum_count;       /* so many sums of those bytes lie behind the file; more follow */
};
struct ipc_abandon {
        uint64_t image_id;
        char reason[IPC_TEXT_MAX];
};
struct ipc_version {
        uint64_t version_id;
};
struct ipc_fail {
        uint64_t version_id;
        char reason[IPC_TEXT_MAX];
};
struct ipc_wait {
        uint64_t version_id;
        int64_t timeout_ms; /* < 0: none */
        uint32_t state, unused;
};
struct ipc_state {
        uint32_t state, unused;
};
struct ipc_find {
        uint64_t generation, sequence;   /* of the tag: this version and no other; 0: any */
        char persist_path[IPC_PATH_MAX]; /* "" = the session's */
        char tag[IPC_NAME_MAX];          /* "" = the newest */
};
#define IPC_PASSED_MAX 4
/* A checkpoint that a search has passed over, though it may be newer, and why. */
struct ipc_passed {
        char tag[IPC_NAME_MAX];
        char reason[IPC_TEXT_MAX];
};
struct ipc_found {
        uint64_t version_id;
        uint64_t generation;
        int64_t step; /* -1: the tag names none */
        uint32_t state, passed_count; /* of those that were passed over the first so many are told */
        char tag[IPC_NAME_MAX];
        struct ipc_passed passed[IPC_PASSED_MAX];
};
struct ipc_open {
        uint64_t version_id;
        uint32_t reads_storage, unused; /* reads_storage: the asker may be given the stored file, to read and check it himself */
        char name[IPC_NAME_MAX];
};
enum ipc_source { IPC_SOURCE_MEMORY = 0, IPC_SOURCE_PEER = 1, IPC_SOURCE_STORAGE = 2 };
struct ipc_opened {
        uint64_t size; /* of the file; the fd may be larger */
        uint32_t format, source;
        /* 0: the fd is an image whose bytes were verified. Else it is the stored file, to be checked while it is read. */
        uint32_t chunk_bytes, chunk_count;
        uint32_t is_direct, unused; /* is_direct: the fd wants whole pages (O_DIRECT) */
        uint64_t crc64[];           /* of each chunk, the last one shorter */
};
struct ipc_flush {
        int64_t timeout_ms;
        char tag[IPC_NAME_MAX]; /* "" = everything */
};
struct ipc_report {
        uint32_t report, unused; /* enum nebula_report */
        char persist_path[IPC_PATH_MAX]; /* "" = the session's; for tools "" = all jobs */
};
struct ipc_watch {
        double since; /* seconds since 1970: only what happened later */
        int64_t timeout_ms; /* < 0: none */
};
struct ipc_event {
        double at, seconds; /* seconds: that writing took; 0: another node wrote */
        uint64_t size;      /* bytes */
        uint32_t kind, unused; /* enum nebula_event_kind */
        char tag[IPC_NAME_MAX];
        char text[IPC_TEXT_MAX];
};
struct ipc_stop {
        uint32_t now, unused; /* now: drop the memory tier */
};

struct ipc_publish {
        uint64_t version_id;
        char name[IPC_NAME_MAX];    /* "" = the whole version, as a directory */
        char path[IPC_PATH_MAX];    /* absolute */
        char staging[IPC_PATH_MAX]; /* of a directory: what lies there goes along; "" for a file */
};
struct ipc_path {
        char path[IPC_PATH_MAX]; /* absolute */
};
struct ipc_found_path {
        struct ipc_found found;
        char name[IPC_NAME_MAX]; /* "" = the path is that of the whole version */
};

/* Sends one frame. passed_fd < 0: none. It stays the caller's. */
enum nebula_status ipc_send(int fd, enum ipc_type type, enum nebula_status status, const void *payload, size_t size,
                            int passed_fd, struct nebula_error *error);
/* An answer that is a text: in the frame, or, when it is larger than one, in a file whose descriptor goes along. */
enum nebula_status ipc_send_text(int fd, enum ipc_type type, const char *text, size_t size, struct nebula_error *error);
/* An answer that carries an error. version_id 0: none. */
enum nebula_status ipc_send_error(int fd, enum ipc_type type, const struct nebula_error *failure, uint64_t version_id,
                                  struct nebula_error *error);
/*
 * Receives one frame into a buffer that grows and is used again; start with a zeroed struct. NEBULA_UNAVAILABLE when the
 * other end is gone, NEBULA_INVALID for a frame that breaks a rule; either way the connection is of no more use. The
 * payload is aligned for any struct, and a NUL that `size` does not count follows it. Who takes the fd sets it to -1;
 * the next receive closes one that nobody took.
 */
struct ipc_frame {
        struct ipc_header header;
        void *payload;
        size_t capacity;
        int fd; /* meaningful when header.has_fd; -1: none, or taken */
};
enum nebula_status ipc_receive(int fd, struct ipc_frame *frame, struct nebula_error *error);
/*
 * The same for requests, which bring no descriptor: a frame is received by one call of the system, mostly. What came of the
 * next ones waits in the inbox, which starts zeroed and belongs to the connection.
 */
struct ipc_inbox {
        char data[1024]; /* the requests of a save are of some 600 bytes */
        size_t start, count; /* of the bytes that wait */
};
enum nebula_status ipc_receive_request(int fd, struct ipc_inbox *inbox, struct ipc_frame *frame, struct nebula_error *error);
/* For who must not wait: one receive, of what has come. Then ipc_receive_request waits for nothing if a whole request is held. */
enum nebula_status ipc_inbox_fill(int fd, struct ipc_inbox *inbox, struct nebula_error *error);
enum ipc_held {
        IPC_HELD_PART,  /* or nothing */
        IPC_HELD_WHOLE, /* a request, or what will never be one */
        IPC_HELD_LARGE, /* the beginning of one that is larger than the inbox */
};
enum ipc_held ipc_inbox_held(const struct ipc_inbox *inbox);
/* The text of a file that came instead of a payload becomes the payload. */
enum nebula_status ipc_receive_text(struct ipc_frame *frame, struct nebula_error *error);
void ipc_frame_done(struct ipc_frame *frame); /* frees the buffer, closes an fd that nobody took */
/* The number that follows a refusal; 0: none. */
uint64_t ipc_refused_version(const struct ipc_frame *frame);
/* The size of a request's struct; 0 for an unknown type. */
size_t ipc_request_size(enum ipc_type type);
/* Size and string termination of a request, as its receiver must check them. */
enum nebula_status ipc_request_check(const struct ipc_frame *frame, struct nebula_error *error);
/* The size of the answer to a request; 0 when it has no payload, SIZE_MAX when it is of any size. */
size_t ipc_answer_size(enum ipc_type type);
/* An answer to `type` as its receiver must check it: an error it carries is returned as this call's own. *ret_broken
 * tells whether the frame breaks a rule, so that the connection must end, or is a plain refusal. */
enum nebula_status ipc_answer_check(const struct ipc_frame *frame, enum ipc_type type, bool *ret_broken,
                                    struct nebula_error *error);
/*
 * One request and its answer. timeout_ms < 0: waits for ever, else NEBULA_TIMEOUT when no answer begins in time, and the
 * connection is broken then, since the answer may still come.
 * On failure *ret_broken tells whether the connection must be closed (true) or the agent merely said no (false).
 */
enum nebula_status ipc_call(int fd, enum ipc_type type, const void *payload, size_t size, int64_t timeout_ms,
                            struct ipc_frame *frame, bool *ret_broken, struct nebula_error *error);
/* Its second half, for who has sent the request. */
enum nebula_status ipc_await(int fd, enum ipc_type type, int64_t timeout_ms, struct ipc_frame *frame, bool *ret_broken,
                             struct nebula_error *error);

/*
 * Where the agent of this user and node is found:
 *   $NEBULA_RUNTIME_DIR, else /tmp/nebula-<uid>; then "-<id>" for $NEBULA_NODE_ID.
 * XDG_RUNTIME_DIR does not choose it: shells of one user differ in it, or have that of another machine, and would have an agent each.
 * But $XDG_RUNTIME_DIR/nebula and /run/user/<uid>/nebula are where agents of older versions live, and the place where /tmp is of no use.
 * The directory is 0700 and must belong to this user. It holds agent.sock, agent.lock and agent.log.
 * The memory tier is $NEBULA_MEMORY_DIR, else /dev/shm/nebula-<uid>[-<id>].
 */
struct ipc_place {
        char directory[IPC_PATH_MAX - 64];
        char socket[108];
        char lock[IPC_PATH_MAX];
        char log[IPC_PATH_MAX];
        char memory[IPC_PATH_MAX];
        char others[2][IPC_PATH_MAX - 64]; /* other directories to look for an agent in, and to be in where `directory` cannot be */
        uint32_t other_count;
};
enum nebula_status ipc_place_find(struct ipc_place *ret_place, struct nebula_error *error);
/* Creates the directory if need be and checks owner and mode; where that fails, one of the others becomes the place. */
enum nebula_status ipc_place_make(struct ipc_place *place, struct nebula_error *error);
/* To the agent, wherever it is: a descriptor, or, as from the place itself, a negative errno. */
int ipc_place_connect(const struct ipc_place *place);
struct os_stat;
/* Of a directory of ours. A link is followed if it is this user's or root's: in /tmp, another user's would be a trap. */
int ipc_place_stat(const char *path, struct os_stat *ret_stat);
/* Whether this user's process listens at the other end of `fd`: below /tmp somebody else may have been there first. */
enum nebula_status ipc_place_check_peer(int fd, const struct ipc_place *place, uint32_t *ret_pid, struct nebula_error *error);

#endif
