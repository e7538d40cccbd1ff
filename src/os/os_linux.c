/* The real table. Each function is one system call and the translation of its flags. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "os/linux_abi.h"
#include "os/lock.h"
#include "os/os_create.h"
#include "os/os.h"
#include "os/os_linux.h"
#include "os/os_ring.h"
#include "os/os_uffd.h"

#ifndef FICLONE /* linux/fs.h conflicts with sys/mount.h on some systems */
#define FICLONE _IOW(0x94, 9, int)
struct file_clone_range {
        int64_t src_fd;
        uint64_t src_offset, src_length, dest_offset;
};
#define FICLONERANGE _IOW(0x94, 13, struct file_clone_range)
#endif

#define NS_PER_S 1000000000
#define TRANSFER_MAX 0x7ffff000u /* the kernel's limit for one transfer */

const struct os_table *os = &os_linux;

static int result_of(int result)
{
        return result < 0 ? -errno : result;
}

int os_linux_descriptor(int returned)
{
        int moved;

        if (returned < 0 || returned > STDERR_FILENO)
                return result_of(returned);
        moved = result_of(fcntl(returned, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
        close(returned);
        return moved;
}

static int64_t size_result_of(ssize_t result)
{
        return result < 0 ? -errno : result;
}

static size_t transfer_size(size_t size)
{
        return size < TRANSFER_MAX ? size : TRANSFER_MAX;
}

/* -- files -- */

int os_linux_open_flags(int flags)
{
        static const struct {
                int ours, theirs;
        } table[] = {
                { OS_CREATE, O_CREAT }, { OS_EXCLUSIVE, O_EXCL }, { OS_TRUNCATE, O_TRUNC }, { OS_APPEND, O_APPEND },
                { OS_DIRECT, O_DIRECT }, { OS_DIRECTORY, O_DIRECTORY }, { OS_NOFOLLOW, O_NOFOLLOW },
        };
        int theirs = O_CLOEXEC;

        if (flags & OS_WRITE)
                theirs |= flags & OS_READ ? O_RDWR : O_WRONLY;
        for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
                if (flags & table[i].ours)
                        theirs |= table[i].theirs;
        return theirs;
}

bool os_linux_is_shared(int flags)
{
        return (flags & (OS_SHARED | OS_CREATE)) == (OS_SHARED | OS_CREATE);
}

int os_linux_opened(int fd, int theirs)
{
        if (fcntl(fd, F_SETFL, theirs & (O_APPEND | O_DIRECT))) {
                int result = -errno;

                close(fd);
                return result;
        }
        return os_linux_descriptor(fd);
}

static int linux_open(const char *path, int flags)
{
        int theirs = os_linux_open_flags(flags);
        /* O_NONBLOCK: otherwise a FIFO at this path would block us until some process opens it for writing. */
        int fd = os_linux_is_shared(flags) ? os_create_file(AT_FDCWD, path, theirs | O_NONBLOCK) : open(path, theirs | O_NONBLOCK, 0600);

        lock_check_files("open");
        return fd < 0 ? -errno : os_linux_opened(fd, theirs);
}

static int linux_close(int fd)
{
        /* The descriptor is closed even after EINTR, so that error says nothing. */
        return close(fd) && errno != EINTR ? -errno : 0;
}

static int linux_duplicate(int fd)
{
        return os_linux_descriptor(fcntl(fd, F_DUPFD_CLOEXEC, 0));
}

static int linux_inherit(int fd, bool on)
{
        return result_of(fcntl(fd, F_SETFD, on ? 0 : FD_CLOEXEC));
}

static int64_t linux_pread(int fd, void *data, size_t size, uint64_t offset)
{
        return size_result_of(pread(fd, data, transfer_size(size), (off_t)offset));
}

static int64_t linux_pread_cached(int fd, void *data, size_t size, uint64_t offset)
{
        struct iovec part = { data, transfer_size(size) };

        return size_result_of(preadv2(fd, &part, 1, (off_t)offset, LINUX_RWF_NOWAIT));
}

static int64_t linux_pwrite(int fd, const void *data, size_t size, uint64_t offset)
{
        lock_check_files("pwrite");
        return size_result_of(pwrite(fd, data, transfer_size(size), (off_t)offset));
}

static int64_t linux_read(int fd, void *data, size_t size)
{
        return size_result_of(read(fd, data, transfer_size(size)));
}

static int64_t linux_write(int fd, const void *data, size_t size)
{
        lock_check_files("write");
        return size_result_of(write(fd, data, transfer_size(size)));
}

static int linux_fsync(int fd)
{
        lock_check_files("fsync");
        return result_of(fsync(fd));
}

static int linux_truncate(int fd, uint64_t size)
{
        lock_check_files("truncate");
        return result_of(ftruncate(fd, (off_t)size));
}

static int linux_allocate(int fd, uint64_t offset, uint64_t size)
{
        lock_check_files("allocate");
        return result_of(fallocate(fd, 0, (off_t)offset, (off_t)size));
}

static int linux_punch(int fd, uint64_t offset, uint64_t size)
{
        lock_check_files("punch");
        return result_of(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)size));
}

