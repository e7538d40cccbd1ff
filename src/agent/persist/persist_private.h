/*
 * persist_private.h - writes one version to storage, in the order of docs/formats.md.
 *
 * A plan is a copy of the version's description, so that the catalogue's lock is free while the worker writes. storage_persist takes
 * the plan through these steps:
 *
 *      persist_plan.c      the files to write, and those that storage has already
 *      persist_source.c    the files of earlier versions that may have some of the bytes already
 *      persist_resume.c    the uploads of an interrupted attempt, which this one continues
 *      persist_seal.c      checksums, on a thread of low priority
 *      persist_stage.c     uploads the files, and publishes them
 *      persist_record.c    this node's record, between the upload and the publication
 *      persist_manifest.c  the manifest of a version whose ranks are all on this node
 *      persist_gather.c    the manifest of a version of several nodes, from the records of all
 *      persist_end.c       updates the catalogue when a manifest is in storage
 *      latest.c            the hint for programs that do not read manifests
 *      persist.c           the order of these steps
 *
 * The worker may begin a version before it is complete, while its last files are still being copied, and writes the bytes as they
 * come. It writes the record and the manifest only after the commit.
 *
 * Call all functions without the lock, except where a comment says otherwise.
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
        uint64_t size, generation;
        struct image *image;
        uint64_t *chunks; /* checksums: the version's, or computed here and given to the version */
        size_t chunk_count;
        bool keeps_chunks; /* the plan still owns the checksums: the version no longer has that image, or has other checksums */
        struct bulk_feed feed; /* the bytes that may be written; not in use if it has no room */
        struct plan_source *source; /* NULL: all bytes are sent */
        struct store_written written; /* known when it has been uploaded */
        struct store_resume resume;
};
/* A copy of the version's description, so that the lock is free while the worker writes. */
struct plan {
        char tag[IPC_NAME_MAX], run[IPC_NAME_MAX], directory[IPC_NAME_MAX]; /* directory: the tag, encoded */
        struct plan_file *files;
        size_t file_count;
        struct part *parts;
        size_t part_count;
        uint64_t generation, sequence;
        struct line line; /* known from the commit on, like the sequence */
        bool is_ahead; /* some files are still being copied: their images are held, and the commit may bring more files */
        bool spread; /* other nodes hold the rest: the nodes have agreed on the numbers, and only the manifest writer carries files over */
        struct store_upload **uploads; /* one for each PERSIST_BATCH files; NULL: it was published, or had nothing to write */
        size_t upload_count;
        uint32_t attempt;          /* the number of this try */
        char writing[WRITING_MAX]; /* its name: another process has it only if that process ended before it wrote a record */
        struct unfinished unfinished; /* the uploads of this try, once no later one can go on with them */
        bool is_published;
        uint64_t log_number;       /* of the newest entry of the tag's log when `before` was read; 0: none */
        uint64_t next_number;      /* of the next entry, which will be the manifest; 0: plan_set_number has not been called */
        struct manifest before;    /* the version that storage has of this tag; file_count and generation 0: none */
        struct manifest manifest;
        char *record_text;         /* of this node's record; NULL: this node wrote none */
        size_t record_size;
        uint32_t first_rank;       /* the rank in that record's name */
        bool record_stays;         /* the version fails, and other nodes learn from the record why */
        bool is_taken_back;        /* the manifest was made, but some objects that it names were missing */
};

enum nebula_status plan_init(struct catalogue *catalogue, struct version *version, struct plan *plan, struct nebula_error *error);
void plan_done(struct catalogue *catalogue, struct plan *plan, struct store *store);
/* A plan that is ahead waits for the commit, and takes over the committed files. NEBULA_BUSY: the commit does not come, or has other files. */
enum nebula_status plan_await_commit(struct catalogue *catalogue, struct version *version, struct plan *plan,
                                     struct nebula_error *error);
/* The version that storage has of this tag becomes plan->before. NEBULA_INVALID: it is another run's or job's, and stays. */
enum nebula_status plan_load_before(struct catalogue *catalogue, struct store *store, struct version *version, struct plan *plan,
                                    struct nebula_error *error);
/* Checks that the tag's log is still as plan_load_before found it, because this agent may have slept, or storage was slow. NEBULA_INVALID
 * as before. NEBULA_STORAGE: make a new plan. */
enum nebula_status plan_look_again(struct catalogue *catalogue, struct store *store, struct version *version, const struct plan *plan,
                                   struct nebula_error *error);
