/*
 * bulk.h - moves much data between memory and one open file, at the speed of the device.
 *
 * A few threads read or write, so a bounded number of requests is in flight. If the table of
 * system calls has rings (os_offer_ring), one thread keeps a ring full and other threads run
 * the checks.
 *
 * For a file opened with OS_DIRECT, `data` must be page-aligned and a read's chunk size must
 * be whole pages. The bytes after the last whole page go through a bounce buffer, so the file
 * gets its exact size and no byte after data + size is touched. If a direct file returns
 * -EINVAL, its file system has no direct I/O: open the file again without OS_DIRECT.
 *
 * Threads: calls share only the one-time probe and the pinned memory. All threads that a call
 * starts end before it returns.
 */
#ifndef NB_OS_BULK_H
#define NB_OS_BULK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nebula.h"
#include "os/lock.h"

#define BULK_PAGE_BYTES 4096u
#define BULK_REQUEST_BYTES (4u << 20) /* large enough for full speed, small enough to spread over threads */
#define BULK_DEPTH 8u                 /* requests in flight: 32 MiB */
#define BULK_WRITE_BYTES (16u << 20)  /* one write request of a large file */
#define BULK_WRITE_DEPTH 3u
#define BULK_THREADS 8u               /* threads of the thread engine, including the caller */

enum bulk_engine { BULK_ENGINE_THREADS, BULK_ENGINE_URING };

/* Checks one chunk, on any thread. `data` is valid during the call only, and may be a
 * buffer instead of the chunk's place. Any result but NEBULA_OK stops the read. */
typedef enum nebula_status bulk_check(void *argument, const void *data, uint64_t offset, uint64_t size,
                                      struct nebula_error *error);

/* The engine in use. */
enum bulk_engine bulk_engine_used(void);
/* For tests and benchmarks, before threads start. -ENOSYS if this machine lacks the engine. */
int bulk_engine_force(enum bulk_engine engine);

/*
 * Shows a write which bytes are final while another thread still produces them. That thread reports each piece of
 * BULK_REQUEST_BYTES once, in any order. It ends the feed after the last piece, or when no more will come. A write takes a
 * request when all pieces of it were reported. bulk_write may be called several times with one feed, also after the feed
 * ended. The caller that made the feed frees it when producer and writers are done.
 */
struct bulk_feed {
        struct lock lock; /* guards the members below */
        pthread_cond_t changed;
        uint64_t chunk_bytes; /* size of one request */
        uint8_t *missing;  /* per chunk: pieces not reported yet */
        uint8_t *differs;  /* per chunk: 1 if a piece of it is not the same in another file */
        uint64_t *sums;    /* per piece: its CRC-64 */
        uint8_t *has_sum;  /* per piece: 1 if bulk_feed_report_summed reported it */
        uint64_t *offsets; /* the final chunks, in the order in which they became final */
        size_t count, wanted;
        size_t taken;    /* how many offsets the running bulk_write has taken */
        bool is_ended, is_written; /* is_written: a bulk_write is running */
        bool in_order; /* of the running writer (bulk_feed_begin) */
        bool skips_same; /* bulk_write skips chunks that are the same; its caller takes these bytes from the other file */
        atomic_ullong *moved_bytes; /* counts the bytes that a writer has written; NULL: not counted */
};
int bulk_feed_init(struct bulk_feed *feed, uint64_t size); /* 0 or -ENOMEM */
int bulk_feed_init_pieces(struct bulk_feed *feed, uint64_t size); /* the same; each chunk is one piece */
void bulk_feed_done(struct bulk_feed *feed);
void bulk_feed_report(struct bulk_feed *feed, uint64_t offset);
/* bulk_feed_report, and says that another file has the same bytes at this offset: a writer may take them from there. */
void bulk_feed_report_same(struct bulk_feed *feed, uint64_t offset);
/* One of the two, with the CRC-64 of the piece, so that a writer need not compute it again. */
void bulk_feed_report_summed(struct bulk_feed *feed, uint64_t offset, uint64_t crc64, bool is_same);
void bulk_feed_report_all(struct bulk_feed *feed);
void bulk_feed_end(struct bulk_feed *feed);
/* True if more than `ahead` bytes are final that the running bulk_write has not taken. Waits up to PACE_MS for it to catch up first. */
bool bulk_feed_pace(struct bulk_feed *feed, uint64_t ahead);
/* Waits until all pieces were reported, then returns true. Returns false if the feed ended before. */
bool bulk_feed_wait(struct bulk_feed *feed);
/*
 * For a writer other than bulk_write, one at a time: begin, take chunks in any of its threads, finish. A chunk has chunk_bytes, the last
 * one fewer. take returns 0; -EAGAIN if no chunk became final within timeout_ms; -ENODATA if all were taken; -ECANCELED if the feed
 * ended before all pieces were reported. in_order: take gives the lowest chunk first, and bulk_feed_pace holds nobody back: the first chunk of a
 * checkpoint is often the last that becomes final.
 */
