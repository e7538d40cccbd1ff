/* A stored file is read whole into memory that has no pages yet, in the ways that a machine has for that, and in parts into memory that exists. */
#include <errno.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/client.h"
#include "os/os.h"
#include "sum/sum.h"
#include "tap.h"

#define CHUNK_BYTES (1u << 20)
#define BYTES_MAX (5u << 20)

static char *bytes;
static struct os_table table;
static int stored_fd; /* of the newest stored_of */
static int fills; /* calls of fill, or how many of them succeed */

/* A file with the first `size` bytes, of which one may be another now than when it was summed. */
static struct client_stored *stored_of(uint64_t size, int64_t flipped)
{
        uint64_t count = (size + CHUNK_BYTES - 1) / CHUNK_BYTES;
        struct ipc_opened *opened = calloc(1, sizeof *opened + count * sizeof opened->crc64[0]);
        struct client_stored *stored;
        int fd = os->memfd("stored");

        *opened = (struct ipc_opened){ .size = size, .chunk_bytes = CHUNK_BYTES, .chunk_count = (uint32_t)count };
        for (uint64_t i = 0; i < count; i++) {
                uint64_t offset = i * CHUNK_BYTES;

                opened->crc64[i] = sum_crc64(0, bytes + offset, size - offset < CHUNK_BYTES ? size - offset : CHUNK_BYTES);
        }
        CHECK(os_write_at(fd, bytes, size, 0) == 0);
        if (flipped >= 0) {
                char wrong = (char)~bytes[flipped];

                CHECK(os_write_at(fd, &wrong, 1, (uint64_t)flipped) == 0);
        }
        stored = stored_new(fd, opened);
        stored_fd = fd;
        free(opened);
        return stored;
}

static char *room_of(uint64_t size)
{
        void *data = NULL;

        CHECK(os->map(-1, 0, size, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE | OS_MAP_ANONYMOUS, &data) == 0);
        return data;
}

static void sizes_come_back(void)
{
        static const uint64_t sizes[] = { 1, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 4097, BYTES_MAX };

        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                struct client_stored *stored = stored_of(sizes[i], -1);
                char *data = room_of(sizes[i]);

                CHECK(stored_fetch_all(stored, data));
                CHECK(!memcmp(data, bytes, sizes[i]));
                data[sizes[i] - 1] ^= 1; /* it is ordinary memory now */
                os->unmap(data, sizes[i]);
                stored_free(stored);
        }
}

static int count_fill(int fd, void *to, const void *from, uint64_t size)
{
        __atomic_fetch_add(&fills, 1, __ATOMIC_RELAXED);
        return os_linux.fill(fd, to, from, size);
}

static void a_file_of_any_size_is_read_into_filled_pages(void)
{
        table = os_linux;
        table.fill = count_fill;
        fills = 0;
        os = &table;
        sizes_come_back();
        os = &os_linux;
        if (!fills)
                SKIP("no userfaultfd here, or huge pages by default");
        CHECK(fills >= 4 + 5 + 13 + 20); /* pieces of 256 KiB */
}

static int no_fill_open(void *data, uint64_t size)
{
        (void)data;
        (void)size;
        return -EPERM;
}

static void a_machine_without_userfaultfd_reads_the_same(void)
{
        table = os_linux;
        table.fill_open = no_fill_open;
        os = &table;
        sizes_come_back();
        os = &os_linux;
}

static void a_flipped_byte_is_found(void)
{
        static const int64_t places[] = { 0, CHUNK_BYTES - 1, 2 * CHUNK_BYTES, BYTES_MAX - 1 };

        for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
                struct client_stored *stored = stored_of(BYTES_MAX, places[i]);
                char *data = room_of(BYTES_MAX);

                CHECK(!stored_fetch_all(stored, data));
                CHECK(stored_fill(stored, data, bytes)); /* no page waits for contents any more */
                CHECK(!memcmp(data, bytes, BYTES_MAX));
                os->unmap(data, BYTES_MAX);
                stored_free(stored);
        }
}

static int fill_some(int fd, void *to, const void *from, uint64_t size)
{
        return __atomic_fetch_sub(&fills, 1, __ATOMIC_RELAXED) > 0 ? os_linux.fill(fd, to, from, size) : -ENOMEM;
}

/* The child keeps the descriptors of the fork. */
static int fill_after_fork(int fd, void *to, const void *from, uint64_t size)
{
        static pid_t child;

        if (__atomic_exchange_n(&fills, 0, __ATOMIC_RELAXED)) {
                child = fork();
                if (child == 0) {
                        os->sleep_ms(2000);
                        _exit(0);
                }
                return -ENOMEM;
        }
        return os_linux.fill(fd, to, from, size);
}

