/*
 * sum_bench.c - GB/s of every checksum and copy path, on one thread.
 *
 *      ninja -C build tests/unit/sum/sum_bench     after make units
 *      build/tests/unit/sum/sum_bench [MiB]        default 256: larger than any cache
 *
 * One line per path: the best of five passes over memory that was touched before,
 * by the processor time of the thread, so that other work on the machine counts less.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sum/sum.h"
#include "sum/sum_private.h"

#define PASSES 5

static unsigned char *from, *to;
static size_t size;
static volatile uint64_t sink;

static void run_crc32(void)
{
        sink ^= sum_crc32(0, from, size);
}

static void run_crc64(void)
{
        sink ^= sum_crc64(0, from, size);
}

static void run_both(void)
{
        uint32_t crc32 = 0;
        uint64_t crc64 = 0;

        sum_both(from, size, &crc32, &crc64);
        sink ^= crc32 ^ crc64;
}

static void run_copy(void)
{
        sum_copy_stream(to, from, size);
}

static void run_copy_both(void)
{
        uint32_t crc32 = 0;
        uint64_t crc64 = 0;

        sum_copy_both(to, from, size, &crc32, &crc64);
        sink ^= crc32 ^ crc64;
}

#ifdef SUM_X86
static void run_sse2(void)
{
        sum_copy_sse2(to, from, size);
}
#endif

static double cpu_s(void)
{
        struct timespec now;

        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
        return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void measure(const char *isa, const char *what, void (*run)(void))
{
        double best = 1e9;

        for (int pass = 0; pass < PASSES; pass++) {
                double begun = cpu_s(), took;

                run();
                took = cpu_s() - begun;
                best = took < best ? took : best;
        }
        printf("%-12s %-12s %7.2f GB/s\n", isa, what, (double)size / best * 1e-9);
        fflush(stdout);
}

int main(int argc, char **argv)
{
        static const char *const names[] = { "portable", "pclmul", "vpclmul-256", "vpclmul-512", "pmull" };

        size = (argc > 1 ? strtoul(argv[1], NULL, 10) : 256) << 20;
        from = aligned_alloc(4096, size);
        to = aligned_alloc(4096, size);
        if (!size || !from || !to) {
                fprintf(stderr, "no memory for 2 times %zu bytes\n", size);
                return 1;
        }
        memset(from, 0x5a, size);
        memset(to, 0, size);
        for (int isa = SUM_ISA_PORTABLE; isa < SUM_ISA_COUNT; isa++) {
                if (sum_isa_force((enum sum_isa)isa)) {
                        printf("%-12s (this machine lacks it)\n", names[isa]);
                        continue;
                }
                measure(names[isa], "crc32", run_crc32);
                measure(names[isa], "crc64", run_crc64);
                measure(names[isa], "both", run_both);
                measure(names[isa], isa == SUM_ISA_PORTABLE ? "memcpy" : "copy_stream", run_copy);
                measure(names[isa], "copy_both", run_copy_both);
        }
#ifdef SUM_X86
        measure("sse2", "copy_stream", run_sse2);
#endif
        free(from);
        free(to);
        return 0;
}
