#include "capture/capture.h"
#include "sum/sum.h"

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/os.h"
#include "tap.h"

static uint64_t random_state = 88172645463325252u;

static uint64_t random_next(void)
{
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        return random_state;
}

static char *random_bytes(size_t size)
{
        char *bytes = malloc(size + 8);

        for (size_t i = 0; i < size; i += 8) {
                uint64_t value = random_next();

                memcpy(bytes + i, &value, 8);
        }
        return bytes;
}

static struct image_sums sums_for(uint64_t size)
{
        uint32_t room = (uint32_t)(size / IMAGE_SUM_MIN) + 1;

        return (struct image_sums){ .list = sum_copies_both() ? calloc(room, sizeof(struct image_sum)) : NULL, .room = room };
}

/* Checks the sums: each range that is long enough has one. A range lies within its part, its piece of the copy and its chunk. Frees the
 * list. */
static void check_sums(struct image_sums *sums, const struct capture_part *parts, size_t count, const char *image)
{
        uint64_t end = 0, summed = 0, least = 0;

        image_sums_sort(sums, 0);
        for (uint32_t i = 0; i < sums->count; i++) {
                const struct image_sum *sum = &sums->list[i];
                uint32_t crc32 = 0;
                uint64_t crc64 = 0;

                CHECK(sum->offset >= end && sum->size >= IMAGE_SUM_MIN);
                end = sum->offset + sum->size;
                CHECK(sum->offset / IMAGE_CHUNK_BYTES == (end - 1) / IMAGE_CHUNK_BYTES);
                sum_both(image + sum->offset, sum->size, &crc32, &crc64);
                CHECK(crc32 == sum->crc32 && crc64 == sum->crc64);
                summed += sum->size;
        }
        for (size_t i = 0; i < count; i++) /* in each 4 MiB, at most two ends are too short for a sum */
                least += parts[i].size > 4 * IMAGE_SUM_MIN ? parts[i].size - (parts[i].size >> 22) * 2 * IMAGE_SUM_MIN - 4 * IMAGE_SUM_MIN : 0;
        CHECK(!sums->list || summed >= least);
        free(sums->list);
}

/* Copies parts of the given sizes, with gaps between them in the image. Checks every byte, and that the gaps did not change. */
static void check_copy(const uint64_t *sizes, size_t count, bool is_fresh)
{
        struct capture_part *parts = calloc(count + 1, sizeof *parts);
        uint64_t size = 0, at = 0, source_size = 0;
        char *image, *expected, *source;
        int64_t cpu_ns;

        for (size_t i = 0; i < count; i++) {
                size += sizes[i] + i % 70;
                source_size += sizes[i];
        }
        source = random_bytes(source_size);
        image = malloc(size + 1);
        expected = malloc(size + 1);
        memset(image, 0x5a, size + 1);
        memset(expected, 0x5a, size + 1);
        source_size = 0;
        for (size_t i = 0; i < count; i++) {
                at += i % 70;
                parts[i] = (struct capture_part){ source + source_size, sizes[i], at };
                memcpy(expected + at, source + source_size, sizes[i]);
                at += sizes[i];
                source_size += sizes[i];
        }
        if (is_fresh) {
                struct image_sums sums = sums_for(size);
                struct capture_job job = { .image = image, .parts = parts, .count = count, .is_fresh = true,
                                           .sums = sums.list ? &sums : NULL };

                capture_copy_begin(&job);
                for (size_t i = 0; i < count; i++) {
                        uint64_t gap = parts[i].image_offset - i % 70;

                        memset(image + gap, 'h', i % 70);
                        memset(expected + gap, 'h', i % 70);
                }
                cpu_ns = capture_copy_end(&job);
                check_sums(&sums, parts, count, image);
        } else {
                cpu_ns = capture_copy(image, parts, count);
        }
        CHECK(cpu_ns >= 0);
        CHECK(memcmp(image, expected, size + 1) == 0);
        free(image);
        free(expected);
        free(source);
        free(parts);
}

static void no_parts_and_empty_parts_are_fine(void)
{
        static const uint64_t sizes[] = { 0, 0, 5, 0 };

        check_copy(sizes, 0, false);
        check_copy(sizes, 4, false);
        check_copy(sizes, 2, true);
}

static void parts_of_any_size_and_alignment_arrive(void)
{
        static const uint64_t sizes[] = { 1, 4096, 3, (9u << 20) + 17, 4u << 20, 63, (4u << 20) - 1, 2 };

        check_copy(sizes, sizeof sizes / sizeof sizes[0], false);
        check_copy(sizes, sizeof sizes / sizeof sizes[0], true);
}

