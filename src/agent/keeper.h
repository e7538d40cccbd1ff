/*
 * keeper.h - the thread that makes pages of the memory tier and gives them back.
 *
 * It gives back the pages of images that were dropped, and makes spare ones
 * ready in the background, so that saves take no page faults. It ends when
 * catalogue->stopping is set.
 */
#ifndef NB_AGENT_KEEPER_H
#define NB_AGENT_KEEPER_H

#include "agent/catalogue.h"

void *keeper_main(void *catalogue);
/* Gives back the pages of doomed images; drops the lock meanwhile (lock held). True when there were any. */
bool keeper_bury(struct catalogue *catalogue);

#endif
