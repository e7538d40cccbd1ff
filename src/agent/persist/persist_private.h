/*
 * persist_private.h - brings one version from memory to storage. store/writer.h writes it; these files are the source of its bytes.
 *
 * A plan is a copy of the version's description, so that the catalogue's lock is free while the worker writes.
 *
 *      persist.c           one version: what the writer is told to do
 *      persist_nodes.c     the same for a version of several nodes
 *      persist_plan.c      the files to write, and those that storage has already
 *      persist_carried.c   the check of the latter
 *      persist_source.c    the files of earlier versions that may have some of the bytes already
 *      persist_resume.c    the uploads of an interrupted attempt, which this one continues
 *      persist_seal.c      checksums, on a thread of low priority
 *      persist_stage.c     uploads the files, and publishes them
 *      persist_record.c    describes the files for this node's record
 *      persist_end.c       updates the catalogue when a manifest is in storage
 *      latest.c            the hint for programs that do not read manifests
 *
 * The worker may begin a version before it is complete, while its last files are still being copied, and writes the bytes as they
 * come. It writes the record and the manifest only after the commit.
 *
 * Call all functions without the lock, except where a comment says otherwise.
 */
#ifndef NB_AGENT_PERSIST_PERSIST_PRIVATE_H
#define NB_AGENT_PERSIST_PERSIST_PRIVATE_H

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
};

enum nebula_status plan_init(struct plan *plan, struct catalogue *catalogue, struct version *version, struct store *store,
                             struct nebula_error *error);
void plan_done(struct plan *plan);
/* A plan that is ahead waits for the commit, and takes over the committed files. NEBULA_BUSY: the commit does not come, or has other files. */
enum nebula_status plan_await_commit(struct plan *plan, struct nebula_error *error);
/* NEBULA_INVALID: the version `before` is another run's or job's, and stays. */
enum nebula_status plan_check_owner(const struct plan *plan, const struct manifest *before, struct nebula_error *error);
/* Reads what storage has of this tag. *ret_is_there: it is this version. NEBULA_INVALID as above. */
enum nebula_status plan_begin(struct plan *plan, bool *ret_is_there, struct nebula_error *error);
/* Reads the files that carry over, if objects are files. A damaged one does not carry over if memory has it. Else the result is the damage. */
enum nebula_status plan_check_carried(struct plan *plan, struct nebula_error *error);
/* Finds the files that storage has from an older generation, and sets numbers later than those in storage. */
enum nebula_status plan_carry_over(struct plan *plan, struct nebula_error *error);
/* For a version of several nodes: leaves out the files that the writer of the manifest carries over. */
enum nebula_status plan_take_share(struct plan *plan, struct nebula_error *error);
/* Finds sources for the files. If that fails, the files have none. */
void plan_find_sources(struct plan *plan);
/* Whether the chunk at that offset has the same bytes in the file's source. */
bool plan_source_has(const struct plan_file *file, uint64_t offset, uint64_t crc64);
void plan_drop_source(struct plan_file *file);
/* Call when the files are in storage. The share of bytes that they had in common with their sources decides when the worker searches for
 * sources again. Lock held. */
void plan_report_common(struct job *job, const struct plan *plan);

/* The number of the try: that of an interrupted attempt, or a new one. Lock held. */
uint32_t persist_choose_try(const struct version *version);
/* Sets with which upload the file goes on, and who is told. */
void persist_set_resume(struct plan *plan, struct plan_file *file, const char *key);
/* Call before the record is written: no later attempt goes on with this try. */
void persist_end_try(struct plan *plan);
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

/* For the writer (struct writer_source); `plan` is the argument. */
extern const struct writer_source persist_images;
enum nebula_status persist_upload(void *plan, struct nebula_error *error);
/* NEBULA_STORAGE: another program has taken the place of a file meanwhile. */
enum nebula_status persist_publish(void *plan, struct nebula_error *error);
enum nebula_status persist_describe(void *plan, struct nebula_error *error);
/* An earlier agent may have written this node's record, and another node the manifest that names it. */
bool persist_is_recorded(const struct plan *plan);

/* Writes this node's share of a version of several nodes, or its manifest, or waits for others. NEBULA_BUSY: call again later. */
enum nebula_status persist_for_nodes(struct plan *plan, struct nebula_error *error);
/* Whether this node has nothing to do but wait for the manifest, and the manifest is not there. This is one request to storage. A version
 * that has waited for a second needs a thorough look: then the answer is false. */
bool persist_only_waits(const struct plan *plan);
/* The version is in storage, and perhaps its writer was interrupted before it could report that. */
enum nebula_status persist_repeat(struct plan *plan, struct nebula_error *error);
/* Call when the manifest of the plan's writer is in storage: adds it to the job. Only the writer of the manifest updates the hint. */
void persist_conclude(struct plan *plan, bool is_writer);
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
