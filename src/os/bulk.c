#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "os/bulk_private.h"
#include "os/os.h"
#include "os/thread.h"

#define HUGE_PAGE_BYTES (2u << 20)
#define PACE_MS 10
#define STACK_BYTES (256u << 10) /* a check has a frame of a few KiB */

static pthread_once_t probe_once = PTHREAD_ONCE_INIT;
static bool threads_wanted, linux_has_ring;

static bool ring_works(void)
{
        struct os_ring *ring;

        if (os_linux.ring_open(BULK_DEPTH, &ring))
                return false;
        os_linux.ring_close(ring);
        return true;
}

static void choose_engine(void)
{
        linux_has_ring = ring_works();
}

/* Whether the table in use has a ring. A test's table that replaces pread and pwrite but not the ring calls would
 * not see requests in a ring, so it has none. */
static bool table_has_ring(void)
{
        return os == &os_linux ? linux_has_ring : os->ring_open != os_linux.ring_open;
}

enum bulk_engine bulk_engine_used(void)
{
        pthread_once(&probe_once, choose_engine);
        return !threads_wanted && table_has_ring() ? BULK_ENGINE_URING : BULK_ENGINE_THREADS;
}

int bulk_engine_force(enum bulk_engine engine)
{
        pthread_once(&probe_once, choose_engine);
        if (engine == BULK_ENGINE_URING && os == &os_linux && !linux_has_ring)
                linux_has_ring = ring_works(); /* os_offer_ring may have been called since the probe */
        threads_wanted = engine == BULK_ENGINE_THREADS;
        return threads_wanted || table_has_ring() ? 0 : -ENOSYS;
}

/* Size of one write request. Each completion wakes a thread, which interrupts a training thread, and other ranks
 * then wait for that one. So requests are large if a few large ones are as fast as many small ones. */
static uint64_t write_chunk_bytes(uint64_t size)
{
        return size / BULK_WRITE_BYTES >= BULK_THREADS ? BULK_WRITE_BYTES : BULK_REQUEST_BYTES;
}

static uint64_t count_of(uint64_t bytes, uint64_t part)
{
        return (bytes + part - 1) / part;
}

static void feed_attach(struct bulk_feed *feed, bool is_written, bool in_order)
{
        if (!feed)
                return;
        lock_take(&feed->lock);
        feed->in_order = in_order;
        feed->taken = 0;
        feed->is_written = is_written;
        pthread_cond_broadcast(&feed->changed);
        lock_give(&feed->lock);
}

void bulk_feed_begin(struct bulk_feed *feed, bool in_order)
{
        feed_attach(feed, true, in_order);
}

void bulk_feed_finish(struct bulk_feed *feed)
{
        feed_attach(feed, false, false);
}

/* Brings the lowest chunk that is final and not taken to the front. */
static void find_lowest(struct bulk_feed *feed)
{
        size_t lowest = feed->taken;
        uint64_t front = feed->offsets[lowest];

        for (size_t i = lowest + 1; i < feed->count; i++)
                if (feed->offsets[i] < feed->offsets[lowest])
                        lowest = i;
        feed->offsets[feed->taken] = feed->offsets[lowest];
        feed->offsets[lowest] = front;
}

int bulk_feed_take(struct bulk_feed *feed, int64_t timeout_ms, uint64_t *ret_offset)
{
        int result = 0;

        lock_take(&feed->lock);
        if (feed->taken == feed->count && feed->taken < feed->wanted && !feed->is_ended)
                lock_wait_for(&feed->lock, &feed->changed, timeout_ms);
        if (feed->taken < feed->count) {
                if (feed->in_order)
                        find_lowest(feed);
                *ret_offset = feed->offsets[feed->taken++];
                pthread_cond_broadcast(&feed->changed);
        } else {
                result = feed->taken == feed->wanted ? -ENODATA : feed->is_ended ? -ECANCELED : -EAGAIN;
        }
        lock_give(&feed->lock);
        return result;
}

bool bulk_feed_is_same(struct bulk_feed *feed, uint64_t offset)
{
        bool is_same;

        lock_take(&feed->lock);
        is_same = !feed->differs[offset / feed->chunk_bytes];
        lock_give(&feed->lock);
        return is_same;
}

bool bulk_feed_sum(struct bulk_feed *feed, uint64_t offset, uint64_t *ret_crc64)
{
        uint64_t piece = offset / BULK_REQUEST_BYTES;
        bool has_sum;

        lock_take(&feed->lock);
        has_sum = feed->has_sum[piece];
        if (has_sum)
                *ret_crc64 = feed->sums[piece];
        lock_give(&feed->lock);
        return has_sum;
}

