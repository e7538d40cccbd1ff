/*
 * os_ring.h - io_uring behind the table of system calls. Only os_linux.c, os_ring.c and os_uring.c include it.
 *
 * The trainer's half does not link liburing. So the real table calls the functions that os_offer_ring has set. Each member
 * works as the table's ring_... member of the same name (os.h).
 */
#ifndef NB_OS_OS_RING_H
#define NB_OS_OS_RING_H

#include "os/os.h"

struct os_ring_calls {
        int (*open)(uint32_t depth, struct os_ring **ret_ring);
        void (*close)(struct os_ring *ring);
        int (*add_buffers)(struct os_ring *ring, const struct os_ring_buffer *buffers, uint32_t count);
        void (*queue)(struct os_ring *ring, const struct os_ring_request *request);
        int (*submit)(struct os_ring *ring);
        int (*wait)(struct os_ring *ring);
        uint32_t (*queued)(struct os_ring *ring);
        bool (*reap)(struct os_ring *ring, void **ret_key, int64_t *ret_result);
};
void os_ring_offer(const struct os_ring_calls *offered);

int os_linux_ring_open(uint32_t depth, struct os_ring **ret_ring);
void os_linux_ring_close(struct os_ring *ring);
int os_linux_ring_register(struct os_ring *ring, const struct os_ring_buffer *buffers, uint32_t count);
void os_linux_ring_queue(struct os_ring *ring, const struct os_ring_request *request);
int os_linux_ring_submit(struct os_ring *ring);
int os_linux_ring_wait(struct os_ring *ring);
uint32_t os_linux_ring_queued(struct os_ring *ring);
bool os_linux_ring_reap(struct os_ring *ring, void **ret_key, int64_t *ret_result);

#endif
