/*
 * cow_private.h - what the files of the cow capture share.
 *
 *      cow.c          the calls of cow.h
 *      cow_plan.c     which memory can be protected; spans and chunks
 *      cow_maps.c     what the kernel says about an address
 *      cow_engine.c   the userfaultfd, its threads, fork
 *      cow_block.c    copying one block and lifting its protection
 *      cow_fault.c    the fault thread
 *      cow_worker.c   background copies; taking registrations back
 *      cow_huge.c     huge pages
 *      cow_choice.c   whether protecting pays
 *      cow_own.c      what was mapped from a file becomes the process's own
 *      cow_spare.c    huge pages for that
 *
 * A span is a run of whole pages that parts touch, and of the few between two of them; of a
 * huge page it has all or nothing. A block is 2 MiB of address space, aligned,
 * the size of a huge page; it is what is copied and released at once, so that
 * a huge page is never split. A chunk is what one capture wants of one block.
 *
 * Everything that the fault thread or a worker writes lies in blocks of the
 * engine's and the captures' own (cow_map), on stacks of their own, or in
 * images. Those blocks never contain a byte of a part, so neither thread ever
 * waits for a fault that only it could serve. For the same reason they
 * allocate nothing and call nothing that does.
 *
 * Locks, in this order:
 *      start_lock   one cow_start at a time, and against taking registrations back. The fault thread never
 *                   takes it: its holder may wait for a fault.
 *      blocks_lock  the list of live captures, their chunks, and the protection of pages: whoever lifts
 *                   protection holds it from the check that nobody wants the block until the pages are free.
 *                   Its holder touches nothing that can be protected.
 *      huge_lock    what is to be joined into huge pages, and those made ahead; taken with neither of the others held.
 */
#ifndef NB_CAPTURE_COW_PRIVATE_H
#define NB_CAPTURE_COW_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "capture/cow.h"
#include "os/os.h"

#define COW_PAGE_BYTES 4096u
#define COW_BLOCK_BYTES (2u << 20)
#define COW_LIVE_MAX 8u             /* captures at a time; more would only queue for the same memory bus */
#define COW_SPAN_MAX 8192u          /* registered runs of pages; more take the copy way */
#define COW_WORKER_MAX 4u
#define COW_WORKER_NICE 5
#define COW_PENDING_MAX 256u        /* faults under service; others are asked again */
#define COW_AHEAD 8u                 /* runs of blocks that the fault thread copies after a fault: writers go on behind it */
#define COW_RUN 8u                  /* blocks that are copied and freed at once while no writer waits for them */
#define COW_MOVED_MAX 64u
#define COW_HUGE_AFTER_MS 100       /* pages are joined then: not between the files of one checkpoint */
#define COW_LATER_MAX 1024u         /* blocks at the ends of registrations; more are joined after another save */
#define COW_RETIRE_AFTER_MS 1000    /* registrations are kept that long for the next save */
#define COW_RETIRE_BYTES (16u << 20) /* taken back at once: the memory map is locked meanwhile */
#define COW_STACK_BYTES (2u << 20)   /* thread-local variables lie there too, a sanitizer has a megabyte of them */
#define COW_STACK_USED_BYTES (256u << 10)

struct cow_span {
        uint64_t start, end;
};

struct cow_part {
        uint64_t start, end;
        uint64_t reach; /* the largest end of this part and all before it */
        uint64_t image_offset;
        size_t turn; /* its place among the parts as they were given */
};

enum cow_chunk_state { COW_CHUNK_WAITING, COW_CHUNK_COPYING, COW_CHUNK_DONE };

