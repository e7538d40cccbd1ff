/*
 * cow_fault.c - the fault thread: the only thread that reads the userfaultfd.
 *
 * The fault thread takes blocks_lock and no other lock. It allocates nothing,
 * and writes only to its own stack, the engine, captures and images.
 */
#include <errno.h>
#include <string.h>

#include "capture/cow_private.h"

#define EVENTS_AT_ONCE 16

static void mark_change(struct cow_engine *engine, const struct os_uffd_event *event)
{
        enum cow_failure failure = event->kind == OS_UFFD_UNMAP ? COW_FAILURE_UNMAPPED :
                                   event->kind == OS_UFFD_REMAP ? COW_FAILURE_MOVED : COW_FAILURE_REMOVED;

        lock_take(&engine->blocks_lock);
        for (size_t i = engine->blocks.live_count; i-- > 0;) {
                struct cow_capture *capture = engine->blocks.live[i];

                if (capture->blocks.failure != COW_FAILURE_NONE || !cow_capture_misses(capture, event->start, event->end))
                        continue;
                cow_capture_fail(capture, failure, event->start);
                cow_capture_end_if_done(engine, capture);
        }
        /* Moved pages stay registered at their new place. If the list is full, a write to such a page costs one more fault. */
        if (event->kind == OS_UFFD_REMAP && engine->blocks.moved_count < COW_MOVED_MAX)
                engine->blocks.moved[engine->blocks.moved_count++] =
                        (struct cow_span){ event->moved_to, event->moved_to + (event->end - event->start) };
        lock_give(&engine->blocks_lock);
}

static bool is_held(struct cow_engine *engine, uint64_t page)
{
        bool held;

        lock_take(&engine->blocks_lock);
        held = page >= engine->blocks.held.start && page < engine->blocks.held.end;
        lock_give(&engine->blocks_lock);
        return held;
}

static void queue_fault(struct cow_engine *engine, uint64_t page)
{
        if (is_held(engine, page)) /* cow_own, which holds the page, wakes the writers */
                return;
        for (size_t i = 0; i < engine->pending.count; i++) {
                if (engine->pending.faults[i].page == page)
                        return;
        }
        if (engine->pending.count < COW_PENDING_MAX)
                engine->pending.faults[engine->pending.count++] = (struct cow_fault){ page, os->now_ns() };
        else /* the thread faults again and is queued again */
                os->uffd_wake(engine->fd, page, page + COW_PAGE_BYTES);
}

void cow_events_drain(struct cow_engine *engine)
{
        struct os_uffd_event events[EVENTS_AT_ONCE];
        int count;

        do {
                atomic_fetch_add(&engine->read_turn, 1);
                count = os->uffd_read(engine->fd, events, EVENTS_AT_ONCE);
                for (int i = 0; i < count; i++) {
                        if (events[i].kind == OS_UFFD_FAULT)
                                queue_fault(engine, events[i].start);
                        else if (events[i].kind != OS_UFFD_OTHER)
                                mark_change(engine, &events[i]);
                }
                atomic_fetch_add(&engine->read_turn, 1);
        } while (count == EVENTS_AT_ONCE);
}

static void serve_pending(struct cow_engine *engine)
{
        while (engine->pending.count) {
                struct cow_fault fault = engine->pending.faults[0];

                uint64_t block = cow_block_of(fault.page);

                cow_blocks_serve(engine, block, block + COW_BLOCK_BYTES, &fault);
                /* Serving the fault may have queued more after it. */
                engine->pending.count--;
                memmove(&engine->pending.faults[0], &engine->pending.faults[1], engine->pending.count * sizeof fault);
                cow_events_drain(engine);
        }
}

bool cow_is_closed(const struct cow_engine *engine)
{
        int status = os->uffd_protect(engine->fd, engine->probe_page, engine->probe_page + COW_PAGE_BYTES, false);

        return status == -EBADF || status == -ENOTTY || status == -EINVAL || status == -ENOENT;
}

void *cow_fault_main(void *argument)
{
        static const struct cow_fault no_fault;
        struct cow_engine *engine = argument;
        uint32_t ahead = 0;
        uint64_t start, end;

        for (;;) {
                os->poll(engine->fd, ahead ? 0 : -1);
                if (cow_is_closed(engine)) { /* no thread waits: closing the descriptor lifted all protection */
                        cow_engine_break(engine);
                        break;
                }
                cow_events_drain(engine);
                if (engine->pending.count) {
                        serve_pending(engine);
                        ahead = COW_AHEAD;
                } else if (ahead && cow_blocks_next(engine, &start, &end)) {
                        cow_blocks_serve(engine, start, end, &no_fault);
                        ahead--;
                } else {
                        ahead = 0;
                }
        }
        return NULL;
}
