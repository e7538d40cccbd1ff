#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/error.h"
#include "os/bulk.h"
#include "os/os.h"
#include "tap.h"
#include "test_dir.h"

#define BYTES_MAX (10u << 20)

static char dir[256], path[512];
static unsigned char *data, *back;

static void begin(void)
{
        test_dir_make(dir);
        snprintf(path, sizeof path, "%s/file", dir);
        data = aligned_alloc(4096, BYTES_MAX);
        back = aligned_alloc(4096, BYTES_MAX);
        for (size_t i = 0; i < BYTES_MAX / 8; i++)
                ((uint64_t *)(void *)data)[i] = i * 0x9e3779b97f4a7c15u;
}

static void end(void)
{
        free(data);
        free(back);
        test_dir_remove(dir);
}

/* -EINVAL from open: this file system has no O_DIRECT, and there is nothing to test. */
static int open_as(bool is_direct, int flags)
{
        return os->open(path, flags | (is_direct ? OS_DIRECT : 0));
}

static enum nebula_status compare(void *argument, const void *chunk, uint64_t offset, uint64_t size,
                                  struct nebula_error *error)
{
        atomic_uint_fast64_t *seen = argument;

        atomic_fetch_add(seen, size);
        if (memcmp(chunk, data + offset, size))
                return error_set(error, NEBULA_CORRUPT, 0, "differs in the chunk at %llu", (unsigned long long)offset);
        return NEBULA_OK;
}

static void round_trip(bool is_direct, uint64_t size, uint32_t chunk_bytes)
{
        atomic_uint_fast64_t seen = 0;
        struct nebula_error error;
        struct os_stat found;
        int fd = open_as(is_direct, OS_WRITE | OS_CREATE | OS_TRUNCATE);

        if (fd == -EINVAL)
                return;
        REQUIRE(fd >= 0);
        CHECK(bulk_write(fd, is_direct, data, size, NULL) == 0);
        CHECK(os->fstat(fd, &found) == 0 && found.size == size);
        os->close(fd);
        memset(back, 0xee, BYTES_MAX);
        fd = open_as(is_direct, OS_READ);
        REQUIRE(fd >= 0);
        CHECK(bulk_read(fd, is_direct, back, is_direct, size, chunk_bytes, compare, &seen, &error) == 0);
        CHECK(seen == size);
        CHECK(!memcmp(back, data, size));
        CHECK(size == BYTES_MAX || back[size] == 0xee);
        os->close(fd);
}

static void every_size_comes_back_as_it_was(void)
{
        static const uint64_t sizes[] = { 0, 1, 4095, 4096, 4097, (4u << 20) - 1, 4u << 20, (4u << 20) + 1,
                                          (9u << 20) + 12345, BYTES_MAX };
        static const uint32_t chunks[] = { 4096, 64u << 10, 4u << 20, 32u << 20 };

        begin();
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
                for (size_t j = 0; j < sizeof chunks / sizeof chunks[0]; j++) {
                        round_trip(true, sizes[i], chunks[j]);
                        if (j == 1)
                                round_trip(false, sizes[i], chunks[j]);
                }
        end();
}

static void through_a_ring_every_size_comes_back_as_it_was(void)
{
        CHECK(bulk_engine_force(BULK_ENGINE_URING) == -ENOSYS); /* os_offer_ring() was not called */
        os_offer_ring();
        if (bulk_engine_force(BULK_ENGINE_URING)) {
                printf("# this machine has no io_uring\n");
                return;
        }
        CHECK(bulk_engine_used() == BULK_ENGINE_URING);
        every_size_comes_back_as_it_was();
}

static void through_threads_every_size_comes_back_as_it_was(void)
{
        CHECK(bulk_engine_force(BULK_ENGINE_THREADS) == 0);
        CHECK(bulk_engine_used() == BULK_ENGINE_THREADS);
        every_size_comes_back_as_it_was();
}

