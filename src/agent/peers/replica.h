/*
 * replica.h - sends copies of this node's versions to other nodes' memory, and reads copies from there.
 *
 * One thread sends. For each job that asks for replicas, it sends the newest complete version, and any that a client waits
 * for, to the nodes that placement.h names, one for each copy. If a node does not answer, the next one on the ring gets the
 * copy. When as many peers as the job asks for have confirmed that the copy is complete and correct, the version moves to
 * `replicated`. The peers keep the versions that this node keeps in memory. A peer that loses its memory gets the newest
 * version again.
 *
 * A failure here costs the copy and nothing else: training, committing and persisting do not wait for it.
 * NEBULA_PEER_MBPS bounds the rate of sending, in 10^6 bytes per second (1000; 0: no bound).
 *
 * Reads: a node asks all members for their copies and shares of its job if it has lost its memory, or if one of its
 * ranks loads a file that another node saved. An answer serves all ranks for a few seconds.
 *
 * replica_fetch is called without the lock.
 */
#ifndef NB_AGENT_PEERS_REPLICA_H
#define NB_AGENT_PEERS_REPLICA_H

#include "agent/catalogue/catalogue.h"
#include "agent/peers/peer_frame.h"

struct replica;

#define REPLICA_MAX 8 /* copies of a version; each takes its size in another node's memory and on the network */

enum nebula_status replica_start(struct catalogue *catalogue, struct nebula_error *error);
/* Lock held; the catalogue is stopping. False: the thread may still hang in storage. */
bool replica_ended(const struct catalogue *catalogue);
/* Call when the catalogue is stopping. Waits for the thread. */
void replica_stop(struct catalogue *catalogue);
/* A client waits for the version's copies on other nodes. True: it is the first. Lock held. */
bool replica_want(struct version *version);
/* Why the copies that a client waits for are not made yet; "": no reason is known. Lock held. */
const char *replica_trouble(const struct version *version);
/* How many of the copies that its job asks for other nodes hold, as far as this node knows; why there are not more, "": no reason is known.
 * Lock held. */
uint32_t replica_copies(const struct version *version);
const char *replica_error(const struct job *job);
/* Reads a file of a version that peers hold into `data` and checks every piece. `size`: of the file, in bytes. */
enum nebula_status replica_fetch(struct catalogue *catalogue, struct job *job, const char *tag, uint64_t sequence,
                                 const char *name, void *data, uint64_t size, struct nebula_error *error);

#endif
