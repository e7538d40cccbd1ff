#include "os/os_fault.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "os/os.h"
#include "os/os_ring_model.h"

/* The ways in which a call can fail. */
enum { PLAIN = 0, BLOCKS = 1, TAKES_SPACE = 2, TRANSFERS = 4 };

static const struct os_table *below;
static struct os_table table;
static struct os_fault fault;
static atomic_uint_fast64_t count;
static const char *_Atomic where;

static bool is_named(const char *name)
{
        size_t length = strlen(name);

        for (const char *at = fault.calls; at; at = strchr(at, ' '), at = at ? at + 1 : NULL)
                if (!strncmp(at, name, length) && (!at[length] || at[length] == ' '))
                        return true;
        return !fault.calls;
}

static bool can_happen(int kind, size_t size)
{
        switch (fault.error) {
        case OS_FAULT_SHORT:
                return kind & TRANSFERS && size > 1;
        case EINTR:
                return kind & BLOCKS;
        case ENOSPC:
        case EDQUOT:
                return kind & TAKES_SPACE;
        default:
                return true;
        }
}

static bool is_hit(const char *name, int kind, size_t size)
{
        const char *none = NULL;
        uint64_t number;

        if (!can_happen(kind, size) || !is_named(name))
                return false;
        number = atomic_fetch_add(&count, 1) + 1;
        if (!fault.at || number < fault.at || (number > fault.at && !fault.goes_on))
                return false;
        atomic_compare_exchange_strong(&where, &none, name);
        return true;
}

/* Half a transfer; of a direct file, in whole pages. */
static size_t half(size_t size)
{
        return size >= 8192 ? size / 2 & ~(size_t)4095 : (size + 1) / 2;
}

/* A call without a byte count; tests select it by the name `text`. */
#define WRAP_AS(text, name, kind, parameters, arguments) \
        static int fault_##name parameters \
        { \
                return is_hit(text, kind, 0) ? -fault.error : below->name arguments; \
        }
#define WRAP(name, kind, parameters, arguments) WRAP_AS(#name, name, kind, parameters, arguments)

