#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "capture/cow_private.h"

/* For threads that look at a running capture or end it. */
static void blocks_lock(struct cow_engine *engine)
{
        lock_take(&engine->start_lock); /* so that no other thread protects the stack again after it was touched */
        cow_stack_touch();
        lock_take(&engine->blocks_lock);
}

static void blocks_unlock(struct cow_engine *engine)
{
        lock_give(&engine->blocks_lock);
        lock_give(&engine->start_lock);
}

/* Makes the union of start.registered and the capture's spans in start.registered; both are sorted. */
static bool registered_merge(struct cow_engine *engine, const struct cow_capture *capture)
{
        struct cow_span *merged = engine->start.merged;
        size_t count = 0, i = 0, k = 0;

        while (i < engine->start.registered_count || k < capture->span_count) {
                bool first = k == capture->span_count || (i < engine->start.registered_count &&
                             engine->start.registered[i].start <= capture->spans[k].start);
                struct cow_span span = first ? engine->start.registered[i++] : capture->spans[k++];

                if (count && span.start <= merged[count - 1].end) {
                        if (merged[count - 1].end < span.end)
                                merged[count - 1].end = span.end;
                        continue;
                }
                if (count == COW_SPAN_MAX)
                        return false;
                merged[count++] = span;
        }
        memcpy(engine->start.registered, merged, count * sizeof *merged);
        engine->start.registered_count = count;
        return true;
}

/* Older kernels protect only pages that are present, so make them present; reading is enough. */
static void span_populate(const struct cow_span *span)
{
        void *data = (void *)(uintptr_t)span->start;

        if (os->advise(data, span->end - span->start, OS_ADVISE_POPULATE_READ) == 0)
                return;
        for (uint64_t page = span->start; page < span->end; page += COW_PAGE_BYTES)
                *(const volatile char *)(uintptr_t)page;
}

static int spans_register(struct cow_engine *engine, const struct cow_capture *capture)
{
        if (!registered_merge(engine, capture))
                return -ENOSPC;
        for (size_t i = 0; i < capture->span_count; i++) {
                int status = os->uffd_register(engine->fd, capture->spans[i].start, capture->spans[i].end);

                if (status < 0)
                        return status;
                if (!engine->unpopulated)
                        span_populate(&capture->spans[i]);
        }
        return 0;
}

int cow_protect(struct cow_engine *engine, const struct cow_span *span)
{
        uint32_t tries = 0;
        int status;

        /* -EAGAIN: another thread is changing the address space; the fault thread reads that event soon. */
        while ((status = os->uffd_protect(engine->fd, span->start, span->end, true)) == -EAGAIN)
                cow_pause(engine, NULL, &tries);
        return status;
}

static int spans_protect(struct cow_engine *engine, const struct cow_capture *capture)
{
        int status = 0;

        for (size_t i = 0; i < capture->span_count && status >= 0; i++)
                status = cow_protect(engine, &capture->spans[i]);
        return status;
}

/* The caller holds start_lock. From here on a write to the capture's memory, by any thread, is served for this capture too. */
static bool capture_publish(struct cow_engine *engine, struct cow_capture *capture)
{
        bool room;

        cow_stack_touch();
        lock_take(&engine->blocks_lock);
        room = engine->blocks.live_count < COW_LIVE_MAX;
        if (room) {
                engine->blocks.live[engine->blocks.live_count++] = capture;
                capture->blocks.active = 1; /* this call counts as one */
        }
        lock_give(&engine->blocks_lock);
        return room;
}

