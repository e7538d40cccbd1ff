/*
 * ipc.h - the protocol between a trainer and the agent of its node.
 *
 * A Unix stream socket carries frames: a header, then `size` bytes of payload, then at most one
 * file descriptor by SCM_RIGHTS. The client sends requests and the agent answers them.
 * * A request is one of the structs below; its answer is the struct named beside it.
 * * If `status` is not NEBULA_OK, the answer is the text of the error. A NUL and a number may
 *   follow: the id of the version that an IMAGE has begun before it was refused.
 * * The header and the start of HELLO are the same in all versions of the protocol.
 * * Both ends run on one machine and come from compatible builds, so structs are sent as they lie
 *   in memory. HELLO checks the version.
 * * A string ends in a NUL inside its array; the receiver checks that.
 * * A frame that breaks a rule ends the connection.
 *
 * A request that waits (WAIT, FLUSH, OPEN from storage) blocks its connection, so a client opens
 * another connection for it.
 *
 * Threads: one thread at a time per end of a connection.
 */
#ifndef NB_IPC_IPC_H
#define NB_IPC_IPC_H

#include <stdbool.h>

#include "nebula.h"

#define IPC_VERSION 20u
#define IPC_OTHER_VERSION 71 /* EPROTO: the errno of the answer to a HELLO of another version */
#define IPC_MAGIC 0x3142454eu /* "NEB1" */
#define IPC_PAYLOAD_MAX (16u << 20)
#define IPC_REQUEST_MAX (64u << 10) /* larger than any request, and than a HELLO of any version */
#define IPC_REPORT_MAX (1u << 30) /* bytes of a JSON text */
#define IPC_PATH_MAX 4096
#define IPC_NAME_MAX 256
#define IPC_TEXT_MAX 512
#define IPC_REASON_MAX 1024
#define IPC_LIVE_MAX 512
#define IPC_PHASE_MAX 32
#define IPC_RUNS_MAX 64 /* a request with so many fits an inbox */

enum ipc_type {
        IPC_HELLO = 1,  /* ipc_hello, variables of clouds (base/vars.h) or none -> ipc_welcome */
        IPC_CONFIGURE,  /* the same -> empty */
        IPC_BEGIN,      /* ipc_begin     -> ipc_begun */
        IPC_IMAGE,      /* ipc_image     -> ipc_granted + fd */
        IPC_CAPTURED,   /* ipc_captured -> empty */
        IPC_ABANDON,    /* ipc_abandon -> empty: this image will not be completed; its version fails */
        IPC_COMMIT,     /* ipc_commit -> empty: this rank's part is closed */
        IPC_FAIL,       /* ipc_fail -> empty */
        IPC_WAIT,       /* ipc_wait -> empty */
        IPC_STATE,      /* ipc_version   -> ipc_state */
        IPC_FIND,       /* ipc_find      -> ipc_found */
        IPC_OPEN,       /* ipc_open      -> ipc_opened, its checksums + fd (read-only) */
        IPC_FLUSH,      /* ipc_flush -> empty */
        IPC_REPORT,     /* ipc_report -> JSON text; if larger than IPC_PAYLOAD_MAX, an empty answer + fd of a file with the text */
        IPC_DESCRIBE,   /* ipc_version -> as IPC_REPORT */
        IPC_STOP,       /* ipc_stop -> empty, then the agent ends */
        IPC_PUBLISH,    /* ipc_publish -> empty: the agent publishes when the version is durable */
        IPC_UNPUBLISH,  /* ipc_path -> empty: takes effect after every earlier publish of the job */
        IPC_FIND_PATH,  /* ipc_path      -> ipc_found_path */
        IPC_WATCH,      /* ipc_watch -> ipc_event: the next one of the session's job or of a cloud; NEBULA_TIMEOUT: none yet */
        IPC_COPIED,     /* ipc_copied -> empty: the start of an image is final and may be written to storage; more follows */
        IPC_PREPARE,    /* ipc_prepare -> empty: the session's next versions will have such a file */
        IPC_FETCH,      /* ipc_fetch -> empty: these chunks of an image are there. NEBULA_BUSY: the agent has no such image any more */
        IPC_SPARE,      /* ipc_spare -> ipc_spare_image + fd: a spare image for a hinted file, which the client may map before its save */
        IPC_KEEP,       /* ipc_keep -> empty: pins a tag, takes a pin back, or removes a version from storage */
        IPC_COMPARED,   /* ipc_compared -> empty: the client has compared a version in storage with its checksums */
        IPC_RECORDS,    /* ipc_version -> as IPC_REPORT: the texts of its records in storage, as far as the agent has them */
        IPC_TYPE_LAST = IPC_RECORDS,
};

