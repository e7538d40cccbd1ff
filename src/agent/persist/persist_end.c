/* Updates the catalogue after a manifest has reached storage. */
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/commit/carry_over.h"
#include "agent/commit/commit.h"
#include "agent/persist/persist_private.h"
#include "agent/persist/records.h"

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
static bool report_later(struct version *later, const struct version *version, const struct agent_file *file)
{
        struct agent_file *same = file->image ? version_file(later, file->name) : NULL;

        if (!same || same->image != file->image)
                return false;
        same->origin = version_file_sequence(version, file);
        same->stored = true;
        return true;
}

/* Each file gets the origin that the manifest names. A file that was to carry over, and that storage did not have, was written
 * with the rest. */
static void files_stored(struct catalogue *catalogue, struct version *version, const struct manifest *manifest)
{
        for (size_t i = 0; i < manifest->file_count; i++) {
                struct agent_file *file = version_file(version, manifest->files[i].name);

                if (!file)
                        continue;
                file->origin = manifest_file_origin(manifest, &manifest->files[i]);
                file->stored = true;
        }
        version_mark_files(catalogue, version);
        for (struct version *later = version->job->versions; later; later = later->next) {
                bool is_reported = false;

                if (later == version || !version_follows(later, version->sequence) || strcmp(later->tag, version->tag))
                        continue;
                for (size_t i = 0; i < version->file_count; i++)
                        is_reported = report_later(later, version, &version->files[i]) || is_reported;
                if (is_reported)
                        version_mark_files(catalogue, later);
        }
}

/* Puts the manifest into the job's list. The rules are applied by the agent that wrote the manifest. True: it is the job's newest. */
static bool make_known(struct plan *plan, bool is_writer)
{
        struct catalogue *catalogue = plan->catalogue;
        struct job *job = plan->job;
        struct version *version = plan->version;
        struct manifest *written = &plan->writer.manifest;
        const struct manifest *known;
        bool is_newest;

        catalogue_lock(catalogue);
        carry_over_renumber(catalogue, version, written->sequence);
        version->line = written->line;
        known = known_put(&job->known, job->name, written);
        if (!known) {
                known_free(known_take(&job->known, job->name, written->tag)); /* rather none than the one before */
                known = written;
        }
        ancestry_stored(version, known->sequence);
        if (version->is_spread)
                name_others(catalogue, version, known);
        files_stored(catalogue, version, known);
        is_newest = known_newest(&job->known) == known;
        known_trim(&job->known, job->name);
        job->retain_due = true;
        job->is_remover = is_writer;
        catalogue_unlock(catalogue);
        return is_newest;
}

void persist_conclude(struct plan *plan, bool is_writer)
{
        bool is_newest;

        records_conclude(plan);
        is_newest = make_known(plan, is_writer);

        if (is_newest && is_writer)
                latest_write(plan->writer.store, plan->job, plan->writer.directory);
        if (is_writer)
                settings_write(plan->catalogue, plan->job, plan->writer.store);
}

enum nebula_status persist_repeat(struct plan *plan, struct nebula_error *error)
{
        enum nebula_status status;

        writer_take_found(&plan->writer);
        status = writer_run(&plan->writer, WRITER_REPEAT, error);
        if (!status)
                persist_conclude(plan, true);
        return status;
}
