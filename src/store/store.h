/*
 * store.h - storage behind one table of operations.
 *
 * A store is opened from a path or URL (store_open). Objects have keys: texts with '/' between components that are encoded already
 * (name_encode). No component is empty, "." or "..", so no key leads out of the store. Feature bits say which further promises a
 * driver keeps.
 *
 *      open      makes no input or output. Credentials are looked up by the first operation that needs them.
 *      features  may probe the storage at the first call. The answer does not change afterwards, except that STORE_REFERS goes once a store
 *                has shown that it takes no bytes from a source.
 *      put       writes a small object. On return the object is whole and durable, or absent. NEBULA_BUSY: the condition does not hold, and
 *                nothing was written; the object that has the key is durable. Of several concurrent puts of one key with STORE_IF_ABSENT,
 *                one succeeds.
 *      get       reads all of a small object as one put left it, NUL-terminated. NEBULA_CORRUPT: it has more than `limit` bytes.
 *      upload    writes large objects, straight from the caller's memory. With a feed (bulk.h) final bytes are sent while others are still
 *                being made. On return the objects are durable, and no operation sees them. An object store holds small ones in memory
 *                until they are published.
 *                An object with a source (STORE_REFERS): the feed says which bytes are the same in the source (bulk_feed_report_same). The
 *                driver takes these bytes from the source while the source has the expected mark. If that fails, it sends them. The
 *                result is a whole object of its own in both cases.
 *                An object with `resume`: the driver gives the caller a text by which a later upload of the same key, also in another
 *                process, finds the parts that arrived (`began`). That upload sends only the other parts: a part counts as arrived if its
 *                size and its checksum are those of the bytes. If this upload fails or is aborted, its parts stay. The caller then starts
 *                a later upload with the text, or calls `forget`. A text is of no use once the object was published.
 *      forget    drops the parts that stayed. NULL: the service drops them by itself, or nothing stays.
 *      publish   makes the objects of an upload visible, each STORE_IF_ABSENT, and frees the upload in every case. NEBULA_BUSY: a key was
 *                taken. After a failure some of the objects may be visible, each of them whole.
 *      abort     drops the objects of an upload, in place of publish, but keeps parts that a later upload can use. NULL is fine.
 *      read      reads exactly the requested bytes, or fails.
 *      read_bulk reads the first `size` bytes into mapped memory, in parallel. Worker threads pass each arrived chunk to `check` while others
 *                are read, with its CRC-64 if the driver has computed it. The driver does not write again to a chunk that `check` accepted.
 *      read_chunks reads the chunks of some ranges as read_bulk reads all. `data` is the address of the object's first byte. The ranges are
 *                sorted and do not overlap. Each begins at a multiple of chunk_bytes, and ends at one or at the end of the object. NULL: the
 *                store lends descriptors.
 *      open_read gives a descriptor from which the caller reads the object (STORE_LENDS_FD). *ret_direct: reads need whole pages (O_DIRECT).
 *                is_shared: several processes read it, so its bytes stay in the page cache and *ret_direct is false.
 *      list      gives entries whose key begins with the text `prefix` ("": all), by ascending bytes of their keys. `deep`: every object.
 *                Otherwise keys are cut at the first '/' after the prefix, and equal ones are folded into one entry (is_prefix), which is
 *                sorted as if its key ended with '/'. `from` is NULL, or `next` of the page before. A page may be empty although `next` is
 *                set. If nothing matches, the page is empty and the call succeeds, even if the root does not exist. A container or bucket
 *                that does not exist is a failure. An object that appears or goes during a listing may be in it or not.
 *      list_after gives the first page of a deep list of all objects, but begins behind `key`. `next` leads to the page after it, in a list of
 *                the prefix "". If the key of an object is `key` and one more character, the page may lack it. NULL, or a failure: the
 *                store cannot begin a list there.
 *      stat      gives the entry of one object. A key that only others begin with is NEBULA_NOT_FOUND.
 *      remove    removes objects, durably. If a victim has a stamp, an object with another stamp stays, and this is no failure. An absent
 *                object is no failure. If objects are files, directories that become empty are removed, too. After a failure some
 *                victims may be gone.
 *      sweep     ends interrupted uploads, which lists do not show. `limit` says of each key until when, by the store's clock, an abandoned
 *                upload of it may have been touched. The beginning of an upload and each part touch it. The uploads of one tag, or of one
 *                write, are ended together or not at all. A writer that continues an upload that was ended fails, and writes nothing.
 *                NULL: the service ends such uploads by itself, or lists show them.
 *      clock     gives the store's time, to compare with time_ns of entries. Never compare those with this machine's clock. Some stores
 *                count in whole seconds.
 *      copy      copies an object inside the store (STORE_COPIES). The copy is whole and durable as after put.
 *      free_bytes fails with NEBULA_NOT_FOUND if the store has no such number.
 *      lacks     names to a person what this store does not do of that what its protocol promises; "": nothing is known to be missing. It may
 *                write and remove a small object. NULL: the driver needs nothing that a store could lack.
 *      reach     describes to a person the route to the store, without a secret. It sends no request. NULL: a file system.
 *
 * Errors: NEBULA_NOT_FOUND; NEBULA_BUSY, a condition does not hold; NEBULA_NO_SPACE; NEBULA_CORRUPT; NEBULA_INVALID, a key or size that this
 * store can never take; NEBULA_STORAGE, with sys_errno or http_status; NEBULA_TIMEOUT and NEBULA_UNAVAILABLE, of the transport;
 * NEBULA_NO_MEMORY. The message names the object and holds no secret of a URL. A driver retries faults of its transport by itself.
 * store_class says whether a caller should try again. If the answer to a write gets lost, the driver reads the object back before it
 * returns NEBULA_BUSY or success.
 *
 * Links: no operation follows a link below the root. The path of the root may contain links. A removal removes the link itself.
 * Ownership: the caller frees what an operation returns (free, store_entry_done, store_page_done). Outputs are written only on success.
 * ret_stamp and ret_size may be NULL. Arguments are not kept after the call. The caller must not change the bytes of an upload until the
 * upload has returned.
 * Threads: all operations may run at the same time on one store.
 *
 * If objects are files (STORE_PATHS), callers must also know:
 *   - A list shows temporary files of writers (store_is_temporary), for a sweep to find, and links. A folded entry may be an empty directory.
 *   - Two writes of equal size within one tick of the file system's clock (some ms) can get one stamp if they also get one inode.
 *   - A file system cannot compare and remove in one step. A removal with a stamp compares, moves the file aside, and compares again. If another
 *     process has replaced the object between the two comparisons, the new object is moved back; meanwhile it is not found. If a third process
 *     takes the key meanwhile, the object stays aside under a temporary name, and a log line says so.
 *   - STORE_IF_ABSENT is safe if the file system has hard links or a rename that replaces nothing. If it has neither (some FUSE), two writers
 *     at the same moment can both succeed, and the later one's object stays.
 *   - A copy shares blocks if the file system can (xfs, btrfs): then programs may write over it. Else (ext4, NFS) the copy is a second name of
 *     the same file: a program that replaces it does not change the object, but one that writes over it in place damages the object. If the
 *     file system has neither, the bytes are copied.
 */