void bulk_feed_begin(struct bulk_feed *feed, bool in_order);
int bulk_feed_take(struct bulk_feed *feed, int64_t timeout_ms, uint64_t *ret_offset);
/* Whether bulk_feed_report_same reported all pieces of a taken chunk. */
bool bulk_feed_is_same(struct bulk_feed *feed, uint64_t offset);
/* The CRC-64 of a piece of a taken chunk. False: its producer reported none. */
bool bulk_feed_sum(struct bulk_feed *feed, uint64_t offset, uint64_t *ret_crc64);
void bulk_feed_finish(struct bulk_feed *feed);
/* Tells that so many bytes are written. bulk_write calls it by itself. feed may be NULL. */
void bulk_feed_count(struct bulk_feed *feed, uint64_t bytes);
/* The counter of these bytes; NULL: they are not counted. feed may be NULL. */
atomic_ullong *bulk_feed_counter(struct bulk_feed *feed);

/*
 * A buffer for transfers, in huge pages if the machine has them. A disk accepts a limited number of memory segments per
 * request, often 254, and each small page is a segment. So 4 MiB of small pages become four requests, at half the speed of
 * the same bytes in huge pages. That gain is larger than the cost of one more copy.
 */
struct bulk_buffer {
        char *data; /* NULL if not open; aligned for huge pages */
        void *map;
        uint64_t map_size;
};
int bulk_buffer_open(struct bulk_buffer *buffer, uint64_t size); /* 0 or a negative errno; the memory is zeroed */
/* bulk_buffer_open in two steps. Several threads may call bulk_buffer_make, each for its own part: it makes the
 * pages. False: the pages are not huge. */
int bulk_buffer_map(struct bulk_buffer *buffer, uint64_t size);
bool bulk_buffer_make(char *data, uint64_t size);
void bulk_buffer_close(struct bulk_buffer *buffer); /* may be called with a zeroed struct that was never opened */

/*
 * Pins memory that is written from its start again and again. With io_uring the kernel then looks up the pages once and
 * not per write, which is most of the processor time of a write from small pages. Call bulk_unpin before the memory is
 * unmapped, while no write uses it. Returns 0, also if the memory is pinned already; -ENOSYS without io_uring; -ENOMEM if
 * the user may not pin so much (RLIMIT_MEMLOCK). Pinning changes only the speed.
 */
int bulk_pin(const void *data, uint64_t size);
void bulk_unpin(const void *data); /* does nothing for memory that is not pinned */

/*
 * Writes `size` bytes at the start of the file and sets the file's size. Does not sync. `feed` says which bytes
 * are final; NULL: all are. Returns 0 or a negative errno; -ECANCELED if the feed ended before all pieces were
 * reported.
 */
int bulk_write(int fd, bool is_direct, const void *data, uint64_t size, struct bulk_feed *feed);

/*
 * Reads the first `size` bytes. Passes each chunk of `chunk_bytes` that has arrived to `check`, while other
 * chunks are in flight; the last chunk is shorter, and `check` may be NULL. is_new: the memory has no pages
 * yet. Threads then make the pages ahead of the requests, and read large direct files through bulk_buffers,
 * 32 MiB in all. Returns 0; a negative errno, -ENODATA if the file is shorter; or the positive status of
 * `check`, which has filled `error`.
 */
int bulk_read(int fd, bool is_direct, void *data, bool is_new, uint64_t size, uint32_t chunk_bytes,
              bulk_check *check, void *argument, struct nebula_error *error);

#endif
