/*
 * unfinished.h - the uploads that an attempt to persist a version has begun and not ended. The next attempt goes on with them, also that of the
 * next agent, which reads them in the survival log. It uses the name of the same try, so that the keys of its files are the same.
 *
 * The list is empty once the version's record is written: from then on another process may see the objects of that try.
 *
 * Threads: the catalogue's lock guards the lists. Only the version's worker changes a list, so the worker reads it without the lock.
 */
#ifndef NB_AGENT_PERSIST_UNFINISHED_H
#define NB_AGENT_PERSIST_UNFINISHED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct unfinished_upload {
        char *key, *text; /* text: by which the store finds it (struct store_resume) */
        bool is_used;     /* by the last attempt */
};
struct unfinished {
        uint32_t attempt; /* the number of the try */
        size_t count;
        struct unfinished_upload *uploads;
};

/* The text for that key; NULL: none. */
const char *unfinished_find(const struct unfinished *list, const char *key);
/* Whether the parts of an upload make the temporary object of that key. */
bool unfinished_has_place(const struct unfinished *list, const char *key);
/* The last attempt uses this upload; another one of the same key is replaced. False: no memory. */
bool unfinished_set(struct unfinished *list, const char *key, const char *text);
/* Moves all uploads of `from` to `to`. Without memory they are lost, and a sweep ends them. */
void unfinished_move(struct unfinished *from, struct unfinished *to);
/* Frees the list. A zeroed one is fine. */
void unfinished_done(struct unfinished *list);

#endif
