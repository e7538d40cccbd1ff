/*
 * restore_private.h - shared by the files behind restore.h.
 *
 *      answers.c         one answer for all ranks of a node
 *      restore_find.c    finding a version: memory, peers and storage
 *      restore_stored.c  the search in storage
 *      restore_open.c    handing out whole files
 *      restore_chunks.c  images that get the chunks of a stored file when trainers ask for them
 */
#ifndef NB_AGENT_RESTORE_RESTORE_PRIVATE_H
#define NB_AGENT_RESTORE_RESTORE_PRIVATE_H

#include "agent/restore/passed_over.h"
#include "agent/restore/restore.h"
#include "store/record.h"

/* The scope of a search in storage. */
struct search_scope {
        bool any_job;            /* versions of other jobs count, too */
        char also[IPC_NAME_MAX]; /* a tag whose newest entry is loaded as well; "": none */
};
/* The result of a search in storage. */
struct stored {
        enum nebula_status status; /* NEBULA_NOT_FOUND: storage certainly has none */
        struct nebula_error error;
        struct manifest manifest;
        struct passed passed;
        enum nebula_status also_status; /* of scope.also */
        struct manifest also;
};
/* No lock held; the job is pinned. The caller ends the result with stored_done, also after a failure. */
void restore_look(struct catalogue *catalogue, struct job *job, const struct ipc_find *wanted, const struct search_scope *scope, struct stored *ret_stored);
/* The same for a caller that has an answer from memory: repeats a search that fails, and waits a minute at most for storage that does not
 * answer. Then the status is NEBULA_TIMEOUT. */
void restore_look_patiently(struct catalogue *catalogue, struct job *job, const struct ipc_find *wanted, const struct search_scope *scope,
                            struct stored *ret_stored);
void stored_done(struct stored *stored);

/* A file that is to be read from storage. */
struct wanted {
        char tag[256], name[256];
        uint64_t origin;     /* sequence of the version that wrote the file, which may be carried over */
        uint64_t sequence;   /* of the version, when storage has it; 0: it is to follow the one that is there, and takes the file over */
};

/* Lock held. */
void restore_want(const struct version *version, const struct agent_file *file, struct wanted *ret_wanted);
/* Loads the manifest of the tag. NEBULA_NOT_FOUND, with restore_gone's message: storage has another writing, or none. */
enum nebula_status restore_manifest(struct store *store, const struct wanted *wanted, struct manifest *ret_manifest, struct nebula_error *error);
/* The same with the file's record. The caller ends both with manifest_done and record_file_done, also after a failure. */
enum nebula_status restore_record(struct store *store, const struct wanted *wanted, struct manifest *ret_manifest, struct record_file *ret_file,
                                  struct nebula_error *error);
enum nebula_status restore_gone(const char *tag, struct nebula_error *error);
/* Reserves bytes of the budget. Waits for pages that are being given back. Lock held. */
enum nebula_status restore_reserve(struct catalogue *catalogue, uint64_t bytes, const char *name, struct nebula_error *error);
/* Opens an image for a client. Drops the lock meanwhile. The image serves no save from here on. */
enum nebula_status restore_lend(struct catalogue *catalogue, struct image *image, int *ret_fd, struct nebula_error *error);

/*
 * Lock held on entry and return, released meanwhile; the version is pinned.
 *
 * chunks_open: hands out the file's sparse image, and makes it if there is none. NEBULA_UNAVAILABLE: this file is read as a whole.
 * chunks_prepare: makes the sparse image alone. chunks_complete: fills the sparse image, if there is one: it becomes the file's image. After a failure it is gone.
 */
enum nebula_status chunks_open(struct catalogue *catalogue, struct version *version, const char *name, struct ipc_opened **ret_opened,
                               int *ret_fd, struct nebula_error *error);
enum nebula_status chunks_prepare(struct catalogue *catalogue, struct version *version, const char *name, struct nebula_error *error);
enum nebula_status chunks_complete(struct catalogue *catalogue, struct version *version, const char *name, struct nebula_error *error);

#endif