/* The same file again and again from pinned memory, whose bytes change in between; other memory and a part of it beside. */
static void pinned_memory_is_written_as_it_is_then(void)
{
        static const uint64_t sizes[] = { BYTES_MAX, 1, 4096, (4u << 20) + 1, (9u << 20) + 12345 };
        unsigned char *other;

        begin();
        other = aligned_alloc(4096, BYTES_MAX);
        memset(other, 0x33, BYTES_MAX);
        bulk_unpin(data); /* which is not pinned: fine */
        if (bulk_pin(data, BYTES_MAX) == -ENOSYS)
                printf("# this machine has no io_uring\n");
        else
                CHECK(bulk_pin(data, BYTES_MAX) == 0); /* twice: fine */
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                data[i] ^= 0xff;
                round_trip(true, sizes[i], 4u << 20);
                round_trip(false, sizes[i], 64u << 10);
        }
        CHECK(bulk_pin(other, 4096) == bulk_pin(data, BYTES_MAX)); /* too small for the write: it uses the ordinary way */
        memcpy(other, data, BYTES_MAX);
        {
                int fd = open_as(true, OS_WRITE | OS_CREATE | OS_TRUNCATE);

                CHECK(fd == -EINVAL || bulk_write(fd, true, other, BYTES_MAX, NULL) == 0);
                if (fd >= 0)
                        os->close(fd);
                fd = open_as(false, OS_READ);
                CHECK(fd < 0 || (os_read_at(fd, back, BYTES_MAX, 0) == 0 && !memcmp(back, data, BYTES_MAX)));
                if (fd >= 0)
                        os->close(fd);
        }
        bulk_unpin(other);
        bulk_unpin(data);
        bulk_unpin(data);
        round_trip(true, BYTES_MAX, 4u << 20);
        free(other);
        end();
}

static void *write_pinned(void *argument)
{
        int *result = argument;
        char name[540];
        int fd;

        snprintf(name, sizeof name, "%s-%p", path, argument);
        for (int i = 0; i < 20 && !*result; i++) {
                fd = os->open(name, OS_WRITE | OS_CREATE | OS_TRUNCATE);
                *result = fd < 0 ? fd : bulk_write(fd, false, data, BYTES_MAX, NULL);
                if (fd >= 0)
                        os->close(fd);
        }
        return NULL;
}

static void pinned_memory_may_be_written_from_by_several_threads(void)
{
        pthread_t threads[3];
        int results[3] = { 0 };

#if defined(__SANITIZE_THREAD__) /* which does not see that a ring's memory is unmapped before another one is mapped there */
        return;
#endif
        begin();
        bulk_pin(data, BYTES_MAX);
        for (int i = 0; i < 3; i++)
                if (pthread_create(&threads[i], NULL, write_pinned, &results[i]))
                        abort();
        for (int i = 0; i < 3; i++) {
                pthread_join(threads[i], NULL);
                CHECK(results[i] == 0);
        }
        bulk_unpin(data);
        end();
}

static void a_flipped_byte_stops_the_read_and_tells_the_first_place(void)
{
        struct nebula_error error = { 0 };
        atomic_uint_fast64_t seen = 0;
        int fd;

        begin();
        fd = open_as(false, OS_WRITE | OS_CREATE);
        REQUIRE(fd >= 0 && bulk_write(fd, false, data, BYTES_MAX, NULL) == 0);
        CHECK(os_write_at(fd, "\x55", 1, 1234567) == 0);
        os->close(fd);
        fd = open_as(false, OS_READ);
        for (int engine = 0; engine < 2; engine++) {
                if (bulk_engine_force((enum bulk_engine)engine))
                        continue;
                CHECK(bulk_read(fd, false, back, false, BYTES_MAX, 64u << 10, compare, &seen, &error) == NEBULA_CORRUPT);
                CHECK(error.status == NEBULA_CORRUPT && strstr(error.message, "1179648"));
        }
        os->close(fd);
        end();
}

static void a_file_that_ends_early_is_no_data(void)
{
        int fd;

        begin();
        fd = open_as(false, OS_WRITE | OS_CREATE);
        REQUIRE(fd >= 0 && bulk_write(fd, false, data, 1u << 20, NULL) == 0);
        os->close(fd);
        fd = open_as(false, OS_READ);
        for (int engine = 0; engine < 2; engine++)
                if (!bulk_engine_force((enum bulk_engine)engine))
                        CHECK(bulk_read(fd, false, back, false, 4u << 20, 64u << 10, NULL, NULL, NULL) == -ENODATA);
        os->close(fd);
        end();
}

#define LARGE_BYTES ((133u << 20) + 12344u)
#define MEDIUM_BYTES ((33u << 20) + 12344u)
#define LARGE_ROOM (134u << 20)

