/*
 * slots_private.h - the copies of a version and of a job in other nodes' memory (replica.h). The catalogue's lock
 * guards it. Only the files of this room see these structs (catalogue/room.h).
 */
#ifndef NB_AGENT_PEERS_SLOTS_PRIVATE_H
#define NB_AGENT_PEERS_SLOTS_PRIVATE_H

#include <stdbool.h>
#include <stdint.h>

#include "agent/peers/replica.h"
#include "nebula.h"

struct version_copies {
        uint32_t world_heard; /* of a remote version: how many members, including this one, have sent their lists of copies */
        bool wanted;          /* a client waits for its copies on other nodes */
        uint64_t nonces[REPLICA_MAX]; /* of the agents that hold the first copy, the second, ...; 0: none does */
};

struct job_copies {
        char identity[2 * 16 + 1];      /* names the secret (tls.h) with which other nodes may read its versions; "": they may not */
        bool announce_due;              /* new trainers have come: write this node's record, even if it was removed */
        struct nebula_error error;      /* why there is no copy yet */
};

#endif
