/*
 * persist_seal_private.h - checksums, on a thread of low priority: of one file, or of all files of a write.
 */
#ifndef NB_AGENT_PERSIST_PERSIST_SEAL_PRIVATE_H
#define NB_AGENT_PERSIST_PERSIST_SEAL_PRIVATE_H

#include "agent/persist/persist_plan_private.h"
#include "agent/persist/persist_seal.h"

/* Computes checksums on a thread of low priority: of one file, or of all files of a write. */
struct sealing {
        struct catalogue *catalogue;
        struct version *version;
        struct plan_file *files;
        size_t file_count;
        bool is_ahead;
        _Atomic bool is_vain; /* the summed bytes will not be written: no thread waits for more */
        int64_t waited_ns;    /* the time waited for the trainer since the last check whether other versions wait for storage */
        int64_t held_up_ns;   /* the time for which other versions waited while this one waited for its trainer */
        enum nebula_status status;
        struct nebula_error error;
};

/* The worker ends a write ahead if the trainer's copy stops for this time. If other versions wait for storage, it also ends it if the copy
 * is slow for this time. */
#define AHEAD_PATIENCE_NS SECOND_NS
#define AHEAD_LOOK_MS 100

void *sealing_run(void *sealing); /* ends every feed, even if it fails */
/* Gives the checksums to the version, if it has the file. */
void sealing_keep_chunks(struct version *version, struct plan_file *file);

#endif