static void feed_free(struct bulk_feed *feed)
{
        free(feed->offsets);
        free(feed->missing);
        free(feed->differs);
        free(feed->sums);
        free(feed->has_sum);
        feed->offsets = NULL;
}

static int feed_init(struct bulk_feed *feed, uint64_t size, uint64_t chunk_bytes)
{
        size_t pieces = (size_t)count_of(size, BULK_REQUEST_BYTES);

        *feed = (struct bulk_feed){ .chunk_bytes = chunk_bytes, .wanted = (size_t)count_of(size, chunk_bytes) };
        feed->offsets = calloc(feed->wanted + 1, sizeof *feed->offsets);
        feed->missing = calloc(feed->wanted + 1, sizeof *feed->missing);
        feed->differs = calloc(feed->wanted + 1, sizeof *feed->differs);
        feed->sums = calloc(pieces + 1, sizeof *feed->sums);
        feed->has_sum = calloc(pieces + 1, sizeof *feed->has_sum);
        if (!feed->offsets || !feed->missing || !feed->differs || !feed->sums || !feed->has_sum) {
                feed_free(feed);
                return -ENOMEM;
        }
        for (size_t i = 0; i < feed->wanted; i++) {
                uint64_t left = size - i * chunk_bytes;

                feed->missing[i] = (uint8_t)count_of(left < chunk_bytes ? left : chunk_bytes, BULK_REQUEST_BYTES);
        }
        lock_init(&feed->lock, LOCK_FEED);
        os_cond_init(&feed->changed);
        return 0;
}

int bulk_feed_init(struct bulk_feed *feed, uint64_t size)
{
        return feed_init(feed, size, write_chunk_bytes(size));
}

int bulk_feed_init_pieces(struct bulk_feed *feed, uint64_t size)
{
        return feed_init(feed, size, BULK_REQUEST_BYTES);
}

void bulk_feed_done(struct bulk_feed *feed)
{
        if (!feed->offsets)
                return;
        lock_done(&feed->lock);
        pthread_cond_destroy(&feed->changed);
        feed_free(feed);
}

/* The caller holds feed->lock. */
static void report_piece(struct bulk_feed *feed, uint64_t offset, bool is_same)
{
        uint64_t chunk = offset / feed->chunk_bytes;

        if (!feed->missing[chunk])
                return;
        feed->differs[chunk] |= !is_same;
        if (--feed->missing[chunk])
                return;
        feed->offsets[feed->count++] = chunk * feed->chunk_bytes;
        pthread_cond_broadcast(&feed->changed);
}

void bulk_feed_report(struct bulk_feed *feed, uint64_t offset)
{
        lock_take(&feed->lock);
        report_piece(feed, offset, false);
        lock_give(&feed->lock);
}

void bulk_feed_report_same(struct bulk_feed *feed, uint64_t offset)
{
        lock_take(&feed->lock);
        report_piece(feed, offset, true);
        lock_give(&feed->lock);
}

void bulk_feed_report_summed(struct bulk_feed *feed, uint64_t offset, uint64_t crc64, bool is_same)
{
        lock_take(&feed->lock);
        feed->sums[offset / BULK_REQUEST_BYTES] = crc64;
        feed->has_sum[offset / BULK_REQUEST_BYTES] = 1;
        report_piece(feed, offset, is_same);
        lock_give(&feed->lock);
}

void bulk_feed_report_all(struct bulk_feed *feed)
{
        lock_take(&feed->lock);
        for (size_t i = 0; i < feed->wanted; i++)
                while (feed->missing[i])
                        report_piece(feed, i * feed->chunk_bytes, false);
        lock_give(&feed->lock);
}

void bulk_feed_end(struct bulk_feed *feed)
{
        lock_take(&feed->lock);
        feed->is_ended = true;
        pthread_cond_broadcast(&feed->changed);
        lock_give(&feed->lock);
}

static bool is_far_ahead(const struct bulk_feed *feed, uint64_t ahead)
{
        return feed->is_written && !feed->in_order && (feed->count - feed->taken) * feed->chunk_bytes > ahead;
}

bool bulk_feed_pace(struct bulk_feed *feed, uint64_t ahead)
{
        bool is_ahead;

        lock_take(&feed->lock);
        if (is_far_ahead(feed, ahead))
                lock_wait_for(&feed->lock, &feed->changed, PACE_MS);
        is_ahead = is_far_ahead(feed, ahead);
        lock_give(&feed->lock);
        return is_ahead;
}

