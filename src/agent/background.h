/*
 * background.h - runs long processor work at low priority, so that training comes first.
 *
 * The agent's own threads have normal priority, because they take the catalogue's lock and a
 * trainer may wait for it. Long work that needs no lock (checksums, making pages) runs on a
 * thread of low priority, and the caller waits for it. Otherwise checksums on all cores
 * would delay the answer to COMMIT.
 */
#ifndef NB_AGENT_BACKGROUND_H
#define NB_AGENT_BACKGROUND_H

/* Threads that `run` starts inherit the priority. If no thread can be started, runs on the calling thread. */
void background_run(void (*run)(void *argument), void *argument);

#endif
