/*
 * copies_state.h - the copies of a version and of a job in other nodes' memory (replica.h). The catalogue's lock guards it.
 */
#ifndef NB_AGENT_PEERS_COPIES_STATE_H
#define NB_AGENT_PEERS_COPIES_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "nebula.h"

#define REPLICA_MAX 8 /* copies of a version; each takes its size in another node's memory and on the network */

struct version_copies {
        bool is_remote;       /* peers hold it and this node does not */
        uint32_t world_heard; /* if is_remote: how many members, including this one, have sent their lists of copies */
        bool wanted;          /* a client waits for its copies on other nodes */
        uint64_t nonces[REPLICA_MAX]; /* of the agents that hold the first copy, the second, ...; 0: none does */
};

struct job_copies {
        uint32_t count;                 /* copies in other nodes' memory that the job asks for */
        char identity[2 * 16 + 1];      /* names the secret (tls.h) with which other nodes may read its versions; "": they may not */
        bool announce_due;              /* new trainers have come: write this node's record, even if it was removed */
        bool is_served;                 /* the replica thread uses the job, so it stays */
        double notice_at;               /* when another agent was seen to have versions of this job in memory; 0: never */
        struct nebula_error error;      /* why there is no copy yet */
};

#endif
