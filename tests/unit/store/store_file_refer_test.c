/* Bytes that a file shares with another one, on file systems that can do that, and on those that fail in the middle. */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "one_file_store.h"

#define CHUNK ((uint64_t)BULK_REQUEST_BYTES)
#define CHUNKS 6u
#define SIZE ((CHUNKS - 1) * CHUNK + 777)

static struct os_table table;
static const struct os_table *real;
static uint64_t shared, written;     /* bytes */
static unsigned clones, clone_fails; /* calls; the one that fails, counted from 1 */
static int clone_result;             /* of that one */
static const char *spoiled;          /* the path of a file that another program changes while it is shared; NULL: none */

static int64_t count_write(int fd, const void *data, size_t size, uint64_t offset)
{
        int64_t count = os_linux.pwrite(fd, data, size, offset);

        if (size >= BULK_PAGE_BYTES || offset)
                __atomic_fetch_add(&written, size, __ATOMIC_RELAXED);
        return count;
}

static int clone_by_copy(int fd, int from, uint64_t offset, uint64_t size)
{
        char *bytes = malloc(size);
        int64_t count = os_linux.pread(from, bytes, size, offset);
        /* Not through `fd`, whose writes may need whole pages. */
        char path[64];
        int other;

        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        other = os_linux.open(path, OS_WRITE);
        if (++clones == clone_fails) {
                os_linux.close(other);
                free(bytes);
                return clone_result;
        }
        if (spoiled) {
                int file = os_linux.open(spoiled, OS_WRITE);

                bytes[0] ^= 1;
                os_linux.pwrite(file, bytes, 1, offset);
                os_linux.close(file);
        }
        count = os_linux.pwrite(other, bytes, (size_t)count, offset);
        os_linux.close(other);
        free(bytes);
        shared += size;
        return (uint64_t)count == size ? 0 : -EIO;
}

static void open_sharing(void)
{
        open_file();
        real = os;
        table = *os;
        table.clone_range = clone_by_copy;
        table.pwrite = count_write;
        os = &table;
        shared = written = clones = clone_fails = 0;
        spoiled = NULL;
}

static void close_sharing(void)
{
        os = real;
        close_file();
}

static char *make_data(void)
{
        char *data = aligned_alloc(4096, CHUNKS * CHUNK);

        for (uint64_t i = 0; i < CHUNKS * CHUNK; i++)
                data[i] = (char)(i * 2654435761u >> 13);
        return data;
}

/* `changed`: a bit for each changed chunk. Returns the number of written bytes. */
static uint64_t write_file(const char *key, const char *data, unsigned changed, const struct store_source *source, struct store_mark *ret_mark)
{
        struct store_written said = { .referred = UINT64_MAX };
        struct bulk_feed feed;
        struct store_object object = { .key = key, .data = data, .size = SIZE, .feed = &feed, .source = source, .ret_written = &said };
        struct store_upload *upload;

        CHECK(!bulk_feed_init_pieces(&feed, SIZE));
        for (unsigned i = 0; i < CHUNKS; i++)
                (changed >> i & 1 ? bulk_feed_report : bulk_feed_report_same)(&feed, i * CHUNK);
        bulk_feed_end(&feed);
        written = 0;
        CHECK(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK);
        bulk_feed_done(&feed);
        if (ret_mark)
                *ret_mark = said.mark;
        return SIZE - said.referred;
}

static bool holds(const char *key, const char *data)
{
        char *back = malloc(SIZE);
        bool same = !store->ops->read(store, key, back, 0, SIZE, &error) && !memcmp(data, back, SIZE);

        free(back);
        return same;
}

/* t/a holds `data`, and `data` differs from it in chunk 2. */
static void begin(char *data, struct store_source *ret_source)
{
        *ret_source = (struct store_source){ .key = "t/a", .size = SIZE };
        CHECK(write_file("t/a", data, ~0u, NULL, &ret_source->mark) == SIZE && written >= SIZE);
        data[2 * CHUNK + 9] ^= 1;
}