static void a_hundred_thousand_small_parts_arrive(void)
{
        size_t count = 100000;
        uint64_t *sizes = malloc(count * sizeof *sizes);

        for (size_t i = 0; i < count; i++)
                sizes[i] = random_next() % 200;
        check_copy(sizes, count, false);
        free(sizes);
}

static void random_plans_arrive(void)
{
        for (int round = 0; round < 60; round++) {
                uint64_t sizes[64];
                size_t count = random_next() % 64;

                for (size_t i = 0; i < count; i++)
                        sizes[i] = random_next() % (1u << (random_next() % 19));
                check_copy(sizes, count, round % 2);
        }
}

static void *copy_thread(void *unused)
{
        static const uint64_t sizes[] = { 2u << 20, 77, 3u << 20 };

        (void)unused;
        for (int i = 0; i < 3; i++) {
                char *source = calloc(1, sizes[0]), *image = malloc(sizes[0]);
                struct capture_part part = { source, sizes[0], 0 };

                memset(source, i + 1, sizes[0]);
                capture_copy(image, &part, 1);
                CHECK(memcmp(source, image, sizes[0]) == 0);
                free(source);
                free(image);
        }
        return NULL;
}

static void captures_from_several_threads_do_not_mix(void)
{
        pthread_t threads[4];

        for (size_t i = 0; i < 4; i++)
                pthread_create(&threads[i], NULL, copy_thread, NULL);
        for (size_t i = 0; i < 4; i++)
                pthread_join(threads[i], NULL);
}

#if defined(__SANITIZE_THREAD__)
#define HAS_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HAS_THREAD_SANITIZER 1
#endif
#endif
#ifndef HAS_THREAD_SANITIZER
#define HAS_THREAD_SANITIZER 0
#endif
#define CHILD_MAY_START_THREADS !HAS_THREAD_SANITIZER /* it ends such a child */

static void a_forked_child_can_copy_too(void)
{
        static const uint64_t sizes[] = { 8u << 20 };
        pid_t child;
        int status = -1;

        if (!CHILD_MAY_START_THREADS)
                return;
        check_copy(sizes, 1, false); /* the copy threads exist now, but not in the child */
        child = fork();
        if (child == 0) {
                alarm(20);
                tap_failed_checks = 0;
                check_copy(sizes, 1, false);
                capture_copy_rest();
                _exit(tap_failed_checks);
        }
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        check_copy(sizes, 1, false);
}

static void the_threads_can_rest_and_come_back(void)
{
        static const uint64_t sizes[] = { 3u << 20 };

        capture_copy_rest();
        capture_copy_rest();
        check_copy(sizes, 1, false);
        capture_copy_rest();
}

/* Checks that each thread of this process may run on the caller's processors. Returns the number of threads. */
static int check_threads_are_free(void)
{
        DIR *tasks = opendir("/proc/self/task");
        cpu_set_t own, other;
        int count = 0;

        CHECK(tasks && sched_getaffinity(0, sizeof own, &own) == 0);
        for (struct dirent *task; tasks && (task = readdir(tasks)); ) {
                if (task->d_name[0] == '.')
                        continue;
                CHECK(sched_getaffinity(atoi(task->d_name), sizeof other, &other) == 0 && CPU_EQUAL(&own, &other));
                count++;
        }
        closedir(tasks);
        return count;
}

/* A copy may keep its threads off the caller's processor only while it wakes them. */
static void the_threads_are_pinned_nowhere(void)
{
        static const uint64_t sizes[] = { 9u << 20 };

        for (int i = 0; i < 5; i++)
                check_copy(sizes, 1, false);
        CHECK(check_threads_are_free() > 1 || os->cpu_count() == 1);
}

static int image_file(uint64_t size)
{
        int fd = os->memfd("pool-test");

        if (fd < 0 || os->truncate(fd, size) != 0)
                abort();
        return fd;
}

static long faults_taken(void)
{
        struct rusage usage;

        getrusage(RUSAGE_SELF, &usage);
        return usage.ru_minflt;
}

static void an_image_that_is_populated_has_all_its_pages_and_keeps_its_bytes(void)
{
        const uint64_t size = 9u << 20;
        int fd = image_file(size);
        long before, wrong = 0;
        void *data;
        char *image;

        CHECK(pwrite(fd, "kept", 4, (off_t)size - 4) == 4);
        CHECK(os->map(fd, 0, size, OS_MAP_READ | OS_MAP_WRITE, &data) == 0);
        image = data;
        capture_populate(image, size);
        before = faults_taken();
        for (uint64_t i = 0; i < size; i += 4096)
                wrong += image[i] != 0;
        /* The address sanitizer takes a fault for each eight pages, the thread sanitizer several for each page. */
        CHECK(HAS_THREAD_SANITIZER || faults_taken() - before < (long)(size / 4096 / 4));
        CHECK(wrong == 0 && memcmp(image + size - 4, "kept", 4) == 0);
        os->unmap(data, size);
        os->close(fd);
}

