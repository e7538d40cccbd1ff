#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/commit/carry_over.h"
#include "agent/commit/commit.h"
#include "agent/commit/lineage.h"
#include "agent/log.h"
#include "agent/memory/survival_log.h"
#include "store/document.h"

const struct manifest *carry_over_stored_manifest(const struct job *job, const char *tag)
{
        for (size_t i = 0; i < job->storage.stored.count; i++)
                if (!strcmp(job->storage.stored.manifests[i].tag, tag) && !strcmp(job->storage.stored.manifests[i].job, job->name))
                        return &job->storage.stored.manifests[i];
        return NULL;
}

static struct agent_file *carry_over_file(struct version *version, const char *name, uint32_t rank, uint64_t size,
                                          uint64_t generation)
{
        /* Ranks of other nodes may be writing their files again, so the manifest decides what carries over from them. A rank outside
         * the world writes nothing again. */
        bool foreign = rank >= version->world || (version->nodes.spread && !version_part(version, rank));
        struct agent_file *file = foreign || version_file(version, name) ? NULL : version_file_add(version, name);

        if (!file)
                return NULL;
        file->rank = rank;
        file->size = size;
        file->generation = generation;
        return file;
}

static void carry_over_version(struct version *version, const struct version *before)
{
        for (size_t i = 0; i < before->file_count; i++) {
                const struct agent_file *old = &before->files[i];
                struct agent_file *file;

                if (!old->image && !before->stored)
                        continue; /* its memory is gone, and it was never persisted */
                file = carry_over_file(version, old->name, old->rank, old->size, old->generation);
                if (!file)
                        continue;
                file->format = old->format;
                file->stored = old->stored || before->stored;
                if (old->image && !old->image->restored) {
                        file->image = old->image;
                        memory_hold(file->image);
                }
        }
}

static void carry_over_manifest(struct version *version, const struct manifest *manifest)
{
        for (size_t i = 0; i < manifest->file_count; i++) {
                const struct manifest_file *old = &manifest->files[i];
                struct agent_file *file = carry_over_file(version, old->name, old->rank, old->size, old->generation);

                if (file)
                        file->stored = true;
        }
}

void carry_over(struct version *version)
{
        const struct version *before = NULL;
        const struct manifest *manifest;

        if (version->generation <= 1)
                return; /* the first of its tag */
        manifest = carry_over_stored_manifest(version->job, version->tag);
        for (const struct version *other = version->job->versions; other; other = other->next)
                if (other != version && !other->copies.is_remote && !strcmp(other->tag, version->tag) && other->generation < version->generation &&
                    (lifecycle_complete(other->life.state) || other->persist.failed_by_storage) &&
                    ancestry_covers(version, other->run, other->sequence) && (!before || other->generation > before->generation))
                        before = other;
        if (before)
                carry_over_version(version, before);
        if (manifest && manifest->generation < version->generation && ancestry_covers(version, manifest->run, manifest->sequence))
                carry_over_manifest(version, manifest);
}

/* The oldest version that this agent may place among the stored ones; NULL: none. */
static struct version *oldest_committed(const struct job *job)
{
        struct version *oldest = NULL;

        for (struct version *version = job->versions; version; version = version->next)
                if (version->sequence && !version->stored && !version->adopted && !version->nodes.spread && !version->copies.is_remote &&
                    version->ancestry.beginning == job->runs.beginning && (!oldest || version->sequence < oldest->sequence))
                        oldest = version;
        return oldest;
}

/* Versions that were committed before the first scan are newer than all stored ones, even if the clock was behind. */
static void renumber(struct catalogue *catalogue, struct job *job, bool is_first)
{
        struct version *version = is_first ? oldest_committed(job) : NULL;
        uint64_t newest = 0, last;

        for (size_t i = 0; i < job->storage.stored.count; i++)
                if (job->storage.stored.manifests[i].sequence > newest && !strcmp(job->storage.stored.manifests[i].job, job->name))
                        newest = job->storage.stored.manifests[i].sequence;
        commit_saw_sequence(job, newest);
        last = job->last_sequence;
        if (!version || version->sequence > newest || last == DOCUMENT_SEQUENCE_MAX)
                return;
        /* Oldest first, then those after it: their order stays. */
        for (; version->sequence <= last; version = oldest_committed(job)) {
                version->sequence = commit_next_sequence(job);
                survival_log_write(catalogue, version);
        }
}

