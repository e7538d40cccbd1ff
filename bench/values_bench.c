/* The time that the agent's look at values takes, beside the checksums that each persist needs: `ninja -C build tests/unit/sum/values_bench && build/tests/unit/sum/values_bench > bench/results/values.md`. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "image/finite.h"
#include "image/image.h"
#include "os/os.h"
#include "sum/sum.h"

#define BYTES (512u << 20)
#define CHUNK (4u << 20)
#define ROUNDS 9
#define SMALL 3000u
#define SMALL_ELEMENTS 1024u

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

static void *small;
static uint64_t small_size;

static void checksums_of_small(const uint8_t *data)
{
        (void)data;
        for (int version = 0; version < 4; version++)
                sink += sum_crc64(0, small, small_size);
}

static void sample_of_small(const uint8_t *data)
{
        struct torch_tensors tensors;
        struct zip_entry *entries;
        size_t count;

        (void)data;
        for (int version = 0; version < 4; version++) {
                if (zip_read_directory(small, small_size, &entries, &count, NULL) ||
                    (!version && torch_tensors_find_in(small, entries, count, &tensors, NULL)))
                        abort();
                free(entries);
        }
        for (size_t i = 0; i < tensors.count; i++)
                sink += finite_sample((uint8_t *)small + tensors.list[i].offset, tensors.list[i].elements * sizeof(float), tensors.list[i].dtype);
        torch_tensors_done(&tensors);
}

/* A file of SMALL tensors of SMALL_ELEMENTS each. */
static void make_small(void)
{
        static struct nebula_tensor tensors[SMALL];
        static uint64_t sizes[SMALL];
        static char names[SMALL][32];
        struct zip_layout layout;
        struct nebula_error error;
        uint64_t *chunks;
        size_t size, count;
        char *pickle;

        for (size_t i = 0; i < SMALL; i++) {
                snprintf(names[i], sizeof names[i], "layers.%zu.weight", i);
                tensors[i] = (struct nebula_tensor){ .name = names[i], .dtype = NEBULA_DTYPE_F32, .dim_count = 1, .shape = { SMALL_ELEMENTS } };
                sizes[i] = SMALL_ELEMENTS * sizeof(float);
        }
        if (pickle_flat_dict(tensors, SMALL, &pickle, &size, &error) || zip_layout_init(&layout, size, sizes, SMALL, &error))
                abort();
        small_size = layout.size;
        small = calloc(1, small_size);
        if (!small)
                abort();
        zip_layout_write(&layout, pickle, small);
        if (image_seal(small, small_size, true, CHUNK, &chunks, &count, &error))
                abort();
        free(chunks);
        free(pickle);
        zip_layout_done(&layout);
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
                size_t base; /* the row that this one is compared with */
        } works[] = {
                { "512 MiB in one tensor: the checksums of a persist (CRC-64)", checksums, 0 }, { "`sample`", sample, 0 }, { "`all`", all, 0 },
                { "12 MB in 3,000 tensors, four versions: the checksums", checksums_of_small, 3 },
                { "their directories, and of one the pickle and `sample`", sample_of_small, 3 },
        };
        enum { WORKS = sizeof works / sizeof *works };
        int64_t times[WORKS][ROUNDS], middle[WORKS];
        float *values = malloc(BYTES);

        if (!values)
                return 1;
        for (size_t i = 0; i < BYTES / sizeof *values; i++)
                values[i] = (float)(i % 1000) / 1000 - 0.5f;
        make_small();
        for (int round = 0; round < ROUNDS; round++)
                for (size_t i = 0; i < WORKS; i++) {
                        int64_t begun = os->thread_cpu_ns();

                        works[i].run((const uint8_t *)values);
                        times[i][round] = os->thread_cpu_ns() - begun;
                }
        printf("# The look at values\n\n`build/tests/unit/sum/values_bench`: processor time, float32, the median of %d runs in turn.\n\n"
               "| work | processor time | of the checksums |\n| --- | --- | --- |\n", ROUNDS);
        for (size_t i = 0; i < WORKS; i++) {
                qsort(times[i], ROUNDS, sizeof times[i][0], compare);
                middle[i] = times[i][ROUNDS / 2];
                printf("| %s | %.2f ms | %.1f %% |\n", works[i].name, (double)middle[i] / 1e6, 100.0 * (double)middle[i] / (double)middle[works[i].base]);
        }
        free(small);
        free(values);
        return 0;
}
