/*
 * Each test fills memory, starts a capture, disturbs it, and compares the image
 * with the values at the start.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "capture/cow.h"
#include "os/os.h"
#include "sum/sum.h"
#include "tap.h"

#define MIB ((size_t)1 << 20)
#define SUMS_BYTES (1 * MIB) /* space for sums after a file */

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

static inline __attribute__((always_inline)) uint64_t mix(uint64_t value)
{
        value += 0x9e3779b97f4a7c15u;
        value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
        value = (value ^ value >> 27) * 0x94d049bb133111ebu;
        return value ^ value >> 31;
}

static unsigned char pattern_byte(uint64_t seed, size_t index)
{
        return (unsigned char)(mix(seed ^ index / 8) >> index % 8 * 8);
}

/* The patterns take most of the time of this test. The sanitizers would multiply it, in the thread sanitizer's case to minutes, and find nothing. */
#if defined(__clang__)
#define UNWATCHED __attribute__((no_sanitize("thread", "address", "undefined")))
#elif defined(__SANITIZE_THREAD__)
#define UNWATCHED __attribute__((no_sanitize("thread")))
#else
#define UNWATCHED
#endif
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HAVE_TSAN 1
#endif
#elif defined(__SANITIZE_THREAD__)
#define HAVE_TSAN 1
#endif
#ifndef HAVE_TSAN
#define HAVE_TSAN 0
#endif

UNWATCHED static void pattern_fill(void *memory, size_t size, uint64_t seed)
{
        unsigned char *bytes = memory;
        size_t i = 0;

        for (; i + 8 <= size; i += 8) {
                uint64_t word = mix(seed ^ i / 8);

                memcpy(bytes + i, &word, 8);
        }
        for (; i < size; i++)
                bytes[i] = pattern_byte(seed, i);
}

UNWATCHED static bool pattern_holds(const void *memory, size_t size, uint64_t seed)
{
        const unsigned char *bytes = memory;
        size_t i = 0;

        for (; i + 8 <= size; i += 8) {
                uint64_t word = mix(seed ^ i / 8);

                if (memcmp(bytes + i, &word, 8)) {
                        printf("# differs at %zu of %zu\n", i, size);
                        return false;
                }
        }
        for (; i < size; i++) {
                if (bytes[i] != pattern_byte(seed, i))
                        return false;
        }
        return true;
}