#ifndef NB_STORE_STORE_H
#define NB_STORE_STORE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "nebula.h"
#include "os/bulk.h"

struct store;
struct store_upload; /* the driver's own */
struct trust;

enum store_feature {
        STORE_PATHS = 1 << 0,         /* objects are files below `root`: other programs read them there */
        STORE_LENDS_FD = 1 << 1,      /* open_read works */
        STORE_OWNERS = 1 << 2,        /* entries say whether they are another user's (is_foreign) */
        STORE_LISTS_FRESH = 1 << 3,   /* a list that begins after a write has returned contains it */
        STORE_COPIES = 1 << 4,        /* copy works, without sending the bytes through this machine */
        STORE_PUTS_IF_SAME = 1 << 5,  /* STORE_IF_SAME works */
        STORE_VIEW_IS_FREE = 1 << 6,  /* copy shares the bytes (reflink, link): its time does not depend on the size */
        STORE_REFERS = 1 << 7,        /* upload can take bytes from a source that is in the store */
        STORE_FAR = 1 << 8,           /* each call waits for a network: callers make independent ones at the same time */
};

enum store_condition {
        STORE_ALWAYS,    /* replaces what is there */
        STORE_IF_ABSENT, /* NEBULA_BUSY if something has the key */
        STORE_IF_SAME,   /* NEBULA_BUSY if the object does not have that stamp, or no longer */
};

/* Identifies the content of a key: each write gives another stamp. Opaque; "" means none. */
struct store_stamp {
        char text[96];
};

