/*
 * bulk.h - moving much data between memory and one open file, at the speed of
 * the device.
 *
 * A bounded number of requests is kept in flight by a few threads that read or
 * write. Where the table of system calls has rings (os_offer_ring), one thread keeps a
 * ring full and others check. NEBULA_IO=threads: never a ring.
 *
 * A file opened with OS_DIRECT asks for page-aligned `data` and, for reads, a
 * chunk size of whole pages; the last bytes that do not fill a page go through
 * a bounce buffer, so the file has its exact size and no byte behind
 * data + size is touched. -EINVAL from a direct file means that its file system
 * can't do it: open it again without.
 *
 * Threads: no shared state but the one-time probe and what is pinned. Nothing else that a call
 * starts outlives it.
 */
#ifndef NB_OS_BULK_H
#define NB_OS_BULK_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nebula.h"

#define BULK_PAGE_BYTES 4096u
#define BULK_REQUEST_BYTES (4u << 20) /* large enough for full speed, small enough to spread over threads */
#define BULK_DEPTH 8u                 /* requests in flight: 32 MiB under way */
#define BULK_WRITE_BYTES (16u << 20)  /* a request of a large file that is written */
#define BULK_WRITE_DEPTH 3u
#define BULK_THREADS 8u               /* of the thread engine, the caller included */

enum bulk_engine { BULK_ENGINE_THREADS, BULK_ENGINE_URING };

/* Same shape as store_check: checks one chunk, on any thread; `data` is good during the call, and may not be the chunk's place yet.
 * Not NEBULA_OK stops the read. */
typedef enum nebula_status bulk_check(void *argument, const void *data, uint64_t offset, uint64_t size,
                                      struct nebula_error *error);

/* What is in use. */
enum bulk_engine bulk_engine_used(void);
/* For tests and benchmarks, before threads start; -ENOSYS when this machine lacks it. */
int bulk_engine_force(enum bulk_engine engine);

/*
 * Bytes that become final while they are written: one thread tells pieces of BULK_REQUEST_BYTES as they are, each once, in any
 * order, and ends the feed when all were told or none will be any more. A request of a write is taken when all its pieces
 * were told. bulk_write may be called with it again, also later. Whoever made it frees it when both are done.
 */
struct bulk_feed {
        pthread_mutex_t lock; /* guards the rest */
        pthread_cond_t changed;
        uint64_t chunk_bytes; /* of a request */
        uint8_t *missing;  /* pieces of each chunk that were not told */
        uint64_t *offsets; /* of the chunks that are final, in the order in which they became it */
        size_t count, wanted;
        size_t taken;    /* so many of them, by the bulk_write that runs */
        bool is_ended, is_written; /* is_written: one runs */
};
int bulk_feed_init(struct bulk_feed *feed, uint64_t size); /* 0 or -ENOMEM */
void bulk_feed_done(struct bulk_feed *feed);
void bulk_feed_tell(struct bulk_feed *feed, uint64_t offset);
void bulk_feed_tell_all(struct bulk_feed *feed);
void bulk_feed_end(struct bulk_feed *feed);
/* True: more than `ahead` bytes are final that the bulk_write which runs has not taken. Waits a moment before it says so. */
bool bulk_feed_pace(struct bulk_feed *feed, uint64_t ahead);
/* Until all were told, or none will be: then false. */
bool bulk_feed_wait(struct bulk_feed *feed);

/*
 * Memory to move data through, of huge pages where the machine has them. A disk takes so many pieces of memory in one request, often 254,
 * and pages that were made one by one are as many pieces: 4 MiB of them reach it as four requests, and it gives half of what
 * it gives for the same bytes in huge pages, which is more than a copy takes.
 */
struct bulk_buffer {
        char *data; /* NULL: not open; aligned for huge pages */
        void *map;
        uint64_t map_size;
};
int bulk_buffer_open(struct bulk_buffer *buffer, uint64_t size); /* 0 or a negative errno; zeroed */
/* The same in two steps, the second of which threads may take for parts of their own: its pages. False: they are not huge. */
int bulk_buffer_map(struct bulk_buffer *buffer, uint64_t size);
bool bulk_buffer_make(char *data, uint64_t size);
void bulk_buffer_close(struct bulk_buffer *buffer); /* one that is not open, too, if it was zeroed */

/*
 * Memory that is written from again and again, from its beginning: with io_uring its pages are looked up once, and not with every write,
 * which is most of what a write from small pages costs a processor. They stay where they are until bulk_unpin, which comes before they are
 * unmapped and while nothing is written from them. 0, also when they are pinned already; -ENOSYS without io_uring; -ENOMEM: this user
 * may not pin so much (RLIMIT_MEMLOCK). Nothing but speed depends on it.
 */
int bulk_pin(const void *data, uint64_t size);
void bulk_unpin(const void *data); /* what is not pinned, too */

/*
 * Writes `size` bytes at the beginning of the file and sets its size. Not synced. `feed`: NULL, or what says which
 * bytes are final. 0 or a negative errno; -ECANCELED when the feed ended before all was told.
 */
int bulk_write(int fd, bool is_direct, const void *data, uint64_t size, struct bulk_feed *feed);

/*
 * Reads the first `size` bytes. Each chunk of `chunk_bytes` (the last one
 * shorter) that has arrived is handed to `check`, which may be NULL, while
 * others are on their way. is_new: the memory has no pages yet; threads make them ahead of the requests, and
 * read large direct files through bulk_buffers, 32 MiB in all. 0; a negative errno, -ENODATA when the file is
 * shorter; or the positive status of `check`, which has filled `error`.
 */
int bulk_read(int fd, bool is_direct, void *data, bool is_new, uint64_t size, uint32_t chunk_bytes,
              bulk_check *check, void *argument, struct nebula_error *error);

#endif
