/*
 * passed_over.h - the checkpoints that a search for the newest one has skipped although they may be newer, with the reasons. The
 * program gets this list: otherwise it would continue from an older checkpoint without notice.
 */
#ifndef NB_AGENT_RESTORE_PASSED_OVER_H
#define NB_AGENT_RESTORE_PASSED_OVER_H

#include "ipc/ipc.h"
#include "store/manifest.h"
#include "store/scan.h"

#define PASSED_UNSEEN "the newest in storage" /* in place of a tag: storage could not be read */

struct passed {
        struct ipc_passed list[IPC_PASSED_MAX];
        uint32_t count;
};

/* Keeps the first few; the agent's log has all of them. */
void passed_add(struct passed *passed, const char *tag, const char *reason);
/* Adds the tags that the scan could not read and the directories without a manifest, unless they are known to be older than `found`. */
void passed_scan(struct passed *passed, struct store *store, const struct manifest_scan *scan, const struct manifest *found);
/* Gives the program those that may be newer than `found`. */
void passed_report(const struct passed *passed, struct ipc_found *found);
/* Gives it one more: a version that may still become complete, perhaps of the same tag. */
void passed_also(struct ipc_found *found, const char *tag, const char *reason);

#endif
