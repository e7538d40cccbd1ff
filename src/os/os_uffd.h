/*
 * os_uffd.h - the members of os_linux that os_uffd.c and os_guard.c implement; see os.h.
 */
#ifndef NB_OS_OS_UFFD_H
#define NB_OS_OS_UFFD_H

#include "os/os.h"

int linux_uffd_open(uint32_t *ret_abilities);
int linux_uffd_register(int fd, uint64_t start, uint64_t end);
int linux_uffd_unregister(int fd, uint64_t start, uint64_t end);
int linux_uffd_protect(int fd, uint64_t start, uint64_t end, bool on);
int linux_uffd_wake(int fd, uint64_t start, uint64_t end);
int linux_uffd_read(int fd, struct os_uffd_event *events, size_t count);
int linux_fill_open(void *data, uint64_t size);
int linux_fill(int fd, void *to, const void *from, uint64_t size);
int64_t linux_copy_self(void *to, uint64_t from, size_t size);
int linux_guard(void);
int linux_copy_guarded(os_copy *copy, void *argument, void *to, uint64_t from, size_t size);
int linux_watch_map(const void *data, uint64_t size);
bool linux_unwatch_map(int slot);
int linux_find_mapping(int maps_fd, uint64_t address, struct os_mapping *ret_mapping);
int linux_huge_page(int pagemap_fd, uint64_t address);
int linux_own_pages(int pagemap_fd, uint64_t start, uint64_t end);
int linux_futex_wait(const void *word, uint32_t value, int64_t timeout_ms);
int linux_futex_wake(const void *word);
int linux_thread_nice(int nice);
void linux_yield(void);

/* The initialisers of these members, for the table in os_linux.c. */
#define LINUX_UFFD_MEMBERS \
        .uffd_open = linux_uffd_open, .uffd_register = linux_uffd_register, .uffd_unregister = linux_uffd_unregister, \
        .uffd_protect = linux_uffd_protect, .uffd_wake = linux_uffd_wake, .uffd_read = linux_uffd_read, \
        .fill_open = linux_fill_open, .fill = linux_fill, .copy_self = linux_copy_self, .guard = linux_guard, .copy_guarded = linux_copy_guarded, \
        .watch_map = linux_watch_map, .unwatch_map = linux_unwatch_map, \
        .find_mapping = linux_find_mapping, .futex_wait = linux_futex_wait, \
        .futex_wake = linux_futex_wake, .thread_nice = linux_thread_nice, .yield = linux_yield, .huge_page = linux_huge_page, \
        .own_pages = linux_own_pages

#endif
