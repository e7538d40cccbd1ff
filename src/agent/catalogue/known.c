#include "agent/catalogue/known.h"
#include "store/scan.h"

#include <stdlib.h>
#include <string.h>

static struct order_entry entry_of(const char *job, const struct manifest *manifest)
{
        struct order_entry entry = order_entry(manifest->tag, manifest->sequence, &manifest->line);

        entry.counts = !strcmp(manifest->job, job);
        return entry;
}

static void count_newest(struct known_versions *known, const char *job, const struct manifest *manifest)
{
        struct order_entry entry = entry_of(job, manifest);

        order_add(&known->newest, &entry, manifest);
}

/* The place of a tag in by_tag, or where it would be. */
static size_t tag_place(const struct known_versions *known, const char *tag)
{
        size_t low = 0, high = known->count;

        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (strcmp(known->by_tag[middle]->tag, tag) < 0)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

static bool is_at(const struct known_versions *known, size_t place, const char *tag)
{
        return place < known->count && !strcmp(known->by_tag[place]->tag, tag);
}

/* Whether `a` comes after `b` in the list. */
static bool is_later(const struct manifest *a, const struct manifest *b)
{
        return a->sequence != b->sequence ? a->sequence > b->sequence : strcmp(a->tag, b->tag) > 0;
}

static size_t list_place(const struct known_versions *known, const struct manifest *manifest)
{
        size_t low = 0, high = known->count;

        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (is_later(manifest, known->list[middle]))
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

static void insert(struct manifest **array, size_t count, size_t place, struct manifest *manifest)
{
        memmove(&array[place + 1], &array[place], (count - place) * sizeof *array);
        array[place] = manifest;
}

static void cut(struct manifest **array, size_t count, size_t place)
{
        memmove(&array[place], &array[place + 1], (count - place - 1) * sizeof *array);
}

static bool make_room(struct known_versions *known)
{
        size_t room = known->room ? known->room * 2 : 16;
        struct manifest **grown;

        if (known->count < known->room)
                return true;
        if (!(grown = realloc(known->list, room * sizeof *grown)))
                return false;
        known->list = grown;
        if (!(grown = realloc(known->by_tag, room * sizeof *grown)))
                return false;
        known->by_tag = grown;
        known->room = room;
        return true;
}

static int by_tag(const void *a, const void *b)
{
        return strcmp((*(struct manifest *const *)a)->tag, (*(struct manifest *const *)b)->tag);
}

bool known_new(struct manifest_scan *scan, const char *job, struct known_versions *ret_known)
{
        struct known_versions known = { .list = calloc(scan->count + 1, sizeof *known.list), .by_tag = calloc(scan->count + 1, sizeof *known.by_tag),
                               .room = scan->count + 1 };
        bool is_done = known.list && known.by_tag;

        for (; is_done && known.count < scan->count; known.count++)
                is_done = (known.list[known.count] = malloc(sizeof **known.list)) != NULL;
        if (!is_done) {
                while (known.list && known.count)
                        free(known.list[--known.count]);
                free(known.list);
                free(known.by_tag);
                return false;
        }
        for (size_t i = 0; i < known.count; i++) {
                *known.list[i] = scan->manifests[i];
                known.by_tag[i] = known.list[i];
                count_newest(&known, job, known.list[i]);
        }
        if (known.count)
                qsort(known.by_tag, known.count, sizeof *known.by_tag, by_tag);
        scan->count = 0;
        manifest_scan_done(scan);
        *ret_known = known;
        return true;
}

/* Takes the version of a tag out of both arrays. NULL: there is none. */
static struct manifest *cut_tag(struct known_versions *known, const char *tag)
{
        size_t place = tag_place(known, tag);
        struct manifest *manifest;

        if (!is_at(known, place, tag))
                return NULL;
        manifest = known->by_tag[place];
        cut(known->by_tag, known->count, place);
        cut(known->list, known->count, list_place(known, manifest));
        known->count--;
        return manifest;
}

/* `former` was cut, and `later`, of the same tag, was inserted; NULL: none was. Only a newest one that went needs a look at all others. */
static void replace_newest(struct known_versions *known, const char *job, const struct manifest *former, const struct manifest *later)
{
        struct order_entry before = entry_of(job, former), after = later ? entry_of(job, later) : before;
        size_t kind = !before.follows_step;

        if (known->newest.what[kind] != former) {
                if (later)
                        count_newest(known, job, later);
                return;
        }
        known->newest.what[kind] = NULL;
        if (later && after.counts && order_is_newest_of(&after, &before)) {
                count_newest(known, job, later);
                return;
        }
        for (size_t i = 0; i < known->count; i++)
                count_newest(known, job, known->list[i]);
}

const struct manifest *known_put(struct known_versions *known, const char *job, struct manifest *manifest)
{
        struct manifest *copy = malloc(sizeof *copy), *former;

        if (!copy || !make_room(known)) {
                free(copy);
                return NULL;
        }
        former = cut_tag(known, manifest->tag);
        *copy = *manifest;
        memset(manifest, 0, sizeof *manifest);
        insert(known->list, known->count, list_place(known, copy), copy);
        insert(known->by_tag, known->count, tag_place(known, copy->tag), copy);
        known->count++;
        if (former)
                replace_newest(known, job, former, copy);
        else
                count_newest(known, job, copy);
        known_free(former);
        return copy;
}

void known_trim(struct known_versions *known, const char *job)
{
        size_t passed = 0, i = known->count;

        while (i && (passed < KNOWN_WHOLE || strcmp(known->list[i - 1]->job, job)))
                passed += !strcmp(known->list[--i]->job, job);
        if (i && known->list[i - 1]->file_count > KNOWN_SMALL)
                manifest_make_brief(known->list[i - 1]);
}

struct manifest *known_take(struct known_versions *known, const char *job, const char *tag)
{
        struct manifest *manifest = cut_tag(known, tag);

        if (manifest)
                replace_newest(known, job, manifest, NULL);
        return manifest;
}

void known_free(struct manifest *manifest)
{
        if (manifest)
                manifest_done(manifest);
        free(manifest);
}

const struct manifest *known_find(const struct known_versions *known, const char *tag)
{
        size_t place = tag_place(known, tag);

        return is_at(known, place, tag) ? known->by_tag[place] : NULL;
}

const struct manifest *known_newest(const struct known_versions *known)
{
        return order_best(&known->newest, NULL);
}

void known_done(struct known_versions *known)
{
        for (size_t i = 0; i < known->count; i++)
                known_free(known->list[i]);
        free(known->list);
        free(known->by_tag);
        *known = (struct known_versions){ 0 };
}
