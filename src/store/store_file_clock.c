/* The store's time: the clock of the file system, which may be a server's. A new file shows it. For some seconds after that, this
 * machine's clock continues it. */
#include <errno.h>
#include <stdio.h>

#include "base/error.h"
#include "store/store_file_private.h"

#define ANSWER_LASTS_NS (5 * SECOND_NS)

/* Writes a byte, because some clients set the time of an empty new file by their own clock. If the disk is full, the time of the empty
 * file is used. */
static int time_of_new(struct store *store, int64_t *ret_ns)
{
        char temp[FILE_TEMP_MAX];
        struct os_stat made;
        int fd = file_temp_open(store, STORE_TEMP_TOP, 0, temp), result, closed;

        if (fd < 0)
                return fd;
        result = os_write_at(fd, "", 1, 0);
        if (result == -ENOSPC || result == -EDQUOT)
                result = 0;
        closed = result ? os->close(fd) : file_temp_close(store, fd, &made);
        if (!result)
                result = closed;
        os->unlink_below(store->root, temp);
        if (!result)
                *ret_ns = made.mtime_ns;
        return result;
}

/* Without a root there are no objects whose times it could be compared with: this machine's time serves, and the root is not created. */
static int read_time(struct store *store, struct file_clock *clock, int64_t *ret_ns)
{
        int64_t now_ns = os->now_ns();
        struct os_stat root;
        int result;

        if (clock->read_ns && now_ns - clock->read_ns < ANSWER_LASTS_NS) {
                *ret_ns = clock->time_ns + (now_ns - clock->read_ns);
                return 0;
        }
        result = os->stat_below(store->root, "", &root);
        if (result == -ENOENT) {
                *ret_ns = os->wall_ns();
                return 0;
        }
        if (!result)
                result = time_of_new(store, ret_ns);
        if (result)
                return result;
        clock->read_ns = os->now_ns();
        clock->time_ns = *ret_ns;
        return 0;
}

enum nebula_status file_clock(struct store *store, int64_t *ret_ns, struct nebula_error *error)
{
        struct file_clock *clock = &((struct file_store *)store)->clock;
        int64_t time_ns = 0;
        int result;

        lock_take(&clock->lock);
        result = read_time(store, clock, &time_ns);
        lock_give(&clock->lock);
        if (result)
                return file_error(store, "ask for the time of", store->root, result, error);
        *ret_ns = time_ns;
        return NEBULA_OK;
}
