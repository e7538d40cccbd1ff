/*
 * os_guard.c - reads memory that another thread may free meanwhile.
 *
 * The kernel's copy (copy_self) returns an error in that case, but writes
 * through the caches, which costs half as much memory traffic again. A copy in
 * user space gets a signal instead, so this file installs a handler. A fault
 * that is not from a guarded copy goes to the previous handler, as if this one
 * did not exist. If the program has replaced this handler since, no copy is
 * made here.
 *
 * A mapping of a file has the same fate if the file is cut off or its disk fails. A page of a watched mapping that cannot be read becomes one of
 * zeros, and the caller learns of it afterwards.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "os/ending.h"
#include "os/os_uffd.h"

#define GUARD_MAX 16
#define WATCHED_MAX 16
#define PAGE_BYTES 4096u

/* One running copy. The handler finds it by its thread id. Thread-local variables would not do: their first use may allocate. */
static struct guard {
        atomic_bool is_taken, is_active;
        pthread_t thread;
        uint64_t from, to, size;
        sigjmp_buf *back;
} guards[GUARD_MAX];

/* A mapping of a file. A page of it that cannot be read, because the file was cut off or its disk fails, becomes one of zeros. */
static struct watched {
        atomic_bool is_taken, is_torn;
        _Atomic uint64_t start, size; /* size 0: it is not watched */
} watched[WATCHED_MAX];

static pthread_once_t install_once = PTHREAD_ONCE_INIT;
static struct sigaction before_segv, before_bus; /* written once, before the handler is installed */
static int install_status;
static uint64_t page_bytes;

/* Compares whole pages: for memory that the hardware has lost, the signal names only the page. */
static bool lies_in(uint64_t address, uint64_t start, uint64_t size)
{
        return address / PAGE_BYTES >= start / PAGE_BYTES && address < start + size;
}

/* True: the page of a watched mapping is there now. */
static bool mend(uint64_t address)
{
        for (int i = 0; i < WATCHED_MAX; i++) {
                uint64_t start = atomic_load(&watched[i].start), size = atomic_load(&watched[i].size);
                void *page = (void *)(uintptr_t)(address & ~(page_bytes - 1));

                if (!size || address < start || address - start >= (size + page_bytes - 1) / page_bytes * page_bytes)
                        continue;
                if (mmap(page, page_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
                        return false;
                atomic_store(&watched[i].is_torn, true);
                return true;
        }
        return false;
}

static void on_fault(int signal_number, siginfo_t *info, void *context)
{
        uint64_t address = (uintptr_t)info->si_addr;
        int saved_errno = errno;

        if (signal_number == SIGBUS && info->si_code > 0 && mend(address)) {
                errno = saved_errno;
                return;
        }

        for (int i = 0; i < GUARD_MAX && info->si_code > 0; i++) {
                struct guard *guard = &guards[i];

                if (!atomic_load(&guard->is_active) || !pthread_equal(guard->thread, pthread_self()))
                        continue;
                if (lies_in(address, guard->from, guard->size) || lies_in(address, guard->to, guard->size))
                        siglongjmp(*guard->back, 1);
        }
        ending_crashes(context);
        ending_pass_on(signal_number == SIGBUS ? &before_bus : &before_segv, signal_number, info, context);
        errno = saved_errno;
}

static int install(int signal_number, struct sigaction *before)
{
        struct sigaction ours = { .sa_sigaction = on_fault };

        if (sigaction(signal_number, NULL, before) < 0)
                return -errno;
        ours.sa_mask = before->sa_mask;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK | (before->sa_flags & (SA_NODEFER | SA_RESTART));
        return sigaction(signal_number, &ours, NULL) < 0 ? -errno : 0;
}

/* A forked child has none of the copying threads, but may reuse their ids. */
static void forget_in_child(void)
{
        for (int i = 0; i < GUARD_MAX; i++) {
                atomic_store(&guards[i].is_active, false);
                atomic_store(&guards[i].is_taken, false);
        }
}

static void install_all(void)
{
        page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
        pthread_atfork(NULL, NULL, forget_in_child);
        install_status = install(SIGSEGV, &before_segv);
        if (install_status == 0)
                install_status = install(SIGBUS, &before_bus);
}

int linux_guard(void)
{
        pthread_once(&install_once, install_all);
        return install_status;
}

static bool is_ours(int signal_number)
{
        struct sigaction now;

        return sigaction(signal_number, NULL, &now) == 0 && now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault;
}

static struct guard *take(void)
{
        for (int i = 0; i < GUARD_MAX; i++) {
                bool is_taken = false;

                if (atomic_compare_exchange_strong(&guards[i].is_taken, &is_taken, true))
                        return &guards[i];
        }
        return NULL;
}

static int copy_until_fault(struct guard *guard, os_copy *copy, void *argument)
{
        sigjmp_buf back;

        guard->back = &back;
        if (sigsetjmp(back, 1)) {
                atomic_store(&guard->is_active, false);
                return -EFAULT;
        }
        atomic_store(&guard->is_active, true);
        copy(argument, (void *)(uintptr_t)guard->to, (const void *)(uintptr_t)guard->from, guard->size);
        atomic_store(&guard->is_active, false);
        return 0;
}

int linux_copy_guarded(os_copy *copy, void *argument, void *to, uint64_t from, size_t size)
{
        struct guard *guard = is_ours(SIGSEGV) && is_ours(SIGBUS) ? take() : NULL;
        int status;

        if (!guard)
                return -ENOTSUP;
        guard->thread = pthread_self();
        guard->from = from;
        guard->to = (uintptr_t)to;
        guard->size = size;
        status = copy_until_fault(guard, copy, argument);
        atomic_store(&guard->is_taken, false);
        return status;
}

int linux_watch_map(const void *data, uint64_t size)
{
        int result = linux_guard();

        if (result || !is_ours(SIGBUS))
                return result ? result : -ENOTSUP;
        for (int i = 0; i < WATCHED_MAX; i++) {
                bool is_taken = false;

                if (!atomic_compare_exchange_strong(&watched[i].is_taken, &is_taken, true))
                        continue;
                atomic_store(&watched[i].is_torn, false);
                atomic_store(&watched[i].start, (uintptr_t)data);
                atomic_store(&watched[i].size, size);
                return i;
        }
        return -EAGAIN;
}

bool linux_unwatch_map(int slot)
{
        bool is_torn;

        if (slot < 0)
                return false;
        atomic_store(&watched[slot].size, 0);
        is_torn = atomic_load(&watched[slot].is_torn);
        atomic_store(&watched[slot].is_taken, false);
        return is_torn;
}
