/* slots_private.h - the answers that the ranks of a job share (answers.h). Only the files of this room see it (catalogue/room.h). */
#ifndef NB_AGENT_RESTORE_SLOTS_PRIVATE_H
#define NB_AGENT_RESTORE_SLOTS_PRIVATE_H

#include "agent/catalogue/catalogue.h"

struct answer {
        struct answer *next;
        char asked[IPC_NAME_MAX]; /* the tag; "": the newest */
        struct ipc_found found;
        uint32_t *ranks; /* that have got it */
        size_t rank_count;
        int64_t last_ns; /* when the last of them got it for the first time */
};
struct job_answers {
        struct answer *first;
        uint64_t run; /* ancestry_number() */
};

#endif
