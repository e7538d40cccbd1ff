/* Checks of a storage path that is a directory. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/doctor.h"
#include "cli/human.h"
#include "cli/target.h"
#include "os/os.h"

#define TRY_BYTES (1u << 20)
#define SPACE_LEAST ((uint64_t)1 << 30)

static bool is_plain(const char *path)
{
        return *path == '/';
}

/* The path, or its nearest existing parent: the first save creates the rest. */
static void nearest(const char *path, char ret_path[TARGET_PATH_MAX])
{
        struct os_stat stat;

        snprintf(ret_path, TARGET_PATH_MAX, "%s", path);
        while (os->stat(ret_path, true, &stat) && strlen(ret_path) > 1) {
                char *slash = strrchr(ret_path, '/');

                slash[slash == ret_path] = '\0';
        }
}

int doctor_try_write(const char *path, int flags, double *ret_seconds)
{
        char directory[TARGET_PATH_MAX], file[TARGET_PATH_MAX + 64];
        int64_t begun_ns = os->now_ns();
        void *data = NULL;
        int fd, result;

        nearest(path, directory);
        snprintf(file, sizeof file, "%s/.nebula-tmp-%" PRIu32 "-doctor", directory, os->pid());
        fd = os->open(file, OS_WRITE | OS_CREATE | OS_EXCLUSIVE | flags);
        if (fd < 0)
                return fd;
        result = os->map(-1, 0, TRY_BYTES, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE | OS_MAP_ANONYMOUS, &data);
        if (result >= 0) {
                memset(data, 'n', TRY_BYTES);
                result = os_write_at(fd, data, TRY_BYTES, 0);
                if (!result)
                        result = os_sync(fd);
                os->unmap(data, TRY_BYTES);
        }
        os->close(fd);
        os->unlink(file);
        if (!result && ret_seconds)
                *ret_seconds = (double)(os->now_ns() - begun_ns) / 1e9;
        return result;
}

static bool check_path(const char *path, struct doctor_finding *finding)
{
        char text[HUMAN_MAX];
        struct os_stat stat;
        double seconds;
        int result;

        if (!*path) {
                FOUND(finding, "no storage path is known: nothing would be persisted");
                ADVICE(finding, "give --path DIR to check it too");
                return true;
        }
        if (!is_plain(path))
                return false;
        result = doctor_try_write(path, 0, &seconds);
        if (result) {
                finding->verdict = DOCTOR_BAD;
                FOUND(finding, "%.120s: cannot write: %s", path, os_error_text(result));
                ADVICE(finding, result == -EACCES || result == -EPERM ? "check the owner and the mode of the directory" : "check that it is mounted, writable and not full");
                return true;
        }
        FOUND(finding, "%.120s: writable%s, 1 MiB written and synced in %s", path,
              os->stat(path, true, &stat) ? " (the first save creates it)" : "", human_duration(seconds, text));
        return true;
}

static bool check_direct(const char *path, struct doctor_finding *finding)
{
        int result;

        if (!is_plain(path))
                return false;
        result = doctor_try_write(path, OS_DIRECT, NULL);
        if (!result) {
                FOUND(finding, "yes");
                return true;
        }
        finding->verdict = DOCTOR_SLOWER;
        FOUND(finding, "%s: writes go through the page cache", os_error_text(result));
        ADVICE(finding, "no action is needed; local file systems such as ext4 or xfs take O_DIRECT");
        return true;
}

static bool check_space(const char *path, struct doctor_finding *finding)
{
        char directory[TARGET_PATH_MAX], total[HUMAN_MAX], free_text[HUMAN_MAX];
        struct os_space space;
        int result;

        if (!is_plain(path))
                return false;
        nearest(path, directory);
        result = os->space(directory, &space);
        if (result) {
                finding->verdict = DOCTOR_BAD;
                FOUND(finding, "%.120s: %s", directory, os_error_text(result));
                return true;
        }
        FOUND(finding, "%s free of %s", human_size(space.free_bytes, free_text), human_size(space.total_bytes, total));
        if (space.free_bytes < SPACE_LEAST) {
                finding->verdict = DOCTOR_SLOWER;
                ADVICE(finding, "`nebula prune` removes old checkpoints");
        }
        return true;
}

const struct doctor_check doctor_storage_checks[] = {
        { "storage", check_path },
        { "O_DIRECT", check_direct },
        { "space", check_space },
};
const size_t doctor_storage_count = CLI_COUNT(doctor_storage_checks);