static int linux_lock(int fd, enum os_lock how)
{
        return result_of(flock(fd, how == OS_LOCK_NONE ? LOCK_UN : how == OS_LOCK_SHARED ? LOCK_SH | LOCK_NB : LOCK_EX | LOCK_NB));
}

void os_linux_convert_stat(const struct stat *from, struct os_stat *to)
{
        *to = (struct os_stat){
                .size = (uint64_t)from->st_size,
                .device = from->st_dev,
                .inode = from->st_ino,
                .mtime_ns = (int64_t)from->st_mtim.tv_sec * NS_PER_S + from->st_mtim.tv_nsec,
                .uid = from->st_uid,
                .mode = from->st_mode & 07777,
                .link_count = (uint32_t)from->st_nlink,
                .kind = S_ISREG(from->st_mode) ? OS_KIND_FILE
                      : S_ISDIR(from->st_mode) ? OS_KIND_DIRECTORY
                      : S_ISLNK(from->st_mode) ? OS_KIND_LINK : OS_KIND_OTHER,
        };
}

static int linux_stat(const char *path, bool follow, struct os_stat *ret_stat)
{
        struct stat found;

        if (fstatat(AT_FDCWD, path, &found, follow ? 0 : AT_SYMLINK_NOFOLLOW))
                return -errno;
        os_linux_convert_stat(&found, ret_stat);
        return 0;
}

static int linux_fstat(int fd, struct os_stat *ret_stat)
{
        struct stat found;

        if (fstat(fd, &found))
                return -errno;
        os_linux_convert_stat(&found, ret_stat);
        return 0;
}

static int linux_space(const char *path, struct os_space *ret_space)
{
        struct statfs found;
        uint64_t unit;

        if (statfs(path, &found))
                return -errno;
        unit = (uint64_t)(found.f_frsize ? found.f_frsize : found.f_bsize);
        *ret_space = (struct os_space){
                .total_bytes = found.f_blocks * unit,
                .free_bytes = found.f_bavail * unit,
                .block_bytes = (uint64_t)found.f_bsize,
                .fs_type = (uint64_t)found.f_type,
        };
        return 0;
}

static int linux_rename(const char *from, const char *to)
{
        lock_check_files("rename");
        return result_of(rename(from, to));
}

static int linux_exchange(const char *a, const char *b)
{
        lock_check_files("exchange");
        return result_of(renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE));
}

static int linux_link(const char *from, const char *to)
{
        lock_check_files("link");
        return result_of(link(from, to));
}

static int linux_clone(int fd, int from)
{
        lock_check_files("clone");
        return result_of(ioctl(fd, FICLONE, from));
}

static int linux_clone_range(int fd, int from, uint64_t offset, uint64_t size)
{
        struct file_clone_range range = { from, offset, size, offset };

        lock_check_files("clone_range");
        return result_of(ioctl(fd, FICLONERANGE, &range));
}

static int linux_unlink(const char *path)
{
        lock_check_files("unlink");
        return result_of(unlink(path));
}

static int linux_mkdir(const char *path, uint32_t mode)
{
        lock_check_files("mkdir");
        return result_of(os_create_directory(AT_FDCWD, path, mode));
}

static int linux_rmdir(const char *path)
{
        lock_check_files("rmdir");
        return result_of(rmdir(path));
}

static int linux_readlink(const char *path, char *text, size_t size)
{
        ssize_t length = readlink(path, text, size);

        if (length < 0)
                return -errno;
        if ((size_t)length >= size)
                return -ENAMETOOLONG;
        text[length] = 0;
        return (int)length;
}

static int linux_opendir(const char *path, struct os_dir **ret_dir)
{
        struct os_dir *dir = malloc(sizeof *dir);

        lock_check_files("opendir");
        if (!dir)
                return -ENOMEM;
        dir->stream = opendir(path);
        if (!dir->stream) {
                int result = -errno;

                free(dir);
                return result;
        }
        *ret_dir = dir;
        return 0;
}

