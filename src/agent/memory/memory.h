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

#include "agent/memory/image_pages.h"
#include "agent/memory/memory_files.h"
#include "nebula.h"

#define MEMORY_SPARE_LEAST (64u << 10) /* making a smaller image takes less time than finding a spare one */
#define MEMORY_ROUND_PART 16 /* an image is at most a 16th larger than its file, so that a file which grows a little finds its images again */
#define MEMORY_ID_SLOTS 4096u
#define MEMORY_SIZE_SLOTS 256u  /* four per power of two */
#define MEMORY_SEARCH_MAX 1024u /* free images searched for one that the trainer has mapped: beyond that, mapping another is cheaper */
#define MEMORY_LEFT (128u << 20) /* stays free of the machine's or cgroup's memory, for a tensor or two of the trainers */

struct memory {
        /* The agent that holds the memory directory instead of this one, and the directory; "": none. */
        char rival[160], rival_directory[MEMORY_PATH_MAX];
        char directory[4096]; /* "": memfds only */
        int lock_fd;
        uint64_t budget, used;            /* bytes, of images and reservations */
        uint64_t named_limit, named_used;
        uint64_t lacking;                 /* bytes of images that lack pages */
        uint32_t room_pending;                /* threads that make or give back pages without the lock: room will follow */
        bool spares_due;                  /* some job may need a spare image (policy_want_spares) */
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
/* A whole image that lacks pages; NULL: there is none. The caller calls image_make_rest, and if that succeeds memory_has_pages (lock held). */
struct image *memory_next_lacking(const struct memory *memory);
void memory_has_pages(struct memory *memory, struct image *image);
/* A memfd without pages. The caller reserves bytes of the budget, adds them to image->taken, and makes their pages with image_make_pages. */
enum nebula_status memory_create_sparse(uint64_t capacity, struct image **ret_image, struct nebula_error *error);
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
void memory_hold(struct image *image);
void memory_drop(struct memory *memory, struct image *image);
void memory_doom(struct memory *memory, struct image *image);
/* Takes one doomed image that no thread is making pages for off the list, for memory_release; NULL if there is none. */
struct image *memory_next_doomed(struct memory *memory);
/* Frees the image; the caller then calls memory_unreserve with what image_taken said before. */
void memory_release(struct memory *memory, struct image *image);
uint64_t memory_free_bytes(const struct memory *memory, const void *job); /* in images that are free for reuse */

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
