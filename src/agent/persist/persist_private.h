/*
 * persist_private.h - one version to storage, in the order of docs/formats.md. A plan is what the worker needs of the version,
 * copied so that the catalogue's lock is free while it writes; storage_persist takes it through these steps.
 *
 *      persist_plan.c      what is to be written, and what storage has already
 *      persist_source.c    the files of earlier versions that may have some of the bytes already
 *      persist_resume.c    the uploads of an interrupted attempt, with which this one goes on
 *      persist_seal.c      checksums, on a thread of low priority
 *      persist_stage.c     files uploaded and published
 *      persist_record.c    this node's record, between the two
 *      persist_manifest.c  the manifest of a version whose ranks are all on this node
 *      persist_gather.c    the manifest of a version of several nodes, from the records of all
 *      persist_end.c       what is known, and done, once a manifest is in storage
 *      latest.c            the hint for programs that know no manifests
 *      persist.c           the order of these
 *
 * A version may be begun before it is complete, while its last files are still being copied: its bytes are written as they come.
 * The record and the manifest are written only after the commit.
 *
 * None is called with the lock held.
 */
#ifndef NB_AGENT_PERSIST_PERSIST_PRIVATE_H
#define NB_AGENT_PERSIST_PERSIST_PRIVATE_H

#include "agent/persist/storage.h"
#include "os/bulk.h"
#include "store/store.h"

/* A file of an earlier version, of the same name and in the same storage. */
struct plan_source {
        char key[MANIFEST_KEY_MAX];
        struct store_source object;
        struct manifest_file named; /* as that version's manifest names it; the name is the plan's */
        size_t earlier;             /* in the list of the records to load */
        uint64_t *chunks;           /* checksums of its chunks */
        size_t chunk_count;
};

struct plan_file {
        char name[IPC_NAME_MAX];
        uint32_t rank;
        bool is_zip, stored, carried; /* stored: storage is known to have it, unless it was removed there; carried: it has */
        size_t before_index;          /* of a carried one, in plan->before */
        bool is_apart;                /* it goes below this writing, since something has its name in the tag's directory */
        uint64_t size, generation;
        struct image *image;
        uint64_t *chunks; /* checksums: the version's, or found here and given to it */
        size_t chunk_count;
        bool keeps_chunks; /* they could not be given: the version has let go of that image, or has others by now */
        struct bulk_feed feed; /* what of it may be written; without room: not in use */
        struct plan_source *source; /* NULL: all bytes are sent */
        struct store_written written; /* known when it has been uploaded */
        struct store_resume resume;
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
        struct store_upload **uploads; /* one for each PERSIST_BATCH files; NULL: it was published, or had nothing to write */
        size_t upload_count;
        uint32_t attempt;          /* the number of this try */
        char writing[WRITING_MAX]; /* its name: another process has it only if that process ended before it wrote a record */
        struct unfinished unfinished; /* the uploads of this try, once no later one can go on with them */
        bool is_published;
        uint64_t log_number;       /* of the newest entry of the tag's log when `before` was read; 0: none */
        uint64_t next_number;      /* of the entry that follows, which the manifest is to be; 0: plan_set_number has not been called */
        struct manifest before;    /* the version that storage has of this tag; file_count and generation 0: none */
        struct manifest manifest;
        char *record_text;         /* of this node's record; NULL: this node wrote none */
        size_t record_size;
        uint32_t first_rank;       /* which names that record */
        bool record_stays;         /* the version fails, and other nodes learn from the record why */
        bool is_taken_back;        /* the manifest was made, and some of what it names was gone */
};

enum nebula_status plan_init(struct catalogue *catalogue, struct version *version, struct plan *plan, struct nebula_error *error);
void plan_done(struct catalogue *catalogue, struct plan *plan, struct store *store);
/* A plan that is ahead waits for the commit, and takes what it brings. NEBULA_BUSY: that does not come, or is something else. */
enum nebula_status plan_await_commit(struct catalogue *catalogue, struct version *version, struct plan *plan,
                                     struct nebula_error *error);
/* The version that storage has of this tag becomes plan->before. NEBULA_INVALID: it is another run's or job's, and stays. */
enum nebula_status plan_load_before(struct catalogue *catalogue, struct store *store, struct version *version, struct plan *plan,
                                    struct nebula_error *error);
/* This agent may have slept, or storage been slow: the tag's log is still as plan_load_before found it. NEBULA_INVALID as before;
 * NEBULA_STORAGE: the plan is to begin anew. */
enum nebula_status plan_look_again(struct catalogue *catalogue, struct store *store, struct version *version, const struct plan *plan,
                                   struct nebula_error *error);
/* The number of the entry that follows what plan_load_before has read, and the last removal. */
enum nebula_status plan_set_number(struct store *store, struct plan *plan, struct nebula_error *error);
/* Which of the files have to lie apart. */
enum nebula_status plan_find_places(struct store *store, struct plan *plan, struct nebula_error *error);
enum nebula_status plan_carry_over(struct plan *plan, struct nebula_error *error);
/* Finds sources for the files. Where that fails the files have none. */
void plan_find_sources(struct catalogue *catalogue, struct store *store, struct version *version, struct plan *plan);
/* Whether the chunk at that offset has the same bytes in the file's source. */
bool plan_source_has(const struct plan_file *file, uint64_t offset, uint64_t crc64);
void plan_drop_source(struct plan_file *file);
/* The files are in storage: how much they had in common with their sources decides when sources are looked for again. Lock held. */
void plan_tell_common(struct job *job, const struct plan *plan);

