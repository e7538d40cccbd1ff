/* slots_private.h - the answers that the ranks of a job share (answers.h). Only the files of this room see it (catalogue/room.h). */
#ifndef NB_AGENT_RESTORE_SLOTS_PRIVATE_H
#define NB_AGENT_RESTORE_SLOTS_PRIVATE_H

#include "agent/catalogue/catalogue.h"
#include "agent/restore/answers.h"

struct answer {
        struct answer *next;
        char *path;              /* "": the job's */
        char asked[IPC_NAME_MAX]; /* the tag; "": the newest */
        bool is_list, is_none;
        bool is_earlier; /* the run has begun again since: for a rank that has not got it, that may be the same start */
        struct ipc_found found;
        struct listed listed;
        uint32_t *ranks; /* that have got it in this turn: a rank that gets it again, after all, begins another turn */
        size_t rank_count;
        bool was_full;    /* all have got it */
        int64_t full_ns;  /* for the first time then */
        int64_t last_ns;  /* when the last of them got it in this turn */
};
struct job_answers {
        struct answer *first; /* the oldest */
        size_t count;
        uint64_t run; /* ancestry_number() */
        char name[IPC_NAME_MAX];
};

#endif