struct ipc_header {
        uint32_t magic;
        uint16_t type;
        uint16_t has_fd;
        uint32_t size;      /* bytes of the payload */
        int32_t status;     /* of answers: enum nebula_status */
        int32_t sys_errno;
        int32_t http_status;
};

/* A TOOL does not count as a rank of a job. A READER is one that sees all jobs of a path, and changes nothing. */
enum ipc_role { IPC_ROLE_TRAINER = 0, IPC_ROLE_TOOL = 1, IPC_ROLE_READER = 2, IPC_ROLE_SPARE = 3 /* a spare node */ };

/* The same for a process and its forked children. They have sessions of their own, but are not rivals for the job. */
#define IPC_NONCE_FAMILY(nonce) ((nonce) & ((UINT64_C(1) << 40) - 1))

struct ipc_hello {
        uint32_t version, role, pid, rank, world, local_rank, local_world;
        uint32_t retention_count, on_full, keep_last, replica_count;
        uint32_t umask, group; /* those of the trainer, for files that the agent makes for it; UINT32_MAX: unknown */
        uint32_t has_begun;    /* the program has begun a checkpoint: it is not about to load one */
        uint32_t keep_best_count, keep_best_is_largest; /* keep_best_count 0: none */
        uint32_t keep_hourly, keep_daily, keep_weekly, keep_within_s;
        int32_t pulse_fd; /* the trainer's descriptor of a struct ipc_pulse; -1: it counts no steps */
        uint32_t has_spares;
        uint64_t memory_bytes, keep_every;
        uint64_t session_nonce; /* stays the same when a client reconnects after the agent died; see IPC_NONCE_FAMILY */
        double persist_interval_s;
        char persist_path[IPC_PATH_MAX]; /* "" = memory only */
        char output_dir[IPC_PATH_MAX];   /* "" = no history file */
        char job[IPC_NAME_MAX];
        char run[IPC_NAME_MAX];
        char keep_best[IPC_NAME_MAX]; /* a metric */
        char keep_items[IPC_NAME_MAX]; /* store/thin.h */
};
/* A page that a trainer writes without a system call, and that the agent reads once a second. */
struct ipc_pulse {
        uint64_t beats; /* changes with each step; 0: the trainer is not to be watched now */
        uint64_t step;  /* the program's own number, for people */
        int64_t at_ns;  /* of the last step; the machine's monotonic clock */
        uint32_t phase_changes; /* odd while `phase` is being written */
        uint32_t stack_signal;  /* makes the trainer append the stacks of its threads to stack_fd; 0: it does not */
        int32_t stack_fd;
        uint32_t ends_hung; /* the agent kills it when it hangs */
        char phase[IPC_PHASE_MAX]; /* "": steps */
};
struct ipc_welcome {
        uint64_t agent_nonce; /* a new one for each agent process */
        uint32_t agent_pid, version;
};
struct ipc_begin {
        int64_t file_count;
        uint64_t writing; /* not 0: begins nothing; takes a version of this run that the agent has, of this writing of the tag or a later one */
        char tag[IPC_NAME_MAX];
};
struct ipc_begun {
        uint64_t version_id;
        uint64_t writing; /* so far: the agent may raise it when it has read storage */
};
enum ipc_format { IPC_FORMAT_ZIP = 0, IPC_FORMAT_RAW = 1 };
struct ipc_image {
        uint64_t version_id; /* 0: this request begins a version, as BEGIN does */
        int64_t file_count;  /* file_count and tag: of the version to begin */
        uint64_t size; /* bytes of the finished file */
        uint32_t format, unused;
        char name[IPC_NAME_MAX];
        char tag[IPC_NAME_MAX];
};
struct ipc_granted {
        uint64_t image_id;
        uint64_t version_id;     /* differs from the request's if this request began a version */
        uint64_t writing;        /* as begun */
        uint64_t capacity_bytes; /* of the fd: at least `size`, whole pages */
        uint32_t live_count;
        uint32_t lacks_pages;    /* the image is new, and the client makes its pages before it writes to them (capture_make_pages) */
        uint64_t live_ids[IPC_LIVE_MAX]; /* images of this session that still exist; the client unmaps all others */
};
struct ipc_captured {
        uint64_t image_id;
        int64_t blocked_ns; /* how long save() blocked the trainer */
        int64_t copy_ns;    /* from the start of save() to the last byte */
        int64_t cpu_ns;     /* of the copying threads */
        uint64_t fault_count; /* copy-on-write faults */
        uint32_t commits;     /* also closes this rank's part, as COMMIT does */
        uint32_t sum_count;   /* number of sums after the file (image.h) */
};
struct ipc_copied {
        uint64_t image_id;
        uint64_t size;            /* bytes from the start that are final, and at most the file's size; a zip's directory is final too */
        uint32_t commits;         /* CAPTURED will close the part too, as far as the client knows */
        uint32_t sum_count;       /* number of sums of those bytes after the file; more follow */
};
struct ipc_prepare {
        uint64_t size; /* bytes of the file */
};
struct ipc_spare {
        uint64_t unused;
};
struct ipc_spare_image {
        uint64_t image_id;       /* 0: none is ready, and there is no fd */
        uint64_t capacity_bytes; /* of the fd: whole pages */
        uint32_t left_count, unused; /* spare images that will follow for this session */
};
struct ipc_abandon {
        uint64_t image_id;
        char reason[IPC_TEXT_MAX];
};
struct ipc_version {
        uint64_t version_id;
};
struct ipc_commit {
        uint64_t version_id;
        uint32_t has_saved, unused; /* has_saved: the version has files of this checkpoint, which was not committed since */
};
struct ipc_fail {
        uint64_t version_id;
        char reason[IPC_TEXT_MAX];
};
struct ipc_wait {
        uint64_t version_id;
        int64_t timeout_ms; /* < 0: no timeout */
        uint32_t state, unused;
};
struct ipc_state {
        uint32_t state, unused;
};
struct ipc_find {
        uint64_t sequence;               /* of the tag: only this version; 0: any */
        uint32_t waits, unused;          /* waits: for versions that the client has closed and that other ranks must close, too */
        char persist_path[IPC_PATH_MAX]; /* "" = the session's */
        char tag[IPC_NAME_MAX];          /* "" = the newest */
};
#define IPC_PASSED_MAX 4
/* A checkpoint that a search skipped although it may be newer, and the reason. */
struct ipc_passed {
        char tag[IPC_NAME_MAX];
        char reason[IPC_TEXT_MAX];
};
struct ipc_found {
        uint64_t version_id;
        uint64_t sequence;
        uint64_t writing; /* of the tag, if the session's run wrote the version; else 0 */
        int64_t step; /* -1: the tag contains no step */
        uint32_t state, passed_count; /* passed_count: how many skipped checkpoints are listed */
        char tag[IPC_NAME_MAX];
        struct ipc_passed passed[IPC_PASSED_MAX];
};
/* How far the client can read and check the stored file itself. */
enum ipc_reads { IPC_READS_NONE = 0, IPC_READS_WHOLE = 1, IPC_READS_PARTS = 2 };
struct ipc_open {
        uint64_t version_id;
        uint32_t reads_storage, unused; /* reads_storage: enum ipc_reads. With IPC_READS_PARTS the answer may ask for FETCH */
        char name[IPC_NAME_MAX];
};
enum ipc_source { IPC_SOURCE_MEMORY = 0, IPC_SOURCE_PEER = 1, IPC_SOURCE_STORAGE = 2 };
struct ipc_opened {
        uint64_t size; /* of the file; the fd's file may be larger */
        uint32_t format, source;
        /* chunk_bytes 0: the fd is an image whose bytes were verified. Otherwise, if image_id is 0, it is the stored file, whose chunks
         * the client checks while it reads. Otherwise it is an image that has those bytes only that were asked for with FETCH. */
        uint32_t chunk_bytes, chunk_count;
        uint32_t is_direct, unused; /* is_direct: the fd needs reads of whole pages (O_DIRECT) */
        uint64_t image_id;
        uint64_t origin;            /* sequence of the version that wrote the file: tells two writings of one size apart */
        uint64_t crc64[];           /* of each chunk; the last chunk is shorter. None with an image_id */
};
/* Chunks of an image that FETCH fills. */
struct ipc_run {
        uint32_t first, count;
};
struct ipc_fetch {
        uint64_t image_id;
        uint32_t run_count, unused;
        struct ipc_run runs[IPC_RUNS_MAX];
};
struct ipc_flush {
        int64_t timeout_ms;
        char tag[IPC_NAME_MAX]; /* "" = everything */
};
struct ipc_report {
        uint32_t report, unused; /* enum nebula_report */
        char persist_path[IPC_PATH_MAX]; /* "" = the session's; for a TOOL, "" = all jobs */
};
struct ipc_watch {
        double since; /* seconds since 1970: only later events */
        int64_t timeout_ms; /* < 0: no timeout */
        uint32_t is_of_cloud, cloud; /* is_of_cloud: only events of this cloud (enum nebula_cloud); else those of the job, or, for a READER, of the
                                      * path, commits among them */
};
struct ipc_event {
        double at, seconds; /* seconds: how long the write took; 0: another node wrote */
        uint64_t size;      /* bytes */
        uint32_t kind, unused; /* enum nebula_event_kind */
        char tag[IPC_NAME_MAX];
        char text[IPC_TEXT_MAX];
};
enum ipc_keep_what { IPC_KEEP_PIN = 0, IPC_KEEP_UNPIN = 1, IPC_KEEP_REMOVE = 2 };
struct ipc_keep {
        uint32_t what, unused;
        char tag[IPC_NAME_MAX];
        char reason[IPC_REASON_MAX]; /* of a pin */
};
struct ipc_compared {
        uint64_t sequence;
        uint32_t is_whole, unused;
        char tag[IPC_NAME_MAX];
};
struct ipc_stop {
        uint32_t now, unused; /* now: drop the memory tier too */
};

