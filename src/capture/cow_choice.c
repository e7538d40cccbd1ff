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
                uint64_t middle = (uintptr_t)parts[i].data + parts[i].size / 2;

                if (parts[i].size < COW_PART_MIN) /* copied at once, whatever is chosen */
                        continue;
                bytes += parts[i].size;
                /* One block tells for its part: what is joined is joined as a whole, sooner or later. */
                if (os->huge_page(fd, cow_block_of(middle)) == 1)
                        huge_bytes += parts[i].size;
        }
        os->close(fd);
        return huge_bytes > bytes / 2;
}
