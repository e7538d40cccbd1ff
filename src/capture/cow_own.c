/*
 * cow_own.c - what was mapped from a file becomes the process's own.
 *
 * A file in memory that is mapped privately, as a checkpoint is when it is
 * loaded, gives a page of its own to who writes to it. Such a page is a small
 * one for good, and is never protected. So its bytes move to anonymous memory,
 * which then takes the place of the mapping (mremap). Meanwhile the pages are
 * protected: a write waits, and goes to the new ones. Those are small as well:
 * huge ones take a virtual machine five times as long to provide, and are made
 * in the background (cow_huge.c).
 */
#include <stdlib.h>

#include "capture/cow_private.h"

#define OWN_BYTES (16u << 20) /* at a time: so long a write may wait */
#define OWN_NS 20000000       /* in one call */

struct span_list {
        struct cow_span *spans;
        size_t count, capacity;
};

static void hold(struct cow_engine *engine, struct cow_span span)
{
        cow_stack_touch();
        pthread_mutex_lock(&engine->blocks_lock);
        engine->blocks.held = span;
        pthread_mutex_unlock(&engine->blocks_lock);
}

/* start_lock held. `to` lies in a huge page as the span does. 0 or negative: then nothing has changed. */
static int span_move(struct cow_engine *engine, const struct cow_span *span, unsigned char *to)
{
        int status = os->uffd_register(engine->fd, span->start, span->end);

        if (status < 0)
                return status;
        status = cow_protect(engine, span);
        if (status >= 0 && cow_copy_piece(to, span->start, span->end))
                status = -1;
        if (status >= 0) /* unless the program has closed the descriptor: then nothing is protected any more */
                status = cow_protect(engine, &(struct cow_span){ span->start, span->start + COW_PAGE_BYTES });
        if (status >= 0)
                status = os->move(to, span->end - span->start, (void *)(uintptr_t)span->start);
        if (status < 0)
                os->uffd_unregister(engine->fd, span->start, span->end);
        return status;
}

static bool span_own(struct cow_engine *engine, const struct cow_span *span)
{
        uint64_t before = span->start - cow_block_of(span->start), size = span->end - span->start;
        uint64_t behind = before + size, end = cow_block_of(behind + COW_BLOCK_BYTES - 1);
        unsigned char *blocks = cow_map_blocks(end);
        int status;

        if (!blocks)
                return false;
        pthread_mutex_lock(&engine->start_lock);
        hold(engine, *span);
        status = span_move(engine, span, blocks + before);
        hold(engine, (struct cow_span){ 0, 0 });
        os->uffd_wake(engine->fd, span->start, span->end);
        pthread_mutex_unlock(&engine->start_lock);
        if (status < 0) {
                cow_unmap(blocks, end);
                return false;
        }
        if (before) /* what lay between has gone, and may be another's by now */
                os->unmap(blocks, before);
        if (behind < end)
                os->unmap(blocks + behind, end - behind);
        return true;
}

/* False: no memory. */
static bool list_add(struct span_list *list, uint64_t start, uint64_t end)
{
        if (list->count == list->capacity) {
                size_t capacity = list->capacity ? list->capacity * 2 : 64;
                struct cow_span *grown = realloc(list->spans, capacity * sizeof *grown);

                if (!grown)
                        return false;
                list->spans = grown;
                list->capacity = capacity;
        }
        list->spans[list->count++] = (struct cow_span){ start, end };
        return true;
}

/* Adds what of the pages [start, end) is mapped from a file, privately, and has been written to, every page. `mapping` is the last one
 * found. False: no memory. */
static bool written_add(struct span_list *list, const struct cow_maps *maps, struct os_mapping *mapping, uint64_t start, uint64_t end)
{
        for (uint64_t at = start; at < end; at = mapping->end) {
                bool known = at >= mapping->start && at < mapping->end;
                uint64_t until;

                if (!known && !cow_maps_find(maps, at, mapping)) {
                        *mapping = (struct os_mapping){ 0 };
                        return true;
                }
                until = end < mapping->end ? end : mapping->end;
                if (mapping->private_file && os->own_pages(maps->pagemap_fd, at, until) > 0 && !list_add(list, at, until))
                        return false;
        }
        return true;
}

/* Of the parts that can be protected, and of small ones right behind them: one span costs less than two. */
static void written_find(struct span_list *list, const struct cow_maps *maps, const struct capture_part *parts, size_t count)
{
        struct os_mapping mapping = { 0 };

        for (size_t i = 0; i < count; i++) {
                uint64_t start = (uintptr_t)parts[i].data, end = cow_page_ceil(start + parts[i].size);

                start = cow_page_floor(start);
                if (parts[i].size < COW_PART_BYTES && !(list->count && list->spans[list->count - 1].end - start <= COW_PAGE_BYTES))
                        continue;
                if (!written_add(list, maps, &mapping, start, end))
                        break;
        }
        if (list->count)
                list->count = cow_spans_join(list->spans, list->count);
}

void cow_own(const struct capture_part *parts, size_t count)
{
        int64_t until_ns = os->now_ns() + OWN_NS;
        struct cow_engine *engine;
        struct span_list list = { 0 };
        struct cow_maps maps;

        if (cow_engine_get(&engine, NULL) != NEBULA_OK || cow_maps_open(&maps, NULL) != NEBULA_OK)
                return;
        written_find(&list, &maps, parts, count);
        for (size_t i = 0; i < list.count; i++) {
                uint64_t end = list.spans[i].end;

                for (struct cow_span piece = list.spans[i]; piece.start < end; piece.start = piece.end) {
                        uint64_t next = cow_block_of(piece.start + OWN_BYTES);

                        piece.end = next < end ? next : end;
                        if (os->now_ns() >= until_ns || !span_own(engine, &piece))
                                goto free;
                }
        }
free:
        free(list.spans);
        cow_maps_close(&maps);
}
