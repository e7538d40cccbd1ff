/* The rings of the real table, for programs that called os_offer_ring (os_uring.c). */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>

#include "os/os_ring.h"

static const struct os_ring_calls *_Atomic calls;

void os_ring_offer(const struct os_ring_calls *offered)
{
        atomic_store(&calls, offered);
}

int os_linux_ring_open(uint32_t depth, struct os_ring **ret_ring)
{
        const struct os_ring_calls *offered = atomic_load(&calls);

        return offered ? offered->open(depth, ret_ring) : -ENOSYS;
}

/* A ring exists, so the calls were set. */
void os_linux_ring_close(struct os_ring *ring)
{
        atomic_load(&calls)->close(ring);
}

int os_linux_ring_register(struct os_ring *ring, const struct os_ring_buffer *buffers, uint32_t count)
{
        return atomic_load(&calls)->add_buffers(ring, buffers, count);
}

void os_linux_ring_queue(struct os_ring *ring, const struct os_ring_request *request)
{
        atomic_load(&calls)->queue(ring, request);
}

int os_linux_ring_submit(struct os_ring *ring)
{
        return atomic_load(&calls)->submit(ring);
}

int os_linux_ring_wait(struct os_ring *ring)
{
        return atomic_load(&calls)->wait(ring);
}

uint32_t os_linux_ring_queued(struct os_ring *ring)
{
        return atomic_load(&calls)->queued(ring);
}

bool os_linux_ring_reap(struct os_ring *ring, void **ret_key, int64_t *ret_result)
{
        return atomic_load(&calls)->reap(ring, ret_key, ret_result);
}
