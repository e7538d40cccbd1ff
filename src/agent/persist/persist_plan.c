/* The plan of a version: the files to write, and those that storage has already. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/commit/commit.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/persist/persist_private.h"
#include "agent/persist/slots_private.h"
#include "base/error.h"
#include "os/os.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"

void plan_done(struct plan *plan)
{
        struct store *store = plan->writer.store;

        for (size_t i = 0; i < plan->upload_count; i++)
                store->ops->abort(store, plan->uploads[i]);
        if (plan->unfinished.count)
                persist_forget(store, &plan->unfinished, plan->is_published);
        unfinished_done(&plan->unfinished);
        free(plan->uploads);
        catalogue_lock(plan->catalogue);
        for (size_t i = 0; plan->is_ahead && i < plan->file_count; i++)
                if (plan->files[i].image)
                        memory_drop(plan->catalogue->memory, plan->files[i].image);
        catalogue_unlock(plan->catalogue);
        writer_done(&plan->writer);
        for (size_t i = 0; i < plan->file_count; i++) {
                bulk_feed_done(&plan->files[i].feed);
                plan_drop_source(&plan->files[i]);
                if (plan->files[i].keeps_chunks)
                        free(plan->files[i].chunks);
        }
        free(plan->files);
        free(plan->parts);
}

static void set_file(struct plan *plan, size_t at, const struct plan_file *file, const char *name)
{
        struct plan_file *to = &plan->files[at];

        *to = *file;
        snprintf(to->name, sizeof to->name, "%s", name);
        if (plan->is_ahead && to->image)
                memory_hold(to->image);
}

/* Adds the files that are still being copied, oldest first (the list is newest first). A thread that fails the version releases their
 * images. */
static void set_loans(struct plan *plan, const struct version *version)
{
        size_t at = plan->file_count;

        for (const struct image_loan *loan = version->loans; loan; loan = loan->next) {
                struct plan_file file = {
                        .rank = loan->rank, .is_zip = loan->format == IPC_FORMAT_ZIP, .size = loan->size, .image = loan->image,
                };

                set_file(plan, --at, &file, loan->name);
        }
}

static enum nebula_status take_parts(struct plan *plan, struct nebula_error *error)
{
        const struct version *version = plan->version;
        struct part *parts = realloc(plan->parts, (version->part_count + 1) * sizeof *parts);

        if (!parts)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to persist \"%s\"", version->tag);
        memcpy(parts, version->parts, version->part_count * sizeof *parts);
        plan->parts = parts;
        plan->part_count = version->part_count;
        plan->writer.manifest.sequence = version->sequence;
        plan->writer.manifest.line = version->line;
        plan->writer.manifest.step = version->step;
        return NEBULA_OK;
}

/* Whether the commit has exactly the files that were written. */
static bool is_as_planned(struct plan *plan)
{
        struct version *version = plan->version;
        bool same = lifecycle_complete(version->life.state) && version->in_memory && !version->is_spread &&
                    version->file_count == plan->file_count;

        for (size_t i = 0; same && i < plan->file_count; i++) {
                const struct plan_file *file = &plan->files[i];
                const struct agent_file *own = version_file(version, file->name);

                same = own && own->image == file->image && own->origin == file->origin && own->rank == file->rank;
        }
        return same;
}

enum nebula_status plan_await_commit(struct plan *plan, struct nebula_error *error)
{
        struct catalogue *catalogue = plan->catalogue;
        int64_t left_ns, until_ns = os->now_ns() + AHEAD_PATIENCE_NS;
        enum nebula_status status;

        catalogue_lock(catalogue);
        while (version_open(plan->version) && !catalogue->stopping && (left_ns = until_ns - os->now_ns()) > 0)
                catalogue_wait(catalogue, &catalogue->moved, left_ns / 1000000 + 1);
        if (is_as_planned(plan))
                status = take_parts(plan, error);
        else
                status = error_set(error, NEBULA_BUSY, 0, "the agent wrote \"%.200s\" ahead of a commit, and the commit did not come",
                                   plan->version->tag);
        for (size_t i = 0; i < plan->file_count && !status; i++)
                if (plan->files[i].keeps_chunks)
                        sealing_keep_chunks(plan->version, &plan->files[i]);
        catalogue_unlock(catalogue);
        return status;
}

/* Lock held. */
static enum nebula_status take_files(struct plan *plan, struct nebula_error *error)
{
        const struct version *version = plan->version;
        size_t loan_count = 0;

        for (const struct image_loan *loan = version->loans; loan; loan = loan->next)
                loan_count++;
        plan->files = calloc(version->file_count + loan_count + 1, sizeof *plan->files);
        if (!plan->files)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to persist \"%s\"", version->tag);
        plan->file_count = version->file_count + (plan->is_ahead ? loan_count : 0);
        for (size_t i = 0; i < version->file_count; i++) {
                const struct agent_file *own = &version->files[i];
                struct plan_file file = {
                        .rank = own->rank, .is_zip = own->format == IPC_FORMAT_ZIP, .size = own->size,
                        .origin = own->origin, .image = own->image && !own->image->restored ? own->image : NULL,
                        .chunks = own->chunks, .chunk_count = own->chunk_count,
                };

                file.stored = own->stored || !file.image;
                set_file(plan, i, &file, own->name);
        }
        if (plan->is_ahead)
                set_loans(plan, version);
        return NEBULA_OK;
}

