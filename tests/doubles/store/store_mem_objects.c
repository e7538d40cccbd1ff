/* The contents of the driver `mem`: one volume per URL, which holds objects sorted by key. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "os/os.h"
#include "store/store_mem_private.h"

static struct lock volumes_lock = LOCK_INIT(LOCK_STORE_VOLUMES);
static struct mem_volume *volumes; /* guarded by volumes_lock */

static bool takes(const char *url)
{
        return !strncmp(url, "mem://", 6);
}

void store_mem_allow(void)
{
        static bool is_offered;

        if (!is_offered)
                store_offer(&store_mem, takes);
        is_offered = true;
}

static struct mem_volume *new_volume(const char *url)
{
        struct mem_volume *volume = calloc(1, sizeof *volume);

        if (volume)
                volume->url = strdup(url);
        if (!volume || !volume->url) {
                free(volume);
                return NULL;
        }
        lock_init(&volume->lock, LOCK_STORE_MEM);
        volume->next = volumes;
        volumes = volume;
        return volume;
}

struct mem_volume *mem_volume_find(const char *url, bool makes)
{
        struct mem_volume *volume;

        lock_take(&volumes_lock);
        volume = volumes;
        while (volume && strcmp(volume->url, url))
                volume = volume->next;
        if (!volume && makes)
                volume = new_volume(url);
        lock_give(&volumes_lock);
        return volume;
}

void store_mem_forget(const char *url)
{
        struct mem_volume *volume = mem_volume_find(url, false);

        if (!volume)
                return;
        lock_take(&volume->lock);
        mem_clear(volume);
        volume->faults = (struct mem_faults){ 0 };
        lock_give(&volume->lock);
}

struct mem_volume *mem_volume_of(const struct store *store)
{
        return ((const struct mem_store *)store)->volume;
}

/* The index of the key, or where it would be inserted. */
static size_t place_of(const struct mem_volume *volume, const char *key)
{
        size_t low = 0, high = volume->count;

        while (low < high) {
                size_t middle = (low + high) / 2;

                if (strcmp(volume->objects[middle].key, key) < 0)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

struct mem_object *mem_find(struct mem_volume *volume, const char *key)
{
        size_t at = place_of(volume, key);

        return at < volume->count && !strcmp(volume->objects[at].key, key) ? &volume->objects[at] : NULL;
}

/* Keeps a removed object without its data for stale lists. Takes over its key. */
static void bury(struct mem_volume *volume, struct mem_object object)
{
        struct mem_object *ghost = &volume->ghosts[volume->next_ghost];

        free(object.data);
        free(ghost->key);
        object.data = NULL;
        object.died = volume->change_count;
        *ghost = object;
        volume->next_ghost = (volume->next_ghost + 1) % STORE_MEM_STALE_MAX;
}

bool mem_set(struct mem_volume *volume, const char *key, char *data, uint64_t size, struct store_stamp *ret_stamp)
{
        size_t at = place_of(volume, key);
        bool is_there = at < volume->count && !strcmp(volume->objects[at].key, key);
        void *objects = volume->objects;
        char *copy = strdup(key);
        bool has_room = copy && store_make_room(&objects, volume->count, sizeof *volume->objects);
        struct mem_object *grown = objects;

        if (!has_room) {
                free(copy);
                return false;
        }
        volume->objects = grown;
        volume->change_count++;
        if (is_there) {
                bury(volume, grown[at]);
        } else {
                memmove(grown + at + 1, grown + at, (volume->count - at) * sizeof *grown);
                volume->count++;
        }
        grown[at] = (struct mem_object){ .key = copy, .data = data, .size = size, .wall_ns = os->wall_ns(), .stamp = ++volume->stamp_count,
                                         .born = volume->change_count, .died = UINT64_MAX };
        if (ret_stamp)
                *ret_stamp = mem_stamp(&grown[at]);
        return true;
}

void mem_drop(struct mem_volume *volume, struct mem_object *object)
{
        struct mem_object dropped = *object;
        size_t at = (size_t)(object - volume->objects);

        volume->change_count++;
        memmove(object, object + 1, (--volume->count - at) * sizeof *object);
        bury(volume, dropped);
}

void mem_clear(struct mem_volume *volume)
{
        for (size_t i = 0; i < volume->count; i++) {
                free(volume->objects[i].key);
                free(volume->objects[i].data);
        }
        for (size_t i = 0; i < STORE_MEM_STALE_MAX; i++)
                free(volume->ghosts[i].key);
        free(volume->objects);
        volume->objects = NULL;
        volume->count = 0;
        memset(volume->ghosts, 0, sizeof volume->ghosts);
}

struct store_stamp mem_stamp(const struct mem_object *object)
{
        struct store_stamp stamp;

        snprintf(stamp.text, sizeof stamp.text, "%" PRIu64, object->stamp);
        return stamp;
}

struct store_entry mem_entry(const struct mem_object *object)
{
        return (struct store_entry){ .key = object->key, .size = object->size, .time_ns = mem_time(object->wall_ns), .stamp = mem_stamp(object) };
}
