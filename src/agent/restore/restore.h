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

/* Every file of a stored version is where it should be, and as long. NEBULA_BUSY: the version went meanwhile, which is to be looked for
 * again. */
enum nebula_status restore_check_files(struct store *store, const struct manifest *manifest, struct nebula_error *error);
enum nebula_status restore_find(struct catalogue *catalogue, const struct session *session, const struct ipc_find *request,
                                struct ipc_found *ret_found, struct nebula_error *error);
/* *ret_opened (to be freed) and *ret_fd, which can only read, are the caller's. */
enum nebula_status restore_open(struct catalogue *catalogue, const struct ipc_open *request, struct ipc_opened **ret_opened,
                                int *ret_fd, struct nebula_error *error);

#endif
