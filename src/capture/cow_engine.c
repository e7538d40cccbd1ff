#include <errno.h>
#include <signal.h>
#include <string.h>

#include "base/error.h"
#include "capture/cow_private.h"
#include "os/thread.h"

static struct lock engine_lock = LOCK_INIT(LOCK_ENGINE); /* guards the variables below; the fault thread never takes it */
static struct cow_engine *engine;
static bool engine_refused;
static struct nebula_error engine_refusal;
static bool fork_has_fd; /* the child must close its copy of the descriptor */
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

#define KEPT_BYTES (16u << 20) /* memory for a capture of 700 GB */
/* The last capture's memory, all zero except mapped_bytes: a new mapping and its page faults would delay the next save. */
static struct cow_capture *_Atomic kept;

static uint64_t whole_blocks(uint64_t size)
{
        return cow_block_of(size + COW_BLOCK_BYTES - 1);
}

/* Maps whole blocks. A part's protection covers whole huge pages, so memory that the engine's threads write must not
 * share one with a part. */
void *cow_map_blocks(uint64_t size)
{
        uint64_t before, after;
        void *data;
        char *begin;

        size = whole_blocks(size);
        if (os->map(-1, 0, size + COW_BLOCK_BYTES, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE | OS_MAP_ANONYMOUS, &data) < 0)
                return NULL;
        before = whole_blocks((uintptr_t)data) - (uintptr_t)data;
        after = COW_BLOCK_BYTES - before;
        begin = (char *)data + before;
        if (before)
                os->unmap(data, before);
        if (after)
                os->unmap(begin + size, after);
        return begin;
}

void *cow_map(uint64_t size)
{
        volatile char *data = cow_map_blocks(size);

        for (uint64_t at = 0; data && at < size; at += COW_PAGE_BYTES)
                data[at] = 0;
        return (void *)data;
}

void cow_unmap(void *data, uint64_t size)
{
        os->unmap(data, whole_blocks(size));
}

struct cow_capture *cow_capture_map(uint64_t size)
{
        struct cow_capture *capture = atomic_exchange(&kept, NULL);

        if (capture && capture->mapped_bytes >= size)
                return capture;
        if (capture)
                cow_unmap(capture, capture->mapped_bytes);
        capture = cow_map(size);
        if (capture)
                capture->mapped_bytes = size;
        return capture;
}

void cow_capture_unmap(struct cow_capture *capture)
{
        uint64_t size = capture->mapped_bytes;

        if (size <= KEPT_BYTES) {
                memset(capture, 0, size);
                capture->mapped_bytes = size;
                capture = atomic_exchange(&kept, capture);
        }
        if (capture)
                cow_unmap(capture, capture->mapped_bytes);
}

void cow_workers_wake(struct cow_engine *for_engine)
{
        atomic_fetch_add(&for_engine->work_turn, 1);
        os->futex_wake(&for_engine->work_turn);
}

__attribute__((noinline)) void cow_stack_touch(void)
{
        volatile char pages[4 * COW_PAGE_BYTES];

        for (size_t i = 0; i < sizeof pages; i += COW_PAGE_BYTES / 2)
                pages[i] = 0;
        pages[sizeof pages - 1] = 0;
}

/* A forked child has none of the threads, and the descriptor acts on the parent's memory. So the child forgets the engine. */
static void child_after_fork(void)
{
        if (fork_has_fd) /* otherwise the number belongs to another file */
                os->close(engine->fd);
        engine = NULL;
        lock_init(&engine_lock, LOCK_ENGINE);
}

static void lock_before_fork(void)
{
        lock_take(&engine_lock);
        /* If the program closes the descriptor, the fault thread is not woken, so it may not know yet. */
        fork_has_fd = engine && !atomic_load(&engine->is_broken) && !cow_is_closed(engine);
}

static void unlock_after_fork(void)
{
        lock_give(&engine_lock);
}

static void watch_forks(void)
{
        pthread_atfork(lock_before_fork, unlock_after_fork, child_after_fork);
}

/* Before engine_lock is taken: before glibc 2.36, pthread_atfork waits for a running fork, and the fork's
 * handlers wait for engine_lock. */
void cow_watch_forks(void)
{
        pthread_once(&fork_once, watch_forks);
}

/* All of the stack that the threads use is made present, with the thread-local variables above it, so using it never faults. */
static void *stack_new(void)
{
        volatile char *stack = cow_map_blocks(COW_STACK_BYTES);

        for (size_t used = COW_PAGE_BYTES; stack && used <= COW_STACK_USED_BYTES; used += COW_PAGE_BYTES)
                stack[COW_STACK_BYTES - used] = 0;
        return (void *)stack;
}

/* Blocks all signals but those of faults: the program's threads handle the others. A copy learns by a fault signal
 * that its source is gone. */
static int start_thread(void *(*main_function)(void *), struct cow_engine *argument, const char *name)
{
        void *stack = stack_new();
        pthread_attr_t attributes;
        sigset_t mask, before;
        pthread_t thread;
        int status;

        if (!stack)
                return ENOMEM;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        status = pthread_attr_setstack(&attributes, stack, COW_STACK_BYTES);
        if (status == 0) {
                os_thread_mask(&mask);
                pthread_sigmask(SIG_SETMASK, &mask, &before);
                status = pthread_create(&thread, &attributes, main_function, argument);
                if (status == 0)
                        pthread_setname_np(thread, name);
                pthread_sigmask(SIG_SETMASK, &before, NULL);
        }
        pthread_attr_destroy(&attributes);
        if (status)
                cow_unmap(stack, COW_STACK_BYTES);
        return status;
}