struct large {
        uint64_t *words, bad; /* bad: the offset of a word that the check does not accept */
        atomic_uint_fast64_t seen, elsewhere; /* bytes; elsewhere: checked before they are in place */
};

static enum nebula_status compare_words(void *argument, const void *chunk, uint64_t offset, uint64_t size,
                                        struct nebula_error *error)
{
        struct large *large = argument;
        const uint64_t *words = chunk;

        atomic_fetch_add(&large->seen, size);
        if (chunk != (char *)large->words + offset)
                atomic_fetch_add(&large->elsewhere, size);
        for (size_t i = 0; i < size / 8; i++)
                if (words[i] != offset / 8 + i || offset + i * 8 == large->bad)
                        return error_set(error, NEBULA_CORRUPT, 0, "differs at %llu", (unsigned long long)(offset + i * 8));
        return NEBULA_OK;
}

static void read_large(uint64_t length, uint64_t bad)
{
        struct large large = { .bad = bad };
        struct nebula_error error = { 0 };
        struct bulk_buffer buffer;
        bool is_huge, is_whole = true;
        int fd = open_as(true, OS_READ);

        REQUIRE(bulk_buffer_open(&buffer, BULK_REQUEST_BYTES) == 0);
        is_huge = bulk_buffer_make(buffer.data, BULK_REQUEST_BYTES);
        bulk_buffer_close(&buffer);
        large.words = aligned_alloc(4096, LARGE_ROOM);
        REQUIRE(fd >= 0 && large.words);
        memset(large.words, 0xff, LARGE_ROOM);
        if (bad < length) {
                CHECK(bulk_read(fd, true, large.words, true, length, BULK_REQUEST_BYTES, compare_words, &large, &error) ==
                      NEBULA_CORRUPT);
                CHECK(strstr(error.message, "differs at 73400320"));
                CHECK(!large.elsewhere || large.words[(bad - bad % BULK_REQUEST_BYTES) / 8] == UINT64_MAX);
        } else {
                CHECK(bulk_read(fd, true, large.words, true, length, BULK_REQUEST_BYTES, compare_words, &large, &error) == 0);
                for (size_t i = 0; i < length / 8; i++)
                        is_whole &= large.words[i] == i;
                CHECK(is_whole);
                CHECK(large.seen == length);
                CHECK(!is_huge || large.elsewhere);
        }
        free(large.words);
        os->close(fd);
}

static void a_large_read_into_new_memory_is_checked_before_it_is_there(void)
{
        uint64_t *words = aligned_alloc(4096, LARGE_ROOM);
        int fd;

        begin();
        REQUIRE(words && !bulk_engine_force(BULK_ENGINE_THREADS));
        for (size_t i = 0; i < LARGE_BYTES / 8; i++)
                words[i] = i;
        fd = open_as(true, OS_WRITE | OS_CREATE);
        if (fd >= 0) {
                CHECK(bulk_write(fd, true, words, LARGE_BYTES, NULL) == 0);
                os->close(fd);
                read_large(LARGE_BYTES, LARGE_BYTES);
                read_large(LARGE_BYTES, 70u << 20);
                read_large(MEDIUM_BYTES, MEDIUM_BYTES);
        }
        free(words);
        end();
}

static void a_failed_write_is_reported(void)
{
        int fd;

        begin();
        fd = open_as(false, OS_WRITE | OS_CREATE);
        os->close(fd);
        fd = open_as(false, OS_READ);
        for (int engine = 0; engine < 2; engine++)
                if (!bulk_engine_force((enum bulk_engine)engine))
                        CHECK(bulk_write(fd, false, data, BYTES_MAX, NULL) == -EBADF);
        os->close(fd);
        end();
}

struct telling {
        struct bulk_feed feed;
        const unsigned char *from;
        unsigned char *to;
        uint64_t size;
};

static void make_piece(struct telling *telling, uint64_t piece)
{
        uint64_t offset = piece * BULK_REQUEST_BYTES, left = telling->size - offset;

        memcpy(telling->to + offset, telling->from + offset, left < BULK_REQUEST_BYTES ? left : BULK_REQUEST_BYTES);
        bulk_feed_report(&telling->feed, offset);
        os->sleep_ms(2);
}

