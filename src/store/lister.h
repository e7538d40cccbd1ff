/*
 * lister.h - deep lists of many prefixes that ascend, for a reader of many tags. One request often answers several of them.
 *
 *      struct lister lister = { .store = store };
 *      for each prefix, in the order of a list
 *              status = lister_list(&lister, prefix, &list, error);    as store_list_all(store, prefix, true, ...)
 *      lister_done(&lister);
 *
 * A page holds the objects behind a key, of any prefix. While the next prefix lies in the page, no request is sent. Otherwise the next page
 * begins at that prefix. If pages answer few prefixes, because many objects lie between them, or if the store cannot begin a list at a key
 * (store.h), each prefix is listed by itself. The same is true if a key in a page has a character that a driver may write in another way:
 * then the service has another order.
 *
 * A list is as old as its page, so it may lack an object that was made since then. The caller keeps a lister only for a short time.
 * A prefix that does not ascend is an error of the caller: its list may lack objects.
 *
 * Threads: one at a time for each lister.
 */
#ifndef NB_STORE_LISTER_H
#define NB_STORE_LISTER_H

#include "store/store.h"

struct lister {
        struct store *store; /* set by the caller, the rest is zero */
        struct store_page page;
        size_t at;           /* entries of the page before this one are behind the last prefix */
        size_t answered;     /* lists that this page began */
        bool has_page, is_sparse;
};

enum nebula_status lister_list(struct lister *lister, const char *prefix, struct store_list *ret_list, struct nebula_error *error);
void lister_done(struct lister *lister);

#endif
