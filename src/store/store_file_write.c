/*
 * Writing one object: a temporary file beside its tag, the bytes, fsync,
 * rename, fsync of the directory. Where it stops, the temporary file is
 * removed and an older object of that key is untouched.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/bulk.h"
#include "os/os.h"
#include "store/store_private.h"

#define TEMP_DIRECTORY ".nebula"
#define TEMP_TRIES 100

struct file_writing {
        struct store *store;
        const void *data;
        uint64_t size;
        char parent[STORE_KEY_MAX], temp_parent[STORE_KEY_MAX];
        char path[STORE_PATH_MAX], temp[STORE_PATH_MAX];
};

/* <tag>/.nebula for what is below a tag, the root for what isn't: in both places a sweep knows it as ours. */
static void choose_temp_parent(struct file_writing *writing, const char *key)
{
        size_t tag_length = strcspn(key, "/");

        if (!key[tag_length])
                writing->temp_parent[0] = 0;
        else
                snprintf(writing->temp_parent, STORE_KEY_MAX, "%.*s/" TEMP_DIRECTORY, (int)tag_length, key);
}

static int open_temp(struct file_writing *writing, int flags)
{
        struct file_store *file = (struct file_store *)writing->store;
        bool is_top = !*writing->temp_parent;

        for (int i = 0; i < TEMP_TRIES; i++) {
                int fd;

                snprintf(writing->temp, sizeof writing->temp, "%s/%s%s%u-%u", writing->store->root, writing->temp_parent,
                         is_top ? ".nebula-tmp-" : "/tmp-", os->pid(), atomic_fetch_add(&file->temp_count, 1));
                do
                        fd = os->open(writing->temp, flags | OS_WRITE | OS_CREATE | OS_EXCLUSIVE | OS_NOFOLLOW | OS_SHARED);
                while (fd == -EINTR);
                if (fd != -EEXIST)
                        return fd;
        }
        return -EEXIST;
}

/* Space is asked for first: a full disk is found out before gigabytes are written, and blocks lie together. */
static int reserve(int fd, uint64_t size)
{
        int result;

        do
                result = os->allocate(fd, 0, size);
        while (result == -EINTR);
        return result == -ENOSPC || result == -EDQUOT || result == -EFBIG ? result : 0;
}

static int fill_temp(struct file_writing *writing, int fd, bool is_direct)
{
        struct os_stat made;
        int result, closed;

        if (writing->size < STORE_BULK_MIN) {
                result = os_write_at(fd, writing->data, writing->size, 0);
        } else {
                result = reserve(fd, writing->size);
                if (!result)
                        result = bulk_write(fd, is_direct, writing->data, writing->size);
        }
        if (!result)
                result = os_sync(fd);
        if (!result && !os->fstat(fd, &made))
                atomic_store(&((struct file_store *)writing->store)->given_uid, made.uid + UINT64_C(1));
        closed = os->close(fd);
        return result ? result : closed;
}

static int make_temp(struct file_writing *writing, bool is_direct)
{
        int fd = open_temp(writing, is_direct ? OS_DIRECT : 0);
        int result;

        if (fd < 0)
                return fd;
        result = fill_temp(writing, fd, is_direct);
        if (result)
                os->unlink(writing->temp);
        return result;
}

static enum nebula_status write_error(const struct file_writing *writing, int result, struct nebula_error *error)
{
        struct os_space space;

        if (error_status_of_errno(-result) == NEBULA_NO_SPACE && !os->space(writing->store->root, &space))
                return error_set(error, NEBULA_NO_SPACE, -result, "can't write %s: needs %" PRIu64 " bytes, %" PRIu64 " are free",
                                 writing->path, writing->size, space.free_bytes);
        return file_error(writing->store, "write", writing->path, result, error);
}

static int put(struct file_writing *writing)
{
        struct file_store *file = (struct file_store *)writing->store;
        bool is_direct = writing->size >= STORE_BULK_MIN && !((uintptr_t)writing->data % BULK_PAGE_BYTES);
        const char *root = writing->store->root;
        int result = -ENOENT;

        /* A directory that we know may have been removed since: then it is made again, once. */
        for (int i = 0; i < 2 && result == -ENOENT; i++) {
                if (i)
                        file_dirs_forget(file->dirs);
                result = file_dirs_ensure(file->dirs, root, writing->temp_parent);
                if (!result)
                        result = file_dirs_ensure(file->dirs, root, writing->parent);
                if (!result)
                        result = make_temp(writing, is_direct);
                if (result == -EINVAL && is_direct)
                        result = make_temp(writing, false); /* a file system without O_DIRECT */
        }
        if (result)
                return result;
        result = os->rename(writing->temp, writing->path);
        if (result) {
                os->unlink(writing->temp);
                return result;
        }
        return file_sync_directory(writing->store, writing->parent);
}

/* NEBULA_STORE_MBPS: a slow disk for tests, and for whoever wants to see what one would do to training. */
static void be_slow(uint64_t size, int64_t begun_ns)
{
        const char *text = getenv("NEBULA_STORE_MBPS");
        double rate = text ? strtod(text, NULL) * 1e6 : 0;
        int64_t left_ms = rate > 0 ? (int64_t)((double)size / rate * 1e3) - (os->now_ns() - begun_ns) / 1000000 : 0;

        if (left_ms > 0)
                os->sleep_ms(left_ms);
}

enum nebula_status file_write(struct store *store, const char *key, const void *data, uint64_t size,
                              struct nebula_error *error)
{
        struct file_store *file = (struct file_store *)store;
        struct file_writing writing = { .store = store, .data = data, .size = size };
        enum nebula_status status = *key ? file_path(store, key, writing.path, error) : NEBULA_INVALID;
        int64_t begun_ns = os->now_ns();
        int result;

        if (status)
                return *key ? status : error_set(error, status, 0, "an object of %s needs a key", store->root);
        file_parent(key, writing.parent);
        choose_temp_parent(&writing, key);
        result = put(&writing);
        be_slow(size, begun_ns);
        if (!result)
                return NEBULA_OK;
        file_dirs_forget(file->dirs);
        return write_error(&writing, result, error);
}
