/*
 * publish_tree.h - directories and files at published paths. Without the lock. Each function can be repeated after an interruption at any point.
 */
#ifndef NB_AGENT_PUBLISH_PUBLISH_TREE_H
#define NB_AGENT_PUBLISH_PUBLISH_TREE_H

#include "agent/publish/publish.h"

#define PUBLISH_PATH_MAX (IPC_PATH_MAX + 600)

/* *ret_tag and *ret_sequence: the version of the removed directory; "": it was not this job's. */
enum nebula_status publish_take_away(struct catalogue *catalogue, struct job *job, const struct publish *publish, char ret_tag[IPC_NAME_MAX],
                                     uint64_t *ret_sequence, struct nebula_error *error);
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
