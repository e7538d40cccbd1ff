/*
 * os_uffd.c - userfaultfd write protection and filling of new pages, copies that survive a vanished
 * source, mappings, futexes.
 *
 * The ABI is that of Linux 5.7 and later (linux_abi.h). Nothing in this file
 * allocates or takes a lock: the fault thread calls it while other threads may
 * hold any lock.
 */
#include "os/os_uffd.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <limits.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "os/linux_abi.h"
#include "os/os_linux.h"

/* No EVENT_FORK: a child gets ordinary, unprotected pages of its own. */
#define NEEDED_FEATURES (UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_REMOVE | \
                         UFFD_FEATURE_EVENT_UNMAP)

struct map_query { /* struct procmap_query of <linux/fs.h> */
        uint64_t size, query_flags, query_address;
        uint64_t start, end, flags, page_size, offset, inode;
        uint32_t device_major, device_minor, name_size, build_id_size;
        uint64_t name_address, build_id_address;
};
#define MAP_QUERY _IOWR('f', 17, struct map_query)
#define MAP_QUERY_WRITABLE 0x02
#define MAP_QUERY_SHARED 0x08
#define MAP_QUERY_OR_NEXT 0x10

static int result(int64_t returned)
{
        return returned < 0 ? -errno : (int)returned;
}

/* Without UFFD_USER_MODE_ONLY: a read() into a protected buffer must wait, not fail with EFAULT. */
static int open_full(void)
{
        int fd = os_linux_descriptor((int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));
        int device;

        if (fd != -EPERM)
                return fd;
        device = result(open("/dev/userfaultfd", O_RDWR | O_CLOEXEC));
        if (device < 0)
                return fd;
        fd = os_linux_descriptor(ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK));
        close(device);
        return fd;
}

int linux_uffd_open(uint32_t *ret_abilities)
{
        /* Asking for a feature that the kernel lacks fails, so ask for the most features first. */
        static const uint64_t attempts[] = { NEEDED_FEATURES | UFFD_FEATURE_WP_UNPOPULATED, NEEDED_FEATURES };
        int status = -ENOSYS;

        for (size_t i = 0; i < sizeof attempts / sizeof attempts[0]; i++) {
                struct uffdio_api api = { .api = UFFD_API, .features = attempts[i] };
                int fd = open_full();

                if (fd < 0)
                        return fd;
                status = result(ioctl(fd, UFFDIO_API, &api));
                if (status >= 0 && (api.features & attempts[i]) == attempts[i]) {
                        *ret_abilities = i == 0 ? OS_UFFD_UNPOPULATED : 0;
                        return fd;
                }
                close(fd);
        }
        return status < 0 ? status : -EOPNOTSUPP;
}

int linux_uffd_register(int fd, uint64_t start, uint64_t end)
{
        struct uffdio_register request = { .range = { start, end - start }, .mode = UFFDIO_REGISTER_MODE_WP };
        int status = result(ioctl(fd, UFFDIO_REGISTER, &request));

        if (status < 0)
                return status;
        return request.ioctls & (1ull << _UFFDIO_WRITEPROTECT) ? 0 : -EOPNOTSUPP;
}

int linux_uffd_unregister(int fd, uint64_t start, uint64_t end)
{
        struct uffdio_range range = { start, end - start };

        return result(ioctl(fd, UFFDIO_UNREGISTER, &range));
}

int linux_uffd_protect(int fd, uint64_t start, uint64_t end, bool on)
{
        struct uffdio_writeprotect request = {
                .range = { start, end - start },
                .mode = on ? UFFDIO_WRITEPROTECT_MODE_WP : 0,
        };

        return result(ioctl(fd, UFFDIO_WRITEPROTECT, &request));
}

int linux_uffd_wake(int fd, uint64_t start, uint64_t end)
{
        struct uffdio_range range = { start, end - start };

        return result(ioctl(fd, UFFDIO_WAKE, &range));
}

static void translate(const struct uffd_msg *message, struct os_uffd_event *ret_event)
{
        uint64_t page = ~(uint64_t)4095;

        memset(ret_event, 0, sizeof *ret_event);
        ret_event->kind = OS_UFFD_OTHER;
        switch (message->event) {
        case UFFD_EVENT_PAGEFAULT:
                ret_event->kind = OS_UFFD_FAULT;
                ret_event->start = message->arg.pagefault.address & page;
                ret_event->end = ret_event->start + 4096;
                break;
        case UFFD_EVENT_REMOVE:
        case UFFD_EVENT_UNMAP:
                ret_event->kind = message->event == UFFD_EVENT_UNMAP ? OS_UFFD_UNMAP : OS_UFFD_REMOVE;
                ret_event->start = message->arg.remove.start;
                ret_event->end = message->arg.remove.end;
                break;
        case UFFD_EVENT_REMAP:
                ret_event->kind = OS_UFFD_REMAP;
                ret_event->start = message->arg.remap.from;
                ret_event->end = message->arg.remap.from + message->arg.remap.len;
                ret_event->moved_to = message->arg.remap.to;
                break;
        default:
                break;
        }
}

int linux_uffd_read(int fd, struct os_uffd_event *events, size_t count)
{
        struct uffd_msg messages[16];
        ssize_t size;

        if (count > sizeof messages / sizeof messages[0])
                count = sizeof messages / sizeof messages[0];
        size = read(fd, messages, count * sizeof messages[0]);
        if (size < 0)
                return errno == EAGAIN || errno == EINTR ? 0 : -errno;
        count = (size_t)size / sizeof messages[0];
        for (size_t i = 0; i < count; i++)
                translate(&messages[i], &events[i]);
        return (int)count;
}

