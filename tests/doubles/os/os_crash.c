/* Wraps the calls that change files: each is done for real, then logged. One lock covers both, so the log has the order of the changes. */
#include "os/os_crash.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "os/lock.h"
#include "os/os.h"
#include "os/os_ring_model.h"
#include "os/os_crash_model.h"

#define FD_MAX 4096
#define PATH_BYTES 4096

static const struct os_table *below;
static struct os_table table;
static char *root;

static struct lock log_lock = LOCK_INIT(LOCK_CRASH_LOG); /* guards all variables below */
static struct crash_op *ops;
static size_t op_count;
static size_t durable_count; /* length of the log when os_crash_begin returned */
static struct crash_model now; /* names only */
static struct { uint32_t inode; bool is_append; uint64_t offset; } files[FD_MAX]; /* inode + 1; 0: not below the root */

static void *need(void *memory)
{
        if (!memory)
                abort();
        return memory;
}

/* The part of `path` below the root; NULL if it is not below the root. */
static const char *relative(const char *path)
{
        size_t length = strlen(root);

        if (strncmp(path, root, length) || (path[length] && path[length] != '/'))
                return NULL;
        return path + length;
}

/* The directory of a path and its last name; CRASH_NONE if the path is not below the root. */
static uint32_t split(const char *path, char ret_name[256])
{
        const char *inside = relative(path);
        char parent[PATH_BYTES];
        const char *slash;

        if (!inside || !(slash = strrchr(inside, '/')) || !slash[1])
                return CRASH_NONE;
        snprintf(parent, sizeof parent, "%.*s", (int)(slash - inside), inside);
        snprintf(ret_name, 256, "%s", slash + 1);
        return crash_model_find(&now, parent);
}

static void add_op(struct crash_op op)
{
        if (!(op_count & (op_count - 1)))
                ops = need(realloc(ops, (op_count ? op_count * 2 : 1) * sizeof *ops));
        ops[op_count++] = op;
        crash_model_apply(&now, &op, CRASH_KEPT, false, 0, NULL);
}

static void log_add(uint32_t directory, const char *name, uint32_t inode)
{
        add_op((struct crash_op){ .kind = CRASH_ADD, .directory = directory, .name = need(strdup(name)), .inode = inode });
}

static void log_write(uint32_t inode, const void *data, uint64_t size, uint64_t offset)
{
        char *copy = need(malloc(size + 1));

        memcpy(copy, data, size);
        add_op((struct crash_op){ .kind = CRASH_WRITE, .inode = inode, .data = copy, .size = size, .offset = offset });
}

static void log_resize(uint32_t inode, uint64_t size)
{
        add_op((struct crash_op){ .kind = CRASH_RESIZE, .inode = inode, .size = size });
}

static bool inode_of(int fd, uint32_t *ret_inode)
{
        if (fd < 0 || fd >= FD_MAX || !files[fd].inode)
                return false;
        *ret_inode = files[fd].inode - 1;
        return true;
}

static void log_open(int fd, const char *path, int flags)
{
        char name[256];
        uint32_t directory = split(path, name);
        uint32_t inode = relative(path) ? crash_model_find(&now, relative(path)) : CRASH_NONE;

        if (fd >= FD_MAX)
                abort();
        if (inode == CRASH_NONE && directory != CRASH_NONE && flags & OS_CREATE) {
                inode = crash_model_new_inode(&now, false);
                log_add(directory, name, inode);
        } else if (inode != CRASH_NONE && flags & OS_TRUNCATE) {
                log_resize(inode, 0);
        }
        files[fd].inode = inode == CRASH_NONE ? 0 : inode + 1;
        files[fd].is_append = flags & OS_APPEND;
        files[fd].offset = 0;
}

static int crash_open(const char *path, int flags)
{
        int fd;

        lock_take(&log_lock);
        fd = below->open(path, flags);
        if (fd >= 0)
                log_open(fd, path, flags);
        lock_give(&log_lock);
        return fd;
}

/* The full path of a key, for the calls that work below a root. */
static void join(const char *at, const char *key, char ret_path[PATH_BYTES])
{
        if (snprintf(ret_path, PATH_BYTES, "%s%s%s", at, *key ? "/" : "", key) >= PATH_BYTES)
                abort();
}

