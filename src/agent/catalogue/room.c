#include <stdlib.h>

#include "agent/catalogue/room.h"

static size_t aligned(size_t size)
{
        size_t unit = _Alignof(max_align_t);

        return (size + unit - 1) / unit * unit;
}

static const struct slot *slots_of(const struct room *room, bool is_job)
{
        return is_job ? room->job_slots : room->version_slots;
}

/* The slots lie behind the object. */
static void *new_object(const struct room *const *rooms, bool is_job, size_t size)
{
        size_t used = aligned(size), total = used;
        char *object;

        for (const struct room *const *room = rooms; *room; room++)
                for (size_t i = 0; i < ROOM_SLOTS; i++)
                        total += aligned(slots_of(*room, is_job)[i].size);
        object = calloc(1, total);
        for (const struct room *const *room = rooms; object && *room; room++)
                for (size_t i = 0; i < ROOM_SLOTS; i++) {
                        const struct slot *slot = &slots_of(*room, is_job)[i];

                        if (slot->size)
                                *(void **)(object + slot->at) = object + used;
                        used += aligned(slot->size);
                }
        return object;
}

void *room_new_job(const struct room *const *rooms, size_t size)
{
        return new_object(rooms, true, size);
}

void *room_new_version(const struct room *const *rooms, size_t size)
{
        return new_object(rooms, false, size);
}
