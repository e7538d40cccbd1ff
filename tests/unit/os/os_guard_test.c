/* Copies of memory that vanishes, and signals that belong to the program. */
#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/os.h"
#include "sum/sum.h"
#include "tap.h"

#define SIZE (1u << 20)

static unsigned char *source, *image;

static unsigned char *memory_new(void)
{
        unsigned char *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        for (size_t i = 0; memory != MAP_FAILED && i < SIZE; i++)
                memory[i] = (unsigned char)(i * 7 + i / 4096);
        return memory;
}

static void copy_all(void *argument, void *to, const void *from, size_t size)
{
        (void)argument;
        sum_copy_stream(to, from, size);
}

/* Reads as a copy does: the thread does not know what other threads do to its source. */
static void copy_and_unmap(void *argument, void *to, const void *from, size_t size)
{
        copy_all(argument, to, from, size / 2);
        munmap((void *)((uintptr_t)from + size / 2), size / 2);
        copy_all(argument, (char *)to + size / 2, (const char *)from + size / 2, size / 2);
}

static void copy_and_forbid(void *argument, void *to, const void *from, size_t size)
{
        mprotect((void *)((uintptr_t)from + size / 2), 4096, PROT_NONE);
        copy_all(argument, to, from, size);
}

static void copy_and_lose_image(void *argument, void *to, const void *from, size_t size)
{
        munmap((char *)to + size / 2, 4096);
        copy_all(argument, to, from, size);
}

static void readable_memory_is_copied(void)
{
        source = memory_new();
        image = memory_new();
        memset(image, 0, SIZE);
        REQUIRE(os->guard() == 0);
        for (size_t shift = 0; shift < 100; shift += 33) {
                CHECK(os->copy_guarded(copy_all, NULL, image, (uintptr_t)source + shift, SIZE - shift) == 0);
                CHECK(!memcmp(image, source + shift, SIZE - shift));
        }
}

static void memory_that_vanishes_ends_the_copy_and_not_the_program(void)
{
        for (int round = 0; round < 40; round++) { /* more often than copies may be made at a time */
                source = memory_new();
                image = memory_new();
                CHECK(os->copy_guarded(copy_and_unmap, NULL, image, (uintptr_t)source, SIZE) == -EFAULT);
                source = memory_new();
                CHECK(os->copy_guarded(copy_and_forbid, NULL, image, (uintptr_t)source, SIZE) == -EFAULT);
                source = memory_new();
                CHECK(os->copy_guarded(copy_and_lose_image, NULL, image, (uintptr_t)source, SIZE) == -EFAULT);
                source = memory_new();
                image = memory_new();
                CHECK(os->copy_guarded(copy_all, NULL, image, (uintptr_t)source, SIZE) == 0);
        }
}

static void read_nothing(void)
{
        unsigned char *gone = memory_new();

        munmap(gone, SIZE);
        printf("# %d\n", *(volatile unsigned char *)gone);
}

static void say_so(int signal_number)
{
        _exit(signal_number == SIGSEGV ? 40 : 41);
}

static void say_so_with_address(int signal_number, siginfo_t *info, void *context)
{
        (void)signal_number, (void)context;
        _exit(info->si_addr && info->si_code == SEGV_MAPERR ? 42 : 43);
}

static void go_on(int signal_number)
{
        (void)signal_number;
}

