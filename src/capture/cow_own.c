/*
 * cow_own.c - moves written pages of file mappings to anonymous memory.
 *
 * A checkpoint that was loaded from memory is a private mapping of a file. A
 * write to it makes a page of the process's own, which stays a small page and
 * cannot be protected. So cow_own moves the bytes to anonymous memory, which
 * then replaces the mapping (mremap). Meanwhile the pages are protected: a
 * write waits and goes to the new page. Whole blocks move to huge pages made
 * beforehand (cow_spare.c); the rest moves to small pages.
 *
 * This happens only in a save. Then no O_DIRECT read, io_uring request or
 * device writes to the parts, because the caller of a save excludes them. At
 * other times Nebula cannot know that.
 */
#include <errno.h>
#include <stdlib.h>

#include "capture/cow_private.h"

#define OWN_BYTES (16u << 20) /* bytes per move: a write may wait that long */
#define MOVE_TRIES 200
#define OWN_NS 20000000       /* time limit of one call for moves to small pages */

struct span_list {
        struct cow_span *spans;
        size_t count, capacity;
};

static void hold(struct cow_engine *engine, struct cow_span span)
{
        cow_stack_touch();
        lock_take(&engine->blocks_lock);
        engine->blocks.held = span;
        lock_give(&engine->blocks_lock);
}

/* Retries: if mremap fails for lack of memory, it may have unmapped `to` already, which the caller cannot know. The bytes
 * are still at `from`. */
static int move_over(void *from, uint64_t size, void *to)
{
        int status = os->move(from, size, to);

        for (int tries = 0; status == -ENOMEM && tries < MOVE_TRIES; tries++) {
                os->sleep_ms(1);
                status = os->move(from, size, to);
        }
        return status;
}

/* The caller holds start_lock. `to` has the same offset in its huge page as the span. Returns 0 or a negative errno;
 * on an error nothing has changed. */
static int span_move(struct cow_engine *engine, const struct cow_span *span, unsigned char *to)
{
        int status = os->uffd_register(engine->fd, span->start, span->end);

        if (status < 0)
                return status;
        status = cow_protect(engine, span);
        if (status >= 0 && cow_copy_piece(to, span->start, span->end, NULL))
                status = -1;
        if (status >= 0) /* unless the program has closed the descriptor, which lifted all protection */
                status = cow_protect(engine, &(struct cow_span){ span->start, span->start + COW_PAGE_BYTES });
        if (status >= 0)
                status = move_over(to, span->end - span->start, (void *)(uintptr_t)span->start);
        if (status < 0)
                os->uffd_unregister(engine->fd, span->start, span->end);
        return status;
}

/* `blocks`: memory in whole blocks, in which the bytes take the same offset as in the span. The function uses it for
 * the span or unmaps it. */
static bool span_own(struct cow_engine *engine, const struct cow_span *span, unsigned char *blocks)
{
        uint64_t before = span->start - cow_block_of(span->start), behind = before + span->end - span->start;
        uint64_t end = cow_block_of(behind + COW_BLOCK_BYTES - 1);
        int status;

        lock_take(&engine->start_lock);
        hold(engine, *span);
        status = span_move(engine, span, blocks + before);
        hold(engine, (struct cow_span){ 0, 0 });
        os->uffd_wake(engine->fd, span->start, span->end);
        lock_give(&engine->start_lock);
        if (status < 0) {
                cow_unmap(blocks, end);
                return false;
        }
        if (before) /* the part in between has moved away, and other memory may be mapped there now */
                os->unmap(blocks, before);
        if (behind < end)
                os->unmap(blocks + behind, end - behind);
        return true;
}

/* Moves less than a block. */
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

/* Moves whole blocks, as far as there are pages for them. `whole->start` is then the first block that was not moved.
 * False: the rest cannot be moved. */
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

/* False: an allocation failed. */
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

/* Adds the parts of [start, end) that are mapped privately from a file and of which every page has been written.
 * False: an allocation failed. */
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

/* Finds them in the parts that can be protected, and in small parts right after those: one span costs less than two. */
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
