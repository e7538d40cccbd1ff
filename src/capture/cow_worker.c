#include "capture/cow_private.h"

/* The caller holds blocks_lock. */
static bool is_waiting(const struct cow_capture *capture, size_t turn, uint64_t block)
{
        const struct cow_chunk *chunk = turn < capture->chunk_count ? &capture->chunks[capture->order[turn]] : NULL;

        return chunk && chunk->state == COW_CHUNK_WAITING && (!block || chunk->block == block);
}

bool cow_blocks_next(struct cow_engine *engine, uint64_t *ret_start, uint64_t *ret_end)
{
        bool found = false;

        lock_take(&engine->blocks_lock);
        for (size_t i = 0; i < engine->blocks.live_count && !found; i++) {
                struct cow_capture *capture = engine->blocks.live[i];
                bool open = capture->blocks.ready && atomic_load(&capture->is_begun) &&
                            capture->blocks.failure == COW_FAILURE_NONE && capture->blocks.left;

                for (size_t k = 0; k < capture->chunk_count && open && !found; k++) {
                        size_t turn = (capture->blocks.cursor + k) % capture->chunk_count, count = 1;

                        if (!is_waiting(capture, turn, 0))
                                continue;
                        *ret_start = capture->chunks[capture->order[turn]].block;
                        *ret_end = *ret_start + COW_BLOCK_BYTES;
                        for (; count < COW_RUN && is_waiting(capture, turn + count, *ret_end); count++)
                                *ret_end += COW_BLOCK_BYTES;
                        capture->blocks.cursor = turn + count;
                        found = true;
                }
        }
        lock_give(&engine->blocks_lock);
        return found;
}

/* Milliseconds since the last capture ended; -1 while one runs. */
static int64_t idle_ms(struct cow_engine *engine)
{
        int64_t idle = -1;

        lock_take(&engine->blocks_lock);
        if (engine->blocks.live_count == 0)
                idle = (os->now_ns() - engine->blocks.idle_since_ns) / 1000000;
        lock_give(&engine->blocks_lock);
        return idle;
}

/* Adds moved pages to the registered ones, which stay sorted. The caller holds start_lock and blocks_lock. */
static void moved_take(struct cow_engine *engine)
{
        struct cow_span *spans = engine->start.registered;

        while (engine->blocks.moved_count && engine->start.registered_count < COW_SPAN_MAX) {
                struct cow_span span = engine->blocks.moved[--engine->blocks.moved_count];
                size_t i = engine->start.registered_count++;

                for (; i > 0 && spans[i - 1].start > span.start; i--)
                        spans[i] = spans[i - 1];
                spans[i] = span;
        }
}

/* The next run of registered pages that no capture needs, about COW_RETIRE_BYTES at most. The caller holds start_lock. */
static bool registered_take(struct cow_engine *engine, struct cow_span *ret_span)
{
        struct cow_span *last;

        lock_take(&engine->blocks_lock);
        moved_take(engine);
        lock_give(&engine->blocks_lock);
        if (!engine->start.registered_count)
                return false;
        last = &engine->start.registered[engine->start.registered_count - 1];
        *ret_span = *last;
        if (last->end - last->start > COW_RETIRE_BYTES + COW_BLOCK_BYTES)
                last->end = ret_span->start = cow_block_of(last->end - COW_RETIRE_BYTES);
        else
                engine->start.registered_count--;
        return true;
}

/*
 * Takes registrations back when no capture has used them for a while. There is
 * no hurry: a registration costs only a message to the fault thread when the
 * program unmaps the memory. An error means that the program has unmapped the
 * memory or mapped other memory there, so there is nothing to take back.
 */
static int64_t retire_step(struct cow_engine *engine)
{
        int64_t idle = idle_ms(engine);
        struct cow_span span;
        bool more;

        if (idle < 0)
                return -1;
        if (idle < COW_RETIRE_AFTER_MS)
                return COW_RETIRE_AFTER_MS - idle;
        lock_take(&engine->start_lock);
        more = idle_ms(engine) >= 0 && registered_take(engine, &span);
        if (more)
                os->uffd_unregister(engine->fd, span.start, span.end);
        lock_give(&engine->start_lock);
        return more ? 0 : -1;
}

static int64_t sooner(int64_t a_ms, int64_t b_ms)
{
        return a_ms < 0 || (b_ms >= 0 && b_ms < a_ms) ? b_ms : a_ms;
}

/* Milliseconds until there is something to do; 0: now; -1: when a thread wakes the workers. */
static int64_t idle_step(struct cow_engine *engine)
{
        int64_t wait_ms = retire_step(engine), idle = idle_ms(engine);

        if (wait_ms == 0 || idle < 0)
                return wait_ms;
        if (idle < COW_HUGE_AFTER_MS)
                return sooner(wait_ms, COW_HUGE_AFTER_MS - idle);
        return sooner(wait_ms, sooner(cow_spare_step(engine), cow_huge_step(engine, wait_ms > 0)));
}

void *cow_worker_main(void *argument)
{
        struct cow_engine *engine = argument;
        bool is_idle_worker = !atomic_exchange(&engine->has_idle_worker, true); /* one does all work between captures */
        uint64_t start, end;

        os->thread_nice(COW_WORKER_NICE); /* training comes first */
        for (;;) {
                uint32_t turn = atomic_load(&engine->work_turn);
                int64_t wait_ms;

                if (cow_blocks_next(engine, &start, &end)) {
                        cow_blocks_serve(engine, start, end, NULL);
                        continue;
                }
                wait_ms = is_idle_worker ? idle_step(engine) : -1;
                if (wait_ms != 0)
                        os->futex_wait(&engine->work_turn, turn, wait_ms);
        }
        return NULL;
}