/* Makes the bytes as it tells them: back to front, of each four pieces the second one at the end. */
static void *report_backwards(void *argument)
{
        struct telling *telling = argument;
        uint64_t count = (telling->size + BULK_REQUEST_BYTES - 1) / BULK_REQUEST_BYTES;

        for (uint64_t i = count; i--;)
                if (i % 4 != 1)
                        make_piece(telling, i);
        for (uint64_t i = count; i--;)
                if (i % 4 == 1)
                        make_piece(telling, i);
        bulk_feed_end(&telling->feed);
        return NULL;
}

static void write_reported(bool is_direct, uint64_t size)
{
        struct telling telling = { .from = aligned_alloc(4096, LARGE_ROOM), .to = aligned_alloc(4096, LARGE_ROOM), .size = size };
        pthread_t thread;
        int fd = open_as(is_direct, OS_WRITE | OS_CREATE | OS_TRUNCATE);

        if (fd == -EINVAL)
                goto free;
        REQUIRE(fd >= 0 && telling.from && telling.to && !bulk_feed_init(&telling.feed, size));
        for (uint64_t i = 0; i < size / 8; i++)
                ((uint64_t *)(void *)(uintptr_t)telling.from)[i] = i * 0x9e3779b97f4a7c15u;
        memset(telling.to, 0, LARGE_ROOM);
        REQUIRE(!pthread_create(&thread, NULL, report_backwards, &telling));
        CHECK(bulk_write(fd, is_direct, telling.to, size, &telling.feed) == 0);
        pthread_join(thread, NULL);
        os->close(fd);
        memset(telling.to, 0, LARGE_ROOM);
        fd = open_as(false, OS_READ);
        CHECK(!os_read_at(fd, telling.to, size, 0) && !memcmp(telling.to, telling.from, size));
        os->close(fd);
        /* Once more: all is told already. */
        fd = open_as(is_direct, OS_WRITE | OS_TRUNCATE);
        CHECK(bulk_write(fd, is_direct, telling.from, size, &telling.feed) == 0);
        os->close(fd);
        bulk_feed_done(&telling.feed);
free:
        free(telling.to);
        free((void *)(uintptr_t)telling.from);
}

static void bytes_are_written_when_they_are_final(void)
{
        begin();
        for (int engine = 0; engine < 2; engine++)
                if (!bulk_engine_force((enum bulk_engine)engine)) {
                        write_reported(true, BYTES_MAX);
                        write_reported(false, BYTES_MAX);
                        write_reported(true, LARGE_BYTES);
                }
        end();
}

static void a_feed_that_ends_early_cancels_the_write(void)
{
        struct bulk_feed feed;
        int fd;

        begin();
        for (int engine = 0; engine < 2; engine++) {
                if (bulk_engine_force((enum bulk_engine)engine))
                        continue;
                fd = open_as(false, OS_WRITE | OS_CREATE);
                REQUIRE(fd >= 0 && !bulk_feed_init(&feed, BYTES_MAX));
                bulk_feed_report(&feed, BULK_REQUEST_BYTES);
                bulk_feed_end(&feed);
                CHECK(!bulk_feed_wait(&feed));
                CHECK(bulk_write(fd, false, data, BYTES_MAX, &feed) == -ECANCELED);
                bulk_feed_report_all(&feed);
                CHECK(bulk_feed_wait(&feed));
                CHECK(bulk_write(fd, false, data, BYTES_MAX, &feed) == 0);
                bulk_feed_done(&feed);
                os->close(fd);
        }
        end();
}

static void a_sum_that_was_told_comes_back(void)
{
        struct bulk_feed feed;
        uint64_t offset, sum = 0;

        REQUIRE(!bulk_feed_init_pieces(&feed, 3 * (uint64_t)BULK_REQUEST_BYTES));
        bulk_feed_report_summed(&feed, BULK_REQUEST_BYTES, 5, true);
        bulk_feed_report_summed(&feed, 2 * BULK_REQUEST_BYTES, 6, false);
        bulk_feed_report(&feed, 0);
        bulk_feed_begin(&feed, false);
        CHECK(!bulk_feed_take(&feed, 0, &offset) && offset == BULK_REQUEST_BYTES && bulk_feed_is_same(&feed, offset));
        CHECK(bulk_feed_sum(&feed, offset, &sum) && sum == 5);
        CHECK(!bulk_feed_take(&feed, 0, &offset) && !bulk_feed_is_same(&feed, offset) && bulk_feed_sum(&feed, offset, &sum) && sum == 6);
        CHECK(!bulk_feed_take(&feed, 0, &offset) && !offset && !bulk_feed_sum(&feed, offset, &sum));
        bulk_feed_finish(&feed);
        bulk_feed_done(&feed);
}

