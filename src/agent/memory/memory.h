/*
 * memory.h - the memory tier: images, their budget, and their reuse.
 *
 * An image is shared memory into which a trainer copies one file. It is a file <id>.img in the memory directory,
 * which outlives the agent. If there is no such directory or it is too small, the image is a memfd. All pages are
 * allocated when the image is made, so a full tier is an error here and never a SIGBUS in the trainer. If a save waits for the
 * image and there is plenty of memory, the trainer makes the pages itself (`lacks_pages`), by calls that fail if there are none.
 *
 *     memory_reserve       takes bytes of the budget            (lock held)
 *     memory_create        makes the image                      (lock not held: slow)
 *     memory_create_sparse makes an image whose pages are made and reserved later
 *     memory_add           lists it, or memory_unreserve        (lock held)
 *     memory_take          a free image that fits, reused       (lock held)
 *     memory_hold/drop     one more or one less file uses it; without users it is free for reuse
 *     memory_doom          takes it off the list                (lock held)
 *     memory_release       removes the file and gives the pages back (lock not held: slow)
 *
 * An image is not reused while a loader has it open or mapped, because pages that the loader has not touched would
 * show later writes to the file. The kernel knows: the loader's descriptor has a shared lock, which ends with the last
 * descriptor and mapping of any process, so also if the loader is killed. Only images that were lent are asked for.
 *
 * An image into which a process may still write (`exposed`) is never reused. The same holds for images of an earlier agent.
 *
 * A small file takes only the pages that it needs. Each image keeps a descriptor open while there are plenty (half of
 * RLIMIT_NOFILE); beyond that, a named image is opened for each use. Free images are found by their size, so nothing
 * here becomes slower the more files a version has.
 *
 * Locks: the catalogue's lock guards all fields. Two exceptions: `data` belongs to the one thread that works on the
 * image (its maker, then the sealing thread), and some fields are atomic.
 */
#ifndef NB_AGENT_MEMORY_MEMORY_H
#define NB_AGENT_MEMORY_MEMORY_H

#include <stdatomic.h>
#include <stdbool.h>

#include "agent/memory/memory_files.h"
#include "nebula.h"

#define MEMORY_ROUND (2u << 20) /* a huge page: large images can consist of them */
#ifdef __x86_64__
#define MEMORY_PAGE (4u << 10)
#else
#define MEMORY_PAGE (64u << 10) /* the largest small page of other kernels; less is not given back */
#endif
#define MEMORY_SPARE_LEAST (64u << 10) /* making a smaller image takes less time than finding a spare one */
#define MEMORY_ROUND_PART 16 /* an image is at most a 16th larger than its file, so that a file which grows a little finds its images again */
#define MEMORY_PATH_MAX 4200
/* Uses after which pages are joined: joining costs as much as it saves in 2 uses, or in 20 if a virtual machine's host
 * must find the memory. */
#define MEMORY_SERVED 16
#define MEMORY_ID_SLOTS 4096u
#define MEMORY_SIZE_SLOTS 256u  /* four per power of two */
#define MEMORY_SEARCH_MAX 1024u /* free images searched for one that the trainer has mapped: beyond that, mapping another is cheaper */
#define MEMORY_MAPPED_MAX 16384u /* images that stay mapped while no thread reads them: a quarter of vm.max_map_count */
#define MEMORY_LEFT (128u << 20) /* stays free of the machine's or cgroup's memory, for a tensor or two of the trainers */

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
        uint64_t joined;               /* bytes from the start that need no memory_join any more; only the page maker uses it */
        /* How many bytes from the start are final; IMAGE_GIVEN_UP: no trainer will fill it. Atomic, because the
         * thread that writes them to storage waits without the lock. `copied_turn` is a futex that changes with it. */
        _Atomic uint64_t copied;
        _Atomic uint32_t copied_turn;
        _Atomic uint32_t sum_count; /* sums after the file, of the copied bytes: changes before `copied` does */
};

#define IMAGE_WHOLE (UINT64_MAX - 1)
#define IMAGE_GIVEN_UP UINT64_MAX

