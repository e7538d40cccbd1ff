/*
 * pace.h - how long the steps of one trainer take, and from when on it counts as hung. Pure: times come from the caller.
 *
 *      steps           after PACE_FEW steps, the limit is max(least, 10 x the slowest of the last 100, 2 x the slowest ever)
 *      a named phase   after its first time, max(10 x least, 10 x the slowest of the last 100 times, 2 x the slowest ever)
 *      else            30 x least: the first steps compile, and the first evaluation may take long
 *
 * "The slowest ever" has pauses that come rarely: the first step, a compilation, an evaluation that the program does not name. A false alarm is
 * worse than a late one, so every pause that ended widens the limit. Time in which nobody looked does not count: the machine stood still.
 */
#ifndef NB_AGENT_PULSE_PACE_H
#define NB_AGENT_PULSE_PACE_H

#include <stdbool.h>
#include <stdint.h>

#include "ipc/ipc.h"

#define PACE_RECENT 100
#define PACE_PHASES 16 /* more of them share the last place */
#define PACE_FEW 10

struct pace_phase {
        char name[IPC_PHASE_MAX]; /* "": steps */
        int64_t recent_ns[PACE_RECENT], slowest_ns;
        uint64_t count; /* times that were measured */
};
struct pace {
        struct pace_phase phases[PACE_PHASES];
        uint32_t phase_count, now; /* now: the present phase; meaningless before the first sample */
        uint64_t beats;            /* as in the last sample; 0: none, and the trainer is not watched */
        int64_t since_ns, looked_ns;
};

/* Takes a sample. beats: a number that changes with each step; 0: the trainer is not to be watched now. every_ns: the usual time between samples. */
void pace_see(struct pace *pace, uint64_t beats, const char *phase, int64_t now_ns, int64_t every_ns);
/* How long the present phase, or the present step, may take. */
int64_t pace_limit_ns(const struct pace *pace, int64_t least_ns);
/* Whether it takes longer. */
bool pace_hangs(const struct pace *pace, int64_t now_ns, int64_t least_ns);

#endif
