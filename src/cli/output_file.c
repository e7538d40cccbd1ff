#include "cli/output_file.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"

enum nebula_status output_file_begin(struct output_file *output, const char *directory, const char *name, uint64_t size,
                                     struct nebula_error *error)
{
        uint64_t id = 0; /* random: processes in containers that share a directory may have the same pid */
        int result = os->random(&id, sizeof id);

        output->result = 0;
        if (result < 0)
                return error_set(error, NEBULA_STORAGE, -result, "no name for a temporary file in %s", directory);
        if (snprintf(output->path, sizeof output->path, "%s/%s", directory, name) >= (int)sizeof output->path ||
            snprintf(output->temporary, sizeof output->temporary, "%s/.nebula-restore-%016" PRIx64, directory, id) >=
                    (int)sizeof output->temporary)
                return error_set(error, NEBULA_INVALID, 0, "the path of \"%s\" is too long", name);
        output->fd = os->open(output->temporary, OS_READ | OS_WRITE | OS_CREATE | OS_EXCLUSIVE | OS_NOFOLLOW | OS_SHARED);
        if (output->fd < 0)
                return error_set(error, NEBULA_STORAGE, -output->fd, "cannot make a file in %s", directory);
        /* Reserves the space, so that a full disk shows now and not after minutes. If the file system cannot
         * reserve, the writes will fail. */
        result = size ? os->allocate(output->fd, 0, size) : 0;
        if (result == -ENOSPC || result == -EDQUOT) {
                output_file_abandon(output);
                return error_set(error, NEBULA_NO_SPACE, -result, "no room for %" PRIu64 " bytes in %s", size, directory);
        }
        return NEBULA_OK;
}

void output_file_write(struct output_file *output, const void *data, uint64_t offset, uint64_t size)
{
        int none = 0, result = os_write_at(output->fd, data, size, offset);

        if (result)
                atomic_compare_exchange_strong(&output->result, &none, result);
}

/* A link fails if a file of that name exists; a rename would replace it. */
static int give_name(const struct output_file *output, bool replaces)
{
        int result = replaces ? -ENOSYS : os->link(output->temporary, output->path);

        if (result && result != -EEXIST)
                return os->rename(output->temporary, output->path); /* or the file system has no links */
        os->unlink(output->temporary);
        return result;
}

enum nebula_status output_file_sync(struct output_file *output, struct nebula_error *error)
{
        int result = output->result, closed;

        if (!result)
                result = os_sync(output->fd);
        closed = os->close(output->fd);
        output->fd = -1;
        if (!result)
                result = closed;
        if (result)
                return error_set(error, result == -ENOSPC ? NEBULA_NO_SPACE : NEBULA_STORAGE, -result, "cannot write %s", output->path);
        return NEBULA_OK;
}

enum nebula_status output_file_place(struct output_file *output, bool replaces, struct nebula_error *error)
{
        int result = give_name(output, replaces);

        if (result == -EEXIST)
                return error_set(error, NEBULA_BUSY, 0, "%s exists already; --force overwrites it", output->path);
        if (result) {
                os->unlink(output->temporary);
                return error_set(error, NEBULA_STORAGE, -result, "cannot write %s", output->path);
        }
        return NEBULA_OK;
}

void output_file_abandon(struct output_file *output)
{
        if (output->fd >= 0)
                os->close(output->fd);
        os->unlink(output->temporary);
}
