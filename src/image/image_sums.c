#include <stdlib.h>

#include "image/image.h"
#include "sum/sum.h"

struct image_sums image_sums_in(void *image, uint64_t size, uint64_t capacity)
{
        struct image_sums sums = { .room = image_sums_room(size, capacity) };

        if (sum_copies_both() && sums.room)
                sums.list = (struct image_sum *)(void *)((char *)image + image_sums_offset(size));
        return sums;
}

void image_sums_add(struct image_sums *sums, const struct image_sum *sum)
{
        if (sums->count < sums->room)
                sums->list[sums->count++] = *sum;
}

static int compare_sums(const void *a, const void *b)
{
        const struct image_sum *left = a, *right = b;

        return left->offset < right->offset ? -1 : left->offset > right->offset;
}

void image_sums_sort(struct image_sums *sums, uint32_t first)
{
        if (first < sums->count)
                qsort(sums->list + first, sums->count - first, sizeof *sums->list, compare_sums);
}
