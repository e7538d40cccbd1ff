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
 * replica_find and replica_fetch are called without the lock.
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
/* Finds the newest version of the job, or of one tag, that peers hold. *ret_version_id: a version of the job's list that is marked as
 * remote. NEBULA_NOT_FOUND: no member has one that serves this session, or the job asks for no replicas. */
enum nebula_status replica_find(struct catalogue *catalogue, struct job *job, const struct session *session, const struct ipc_find *wanted,
                                uint64_t *ret_version_id, struct nebula_error *error);
/* Whether peers hold this version and it serves the session: of several nodes' shares, that of the session's node must be there.
 * session NULL: any. Lock held. */
bool replica_serves(const struct session *session, const struct version *version);
/* Puts every version that peers hold into the job's list, marked as remote. It does nothing if memory has one, or if the job asks for
 * no replicas. */
void replica_learn(struct catalogue *catalogue, struct job *job);
/* The copies that this node keeps for the job's other nodes; none if that is not possible. The caller frees them with peer_listing_done. The
 * job is pinned. Called without the lock. */
void replica_kept(struct catalogue *catalogue, const struct job *job, struct peer_listing *ret_listing);
/* Puts the other nodes' files of one version, which storage does not have, beside this node's share of it. False: no member was asked.
 * Lock held, released meanwhile. */
bool replica_gather(struct catalogue *catalogue, struct version *version);
/* Whether a peer holds the file of this version, of which this node still has its own share in memory. False, too: the job asks for no
 * replicas, or has too many nodes for each to ask all others. Lock held, released meanwhile. */
bool replica_locate(struct catalogue *catalogue, struct version *version, const char *name, uint64_t *ret_size, enum ipc_format *ret_format);
/* The version with the other nodes' files that replica_gather has put beside this node's share; for that version, this node's share.
 * NULL: there is none. Lock held. */
const struct version *replica_rest(const struct version *version);
/* Whether these are the files of all nodes: as many members have answered as the version had nodes, or every rank has a file. Lock
 * held. */
bool replica_gathered_all(const struct version *version);
/* Reads a file of such a version into `data` and checks every piece. `size`: of the file, in bytes. */
enum nebula_status replica_fetch(struct catalogue *catalogue, struct job *job, const char *tag, uint64_t generation, uint64_t sequence,
                                 const char *name, void *data, uint64_t size, struct nebula_error *error);

#endif
