/* Reading objects: exactly the asked bytes, or an error that says what is there instead. */
#include <errno.h>
#include <inttypes.h>

#include "base/error.h"
#include "os/bulk.h"
#include "os/os.h"
#include "store/store_private.h"

static int open_to_read(const struct store *store, const char *key, int flags)
{
        int fd;

        do
                fd = os->open_below(store->root, key, OS_READ | flags);
        while (fd == -EINTR);
        return fd == -ENOTDIR ? -ENOENT : fd;
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

enum nebula_status file_read(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size,
                             struct nebula_error *error)
{
        char path[STORE_PATH_MAX];
        enum nebula_status status = file_path(store, key, path, error);
        int fd, result;

        if (status)
                return status;
        fd = open_to_read(store, key, 0);
        result = fd < 0 ? fd : os_read_at(fd, data, size, offset);
        if (result)
                status = read_error(store, path, fd, offset + size, result, error);
        if (fd >= 0)
                os->close(fd);
        return status;
}

/* Size and bytes come from one descriptor: of a name they may be those of two files, or the size an older one that NFS remembers. */
enum nebula_status file_old_read_text(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                  struct nebula_error *error)
{
        char path[STORE_PATH_MAX];
        enum nebula_status status = file_path(store, key, path, error);
        int result;

        if (status)
                return status;
        result = os_read_file_below(store->root, key, limit, ret_text, ret_size);
        if (result == -ESPIPE)
                return error_set(error, NEBULA_CORRUPT, 0, "%s: is no file", path);
        if (result == -EFBIG)
                return error_set(error, NEBULA_CORRUPT, 0, "%s: has more than the %zu bytes that are allowed", path, limit);
        return result ? file_error(store, "read", path, result == -ENOTDIR ? -ENOENT : result, error) : NEBULA_OK;
}

enum nebula_status file_read_bulk(struct store *store, const char *key, void *data, uint64_t size, uint32_t chunk_bytes,
                                  store_check *check, void *argument, struct nebula_error *error)
{
        bool is_direct = size >= STORE_BULK_MIN && !(((uintptr_t)data | chunk_bytes) % BULK_PAGE_BYTES);
        char path[STORE_PATH_MAX];
        enum nebula_status status = file_path(store, key, path, error);
        int fd, result;

        if (status)
                return status;
        fd = open_to_read(store, key, is_direct ? OS_DIRECT : 0);
        result = fd < 0 ? fd : bulk_read(fd, is_direct, data, false, size, chunk_bytes, check, argument, error);
        if (result == -EINVAL && is_direct) {
                if (fd >= 0)
                        os->close(fd);
                fd = open_to_read(store, key, 0); /* a file system without O_DIRECT */
                result = fd < 0 ? fd : bulk_read(fd, false, data, false, size, chunk_bytes, check, argument, error);
        }
        if (result > 0)
                status = (enum nebula_status)result; /* the check's, and so is the error */
        else if (result < 0)
                status = read_error(store, path, fd, size, result, error);
        if (fd >= 0)
                os->close(fd);
        return status;
}

enum nebula_status file_open_read(struct store *store, const char *key, int *ret_fd, bool *ret_direct,
                                  struct nebula_error *error)
{
        char path[STORE_PATH_MAX];
        enum nebula_status status = file_path(store, key, path, error);

        if (status)
                return status;
        *ret_direct = true;
        *ret_fd = open_to_read(store, key, OS_DIRECT);
        if (*ret_fd == -EINVAL) {
                *ret_direct = false; /* a file system without O_DIRECT */
                *ret_fd = open_to_read(store, key, 0);
        }
        return *ret_fd < 0 ? file_error(store, "read", path, *ret_fd, error) : NEBULA_OK;
}