struct ipc_publish {
        uint64_t version_id;
        char name[IPC_NAME_MAX];    /* "" = the whole version, as a directory */
        char path[IPC_PATH_MAX];    /* absolute */
        char staging[IPC_PATH_MAX]; /* for a directory: the files to add to it are here; "" for a file */
};
struct ipc_path {
        char path[IPC_PATH_MAX]; /* absolute */
};
struct ipc_found_path {
        struct ipc_found found;
        char name[IPC_NAME_MAX]; /* "" = the path is that of a whole version */
};

/* Sends one frame. The caller keeps passed_fd; passed_fd < 0: none. */
enum nebula_status ipc_send(int fd, enum ipc_type type, enum nebula_status status, const void *payload, size_t size,
                            int passed_fd, struct nebula_error *error);
/* Answers with a text: in the frame, or, if it is too large for a frame, in a file whose descriptor is sent. */
enum nebula_status ipc_send_text(int fd, enum ipc_type type, const char *text, size_t size, struct nebula_error *error);
/* Answers with an error. version_id 0: none. */
enum nebula_status ipc_send_error(int fd, enum ipc_type type, const struct nebula_error *failure, uint64_t version_id,
                                  struct nebula_error *error);
/*
 * Receives one frame into a buffer that grows and is reused; start with a zeroed struct. NEBULA_UNAVAILABLE: the other
 * end is gone. NEBULA_INVALID: the frame breaks a rule. After either, close the connection. The payload is aligned for
 * any struct and followed by a NUL that `size` does not count. To keep `fd`, set it to -1 after you took it; otherwise
 * the next receive closes it.
 */
