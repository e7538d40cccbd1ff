#include <errno.h>
#include <string.h>

#include "capture/cow_private.h"
#include "sum/sum.h"

#define GUARDED_MIN (64u << 10) /* the kernel copies a shorter piece faster than the guard can be set up */

#define CLAIM_SUMS 4u /* sums per block in one part: at most two */

struct claim {
        struct cow_capture *capture;
        struct cow_chunk *chunk;
        uint64_t failed; /* the address of the first byte that could not be copied, or 0 */
        enum cow_failure failure;
        struct image_sum sums[CLAIM_SUMS];
        uint32_t sum_count;
};

void cow_pause(struct cow_engine *engine, const struct cow_fault *fault, uint32_t *tries)
{
        if (fault)
                cow_events_drain(engine);
        if ((*tries)++ < 64)
                os->yield();
        else
                os->sleep_ms(1);
}

bool cow_capture_misses(const struct cow_capture *capture, uint64_t start, uint64_t end)
{
        for (size_t i = cow_chunk_find(capture, cow_block_of(start));
             i < capture->chunk_count && capture->chunks[i].block < end; i++) {
                uint64_t block = capture->chunks[i].block;
                uint64_t from = start > block ? start : block;
                uint64_t to = end < block + COW_BLOCK_BYTES ? end : block + COW_BLOCK_BYTES;

                if (capture->chunks[i].state == COW_CHUNK_DONE)
                        continue;
                for (size_t k = cow_part_find(capture, from);
                     k < capture->part_count && capture->parts[k].start < to; k++) {
                        if (capture->parts[k].end > from)
                                return true;
                }
        }
        return false;
}

void cow_capture_fail(struct cow_capture *capture, enum cow_failure failure, uint64_t address)
{
        if (capture->blocks.failure != COW_FAILURE_NONE)
                return;
        capture->blocks.failure = failure;
        capture->blocks.failure_address = address;
}

void cow_capture_end_if_done(struct cow_engine *engine, struct cow_capture *capture)
{
        bool failed = capture->blocks.failure != COW_FAILURE_NONE;
        size_t i = 0;

        if (capture->blocks.active || (!failed && capture->blocks.left))
                return;
        while (i < engine->blocks.live_count && engine->blocks.live[i] != capture)
                i++;
        if (i == engine->blocks.live_count)
                return;
        engine->blocks.live_count--;
        memmove(&engine->blocks.live[i], &engine->blocks.live[i + 1],
                (engine->blocks.live_count - i) * sizeof engine->blocks.live[0]);
        engine->blocks.idle_since_ns = os->now_ns();
        capture->blocks.stats.copy_ns = engine->blocks.idle_since_ns - capture->started_ns;
        atomic_store(&capture->state, failed ? COW_STATE_FAILED : COW_STATE_DONE);
        os->futex_wake(&capture->state);
        if (engine->blocks.live_count == 0)
                cow_workers_wake(engine);
}

static struct cow_chunk *chunk_of(struct cow_capture *capture, uint64_t block)
{
        size_t index = cow_chunk_find(capture, block);

        return index < capture->chunk_count && capture->chunks[index].block == block ? &capture->chunks[index] : NULL;
}

static bool asks(const struct cow_fault *fault)
{
        return fault && fault->page;
}

/* Notes a write that waits for a chunk. Workers then continue after that chunk, because the program usually writes
 * there next. A write to memory between the parts (the program's heap) is not noted, because it does not show which
 * part changes next. */
static void fault_note(struct cow_engine *engine, struct cow_capture *capture, struct cow_chunk *chunk,
                       const struct cow_fault *fault)
{
        capture->blocks.stats.fault_count++;
        atomic_store(&capture->waited_ns, fault->since_ns);
        if (!chunk->fault_since_ns)
                chunk->fault_since_ns = fault->since_ns;
        if (!cow_capture_misses(capture, fault->page, fault->page + COW_PAGE_BYTES))
                return;
        capture->blocks.cursor = chunk->turn + 1;
        if (!atomic_exchange(&capture->is_begun, true))
                cow_workers_wake(engine);
}

/* Claims the block for every capture that still needs it and for which no other thread copies it. Adds to `claims`. */
static size_t claim_block(struct cow_engine *engine, uint64_t block, const struct cow_fault *fault, struct claim *claims)
{
        size_t count = 0;

        for (size_t i = 0; i < engine->blocks.live_count; i++) {
                struct cow_capture *capture = engine->blocks.live[i];
                struct cow_chunk *chunk = chunk_of(capture, block);

                if (!chunk || capture->blocks.failure != COW_FAILURE_NONE || chunk->state == COW_CHUNK_DONE)
                        continue;
                if (asks(fault))
                        fault_note(engine, capture, chunk, fault);
                if (chunk->state == COW_CHUNK_COPYING)
                        continue;
                chunk->state = COW_CHUNK_COPYING;
                capture->blocks.active++;
                claims[count++] = (struct claim){ .capture = capture, .chunk = chunk };
        }
        return count;
}

