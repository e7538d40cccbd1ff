/*
 * cow_own.c - what was mapped from a file becomes the process's own.
 *
 * A file in memory that is mapped privately, as a checkpoint is when it is
 * loaded, gives a page of its own to who writes to it. Such a page is a small
 * one for good, and is never protected. So its bytes move to anonymous memory,
 * which then takes the place of the mapping (mremap). Meanwhile the pages are
 * protected: a write waits, and goes to the new ones. Whole blocks move to huge
 * pages, which are made beforehand (cow_spare.c); what lies before and behind
 * them, to small ones.
 *
 * Only within a save: of what writes past the page tables (O_DIRECT, io_uring,
 * a device) nothing may be under way into the parts then, and nobody can tell
 * when else that is so.
 */
#include <errno.h>
#include <stdlib.h>

#include "capture/cow_private.h"

#define OWN_BYTES (16u << 20) /* at a time: so long a write may wait */
#define MOVE_TRIES 200
#define OWN_NS 20000000       /* in one call, for what moves to small pages */

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

/* Whether the kernel has unmapped `to` before it finds no memory for the rest, nobody learns. What was there is at `from`, so that there is
 * no way but on. */
static int move_over(void *from, uint64_t size, void *to)
{
        int status = os->move(from, size, to);

        for (int tries = 0; status == -ENOMEM && tries < MOVE_TRIES; tries++) {
                os->sleep_ms(1);
                status = os->move(from, size, to);
        }
        return status;
}

/* start_lock held. `to` lies in a huge page as the span does. 0 or negative: then nothing has changed. */
static int span_move(struct cow_engine *engine, const struct cow_span *span, unsigned char *to)
{
        int status = os->uffd_register(engine->fd, span->start, span->end);

        if (status < 0)
                return status;
        status = cow_protect(engine, span);
        if (status >= 0 && cow_copy_piece(to, span->start, span->end, NULL))
                status = -1;
        if (status >= 0) /* unless the program has closed the descriptor: then nothing is protected any more */
                status = cow_protect(engine, &(struct cow_span){ span->start, span->start + COW_PAGE_BYTES });
        if (status >= 0)
                status = move_over(to, span->end - span->start, (void *)(uintptr_t)span->start);
        if (status < 0)
                os->uffd_unregister(engine->fd, span->start, span->end);
        return status;
}

/* `blocks`: where to, memory in blocks of its own that lies in them as the span does; it is the span's then, or unmapped. */
static bool span_own(struct cow_engine *engine, const struct cow_span *span, unsigned char *blocks)
{
        uint64_t before = span->start - cow_block_of(span->start), behind = before + span->end - span->start;
        uint64_t end = cow_block_of(behind + COW_BLOCK_BYTES - 1);
        int status;

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

/* Less than a block. */
static void rest_own(struct cow_engine *engine, const struct cow_span *rest)
{
        unsigned char *blocks = cow_map_blocks(COW_BLOCK_BYTES);

        if (blocks)
                span_own(engine, rest, blocks);
}

/* The whole blocks of a span. */
static struct cow_span blocks_in(const struct cow_span *span)
{
        uint64_t start = cow_block_of(span->start + COW_BLOCK_BYTES - 1), end = cow_block_of(span->end);

        start = start < span->end ? start : span->end;
        return (struct cow_span){ start, end > start ? end : start };
}

/* Whole blocks, as far as memory was made for them. What is left begins at `whole->start` then; false: it can't be moved. */
static bool blocks_own(struct cow_engine *engine, struct cow_span *whole)
{
        while (whole->start < whole->end) {
                uint64_t left = whole->end - whole->start, size = left < OWN_BYTES ? left : OWN_BYTES;
                unsigned char *blocks = cow_spare_take(engine, &size);

                if (!blocks)
                        break;
                if (!span_own(engine, &(struct cow_span){ whole->start, whole->start + size }, blocks))
                        return false;
                whole->start += size;
        }
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

/* Adds what of the pages [start, end) is mapped from a file, privately, and has been written to, every page. False: no memory. */
static bool written_add(struct span_list *list, struct cow_maps *maps, uint64_t start, uint64_t end)
{
        const struct os_mapping *mapping;
        uint64_t until;

        for (uint64_t at = start; at < end && (mapping = cow_maps_find(maps, at)) != NULL; at = until) {
                until = end < mapping->end ? end : mapping->end;
                if (mapping->private_file && os->own_pages(maps->pagemap_fd, at, until) > 0 && !list_add(list, at, until))
                        return false;
        }
        return true;
}

/* Of the parts that can be protected, and of small ones right behind them: one span costs less than two. */
static void written_find(struct span_list *list, struct cow_maps *maps, const struct capture_part *parts, size_t count)
{
        for (size_t i = 0; i < count; i++) {
                uint64_t start = (uintptr_t)parts[i].data, end = cow_page_ceil(start + parts[i].size);

                start = cow_page_floor(start);
                if (parts[i].size < COW_PART_BYTES && !(list->count && list->spans[list->count - 1].end - start <= COW_PAGE_BYTES))
                        continue;
                if (!written_add(list, maps, start, end))
                        break;
        }
        if (list->count)
                list->count = cow_spans_join(list->spans, list->count);
}

bool cow_own(const struct capture_part *parts, size_t count)
{
        int64_t until_ns = os->now_ns() + OWN_NS;
        struct cow_engine *engine;
        struct span_list list = { 0 };
        struct cow_maps maps;
        uint64_t moved = 0, left = 0;

        if (cow_engine_get(&engine, NULL) != NEBULA_OK || cow_maps_open(&maps, NULL) != NEBULA_OK)
                return false;
        written_find(&list, &maps, parts, count);
        for (size_t i = 0; i < list.count; i++) {
                const struct cow_span *span = &list.spans[i];
                struct cow_span whole = blocks_in(span);
                struct cow_span rests[] = { { span->start, whole.start }, { whole.end, span->end } };

                if (blocks_own(engine, &whole))
                        left += whole.end - whole.start;
                moved += whole.start - rests[0].end;
                for (size_t k = 0; k < 2; k++)
                        if (rests[k].start < rests[k].end && os->now_ns() < until_ns)
                                rest_own(engine, &rests[k]);
        }
        cow_spare_want(engine, left);
        free(list.spans);
        cow_maps_close(&maps);
        return moved > 0;
}
