/*
 * share.h - this node's share of a version, as other nodes are told of it.
 */
#ifndef NB_AGENT_PEERS_SHARE_H
#define NB_AGENT_PEERS_SHARE_H

#include "agent/catalogue/catalogue.h"
#include "agent/peers/peer_frame.h"

/* Whether its bytes are here and nobody else's: not read back from storage, which others can read as well. */
bool share_holds(const struct agent_file *file);
/* Its numbers and files, in the order of the version's; `owner` is the caller's to say. Lock held; peer_copy_done also after a failure. */
enum nebula_status share_describe(const struct version *version, struct peer_copy *ret_copy, struct nebula_error *error);

#endif
