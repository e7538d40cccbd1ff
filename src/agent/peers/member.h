/*
 * member.h - the agents of a job's other nodes, and their addresses.
 *
 *   .nebula/nodes/<node>.json    in storage: where the agent of that node listens. The agent writes it, and removes it at its end.
 *   .nebula/nodes/<node>.spare   the same of a spare node: no rank is there yet, and copies go to it first.
 *
 * $NEBULA_PEERS=host:port,... replaces the records. A job without storage needs it: its `store` is NULL.
 * The keys of the records name the nodes, so an agent lists them and reads only the record of the node that it connects to. If a node
 * does not answer, the agent removes that node's record if it is a day older than its own, by the clock of storage. Otherwise a job whose
 * nodes have new names at each start would leave many records. An agent writes its record again when trainers come after a pause.
 *
 * Called without the lock. Threads: no shared state.
 */
#ifndef NB_AGENT_PEERS_MEMBER_H
#define NB_AGENT_PEERS_MEMBER_H

#include "ipc/ipc.h"
#include "store/store.h"

#define MEMBER_MAX 65536
#define MEMBER_GONE_NS (86400 * SECOND_NS)

struct member {
        char node[IPC_NAME_MAX], address[IPC_NAME_MAX];
        uint16_t port;
        uint64_t nonce; /* of the agent; 0: not known (NEBULA_PEERS) */
};
struct member_list {
        char **names;
        size_t count;       /* nodes with ranks. Sorted, each name once */
        size_t spare_count; /* spare nodes, behind them; likewise */
};

/* $NEBULA_NODE_ID, else the host's name. */
enum nebula_status member_own_name(char ret_node[IPC_NAME_MAX], struct nebula_error *error);
/* Nothing to do with NEBULA_PEERS. */
enum nebula_status member_announce(struct store *store, const struct member *own, bool is_spare, struct nebula_error *error);
void member_withdraw(struct store *store, const struct member *own, bool is_spare);
/* This node has become a spare, or is one no more: removes its record of the other kind, also one that a dead agent has left. */
void member_replace(struct store *store, const struct member *own, bool is_spare);
/* `node` did not answer: its record goes if it is old. */
void member_remove_gone(struct store *store, const char *node, bool is_spare, const char *own_node);
/* own->node may be among them. */
enum nebula_status member_names(struct store *store, struct member_list *ret_list, struct nebula_error *error);
void member_list_done(struct member_list *list);
enum nebula_status member_load(struct store *store, const char *node, bool is_spare, struct member *ret_member, struct nebula_error *error);
/* "host:port", "[v6]:port" or "host", whose port is 0 then; NEBULA_INVALID says what is wrong with setting `what`. */
enum nebula_status member_parse(const char *what, const char *text, struct member *ret_member, struct nebula_error *error);
/* The record as text, and back. */
enum nebula_status member_format(const struct member *member, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status member_read(const char *text, size_t size, struct member *ret_member, struct nebula_error *error);

#endif
