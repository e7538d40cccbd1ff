/* io_uring through liburing: the rings of the agent and of the command. */
#ifdef NB_HAVE_URING
#include <errno.h>
#include <liburing.h>
#include <pthread.h>
#include <stdlib.h>

#include "os/os_ring.h"

struct os_ring {
        struct io_uring uring;
        bool has_buffers;
};

static pthread_once_t probe_once = PTHREAD_ONCE_INIT;
static bool can_read_and_write;

static void probe(void)
{
        struct io_uring_probe *known = io_uring_get_probe();

        can_read_and_write = known && io_uring_opcode_supported(known, IORING_OP_READ) && io_uring_opcode_supported(known, IORING_OP_WRITE);
        if (known)
                io_uring_free_probe(known);
}

static int uring_open(uint32_t depth, struct os_ring **ret_ring)
{
        struct os_ring *ring;
        int result;

        pthread_once(&probe_once, probe);
        if (!can_read_and_write)
                return -ENOSYS;
        ring = calloc(1, sizeof *ring);
        if (!ring)
                return -ENOMEM;
        result = io_uring_queue_init(depth, &ring->uring, 0);
        if (result) {
                free(ring);
                return result;
        }
        *ret_ring = ring;
        return 0;
}

static void uring_close(struct os_ring *ring)
{
        if (ring->has_buffers)
                io_uring_unregister_buffers(&ring->uring); /* closing a ring takes a while, and the pages would stay pinned as long */
        io_uring_queue_exit(&ring->uring);
        free(ring);
}

static int uring_register(struct os_ring *ring, const struct os_ring_buffer *buffers, uint32_t count)
{
        struct iovec *vectors = calloc(count, sizeof *vectors);
        int result;

        if (!vectors)
                return -ENOMEM;
        for (uint32_t i = 0; i < count; i++)
                vectors[i] = (struct iovec){ (void *)(uintptr_t)buffers[i].data, (size_t)buffers[i].size };
        result = io_uring_register_buffers(&ring->uring, vectors, count);
        ring->has_buffers = !result;
        free(vectors);
        return result;
}

static void uring_queue(struct os_ring *ring, const struct os_ring_request *request)
{
        struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);

        if (request->is_write && request->buffer >= 0)
                io_uring_prep_write_fixed(sqe, request->fd, request->data, request->size, request->offset, request->buffer);
        else if (request->is_write)
                io_uring_prep_write(sqe, request->fd, request->data, request->size, request->offset);
        else
                io_uring_prep_read(sqe, request->fd, request->data, request->size, request->offset);
        if (request->may_take_pages)
                io_uring_sqe_set_flags(sqe, IOSQE_ASYNC);
        io_uring_sqe_set_data(sqe, request->key);
}

static int uring_submit(struct os_ring *ring)
{
        int result = io_uring_submit_and_wait(&ring->uring, 1);

        return result < 0 ? result : 0;
}

static int uring_wait(struct os_ring *ring)
{
        struct io_uring_cqe *cqe;

        return io_uring_wait_cqe(&ring->uring, &cqe);
}

static uint32_t uring_queued(struct os_ring *ring)
{
        return io_uring_sq_ready(&ring->uring);
}

static bool uring_reap(struct os_ring *ring, void **ret_key, int64_t *ret_result)
{
        struct io_uring_cqe *cqe;

        if (io_uring_peek_cqe(&ring->uring, &cqe))
                return false;
        *ret_key = io_uring_cqe_get_data(cqe);
        *ret_result = cqe->res;
        io_uring_cqe_seen(&ring->uring, cqe);
        return true;
}

void os_offer_ring(void)
{
        static const struct os_ring_calls calls = {
                .open = uring_open, .close = uring_close, .add_buffers = uring_register, .queue = uring_queue,
                .submit = uring_submit, .wait = uring_wait, .queued = uring_queued, .reap = uring_reap,
        };

        os_ring_offer(&calls);
}

#else

#include "os/os.h"

void os_offer_ring(void)
{
}

#endif
