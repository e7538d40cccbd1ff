/*
 * restore.h - finding a version and handing out its files.
 *
 * A version is looked for in this node's memory, then in storage; only complete
 * ones are found. A file comes from memory as it is; from storage it is lent to
 * the first trainer that asks, which reads and checks it by itself; for those
 * after it is read in parallel into an image of its own, every byte checked on
 * the way, once however many ranks ask.
 *
 * Called without the lock.
 */
#ifndef NB_AGENT_RESTORE_RESTORE_H
#define NB_AGENT_RESTORE_RESTORE_H

#include "agent/catalogue/catalogue.h"

/* Checks that every file of a stored version is in its place and has its size. NEBULA_BUSY: the version was removed meanwhile; search
 * again. */
enum nebula_status restore_check_files(struct store *store, const struct manifest *manifest, struct nebula_error *error);
enum nebula_status restore_find(struct catalogue *catalogue, const struct session *session, const struct ipc_find *request,
                                struct ipc_found *ret_found, struct nebula_error *error);
/* The caller frees *ret_opened and closes *ret_fd, which is read-only. */
enum nebula_status restore_open(struct catalogue *catalogue, const struct ipc_open *request, struct ipc_opened **ret_opened,
                                int *ret_fd, struct nebula_error *error);

#endif
