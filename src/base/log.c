#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/text.h"
#include "os/os.h"

#define LOG_LINE_MAX 1024 /* a message (512 bytes) and its subject */

static const char *const level_names[] = { "error", "warn", "info", "debug" };
static atomic_int log_fd = -1;
static atomic_int log_level = LOG_LEVEL_INFO;

/* A line that waits for log_let_go. */
struct kept {
        struct kept *next;
        size_t size;
        char line[];
};
static _Thread_local struct {
        bool is_on;
        struct kept *first, *last;
} held;

void log_to(int fd, enum log_level level)
{
        atomic_store(&log_level, (int)level);
        atomic_store(&log_fd, fd);
}

bool log_wants(enum log_level level)
{
        return atomic_load(&log_fd) >= 0 && (int)level <= atomic_load(&log_level);
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

/* Returns its size. */
__attribute__((format(printf, 3, 0)))
static size_t format_line(char line[LOG_LINE_MAX], enum log_level level, const char *format, va_list arguments)
{
        size_t head, size;

        head = write_time(line, LOG_LINE_MAX);
        head += (size_t)snprintf(line + head, LOG_LINE_MAX - head, "%s ", level_names[level]);
        vsnprintf(line + head, LOG_LINE_MAX - head - 1, format, arguments); /* leaves room for the newline */
        text_make_printable(line + head);
        size = head + strlen(line + head);
        line[size++] = '\n';
        return size;
}

/* Without memory the line is lost: the program goes on if the log cannot be written. */
static void keep(const char *line, size_t size)
{
        struct kept *kept = malloc(sizeof *kept + size);

        if (!kept)
                return;
        kept->next = NULL;
        kept->size = size;
        memcpy(kept->line, line, size);
        *(held.last ? &held.last->next : &held.first) = kept;
        held.last = kept;
}

void log_event(enum log_level level, const char *format, ...)
{
        char line[LOG_LINE_MAX];
        va_list arguments;
        size_t size;

        if (!log_wants(level))
                return;
        va_start(arguments, format);
        size = format_line(line, level, format, arguments);
        va_end(arguments);
        if (held.is_on)
                keep(line, size);
        else
                os->write(atomic_load(&log_fd), line, size); /* the program goes on if the log cannot be written */
}

void log_hold(void)
{
        held.is_on = true;
}

void log_let_go(void)
{
        struct kept *kept = held.first;

        held.is_on = false;
        held.first = held.last = NULL;
        while (kept) {
                struct kept *next = kept->next;

                os->write(atomic_load(&log_fd), kept->line, kept->size);
                free(kept);
                kept = next;
        }
}

bool log_is_held(void)
{
        return held.first != NULL;
}

void log_line(int fd, enum log_level level, const char *format, ...)
{
        char line[LOG_LINE_MAX];
        va_list arguments;
        size_t size;

        va_start(arguments, format);
        size = format_line(line, level, format, arguments);
        va_end(arguments);
        os->write(fd, line, size);
}
