/*
 * copy_server.h - the copies that this agent keeps for others, and the listener through which they come.
 *
 * The listener opens when the first job of this node asks for replicas, at $NEBULA_LISTEN
 * (host:port; else 127.0.0.1 when NEBULA_NODE_ID plays several nodes on one host, else this
 * host's address; port 0 and a chosen one). A peer that connects proves that it holds the secret of
 * a job of this node. It then sees only the copies of that job and storage path, and this node's own share of
 * that job's complete versions, which is read from its images (copy_server_own.c).
 *
 * Copies lie in memory of their own, outside the catalogue, and are never written to storage from here.
 * Their budget is $NEBULA_PEER_MEMORY (half of the memory tier), within that of the tier. A copy is dropped when
 * its owner says so, or if a new copy needs the room and the owner has gone. A copy counts when every byte of it
 * has come and was sound.
 *
 * Locks: copy_server_lock guards everything below it in the struct; it is never held
 * during input or output, and the catalogue's lock may be taken inside it, not the other way round.
 */
#ifndef NB_AGENT_PEERS_COPY_SERVER_H
#define NB_AGENT_PEERS_COPY_SERVER_H

#include "agent/catalogue/catalogue.h"
#include "agent/peers/peer.h"

struct copy_server;

enum nebula_status copy_server_new(struct catalogue *catalogue, const char *node, struct copy_server **ret_server, struct nebula_error *error);
/* Opens the listener if it is not open. *ret_own: the record of this node for other members. */
enum nebula_status copy_server_open(struct copy_server *server, struct member *ret_own, struct nebula_error *error);
/* A secret of a job of this node. */
enum nebula_status copy_server_add_key(struct copy_server *server, const struct tls_key *key, struct nebula_error *error);
/* The copies that this node keeps for the job's other nodes. The caller frees them with peer_listing_done. Call without the catalogue's
 * lock; the job is pinned. */
enum nebula_status copy_server_kept(struct copy_server *server, const struct job *job, struct peer_listing *ret_listing,
                                    struct nebula_error *error);
/* Reads a file of a version from a copy that this node keeps, and checks it. False: no sound copy of it is here. Call as copy_server_kept. */
bool copy_server_read(struct copy_server *server, const struct job *job, const char *tag, uint64_t sequence, const char *name, void *data, uint64_t size);
/* Ends the threads and frees the memory. The catalogue must still exist. */
void copy_server_free(struct copy_server *server);

#endif