/* Maps private anonymous memory on a 2 MiB boundary, with or without huge pages. */
static unsigned char *memory_new(size_t size, bool huge)
{
        size_t block = 2 * MIB;
        unsigned char *data = mmap(NULL, size + block, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        unsigned char *begin = (unsigned char *)(((uintptr_t)data + block - 1) & ~(uintptr_t)(block - 1));

        if (data == MAP_FAILED)
                abort();
        if (begin > data)
                munmap(data, (size_t)(begin - data));
        if (data + block > begin)
                munmap(begin + size, (size_t)(data + block - begin));
        madvise(begin, size, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
        return begin;
}

static unsigned char *image_new(size_t size)
{
        unsigned char *image = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

        if (image == MAP_FAILED)
                abort();
        return image;
}

static struct cow_capture *start(void *image, const struct capture_part *parts, size_t count)
{
        struct cow_capture *capture = NULL;
        struct nebula_error error;

        if (cow_start(image, parts, count, &capture, &error) != NEBULA_OK) {
                printf("# cow_start: %s\n", error.message);
                abort();
        }
        return capture;
}

/* Starts a capture of one part, the whole memory. */
static struct cow_capture *start_one(void *image, const void *memory, size_t size)
{
        struct capture_part part = { memory, size, 0 };

        return start(image, &part, 1);
}

static bool complete(struct cow_capture *capture)
{
        struct nebula_error error = { 0 };
        enum nebula_status status = cow_wait(capture, 20000, &error);

        if (status != NEBULA_OK)
                printf("# cow_wait: %s\n", error.message);
        return status == NEBULA_OK;
}

struct writer {
        pthread_t thread;
        unsigned char *memory;
        size_t size;
        int order; /* 0: upwards; 1: downwards; 2: in scattered order */
};

static void *writer_main(void *argument)
{
        struct writer *writer = argument;
        size_t piece = 64 << 10, count = writer->size / piece;

        for (size_t i = 0; i < count; i++) {
                size_t index = writer->order == 0 ? i : writer->order == 1 ? count - 1 - i : i * 7919 % count;

                memset(writer->memory + index * piece, (int)(0xa0 + i % 16), piece);
        }
        return NULL;
}

static void overwrite_all(unsigned char *memory, size_t size)
{
        struct writer writers[4];

        for (int i = 0; i < 4; i++) {
                writers[i] = (struct writer){ .memory = memory + size / 4 * (size_t)i, .size = size / 4, .order = i % 3 };
                pthread_create(&writers[i].thread, NULL, writer_main, &writers[i]);
        }
        for (int i = 0; i < 4; i++)
                pthread_join(writers[i].thread, NULL);
}

static void check_overwriting(bool huge)
{
        size_t size = 48 * MIB;
        unsigned char *memory = memory_new(size, huge), *image = image_new(size);
        struct cow_capture *capture;
        struct cow_stats stats;

        pattern_fill(memory, size, 1);
        capture = start_one(image, memory, size);
        overwrite_all(memory, size);
        CHECK(complete(capture));
        CHECK(pattern_holds(image, size, 1));
        cow_stats(capture, &stats);
        CHECK(stats.protected_bytes == size && stats.direct_bytes == 0);
        CHECK(stats.fault_count > 0 && stats.fault_ns > 0 && stats.copy_ns > 0 && stats.cpu_ns > 0);
        cow_free(capture);
        munmap(memory, size);
        munmap(image, size);
}

static void overwriting_everything_at_once_keeps_the_old_values_on_huge_pages(void)
{
        check_overwriting(true);
}

static void overwriting_everything_at_once_keeps_the_old_values_on_small_pages(void)
{
        check_overwriting(false);
}

static void system_calls_may_write_into_protected_memory(void)
{
        size_t size = 16 * MIB;
        unsigned char *memory = memory_new(size, true), *image = image_new(size);
        struct cow_capture *capture;
        char path[] = "/tmp/nebula-cow-XXXXXX", junk[4096];
        int pipe_fds[2], file = mkstemp(path);
        size_t done = 0;

        REQUIRE(file >= 0 && pipe(pipe_fds) == 0);
        unlink(path);
        memset(junk, 0x5a, sizeof junk);
        for (size_t i = 0; i < size / 2; i += sizeof junk)
                REQUIRE(write(file, junk, sizeof junk) == sizeof junk);
        pattern_fill(memory, size, 2);
        capture = start_one(image, memory, size);
        while (done < size / 2) {
                ssize_t got = pread(file, memory + size / 2 + done, size / 2 - done, (off_t)done);

                REQUIRE(got > 0);
                done += (size_t)got;
        }
        for (size_t at = size / 2; at > 0; at -= 2 * MIB) {
                REQUIRE(write(pipe_fds[1], junk, sizeof junk) == sizeof junk);
                REQUIRE(read(pipe_fds[0], memory + at - 3 * sizeof junk / 2, sizeof junk) == sizeof junk);
        }
        CHECK(complete(capture));
        CHECK(pattern_holds(image, size, 2));
        CHECK(memory[size - 1] == 0x5a && memory[size / 2 - sizeof junk] == 0x5a);
        cow_free(capture);
        close(file);
        close(pipe_fds[0]);
        close(pipe_fds[1]);
        munmap(memory, size);
        munmap(image, size);
}

/* Removes memory during a capture. The capture must have the right bytes, or fail with a reason. */
static void check_vanishing(void (*vanish)(unsigned char *memory, size_t size))
{
        size_t size = 24 * MIB;
        unsigned char *image = image_new(size);
        int failures = 0;

        for (int round = 0; round < 6; round++) {
                unsigned char *memory = memory_new(size, round % 2);
                struct nebula_error error = { 0 };
                struct cow_capture *capture;
                enum nebula_status status;

                pattern_fill(memory, size, 3 + (uint64_t)round);
                capture = start_one(image, memory, size);
                if (round >= 4)
                        CHECK(complete(capture)); /* after the capture it makes no difference */
                vanish(memory, size);
                status = cow_wait(capture, 20000, &error);
                if (status == NEBULA_OK) {
                        CHECK(pattern_holds(image, size, 3 + (uint64_t)round));
                } else {
                        CHECK(status == NEBULA_FAILED && strstr(error.message, "0x"));
                        failures++;
                }
                cow_free(capture);
        }
        CHECK(failures > 0 && failures <= 4);
        munmap(image, size);
}

static void unmap_all(unsigned char *memory, size_t size)
{
        munmap(memory, size);
}

static void unmap_the_end_and_reuse_it(unsigned char *memory, size_t size)
{
        unsigned char *end = memory + size - 2 * MIB;

        munmap(end, 2 * MIB);
        if (mmap(end, 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != end)
                abort();
        memset(end, 7, 2 * MIB);
        munmap(memory, size);
}

static void map_over_the_end(unsigned char *memory, size_t size)
{
        unsigned char *end = memory + size - 3 * MIB;

        if (mmap(end, 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != end)
                abort();
        memset(memory, 9, size);
        munmap(memory, size);
}

static void give_pages_back(unsigned char *memory, size_t size)
{
        madvise(memory + size / 2, size / 2, MADV_DONTNEED);
        memset(memory, 7, size);
        munmap(memory, size);
}

static void give_pages_back_lazily(unsigned char *memory, size_t size)
{
        madvise(memory + size / 2, size / 2, MADV_FREE);
        memset(memory, 7, size);
        munmap(memory, size);
}

static void move_and_write(unsigned char *memory, size_t size)
{
        unsigned char *moved = mremap(memory, size, size * 2, MREMAP_MAYMOVE);

        if (moved == MAP_FAILED)
                abort();
        memset(moved, 7, size * 2);
        munmap(moved, size * 2);
}

static void forbid_reading(unsigned char *memory, size_t size)
{
        mprotect(memory, size, PROT_NONE);
        mprotect(memory, size, PROT_READ | PROT_WRITE);
        memset(memory, 8, size);
        mprotect(memory, size, PROT_NONE);
        munmap(memory, size);
}

static void shrink(unsigned char *memory, size_t size)
{
        if (mremap(memory, size, size / 2, 0) != memory)
                abort();
        memset(memory, 7, size / 2);
        munmap(memory, size / 2);
}

static void memory_that_is_unmapped_fails_the_capture_and_nothing_else(void)
{
        check_vanishing(unmap_all);
}

static void memory_that_is_replaced_is_never_mistaken_for_the_old_one(void)
{
        check_vanishing(unmap_the_end_and_reuse_it);
        check_vanishing(map_over_the_end);
}

static void pages_given_back_fail_the_capture_and_nothing_else(void)
{
        check_vanishing(give_pages_back);
        check_vanishing(give_pages_back_lazily);
}

static void memory_that_is_resized_fails_the_capture_and_nothing_else(void)
{
        check_vanishing(move_and_write);
        check_vanishing(shrink);
}

static void memory_that_becomes_unreadable_does_not_crash_the_program(void)
{
        size_t size = 8 * MIB;
        unsigned char *image = image_new(size);

        for (int round = 0; round < 4; round++) {
                unsigned char *memory = memory_new(size, round % 2);
                struct cow_capture *capture;

                pattern_fill(memory, size, 11);
                capture = start_one(image, memory, size);
                forbid_reading(memory, size);
                if (cow_wait(capture, 20000, NULL) == NEBULA_OK)
                        CHECK(pattern_holds(image, size, 11));
                cow_free(capture);
        }
        munmap(image, size);
}

/*
 * fault (Memory): Memory runs full while a new image gets its pages.
 * result: That version fails, and the error says so. Training goes on, and later saves find memory again.
 */
/* As if the disk of a spilled image fails. */
static void an_image_that_cannot_be_written_is_not_blamed_on_the_memory(void)
{
        size_t size = 8 * MIB;
        unsigned char *memory = memory_new(size, false), *image;
        struct nebula_error error = { 0 };
        struct cow_capture *capture;
        int fd = os->memfd("test");

        REQUIRE(fd >= 0 && ftruncate(fd, (off_t)(size / 2)) == 0);
        image = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        REQUIRE(image != MAP_FAILED);
        pattern_fill(memory, size, 13);
        capture = start_one(image, memory, size);
        CHECK(cow_wait(capture, 20000, &error) == NEBULA_FAILED);
        CHECK(strstr(error.message, "the storage of the image is full") != NULL);
        cow_free(capture);
        CHECK(pattern_holds(memory, size, 13));
        memset(memory, 1, size);
        munmap(memory, size);
        munmap(image, size);
        close(fd);
}

static size_t pages_of(int fd)
{
        struct stat stat;

        return fstat(fd, &stat) ? SIZE_MAX : (size_t)stat.st_blocks * 512 / 4096;
}

static void an_image_gets_its_pages_while_the_bytes_are_copied(void)
{
        size_t size = 8 * MIB, capacity = 2 * size + 4 * 4096;
        unsigned char *memory = memory_new(2 * size, false), *image;
        struct capture_part parts[] = { { memory + size, size, 3 * 4096 + size }, { memory, size, 4096 } };
        struct nebula_error error = { 0 };
        struct cow_capture *capture;
        int fd = os->memfd("test");

        REQUIRE(fd >= 0 && ftruncate(fd, (off_t)capacity) == 0);
        image = mmap(NULL, capacity, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        REQUIRE(image != MAP_FAILED);
        pattern_fill(memory, 2 * size, 14);
        REQUIRE(cow_prepare(parts, 2, &capture, &error) == NEBULA_OK);
        CHECK(cow_make(capture, image, capacity) && pages_of(fd) == 4); /* before, between and behind the parts */
        cow_begin(capture, image, parts, 2);
        CHECK(pages_of(fd) == 4);
        CHECK(cow_wait(capture, 20000, &error) == NEBULA_OK && pages_of(fd) == capacity / 4096);
        cow_free(capture);
        CHECK(!memcmp(image + 4096, memory, size) && !memcmp(image + 3 * 4096 + size, memory + size, size));
        munmap(memory, 2 * size);
        munmap(image, capacity);
        close(fd);
}

static const struct os_table *real_os;

static int refuse_pages(void *data, uint64_t size, enum os_advice advice)
{
        return advice == OS_ADVISE_POPULATE_WRITE ? -EFAULT : real_os->advise(data, size, advice);
}

/* fault: as an_image_that_cannot_be_written_is_not_blamed_on_the_memory */
static void pages_that_the_machine_refuses_are_not_written_to(void)
{
        size_t size = 8 * MIB;
        unsigned char *memory = memory_new(size, false), *image = image_new(size);
        struct capture_part part = { memory, size, 0 };
        struct os_table table = *os;
        struct nebula_error error = { 0 };
        struct cow_capture *capture;

        real_os = os;
        REQUIRE(cow_prepare(&part, 1, &capture, &error) == NEBULA_OK);
        table.advise = refuse_pages;
        os = &table;
        CHECK(!cow_make(capture, image, size + 4096) && !capture_populate(image, size) && !capture_make_pages(image, 0, 1));
        os = real_os;
        cow_free(capture);
        munmap(memory, size);
        munmap(image, size);
}

static void children_of_fork_neither_hang_nor_disturb_the_capture(void)
{
        if (HAVE_TSAN) /* the sanitizer allows no threads after fork */
                return;
        size_t size = 32 * MIB;
        unsigned char *image = image_new(size);

        for (int round = 0; round < 2; round++) {
                unsigned char *memory = memory_new(size, round % 2);
                struct cow_capture *capture;
                pid_t children[2];
                int exit_status;

                pattern_fill(memory, size, 5);
                capture = start_one(image, memory, size);
                for (int i = 0; i < 2; i++) {
                        children[i] = fork();
                        if (children[i] == 0) {
                                bool right = i == 0 ? pattern_holds(memory, size, 5) :
                                                      memory[0] == 0x22 && memory[size - 1] == pattern_byte(5, size - 1);
                                struct cow_capture *own;

                                memset(memory, 0x11, size);
                                right &= i == 0 || cow_wait(capture, 1000, NULL) != NEBULA_TIMEOUT;
                                /* The child may save too. */
                                own = start_one(image_new(size), memory, size);
                                right &= complete(own);
                                cow_free(own);
                                _exit(right ? 0 : 1);
                        }
                        REQUIRE(children[i] > 0);
                        memset(memory + size / 2 * (size_t)i, 0x22, size / 2);
                }
                CHECK(complete(capture));
                CHECK(pattern_holds(image, size, 5));
                for (int i = 0; i < 2; i++)
                        CHECK(waitpid(children[i], &exit_status, 0) == children[i] && exit_status == 0);
                CHECK(memory[0] == 0x22 && memory[size - 1] == 0x22);
                cow_free(capture);
                munmap(memory, size);
        }
        munmap(image, size);
}

static void overlapping_captures_each_see_their_own_start(void)
{
        size_t size = 32 * MIB;
        unsigned char *memory = memory_new(size, true), *images[4];
        struct cow_capture *captures[4];

        pattern_fill(memory, size, 20);
        for (int i = 0; i < 4; i++) {
                /* The second half changes from start to start; the third capture begins in the middle of a page. */
                size_t from = i == 2 ? 5 * MIB + 123 : 0;
                struct capture_part part = { memory + from, size - from, from };

                pattern_fill(memory + size / 2, size / 2, 20 + (uint64_t)i);
                images[i] = image_new(size);
                captures[i] = start(images[i], &part, 1);
        }
        memset(memory, 0, size);
        for (int i = 3; i >= 0; i--) {
                if (i == 2) { /* bytes before its part do not belong to it */
                        pattern_fill(memory, size, 20);
                        memcpy(images[i], memory, 5 * MIB + 123);
                }
                CHECK(complete(captures[i]));
                CHECK(pattern_holds(images[i], size / 2, 20));
                CHECK(pattern_holds(images[i] + size / 2, size / 2, 20 + (uint64_t)i));
                cow_free(captures[i]);
                munmap(images[i], size);
        }
        munmap(memory, size);
}

static void more_captures_than_are_followed_are_copied_at_once(void)
{
        enum { COUNT = 24 };
        size_t size = 4 * MIB;
        unsigned char *memory = memory_new(size, true), *images[COUNT];
        struct cow_capture *captures[COUNT];

        for (int i = 0; i < COUNT; i++) {
                pattern_fill(memory, size, (uint64_t)i);
                images[i] = image_new(size);
                captures[i] = start_one(images[i], memory, size);
        }
        for (int i = 0; i < COUNT; i++) {
                CHECK(complete(captures[i]));
                CHECK(pattern_holds(images[i], size, (uint64_t)i));
                cow_free(captures[i]);
                munmap(images[i], size);
        }
        munmap(memory, size);
}

static void small_and_unaligned_parts_are_exact(void)
{
        enum { COUNT = 3000 };
        static struct capture_part parts[COUNT + 4];
        size_t capacity = 64 * MIB, used = 0, image_size = 0;
        unsigned char *memory = memory_new(capacity, false), *image = image_new(128 * MIB);
        struct cow_capture *capture;
        uint64_t state = 99;

        for (int i = 0; i < COUNT; i++) {
                state = mix(state);
                parts[i].data = memory + used;
                parts[i].size = state % 100 == 0 ? 256 * 1024 + state % 700001 : state % 8192;
                parts[i].image_offset = image_size;
                pattern_fill(memory + used, parts[i].size, (uint64_t)i);
                used += parts[i].size + state % 3;
                image_size += (parts[i].size + 63) & ~(size_t)63;
        }
        /* Parts that overlap: the same bytes twice, and parts within parts. */
        parts[COUNT] = (struct capture_part){ memory + 33, used - 100, image_size };
        parts[COUNT + 1] = (struct capture_part){ memory + 333333, MIB, image_size + used };
        parts[COUNT + 2] = (struct capture_part){ memory + 333335, 3 * MIB, image_size + used + MIB };
        parts[COUNT + 3] = (struct capture_part){ memory, 0, 0 };
        REQUIRE(used <= capacity && image_size + used + 4 * MIB <= 128 * MIB);
        unsigned char *before = malloc(used);
        memcpy(before, memory, used);
        capture = start(image, parts, COUNT + 4);
        memset(memory, 0xee, capacity);
        CHECK(complete(capture));
        for (int i = 0; i < COUNT; i++)
                CHECK(pattern_holds(image + parts[i].image_offset, parts[i].size, (uint64_t)i));
        for (int i = COUNT; i < COUNT + 3; i++)
                CHECK(memcmp(image + parts[i].image_offset, before + ((const unsigned char *)parts[i].data - memory),
                             parts[i].size) == 0);
        cow_free(capture);
        free(before);
        munmap(memory, capacity);
        munmap(image, 128 * MIB);
}

static void memory_that_was_never_touched_reads_as_zero(void)
{
        size_t size = 16 * MIB;
        unsigned char *image = image_new(size);

        for (int round = 0; round < 4; round++) {
                unsigned char *memory = memory_new(size, round % 2);
                struct cow_capture *capture;
                bool zero = true;

                memset(image, 1, size);
                if (round >= 2) /* the zero page, huge or not, is mapped */
                        for (size_t i = 0; i < size; i += 4096)
                                zero &= ((volatile unsigned char *)memory)[i] == 0;
                capture = start_one(image, memory, size);
                memset(memory, 0x77, size);
                CHECK(complete(capture));
                for (size_t i = 0; i < size; i++)
                        zero &= image[i] == 0;
                CHECK(zero);
                cow_free(capture);
                munmap(memory, size);
        }
        munmap(image, size);
}

static void memory_that_others_can_write_is_copied_at_once(void)
{
        size_t size = 4 * MIB;
        char path[] = "/tmp/nebula-cow-XXXXXX";
        int file = mkstemp(path);
        unsigned char *image = image_new(4 * size);
        struct capture_part parts[3];
        struct cow_capture *capture;
        struct cow_stats stats;

        REQUIRE(file >= 0 && ftruncate(file, (off_t)size) == 0);
        unlink(path);
        parts[0].data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        parts[1].data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        parts[2].data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
        for (size_t i = 0; i < 3; i++) {
                parts[i].size = size;
                parts[i].image_offset = i * size;
                pattern_fill((void *)(uintptr_t)parts[i].data, size, i);
        }
        capture = start(image, parts, 3);
        cow_stats(capture, &stats);
        CHECK(stats.direct_bytes == 3 * size && stats.protected_bytes == 0);
        CHECK(cow_wait(capture, 0, NULL) == NEBULA_OK);
        for (size_t i = 0; i < 3; i++) {
                CHECK(pattern_holds(image + i * size, size, i));
                munmap((void *)(uintptr_t)parts[i].data, size);
        }
        cow_free(capture);
        close(file);
        munmap(image, 4 * size);
}

static void a_cancelled_capture_fails_and_frees_the_memory(void)
{
        size_t size = 64 * MIB;
        unsigned char *memory = memory_new(size, false), *image = image_new(size);
        struct nebula_error error = { 0 };
        struct cow_capture *capture;
        enum nebula_status status;

        pattern_fill(memory, size, 1);
        capture = start_one(image, memory, size);
        cow_cancel(capture);
        overwrite_all(memory, size);
        status = cow_wait(capture, 10000, &error);
        CHECK(status == NEBULA_FAILED && strstr(error.message, "cancelled"));
        cow_free(capture);
        /* cow_free of a running capture cancels it, too. After that the caller may use the image. */
        cow_free(start_one(image, memory, size));
        munmap(image, size);
        memset(memory, 4, size);
        munmap(memory, size);
        /* The cancelled captures do not affect the next one. */
        check_overwriting(false);
}

static void a_wait_that_is_too_short_says_so(void)
{
        size_t size = 128 * MIB;
        unsigned char *memory = memory_new(size, false), *image = image_new(size);
        struct nebula_error error = { 0 };
        struct cow_capture *capture;

        pattern_fill(memory, size, 1);
        capture = start_one(image, memory, size);
        CHECK(cow_wait(capture, 0, &error) == NEBULA_TIMEOUT);
        CHECK(complete(capture));
        cow_free(capture);
        munmap(memory, size);
        munmap(image, size);
}

static void an_image_off_a_page_boundary_is_refused(void)
{
        struct capture_part part = { "x", 1, 0 };
        struct cow_capture *capture = NULL;
        unsigned char *image = image_new(4096);

        CHECK(cow_start(image + 64, &part, 1, &capture, NULL) == NEBULA_INVALID && !capture);
        munmap(image, 4096);
}

/* An array on a thread's own stack: the pages that cow_start itself runs on are among the protected ones. */
static void *stack_main(void *argument)
{
        volatile unsigned char array[4 * MIB];
        unsigned char *image = argument;
        bool right = true;

        for (int round = 0; round < 8; round++) {
                struct cow_capture *captures[2];

                pattern_fill((void *)(uintptr_t)array, sizeof array, (uint64_t)round);
                for (size_t i = 0; i < 2; i++)
                        captures[i] = start_one(image + i * sizeof array, (void *)(uintptr_t)array, sizeof array);
                memset((void *)(uintptr_t)array, 1, sizeof array);
                for (size_t i = 0; i < 2; i++) {
                        right &= complete(captures[i]);
                        right &= pattern_holds(image + i * sizeof array, sizeof array, (uint64_t)round);
                        cow_free(captures[i]);
                }
        }
        return right ? argument : NULL;
}

static void arrays_on_a_stack_can_be_captured(void)
{
        unsigned char *image = image_new(8 * MIB);
        pthread_attr_t attributes;
        pthread_t thread;
        void *result = NULL;

        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, 8 * MIB);
        REQUIRE(pthread_create(&thread, &attributes, stack_main, image) == 0);
        pthread_join(thread, &result);
        CHECK(result == image);
        pthread_attr_destroy(&attributes);
        munmap(image, 8 * MIB);
}

static bool can_join_pages(void)
{
        unsigned char *probe = memory_new(2 * MIB, false);
        bool can;

        memset(probe, 1, 2 * MIB);
        can = !madvise(probe, 2 * MIB, MADV_HUGEPAGE) && !madvise(probe, 2 * MIB, MADV_COLLAPSE);
        munmap(probe, 2 * MIB);
        if (!can)
                printf("# this kernel can't join pages\n");
        return can;
}

static size_t count_huge(const unsigned char *memory, size_t size)
{
        int fd = os->open("/proc/self/pagemap", OS_READ);
        size_t count = 0;

        for (size_t at = 0; at < size; at += 2 * MIB)
                count += os->huge_page(fd, (uintptr_t)memory + at) == 1;
        os->close(fd);
        return count;
}

static void check_joining(size_t offset)
{
        size_t size = 8 * MIB;
        unsigned char *memory = memory_new(size, false);
        struct capture_part part = { memory + offset, size - 2 * offset, 0 };

        pattern_fill(memory, size, 1);
        CHECK(count_huge(memory, size) == 0);
        cow_advise_huge(&part, 1);
        for (int i = 0; i < 2000 && count_huge(memory, size) < 4; i++) /* the engine ends registrations of earlier tests first */
                os->sleep_ms(5);
        CHECK(count_huge(memory, size) == 4);
        CHECK(pattern_holds(memory, size, 1));
        munmap(memory, size);
}

static void memory_that_is_saved_moves_to_huge_pages(void)
{
        if (can_join_pages())
                check_joining(0);
}

/* Like the files of one checkpoint: the second call comes before the work of the first has begun. */
static void memory_of_several_calls_moves_to_huge_pages(void)
{
        size_t size = 8 * MIB;
        unsigned char *memory[2];

        if (!can_join_pages())
                return;
        for (int i = 0; i < 2; i++) {
                memory[i] = memory_new(size, false);
                pattern_fill(memory[i], size, 1);
        }
        for (int i = 0; i < 2; i++) {
                struct capture_part part = { memory[i], size, 0 };

                cow_advise_huge(&part, 1);
        }
        for (int i = 0; i < 2000 && count_huge(memory[0], size) + count_huge(memory[1], size) < 8; i++)
                os->sleep_ms(5);
        for (int i = 0; i < 2; i++) {
                CHECK(count_huge(memory[i], size) == 4);
                CHECK(pattern_holds(memory[i], size, 1));
                munmap(memory[i], size);
        }
}

static void the_ends_of_what_is_saved_move_too(void)
{
        if (can_join_pages())
                check_joining(64);
}

/* Like the memory of an allocator: each part has its own mapping. The pages between parts are not advised for huge pages, and some were
 * never touched. Saves come so often that the engine never ends their registration. */
static void the_ends_of_parts_in_several_mappings_move_between_saves(void)
{
        size_t size = 8 * MIB, first = 3 * MIB - 4096, gap = 8192;
        unsigned char *memory = memory_new(size, false), *image = image_new(size);
        struct capture_part parts[] = { { memory, first, 0 }, { memory + first + gap, size - first - gap, first } };
        uint32_t abilities = 0;
        int fd = os->uffd_open(&abilities);

        os->close(fd);
        if (!can_join_pages() || !(abilities & OS_UFFD_UNPOPULATED)) {
                printf("# this kernel protects one mapping at a time\n");
                return;
        }
        for (int i = 0; i < 2; i++) {
                pattern_fill((void *)(uintptr_t)parts[i].data, parts[i].size, 1);
                madvise((void *)(uintptr_t)parts[i].data, parts[i].size, MADV_HUGEPAGE);
        }
        for (int i = 0; i < 240 && count_huge(memory, size) < 4; i++) {
                struct cow_capture *capture = start(image, parts, 2);

                memset(memory + first, i, gap);
                CHECK(complete(capture));
                cow_free(capture);
                CHECK(pattern_holds(image, parts[0].size, 1) && pattern_holds(image + first, parts[1].size, 1));
                cow_advise_huge(parts, 2);
                os->sleep_ms(250);
        }
        CHECK(count_huge(memory, size) == 4);
        munmap(memory, size);
        munmap(image, size);
}

/* Tensors of one size in an allocator's own mappings: each begins, and ends, inside a block of small pages. */
static void memory_of_huge_pages_with_small_ends_is_protected(void)
{
        enum { COUNT = 32, SIZE = 4 << 20 }; /* so that the engine would look only at beginnings, if it did not look into parts */
        size_t stride = SIZE + (2u << 20);
        unsigned char *memory = memory_new(COUNT * stride, false);
        struct capture_part parts[COUNT];

        for (size_t i = 0; i < COUNT; i++) {
                unsigned char *begin = memory + i * stride + (1u << 20);

                madvise(memory + i * stride + (2u << 20), SIZE - (2u << 20), MADV_HUGEPAGE);
                memset(begin, 1, SIZE);
                parts[i] = (struct capture_part){ .data = begin, .size = SIZE };
        }
        if (count_huge(memory, COUNT * stride) < COUNT)
                printf("# no huge pages here\n");
        else
                CHECK(cow_pays(parts, COUNT));
        madvise(memory, COUNT * stride, MADV_NOHUGEPAGE);
        munmap(memory, COUNT * stride);
        memory = memory_new(COUNT * stride, false);
        for (size_t i = 0; i < COUNT; i++) {
                parts[i].data = memory + i * stride + (1u << 20);
                memset(memory + i * stride + (1u << 20), 1, SIZE);
        }
        CHECK(!cow_pays(parts, COUNT));
        munmap(memory, COUNT * stride);
}

/* Parts begin and end inside huge pages. The test writes to the other bytes of these pages while the capture runs. True: a write had to
 * wait. */
static bool write_beside(size_t count)
{
        size_t stride = 8 * MIB, size = count * stride, begin = 3 * MIB - 4160, length = 4 * MIB;
        unsigned char *memory = memory_new(size, true), *image = image_new(size);
        struct capture_part parts[16];
        struct cow_stats stats = { 0 };
        uint64_t waits = 0;

        pattern_fill(memory, size, 1);
        for (size_t i = 0; i < count; i++)
                parts[i] = (struct capture_part){ memory + i * stride + begin, length, i * length };
        for (int round = 0; round < 5 && count_huge(memory, size) == size / (2 * MIB); round++) {
                struct cow_capture *capture = start(image, parts, count);

                for (size_t i = 0; i < count; i++) {
                        memset(memory + i * stride, 7, begin);
                        memset(memory + i * stride + begin + length, 7, stride - begin - length);
                }
                CHECK(cow_wait(capture, -1, NULL) == NEBULA_OK);
                cow_stats(capture, &stats);
                waits += stats.fault_count;
                cow_free(capture);
                CHECK(count_huge(memory, size) == size / (2 * MIB));
                for (size_t i = 0; i < count; i++)
                        CHECK(memcmp(image + i * length, parts[i].data, length) == 0);
                CHECK(stats.protected_bytes + stats.direct_bytes == count * length);
        }
        if (!stats.protected_bytes)
                printf("# no huge pages here\n");
        else
                CHECK((stats.direct_bytes > 0) == (count == 1));
        munmap(memory, size);
        munmap(image, size);
        return waits > 0;
}

static void a_huge_page_that_others_share_stays_whole(void)
{
        write_beside(16);
}

static void a_write_beside_what_is_saved_does_not_wait_when_little_lies_there(void)
{
        CHECK(!write_beside(1));
}

/* The pages between parts are protected with the parts. The program writes to them, but not yet to the parts. */
static void a_write_between_parts_begins_no_copying(void)
{
        size_t size = 8 * MIB, first = 3 * MIB, gap = 4096;
        unsigned char *memory = memory_new(size, false), *image = image_new(size);
        struct capture_part parts[] = { { memory, first, 0 }, { memory + first + gap, size - first - gap, first } };
        struct cow_capture *capture;
        struct cow_stats stats;

        pattern_fill(memory, size, 1);
        capture = start(image, parts, 2);
        memory[first + 1] = 7;
        os->sleep_ms(100);
        CHECK(cow_copied(capture) == 0);
        memory[0]++;
        for (int i = 0; i < 20000 && cow_copied(capture) != UINT64_MAX; i++)
                os->sleep_ms(5);
        CHECK(cow_copied(capture) == UINT64_MAX);
        memory[0]--;
        CHECK(complete(capture));
        CHECK(memcmp(image, memory, first) == 0 && memcmp(image + first, memory + first + gap, size - first - gap) == 0);
        cow_stats(capture, &stats);
        CHECK(stats.fault_count == 2);
        cow_free(capture);
        munmap(memory, size);
        munmap(image, size);
}

/* One part covers the memory of two calls of an allocator. Other parts lie inside a shared huge page, or across its border. */
static void parts_over_the_border_of_a_shared_huge_page_are_exact(void)
{
        size_t size = 12 * MIB;
        unsigned char *memory = memory_new(size, true), *image = image_new(size);
        struct capture_part parts[] = {
                { memory + 1 * MIB, 512 << 10, 0 },          { memory + MIB + (512 << 10) + 100, MIB, 512 << 10 },
                { memory + 3 * MIB, 4 * MIB, 2 * MIB },      { memory + 6 * MIB, 3 * MIB, 6 * MIB }, /* the same bytes twice */
                { memory + 9 * MIB, MIB + 4096 * 3, 9 * MIB },
        };
        enum { COUNT = sizeof parts / sizeof parts[0] };
        unsigned char *before = malloc(size);

        pattern_fill(memory, size, 5);
        memcpy(before, memory, size);
        for (int round = 0; round < 3; round++) {
                struct cow_capture *capture = start(image, parts, COUNT);

                memset(memory, round, size);
                CHECK(cow_wait(capture, -1, NULL) == NEBULA_OK);
                cow_free(capture);
                for (size_t i = 0; i < COUNT; i++)
                        CHECK(memcmp(image + parts[i].image_offset, before + ((unsigned char *)parts[i].data - memory), parts[i].size) == 0);
                memcpy(memory, before, size);
                memset(image, 0xee, size);
        }
        free(before);
        munmap(memory, size);
        munmap(image, size);
}

#define LAYOUT_BYTES (16 * MIB)
#define LAYOUT_PARTS 12u

static uint64_t next_random(uint64_t *state)
{
        *state = mix(*state);
        return *state >> 8;
}

/* Makes memory of several mappings: with and without huge pages, and one that other processes can write to. */
static unsigned char *layout_memory(uint64_t *state)
{
        unsigned char *memory = memory_new(LAYOUT_BYTES, true);

        for (uint64_t i = next_random(state) % 4; i > 0; i--) {
                size_t start = next_random(state) % (LAYOUT_BYTES - 2 * MIB) & ~(size_t)4095;
                size_t size = (next_random(state) % (2 * MIB) + 4096) & ~(size_t)4095;

                if (i == 3)
                        CHECK(mmap(memory + start, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
                              MAP_FAILED);
                else
                        madvise(memory + start, size, MADV_NOHUGEPAGE);
        }
        pattern_fill(memory, LAYOUT_BYTES, next_random(state));
        return memory;
}

/* Makes parts of all sizes at random places; they may overlap. The image has gaps between them. Returns its size. */
static size_t layout_parts(uint64_t *state, unsigned char *memory, struct capture_part *parts, size_t count)
{
        size_t image_size = 0;

        for (size_t i = 0; i < count; i++) {
                size_t size = next_random(state) % (MIB / 4 << next_random(state) % 6) + 1;
                size_t start = next_random(state) % (LAYOUT_BYTES - size);

                image_size += next_random(state) % 9000;
                parts[i] = (struct capture_part){ memory + start, size, image_size };
                image_size += size;
        }
        return image_size;
}

static void captures_of_random_layouts_are_exact(void)
{
        size_t most = LAYOUT_PARTS * (8 * MIB + 9000);
        unsigned char *image = image_new(most), *wanted = image_new(most);
        uint64_t state = 99, direct_bytes = 0, protected_bytes = 0;
        struct capture_part parts[LAYOUT_PARTS];

        for (int round = 0; round < 40; round++) {
                unsigned char *memory = layout_memory(&state);
                size_t count = next_random(&state) % (round % 2 ? LAYOUT_PARTS : 3) + 1;
                size_t image_size = layout_parts(&state, memory, parts, count), part_bytes = 0;
                struct cow_capture *capture;
                struct cow_stats stats;

                memset(image, 0xee, image_size);
                memset(wanted, 0xee, image_size);
                for (size_t i = 0; i < count; i++) {
                        memcpy(wanted + parts[i].image_offset, parts[i].data, parts[i].size);
                        part_bytes += parts[i].size;
                }
                capture = start(image, parts, count);
                memset(memory, round, LAYOUT_BYTES);
                CHECK(complete(capture));
                CHECK(memcmp(image, wanted, image_size) == 0);
                cow_stats(capture, &stats);
                CHECK(stats.direct_bytes + stats.protected_bytes == part_bytes);
                direct_bytes += stats.direct_bytes;
                protected_bytes += stats.protected_bytes;
                cow_free(capture);
                munmap(memory, LAYOUT_BYTES);
        }
        CHECK(direct_bytes > 0 && protected_bytes > 0);
        munmap(image, most);
        munmap(wanted, most);
}

/* Makes a file in memory with pattern 1, and maps it privately on a 2 MiB boundary. */
static unsigned char *file_new(size_t size)
{
        int fd = os->memfd("test");
        void *data;

        if (os->truncate(fd, size) < 0 || os->map(fd, 0, size, OS_MAP_READ | OS_MAP_WRITE, &data) < 0)
                abort();
        pattern_fill(data, size, 1);
        os->unmap(data, size);
        if (os->map(fd, 0, size, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE, &data) < 0)
                abort();
        os->close(fd);
        return data;
}

static bool is_anonymous(const unsigned char *data)
{
        int fd = os->open("/proc/self/maps", OS_READ);
        struct os_mapping mapping = { 0 };
        int status = os->find_mapping(fd, (uintptr_t)data, &mapping);

        os->close(fd);
        return status == 0 && mapping.start <= (uintptr_t)data && mapping.private_anonymous;
}

/* Whether this kernel reports which pages belong to a file, and where a mapping ends. */
static bool can_report_pages(void)
{
        int maps_fd = os->open("/proc/self/maps", OS_READ), pagemap_fd = os->open("/proc/self/pagemap", OS_READ);
        uint64_t page = (uintptr_t)&maps_fd & ~UINT64_C(4095);
        struct os_mapping mapping;
        bool can = os->own_pages(pagemap_fd, page, page + 4096) == 1 && os->find_mapping(maps_fd, page, &mapping) == 0;

        os->close(maps_fd);
        os->close(pagemap_fd);
        if (!can)
                printf("# this kernel does not tell pages apart\n");
        return can;
}

/* The background makes room for the moved pages after the first call, so the call is repeated. */
static void own(const struct capture_part *parts, size_t count)
{
        for (int i = 0; i < 40; i++) {
                cow_own(parts, count);
                os->sleep_ms(10);
        }
}

/* Repeats the call until [start, end) belongs to the process. The background may take long to make room. */
static void own_all(const struct capture_part *parts, size_t count, const unsigned char *start, const unsigned char *end)
{
        for (int tries = 0; start < end && tries < 50; tries++) {
                own(parts, count);
                while (start < end && is_anonymous(start))
                        start += (size_t)(end - start) > MIB / 2 ? MIB / 2 : (size_t)(end - start);
        }
}

static void memory_of_a_file_is_protected_once_it_was_written_to(void)
{
        size_t size = 40 * MIB, from = 3 * MIB - 4160, length = 32 * MIB;
        unsigned char *memory = file_new(size), *image = image_new(size);
        struct capture_part part = { memory + from, length, 0 };
        struct cow_capture *capture;
        struct cow_stats stats;

        if (!can_report_pages())
                return;
        own(&part, 1);
        CHECK(!is_anonymous(memory + from)); /* a copy would be anonymous memory */
        pattern_fill(memory + from, length, 2);
        own_all(&part, 1, memory + from, memory + from + length);
        CHECK(is_anonymous(memory + from) && is_anonymous(memory + from + length - 1) && is_anonymous(memory + from + length / 2));
        CHECK(!is_anonymous(memory) && !is_anonymous(memory + size - 1));
        CHECK(pattern_holds(memory + from, length, 2));
        capture = start(image, &part, 1);
        memset(memory + from, 3, length);
        CHECK(complete(capture));
        cow_stats(capture, &stats);
        CHECK(stats.protected_bytes + stats.direct_bytes == length && stats.protected_bytes > length / 2);
        CHECK(pattern_holds(image, length, 2));
        cow_free(capture);
        munmap(memory, size);
        munmap(image, size);
}

static void memory_of_a_file_that_was_not_written_to_stays_its_own(void)
{
        size_t size = 64 * MIB;
        unsigned char *memory = file_new(size);
        struct capture_part part = { memory, size, 0 };

        memset(memory, 7, size - 4096); /* all but a page */
        own(&part, 1);
        CHECK(!is_anonymous(memory) && !is_anonymous(memory + size / 2) && !is_anonymous(memory + size - 4096));
        munmap(memory, size);
}

static void memory_of_a_file_that_was_made_read_only_stays_read_only(void)
{
        size_t size = 8 * MIB;
        unsigned char *memory = file_new(size);
        struct capture_part part = { memory, size, 0 };

        pattern_fill(memory, size, 2);
        mprotect(memory, size, PROT_READ);
        own(&part, 1);
        CHECK(!is_anonymous(memory));
        munmap(memory, size);
}

static void memory_of_a_file_is_protected_beside_mappings_of_any_kind(void)
{
        size_t size = 64 * MIB, half = size / 2;
        unsigned char *memory = file_new(size);
        struct capture_part parts[] = {
                { memory, 3 * MIB, 0 },                                /* the program has only read it */
                { memory + 3 * MIB, half - 3 * MIB, 3 * MIB },
                { memory + half, 100, half },                          /* shares its page with the next part */
                { memory + half + 128, 20 * MIB - 128, half + 128 },
                { memory + half + 20 * MIB, 4096, half + 20 * MIB },   /* small, and the program has only read it */
                { memory + half + 21 * MIB, 4096, half + 21 * MIB },   /* small, and beside no other part */
        };

        if (!can_report_pages())
                return;
        memset(memory + 3 * MIB, 7, half + 17 * MIB);
        memory[half + 21 * MIB] = 7;
        own_all(parts, sizeof parts / sizeof *parts, memory + 3 * MIB, memory + half + 20 * MIB);
        CHECK(!is_anonymous(memory) && !is_anonymous(memory + 3 * MIB - 4096));
        for (size_t at = 3 * MIB; at < half + 20 * MIB; at += MIB / 2)
                CHECK(is_anonymous(memory + at) && memory[at] == 7);
        CHECK(is_anonymous(memory + half + 20 * MIB - 4096));
        CHECK(!is_anonymous(memory + half + 20 * MIB) && !is_anonymous(memory + half + 21 * MIB));
        munmap(memory, size);
}

struct counting {
        unsigned char *memory;
        size_t size, offset;
        atomic_bool is_ending;
        uint64_t count;
};

/* Counts up a word in each page in turn, and checks that the word has the last value. */
static void *count_on(void *argument)
{
        struct counting *counting = argument;

        while (!atomic_load(&counting->is_ending)) {
                for (size_t at = counting->offset; at < counting->size; at += 4096) {
                        volatile uint64_t *word = (volatile uint64_t *)(counting->memory + at);

                        if (*word != counting->count)
                                return counting;
                        *word = counting->count + 1;
                }
                counting->count++;
        }
        return NULL;
}

static void writes_during_a_move_of_memory_are_not_lost(void)
{
        size_t size = 4 * MIB;

        for (int round = 0; round < 40 && can_report_pages(); round++) {
                unsigned char *memory = file_new(size);
                struct capture_part part = { memory, size, 0 };
                struct counting countings[2];
                pthread_t threads[2];
                void *lost;

                memset(memory, 0, size);
                for (size_t i = 0; i < 2; i++) {
                        countings[i] = (struct counting){ .memory = memory, .size = size, .offset = i * 2048 };
                        REQUIRE(pthread_create(&threads[i], NULL, count_on, &countings[i]) == 0);
                }
                for (int tries = 0; tries < 20000 && !is_anonymous(memory); tries++) {
                        os->sleep_ms(2);
                        cow_own(&part, 1);
                }
                CHECK(is_anonymous(memory));
                os->sleep_ms(2);
                for (size_t i = 0; i < 2; i++) {
                        atomic_store(&countings[i].is_ending, true);
                        pthread_join(threads[i], &lost);
                        CHECK(!lost);
                }
                munmap(memory, size);
        }
}

static void a_capture_that_was_only_prepared_fixes_no_values(void)
{
        size_t size = 4 * MIB;
        unsigned char *memory = memory_new(size, true), *image = image_new(size);
        struct capture_part part = { memory, size, 0 };
        struct cow_capture *capture = NULL;

        pattern_fill(memory, size, 1);
        CHECK(cow_prepare(&part, 1, &capture, NULL) == NEBULA_OK);
        cow_free(capture);
        CHECK(cow_prepare(&part, 1, &capture, NULL) == NEBULA_OK);
        CHECK(cow_wait(capture, 1000, NULL) == NEBULA_OK); /* there is nothing to wait for */
        pattern_fill(memory, size, 2);
        cow_begin(capture, image, &part, 1);
        memset(memory, 3, size);
        CHECK(complete(capture) && pattern_holds(image, size, 2));
        cow_free(capture);
        munmap(memory, size);
        munmap(image, size);
}

/* Writers overwrite random pieces while captures start again and again, up to three at a time. A lock stops the writers only during a
 * start, so that the test can copy the values at that moment. */
#define STRESS_BLOCKS 96u
#define STRESS_WRITERS 3u
#define STRESS_BLOCK (96u * 1024)
struct stress {
        unsigned char *memory;
        pthread_rwlock_t start_lock; /* writers take it shared, a start takes it exclusively */
        atomic_bool stop;
        atomic_uint next_writer;
};

static void *stress_main(void *argument)
{
        struct stress *stress = argument;
        unsigned writer = atomic_fetch_add(&stress->next_writer, 1); /* each writer has its own blocks */
        uint64_t state = mix(4711 + writer);

        while (!atomic_load(&stress->stop)) {
                size_t block;

                state = mix(state);
                block = state % (STRESS_BLOCKS / STRESS_WRITERS) * STRESS_WRITERS + writer;
                pthread_rwlock_rdlock(&stress->start_lock);
                memset(stress->memory + block * STRESS_BLOCK + state / 1000 % 4096, (int)(state >> 40), STRESS_BLOCK / 2);
                pthread_rwlock_unlock(&stress->start_lock);
                if (state % 64 == 0) { /* unrelated changes of the address space */
                        void *other = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

                        memset(other, 1, MIB);
                        madvise(other, MIB / 2, MADV_DONTNEED);
                        munmap(other, MIB);
                }
        }
        return NULL;
}

static void captures_under_random_writes_are_exact(void)
{
        enum { DEPTH = 3 };
        size_t size = STRESS_BLOCKS * STRESS_BLOCK;
        unsigned char *images[DEPTH], *before[DEPTH];
        struct cow_capture *captures[DEPTH] = { NULL };
        struct stress stress = { .memory = memory_new(size, true) };
        int64_t until = os->now_ns() + 1000000000;
        pthread_t threads[STRESS_WRITERS];
        int rounds = 0;

        pthread_rwlock_init(&stress.start_lock, NULL);
        pattern_fill(stress.memory, size, 1);
        for (int i = 0; i < DEPTH; i++) {
                images[i] = image_new(size);
                before[i] = malloc(size);
        }
        for (int i = 0; i < (int)STRESS_WRITERS; i++)
                pthread_create(&threads[i], NULL, stress_main, &stress);
        for (; os->now_ns() < until; rounds++) {
                int slot = rounds % DEPTH;
                size_t skip = rounds % 5 == 4 ? 300001 : 0;
                struct capture_part part = { stress.memory + skip, size - 2 * skip, skip };

                if (captures[slot]) {
                        CHECK(complete(captures[slot]));
                        skip = rounds >= DEPTH && (rounds - DEPTH) % 5 == 4 ? 300001 : 0;
                        CHECK(memcmp(images[slot] + skip, before[slot] + skip, size - 2 * skip) == 0);
                        cow_free(captures[slot]);
                }
                pthread_rwlock_wrlock(&stress.start_lock);
                memcpy(before[slot], stress.memory, size);
                captures[slot] = start(images[slot], &part, 1);
                pthread_rwlock_unlock(&stress.start_lock);
        }
        atomic_store(&stress.stop, true);
        for (int i = 0; i < (int)STRESS_WRITERS; i++)
                pthread_join(threads[i], NULL);
        for (int i = 0; i < DEPTH; i++) {
                CHECK(!captures[i] || complete(captures[i]));
                cow_free(captures[i]);
                munmap(images[i], size);
                free(before[i]);
        }
        printf("# %d captures\n", rounds);
        CHECK(rounds >= DEPTH);
        pthread_rwlock_destroy(&stress.start_lock);
        munmap(stress.memory, size);
}

/* The same as on an older kernel, in a child that has no engine yet. */
static struct os_table old_table;

static int old_find_mapping(int maps_fd, uint64_t address, struct os_mapping *ret_mapping)
{
        (void)maps_fd, (void)address, (void)ret_mapping;
        return -ENOTTY;
}

static int old_uffd_open(uint32_t *ret_abilities)
{
        int fd = os_linux.uffd_open(ret_abilities);

        if (fd >= 0)
                *ret_abilities = 0;
        return fd;
}

static int refused_uffd_open(uint32_t *ret_abilities)
{
        (void)ret_abilities;
        return -EPERM;
}

static bool in_child(void (*run)(void))
{
        pid_t child;
        int exit_status = 1;

        fflush(stdout);
        child = fork();
        if (child == 0) {
                run();
                fflush(stdout);
                _exit(tap_failed_checks ? 1 : 0);
        }
        return waitpid(child, &exit_status, 0) == child && exit_status == 0;
}

static unsigned char *block_of_two;
static atomic_bool is_copied;
static pthread_t late_writer;
static atomic_bool late_writer_is_done;

static void *write_early(void *argument)
{
        *(volatile unsigned char *)block_of_two = 8;
        return argument;
}

static void *write_late(void *argument)
{
        *(volatile unsigned char *)(block_of_two + MIB + 5000) = 9;
        atomic_store(&late_writer_is_done, true);
        return argument;
}

/* The copy of cow_own. Before it ends, a thread writes to a page beside the block that it holds; then a thread writes to a page in that
 * block. */
static int copy_among_writes(os_copy *copy, void *argument, void *to, uint64_t from, size_t size)
{
        int status = os_linux.copy_guarded(copy, argument, to, from, size);
        pthread_t writer;

        if (from != (uintptr_t)block_of_two + MIB || atomic_exchange(&is_copied, true))
                return status;
        if (pthread_create(&writer, NULL, write_early, NULL) || pthread_join(writer, NULL) ||
            pthread_create(&late_writer, NULL, write_late, NULL))
                abort();
        for (int i = 0; i < 20 && !atomic_load(&late_writer_is_done); i++)
                os->sleep_ms(5);
        return status;
}

/* Half of a block belongs to a file and is moved. The other half is still protected, for a cancelled capture. */
static void as_with_a_write_beside_what_is_moved(void)
{
        unsigned char *image = image_new(MIB), *file = file_new(MIB);
        struct capture_part part = { NULL, MIB, 0 };
        struct cow_capture *capture;

        old_table = os_linux;
        old_table.copy_guarded = copy_among_writes;
        os = &old_table;
        block_of_two = memory_new(2 * MIB, false);
        REQUIRE(mremap(file, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, block_of_two + MIB) == block_of_two + MIB);
        memset(block_of_two, 1, 2 * MIB);
        part.data = block_of_two;
        capture = start(image, &part, 1);
        cow_cancel(capture);
        part.data = block_of_two + MIB;
        cow_own(&part, 1);
        REQUIRE(atomic_load(&is_copied));
        pthread_join(late_writer, NULL);
        CHECK(is_anonymous(block_of_two + MIB));
        CHECK(block_of_two[0] == 8 && block_of_two[MIB + 5000] == 9 && block_of_two[MIB] == 1);
        cow_free(capture);
}

static void a_write_beside_memory_that_changes_its_place_lets_no_other_through(void)
{
        CHECK(HAVE_TSAN || !can_report_pages() || in_child(as_with_a_write_beside_what_is_moved));
}

static atomic_bool is_slow;
static _Atomic int64_t slow_calls;

static int64_t slow_clock(void)
{
        return os_linux.now_ns() + (atomic_load(&is_slow) ? atomic_fetch_add(&slow_calls, 1) : atomic_load(&slow_calls)) * 25000000;
}

static struct capture_part written_file_new(size_t size)
{
        unsigned char *memory = file_new(size);

        memset(memory, 7, size);
        return (struct capture_part){ memory, size, 0 };
}

/* A save moves memory for at most 20 ms. The rest of a part may then be as small as a page. */
static void as_on_a_slow_machine(void)
{
        struct capture_part part = written_file_new(32 * MIB + 4096);
        const unsigned char *memory = part.data;

        old_table = os_linux;
        old_table.now_ns = slow_clock;
        os = &old_table;
        atomic_store(&is_slow, true);
        own(&part, 1);
        CHECK(is_anonymous(memory) && is_anonymous(memory + 32 * MIB - 4096) && !is_anonymous(memory + 32 * MIB));
        atomic_store(&is_slow, false);
        own_all(&part, 1, memory, memory + 32 * MIB + 1);
        CHECK(is_anonymous(memory) && is_anonymous(memory + 16 * MIB) && is_anonymous(memory + 32 * MIB));
}

static void memory_of_a_file_is_protected_to_its_last_page(void)
{
        CHECK(HAVE_TSAN || !can_report_pages() || in_child(as_on_a_slow_machine));
}

static uint64_t little_memory(void)
{
        return 16 * MIB;
}

static void as_with_little_memory(void)
{
        struct capture_part part = written_file_new(32 * MIB);
        const unsigned char *memory = part.data;

        old_table = os_linux;
        old_table.memory_free = little_memory;
        os = &old_table;
        for (int tries = 0; tries < 20000 && !cow_own(&part, 1); tries++)
                os->sleep_ms(2);
        CHECK(is_anonymous(memory) && !is_anonymous(memory + 4 * MIB)); /* a quarter */
        for (int tries = 0; tries < 20000 && !is_anonymous(memory + part.size - 1); tries++) {
                cow_own(&part, 1);
                os->sleep_ms(2);
        }
        for (size_t at = 0; at < part.size; at += MIB)
                CHECK(is_anonymous(memory + at) && memory[at] == 7);
}

static void memory_of_a_file_moves_bit_by_bit_where_there_is_little_room(void)
{
        CHECK(HAVE_TSAN || !can_report_pages() || in_child(as_with_little_memory));
}

static int moves_to_fail = 2;

/* Fails like mremap in a kernel without memory: the target is unmapped then. */
static int move_without_memory(void *data, uint64_t size, void *to)
{
        if (moves_to_fail > 0) {
                moves_to_fail--;
                munmap(to, size);
                return -ENOMEM;
        }
        return os_linux.move(data, size, to);
}

static void as_where_moves_find_no_memory(void)
{
        struct capture_part part = written_file_new(32 * MIB);
        const unsigned char *memory = part.data;

        old_table = os_linux;
        old_table.move = move_without_memory;
        os = &old_table;
        for (int tries = 0; tries < 20000 && !is_anonymous(memory + part.size - 1); tries++) {
                cow_own(&part, 1);
                os->sleep_ms(2);
        }
        CHECK(!moves_to_fail);
        for (size_t at = 0; at < part.size; at += MIB)
                CHECK(is_anonymous(memory + at) && memory[at] == 7);
}

static void memory_that_is_moved_is_never_left_without_a_place(void)
{
        CHECK(HAVE_TSAN || !can_report_pages() || in_child(as_where_moves_find_no_memory));
}

static uint64_t largest_unmapped;

static int unmap_counting(void *data, uint64_t size)
{
        largest_unmapped = size > largest_unmapped ? size : largest_unmapped;
        return os_linux.unmap(data, size);
}

/* The program has unmapped its loaded memory before the next saves. */
static void as_a_program_that_unmaps_loaded_memory(void)
{
        size_t size = 32 * MIB;
        unsigned char *memory = file_new(size);
        struct capture_part part = { memory, size, 0 };
        int calls = 0;

        memset(memory, 7, size);
        cow_own(&part, 1);
        munmap(memory, size);
        old_table = os_linux;
        old_table.unmap = unmap_counting;
        os = &old_table;
        part = (struct capture_part){ memory_new(MIB, false), MIB, 0 };
        for (; calls < 100 && largest_unmapped < size; calls++) {
                struct cow_capture *capture = NULL;

                REQUIRE(cow_prepare(&part, 1, &capture, NULL) == NEBULA_OK);
                cow_free(capture);
        }
        CHECK(largest_unmapped == size && calls > 10);
}

static void an_unused_reservation_is_unmapped(void)
{
        CHECK(HAVE_TSAN || !can_report_pages() || in_child(as_a_program_that_unmaps_loaded_memory));
}

static void as_on_an_old_kernel(void)
{
        old_table = os_linux;
        old_table.find_mapping = old_find_mapping;
        old_table.uffd_open = old_uffd_open;
        os = &old_table;
        check_overwriting(true);
        memory_that_was_never_touched_reads_as_zero();
        memory_that_others_can_write_is_copied_at_once();
        small_and_unaligned_parts_are_exact();
}

static void as_without_permission(void)
{
        size_t size = 4 * MIB;
        unsigned char *memory = memory_new(size, true), *image = image_new(size);
        struct nebula_error error = { 0 };
        struct cow_capture *capture;

        old_table = os_linux;
        old_table.uffd_open = refused_uffd_open;
        os = &old_table;
        CHECK(cow_available(&error) == NEBULA_UNAVAILABLE && strstr(error.message, "userfaultfd"));
        pattern_fill(memory, size, 1);
        capture = start_one(image, memory, size);
        memset(memory, 1, size);
        CHECK(cow_wait(capture, 0, NULL) == NEBULA_OK && pattern_holds(image, size, 1));
        cow_free(capture);
}

static unsigned pretended_cpus;

static unsigned pretended_cpu_count(void)
{
        return pretended_cpus;
}

static unsigned count_threads(const char *name)
{
        DIR *directory = opendir("/proc/self/task");
        unsigned count = 0;

        for (struct dirent *entry; directory && (entry = readdir(directory));) {
                char path[300], comm[32] = "";
                int fd;

                snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
                fd = open(path, O_RDONLY | O_CLOEXEC);
                if (fd < 0)
                        continue;
                if (read(fd, comm, sizeof comm - 1) > 0)
                        count += !strncmp(comm, name, strlen(name));
                close(fd);
        }
        if (directory)
                closedir(directory);
        return count;
}

static void as_on_a_machine_of_any_size(void)
{
        static const unsigned wanted[][2] = { { 1, 1 }, { 2, 2 }, { 3, 2 }, { 6, 3 }, { 64, 4 } };

        old_table = os_linux;
        old_table.cpu_count = pretended_cpu_count;
        os = &old_table;
        for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
                pid_t child;
                int status = 1;

                pretended_cpus = wanted[i][0];
                child = fork();
                if (!child)
                        _exit(cow_available(NULL) != NEBULA_OK || count_threads("nebula-copy") != wanted[i][1]);
                CHECK(child > 0 && waitpid(child, &status, 0) == child && !status);
        }
}

static int own_uffd = -1;

static int known_uffd_open(uint32_t *ret_abilities)
{
        return own_uffd = os_linux.uffd_open(ret_abilities);
}

/* Closes the engine's descriptor, as os.closerange(3, 1024) would. Another file may get the number then. */
static void as_with_a_descriptor_closed(void)
{
        size_t size = 64 * MIB;
        unsigned char *memory = memory_new(size, true), *image = image_new(size);
        struct nebula_error error = { 0 };
        struct cow_capture *capture;

        old_table = os_linux;
        old_table.uffd_open = known_uffd_open;
        os = &old_table;
        pattern_fill(memory, size, 1);
        capture = start_one(image, memory, size);
        REQUIRE(own_uffd > 2);
        close(own_uffd);
        CHECK(open("/dev/null", O_RDONLY | O_CLOEXEC) >= 0);
        memset(memory, 1, size);
        CHECK(cow_wait(capture, 20000, &error) == NEBULA_FAILED && strstr(error.message, "descriptor"));
        cow_free(capture);
        CHECK(cow_available(&error) == NEBULA_UNAVAILABLE && strstr(error.message, "descriptor"));
        pattern_fill(memory, size, 2);
        capture = start_one(image, memory, size);
        memset(memory, 1, size);
        CHECK(complete(capture) && pattern_holds(image, size, 2));
        cow_free(capture);
}

/* The program closes the descriptor while no save runs, as os.closerange(3, 1024) would. That does not wake the fault thread. */
static void as_with_a_descriptor_closed_before_a_fork(void)
{
        size_t size = 4 * MIB;
        unsigned char *memory = memory_new(size, true), *image = image_new(size);
        struct cow_capture *capture;
        int status = 1, other;
        pid_t child;

        old_table = os_linux;
        old_table.uffd_open = known_uffd_open;
        os = &old_table;
        capture = start_one(image, memory, size);
        CHECK(complete(capture));
        cow_free(capture);
        REQUIRE(own_uffd > 2);
        close(own_uffd);
        other = open("/dev/null", O_RDONLY | O_CLOEXEC);
        REQUIRE(other == own_uffd);
        child = fork();
        if (!child)
                _exit(fcntl(other, F_GETFD) < 0);
        CHECK(child > 0 && waitpid(child, &status, 0) == child && !status);
}

static unsigned char *first_of_two, *second_of_two;

/* Protects the first range and then fails for the second. A write comes in between. */
static int half_uffd_protect(int fd, uint64_t start, uint64_t end, bool on)
{
        if (on && start <= (uintptr_t)second_of_two && (uintptr_t)second_of_two < end) {
                memset(first_of_two, 9, 2 * MIB);
                return -ENOMEM;
        }
        return os_linux.uffd_protect(fd, start, end, on);
}

static void as_where_half_can_be_protected(void)
{
        size_t size = 4 * MIB;
        struct capture_part parts[2];
        unsigned char *image = image_new(2 * size + SUMS_BYTES);
        struct image_sums sums = image_sums_in(image, 2 * size, 2 * size + SUMS_BYTES);
        struct cow_capture *capture;
        uint32_t count;

        first_of_two = memory_new(3 * size, true);
        second_of_two = first_of_two + 2 * size; /* too far apart to be protected by one call */
        pattern_fill(first_of_two, size, 1);
        pattern_fill(second_of_two, size, 2);
        parts[0] = (struct capture_part){ first_of_two, size, 0 };
        parts[1] = (struct capture_part){ second_of_two, size, size };
        old_table = os_linux;
        old_table.uffd_protect = half_uffd_protect;
        os = &old_table;
        REQUIRE(cow_prepare(parts, 2, &capture, NULL) == NEBULA_OK);
        cow_sum(capture, &sums);
        cow_begin(capture, image, parts, 2);
        CHECK(complete(capture) && !memcmp(image, parts[0].data, size) && !memcmp(image + size, parts[1].data, size));
        count = cow_summed(capture, UINT64_MAX);
        for (uint32_t i = 0; i < count; i++)
                CHECK(sums.list[i].crc64 == sum_crc64(0, image + sums.list[i].offset, sums.list[i].size));
        cow_free(capture);
}

/* The fault thread receives an unmap event, and is then not scheduled for a while. */
static int slow_uffd_read(int fd, struct os_uffd_event *events, size_t count)
{
        int got = os_linux.uffd_read(fd, events, count);

        for (int i = 0; i < got; i++) {
                if (events[i].kind == OS_UFFD_UNMAP)
                        os_linux.sleep_ms(20);
        }
        return got;
}

static void as_with_late_news(void)
{
        size_t size = 4 * MIB;
        unsigned char *memory = memory_new(size, false), *image = image_new(size);

        old_table = os_linux;
        old_table.uffd_read = slow_uffd_read;
        os = &old_table;
        for (int round = 0; round < 4; round++) {
                struct cow_capture *capture;

                pattern_fill(memory, size, (uint64_t)round);
                capture = start_one(image, memory, size);
                CHECK(complete(capture));
                CHECK(pattern_holds(image, size, (uint64_t)round));
                cow_free(capture);
                munmap(memory, size);
                REQUIRE(mmap(memory, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
                        memory);
        }
}

/* The test holds up the copy of the first block. */
static atomic_int held_up = 3; /* 0: hold up the next copy; 1: the copy waits; 2: the copy continues */

static int64_t held_copy_self(void *to, uint64_t from, size_t size)
{
        int none = 0;

        if (atomic_compare_exchange_strong(&held_up, &none, 1))
                while (atomic_load(&held_up) != 2)
                        os_linux.sleep_ms(1);
        return os_linux.copy_self(to, from, size);
}

static int no_guard(os_copy *copy, void *argument, void *to, uint64_t from, size_t size)
{
        (void)copy, (void)argument, (void)to, (void)from, (void)size;
        return -ENOTSUP;
}

static atomic_bool has_written;

static void *write_a_byte(void *memory)
{
        *(volatile unsigned char *)memory = 0x33;
        atomic_store(&has_written, true);
        return NULL;
}

static bool has_written_soon(void)
{
        for (int i = 0; i < 4000 && !atomic_load(&has_written); i++)
                os_linux.sleep_ms(5);
        return atomic_load(&has_written);
}

/* One block. The copy for the first capture, which has `size` bytes of the block, is held up, and a write to byte `at` waits for it. */
struct held {
        unsigned char *memory, *images[2];
        struct cow_capture *captures[2];
        pthread_t writer;
};

static bool hold_first(struct held *held, size_t size, size_t at, int64_t (*copy_self)(void *to, uint64_t from, size_t size))
{
        *held = (struct held){ memory_new(2 * MIB, false), { image_new(2 * MIB), image_new(2 * MIB) }, { NULL, NULL }, 0 };
        old_table = os_linux;
        old_table.copy_self = copy_self;
        old_table.copy_guarded = no_guard;
        os = &old_table;
        pattern_fill(held->memory, 2 * MIB, 1);
        held->captures[0] = start_one(held->images[0], held->memory, size);
        atomic_store(&held_up, 0);
        CHECK(cow_wait(held->captures[0], 0, NULL) == NEBULA_TIMEOUT);
        while (atomic_load(&held_up) != 1)
                os_linux.sleep_ms(1);
        if (pthread_create(&held->writer, NULL, write_a_byte, held->memory + at) != 0)
                return false;
        os_linux.sleep_ms(100); /* the fault thread receives the fault, and finds that another thread copies the block */
        return true;
}

/* Another capture begins while a block is copied for the first one. The waiting writer must make the block's copy for the new capture, too:
 * other threads may never do so, for example because they wait for a lock that the writer holds. */
static void as_with_a_start_during_a_copy(void)
{
        size_t size = 2 * MIB;
        struct held held;

        REQUIRE(hold_first(&held, size, size / 2, held_copy_self));
        held.captures[1] = start_one(held.images[1], held.memory, size);
        atomic_store(&held_up, 2);
        REQUIRE(has_written_soon());
        for (int i = 0; i < 2; i++) {
                CHECK(complete(held.captures[i]));
                CHECK(pattern_holds(held.images[i], size, 1));
                cow_free(held.captures[i]);
        }
        pthread_join(held.writer, NULL);
        CHECK(held.memory[size / 2] == 0x33);
}

static void a_writer_does_not_wait_for_a_capture_whose_copy_has_not_begun(void)
{
        CHECK(HAVE_TSAN || in_child(as_with_a_start_during_a_copy));
}

/* The other capture has other pages of the block. When the first capture has ended, the writer's page belongs to no capture. */
static void as_with_a_start_beside(void)
{
        size_t size = 2 * MIB;
        struct held held;

        REQUIRE(hold_first(&held, size / 2, size / 4, held_copy_self));
        held.captures[1] = start_one(held.images[1], held.memory + size / 2, size / 2);
        atomic_store(&held_up, 2);
        REQUIRE(has_written_soon());
        for (int i = 0; i < 2; i++) {
                CHECK(complete(held.captures[i]));
                cow_free(held.captures[i]);
        }
        CHECK(pattern_holds(held.images[0], size / 2, 1) && !memcmp(held.images[1], held.memory + size / 2, size / 2));
        pthread_join(held.writer, NULL);
        CHECK(held.memory[size / 4] == 0x33);
}

static void a_writer_waits_for_no_capture_of_other_pages(void)
{
        CHECK(HAVE_TSAN || in_child(as_with_a_start_beside));
}

static __thread bool holds_up;
static __thread int clock_looks;
static struct cow_capture *to_cancel;

static int64_t remembering_copy_self(void *to, uint64_t from, size_t size)
{
        holds_up |= atomic_load(&held_up) == 0;
        return held_copy_self(to, from, size);
}

/* The second read of the clock after the copy that was held up is at the begin of the next round, where no lock is held. */
static int64_t cancelling_cpu_ns(void)
{
        if (holds_up && to_cancel && ++clock_looks == 2)
                cow_cancel(to_cancel);
        return os_linux.thread_cpu_ns();
}

static void as_with_a_cancel_between_rounds(void)
{
        size_t size = 2 * MIB;
        struct held held;

        REQUIRE(hold_first(&held, size, size / 2, remembering_copy_self));
        old_table.thread_cpu_ns = cancelling_cpu_ns;
        held.captures[1] = start_one(held.images[1], held.memory, size);
        to_cancel = held.captures[1];
        atomic_store(&held_up, 2);
        REQUIRE(has_written_soon());
        CHECK(complete(held.captures[0]) && pattern_holds(held.images[0], size, 1));
        CHECK(cow_wait(held.captures[1], -1, NULL) == NEBULA_FAILED);
        pthread_join(held.writer, NULL);
        CHECK(held.memory[size / 2] == 0x33);
}

static void a_cancelled_capture_leaves_no_writer_waiting(void)
{
        CHECK(HAVE_TSAN || in_child(as_with_a_cancel_between_rounds));
}

static atomic_bool is_protecting;

/* Makes the protection of many small pages slow. */
static int slow_uffd_protect(int fd, uint64_t start, uint64_t end, bool on)
{
        int status = os_linux.uffd_protect(fd, start, end, on);

        if (on && end - start > MIB) {
                atomic_store(&is_protecting, true);
                os_linux.sleep_ms(200);
        }
        return status;
}

static void *write_while_it_starts(void *memory)
{
        while (!atomic_load(&is_protecting))
                os_linux.sleep_ms(1);
        *(volatile unsigned char *)memory = 0x33;
        return NULL;
}

static void as_with_a_write_during_the_start(void)
{
        size_t size = 64 * MIB;
        unsigned char *memory = memory_new(size, false), *image = image_new(size);
        struct cow_capture *capture;
        pthread_t writer;

        old_table = os_linux;
        old_table.uffd_protect = slow_uffd_protect;
        os = &old_table;
        pattern_fill(memory, size, 1);
        REQUIRE(pthread_create(&writer, NULL, write_while_it_starts, memory) == 0);
        capture = start_one(image, memory, size);
        CHECK(cow_wait(capture, 5000, NULL) == NEBULA_OK);
        CHECK(pattern_holds(image, size, 1));
        pthread_join(writer, NULL);
        cow_free(capture);
}

static void a_write_during_the_start_holds_nothing_up(void)
{
        CHECK(HAVE_TSAN || in_child(as_with_a_write_during_the_start));
}

static void news_of_memory_that_is_gone_never_fails_what_is_there_now(void)
{
        CHECK(HAVE_TSAN || in_child(as_with_late_news));
}

static void kernels_without_the_newer_calls_are_served_as_well(void)
{
        CHECK(HAVE_TSAN || in_child(as_on_an_old_kernel));
}

/* Checks the sums [first, count): they are in the order of the image after `end_before`, of copied bytes, correct, and each within one
 * chunk. */
static uint64_t check_sums(const struct image_sum *sums, uint32_t first, uint32_t count, const unsigned char *image, uint64_t copied,
                           uint64_t end_before)
{
        for (uint32_t i = first; i < count; i++) {
                const struct image_sum *sum = &sums[i];
                uint32_t crc32 = 0;
                uint64_t crc64 = 0, end = sum->offset + sum->size;

                CHECK(sum->offset >= end_before && end <= copied);
                CHECK(sum->size >= IMAGE_SUM_MIN && sum->offset / IMAGE_CHUNK_BYTES == (end - 1) / IMAGE_CHUNK_BYTES);
                sum_both(image + sum->offset, sum->size, &crc32, &crc64);
                CHECK(crc32 == sum->crc32 && crc64 == sum->crc64);
                end_before = end;
        }
        return end_before;
}

static uint64_t bytes_summed(const struct image_sum *sums, uint32_t count)
{
        uint64_t size = 0;

        for (uint32_t i = 0; i < count; i++)
                size += sums[i].size;
        return size;
}

/* Watches one capture of four parts. True: at some time exactly the first half of the image was copied. */
static bool watch_copying(unsigned char *memory, unsigned char *image, const unsigned char *wanted, const struct capture_part *parts,
                          size_t part_size)
{
        size_t size = 4 * part_size;
        uint64_t copied = 0, before = 0, summed_end = 0;
        struct image_sums sums = image_sums_in(image, size, size + SUMS_BYTES);
        uint32_t summed = 0;
        bool was_between = false;
        struct cow_capture *capture;

        memset(image, 0x77, size);
        if (cow_prepare(parts, 4, &capture, NULL) != NEBULA_OK)
                abort();
        cow_sum(capture, &sums);
        cow_begin(capture, image, parts, 4);
        CHECK(cow_copied(capture) == 0);
        memory[3 * part_size] ^= 1; /* a write makes the copies continue after it: here with the part that is first in the image */
        while (copied != UINT64_MAX) {
                uint32_t count;
                uint64_t end;

                copied = cow_copied(capture);
                end = copied < size ? copied : size;
                CHECK(end >= before && !memcmp(image + before, wanted + before, end - before));
                count = cow_summed(capture, copied);
                summed_end = check_sums(sums.list, summed, count, image, copied, summed_end);
                summed = count;
                was_between = was_between || (end > part_size && end < 3 * part_size);
                before = end;
                cow_wait(capture, 0, NULL);
        }
        CHECK(before == size && complete(capture));
        CHECK(!sums.list || bytes_summed(sums.list, summed) == size); /* parts and their pieces are whole blocks here */
        cow_free(capture);
        memory[3 * part_size] ^= 1;
        return was_between;
}

/* In memory the parts have another order than in the image. `is_reversed`: the list of parts has the order of memory. */
static void watch_copies(bool is_reversed)
{
        size_t part_size = 12 * MIB, size = 4 * part_size;
        unsigned char *memory = memory_new(size, true), *image = image_new(size + SUMS_BYTES), *wanted = image_new(size);
        struct capture_part parts[4];
        bool was_between = false;

        pattern_fill(memory, size, 21);
        for (size_t i = 0; i < 4; i++) {
                parts[is_reversed ? 3 - i : i] = (struct capture_part){ memory + (3 - i) * part_size, part_size, i * part_size };
                memcpy(wanted + i * part_size, memory + (3 - i) * part_size, part_size);
        }
        for (int round = 0; round < (is_reversed ? 10 : 200) && !was_between; round++) /* a capture may end before the test looks at it */
                was_between = watch_copying(memory, image, wanted, parts, part_size);
        CHECK(was_between || is_reversed);
        munmap(memory, size);
        munmap(image, size + SUMS_BYTES);
        munmap(wanted, size);
}

static void reported_copies_stay_and_come_in_the_image_s_order(void)
{
        watch_copies(false);
}

static void reported_copies_stay_in_any_order_of_arrival(void)
{
        watch_copies(true);
}

static void a_capture_that_failed_has_copied_nothing(void)
{
        size_t size = 24 * MIB;
        unsigned char *memory = memory_new(size, true), *image = image_new(size);
        struct cow_capture *capture;

        pattern_fill(memory, size, 22);
        capture = start_one(image, memory, size);
        memory[0] = 1;
        cow_cancel(capture);
        CHECK(cow_copied(capture) == 0 || cow_wait(capture, -1, NULL) == NEBULA_OK);
        cow_free(capture);
        munmap(memory, size);
        munmap(image, size);
}

static void without_permission_everything_is_copied_at_once(void)
{
        CHECK(HAVE_TSAN || in_child(as_without_permission));
}

static void a_descriptor_that_the_program_closes_fails_the_capture_and_nothing_else(void)
{
        CHECK(HAVE_TSAN || in_child(as_with_a_descriptor_closed));
}

static void a_fork_closes_no_descriptor_that_has_become_the_program_s(void)
{
        CHECK(HAVE_TSAN || in_child(as_with_a_descriptor_closed_before_a_fork));
}

static void a_repeated_copy_keeps_no_sums_of_the_first(void)
{
        CHECK(HAVE_TSAN || in_child(as_where_half_can_be_protected));
}

static void at_least_two_threads_copy_where_there_are_two_processors(void)
{
        CHECK(HAVE_TSAN || in_child(as_on_a_machine_of_any_size));
}

int main(void)
{
        static const struct tap_test tests[] = {
                TEST(without_permission_everything_is_copied_at_once),
                TEST(at_least_two_threads_copy_where_there_are_two_processors),
                TEST(a_descriptor_that_the_program_closes_fails_the_capture_and_nothing_else),
                TEST(a_fork_closes_no_descriptor_that_has_become_the_program_s),
                TEST(a_repeated_copy_keeps_no_sums_of_the_first),
                TEST(news_of_memory_that_is_gone_never_fails_what_is_there_now),
                TEST(kernels_without_the_newer_calls_are_served_as_well),
                TEST(a_write_during_the_start_holds_nothing_up),
                TEST(a_writer_does_not_wait_for_a_capture_whose_copy_has_not_begun),
                TEST(a_writer_waits_for_no_capture_of_other_pages),
                TEST(a_cancelled_capture_leaves_no_writer_waiting),
                TEST(overwriting_everything_at_once_keeps_the_old_values_on_huge_pages),
                TEST(overwriting_everything_at_once_keeps_the_old_values_on_small_pages),
                TEST(system_calls_may_write_into_protected_memory),
                TEST(memory_that_is_unmapped_fails_the_capture_and_nothing_else),
                TEST(memory_that_is_replaced_is_never_mistaken_for_the_old_one),
                TEST(pages_given_back_fail_the_capture_and_nothing_else),
                TEST(memory_that_is_resized_fails_the_capture_and_nothing_else),
                TEST(memory_that_becomes_unreadable_does_not_crash_the_program),
                TEST(an_image_that_cannot_be_written_is_not_blamed_on_the_memory),
                TEST(an_image_gets_its_pages_while_the_bytes_are_copied),
                TEST(pages_that_the_machine_refuses_are_not_written_to),
                TEST(children_of_fork_neither_hang_nor_disturb_the_capture),
                TEST(overlapping_captures_each_see_their_own_start),
                TEST(more_captures_than_are_followed_are_copied_at_once),
                TEST(small_and_unaligned_parts_are_exact),
                TEST(memory_that_was_never_touched_reads_as_zero),
                TEST(memory_that_others_can_write_is_copied_at_once),
                TEST(a_cancelled_capture_fails_and_frees_the_memory),
                TEST(a_wait_that_is_too_short_says_so),
                TEST(an_image_off_a_page_boundary_is_refused),
                TEST(arrays_on_a_stack_can_be_captured),
                TEST(memory_that_is_saved_moves_to_huge_pages),
                TEST(memory_of_several_calls_moves_to_huge_pages),
                TEST(the_ends_of_what_is_saved_move_too),
                TEST(the_ends_of_parts_in_several_mappings_move_between_saves),
                TEST(memory_of_huge_pages_with_small_ends_is_protected),
                TEST(a_huge_page_that_others_share_stays_whole),
                TEST(a_write_beside_what_is_saved_does_not_wait_when_little_lies_there),
                TEST(a_write_between_parts_begins_no_copying),
                TEST(parts_over_the_border_of_a_shared_huge_page_are_exact),
                TEST(captures_of_random_layouts_are_exact),
                TEST(memory_of_a_file_is_protected_once_it_was_written_to),
                TEST(memory_of_a_file_that_was_not_written_to_stays_its_own),
                TEST(memory_of_a_file_that_was_made_read_only_stays_read_only),
                TEST(memory_of_a_file_is_protected_beside_mappings_of_any_kind),
                TEST(memory_of_a_file_is_protected_to_its_last_page),
                TEST(memory_that_is_moved_is_never_left_without_a_place),
         TEST(memory_of_a_file_moves_bit_by_bit_where_there_is_little_room), TEST(an_unused_reservation_is_unmapped),
                TEST(writes_during_a_move_of_memory_are_not_lost),
                TEST(a_write_beside_memory_that_changes_its_place_lets_no_other_through),
                TEST(a_capture_that_was_only_prepared_fixes_no_values),
                TEST(captures_under_random_writes_are_exact),
                TEST(reported_copies_stay_and_come_in_the_image_s_order),
                TEST(reported_copies_stay_in_any_order_of_arrival),
                TEST(a_capture_that_failed_has_copied_nothing),
        };
        uint32_t abilities;
        int fd = os->uffd_open(&abilities);

        if (fd < 0) {
                printf("1..0 # SKIP no full userfaultfd here: %s\n", strerror(-fd));
                return 77;
        }
        os->close(fd);
        return tap_run(tests, sizeof tests / sizeof tests[0]);
}