/* Sets the number of the entry that follows the one that plan_load_before has read, and the last removal. */
enum nebula_status plan_set_number(struct store *store, struct plan *plan, struct nebula_error *error);
/* Decides which of the files must be stored apart. */
enum nebula_status plan_find_places(struct store *store, struct plan *plan, struct nebula_error *error);
enum nebula_status plan_carry_over(struct plan *plan, struct nebula_error *error);
/* Finds sources for the files. If that fails, the files have none. */
void plan_find_sources(struct catalogue *catalogue, struct store *store, struct version *version, struct plan *plan);
/* Whether the chunk at that offset has the same bytes in the file's source. */
bool plan_source_has(const struct plan_file *file, uint64_t offset, uint64_t crc64);
void plan_drop_source(struct plan_file *file);
/* Call when the files are in storage. The share of bytes that they had in common with their sources decides when the worker searches for
 * sources again. Lock held. */
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

/* Files that are mapped at a time: a process has about 65,000 mappings (vm.max_map_count). */
#define PERSIST_BATCH 1024u

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
/* An earlier agent may have written this node's record, and another node the manifest that names it. */
bool persist_is_recorded(struct store *store, const struct job *job, const struct version *version, struct plan *plan);
/* The reference to this node's record for a manifest. */
void persist_describe_record(const struct plan *plan, struct manifest_record *ret_record);

/* Fills in the head of plan->manifest. */
void persist_fill_manifest(const struct job *job, const struct version *version, struct plan *plan);
enum nebula_status persist_write_manifest(struct catalogue *catalogue, struct store *store, const struct job *job,
                                          struct version *version, struct plan *plan, struct nebula_error *error);
/* Makes plan->manifest the next entry of the tag's log, unless another one was made since plan_load_before. */
enum nebula_status persist_commit(struct catalogue *catalogue, struct store *store, struct version *version, struct plan *plan,
                                  struct nebula_error *error);
/* Checks that the manifest and all objects that it names exist. NEBULA_STORAGE: another program has removed some of them, so the manifest
 * was taken back and all must be written again; or a sweep is running. `is_found`: this try did not make the manifest. Then another agent
 * may have called the version durable, and a sweep is no reason to take it back. The same holds for a version of several nodes. */
enum nebula_status persist_check(struct store *store, struct plan *plan, bool is_found, struct nebula_error *error);
/* Call if the plan's manifest was found in storage. Its name may not have been synced, so this puts it again. */
enum nebula_status persist_repeat_manifest(struct store *store, const struct plan *plan, struct nebula_error *error);
/* Adds the files of plan->before that carry over, with their records, to the manifest. is_carried: by their index there. */
enum nebula_status persist_add_carried(struct plan *plan, const bool *is_carried, struct nebula_error *error);

/* Whether this node writes the manifest of a version of several nodes. If that node is gone, another one does. */
bool persist_is_writer(const struct version *version, const struct plan *plan);
/* Whether this node has nothing to do but wait for the manifest, and the manifest is not there. This is one request to storage. A version
 * that has waited for a second needs a thorough look: then the answer is false. */
bool persist_only_waits(const struct catalogue *catalogue, struct store *store, const struct version *version, const struct plan *plan);
enum nebula_status persist_not_arrived(const struct plan *plan, struct nebula_error *error); /* NEBULA_BUSY */
/* Call for a version of several nodes when this node's record is in storage. NEBULA_BUSY: call again later. */
enum nebula_status persist_gather(struct catalogue *catalogue, struct store *store, struct job *job, struct version *version,
                                  struct plan *plan, struct nebula_error *error);

/* Call when the plan's manifest is in storage. Makes the views, adds the manifest to the job, and updates the hint. Only the writer of the
 * manifest changes storage. */
void persist_conclude(struct catalogue *catalogue, struct store *store, struct job *job, struct version *version, struct plan *plan,
                      bool is_writer);
/* The tags of the versions that no rule keeps, oldest first. */
struct dropped {
        char (*tags)[256];
        size_t count;
        bool has_other_runs; /* one is of a run that is not this agent's own and may go on elsewhere */
        char rules[512];     /* that no longer keep them */
};
/* Reads metrics from storage if a rule names one. Finds none if storage fails. The caller frees the tags. */
void retain_decide(struct catalogue *catalogue, struct job *job, struct store *store, struct dropped *ret_dropped);
/* "latest" names the version in this directory, unless a user's own file, directory or link has that name. */
void latest_write(struct store *store, struct job *job, const char *directory);
/* If the hint names a step whose directory is gone, this makes it name the newest version. */
void latest_mend(struct catalogue *catalogue, struct job *job, struct store *store);

#endif