/* Lock held. The host is left out of a manifest that any of several nodes may write: all of them write the same bytes. */
static void fill_head(struct plan *plan)
{
        const struct version *version = plan->version;
        struct manifest *manifest = &plan->writer.manifest;

        snprintf(manifest->tag, sizeof manifest->tag, "%s", version->tag);
        snprintf(manifest->job, sizeof manifest->job, "%s", version->job->name);
        snprintf(manifest->run, sizeof manifest->run, "%s", version->run);
        manifest->writing = version->writing;
        manifest->world = version->world;
        if (version->is_spread || os->host_name(manifest->host, sizeof manifest->host) < 0)
                manifest->host[0] = 0;
}

enum nebula_status plan_init(struct plan *plan, struct catalogue *catalogue, struct version *version, struct store *store,
                             struct nebula_error *error)
{
        enum nebula_status status;

        *plan = (struct plan){ .catalogue = catalogue, .job = version->job, .version = version };
        status = writer_init(&plan->writer, store, &persist_images, plan, version->tag, error);
        if (status)
                return status;
        catalogue_lock(catalogue);
        plan->attempt = persist_choose_try(version);
        writing_name(version->job->name, version->run, version->writing, plan->attempt, plan->writing);
        fill_head(plan);
        plan->spread = version->is_spread;
        plan->is_ahead = version_open(version);
        if (plan->is_ahead ? version->is_spread : !lifecycle_complete(version->life.state))
                status = error_set(error, NEBULA_BUSY, 0, "\"%.200s\" got other files or another state after the agent chose to write it: the agent looks at it again", version->tag);
        if (!status)
                status = take_parts(plan, error);
        if (!status)
                status = take_files(plan, error);
        catalogue_unlock(catalogue);
        return status;
}

bool plan_is_first(const struct plan *plan)
{
        const struct version *version = plan->version;
        unsigned features = plan->writer.store->ops->features(plan->writer.store);
        bool is_first = !plan->spread && !(features & STORE_PATHS) && (features & STORE_LISTS_FRESH);

        catalogue_lock(plan->catalogue);
        is_first = is_first && plan->job->is_scanned && !known_find(&plan->job->known, version->tag) && !version->adopted && !version->persist->attempt;
        catalogue_unlock(plan->catalogue);
        for (size_t i = 0; i < plan->file_count; i++)
                is_first = is_first && !plan->files[i].stored;
        return is_first;
}

enum nebula_status plan_check_owner(const struct plan *plan, const struct manifest *before, struct nebula_error *error)
{
        const struct job *job = plan->job;

        if (!before->sequence)
                return NEBULA_OK;
        if (strcmp(before->job, job->name))
                return error_set(error, NEBULA_INVALID, 0,
                                 "\"%.200s\" in this storage path belongs to job \"%.100s\", and this is job \"%.100s\": give each job "
                                 "its own path", before->tag, before->job, job->name);
        return ancestry_check(plan->catalogue, plan->version, before, error);
}

enum nebula_status plan_begin(struct plan *plan, bool *ret_is_there, struct nebula_error *error)
{
        const struct manifest *before = &plan->writer.before.manifest, *own = &plan->writer.manifest;
        enum nebula_status status = writer_begin(&plan->writer, error);

        if (status)
                return status;
        if (plan->writer.before.is_unsound)
                log_event(LOG_LEVEL_WARN, "%s in %s is damaged and is written anew: %s", own->tag, plan->job->persist_path,
                          plan->writer.before.unsound.message);
        /* Another node may have raised the sequence when it made the manifest. */
        *ret_is_there = before->writing == own->writing && !strcmp(before->run, own->run) &&
                        (before->sequence == own->sequence || (plan->spread && before->sequence > own->sequence));
        if (*ret_is_there && before->sequence == own->sequence)
                return NEBULA_OK;
        return plan_check_owner(plan, before, error);
}

static enum nebula_status find_carried(struct plan *plan, struct nebula_error *error)
{
        const struct manifest *before = &plan->writer.before.manifest;

        for (size_t i = 0; i < plan->file_count; i++) {
                struct plan_file *file = &plan->files[i];
                const struct manifest_file *stored = manifest_find_file(before, file->name);

                file->carried = file->stored && file->origin && stored && manifest_file_sequence(before, stored) == file->origin &&
                                stored->rank == file->rank && stored->size == file->size;
                file->before_index = file->carried ? (size_t)(stored - before->files) : 0;
        }
        return plan_check_carried(plan, error);
}

enum nebula_status plan_carry_over(struct plan *plan, struct nebula_error *error)
{
        const struct manifest *before = &plan->writer.before.manifest;
        struct manifest *own = &plan->writer.manifest;
        enum nebula_status status = find_carried(plan, error);

        if (status)
                return status;
        if (before->sequence >= own->sequence)
                own->sequence = before->sequence + 1;
        for (size_t i = 0; i < plan->file_count; i++)
                if (!plan->files[i].carried && !plan->files[i].image)
                        return error_set(error, NEBULA_CORRUPT, 0,
                                         "file \"%.200s\" of \"%.100s\" was carried over from an earlier version that is gone from storage",
                                         plan->files[i].name, own->tag);
        return NEBULA_OK;
}

enum nebula_status plan_take_share(struct plan *plan, struct nebula_error *error)
{
        const struct manifest *before = &plan->writer.before.manifest;
        struct manifest *own = &plan->writer.manifest;
        enum nebula_status status;
        size_t kept = 0;

        if (before->writing > own->writing && !strcmp(before->run, own->run))
                return error_set(error, NEBULA_CORRUPT, 0, "a later writing of \"%.150s\" by the same run is durable in storage", own->tag);
        status = find_carried(plan, error);
        if (status)
                return status;
        if (before->sequence >= own->sequence)
                own->sequence = before->sequence + 1;
        for (size_t i = 0; i < plan->file_count; i++)
                if (plan->files[i].image && !plan->files[i].carried)
                        plan->files[kept++] = plan->files[i];
        plan->file_count = kept;
        return NEBULA_OK;
}
