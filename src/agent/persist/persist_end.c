/* Updates the catalogue after a manifest has reached storage. */
#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/commit/commit.h"
#include "agent/memory/survival_log.h"
#include "agent/persist/persist_private.h"

/* Adds the files of other nodes, which are now in storage. */
static void name_others(struct catalogue *catalogue, struct version *version, const struct manifest *manifest)
{
        for (size_t i = 0; i < manifest->file_count; i++) {
                const struct manifest_file *other = &manifest->files[i];
                struct agent_file *file = version_file(version, other->name);

                if (file && file->rank != other->rank)
                        version_file_change(catalogue, version, file); /* another rank wrote that name, too, and its file wins */
                else if (file || !(file = version_file_add(version, other->name)))
                        continue;
                file->rank = other->rank;
                file->size = other->size;
        }
}

/* A later writing of the tag that carries this file over need not write it again: its entry says so. */
static bool tell_later(struct version *later, const struct agent_file *file)
{
        struct agent_file *same = file->image ? version_file(later, file->name) : NULL;

        if (!same || same->image != file->image)
                return false;
        same->generation = file->generation;
        same->stored = true;
        return true;
}

/* Each file gets the generation that the manifest names. A file that was to carry over, and that storage did not have, was written
 * with the rest. */
static void files_stored(struct catalogue *catalogue, struct version *version, const struct manifest *manifest)
{
        for (size_t i = 0; i < manifest->file_count; i++) {
                struct agent_file *file = version_file(version, manifest->files[i].name);

                if (!file)
                        continue;
                file->generation = manifest_file_generation(manifest, &manifest->files[i]);
                file->stored = true;
        }
        for (struct version *later = version->job->versions; later; later = later->next) {
                bool told = false;

                if (later == version || later->generation <= version->generation || strcmp(later->tag, version->tag))
                        continue;
                for (size_t i = 0; i < version->file_count; i++)
                        told = tell_later(later, &version->files[i]) || told;
                if (told) {
                        survival_log_restate(later);
                        survival_log_write(catalogue, later);
                }
        }
}

/* A later writing of the tag on this node may replace this one, whichever run it belongs to. */
static void set_base(struct version *version, uint64_t sequence)
{
        for (struct version *later = version->job->versions; later; later = later->next)
                if (later != version && later->generation > version->generation && !strcmp(later->tag, version->tag))
                        later->ancestry.base_sequence = sequence;
        if (version->ancestry.beginning != version->job->runs.beginning)
                ancestry_add(version->job, version->run, sequence);
}

/* Puts the manifest into the job's list. True: it is the job's newest. */
static bool make_known(struct plan *plan)
{
        struct catalogue *catalogue = plan->catalogue;
        struct job *job = plan->job;
        struct version *version = plan->version;
        struct manifest *written = &plan->writer.manifest;
        struct manifest_scan *stored = &job->storage.stored;
        const struct manifest *known;
        struct manifest *grown;
        size_t at = 0;
        int64_t newest;
        bool is_newest;

        catalogue_lock(catalogue);
        version_set_generation(version, written->generation);
        version->sequence = written->sequence;
        version->line = written->line;
        commit_saw_sequence(job, written->sequence);
        while (at < stored->count && strcmp(stored->manifests[at].tag, written->tag))
                at++;
        if (at < stored->count) {
                manifest_done(&stored->manifests[at]);
                memmove(&stored->manifests[at], &stored->manifests[at + 1], (stored->count - at - 1) * sizeof *grown);
                stored->count--;
        }
        grown = realloc(stored->manifests, (stored->count + 1) * sizeof *grown);
        if (grown) {
                stored->manifests = grown;
                for (at = stored->count++; at && grown[at - 1].sequence > written->sequence; at--)
                        grown[at] = grown[at - 1];
                grown[at] = *written;
                memset(written, 0, sizeof *written);
        }
        known = grown ? &grown[at] : written;
        set_base(version, known->sequence);
        if (version->nodes.spread)
                name_others(catalogue, version, known);
        files_stored(catalogue, version, known);
        manifest_scan_mark(stored);
        newest = manifest_scan_newest(stored, job->name);
        is_newest = newest >= 0 && !strcmp(stored->manifests[newest].tag, known->tag);
        catalogue_unlock(catalogue);
        return is_newest;
}

void persist_conclude(struct plan *plan, bool is_writer)
{
        if (make_known(plan) && is_writer)
                latest_write(plan->writer.store, plan->job, plan->writer.directory);
}
