/* Lists of the driver `mem`. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/store_mem_private.h"

#define PAGE_ENTRIES 3
#define AT_THE_FIRST "\n" /* `from` of the page after the empty first one: it sorts before every key */

/* The objects that a list shows, by key. */
struct view {
        const struct mem_object **objects;
        size_t count;
};

static int by_key(const void *a, const void *b)
{
        const struct mem_object *const *x = a, *const *y = b;

        return strcmp((*x)->key, (*y)->key);
}

static void add_seen(struct view *view, const struct mem_object *object, const char *prefix, uint64_t time)
{
        if (object->key && object->born <= time && time < object->died && !strncmp(object->key, prefix, strlen(prefix)))
                view->objects[view->count++] = object;
}

/* `time`: a change count. */
static bool see(const struct mem_volume *volume, const char *prefix, uint64_t time, struct view *view)
{
        *view = (struct view){ malloc((volume->count + STORE_MEM_STALE_MAX) * sizeof *view->objects), 0 };
        if (!view->objects)
                return false;
        for (size_t i = 0; i < volume->count; i++)
                add_seen(view, &volume->objects[i], prefix, time);
        for (size_t i = 0; i < STORE_MEM_STALE_MAX; i++)
                add_seen(view, &volume->ghosts[i], prefix, time);
        qsort(view->objects, view->count, sizeof *view->objects, by_key);
        return true;
}

/* The key as the list shows it: cut at the first '/' after the prefix, unless the list is deep. True: it was cut. */
static bool cut(const char *key, const char *prefix, bool deep, char ret_key[STORE_KEY_MAX])
{
        const char *slash = deep ? NULL : strchr(key + strlen(prefix), '/');
        size_t length = slash ? (size_t)(slash + 1 - key) : strlen(key);

        memcpy(ret_key, key, length);
        ret_key[length] = 0;
        return slash;
}

static enum nebula_status add_entry(struct store_page *page, const struct mem_object *object, char *key, bool is_prefix)
{
        struct store_entry entry = is_prefix ? (struct store_entry){ .key = key, .is_prefix = true } : mem_entry(object);

        if (is_prefix)
                key[strlen(key) - 1] = 0;
        return store_page_add(page, &entry);
}

/* Adds the keys after `from`, the last key of the page before. */
static enum nebula_status fill_page(const struct view *view, const char *prefix, bool deep, const char *from, size_t most, struct store_page *page)
{
        char key[STORE_KEY_MAX], last[STORE_KEY_MAX];
        enum nebula_status status = NEBULA_OK;

        strcpy(last, from);
        for (size_t i = 0; i < view->count && !status; i++) {
                bool is_prefix = cut(view->objects[i]->key, prefix, deep, key);

                if (strcmp(key, last) <= 0)
                        continue;
                if (page->count == most) {
                        page->next = strdup(last);
                        return page->next ? NEBULA_OK : NEBULA_NO_MEMORY;
                }
                strcpy(last, key);
                status = add_entry(page, view->objects[i], key, is_prefix);
        }
        return status;
}

static enum nebula_status list_locked(struct mem_volume *volume, const char *prefix, bool deep, const char *from, struct store_page *page)
{
        uint64_t changes = volume->change_count, stale = volume->faults.stale_writes;
        size_t most = volume->faults.page_entries ? volume->faults.page_entries : PAGE_ENTRIES;
        enum nebula_status status;
        struct view view;

        if (!see(volume, prefix, changes > stale ? changes - stale : 0, &view))
                return NEBULA_NO_MEMORY;
        status = fill_page(&view, prefix, deep, from, most, page);
        free(view.objects);
        return status;
}

enum nebula_status mem_list(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                            struct nebula_error *error)
{
        struct mem_volume *volume = mem_volume_of(store);
        struct store_page page = { 0 };
        enum nebula_status status;

        if (!store_prefix_sound(prefix) || (from && strlen(from) >= STORE_KEY_MAX))
                return error_set(error, NEBULA_INVALID, 0, "\"%.300s\" is not a prefix of keys of %s", prefix, store->root);
        status = mem_begin(store, prefix, error);
        if (status)
                return status;
        if (!from) {
                page.next = strdup(AT_THE_FIRST);
                status = page.next ? NEBULA_OK : NEBULA_NO_MEMORY;
        } else {
                lock_take(&volume->lock);
                status = list_locked(volume, prefix, deep, from, &page);
                lock_give(&volume->lock);
        }
        if (status) {
                store_page_done(&page);
                return mem_no_memory(store, error);
        }
        *ret_page = page;
        return NEBULA_OK;
}

enum nebula_status mem_list_after(struct store *store, const char *key, struct store_page *ret_page, struct nebula_error *error)
{
        return mem_list(store, "", true, key, ret_page, error);
}
