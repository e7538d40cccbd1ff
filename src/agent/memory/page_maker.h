/*
 * page_maker.h - the thread that makes and gives back pages of the memory tier.
 *
 * It gives back the pages of dropped images, and makes spare images in the background, so
 * that saves take no page faults. If an image is reused often and no thread is working on
 * it, the page maker slowly joins its pages into huge ones. Copying, summing and storing
 * huge pages takes a third less processor time than pages of 4 KiB. The thread ends when
 * catalogue->stopping is set.
 */
#ifndef NB_AGENT_MEMORY_PAGE_MAKER_H
#define NB_AGENT_MEMORY_PAGE_MAKER_H

#include "agent/catalogue/catalogue.h"

void *page_maker_main(void *catalogue);
/* Gives back the pages of doomed images. True if there were any. The lock is held, and dropped meanwhile. */
bool page_maker_discard(struct catalogue *catalogue);
/* Makes the pages that the trainer of a new image has not needed: another file may. False: no image lacks pages, or memory is full. */
bool page_maker_make_rest(struct catalogue *catalogue);
/* Joins some pages of an image. False if there is no such image or *join_at_ns has not come; otherwise moves
 * *join_at_ns on. Sets memory.joining if there is more to join. The lock is held, and dropped meanwhile. */
bool page_maker_join(struct catalogue *catalogue, int64_t *join_at_ns);

#endif
