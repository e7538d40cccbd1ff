/*
 * clock.h - the thread that keeps the clock: sessions that do not come back, parts that have gone quiet, memory that nobody uses, workers that
 * are needed, the end of an idle agent. It sleeps until the earliest of these, and calls no storage.
 */
#ifndef NB_AGENT_CLOCK_H
#define NB_AGENT_CLOCK_H

/* Ends when catalogue->stopping is set, after all workers. */
void *clock_main(void *catalogue);

#endif
