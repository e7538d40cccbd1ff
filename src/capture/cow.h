/*
 * cow.h - copy-on-write capture: the values are fixed at once, the bytes follow.
 *
 *      if (cow_available(&error) == NEBULA_OK) {
 *              cow_start(image, parts, count, &capture, &error);
 *              ... the program changes its memory as it likes ...
 *              cow_wait(capture, -1, &error);          // from any thread
 *              cow_stats(capture, &stats);
 *              cow_free(capture);
 *      }
 *
 * cow_start write-protects the pages of the parts (userfaultfd) and returns.
 * From the first write or cow_wait on, background threads copy block after
 * block of 2 MiB into the image and lift the protection; a write to
 * a block that is not copied yet stops its thread until the fault thread has
 * copied that block. docs/capture.md says why this
 * is exact.
 *
 * What can be protected is decided inside: large parts in private anonymous
 * memory. All others are copied before cow_start returns. What cannot be seen
 * from here must be kept out by the caller: memory that a device writes to
 * (pinned, registered), and I/O that already runs into a part.
 *
 * The parts must stay allocated until cow_wait says OK. Memory that is
 * unmapped, moved (mremap) or emptied (MADV_DONTNEED) before it was copied, or
 * an image in a file whose storage fails meanwhile, makes the capture fail and
 * nothing else: no torn image is called good, no thread crashes. fork is safe:
 * the child's memory is its own and unprotected.
 * In the child every capture has failed, and new ones can be started.
 *
 * Ownership: `image` stays mapped and is written to until cow_wait returned a
 * result other than NEBULA_TIMEOUT, or cow_free returned. It begins on a page
 * boundary and is not itself part of a capture. The capture is the caller's,
 * freed with cow_free, which gives a running one up.
 *
 * Threads: any function from any thread; a capture is freed once. Several
 * captures may run, over the same memory too: each sees the values of its own
 * start. No lock that cow_start holds is one the fault thread takes, save one
 * around a few instructions that touch no caller's memory.
 */
#ifndef NB_CAPTURE_COW_H
#define NB_CAPTURE_COW_H

#include "capture/capture.h"

struct cow_capture;

/* Smaller parts are copied before cow_start returns: it costs no more than protection and faults. */
#define COW_PART_BYTES (256u << 10)

struct cow_stats {
        int64_t blocked_ns;       /* how long cow_start took */
        int64_t copy_ns;          /* from its begin to the last byte; 0 while it runs */
        int64_t cpu_ns;           /* of the background and fault threads */
        int64_t fault_ns;         /* sum over blocks of the time that writers waited for one, without their wake-up */
        uint64_t fault_count;     /* writes that waited */
        uint64_t protected_bytes; /* copied in the background */
        uint64_t direct_bytes;    /* copied in cow_start */
};

/* Asks the kernel once and starts the threads. NEBULA_UNAVAILABLE says what is missing. */
enum nebula_status cow_available(struct nebula_error *error);
/* Never fails for what protection lacks: then everything is copied at once and the capture is complete on return. */
enum nebula_status cow_start(void *image, const struct capture_part *parts, size_t count,
                             struct cow_capture **ret_capture, struct nebula_error *error);
/* cow_start in two halves, for who has time before the image is there. The first looks where the parts lie and fixes nothing: little time
 * may pass until the second, with the same parts. A capture that was only prepared has cost memory, and is freed like any other. */
enum nebula_status cow_prepare(const struct capture_part *parts, size_t count, struct cow_capture **ret_capture,
                               struct nebula_error *error);
void cow_begin(struct cow_capture *capture, void *image, const struct capture_part *parts, size_t count);
/* Before cow_begin: what is copied in the background is summed on the way, into a list that stays until the image is given up. */
void cow_sum(struct cow_capture *capture, const struct image_sums *sums);
/* Puts those of the bytes before `copied`, which cow_copied has returned, in order at the beginning of that list: how many there are.
 * One thread at a time. */
uint32_t cow_summed(struct cow_capture *capture, uint64_t copied);
/* NEBULA_OK: every byte is in the image. NEBULA_TIMEOUT: not yet. NEBULA_FAILED: never, the image is worthless.
 * timeout_ms < 0: no limit. */
enum nebula_status cow_wait(struct cow_capture *capture, int64_t timeout_ms, struct nebula_error *error);
/* So many bytes from the image's beginning are as they will be, as far as this capture writes them; UINT64_MAX: all. */
uint64_t cow_copied(struct cow_capture *capture);
/* When a write last began to wait for a copy, on the clock of os->now_ns; 0: none has. */
int64_t cow_waited_ns(const struct cow_capture *capture);
/* Gives up; cow_wait then reports failure, or OK when it came too late. Does not wait. */
void cow_cancel(struct cow_capture *capture);
void cow_stats(const struct cow_capture *capture, struct cow_stats *ret_stats);
void cow_free(struct cow_capture *capture);

/*
 * Where parts lie in a private mapping of a file in memory (a memfd, tmpfs) and all their pages were written to, and so are the process's
 * own: the same bytes at the same addresses, in anonymous memory from now on, whose pages can be protected, and joined into huge ones.
 * What other threads write meanwhile is there afterwards. Huge pages for them are made in the background after a first call, and a later
 * one moves as much as there is room for, which takes two or three times as long as a copy. What devices write to, or a read that is
 * under way without the processor (io_uring, O_DIRECT), must not be among the parts. True: there is something now that could not be protected before.
 */
bool cow_own(const struct capture_part *parts, size_t count);
/* Whether there may be something to do for it. */
bool cow_has_files(const struct cow_capture *capture);

/* True when most of the bytes lie in huge pages: then protecting them is far cheaper than copying them now. */
bool cow_pays(const struct capture_part *parts, size_t count);

/*
 * Asks for huge pages where `parts` lie, so that the next capture protects them a thousand times faster:
 * MADV_HUGEPAGE for what is yet to be touched, now; the pages that are there are joined in the background
 * (MADV_COLLAPSE), slowly, and only while no capture runs.
 * Call it after each cow_start, or never. Memory that is freed meanwhile is passed over.
 */
void cow_advise_huge(const struct capture_part *parts, size_t count);

#endif
