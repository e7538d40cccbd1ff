/*
 * known.h - the versions that an agent knows in the storage path of a job: of all jobs that write there.
 *
 * The path's worker alone changes the list, with the catalogue's lock. So the worker may read it without the lock, and all other threads
 * read it with the lock. The cost of a save does not grow with the list: the newest is kept, a tag is found by a binary search, and a
 * change moves pointers only.
 *
 * `job`: the name of the job whose newest version counts; the same at each call.
 */
#ifndef NB_AGENT_CATALOGUE_KNOWN_H
#define NB_AGENT_CATALOGUE_KNOWN_H

#include "store/manifest.h"
#include "store/scan.h"

#define KNOWN_WHOLE 8  /* so many of the newest versions that this agent has written keep the lists of their files, */
#define KNOWN_SMALL 64 /* and so do all that have no more files than this */

/* The manifests are brief: what the index says, which is a hint. Before a version is loaded or removed, its log is read. */
struct known_versions {
        struct manifest **list;   /* by sequence, oldest first */
        struct manifest **by_tag; /* the same ones */
        size_t count, room;
        struct order_best newest; /* of the job */
};

/* Moves the manifests out of a scan into a new list. False: no memory, and nothing has changed. */
bool known_new(struct manifest_scan *scan, const char *job, struct known_versions *ret_known);
/* Moves a manifest into the list, in place of the one that its tag had. NULL: no memory, and the manifest stays the caller's. */
const struct manifest *known_put(struct known_versions *known, const char *job, struct manifest *manifest);
/* Call after each version that this agent has written: the one that is no more among the newest of the job may become brief. */
void known_trim(struct known_versions *known, const char *job);
/* Takes the version of a tag out of the list, for known_free. NULL: there is none. */
struct manifest *known_take(struct known_versions *known, const char *job, const char *tag);
void known_free(struct manifest *manifest);
/* The version of a tag, of any job; NULL: none. */
const struct manifest *known_find(const struct known_versions *known, const char *tag);
/* The newest version of the job; NULL: none. */
const struct manifest *known_newest(const struct known_versions *known);
void known_done(struct known_versions *known);

#endif
