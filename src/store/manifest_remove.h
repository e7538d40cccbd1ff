/*
 * manifest_remove.h - removes a version.
 */
#ifndef NB_STORE_MANIFEST_REMOVE_H
#define NB_STORE_MANIFEST_REMOVE_H

#include "store/manifest.h"

/* Enters a removal into the tag's log, then removes the objects that the log and its records name, and Nebula's own objects. Other
 * programs' files stay. Each object is removed only if it is the one that was there before the entry. NEBULA_BUSY: nothing was removed,
 * because the tag was written again since the manifest was loaded, or is being removed. */
enum nebula_status manifest_remove(struct store *store, const struct manifest *manifest, struct nebula_error *error);
/* Completes a removal that was interrupted. Does nothing if the newest entry of the log is not a removal. */
enum nebula_status manifest_end_removal(struct store *store, const char *tag, struct nebula_error *error);
/* Removes the objects of one try of a writing, for a try that no manifest will name. */
void manifest_forsake(struct store *store, const char *tag, const char *writing);

#endif