/* Tries all that a capture needs: protects a page, reads it through the kernel, lifts the protection. */
static enum nebula_status probe(struct cow_engine *new_engine, struct nebula_error *error)
{
        uint64_t start = new_engine->probe_page, end = start + COW_PAGE_BYTES;
        char byte = 1;
        int64_t status;

        status = os->uffd_register(new_engine->fd, start, end);
        if (status == 0)
                status = os->uffd_protect(new_engine->fd, start, end, true);
        if (status < 0)
                return error_set(error, NEBULA_UNAVAILABLE, (int)-status,
                                 "this kernel cannot write-protect private memory: copy-on-write needs userfaultfd of Linux 5.7 "
                                 "and 4 KiB pages");
        status = os->copy_self(&byte, start, 1);
        if (status == 1)
                status = os->uffd_protect(new_engine->fd, start, end, false);
        if (status < 0 || byte != 0)
                return error_set(error, NEBULA_UNAVAILABLE, (int)-status,
                                 "process_vm_readv is not allowed here; a seccomp filter may forbid it");
        return NEBULA_OK;
}

/*
 * Half as many workers as processors, at least two if there are two processors. Training threads wait for each other at
 * the end of each part of a step. So a worker that takes a processor from one of them delays all of them, and a second
 * worker can then use the processors of those that wait.
 */
static size_t worker_count(void)
{
        size_t cpus = os->cpu_count(), count = cpus / 2 < 2 ? 2 : cpus / 2;

        return cpus < 2 ? 1 : count > COW_WORKER_MAX ? COW_WORKER_MAX : count;
}

static enum nebula_status engine_open(struct cow_engine **ret_engine, struct nebula_error *error)
{
        struct cow_engine *new_engine = cow_map(sizeof *new_engine);
        enum nebula_status status;
        uint32_t abilities;
        void *page = cow_map(COW_PAGE_BYTES);
        int failed = 0;

        if (!new_engine || !page) {
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for copy-on-write captures");
                goto unmap;
        }
        new_engine->pid = os->pid();
        new_engine->probe_page = (uintptr_t)page;
        lock_init(&new_engine->start_lock, LOCK_START);
        lock_init(&new_engine->blocks_lock, LOCK_BLOCKS);
        lock_init(&new_engine->huge_lock, LOCK_HUGE);
        new_engine->fd = os->uffd_open(&abilities);
        if (new_engine->fd < 0) {
                status = error_set(error, NEBULA_UNAVAILABLE, -new_engine->fd,
                                   "no full userfaultfd: it needs CAP_SYS_PTRACE, access to /dev/userfaultfd, or "
                                   "sysctl vm.unprivileged_userfaultfd=1");
                goto unmap;
        }
        new_engine->unpopulated = abilities & OS_UFFD_UNPOPULATED;
        status = probe(new_engine, error);
        if (status != NEBULA_OK)
                goto close;
        /* The fault thread starts first: a thread cannot be taken back, and without the fault thread nothing works. */
        failed = start_thread(cow_fault_main, new_engine, "nebula-fault");
        if (failed) {
                status = error_set(error, NEBULA_UNAVAILABLE, failed, "starting the fault thread");
                goto close;
        }
        for (new_engine->worker_count = 0; new_engine->worker_count < worker_count(); new_engine->worker_count++) {
                failed = start_thread(cow_worker_main, new_engine, "nebula-copy");
                if (failed)
                        break;
        }
        if (new_engine->worker_count == 0) /* only the fault thread runs, and it keeps the engine's memory */
                return error_set(error, NEBULA_UNAVAILABLE, failed, "starting a copying thread");
        *ret_engine = new_engine;
        return NEBULA_OK;
close:
        os->close(new_engine->fd);
unmap:
        if (page)
                cow_unmap(page, COW_PAGE_BYTES);
        if (new_engine)
                cow_unmap(new_engine, sizeof *new_engine);
        return status;
}

enum nebula_status cow_engine_get(struct cow_engine **ret_engine, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;
        bool is_broken;

        cow_watch_forks();
        lock_take(&engine_lock);
        if (engine && engine->pid != os->pid()) /* a fork that ran no handlers */
                engine = NULL;
        if (!engine && !engine_refused)
                engine_refused = engine_open(&engine, &engine_refusal) != NEBULA_OK;
        is_broken = engine && atomic_load(&engine->is_broken);
        if (is_broken)
                status = error_set(error, NEBULA_UNAVAILABLE, 0, "the program closed a userfaultfd that belongs to Nebula; close "
                                                                 "only descriptors that your program opened");
        else if (engine)
                *ret_engine = engine;
        else
                status = engine_refusal.status;
        if (!engine && error)
                *error = engine_refusal;
        lock_give(&engine_lock);
        if (status == NEBULA_OK)
                os->guard(); /* every time: the program may have replaced the handler. Without it the kernel copies */
        return status;
}

enum nebula_status cow_available(struct nebula_error *error)
{
        struct cow_engine *unused;

        return cow_engine_get(&unused, error);
}