static void an_image_is_mapped_once(void)
{
        struct capture_pool *pool;
        struct nebula_error error;
        int fd = image_file(8192);
        void *first, *second;
        char byte = 0;

        REQUIRE(capture_pool_new(&pool, &error) == NEBULA_OK);
        CHECK(capture_pool_map(pool, 7, dup(fd), 8192, &first, &error) == NEBULA_OK);
        CHECK(capture_pool_take_fresh(pool, first) && !capture_pool_take_fresh(pool, first));
        ((char *)first)[5000] = 'x';
        CHECK(pread(fd, &byte, 1, 5000) == 1 && byte == 'x');
        CHECK(capture_pool_map(pool, 7, dup(fd), 8192, &second, &error) == NEBULA_OK);
        CHECK(first == second && !capture_pool_take_fresh(pool, second));
        capture_pool_free(pool);
        close(fd);
}

static void another_file_under_the_same_id_is_mapped_anew(void)
{
        struct capture_pool *pool;
        struct nebula_error error;
        int one = image_file(4096), two = image_file(4096);
        char byte = 0;
        void *image;

        REQUIRE(capture_pool_new(&pool, &error) == NEBULA_OK);
        CHECK(capture_pool_map(pool, 7, dup(one), 4096, &image, &error) == NEBULA_OK);
        CHECK(capture_pool_map(pool, 7, dup(two), 4096, &image, &error) == NEBULA_OK);
        *(char *)image = 'y';
        CHECK(pread(two, &byte, 1, 0) == 1 && byte == 'y');
        CHECK(pread(one, &byte, 1, 0) == 1 && byte == '\0');
        capture_pool_free(pool);
        close(one);
        close(two);
}

static void a_file_shorter_than_promised_is_refused_and_closed(void)
{
        struct capture_pool *pool;
        struct nebula_error error;
        int fd = image_file(4096);
        void *image = NULL;
        int next;

        REQUIRE(capture_pool_new(&pool, &error) == NEBULA_OK);
        CHECK(capture_pool_map(pool, 1, fd, 8192, &image, &error) == NEBULA_FAILED);
        CHECK(image == NULL);
        next = dup(0);
        CHECK(next < 0 || next <= fd); /* the descriptor was closed */
        if (next >= 0)
                close(next);
        capture_pool_free(pool);
}

static int unmap_count;

static int counted_unmap(void *data, uint64_t size)
{
        unmap_count++;
        return os_linux.unmap(data, size);
}

static void an_image_that_is_not_live_is_unmapped(void)
{
        struct os_table table = *os;
        const struct os_table *before = os;
        uint64_t live[] = { 3, 99, 5 };
        struct capture_pool *pool;
        struct nebula_error error;
        void *images[8];

        table.unmap = counted_unmap;
        os = &table;
        unmap_count = 0;
        REQUIRE(capture_pool_new(&pool, &error) == NEBULA_OK);
        for (uint64_t id = 0; id < 8; id++)
                CHECK(capture_pool_map(pool, id, image_file(4096), 4096, &images[id], &error) == NEBULA_OK);
        capture_pool_keep(pool, live, 3);
        CHECK(unmap_count == 6);
        memset(images[3], 1, 4096);
        memset(images[5], 1, 4096);
        capture_pool_keep(pool, NULL, 0);
        CHECK(unmap_count == 8);
        capture_pool_free(pool);
        capture_pool_free(NULL);
        os = before;
}

TAP_MAIN(
        TEST(no_parts_and_empty_parts_are_fine),
        TEST(parts_of_any_size_and_alignment_arrive),
        TEST(a_hundred_thousand_small_parts_arrive),
        TEST(random_plans_arrive),
        TEST(captures_from_several_threads_do_not_mix),
        TEST(a_forked_child_can_copy_too),
        TEST(the_threads_can_rest_and_come_back),
        TEST(the_threads_are_pinned_nowhere),
        TEST(an_image_that_is_populated_has_all_its_pages_and_keeps_its_bytes),
        TEST(an_image_is_mapped_once),
        TEST(another_file_under_the_same_id_is_mapped_anew),
        TEST(a_file_shorter_than_promised_is_refused_and_closed),
        TEST(an_image_that_is_not_live_is_unmapped),
)
