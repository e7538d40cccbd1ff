/*
 * linux_abi.h - definitions of the kernel's interface that the headers of an older system lack. What the running
 * kernel can do is found at run time, so a program that was built on an old system uses a new kernel in full.
 */
#ifndef NB_OS_LINUX_ABI_H
#define NB_OS_LINUX_ABI_H

#include <linux/userfaultfd.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

/* Linux 5.1, 5.6 and 5.9. The numbers are those of all architectures but alpha. */
#ifndef SYS_io_uring_setup
#define SYS_io_uring_setup 425
#endif
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

/* Linux 4.14: RWF_NOWAIT of <linux/fs.h> */
#define LINUX_RWF_NOWAIT 0x00000008

/* struct open_how and RESOLVE_ of <linux/openat2.h> */
struct linux_open_how {
        uint64_t flags, mode, resolve;
};
#define LINUX_RESOLVE_NO_MAGICLINKS 0x02
#define LINUX_RESOLVE_NO_SYMLINKS 0x04
#define LINUX_RESOLVE_BENEATH 0x08

/* Linux 5.7: write protection by userfaultfd */
#ifndef UFFDIO_WRITEPROTECT
#define _UFFDIO_WRITEPROTECT 0x06
struct uffdio_writeprotect {
        struct uffdio_range range;
        uint64_t mode;
};
#define UFFDIO_WRITEPROTECT_MODE_WP (UINT64_C(1) << 0)
#define UFFDIO_WRITEPROTECT _IOWR(UFFDIO, _UFFDIO_WRITEPROTECT, struct uffdio_writeprotect)
#endif
/* Linux 5.11, 6.1 and 6.4 */
#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif
#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif
#ifndef UFFD_FEATURE_WP_UNPOPULATED
#define UFFD_FEATURE_WP_UNPOPULATED (1 << 13)
#endif

/* Linux 5.14 and 6.1 */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#endif
