/*
 * The io_uring engine. The calling thread keeps the ring full and reaps
 * results. Chunks that have arrived go through a short queue to threads that
 * check them; if no thread can be started, the caller checks them.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "os/bulk_private.h"
#include "os/os.h"

#define CHECKERS_MAX 4u
#define REQUEST_MAX (1u << 30) /* a request's length is 32 bits */
#define PIN_BYTES (1u << 30)   /* the kernel's limit for one registered buffer */
_Static_assert(PIN_BYTES % BULK_WRITE_BYTES == 0, "a request lies in one buffer");

struct request {
        uint64_t offset, size; /* the chunk */
        uint64_t done;         /* bytes done of its direct part */
        bool is_used;
};

/* Memory that is registered with a ring of its own. */
struct pinned {
        struct pinned *next;
        const char *data;
        uint64_t size;
        bool is_used;
        struct os_ring *ring;
};

/* Guards the list below and the is_used of its entries. The ring of an entry belongs to the run that has set is_used. */
static struct lock pinned_lock = LOCK_INIT(LOCK_PINNED);
static struct pinned *pinned_list;

struct uring_run {
        struct bulk_job *job;
        struct os_ring *ring;
        const struct pinned *pinned; /* NULL: the ring is for this run alone */
        struct request requests[BULK_DEPTH];

        struct lock queue_lock; /* guards the members below */
        pthread_cond_t queue_changed;
        struct { uint64_t offset, size; } queue[BULK_DEPTH];
        size_t queue_first, queue_count;
        bool is_ended;
        size_t checker_count;
};

/* The caller holds pinned_lock. */
static struct pinned **pinned_find(const char *data)
{
        struct pinned **link = &pinned_list;

        while (*link && (*link)->data != data)
                link = &(*link)->next;
        return link;
}

static void pinned_free(struct pinned *pinned)
{
        os->ring_close(pinned->ring);
        free(pinned);
}

static int pinned_open(struct pinned *pinned)
{
        uint32_t count = (uint32_t)((pinned->size + PIN_BYTES - 1) / PIN_BYTES);
        struct os_ring_buffer *buffers = calloc(count, sizeof *buffers);
        int result = buffers ? os->ring_open(BULK_DEPTH, &pinned->ring) : -ENOMEM;

        if (result)
                goto free;
        for (uint32_t i = 0; i < count; i++) {
                uint64_t offset = i * (uint64_t)PIN_BYTES, left = pinned->size - offset;

                buffers[i] = (struct os_ring_buffer){ pinned->data + offset, left < PIN_BYTES ? left : PIN_BYTES };
        }
        result = os->ring_register(pinned->ring, buffers, count);
        if (result)
                os->ring_close(pinned->ring);
free:
        free(buffers);
        return result;
}

int bulk_ring_pin(const char *data, uint64_t size)
{
        struct pinned *pinned;
        int result = 0;

        if (!size)
                return -EINVAL;
        lock_take(&pinned_lock);
        if (*pinned_find(data))
                goto unlock;
        pinned = calloc(1, sizeof *pinned);
        if (!pinned) {
                result = -ENOMEM;
                goto unlock;
        }
        pinned->data = data;
        pinned->size = size;
        result = pinned_open(pinned);
        if (result) {
                free(pinned);
                goto unlock;
        }
        pinned->next = pinned_list;
        pinned_list = pinned;
unlock:
        lock_give(&pinned_lock);
        return result;
}

void bulk_ring_unpin(const char *data)
{
        struct pinned **link, *pinned;

        lock_take(&pinned_lock);
        link = pinned_find(data);
        pinned = *link;
        if (pinned)
                *link = pinned->next;
        lock_give(&pinned_lock);
        if (pinned)
                pinned_free(pinned);
}

/* The ring of the job's memory, if it is pinned and no other run uses it. */
static struct pinned *pinned_take(const struct bulk_job *job)
{
        struct pinned *pinned;

        if (!job->is_write)
                return NULL;
        lock_take(&pinned_lock);
        pinned = *pinned_find(job->data);
        if (pinned && (pinned->is_used || pinned->size < job->size))
                pinned = NULL;
        if (pinned)
                pinned->is_used = true;
        lock_give(&pinned_lock);
        return pinned;
}

static void pinned_return(struct pinned *pinned)
{
        lock_take(&pinned_lock);
        pinned->is_used = false;
        lock_give(&pinned_lock);
}

static uint64_t direct_end(const struct bulk_job *job, const struct request *request)
{
        uint64_t end = request->offset + request->size;

        return end < job->direct_size ? end : job->direct_size;
}

static void submit(struct uring_run *run, struct request *request)
{
        struct bulk_job *job = run->job;
        uint64_t at = request->offset + request->done;
        struct os_ring_request asked = {
                .key = request, .fd = job->fd, .is_write = job->is_write, .may_take_pages = !job->is_write,
                .buffer = run->pinned ? (int)(at / PIN_BYTES) : -1, .data = job->data + at,
                .size = (uint32_t)(direct_end(job, request) - at), .offset = at,
        };

        os->ring_queue(run->ring, &asked); /* always fits: there are as many places as requests */
}

