/*
 * manifest_publish.h - makes the views of a version, and removes what it replaces.
 */
#ifndef NB_STORE_MANIFEST_PUBLISH_H
#define NB_STORE_MANIFEST_PUBLISH_H

#include "store/manifest.h"

/* Call this after a commit. Copies the committed bytes of each file that lies apart to <tag>/<name>, if the store can copy, and removes
 * objects that only earlier entries named. NEBULA_BUSY: another entry was made. If that happened during the call, this call may have put
 * older bytes over its views, so they are made again. */
enum nebula_status manifest_publish(struct store *store, const struct manifest *manifest, const struct manifest *before,
                                    struct nebula_error *error);
/* The same for a version whose writer may have ended before this work was done. *ret_was_left: it was not done. */
enum nebula_status manifest_publish_rest(struct store *store, const struct manifest *manifest, const struct manifest *before,
                                         bool *ret_was_left, struct nebula_error *error);

#endif