/* The number of the try: that of an interrupted attempt, or a new one. Lock held. */
uint32_t persist_choose_try(const struct version *version);
/* For the files of one upload: with which uploads they go on, and who is told. */
struct persist_began {
        struct catalogue *catalogue;
        struct version *version;
        const struct plan *plan;
};
void persist_set_resume(struct persist_began *began, struct plan_file *file, const char *key);
/* Call before the record is written: no later attempt goes on with this try. */
void persist_end_try(struct catalogue *catalogue, struct version *version, struct plan *plan);
/* Ends uploads. Stops at the first failure: a sweep ends the others. */
void persist_forget(struct store *store, const struct unfinished *list, bool only_unused);

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

/* Storage does not wait for a trainer that stands still, nor, if other versions wait, for a slow one. */
#define AHEAD_PATIENCE_NS INT64_C(1000000000)
#define AHEAD_LOOK_MS 100

void *sealing_run(void *sealing); /* ends every feed, even if it fails */
/* Gives the checksums to the version, if it has the file. */
void sealing_keep_chunks(struct version *version, struct plan_file *file);
/* Maps an image for a writer to storage; other threads may map it at the same time. After NEBULA_OK the writer calls sealing_unmap, which may
 * keep the mapping for the next time. */
enum nebula_status sealing_map(struct catalogue *catalogue, struct image *image, void **ret_data, struct nebula_error *error);
void sealing_unmap(struct catalogue *catalogue, struct image *image);

enum nebula_status persist_upload(struct catalogue *catalogue, struct version *version, struct store *store, struct plan *plan,
                                  struct nebula_error *error);
/* Writes the record before the files are published: it tells a sweep which of them are this agent's. Other nodes take a record as a sign that
 * its files are in place. So if they wait for it, it is a claim until then. */
enum nebula_status persist_write_record(struct store *store, const struct job *job, const struct version *version, struct plan *plan,
                                        struct nebula_error *error);
/* Call when the files are in place: a record takes the place of the claim. */
enum nebula_status persist_show_record(struct store *store, struct plan *plan, struct nebula_error *error);
/* NEBULA_STORAGE: another program has taken the place of a file meanwhile. */
enum nebula_status persist_publish(struct catalogue *catalogue, struct version *version, struct store *store, struct plan *plan,
                                   struct nebula_error *error);
/* An agent before this one may have got as far as this node's record, and another node may have written the manifest that names it. */
bool persist_is_recorded(struct store *store, const struct job *job, const struct version *version, struct plan *plan);
/* This node's record, as a manifest names it. */
void persist_describe_record(const struct plan *plan, struct manifest_record *ret_record);

/* Head of plan->manifest. */
void persist_fill_manifest(const struct job *job, const struct version *version, struct plan *plan);
enum nebula_status persist_write_manifest(struct catalogue *catalogue, struct store *store, const struct job *job,
                                          struct version *version, struct plan *plan, struct nebula_error *error);
/* plan->manifest becomes the next entry of the tag's log, unless another has been made since plan_load_before. */
enum nebula_status persist_commit(struct catalogue *catalogue, struct store *store, struct version *version, struct plan *plan,
                                  struct nebula_error *error);
/* The manifest is there, and all that it names stands? NEBULA_STORAGE: another program has removed some of it, the manifest was taken back,
 * and all is to be written again; or a sweep goes on. `is_found`: this try did not make it, so another agent may have called it durable, and
 * no sweep is a reason to take it back. So it is for a version of several nodes. */
enum nebula_status persist_check(struct store *store, struct plan *plan, bool is_found, struct nebula_error *error);
/* The plan's manifest was found in storage, and its name may not have been synced: it is put once more. */
enum nebula_status persist_repeat_manifest(struct store *store, const struct plan *plan, struct nebula_error *error);
/* Those files of plan->before that carry over, by their index there, join the manifest with their records. */
enum nebula_status persist_add_carried(struct plan *plan, const bool *is_carried, struct nebula_error *error);

/* Of several nodes, the one that writes the manifest, unless it is gone. */
bool persist_is_writer(const struct version *version, const struct plan *plan);
/* Several nodes, and this one's record is in storage. NEBULA_BUSY: look again. */
enum nebula_status persist_gather(struct catalogue *catalogue, struct store *store, struct job *job, struct version *version,
                                  struct plan *plan, struct nebula_error *error);

/* The plan's manifest is in storage: its views are made, the job knows it, and the hint follows it. Only the writer changes storage. */
void persist_conclude(struct catalogue *catalogue, struct store *store, struct job *job, struct version *version, struct plan *plan,
                      bool is_writer);
/* "latest" names the version in this directory, unless a user's own file, directory or link has that name. */
void latest_write(struct store *store, struct job *job, const char *directory);
/* A hint that names a step whose directory is gone names the newest version instead. */
void latest_mend(struct catalogue *catalogue, struct job *job, struct store *store);

#endif
