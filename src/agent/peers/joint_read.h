/*
 * joint_read.h - the nodes of a job read a stored file together, so that storage sends each chunk of it once.
 *
 * Each chunk has an owner among the nodes that answer. A node reads its own chunks from storage and asks the owners for the others. An owner
 * that has not read a chunk yet reads it then. A chunk that does not come is read from storage. At most JOINT_NODES nodes, neighbours in the
 * order of their names, are one group: in a larger job storage sends a chunk once for each group.
 *
 * joint_open waits for members of the job that have not announced themselves yet, JOINT_WAIT_NS at most. joint_close keeps the connections for
 * JOINT_KEPT_NS. Call all without the catalogue's lock.
 */
#ifndef NB_AGENT_PEERS_JOINT_READ_H
#define NB_AGENT_PEERS_JOINT_READ_H

#include "agent/catalogue/catalogue.h"
#include "agent/peers/peer_frame.h"
#include "store/store.h"

#define JOINT_NODES 32
#define JOINT_WAIT_NS (2 * SECOND_NS)
#define JOINT_KEPT_NS (5 * SECOND_NS)
#define JOINT_ALONE_NS (60 * SECOND_NS) /* a node that was alone does not look for others again so soon */

struct joint;
struct replica;
/* A stored file. chunk: of what is asked for. */
struct joint_file {
        struct peer_part part;
        uint64_t size;
        uint32_t chunk_bytes;
        const uint64_t *crc64; /* per chunk */
        char *data;            /* where its first byte goes */
};

/* Whether the nodes of this job read together. Lock held. */
bool joint_wanted(const struct catalogue *catalogue, const struct job *job);
/* Connects to the other nodes. NULL: this node reads alone. The job is pinned. */
struct joint *joint_open(struct catalogue *catalogue, struct job *job, const char *name);
bool joint_is_own(const struct joint *joint, uint32_t chunk);
/* Gets the chunks of the ranges from their owners. ret_here: per chunk, whether it is there now, and is what the record says. */
void joint_fetch(struct joint *joint, const struct joint_file *file, const struct store_range *ranges, size_t count, bool *ret_here);
void joint_close(struct catalogue *catalogue, struct joint *joint);
/* Closes connections whose time is over. Returns when the next ones are due; INT64_MAX: there are none. */
int64_t joint_expire(struct replica *replica);
/* Closes the connections of a job; NULL: of all. */
void joint_forget(struct replica *replica, const struct job *job);

#endif
