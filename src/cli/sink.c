#include "cli/sink.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"

enum nebula_status sink_begin(struct sink *sink, const char *directory, const char *name, uint64_t size,
                              struct nebula_error *error)
{
        uint64_t id = 0; /* random: processes in containers that share a directory may have the same pid */
        int result = os->random(&id, sizeof id);

        sink->result = 0;
        if (result < 0)
                return error_set(error, NEBULA_STORAGE, -result, "no name for a temporary file in %s", directory);
        if (snprintf(sink->path, sizeof sink->path, "%s/%s", directory, name) >= (int)sizeof sink->path ||
            snprintf(sink->temporary, sizeof sink->temporary, "%s/.nebula-restore-%016" PRIx64, directory, id) >=
                    (int)sizeof sink->temporary)
                return error_set(error, NEBULA_INVALID, 0, "the path of \"%s\" is too long", name);
        sink->fd = os->open(sink->temporary, OS_READ | OS_WRITE | OS_CREATE | OS_EXCLUSIVE | OS_NOFOLLOW | OS_SHARED);
        if (sink->fd < 0)
                return error_set(error, NEBULA_STORAGE, -sink->fd, "cannot create %s", sink->temporary);
        /* Reserves the space, so that a full disk shows now and not after minutes. If the file system cannot
         * reserve, the writes will fail. */
        result = size ? os->allocate(sink->fd, 0, size) : 0;
        if (result == -ENOSPC || result == -EDQUOT) {
                sink_abandon(sink);
                return error_set(error, NEBULA_NO_SPACE, -result, "no room for %" PRIu64 " bytes in %s", size, directory);
        }
        return NEBULA_OK;
}

void sink_write(struct sink *sink, const void *data, uint64_t offset, uint64_t size)
{
        int none = 0, result = os_write_at(sink->fd, data, size, offset);

        if (result)
                atomic_compare_exchange_strong(&sink->result, &none, result);
}

/* A link fails if a file of that name exists; a rename would replace it. */
static int give_name(const struct sink *sink, bool replaces)
{
        int result = replaces ? -ENOSYS : os->link(sink->temporary, sink->path);

        if (result && result != -EEXIST)
                return os->rename(sink->temporary, sink->path); /* or the file system has no links */
        os->unlink(sink->temporary);
        return result;
}

enum nebula_status sink_sync(struct sink *sink, struct nebula_error *error)
{
        int result = sink->result, closed;

        if (!result)
                result = os_sync(sink->fd);
        closed = os->close(sink->fd);
        sink->fd = -1;
        if (!result)
                result = closed;
        if (result)
                return error_set(error, result == -ENOSPC ? NEBULA_NO_SPACE : NEBULA_STORAGE, -result, "cannot write %s", sink->path);
        return NEBULA_OK;
}

enum nebula_status sink_place(struct sink *sink, bool replaces, struct nebula_error *error)
{
        int result = give_name(sink, replaces);

        if (result == -EEXIST)
                return error_set(error, NEBULA_BUSY, 0, "%s exists already; --force overwrites it", sink->path);
        if (result) {
                os->unlink(sink->temporary);
                return error_set(error, NEBULA_STORAGE, -result, "cannot write %s", sink->path);
        }
        return NEBULA_OK;
}

void sink_abandon(struct sink *sink)
{
        if (sink->fd >= 0)
                os->close(sink->fd);
        os->unlink(sink->temporary);
}