struct ipc_frame {
        struct ipc_header header;
        void *payload;
        size_t capacity;
        int fd; /* valid if header.has_fd; -1: none, or taken */
};
enum nebula_status ipc_receive(int fd, struct ipc_frame *frame, struct nebula_error *error);
/*
 * Receives requests, which carry no descriptor, usually with one system call each. Bytes of later requests wait in the
 * inbox. The inbox starts zeroed and belongs to the connection.
 */
struct ipc_inbox {
        char data[1024]; /* the requests of a save have some 600 bytes */
        size_t start, count; /* start and count of the waiting bytes */
};
enum nebula_status ipc_receive_request(int fd, struct ipc_inbox *inbox, struct ipc_frame *frame, struct nebula_error *error);
/* For threads that must not block: receives once what has come. If a whole request is held afterwards,
 * ipc_receive_request does not block. */
enum nebula_status ipc_inbox_fill(int fd, struct ipc_inbox *inbox, struct nebula_error *error);
enum ipc_held {
        IPC_HELD_PART,  /* or nothing */
        IPC_HELD_WHOLE, /* a request, or bytes that break a rule */
        IPC_HELD_LARGE, /* the start of a request that is larger than the inbox */
};
enum ipc_held ipc_inbox_held(const struct ipc_inbox *inbox);
/* If the text came as a file, reads it into the payload. */
enum nebula_status ipc_receive_text(struct ipc_frame *frame, struct nebula_error *error);
void ipc_frame_done(struct ipc_frame *frame); /* frees the buffer; closes `fd` if it was not taken */
/* The version id in an error answer; 0: none. */
uint64_t ipc_refused_version(const struct ipc_frame *frame);
/* Size of a request's struct; 0 for an unknown type. */
size_t ipc_request_size(enum ipc_type type);
/* Checks a request's size and the ends of its strings. Every receiver calls it. */
enum nebula_status ipc_request_check(const struct ipc_frame *frame, struct nebula_error *error);
/* Size of the answer to a request; 0 if it has no payload, SIZE_MAX if its size varies. */
size_t ipc_answer_size(enum ipc_type type);
/* Checks an answer to `type`. An error answer is returned as this call's own error. *ret_broken: true if the frame
 * breaks a rule, so that the connection must be closed; false for an ordinary refusal. */