static void copy_plain(void *unused, void *to, const void *from, size_t size)
{
        (void)unused;
        sum_copy_stream(to, from, size);
}

static void copy_and_sum(void *argument, void *to, const void *from, size_t size)
{
        struct image_sum *sum = argument;

        sum->crc32 = 0;
        sum->crc64 = 0;
        sum_copy_both(to, from, size, &sum->crc32, &sum->crc64);
        sum->size = (uint32_t)size;
}

/* If the source vanishes, the copy ends and the program goes on. The kernel's copy then gives the address. */
uint64_t cow_copy_piece(unsigned char *to, uint64_t from, uint64_t end, struct image_sum *sum)
{
        if (end - from >= GUARDED_MIN && os->copy_guarded(sum ? copy_and_sum : copy_plain, sum, to, from, end - from) == 0)
                return 0;
        while (from < end) {
                int64_t copied = os->copy_self(to, from, end - from);

                if (copied == -EINTR)
                        continue;
                if (copied <= 0)
                        return from;
                to += copied;
                from += (uint64_t)copied;
        }
        return 0;
}

/* Why a byte could not be copied: its source is gone, or the file of the image is on a disk that fails or is full. */
static enum cow_failure failure_at(uint64_t address)
{
        unsigned char byte;

        return os->copy_self(&byte, address, 1) == 1 ? COW_FAILURE_IMAGE : COW_FAILURE_UNREADABLE;
}

/* Copies [from, end) to `image_offset`. If the capture wants sums, the pieces do not cross a border between chunks. */
static void copy_range(struct claim *claim, uint64_t image_offset, uint64_t from, uint64_t end)
{
        const struct cow_capture *capture = claim->capture;
        bool is_summed = capture->blocks.sums.list != NULL;

        while (from < end && !claim->failed) {
                uint64_t size = is_summed ? image_sum_size(image_offset, end - from) : end - from;
                struct image_sum *sum = is_summed && claim->sum_count < CLAIM_SUMS ? &claim->sums[claim->sum_count] : NULL;

                claim->failed = cow_copy_piece(capture->image + image_offset, from, from + size, sum);
                if (claim->failed)
                        claim->failure = failure_at(claim->failed);
                if (sum && sum->size) {
                        sum->offset = image_offset;
                        claim->sum_count++;
                }
                image_offset += size;
                from += size;
        }
}

static void copy_chunk(struct claim *claim)
{
        const struct cow_capture *capture = claim->capture;
        uint64_t block = claim->chunk->block, block_end = block + COW_BLOCK_BYTES;

        for (size_t i = cow_part_find(capture, block);
             i < capture->part_count && capture->parts[i].start < block_end && !claim->failed; i++) {
                const struct cow_part *part = &capture->parts[i];
                uint64_t from = part->start > block ? part->start : block;
                uint64_t end = part->end < block_end ? part->end : block_end;

                if (from < end)
                        copy_range(claim, part->image_offset + (from - part->start), from, end);
        }
}

/*
 * Waits until all earlier changes of the address space have marked their
 * captures. The kernel counts a change (unmap, move, removal) as running from
 * before it takes place until the thread that makes it learns that its event
 * was read. Until then the protection ioctl returns -EAGAIN for any page. If
 * read_turn is even again, the change whose event was read has been marked.
 */
int cow_events_await(struct cow_engine *engine, const struct cow_fault *fault)
{
        uint64_t page = engine->probe_page;
        uint32_t tries = 0, turn;
        int status;

        while ((status = os->uffd_protect(engine->fd, page, page + COW_PAGE_BYTES, false)) == -EAGAIN)
                cow_pause(engine, fault, &tries);
        if (status < 0) {
                cow_engine_break(engine);
                return status;
        }
        turn = atomic_load(&engine->read_turn);
        while (turn & 1 && atomic_load(&engine->read_turn) == turn)
                cow_pause(engine, fault, &tries);
        return 0;
}

void cow_engine_break(struct cow_engine *engine)
{
        cow_stack_touch();
        lock_take(&engine->blocks_lock);
        atomic_store(&engine->is_broken, true);
        for (size_t i = engine->blocks.live_count; i-- > 0;) {
                struct cow_capture *capture = engine->blocks.live[i];

                cow_capture_fail(capture, COW_FAILURE_UNWATCHED, 0);
                cow_capture_end_if_done(engine, capture);
        }
        lock_give(&engine->blocks_lock);
}

