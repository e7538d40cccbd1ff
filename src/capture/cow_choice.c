/*
 * cow_choice.c - decides whether protecting is cheaper than copying. A huge
 * page is protected and freed in one operation. Protecting 512 small pages
 * costs about half of copying them, and early writers pay more than the other
 * half.
 */
#include "capture/cow_private.h"
#include "os/os.h"

#define PLACE_COUNT 16 /* addresses to check, spread evenly over the bytes; each check costs more than a microsecond */

static uint64_t protected_bytes(const struct capture_part *part)
{
        return part->size < COW_PART_BYTES ? 0 : part->size; /* smaller parts are copied at once in any case */
}

static uint64_t place_at(uint64_t bytes, uint32_t place)
{
        return bytes / PLACE_COUNT * place + bytes / (2 * PLACE_COUNT);
}

/* The block at `address`; if that block contains an end of the part, its neighbour inside the part. At the ends,
 * pages are small even if all others are huge, and parts of equal size would be checked only at their ends. */
static uint64_t block_inside(const struct capture_part *part, uint64_t address)
{
        uint64_t start = (uintptr_t)part->data, end = start + part->size, block = cow_block_of(address);

        if (block < start && block + 2 * COW_BLOCK_BYTES <= end)
                return block + COW_BLOCK_BYTES;
        if (block + COW_BLOCK_BYTES > end && block >= start + COW_BLOCK_BYTES)
                return block - COW_BLOCK_BYTES;
        return block;
}

bool cow_pays(const struct capture_part *parts, size_t count)
{
        uint64_t bytes = 0, end = 0, at;
        uint32_t place = 0, huge_count = 0;
        int fd = os->open("/proc/self/pagemap", OS_READ);

        if (fd < 0)
                return false;
        for (size_t i = 0; i < count; i++)
                bytes += protected_bytes(&parts[i]);
        for (size_t i = 0; i < count; i++) {
                end += protected_bytes(&parts[i]);
                for (; place < PLACE_COUNT && (at = place_at(bytes, place)) < end; place++)
                        huge_count += os->huge_page(fd, block_inside(&parts[i], (uintptr_t)parts[i].data + parts[i].size - (end - at))) == 1;
        }
        os->close(fd);
        return huge_count > PLACE_COUNT / 2;
}
