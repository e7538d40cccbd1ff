/*
 * slots_private.h - the order of a job's runs, and the documents that the nodes of a version have read and written. The catalogue's lock
 * guards it. Only the files of this room see these structs (catalogue/room.h).
 */
#ifndef NB_AGENT_COMMIT_SLOTS_PRIVATE_H
#define NB_AGENT_COMMIT_SLOTS_PRIVATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/ipc.h"

/* A run that came before the job's newest run, or that writes at the same time (ancestry.h). */
struct ancestor {
        char run[IPC_NAME_MAX];
        uint64_t until; /* sequences up to this one are its own; 0: none */
        bool is_rival;
};
/* A rank that has left its job. */
struct gone {
        uint32_t rank, pid;
};

/* The runs of a job (ancestry.h). */
struct job_runs {
        char newest[IPC_NAME_MAX];
        bool has_newest;
        bool has_looked;         /* at storage: the runs that it had then came before the newest one */
        uint64_t beginning;      /* number of runs that began here: two runs in a row may have the same name */
        uint64_t begun_sequence; /* the sequence at which the present run began */
        int64_t begun_ns;
        double stopped;          /* when the last of its trainers here ended, seconds since 1970; 0: none has */
        double stepped;          /* when they had made their last step; 0: not known */
        struct ancestor *ancestors;
        size_t ancestor_count;
        uint64_t unseen_after;    /* storage could not be read when a trainer took the version of this sequence as the newest; 0: it could */
        int64_t spread_start_ns;  /* when a version of several nodes was last chosen to be persisted; 0: never */
        struct gone *gone;        /* ranks of run gone_run; one that comes back is removed */
        size_t gone_count;
        char gone_run[IPC_NAME_MAX];
};

struct version_ancestry {
        uint64_t beginning; /* the job's runs.beginning when this version was begun */
        uint64_t compared;  /* 1 + runs.beginning of the run that has compared it with storage; 0: none has */
        uint64_t carries_from; /* id of the version in memory whose files it takes over once storage has confirmed that one; 0: none */
        /* Sequence of the stored version that this one may replace, whichever run wrote that; 0: only a version of its
         * own run, or as ancestry.h allows. */
        uint64_t base_sequence;
        int64_t rival_ns;   /* since when another run has been seen to write the same version; 0: none has */
};

/* A version whose ranks are on several nodes (world.h). */
struct version_nodes {
        bool is_counted;  /* the version's `writing` includes the earlier ones in storage */
        bool leads;       /* this node decides, and writes the manifest */
        bool to_announce, wanted_reported, report_failed;
        bool to_give_up;  /* the program has given it up: the other nodes are to learn that */
        bool withdrawn;   /* its documents were removed */
        size_t announced_size;
        bool announced_more;      /* this node may have written other captured documents before the last one */
        char announced[128];      /* the path of the last one; "": this agent has written none */
        size_t carried_parts; /* parts that had begun when their files were carried over */
        uint64_t announce_sequence, heard;
        int64_t poll_at_ns, waiting_since_ns, heard_ns, behind_ns;
        uint32_t poll_count;
        uint32_t *decided; /* the ranks of the committed document; NULL: an earlier agent adopted it */
        size_t decided_count, decided_nodes;
        uint8_t *covered;  /* per rank: its captured document was seen; NULL: not looked */
        struct coverage *coverage; /* the worker's alone; NULL: not looked, or decided */
};

#endif