struct store_entry {
        char *key;               /* the whole key */
        uint64_t size;           /* bytes */
        int64_t time_ns;         /* when it was written, by the store's clock */
        struct store_stamp stamp;
        bool is_prefix;          /* in shallow lists: some keys continue with '/' after this one. size and time are 0 */
        bool is_link;            /* in lists: no operation follows it, so its target is not part of the store */
        bool is_foreign;         /* another user's, as far as the driver knows: a sweep must leave it */
};
struct store_page {
        struct store_entry *entries;
        size_t count;
        char *next; /* `from` of the next page; NULL: this is the last one */
};
struct store_list {
        struct store_entry *entries;
        size_t count;
};

struct store_victim {
        const char *key;
        struct store_stamp stamp; /* "": whatever is there */
};

/* Whether trying again can help after a failure. */
enum store_class {
        STORE_AGAIN, /* yes, at once: the transport failed */
        STORE_LATER, /* yes, by the caller, later */
        STORE_NEVER, /* no, until a person changes the storage or the request */
};

/* Identifies the one object that an upload makes; known once the upload has returned. Opaque; "" means none. */
struct store_mark {
        char text[96];
};

/* An object in the store that has some bytes of an object being uploaded, at the same offsets. */
struct store_source {
        const char *key;
        uint64_t size;
        struct store_mark mark; /* of the upload that made it */
};

/* How an interrupted upload of one object goes on later. */
#define STORE_RESUME_MAX 512 /* bytes of the text, its NUL included */
struct store_resume {
        const char *former; /* the text that an earlier upload of this key gave; NULL: there was none */
        /* If the parts make a temporary object (store_is_temporary), the text begins with its key and a blank, and a sweep knows the upload by
         * that key. Called for each object that can go on later, before its first part is sent, on the thread that called `upload`. `is_last`: no
         * other object of this upload follows. */
        void (*began)(void *argument, const char *key, const char *text, bool is_last);
        void *argument;
};

/* The result of an upload for one object. All bytes that are neither referred nor resumed were sent. */
struct store_written {
        struct store_mark mark;
        uint64_t referred; /* bytes taken from the source */
        uint64_t resumed;  /* bytes that an earlier upload had sent */
};

/* One of the objects of an upload. `feed`: says which of its bytes are final (bulk.h); NULL: all are. */
struct store_object {
        const char *key;
        const void *data;
        uint64_t size;
        struct bulk_feed *feed;
        const struct store_source *source;  /* NULL: send all bytes. A source needs a feed */
        struct store_written *ret_written; /* may be NULL */
        const struct store_resume *resume; /* NULL: the upload cannot go on later */
};

struct store_range {
        uint64_t offset, size;
};

/* Checks one chunk; a failure stops the read and is its result. May run on several threads. `crc64`: the sum of the bytes as they
 * arrived; NULL: the driver did not compute it (store_chunk_sum). */
typedef enum nebula_status store_check(void *argument, const void *data, uint64_t offset, uint64_t size, const uint64_t *crc64,
                                       struct nebula_error *error);

/* The latest time, in ns by the store's clock, at which an abandoned upload of that key was touched. INT64_MIN: the upload stays. */
typedef int64_t store_sweep_limit(void *argument, const char *key);

/* For people. */
struct store_reach {
        char credential[240]; /* which one is used, and its origin */
        char transport[240];  /* "https, ..." or "http, ..." */
        bool is_expired;      /* by its own expiry time */
};

