/*
 * place.h - one place in an object store is one path, however its URL is spelled, and the path holds no secret.
 *
 *      place_normalize(path);                "HTTPS" stays as it is, but "https://Account.blob.core.windows.net:443//c/a%62/?SIGNATURE" becomes
 *                                         "https://account.blob.core.windows.net/c/ab"
 *      place_keep(url);                   the newest signature of that place, for this process
 *      url = place_signed(path);          the path with that signature: store_open takes either
 *
 * Two spellings of one place must be one job: otherwise two trainers overwrite each other's files, and a trainer that starts again with a
 * new signature does not find what the agent has in memory. Paths of jobs are printed, so a signature does not belong to them.
 *
 * Threads: all functions may be called from any thread.
 */
#ifndef NB_STORE_PLACE_H
#define NB_STORE_PLACE_H

/* Writes the URL of an object store in one spelling, without its query. The result is never longer. Paths of directories, and texts that
 * no driver takes, stay as they are. */
void place_normalize(char *url);
/* Remembers the query of a URL. A URL without one changes nothing. */
void place_keep(const char *url);
/* The query that was kept for this place, in whatever spelling; NULL: none, or no memory. The caller passes it to place_forget. */
char *place_query(const char *url);
/* The place with the query that was kept for it; a copy of `path` if there is none. NULL: no memory. The caller passes it to place_forget. */
char *place_signed(const char *path);
void place_forget(char *secret); /* overwrites and frees it */

#endif
