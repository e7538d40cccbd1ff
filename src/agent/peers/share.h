/* share.h - the description of this node's share of a version that other nodes get. */
#ifndef NB_AGENT_PEERS_SHARE_H
#define NB_AGENT_PEERS_SHARE_H

#include "agent/catalogue/catalogue.h"
#include "agent/peers/peer_frame.h"

/* Whether this node has the file's bytes from its own ranks. Bytes that were read back from storage do not count: other nodes can read
 * them there. */
bool share_holds(const struct agent_file *file);
/* Describes the version's numbers and its files, in their order. The caller sets `owner`. Lock held. Call peer_copy_done even after a
 * failure. */
enum nebula_status share_describe(const struct version *version, struct peer_copy *ret_copy, struct nebula_error *error);

#endif
