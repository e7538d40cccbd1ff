/*
 * cow.h - copy-on-write capture: fixes the values at once and copies the bytes
 * afterwards.
 *
 *     if (cow_available(&error) == NEBULA_OK) {
 *             cow_start(image, parts, count, &capture, &error);
 *             ... the program may change its memory ...
 *             cow_wait(capture, -1, &error);          // from any thread
 *             cow_stats(capture, &stats);
 *             cow_free(capture);
 *     }
 *
 * cow_start write-protects the pages of the parts (userfaultfd) and returns.
 * From the first write or cow_wait on, background threads copy block after block
 * of 2 MiB into the image and lift the protection. A thread that writes to a
 * block which is not copied yet waits until the fault thread has copied that
 * block. docs/capture.md says why this is exact.
 *
 * cow_start decides which parts to protect: large ones in private anonymous
 * memory. It copies all others before it returns. The caller must keep out two
 * kinds of memory that cow_start cannot recognise:
 * * memory that a device writes to (pinned, registered);
 * * memory that I/O already in progress writes to.
 *
 * The parts must stay allocated until cow_wait returns OK. The capture fails if
 * a part is unmapped, moved (mremap) or emptied (MADV_DONTNEED) before it was
 * copied, or if the storage of an image in a file fails. A failure never crashes
 * a thread, and a torn image is never reported as OK. After a fork, the child's
 * memory is its own and unprotected; in the child all captures have failed, and
 * new ones can be started.
 *
 * Ownership: `image` must stay mapped until cow_wait returns something other
 * than NEBULA_TIMEOUT, or cow_free returns. It begins on a page boundary and is
 * not part of a capture. The caller owns the capture and frees it with cow_free,
 * which cancels a running one.
 *
 * Threads: any thread may call any function; free a capture once. Several
 * captures may run, over the same memory too; each gets the values of its own
 * start. The fault thread takes only one of the locks that cow_start holds; that
 * lock covers a few instructions that touch no memory of the caller.
 */
#ifndef NB_CAPTURE_COW_H
#define NB_CAPTURE_COW_H

#include "capture/capture.h"

struct cow_capture;

/* cow_start copies smaller parts at once, because protecting them would cost as much. */
#define COW_PART_BYTES (256u << 10)

struct cow_stats {
        int64_t blocked_ns;       /* time in cow_start */
        int64_t copy_ns;          /* from the start to the last byte; 0 while it runs */
        int64_t cpu_ns;           /* of the background threads and the fault thread */
        int64_t fault_ns;         /* time that writers waited, summed over blocks, without their wake-up */
        uint64_t fault_count;     /* writes that had to wait */
        uint64_t protected_bytes; /* bytes copied in the background */
        uint64_t direct_bytes;    /* bytes copied in cow_start */
};

/* Asks the kernel once, and starts the threads. On NEBULA_UNAVAILABLE, `error` says what is missing. */
enum nebula_status cow_available(struct nebula_error *error);
/* The engine's lock is held during a fork. A caller that holds locks of its own then calls this before it registers its handlers.
 * Handlers before a fork run in the reverse order, so that the engine's lock is always the last one. */
void cow_watch_forks(void);
/* If memory cannot be protected, cow_start copies everything at once, and the capture is complete when it returns. */
enum nebula_status cow_start(void *image, const struct capture_part *parts, size_t count,
                             struct cow_capture **ret_capture, struct nebula_error *error);
/* cow_start in two steps, for a caller that has time before the image is there. cow_prepare finds out how the memory
 * of the parts is mapped, and fixes no values. Call cow_begin soon after it, with the same parts. A capture that was
 * only prepared must be freed too. */
enum nebula_status cow_prepare(const struct capture_part *parts, size_t count, struct cow_capture **ret_capture,
                               struct nebula_error *error);
void cow_begin(struct cow_capture *capture, void *image, const struct capture_part *parts, size_t count);
/* Call before cow_begin if the image lacks pages: makes those that its owner and cow_begin write to. The background threads make the others as
 * they copy; if memory is full then, the capture fails. False: memory is full already. */
bool cow_make(struct cow_capture *capture, void *image, uint64_t capacity);
/* Call before cow_begin: checksums of the bytes that are copied in the background go into `sums`, which must live as
 * long as the image is written to. */
void cow_sum(struct cow_capture *capture, const struct image_sums *sums);
/* Sorts the sums of the bytes before `copied`, a result of cow_copied, to the start of that list. Returns how many
 * there are. One thread at a time. */
uint32_t cow_summed(struct cow_capture *capture, uint64_t copied);
/* NEBULA_OK: every byte is in the image. NEBULA_TIMEOUT: not yet. NEBULA_FAILED: the image is useless. timeout_ms < 0: no limit. */
enum nebula_status cow_wait(struct cow_capture *capture, int64_t timeout_ms, struct nebula_error *error);
/* How many bytes from the start of the image are final, as far as this capture writes them; UINT64_MAX: all. */
uint64_t cow_copied(struct cow_capture *capture);
/* When a write last began to wait for a copy, on the clock of os->now_ns; 0: never. */
int64_t cow_waited_ns(const struct cow_capture *capture);
/* Cancels without waiting. cow_wait then reports a failure, or OK if all bytes were copied already. */
void cow_cancel(struct cow_capture *capture);
void cow_stats(const struct cow_capture *capture, struct cow_stats *ret_stats);
void cow_free(struct cow_capture *capture);

/*
 * Moves memory that was mapped from a checkpoint into memory that can be protected. It concerns private mappings of a file
 * in memory (a memfd, tmpfs) of which the program has written every page, so that these pages are the process's own. The
 * same bytes are then at the same addresses, in anonymous memory, whose pages can be protected and joined into huge ones.
 * Writes that other threads make meanwhile are kept.
 *
 * The first call starts making huge pages in the background. A later call moves as many bytes as there are pages for, and
 * takes two or three times as long as a copy. The parts must not contain memory that a device writes to, or that a read in
 * progress writes to without the processor (io_uring, O_DIRECT). True: some memory can now be protected that could not be
 * before.
 */
bool cow_own(const struct capture_part *parts, size_t count);
/* Whether cow_own may have something to do. */
bool cow_has_files(const struct cow_capture *capture);

/* True if most of the bytes lie in huge pages: protecting is then far cheaper than copying. */
bool cow_pays(const struct capture_part *parts, size_t count);

/*
 * Asks for huge pages in `parts`, so that the next capture protects them a thousand times faster. Pages
 * that do not exist yet are advised now (MADV_HUGEPAGE). Existing pages are joined slowly in the
 * background (MADV_COLLAPSE), only while no capture runs. Call it after each cow_start, or never. Memory
 * that is freed meanwhile is skipped.
 */
void cow_advise_huge(const struct capture_part *parts, size_t count);

#endif