static int crash_open_below(const char *at, const char *key, int flags)
{
        char path[PATH_BYTES];
        int fd;

        join(at, key, path);
        lock_take(&log_lock);
        fd = below->open_below(at, key, flags);
        if (fd >= 0)
                log_open(fd, path, flags);
        lock_give(&log_lock);
        return fd;
}

static int crash_close(int fd)
{
        int result;

        lock_take(&log_lock);
        if (fd >= 0 && fd < FD_MAX)
                files[fd].inode = 0;
        result = below->close(fd);
        lock_give(&log_lock);
        return result;
}

static int64_t crash_pwrite(int fd, const void *data, size_t size, uint64_t offset)
{
        int64_t count;
        uint32_t inode;

        lock_take(&log_lock);
        count = below->pwrite(fd, data, size, offset);
        if (count > 0 && inode_of(fd, &inode))
                log_write(inode, data, (uint64_t)count, offset);
        lock_give(&log_lock);
        return count;
}

static int64_t crash_write(int fd, const void *data, size_t size)
{
        struct os_stat before = { 0 };
        uint32_t inode;
        int64_t count;

        lock_take(&log_lock);
        if (inode_of(fd, &inode) && files[fd].is_append && !below->fstat(fd, &before))
                files[fd].offset = before.size;
        count = below->write(fd, data, size);
        if (count > 0 && inode_of(fd, &inode)) {
                log_write(inode, data, (uint64_t)count, files[fd].offset);
                files[fd].offset += (uint64_t)count;
        }
        lock_give(&log_lock);
        return count;
}

static int64_t crash_read(int fd, void *data, size_t size)
{
        uint32_t inode;
        int64_t count;

        lock_take(&log_lock);
        if (!inode_of(fd, &inode)) {
                /* Read without the lock: a pipe or a socket may wait for another thread's call. */
                lock_give(&log_lock);
                return below->read(fd, data, size);
        }
        count = below->read(fd, data, size);
        if (count > 0)
                files[fd].offset += (uint64_t)count;
        lock_give(&log_lock);
        return count;
}

/* Does no real sync: only the log counts, and the test is faster. */
static int crash_fsync(int fd)
{
        uint32_t inode;
        int result = 0;

        lock_take(&log_lock);
        if (inode_of(fd, &inode))
                add_op((struct crash_op){ .kind = CRASH_SYNC, .inode = inode });
        else
                result = below->fsync(fd);
        lock_give(&log_lock);
        return result;
}

static int crash_truncate(int fd, uint64_t size)
{
        uint32_t inode;
        int result;

        lock_take(&log_lock);
        result = below->truncate(fd, size);
        if (!result && inode_of(fd, &inode))
                log_resize(inode, size);
        lock_give(&log_lock);
        return result;
}

static int crash_allocate(int fd, uint64_t offset, uint64_t size)
{
        struct os_stat before, after;
        uint32_t inode;
        int result;

        lock_take(&log_lock);
        result = below->fstat(fd, &before);
        if (!result)
                result = below->allocate(fd, offset, size);
        if (!result && inode_of(fd, &inode) && !below->fstat(fd, &after) && after.size != before.size)
                log_resize(inode, after.size);
        lock_give(&log_lock);
        return result;
}

static int crash_punch(int fd, uint64_t offset, uint64_t size)
{
        uint32_t inode;
        int result;

        lock_take(&log_lock);
        result = below->punch(fd, offset, size);
        if (!result && inode_of(fd, &inode)) {
                char *zeros = need(calloc(1, size + 1));

                add_op((struct crash_op){ .kind = CRASH_WRITE, .inode = inode, .data = zeros, .size = size, .offset = offset });
        }
        lock_give(&log_lock);
        return result;
}

