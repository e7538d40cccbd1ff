/*
 * world.h - versions whose ranks live on several nodes (docs/protocol.md).
 *
 * commit_rule.c asks world_is_spread; when this node's share of such a version has
 * captured it calls world_captured. From there the persist worker carries on,
 * in world_work: it writes the captured document, looks for the others' with
 * back-off, and commits when they cover the version. It looks only while
 * a version waits.
 *
 * While a version waits, its state names the missing ranks. It fails when a newer
 * version is complete or its run has ended. Its documents are then removed.
 *
 * All functions need the catalogue's lock. world_work releases it while it
 * reads and writes.
 */
#ifndef NB_AGENT_COMMIT_WORLD_H
#define NB_AGENT_COMMIT_WORLD_H

#include "agent/catalogue/catalogue.h"
#include "store/announce.h"

/* Whether ranks of this version may be on other nodes. Their agents exchange documents through storage. */
bool world_is_spread(const struct catalogue *catalogue, const struct version *version);
/* Call when ranks of this node have captured: the share is announced, or announced again with more ranks. */
void world_captured(struct catalogue *catalogue, struct version *version);
/* Call after the program has given the version up: the agent puts that decision into storage for the other nodes, unless there is another one. */
void world_give_up(struct catalogue *catalogue, struct version *version);
/* The number of a new version among the writings of its tag in its run. */
uint64_t world_next_writing(const struct job *job, const char *tag, const char *run);
/* One piece of work on the job. False when none is due; *due_ns is lowered to when the next is. Its worker only. */
bool world_work(struct catalogue *catalogue, struct job *job, int64_t now_ns, int64_t *due_ns);
/* Whether this node decides, and writes the manifest. */
bool world_leads(const struct version *version);
/* Since when this node waits for others, and when it last heard of one. */
int64_t world_waiting_since_ns(const struct version *version);
int64_t world_heard_ns(const struct version *version);
/* When this node looks again, how often it has looked, and the next time, a longer pause later. */
int64_t world_poll_at_ns(const struct version *version);
uint32_t world_poll_count(const struct version *version);
void world_look_later(struct version *version, int64_t now_ns);
/* This node's share is in storage: the wait for the others begins. */
void world_await(struct version *version);
/* For the survival log: the sequence of the version's announcement; 0: it was not announced. An adopted version is announced again. */
uint64_t world_announce_sequence(const struct version *version);
void world_adopt(struct version *version, uint64_t announce_sequence, bool is_spread);

#endif
