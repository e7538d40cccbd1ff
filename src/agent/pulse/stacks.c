#include "agent/pulse/stacks.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "os/os.h"

#define TEXT_MAX (256u << 10)
#define WAIT_MS 2000 /* for a process to write its stacks */
#define PAUSE_MS 20
#define QUIET_ROUNDS 5 /* so many pauses without a new byte: it has written all */
#define THREADS_MAX 512
#define NO_TOOL 77
#define SIGNAL_CONTINUE 18

/* A file of a thread; nothing if the kernel does not show it. */
static void copy(FILE *file, uint32_t pid, const char *thread, const char *what)
{
        char path[128], *text;
        size_t size;

        snprintf(path, sizeof path, "/proc/%" PRIu32 "/task/%.20s/%s", pid, thread, what);
        if (os_read_file(path, TEXT_MAX, &text, &size))
                return;
        while (size && (text[size - 1] == '\n' || text[size - 1] == ' '))
                text[--size] = 0;
        if (size && strcmp(text, "0"))
                fprintf(file, "    %s: %s\n", what, text);
        free(text);
}

static void write_threads(const struct stacks_of *process, FILE *file)
{
        static const char *const files[] = { "comm", "wchan", "syscall", "stack" };
        char path[64], name[64];
        struct os_dir *dir;
        int count = 0;

        snprintf(path, sizeof path, "/proc/%" PRIu32 "/task", process->pid);
        if (os->opendir(path, &dir))
                return;
        while (count++ < THREADS_MAX && os->readdir(dir, name, sizeof name) == 1) {
                fprintf(file, "  thread %s\n", name);
                for (size_t i = 0; i < sizeof files / sizeof *files; i++)
                        copy(file, process->pid, name, files[i]);
        }
        os->closedir(dir);
}

static uint64_t size_of(int fd)
{
        struct os_stat stat;

        return os->fstat(fd, &stat) ? 0 : stat.size;
}

/* The process appends to its file. So only what is behind the present end is new. */
static void write_own(const struct stacks_of *process, FILE *file)
{
        uint64_t begin, end;
        int64_t waited_ms = 0;
        char path[64], *text;
        int fd, quiet = 0;

        snprintf(path, sizeof path, "/proc/%" PRIu32 "/fd/%" PRId32, process->pid, process->fd);
        fd = os->open(path, OS_READ);
        if (fd < 0)
                return;
        begin = end = size_of(fd);
        if (os->signal(process->pid, process->signal))
                goto close_file;
        while (waited_ms < WAIT_MS && (end == begin || quiet < QUIET_ROUNDS)) {
                uint64_t now;

                os->sleep_ms(PAUSE_MS);
                waited_ms += PAUSE_MS;
                now = size_of(fd);
                quiet = now == end ? quiet + 1 : 0;
                end = now;
        }
        if (end == begin) {
                fputs("  The process has not answered the signal that asks for its stacks.\n", file);
                goto close_file;
        }
        end = end - begin > TEXT_MAX ? begin + TEXT_MAX : end;
        text = malloc(end - begin);
        if (text && !os_read_at(fd, text, end - begin, begin))
                fwrite(text, 1, end - begin, file);
        free(text);
close_file:
        os->close(fd);
}

/* A tool whose time is over may leave the process stopped: it gets SIGCONT. */
static void write_native(const struct stacks_of *process, int64_t *left_ms, FILE *file)
{
        static char script[] = "export DEBUGINFOD_URLS=; if command -v eu-stack >/dev/null; then exec eu-stack -p $1 2>&1; "
                               "elif command -v gdb >/dev/null; then exec gdb -nx -batch -p $1 -ex 'thread apply all backtrace 40' 2>&1; else exit 77; fi";
        char pid[16], *text = malloc(TEXT_MAX);
        char *argv[] = { (char[]){ "sh" }, (char[]){ "-c" }, script, (char[]){ "nebula-stacks" }, pid, NULL };
        int64_t begun_ns = os->now_ns();
        int code = 0, result;
        size_t size = 0;

        snprintf(pid, sizeof pid, "%" PRIu32, process->pid);
        result = !text ? -ENOMEM : *left_ms <= 0 ? -ETIMEDOUT : os->run("/bin/sh", argv, *left_ms, text, TEXT_MAX, &size, &code);
        *left_ms -= (os->now_ns() - begun_ns) / 1000000;
        if (result == -ETIMEDOUT)
                os->signal(process->pid, SIGNAL_CONTINUE);
        if (result == -EFBIG)
                size = TEXT_MAX;
        if (size) {
                fputs("  native stacks:\n", file);
                fwrite(text, 1, size, file);
        } else if (result) {
                fprintf(file, "  no native stacks: %s\n", result == -ETIMEDOUT ? "the time for them is over" : os_error_text(result));
        } else if (code == NO_TOOL) {
                fputs("  no native stacks: install eu-stack (elfutils) or gdb on this node\n", file);
        } else {
                fprintf(file, "  no native stacks: eu-stack or gdb has ended with %d\n", code);
        }
        free(text);
}

void stacks_write(const struct stacks_of *process, int64_t *native_ms, FILE *file)
{
        fprintf(file, "rank %" PRIu32 ", process %" PRIu32 ": step %" PRIu64 "%s%s, for %.0f s (its limit is %.0f s)\n", process->rank, process->pid,
                process->step, process->phase[0] ? ", phase " : "", process->phase, process->silent_s, process->limit_s);
        if (process->signal)
                write_own(process, file);
        write_threads(process, file);
        write_native(process, native_ms, file);
        fputc('\n', file);
}