static void log_rename(const char *from, const char *to)
{
        char name[256], to_name[256];
        uint32_t directory = split(from, name), to_directory = split(to, to_name);
        uint32_t inode = directory == CRASH_NONE ? CRASH_NONE : crash_model_entry(&now, directory, name);

        if (inode == CRASH_NONE && to_directory == CRASH_NONE)
                return;
        if (inode == CRASH_NONE || to_directory == CRASH_NONE)
                abort(); /* a move into the tree or out of it: no test needs that */
        if (inode == crash_model_entry(&now, to_directory, to_name))
                return; /* two names of one file: rename does nothing */
        add_op((struct crash_op){ .kind = CRASH_RENAME, .directory = directory, .to_directory = to_directory, .inode = inode,
                                  .name = need(strdup(name)), .to_name = need(strdup(to_name)) });
}

static int crash_rename(const char *from, const char *to)
{
        int result;

        lock_take(&log_lock);
        result = below->rename(from, to);
        if (!result)
                log_rename(from, to);
        lock_give(&log_lock);
        return result;
}

static int rename_below_with(int (*call)(const char *at, const char *from, const char *to), const char *at, const char *from, const char *to)
{
        char from_path[PATH_BYTES], to_path[PATH_BYTES];
        int result;

        join(at, from, from_path);
        join(at, to, to_path);
        lock_take(&log_lock);
        result = call(at, from, to);
        if (!result)
                log_rename(from_path, to_path);
        lock_give(&log_lock);
        return result;
}

static int crash_rename_below(const char *at, const char *from, const char *to)
{
        return rename_below_with(below->rename_below, at, from, to);
}

static int crash_rename_new_below(const char *at, const char *from, const char *to)
{
        return rename_below_with(below->rename_new_below, at, from, to);
}

static void log_exchange(const char *a, const char *b)
{
        char name[256], to_name[256];
        uint32_t directory = split(a, name), to_directory = split(b, to_name);

        if (directory == CRASH_NONE && to_directory == CRASH_NONE)
                return;
        if (directory == CRASH_NONE || to_directory == CRASH_NONE)
                abort(); /* as for rename */
        add_op((struct crash_op){ .kind = CRASH_EXCHANGE, .directory = directory, .to_directory = to_directory,
                                  .inode = crash_model_entry(&now, directory, name),
                                  .to_inode = crash_model_entry(&now, to_directory, to_name), .name = need(strdup(name)),
                                  .to_name = need(strdup(to_name)) });
}

static int crash_exchange(const char *a, const char *b)
{
        int result;

        lock_take(&log_lock);
        result = below->exchange(a, b);
        if (!result)
                log_exchange(a, b);
        lock_give(&log_lock);
        return result;
}

static void log_link(const char *from, const char *to)
{
        char name[256];
        uint32_t directory = split(to, name), inode = relative(from) ? crash_model_find(&now, relative(from)) : CRASH_NONE;

        if (directory == CRASH_NONE)
                return;
        if (inode == CRASH_NONE)
                abort();
        log_add(directory, name, inode);
}

static int crash_link(const char *from, const char *to)
{
        int result;

        lock_take(&log_lock);
        result = below->link(from, to);
        if (!result)
                log_link(from, to);
        lock_give(&log_lock);
        return result;
}

/* Logs cloned bytes as written bytes, which are durable after a sync of the file. Copies them, because tests must
 * run on file systems that cannot share blocks. */
static int crash_clone_range(int fd, int from, uint64_t offset, uint64_t size)
{
        char *data = need(malloc(size + 1));
        int64_t count = below->pread(from, data, size, offset);

        if (count > 0)
                count = crash_pwrite(fd, data, (size_t)count, offset);
        free(data);
        return count < 0 ? (int)count : (uint64_t)count == size ? 0 : -EIO;
}

static int crash_clone(int fd, int from)
{
        struct os_stat stat;
        int result = below->fstat(from, &stat);

        return result ? result : crash_clone_range(fd, from, 0, stat.size);
}

static int crash_link_below(const char *at, const char *key, const char *to_at, const char *to)
{
        char path[PATH_BYTES], to_path[PATH_BYTES];
        int result;

        join(at, key, path);
        join(to_at, to, to_path);
        lock_take(&log_lock);
        result = below->link_below(at, key, to_at, to);
        if (!result)
                log_link(path, to_path);
        lock_give(&log_lock);
        return result;
}

static void log_remove(const char *path)
{
        char name[256];
        uint32_t directory = split(path, name);

        if (directory != CRASH_NONE)
                add_op((struct crash_op){ .kind = CRASH_REMOVE, .directory = directory, .name = need(strdup(name)) });
}

