/* store_file_private.h - declarations that the files of the driver `file` share. Functions that return an int return 0 or a negative
 * errno. */
#ifndef NB_STORE_STORE_FILE_PRIVATE_H
#define NB_STORE_STORE_FILE_PRIVATE_H

#include <stdatomic.h>

#include "os/lock.h"
#include "os/os.h"
#include "store/store_private.h"

#define FILE_BULK_MIN (1u << 20) /* below it, threads and O_DIRECT cost more than they save */
#define FILE_TRIES 8 /* of a write while other processes remove its empty directories */
#define FILE_TEMP_MAX (STORE_KEY_MAX + 32)

/* The last answer of the store's clock, read at `read_ns` (os->now_ns); 0: never. */
struct file_clock {
        struct lock lock; /* guards the rest */
        int64_t read_ns, time_ns;
};

struct file_store {
        struct store store; /* must be first: the driver casts between the two */
        struct file_dirs *dirs;
        atomic_uint temp_count;
        _Atomic uint64_t given_uid; /* 1 + owner of the last file that was written; 0: none yet */
        atomic_uint features;       /* 0: not probed */
        atomic_bool cannot_clone;   /* the file system cannot share blocks */
        struct file_clock clock;
};

/* store_file.c: paths of keys, and errors of failed calls. */
enum nebula_status file_path(const struct store *store, const char *key, char ret_path[STORE_PATH_MAX], struct nebula_error *error);
/* `what` is a verb: "write", "remove". */
enum nebula_status file_error(const struct store *store, const char *what, const char *path, int result, struct nebula_error *error);
/* The directory of `key`, relative to the root; "" at the top. */
void file_parent(const char *key, char ret_directory[STORE_KEY_MAX]);
bool file_same_parent(const char *one, const char *other);

/* store_file_obstacle.c: describes the thing on the path that explains a failure, and how to remove it. False: none was found. */
bool file_obstacle(const char *path, int result, char *text, size_t size);

/* store_file_dirs.c: directories that exist and are durable. */
#define FILE_DIRS_KEPT 64

struct file_dirs;
struct file_dirs *file_dirs_new(atomic_uint *mount_length);
void file_dirs_free(struct file_dirs *dirs);
/* Makes <root>/<directory> ("": the root itself) and its missing parents, and syncs every entry on the path, once. -ENODEV: the file
 * system that held the root has gone. */
int file_dirs_ensure(struct file_dirs *dirs, const char *root, const char *directory);
/* Call it when something is missing, and with each list. -ENODEV: the file system that held the root has gone, so nothing is known of what
 * is missing. -ENOTDIR: the root is no directory. Other failures are those of the root. */
int file_dirs_look(struct file_dirs *dirs, const char *root);
/* The same as file_dirs_ensure, and syncs again if another process has removed and remade the directory. Call it after adding an entry: while the entry
 * exists, no process removes the directory. */
int file_dirs_confirm(struct file_dirs *dirs, const char *root, const char *directory);
/* Forgets all directories. Call it after a failure. */
void file_dirs_forget(struct file_dirs *dirs);
/* Forgets one directory and those below it. Call it before removing the directory. */
void file_dirs_forget_one(struct file_dirs *dirs, const char *path);

/* store_file_temp.c: temporary files, <tag>/.nebula/tmp-* and .nebula-tmp-*. A sweep recognizes them by these names. */
void file_temp_parent(const char *key, char ret_directory[STORE_KEY_MAX]);
/* Another name at each call. `parent` comes from file_temp_parent. */
void file_temp_name(struct store *store, const char *parent, char ret_temp[FILE_TEMP_MAX]);
/* Makes the directories for the temporary file and for `key`, and the file. Returns its descriptor. */
int file_temp_open(struct store *store, const char *key, int flags, char ret_temp[FILE_TEMP_MAX]);
/* The same, but makes the temporary file as a hard link to `source`. Returns 0. */
int file_temp_link(struct store *store, const char *key, const char *source, char ret_temp[FILE_TEMP_MAX]);
/* Syncs and closes it. */
int file_temp_close(struct store *store, int fd, struct os_stat *ret_made);

/* store_file_place.c: from a temporary file to its key. */
struct file_placing {
        char *temp, *key;    /* temp NULL: the file has only its key */
        struct os_stat made; /* the temporary file */
};
/* With STORE_IF_ABSENT -EEXIST: the key is taken. Call file_place_sync to make the key durable. */
int file_place(struct store *store, struct file_placing *placing, enum store_condition condition);
/* The same, but makes no directories; gives the file `key` as a second name only if `key` is free. */
int file_place_new(const struct store *store, const char *temp, const char *key, const struct os_stat *made);
/* *ret_at: the index that a failure concerns. */
int file_place_sync(struct store *store, const struct file_placing *placings, size_t count, size_t *ret_at);
struct store_stamp file_stamp(const struct os_stat *stat);

/* store_file_upload.c */
struct store_upload {
        size_t count;
        struct file_placing files[];
};
enum nebula_status file_upload(struct store *store, const struct store_object *objects, size_t count, struct store_upload **ret_upload,
                               struct nebula_error *error);
/* Removes the remaining temporary files, and frees the upload. */
void file_end_upload(struct store *store, struct store_upload *upload);
void file_abort(struct store *store, struct store_upload *upload);
enum nebula_status file_write_error(const struct store *store, const char *key, uint64_t size, int result, struct nebula_error *error);

/* store_file_refer.c */
/* Opens the object's source, if it has the expected mark and this file system may share its blocks. -1: all bytes must be written. */
int file_open_source(struct store *store, const struct store_object *object);
/* Fills `fd` of the temporary file `temp`: shares the blocks of `source` for bytes that the feed says are the same, writes the others, and reads the
 * shared ones. */
int file_refer(struct store *store, const struct store_object *object, int source, const char *temp, int fd, bool is_direct, uint64_t *ret_referred);

/* store_file_publish.c */
enum nebula_status file_publish(struct store *store, struct store_upload *upload, struct nebula_error *error);
enum nebula_status file_put(struct store *store, const char *key, const void *data, uint64_t size, enum store_condition condition,
                            const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error);

/* store_file_read.c */
int file_open_to_read(const struct store *store, const char *key, int flags);
enum nebula_status file_get(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                            struct store_stamp *ret_stamp, struct nebula_error *error);
enum nebula_status file_read(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size, struct nebula_error *error);
enum nebula_status file_read_bulk(struct store *store, const char *key, void *data, uint64_t size, uint32_t chunk_bytes,
                                  store_check *check, void *argument, struct nebula_error *error);
enum nebula_status file_open_read(struct store *store, const char *key, bool is_shared, int *ret_fd, bool *ret_direct,
                                  struct nebula_error *error);

/* store_file_list.c */
enum nebula_status file_list(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                             struct nebula_error *error);
enum nebula_status file_stat(struct store *store, const char *key, struct store_entry *ret_entry, struct nebula_error *error);

/* store_file_remove.c, store_file_copy.c, store_file_clock.c */
enum nebula_status file_remove(struct store *store, const struct store_victim *victims, size_t count, struct nebula_error *error);
/* Removes the empty directories on the paths of `key` and of its temporary file. */
void file_remove_empty(struct store *store, const char *key);
enum nebula_status file_copy(struct store *store, const char *from, const char *to, enum store_condition condition,
                             struct nebula_error *error);
enum nebula_status file_clock(struct store *store, int64_t *ret_ns, struct nebula_error *error);

#endif
