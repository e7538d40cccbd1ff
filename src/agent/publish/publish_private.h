/* publish_private.h - shared by the files of this room; other rooms use publish.h. */
#ifndef NB_AGENT_PUBLISH_PUBLISH_PRIVATE_H
#define NB_AGENT_PUBLISH_PUBLISH_PRIVATE_H

#include "agent/publish/publish.h"

#define PUBLISH_PATH_MAX (IPC_PATH_MAX + 600)
#define PUBLISH_DIRECTORY_MODE 0777 /* as the job's umask allows */

/* publish_list.c: a job's list, in memory and in the memory directory. Lock held. */
/* NULL: an allocation failed. */
struct publish *publish_append(struct job *job, enum publish_kind kind, const char *path, const char *staging,
                               struct nebula_error *error);
void publish_erase(struct job *job, struct publish *gone);
/* Describes the list, which catalogue_unlock writes to the memory directory (memory_files.h). */
void publish_keep_list(struct catalogue *catalogue, const struct job *job);

/* publish.c. Lock held. */
bool publish_is_dead(const struct publish *publish);    /* it will never happen */
bool publish_done_after(const struct publish *publish); /* a later request for the same path has happened */
bool publish_can_happen(struct catalogue *catalogue, const struct job *job, const struct publish *publish);

/* publish_files.c and publish_tree.c: work in file systems. Without the lock. Each function can be repeated after an
 * interruption at any point. */
enum nebula_status publish_put_file(struct catalogue *catalogue, struct job *job, const struct publish *publish,
                                    struct nebula_error *error);
enum nebula_status publish_put_directory(struct catalogue *catalogue, struct job *job, const struct publish *publish,
                                         struct nebula_error *error);
/* *ret_tag and *ret_generation: the version of the removed directory; "": it was not this job's. */
enum nebula_status publish_take_away(struct catalogue *catalogue, struct job *job, const struct publish *publish, char ret_tag[IPC_NAME_MAX],
                                     uint64_t *ret_generation, struct nebula_error *error);

/* publish_copy.c. Makes a file of the version as `own`, which must not exist; its bytes are durable on return. Without the lock. */
enum nebula_status publish_make_file(struct catalogue *catalogue, struct job *job, const struct publish *publish, const char *name,
                                     const char *own, struct nebula_error *error);

extern uint64_t publish_window_bytes; /* read at once from an object store; tests make it small */

/* publish_tree.c. Without the lock. */
enum nebula_status publish_fail(struct nebula_error *error, const char *doing, const char *path, int result);
/* ret_parent may be `path`. */
void publish_parent_of(const char *path, char ret_parent[PUBLISH_PATH_MAX]);
/* A temporary name beside `path`, the same for each attempt, so that an interrupted attempt leaves nothing behind. */
void publish_unfinished_name(const char *path, const struct publish *publish, char ret_name[PUBLISH_PATH_MAX]);
/* Syncs the directory of `path` and the directories above it that may be new too. Returns 0 or a negative errno. */
int publish_sync_way(const char *path);
/* Whether this publish has already put its directory at the path, so that only publish_finish_directory may be missing. */
bool publish_is_there(const struct publish *publish);
/* Moves the staging directory to the path. */
enum nebula_status publish_move_directory(const struct job *job, const struct publish *publish, struct nebula_error *error);
/* Syncs the path and removes the files that it replaced. */
enum nebula_status publish_finish_directory(const struct publish *publish, struct nebula_error *error);
/* Removes temporary files that earlier agents left beside `path`. */
void publish_sweep(struct catalogue *catalogue, const char *path);

#endif
