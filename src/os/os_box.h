/*
 * os_box.h - takes rights from this process that it needs no more. There is no way back, also for a thread that hostile bytes have taken over.
 *
 *      os_box_enter    before threads start: they inherit the box
 *
 * No privileges: no program that it starts gets more rights than it has.
 * Calls: the kernel refuses every system call that is not in the list of os_box.c: with EPERM those that start or read
 * another program, and all others with ENOSYS.
 * Paths: the kernel opens files below the given paths alone (Landlock, Linux 5.13 or newer). Descriptors that are open stay open.
 */
#ifndef NB_OS_OS_BOX_H
#define NB_OS_OS_BOX_H

/* A sanitizer traces its own process, so a build with one keeps all calls. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OS_BOX_HAS_CALLS 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define OS_BOX_HAS_CALLS 0
#endif
#endif
#ifndef OS_BOX_HAS_CALLS
#define OS_BOX_HAS_CALLS 1
#endif

enum os_box_part { OS_BOX_NO_PRIVILEGES = 1, OS_BOX_CALLS = 2, OS_BOX_PATHS = 4 };

struct os_box {
        const char *const *read;  /* paths below which files are read; NULL ends the list */
        const char *const *write; /* below which they are read, written, made and removed. NULL, and `read` NULL: all paths stay open */
};
/* Returns the parts that the kernel has. A path that does not exist is left out. A negative errno: a part failed that the kernel has. */
int os_box_enter(const struct os_box *box);

#endif
