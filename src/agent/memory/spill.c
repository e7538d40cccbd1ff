#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/memory/memory.h"
#include "agent/memory/spill.h"
#include "base/conf.h"
#include "base/error.h"
#include "base/text.h"
#include "os/os.h"

/* f_type of file systems on a local disk: ext2 to 4, xfs, btrfs, overlay, zfs, f2fs, bcachefs. */
static const uint64_t local_types[] = { 0xef53, 0x58465342, 0x9123683e, 0x794c7630, 0x2fc12fc1, 0xf2f52010, 0xca451a4e };

static bool is_local(uint64_t fs_type)
{
        for (size_t i = 0; i < sizeof local_types / sizeof *local_types; i++)
                if (local_types[i] == fs_type)
                        return true;
        return false;
}

static const char *choose_directory(const char *persist_path)
{
        const char *chosen = conf_env("NEBULA_SPILL_DIR");

        if (chosen)
                return chosen;
        persist_path = text_local_path(persist_path);
        return *persist_path == '/' ? persist_path : NULL;
}

static int open_nameless(const char *directory, uint64_t id)
{
        char path[MEMORY_PATH_MAX];
        int fd;

        /* A name that the sweep recognises, because the file has it for a moment. */
        if ((size_t)snprintf(path, sizeof path, "%s/.nebula-tmp-%016" PRIx64, directory, id) >= sizeof path)
                return -ENAMETOOLONG;
        fd = os->open(path, OS_READ | OS_WRITE | OS_CREATE | OS_EXCLUSIVE | OS_NOFOLLOW);
        if (fd >= 0)
                os->unlink(path);
        return fd;
}

enum nebula_status spill_create(const char *persist_path, bool may_make, uint64_t capacity, struct image **ret_image, struct nebula_error *error)
{
        const char *directory = choose_directory(persist_path);
        struct os_space space;
        struct image *image;
        int result;

        if (!directory)
                return error_set(error, NEBULA_INVALID, 0, "no local disk is known: set NEBULA_SPILL_DIR to a directory on one");
        result = may_make || conf_env("NEBULA_SPILL_DIR") ? os_make_dirs(directory, 0777) : 0;
        if (!result)
                result = os->space(directory, &space);
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "cannot stream through %s", directory);
        if (!is_local(space.fs_type))
                return error_set(error, NEBULA_INVALID, 0, "%s is not on a local disk: set NEBULA_SPILL_DIR to a directory on one",
                                 directory);
        image = calloc(1, sizeof *image);
        if (!image)
                return error_set(error, NEBULA_NO_MEMORY, ENOMEM, "no memory to describe an image");
        *image = (struct image){ .id = memory_random_id(), .capacity = capacity, .spilled = true };
        image->fd = result = open_nameless(directory, image->id);
        if (result >= 0) {
                do
                        result = os->allocate(image->fd, 0, capacity);
                while (result == -EINTR);
                if (result < 0)
                        os->close(image->fd);
        }
        if (result < 0) {
                free(image);
                return error_set(error, error_status_of_errno(-result), -result, "cannot stream %" PRIu64 " MiB through %s",
                                 capacity >> 20, directory);
        }
        *ret_image = image;
        return NEBULA_OK;
}
