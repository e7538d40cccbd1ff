/* How much memory may still be used: the smaller of the machine's free memory and the container's limit. And how long threads wait for it. */
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

/* If there is no number, leaves *ret_value as it is: "max" is no limit. */
static bool read_number(const char *directory, const char *name, char text[TEXT_MAX], uint64_t *ret_value)
{
        char path[4096 + 64];
        uint64_t value;
        char *end;

        snprintf(path, sizeof path, "%s/%s", directory, name);
        if (!read_text(path, text))
                return false;
        value = strtoull(text, &end, 10);
        if (end == text)
                return false;
        *ret_value = value;
        return true;
}

/* Free memory of one cgroup. Its page cache counts as free, because the kernel drops it first. */
static uint64_t cgroup_free(const char *directory, char text[TEXT_MAX])
{
        char path[4096 + 64];
        uint64_t limit = UINT64_MAX, high, used, cache = 0;

        if (!read_number(directory, "memory.max", text, &limit))
                read_number(directory, "memory.limit_in_bytes", text, &limit);
        if (read_number(directory, "memory.high", text, &high) && high < limit) /* beyond it the kernel slows every thread down */
                limit = high;
        if (limit == UINT64_MAX)
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

/* The cgroup of this process in the only hierarchy that measures waits, below CGROUP_ROOT. False: it is the root, or there is no such hierarchy. */
static bool own_cgroup(char text[TEXT_MAX], char *below, size_t size)
{
        char *line = read_text("/proc/self/cgroup", text) ? strstr(text, "0::/") : NULL;

        if (!line || (line != text && line[-1] != '\n'))
                return false;
        line[strcspn(line, "\n")] = 0;
        snprintf(below, size, "%s", line + 3);
        return below[1] != 0;
}

uint32_t os_linux_memory_stalled(void)
{
        char text[TEXT_MAX], below[4096], path[4096 + 64];
        const char *full;

        snprintf(path, sizeof path, "/proc/pressure/memory");
        if (own_cgroup(text, below, sizeof below))
                snprintf(path, sizeof path, CGROUP_ROOT "%s/memory.pressure", below);
        if (!read_text(path, text) && !read_text("/proc/pressure/memory", text))
                return 0;
        full = strstr(text, "full avg10=");
        return full ? (uint32_t)(strtod(full + strlen("full avg10="), NULL) * 10) : 0;
}