struct memory {
        /* The agent that holds the memory directory instead of this one, and the directory; "": none. */
        char rival[160], rival_directory[MEMORY_PATH_MAX];
        char directory[4096]; /* "": memfds only */
        int lock_fd;
        uint64_t budget, used;            /* bytes, of images and reservations */
        uint64_t named_limit, named_used;
        uint64_t lacking;                 /* bytes of images that lack pages */
        uint32_t room_pending;                /* threads that make or give back pages without the lock: room will follow */
        uint32_t wanting;                 /* saves and loads that look for room: no spare images are made meanwhile */
        bool joining;                     /* the page maker will come back to join pages */
        bool is_short;                    /* the machine needs the memory: no images are made ahead of time (shortage.h) */
        int64_t look_at_ns;               /* when shortage.h looks again */
        bool removes_nothing;             /* the agent ends, and leaves the files to the next one */
        struct image *images;
        struct image *doomed;             /* images off the list; they still count in `used` */
        struct image *by_id[MEMORY_ID_SLOTS];
        struct image *free[MEMORY_SIZE_SLOTS];
        size_t large_count;               /* images of at least MEMORY_ROUND */
        struct memory_files files;        /* the directory's small files */
        uint32_t descriptor_limit;        /* RLIMIT_NOFILE */
        _Atomic uint32_t descriptor_count; /* descriptors of images */
        _Atomic uint32_t mapped_count;
};

/* Takes the memory directory: creates it, checks owner and mode, locks it. If that fails, memfds are used and *ret_why says why. */
void memory_init(struct memory *memory, const char *directory, uint64_t budget, char *ret_why, size_t why_size);
/* Sets how much of the directory images may take: its free space and their own. On failure returns a negative errno and changes nothing. */
int memory_measure(struct memory *memory);
/* Call before memory_done: from now on dropped images keep their files for the next agent, unless `forget`. */
void memory_stop_removing(struct memory *memory, bool forget);
/* If `forget`, removes all images; otherwise leaves the named ones to the next agent. */
void memory_done(struct memory *memory, bool forget);
/* Sets the budget from now on; 0: the default. */
void memory_configure(struct memory *memory, uint64_t budget);

uint64_t memory_capacity(uint64_t size); /* with room for the file's sums, rounded up; never 0 */
/* False: over budget, or more than the machine or the cgroup has left, or no descriptor for a memfd. *ret_named: the
 * memory directory has room for the image. */
bool memory_reserve(struct memory *memory, uint64_t capacity, bool *ret_named);
void memory_unreserve(struct memory *memory, uint64_t capacity);
/* If memfds have used up their descriptors, `text` says so and what to do. Otherwise `text` is empty. */
void memory_lacks(const struct memory *memory, char *text, size_t size);
/* True if another thread is about to make room: it is releasing images or making a spare one. */
bool memory_follows(const struct memory *memory);
enum nebula_status memory_create(struct memory *memory, uint64_t capacity, bool named, struct image **ret_image,
                                 struct nebula_error *error);
/* The same without pages, which the trainer makes as it fills the image: a first save does not wait for them. */
enum nebula_status memory_create_bare(struct memory *memory, uint64_t capacity, bool named, struct image **ret_image, struct nebula_error *error);
/* Whether there is memory for the image in plenty, and the kernel makes pages without a signal where there is none. */
bool memory_may_lack_pages(const struct memory *memory, uint64_t capacity, bool named);
/* A whole image that lacks pages; NULL: there is none. The caller calls memory_make_rest, and if that succeeds memory_has_pages (lock held). */
struct image *memory_next_lacking(const struct memory *memory);
int memory_make_rest(const struct image *image);
void memory_has_pages(struct memory *memory, struct image *image);
/* A memfd without pages. The caller reserves bytes of the budget, adds them to image->taken, and makes their pages with memory_make. */
enum nebula_status memory_create_sparse(uint64_t capacity, struct image **ret_image, struct nebula_error *error);
/* Makes pages of a sparse image, or gives them back. */
enum nebula_status memory_make(const struct image *image, uint64_t offset, uint64_t size, struct nebula_error *error);
void memory_unmake(const struct image *image, uint64_t offset, uint64_t size);
/* How many bytes of the budget it takes. */
uint64_t memory_taken(const struct image *image);
void memory_add(struct memory *memory, struct image *image);
/* Adopts an image file of an earlier agent. Counts it even beyond the budget. NEBULA_CORRUPT: there is no such file,
 * or it is not one of ours. Any other error: it cannot be opened at the moment. */
