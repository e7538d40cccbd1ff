/* publish_private.h - shared by the files of this room; other rooms use publish.h. */
#ifndef NB_AGENT_PUBLISH_PUBLISH_PRIVATE_H
#define NB_AGENT_PUBLISH_PUBLISH_PRIVATE_H

#include "agent/publish/publish_list.h"
#include "agent/publish/publish_tree.h"

#define PUBLISH_DIRECTORY_MODE 0777 /* as the job's umask allows */

/* publish.c. Lock held. */
bool publish_is_dead(const struct publish *publish);    /* it will never happen */
bool publish_done_after(const struct publish *publish); /* a later request for the same path has happened */
bool publish_can_happen(struct catalogue *catalogue, const struct job *job, const struct publish *publish);

/* publish_files.c: work in file systems. Without the lock. Each function can be repeated after an
 * interruption at any point. */
enum nebula_status publish_put_file(struct catalogue *catalogue, struct job *job, const struct publish *publish,
                                    struct nebula_error *error);
enum nebula_status publish_put_directory(struct catalogue *catalogue, struct job *job, const struct publish *publish,
                                         struct nebula_error *error);

/* publish_copy.c. Makes a file of the version as `own`, which must not exist; its bytes are durable on return. Without the lock. */
enum nebula_status publish_make_file(struct catalogue *catalogue, struct job *job, const struct publish *publish, const char *name,
                                     const char *own, struct nebula_error *error);

extern uint64_t publish_window_bytes; /* read at once from an object store; tests make it small */

#endif