/* A call that transfers `size` bytes. */
#define WRAP_TRANSFER(name, kind, parameters, arguments) \
        static int64_t fault_##name parameters \
        { \
                if (is_hit(#name, kind | TRANSFERS | BLOCKS, size)) { \
                        if (fault.error != OS_FAULT_SHORT) \
                                return -fault.error; \
                        size = half(size); \
                } \
                return below->name arguments; \
        }

WRAP(open, BLOCKS | TAKES_SPACE, (const char *path, int flags), (path, flags))
WRAP_TRANSFER(pread, 0, (int fd, void *data, size_t size, uint64_t offset), (fd, data, size, offset))
WRAP_TRANSFER(pwrite, TAKES_SPACE, (int fd, const void *data, size_t size, uint64_t offset), (fd, data, size, offset))
WRAP(duplicate, PLAIN, (int fd), (fd))
WRAP(inherit, PLAIN, (int fd, bool on), (fd, on))
WRAP_TRANSFER(read, 0, (int fd, void *data, size_t size), (fd, data, size))
WRAP_TRANSFER(write, TAKES_SPACE, (int fd, const void *data, size_t size), (fd, data, size))
WRAP(fsync, BLOCKS | TAKES_SPACE, (int fd), (fd))
WRAP(truncate, BLOCKS | TAKES_SPACE, (int fd, uint64_t size), (fd, size))
WRAP(allocate, BLOCKS | TAKES_SPACE, (int fd, uint64_t offset, uint64_t size), (fd, offset, size))
WRAP(punch, BLOCKS, (int fd, uint64_t offset, uint64_t size), (fd, offset, size))
WRAP(lock, BLOCKS, (int fd, enum os_lock how), (fd, how))
WRAP(stat, PLAIN, (const char *path, bool follow, struct os_stat *ret_stat), (path, follow, ret_stat))
WRAP(fstat, PLAIN, (int fd, struct os_stat *ret_stat), (fd, ret_stat))
WRAP(space, PLAIN, (const char *path, struct os_space *ret_space), (path, ret_space))
WRAP(rename, TAKES_SPACE, (const char *from, const char *to), (from, to))
WRAP(link, TAKES_SPACE, (const char *from, const char *to), (from, to))
WRAP(clone, BLOCKS | TAKES_SPACE, (int fd, int from), (fd, from))
WRAP(clone_range, BLOCKS | TAKES_SPACE, (int fd, int from, uint64_t offset, uint64_t size), (fd, from, offset, size))
WRAP(exchange, TAKES_SPACE, (const char *a, const char *b), (a, b))
WRAP(unlink, PLAIN, (const char *path), (path))
WRAP(mkdir, TAKES_SPACE, (const char *path, uint32_t mode), (path, mode))
WRAP(rmdir, PLAIN, (const char *path), (path))
WRAP(readlink, PLAIN, (const char *path, char *text, size_t size), (path, text, size))
WRAP(opendir, PLAIN, (const char *path, struct os_dir **ret_dir), (path, ret_dir))
WRAP(readdir, PLAIN, (struct os_dir *dir, char *name, size_t size), (dir, name, size))
WRAP_AS("open", open_below, BLOCKS | TAKES_SPACE, (const char *root, const char *key, int flags), (root, key, flags))
WRAP_AS("stat", stat_below, PLAIN, (const char *root, const char *key, struct os_stat *ret_stat), (root, key, ret_stat))
WRAP_AS("rename", rename_below, TAKES_SPACE, (const char *root, const char *from, const char *to), (root, from, to))
WRAP_AS("rename", rename_new_below, TAKES_SPACE, (const char *root, const char *from, const char *to), (root, from, to))
WRAP_AS("link", link_below, TAKES_SPACE, (const char *root, const char *key, const char *to_root, const char *to), (root, key, to_root, to))
WRAP_AS("unlink", unlink_below, PLAIN, (const char *root, const char *key), (root, key))
WRAP_AS("mkdir", mkdir_below, TAKES_SPACE, (const char *root, const char *key, uint32_t mode), (root, key, mode))
WRAP_AS("rmdir", rmdir_below, PLAIN, (const char *root, const char *key), (root, key))
WRAP_AS("opendir", opendir_below, PLAIN, (const char *root, const char *key, struct os_dir **ret_dir), (root, key, ret_dir))
WRAP_AS("stat", stat_entry, PLAIN, (struct os_dir *dir, const char *name, struct os_stat *ret_stat), (dir, name, ret_stat))
WRAP(memfd, PLAIN, (const char *name), (name))
WRAP(map, PLAIN, (int fd, uint64_t offset, uint64_t size, int flags, void **ret_data), (fd, offset, size, flags, ret_data))
WRAP(advise, PLAIN, (void *data, uint64_t size, enum os_advice advice), (data, size, advice))
WRAP(listen, PLAIN, (const char *path), (path))
WRAP(connect, BLOCKS, (const char *path), (path))
WRAP(accept, BLOCKS, (int fd), (fd))
WRAP(socketpair, PLAIN, (int ret_fds[2]), (ret_fds))
WRAP_TRANSFER(send, 0, (int fd, const void *data, size_t size, int passed_fd), (fd, data, size, passed_fd))
WRAP_TRANSFER(receive, 0, (int fd, void *data, size_t size, int *ret_passed_fd), (fd, data, size, ret_passed_fd))
WRAP(peer, PLAIN, (int fd, uint32_t *ret_uid, uint32_t *ret_pid), (fd, ret_uid, ret_pid))
WRAP(poll, BLOCKS, (int fd, int64_t timeout_ms), (fd, timeout_ms))
WRAP(watch_open, PLAIN, (void), ())
WRAP(watch, PLAIN, (int set, int fd, void *key, enum os_watch how), (set, fd, key, how))
WRAP(watch_wait, BLOCKS, (int set, void **ret_keys, size_t most, int64_t timeout_ms), (set, ret_keys, most, timeout_ms))
WRAP(spawn, PLAIN, (const char *path, char *const argv[], const int stdio[3], int *ret_exit), (path, argv, stdio, ret_exit))
WRAP(run, PLAIN, (const char *path, char *const argv[], int64_t timeout_ms, char *text, size_t room, size_t *ret_size, int *ret_exit),
     (path, argv, timeout_ms, text, room, ret_size, ret_exit))
WRAP(random, PLAIN, (void *data, size_t size), (data, size))
WRAP(uffd_open, PLAIN, (uint32_t *ret_abilities), (ret_abilities))
WRAP(uffd_register, PLAIN, (int fd, uint64_t start, uint64_t end), (fd, start, end))
WRAP(uffd_protect, PLAIN, (int fd, uint64_t start, uint64_t end, bool on), (fd, start, end, on))
WRAP(fill_open, PLAIN, (void *data, uint64_t size), (data, size))
WRAP(fill, PLAIN, (int fd, void *to, const void *from, uint64_t size), (fd, to, from, size))

/* Requests in a ring become preads and pwrites of this table. */
static int fault_ring_open(uint32_t depth, struct os_ring **ret_ring)
{
        return is_hit("ring_open", PLAIN, 0) ? -fault.error : os_ring_model_open(depth, ret_ring);
}

static int fault_ring_register(struct os_ring *ring, const struct os_ring_buffer *buffers, uint32_t count_of)
{
        return is_hit("ring_register", PLAIN, 0) ? -fault.error : os_ring_model_register(ring, buffers, count_of);
}

static int fault_ring_submit(struct os_ring *ring)
{
        return is_hit("ring_submit", BLOCKS, 0) ? -fault.error : os_ring_model_submit(ring);
}

static int fault_close(int fd)
{
        int result = below->close(fd);

        return is_hit("close", PLAIN, 0) ? -fault.error : result;
}

/* Calls that are not listed here either cannot fail, or clean up and have no caller to report a failure to. */
static void fill_table(void)
{
        table = *below;
#define SET(name) table.name = fault_##name
        SET(open); SET(close); SET(duplicate); SET(inherit); SET(pread); SET(pwrite); SET(read); SET(write); SET(fsync); SET(truncate);
        SET(allocate); SET(punch); SET(lock); SET(stat); SET(fstat); SET(space); SET(rename); SET(exchange); SET(link); SET(clone); SET(clone_range);
        SET(unlink); SET(mkdir); SET(rmdir); SET(readlink); SET(opendir); SET(readdir); SET(memfd); SET(map);
        SET(open_below); SET(stat_below); SET(rename_below); SET(rename_new_below); SET(link_below); SET(unlink_below); SET(mkdir_below); SET(rmdir_below);
        SET(opendir_below); SET(stat_entry);
        SET(advise); SET(listen); SET(connect); SET(accept); SET(socketpair); SET(send); SET(receive); SET(peer);
        SET(poll); SET(watch_open); SET(watch); SET(watch_wait); SET(spawn); SET(run); SET(random); SET(uffd_open); SET(uffd_register);
        SET(uffd_protect); SET(fill_open); SET(fill); SET(ring_open); SET(ring_register); SET(ring_submit);
#undef SET
        os_ring_model_use(&table);
}

void os_fault_begin(const struct os_fault *wanted)
{
        fault = *wanted;
        atomic_store(&count, 0);
        atomic_store(&where, (const char *)NULL);
        below = os;
        fill_table();
        os = &table;
}

bool os_fault_end(void)
{
        os = below;
        return *os_fault_where();
}

uint64_t os_fault_count(void)
{
        return atomic_load(&count);
}

uint64_t os_fault_step(int error)
{
        return error == EIO || getenv("NEBULA_TEST_NIGHTLY") ? 1 : 8;
}

const char *os_fault_where(void)
{
        const char *name = atomic_load(&where);

        return name ? name : "";
}
