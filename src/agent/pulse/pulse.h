/*
 * pulse.h - notices that the trainers of a job hang, and says where.
 *
 * A trainer counts its steps in a page of memory (struct ipc_pulse). Its greeting names the descriptor of that page, and the agent reads the page
 * about once a second (pace.h). A job hangs if every trainer of this node that counts steps takes longer than its limit. Then the agent writes the
 * stacks of all threads of these trainers into one file, with the rank that lags behind first: stacks.h. With NEBULA_ON_HANG=restart in the
 * environment of a trainer it kills the trainers after that.
 *
 * The catalogue's lock guards all of it. Call pulse_open without the lock, because it opens a file.
 */
#ifndef NB_AGENT_PULSE_PULSE_H
#define NB_AGENT_PULSE_PULSE_H

#include <jansson.h>

#include "agent/catalogue/catalogue.h"

struct pulse_hang {
        double since;             /* when it was noticed; 0: the job does not hang */
        char text[IPC_TEXT_MAX];  /* which rank takes how long for what, and the file */
        uint64_t count;           /* hangs of this job until now */
};

/* Opens the page that a greeting names; negative: it names none, or it cannot be opened. */
int pulse_open(const struct ipc_hello *hello, uint32_t seen_pid);
/* Takes over the page, for the session. The lock is held. */
void pulse_take(struct catalogue *catalogue, struct session *session, int fd);
/* Looks at all trainers. Returns when to look again. */
int64_t pulse_look(struct catalogue *catalogue, int64_t now_ns);
/* All trainers of the job on this node have ended. Returns the time of their last step, by the machine's monotonic clock; 0: they counted none. */
int64_t pulse_end_run(struct job *job);
/* Closes the pages of a job that ends. */
void pulse_forget(struct job *job);
const struct pulse_hang *pulse_hang(const struct job *job);
/* The step of the trainer of this node that lags behind; -1: none counts steps. */
int64_t pulse_step(const struct job *job);
/* {"step", "phase", "seconds", "limit"} of the trainer of this node that lags behind; NULL: none counts steps. */
json_t *pulse_json(const struct catalogue *catalogue, const struct job *job);

#endif
