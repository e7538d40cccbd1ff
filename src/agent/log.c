#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "agent/log.h"
#include "os/os.h"

#define LOG_BYTES_MAX (8u << 20)
#define STANDARD_ERROR 2

static atomic_int log_fd = -1;

int log_open(const char *path)
{
        char old[4200];
        struct os_stat stat;
        int fd = STANDARD_ERROR;

        if (strcmp(path, "-")) {
                if (!os->stat(path, false, &stat) && stat.kind == OS_KIND_FILE && stat.size > LOG_BYTES_MAX &&
                    (size_t)snprintf(old, sizeof old, "%s.1", path) < sizeof old)
                        os->rename(path, old);
                fd = os->open(path, OS_WRITE | OS_CREATE | OS_APPEND | OS_NOFOLLOW);
                if (fd < 0)
                        return fd;
        }
        atomic_store(&log_fd, fd);
        log_to(fd, LOG_LEVEL_INFO);
        return 0;
}

void log_close(void)
{
        int fd = atomic_exchange(&log_fd, -1);

        log_to(-1, LOG_LEVEL_INFO);
        if (fd >= 0 && fd != STANDARD_ERROR)
                os->close(fd);
}
