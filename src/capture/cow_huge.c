#include <stdlib.h>
#include <string.h>

#include "capture/cow_private.h"

#define STEP_NS 1000000 /* joins pages for so long at a time */
#define STEP_SHARE 3    /* and for at most a third of the time: pages are joined once, and all saves before that are copies */

static int compare_spans(const void *a, const void *b)
{
        const struct cow_span *left = a, *right = b;

        return left->start < right->start ? -1 : left->start > right->start;
}

static bool can_be_huge(struct cow_maps *maps, uint64_t block)
{
        return cow_maps_is_anonymous(maps, block, block + COW_BLOCK_BYTES);
}

/* The blocks of a part, including those that it shares with its neighbours, which are usually other parts. Otherwise
 * each part would keep up to 1,022 small pages at its ends. */
static struct cow_span part_blocks(struct cow_maps *maps, const struct capture_part *part)
{
        uint64_t start = (uintptr_t)part->data, end = start + part->size;
        uint64_t first = cow_block_of(start), last = cow_block_of(end - 1);

        if (!cow_maps_is_anonymous(maps, start, start + 1)) /* pages of a file are never joined */
                return (struct cow_span){ 0, 0 };
        if (first != start && !can_be_huge(maps, first))
                first += COW_BLOCK_BYTES;
        if (last + COW_BLOCK_BYTES == end || (last >= first && can_be_huge(maps, last)))
                last += COW_BLOCK_BYTES;
        return (struct cow_span){ first, last };
}

size_t cow_spans_join(struct cow_span *spans, size_t count)
{
        size_t joined = 0;

        qsort(spans, count, sizeof *spans, compare_spans);
        for (size_t i = 0; i < count; i++) {
                if (joined && spans[i].start <= spans[joined - 1].end) {
                        if (spans[joined - 1].end < spans[i].end)
                                spans[joined - 1].end = spans[i].end;
                } else {
                        spans[joined++] = spans[i];
                }
        }
        return joined;
}

/* Writes the blocks of `spans` that are not huge pages yet to `ret_small`, as consecutive spans; it has room for
 * COW_SPAN_MAX. Returns the number of spans. */
static size_t small_find(struct cow_maps *maps, const struct cow_span *spans, size_t count, struct cow_span *ret_small)
{
        size_t small_count = 0;

        for (size_t i = 0; i < count; i++) {
                for (uint64_t block = spans[i].start; block < spans[i].end; block += COW_BLOCK_BYTES) {
                        if (cow_maps_is_huge(maps, block))
                                continue;
                        if (small_count && ret_small[small_count - 1].end == block)
                                ret_small[small_count - 1].end += COW_BLOCK_BYTES;
                        else if (small_count < COW_SPAN_MAX)
                                ret_small[small_count++] = (struct cow_span){ block, block + COW_BLOCK_BYTES };
                }
        }
        return small_count;
}

void cow_advise_huge(const struct capture_part *parts, size_t count)
{
        struct cow_engine *engine;
        struct cow_span *spans, *small;
        struct cow_maps maps;
        size_t span_count = 0, small_count;

        if (cow_engine_get(&engine, NULL) != NEBULA_OK || cow_maps_open(&maps, NULL) != NEBULA_OK)
                return;
        spans = malloc(count * sizeof *spans + (2 * COW_SPAN_MAX + COW_LATER_MAX) * sizeof *spans);
        if (!spans) { /* advice may be skipped */
                cow_maps_close(&maps);
                return;
        }
        for (size_t i = 0; i < count; i++) {
                struct cow_span span = parts[i].size < COW_PART_BYTES ? (struct cow_span){ 0, 0 } : part_blocks(&maps, &parts[i]);

                if (span.start < span.end)
                        spans[span_count++] = span;
        }
        span_count = cow_spans_join(spans, span_count);
        for (size_t i = 0; i < span_count; i++)
                os->advise((void *)(uintptr_t)spans[i].start, spans[i].end - spans[i].start, OS_ADVISE_HUGE);
        small = spans + count;
        small_count = small_find(&maps, spans, span_count, small);
        cow_maps_close(&maps);
        lock_take(&engine->huge_lock);
        /* Keeps the work of earlier calls: a checkpoint often has several files. */
        memcpy(small + small_count, engine->huge.work, engine->huge.work_count * sizeof *small);
        small_count += engine->huge.work_count;
        memcpy(small + small_count, engine->huge.later, engine->huge.later_count * sizeof *small);
        small_count = cow_spans_join(small, small_count + engine->huge.later_count);
        engine->huge.later_count = 0;
        engine->huge.work_count = small_count < COW_SPAN_MAX ? small_count : COW_SPAN_MAX;
        memcpy(engine->huge.work, small, engine->huge.work_count * sizeof *small);
        lock_give(&engine->huge_lock);
        free(spans);
        cow_workers_wake(engine);
}

/* The caller holds huge_lock. False if no block is left or it is too early. */
static bool take_block(struct cow_engine *engine, bool is_registered, uint64_t *ret_block, int64_t *ret_wait_ms)
{
        struct cow_span *last;
        int64_t early_ns = engine->huge.next_ns - os->now_ns();

        *ret_wait_ms = -1;
        if (!engine->huge.work_count && !is_registered) {
                memcpy(engine->huge.work, engine->huge.later, engine->huge.later_count * sizeof engine->huge.work[0]);
                engine->huge.work_count = engine->huge.later_count;
                engine->huge.later_count = 0;
        }
        if (!engine->huge.work_count)
                return false;
        if (early_ns > 0) {
                *ret_wait_ms = early_ns / 1000000 + 1;
                return false;
        }
        last = &engine->huge.work[engine->huge.work_count - 1];
        last->end -= COW_BLOCK_BYTES;
        *ret_block = last->end;
        if (last->end <= last->start)
                engine->huge.work_count--;
        return true;
}

/* The kernel joins no pages across the end of a registration, so such blocks wait until the registration is taken back. */
static void keep_for_later(struct cow_engine *engine, uint64_t block)
{
        lock_take(&engine->huge_lock);
        if (engine->huge.later_count < COW_LATER_MAX)
                engine->huge.later[engine->huge.later_count++] = (struct cow_span){ block, block + COW_BLOCK_BYTES };
        lock_give(&engine->huge_lock);
}

int64_t cow_huge_step(struct cow_engine *engine, bool is_registered)
{
        int64_t started_ns = os->now_ns(), wait_ms;
        uint32_t turn = atomic_load(&engine->work_turn);
        uint64_t block;
        bool taken;

        do {
                lock_take(&engine->huge_lock);
                taken = take_block(engine, is_registered, &block, &wait_ms);
                lock_give(&engine->huge_lock);
                if (!taken)
                        return wait_ms;
                /* The memory may have been freed and reused meanwhile; a huge page does its new owner no harm. */
                if (os->advise((void *)(uintptr_t)block, COW_BLOCK_BYTES, OS_ADVISE_COLLAPSE) < 0 && is_registered)
                        keep_for_later(engine, block);
        } while (os->now_ns() - started_ns < STEP_NS && atomic_load(&engine->work_turn) == turn);
        lock_take(&engine->huge_lock);
        engine->huge.next_ns = os->now_ns() + (os->now_ns() - started_ns) * (STEP_SHARE - 1);
        lock_give(&engine->huge_lock);
        return 0;
}