static void a_writer_in_order_takes_the_lowest_final_chunk(void)
{
        struct bulk_feed feed;
        uint64_t offset;

        REQUIRE(!bulk_feed_init_pieces(&feed, 4 * (uint64_t)BULK_REQUEST_BYTES));
        bulk_feed_report(&feed, 3 * BULK_REQUEST_BYTES);
        bulk_feed_report(&feed, 2 * BULK_REQUEST_BYTES);
        bulk_feed_begin(&feed, true);
        CHECK(!bulk_feed_take(&feed, 0, &offset) && offset == 2 * BULK_REQUEST_BYTES);
        bulk_feed_report(&feed, BULK_REQUEST_BYTES);
        bulk_feed_report(&feed, 0);
        CHECK(!bulk_feed_pace(&feed, 0)); /* nobody waits for the writer */
        CHECK(!bulk_feed_take(&feed, 0, &offset) && offset == 0);
        CHECK(!bulk_feed_take(&feed, 0, &offset) && offset == BULK_REQUEST_BYTES);
        CHECK(!bulk_feed_take(&feed, 0, &offset) && offset == 3 * BULK_REQUEST_BYTES && bulk_feed_take(&feed, 0, &offset) == -ENODATA);
        bulk_feed_finish(&feed);
        bulk_feed_begin(&feed, false); /* the next writer gets all of them */
        for (unsigned i = 0; i < 4; i++)
                CHECK(!bulk_feed_take(&feed, 0, &offset));
        bulk_feed_finish(&feed);
        bulk_feed_done(&feed);
}

static void the_feeding_thread_is_held_back_only_while_a_write_runs(void)
{
        struct bulk_feed feed;
        int fd;

        begin();
        REQUIRE(!bulk_feed_init(&feed, BYTES_MAX));
        bulk_feed_report_all(&feed);
        CHECK(!bulk_feed_pace(&feed, 0));
        feed.is_written = true; /* as during a write that has taken one of three */
        feed.taken = 1;
        CHECK(bulk_feed_pace(&feed, BULK_REQUEST_BYTES));
        CHECK(!bulk_feed_pace(&feed, 2 * BULK_REQUEST_BYTES));
        fd = open_as(false, OS_WRITE | OS_CREATE);
        for (int engine = 0; engine < 2; engine++) {
                if (bulk_engine_force((enum bulk_engine)engine))
                        continue;
                CHECK(bulk_write(fd, false, data, BYTES_MAX, &feed) == 0);
                CHECK(!feed.is_written && !bulk_feed_pace(&feed, 0));
        }
        os->close(fd);
        bulk_feed_done(&feed);
        end();
}

static void unaligned_memory_is_refused_for_a_direct_file(void)
{
        begin();
        CHECK(bulk_read(0, true, back + 1, false, 1u << 20, 64u << 10, NULL, NULL, NULL) == -EINVAL);
        CHECK(bulk_read(0, true, back, false, 1u << 20, 1000, NULL, NULL, NULL) == -EINVAL);
        CHECK(bulk_read(0, false, back, false, 1u << 20, 0, NULL, NULL, NULL) == -EINVAL);
        CHECK(bulk_write(0, true, data + 8, 1u << 20, NULL) == -EINVAL);
        end();
}

TAP_MAIN(TEST(through_a_ring_every_size_comes_back_as_it_was),
         TEST(pinned_memory_is_written_as_it_is_then), TEST(pinned_memory_may_be_written_from_by_several_threads),
         TEST(through_threads_every_size_comes_back_as_it_was),
         TEST(a_flipped_byte_stops_the_read_and_tells_the_first_place), TEST(a_file_that_ends_early_is_no_data),
         TEST(a_large_read_into_new_memory_is_checked_before_it_is_there), TEST(a_failed_write_is_reported), TEST(bytes_are_written_when_they_are_final), TEST(a_feed_that_ends_early_cancels_the_write),
         TEST(a_sum_that_was_told_comes_back), TEST(a_writer_in_order_takes_the_lowest_final_chunk), TEST(the_feeding_thread_is_held_back_only_while_a_write_runs), TEST(unaligned_memory_is_refused_for_a_direct_file))
