/*
 * store_private.h - what drivers share. Only drivers include it.
 */
#ifndef NB_STORE_STORE_PRIVATE_H
#define NB_STORE_STORE_PRIVATE_H

#include <stdatomic.h>

#include "store/store.h"

#define STORE_KEY_MAX 2048
#define STORE_PATH_MAX 4096
#define STORE_BULK_MIN (1u << 20) /* below it, threads and O_DIRECT cost more than they save */

/* A relative path with no empty, "." or ".." component: a key can't lead out of the store. */
bool store_key_sound(const char *key);
/* A text that such a path can begin with; "": any. */
bool store_prefix_sound(const char *prefix);
/* store_mem.c: whether store_open may open it. */
bool store_mem_is_allowed(void);
/* The keys of temporary files begin like this at the top, and below a tag like that. */
#define STORE_TEMP_TOP ".nebula-tmp-"
#define STORE_TEMP_BELOW ".nebula/tmp-"
/* Adds a copy of the entry and its key. NEBULA_OK or NEBULA_NO_MEMORY. */
enum nebula_status store_page_add(struct store_page *page, const struct store_entry *entry);
/* Adds a copy of the entry and its name. NEBULA_OK or NEBULA_NO_MEMORY. */
enum nebula_status old_list_add(struct old_list *list, const struct old_entry *entry);

/* store_file.c: the path of a key, and what a failed call amounts to. */
struct file_store {
        struct store store; /* first: a struct store of this driver is one of these */
        struct file_dirs *dirs;
        atomic_uint temp_count;
        _Atomic uint64_t given_uid; /* 1 + whose the last file that was written became; 0: none yet */
};
struct file_dirs;
enum nebula_status file_path(const struct store *store, const char *key, char ret_path[STORE_PATH_MAX],
                             struct nebula_error *error);
/* What lies on the way to `path` and explains a failure, with what to do about it. False: nothing that can be seen. */
bool file_obstacle(const char *path, int result, char *text, size_t size);
/* `what` is a verb: "write", "remove". */
enum nebula_status file_error(const struct store *store, const char *what, const char *path, int result,
                              struct nebula_error *error);
/* The directory that holds `key`, relative to the root; "" at the top. */
void file_parent(const char *key, char ret_directory[STORE_KEY_MAX]);
/* Makes that directory durable. */
enum nebula_status file_ensure(struct store *store, const char *directory, const char *what, const char *path,
                               struct nebula_error *error);
/* Syncs that directory, after an entry of it changed. */
int file_sync_directory(const struct store *store, const char *directory);

/* store_file_write.c, store_file_read.c */
enum nebula_status file_old_write(struct store *store, const char *key, const void *data, uint64_t size,
                              struct nebula_error *error);
enum nebula_status file_old_create(struct store *store, const char *key, const void *data, uint64_t size,
                               struct nebula_error *error);
enum nebula_status file_old_stage(struct store *store, const struct store_object *objects, size_t count,
                              struct store_staged **ret_staged, struct nebula_error *error);
enum nebula_status file_old_place(struct store *store, struct store_staged *staged, struct nebula_error *error);
void file_old_unstage(struct store *store, struct store_staged *staged);
enum nebula_status file_read(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size,
                             struct nebula_error *error);
enum nebula_status file_old_read_text(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                  struct nebula_error *error);
enum nebula_status file_read_bulk(struct store *store, const char *key, void *data, uint64_t size, uint32_t chunk_bytes,
                                  store_check *check, void *argument, struct nebula_error *error);
enum nebula_status file_open_read(struct store *store, const char *key, int *ret_fd, bool *ret_direct, struct nebula_error *error);

/* store_file_dirs.c: directories that are there, and durable. */
#define FILE_DIRS_KEPT 64

struct file_dirs *file_dirs_new(void);
void file_dirs_free(struct file_dirs *dirs);
/*
 * Makes <root>/<directory> ("": the root itself) and what is missing above it,
 * and syncs every entry on the way, once. 0 or a negative errno; -ENODEV: the
 * file system that held the root has gone.
 */
int file_dirs_ensure(struct file_dirs *dirs, const char *root, const char *directory);
/* After a failure nothing is taken for granted. */
void file_dirs_forget(struct file_dirs *dirs);
/* That one, and what is below it: it is about to be removed. */
void file_dirs_forget_one(struct file_dirs *dirs, const char *path);

#endif
