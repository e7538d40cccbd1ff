#include "agent/memory/shortage.h"

#include <inttypes.h>
#include <stdio.h>

#include "agent/catalogue/memory_policy.h"
#include "agent/memory/memory.h"
#include "os/os.h"

#define LOOK_NS (2 * SECOND_NS) /* the kernel computes the waits as often */
#define STALLED_MOST 100              /* per mille */
#define LEFT_PART 16                  /* hardly any: less than that part of what the tier has */

/* `text` says why, if the machine is short of memory. */
static bool is_short(const struct memory *memory, char *text, size_t size)
{
        uint64_t free_bytes = os->memory_free(), least = memory->used / LEFT_PART;
        uint32_t stalled;

        if (least < MEMORY_LEFT)
                least = MEMORY_LEFT;
        if (free_bytes >= memory->used && free_bytes >= least)
                return false; /* what checkpoints take is not what lacks */
        stalled = os->memory_stalled();
        if (free_bytes >= least && stalled < STALLED_MOST)
                return false;
        snprintf(text, size, "the machine or the cgroup is short of memory: %" PRIu64 " MiB are free, and all threads waited for memory for %u.%u %% of the time",
                 free_bytes >> 20, stalled / 10, stalled % 10);
        return true;
}

static bool drop_spares(struct catalogue *catalogue)
{
        bool is_any = false;

        while (policy_drop_spare(catalogue))
                is_any = true;
        return is_any;
}

static void give_back(struct catalogue *catalogue, const char *why)
{
        bool is_any = drop_spares(catalogue);

        for (int keeps_newest = 1; keeps_newest >= 0; keeps_newest--)
                for (struct job *job = is_any ? NULL : catalogue->jobs, *next; job; job = next) {
                        next = job->next;
                        if (catalogue_resumes(job))
                                continue; /* its ranks are about to load what they have found */
                        if (policy_release(catalogue, job, keeps_newest, why))
                                is_any = true;
                }
        drop_spares(catalogue); /* the images of these versions */
        if (is_any)
                catalogue_signal_pages(catalogue);
}

int64_t shortage_look(struct catalogue *catalogue, int64_t now_ns)
{
        struct memory *memory = catalogue->memory;
        char why[200];

        if (!memory->used) {
                memory->is_short = false;
                return INT64_MAX;
        }
        if (now_ns < memory->look_at_ns)
                return memory->look_at_ns;
        memory->look_at_ns = now_ns + LOOK_NS;
        memory->is_short = is_short(memory, why, sizeof why);
        if (memory->is_short)
                give_back(catalogue, why);
        return memory->look_at_ns;
}