struct cow_chunk {
        uint64_t block;        /* address */
        uint64_t image_offset; /* of the first byte that goes into the image from it or a later one in `order`; UINT64_MAX: none does */
        uint32_t first_span, turn; /* turn: its place in `order` */
        uint32_t state;
        int64_t fault_since_ns; /* when a writer began to wait for it; 0: none does */
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
        uint64_t mapped_bytes; /* of this struct and its arrays, one mapping */
        uint32_t pid;
        _Atomic uint32_t state; /* enum cow_state; waited for with a futex */
        atomic_bool is_begun;   /* workers may copy, once the protection is ready */
        _Atomic int64_t waited_ns; /* when a write last began to wait; 0: none has */
        unsigned char *image;
        struct cow_part *parts; /* by start */
        struct cow_span *spans; /* by start, disjoint */
        struct cow_chunk *chunks; /* by block */
        uint32_t *order;          /* of chunks, as they are copied: as the parts were given */
        struct capture_part *direct; /* what is copied at once */
        size_t part_count, span_count, chunk_count, direct_count;
        int64_t started_ns, blocked_ns;
        uint64_t direct_bytes;
        uint32_t summed_count; /* of the sums: those that cow_summed has put in order */
        bool has_files; /* a part lies in a private mapping of one */
        /* under blocks_lock */
        struct {
                bool ready; /* protected */
                enum cow_failure failure;
                uint64_t failure_address;
                size_t left;    /* chunks not DONE */
                size_t done_turns; /* so many at the beginning of `order` were seen to be DONE */
                struct image_sums sums;
                size_t cursor;  /* where in `order` workers look next: behind the newest fault */
                uint32_t active; /* threads that copy into the image now */
                struct cow_stats stats;
        } blocks;
};

/* A write that waits. The fault thread passes one wherever it can't wait for itself; page 0: it works ahead. */
struct cow_fault {
        uint64_t page;
        int64_t since_ns;
};

/* Memory in blocks: of [begin, made) the pages are there, of [made, end) not yet. */
struct cow_spare {
        unsigned char *begin, *made, *end;
        uint32_t passed; /* calls since the last one that wanted some */
        int64_t next_ns;
};

struct cow_engine {
        uint32_t pid;
        int fd;
        /* Linux 6.4: it protects pages that were never touched, and, since 6.3, across the border of two mappings. */
        bool unpopulated;
        uint64_t probe_page; /* registered, of the engine's own: see cow_events_settle */
        size_t worker_count;
        atomic_bool has_keeper; /* a worker has taken over what is to be done between captures */
        atomic_bool is_broken; /* `fd` is not ours any more */
        /* Odd while the fault thread has read events that it has not yet marked. */
        _Atomic uint32_t read_turn;
        _Atomic uint32_t work_turn; /* futex: changes when there is something to do for a worker */

        pthread_mutex_t start_lock;
        struct {
                struct cow_span registered[COW_SPAN_MAX], merged[COW_SPAN_MAX];
                size_t registered_count;
        } start;

        pthread_mutex_t blocks_lock;
        struct {
                struct cow_capture *live[COW_LIVE_MAX]; /* oldest first */
                size_t live_count;
                struct cow_span moved[COW_MOVED_MAX]; /* new places of what was moved: still registered */
                size_t moved_count;
                int64_t idle_since_ns;
                struct cow_span held; /* by cow_own: writes to it wait until that is done */
        } blocks;

        pthread_mutex_t huge_lock;
        struct {
                struct cow_span work[COW_SPAN_MAX], later[COW_LATER_MAX];
                size_t work_count, later_count;
                int64_t next_ns;
        } huge;
        struct cow_spare spare;