static void memory_that_was_not_filled_is_ordinary_memory(void)
{
        int (*const ways[])(int, void *, const void *, uint64_t) = { fill_some, fill_after_fork };

        table = os_linux;
        os = &table;
        for (size_t i = 0; i < 2; i++) {
                struct client_stored *stored = stored_of(BYTES_MAX, -1);
                char *data = room_of(BYTES_MAX);
                bool is_read;

                table.fill = ways[i];
                fills = 3;
                is_read = stored_fetch_all(stored, data);
                CHECK(!is_read || fills == 3); /* 3: this machine does not fill */
                if (!is_read)
                        CHECK(stored_fill(stored, data, bytes));
                CHECK(!memcmp(data, bytes, BYTES_MAX));
                os->unmap(data, BYTES_MAX);
                stored_free(stored);
        }
        os = &os_linux;
        while (wait(NULL) > 0)
                ;
}

/* mlockall(MCL_FUTURE) makes pages when memory is mapped. */
static void pages_that_are_there_already_get_the_bytes(void)
{
        struct client_stored *stored = stored_of(BYTES_MAX, -1);
        char *data = room_of(BYTES_MAX);

        data[5000] = 1;
        data[BYTES_MAX - 1] = 1;
        CHECK(stored_fetch_all(stored, data));
        CHECK(!memcmp(data, bytes, BYTES_MAX));
        os->unmap(data, BYTES_MAX);
        stored_free(stored);
}

/* Parts of many sizes: small and large ones, with and without a gap between them, across chunks and inside one. */
static const struct nebula_part places[] = {
        { 3, 1, NULL }, { 4, 100, NULL }, { 200, 0, NULL }, { 300, 70000, NULL }, { 70300, 65536, NULL }, { CHUNK_BYTES - 1, 2, NULL },
        { CHUNK_BYTES + 64, 2 * CHUNK_BYTES + 100, NULL }, { 3 * CHUNK_BYTES + 200, 65535, NULL }, { BYTES_MAX - CHUNK_BYTES / 2, CHUNK_BYTES / 2, NULL },
};
#define PART_COUNT (sizeof places / sizeof places[0])

/* Reads the parts. Each one that has no byte of the chunk `damaged` gets its bytes; -1: no chunk is. */
static void read_parts(int64_t flipped, int64_t damaged)
{
        struct client_stored *stored = stored_of(BYTES_MAX, flipped);
        struct nebula_part parts[PART_COUNT];
        char *data = room_of(BYTES_MAX), *to = malloc(BYTES_MAX + 2 * PART_COUNT), *at = to;
        bool is_read;

        memset(to, 0x5a, BYTES_MAX + 2 * PART_COUNT);
        for (size_t i = 0; i < PART_COUNT; i++) {
                parts[i] = places[i];
                parts[i].data = at + 1; /* no part is aligned to a page, and a byte that no part has lies between two */
                at += places[i].size + 1;
        }
        is_read = stored_scatter(stored, -1, data, BYTES_MAX, parts, PART_COUNT);
        CHECK(is_read == (damaged < 0));
        for (size_t i = 0; i < PART_COUNT; i++) {
                const char *now = parts[i].data;

                CHECK(now[-1] == 0x5a && now[parts[i].size] == 0x5a);
                for (uint64_t k = 0; k < parts[i].size; k++) {
                        uint64_t place = parts[i].offset + k;
                        bool is_right = now[k] == bytes[place], is_left = now[k] == 0x5a;

                        if (is_read ? is_right : (int64_t)(place / CHUNK_BYTES) == damaged ? !now[k] || is_left : is_right || is_left)
                                continue;
                        CHECK(false && "a byte that is neither right nor as it was");
                        break;
                }
        }
        free(to);
        os->unmap(data, BYTES_MAX);
        stored_free(stored);
}

static void parts_get_their_bytes(void)
{
        read_parts(-1, -1);
}

static void no_part_keeps_a_byte_of_a_damaged_chunk(void)
{
        for (size_t i = 0; i < PART_COUNT; i++)
                if (places[i].size) {
                        read_parts((int64_t)places[i].offset, (int64_t)(places[i].offset / CHUNK_BYTES));
                        read_parts((int64_t)(places[i].offset + places[i].size - 1), (int64_t)((places[i].offset + places[i].size - 1) / CHUNK_BYTES));
                }
        read_parts(0, 0); /* a byte that no part has, in a chunk of which parts have others */
}

/* The file of the descriptor has other bytes than the map, so a part shows where its bytes came from. */
static void parts_of_an_image(bool is_open)
{
        struct client_stored *stored = stored_of(BYTES_MAX, -1);
        struct nebula_part parts[PART_COUNT];
        char *data = malloc(BYTES_MAX), *to = malloc(BYTES_MAX);

        memset(data, 0x5a, BYTES_MAX);
        for (size_t i = 0; i < PART_COUNT; i++) {
                parts[i] = places[i];
                parts[i].data = to + places[i].offset;
        }
        CHECK(is_open || !os->truncate(stored_fd, 0));
        CHECK(stored_scatter(NULL, stored_fd, data, BYTES_MAX, parts, PART_COUNT));
        for (size_t i = 0; i < PART_COUNT; i++) {
                const char *from = is_open && places[i].size >= (64u << 10) ? bytes : data;

                CHECK(!memcmp(parts[i].data, from + places[i].offset, places[i].size));
        }
        free(to);
        free(data);
        stored_free(stored);
}

