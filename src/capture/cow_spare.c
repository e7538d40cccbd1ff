/*
 * cow_spare.c - makes huge pages for memory that cow_own.c will move.
 *
 * A save that finds such memory asks for room, a worker makes the pages between
 * saves, and a later save takes them. That save then waits for copies only: a
 * virtual machine provides pages ten times slower than it copies.
 */
#include "capture/cow_private.h"

#define STEP_NS 2000000   /* makes pages for so long at a time */
#define STEP_SHARE 2      /* and for half of the time: memory is moved once, and all saves before that are copies */
#define FREE_SHARE 4      /* share of the free memory; the rest is made when this was used */
#define PASSED_MAX 16     /* calls in a row that wanted none: the memory that the pages were for is gone */

static bool is_used_up(const struct cow_engine *engine)
{
        return engine->spare.begin == engine->spare.end;
}

void *cow_spare_take(struct cow_engine *engine, uint64_t *size)
{
        unsigned char *taken = NULL;
        uint64_t made;

        lock_take(&engine->huge_lock);
        made = (uint64_t)(engine->spare.made - engine->spare.begin);
        if (made) {
                taken = engine->spare.begin;
                *size = *size < made ? *size : made;
                engine->spare.begin += *size;
        }
        lock_give(&engine->huge_lock);
        return taken;
}

/* Returns the unused memory, which the caller unmaps. */
static struct cow_spare spare_drop(struct cow_engine *engine)
{
        struct cow_spare spare = engine->spare;

        engine->spare = (struct cow_spare){ 0 };
        return spare;
}

void cow_spare_want(struct cow_engine *engine, uint64_t size)
{
        struct cow_spare old = { 0 };
        uint64_t most;

        lock_take(&engine->huge_lock);
        if (size) {
                engine->spare.passed = 0;
        } else if (!is_used_up(engine) && ++engine->spare.passed > PASSED_MAX) {
                old = spare_drop(engine);
        }
        if (size && is_used_up(engine)) {
                most = cow_block_of(os->memory_free() / FREE_SHARE);
                size = size < most ? size : most;
                engine->spare.begin = engine->spare.made = size ? cow_map_blocks(size) : NULL;
                engine->spare.end = engine->spare.begin ? engine->spare.begin + size : NULL;
                if (engine->spare.begin)
                        os->advise(engine->spare.begin, size, OS_ADVISE_HUGE);
        }
        lock_give(&engine->huge_lock);
        if (old.begin < old.end)
                os->unmap(old.begin, (uint64_t)(old.end - old.begin));
        if (size)
                cow_workers_wake(engine);
}

/* The caller holds huge_lock. */
static bool has_more(const struct cow_engine *engine)
{
        return engine->spare.made < engine->spare.end;
}

int64_t cow_spare_step(struct cow_engine *engine)
{
        int64_t started_ns = os->now_ns(), early_ns;
        uint32_t turn = atomic_load(&engine->work_turn);
        unsigned char *block;
        bool more;

        lock_take(&engine->huge_lock);
        early_ns = engine->spare.next_ns - started_ns;
        more = has_more(engine);
        block = engine->spare.made;
        lock_give(&engine->huge_lock);
        if (!more || early_ns > 0)
                return more ? early_ns / 1000000 + 1 : -1;
        do {
                /* The room may have been dropped and reused meanwhile; making its pages does its new owner no harm. */
                os->advise(block, COW_BLOCK_BYTES, OS_ADVISE_POPULATE_WRITE);
                lock_take(&engine->huge_lock);
                if (engine->spare.made == block && has_more(engine))
                        engine->spare.made += COW_BLOCK_BYTES;
                block = engine->spare.made;
                more = has_more(engine);
                lock_give(&engine->huge_lock);
        } while (more && os->now_ns() - started_ns < STEP_NS && atomic_load(&engine->work_turn) == turn);
        lock_take(&engine->huge_lock);
        engine->spare.next_ns = os->now_ns() + (os->now_ns() - started_ns) * (STEP_SHARE - 1);
        lock_give(&engine->huge_lock);
        return 0;
}
