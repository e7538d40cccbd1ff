/* store_mem_private.h - declarations that the files of the driver `mem` share. */
#ifndef NB_STORE_STORE_MEM_PRIVATE_H
#define NB_STORE_STORE_MEM_PRIVATE_H

#include "os/lock.h"
#include "store/store_mem.h"
#include "store/store_private.h"

struct mem_object {
        char *key, *data;
        uint64_t size;
        int64_t wall_ns;     /* when it was written */
        uint64_t stamp;
        uint64_t mark;       /* of the upload that made it; 0: a small object */
        uint64_t born, died; /* the changes that wrote and removed it; died UINT64_MAX: it exists */
};

/* The store's clock is ahead of this machine's. Converts a time of this machine to the store's. */
#define MEM_CLOCK_AHEAD_NS (INT64_C(3600) * 1000000000)
static inline int64_t mem_time(int64_t wall_ns)
{
        return wall_ns - wall_ns % 1000000000 + MEM_CLOCK_AHEAD_NS;
}

/* The state that all stores of one URL share. */
struct mem_volume {
        struct mem_volume *next;
        char *url;
        struct lock lock; /* guards everything below */
        struct mem_object *objects; /* by key */
        size_t count;
        struct mem_object ghosts[STORE_MEM_STALE_MAX]; /* the last removed objects, without data: stale lists show them */
        size_t next_ghost;
        uint64_t change_count, stamp_count, mark_count; /* these counters are never reset */
        uint64_t call_count, write_count;
        struct mem_faults faults;
};

struct mem_store {
        struct store store; /* must be first: the driver casts between the two */
        struct mem_volume *volume;
};

/* store_mem_objects.c. `makes`: creates the volume, if it is missing. NULL: no memory, or no such volume. */
struct mem_volume *mem_volume_find(const char *url, bool makes);
struct mem_volume *mem_volume_of(const struct store *store);
/* The volume's lock is held. */
struct mem_object *mem_find(struct mem_volume *volume, const char *key); /* NULL: absent */
/* Takes over `data`. False: no memory, and the caller keeps `data`. */
bool mem_set(struct mem_volume *volume, const char *key, char *data, uint64_t size, struct store_stamp *ret_stamp);
void mem_drop(struct mem_volume *volume, struct mem_object *object);
void mem_clear(struct mem_volume *volume);
struct store_stamp mem_stamp(const struct mem_object *object);
struct store_entry mem_entry(const struct mem_object *object); /* the object owns the key */

/* store_mem_faults.c: each call begins with mem_begin. Each write ends with mem_answer, under the lock. */
enum nebula_status mem_begin(struct store *store, const char *key, struct nebula_error *error);
enum nebula_status mem_answer(struct mem_volume *volume, const char *key, struct nebula_error *error);
enum nebula_status mem_no_memory(const struct store *store, struct nebula_error *error);
enum nebula_status mem_not_found(const struct store *store, const char *key, struct nebula_error *error);

/* store_mem_list.c */
enum nebula_status mem_list_after(struct store *store, const char *key, struct store_page *ret_page, struct nebula_error *error);
enum nebula_status mem_list(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                            struct nebula_error *error);

/* store_mem_upload.c */
struct store_upload {
        size_t count;
        struct mem_object objects[];
};
enum nebula_status mem_upload(struct store *store, const struct store_object *objects, size_t count, struct store_upload **ret_upload,
                              struct nebula_error *error);
enum nebula_status mem_publish(struct store *store, struct store_upload *upload, struct nebula_error *error);
void mem_abort(struct store *store, struct store_upload *upload);

/* store_mem.c */
/* Takes over `data`. `mark`: of an upload, or 0. */
enum nebula_status mem_write(struct store *store, const char *key, char *data, uint64_t size, uint64_t mark, enum store_condition condition,
                             const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error);
enum nebula_status mem_get(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                           struct store_stamp *ret_stamp, struct nebula_error *error);

#endif
