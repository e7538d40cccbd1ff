/* The time that the agent's look at values takes, beside the checksums that each persist needs: `ninja -C build tests/unit/sum/values_bench && build/tests/unit/sum/values_bench > bench/results/values.md`. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "image/finite.h"
#include "os/os.h"
#include "sum/sum.h"

#define BYTES (512u << 20)
#define CHUNK (4u << 20)
#define ROUNDS 9

static volatile uint64_t sink;

static void checksums(const uint8_t *data)
{
        for (size_t at = 0; at < BYTES; at += CHUNK)
                sink += sum_crc64(0, data + at, CHUNK);
}

static void sample(const uint8_t *data)
{
        sink += finite_sample(data, BYTES, TORCH_F32);
}

static void all(const uint8_t *data)
{
        sink += finite_all(data, BYTES, TORCH_F32);
}

static int compare(const void *a, const void *b)
{
        int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

        return (x > y) - (x < y);
}

int main(void)
{
        static const struct {
                const char *name;
                void (*run)(const uint8_t *data);
        } works[] = { { "the checksums of a persist (CRC-64)", checksums }, { "`sample`", sample }, { "`all`", all } };
        int64_t times[3][ROUNDS], middle[3];
        float *values = malloc(BYTES);

        if (!values)
                return 1;
        for (size_t i = 0; i < BYTES / sizeof *values; i++)
                values[i] = (float)(i % 1000) / 1000 - 0.5f;
        for (int round = 0; round < ROUNDS; round++)
                for (int i = 0; i < 3; i++) {
                        int64_t begun = os->thread_cpu_ns();

                        works[i].run((const uint8_t *)values);
                        times[i][round] = os->thread_cpu_ns() - begun;
                }
        printf("# The look at values\n\n`build/tests/unit/sum/values_bench`: processor time for 512 MiB of float32, the median of %d runs in turn.\n\n"
               "| work | processor time | of the checksums |\n| --- | --- | --- |\n", ROUNDS);
        for (int i = 0; i < 3; i++) {
                qsort(times[i], ROUNDS, sizeof times[i][0], compare);
                middle[i] = times[i][ROUNDS / 2];
                printf("| %s | %.2f ms | %.1f %% |\n", works[i].name, (double)middle[i] / 1e6, 100.0 * (double)middle[i] / (double)middle[0]);
        }
        free(values);
        return 0;
}
