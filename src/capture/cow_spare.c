/*
 * cow_spare.c - huge pages for memory that is to change its place (cow_own.c).
 *
 * A save that finds such memory wants room for it, a worker makes that between
 * saves, and a later save takes it: it waits for copies then, not for pages,
 * which a virtual machine takes ten times as long to provide.
 */
#include "capture/cow_private.h"

#define STEP_NS 2000000   /* making runs that long at a time */
#define STEP_SHARE 2      /* and half of the time: memory that moves is moved once, and all saves until then are copies */
#define FREE_SHARE 4      /* of what is free; what else is wanted is made when this has been used */
#define PASSED_MAX 16     /* times that none was wanted: whoever it was made for has gone */

static bool is_used_up(const struct cow_engine *engine)
{
        return engine->spare.begin == engine->spare.end;
}

void *cow_spare_take(struct cow_engine *engine, uint64_t *size)
{
        unsigned char *taken = NULL;
        uint64_t made;

        pthread_mutex_lock(&engine->huge_lock);
        made = (uint64_t)(engine->spare.made - engine->spare.begin);
        if (made) {
                taken = engine->spare.begin;
                *size = *size < made ? *size : made;
                engine->spare.begin += *size;
        }
        pthread_mutex_unlock(&engine->huge_lock);
        return taken;
}

/* The memory that is left goes to the caller. */
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

        pthread_mutex_lock(&engine->huge_lock);
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
        pthread_mutex_unlock(&engine->huge_lock);
        if (old.begin < old.end)
                os->unmap(old.begin, (uint64_t)(old.end - old.begin));
        if (size)
                cow_workers_wake(engine);
}

/* huge_lock held. */
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

        pthread_mutex_lock(&engine->huge_lock);
        early_ns = engine->spare.next_ns - started_ns;
        more = has_more(engine);
        block = engine->spare.made;
        pthread_mutex_unlock(&engine->huge_lock);
        if (!more || early_ns > 0)
                return more ? early_ns / 1000000 + 1 : -1;
        do {
                /* Where it was dropped meanwhile, the memory is somebody else's, and no worse off for being there. */
                os->advise(block, COW_BLOCK_BYTES, OS_ADVISE_POPULATE_WRITE);
                pthread_mutex_lock(&engine->huge_lock);
                if (engine->spare.made == block && has_more(engine))
                        engine->spare.made += COW_BLOCK_BYTES;
                block = engine->spare.made;
                more = has_more(engine);
                pthread_mutex_unlock(&engine->huge_lock);
        } while (more && os->now_ns() - started_ns < STEP_NS && atomic_load(&engine->work_turn) == turn);
        pthread_mutex_lock(&engine->huge_lock);
        engine->spare.next_ns = os->now_ns() + (os->now_ns() - started_ns) * (STEP_SHARE - 1);
        pthread_mutex_unlock(&engine->huge_lock);
        return 0;
}
