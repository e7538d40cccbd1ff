/* Reads objects: exactly the requested bytes, or an error that describes what is there instead. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "base/error.h"
#include "os/bulk.h"
#include "store/store_file_private.h"

#define PROBES 64u
#define STALE_TRIES 20 /* of a read that meets a file which another node has just replaced (NFS) */

/* Fails for a directory: it is not an object. */
int file_open_to_read(const struct store *store, const char *key, int flags)
{
        struct os_stat found;
        int fd, result;

        do
                fd = os->open_below(store->root, key, OS_READ | flags);
        while (fd == -EINTR);
        if (fd < 0)
                return fd == -ENOTDIR ? -ENOENT : fd;
        result = os->fstat(fd, &found);
        if (!result && found.kind == OS_KIND_DIRECTORY)
                result = -ENOENT;
        if (!result)
                return fd;
        os->close(fd);
        return result;
}

static enum nebula_status read_error(const struct store *store, const char *path, int fd, uint64_t end, int result,
                                     struct nebula_error *error)
{
        struct os_stat found;

        if (result == -ENODATA && fd >= 0 && !os->fstat(fd, &found))
                return error_set(error, NEBULA_CORRUPT, 0, "%s: ends after %" PRIu64 " bytes, %" PRIu64 " were expected",
                                 path, found.size, end);
        if (result == -ENODATA)
                return error_set(error, NEBULA_CORRUPT, 0, "%s: ends before byte %" PRIu64, path, end);
        return file_error(store, "read", path, result, error);
}

/* Whether to read once more: on NFS a file that another node replaces after it was opened is gone, and the name leads to the new one. */
static bool is_stale(enum nebula_status status, const struct nebula_error *failure, int *tries)
{
        return status && failure->sys_errno == ESTALE && ++*tries < STALE_TRIES;
}

static enum nebula_status read_once(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size,
                                    struct nebula_error *error)
{
        char path[STORE_PATH_MAX];
        enum nebula_status status = file_path(store, key, path, error);
        int fd, result;

        if (status)
                return status;
        fd = file_open_to_read(store, key, 0);
        result = fd < 0 ? fd : os_read_at(fd, data, size, offset);
        if (result)
                status = read_error(store, path, fd, offset + size, result, error);
        if (fd >= 0)
                os->close(fd);
        return status;
}

enum nebula_status file_read(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size,
                             struct nebula_error *error)
{
        struct nebula_error failure = { 0 };
        enum nebula_status status;
        int tries = 0;

        do
                status = read_once(store, key, data, offset, size, &failure);
        while (is_stale(status, &failure, &tries));
        if (status && error)
                *error = failure;
        return status;
}

static enum nebula_status get_from(const char *path, const struct store *store, int fd, const struct os_stat *found, size_t limit, char **ret_text,
                                   struct nebula_error *error)
{
        char *text;
        int result;

        if (found->kind != OS_KIND_FILE)
                return error_set(error, NEBULA_CORRUPT, 0, "%s: is not a regular file", path);
        if (found->size > limit)
                return error_set(error, NEBULA_CORRUPT, 0, "%s: has more than the %zu bytes that are allowed", path, limit);
        text = malloc(found->size + 1);
        if (!text)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to read %s", path);
        result = os_read_at(fd, text, found->size, 0);
        if (result) {
                free(text);
                return read_error(store, path, fd, found->size, result, error);
        }
        text[found->size] = 0;
        *ret_text = text;
        return NEBULA_OK;
}

/* Reads size and bytes from one descriptor. By name they could come from two files, and NFS could return the cached size of an older
 * one. */
static enum nebula_status get_once(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                   struct store_stamp *ret_stamp, struct nebula_error *error)
{
        char path[STORE_PATH_MAX];
        struct os_stat found;
        enum nebula_status status = file_path(store, key, path, error);
        int fd, result;