        struct { /* of the fault thread alone */
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
/* Memory in blocks that belong to nobody else, zeroed and present; NULL when there is none. */
void *cow_map(uint64_t size);
void *cow_map_blocks(uint64_t size); /* likewise, never touched */
void cow_unmap(void *data, uint64_t size);

/* The same for a capture and its arrays, whose mapped_bytes are at least `size`: the mapping of the last one where that is large enough. */
struct cow_capture *cow_capture_map(uint64_t size);

void cow_capture_unmap(struct cow_capture *capture);
void cow_workers_wake(struct cow_engine *engine);
/* Makes the next 16 KiB of the caller's stack writable without a fault, before it takes blocks_lock: a stack may
 * hold an array that is being captured. start_lock held, so that no cow_start protects it again. */
void cow_stack_touch(void);

/* cow_maps.c */
struct cow_maps {
        int fd;
        int pagemap_fd; /* < 0: huge pages can't be told from others */
        uint64_t asked_block; /* the last one that cow_maps_is_huge was asked for, and its answer */
        bool asked_is_huge;
        struct os_mapping found; /* the last one that cow_maps_find returned */
        struct os_mapping *list; /* where the kernel answers no single questions */
        size_t count;
};
enum nebula_status cow_maps_open(struct cow_maps *maps, struct nebula_error *error);
/* The mapping that holds `address`, valid until the next call; NULL when there is none. */
const struct os_mapping *cow_maps_find(struct cow_maps *maps, uint64_t address);
/* Whether all of [start, end) is private anonymous memory, of one mapping or several. */
bool cow_maps_is_anonymous(struct cow_maps *maps, uint64_t start, uint64_t end);
/* Whether a block is one huge page. Answers are remembered, so `maps` is opened for each capture. */
bool cow_maps_is_huge(struct cow_maps *maps, uint64_t block);
void cow_maps_close(struct cow_maps *maps);

/* cow.c: start_lock held. Writes to the span, which is registered, wait from now on. 0 or negative. */
int cow_protect(struct cow_engine *engine, const struct cow_span *span);

/* cow_plan.c */
/* A new capture of what can be protected (nothing without an engine), and of the rest. */
enum nebula_status cow_plan(const struct cow_engine *engine, const struct capture_part *parts, size_t count,
                            struct cow_capture **ret_capture, struct nebula_error *error);
/* The first chunk of `block` or behind it, the first part that reaches beyond `address`; the count when there is none. */
size_t cow_chunk_find(const struct cow_capture *capture, uint64_t block);
size_t cow_part_find(const struct cow_capture *capture, uint64_t address);

/* cow_block.c */
/* Copies the blocks [start, end), COW_RUN at most, for every capture that waits for them, and lifts their protection once none does.
 * `fault` is NULL in workers; the block of one that asks is served alone. */
void cow_blocks_serve(struct cow_engine *engine, uint64_t start, uint64_t end, const struct cow_fault *fault);
/* Copies [from, end); not 0: the address where that failed. `sum` gets the sums; NULL, or size 0 then: it was not summed. */
uint64_t cow_copy_piece(unsigned char *to, uint64_t from, uint64_t end, struct image_sum *sum);
/* Let others go on; in the fault thread (`fault` not NULL) by reading events. */
void cow_pause(struct cow_engine *engine, const struct cow_fault *fault, uint32_t *tries);
/* Returns when every change of the address space that took place before the call has been marked in the captures
 * that it spoils. No lock but start_lock held. Not 0: the kernel does not answer, and the engine is broken now. */
int cow_events_settle(struct cow_engine *engine, const struct cow_fault *fault);
/* The program has closed the descriptor: pages are protected no more, so live captures fail, and no other begins. No lock but
 * start_lock held. */
void cow_engine_break(struct cow_engine *engine);
/* blocks_lock held: whether a byte of a part that is not yet in the image lies in [start, end). */
bool cow_capture_misses(const struct cow_capture *capture, uint64_t start, uint64_t end);
/* blocks_lock held: the capture will not be completed. The first reason stays. */
void cow_capture_fail(struct cow_capture *capture, enum cow_failure failure, uint64_t address);
/* blocks_lock held: ends it when nothing of it is left to do. Its owner may free it from then on. */
void cow_capture_settle(struct cow_engine *engine, struct cow_capture *capture);

/* cow_fault.c */
void *cow_fault_main(void *engine);
/* Whether the number stands for our descriptor no more: a program may close what it does not know. What has it now must not be read. */
bool cow_is_closed(const struct cow_engine *engine);
/* In the fault thread: reads and marks what has happened, queues faults. */
void cow_events_drain(struct cow_engine *engine);

/* cow_worker.c */
/* The next blocks to copy, side by side: of the oldest capture first, in each from behind the newest fault. */
bool cow_blocks_next(struct cow_engine *engine, uint64_t *ret_start, uint64_t *ret_end);
void *cow_worker_main(void *engine);

/* cow_huge.c: sorts spans and joins those that touch. Returns how many are left. */
size_t cow_spans_join(struct cow_span *spans, size_t count);
/* cow_huge.c, in one worker: works for about a millisecond; how long to sleep before the next step, -1 when there is nothing to do.
 * is_registered: what was captured last may still be registered. */
int64_t cow_huge_step(struct cow_engine *engine, bool is_registered);

/* cow_spare.c */
/* Blocks whose pages are there, *size bytes at most; how many is in *size then. The caller's, for cow_unmap. NULL: none are there. */
void *cow_spare_take(struct cow_engine *engine, uint64_t *size);
/* So many bytes could have been taken just now, had they been there. */
void cow_spare_want(struct cow_engine *engine, uint64_t size);
/* Makes some, like cow_huge_step. */
int64_t cow_spare_step(struct cow_engine *engine);

#endif