static int remove_with(int (*call)(const char *path), const char *path)
{
        int result;

        lock_take(&log_lock);
        result = call(path);
        if (!result)
                log_remove(path);
        lock_give(&log_lock);
        return result;
}

static int remove_below_with(int (*call)(const char *at, const char *key), const char *at, const char *key)
{
        char path[PATH_BYTES];
        int result;

        join(at, key, path);
        lock_take(&log_lock);
        result = call(at, key);
        if (!result)
                log_remove(path);
        lock_give(&log_lock);
        return result;
}

static int crash_unlink(const char *path)
{
        return remove_with(below->unlink, path);
}

static int crash_rmdir(const char *path)
{
        return remove_with(below->rmdir, path);
}

static int crash_unlink_below(const char *at, const char *key)
{
        return remove_below_with(below->unlink_below, at, key);
}

static int crash_rmdir_below(const char *at, const char *key)
{
        return remove_below_with(below->rmdir_below, at, key);
}

static void log_mkdir(const char *path)
{
        char name[256];
        uint32_t directory = split(path, name);

        if (directory != CRASH_NONE)
                log_add(directory, name, crash_model_new_inode(&now, true));
}

static int crash_mkdir(const char *path, uint32_t mode)
{
        int result;

        lock_take(&log_lock);
        result = below->mkdir(path, mode);
        if (!result)
                log_mkdir(path);
        lock_give(&log_lock);
        return result;
}

static int crash_mkdir_below(const char *at, const char *key, uint32_t mode)
{
        char path[PATH_BYTES];
        int result;

        join(at, key, path);
        lock_take(&log_lock);
        result = below->mkdir_below(at, key, mode);
        if (!result)
                log_mkdir(path);
        lock_give(&log_lock);
        return result;
}

static int import_file(uint32_t inode, const char *path)
{
        size_t size;
        char *data;
        int result = os_read_file(path, SIZE_MAX / 4, &data, &size);

        if (result)
                return result;
        log_write(inode, data, size, 0);
        free(data);
        return 0;
}

/* Logs the existing content of `path` as durable. */
static int import(uint32_t directory, const char *path)
{
        char name[256], full[PATH_BYTES];
        struct os_stat found;
        struct os_dir *dir;
        int result = below->opendir(path, &dir);

        if (result)
                return result;
        while ((result = below->readdir(dir, name, sizeof name)) > 0) {
                uint32_t inode;

                snprintf(full, sizeof full, "%s/%s", path, name);
                result = below->stat(full, false, &found);
                if (result)
                        break;
                if (found.kind != OS_KIND_DIRECTORY && found.kind != OS_KIND_FILE)
                        continue;
                inode = crash_model_new_inode(&now, found.kind == OS_KIND_DIRECTORY);
                log_add(directory, name, inode);
                result = found.kind == OS_KIND_DIRECTORY ? import(inode, full) : import_file(inode, full);
                if (result)
                        break;
        }
        below->closedir(dir);
        return result;
}

int os_crash_begin(const char *path)
{
        int result;

        os_crash_free();
        below = os;
        root = need(strdup(path));
        crash_model_new_inode(&now, true);
        result = import(0, root);
        if (result)
                return result;
        durable_count = op_count;
        table = *below;
        table.open = crash_open;
        table.close = crash_close;
        table.pwrite = crash_pwrite;
        table.write = crash_write;
        table.read = crash_read;
        table.fsync = crash_fsync;
        table.truncate = crash_truncate;
        table.allocate = crash_allocate;
        table.punch = crash_punch;
        table.rename = crash_rename;
        table.exchange = crash_exchange;
        table.link = crash_link;
        table.clone = crash_clone;
        table.clone_range = crash_clone_range;
        table.unlink = crash_unlink;
        table.rmdir = crash_rmdir;
        table.mkdir = crash_mkdir;
        table.open_below = crash_open_below;
        table.rename_below = crash_rename_below;
        table.rename_new_below = crash_rename_new_below;
        table.link_below = crash_link_below;
        table.unlink_below = crash_unlink_below;
        table.rmdir_below = crash_rmdir_below;
        table.mkdir_below = crash_mkdir_below;
        os_ring_model_use(&table); /* so that requests in a ring go through crash_pwrite and crash_pread */
        os = &table;
        return 0;
}