enum nebula_status memory_adopt(struct memory *memory, uint64_t id, struct image **ret_image, struct nebula_error *error);
/* Gives up an adopted image without users; its file stays for the next agent. */
void memory_leave(struct memory *memory, struct image *image);
struct image *memory_take(struct memory *memory, uint64_t size, uint64_t owner_nonce, const void *job);
struct image *memory_find(const struct memory *memory, uint64_t id);
/* Iterates over the free images of a job, or of all jobs (NULL). Pass NULL for the first. */
struct image *memory_next_free(const struct memory *memory, const struct image *image, const void *job);
/*
 * Whether joining its pages pays: it has been reused often, will probably be reused again, and memory_join has not
 * finished it.
 */
bool memory_is_small(const struct image *image, int64_t now_ns);
/* How many of its bytes can lie in huge pages. */
uint64_t memory_join_size(const struct image *image);
void memory_hold(struct image *image);
void memory_drop(struct memory *memory, struct image *image);
void memory_doom(struct memory *memory, struct image *image);
/* Takes one doomed image that no thread is making pages for off the list, for memory_release; NULL if there is none. */
struct image *memory_next_doomed(struct memory *memory);
/* Frees the image; the caller then calls memory_unreserve with what memory_taken said before. */
void memory_release(struct memory *memory, struct image *image);
uint64_t memory_free_bytes(const struct memory *memory, const void *job); /* in images that are free for reuse */

/* Whether memory_pin pays from the first write on: the image is reused, its pages are small, and no thread is joining them. Lock held. */
bool memory_wants_pin(const struct image *image);
/* memory_pin: for the one thread that works on the image and has mapped it. Returns whether the pages are pinned
 * now. memory_unpin: at any time when no write from the image is in flight. */
bool memory_pin(const struct image *image);
void memory_unpin(const struct image *image);

enum nebula_status memory_map(struct image *image, void **ret_data, struct nebula_error *error);
void memory_unmap(struct image *image);
/* Whether it may stay mapped while no thread reads it: it is reused, and not too many are mapped. */
bool memory_stays_mapped(const struct image *image);
/* Closes the descriptor of an image that stays mapped, has no file and was handed to no process. */
void memory_close(struct image *image);
void memory_set_copied(struct image *image, uint64_t copied);
/* Waits until `size` bytes from the start are final, or some more are, or `timeout_ms` have passed. Returns how many are final. */
uint64_t memory_await_copied(struct image *image, uint64_t size, int64_t timeout_ms);
/* Makes the pages of a mapped image. Its bytes do not change: a trainer may already be copying into it. */
void memory_prefault(struct image *image);
/*
 * Joins the pages of `size` bytes at `offset` into huge ones; both are multiples of MEMORY_ROUND. The bytes do not change,
 * and other threads may read and write them meanwhile. Pages that the kernel is using at that moment stay small. A
 * negative errno if this machine cannot join any.
 */
int memory_join(const struct image *image, uint64_t offset, uint64_t size);
/* Opens a read-only descriptor of an image that is held. Call without the lock. */
enum nebula_status memory_open_read_only(const struct image *image, int *ret_fd, struct nebula_error *error);
/* From now on the image is in use while any process has this descriptor or a mapping of it. Lock held. */
void memory_set_lent(struct image *image, int fd);
/* Whether another process may read or write the image. Lock held. */
bool memory_is_in_use(struct image *image);

/* Duplicates the image's descriptor, for the trainer that writes to it. */
enum nebula_status memory_duplicate(const struct image *image, int *ret_fd, struct nebula_error *error);
/* Lock held. Removes all named files as soon as the lock is released; their memory follows when no process maps it. For
 * an end that does not wait for threads. */
void memory_unlink_all(struct memory *memory);

/* The path of the file <id><suffix> in the memory directory. */
void memory_path(const struct memory *memory, uint64_t id, const char *suffix, char path[MEMORY_PATH_MAX]);
/* A random number other than 0. */
uint64_t memory_random_id(void);
/* Whether `name` is "<id>" + suffix, such as "<id>.img". */
bool memory_image_name(const char *name, const char *suffix, uint64_t *ret_id);

#endif
