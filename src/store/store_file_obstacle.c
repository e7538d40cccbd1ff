/* Finds the file or directory that blocks an object, and says how to remove it: errno alone does not. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "store/store_file_private.h"

static bool is_denied(int result)
{
        return result == -EACCES || result == -EPERM;
}

/* `is_last`: `path` is the object itself, not a directory above it. False: it is not the obstacle. */
static bool describe(const char *path, struct os_stat *found, bool is_last, int result, char *text, size_t size)
{
        struct os_stat target;

        if (found->kind == OS_KIND_LINK && result == -ELOOP)
                return snprintf(text, size, "%s is a symbolic link, and Nebula follows none below a storage path: move it away", path) > 0;
        if (found->kind == OS_KIND_LINK && os->stat(path, true, &target))
                return snprintf(text, size, "%s is a symbolic link that leads nowhere: move it away", path) > 0;
        if (found->kind == OS_KIND_LINK)
                *found = target;
        if (!is_last && found->kind != OS_KIND_DIRECTORY)
                return snprintf(text, size, "%s is a file where a directory is to be: move it away", path) > 0;
        if (is_last && found->kind == OS_KIND_DIRECTORY && !is_denied(result))
                return snprintf(text, size, "%s is a directory where a file is to be: move it away", path) > 0;
        return false;
}

static void describe_denial(const char *path, const struct os_stat *found, char *text, size_t size)
{
        if (found->uid != os->uid())
                snprintf(text, size, "%s belongs to user %u (mode %03o), and user %u needs more rights there: give them, or move it away",
                         path, found->uid, found->mode & 07777u, os->uid());
        else
                snprintf(text, size, "%s has mode %03o: if it is that, run chmod u+rwx on it", path, found->mode & 07777u);
}

bool file_obstacle(const char *path, int result, char *text, size_t size)
{
        char part[STORE_PATH_MAX], nearest[STORE_PATH_MAX] = "";
        size_t length = strlen(path);
        struct os_stat found, last = { 0 };

        if (result == -ENAMETOOLONG)
                return snprintf(text, size, "the file system does not take names of this length: choose a shorter tag or file name") > 0;
        if (!is_denied(result) && result != -ENOTDIR && result != -EISDIR && result != -EEXIST && result != -ENOTEMPTY &&
            result != -ELOOP && result != -ENOENT)
                return false;
        for (size_t i = 1; i <= length && i < sizeof part; i++) {
                if (path[i] && path[i] != '/')
                        continue;
                snprintf(part, sizeof part, "%.*s", (int)i, path);
                if (os->stat(part, false, &found))
                        break;
                if (describe(part, &found, i == length, result, text, size))
                        return true;
                memcpy(nearest, part, i + 1);
                last = found;
        }
        if (!is_denied(result) || !nearest[0])
                return false;
        describe_denial(nearest, &last, text, size);
        return true;
}