static void only_what_changed_is_written(void)
{
        char *data = make_data();
        struct store_source source;

        open_sharing();
        begin(data, &source);
        CHECK(write_file("t/b", data, 1u << 2, &source, NULL) == CHUNK);
        CHECK(written == CHUNK && shared == SIZE - CHUNK && clones == 2 && holds("t/b", data));
        shared = 0;
        source.key = "t/b";
        source.mark.text[0] = 0;
        snprintf(source.mark.text, sizeof source.mark.text, "%s", stamp_of("t/b").text);
        CHECK(write_file("t/c", data, 0, &source, NULL) == 0 && !written && shared == SIZE && holds("t/c", data));
        data[SIZE - 1] ^= 1;
        CHECK(write_file("t/d", data, 1u << (CHUNKS - 1), &source, NULL) == SIZE % CHUNK && holds("t/d", data));
        close_sharing();
        free(data);
}

static void all_bytes_are_written_if_blocks_cannot_be_shared(void)
{
        static const int results[] = { -EOPNOTSUPP, -EXDEV, -EINVAL, -ENOSPC, -ESTALE, -EIO };
        char *data = make_data();

        for (size_t i = 0; i < sizeof results / sizeof *results; i++)
                for (unsigned fails = 1; fails <= 2; fails++) {
                        struct store_source source;

                        open_sharing();
                        begin(data, &source);
                        clone_fails = fails;
                        clone_result = results[i];
                        CHECK(write_file("t/b", data, 1u << 2, &source, NULL) == SIZE && written >= SIZE && holds("t/b", data));
                        clones = clone_fails = 0; /* a file system that never can is asked only once */
                        write_file("t/c", data, 1u << 2, &source, NULL);
                        CHECK(!clones == (results[i] == -EOPNOTSUPP) && holds("t/c", data));
                        close_sharing();
                }
        free(data);
}

/* fault: as a_source_that_is_gone_or_another_object_costs_nothing_but_sending */
static void a_source_that_has_changed_is_not_used(void)
{
        char *data = make_data(), path[600];
        struct store_source source;

        open_sharing();
        begin(data, &source);
        run_shell("sleep 0.02; printf x | dd of=root/t/a bs=1 seek=5 conv=notrunc 2>/dev/null");
        CHECK(write_file("t/b", data, 1u << 2, &source, NULL) == SIZE && !clones && holds("t/b", data));
        run_shell("rm root/t/a");
        CHECK(write_file("t/c", data, 1u << 2, &source, NULL) == SIZE && !clones && holds("t/c", data));
        close_sharing();
        data[2 * CHUNK + 9] ^= 1;
        open_sharing();
        begin(data, &source);
        snprintf(path, sizeof path, "%s/t/a", kind_root);
        run_shell("sleep 0.02");
        spoiled = path; /* between the check of the source and the end of the copy */
        CHECK(write_file("t/d", data, 1u << 2, &source, NULL) == SIZE && clones && holds("t/d", data));
        close_sharing();
        free(data);
}

/* As on a disk whose blocks lose bits: the time of the file stays. */
static void rot(const char *path, uint64_t offset)
{
        struct stat before;
        int fd = open(path, O_RDWR | O_CLOEXEC);
        char byte = 0;

        CHECK(fd >= 0 && !fstat(fd, &before) && pread(fd, &byte, 1, (off_t)offset) == 1);
        byte ^= 1;
        CHECK(pwrite(fd, &byte, 1, (off_t)offset) == 1);
        CHECK(!futimens(fd, (struct timespec[]){ before.st_atim, before.st_mtim }));
        close(fd);
}

/*
 * fault (Storage): Unchanged bytes that a new version takes over from an earlier one have rotted in storage.
 * result: The agent compares the bytes that it takes over, and writes the new version as a whole.
 */
static void shared_bytes_that_have_rotted_are_written_again(void)
{
        static const uint64_t places[] = { 0, 3 * CHUNK + 5, SIZE - 1 };

        for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
                char *data = make_data(), path[600];
                struct store_source source;

                open_sharing();
                begin(data, &source);
                snprintf(path, sizeof path, "%s/t/a", kind_root);
                rot(path, places[i]);
                CHECK(write_file("t/b", data, 1u << 2, &source, NULL) == SIZE && clones && written >= SIZE && holds("t/b", data));
                close_sharing();
                free(data);
        }
}

TAP_MAIN(TEST(only_what_changed_is_written), TEST(all_bytes_are_written_if_blocks_cannot_be_shared), TEST(a_source_that_has_changed_is_not_used),
         TEST(shared_bytes_that_have_rotted_are_written_again))
