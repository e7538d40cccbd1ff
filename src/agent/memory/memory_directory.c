#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "agent/memory/memory.h"
#include "agent/memory/memory_directory.h"
#include "ipc/ipc.h"
#include "os/os.h"

#define LOCK_LOOKS 25
#define LOCK_LOOK_MS 20

/* Names the agent that holds the lock: it has written its pid into the lock file. */
static void name_rival(struct memory *memory, const char *directory)
{
        int64_t length = memory->lock_fd < 0 ? 0 : os->pread(memory->lock_fd, memory->rival, sizeof memory->rival - 1, 0);

        snprintf(memory->rival_directory, sizeof memory->rival_directory, "%s", directory);
        if (length <= 0)
                length = snprintf(memory->rival, sizeof memory->rival, "of this user");
        memory->rival[length] = 0;
}

/* An agent that was killed gives its lock up a moment after its sockets, and its trainers have started this agent by then. */
static int lock_soon(int fd)
{
        int result = os->lock(fd, OS_LOCK_ALONE);

        for (int i = 0; result == -EAGAIN && i < LOCK_LOOKS; i++) {
                os->sleep_ms(LOCK_LOOK_MS);
                result = os->lock(fd, OS_LOCK_ALONE);
        }
        return result;
}

int memory_directory_take(struct memory *memory, const char *directory, char *ret_why, size_t why_size)
{
        char path[MEMORY_PATH_MAX], text[32];
        int length;
        struct os_stat stat, named;
        int result = os->mkdir(directory, 0700);

        if (result < 0 && result != -EEXIST) {
                snprintf(ret_why, why_size, "cannot create %s: %s", directory, os_error_text(result));
                return result;
        }
        result = ipc_place_stat(directory, &stat);
        /* Other users may list the directory, but not read the files, which have mode 0600. */
        if (!result && (stat.kind != OS_KIND_DIRECTORY || stat.uid != os->uid() || (stat.mode & 022)))
                result = -EPERM;
        if (result < 0) {
                snprintf(ret_why, why_size, "%s is not a directory that belongs to this user alone: it must be this user's, with "
                                            "mode 0755 or less", directory);
                return result;
        }
        snprintf(path, sizeof path, "%s/lock", directory);
        memory->lock_fd = os->open(path, OS_READ | OS_WRITE | OS_CREATE | OS_NOFOLLOW);
        result = memory->lock_fd < 0 ? memory->lock_fd : lock_soon(memory->lock_fd);
        /* An agent that ended may have removed the file between the two calls. */
        if (result >= 0 && (os->fstat(memory->lock_fd, &stat) < 0 || os->stat(path, false, &named) < 0 || stat.inode != named.inode))
                result = -EBUSY;
        if (result < 0) {
                name_rival(memory, directory);
                snprintf(ret_why, why_size, "%s is in use by another agent, %s: %s", directory, memory->rival, os_error_text(result));
                return result;
        }
        length = snprintf(text, sizeof text, "process %u", os->pid());
        os->truncate(memory->lock_fd, 0);
        os->pwrite(memory->lock_fd, text, (size_t)length, 0); /* for the log of another agent that finds the directory locked */
        strcpy(memory->directory, directory);
        result = memory_directory_measure(memory);
        if (result < 0)
                snprintf(ret_why, why_size, "no answer about the space in %s: %s", directory, os_error_text(result));
        return result;
}

int memory_directory_measure(struct memory *memory)
{
        struct os_space space;
        int result = os->space(memory->directory, &space);

        if (result >= 0)
                memory->named_limit = (space.free_bytes + memory->named_used) / 10 * 9;
        return result;
}