struct store_ops {
        const char *scheme;
        enum nebula_status (*open)(const char *url, struct store **ret_store, struct nebula_error *error);
        void (*close)(struct store *store);
        unsigned (*features)(struct store *store);
        /* `seen`: for STORE_IF_SAME, else NULL. */
        enum nebula_status (*put)(struct store *store, const char *key, const void *data, uint64_t size, enum store_condition condition,
                                  const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error);
        enum nebula_status (*get)(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                  struct store_stamp *ret_stamp, struct nebula_error *error);
        enum nebula_status (*upload)(struct store *store, const struct store_object *objects, size_t count,
                                     struct store_upload **ret_upload, struct nebula_error *error);
        enum nebula_status (*publish)(struct store *store, struct store_upload *upload, struct nebula_error *error);
        void (*abort)(struct store *store, struct store_upload *upload);
        enum nebula_status (*forget)(struct store *store, const char *key, const char *text, struct nebula_error *error);
        enum nebula_status (*read)(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size, struct nebula_error *error);
        enum nebula_status (*read_bulk)(struct store *store, const char *key, void *data, uint64_t size, uint32_t chunk_bytes,
                                        store_check *check, void *argument, struct nebula_error *error);
        enum nebula_status (*read_chunks)(struct store *store, const char *key, void *data, const struct store_range *ranges, size_t count,
                                          uint32_t chunk_bytes, store_check *check, void *argument, struct nebula_error *error);
        enum nebula_status (*open_read)(struct store *store, const char *key, bool is_shared, int *ret_fd, bool *ret_direct,
                                        struct nebula_error *error);
        enum nebula_status (*list)(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                                   struct nebula_error *error);
        enum nebula_status (*list_after)(struct store *store, const char *key, struct store_page *ret_page, struct nebula_error *error);
        enum nebula_status (*stat)(struct store *store, const char *key, struct store_entry *ret_entry, struct nebula_error *error);
        enum nebula_status (*remove)(struct store *store, const struct store_victim *victims, size_t count, struct nebula_error *error);
        enum nebula_status (*sweep)(struct store *store, store_sweep_limit *limit, void *argument, size_t *ret_count, struct nebula_error *error);
        enum nebula_status (*clock)(struct store *store, int64_t *ret_ns, struct nebula_error *error);
        enum nebula_status (*copy)(struct store *store, const char *from, const char *to, enum store_condition condition,
                                   struct nebula_error *error);
        enum nebula_status (*free_bytes)(struct store *store, uint64_t *ret_bytes, struct nebula_error *error);
        enum nebula_status (*reach)(struct store *store, struct store_reach *ret_reach, struct nebula_error *error);
        enum nebula_status (*lacks)(struct store *store, char *ret_text, size_t size, struct nebula_error *error);
};

struct store {
        const struct store_ops *ops;
        char *root; /* the path or URL as opened, absolute */
        /* STORE_PATHS: the mount point on which the root lay, as so many bytes of its path; 0: not known, or none below "/". While it is none,
         * every operation fails with ENODEV: what is mounted there is missing. The driver sets it; a caller that knows it from an earlier
         * agent may set it after store_open. */
        atomic_uint mount_length;
        struct trust *trust; /* which signatures count, and the key that signs (trust.h); NULL: none */
};

extern const struct store_ops store_file;

/* Registers a driver that only some programs link (cloud.h): store_open calls its `open` for URLs that `takes` accepts. Call it before
 * threads start. */
void store_offer(const struct store_ops *ops, bool (*takes)(const char *url));
/* Picks the driver from the URL: a plain absolute path or file:// is store_file. The settings of signatures count (trust.h). */
enum nebula_status store_open(const char *url, struct store **ret_store, struct nebula_error *error);
void store_close(struct store *store);

/* All pages of a list. */
enum nebula_status store_list_all(struct store *store, const char *prefix, bool deep, struct store_list *ret_list, struct nebula_error *error);
/* The entry with that key, or NULL. Binary search: lists are sorted. */
const struct store_entry *store_list_find(const struct store_list *list, const char *key);
enum nebula_status store_put_text(struct store *store, const char *key, const char *text, enum store_condition condition,
                                  struct nebula_error *error);
enum nebula_status store_remove_one(struct store *store, const char *key, struct nebula_error *error); /* whatever is there */
/* Removes Nebula's objects below the prefix that are not younger than that time of the store's clock. */
enum nebula_status store_remove_before(struct store *store, const char *prefix, int64_t before_ns, struct nebula_error *error);
/* Removes an object that readers do not look at. If that fails (some stores refuse all removals), it stays for a sweep, and the log says so. */
void store_drop(struct store *store, const char *key);
/* NEBULA_CORRUPT: the object `key` has `found` bytes, and its record says another number. */
enum nebula_status store_check_size(const struct store *store, const char *key, uint64_t found, uint64_t recorded, struct nebula_error *error);
/* These accept zeroed structs, and zero the struct they free. */
void store_page_done(struct store_page *page);
void store_list_done(struct store_list *list);
void store_entry_done(struct store_entry *entry);

/* Whether the key is that of an unfinished file of the file driver: no object, listed for a sweep to remove. */
bool store_is_temporary(const char *key);
/* The CRC-64 of a chunk that a store_check got. */
uint64_t store_chunk_sum(const void *data, uint64_t size, const uint64_t *crc64);
/* Of a failed operation. */
enum store_class store_class(const struct nebula_error *error);


#endif
