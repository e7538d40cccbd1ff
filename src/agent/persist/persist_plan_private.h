/*
 * persist_plan_private.h - a plan: a copy of a version's description, so that the catalogue's lock is free while the worker writes. It has the
 * files to write, and those that storage has already.
 */
#ifndef NB_AGENT_PERSIST_PERSIST_PLAN_PRIVATE_H
#define NB_AGENT_PERSIST_PERSIST_PLAN_PRIVATE_H

#include "agent/persist/storage.h"
#include "agent/persist/unfinished.h"
#include "os/bulk.h"
#include "store/writer.h"

/* A file of an earlier version, of the same name and in the same storage. */
struct plan_source {
        char key[MANIFEST_KEY_MAX];
        struct store_source object;
        struct manifest_file named; /* from that version's manifest; the plan owns the name */
        size_t earlier;             /* index in the list of records to load */
        uint64_t *chunks;           /* checksums of its chunks */
        size_t chunk_count;
};

struct plan_file {
        char name[IPC_NAME_MAX];
        uint32_t rank;
        bool is_zip, stored, carried; /* stored: storage had it when last seen; carried: it was found there, and carries over */
        size_t before_index;          /* index in plan->before, of a carried file */
        bool is_apart;                /* it is stored below this writing, because another object has its name in the tag's directory */
        uint64_t size, origin; /* origin: as in struct agent_file */
        struct image *image;
        uint64_t *chunks; /* checksums: the version's, or computed here and given to the version */
        size_t chunk_count;
        bool keeps_chunks; /* the plan still owns the checksums: the version no longer has that image, or has other checksums */
        struct bulk_feed feed; /* the bytes that may be written; not in use if it has no room */
        struct plan_source *source; /* NULL: all bytes are sent */
        struct store_written written; /* known when it has been uploaded */
        struct store_resume resume;
};
/* persist_values.c has found this in the files. */
struct plan_values {
        uint64_t sum; /* of the values of all files */
        bool has_any; /* a file counts */
        bool has_gap; /* a file of many small tensors was left out */
        char tensor[300], file[IPC_NAME_MAX]; /* the first that is not finite; "": none */
};
/* A copy of the version's description, so that the lock is free while the worker writes. */
struct plan {
        struct catalogue *catalogue;
        struct job *job;
        struct version *version;
        struct writer writer; /* line and sequence of its manifest are known from the commit on */
        struct plan_file *files;
        size_t file_count;
        struct part *parts;
        size_t part_count;
        bool is_ahead; /* some files are still being copied: their images are held, and the commit may bring more files */
        bool spread; /* other nodes hold the rest: the nodes have agreed on the numbers, and only the manifest writer carries files over */
        struct store_upload **uploads; /* one for each PERSIST_BATCH files; NULL: it was published, or had nothing to write */
        size_t upload_count;
        uint32_t attempt;          /* the number of this try */
        char writing[WRITING_MAX]; /* its name: another process has it only if that process ended before it wrote a record */
        struct unfinished unfinished; /* the uploads of this try, once no later one can go on with them */
        bool is_published;
        struct plan_values values;
};

enum nebula_status plan_init(struct plan *plan, struct catalogue *catalogue, struct version *version, struct store *store,
                             struct nebula_error *error);
void plan_done(struct plan *plan);
/* Whether the tag is new, as far as this agent knows, and the storage shows later if that is wrong. */
bool plan_is_first(const struct plan *plan);
/* A plan that is ahead waits for the commit, and takes over the committed files. NEBULA_BUSY: the commit does not come, or has other files. */
enum nebula_status plan_await_commit(struct plan *plan, struct nebula_error *error);
/* NEBULA_INVALID: the version `before` is another run's or job's, and stays. */
enum nebula_status plan_check_owner(const struct plan *plan, const struct manifest *before, struct nebula_error *error);
/* Reads what storage has of this tag. *ret_is_there: it is this version. NEBULA_INVALID as above. */
enum nebula_status plan_begin(struct plan *plan, bool *ret_is_there, struct nebula_error *error);
/* Reads the files that carry over, if objects are files. A damaged one does not carry over if memory has it. Else the result is the damage. */
enum nebula_status plan_check_carried(struct plan *plan, struct nebula_error *error);
/* Finds the files that storage has from an earlier version, and sets a sequence later than the one in storage. */
enum nebula_status plan_carry_over(struct plan *plan, struct nebula_error *error);
/* For a version of several nodes: leaves out the files that the writer of the manifest carries over. */
enum nebula_status plan_take_share(struct plan *plan, struct nebula_error *error);

#endif
