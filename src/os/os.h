/*
 * os.h - the only way to the operating system.
 *
 * Every system call of Nebula goes through the table `os`, so that a test can
 * fail the k-th call (os_fault.c) or lose data that was not synced
 * (os_crash.c). A member takes and returns the same as its system call, with
 * one difference: a failure is a negative errno in the result, and the global
 * errno is not used. Members may return -EINTR and short counts; the helpers
 * below the table retry and complete.
 *
 * Threads: the table is set before threads start and does not change
 * afterwards.
 */
#ifndef NB_OS_OS_H
#define NB_OS_OS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Times are nanoseconds in int64_t. */
#define SECOND_NS INT64_C(1000000000)

/* Flags of open, independent of the platform. */
enum os_open {
        OS_READ = 1,
        OS_WRITE = 2,
        OS_CREATE = 4,     /* mode 0600, or 0666 with OS_SHARED */
        OS_EXCLUSIVE = 8,
        OS_TRUNCATE = 16,
        OS_APPEND = 32,
        OS_DIRECT = 64,    /* O_DIRECT */
        OS_DIRECTORY = 128,
        OS_NOFOLLOW = 256,
        OS_SHARED = 512,   /* readable for other users as the umask allows (os_create.h) */
};

enum os_kind { OS_KIND_FILE, OS_KIND_DIRECTORY, OS_KIND_LINK, OS_KIND_OTHER };

