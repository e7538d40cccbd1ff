/*
 * image_pages.h - an image of the memory tier: its pages, its descriptor, and its mapping in the agent.
 *
 * memory.h lists images and gives them to files. An image is not reused while a loader has it open or mapped, because pages
 * that the loader has not touched would show later writes to the file. The kernel knows: the loader's descriptor has a shared
 * lock, which ends with the last descriptor and mapping of any process, so also if the loader is killed. Only images that were
 * lent are asked for.
 */
#ifndef NB_AGENT_MEMORY_IMAGE_PAGES_H
#define NB_AGENT_MEMORY_IMAGE_PAGES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "nebula.h"

#define MEMORY_ROUND (2u << 20) /* a huge page: large images can consist of them */
#ifdef __x86_64__
#define MEMORY_PAGE (4u << 10)
#else
#define MEMORY_PAGE (64u << 10) /* the largest small page of other kernels; less is not given back */
#endif
#define MEMORY_PATH_MAX 4200
/* Uses after which pages are joined: joining costs as much as it saves in 2 uses, or in 20 if a virtual machine's host
 * must find the memory. */
#define MEMORY_SERVED 16
#define MEMORY_MAPPED_MAX 16384u /* images that stay mapped while no thread reads them: a quarter of vm.max_map_count */

struct memory;

struct image {
        struct image *next, *previous;
        struct image *next_of_id;                  /* in the table of ids */
        struct image *next_free, *previous_free;   /* while it is free for reuse */
        struct memory *memory;                     /* the tier that lists it or made it */
        uint64_t id, capacity;
        int fd;                        /* -1: a named image that is opened for each use */
        bool is_listed, is_free;
        bool is_counted;               /* its descriptor counts in memory->descriptor_count */
        bool lent, kept;               /* lent: a loader may still have it. kept: by a trainer, whose tensors may lie in it */
        bool named, exposed, restored; /* restored: read back from storage; not part of the retained tier */
        bool from_peer;                /* restored from another node's memory */
        bool vouched;                  /* its bytes are those that a signature names */
        int64_t scrubbed_ns;           /* when it was compared with its checksums as a whole; 0: not yet (memory_scrub.h) */
        uint64_t scrub_next;           /* the chunk with which that goes on */
        bool is_sparse;                /* it takes `taken` bytes of the budget, and not its capacity */
        bool spilled;                  /* its pages are a disk's: does not count in the budget, never reused (spill.h) */
        bool lacks_pages;              /* the trainer that fills it makes its pages; the page maker makes the rest before another use */
        bool faulting;                 /* the page maker works on its pages: it may be lent meanwhile, but not released */
        bool pinned, unpinnable;       /* pinned: its small pages are registered for writes; unpinnable: that failed */
        uint32_t users;                /* files and loans that use it; 0: free */
        uint64_t owner_nonce;          /* the session that last wrote to it */
        const void *job;               /* the job that may reuse it when it is free */
        uint64_t taken;                /* of a sparse image: bytes whose pages are made, or being made */
        struct image_chunks *chunks;       /* which of its chunks it has (restore_chunks.c), allocated by malloc; or NULL */
        void *data;                    /* its mapping, or NULL */
        uint32_t readers;              /* threads that use `data` */
        uint32_t served;               /* how often it was reused */
        int64_t taken_ns, pause_ns;    /* when it was last reused, and how long after the time before */
        uint64_t joined;               /* bytes from the start that need no image_join any more; only the page maker uses it */
        /* How many bytes from the start are final; IMAGE_GIVEN_UP: no trainer will fill it. Atomic, because the
         * thread that writes them to storage waits without the lock. `copied_turn` is a futex that changes with it. */
        _Atomic uint64_t copied;
        _Atomic uint32_t copied_turn;
        _Atomic uint32_t sum_count; /* sums after the file, of the copied bytes: changes before `copied` does */
};

#define IMAGE_WHOLE (UINT64_MAX - 1)
#define IMAGE_GIVEN_UP UINT64_MAX

/* Returns the image's descriptor, or opens another, which *ret_own says; or a negative errno. */
int image_open(const struct image *image, int flags, bool *ret_own);
/* Duplicates the image's descriptor, for the trainer that writes to it. */
enum nebula_status image_duplicate(const struct image *image, int *ret_fd, struct nebula_error *error);
/* Makes the pages that it lacks. A negative errno: there is no memory for them. */
int image_make_rest(const struct image *image);
/* Makes pages of a sparse image, or gives them back. */
enum nebula_status image_make_pages(const struct image *image, uint64_t offset, uint64_t size, struct nebula_error *error);
void image_drop_pages(const struct image *image, uint64_t offset, uint64_t size);
/* How many bytes of the budget it takes. */
uint64_t image_taken(const struct image *image);

/*
 * Whether joining its pages pays: it has been reused often, will probably be reused again, and image_join has not
 * finished it.
 */
bool image_is_small(const struct image *image, int64_t now_ns);
/* How many of its bytes can lie in huge pages. */
uint64_t image_join_size(const struct image *image);

/* Whether image_pin pays from the first write on: the image is reused, its pages are small, and no thread is joining them. Lock held. */
bool image_wants_pin(const struct image *image);
/* image_pin: for the one thread that works on the image and has mapped it. Returns whether the pages are pinned
 * now. image_unpin: at any time when no write from the image is in flight. */
bool image_pin(const struct image *image);
void image_unpin(const struct image *image);

enum nebula_status image_map(struct image *image, void **ret_data, struct nebula_error *error);
void image_unmap(struct image *image);
/* Whether it may stay mapped while no thread reads it: it is reused, and not too many are mapped. */
bool image_stays_mapped(const struct image *image);
/* Closes the descriptor of an image that stays mapped, has no file and was handed to no process. */
void image_close(struct image *image);
void image_set_copied(struct image *image, uint64_t copied);
/* Waits until `size` bytes from the start are final, or some more are, or `timeout_ms` have passed. Returns how many are final. */
uint64_t image_await_copied(struct image *image, uint64_t size, int64_t timeout_ms);
/* Makes the pages of a mapped image. Its bytes do not change: a trainer may already be copying into it. */
void image_prefault(struct image *image);
/*
 * Joins the pages of `size` bytes at `offset` into huge ones; both are multiples of MEMORY_ROUND. The bytes do not change,
 * and other threads may read and write them meanwhile. Pages that the kernel is using at that moment stay small. A
 * negative errno if this machine cannot join any.
 */
int image_join(const struct image *image, uint64_t offset, uint64_t size);
/* Opens a read-only descriptor of an image that is held. Call without the lock. */
enum nebula_status image_open_read_only(const struct image *image, int *ret_fd, struct nebula_error *error);
/* From now on the image is in use while any process has this descriptor or a mapping of it. Lock held. */
void image_set_lent(struct image *image, int fd);
/* Whether another process may read or write the image. Lock held. */
bool image_is_in_use(struct image *image);
/* Whether another process has the lent image, which the lock of its descriptor `fd` says. */
bool image_is_held(struct image *image, int fd);
/* Unmaps and closes it, and frees what describes it. Its file stays. */
void image_free(struct image *image);

#endif
