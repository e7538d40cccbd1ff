/*
 * os.h - the one door to the operating system.
 *
 * Every system call that Nebula makes goes through the table `os`, so that a
 * test can fail the k-th call (os_fault.c) or lose what was not synced
 * (os_crash.c). Members take and return what the system call does, except that
 * failure is a negative errno in the result and the global errno is not used.
 * They may return -EINTR and short counts; the helpers below the table retry
 * and complete.
 *
 * Threads: the table is set before threads start and not changed after.
 */
#ifndef NB_OS_OS_H
#define NB_OS_OS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Flags of open, independent of the platform's. */
enum os_open {
        OS_READ = 1,
        OS_WRITE = 2,
        OS_CREATE = 4,     /* mode 0600 for private, 0666 with OS_SHARED */
        OS_EXCLUSIVE = 8,
        OS_TRUNCATE = 16,
        OS_APPEND = 32,
        OS_DIRECT = 64,    /* O_DIRECT */
        OS_DIRECTORY = 128,
        OS_NOFOLLOW = 256,
        OS_SHARED = 512,   /* for others too, as the umask allows (os_create.h) */
};

enum os_kind { OS_KIND_FILE, OS_KIND_DIRECTORY, OS_KIND_LINK, OS_KIND_OTHER };

struct os_stat {
        uint64_t size;       /* bytes */
        uint64_t device, inode;
        int64_t mtime_ns;
        uint32_t uid, mode, link_count;
        enum os_kind kind;
};

struct os_space {
        uint64_t total_bytes, free_bytes; /* free to this user */
        uint64_t block_bytes;
        uint64_t fs_type;                 /* f_type of statfs */
};

enum os_map { OS_MAP_READ = 1, OS_MAP_WRITE = 2, OS_MAP_PRIVATE = 4, OS_MAP_POPULATE = 8, OS_MAP_ANONYMOUS = 16 };
enum os_advice { OS_ADVISE_HUGE, OS_ADVISE_POPULATE_WRITE, OS_ADVISE_POPULATE_READ, OS_ADVISE_COLLAPSE, OS_ADVISE_DONTNEED };

/* What doctor asks, and what each answers. -errno: it is not allowed, or not there. */
enum os_probe {
        OS_PROBE_TERMINAL_IN,  /* columns of the terminal behind stdin; -ENOTTY when it is none */
        OS_PROBE_TERMINAL_OUT,
        OS_PROBE_TERMINAL_ERR,
        OS_PROBE_IO_URING,     /* 1: a ring can be set up */
        OS_PROBE_USERFAULTFD,  /* 2: a write-protected page caught a write; 1: only faults of user mode */
        OS_PROBE_MEMLOCK,      /* bytes that may be locked; UINT64_MAX: no limit */
        OS_PROBE_DESCRIPTORS,  /* files that this process may have open; UINT64_MAX: no limit */
};
int os_probe_linux(enum os_probe what, uint64_t *ret_value); /* os_linux.probe */

struct os_dir; /* an open directory listing */

/* What a userfaultfd tells (os_uffd.c). Addresses are page-aligned. */
enum os_uffd_kind {
        OS_UFFD_FAULT,    /* a thread waits to write to the page at `start` */
        OS_UFFD_REMOVE,   /* [start, end) is about to be emptied (MADV_DONTNEED, MADV_FREE) */
        OS_UFFD_UNMAP,    /* [start, end) is gone */
        OS_UFFD_REMAP,    /* [start, end) now lives at `moved_to` */
        OS_UFFD_OTHER,
};
struct os_uffd_event {
        enum os_uffd_kind kind;
        uint64_t start, end, moved_to;
};
#define OS_UFFD_UNPOPULATED 1u /* protection also holds for pages that were never touched */

/* The mapping that holds an address, or the next one above it. */
struct os_mapping {
        uint64_t start, end;
        bool private_anonymous, private_file;
};

enum os_watch {
        OS_WATCH_READ, /* reported as long as it is readable or closed; may be asked for again */
        OS_WATCH_ONCE, /* reported once, at once: as a message from another thread */
        OS_WATCH_END,  /* before the descriptor is closed, too */
};
/* io_uring, for bulk I/O. One thread uses a ring. */
struct os_ring;
struct os_ring_request {
        void *key;       /* comes back with the result */
        int fd;
        bool is_write;
        bool may_take_pages; /* `data` may have none yet: a thread of the kernel makes them */
        int buffer;      /* the registered one that `data` lies in; -1: none. Writes only */
        void *data;
        uint32_t size;   /* bytes */
        uint64_t offset;
};
struct os_ring_buffer {
        const void *data;
        uint64_t size; /* bytes; 1 GiB at most */
};
/* Copies `size` bytes, in user space. */
typedef void os_copy(void *argument, void *to, const void *from, size_t size);

