/* What is to be written of a version, and what storage has of it already. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "agent/persist_private.h"
#include "base/error.h"

void plan_done(struct plan *plan, struct store *store)
{
        if (plan->staged)
                store->ops->unstage(store, plan->staged);
        for (size_t i = 0; i < plan->file_count; i++)
                bulk_feed_done(&plan->files[i].feed);
        free(plan->files);
        free(plan->parts);
        manifest_done(&plan->before);
        manifest_done(&plan->manifest);
}

enum nebula_status plan_init(struct catalogue *catalogue, struct version *version, struct plan *plan,
                             struct nebula_error *error)
{
        enum nebula_status status = name_encode(version->tag, plan->directory, error);

        if (status)
                return status;
        catalogue_lock(catalogue);
        snprintf(plan->tag, sizeof plan->tag, "%s", version->tag);
        snprintf(plan->run, sizeof plan->run, "%s", version->run);
        plan->generation = version->generation;
        plan->sequence = version->sequence;
        plan->spread = version->spread;
        plan->files = calloc(version->file_count + 1, sizeof *plan->files);
        plan->parts = calloc(version->part_count + 1, sizeof *plan->parts);
        if (!plan->files || !plan->parts)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to persist \"%s\"", version->tag);
        for (size_t i = 0; !status && i < version->file_count; i++) {
                const struct agent_file *file = &version->files[i];
                struct plan_file *to = &plan->files[plan->file_count++];

                *to = (struct plan_file){
                        .rank = file->rank, .is_zip = file->format == IPC_FORMAT_ZIP, .size = file->size,
                        .generation = file->generation, .image = file->image && !file->image->restored ? file->image : NULL,
                        .chunks = file->chunks, .chunk_count = file->chunk_count,
                };
                strcpy(to->name, file->name);
                status = name_encode(file->name, to->path, error);
        }
        for (size_t i = 0; !status && i < version->part_count; i++)
                plan->parts[plan->part_count++] = version->parts[i];
        catalogue_unlock(catalogue);
        return status;
}

enum nebula_status plan_load_before(struct store *store, const struct job *job, struct plan *plan, struct nebula_error *error)
{
        struct nebula_error failure = { 0 };
        enum nebula_status status = manifest_load(store, plan->tag, &plan->before, &failure);

        if (status == NEBULA_CORRUPT)
                log_event(LOG_LEVEL_WARN, "%s in %s is damaged and is written anew: %s", plan->tag, job->persist_path, failure.message);
        if (status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT) {
                memset(&plan->before, 0, sizeof plan->before);
                return NEBULA_OK;
        }
        if (status) {
                if (error)
                        *error = failure;
                return status;
        }
        if (strcmp(plan->before.job, job->name))
                return error_set(error, NEBULA_INVALID, 0,
                                 "\"%.200s\" in this storage path belongs to job \"%.100s\", and this is job \"%.100s\": give each job "
                                 "its own path", plan->tag, plan->before.job, job->name);
        return NEBULA_OK;
}

/* Which files storage has already, from an older generation; and numbers that are later than what it holds. */
enum nebula_status plan_carry(struct plan *plan, struct nebula_error *error)
{
        uint64_t own = plan->generation;
        size_t kept = 0;

        if (plan->spread && plan->before.generation >= plan->generation)
                return error_set(error, NEBULA_CORRUPT, 0,
                                 "\"%.150s\" in storage was written by run \"%.100s\" while run \"%.100s\" wrote it too", plan->tag,
                                 plan->before.run, plan->run);
        if (plan->before.generation >= plan->generation)
                plan->generation = plan->before.generation + 1;
        if (plan->before.sequence >= plan->sequence)
                plan->sequence = plan->before.sequence + 1;
        for (size_t i = 0; i < plan->file_count; i++) {
                struct plan_file *file = &plan->files[i];
                const struct manifest_file *stored = manifest_find_file(&plan->before, file->name);

                file->carried = file->generation != own && stored && stored->generation == file->generation &&
                                stored->rank == file->rank && stored->size == file->size;
                if (plan->spread && (file->carried || !file->image))
                        continue; /* who writes the manifest carries it over */
                if (!file->carried && !file->image)
                        return error_set(error, NEBULA_CORRUPT, 0,
                                         "file \"%.200s\" of \"%.100s\" was carried over from an older generation that is gone from storage",
                                         file->name, plan->tag);
                if (!file->carried)
                        file->generation = plan->generation;
                if (plan->spread)
                        plan->files[kept++] = *file;
        }
        if (plan->spread)
                plan->file_count = kept;
        return NEBULA_OK;
}