void os_crash_end(void)
{
        os = below;
}

uint64_t os_crash_position(void)
{
        uint64_t position;

        lock_take(&log_lock);
        position = op_count - durable_count;
        lock_give(&log_lock);
        return position;
}

/* For each inode: the position of its last sync before `end`. */
static uint64_t *last_syncs(size_t end)
{
        uint64_t *last = need(malloc((now.count + 1) * sizeof *last));

        for (size_t i = 0; i < now.count; i++)
                last[i] = durable_count;
        for (size_t i = 0; i < end; i++)
                if (ops[i].kind == CRASH_SYNC)
                        last[ops[i].inode] = i;
        return last;
}

static enum crash_fate by_chance(uint64_t seed, uint64_t *random)
{
        if (seed == OS_CRASH_ALL_LOST)
                return CRASH_LOST;
        return seed == OS_CRASH_ALL_KEPT || crash_random(random) & 1 ? CRASH_KEPT : CRASH_LOST;
}

/* The new name is there if either directory was synced; the old name is gone if its own directory was synced. */
static enum crash_fate fate_of_rename(const struct crash_op *op, uint64_t at, const uint64_t *last, uint64_t seed,
                                      uint64_t *random)
{
        bool is_gone = at < last[op->directory], is_there = is_gone || at < last[op->to_directory];
        bool is_whole = op->directory == op->to_directory || now.inodes[op->inode].is_directory;

        if (!is_there && by_chance(seed, random) == CRASH_LOST)
                return CRASH_LOST;
        return is_gone || is_whole || by_chance(seed, random) == CRASH_KEPT ? CRASH_KEPT : CRASH_HALF;
}

static void survive(struct crash_model *model, size_t at, const uint64_t *last, uint64_t seed, uint64_t *random)
{
        static const uint32_t sectors[] = { 0, 512, 4096 };
        const struct crash_op *op = &ops[at];
        enum crash_fate fate;
        uint32_t sector_bytes = 0;

        if (op->kind == CRASH_EXCHANGE) {
                bool is_synced = at < last[op->directory] || at < last[op->to_directory];

                fate = is_synced ? CRASH_KEPT : by_chance(seed, random);
        } else if (op->kind == CRASH_RENAME) {
                fate = fate_of_rename(op, at, last, seed, random);
        } else if (op->kind == CRASH_ADD || op->kind == CRASH_REMOVE) {
                fate = at < last[op->directory] ? CRASH_KEPT : by_chance(seed, random);
        } else if (at < last[op->inode]) {
                fate = CRASH_KEPT;
        } else {
                fate = by_chance(seed, random);
                if (seed > OS_CRASH_ALL_KEPT)
                        sector_bytes = sectors[crash_random(random) % 3];
        }
        crash_model_apply(model, op, fate, true, sector_bytes, random);
}

int os_crash_materialise(uint64_t position, uint64_t seed, const char *directory)
{
        const struct os_table *in_use = os;
        struct crash_model model = { 0 };
        size_t end = durable_count + position;
        uint64_t random = seed * 0x100000001b3u + position;
        uint64_t *last;
        int result;

        if (end > op_count)
                return -EINVAL;
        last = last_syncs(end);
        for (size_t i = 0; i < now.count; i++)
                crash_model_new_inode(&model, now.inodes[i].is_directory);
        for (size_t i = 0; i < end; i++)
                survive(&model, i, last, seed, &random);
        os = &os_linux;
        result = os_remove_tree(directory);
        os = in_use;
        if (!result)
                result = crash_model_write_out(&model, 0, directory);
        crash_model_done(&model);
        free(last);
        return result;
}

void os_crash_free(void)
{
        for (size_t i = 0; i < op_count; i++) {
                free(ops[i].name);
                free(ops[i].to_name);
                free(ops[i].data);
        }
        free(ops);
        ops = NULL;
        op_count = durable_count = 0;
        crash_model_done(&now);
        free(root);
        root = NULL;
        memset(files, 0, sizeof files);
}
