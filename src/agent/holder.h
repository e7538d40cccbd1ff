/*
 * holder.h - the copies that this agent keeps for others, and the door through which they come.
 *
 * The door opens when the first job of this node asks for replicas, at $NEBULA_LISTEN
 * (host:port; else 127.0.0.1 when NEBULA_NODE_ID plays several nodes on one host, else this
 * host's address; port 0 and a chosen one). Who knocks proves that it holds the secret of
 * a job of this node; it then sees the copies of that job and storage path alone, and what this node
 * itself has of that job's complete versions, which is read where it lies (holder_own.c).
 *
 * Copies lie in memory of their own, outside the catalogue, and are never written to storage from here.
 * Their budget is $NEBULA_PEER_MEMORY (half of the memory tier), within that of the tier. A copy goes when
 * its owner says so, or, where a new one needs the room and the owner has gone, as a whole. It counts when
 * every byte of it came and was sound.
 *
 * Locks: holder_lock guards everything below it in the struct; it is never held
 * during input or output, and the catalogue's lock may be taken inside it, not the other way round.
 */
#ifndef NB_AGENT_HOLDER_H
#define NB_AGENT_HOLDER_H

#include "agent/catalogue.h"
#include "agent/peer.h"

struct holder;

enum nebula_status holder_new(struct catalogue *catalogue, const char *node, struct holder **ret_holder, struct nebula_error *error);
/* Opens the door if it is not open; *ret_own is what others need to know. */
enum nebula_status holder_open(struct holder *holder, struct member *ret_own, struct nebula_error *error);
/* A secret of a job of this node. */
enum nebula_status holder_add_key(struct holder *holder, const struct tls_key *key, struct nebula_error *error);
/* Ends its threads and gives the memory back; the catalogue still stands. */
void holder_free(struct holder *holder);

#endif
