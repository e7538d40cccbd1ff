/*
 * store.h - storage behind one table of operations.
 *
 * A store is opened from a path or URL and addressed by keys: relative paths
 * with '/', whose components are already encoded (name_encode). Each driver
 * (file; later azure, s3; mem as the reference) keeps these promises:
 *
 *   write     the object appears whole or not at all, and is durable on return:
 *             data, directory entry and all. An older object of that key is replaced.
 *   create    as write, but one that is there stays: then it is NEBULA_BUSY. Of two that create
 *             one key at the same time one succeeds.
 *   move      as rename: atomic, durable on return. Optional (NULL on object stores).
 *   read      exactly the asked bytes, or an error.
 *   read_text an object as one write left it, also when another replaces it meanwhile.
 *   list      every object written before the call, in no order; `prefix` names a directory,
 *             "" the root. One that is not there is NEBULA_NOT_FOUND.
 *   links     none is followed below the root, which itself may be reached through some: the call fails, with ELOOP. A move or a
 *             removal takes the link itself.
 *   remove    durable or not at all; absent is fine. So it is for remove_directory,
 *             which fails when the directory is not empty.
 *
 * write of a large object takes bytes from mapped memory (page-aligned data is
 * written with O_DIRECT, with no copy). read of a large object goes straight
 * into mapped memory, in parallel; each finished chunk is handed to `check`,
 * on worker threads, while others are still on their way.
 *
 * Errors: NEBULA_NOT_FOUND, NEBULA_NO_SPACE, NEBULA_STORAGE with errno or
 * HTTP status, NEBULA_CORRUPT when an object is shorter than what is read of
 * it; the message names the object. Retrying is the caller's.
 * Threads: all operations may run at the same time on one store.
 */
#ifndef NB_STORE_STORE_H
#define NB_STORE_STORE_H

#include <stdbool.h>

#include "nebula.h"
#include "os/bulk.h"

struct store;
struct store_staged; /* objects of one call of stage; the driver's own */

struct store_entry {
        char *name;        /* last component */
        uint64_t size;
        int64_t mtime_ns;
        bool is_directory;
        bool is_link;      /* in a listing: no operation follows it, so what it leads to is not part of the store */
        bool is_foreign;   /* another user's, as far as the driver can tell: not to be swept */
};
struct store_list {
        struct store_entry *entries;
        size_t count;
};

/* One of several that are staged together. `feed`: NULL, or what says which of its bytes are final (bulk.h). */
struct store_object {
        const char *key;
        const void *data;
        uint64_t size;
        struct bulk_feed *feed;
};

/* Checks one chunk; a failure stops the read and is its result. May run on several threads. */
typedef enum nebula_status store_check(void *argument, const void *data, uint64_t offset, uint64_t size,
                                       struct nebula_error *error);

struct store_ops {
        const char *scheme;
        enum nebula_status (*open)(const char *url, struct store **ret_store, struct nebula_error *error);
        void (*close)(struct store *store);
        enum nebula_status (*write)(struct store *store, const char *key, const void *data, uint64_t size, struct nebula_error *error);
        enum nebula_status (*create)(struct store *store, const char *key, const void *data, uint64_t size, struct nebula_error *error);
        /* write for each, with fewer syncs and in two halves. First the bytes, durable, where only a sweep knows them. */
        enum nebula_status (*stage)(struct store *store, const struct store_object *objects, size_t count,
                                    struct store_staged **ret_staged, struct nebula_error *error);
        /* Then their keys, in no order, durable on return. Frees `staged` in every case; after a failure some may be there, each of them whole. */
        enum nebula_status (*place)(struct store *store, struct store_staged *staged, struct nebula_error *error);
        void (*unstage)(struct store *store, struct store_staged *staged); /* instead of place; NULL is fine */
        enum nebula_status (*move)(struct store *store, const char *from, const char *to, struct nebula_error *error);
        enum nebula_status (*read)(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size, struct nebula_error *error);
        /* All of a small one, NUL-terminated (free it); with more than `limit` bytes it is NEBULA_CORRUPT. */
        enum nebula_status (*read_text)(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                        struct nebula_error *error);
        enum nebula_status (*read_bulk)(struct store *store, const char *key, void *data, uint64_t size, uint32_t chunk_bytes,
                                        store_check *check, void *argument, struct nebula_error *error);
        /* A descriptor to read the object through, for who checks it himself; *ret_direct: it wants whole pages (O_DIRECT).
         * Optional (NULL where objects are no files). */
        enum nebula_status (*open_read)(struct store *store, const char *key, int *ret_fd, bool *ret_direct, struct nebula_error *error);
        enum nebula_status (*stat)(struct store *store, const char *key, struct store_entry *ret_entry, struct nebula_error *error);
        enum nebula_status (*list)(struct store *store, const char *prefix, struct store_list *ret_list, struct nebula_error *error);
        enum nebula_status (*remove)(struct store *store, const char *key, struct nebula_error *error);
        enum nebula_status (*remove_directory)(struct store *store, const char *prefix, struct nebula_error *error); /* only if empty */
        enum nebula_status (*free_bytes)(struct store *store, uint64_t *ret_bytes, struct nebula_error *error);
};

struct store {
        const struct store_ops *ops;
        char *root; /* the path or URL as opened, absolute */
};

extern const struct store_ops store_file;
extern const struct store_ops store_mem; /* the reference, for tests: each open makes an empty one; not to be had by URL */

/* Picks the driver from the URL: a plain absolute path or file:// is store_file. */
enum nebula_status store_open(const char *url, struct store **ret_store, struct nebula_error *error);
void store_close(struct store *store);
/* A whole small object as NUL-terminated text; refuses more than `limit` bytes. */
enum nebula_status store_read_text(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                   struct nebula_error *error);
void store_list_done(struct store_list *list);
void store_entry_done(struct store_entry *entry);

#endif
