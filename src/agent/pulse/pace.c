#include "agent/pulse/pace.h"

#include <stdio.h>
#include <string.h>

#define TIMES_SLOWEST 10
#define TIMES_EVER 2
#define TIMES_PHASE 10    /* the least limit of a named phase, in least limits of a step */
#define TIMES_UNKNOWN 30  /* the limit of what has no history */

static int64_t larger(int64_t a, int64_t b)
{
        return a > b ? a : b;
}

static uint32_t find(struct pace *pace, const char *name)
{
        for (uint32_t i = 0; i < pace->phase_count; i++)
                if (!strncmp(pace->phases[i].name, name, sizeof pace->phases[i].name))
                        return i;
        if (pace->phase_count == PACE_PHASES)
                return PACE_PHASES - 1;
        snprintf(pace->phases[pace->phase_count].name, sizeof pace->phases[0].name, "%s", name);
        return pace->phase_count++;
}

static void note(struct pace_phase *phase, int64_t took_ns)
{
        /* The first step compiles and fills caches: it says little about the others, and counts only as the slowest ever. */
        if (phase->count || phase->name[0])
                phase->recent_ns[phase->count % PACE_RECENT] = took_ns;
        phase->slowest_ns = larger(phase->slowest_ns, took_ns);
        phase->count++;
}

void pace_see(struct pace *pace, uint64_t beats, const char *phase, int64_t now_ns, int64_t every_ns)
{
        int64_t pause_ns = now_ns - pace->looked_ns;
        bool is_watched = beats && pace->beats;
        uint32_t index = find(pace, phase);

        pace->looked_ns = now_ns;
        if (is_watched && pause_ns > 4 * every_ns)
                pace->since_ns += pause_ns - every_ns;
        if (is_watched && beats == pace->beats && index == pace->now)
                return;
        if (is_watched && (index == pace->now || pace->phases[pace->now].name[0])) /* the beginning of a phase is not the end of a step */
                note(&pace->phases[pace->now], now_ns - pace->since_ns);
        pace->beats = beats;
        pace->now = index;
        pace->since_ns = now_ns;
}

int64_t pace_limit_ns(const struct pace *pace, int64_t least_ns)
{
        const struct pace_phase *phase = &pace->phases[pace->now];
        bool is_named = phase->name[0];
        int64_t slowest_ns = 0;

        if (phase->count < (is_named ? 1 : PACE_FEW))
                return larger(TIMES_UNKNOWN * least_ns, TIMES_EVER * phase->slowest_ns);
        for (uint32_t i = 0; i < PACE_RECENT; i++)
                slowest_ns = larger(slowest_ns, phase->recent_ns[i]);
        return larger(larger(is_named ? TIMES_PHASE * least_ns : least_ns, TIMES_SLOWEST * slowest_ns), TIMES_EVER * phase->slowest_ns);
}

bool pace_hangs(const struct pace *pace, int64_t now_ns, int64_t least_ns)
{
        return pace->beats && now_ns - pace->since_ns > pace_limit_ns(pace, least_ns);
}
