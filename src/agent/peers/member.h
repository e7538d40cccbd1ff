/*
 * member.h - which agents there are, how they are reached, and the secret that they share.
 *
 *   <persist>/.nebula/secret              32 random bytes in hex, mode 0600, made by the first agent that needs it
 *   <persist>/.nebula/nodes/<node>.json   where the agent of that node listens; written by it, removed at its end
 *
 * $NEBULA_SECRET_FILE replaces the first, $NEBULA_PEERS=host:port,... the second; without a storage path
 * both are needed. The names of the records alone say who there is, so that a node reads only the record of
 * the one it turns to. Who finds that nobody answers removes a record that is a day older than its own, by the clock of storage:
 * a job that goes on under new names with each start leaves many. An agent writes its record again whenever trainers come to it anew.
 *
 * Called without the lock. Threads: no shared state.
 */
#ifndef NB_AGENT_PEERS_MEMBER_H
#define NB_AGENT_PEERS_MEMBER_H

#include "agent/peers/tls.h"
#include "ipc/ipc.h"
#include "nebula.h"

#define MEMBER_MAX 65536
#define MEMBER_GONE_NS INT64_C(86400000000000)

struct member {
        char node[IPC_NAME_MAX], address[IPC_NAME_MAX];
        uint16_t port;
        uint64_t nonce; /* of the agent; 0: not known (NEBULA_PEERS) */
};
struct member_list {
        char **names;
        size_t count;
};

/* $NEBULA_NODE_ID, else the host's name. */
enum nebula_status member_own_name(char ret_node[IPC_NAME_MAX], struct nebula_error *error);
enum nebula_status member_key(const char *persist_path, struct tls_key *ret_key, struct nebula_error *error);
/* Nothing to do with NEBULA_PEERS. */
enum nebula_status member_announce(const char *persist_path, const struct member *own, struct nebula_error *error);
void member_withdraw(const char *persist_path, const struct member *own);
/* `node` did not answer: its record goes if it is old. */
void member_bury(const char *persist_path, const char *node, const char *own_node);
/* Sorted, each name once; own->node may be among them. */
enum nebula_status member_names(const char *persist_path, struct member_list *ret_list, struct nebula_error *error);
void member_list_done(struct member_list *list);
enum nebula_status member_load(const char *persist_path, const char *node, struct member *ret_member, struct nebula_error *error);
/* "host:port", "[v6]:port" or "host", whose port is 0 then; NEBULA_INVALID says what is wrong with setting `what`. */
enum nebula_status member_parse(const char *what, const char *text, struct member *ret_member, struct nebula_error *error);
/* The record as text, and back. */
enum nebula_status member_format(const struct member *member, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status member_read(const char *text, size_t size, struct member *ret_member, struct nebula_error *error);

#endif