/* Lifts the protection of [start, end), except where cow_own holds it. Only -EAGAIN is retried. Any other error
 * means that the memory is no longer registered or the descriptor is closed, so it is writable anyway. */
static int lift(struct cow_engine *engine, uint64_t start, uint64_t end)
{
        uint64_t step = end - start > COW_BLOCK_BYTES ? COW_BLOCK_BYTES : COW_PAGE_BYTES;
        const struct cow_span *held = &engine->blocks.held;
        int status;

        if (start < held->end && held->start < end) {
                if (start < held->start && lift(engine, start, held->start) == -EAGAIN)
                        return -EAGAIN;
                return held->end < end ? lift(engine, held->end, end) : 0;
        }
        status = os->uffd_protect(engine->fd, start, end, false);
        if (status != -ENOENT || end - start <= COW_PAGE_BYTES)
                return status;
        for (uint64_t at = start; at < end; at += step)
                if (lift(engine, at, end - at < step ? end : at + step) == -EAGAIN)
                        return -EAGAIN;
        return 0;
}

/* Lifts the protection of the blocks [start, end) in as few calls as possible, because each call may interrupt the other processors. */
static int lift_blocks(struct cow_engine *engine, uint64_t start, uint64_t end)
{
        for (size_t i = 0; i < engine->blocks.live_count; i++) {
                struct cow_capture *capture = engine->blocks.live[i];
                size_t first = cow_chunk_find(capture, start);

                if (first == capture->chunk_count || capture->chunks[first].block >= end)
                        continue;
                for (size_t k = capture->chunks[first].first_span; k < capture->span_count && capture->spans[k].start < end; k++) {
                        const struct cow_span *span = &capture->spans[k];

                        if (lift(engine, span->start > start ? span->start : start, span->end < end ? span->end : end) == -EAGAIN)
                                return -EAGAIN;
                }
                for (size_t k = first; k < capture->chunk_count && capture->chunks[k].block < end; k++) {
                        capture->chunks[k].fault_since_ns = 0;
                        capture->chunks[k].is_handed_on = false;
                }
        }
        return 0;
}

static bool chunk_covers(const struct cow_capture *capture, const struct cow_chunk *chunk, uint64_t page)
{
        for (size_t i = chunk->first_span; i < capture->span_count && capture->spans[i].start <= page; i++) {
                if (page < capture->spans[i].end)
                        return true;
        }
        return false;
}

/* The block stays protected for captures that still need it; a writer that waits for the block now waits for those. */
static void hand_on(struct cow_engine *engine, uint64_t block, int64_t since_ns)
{
        for (size_t i = 0; i < engine->blocks.live_count; i++) {
                struct cow_chunk *chunk = chunk_of(engine->blocks.live[i], block);

                if (!chunk || chunk->state == COW_CHUNK_DONE || !since_ns)
                        continue;
                chunk->is_handed_on = true;
                if (!chunk->fault_since_ns)
                        chunk->fault_since_ns = since_ns;
        }
}

/* Which captures and writers still need a block. */
struct demand {
        bool wanted;      /* a capture has not copied it yet */
        bool waiting;     /* and no thread copies it for that capture */
        bool covered;     /* a capture has protected the page of the fault */
        bool handed_on;   /* a writer may wait for a page that no capture protects any more */
        int64_t since_ns; /* when a writer began to wait for the block; 0: no writer waits */
};

static struct demand demand_for(struct cow_engine *engine, uint64_t block, const struct cow_fault *fault)
{
        struct demand demand = { 0 };

        for (size_t i = 0; i < engine->blocks.live_count; i++) {
                struct cow_capture *capture = engine->blocks.live[i];
                struct cow_chunk *chunk = chunk_of(capture, block);

                if (!chunk)
                        continue;
                if (capture->blocks.failure == COW_FAILURE_NONE) {
                        demand.wanted |= chunk->state != COW_CHUNK_DONE;
                        demand.waiting |= chunk->state == COW_CHUNK_WAITING;
                }
                demand.covered |= asks(fault) && chunk_covers(capture, chunk, fault->page);
                demand.handed_on |= chunk->is_handed_on;
                demand.since_ns = demand.since_ns ? demand.since_ns : chunk->fault_since_ns;
        }
        return demand;
}

/*
 * Lifts the protection of those blocks in [start, end) that no capture needs.
 * The caller holds blocks_lock. A block stays protected while any capture needs
 * it: the last thread that copies it lifts the protection for all.
 *
 * Returns 1 in one case: a new capture needs a block, no thread copies it for
 * that capture, and a writer waits that the fault thread left to this thread.
 * The block must then be copied for the new capture before the writer may go
 * on. The caller serves the block again, with `owed`: the capture that
 * protected the writer's page may have ended since.
 */
