/*
 * cow_choice.c - whether protecting pays. A huge page is protected, and given
 * free again, in one stroke; 512 small ones cost about half of what copying
 * them at once would, and writers that come soon pay more than the rest.
 */
#include "capture/cow_private.h"
#include "os/os.h"

bool cow_pays(const struct capture_part *parts, size_t count)
{
        uint64_t huge_bytes = 0, bytes = 0;
        int fd = os->open("/proc/self/pagemap", OS_READ);

        if (fd < 0)
                return false;
        for (size_t i = 0; i < count; i++) {
                uint64_t start = (uintptr_t)parts[i].data, middle = cow_block_of(start + parts[i].size / 2);

                bytes += parts[i].size;
                /* One block tells for its part: what is joined is joined as a whole, sooner or later. */
                if (middle >= start && middle + COW_BLOCK_BYTES <= start + parts[i].size && os->huge_page(fd, middle) == 1)
                        huge_bytes += parts[i].size;
        }
        os->close(fd);
        return huge_bytes > bytes / 2;
}
