/*
 * cow_private.h - shared by the files of the copy-on-write capture.
 *
 *     cow.c          the calls of cow.h
 *     cow_plan.c     which memory can be protected; spans and chunks
 *     cow_maps.c     asks the kernel how an address is mapped
 *     cow_engine.c   the userfaultfd, its threads, fork
 *     cow_block.c    copies one block and lifts its protection
 *     cow_fault.c    the fault thread
 *     cow_worker.c   background copies; takes registrations back
 *     cow_huge.c     joins pages into huge pages
 *     cow_choice.c   whether protecting is cheaper than copying
 *     cow_own.c      moves written pages of file mappings to anonymous memory
 *     cow_spare.c    makes huge pages for cow_own.c
 *
 * A span is a run of whole pages that parts touch, with the few pages between two neighbouring parts; it contains a
 * huge page as a whole or not at all. A block is 2 MiB of address space, aligned, the size of a huge page. A block is
 * copied and freed as a whole, so a huge page is never split. A chunk is the portion of one block that one capture
 * wants.
 *
 * The fault thread and the workers write only to blocks of the engine and of captures (cow_map), to their own stacks,
 * and to images. Those blocks never contain a byte of a part, so neither kind of thread ever waits for a fault that
 * only it could serve. For the same reason these threads allocate nothing and call nothing that allocates.
 *
 * Locks; their order is in os/lock_order.h:
 *     start_lock   one cow_start at a time, and no taking back of registrations meanwhile. The fault
 *                  thread never takes it, because its holder may wait for a fault.
 *     blocks_lock  the list of live captures, their chunks, and the protection of pages. A thread that
 *                  lifts protection holds it from the check that no capture needs the block until the
 *                  pages are free. Its holder touches no memory that can be protected.
 *     huge_lock    the blocks to join into huge pages, and the huge pages made ahead; taken while
 *                  neither of the others is held.
 */
#ifndef NB_CAPTURE_COW_PRIVATE_H
#define NB_CAPTURE_COW_PRIVATE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "capture/cow.h"
#include "os/lock.h"
#include "os/os.h"

#define COW_PAGE_BYTES 4096u
#define COW_BLOCK_BYTES (2u << 20)
#define COW_LIVE_MAX 8u             /* captures at a time; more would only compete for the same memory bus */
#define COW_SPAN_MAX 8192u          /* registered runs of pages; parts beyond that are copied at once */
#define COW_WORKER_MAX 4u
#define COW_WORKER_NICE 5
#define COW_PENDING_MAX 256u        /* faults in service; threads beyond that fault again */
#define COW_AHEAD 8u                 /* runs of blocks that the fault thread copies after a fault, where writers go on */
#define COW_RUN 8u                  /* blocks copied and freed together while no writer waits for them */
#define COW_MOVED_MAX 64u
#define COW_HUGE_AFTER_MS 100       /* joins pages after such a pause: not between the files of one checkpoint */
#define COW_LATER_MAX 1024u         /* blocks at the ends of registrations; further ones are joined after another save */
#define COW_RETIRE_AFTER_MS 1000    /* keeps registrations so long for the next save */
#define COW_RETIRE_BYTES (16u << 20) /* taken back per step: the memory map is locked meanwhile */
#define COW_STACK_BYTES (2u << 20)   /* thread-local variables lie there too; a sanitizer has a megabyte of them */
#define COW_STACK_USED_BYTES (256u << 10)

struct cow_span {
        uint64_t start, end;
};

struct cow_part {
        uint64_t start, end;
        uint64_t reach; /* the largest end of this part and of all parts before it */
        uint64_t image_offset;
        size_t turn; /* its index among the parts as the caller gave them */
};

enum cow_chunk_state { COW_CHUNK_WAITING, COW_CHUNK_COPYING, COW_CHUNK_DONE };

struct cow_chunk {
        uint64_t block;        /* address */
        uint64_t image_offset; /* of the first byte that goes to the image from this chunk or a later one in `order`; UINT64_MAX: none */
        uint32_t first_span, turn; /* turn: its index in `order` */
        uint32_t state;
        int64_t fault_since_ns; /* when a writer began to wait for it; 0: no writer waits */
        bool is_handed_on;      /* a writer may wait for a page of the block that only another capture had protected */
};

enum cow_state { COW_STATE_RUNNING, COW_STATE_DONE, COW_STATE_FAILED };
enum cow_failure {
        COW_FAILURE_NONE,
        COW_FAILURE_UNMAPPED,
        COW_FAILURE_REMOVED,
        COW_FAILURE_MOVED,
        COW_FAILURE_UNREADABLE,
        COW_FAILURE_IMAGE,
        COW_FAILURE_CANCELLED,
        COW_FAILURE_UNWATCHED,
};