static int release(struct cow_engine *engine, uint64_t start, uint64_t end, bool owed)
{
        uint64_t free_start = start;
        int again = 0;

        for (uint64_t block = start; block <= end; block += COW_BLOCK_BYTES) {
                struct demand demand = { 0 };

                if (block < end)
                        demand = demand_for(engine, block, NULL);
                if (block < end && !demand.wanted) {
                        if ((owed || demand.handed_on) && lift(engine, block, block + COW_BLOCK_BYTES) == -EAGAIN)
                                return -EAGAIN;
                        continue;
                }
                if (free_start < block && lift_blocks(engine, free_start, block) == -EAGAIN)
                        return -EAGAIN;
                free_start = block + COW_BLOCK_BYTES;
                if (block < end)
                        hand_on(engine, block, demand.since_ns);
                again |= demand.waiting && demand.since_ns;
        }
        return again;
}

/* release for the block of a fault. If the page belongs to no live capture (left over from a failed one, or moved
 * here), its protection is always lifted. */
static int release_fault(struct cow_engine *engine, uint64_t block, const struct cow_fault *fault)
{
        struct demand demand = demand_for(engine, block, fault);
        int status = 0;

        if (demand.wanted && demand.covered) {
                hand_on(engine, block, demand.since_ns);
                return demand.waiting;
        }
        if (!demand.covered || (!demand.wanted && demand.handed_on))
                status = demand.wanted ? lift(engine, fault->page, fault->page + COW_PAGE_BYTES) :
                                         lift(engine, block, block + COW_BLOCK_BYTES);
        if (status != -EAGAIN && !demand.wanted)
                status = lift_blocks(engine, block, block + COW_BLOCK_BYTES);
        if (status != -EAGAIN)
                os->uffd_wake(engine->fd, fault->page, fault->page + COW_PAGE_BYTES);
        return status;
}

static void chunk_finish(const struct claim *claim, int64_t cpu_ns)
{
        struct cow_capture *capture = claim->capture;

        if (claim->failed)
                cow_capture_fail(capture, claim->failure, claim->failed);
        for (uint32_t i = 0; i < claim->sum_count; i++)
                image_sums_add(&capture->blocks.sums, &claim->sums[i]);
        claim->chunk->state = COW_CHUNK_DONE;
        capture->blocks.left--;
        capture->blocks.stats.cpu_ns += cpu_ns;
        if (claim->chunk->fault_since_ns)
                capture->blocks.stats.fault_ns += os->now_ns() - claim->chunk->fault_since_ns;
}

/* One round of cow_blocks_serve. False: another round is needed. */
static bool blocks_serve(struct cow_engine *engine, uint64_t start, uint64_t end, const struct cow_fault *fault, bool owed)
{
        struct claim claims[COW_RUN * COW_LIVE_MAX];
        int64_t cpu_ns = os->thread_cpu_ns();
        uint32_t tries = 0;
        size_t count = 0;
        int released;

        lock_take(&engine->blocks_lock);
        for (uint64_t block = start; block < end; block += COW_BLOCK_BYTES)
                count += claim_block(engine, block, fault, claims + count);
        lock_give(&engine->blocks_lock);
        if (!count && !asks(fault) && !owed)
                return true;
        for (size_t i = 0; i < count; i++)
                copy_chunk(&claims[i]);
        if (count)
                cow_events_await(engine, fault); /* an error here fails the captures */
        cpu_ns = os->thread_cpu_ns() - cpu_ns;

        lock_take(&engine->blocks_lock);
        for (size_t i = 0; i < count; i++)
                chunk_finish(&claims[i], cpu_ns / (int64_t)count);
        while ((released = asks(fault) ? release_fault(engine, start, fault) : release(engine, start, end, owed)) == -EAGAIN) {
                lock_give(&engine->blocks_lock);
                cow_pause(engine, fault, &tries);
                lock_take(&engine->blocks_lock);
        }
        /* Not earlier: after a capture has ended, its owner may free it. */
        for (size_t i = 0; i < count; i++) {
                claims[i].capture->blocks.active--;
                cow_capture_end_if_done(engine, claims[i].capture);
        }
        lock_give(&engine->blocks_lock);
        return released <= 0;
}

void cow_blocks_serve(struct cow_engine *engine, uint64_t start, uint64_t end, const struct cow_fault *fault)
{
        bool owed = false; /* a writer depends on this thread */

        while (!blocks_serve(engine, start, end, fault, owed))
                owed = true;
}