enum nebula_status ipc_answer_check(const struct ipc_frame *frame, enum ipc_type type, bool *ret_broken,
                                    struct nebula_error *error);
/*
 * Sends one request and receives its answer. timeout_ms < 0: waits without limit. NEBULA_TIMEOUT: no answer began in
 * time; the connection is broken then, because the answer may still come. On failure, *ret_broken says whether to close
 * the connection (true) or whether the agent only refused (false).
 */
enum nebula_status ipc_call(int fd, enum ipc_type type, const void *payload, size_t size, int64_t timeout_ms,
                            struct ipc_frame *frame, bool *ret_broken, struct nebula_error *error);
/* The second half of ipc_call, after the request was sent. */
enum nebula_status ipc_await(int fd, enum ipc_type type, int64_t timeout_ms, struct ipc_frame *frame, bool *ret_broken,
                             struct nebula_error *error);

/*
 * Where to find the agent of this user and node:
 *  $NEBULA_RUNTIME_DIR, else /tmp/nebula-<uid>; then "-<id>" for $NEBULA_NODE_ID.
 * XDG_RUNTIME_DIR does not decide, because it differs between the shells of one user, and each value would get an agent of its own.
 * $XDG_RUNTIME_DIR/nebula and /run/user/<uid>/nebula are searched too: agents of older versions are there, and agents for which /tmp
 * cannot be used.
 * The directory has mode 0700 and must belong to this user. It holds agent.sock, agent.lock and agent.log.
 * The memory tier is $NEBULA_MEMORY_DIR, else /dev/shm/nebula-<uid>[-<id>].
 */
struct ipc_place {
        char directory[IPC_PATH_MAX - 64];
        char socket[108];
        char lock[IPC_PATH_MAX];
        char log[IPC_PATH_MAX];
        char memory[IPC_PATH_MAX];
        char others[2][IPC_PATH_MAX - 64]; /* other directories to search for an agent, and to use if `directory` cannot be used */
        uint32_t other_count;
};
enum nebula_status ipc_place_find(struct ipc_place *ret_place, struct nebula_error *error);
/* Creates the directory if needed and checks its owner and mode. If that fails, one of the others becomes the place. */
enum nebula_status ipc_place_make(struct ipc_place *place, struct nebula_error *error);
/* Connects to the agent, in any of the places. Returns a descriptor, or the negative errno of the first place. */
int ipc_place_connect(const struct ipc_place *place);
struct os_stat;
/* Stat of one of these directories. Follows a link only if it belongs to this user or root: another user could put a link into /tmp. */
int ipc_place_stat(const char *path, struct os_stat *ret_stat);
/* Checks that the process at the other end of `fd` is this user's: another user could have made the socket below /tmp first. */
enum nebula_status ipc_place_check_peer(int fd, const struct ipc_place *place, uint32_t *ret_pid, struct nebula_error *error);

#endif
