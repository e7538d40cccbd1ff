/*
 * vars.h - variables of clouds (credentials, endpoints, regions) that a trainer's environment has, for its agent.
 *
 * An agent outlives the process that started it, and serves others. So each job brings its own variables.
 *
 *      vars_collect(environ, &vars, error);        the trainer's half, which sends vars_text
 *      vars = vars_new(text, size, "rank 0 ...");  the agent's half
 *      before = vars_enter(vars);
 *      ... conf_env("AWS_REGION") ...              on this thread: from `vars` alone if vars_is_of_cloud, else from the process
 *      vars_leave(before);
 *      vars_drop(vars);                            the last holder overwrites them
 *
 * They are secrets: nobody writes them to a log or a file.
 * Threads: an object may be shared; each thread enters for itself.
 */
#ifndef NB_BASE_VARS_H
#define NB_BASE_VARS_H

#include <stdbool.h>
#include <stddef.h>

#include "nebula.h"

#define VARS_MAX (32u << 10) /* bytes of a text: keys and tokens have some kilobytes */

struct vars;

/* `name`: alone, or with "=VALUE". */
bool vars_is_of_cloud(const char *name);
/* Those of an environment. *ret_vars is NULL if it has none. NEBULA_INVALID: they have more than VARS_MAX bytes. NEBULA_NO_MEMORY. */
enum nebula_status vars_collect(char *const *environment, struct vars **ret_vars, struct nebula_error *error);
/* "NAME=VALUE" of each, each with a NUL. `vars` NULL: *ret_size is 0. */
const char *vars_text(const struct vars *vars, size_t *ret_size);
/* `origin` says where they came from. NULL: no memory. */
struct vars *vars_new(const char *text, size_t size, const char *origin);
struct vars *vars_hold(struct vars *vars); /* NULL is fine, also below */
void vars_drop(struct vars *vars);
bool vars_same(const struct vars *a, const struct vars *b);
/* NULL: the process's own variables count. */
struct vars *vars_enter(struct vars *vars);
void vars_leave(struct vars *before);
struct vars *vars_now(void);
/* The value in the entered variables. NULL: it has none there. */
const char *vars_value(const char *name);
/* The origin of those that count on this thread; "": of this process itself. */
const char *vars_origin(void);
/* Removes all variables of clouds from the process's own environment. Call it before threads start. */
void vars_forget_own(void);
/* What vars_origin says while none are entered: for an agent, which has the environment of another process. Call it before threads start. */
void vars_own_origin(const char *origin);

#endif