struct os_table {
        /* files */
        int (*open)(const char *path, int flags);                  /* never waits, not even at a FIFO */
        int (*close)(int fd);
        int (*duplicate)(int fd);                                  /* one more descriptor of what is open */
        int64_t (*pread)(int fd, void *data, size_t size, uint64_t offset);
        int64_t (*pwrite)(int fd, const void *data, size_t size, uint64_t offset);
        int64_t (*read)(int fd, void *data, size_t size);
        int64_t (*write)(int fd, const void *data, size_t size);
        int (*fsync)(int fd);
        int (*truncate)(int fd, uint64_t size);
        int (*allocate)(int fd, uint64_t offset, uint64_t size);   /* fallocate */
        int (*punch)(int fd, uint64_t offset, uint64_t size);      /* frees the pages, keeps the size */
        int (*lock)(int fd, bool wait);                            /* exclusive flock, dies with the process */
        int (*stat)(const char *path, bool follow, struct os_stat *ret_stat);
        int (*fstat)(int fd, struct os_stat *ret_stat);
        int (*space)(const char *path, struct os_space *ret_space);
        int (*rename)(const char *from, const char *to);
        int (*exchange)(const char *a, const char *b); /* both change places at once; -EINVAL: not in this file system */
        int (*link)(const char *from, const char *to);
        int (*clone)(int fd, int from);  /* the whole of `from`, its blocks shared until one is written to; -EOPNOTSUPP and others: not here */
        int (*unlink)(const char *path);
        int (*mkdir)(const char *path, uint32_t mode);
        int (*rmdir)(const char *path);
        int (*readlink)(const char *path, char *text, size_t size);
        int (*opendir)(const char *path, struct os_dir **ret_dir);
        int (*readdir)(struct os_dir *dir, char *name, size_t size); /* 1: an entry, 0: the end; never . or .. */
        void (*closedir)(struct os_dir *dir);
        /*
         * The same below a root that others may write to. The root is a path like any other; `key` is one below it, "" the root itself.
         * No link is followed in it: -ELOOP. What others move or replace during a call leads nowhere out of the root (os_below.c).
         */
        int (*open_below)(const char *root, const char *key, int flags);
        int (*stat_below)(const char *root, const char *key, struct os_stat *ret_stat); /* of a link itself */
        int (*rename_below)(const char *root, const char *from, const char *to);
        int (*link_below)(const char *root, const char *key, const char *to_root, const char *to);
        int (*unlink_below)(const char *root, const char *key);
        int (*mkdir_below)(const char *root, const char *key, uint32_t mode);
        int (*rmdir_below)(const char *root, const char *key);
        int (*opendir_below)(const char *root, const char *key, struct os_dir **ret_dir);
        int (*stat_entry)(struct os_dir *dir, const char *name, struct os_stat *ret_stat); /* likewise; of any open listing */
        /* rings: -ENOSYS where os_offer_ring was not called, or the machine has none. Requests end in any order; the memory of one belongs
         * to the kernel until it has come back */
        int (*ring_open)(uint32_t depth, struct os_ring **ret_ring);
        void (*ring_close)(struct os_ring *ring);                  /* nothing is under way */
        int (*ring_register)(struct os_ring *ring, const struct os_ring_buffer *buffers, uint32_t count); /* their pages stay where they are until the ring closes */
        void (*ring_queue)(struct os_ring *ring, const struct os_ring_request *request); /* `depth` at most are queued or under way */
        int (*ring_submit)(struct os_ring *ring);                  /* what is queued; waits until a request has come back */
        int (*ring_wait)(struct os_ring *ring);                    /* the same without submitting */
        uint32_t (*ring_queued)(struct os_ring *ring);             /* so many are not submitted */
        bool (*ring_reap)(struct os_ring *ring, void **ret_key, int64_t *ret_result); /* false: none has come back */
        /* memory */
        int (*memfd)(const char *name);
        int (*map)(int fd, uint64_t offset, uint64_t size, int flags, void **ret_data);
        int (*unmap)(void *data, uint64_t size);
        int (*advise)(void *data, uint64_t size, enum os_advice advice);
        int (*move)(void *data, uint64_t size, void *to);          /* pages and all; what was at `to` is unmapped. Everybody sees one or the other */
        /* sockets: Unix stream sockets, close-on-exec */
        int (*listen)(const char *path);
        int (*connect)(const char *path);
        int (*accept)(int fd);
        int (*socketpair)(int ret_fds[2]);
        int64_t (*send)(int fd, const void *data, size_t size, int passed_fd);   /* passed_fd < 0: none; never SIGPIPE */
        int64_t (*receive)(int fd, void *data, size_t size, int *ret_passed_fd); /* -1 when none came */
        int (*peer)(int fd, uint32_t *ret_uid, uint32_t *ret_pid);
        int (*shutdown)(int fd);
        int (*poll)(int fd, int64_t timeout_ms);                                 /* 1: readable or closed, 0: timeout */
        int (*can_send)(int fd);                                                 /* 1: some pages, without waiting, or closed; 0: not now */
        /* many descriptors at once, each with a key; a set is a descriptor itself */
        int (*watch_open)(void);
        int (*watch)(int set, int fd, void *key, enum os_watch how);
        int (*watch_wait)(int set, void **ret_keys, size_t count, int64_t timeout_ms); /* of how many; timeout_ms < 0: none */
        /* processes and time */
        int (*spawn)(const char *path, char *const argv[], int *ret_exit);       /* runs to its end; stdio on /dev/null */
        int64_t (*now_ns)(void);        /* monotonic, counts suspend: CLOCK_BOOTTIME */
        int64_t (*wall_ns)(void);       /* since 1970 */
        int64_t (*thread_cpu_ns)(void);
        void (*sleep_ms)(int64_t ms);
        int (*random)(void *data, size_t size);
        uint32_t (*pid)(void);
        uint32_t (*uid)(void);
        bool (*alive)(uint32_t pid);
        uint32_t (*cpu_count)(void);    /* that this process may run on */
        uint64_t (*memory_free)(void);  /* bytes, the smaller of the machine's and the cgroup's */
        int (*probe)(enum os_probe what, uint64_t *ret_value); /* what this machine allows, tried for real */
        /* write protection of private anonymous memory: os_uffd.c. -EAGAIN: an event waits to be read first */
        int (*uffd_open)(uint32_t *ret_abilities);               /* catches faults of the kernel too, or fails */
        int (*uffd_register)(int fd, uint64_t start, uint64_t end);
        int (*uffd_unregister)(int fd, uint64_t start, uint64_t end); /* drops protection, wakes who waits */
        int (*uffd_protect)(int fd, uint64_t start, uint64_t end, bool on); /* off also wakes */
        int (*uffd_wake)(int fd, uint64_t start, uint64_t end);
        int (*uffd_read)(int fd, struct os_uffd_event *events, size_t count); /* how many; never blocks */
        int64_t (*copy_self)(void *to, uint64_t from, size_t size); /* -EFAULT or short where `from` is not readable */
        /* os_guard.c: handles SIGSEGV and SIGBUS from now on, for copies by `copy` of what may vanish meanwhile; those return 0, or
         * negative, and then nothing is known of `to` */
        int (*guard)(void);
        int (*copy_guarded)(os_copy *copy, void *argument, void *to, uint64_t from, size_t size);
        int (*find_mapping)(int maps_fd, uint64_t address, struct os_mapping *ret_mapping); /* -ENOTTY before Linux 6.11 */
        /* threads */
        int (*futex_wait)(const void *word, uint32_t value, int64_t timeout_ms); /* timeout_ms < 0: none */
        int (*futex_wake)(const void *word);                     /* all waiters; `word` may be gone already */
        int (*thread_nice)(int nice);                            /* added to the calling thread's */
        void (*yield)(void);
        /* TCP, between agents only: os_tcp.c. send, receive, poll, shutdown and close serve for these too */
        int (*tcp_listen)(const char *address, uint16_t port, uint16_t *ret_port); /* port 0: any */
        int (*tcp_connect)(const char *address, uint16_t port, int64_t timeout_ms);
        int (*tcp_accept)(int fd, char *ret_address, size_t size);                 /* and who it is, as text */
        int (*host_name)(char *text, size_t size);
        int (*host_address)(char *text, size_t size);                              /* by which other hosts reach this one */
        /* 1 when the 2 MiB at `address` are one huge page, 0 when not; -ENOTTY before Linux 6.7. pagemap_fd: /proc/self/pagemap */
        int (*huge_page)(int pagemap_fd, uint64_t address);
        /* Likewise, when every page of [start, end) is there, and none is a file's */
        int (*own_pages)(int pagemap_fd, uint64_t start, uint64_t end);
};

