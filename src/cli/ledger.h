/*
 * ledger.h - where the time of a job went, between its first and its last save, from the history alone.
 *
 *      productive  training that stayed
 *      blocked     training stood still for a save
 *      inflated    steps took longer while a version was copied or written than they take otherwise
 *      lost        training that a failure undid: after the last save before it, and steps that were done again
 *      restart     from the end of the processes to the load of a version
 *
 * The rules. A step takes the median time of all intervals between two saves of one run. In an interval of a run, time beyond that counts as
 * inflated as far as a version was copied or written in it, else as productive: the history does not tell what else was slow. An interval
 * in which ranks loaded a version holds a restart. It is lost from the save to the end of the processes, and restart from there to the load. When
 * the end is not known (the agent ended too), half the usual interval between two saves counts as lost, and the rest as restart.
 * Steps up to the last one that was reached before are done again, and count as lost.
 *
 * Threads: pure functions.
 */
#ifndef NB_CLI_LEDGER_H
#define NB_CLI_LEDGER_H

#include "cli/history.h"

enum ledger_kind { LEDGER_PRODUCTIVE, LEDGER_BLOCKED, LEDGER_INFLATED, LEDGER_LOST, LEDGER_RESTART, LEDGER_KINDS };
extern const char *const ledger_names[LEDGER_KINDS];

struct ledger {
        double begun, ended; /* of the first and the last save; seconds since 1970 */
        double seconds[LEDGER_KINDS];
        double step_s;       /* what a step takes; 0: not known */
        size_t saves, failed_saves, restarts, estimated; /* estimated: restarts whose end of the processes is not known */
        size_t restored[HISTORY_TIERS]; /* of the restarts, by the tier that they read from */
        int64_t first_step, last_step; /* -1: none */
};
/* NEBULA_NO_MEMORY. A history of fewer than two numbered saves gives a ledger of no time. */
enum nebula_status ledger_make(const struct history *history, struct ledger *ret_ledger, struct nebula_error *error);
double ledger_total(const struct ledger *ledger);

#endif
