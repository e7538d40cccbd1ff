/*
 * memory.h - the memory tier: images, their budget, and their reuse.
 *
 * An image is a run of shared memory that a trainer copies one file into: a
 * file named <id>.img in the memory directory, which outlives the agent, or a
 * memfd where there is no such directory or it is too small. Its pages are
 * allocated when it is made, so that a full tier is an error here and never a
 * SIGBUS in the trainer.
 *
 *      memory_reserve       takes bytes of the budget            (lock held)
 *      memory_create        makes the image                      (lock not held: slow)
 *      memory_add           lists it, or memory_unreserve        (lock held)
 *      memory_take          a free image that fits, reused       (lock held)
 *      memory_hold/drop     one more or one less file uses it; at none it is free for reuse
 *      memory_doom          off the list                         (lock held)
 *      memory_release          out of its directory; gives the pages back (lock not held: slow)
 *
 * An image that a loader may have mapped (`exposed`) is never reused: pages that
 * were not yet touched follow later writes to the file. So is one that an earlier
 * agent made: this agent does not know to whom that one handed it.
 *
 * A small file takes the pages that it needs. A descriptor is kept for each image as long as there are plenty
 * (half of RLIMIT_NOFILE); beyond that a named image is opened again for each use. Images that are free for reuse are
 * found by their size: nothing here takes longer the more files a version has.
 *
 * Locks: all fields are guarded by the catalogue's lock, but `data`, which belongs to
 * the one thread that works on the image (its maker, then who seals), and what is atomic.
 */
#ifndef NB_AGENT_MEMORY_MEMORY_H
#define NB_AGENT_MEMORY_MEMORY_H

#include <stdatomic.h>
#include <stdbool.h>

#include "nebula.h"

#define MEMORY_ROUND (2u << 20) /* a huge page: large images can be backed by them */
#ifdef __x86_64__
#define MEMORY_PAGE (4u << 10)
#else
#define MEMORY_PAGE (64u << 10) /* the largest that other kernels have: less is not given back */
#endif
#define MEMORY_SPARE_LEAST (64u << 10) /* a smaller image is made in less time than a spare one takes to be found */
#define MEMORY_ROUND_PART 16 /* so much of a file at most is rounded up, so that one which grows a little finds its images again */
#define MEMORY_PATH_MAX 4200
#define MEMORY_SERVED 16 /* times: joining pages costs what it saves in 2 of them, in 20 where the host of a virtual machine must find the memory */
#define MEMORY_ID_SLOTS 4096u
#define MEMORY_SIZE_SLOTS 256u  /* four to each power of two */
#define MEMORY_SEARCH_MAX 1024u /* free images that are looked at for one that the trainer has mapped: it costs less to map another */
#define MEMORY_MAPPED_MAX 16384u /* images that stay mapped when nobody reads them: a quarter of vm.max_map_count */
#define MEMORY_LEFT (128u << 20) /* stays free of what the machine or the cgroup has: a tensor or two of the trainers */

struct memory;
struct image {
        struct image *next, *previous;
        struct image *next_of_id;                  /* in the table of numbers */
        struct image *next_free, *previous_free;   /* when it is free for reuse */
        struct memory *memory;                     /* that lists it, or made it */
        uint64_t id, capacity;
        int fd;                        /* -1: a named one, which is opened for each use */
        bool is_listed, is_free;
        bool is_counted;               /* its descriptor, in memory->descriptor_count */
        bool named, exposed, restored; /* restored: read back from storage; not part of the retained tier */
        bool from_peer;                /* read back from another node's memory */
        bool spilled;                  /* its pages are a disk's: not of the budget, never reused (spill.h) */
        bool faulting;                 /* the page maker is making or joining its pages; may be lent meanwhile, not released */
        bool pinned, unpinnable;       /* its small pages are looked up once for all that is written from it; tried in vain */
        uint32_t users;                /* files and loans that hold it; 0: free */
        uint64_t owner_nonce;          /* the session that last wrote it */
        const void *job;               /* whose spare it is when free */
        void *data;                    /* mapping, or NULL */
        uint32_t readers;              /* threads that need `data` */
        uint32_t served;               /* how often it was taken again */
        int64_t taken_ns, pause_ns;    /* when it was last, and how long after the time before */
        uint64_t joined;               /* so many bytes from its beginning need no memory_join any more; the page maker's */
        /* So many bytes from the beginning are as they will be; IMAGE_GIVEN_UP: nobody will fill it. Atomic, for who writes
         * them to storage waits without the lock; `copied_turn` changes with it, and is a futex. */
        _Atomic uint64_t copied;
        _Atomic uint32_t copied_turn;
        _Atomic uint32_t sum_count; /* of what was copied so many sums lie behind the file: changes before `copied` does */
};

#define IMAGE_WHOLE (UINT64_MAX - 1)
#define IMAGE_GIVEN_UP UINT64_MAX

struct memory {
        char rival[160], rival_directory[MEMORY_PATH_MAX]; /* who has the memory directory instead, and that; "": nobody */
        char directory[4096]; /* "": memfds only */
        int lock_fd;
        uint64_t budget, used;            /* bytes; images and reservations */
        uint64_t named_limit, named_used;
        uint32_t settling;                /* threads that give pages back, or make spare ones, without the lock: room follows */
        uint32_t wanting;                 /* saves and loads that look for room: none of it goes to spare images meanwhile */
        bool joining;                     /* the page maker comes back by itself to join pages */
        bool settled;
        struct image *images;
        struct image *doomed;             /* off the list; still counted in `used` */
        struct image *by_id[MEMORY_ID_SLOTS];
        struct image *free[MEMORY_SIZE_SLOTS];
        size_t large_count;               /* images of MEMORY_ROUND and more */
        uint32_t descriptor_limit;        /* RLIMIT_NOFILE */
        _Atomic uint32_t descriptor_count; /* of images */
        _Atomic uint32_t mapped_count;
};