struct cow_capture {
        uint64_t mapped_bytes; /* size of the one mapping of this struct and its arrays */
        uint32_t pid;
        _Atomic uint32_t state; /* enum cow_state; a futex */
        atomic_bool is_begun;   /* workers may copy as soon as the protection is ready */
        _Atomic int64_t waited_ns; /* when a write last began to wait; 0: never */
        unsigned char *image;
        struct cow_part *parts; /* sorted by start */
        struct cow_span *spans; /* sorted by start, disjoint */
        struct cow_chunk *chunks; /* sorted by block */
        uint32_t *order;          /* the chunks in the order of copying: as the parts were given */
        struct capture_part *direct; /* parts that are copied at once */
        size_t part_count, span_count, chunk_count, direct_count;
        int64_t started_ns, blocked_ns;
        uint64_t direct_bytes;
        uint32_t summed_count; /* sums that cow_summed has sorted */
        bool has_files; /* a part lies in a private mapping of a file */
        uint64_t unmade; /* the size of an image that lacks pages; 0: it has all */
        /* guarded by blocks_lock */
        struct {
                bool ready; /* the protection is in place */
                enum cow_failure failure;
                uint64_t failure_address;
                size_t left;    /* chunks that are not DONE */
                size_t done_turns; /* chunks at the start of `order` that are known to be DONE */
                struct image_sums sums;
                size_t cursor;  /* index in `order` at which workers look next: after the newest fault */
                uint32_t active; /* threads that copy into the image now */
                struct cow_stats stats;
        } blocks;
};

/* A write that waits. The fault thread passes it to each function that must read events instead of waiting. If page
 * is 0, the fault thread copies ahead. */
struct cow_fault {
        uint64_t page;
        int64_t since_ns;
};

/* Memory in blocks. The pages of [begin, made) exist, those of [made, end) do not yet. */
struct cow_spare {
        unsigned char *begin, *made, *end;
        uint32_t passed; /* calls since the last one that wanted pages */
        int64_t next_ns;
};

struct cow_engine {
        uint32_t pid;
        int fd;
        /* Linux 6.4: protection covers pages that were never touched and, since 6.3, crosses the border of two mappings. */
        bool unpopulated;
        uint64_t probe_page; /* registered, in the engine's own memory: see cow_events_await */
        size_t worker_count;
        atomic_bool has_idle_worker; /* a worker does the work between captures */
        atomic_bool is_broken; /* the program has closed `fd` */
        /* Odd while the fault thread has read events that it has not marked yet. */
        _Atomic uint32_t read_turn;
        _Atomic uint32_t work_turn; /* futex: changes when a worker has something to do */

        struct lock start_lock;
        struct {
                struct cow_span registered[COW_SPAN_MAX], merged[COW_SPAN_MAX];
                size_t registered_count;
        } start;

        struct lock blocks_lock;
        struct {
                struct cow_capture *live[COW_LIVE_MAX]; /* oldest first */
                size_t live_count;
                struct cow_span moved[COW_MOVED_MAX]; /* where moved pages are now; they are still registered */
                size_t moved_count;
                int64_t idle_since_ns;
                struct cow_span held; /* pages that cow_own moves: writes to them wait for it */
        } blocks;

        struct lock huge_lock;
        struct {
                struct cow_span work[COW_SPAN_MAX], later[COW_LATER_MAX];
                size_t work_count, later_count;
                int64_t next_ns;
        } huge;
        struct cow_spare spare;

        struct { /* used by the fault thread only */
                struct cow_fault faults[COW_PENDING_MAX];
                size_t count;
        } pending;
};

static inline uint64_t cow_page_floor(uint64_t address)
{
        return address & ~(uint64_t)(COW_PAGE_BYTES - 1);
}

static inline uint64_t cow_page_ceil(uint64_t address)
{
        return cow_page_floor(address + COW_PAGE_BYTES - 1);
}

static inline uint64_t cow_block_of(uint64_t address)
{
        return address & ~(uint64_t)(COW_BLOCK_BYTES - 1);
}

/* cow_engine.c */
enum nebula_status cow_engine_get(struct cow_engine **ret_engine, struct nebula_error *error);
/* Zeroed, present memory in whole blocks of its own; NULL if there is none. */
void *cow_map(uint64_t size);
void *cow_map_blocks(uint64_t size); /* the same, not present yet */
void cow_unmap(void *data, uint64_t size);

/* The same for a capture and its arrays of `size` bytes or more. Reuses the last capture's mapping if it is large enough. */
struct cow_capture *cow_capture_map(uint64_t size);

void cow_capture_unmap(struct cow_capture *capture);
void cow_workers_wake(struct cow_engine *engine);
/* Makes the next 16 KiB of the caller's stack writable, so that no fault happens while it holds blocks_lock: a part
 * may lie on a stack. The caller holds start_lock, so that no cow_start protects the stack again. */
void cow_stack_touch(void);

