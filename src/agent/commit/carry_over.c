#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/commit/carry_over.h"
#include "agent/commit/commit.h"
#include "agent/commit/lineage.h"
#include "agent/commit/slots_private.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "store/document.h"

static struct agent_file *carry_over_file(struct version *version, const char *name, uint32_t rank, uint64_t size,
                                          uint64_t origin)
{
        /* Ranks of other nodes may be writing their files again, so the manifest decides what carries over from them. A rank outside
         * the world writes nothing again. */
        bool foreign = rank >= version->world || (version->is_spread && !version_part(version, rank));
        struct agent_file *file = foreign || version_file(version, name) ? NULL : version_file_add(version, name);

        if (!file)
                return NULL;
        file->rank = rank;
        file->size = size;
        file->origin = origin;
        return file;
}

static void carry_over_version(struct version *version, const struct version *before)
{
        for (size_t i = 0; i < before->file_count; i++) {
                const struct agent_file *old = &before->files[i];
                struct agent_file *file;

                if ((!old->image || old->image->restored) && !before->stored)
                        continue; /* its memory is gone, and it was never persisted */
                file = carry_over_file(version, old->name, old->rank, old->size, version_file_sequence(before, old));
                if (!file)
                        continue;
                file->format = old->format;
                file->stored = old->stored || version_is_safe(before);
                if (old->image && !old->image->restored) {
                        file->image = old->image;
                        memory_hold(file->image);
                }
        }
}

/* If the manifest has not been read yet, a scan reads it. */
static void carry_over_manifest(struct version *version, const struct manifest *manifest)
{
        version->job->scan_due |= manifest->is_brief;
        for (size_t i = 0; i < manifest->file_count; i++) {
                const struct manifest_file *old = &manifest->files[i];
                struct agent_file *file = carry_over_file(version, old->name, old->rank, old->size, manifest_file_sequence(manifest, old));

                if (file)
                        file->stored = true;
        }
}

/* Whether the memory of `before` is the writing before `version`, as far as the agent knows. */
static bool may_carry(const struct version *version, const struct version *before, const struct manifest *manifest)
{
        if (!strcmp(before->tag, version->tag) && before != version && !before->is_remote && version_follows(version, before->sequence) &&
            (lifecycle_complete(before->life.state) || before->failed_by_storage) && !before->superseded && !before->is_gone &&
            (before->stored || before->life.state != NEBULA_STATE_DURABLE) && /* else it was removed from storage */
            ancestry_covers(version, before->run, before->sequence))
                return !manifest || ancestry_compare(before, manifest) != ANCESTRY_EARLIER;
        return false;
}

/* If `before` is of another run and was not compared with storage, another node may have written the tag since. */
static bool is_confirmed(const struct version *version, const struct version *before)
{
        bool is_same_run = !strcmp(before->run, version->run) && before->ancestry->beginning == version->ancestry->beginning;

        return is_same_run || !version->job->persist_path[0] || ancestry_is_compared(before);
}

bool carry_over_is_first(const struct version *version)
{
        const struct job *job = version->job;
        const struct version *other = job->tag_counts[job_tag_slot(version->tag)] > 1 ? job->versions : NULL;

        while (other && (other == version || strcmp(other->tag, version->tag)))
                other = other->next;
        return !other && !job_stored(job, version->tag);
}

void carry_over(struct version *version)
{
        struct version *before = NULL;
        const struct manifest *manifest;

        if (carry_over_is_first(version))
                return;
        manifest = job_stored(version->job, version->tag);
        if (manifest && !version->job->is_scanned && strcmp(manifest->run, version->run))
                manifest = NULL; /* an earlier run has listed it: the scan may find a later one */
        for (struct version *other = version->job->versions; other; other = other->next)
                if (may_carry(version, other, manifest) && (!before || other->sequence > before->sequence))
                        before = other;
        if (before && !is_confirmed(version, before)) {
                version->ancestry->carries_from = before->id;
                before->is_awaited = true;
        } else if (before) {
                carry_over_version(version, before);
        }
        if (manifest && version_follows(version, manifest->sequence) && ancestry_covers(version, manifest->run, manifest->sequence))
                carry_over_manifest(version, manifest);
}

bool carry_over_awaits(const struct version *version)
{
        const struct manifest *manifest = job_stored(version->job, version->tag);

        return manifest && manifest->is_brief && version_follows(version, manifest->sequence) &&
               ancestry_covers(version, manifest->run, manifest->sequence);
}

/* The oldest version later than `after` that this agent may place among the stored ones; NULL: none. */
static struct version *oldest_committed(const struct job *job, uint64_t after)
{
        struct version *oldest = NULL;

        for (struct version *version = job->versions; version; version = version->next)
                if (version->sequence > after && !version->stored && !version->adopted && !version->is_spread && !version->is_remote &&
                    version->ancestry->beginning == job->runs->beginning && (!oldest || version->sequence < oldest->sequence))
                        oldest = version;
        return oldest;
}

