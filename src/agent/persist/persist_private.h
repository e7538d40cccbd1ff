/*
 * persist_private.h - brings one version from memory to storage. store/writer.h writes it; these files are the source of its bytes.
 *
 * A plan is a copy of the version's description, so that the catalogue's lock is free while the worker writes.
 *
 *      persist.c           one version: the orders for the writer
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
 *      settings.c          what the job gave to init(), for people
 *
 * The worker may begin a version before it is complete, while its last files are still being copied, and writes the bytes as they
 * come. It writes the record and the manifest only after the commit.
 *
 * Call all functions without the lock, except where a comment says otherwise.
 */
#ifndef NB_AGENT_PERSIST_PERSIST_PRIVATE_H
#define NB_AGENT_PERSIST_PERSIST_PRIVATE_H

#include "agent/persist/persist_plan_private.h"
#include "agent/persist/persist_resume_private.h"
#include "agent/persist/persist_seal_private.h"
#include "agent/persist/persist_source_private.h"

/* Files that are mapped at a time: a process has about 65,000 mappings (vm.max_map_count). */
#define PERSIST_BATCH 1024u

/* For the writer (struct writer_source); `plan` is the argument. */
extern const struct writer_source persist_images;
enum nebula_status persist_upload(void *plan, struct nebula_error *error);
/* NEBULA_STORAGE: another program has taken the place of a file meanwhile. */
enum nebula_status persist_publish(void *plan, struct nebula_error *error);
/* persist_values.c: looks at the values of a file, whose checksums are known. Then judges those of the version. */
void persist_look_at(struct plan *plan, const struct plan_file *file, const void *data);
void persist_judge_values(struct plan *plan);
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
#define RESTS_PAUSE_NS (3600 * SECOND_NS) /* between two sweeps of documents that stay for a week */
#define RETAIN_TURN_NS SECOND_NS /* of removals; then a version that waits to be written goes first */
/* The tags of the versions that no rule keeps, oldest first. */
struct dropped {
        char (*tags)[256];
        size_t count;
        bool has_other_runs; /* one is of a run that is not this agent's own and may go on elsewhere */
        char rules[512];     /* that no longer keep them */
};
/* Reads metrics from storage if a rule names one. The caller frees the tags. */
enum nebula_status retain_decide(struct catalogue *catalogue, struct job *job, struct store *store, struct dropped *ret_dropped, struct nebula_error *error);
/* The versions that are not among the newest `last`. */
enum nebula_status retain_decide_items(struct catalogue *catalogue, struct job *job, uint32_t last, struct dropped *ret_dropped,
                                       struct nebula_error *error);
/* retain_items.c: removes files of old versions. Works for about a second, as storage_retain. */
enum nebula_status retain_items(struct catalogue *catalogue, struct job *job, struct store *store, bool *ret_has_more, struct nebula_error *error);
struct pins;
/* The pins, and what readers of other nodes have: no rule removes those. */
enum nebula_status retain_load_kept(struct store *store, struct pins *ret_pins, struct nebula_error *error);
/* Whether a version of this manifest is being read, or its tag written again. Lock held. */
bool retain_in_use(const struct job *job, const struct manifest *manifest);
/* Puts the settings of the job into storage, if they are not those that this agent has put there. */
void settings_write(struct catalogue *catalogue, struct job *job, struct store *store);
/* "latest" names the version in this directory, unless a user's own file, directory or link has that name. */
void latest_write(struct store *store, struct job *job, const char *directory);
/* If the hint names a step whose directory is gone, this makes it name the newest version. */
void latest_mend(struct catalogue *catalogue, struct job *job, struct store *store);

#endif