/* cow_maps.c */
struct cow_maps {
        int fd;
        int pagemap_fd; /* < 0: huge pages cannot be distinguished from small ones */
        uint64_t asked_block; /* the last block that cow_maps_is_huge was asked about, and its answer */
        bool asked_is_huge;
        struct os_mapping found; /* the last result of cow_maps_find */
        struct os_mapping *list; /* for kernels that cannot be asked about one address */
        size_t count;
};
enum nebula_status cow_maps_open(struct cow_maps *maps, struct nebula_error *error);
/* The mapping that contains `address`, valid until the next call; NULL if there is none. */
const struct os_mapping *cow_maps_find(struct cow_maps *maps, uint64_t address);
/* Whether all of [start, end) is private anonymous memory, of one mapping or several. */
bool cow_maps_is_anonymous(struct cow_maps *maps, uint64_t start, uint64_t end);
/* Whether a block is one huge page. Remembers answers, so open `maps` for each capture. */
bool cow_maps_is_huge(struct cow_maps *maps, uint64_t block);
void cow_maps_close(struct cow_maps *maps);

/* cow.c. The caller holds start_lock, and the span is registered. Writes to it wait from now on. Returns 0 or a negative errno. */
int cow_protect(struct cow_engine *engine, const struct cow_span *span);

/* cow_plan.c */
/* Makes a capture that protects the parts which can be protected and copies the others. Without an engine it copies all. */
enum nebula_status cow_plan(const struct cow_engine *engine, const struct capture_part *parts, size_t count,
                            struct cow_capture **ret_capture, struct nebula_error *error);
/* The first chunk at or after `block`; the first part that ends above `address`. The count if there is none. */
size_t cow_chunk_find(const struct cow_capture *capture, uint64_t block);
size_t cow_part_find(const struct cow_capture *capture, uint64_t address);

/* cow_block.c */
/* Copies the blocks [start, end), at most COW_RUN, for every capture that waits for them. Lifts their protection as
 * soon as no capture needs them. `fault` is NULL in workers. In the fault thread, the range is the one block of the
 * fault. */
void cow_blocks_serve(struct cow_engine *engine, uint64_t start, uint64_t end, const struct cow_fault *fault);
/* Copies [from, end). Returns 0, or the address at which the copy failed. `sum` gets the sums. If `sum` is NULL, or
 * its size is 0 afterwards, the bytes were not summed. */
uint64_t cow_copy_piece(unsigned char *to, uint64_t from, uint64_t end, struct image_sum *sum);
/* Lets other threads go on; in the fault thread (`fault` not NULL) by reading events. */
void cow_pause(struct cow_engine *engine, const struct cow_fault *fault, uint32_t *tries);
/* Returns when every change of the address space before the call has been marked in the captures that it spoils. The
 * caller holds at most start_lock. Not 0: the kernel does not answer, and the engine is now broken. */
int cow_events_await(struct cow_engine *engine, const struct cow_fault *fault);
/* Call when the program has closed the descriptor. No page is protected any more, so live captures fail and no new
 * one begins. The caller holds at most start_lock. */
void cow_engine_break(struct cow_engine *engine);
/* Whether [start, end) contains a byte of a part that is not in the image yet. The caller holds blocks_lock. */
bool cow_capture_misses(const struct cow_capture *capture, uint64_t start, uint64_t end);
/* Fails the capture; the first reason stays. The caller holds blocks_lock. */
void cow_capture_fail(struct cow_capture *capture, enum cow_failure failure, uint64_t address);
/* Ends the capture if nothing of it is left to do; its owner may then free it. The caller holds blocks_lock. */
void cow_capture_end_if_done(struct cow_engine *engine, struct cow_capture *capture);

/* cow_fault.c */
void *cow_fault_main(void *engine);
/* Whether the descriptor's number no longer stands for our userfaultfd, because the program closed it. The number
 * may then belong to another file, which must not be read. */
bool cow_is_closed(const struct cow_engine *engine);
/* For the fault thread: reads events and marks captures; queues faults. */
void cow_events_drain(struct cow_engine *engine);

/* cow_worker.c */
/* The next neighbouring blocks to copy: from the oldest capture first, and in it from after the newest fault. */
bool cow_blocks_next(struct cow_engine *engine, uint64_t *ret_start, uint64_t *ret_end);
void *cow_worker_main(void *engine);

/* cow_huge.c: sorts spans and joins those that touch. Returns the number of spans that result. */
size_t cow_spans_join(struct cow_span *spans, size_t count);
/* cow_huge.c, in one worker: works for about a millisecond. Returns the time to sleep until the next step; -1 if
 * nothing is left to do. is_registered: the last capture's memory may still be registered. */
int64_t cow_huge_step(struct cow_engine *engine, bool is_registered);

/* cow_spare.c */
/* Takes blocks whose pages exist, at most *size bytes; sets *size to their size. The caller frees them with
 * cow_unmap. NULL if there are none. */
void *cow_spare_take(struct cow_engine *engine, uint64_t *size);
/* Records that so many bytes were wanted and not available. */
void cow_spare_want(struct cow_engine *engine, uint64_t size);
/* Makes some of them; returns the same as cow_huge_step. */
int64_t cow_spare_step(struct cow_engine *engine);

#endif