/* Takes the directory (creates it, checks owner and mode, locks it). When it can't be had, memfds it is: *ret_why says so. */
void memory_init(struct memory *memory, const char *directory, uint64_t budget, char *ret_why, size_t why_size);
/* How much of the directory images may take, from what is free there and what they have. On failure, a negative errno, that stays. */
int memory_measure(struct memory *memory);
/* Before memory_done: from now on nothing that is dropped is unlinked, unless `forget`. */
void memory_settle(struct memory *memory, bool forget);
/* Removes what is left when `forget`, else leaves named images for the next agent. */
void memory_done(struct memory *memory, bool forget);
uint64_t memory_default_budget(void);
/* A smaller or larger budget from now on; 0: the default. */
void memory_configure(struct memory *memory, uint64_t budget);

uint64_t memory_capacity(uint64_t size); /* with room for the sums of a file, rounded up; never 0 */
/* False: over budget, more than the machine or the cgroup has left, or no descriptor for a memfd. *ret_named: the memory directory has
 * room for it. */
bool memory_reserve(struct memory *memory, uint64_t capacity, bool *ret_named);
void memory_unreserve(struct memory *memory, uint64_t capacity);
/* memfds have taken the descriptors that they may: `text` says so, and what to do. Else it is empty. */
void memory_lacks(const struct memory *memory, char *text, size_t size);
/* Another thread is about to give some back, for nobody in particular: what is doomed and not released is still being made. */
bool memory_follows(const struct memory *memory);
enum nebula_status memory_create(struct memory *memory, uint64_t capacity, bool named, struct image **ret_image,
                                 struct nebula_error *error);
void memory_add(struct memory *memory, struct image *image);
/* Adopts a file that an earlier agent left. Counts it, budget or not. NEBULA_CORRUPT: there is none, or it is none of ours;
 * else it cannot be had just now. */
enum nebula_status memory_adopt(struct memory *memory, uint64_t id, struct image **ret_image, struct nebula_error *error);
/* Gives up one that was adopted and that nobody holds; its file stays for the next agent. */
void memory_leave(struct memory *memory, struct image *image);
struct image *memory_take(struct memory *memory, uint64_t size, uint64_t owner_nonce, const void *job);
struct image *memory_find(const struct memory *memory, uint64_t id);
/* The free images of a job, or of all (NULL), one after the other; the first after NULL. */
struct image *memory_next_free(const struct memory *memory, const struct image *image, const void *job);
/*
 * Has served so often that it pays to join its pages for the next times, may be expected to serve again, and memory_join has not
 * been through it.
 */
bool memory_is_small(const struct image *image, int64_t now_ns);
/* So many of its bytes can lie in huge pages. */
uint64_t memory_join_size(const struct image *image);
void memory_hold(struct image *image);
void memory_drop(struct memory *memory, struct image *image);
void memory_doom(struct memory *memory, struct image *image);
/* Takes one doomed image that nobody is faulting in off the list for memory_release; NULL when there is none. */
struct image *memory_next_doomed(struct memory *memory);
/* Frees it; the caller then calls memory_unreserve(capacity). */
void memory_release(struct memory *memory, struct image *image);
uint64_t memory_free_bytes(const struct memory *memory, const void *job); /* in images that are free for reuse */

/* Serves again, from small pages that nobody is joining: then memory_pin pays with the first write. Lock held. */
bool memory_wants_pin(const struct image *image);
/* For the one thread that works on the image, which has mapped it; whether they are pinned now. And its opposite, at any time when
 * nothing is written from it. */
bool memory_pin(const struct image *image);
void memory_unpin(const struct image *image);

enum nebula_status memory_map(struct image *image, void **ret_data, struct nebula_error *error);
void memory_unmap(struct image *image);
/* Whether it may stay mapped while nobody reads it: it serves again, and there are not too many. */
bool memory_stays_mapped(const struct image *image);
/* One that is mapped for good, in no directory, and given to nobody: its descriptor is not needed any more. */
void memory_close(struct image *image);
void memory_set_copied(struct image *image, uint64_t copied);
/* Until `size` bytes from its beginning are as they will be, or there are some more, or `timeout_ms` have passed: how many there are. */
uint64_t memory_await_copied(struct image *image, uint64_t size, int64_t timeout_ms);
/* Makes the pages of a mapped image. Its bytes stay: a trainer may be copying into it already. */
void memory_prefault(struct image *image);
/*
 * Joins `size` bytes of pages at `offset` into huge ones, whole MEMORY_ROUND both. Their bytes stay, whoever reads or writes them; pages that are
 * in the kernel's use just then stay small. A negative errno when none can be joined on this machine.
 */
int memory_join(const struct image *image, uint64_t offset, uint64_t size);
/* A descriptor that can only read; the image is exposed from now on. */
enum nebula_status memory_open_read_only(struct image *image, int *ret_fd, struct nebula_error *error);

/* Another descriptor of the image, for the trainer that writes it. */
enum nebula_status memory_duplicate(const struct image *image, int *ret_fd, struct nebula_error *error);
/* The named files go, their memory with them once nobody maps it: for an end that does not wait for its threads. */
void memory_unlink_all(struct memory *memory);

/* A random number that is not 0. */
uint64_t memory_random_id(void);
/* "<id>.img": true when `name` is one. */
bool memory_image_name(const char *name, const char *suffix, uint64_t *ret_id);

#endif