/* Versions got their lines before storage was known. They get new ones, oldest first: each continues the one before it. */
static void set_lines_again(struct job *job)
{
        uint64_t last = 0;

        for (struct version *next = job->versions; next;) {
                next = NULL;
                for (struct version *version = job->versions; version; version = version->next)
                        if (version->line_due && version->sequence > last && (!next || version->sequence < next->sequence))
                                next = version;
                if (!next)
                        break;
                last = next->sequence;
                next->line_due = false;
                if (!next->stored && !next->nodes.spread)
                        lineage_set(next, next->sequence);
        }
}

static bool is_numbered_here(const struct version *version)
{
        return !version->stored && !version->adopted && !version->copies.is_remote && !version->superseded && version->life.state != NEBULA_STATE_FAILED;
}

/* No other process has seen these generations: one process gives them. If one was given before storage was known, all were. They move
 * together, or two writings would have one number. */
static bool moves(const struct version *version, const struct manifest *manifest)
{
        if (!is_numbered_here(version))
                return false;
        for (const struct version *other = version->job->versions; other; other = other->next)
                if (is_numbered_here(other) && !strcmp(other->tag, version->tag) && other->generation <= manifest->generation)
                        return true;
        return false;
}

/* Files that were carried over from a writing that moves get its new number. */
static void move_generation(struct version *version, uint64_t by)
{
        for (size_t i = 0; i < version->file_count; i++) {
                struct agent_file *file = &version->files[i];

                if (file->generation != version->generation && file->image && !file->stored)
                        file->generation += by;
        }
        version_set_generation(version, version->generation + by);
}

/* The list is newest first. The oldest shows if any of them moves. */
static void move_generations(struct job *job)
{
        for (struct version *version = job->versions; version; version = version->next) {
                const struct manifest *manifest = carry_over_stored_manifest(job, version->tag);

                if (manifest && moves(version, manifest))
                        move_generation(version, manifest->generation);
        }
}

/* True if memory has a version of an older run, and storage one that the next run, on another node, has made durable. */
static bool give_way_to_other_run(struct catalogue *catalogue, struct version *version, const struct manifest *manifest)
{
        struct nebula_error error = { 0 };

        if (!version->in_memory || version->stored || version->superseded || !lifecycle_complete(version->life.state) ||
            ancestry_covers(version, manifest->run, manifest->sequence) || !ancestry_judge(version, manifest, &error))
                return false;
        ancestry_give_way(catalogue, version, manifest, error.message);
        return true;
}

void carry_over_stored(struct catalogue *catalogue, struct job *job, bool is_first)
{
        renumber(catalogue, job, is_first);
        ancestry_looked(job);
        set_lines_again(job);
        for (struct version *version = job->versions; version; version = version->next) {
                const struct manifest *manifest = carry_over_stored_manifest(job, version->tag);

                if (manifest && !give_way_to_other_run(catalogue, version, manifest))
                        version_give_way(catalogue, version, manifest->generation, manifest->sequence);
        }
        move_generations(job);
        for (struct version *version = job->versions; version; version = version->next) {
                const struct manifest *manifest = carry_over_stored_manifest(job, version->tag);

                if (!manifest || version->stored || version->adopted || version->superseded)
                        continue;
                if (lifecycle_complete(version->life.state) && version->in_memory && /* pins do not matter: a thread that works on it holds no file */
                    ancestry_covers(version, manifest->run, manifest->sequence))
                        carry_over_manifest(version, manifest);
                survival_log_write(catalogue, version);
        }
}
