/*
 * Gives the pages of a private mapping to this process ahead of its writes. Otherwise the first write to each page takes a fault, which
 * copies it: that made the first training step after a resume as slow as a load. While the program reads on through the mapping, it
 * probably copies it into memory of its own and drops it, so the thread waits.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "client/client.h"
#include "os/os.h"
#include "os/thread.h"

#define OWN_MIN (4u << 20)
#define PIECE_BYTES (1u << 20)  /* the address space cannot change meanwhile: less than a millisecond */
#define LOOK_BYTES (64u << 20)  /* between two looks at the free memory */
#define READ_MS 25              /* a program that copies 1 GiB in a second reads some samples in that time */
#define READ_LOOKS 4            /* on a busy machine it may pause for as many */
#define SAMPLE_BYTES (4u << 20) /* between two samples of a large file */
#define SAMPLES_MIN 256 /* small tensors are copied at a tenth of that speed, and lie in smaller files */
#define SAMPLES_MAX 4096
#define PAGE_BYTES 4096u        /* with others no page counts as read, and the thread begins at once */

struct map_own {
        pthread_t thread;
        uint32_t pid; /* a forked child does not have the thread */
        _Atomic uint32_t is_stopped; /* a futex */
        char *data;
        uint64_t size;
};

/* Whether the rest leaves at least as much memory free as it takes. */
static bool has_room(uint64_t rest)
{
        return os->memory_free() / 2 >= rest;
}

/* How many of the sampled pages the program has touched. */
static size_t count_touched(int pagemap_fd, const struct map_own *own)
{
        uint64_t samples = own->size / SAMPLE_BYTES, entry;
        size_t count = 0;

        samples = samples < SAMPLES_MIN ? SAMPLES_MIN : samples > SAMPLES_MAX ? SAMPLES_MAX : samples;
        for (uint64_t i = 0; i < samples; i++) {
                uintptr_t at = (uintptr_t)own->data + own->size / samples * i;

                if (os->pread(pagemap_fd, &entry, sizeof entry, at / PAGE_BYTES * sizeof entry) == sizeof entry)
                        count += entry >> 63;
        }
        return count;
}

/* Until the program has touched nothing new in some looks: in one, if it has not begun to read. */
static void await_reads(struct map_own *own)
{
        int fd = os->open("/proc/self/pagemap", OS_READ);
        size_t before, count;

        if (fd < 0)
                return;
        count = count_touched(fd, own);
        for (unsigned left = 1; left && !atomic_load(&own->is_stopped); left = count > before ? READ_LOOKS : left - 1) {
                before = count;
                os->futex_wait(&own->is_stopped, 0, READ_MS);
                count = count_touched(fd, own);
        }
        os->close(fd);
}

/* From the end: a program that reads or writes from the beginning meets this thread once, and does not run behind or ahead of it, page by
 * page. A page that the program has mapped to read it takes longer to copy, because its processors must forget it first. */
static void *own_pages(void *argument)
{
        struct map_own *own = argument;

        await_reads(own);
        for (uint64_t rest = own->size, look = rest, size; rest && !atomic_load(&own->is_stopped); rest -= size) {
                size = (rest - 1) % PIECE_BYTES + 1;
                if (rest <= look) {
                        if (!has_room(rest))
                                break;
                        look = rest > LOOK_BYTES ? rest - LOOK_BYTES : 0;
                }
                if (os->advise(own->data + (rest - size), size, OS_ADVISE_POPULATE_WRITE) < 0)
                        break; /* a kernel before Linux 5.14, or the program has unmapped it */
        }
        return NULL;
}

struct map_own *map_own_start(void *data, uint64_t size)
{
        struct map_own *own = size >= OWN_MIN ? calloc(1, sizeof *own) : NULL;

        if (!own)
                return NULL;
        own->pid = os->pid();
        own->data = data;
        own->size = size;
        if (!os_thread_start(&own->thread, own_pages, own, false))
                return own;
        free(own);
        return NULL;
}

void map_own_stop(struct map_own *own)
{
        if (!own)
                return;
        atomic_store(&own->is_stopped, 1);
        os->futex_wake(&own->is_stopped);
        if (own->pid == os->pid())
                pthread_join(own->thread, NULL);
        free(own);
}