static int linux_readdir(struct os_dir *dir, char *name, size_t size)
{
        for (;;) {
                struct dirent *entry;
                size_t length;

                errno = 0;
                entry = readdir(dir->stream);
                if (!entry)
                        return -errno; /* 0 at the end */
                if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
                        continue;
                length = strlen(entry->d_name);
                if (length >= size)
                        return -ENAMETOOLONG;
                memcpy(name, entry->d_name, length + 1);
                return 1;
        }
}

static void linux_closedir(struct os_dir *dir)
{
        closedir(dir->stream);
        free(dir);
}

/* -- memory -- */

static int linux_memfd(const char *name)
{
        return os_linux_descriptor(memfd_create(name, MFD_CLOEXEC));
}

#define PAGE_BYTES 4096u
#define HUGE_BYTES (2u << 20)

/* Aligns the mapping so that the huge pages of a file fall on those of the address space. The kernel does that by
 * itself for anonymous memory only. */
static void *map_aligned(uint64_t size, int protection, int kind, int fd, uint64_t offset)
{
        uint64_t whole = (size + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES, around = whole + HUGE_BYTES, before;
        unsigned char *place = mmap(NULL, around, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        void *data;

        if (place == MAP_FAILED)
                return MAP_FAILED;
        before = (offset - (uintptr_t)place) % HUGE_BYTES;
        data = mmap(place + before, size, protection, kind | MAP_FIXED, fd, (off_t)offset);
        if (data == MAP_FAILED) {
                munmap(place, around);
                return MAP_FAILED;
        }
        if (before)
                munmap(place, before);
        munmap(place + before + whole, HUGE_BYTES - before);
        return data;
}

static int linux_map(int fd, uint64_t offset, uint64_t size, int flags, void **ret_data)
{
        int protection = 0, kind = flags & OS_MAP_PRIVATE ? MAP_PRIVATE : MAP_SHARED;
        void *data;

        if (flags & OS_MAP_READ)
                protection |= PROT_READ;
        if (flags & OS_MAP_WRITE)
                protection |= PROT_WRITE;
        if (flags & OS_MAP_POPULATE)
                kind |= MAP_POPULATE;
        if (flags & OS_MAP_ANONYMOUS)
                kind |= MAP_ANONYMOUS;
        if (size >= HUGE_BYTES && !(flags & OS_MAP_ANONYMOUS))
                data = map_aligned(size, protection, kind, fd, offset);
        else
                data = mmap(NULL, size, protection, kind, flags & OS_MAP_ANONYMOUS ? -1 : fd, (off_t)offset);
        if (data == MAP_FAILED)
                return -errno;
        *ret_data = data;
        return 0;
}

static int linux_unmap(void *data, uint64_t size)
{
        return result_of(munmap(data, size));
}

static int linux_move(void *data, uint64_t size, void *to)
{
        return mremap(data, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED ? -errno : 0;
}

static int linux_advise(void *data, uint64_t size, enum os_advice advice)
{
        static const int table[] = {
                [OS_ADVISE_HUGE] = MADV_HUGEPAGE,
                [OS_ADVISE_POPULATE_WRITE] = MADV_POPULATE_WRITE,
                [OS_ADVISE_POPULATE_READ] = MADV_POPULATE_READ,
                [OS_ADVISE_COLLAPSE] = MADV_COLLAPSE,
                [OS_ADVISE_DONTNEED] = MADV_DONTNEED,
        };

        return result_of(madvise(data, size, table[advice]));
}

/* -- processes and time -- */

static int linux_poll(int fd, int64_t timeout_ms)
{
        struct pollfd wait = { .fd = fd, .events = POLLIN };
        int timeout = timeout_ms < 0 ? -1 : timeout_ms > 0x7fffffff ? 0x7fffffff : (int)timeout_ms;

        return result_of(poll(&wait, 1, timeout));
}

static int64_t clock_ns(clockid_t clock)
{
        struct timespec now;

        clock_gettime(clock, &now);
        return (int64_t)now.tv_sec * NS_PER_S + now.tv_nsec;
}

static int64_t linux_now_ns(void)
{
        return clock_ns(CLOCK_BOOTTIME);
}

static int64_t linux_wall_ns(void)
{
        return clock_ns(CLOCK_REALTIME);
}

static int64_t linux_thread_cpu_ns(void)
{
        return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

static void linux_sleep_ms(int64_t ms)
{
        struct timespec left = { .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000 };

        while (ms > 0 && clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR)
                ;
}

static int linux_random(void *data, size_t size)
{
        char *at = data;

        while (size) {
                ssize_t count = getrandom(at, size, 0);

                if (count < 0 && errno == EINTR)
                        continue;
                if (count < 0)
                        return -errno;
                at += count;
                size -= (size_t)count;
        }
        return 0;
}

static uint32_t linux_pid(void)
{
        return (uint32_t)getpid();
}

static uint32_t linux_uid(void)
{
        return geteuid();
}

static int linux_signal(uint32_t pid, uint32_t number)
{
        if (!pid || pid > INT32_MAX)
                return -ESRCH;
        return kill((pid_t)pid, (int)number) ? -errno : 0;
}

/* kill(pid, 0) also finds zombies, which will do nothing more. */
static bool linux_alive(uint32_t pid)
{
        char path[64], text[512];
        const char *end;
        ssize_t size;
        int fd;

        if (!pid || pid > INT32_MAX)
                return false;
        if (kill((pid_t)pid, 0) && errno != EPERM)
                return false;
        snprintf(path, sizeof path, "/proc/%u/stat", pid);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return true;
        size = read(fd, text, sizeof text - 1);
        close(fd);
        if (size <= 0)
                return size == 0 || errno != ESRCH;
        text[size] = 0;
        end = strrchr(text, ')'); /* the program's name may contain any character */
        return !end || strlen(end) < 3 || (end[2] != 'Z' && end[2] != 'X');
}

static uint32_t linux_cpu_count(void)
{
        cpu_set_t set;

        if (!sched_getaffinity(0, sizeof set, &set) && CPU_COUNT(&set) > 0)
                return (uint32_t)CPU_COUNT(&set);
        return sysconf(_SC_NPROCESSORS_ONLN) > 0 ? (uint32_t)sysconf(_SC_NPROCESSORS_ONLN) : 1;
}

const struct os_table os_linux = {
        .open = linux_open, .close = linux_close, .duplicate = linux_duplicate, .inherit = linux_inherit,
        .pread = linux_pread, .pread_cached = linux_pread_cached, .pwrite = linux_pwrite, .read = linux_read, .write = linux_write,
        .fsync = linux_fsync, .truncate = linux_truncate, .allocate = linux_allocate, .punch = linux_punch,
        .lock = linux_lock, .stat = linux_stat, .fstat = linux_fstat, .space = linux_space,
        .rename = linux_rename, .exchange = linux_exchange, .link = linux_link, .clone = linux_clone, .clone_range = linux_clone_range, .unlink = linux_unlink,
        .mkdir = linux_mkdir, .rmdir = linux_rmdir, .readlink = linux_readlink,
        .opendir = linux_opendir, .readdir = linux_readdir, .closedir = linux_closedir,
        .ring_open = os_linux_ring_open, .ring_close = os_linux_ring_close, .ring_register = os_linux_ring_register,
        .ring_queue = os_linux_ring_queue, .ring_submit = os_linux_ring_submit, .ring_wait = os_linux_ring_wait,
        .ring_queued = os_linux_ring_queued, .ring_reap = os_linux_ring_reap,
        .memfd = linux_memfd, .map = linux_map, .unmap = linux_unmap, .advise = linux_advise, .move = linux_move,
        .open_below = os_linux_open_below, .stat_below = os_linux_stat_below, .rename_below = os_linux_rename_below,
        .rename_new_below = os_linux_rename_new_below,
        .link_below = os_linux_link_below, .unlink_below = os_linux_unlink_below, .mkdir_below = os_linux_mkdir_below,
        .rmdir_below = os_linux_rmdir_below, .opendir_below = os_linux_opendir_below, .stat_entry = os_linux_stat_entry,
        .listen = os_linux_listen, .connect = os_linux_connect, .accept = os_linux_accept,
        .socketpair = os_linux_socketpair, .send = os_linux_send, .receive = os_linux_receive,
        .peer = os_linux_peer, .shutdown = os_linux_shutdown, .poll = linux_poll, .can_send = os_linux_can_send,
        .watch_open = os_linux_watch_open, .watch = os_linux_watch, .watch_wait = os_linux_watch_wait,
        .spawn = os_linux_spawn, .run = os_linux_run, .now_ns = linux_now_ns, .wall_ns = linux_wall_ns,
        .thread_cpu_ns = linux_thread_cpu_ns, .sleep_ms = linux_sleep_ms, .random = linux_random,
        .pid = linux_pid, .uid = linux_uid, .alive = linux_alive, .signal = linux_signal, .cpu_count = linux_cpu_count,
        .memory_free = os_linux_memory_free, .memory_stalled = os_linux_memory_stalled, .probe = os_probe_linux,
        LINUX_UFFD_MEMBERS,
        .tcp_listen = os_linux_tcp_listen, .tcp_connect = os_linux_tcp_connect, .tcp_accept = os_linux_tcp_accept,
        .host_name = os_linux_host_name, .host_address = os_linux_host_address,
};