/* Runs both in a child that has no guard yet; how it ended. */
static int end_of(void (*before)(void), void (*after)(void))
{
        int status = 0;
        pid_t child;

        fflush(stdout);
        child = fork();
        if (child == 0) {
                if (before)
                        before();
                os->guard();
                after();
                _exit(7);
        }
        waitpid(child, &status, 0);
        return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

static void handle(void)
{
        signal(SIGSEGV, say_so);
}

static void handle_with_address(void)
{
        struct sigaction action = { .sa_sigaction = say_so_with_address, .sa_flags = SA_SIGINFO };

        sigaction(SIGSEGV, &action, NULL);
}

static void by_default(void)
{
        signal(SIGSEGV, SIG_DFL); /* a sanitizer has a handler of its own */
        signal(SIGBUS, SIG_DFL);
}

static void ignore(void)
{
        signal(SIGSEGV, SIG_IGN);
}

static void handle_once(void)
{
        struct sigaction action = { .sa_handler = go_on, .sa_flags = (int)SA_RESETHAND };

        sigaction(SIGSEGV, &action, NULL);
}

static void send_itself(void)
{
        kill(getpid(), SIGSEGV);
}

static void faults_of_others_end_as_without_a_guard(void)
{
        CHECK(end_of(by_default, read_nothing) == -SIGSEGV);
        CHECK(end_of(by_default, send_itself) == -SIGSEGV);
        CHECK(end_of(ignore, read_nothing) == -SIGSEGV);
        CHECK(end_of(ignore, send_itself) == 7);
        CHECK(end_of(handle, read_nothing) == 40);
        CHECK(end_of(handle, send_itself) == 40);
        CHECK(end_of(handle_with_address, read_nothing) == 42);
        CHECK(end_of(handle_with_address, send_itself) == 43);
        CHECK(end_of(handle_once, read_nothing) == -SIGSEGV);
}

/* Also in the middle of a copy, where the read is of other memory than the copy. */
static void copy_something_else(void *argument, void *to, const void *from, size_t size)
{
        (void)argument, (void)to, (void)from, (void)size;
        read_nothing();
}

static void copy_that_reads_elsewhere(void)
{
        source = memory_new();
        image = memory_new();
        os->copy_guarded(copy_something_else, NULL, image, (uintptr_t)source, SIZE);
}

static void a_fault_elsewhere_is_not_taken_for_one_of_the_copy(void)
{
        CHECK(end_of(by_default, copy_that_reads_elsewhere) == -SIGSEGV);
        CHECK(end_of(handle, copy_that_reads_elsewhere) == 40);
}

static void copy_under_another_handler(void)
{
        source = memory_new();
        image = memory_new();
        signal(SIGSEGV, say_so);
        _exit(os->copy_guarded(copy_all, NULL, image, (uintptr_t)source, SIZE) == -ENOTSUP ? 50 : 51);
}

static void under_a_handler_that_came_later_no_copy_is_made(void)
{
        CHECK(end_of(by_default, copy_under_another_handler) == 50);
}

static void a_watched_map_of_a_file_that_is_cut_off_reads_as_zeros(void)
{
        int fd = os->memfd("cut"), slot;
        volatile unsigned char *bytes;
        void *data;

        REQUIRE(fd >= 0 && !os->truncate(fd, 3 * 65536) && !os_write_at(fd, "abc", 3, 0));
        for (int cuts = 0; cuts < 2; cuts++) {
                REQUIRE(!os->map(fd, 0, 3 * 65536, OS_MAP_READ, &data));
                bytes = data;
                slot = os->watch_map(data, 3 * 65536);
                REQUIRE(slot >= 0 && bytes[1] == 'b');
                if (cuts)
                        REQUIRE(!os->truncate(fd, 65536));
                CHECK(bytes[1] == 'b' && bytes[3 * 65536 - 1] == 0 && bytes[65536] == 0);
                CHECK(os->unwatch_map(slot) == (cuts == 1));
                os->unmap(data, 3 * 65536);
        }
        os->close(fd);
}

/* These first: the guard is there for good once it is asked for, and children inherit it. */
TAP_MAIN(TEST(faults_of_others_end_as_without_a_guard), TEST(under_a_handler_that_came_later_no_copy_is_made),
         TEST(a_fault_elsewhere_is_not_taken_for_one_of_the_copy), TEST(readable_memory_is_copied),
         TEST(memory_that_vanishes_ends_the_copy_and_not_the_program), TEST(a_watched_map_of_a_file_that_is_cut_off_reads_as_zeros))
