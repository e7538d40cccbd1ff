/*
 * world.h - versions whose ranks live on several nodes (docs/protocol.md).
 *
 * commit_rule.c asks world_is_spread; when this node's share of such a version has
 * captured it calls world_captured. From there the persist worker carries on,
 * in world_work: it writes the captured document, looks for the others' with
 * back-off, and commits when they cover the version. It looks only while
 * a version waits.
 *
 * A version that never becomes whole says which ranks are missing while it
 * waits, fails when a newer one is complete or its run has ended, and takes its
 * documents with it.
 *
 * All functions need the catalogue's lock; world_work gives it up while it
 * reads and writes.
 */
#ifndef NB_AGENT_COMMIT_WORLD_H
#define NB_AGENT_COMMIT_WORLD_H

#include "agent/catalogue/catalogue.h"
#include "store/announce.h"

/* Whether ranks of this version may live on other nodes, whose agents are told through storage. */
bool world_is_spread(const struct catalogue *catalogue, const struct version *version);
/* This node's ranks have captured: to be announced, or announced again with more. */
void world_captured(struct catalogue *catalogue, struct version *version);
/* Which writing of its tag in its run a new version is. */
uint64_t world_next_writing(const struct job *job, const char *tag, const char *run);
/* One piece of work on the job. False when none is due; *due_ns is lowered to when the next is. Its worker only. */
bool world_work(struct catalogue *catalogue, struct job *job, int64_t now_ns, int64_t *due_ns);
/* This node waits for others to make a version durable. Somebody who was about to write committed.json when he fell asleep may have
 * written it since, and taken `persist` back, or put an earlier writing's in its place: then it is written again. No lock held. */
void world_keep_committed(struct catalogue *catalogue, struct store *store, struct version *version);
enum nebula_status world_read_committed(struct store *store, const char *tag, struct committed *ret_committed, struct nebula_error *error);
/* "waits for ranks 2, 5 of 8"; empty when it does not wait. */
void world_missing(const struct version *version, char *text, size_t size);
/* When to look again after `count` looks in vain. */
int64_t world_back_off(uint32_t count);

#endif