static void large_parts_of_an_image_are_read_from_its_descriptor(void)
{
        parts_of_an_image(true);
}

static void parts_come_from_the_map_if_the_descriptor_fails(void)
{
        parts_of_an_image(false);
}

static void a_file_that_became_shorter_is_not_read(void)
{
        struct client_stored *stored = stored_of(BYTES_MAX, -1);
        char *data = room_of(BYTES_MAX), *to = malloc(BYTES_MAX);
        struct nebula_part part = { 0, BYTES_MAX, to };

        memset(to, 0x5a, BYTES_MAX);
        CHECK(os->truncate(stored_fd, BYTES_MAX - CHUNK_BYTES / 2) == 0);
        CHECK(!stored_scatter(stored, -1, data, BYTES_MAX, &part, 1));
        for (uint64_t k = BYTES_MAX - CHUNK_BYTES; k < BYTES_MAX; k++)
                if (to[k] && to[k] != 0x5a) {
                        CHECK(false && "a byte that was not compared");
                        break;
                }
        free(to);
        os->unmap(data, BYTES_MAX);
        stored_free(stored);
}

/* Reads the bytes [offset, offset + size) as a record. flipped: see stored_of. */
static void read_record(uint64_t offset, uint64_t size, int64_t flipped)
{
        struct client_stored *stored = stored_of(BYTES_MAX, flipped);
        char *to = malloc(size), *none = calloc(1, size);
        struct nebula_part part = { offset, size, to };
        bool is_damaged = flipped >= (int64_t)offset && flipped < (int64_t)(offset + size);
        uint64_t before = stored_read_bytes();

        CHECK(stored_read_record(stored, &part, sum_crc32(0, bytes + offset, size)) == !is_damaged);
        CHECK(!memcmp(to, is_damaged ? none : bytes + offset, size));
        CHECK(stored_read_bytes() - before == size); /* and none beside it */
        free(none);
        free(to);
        stored_free(stored);
}

static void a_record_is_read_alone_and_compared(void)
{
        static const uint64_t records[][2] = { { 0, 1 }, { 64, CHUNK_BYTES }, { 4097, 3 * CHUNK_BYTES + 5 }, { CHUNK_BYTES, CHUNK_BYTES }, { 0, BYTES_MAX } };

        for (size_t i = 0; i < sizeof records / sizeof records[0]; i++) {
                uint64_t offset = records[i][0], size = records[i][1];

                read_record(offset, size, -1);
                read_record(offset, size, (int64_t)offset);
                read_record(offset, size, (int64_t)(offset + size / 2));
                read_record(offset, size, (int64_t)(offset + size - 1));
                if (offset)
                        read_record(offset, size, (int64_t)offset - 1); /* damage beside it does not matter */
        }
}

static void a_record_whose_bytes_the_program_may_have_changed_is_left_to_the_map(void)
{
        struct client_stored *stored = stored_of(BYTES_MAX, -1);
        char *data = room_of(BYTES_MAX), *to = malloc(CHUNK_BYTES);
        struct nebula_part part = { 64, CHUNK_BYTES, to };

        CHECK(stored_fetch(stored, data, &part, 1));
        CHECK(!stored_read_record(stored, &part, sum_crc32(0, bytes + 64, CHUNK_BYTES)));
        part.offset = 3 * CHUNK_BYTES;
        CHECK(stored_read_record(stored, &part, sum_crc32(0, bytes + part.offset, CHUNK_BYTES)));
        free(to);
        os->unmap(data, BYTES_MAX);
        stored_free(stored);
}

static void a_file_is_read_whole(void)
{
        bytes = malloc(BYTES_MAX);
        for (size_t i = 0; i < BYTES_MAX / 8; i++)
                ((uint64_t *)(void *)bytes)[i] = i * 0x9e3779b97f4a7c15u;
        a_file_of_any_size_is_read_into_filled_pages();
}

TAP_MAIN(TEST(a_file_is_read_whole), TEST(a_machine_without_userfaultfd_reads_the_same), TEST(a_flipped_byte_is_found),
         TEST(memory_that_was_not_filled_is_ordinary_memory), TEST(pages_that_are_there_already_get_the_bytes), TEST(parts_get_their_bytes),
         TEST(no_part_keeps_a_byte_of_a_damaged_chunk), TEST(large_parts_of_an_image_are_read_from_its_descriptor),
         TEST(parts_come_from_the_map_if_the_descriptor_fails), TEST(a_file_that_became_shorter_is_not_read),
         TEST(a_record_is_read_alone_and_compared), TEST(a_record_whose_bytes_the_program_may_have_changed_is_left_to_the_map))