/* Whether a page fault in any large mapping makes a huge page. */
static bool huge_is_default(void)
{
        char text[64];
        int fd = result(open("/sys/kernel/mm/transparent_hugepage/enabled", O_RDONLY | O_CLOEXEC));
        ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);

        if (fd >= 0)
                close(fd);
        text[size < 0 ? 0 : size] = 0;
        return strstr(text, "[always]") != NULL;
}

/* Faults of the kernel are not needed here, so this works without privileges (Linux 5.11). */
int linux_fill_open(void *data, uint64_t size)
{
        struct uffdio_api api = { .api = UFFD_API };
        struct uffdio_register request = { .range = { (uintptr_t)data, size }, .mode = UFFDIO_REGISTER_MODE_MISSING };
        int fd, status;

        if (huge_is_default())
                return -EOPNOTSUPP;
        fd = os_linux_descriptor((int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY));
        if (fd < 0)
                return fd;
        status = result(ioctl(fd, UFFDIO_API, &api));
        if (status >= 0)
                status = result(ioctl(fd, UFFDIO_REGISTER, &request));
        if (status >= 0)
                return fd;
        close(fd);
        return status;
}

int linux_fill(int fd, void *to, const void *from, uint64_t size)
{
        uint64_t done = 0;

        while (done < size) {
                struct uffdio_copy request = { .dst = (uintptr_t)to + done, .src = (uintptr_t)from + done, .len = size - done };
                int status = result(ioctl(fd, UFFDIO_COPY, &request));

                if (status >= 0)
                        return 0;
                if (request.copy > 0) {
                        done += (uint64_t)request.copy;
                } else if (status == -EEXIST) { /* mlockall(MCL_FUTURE) has made the pages */
                        memcpy((char *)to + done, (const char *)from + done, 4096);
                        done += 4096;
                } else if (status != -EAGAIN) {
                        return status;
                }
        }
        return 0;
}

int64_t linux_copy_self(void *to, uint64_t from, size_t size)
{
        struct iovec local = { to, size };
        struct iovec remote = { (void *)(uintptr_t)from, size };
        ssize_t copied = syscall(SYS_process_vm_readv, getpid(), &local, 1ul, &remote, 1ul, 0ul);

        return copied < 0 ? -errno : copied;
}

int linux_find_mapping(int maps_fd, uint64_t address, struct os_mapping *ret_mapping)
{
        struct map_query query = { .size = sizeof query, .query_flags = MAP_QUERY_OR_NEXT, .query_address = address };
        int status = result(ioctl(maps_fd, MAP_QUERY, &query));
        bool is_file;

        if (status < 0)
                return status;
        ret_mapping->start = query.start;
        ret_mapping->end = query.end;
        is_file = query.inode || query.device_major || query.device_minor;
        ret_mapping->private_anonymous = !(query.flags & MAP_QUERY_SHARED) && !is_file;
        ret_mapping->private_file = !(query.flags & MAP_QUERY_SHARED) && query.flags & MAP_QUERY_WRITABLE && is_file;
        return 0;
}

/* PAGEMAP_SCAN of linux/fs.h, for headers that lack it. */
struct page_scan {
        uint64_t size, flags, start, end, walk_end, vector, vector_count, page_max;
        uint64_t category_inverted, category_all, category_any, category_return;
};
struct page_region {
        uint64_t start, end, categories;
};
#define PAGE_SCAN _IOWR('f', 16, struct page_scan)
#define PAGE_FILE (UINT64_C(1) << 2)
#define PAGE_PRESENT (UINT64_C(1) << 3)
#define PAGE_HUGE (UINT64_C(1) << 6)

/* 1 if there is a page as `scan` describes it. */
static int scan_pages(int pagemap_fd, struct page_scan scan)
{
        struct page_region region;
        int count;

        scan.size = sizeof scan;
        scan.vector = (uintptr_t)&region;
        scan.vector_count = 1;
        count = result(ioctl(pagemap_fd, PAGE_SCAN, &scan));
        return count < 0 ? count : count > 0;
}

int linux_huge_page(int pagemap_fd, uint64_t address)
{
        return scan_pages(pagemap_fd, (struct page_scan){
                .start = address, .end = address + (UINT64_C(2) << 20), .category_all = PAGE_HUGE, .category_return = PAGE_HUGE,
        });
}

int linux_own_pages(int pagemap_fd, uint64_t start, uint64_t end)
{
        int others = scan_pages(pagemap_fd, (struct page_scan){
                .start = start, .end = end, .category_inverted = PAGE_PRESENT, .category_any = PAGE_FILE | PAGE_PRESENT,
                .category_return = PAGE_FILE,
        });

        return others < 0 ? others : !others;
}

int linux_futex_wait(const void *word, uint32_t value, int64_t timeout_ms)
{
        struct timespec limit = { timeout_ms / 1000, timeout_ms % 1000 * 1000000 };

        return result(syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, timeout_ms < 0 ? NULL : &limit, NULL, 0));
}

int linux_futex_wake(const void *word)
{
        return result(syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0));
}

int linux_thread_nice(int nice)
{
        int before;

        errno = 0;
        before = getpriority(PRIO_PROCESS, 0); /* on Linux this is the calling thread alone; -1 is a valid priority */
        if (errno)
                return -errno;
        return result(setpriority(PRIO_PROCESS, 0, before + nice));
}

void linux_yield(void)
{
        sched_yield();
}
