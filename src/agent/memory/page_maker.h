/*
 * page_maker.h - the thread that makes pages of the memory tier and gives them back.
 *
 * It gives back the pages of images that were dropped, and makes spare ones
 * ready in the background, so that saves take no page faults. Of an image
 * that serves often, and that nobody works on just then, it joins the pages into huge ones,
 * slowly: what is copied into those, summed and handed to storage takes a third less
 * of the processors than pages of 4 KiB. It ends when catalogue->stopping is set.
 */
#ifndef NB_AGENT_MEMORY_PAGE_MAKER_H
#define NB_AGENT_MEMORY_PAGE_MAKER_H

#include "agent/catalogue/catalogue.h"

void *page_maker_main(void *catalogue);
/* Gives back the pages of doomed images; drops the lock meanwhile (lock held). True when there were any. */
bool page_maker_discard(struct catalogue *catalogue);
/* Joins some pages of an image; drops the lock meanwhile (lock held). False when there is none, or *join_at_ns has not come;
 * else it is put off. memory.joining: there is something to join. */
bool page_maker_join(struct catalogue *catalogue, int64_t *join_at_ns);

#endif
