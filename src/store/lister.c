#include "store/lister.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/store_private.h"

#define ANSWERS_MIN 4 /* lists that a page has to answer: it has up to 1,000 entries, and a list of one tag has a few */

void lister_done(struct lister *lister)
{
        store_page_done(&lister->page);
        lister->has_page = false;
}

/* Whether every driver writes the key as it is (object_name.c). */
static bool is_plain(const char *key)
{
        for (const char *at = key; *at; at++)
                if (*at < ' ' || *at > '~' || *at == '%' || *at == '\\' || (*at == '.' && (at[1] == '/' || !at[1])))
                        return false;
        return true;
}

static bool all_plain(const struct store_page *page)
{
        for (size_t i = 0; i < page->count; i++)
                if (!is_plain(page->entries[i].key))
                        return false;
        return true;
}

/* Whether the objects of `prefix` begin in the page, or would if there were any. */
static bool reaches(struct lister *lister, const char *prefix)
{
        while (lister->at < lister->page.count && strcmp(lister->page.entries[lister->at].key, prefix) < 0)
                lister->at++;
        return lister->has_page && (lister->at < lister->page.count || !lister->page.next);
}

static enum nebula_status turn(struct lister *lister, struct nebula_error *error)
{
        struct store_page page;
        enum nebula_status status = lister->store->ops->list(lister->store, "", true, lister->page.next, &page, error);

        if (status)
                return status;
        store_page_done(&lister->page);
        lister->page = page;
        lister->at = 0;
        lister->is_sparse = !all_plain(&page);
        return NEBULA_OK;
}

/* A store that fails here may still list one prefix: the failure has no other consequence. */
static void open_at(struct lister *lister, const char *prefix)
{
        struct store_page page;

        if (lister->has_page && lister->answered < ANSWERS_MIN)
                lister->is_sparse = true;
        lister_done(lister);
        if (lister->is_sparse || !lister->store->ops->list_after || lister->store->ops->list_after(lister->store, prefix, &page, NULL)) {
                lister->is_sparse = true;
                return;
        }
        lister->page = page;
        lister->at = lister->answered = 0;
        lister->has_page = true;
        lister->is_sparse = !all_plain(&page);
}

/* Moves the entries of the prefix out of the page. */
static enum nebula_status take(struct lister *lister, const char *prefix, struct store_list *list, struct nebula_error *error)
{
        struct store_page *page = &lister->page;
        size_t length = strlen(prefix), first = lister->at, count;
        struct store_entry *grown;

        while (lister->at < page->count && !strncmp(page->entries[lister->at].key, prefix, length))
                lister->at++;
        count = lister->at - first;
        if (!count)
                return NEBULA_OK;
        grown = realloc(list->entries, (list->count + count) * sizeof *grown);
        if (!grown) {
                lister->at = first;
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to list %.400s", lister->store->root);
        }
        list->entries = grown;
        memcpy(grown + list->count, page->entries + first, count * sizeof *grown);
        memset(page->entries + first, 0, count * sizeof *grown);
        list->count += count;
        return NEBULA_OK;
}

enum nebula_status lister_list(struct lister *lister, const char *prefix, struct store_list *ret_list, struct nebula_error *error)
{
        struct store_list list = { 0 };
        enum nebula_status status;

        if (!lister->is_sparse && is_plain(prefix) && !reaches(lister, prefix))
                open_at(lister, prefix);
        if (lister->is_sparse || !is_plain(prefix))
                return store_list_all(lister->store, prefix, true, ret_list, error);
        lister->answered++;
        do
                status = reaches(lister, prefix) ? take(lister, prefix, &list, error) : NEBULA_OK;
        while (!status && lister->at == lister->page.count && lister->page.next && !(status = turn(lister, error)) && !lister->is_sparse);
        if (!status && !lister->is_sparse) {
                *ret_list = list;
                return NEBULA_OK;
        }
        store_list_done(&list);
        return status ? status : store_list_all(lister->store, prefix, true, ret_list, error);
}
