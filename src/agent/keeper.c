/* Pages of the memory tier, made and given back behind the sessions' backs. */
#include "agent/background.h"
#include "agent/keeper.h"

bool keeper_bury(struct catalogue *catalogue)
{
        struct image *image = memory_next_doomed(&catalogue->memory);
        uint64_t capacity;

        if (!image)
                return false;
        catalogue->memory.settling++;
        while (image) {
                capacity = image->spilled ? 0 : image->capacity;
                catalogue_unlock(catalogue);
                memory_bury(&catalogue->memory, image);
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

void *keeper_main(void *argument)
{
        struct catalogue *catalogue = argument;

        catalogue_lock(catalogue);
        while (!catalogue->stopping) {
                if (keeper_bury(catalogue) || make_spare(catalogue))
                        continue;
                catalogue_wait(catalogue, &catalogue->keep, -1);
        }
        catalogue_unlock(catalogue);
        return NULL;
}
