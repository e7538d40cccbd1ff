/* publish_private.h - what the files of publishing share; publish.h is for the others. */
#ifndef NB_AGENT_PUBLISH_PUBLISH_PRIVATE_H
#define NB_AGENT_PUBLISH_PUBLISH_PRIVATE_H

#include "agent/publish/publish.h"

#define PUBLISH_PATH_MAX (IPC_PATH_MAX + 600)
#define PUBLISH_DIRECTORY_MODE 0777 /* as the job's umask allows */

/* publish_list.c: a job's list, in memory and in the memory directory. With the lock. */
/* NULL: no memory. */
struct publish *publish_append(struct job *job, enum publish_kind kind, const char *path, const char *staging,
                               struct nebula_error *error);
void publish_erase(struct job *job, struct publish *gone);
/* Writes the list down. One that cannot be costs only the protection against the agent's death, as with survival logs. */
void publish_keep_list(const struct catalogue *catalogue, const struct job *job);

/* publish.c. With the lock. */
bool publish_is_dead(const struct publish *publish);    /* it will never happen */
bool publish_done_after(const struct publish *publish); /* one that was asked for later has happened */
bool publish_can_happen(struct catalogue *catalogue, const struct job *job, const struct publish *publish);

/* publish_files.c and publish_tree.c: what happens in file systems. Without the lock; each can be done again from any point. */
enum nebula_status publish_put_file(struct catalogue *catalogue, struct job *job, const struct publish *publish,
                                    struct nebula_error *error);
enum nebula_status publish_put_directory(struct catalogue *catalogue, struct job *job, const struct publish *publish,
                                         struct nebula_error *error);
/* *ret_tag and *ret_generation: the version that the removed directory was of; "" when it was none of this job's. */
enum nebula_status publish_take_away(struct catalogue *catalogue, struct job *job, const struct publish *publish, char ret_tag[IPC_NAME_MAX],
                                     uint64_t *ret_generation, struct nebula_error *error);

/* publish_copy.c. A file of the version as `own`, which does not exist; its bytes are on disk when this returns. Without the lock. */
enum nebula_status publish_make_file(struct catalogue *catalogue, struct job *job, const struct publish *publish, const char *name,
                                     const char *own, struct nebula_error *error);

/* publish_tree.c. Without the lock. */
enum nebula_status publish_fail(struct nebula_error *error, const char *doing, const char *path, int result);
/* ret_parent may be `path`. */
void publish_parent_of(const char *path, char ret_parent[PUBLISH_PATH_MAX]);
/* A name beside `path` until the file is whole; the same for each try, so that one that was interrupted leaves nothing. */
void publish_unfinished_name(const char *path, const struct publish *publish, char ret_name[PUBLISH_PATH_MAX]);
/* Syncs the directory of `path`, and those above it that may be as new. 0 or a negative errno. */
int publish_sync_way(const char *path);
/* The directory is whole at its path, put there by this publish: only publish_finish_directory may be missing. */
bool publish_is_there(const struct publish *publish);
/* Staging becomes the path. */
enum nebula_status publish_move_directory(const struct job *job, const struct publish *publish, struct nebula_error *error);
/* The path is on disk, and what it replaced goes. */
enum nebula_status publish_finish_directory(const struct publish *publish, struct nebula_error *error);
/* Removes what agents that are gone left beside `path`. */
void publish_sweep(struct catalogue *catalogue, const char *path);

#endif