/* Registers, publishes and protects the capture's spans. On failure the engine keeps nothing of the capture. */
static int capture_protect(struct cow_engine *engine, struct cow_capture *capture)
{
        bool published = false;
        int status;

        lock_take(&engine->start_lock);
        status = spans_register(engine, capture);
        if (status < 0)
                goto unlock;
        /* Reads pending events first: an event about memory that was here before must not spoil this capture. */
        status = cow_events_await(engine, NULL);
        if (status < 0)
                goto unlock;
        if (!capture_publish(engine, capture)) {
                status = -EBUSY;
                goto unlock;
        }
        published = true;
        status = spans_protect(engine, capture);
        cow_stack_touch();
        lock_take(&engine->blocks_lock);
        if (status < 0)
                cow_capture_fail(capture, COW_FAILURE_CANCELLED, 0);
        capture->blocks.ready = true;
        if (atomic_load(&capture->is_begun)) /* a write has begun it already: the workers were woken and found it not ready */
                cow_workers_wake(engine);
        capture->blocks.active--;
        cow_capture_end_if_done(engine, capture);
        lock_give(&engine->blocks_lock);
unlock:
        lock_give(&engine->start_lock);
        if (status < 0 && published) /* the fault thread may still write into the image */
                cow_wait(capture, -1, NULL);
        return status;
}

enum nebula_status cow_prepare(const struct capture_part *parts, size_t count, struct cow_capture **ret_capture,
                               struct nebula_error *error)
{
        struct cow_engine *engine = NULL;
        enum nebula_status status;

        cow_engine_get(&engine, NULL);
        status = cow_plan(engine, parts, count, ret_capture, error);
        if (status == NEBULA_OK) {
                (*ret_capture)->pid = os->pid();
                atomic_store(&(*ret_capture)->state, COW_STATE_DONE); /* no byte is missing yet */
                if (engine && !(*ret_capture)->has_files)
                        cow_spare_want(engine, 0);
        }
        return status;
}

/* Whether a part lies in the image itself. The copying threads could then not write to it. */
static bool touches_image(const void *image, const struct capture_part *parts, size_t count)
{
        uint64_t start = (uintptr_t)image, end = start;

        for (size_t i = 0; i < count; i++) {
                uint64_t part_end = (uintptr_t)image + parts[i].image_offset + parts[i].size;

                end = part_end > end ? part_end : end;
        }
        end = cow_page_ceil(end);
        for (size_t i = 0; i < count; i++)
                if ((uintptr_t)parts[i].data < end && cow_page_ceil((uintptr_t)parts[i].data + parts[i].size) > start)
                        return true;
        return false;
}

static int by_offset(const void *a, const void *b)
{
        const struct cow_part *const *left = a, *const *right = b;

        return (*left)->image_offset < (*right)->image_offset ? -1 : (*left)->image_offset > (*right)->image_offset;
}

bool cow_make(struct cow_capture *capture, void *image, uint64_t capacity)
{
        const struct cow_part **parts = malloc((capture->part_count + 1) * sizeof *parts);
        bool is_made = parts != NULL;
        uint64_t at = 0;

        capture->unmade = capacity;
        for (size_t i = 0; i < capture->part_count && parts; i++)
                parts[i] = &capture->parts[i];
        if (parts)
                qsort(parts, capture->part_count, sizeof *parts, by_offset);
        for (size_t i = 0; i < capture->part_count && is_made; i++) {
                uint64_t offset = parts[i]->image_offset, end = offset + (parts[i]->end - parts[i]->start);

                is_made = offset <= at || capture_make_pages(image, at, offset - at);
                at = end > at ? end : at;
        }
        free(parts);
        return is_made && (at >= capacity || capture_make_pages(image, at, capacity - at));
}

/* Copies now: the caller waits, so the values are exact. If protection failed, blocks that were written meanwhile
 * have been copied and summed before that write. */
static void copy_all(struct cow_capture *capture, void *image, const struct capture_part *parts, size_t count)
{
        capture_copy(image, parts, count);
        capture->blocks.sums.count = 0;
        capture->direct_bytes = 0;
        for (size_t i = 0; i < count; i++)
                capture->direct_bytes += parts[i].size;
        capture->blocks.stats.protected_bytes = 0;
}

