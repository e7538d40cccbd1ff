/* A ring for the tables of tests. Each request is a pread or pwrite of the table in use, made when it is submitted.
 * Results come back in reverse order. */
#include "os/os_ring_model.h"

#include <errno.h>
#include <stdlib.h>

struct os_ring {
        uint32_t depth, queued, done;
        struct os_ring_request *requests;                    /* queued */
        struct { void *key; int64_t result; } *results;      /* done */
};

static void model_close(struct os_ring *ring)
{
        if (ring->done)
                abort(); /* a request is in flight, so its memory is still in use */
        free(ring->requests);
        free(ring->results);
        free(ring);
}

int os_ring_model_open(uint32_t depth, struct os_ring **ret_ring)
{
        struct os_ring *ring = calloc(1, sizeof *ring);

        if (!ring)
                return -ENOMEM;
        ring->depth = depth;
        ring->requests = calloc(depth, sizeof *ring->requests);
        ring->results = calloc(depth, sizeof *ring->results);
        if (!ring->requests || !ring->results) {
                model_close(ring);
                return -ENOMEM;
        }
        *ret_ring = ring;
        return 0;
}

int os_ring_model_register(struct os_ring *ring, const struct os_ring_buffer *buffers, uint32_t count)
{
        (void)ring;
        (void)buffers;
        (void)count;
        return 0;
}

static void model_queue(struct os_ring *ring, const struct os_ring_request *request)
{
        if (ring->queued + ring->done == ring->depth)
                abort(); /* liburing has no free entry in this case */
        ring->requests[ring->queued++] = *request;
}

int os_ring_model_submit(struct os_ring *ring)
{
        for (uint32_t i = 0; i < ring->queued; i++) {
                const struct os_ring_request *request = &ring->requests[i];

                ring->results[ring->done].key = request->key;
                ring->results[ring->done++].result = request->is_write ? os->pwrite(request->fd, request->data, request->size, request->offset)
                                                                        : os->pread(request->fd, request->data, request->size, request->offset);
        }
        ring->queued = 0;
        return 0;
}

static int model_wait(struct os_ring *ring)
{
        if (!ring->done)
                abort(); /* the wait would never end */
        return 0;
}

static uint32_t model_queued(struct os_ring *ring)
{
        return ring->queued;
}

static bool model_reap(struct os_ring *ring, void **ret_key, int64_t *ret_result)
{
        if (!ring->done)
                return false;
        ring->done--;
        *ret_key = ring->results[ring->done].key;
        *ret_result = ring->results[ring->done].result;
        return true;
}

void os_ring_model_use(struct os_table *table)
{
        if (table->ring_open == os_linux.ring_open) {
                table->ring_open = os_ring_model_open;
                table->ring_register = os_ring_model_register;
                table->ring_submit = os_ring_model_submit;
        }
        table->ring_close = model_close;
        table->ring_queue = model_queue;
        table->ring_wait = model_wait;
        table->ring_queued = model_queued;
        table->ring_reap = model_reap;
}
