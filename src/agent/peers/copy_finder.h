/*
 * copy_finder.h - which versions peers hold in memory, and the versions of this node that they make.
 */
#ifndef NB_AGENT_PEERS_COPY_FINDER_H
#define NB_AGENT_PEERS_COPY_FINDER_H

#include "agent/catalogue/catalogue.h"
#include "agent/peers/peer_frame.h"

/* Call without the lock. Finds the newest version of the job, or of one tag, that peers hold. *ret_version_id: a version of the job's list that is marked as
 * remote. NEBULA_NOT_FOUND: no member has one that serves this session, or the job of a trainer asks for no replicas. A version serves a reader if peers
 * hold all shares of it, of any job of the path. */
enum nebula_status replica_find(struct catalogue *catalogue, struct job *job, const struct session *session, const struct ipc_find *wanted,
                                uint64_t *ret_version_id, struct nebula_error *error);
/* Whether peers hold this version and it serves the session: of several nodes' shares, that of the session's node must be there.
 * session NULL: any. Lock held. */
bool replica_serves(const struct session *session, const struct version *version);
/* Puts every version that peers hold into the job's list, marked as remote. It does nothing if memory has one, or if the job asks for
 * no replicas. For a reader: the versions of which peers hold all shares, in any case. */
void replica_learn(struct catalogue *catalogue, struct job *job, bool is_reader);
/* The copies that this node keeps for the job's other nodes; none if that is not possible. The caller frees them with peer_listing_done. The
 * job is pinned. Called without the lock. */
void replica_kept(struct catalogue *catalogue, const struct job *job, struct peer_listing *ret_listing);
/* Puts the other nodes' files of one version, which storage does not have, beside this node's share of it. False: no member was asked.
 * Lock held, released meanwhile. */
bool replica_gather(struct catalogue *catalogue, struct version *version);
/* Whether this node keeps a copy with the file of this version, or a peer holds one and this node still has its own share in memory. False,
 * too: the job asks for no replicas. Peers are not asked in a job of too many nodes. Lock held, released meanwhile. */
bool replica_locate(struct catalogue *catalogue, struct version *version, const char *name, uint64_t *ret_size, enum ipc_format *ret_format);
/* The version with the other nodes' files that replica_gather has put beside this node's share; for that version, this node's share.
 * NULL: there is none. Lock held. */
const struct version *replica_rest(const struct version *version);
/* Whether these are the files of all nodes: as many members have answered as the version had nodes, or every rank has a file. Lock
 * held. */
bool replica_gathered_all(const struct version *version);

#endif