void cow_begin(struct cow_capture *capture, void *image, const struct capture_part *parts, size_t count)
{
        struct cow_engine *engine = NULL;
        bool is_protected = false;

        capture->started_ns = os->now_ns();
        capture->image = image;
        if (capture->chunk_count && cow_engine_get(&engine, NULL) == NEBULA_OK && capture->pid == os->pid() &&
            !touches_image(image, parts, count)) {
                capture_copy(image, capture->direct, capture->direct_count);
                for (size_t i = 0; i < capture->direct_count; i++)
                        capture->direct_bytes += capture->direct[i].size;
                atomic_store(&capture->state, COW_STATE_RUNNING);
                is_protected = capture_protect(engine, capture) >= 0;
        }
        if (!is_protected && capture->unmade && !capture_populate(image, capture->unmade)) {
                capture->blocks.failure = COW_FAILURE_IMAGE;
                atomic_store(&capture->state, COW_STATE_FAILED);
        } else if (!is_protected) {
                copy_all(capture, image, parts, count);
                capture->blocks.stats.copy_ns = os->now_ns() - capture->started_ns;
                atomic_store(&capture->state, COW_STATE_DONE);
        }
        capture->blocked_ns = os->now_ns() - capture->started_ns;
}

enum nebula_status cow_start(void *image, const struct capture_part *parts, size_t count,
                             struct cow_capture **ret_capture, struct nebula_error *error)
{
        int64_t started_ns = os->now_ns();
        enum nebula_status status;

        if ((uintptr_t)image % COW_PAGE_BYTES)
                return error_set(error, NEBULA_INVALID, 0, "the image at %p does not begin on a page boundary", image);
        status = cow_prepare(parts, count, ret_capture, error);
        if (status != NEBULA_OK)
                return status;
        cow_begin(*ret_capture, image, parts, count);
        (*ret_capture)->blocked_ns = os->now_ns() - started_ns;
        return NEBULA_OK;
}

static enum nebula_status failure_describe(const struct cow_capture *capture, struct nebula_error *error)
{
        static const char *const what[] = {
                [COW_FAILURE_NONE] = "",
                [COW_FAILURE_UNMAPPED] = "it was freed (unmapped) before its bytes were copied",
                [COW_FAILURE_REMOVED] = "its pages were given back (MADV_DONTNEED or MADV_FREE) before they were copied",
                [COW_FAILURE_MOVED] = "it was resized or moved (mremap) before its bytes were copied",
                [COW_FAILURE_UNREADABLE] = "it was freed or protected against reading before its bytes were copied",
        };

        if (capture->blocks.failure == COW_FAILURE_CANCELLED)
                return error_set(error, NEBULA_FAILED, 0, "the capture was cancelled");
        if (capture->blocks.failure == COW_FAILURE_UNWATCHED)
                return error_set(error, NEBULA_FAILED, 0, "the program closed a userfaultfd that belongs to Nebula while the "
                                                          "capture was running; close only descriptors that your program opened");
        if (capture->blocks.failure == COW_FAILURE_IMAGE)
                return error_set(error, NEBULA_FAILED, 0, "the bytes could not be written to the image: the memory or the storage "
                                                          "of the image is full, or fails");
        return error_set(error, NEBULA_FAILED, 0,
                         "memory at 0x%llx changed while it was being saved: %s; do not free, move or resize saved memory until "
                         "the capture is complete", (unsigned long long)capture->blocks.failure_address,
                         what[capture->blocks.failure]);
}

/* Not in cow_start: its caller is still in the blocking part of the save, and the workers would take processors from it. */
static void begin_copying(struct cow_capture *capture)
{
        struct cow_engine *engine;

        if (capture->pid == os->pid() && atomic_load(&capture->state) == COW_STATE_RUNNING &&
            !atomic_exchange(&capture->is_begun, true) && cow_engine_get(&engine, NULL) == NEBULA_OK)
                cow_workers_wake(engine);
}

enum nebula_status cow_wait(struct cow_capture *capture, int64_t timeout_ms, struct nebula_error *error)
{
        int64_t deadline_ns = os->now_ns() + timeout_ms * 1000000;
        uint32_t state;

        begin_copying(capture);

        if (capture->pid != os->pid() && atomic_load(&capture->state) != COW_STATE_DONE)
                return error_set(error, NEBULA_FAILED, 0, "the capture belongs to process %u; a fork does not continue it",
                                 capture->pid);
        while ((state = atomic_load(&capture->state)) == COW_STATE_RUNNING) {
                int64_t left_ms = -1;

                if (timeout_ms >= 0) {
                        left_ms = (deadline_ns - os->now_ns() + 999999) / 1000000;
                        if (left_ms <= 0)
                                return error_set(error, NEBULA_TIMEOUT, 0, "the capture still copies after %lld ms",
                                                 (long long)timeout_ms);
                }
                os->futex_wait(&capture->state, COW_STATE_RUNNING, left_ms);
        }
        return state == COW_STATE_DONE ? NEBULA_OK : failure_describe(capture, error);
}

