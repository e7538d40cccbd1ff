/* A library to preload: the wall clock of a process is ahead by the seconds, or behind by those below 0, that the file NEBULA_TEST_CLOCK holds as text. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *ret_time)
{
        int result = (int)syscall(SYS_clock_gettime, clock, ret_time);
        const char *path = getenv("NEBULA_TEST_CLOCK");
        char text[32] = "";
        int fd = !result && clock == CLOCK_REALTIME && path ? open(path, O_RDONLY | O_CLOEXEC) : -1;

        if (fd >= 0) {
                if (read(fd, text, sizeof text - 1) > 0)
                        ret_time->tv_sec += atol(text);
                close(fd);
        }
        return result;
}
