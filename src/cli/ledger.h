/*
 * ledger.h - splits the time of a job between its first and its last save by kind, from the history alone.
 *
 *      productive  training whose result was kept
 *      blocked     training waited for a save
 *      inflated    extra time of steps while a version was copied or written
 *      lost        training that a failure undid: the steps after the last save before it, and steps that were done again
 *      restart     from the end of the processes to the load of a version
 *      paused      the same after an end that lost nothing, if it took long: nothing ran, because nothing was to run
 *
 * The rules:
 *   - A step normally takes the median time, over all intervals between two saves of one run.
 *   - In an interval without a restart, longer time counts as inflated while a version was copied or written. The rest counts as
 *     productive: the history does not show other causes.
 *   - An interval in which ranks loaded a version has a restart. The time from the save to the end of the processes is lost, the time
 *     from there to the load is restart. If that end is unknown because the agent ended, too, half the usual interval between two saves
 *     counts as lost, and the rest as restart.
 *   - If the processes ended within a step of that save, the ranks loaded that very version, and more than LEDGER_PAUSE_S went by, the run
 *     had ended by itself: that time is paused. It counts neither as a restart nor under goodput.
 *   - The time to notice a failure is what went by from the last step of the processes to their end, less the time of a step. It is part of the
 *     time that is lost.
 *   - Steps up to the last one that was reached before are done again, and count as lost.
 *
 * Threads: pure functions.
 */
#ifndef NB_CLI_LEDGER_H
#define NB_CLI_LEDGER_H

#include "cli/history.h"

enum ledger_kind { LEDGER_PRODUCTIVE, LEDGER_BLOCKED, LEDGER_INFLATED, LEDGER_LOST, LEDGER_RESTART, LEDGER_PAUSED, LEDGER_KINDS };
#define LEDGER_PAUSE_S 900 /* a launcher starts a job again sooner */
extern const char *const ledger_names[LEDGER_KINDS];

struct ledger {
        double begun, ended; /* the first and the last save; seconds since 1970 */
        double seconds[LEDGER_KINDS];
        double step_s;       /* time of a step; 0: unknown */
        size_t saves, failed_saves, restarts, pauses, estimated; /* estimated: restarts for which the end of the processes is unknown */
        double notice_s;     /* the sum over `noticed` restarts of the time to notice */
        size_t noticed;      /* restarts for which the last step is known */
        size_t restored[HISTORY_TIERS]; /* restarts, by the tier that was read */
        int64_t first_step, last_step; /* -1: none */
};
/* NEBULA_NO_MEMORY. If the history has fewer than two numbered saves, all times are 0. */
enum nebula_status ledger_make(const struct history *history, struct ledger *ret_ledger, struct nebula_error *error);
double ledger_total(const struct ledger *ledger);
/* The productive share of the time in which the job ran, or should have. 0: there is no such time. */
double ledger_goodput(const struct ledger *ledger);

#endif