static void *check_queue(void *argument)
{
        struct uring_run *run = argument;

        lock_take(&run->queue_lock);
        for (;;) {
                uint64_t offset, size;

                while (!run->queue_count && !run->is_ended)
                        lock_wait(&run->queue_lock, &run->queue_changed);
                if (!run->queue_count)
                        break;
                offset = run->queue[run->queue_first].offset;
                size = run->queue[run->queue_first].size;
                run->queue_first = (run->queue_first + 1) % BULK_DEPTH;
                run->queue_count--;
                lock_give(&run->queue_lock);
                bulk_finish_chunk(run->job, run->job->data + offset, offset, size);
                lock_take(&run->queue_lock);
        }
        lock_give(&run->queue_lock);
        return NULL;
}

/* If the checkers do not keep up, the caller checks a chunk too, so that the queue stays short. */
static void hand_over(struct uring_run *run, uint64_t offset, uint64_t size)
{
        bool is_queued = false;

        lock_take(&run->queue_lock);
        if (run->checker_count && run->queue_count < BULK_DEPTH) {
                size_t last = (run->queue_first + run->queue_count) % BULK_DEPTH;

                run->queue[last].offset = offset;
                run->queue[last].size = size;
                run->queue_count++;
                is_queued = true;
                pthread_cond_signal(&run->queue_changed);
        }
        lock_give(&run->queue_lock);
        if (!is_queued)
                bulk_finish_chunk(run->job, run->job->data + offset, offset, size);
}

/* Handles a request's result. True: the request is in flight again. */
static bool complete(struct uring_run *run, struct request *request, int64_t result)
{
        struct bulk_job *job = run->job;

        if (result == -EINTR || result == -EAGAIN)
                result = 0;
        else if (!result)
                result = job->is_write ? -EIO : -ENODATA;
        if (result < 0) {
                bulk_fail(job, request->offset, (int)result, NULL);
                return false;
        }
        request->done += (uint64_t)result;
        if (request->offset + request->done >= direct_end(job, request)) {
                hand_over(run, request->offset, request->size);
                return false;
        }
        if (atomic_load(&job->is_stopped))
                return false;
        submit(run, request);
        return true;
}

static size_t depth(const struct bulk_job *job)
{
        return job->chunk_bytes > BULK_REQUEST_BYTES && job->is_write ? BULK_WRITE_DEPTH : BULK_DEPTH;
}

/* Fills free slots. Waits for a chunk to become final only if no request is in flight. Finishes chunks that have no direct part at once. */
static size_t fill(struct uring_run *run, size_t in_flight)
{
        size_t started = 0;

        for (size_t i = 0; i < depth(run->job); i++) {
                struct request *request = &run->requests[i];

                if (request->is_used)
                        continue;
                do {
                        if (!bulk_take(run->job, !(in_flight + started), &request->offset, &request->size))
                                return started;
                        if (request->offset >= run->job->direct_size)
                                hand_over(run, request->offset, request->size);
                } while (request->offset >= run->job->direct_size);
                request->done = 0;
                request->is_used = true;
                submit(run, request);
                started++;
        }
        return started;
}

static size_t reap(struct uring_run *run)
{
        int64_t count;
        size_t ended = 0;
        void *key;

        while (os->ring_reap(run->ring, &key, &count)) {
                struct request *request = key;

                if (!complete(run, request, count)) {
                        request->is_used = false;
                        ended++;
                }
        }
        return ended;
}

/* Runs until all requests have returned, because the kernel uses the caller's memory until then. False: the ring is broken. */
static bool pump(struct uring_run *run)
{
        size_t in_flight = fill(run, 0);
        bool is_broken = false;

        while (in_flight) {
                int result = is_broken ? os->ring_wait(run->ring) : os->ring_submit(run->ring);

                if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY) {
                        bulk_fail(run->job, 0, result, NULL);
                        if (!is_broken)
                                in_flight -= os->ring_queued(run->ring); /* the kernel never saw these requests */
                        is_broken = true;
                }
                in_flight -= reap(run);
                if (!is_broken)
                        in_flight += fill(run, in_flight);
        }
        return !is_broken;
}

/* Runs the ring, with threads beside it that check chunks which arrived. */
static bool pump_and_check(struct uring_run *run)
{
        struct bulk_job *job = run->job;
        pthread_t threads[CHECKERS_MAX];
        size_t wanted = os->cpu_count() < CHECKERS_MAX ? os->cpu_count() : CHECKERS_MAX;
        size_t count = 0;
        bool is_whole;

        lock_init(&run->queue_lock, LOCK_RING_QUEUE);
        pthread_cond_init(&run->queue_changed, NULL);
        while (job->check && count < wanted && count + 1 < job->chunk_count &&
               !bulk_start(&threads[count], check_queue, run))
                count++;
        run->checker_count = count;
        is_whole = pump(run);
        lock_take(&run->queue_lock);
        run->is_ended = true;
        pthread_cond_broadcast(&run->queue_changed);
        lock_give(&run->queue_lock);
        check_queue(run); /* helps to check the rest */
        while (count)
                pthread_join(threads[--count], NULL);
        pthread_cond_destroy(&run->queue_changed);
        lock_done(&run->queue_lock);
        return is_whole;
}

bool bulk_run_ring(struct bulk_job *job)
{
        struct pinned *pinned = pinned_take(job);
        struct uring_run run = { .job = job, .ring = pinned ? pinned->ring : NULL, .pinned = pinned };

        if (pinned) {
                if (pump_and_check(&run))
                        pinned_return(pinned);
                else /* closed while it is marked as used, so no other thread takes it */
                        bulk_ring_unpin(job->data);
                return true;
        }
        if (job->chunk_bytes > REQUEST_MAX || os->ring_open(BULK_DEPTH, &run.ring))
                return false;
        pump_and_check(&run);
        os->ring_close(run.ring);
        return true;
}
