/* Pages of a mapped file become the process's own ahead of its writes, as far as there is memory. */
#include <errno.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/client.h"
#include "os/os.h"
#include "tap.h"

#define SIZE ((130u << 20) + 4096)

static struct os_table table;
static atomic_int calls;
static uint64_t free_bytes;

static int count_advise(void *data, uint64_t size, enum os_advice advice)
{
        atomic_fetch_add(&calls, 1);
        return os_linux.advise(data, size, advice);
}

static int slow_advise(void *data, uint64_t size, enum os_advice advice)
{
        os->sleep_ms(20);
        return count_advise(data, size, advice);
}

static uint64_t memory_free(void)
{
        return free_bytes;
}

/* A file of one value, mapped privately. */
static char *mapped(int *ret_fd)
{
        void *data = NULL;
        char byte = 7;

        *ret_fd = os->memfd("image");
        CHECK(os->truncate(*ret_fd, SIZE) == 0 && os_write_at(*ret_fd, &byte, 1, SIZE - 1) == 0);
        CHECK(os->map(*ret_fd, 0, SIZE, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE, &data) == 0);
        table = os_linux;
        table.advise = count_advise;
        table.memory_free = memory_free;
        os = &table;
        atomic_store(&calls, 0);
        free_bytes = UINT64_C(1) << 40;
        return data;
}

static void unmap(char *data, int fd)
{
        os = &os_linux;
        os->unmap(data, SIZE);
        os->close(fd);
}

static void wait_for(int count)
{
        for (int i = 0; i < 20000 && atomic_load(&calls) < count; i++)
                os->sleep_ms(10);
}

static void all_pages_become_own_and_keep_their_values(void)
{
        int fd, pagemap = os->open("/proc/self/pagemap", OS_READ), found;
        char *data = mapped(&fd), byte = 1;
        struct map_own *own = map_own_start(data, SIZE);

        REQUIRE(own);
        data[0] = 5; /* the program may write meanwhile */
        wait_for(131);
        map_own_stop(own);
        CHECK(atomic_load(&calls) == 131);
        found = os->own_pages(pagemap, (uintptr_t)data, (uintptr_t)data + SIZE);
        CHECK(found == 1 || found == -ENOTTY);
        CHECK(os_write_at(fd, &byte, 1, 4096) == 0);
        CHECK(data[0] == 5 && data[SIZE - 1] == 7 && (found != 1 || data[4096] == 0));
        os->close(pagemap);
        unmap(data, fd);
}

static void without_twice_the_memory_free_no_page_is_copied(void)
{
        int fd;
        char *data = mapped(&fd);

        struct map_own *own;

        free_bytes = 2 * (uint64_t)SIZE - 4096;
        own = map_own_start(data, SIZE);
        os->sleep_ms(50);
        map_own_stop(own);
        CHECK(atomic_load(&calls) == 0);
        unmap(data, fd);
}

#define READ_BYTES (640u << 10) /* between two looks: a program that copies many small tensors is slow */

static char *read_on; /* where the program reads while the thread waits */
static unsigned reads;

static int read_meanwhile(const void *word, uint32_t value, int64_t timeout_ms)
{
        for (size_t at = 0; reads < 30 && at < READ_BYTES; at += 4096)
                CHECK(((volatile char *)read_on)[reads * READ_BYTES + at] == 0);
        reads += reads < 30;
        CHECK(atomic_load(&calls) == 0);
        return os_linux.futex_wait(word, value, 1);
}

/* `load_state_dict` copies what `load` has mapped, and the program then drops the map. */
static void while_the_program_reads_on_no_page_is_copied(void)
{
        int fd;
        struct map_own *own;

        read_on = mapped(&fd);
        table.futex_wait = read_meanwhile;
        own = map_own_start(read_on, SIZE);
        REQUIRE(own);
        wait_for(131);
        CHECK(reads == 30 && atomic_load(&calls) == 131);
        map_own_stop(own);
        unmap(read_on, fd);
}

static void a_small_file_gets_no_thread(void)
{
        int fd;
        char *data = mapped(&fd);

        CHECK(!map_own_start(data, 1u << 20));
        unmap(data, fd);
}

static void a_map_that_goes_is_not_held_up(void)
{
        int fd;
        char *data = mapped(&fd);
        struct map_own *own;

        table.advise = slow_advise;
        own = map_own_start(data, SIZE);
        wait_for(1);
        map_own_stop(own);
        CHECK(atomic_load(&calls) < 20);
        unmap(data, fd);
}

static void a_forked_child_that_frees_the_map_does_not_wait_for_its_parents_thread(void)
{
        int fd, status = 1;
        char *data = mapped(&fd);
        struct map_own *own;
        pid_t child;

        table.advise = slow_advise;
        own = map_own_start(data, SIZE);
        child = fork();
        if (child == 0) {
                alarm(20);
                map_own_stop(own);
                _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        map_own_stop(own);
        unmap(data, fd);
}

TAP_MAIN(TEST(all_pages_become_own_and_keep_their_values), TEST(without_twice_the_memory_free_no_page_is_copied),
         TEST(while_the_program_reads_on_no_page_is_copied), TEST(a_small_file_gets_no_thread), TEST(a_map_that_goes_is_not_held_up),
         TEST(a_forked_child_that_frees_the_map_does_not_wait_for_its_parents_thread))