extern const struct os_table *os;      /* what the code calls */
extern const struct os_table os_linux; /* the real one, and the default */

/* Only programs that link a library for it have rings, the agent and the command: os_uring.c. */
void os_offer_ring(void);

/* Completed operations: retry EINTR and short counts. 0 or negative errno; end of file is -ENODATA. */
int os_read_at(int fd, void *data, size_t size, uint64_t offset);
int os_write_at(int fd, const void *data, size_t size, uint64_t offset);
int os_sync(int fd);                                   /* fsync, retried only on EINTR */
/* Whole small file into a new NUL-terminated buffer (free it); refuses more than limit with -EFBIG. */
int os_read_file(const char *path, size_t limit, char **ret_data, size_t *ret_size);
int os_read_file_below(const char *root, const char *key, size_t limit, char **ret_data, size_t *ret_size);
int os_sync_dir_below(const char *root, const char *key);
/* The directories of `key` that are missing; the root is there. Syncs each directory that it adds to. */
int os_make_dirs_below(const char *root, const char *key, uint32_t mode);
/* temp in the same directory, write, fsync, rename, fsync directory: the four visible steps. */
int os_write_file_atomic(const char *path, const void *data, size_t size);
int os_write_file_atomic_below(const char *root, const char *key, const void *data, size_t size);
int os_sync_dir(const char *path);
int os_make_dirs(const char *path, uint32_t mode);     /* like mkdir -p; syncs each parent it adds to */
int os_remove_tree(const char *path);                  /* does not follow links; absent is fine */
const char *os_error_text(int negative_errno);         /* strerror, thread-safe */

#endif
