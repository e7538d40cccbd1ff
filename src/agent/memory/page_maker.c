/* Makes and gives back pages of the memory tier in the background. */
#include "agent/background.h"
#include "agent/catalogue/memory_policy.h"
#include "agent/memory/memory.h"
#include "agent/memory/page_maker.h"
#include "os/os.h"

/*
 * Joins pages slowly: a job trains for days, so there is no hurry. A virtual machine that has given free memory back to
 * its host may need milliseconds to find 2 MiB in one piece.
 */
#define JOIN_BYTES (4u << 20) /* per step */
#define JOIN_SHARE 200        /* at most the 200th part of one thread's time */

struct rest {
        const struct image *image;
        int result;
};

struct join {
        struct image *image;
        uint64_t size;
        bool was_pinned; /* its pages were pinned, so they could not be joined */
        int64_t took_ns;
};

bool page_maker_discard(struct catalogue *catalogue)
{
        struct image *image = memory_next_doomed(catalogue->memory);
        uint64_t capacity;

        if (!image)
                return false;
        catalogue->memory->room_pending++;
        while (image) {
                capacity = image_taken(image);
                catalogue_unlock(catalogue);
                memory_release(catalogue->memory, image);
                catalogue_lock(catalogue);
                memory_unreserve(catalogue->memory, capacity);
                image = memory_next_doomed(catalogue->memory);
        }
        catalogue->memory->room_pending--;
        pthread_cond_broadcast(&catalogue->moved);
        return true;
}

static void prefault(void *image)
{
        image_prefault(image);
}

/* Makes one spare image. False: none is needed, or a save or the machine needs the room. */
static bool make_spare(struct catalogue *catalogue)
{
        if (catalogue->memory->wanting || catalogue->memory->is_short)
                return false; /* otherwise it would take the memory that the save has just freed, again and again */
        catalogue->memory->spares_due = false;
        for (struct job *job = catalogue->jobs; job; job = job->next) {
                uint64_t capacity = job->spare_due ? policy_spare_bytes(catalogue, job) : 0;
                struct image *image;
                enum nebula_status status;
                void *data;
                bool named;

                if (!capacity || !memory_reserve(catalogue->memory, capacity, &named)) {
                        job->spare_due = false;
                        continue;
                }
                catalogue->memory->spares_due = true; /* of this job there may be more, and the others were not looked at */
                catalogue->memory->room_pending++;
                job->pins++;
                catalogue_unlock(catalogue);
                status = memory_create(catalogue->memory, capacity, named, &image, NULL);
                if (!status)
                        image_map(image, &data, NULL);
                catalogue_lock(catalogue);
                job->pins--;
                catalogue->memory->room_pending--;
                pthread_cond_broadcast(&catalogue->moved);
                if (status) {
                        memory_unreserve(catalogue->memory, capacity);
                        job->spare_due = false;
                        continue;
                }
                image->job = job;
                image->faulting = true;
                memory_add(catalogue->memory, image); /* listed first, so that a save that comes now has at least some pages ready */
                catalogue_unlock(catalogue);
                background_run(prefault, image);
                catalogue_lock(catalogue);
                image->faulting = false;
                return true;
        }
        return false;
}

static void make_rest(void *argument)
{
        struct rest *rest = argument;

        rest->result = image_make_rest(rest->image);
}

bool page_maker_make_rest(struct catalogue *catalogue)
{
        struct image *image = memory_next_lacking(catalogue->memory);
        struct rest rest = { .image = image };

        if (!image)
                return false;
        image->faulting = true;
        catalogue_unlock(catalogue);
        background_run(make_rest, &rest);
        catalogue_lock(catalogue);
        image->faulting = false;
        if (rest.result >= 0)
                memory_has_pages(catalogue->memory, image);
        return rest.result >= 0;
}

static void join(void *argument)
{
        struct join *join = argument;
        int64_t begun_ns = os->now_ns();

        if (join->was_pinned)
                image_unpin(join->image);
        if (image_join(join->image, join->image->joined, join->size) < 0)
                join->size = image_join_size(join->image) - join->image->joined; /* the rest cannot be joined either */
        join->took_ns = os->now_ns() - begun_ns;
}

bool page_maker_join(struct catalogue *catalogue, int64_t *join_at_ns)
{
        struct join work = { .image = policy_small_image(catalogue) };
        uint64_t left;

        catalogue->memory->joining = work.image != NULL;
        if (!work.image || os->now_ns() < *join_at_ns)
                return false;
        left = image_join_size(work.image) - work.image->joined;
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

        return !catalogue->memory->joining ? -1 : left_ns > 0 ? left_ns / 1000000 + 1 : 0;
}

void *page_maker_main(void *argument)
{
        struct catalogue *catalogue = argument;
        int64_t join_at_ns = 0;

        catalogue_lock(catalogue);
        while (!catalogue->stopping) {
                if (page_maker_discard(catalogue) || page_maker_make_rest(catalogue) || make_spare(catalogue) || page_maker_join(catalogue, &join_at_ns))
                        continue;
                catalogue_wait(catalogue, &catalogue->pages, until_ms(catalogue, join_at_ns));
        }
        catalogue_unlock(catalogue);
        return NULL;
}
