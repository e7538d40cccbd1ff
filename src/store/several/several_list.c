/* Lists all members, and merges what they have. One page has everything. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/index.h"
#include "store/several/several_private.h"
#include "store/store_private.h"

/* As lists are sorted: a folded entry as if its key ended with '/'. */
static int compare(const struct store_entry *a, const struct store_entry *b)
{
        size_t a_size = strlen(a->key), b_size = strlen(b->key), size = a_size < b_size ? a_size : b_size;
        int order = memcmp(a->key, b->key, size);
        unsigned char a_next = (unsigned char)(a_size > size ? a->key[size] : a->is_prefix ? '/' : 0);
        unsigned char b_next = (unsigned char)(b_size > size ? b->key[size] : b->is_prefix ? '/' : 0);

        if (order)
                return order;
        return a_next != b_next ? (int)a_next - (int)b_next : (a_size > b_size) - (a_size < b_size);
}

/* Takes the entry, unless it has another member's place, where no reader looks, or is folded already. */
static enum nebula_status take(struct several *several, size_t member, struct store_entry *entry, struct store_page *page)
{
        const struct store_entry *last = page->count ? &page->entries[page->count - 1] : NULL;

        if (entry->is_prefix ? last && last->is_prefix && !strcmp(last->key, entry->key) : several_place(entry->key, several->count) != member)
                return NEBULA_OK;
        return store_page_add(page, entry);
}

static enum nebula_status merge(struct several *several, struct store_list *lists, struct store_page *page)
{
        size_t at[SEVERAL_MAX] = { 0 };
        enum nebula_status status = NEBULA_OK;

        while (!status) {
                size_t first = several->count;

                for (size_t i = 0; i < several->count; i++)
                        if (at[i] < lists[i].count &&
                            (first == several->count || compare(&lists[i].entries[at[i]], &lists[first].entries[at[first]]) < 0))
                                first = i;
                if (first == several->count)
                        break;
                status = take(several, first, &lists[first].entries[at[first]++], page);
        }
        return status;
}

/* Whether the objects are signs of checkpoints: entries of the index, or `latest`. */
static bool tells_of_versions(const struct store_list *list)
{
        for (size_t i = 0; i < list->count; i++)
                if (!list->entries[i].is_prefix && (!strcmp(list->entries[i].key, "latest") || !strncmp(list->entries[i].key, INDEX_PREFIX, sizeof INDEX_PREFIX - 1)))
                        return true;
        return false;
}

/* Such objects lie in the first member. If they lie in another one alone, the names had another order when they were written. A job that did
 * not find its checkpoints would begin from nothing. */
static enum nebula_status check_order(struct several *several, const struct store_list *lists, struct nebula_error *error)
{
        for (size_t i = 1; i < several->count && !tells_of_versions(&lists[0]); i++)
                if (tells_of_versions(&lists[i]))
                        return error_set(error, NEBULA_INVALID, 0, "the storage path \"%.200s\": %.150s has checkpoints, and the first account or bucket has none: "
                                         "give the names in the order in which the checkpoints were written", several->store.root, several->members[i]->root);
        return NEBULA_OK;
}

enum nebula_status several_list(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                                struct nebula_error *error)
{
        struct several *several = (struct several *)store;
        struct store_list lists[SEVERAL_MAX] = { 0 };
        struct store_page page = { 0 };
        enum nebula_status status = NEBULA_OK;

        (void)from; /* there is no other page */
        for (size_t i = 0; i < several->count && !status; i++)
                status = store_list_all(several->members[i], prefix, deep, &lists[i], error);
        if (!status)
                status = check_order(several, lists, error);
        if (!status && merge(several, lists, &page))
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to list %s", store->root);
        for (size_t i = 0; i < several->count; i++)
                store_list_done(&lists[i]);
        if (status)
                store_page_done(&page);
        else
                *ret_page = page;
        return status;
}