atomic_ullong *bulk_feed_counter(struct bulk_feed *feed)
{
        return feed ? feed->moved_bytes : NULL;
}

void bulk_feed_count(struct bulk_feed *feed, uint64_t bytes)
{
        atomic_ullong *counter = bulk_feed_counter(feed);

        if (counter)
                atomic_fetch_add(counter, bytes);
}

bool bulk_feed_wait(struct bulk_feed *feed)
{
        bool is_whole;

        lock_take(&feed->lock);
        while (feed->count < feed->wanted && !feed->is_ended)
                lock_wait(&feed->lock, &feed->changed);
        is_whole = feed->count == feed->wanted;
        lock_give(&feed->lock);
        return is_whole;
}

/* The first chunk for the job to write that is final and not taken. The caller holds feed->lock. */
static uint64_t next_reported(struct bulk_job *job)
{
        const struct bulk_feed *feed = job->feed;
        uint64_t index = atomic_load(&job->next_chunk);

        while (feed->skips_same && index < feed->count && !feed->differs[feed->offsets[index] / feed->chunk_bytes])
                index++;
        atomic_store(&job->next_chunk, index);
        return index;
}

/* Takes the next chunk that became final. Returns 0; -EAGAIN: none is final yet; -ENODATA: all were taken;
 * -ECANCELED: the feed ended early. */
static int take_reported(struct bulk_job *job, bool may_wait, uint64_t *ret_offset)
{
        struct bulk_feed *feed = job->feed;
        uint64_t index;
        int result;

        lock_take(&feed->lock);
        while ((index = next_reported(job)) == feed->count && index < feed->wanted && !feed->is_ended && may_wait)
                lock_wait(&feed->lock, &feed->changed);
        if (index < feed->count) {
                *ret_offset = feed->offsets[index];
                atomic_store(&job->next_chunk, index + 1);
                feed->taken = index + 1;
                pthread_cond_broadcast(&feed->changed);
                result = 0;
        } else {
                result = index == feed->wanted ? -ENODATA : feed->is_ended ? -ECANCELED : -EAGAIN;
        }
        lock_give(&feed->lock);
        return result;
}

int bulk_buffer_map(struct bulk_buffer *buffer, uint64_t size)
{
        int result;

        size = (size + HUGE_PAGE_BYTES - 1) & ~(uint64_t)(HUGE_PAGE_BYTES - 1);
        *buffer = (struct bulk_buffer){ .map_size = size + HUGE_PAGE_BYTES };
        result = os->map(-1, 0, buffer->map_size, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE | OS_MAP_ANONYMOUS, &buffer->map);
        if (result)
                return result;
        buffer->data = (char *)(((uintptr_t)buffer->map + HUGE_PAGE_BYTES - 1) & ~(uintptr_t)(HUGE_PAGE_BYTES - 1));
        os->advise(buffer->data, size, OS_ADVISE_HUGE);
        return 0;
}

bool bulk_buffer_make(char *data, uint64_t size)
{
        size = (size + HUGE_PAGE_BYTES - 1) & ~(uint64_t)(HUGE_PAGE_BYTES - 1);
        os->advise(data, size, OS_ADVISE_POPULATE_WRITE);
        /* Returns quickly if the pages are huge already; fails if they cannot be. */
        return os->advise(data, size, OS_ADVISE_COLLAPSE) == 0;
}

int bulk_buffer_open(struct bulk_buffer *buffer, uint64_t size)
{
        int result = bulk_buffer_map(buffer, size);

        if (!result)
                bulk_buffer_make(buffer->data, size);
        return result;
}

void bulk_buffer_close(struct bulk_buffer *buffer)
{
        if (buffer->map)
                os->unmap(buffer->map, buffer->map_size);
        *buffer = (struct bulk_buffer){ 0 };
}

bool bulk_take(struct bulk_job *job, bool may_wait, uint64_t *ret_offset, uint64_t *ret_size)
{
        uint64_t index, offset;

        if (atomic_load(&job->is_stopped))
                return false;
        if (job->feed) {
                int result = take_reported(job, may_wait, &offset);

                if (result == -ECANCELED)
                        bulk_fail(job, job->size, result, NULL);
                if (result)
                        return false;
        } else {
                index = atomic_fetch_add(&job->next_chunk, 1);
                if (index >= job->chunk_count)
                        return false;
                offset = index * job->chunk_bytes;
        }
        *ret_offset = offset;
        *ret_size = job->size - offset < job->chunk_bytes ? job->size - offset : job->chunk_bytes;
        return true;
}

