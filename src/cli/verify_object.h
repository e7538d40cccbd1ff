/*
 * verify_object.h - finds what a command line of `nebula verify` names: a version, all versions of a storage path, a file of a version, or a file
 * that no version has.
 *
 * Threads: no shared state.
 */
#ifndef NB_CLI_VERIFY_OBJECT_H
#define NB_CLI_VERIFY_OBJECT_H

#include "cli/target.h"

struct verify_object {
        struct store *store; /* NULL: a file on its own, at `path`; the caller closes it */
        char tag[256];       /* "" = every version of the store */
        bool is_newest;      /* no tag was given: the newest version */
        size_t passed_over;  /* number of versions that cannot be read; one of them may be newer */
        char name[256];      /* "" = every file */
        char path[TARGET_PATH_MAX];
};

/* `word`: a tag, "latest" or a path; NULL: the newest version. `all`: all versions, without a word. `can_be_lost`: a tag without a manifest counts, if one can be
 * made again from its records. */
enum nebula_status verify_resolve(const char *given_path, const char *word, bool all, bool can_be_lost, struct verify_object *object,
                                  struct nebula_error *error);

#endif
