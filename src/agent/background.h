/*
 * background.h - work that only takes the processor: it gives way to training.
 *
 * The agent's own threads keep normal priority, since they take the
 * catalogue's lock and a trainer may wait for it; what is long and needs no lock (checksums,
 * making pages) runs on a thread of low priority instead, and the caller waits for it.
 * Measured: without this, checksums on all cores delayed the answer to COMMIT by 5 ms.
 */
#ifndef NB_AGENT_BACKGROUND_H
#define NB_AGENT_BACKGROUND_H

/* Threads that `run` starts inherit the priority. Runs here when no thread can be had. */
void background_run(void (*run)(void *argument), void *argument);

#endif