void bulk_fail(struct bulk_job *job, uint64_t offset, int result, const struct nebula_error *error)
{
        atomic_store(&job->is_stopped, true);
        lock_take(&job->result_lock);
        if (!job->result || offset < job->failed_offset) {
                job->result = result;
                job->failed_offset = offset;
                if (job->error && error)
                        *job->error = *error;
        }
        lock_give(&job->result_lock);
}

/* Moves the bytes after the last whole page of a direct file. */
static int move_tail(struct bulk_job *job)
{
        size_t size = (size_t)(job->size - job->direct_size);
        char *bounce = aligned_alloc(BULK_PAGE_BYTES, BULK_PAGE_BYTES);
        size_t done = 0;
        int result = 0;

        if (!bounce)
                return -ENOMEM;
        if (job->is_write) {
                memcpy(bounce, job->data + job->direct_size, size);
                memset(bounce + size, 0, BULK_PAGE_BYTES - size);
                result = os_write_at(job->fd, bounce, BULK_PAGE_BYTES, job->direct_size);
                goto free_bounce;
        }
        /* One read to the end of the file. It is repeated only as a whole, because a direct read must stay aligned. */
        while (done < size && !result) {
                int64_t count = os->pread(job->fd, bounce, BULK_PAGE_BYTES, job->direct_size);

                if (count == -EINTR)
                        continue;
                result = count < 0 ? (int)count : (size_t)count <= done ? -ENODATA : 0;
                done = count < 0 ? done : (size_t)count;
        }
        if (!result)
                memcpy(job->data + job->direct_size, bounce, size);
free_bounce:
        free(bounce);
        return result;
}

void bulk_finish_chunk(struct bulk_job *job, const char *data, uint64_t offset, uint64_t size)
{
        struct nebula_error error = { 0 };
        int result = 0;

        if (atomic_load(&job->is_stopped))
                return;
        if (offset + size > job->direct_size)
                result = move_tail(job);
        if (!result && job->check)
                result = (int)job->check(job->argument, data, offset, size, &error);
        if (result)
                bulk_fail(job, offset, result, &error);
        else if (job->is_write)
                bulk_feed_count(job->feed, size);
}

int bulk_start(pthread_t *ret_thread, void *(*run)(void *), void *argument)
{
        pthread_attr_t attributes;
        sigset_t mask, before;
        int result;

        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, STACK_BYTES);
        os_thread_mask(&mask);
        pthread_sigmask(SIG_SETMASK, &mask, &before);
        result = pthread_create(ret_thread, &attributes, run, argument);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
        return -result;
}

static int run_job(struct bulk_job *job)
{
        job->direct_size = job->is_direct ? job->size & ~(uint64_t)(BULK_PAGE_BYTES - 1) : job->size;
        job->chunk_count = count_of(job->size, job->chunk_bytes);
        if (job->is_direct && (((uintptr_t)job->data | job->chunk_bytes) & (BULK_PAGE_BYTES - 1)))
                return -EINVAL;
        lock_init(&job->result_lock, LOCK_BULK_RESULT);
        if (bulk_engine_used() == BULK_ENGINE_THREADS || !bulk_run_ring(job))
                bulk_run_threads(job);
        lock_done(&job->result_lock);
        return job->result;
}


int bulk_pin(const void *data, uint64_t size)
{
        return bulk_engine_used() == BULK_ENGINE_URING ? bulk_ring_pin(data, size) : -ENOSYS;
}

void bulk_unpin(const void *data)
{
        bulk_ring_unpin(data);
}

int bulk_write(int fd, bool is_direct, const void *data, uint64_t size, struct bulk_feed *feed)
{
        struct bulk_job job = {
                .fd = fd, .is_write = true, .is_direct = is_direct, .data = (char *)(uintptr_t)data, .size = size,
                .chunk_bytes = feed ? feed->chunk_bytes : write_chunk_bytes(size), .feed = feed,
        };
        int result;

        feed_attach(feed, true, false);
        result = run_job(&job);
        feed_attach(feed, false, false);
        if (result)
                return result;
        do
                result = os->truncate(fd, size);
        while (result == -EINTR);
        return result;
}

int bulk_read(int fd, bool is_direct, void *data, bool is_new, uint64_t size, uint32_t chunk_bytes,
              bulk_check *check, void *argument, struct nebula_error *error)
{
        struct bulk_job job = {
                .fd = fd, .is_direct = is_direct, .is_new = is_new, .data = data, .size = size, .chunk_bytes = chunk_bytes,
                .check = check, .argument = argument, .error = error,
        };

        return chunk_bytes ? run_job(&job) : -EINVAL;
}