struct os_stat {
        uint64_t size;       /* bytes */
        uint64_t device, inode;
        int64_t mtime_ns;
        int64_t born_ns;     /* of directories, and only by stat_below; 0: unknown */
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

/* The probes of doctor, and the value of each. A negative errno: not allowed, or not present. */
enum os_lock { OS_LOCK_ALONE, OS_LOCK_SHARED, OS_LOCK_NONE };
enum os_probe {
        OS_PROBE_TERMINAL_IN,  /* columns of the terminal behind stdin; -ENOTTY if it is not a terminal */
        OS_PROBE_TERMINAL_OUT,
        OS_PROBE_TERMINAL_ERR,
        OS_PROBE_IO_URING,     /* 1: a ring can be opened */
        OS_PROBE_USERFAULTFD,  /* 2: a write-protected page caught a write; 1: only faults of user mode are caught */
        OS_PROBE_MEMLOCK,      /* bytes that may be locked; UINT64_MAX: no limit */
        OS_PROBE_DESCRIPTORS,  /* files that this process may open; UINT64_MAX: no limit */
};
int os_probe_linux(enum os_probe what, uint64_t *ret_value); /* os_linux.probe */

struct os_dir; /* an open directory listing */

/* Events of a userfaultfd (os_uffd.c). Addresses are page-aligned. */
enum os_uffd_kind {
        OS_UFFD_FAULT,    /* a thread waits to write to the page at `start` */
        OS_UFFD_REMOVE,   /* [start, end) is about to be emptied (MADV_DONTNEED, MADV_FREE) */
        OS_UFFD_UNMAP,    /* [start, end) is gone */
        OS_UFFD_REMAP,    /* [start, end) is now at `moved_to` */
        OS_UFFD_OTHER,
};
struct os_uffd_event {
        enum os_uffd_kind kind;
        uint64_t start, end, moved_to;
};
#define OS_UFFD_UNPOPULATED 1u /* protection also works on pages that were never touched */

/* The mapping that contains an address, or the next one above it. */
struct os_mapping {
        uint64_t start, end;
        bool private_anonymous;
        bool private_file; /* and writable */
};

enum os_watch {
        OS_WATCH_READ, /* reported while it is readable or closed; can be requested again */
        OS_WATCH_ONCE, /* reported once, immediately: a message from another thread */
        OS_WATCH_END,  /* call it before the descriptor is closed, too */
};
/* io_uring, for bulk I/O. Only one thread uses a ring. */
struct os_ring;
struct os_ring_request {
        void *key;       /* returned with the result */
        int fd;
        bool is_write;
        bool may_take_pages; /* the pages of `data` may be missing: a thread of the kernel then makes them */
        int buffer;      /* the registered buffer that holds `data`; -1: none. For writes only */
        void *data;
        uint32_t size;   /* bytes */
        uint64_t offset;
};
struct os_ring_buffer {
        const void *data;
        uint64_t size; /* bytes, at most 1 GiB */
};
/* Copies `size` bytes in user space. */
typedef void os_copy(void *argument, void *to, const void *from, size_t size);

struct os_table {
        /* files */
        int (*open)(const char *path, int flags);                  /* never blocks, not even on a FIFO */
        int (*close)(int fd);
        int (*duplicate)(int fd);                                  /* another descriptor of the same open file */
        int (*inherit)(int fd, bool on);                           /* whether programs that system() starts have the descriptor, too */
        int64_t (*pread)(int fd, void *data, size_t size, uint64_t offset);
        int64_t (*pread_cached)(int fd, void *data, size_t size, uint64_t offset); /* -EAGAIN: the disk would be read; -EOPNOTSUPP: unknown */
        int64_t (*pwrite)(int fd, const void *data, size_t size, uint64_t offset);
        int64_t (*read)(int fd, void *data, size_t size);
        int64_t (*write)(int fd, const void *data, size_t size);
        int (*fsync)(int fd);
        int (*truncate)(int fd, uint64_t size);
        int (*allocate)(int fd, uint64_t offset, uint64_t size);   /* fallocate */
        int (*punch)(int fd, uint64_t offset, uint64_t size);      /* frees the pages, keeps the size */
        int (*lock)(int fd, enum os_lock how);                     /* flock; -EAGAIN: another open file has it. Ends with the last descriptor and mapping */
        int (*stat)(const char *path, bool follow, struct os_stat *ret_stat);
        int (*fstat)(int fd, struct os_stat *ret_stat);
        int (*space)(const char *path, struct os_space *ret_space);
        int (*rename)(const char *from, const char *to);
        int (*exchange)(const char *a, const char *b); /* swaps both names at once; -EINVAL: the file system cannot do it */
        int (*link)(const char *from, const char *to);
        int (*clone)(int fd, int from);  /* shares all blocks of `from`, until one is written; -EOPNOTSUPP and others: the file system cannot do it */
        int (*clone_range)(int fd, int from, uint64_t offset, uint64_t size); /* the same of a range, at the same offset in both */
        int (*unlink)(const char *path);
        int (*mkdir)(const char *path, uint32_t mode);
        int (*rmdir)(const char *path);
        int (*readlink)(const char *path, char *text, size_t size);
        int (*opendir)(const char *path, struct os_dir **ret_dir);
        int (*readdir)(struct os_dir *dir, char *name, size_t size); /* 1: an entry, 0: the end; never returns . or .. */
        void (*closedir)(struct os_dir *dir);
        /*
         * The same calls below a root in which other users may write. The root is resolved like any path. `key` is a path below
         * it; "" is the root itself. No link inside `key` is followed: -ELOOP. If another process moves or replaces directories
         * during a call, the call still cannot leave the root (os_below.c).
         */
        int (*open_below)(const char *root, const char *key, int flags);
        int (*stat_below)(const char *root, const char *key, struct os_stat *ret_stat); /* of a link itself */
        int (*rename_below)(const char *root, const char *from, const char *to);
        int (*rename_new_below)(const char *root, const char *from, const char *to); /* -EEXIST: `to` exists; -EINVAL: the file system cannot do it */
        int (*link_below)(const char *root, const char *key, const char *to_root, const char *to);
        int (*unlink_below)(const char *root, const char *key);
        int (*mkdir_below)(const char *root, const char *key, uint32_t mode);
        int (*rmdir_below)(const char *root, const char *key);
        int (*opendir_below)(const char *root, const char *key, struct os_dir **ret_dir);
        int (*stat_entry)(struct os_dir *dir, const char *name, struct os_stat *ret_stat); /* of a link itself; works on any open listing */
        /* rings: -ENOSYS if os_offer_ring was not called or the machine has no io_uring. Requests complete in any
         * order. The kernel uses a request's memory until its result was reaped */
        int (*ring_open)(uint32_t depth, struct os_ring **ret_ring);
        void (*ring_close)(struct os_ring *ring);                  /* no request may be in flight */
        int (*ring_register)(struct os_ring *ring, const struct os_ring_buffer *buffers, uint32_t count); /* pins the pages until the ring closes */
        void (*ring_queue)(struct os_ring *ring, const struct os_ring_request *request); /* at most `depth` requests are queued or in flight */
        int (*ring_submit)(struct os_ring *ring);                  /* submits queued requests and waits until one has completed */
        int (*ring_wait)(struct os_ring *ring);                    /* waits without submitting */
        uint32_t (*ring_queued)(struct os_ring *ring);             /* requests queued and not submitted */
        bool (*ring_reap)(struct os_ring *ring, void **ret_key, int64_t *ret_result); /* false: no result is ready */
        /* memory */
        int (*memfd)(const char *name);
        int (*map)(int fd, uint64_t offset, uint64_t size, int flags, void **ret_data);
        int (*unmap)(void *data, uint64_t size);
        int (*advise)(void *data, uint64_t size, enum os_advice advice);
        int (*move)(void *data, uint64_t size, void *to);          /* moves the pages; other threads see the old or the new memory */
        /* sockets: Unix stream sockets, close-on-exec */
        int (*listen)(const char *path);
        int (*connect)(const char *path);
        int (*accept)(int fd);
        int (*socketpair)(int ret_fds[2]);
        int64_t (*send)(int fd, const void *data, size_t size, int passed_fd);   /* passed_fd < 0: none; never raises SIGPIPE */
        int64_t (*receive)(int fd, void *data, size_t size, int *ret_passed_fd); /* *ret_passed_fd is -1 if no descriptor came */
        int (*peer)(int fd, uint32_t *ret_uid, uint32_t *ret_pid);
        int (*shutdown)(int fd);
        int (*poll)(int fd, int64_t timeout_ms);                                 /* 1: readable or closed, 0: timeout */
        int (*can_send)(int fd);                                                 /* 1: can send some pages without waiting, or closed */
        /* many descriptors at once, each with a key; the set itself is a descriptor */
        int (*watch_open)(void);
        int (*watch)(int set, int fd, void *key, enum os_watch how);
        int (*watch_wait)(int set, void **ret_keys, size_t count, int64_t timeout_ms); /* returns the number of keys; timeout_ms < 0: no timeout */
        /* processes and time */
        /* Runs the program to its end. stdio: becomes its stdin, stdout and stderr; -1, or a NULL pointer: /dev/null */
        int (*spawn)(const char *path, char *const argv[], const int stdio[3], int *ret_exit);
        /* Runs the program and reads what it prints, at most `room` bytes. It runs in a process group of its own, which is killed when the
         * time is over (-ETIMEDOUT) or when it prints more (-EFBIG). Its other stdio is /dev/null. */
        int (*run)(const char *path, char *const argv[], int64_t timeout_ms, char *text, size_t room, size_t *ret_size, int *ret_exit);
        int64_t (*now_ns)(void);        /* monotonic, counts suspend: CLOCK_BOOTTIME */
        int64_t (*wall_ns)(void);       /* since 1970 */
        int64_t (*thread_cpu_ns)(void);
        void (*sleep_ms)(int64_t ms);
        int (*random)(void *data, size_t size);
        uint32_t (*pid)(void);
        uint32_t (*uid)(void);
        bool (*alive)(uint32_t pid);
        int (*signal)(uint32_t pid, uint32_t number);
        uint32_t (*cpu_count)(void);    /* processors that this process may run on */
        uint64_t (*memory_free)(void);  /* bytes, the smaller of the machine's and the cgroup's */
        /* Per mille of the last 10 seconds in which no thread of the cgroup, or else of the machine, ran because all waited for memory. 0 if unknown */
        uint32_t (*memory_stalled)(void);
        int (*probe)(enum os_probe what, uint64_t *ret_value); /* the abilities of this machine, found by trying */
        /* write protection of private anonymous memory: os_uffd.c. -EAGAIN: read a waiting event first */
        int (*uffd_open)(uint32_t *ret_abilities);               /* also catches faults of the kernel; fails if that is not allowed */
        int (*uffd_register)(int fd, uint64_t start, uint64_t end);
        int (*uffd_unregister)(int fd, uint64_t start, uint64_t end); /* removes protection and wakes waiting threads */
        int (*uffd_protect)(int fd, uint64_t start, uint64_t end, bool on); /* removing it also wakes waiting threads */
        int (*uffd_wake)(int fd, uint64_t start, uint64_t end);
        int (*uffd_read)(int fd, struct os_uffd_event *events, size_t count); /* number of events; never blocks */
        /*
         * Gives private anonymous memory that has no pages yet its pages and their contents in one step: a page fault would set the page
         * to zeros first. fill_open returns a descriptor for the range; -EOPNOTSUPP: page faults give this memory huge pages, which are
         * better. fill copies whole pages. Until the range is unregistered, a thread that touches a page without contents waits.
         */
        int (*fill_open)(void *data, uint64_t size);
        int (*fill)(int fd, void *to, const void *from, uint64_t size);
        int64_t (*copy_self)(void *to, uint64_t from, size_t size); /* -EFAULT or a short count if `from` is not readable */
        /* os_guard.c. guard installs handlers for SIGSEGV and SIGBUS. copy_guarded runs `copy`, whose source may
         * vanish meanwhile. It returns 0; or a negative errno, and then the contents of `to` are undefined */
        int (*guard)(void);
        int (*copy_guarded)(os_copy *copy, void *argument, void *to, uint64_t from, size_t size);
        /* Watches a mapping of a file that this process only reads: a page that cannot be read becomes zeros, in place of a SIGBUS.
         * watch_map returns a slot, or a negative errno: then it is not watched. unwatch_map says whether there was such a page. A
         * negative slot is fine. */
        int (*watch_map)(const void *data, uint64_t size);
        bool (*unwatch_map)(int slot);
        int (*find_mapping)(int maps_fd, uint64_t address, struct os_mapping *ret_mapping); /* -ENOTTY before Linux 6.11 */
        /* threads */
        int (*futex_wait)(const void *word, uint32_t value, int64_t timeout_ms); /* timeout_ms < 0: no timeout */
        int (*futex_wake)(const void *word);                     /* wakes all waiters; `word` may be unmapped already */
        int (*thread_nice)(int nice);                            /* added to the calling thread's nice value */
        void (*yield)(void);
        /* TCP, between agents only: os_tcp.c. Use send, receive, poll, shutdown and close for these sockets too */
        int (*tcp_listen)(const char *address, uint16_t port, uint16_t *ret_port); /* port 0: any free one */
        int (*tcp_connect)(const char *address, uint16_t port, int64_t timeout_ms);
        int (*tcp_accept)(int fd, char *ret_address, size_t size);                 /* and the peer's address, as text */
        int (*host_name)(char *text, size_t size);
        int (*host_address)(char *text, size_t size);                              /* the address by which other hosts reach this one */
        /* 1 if the 2 MiB at `address` are one huge page, else 0; -ENOTTY before Linux 6.7. pagemap_fd: /proc/self/pagemap */
        int (*huge_page)(int pagemap_fd, uint64_t address);
        /* 1 if every page of [start, end) is present and belongs to no file, else 0; -ENOTTY before Linux 6.7 */
        int (*own_pages)(int pagemap_fd, uint64_t start, uint64_t end);
};

extern const struct os_table *os;      /* the table that all code calls */
extern const struct os_table os_linux; /* the real table, and the default */

/* Gives rings to the table. Only the agent and the command call this, because it links liburing: os_uring.c. */
void os_offer_ring(void);

/* Complete transfers: these retry EINTR and short counts. They return 0 or a negative errno; end of file is -ENODATA. */
int os_read_at(int fd, void *data, size_t size, uint64_t offset);
int os_write_at(int fd, const void *data, size_t size, uint64_t offset);
int os_sync(int fd);                                   /* fsync, retried only on EINTR */
/* Reads a whole small file into a new NUL-terminated buffer, which the caller frees. A file larger than `limit` is -EFBIG. */
int os_read_file(const char *path, size_t limit, char **ret_data, size_t *ret_size);
int os_sync_dir_below(const char *root, const char *key);
/* Makes the missing directories of `key`; the root must exist. Syncs each directory in which it makes one. */
int os_make_dirs_below(const char *root, const char *key, uint32_t mode);
/* Writes a temporary file in the same directory, then fsync, rename, fsync of the directory. */
int os_write_file_atomic(const char *path, const void *data, size_t size);
int os_sync_dir(const char *path);
int os_make_dirs(const char *path, uint32_t mode);     /* like mkdir -p; syncs each directory in which it makes one */
int os_remove_tree(const char *path);                  /* does not follow links; an absent tree is no error */
const char *os_error_text(int negative_errno);         /* strerror, thread-safe */

#endif
