/* Pages of the memory tier, made and given back behind the sessions' backs. */
#include "agent/background.h"
#include "agent/memory/page_maker.h"
#include "os/os.h"

/*
 * A job trains for days, and its images serve all the time: there is no hurry. A virtual machine whose free memory goes back to the host
 * may take milliseconds to find two MiB in one piece.
 */
#define JOIN_BYTES (4u << 20) /* at a time */
#define JOIN_SHARE 200        /* of the time of one thread: the 200th part */

struct join {
        struct image *image;
        uint64_t size;
        bool was_pinned; /* such pages cannot be joined */
        int64_t took_ns;
};

bool page_maker_discard(struct catalogue *catalogue)
{
        struct image *image = memory_next_doomed(&catalogue->memory);
        uint64_t capacity;

        if (!image)
                return false;
        catalogue->memory.settling++;
        while (image) {
                capacity = image->spilled ? 0 : image->capacity;
                catalogue_unlock(catalogue);
                memory_release(&catalogue->memory, image);
                catalogue_lock(catalogue);
                memory_unreserve(&catalogue->memory, capacity);
                image = memory_next_doomed(&catalogue->memory);
        }
        catalogue->memory.settling--;
        pthread_cond_broadcast(&catalogue->moved);
        return true;
}

static void prefault(void *image)
{
        memory_prefault(image);
}

/* Makes one spare image. False when none is needed, or there is no room that nobody waits for. */
static bool make_spare(struct catalogue *catalogue)
{
        if (catalogue->memory.wanting)
                return false; /* it would take what the save has just reclaimed, again and again */
        for (struct job *job = catalogue->jobs; job; job = job->next) {
                uint64_t capacity = job->spare_due ? catalogue_spare_bytes(catalogue, job) : 0;
                struct image *image;
                enum nebula_status status;
                void *data;
                bool named;

                if (!capacity || !memory_reserve(&catalogue->memory, capacity, &named)) {
                        job->spare_due = false;
                        continue;
                }
                catalogue->memory.settling++;
                job->pins++;
                catalogue_unlock(catalogue);
                status = memory_create(&catalogue->memory, capacity, named, &image, NULL);
                if (!status)
                        memory_map(image, &data, NULL);
                catalogue_lock(catalogue);
                job->pins--;
                catalogue->memory.settling--;
                pthread_cond_broadcast(&catalogue->moved);
                if (status) {
                        memory_unreserve(&catalogue->memory, capacity);
                        job->spare_due = false;
                        continue;
                }
                image->job = job;
                image->faulting = true;
                memory_add(&catalogue->memory, image); /* a save that comes now has at least some pages ready */
                catalogue_unlock(catalogue);
                background_run(prefault, image);
                catalogue_lock(catalogue);
                image->faulting = false;
                return true;
        }
        return false;
}

static void join(void *argument)
{
        struct join *join = argument;
        int64_t begun_ns = os->now_ns();

        if (join->was_pinned)
                memory_unpin(join->image);
        if (memory_join(join->image, join->image->joined, join->size) < 0)
                join->size = memory_join_size(join->image) - join->image->joined; /* nor will the rest be */
        join->took_ns = os->now_ns() - begun_ns;
}

bool page_maker_join(struct catalogue *catalogue, int64_t *join_at_ns)
{
        struct join work = { .image = catalogue_small_image(catalogue) };
        uint64_t left;

        catalogue->memory.joining = work.image != NULL;
        if (!work.image || os->now_ns() < *join_at_ns)
                return false;
        left = memory_join_size(work.image) - work.image->joined;
        work.size = left < JOIN_BYTES ? left : JOIN_BYTES;
        work.was_pinned = work.image->pinned;
        work.image->pinned = false;
        work.image->faulting = true;
        catalogue_unlock(catalogue);
        background_run(join, &work);
        catalogue_lock(catalogue);
        work.image->faulting = false;
        work.image->joined += work.size;
        *join_at_ns = os->now_ns() + (JOIN_SHARE - 1) * work.took_ns;
        return true;
}

static int64_t until_ms(const struct catalogue *catalogue, int64_t join_at_ns)
{
        int64_t left_ns = join_at_ns - os->now_ns();

        return !catalogue->memory.joining ? -1 : left_ns > 0 ? left_ns / 1000000 + 1 : 0;
}

void *page_maker_main(void *argument)
{
        struct catalogue *catalogue = argument;
        int64_t join_at_ns = 0;

        catalogue_lock(catalogue);
        while (!catalogue->stopping) {
                if (page_maker_discard(catalogue) || make_spare(catalogue) || page_maker_join(catalogue, &join_at_ns))
                        continue;
                catalogue_wait(catalogue, &catalogue->keep, until_ms(catalogue, join_at_ns));
        }
        catalogue_unlock(catalogue);
        return NULL;
}