        if (status)
                return status;
        fd = file_open_to_read(store, key, 0);
        if (fd < 0)
                return file_error(store, "read", path, fd, error);
        result = os->fstat(fd, &found);
        status = result ? file_error(store, "read", path, result, error) : get_from(path, store, fd, &found, limit, ret_text, error);
        os->close(fd);
        if (status)
                return status;
        if (ret_size)
                *ret_size = found.size;
        if (ret_stamp)
                *ret_stamp = file_stamp(&found);
        return NEBULA_OK;
}

enum nebula_status file_get(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                            struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct nebula_error failure = { 0 };
        enum nebula_status status;
        int tries = 0;

        do
                status = get_once(store, key, limit, ret_text, ret_size, ret_stamp, &failure);
        while (is_stale(status, &failure, &tries));
        if (status && error)
                *error = failure;
        return status;
}

/* The argument of bulk_read, which computes no sums. */
struct checking {
        store_check *check;
        void *argument;
};

static enum nebula_status check_chunk(void *argument, const void *data, uint64_t offset, uint64_t size, struct nebula_error *error)
{
        const struct checking *checking = argument;

        return checking->check(checking->argument, data, offset, size, NULL, error);
}

/* Whether the page cache has the file: a look at PROBES places, spread over it, which ends at the first that it lacks. */
static bool is_cached(int fd)
{
        struct os_stat found;
        char byte;

        if (os->fstat(fd, &found) || !found.size)
                return false;
        for (uint64_t i = 0; i <= PROBES; i++)
                if (os->pread_cached(fd, &byte, 1, (found.size - 1) / PROBES * i) != 1)
                        return false;
        return true;
}

/* Opens a file that is read as a whole. The page cache is faster than a disk, and a disk is fastest without it. Several readers take
 * the bytes from the page cache, so that the disk is read once. */
static int open_whole(const struct store *store, const char *key, bool is_shared, bool *ret_direct)
{
        int fd = file_open_to_read(store, key, 0), direct;

        *ret_direct = false;
        if (fd < 0 || is_shared || is_cached(fd))
                return fd;
        direct = file_open_to_read(store, key, OS_DIRECT);
        if (direct == -EINVAL)
                return fd; /* a file system without O_DIRECT */
        os->close(fd);
        *ret_direct = true;
        return direct;
}

enum nebula_status file_read_bulk(struct store *store, const char *key, void *data, uint64_t size, uint32_t chunk_bytes,
                                  store_check *check, void *argument, struct nebula_error *error)
{
        bool is_direct = size >= FILE_BULK_MIN && !(((uintptr_t)data | chunk_bytes) % BULK_PAGE_BYTES);
        struct checking checking = { check, argument };
        char path[STORE_PATH_MAX];
        enum nebula_status status = file_path(store, key, path, error);
        int fd, result;

        if (status)
                return status;
        fd = is_direct ? open_whole(store, key, false, &is_direct) : file_open_to_read(store, key, 0);
        result = fd < 0 ? fd : bulk_read(fd, is_direct, data, false, size, chunk_bytes, check ? check_chunk : NULL, &checking, error);
        if (result == -EINVAL && is_direct) {
                if (fd >= 0)
                        os->close(fd);
                fd = file_open_to_read(store, key, 0); /* the file system has no O_DIRECT */
                result = fd < 0 ? fd : bulk_read(fd, false, data, false, size, chunk_bytes, check ? check_chunk : NULL, &checking, error);
        }
        if (result > 0)
                status = (enum nebula_status)result; /* `check` failed, and has set the error */
        else if (result < 0)
                status = read_error(store, path, fd, size, result, error);
        if (fd >= 0)
                os->close(fd);
        return status;
}

enum nebula_status file_open_read(struct store *store, const char *key, bool is_shared, int *ret_fd, bool *ret_direct,
                                  struct nebula_error *error)
{
        char path[STORE_PATH_MAX];
        enum nebula_status status = file_path(store, key, path, error);

        if (status)
                return status;
        *ret_fd = open_whole(store, key, is_shared, ret_direct);
        return *ret_fd < 0 ? file_error(store, "read", path, *ret_fd, error) : NEBULA_OK;
}
