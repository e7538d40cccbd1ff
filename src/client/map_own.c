/*
 * Gives the pages of a private mapping to this process ahead of its writes. Otherwise the first write to each page takes a fault, which
 * copies it: that made the first training step after a resume as slow as a load.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "client/client.h"
#include "os/os.h"
#include "os/thread.h"

#define OWN_MIN (4u << 20)
#define PIECE_BYTES (1u << 20)  /* the address space cannot change meanwhile: less than a millisecond */
#define LOOK_BYTES (64u << 20)  /* between two looks at the free memory */

struct map_own {
        pthread_t thread;
        uint32_t pid; /* a forked child does not have the thread */
        atomic_bool is_stopped;
        char *data;
        uint64_t size;
};

/* Whether the rest leaves at least as much memory free as it takes. */
static bool has_room(uint64_t rest)
{
        return os->memory_free() / 2 >= rest;
}

/* From the end: a program that reads or writes from the beginning meets this thread once, and does not run behind or ahead of it, page by
 * page. A page that the program has mapped to read it takes longer to copy, because its processors must forget it first. */
static void *own_pages(void *argument)
{
        struct map_own *own = argument;

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
        atomic_store(&own->is_stopped, true);
        if (own->pid == os->pid())
                pthread_join(own->thread, NULL);
        free(own);
}