/* Versions that were committed before the first scan are newer than all stored ones, even if the clock was behind. */
static void renumber(struct catalogue *catalogue, struct job *job, bool is_first)
{
        struct version *version = is_first ? oldest_committed(job, 0) : NULL;
        uint64_t newest = 0, last;

        for (size_t i = job->known.count; i-- && !newest;)
                if (!strcmp(job->known.list[i]->job, job->name))
                        newest = job->known.list[i]->sequence;
        job_saw_sequence(job, newest);
        last = job->last_sequence;
        if (!version || version->sequence > newest || last == DOCUMENT_SEQUENCE_MAX)
                return;
        /* Oldest first, then those after it: their order stays. */
        for (; version->sequence <= last; version = oldest_committed(job, 0)) {
                version_renumber(version, job_next_sequence(job));
                version_mark(catalogue, version);
        }
}

void carry_over_renumber(struct catalogue *catalogue, struct version *version, uint64_t sequence)
{
        uint64_t before = version->sequence;
        struct version *next;

        version_renumber(version, sequence);
        job_saw_sequence(version->job, sequence);
        while ((next = oldest_committed(version->job, before)) && next != version && next->sequence < sequence && version->job->last_sequence < DOCUMENT_SEQUENCE_MAX) {
                version_renumber(next, job_next_sequence(version->job));
                version_mark(catalogue, next);
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
                if (!next->stored && !next->is_spread)
                        lineage_set(next, next->sequence);
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

/* Storage was read. The run of the version may have ended by now. */
static void carry_over_late(struct version *version, const struct manifest *manifest)
{
        const struct version *before = version->job->versions;

        while (before && before->id != version->ancestry->carries_from)
                before = before->next;
        version->ancestry->carries_from = 0;
        if (before && before->in_memory && !before->superseded && !before->is_gone &&
            (!manifest || ancestry_compare(before, manifest) != ANCESTRY_EARLIER))
                carry_over_version(version, before);
        else if (manifest && version_follows(version, manifest->sequence) && ancestry_covers(version, manifest->run, manifest->sequence))
                carry_over_manifest(version, manifest);
}

/* A version that storage had and that the scan has not found is looked up by name later (storage.c): a listing may be stale. */
static void compare_all(struct catalogue *catalogue, struct job *job)
{
        for (struct version *version = job->versions; version; version = version->next) {
                const struct manifest *manifest = job_stored(job, version->tag);

                if (!lifecycle_complete(version->life.state) || version->is_remote || (!manifest && version->stored))
                        continue;
                if (manifest)
                        ancestry_note(catalogue, version, manifest);
                else
                        ancestry_set_compared(version);
        }
}

/* A trainer took a version of memory for the newest while storage could not be read. It did not know of the runs that had gone on
 * elsewhere, so retention leaves their versions. */
static void keep_unseen(struct job *job)
{
        for (size_t i = 0; job->runs->unseen_after && i < job->known.count; i++) {
                const struct manifest *manifest = job->known.list[i];

                if (strcmp(manifest->job, job->name) || manifest->sequence <= job->runs->unseen_after || !strcmp(manifest->run, job->runs->newest))
                        continue;
                if (!ancestry_is_rival(job, manifest->run))
                        log_event(LOG_LEVEL_WARN, "run \"%s\" had made %s durable in %s, and this run began before storage could be read: keep_last "
                                  "removes none of its checkpoints", manifest->run, manifest->tag, job->persist_path);
                ancestry_set_rival(job, manifest->run);
        }
}

void carry_over_stored(struct catalogue *catalogue, struct job *job, bool is_first)
{
        renumber(catalogue, job, is_first);
        ancestry_looked(job);
        keep_unseen(job);
        for (struct version *version = job->versions; version; version = version->next) {
                const struct manifest *manifest = job_stored(job, version->tag);

                if (manifest && !give_way_to_other_run(catalogue, version, manifest))
                        version_give_way(catalogue, version, manifest->sequence);
        }
        compare_all(catalogue, job);
        for (struct version *version = job->versions; version; version = version->next)
                if (version->ancestry->carries_from && version->in_memory && !version->stored && !version->superseded)
                        carry_over_late(version, job_stored(job, version->tag));
        for (struct version *version = job->versions; version; version = version->next)
                version->is_awaited = false;
        for (struct version *version = job->versions; version; version = version->next) {
                if (version->stored || version->adopted || version->superseded)
                        continue;
                if (!lifecycle_complete(version->life.state) || !version->in_memory)
                        continue;
                carry_over(version); /* pins do not matter: a thread that works on it holds no file */
        }
        set_lines_again(job);
        for (struct version *version = job->versions; version; version = version->next)
                if (!version->stored && !version->superseded && lifecycle_complete(version->life.state))
                        version_mark(catalogue, version);
}
