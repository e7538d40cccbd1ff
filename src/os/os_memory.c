/* How much memory may still be used: the smaller of the machine's free memory and the container's limit. */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "os/os_linux.h"

#define TEXT_MAX 16384 /* memory.stat of a cgroup is 2 to 4 KiB */
#define CGROUP_ROOT "/sys/fs/cgroup"

static bool read_text(const char *path, char text[TEXT_MAX])
{
        size_t size = 0;
        int fd = open(path, O_RDONLY | O_CLOEXEC);

        if (fd < 0)
                return false;
        while (size < TEXT_MAX - 1) {
                ssize_t count = read(fd, text + size, TEXT_MAX - 1 - size);

                if (count < 0 && errno == EINTR)
                        continue;
                if (count <= 0)
                        break;
                size += (size_t)count;
        }
        close(fd);
        text[size] = 0;
        return size > 0;
}

/* The number after a key at the start of a line; 0 if there is no such line. */
static uint64_t number_of(const char *text, const char *key)
{
        size_t length = strlen(key);

        for (const char *line = text; line; line = strchr(line, '\n'), line = line ? line + 1 : NULL)
                if (!strncmp(line, key, length))
                        return strtoull(line + length, NULL, 10);
        return 0;
}

static uint64_t machine_free(char text[TEXT_MAX])
{
        return read_text("/proc/meminfo", text) ? number_of(text, "MemAvailable:") * 1024 : 0;
}

static bool read_number(const char *directory, const char *name, char text[TEXT_MAX], uint64_t *ret_value)
{
        char path[4096 + 64];
        char *end;

        snprintf(path, sizeof path, "%s/%s", directory, name);
        if (!read_text(path, text))
                return false;
        *ret_value = strtoull(text, &end, 10); /* "max" is not a number: no limit */
        return end != text;
}

/* Free memory of one cgroup. Its page cache counts as free, because the kernel drops it first. */
static uint64_t cgroup_free(const char *directory, char text[TEXT_MAX])
{
        char path[4096 + 64];
        uint64_t limit, used, cache = 0;

        if (!read_number(directory, "memory.max", text, &limit) &&
            !read_number(directory, "memory.limit_in_bytes", text, &limit))
                return UINT64_MAX;
        if (!read_number(directory, "memory.current", text, &used) &&
            !read_number(directory, "memory.usage_in_bytes", text, &used))
                return UINT64_MAX;
        snprintf(path, sizeof path, "%s/memory.stat", directory);
        if (read_text(path, text))
                cache = number_of(text, "inactive_file ") + number_of(text, "active_file ");
        used -= cache < used ? cache : used;
        return limit > used ? limit - used : 0;
}

/* Checks the cgroup of this process and all its parents: each of them may have a limit. */
static uint64_t cgroups_free(const char *base, char *below, char text[TEXT_MAX])
{
        uint64_t least = UINT64_MAX;

        for (;;) {
                char directory[4096];
                char *slash;
                uint64_t left;

                snprintf(directory, sizeof directory, "%s%s", base, below);
                left = cgroup_free(directory, text);
                least = left < least ? left : least;
                slash = strrchr(below, '/');
                if (!slash || !*below)
                        return least;
                *slash = 0;
        }
}

uint64_t os_linux_memory_free(void)
{
        char text[TEXT_MAX], groups[TEXT_MAX];
        uint64_t least = machine_free(text);
        char *save = NULL;

        if (!read_text("/proc/self/cgroup", groups))
                return least;
        for (char *line = strtok_r(groups, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
                char *controllers = strchr(line, ':');
                char *below = controllers ? strchr(controllers + 1, ':') : NULL;
                const char *base;
                uint64_t left;

                if (!below)
                        continue;
                *below++ = 0;
                if (!controllers[1])
                        base = CGROUP_ROOT;
                else if (strstr(controllers, "memory"))
                        base = CGROUP_ROOT "/memory";
                else
                        continue;
                left = cgroups_free(base, below, text);
                least = left < least ? left : least;
        }
        return least;
}
