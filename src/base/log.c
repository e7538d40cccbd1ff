#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/text.h"
#include "os/os.h"

#define LOG_LINE_MAX 1024 /* a message (512 bytes) and its subject */

static const char *const level_names[] = { "error", "warn", "info", "debug" };
static atomic_int log_fd = -1;
static atomic_int log_level = LOG_LEVEL_INFO;

void log_to(int fd, enum log_level level)
{
        atomic_store(&log_level, (int)level);
        atomic_store(&log_fd, fd);
}

bool log_wants(enum log_level level)
{
        return atomic_load(&log_fd) >= 0 && (int)level <= atomic_load(&log_level);
}

bool log_level_parse(const char *text, enum log_level *ret_level)
{
        for (size_t k = 0; k < sizeof level_names / sizeof level_names[0]; k++) {
                if (strcmp(text, level_names[k]) == 0) {
                        *ret_level = (enum log_level)k;
                        return true;
                }
        }
        return false;
}

static size_t write_time(char *line, size_t size)
{
        int64_t now = os->wall_ns();
        time_t seconds = (time_t)(now / 1000000000);
        struct tm parts;
        size_t used;

        if (!gmtime_r(&seconds, &parts))
                return 0;
        used = strftime(line, size, "%Y-%m-%dT%H:%M:%S", &parts);
        return used + (size_t)snprintf(line + used, size - used, ".%03dZ ", (int)(now / 1000000 % 1000));
}

__attribute__((format(printf, 3, 0)))
static void write_line(int fd, enum log_level level, const char *format, va_list arguments)
{
        char line[LOG_LINE_MAX];
        size_t head, size;

        head = write_time(line, sizeof line);
        head += (size_t)snprintf(line + head, sizeof line - head, "%s ", level_names[level]);
        vsnprintf(line + head, sizeof line - head - 1, format, arguments); /* leaves room for the newline */
        text_make_printable(line + head);
        size = head + strlen(line + head);
        line[size++] = '\n';
        os->write(fd, line, size); /* the program goes on if the log cannot be written */
}

void log_event(enum log_level level, const char *format, ...)
{
        va_list arguments;

        if (!log_wants(level))
                return;
        va_start(arguments, format);
        write_line(atomic_load(&log_fd), level, format, arguments);
        va_end(arguments);
}

void log_line(int fd, enum log_level level, const char *format, ...)
{
        va_list arguments;

        va_start(arguments, format);
        write_line(fd, level, format, arguments);
        va_end(arguments);
}
