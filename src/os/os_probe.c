/* Finds the machine's abilities by trying. Nothing here changes state that outlives the call. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "os/linux_abi.h"
#include "os/os.h"

#define FAULT_TIMEOUT_MS 2000
#define COLUMNS_DEFAULT 80

static int probe_terminal(int fd, uint64_t *ret_columns)
{
        struct winsize size;

        if (ioctl(fd, TIOCGWINSZ, &size))
                return -errno;
        *ret_columns = size.ws_col ? size.ws_col : COLUMNS_DEFAULT;
        return 0;
}

static int probe_io_uring(uint64_t *ret_value)
{
        uint64_t params[15]; /* struct io_uring_params */
        long fd;

        memset(params, 0, sizeof params);
        fd = syscall(SYS_io_uring_setup, 4, params);
        if (fd < 0)
                return -errno;
        close((int)fd);
        *ret_value = 1;
        return 0;
}

/* Opens the full kind, which also catches writes that the kernel does for the program. */
static int open_full(void)
{
        long fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
        int device, result;

        if (fd >= 0)
                return (int)fd;
        result = -errno;
        device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
        if (device < 0)
                return result;
        fd = ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
        close(device);
        if (fd >= 0)
                return (int)fd;
        return result;
}

static int protect(int fd, void *page, size_t size, bool is_protected)
{
        struct uffdio_writeprotect request = {
                .range = { .start = (uintptr_t)page, .len = size },
                .mode = is_protected ? UFFDIO_WRITEPROTECT_MODE_WP : 0,
        };

        return ioctl(fd, UFFDIO_WRITEPROTECT, &request) ? -errno : 0;
}

static void *write_page(void *page)
{
        *(volatile char *)page = 2;
        return NULL;
}

/* Protects a page, lets a thread write to it, and checks whether the write was caught. */
static int catch_write(int fd, char *page, size_t size)
{
        struct uffdio_api api = { .api = UFFD_API, .features = UFFD_FEATURE_PAGEFAULT_FLAG_WP };
        struct uffdio_register area = { .range = { .start = (uintptr_t)page, .len = size },
                                        .mode = UFFDIO_REGISTER_MODE_WP };
        struct pollfd wait = { .fd = fd, .events = POLLIN };
        struct uffd_msg message;
        pthread_t writer;
        bool is_caught;
        int result;

        if (ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &area))
                return -errno;
        *page = 1;
        result = protect(fd, page, size, true);
        if (result)
                return result;
        result = pthread_create(&writer, NULL, write_page, page);
        if (result)
                return -result;
        is_caught = poll(&wait, 1, FAULT_TIMEOUT_MS) == 1 &&
                    read(fd, &message, sizeof message) == (ssize_t)sizeof message &&
                    message.event == UFFD_EVENT_PAGEFAULT &&
                    message.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP && *page == 1;
        result = protect(fd, page, size, false);
        if (result)
                ioctl(fd, UFFDIO_UNREGISTER, &area.range); /* wakes the writer in any case */
        pthread_join(writer, NULL);
        return result ? result : is_caught ? 0 : -ENOTSUP;
}

static int probe_userfaultfd(uint64_t *ret_value)
{
        size_t size = (size_t)sysconf(_SC_PAGESIZE);
        int fd = open_full(), result;
        char *page;

        if (fd < 0) {
                long user_only = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);

                if (user_only < 0)
                        return fd;
                close((int)user_only);
                *ret_value = 1;
                return 0;
        }
        page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED) {
                result = -errno;
        } else {
                result = catch_write(fd, page, size);
                munmap(page, size);
        }
        close(fd);
        if (!result)
                *ret_value = 2;
        return result;
}

static int probe_limit(int resource, uint64_t *ret_value)
{
        struct rlimit limit;

        if (getrlimit((__rlimit_resource_t)resource, &limit))
                return -errno;
        *ret_value = limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : (uint64_t)limit.rlim_cur;
        return 0;
}

int os_probe_linux(enum os_probe what, uint64_t *ret_value)
{
        switch (what) {
        case OS_PROBE_TERMINAL_IN:
                return probe_terminal(0, ret_value);
        case OS_PROBE_TERMINAL_OUT:
                return probe_terminal(1, ret_value);
        case OS_PROBE_TERMINAL_ERR:
                return probe_terminal(2, ret_value);
        case OS_PROBE_IO_URING:
                return probe_io_uring(ret_value);
        case OS_PROBE_USERFAULTFD:
                return probe_userfaultfd(ret_value);
        case OS_PROBE_MEMLOCK:
                return probe_limit(RLIMIT_MEMLOCK, ret_value);
        case OS_PROBE_DESCRIPTORS:
                return probe_limit(RLIMIT_NOFILE, ret_value);
        }
        return -EINVAL;
}
