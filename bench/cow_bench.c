/*
 * cow_bench.c - compares a copy-on-write capture with a streaming copy of the same bytes in the same run.
 *
 *      cow_bench [MiB [rounds]]        default 2048 5
 *
 * Prints one JSON object per kind of page: medians in milliseconds, and the ratios of bench/results/peers.md. Every round's image is compared
 * with the values at its start.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "capture/cow.h"
#include "os/os.h"

#define MIB ((size_t)1 << 20)
#define PART_COUNT 64
#define ROUND_MAX 64

struct samples {
        double ms[ROUND_MAX];
        int count;
};

static double now_ms(void)
{
        return (double)os->now_ns() / 1e6;
}

static void add(struct samples *samples, double ms)
{
        samples->ms[samples->count++] = ms;
}

static int compare(const void *a, const void *b)
{
        double left = *(const double *)a, right = *(const double *)b;

        return left < right ? -1 : left > right;
}

static double median(struct samples *samples)
{
        qsort(samples->ms, (size_t)samples->count, sizeof samples->ms[0], compare);
        return samples->ms[samples->count / 2];
}

static void *map(size_t size, int flags)
{
        void *data = mmap(NULL, size, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);

        if (data == MAP_FAILED) {
                perror("mmap");
                exit(1);
        }
        return data;
}

/* Each part begins 64 bytes into its mapping, as malloc lays large blocks out. */
static size_t parts_make(unsigned char *memory, size_t total, struct capture_part *parts)
{
        size_t stride = total / PART_COUNT;

        for (size_t i = 0; i < PART_COUNT; i++)
                parts[i] = (struct capture_part){ memory + i * stride + 64, stride - 4096, i * stride };
        return PART_COUNT;
}

static void check(const unsigned char *image, const struct capture_part *parts, size_t count, int value)
{
        for (size_t i = 0; i < count; i++) {
                const unsigned char *bytes = image + parts[i].image_offset;

                if (bytes[0] != value || memcmp(bytes, bytes + 1, parts[i].size - 1)) {
                        fprintf(stderr, "part %zu of the image does not hold the old values\n", i);
                        exit(1);
                }
        }
}

static void bench(const char *name, size_t total, int rounds, int advice)
{
        unsigned char *memory = map(total + 2 * MIB, MAP_PRIVATE), *image = map(total, MAP_SHARED);
        struct samples copy = { 0 }, copy_over = { 0 }, blocked = { 0 }, done = { 0 }, cow_over = { 0 }, cpu = { 0 };
        struct capture_part parts[PART_COUNT];
        size_t count;
        uint64_t faults = 0;
        int value = 0;

        memory = (unsigned char *)(((uintptr_t)memory + 2 * MIB - 1) & ~(uintptr_t)(2 * MIB - 1));
        madvise(memory, total, advice);
        memset(memory, 0, total);
        memset(image, 0, total);
        count = parts_make(memory, total, parts);
        for (int round = 0; round < rounds; round++) {
                struct cow_capture *capture;
                struct cow_stats stats;
                double begin = now_ms(), middle;

                capture_copy(image, parts, count);
                middle = now_ms();
                memset(memory, ++value & 127, total);
                add(&copy, middle - begin);
                add(&copy_over, now_ms() - begin);

                /* The program changes nothing: measures the time that the capture blocks, and the time until the last byte is copied. */
                begin = now_ms();
                if (cow_start(image, parts, count, &capture, NULL) != NEBULA_OK)
                        exit(1);
                add(&blocked, now_ms() - begin);
                cow_wait(capture, -1, NULL);
                add(&done, now_ms() - begin);
                cow_stats(capture, &stats);
                add(&cpu, (double)stats.cpu_ns / 1e6);
                cow_free(capture);

                /* The program overwrites everything at once. */
                begin = now_ms();
                if (cow_start(image, parts, count, &capture, NULL) != NEBULA_OK)
                        exit(1);
                add(&blocked, now_ms() - begin);
                memset(memory, ++value & 127, total);
                add(&cow_over, now_ms() - begin);
                if (cow_wait(capture, -1, NULL) != NEBULA_OK)
                        exit(1);
                cow_stats(capture, &stats);
                faults = stats.fault_count;
                cow_free(capture);
                check(image, parts, count, (value - 1) & 127);
        }
        printf("{\"pages\": \"%s\", \"mib\": %zu, \"parts\": %zu, \"streaming_copy_ms\": %.2f, \"cow_blocked_ms\": %.3f, "
               "\"cow_complete_ms\": %.2f, \"cow_cpu_ms\": %.2f, \"copy_and_overwrite_ms\": %.2f, "
               "\"cow_and_overwrite_ms\": %.2f, \"faults\": %llu, \"blocked_ratio\": %.5f, \"overwrite_ratio\": %.3f}\n",
               name, total / MIB, count, median(&copy), median(&blocked), median(&done), median(&cpu),
               median(&copy_over), median(&cow_over), (unsigned long long)faults, median(&blocked) / median(&copy),
               median(&cow_over) / median(&copy_over));
        munmap(image, total);
        munmap(memory, total);
}

int main(int argc, char **argv)
{
        size_t total = (argc > 1 ? (size_t)atol(argv[1]) : 2048) * MIB;
        int rounds = argc > 2 ? atoi(argv[2]) : 5;
        struct nebula_error error;

        if (total < PART_COUNT * MIB || rounds < 1 || rounds > ROUND_MAX / 2) {
                fprintf(stderr, "usage: cow_bench [MiB >= %d [rounds 1..%d]]\n", PART_COUNT, ROUND_MAX / 2);
                return 2;
        }
        if (cow_available(&error) != NEBULA_OK) {
                fprintf(stderr, "cow_bench: %s\n", error.message);
                return 77;
        }
        bench("huge", total, rounds, MADV_HUGEPAGE);
        bench("4k", total, rounds, MADV_NOHUGEPAGE);
        return 0;
}
