#include "cli/human.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>

const char *human_size(uint64_t bytes, char text[HUMAN_MAX])
{
        static const char *const units[] = { "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
        double value = (double)bytes / 1024;
        unsigned unit = 0;

        if (bytes < 1024) {
                snprintf(text, HUMAN_MAX, "%" PRIu64 " B", bytes);
                return text;
        }
        /* 1023.96 would print as 1024.0. */
        for (; value >= 1023.95 && unit < 5; unit++)
                value /= 1024;
        snprintf(text, HUMAN_MAX, "%.1f %s", value, units[unit]);
        return text;
}

const char *human_speed(uint64_t bytes, double seconds, char text[HUMAN_MAX])
{
        char size[HUMAN_MAX];

        if (seconds <= 0)
                snprintf(text, HUMAN_MAX, "-");
        else
                snprintf(text, HUMAN_MAX, "%.40s/s", human_size((uint64_t)((double)bytes / seconds), size));
        return text;
}

const char *human_duration(double seconds, char text[HUMAN_MAX])
{
        if (seconds < 1)
                snprintf(text, HUMAN_MAX, "%.1f ms", seconds < 0 ? 0.0 : seconds * 1e3);
        else if (seconds < 10)
                snprintf(text, HUMAN_MAX, "%.1f s", seconds);
        else if (seconds < 120)
                snprintf(text, HUMAN_MAX, "%.0f s", seconds);
        else if (seconds < 7200)
                snprintf(text, HUMAN_MAX, "%.0f min", seconds / 60);
        else if (seconds < 172800)
                snprintf(text, HUMAN_MAX, "%d h %d min", (int)(seconds / 3600), (int)(seconds / 60) % 60);
        else
                snprintf(text, HUMAN_MAX, "%.0f days", seconds / 86400);
        return text;
}

const char *human_age(double then, double now, char text[HUMAN_MAX])
{
        double age = now - then;

        if (then <= 0)
                snprintf(text, HUMAN_MAX, "-");
        else if (age < -1)
                snprintf(text, HUMAN_MAX, "in the future");
        else if (age < 2)
                snprintf(text, HUMAN_MAX, "just now");
        else if (age < 90)
                snprintf(text, HUMAN_MAX, "%.0f s ago", age);
        else if (age < 5400)
                snprintf(text, HUMAN_MAX, "%.0f min ago", age / 60);
        else if (age < 129600)
                snprintf(text, HUMAN_MAX, "%.0f h ago", age / 3600);
        else
                snprintf(text, HUMAN_MAX, "%.0f days ago", age / 86400);
        return text;
}

const char *human_time(double then, char text[HUMAN_MAX])
{
        time_t seconds = (time_t)then;
        struct tm parts;

        if (then <= 0 || !localtime_r(&seconds, &parts) || !strftime(text, HUMAN_MAX, "%Y-%m-%d %H:%M:%S", &parts))
                snprintf(text, HUMAN_MAX, "-");
        return text;
}
