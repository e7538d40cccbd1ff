/*
 * restore.h - finds a version and hands out its files.
 *
 * A search looks for complete versions in this node's memory, then in storage. A
 * file in memory is handed out as its image. A file in storage:
 * - The agent lends the stored file to a trainer that is alone on this node. That
 *   trainer reads and checks it by itself.
 * - If other trainers of the job are on this node, or a trainer has read the file
 *   before, the agent reads the file once into an image, in parallel, and checks
 *   every byte.
 * - A trainer that needs only parts of the file is always lent the stored file.
 *   With other trainers beside it, it reads through the page cache.
 * - If the store lends no descriptors, a trainer that needs only parts gets an image
 *   without bytes. restore_fetch fills the chunks that the trainer asks for.
 * So the ranks of a node read storage once.
 *
 * Call all functions without the lock.
 */
#ifndef NB_AGENT_RESTORE_RESTORE_H
#define NB_AGENT_RESTORE_RESTORE_H

#include "agent/catalogue/catalogue.h"
#include "agent/peers/peer_frame.h"
#include "store/scan.h"

/* Checks that every file of a stored version is in its place and has its size. NEBULA_BUSY: the version was removed meanwhile; search
 * again. */
enum nebula_status restore_check_files(struct store *store, const struct manifest *manifest, struct nebula_error *error);
/* Lists what storage has, for a trainer. A failure is repeated some times: a rank that sees less than the others makes them go back. */
enum nebula_status restore_scan(struct catalogue *catalogue, struct store *store, struct manifest_scan *ret_scan, struct nebula_error *error);
enum nebula_status restore_find(struct catalogue *catalogue, const struct session *session, const struct ipc_find *request,
                                struct ipc_found *ret_found, struct nebula_error *error);
/* A chunk of a stored file, for another node. */
struct restore_part {
        struct version *version; /* pinned */
        struct image *image;     /* held */
        const char *bytes;
        uint64_t offset, crc64;
        size_t size;
};
/* Reads the chunk from storage, unless this node has done so. NEBULA_BUSY: this node waits for another one that reads it. The job is pinned. */
enum nebula_status restore_part(struct catalogue *catalogue, struct job *job, const struct peer_part *wanted, struct restore_part *ret_part,
                                struct nebula_error *error);
void restore_part_done(struct catalogue *catalogue, struct restore_part *part);
/* session: that of the reader; NULL: the agent. The caller frees *ret_opened and closes *ret_fd, which is read-only. */
enum nebula_status restore_open(struct catalogue *catalogue, const struct session *session, const struct ipc_open *request,
                                struct ipc_opened **ret_opened, int *ret_fd, struct nebula_error *error);
/* Fills chunks of an image that restore_open has handed out. NEBULA_BUSY: the image is gone; open the file again. */
enum nebula_status restore_fetch(struct catalogue *catalogue, const struct ipc_fetch *request, struct nebula_error *error);

#endif
