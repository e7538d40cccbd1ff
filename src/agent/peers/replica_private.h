/*
 * replica_private.h - declarations that the files behind replica.h share.
 *
 *   replica.c       the thread: which version goes to which member, and when
 *   copy_sender.c   one version to one peer
 *   copy_finder.c   which copies peers hold, and the versions that they make
 *   copy_fetch.c    one file from the memory of a peer
 */
#ifndef NB_AGENT_PEERS_REPLICA_PRIVATE_H
#define NB_AGENT_PEERS_REPLICA_PRIVATE_H

#include "agent/peers/copy_server.h"
#include "agent/peers/member.h"
#include "agent/peers/peer.h"
#include "agent/peers/replica.h"
#include "agent/peers/secret.h"
#include "os/lock.h"
#include "os/os.h"

#define ASKING_NS (10 * SECOND_NS)    /* all members together */

/* The connection that sends one copy of each version of a job. */
struct channel {
        struct job *job;
        size_t index;             /* which copy */
        struct peer *peer;        /* NULL: none */
        int64_t retry_at_ns;
        size_t place;             /* of the peer, in the order of the members when it was chosen */
        size_t passed_over;       /* members, best first, that the next attempt leaves out: spare nodes without room, or nodes that did not answer before the time was up */
        char failed_text[512];    /* the last one in the log */
        bool is_spare;            /* the peer was one when it was chosen */
        int64_t look_ns, pause_ns; /* when to look for a spare node again, and the pause after that */
};
/* All connections of one job, each to another member. Only the replica thread uses them. */
struct fan {
        struct fan *next;
        struct job *job;
        struct tls_key key;
        bool announced, as_spare;
        int64_t look_ns; /* when to look whether this node keeps copies of the job, which nobody needs here; 0: it is needed */
        struct channel channels[REPLICA_MAX];
};
struct replica {
        struct catalogue *catalogue;
        struct copy_server *server;
        char node[IPC_NAME_MAX];
        struct lock own_lock; /* guards own, which the replica thread alone writes */
        struct member own;
        struct joint *joints; /* connections for reading together that no thread uses; own_lock guards them */
        pthread_t thread;
        bool ended; /* the thread has, or is about to; catalogue_lock guards it */
        struct fan *fans;
        uint64_t bytes_per_s; /* of all copies together; 0: no bound */
        struct lock peer_copies_lock; /* guards peer_copies; held while members are asked, so that ranks ask once */
        struct peer_copies *peer_copies;
};

/* This agent's greeting for a connection about `job`, which the caller frees; NULL: the allocation failed. */
struct peer_hello *replica_hello(const struct replica *replica, const struct job *job, bool is_reader);
/* Whether only readers of this node ask peers about the job: it makes and removes nothing in storage. Call without the catalogue's lock. */
bool replica_only_reads(struct replica *replica, const struct job *job);
/* Opens the job's storage; NULL: it has none. */
enum nebula_status replica_store(struct replica *replica, struct job *job, struct store **ret_store, struct nebula_error *error);
/* All other members, best first: spare nodes (from index ret_list->count on), then the others. `store` may be NULL. */
enum nebula_status replica_members(struct replica *replica, struct store *store, struct member_list *ret_list,
                                   size_t **ret_order, size_t *ret_count, struct nebula_error *error);
/* Sends a pinned version and waits for its acknowledgement. After a failure without *ret_broken the connection is still usable. */
enum nebula_status replica_send(struct replica *replica, struct channel *channel, struct version *version, bool *ret_broken,
                                struct nebula_error *error);
/* The peer is to drop all copies of this node's versions of the job. */
void replica_take_back(struct replica *replica, struct channel *channel);
/* The copies of a job that one member holds. */
struct member_copies {
        struct member member;
        struct peer_listing listing;
};
/* All of them: what this agent knows of the copies in other nodes' memory. peer_copies_lock guards it. */
struct peer_copies {
        struct peer_copies *next;
        struct job *job;
        struct member_copies *members;
        size_t count;
        int64_t at_ns;
};
#define PEER_LISTING_NS (2 * SECOND_NS)
/* Asks the members again if their answers are older than oldest_ns (INT64_MAX: never). peer_copies_lock held. */
enum nebula_status peer_copies_get(struct replica *replica, struct job *job, int64_t oldest_ns, struct peer_copies **ret_peers, struct nebula_error *error);
/* Whether the copy is of that version. */
bool copy_is_of(const struct peer_copy *copy, const char *tag, uint64_t sequence);
/* Forgets what peers hold of the job; NULL: of all. */
void replica_forget(struct replica *replica, const struct job *job);

#endif
