/* Makes an object that shares blocks with another file of the store. These bytes are not written and take no space. A hard link would do
 * so for identical files on more file systems, but a program that writes over one version in place would then damage the other version,
 * too. */
#include <errno.h>
#include <string.h>

#include "base/log.h"
#include "store/store_file_private.h"

static bool is_meant(int fd, const struct store_source *source)
{
        struct os_stat found;

        return !os->fstat(fd, &found) && found.kind == OS_KIND_FILE && found.size == source->size &&
               !strcmp(file_stamp(&found).text, source->mark.text);
}

int file_open_source(struct store *store, const struct store_object *object)
{
        char path[STORE_PATH_MAX];
        int fd;

        if (!object->source || !object->feed || object->size < FILE_BULK_MIN || atomic_load(&((struct file_store *)store)->cannot_clone) ||
            file_path(store, object->source->key, path, NULL))
                return -1;
        fd = file_open_to_read(store, object->source->key, 0);
        if (fd >= 0 && !is_meant(fd, object->source)) {
                os->close(fd);
                fd = -1;
        }
        return fd < 0 ? -1 : fd;
}

static int share_range(struct store *store, int fd, int source, uint64_t offset, uint64_t size)
{
        int result;

        do
                result = os->clone_range(fd, source, offset, size);
        while (result == -EINTR);
        if (result == -EOPNOTSUPP || result == -ENOTTY)
                atomic_store(&((struct file_store *)store)->cannot_clone, true);
        return result;
}

/* Shares the blocks of the same chunks. Neighbouring chunks take one call. */
static int share_same(struct store *store, const struct store_object *object, int source, int fd, uint64_t *ret_shared)
{
        uint64_t chunk_bytes = object->feed->chunk_bytes, begin = 0;
        int result = 0;

        *ret_shared = 0;
        for (uint64_t offset = 0; offset < object->size && !result; offset += chunk_bytes) {
                uint64_t left = object->size - offset, end = left < chunk_bytes ? object->size : offset + chunk_bytes;
                bool is_same = bulk_feed_is_same(object->feed, offset);

                if (is_same && end < object->size)
                        continue;
                if (!is_same)
                        end = offset;
                if (begin < end)
                        result = share_range(store, fd, source, begin, end - begin);
                *ret_shared += end - begin;
                begin = offset + chunk_bytes;
        }
        return result;
}

/* Reads `size` bytes, by requests of whole pages. */
static int read_pages(int fd, char *to, uint64_t size, uint64_t offset)
{
        uint64_t pages = (size + BULK_PAGE_BYTES - 1) & ~(uint64_t)(BULK_PAGE_BYTES - 1), done = 0;

        while (done < size) {
                int64_t got = os->pread(fd, to + done, pages - done, offset + done);

                if (got == -EINTR)
                        continue;
                if (got <= 0)
                        return got ? (int)got : -ENODATA;
                done += (uint64_t)got;
        }
        return 0;
}

/* Compares the shared chunks with those in memory: blocks that rotted would damage this version, too. The read passes the page cache by if it can,
 * because the cache may have bytes that the disk has lost. 0: they are the same. */
static int compare_same(const struct store *store, const struct store_object *object, const char *temp)
{
        uint64_t chunk_bytes = object->feed->chunk_bytes;
        struct bulk_buffer buffer = { 0 };
        int fd = os->open_below(store->root, temp, OS_READ | OS_NOFOLLOW | OS_DIRECT), result;

        if (fd == -EINVAL) /* the file system has no O_DIRECT */
                fd = os->open_below(store->root, temp, OS_READ | OS_NOFOLLOW);
        if (fd < 0)
                return fd;
        result = bulk_buffer_open(&buffer, chunk_bytes);
        for (uint64_t offset = 0; offset < object->size && !result; offset += chunk_bytes) {
                uint64_t left = object->size - offset, size = left < chunk_bytes ? left : chunk_bytes;
                if (!bulk_feed_is_same(object->feed, offset))
                        continue;
                result = read_pages(fd, buffer.data, size, offset);
                if (!result && memcmp(buffer.data, (const char *)object->data + offset, size))
                        result = -EBADMSG;
        }
        bulk_buffer_close(&buffer);
        os->close(fd);
        return result;
}

static const char *reason_of(int refused)
{
        return refused == -EBADMSG ? "the bytes on the disk are others than were written" : refused ? strerror(-refused) : "another program has changed that file";
}

int file_refer(struct store *store, const struct store_object *object, int source, const char *temp, int fd, bool is_direct, uint64_t *ret_referred)
{
        uint64_t shared;
        int result, refused;

        object->feed->skips_same = true;
        result = bulk_write(fd, is_direct, object->data, object->size, object->feed);
        object->feed->skips_same = false;
        if (result)
                return result;
        refused = share_same(store, object, source, fd, &shared);
        if (!refused && is_meant(source, object->source)) {
                refused = compare_same(store, object, temp);
                *ret_referred = shared;
                if (!refused)
                        return 0;
                *ret_referred = 0;
        }
        log_event(refused == -EBADMSG ? LOG_LEVEL_WARN : LOG_LEVEL_DEBUG, "%s/%s is written as a whole: its blocks cannot be shared with %s (%s)", store->root,
                  object->key, object->source->key, reason_of(refused));
        return bulk_write(fd, is_direct, object->data, object->size, object->feed);
}