uint64_t cow_copied(struct cow_capture *capture)
{
        uint32_t state = atomic_load(&capture->state);
        uint64_t copied = UINT64_MAX;
        struct cow_engine *engine;
        size_t *turn = &capture->blocks.done_turns;

        if (state == COW_STATE_DONE)
                return UINT64_MAX;
        if (state != COW_STATE_RUNNING || capture->pid != os->pid() || cow_engine_get(&engine, NULL) != NEBULA_OK)
                return 0;
        blocks_lock(engine);
        while (*turn < capture->chunk_count && capture->chunks[capture->order[*turn]].state == COW_CHUNK_DONE)
                (*turn)++;
        if (*turn < capture->chunk_count)
                copied = capture->chunks[capture->order[*turn]].image_offset;
        if (capture->blocks.failure != COW_FAILURE_NONE)
                copied = 0;
        blocks_unlock(engine);
        return copied;
}

void cow_sum(struct cow_capture *capture, const struct image_sums *sums)
{
        capture->blocks.sums = *sums;
}

/* Takes the sums of the bytes before `copied` and puts them after the sums taken before. If the capture is running,
 * the caller holds blocks_lock. */
static struct image_sums take_sums(struct cow_capture *capture, uint64_t copied)
{
        struct image_sums *sums = &capture->blocks.sums, taken = *sums;

        taken.count = capture->summed_count;
        for (uint32_t i = taken.count; i < sums->count; i++) {
                struct image_sum sum = sums->list[i];

                if (sum.offset + sum.size > copied)
                        continue;
                sums->list[i] = sums->list[taken.count];
                sums->list[taken.count++] = sum;
        }
        return taken;
}

uint32_t cow_summed(struct cow_capture *capture, uint64_t copied)
{
        uint32_t before = capture->summed_count, state = atomic_load(&capture->state);
        struct image_sums taken;
        struct cow_engine *engine;

        if (state == COW_STATE_DONE) {
                taken = take_sums(capture, copied);
        } else {
                if (state != COW_STATE_RUNNING || capture->pid != os->pid() || cow_engine_get(&engine, NULL) != NEBULA_OK)
                        return before;
                blocks_lock(engine);
                taken = take_sums(capture, copied);
                blocks_unlock(engine);
        }
        image_sums_sort(&taken, before); /* no other thread uses these sums any more */
        return capture->summed_count = taken.count;
}

bool cow_has_files(const struct cow_capture *capture)
{
        return capture->has_files;
}

int64_t cow_waited_ns(const struct cow_capture *capture)
{
        return atomic_load(&capture->waited_ns);
}

void cow_cancel(struct cow_capture *capture)
{
        struct cow_engine *engine;

        if (capture->pid != os->pid() || atomic_load(&capture->state) != COW_STATE_RUNNING ||
            cow_engine_get(&engine, NULL) != NEBULA_OK)
                return;
        blocks_lock(engine);
        if (atomic_load(&capture->state) == COW_STATE_RUNNING) {
                cow_capture_fail(capture, COW_FAILURE_CANCELLED, 0);
                cow_capture_end_if_done(engine, capture);
        }
        blocks_unlock(engine);
}

void cow_stats(const struct cow_capture *capture, struct cow_stats *ret_stats)
{
        memset(ret_stats, 0, sizeof *ret_stats);
        if (atomic_load(&capture->state) != COW_STATE_RUNNING) /* otherwise the threads still add to it */
                *ret_stats = capture->blocks.stats;
        ret_stats->blocked_ns = capture->blocked_ns;
        ret_stats->direct_bytes = capture->direct_bytes;
}

void cow_free(struct cow_capture *capture)
{
        if (!capture)
                return;
        cow_cancel(capture);
        if (capture->pid == os->pid())
                cow_wait(capture, -1, NULL);
        cow_capture_unmap(capture);
}
