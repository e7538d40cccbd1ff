/*
 * persist_private.h - one version to storage, in the order of docs/formats.md. A plan is what the worker needs of the version,
 * copied so that the catalogue's lock is free while it writes; storage_persist takes it through these steps.
 *
 *      persist_plan.c      what is to be written, and what storage has already
 *      persist_seal.c      checksums, on a thread of low priority
 *      persist_stage.c     files staged, records, files in place
 *      persist_manifest.c  the manifest, of this node's files or of all nodes' records; what is known from then on
 *      persist.c           the order of these
 *
 * A version may be begun before it is complete, while its last files are still being copied: its bytes are written as they come,
 * and what says that they are there only after the commit.
 *
 * None is called with the lock held.
 */
#ifndef NB_AGENT_PERSIST_PERSIST_PRIVATE_H
#define NB_AGENT_PERSIST_PERSIST_PRIVATE_H

#include "agent/persist/storage.h"
#include "os/bulk.h"
#include "store/store.h"

struct plan_file {
        char name[IPC_NAME_MAX], path[IPC_NAME_MAX];
        uint32_t rank;
        bool is_zip, stored, carried; /* stored: storage is known to have it, unless it was removed there; carried: it has */
        uint64_t size, generation;
        struct image *image;
        uint64_t *chunks; /* checksums: the version's, or found here and given to it */
        size_t chunk_count;
        bool keeps_chunks; /* they could not be given: the version has let go of that image, or has others by now */
        struct bulk_feed feed; /* what of it may be written; without room: not in use */
};
/* What the worker needs of a version, copied so that the lock is free while it writes. */
struct plan {
        char tag[IPC_NAME_MAX], run[IPC_NAME_MAX], directory[IPC_NAME_MAX]; /* directory: the tag, encoded */
        struct plan_file *files;
        size_t file_count;
        struct part *parts;
        size_t part_count;
        uint64_t generation, sequence;
        struct line line; /* as is the sequence, known from the commit on */
        bool is_ahead; /* some files are still being copied: their images are held, and what the commit brings is not known yet */
        bool spread; /* other nodes hold the rest: numbers were agreed, carried files are the manifest writer's matter */
        struct store_staged **staged; /* a set for each PERSIST_BATCH files; NULL: it was placed */
        size_t staged_count;
        struct manifest before; /* in storage, of this tag; file_count and generation 0: none */
        struct manifest manifest;
        char claim_key[MANIFEST_KEY_MAX]; /* the first record that was written: while it is there nobody else writes this writing of the tag; "": none */
        uint64_t claim_crc64;
};

enum nebula_status plan_init(struct catalogue *catalogue, struct version *version, struct plan *plan, struct nebula_error *error);
void plan_done(struct catalogue *catalogue, struct plan *plan, struct store *store);
/* A plan that is ahead waits for the commit, and takes what it brings. NEBULA_BUSY: that does not come, or is something else. */
enum nebula_status plan_await_commit(struct catalogue *catalogue, struct version *version, struct plan *plan,
                                     struct nebula_error *error);
/* The manifest that storage has of this tag becomes plan->before. NEBULA_INVALID: it is another run's or job's, and stays. */
enum nebula_status plan_load_before(struct catalogue *catalogue, struct store *store, struct version *version, struct plan *plan,
                                    struct nebula_error *error);
/* This agent may have slept, or storage been slow: what storage has of the tag is still plan->before, and what this agent has
 * written of it still its own. NEBULA_INVALID as before; NEBULA_STORAGE: it is to begin anew. */
enum nebula_status plan_look_again(struct catalogue *catalogue, struct store *store, struct version *version, const struct plan *plan,
                                   struct nebula_error *error);
enum nebula_status plan_carry_over(struct plan *plan, struct nebula_error *error);

/* Files that are mapped at a time: the kernel gives a process some 65,000 mappings (vm.max_map_count). */
#define PERSIST_BATCH 1024u

/* Checksums on a thread of low priority, of one file or of all that are written. */
struct sealing {
        struct catalogue *catalogue;
        struct version *version;
        struct plan_file *files;
        size_t file_count;
        bool is_ahead;
        _Atomic bool is_vain; /* what is summed will not be written: nothing more is waited for */
        int64_t waited_ns;    /* for its trainer, since it was looked whether others wait for storage */
        int64_t held_up_ns;   /* for so long they waited, and this for its trainer */
        enum nebula_status status;
        struct nebula_error error;
};

/* A trainer that stands still does not hold up its storage; nor does one that is slow, where others wait. */
#define AHEAD_PATIENCE_NS INT64_C(1000000000)
#define AHEAD_LOOK_MS 100

void *sealing_run(void *sealing); /* ends every feed, also when it fails */
/* The checksums belong to the version from now on, if it has the file. */
void sealing_keep_chunks(struct version *version, struct plan_file *file);
/* The mapped bytes of an image, whoever else maps it at this time, for who writes them to storage, and then calls sealing_unmap, if this was
 * NEBULA_OK: it may stay mapped for the next time. */
enum nebula_status sealing_map(struct catalogue *catalogue, struct image *image, void **ret_data, struct nebula_error *error);
void sealing_unmap(struct catalogue *catalogue, struct image *image);

enum nebula_status persist_stage(struct catalogue *catalogue, struct version *version, struct store *store, struct plan *plan,
                                 struct nebula_error *error);
enum nebula_status persist_write_records(struct catalogue *catalogue, struct store *store, const struct job *job,
                                         struct version *version, struct plan *plan, struct nebula_error *error);
/* Another run's writing of the tag stays: the record that this one has written goes, for no sweep is to wait for it. */
void persist_leave(struct store *store, const struct plan *plan);
enum nebula_status persist_place(struct store *store, struct plan *plan, struct nebula_error *error);

enum nebula_status persist_write_manifest(struct catalogue *catalogue, struct store *store, const struct job *job,
                                          struct version *version, struct plan *plan, struct nebula_error *error);
/* The manifest is there, and does all that it names stand? Somebody who began to remove an earlier writing of the tag may have taken
 * some of it since. NEBULA_STORAGE: then it is to be written again. */
enum nebula_status persist_check(struct store *store, const struct plan *plan, struct nebula_error *error);
/* The plan's manifest was found in storage: once more, if it is this node that writes it, for its name may not have been synced. */
enum nebula_status persist_repeat_manifest(struct store *store, const struct version *version, const struct plan *plan,
                                           struct nebula_error *error);
/* Several nodes, and this one's records are in storage. NEBULA_BUSY: look again. */
enum nebula_status persist_gather(struct catalogue *catalogue, struct store *store, struct job *job, struct version *version,
                                  struct plan *plan, struct nebula_error *error);
/* The files of a manifest that is in storage go from where they wait to their places; a failure is for the next start. */
void persist_settle(struct store *store, const struct plan *plan, const struct manifest *manifest);
/* The plan's manifest is in storage: its files are settled, the job knows it, and what is the newest is said. */
void persist_conclude(struct catalogue *catalogue, struct store *store, struct job *job, struct version *version, struct plan *plan);

#endif
