#include "cli/term.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "cli/human.h"
#include "os/lock.h"
#include "os/os.h"

#define REDRAW_NS 150000000
#define LINE_NS 500000000

uint32_t term_columns(void)
{
        uint64_t columns;

        return os->probe(OS_PROBE_TERMINAL_OUT, &columns) ? 0 : (uint32_t)columns;
}

bool term_has_colour(void)
{
        const char *off = getenv("NO_COLOR"), *term = getenv("TERM");

        return !(off && *off) && !(term && !strcmp(term, "dumb")) && term_columns();
}

bool term_can_ask(void)
{
        uint64_t columns;

        return !os->probe(OS_PROBE_TERMINAL_IN, &columns) && !os->probe(OS_PROBE_TERMINAL_ERR, &columns);
}

const char *term_code(enum style style)
{
        static const char *const codes[] = { "", "\033[1m", "\033[2m", "\033[32m", "\033[33m", "\033[31m" };

        return codes[style];
}

/* Keeps only the newlines at the start and the end of the format: a newline in a tag or path cannot forge a line. */
static void print_harmless(const char *format, char *text)
{
        size_t above = strspn(format, "\n"), below = 0, length = strlen(text);

        while (below + above < strlen(format) && format[strlen(format) - 1 - below] == '\n')
                below++;
        text[length - below] = '\0';
        text_make_printable(text + above);
        fputs(text, stdout);
        while (below--)
                fputc('\n', stdout);
}

void term_print(enum style style, const char *format, ...)
{
        bool is_styled = style != STYLE_PLAIN && term_has_colour();
        va_list arguments;
        char *text;
        int length;

        va_start(arguments, format);
        length = vasprintf(&text, format, arguments);
        va_end(arguments);
        if (length < 0)
                return;
        fputs(is_styled ? term_code(style) : "", stdout);
        print_harmless(format, text);
        fputs(is_styled ? TERM_PLAIN : "", stdout);
        free(text);
}

static struct {
        struct lock lock; /* guards the members below */
        char what[80];
        uint64_t total, done;
        int64_t begun_ns, drawn_ns;
        bool is_on, is_json;
} progress = { .lock = LOCK_INIT(LOCK_PROGRESS) };

void progress_begin(const char *what, uint64_t total_bytes)
{
        uint64_t columns;

        lock_take(&progress.lock);
        snprintf(progress.what, sizeof progress.what, "%s", what);
        text_make_printable(progress.what);
        progress.total = total_bytes;
        progress.done = 0;
        progress.begun_ns = progress.drawn_ns = os->now_ns();
        progress.is_json = getenv("NEBULA_PROGRESS") && !strcmp(getenv("NEBULA_PROGRESS"), "json");
        progress.is_on = progress.is_json || !os->probe(OS_PROBE_TERMINAL_ERR, &columns);
        lock_give(&progress.lock);
}

/* For a program: {"done": BYTES, "total": BYTES} on a line of its own. */
static void print_progress(int64_t now_ns)
{
        fprintf(stderr, "{\"done\": %" PRIu64 ", \"total\": %" PRIu64 "}\n", progress.done, progress.total);
        progress.drawn_ns = now_ns;
}

static void draw(int64_t now_ns)
{
        char done[HUMAN_MAX], total[HUMAN_MAX], speed[HUMAN_MAX], left[HUMAN_MAX];
        double share = progress.total ? (double)progress.done / (double)progress.total : 1;
        double seconds = (double)(now_ns - progress.begun_ns) / 1e9;

        fprintf(stderr, "\r\033[K%s  %3.0f %%  %s of %s  %s", progress.what, share * 100, human_size(progress.done, done),
                human_size(progress.total, total), human_speed(progress.done, seconds, speed));
        if (progress.done && progress.done < progress.total)
                fprintf(stderr, "  %s left", human_duration(seconds * (1 / share - 1), left));
        fflush(stderr);
        progress.drawn_ns = now_ns;
}

void progress_add(uint64_t bytes)
{
        int64_t now_ns;

        lock_take(&progress.lock);
        progress.done += bytes;
        now_ns = progress.is_on ? os->now_ns() : 0;
        if (progress.is_json && now_ns - progress.drawn_ns >= LINE_NS)
                print_progress(now_ns);
        else if (progress.is_on && !progress.is_json && now_ns - progress.drawn_ns >= REDRAW_NS)
                draw(now_ns);
        lock_give(&progress.lock);
}

void progress_end(void)
{
        lock_take(&progress.lock);
        if (progress.is_on && !progress.is_json && progress.drawn_ns != progress.begun_ns)
                fputs("\r\033[K", stderr);
        progress.is_on = progress.is_json = false;
        lock_give(&progress.lock);
}
