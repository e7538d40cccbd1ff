/*
 * secret.h - the secret that the agents of one job share. It proves who may ask for copies, and encrypts them.
 *
 *   $NEBULA_SECRET_FILE        a file of this user on this node
 *   <persist>/.nebula/secret   else, if storage is a directory: 32 random bytes in hex, mode 0600, made by the first agent that needs it
 *
 * An object store has no place for it: every user that may read a bucket would read the secret, too.
 */
#ifndef NB_AGENT_PEERS_SECRET_H
#define NB_AGENT_PEERS_SECRET_H

#include "agent/peers/tls.h"
#include "store/store.h"

/* Returns the job's secret. `store` NULL: the job has no storage. `makes`: if storage has none, it is made; else that is NEBULA_NOT_FOUND.
 * NEBULA_INVALID: there is no secret, or others could read it. Call without the catalogue's lock. */
enum nebula_status secret_take(struct store *store, bool makes, struct tls_key *ret_key, struct nebula_error *error);

#endif
