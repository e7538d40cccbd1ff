/* The plan of a version: the files to write, and those that storage has already. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/commit/commit.h"
#include "agent/log.h"
#include "agent/persist/persist_private.h"
#include "base/error.h"
#include "os/os.h"
#include "store/tag_log.h"

void plan_done(struct catalogue *catalogue, struct plan *plan, struct store *store)
{
        for (size_t i = 0; i < plan->upload_count; i++)
                store->ops->abort(store, plan->uploads[i]);
        if (plan->unfinished.count)
                persist_forget(store, &plan->unfinished, plan->is_published);
        unfinished_done(&plan->unfinished);
        free(plan->uploads);
        free(plan->record_text);
        catalogue_lock(catalogue);
        for (size_t i = 0; plan->is_ahead && i < plan->file_count; i++)
                if (plan->files[i].image)
                        memory_drop(&catalogue->memory, plan->files[i].image);
        catalogue_unlock(catalogue);
        for (size_t i = 0; i < plan->file_count; i++) {
                bulk_feed_done(&plan->files[i].feed);
                plan_drop_source(&plan->files[i]);
                if (plan->files[i].keeps_chunks)
                        free(plan->files[i].chunks);
        }
        free(plan->files);
        free(plan->parts);
        manifest_done(&plan->before);
        manifest_done(&plan->manifest);
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
                        .rank = loan->rank, .is_zip = loan->format == IPC_FORMAT_ZIP, .size = loan->size,
                        .generation = version->generation, .image = loan->image,
                };

                set_file(plan, --at, &file, loan->name);
        }
}

static enum nebula_status take_parts(struct plan *plan, const struct version *version, struct nebula_error *error)
{
        struct part *parts = realloc(plan->parts, (version->part_count + 1) * sizeof *parts);

        if (!parts)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to persist \"%s\"", version->tag);
        memcpy(parts, version->parts, version->part_count * sizeof *parts);
        plan->parts = parts;
        plan->part_count = version->part_count;
        plan->sequence = version->sequence;
        plan->line = version->line;
        return NEBULA_OK;
}

/* Whether the commit has exactly the files that were written. */
static bool is_as_planned(struct plan *plan, struct version *version)
{
        bool same = lifecycle_complete(version->life.state) && version->in_memory && !version->nodes.spread &&
                    version->generation == plan->generation && version->file_count == plan->file_count;

        for (size_t i = 0; same && i < plan->file_count; i++) {
                const struct plan_file *file = &plan->files[i];
                const struct agent_file *own = version_file(version, file->name);

                same = own && own->image == file->image && own->generation == file->generation && own->rank == file->rank;
        }
        return same;
}

enum nebula_status plan_await_commit(struct catalogue *catalogue, struct version *version, struct plan *plan,
                                     struct nebula_error *error)
{
        int64_t left_ns, until_ns = os->now_ns() + AHEAD_PATIENCE_NS;
        enum nebula_status status;

        catalogue_lock(catalogue);
        while (commit_open(version) && !catalogue->stopping && (left_ns = until_ns - os->now_ns()) > 0)
                catalogue_wait(catalogue, &catalogue->moved, left_ns / 1000000 + 1);
        if (is_as_planned(plan, version))
                status = take_parts(plan, version, error);
        else
                status = error_set(error, NEBULA_BUSY, 0, "the agent wrote \"%.200s\" ahead of a commit, and the commit did not come", plan->tag);
        for (size_t i = 0; i < plan->file_count && !status; i++)
                if (plan->files[i].keeps_chunks)
                        sealing_keep_chunks(version, &plan->files[i]);
        catalogue_unlock(catalogue);
        return status;
}

enum nebula_status plan_init(struct catalogue *catalogue, struct version *version, struct plan *plan,
                             struct nebula_error *error)
{
        enum nebula_status status = name_encode(version->tag, plan->directory, error);
        size_t loan_count = 0;

        if (status)
                return status;
        catalogue_lock(catalogue);
        plan->attempt = persist_choose_try(version);
        writing_name(version->job->name, version->run, version->nodes.writing, plan->attempt, plan->writing);
        snprintf(plan->tag, sizeof plan->tag, "%s", version->tag);
        snprintf(plan->run, sizeof plan->run, "%s", version->run);
        plan->generation = version->generation;
        plan->spread = version->nodes.spread;
        plan->is_ahead = commit_open(version);
        if (plan->is_ahead ? version->nodes.spread : !lifecycle_complete(version->life.state)) {
                catalogue_unlock(catalogue);
                return error_set(error, NEBULA_BUSY, 0, "\"%.200s\" has changed since the agent planned to write it", plan->tag);
        }
        for (const struct image_loan *loan = version->loans; loan; loan = loan->next)
                loan_count++;
        plan->files = calloc(version->file_count + loan_count + 1, sizeof *plan->files);
        plan->file_count = plan->files ? version->file_count + (plan->is_ahead ? loan_count : 0) : 0;
        status = plan->files ? take_parts(plan, version, error)
                             : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to persist \"%s\"", version->tag);
        for (size_t i = 0; !status && i < version->file_count; i++) {
                const struct agent_file *own = &version->files[i];
                struct plan_file file = {
                        .rank = own->rank, .is_zip = own->format == IPC_FORMAT_ZIP, .size = own->size,
                        .generation = own->generation, .image = own->image && !own->image->restored ? own->image : NULL,
                        .chunks = own->chunks, .chunk_count = own->chunk_count,
                };

                file.stored = own->stored || !file.image;
                set_file(plan, i, &file, own->name);
        }
        if (!status && plan->is_ahead)
                set_loans(plan, version);
        catalogue_unlock(catalogue);
        return status;
}

static enum nebula_status check_owner(struct catalogue *catalogue, struct version *version, const struct manifest *manifest,
                                      struct nebula_error *error)
{
        const struct job *job = version->job;

        if (!manifest->generation)
                return NEBULA_OK;
        if (strcmp(manifest->job, job->name))
                return error_set(error, NEBULA_INVALID, 0,
                                 "\"%.200s\" in this storage path belongs to job \"%.100s\", and this is job \"%.100s\": give each job "
                                 "its own path", manifest->tag, manifest->job, job->name);
        return ancestry_check(catalogue, version, manifest, error);
}

enum nebula_status plan_load_before(struct catalogue *catalogue, struct store *store, struct version *version, struct plan *plan,
                                    struct nebula_error *error)
{
        struct tag_log log;
        enum nebula_status status = tag_log_head(store, plan->tag, &log, error);

        if (status == NEBULA_CORRUPT) /* a link lies at the tag's path: the version can be written after it was moved away */
                return error ? error->status = NEBULA_STORAGE : NEBULA_STORAGE;
        if (status)
                return status;
        if (log.is_unsound && log.unsound.status != NEBULA_CORRUPT) {
                if (error)
                        *error = log.unsound;
                return log.unsound.status;
        }
        if (log.is_unsound)
                log_event(LOG_LEVEL_WARN, "%s in %s is damaged and is written anew: %s", plan->tag, version->job->persist_path, log.unsound.message);
        plan->log_number = log.number;
        plan->before = log.manifest;
        if (plan->before.generation == plan->generation && plan->before.sequence == plan->sequence && !strcmp(plan->before.run, plan->run))
                return NEBULA_OK; /* it is this version */
        return check_owner(catalogue, version, &plan->before, error);
}

enum nebula_status plan_look_again(struct catalogue *catalogue, struct store *store, struct version *version, const struct plan *plan,
                                   struct nebula_error *error)
{
        struct tag_log log = { 0 };
        uint64_t newest;
        enum nebula_status status = tag_log_number(store, plan->tag, &newest, error);

        if (status || newest == plan->log_number)
                return status;
        status = tag_log_head(store, plan->tag, &log, error);
        if (!status)
                status = check_owner(catalogue, version, &log.manifest, error);
        if (!status)
                status = error_set(error, NEBULA_STORAGE, 0, "\"%.200s\" was %s while it was written", plan->tag,
                                   log.manifest.generation ? "written by another agent" : "removed");
        tag_log_done(&log);
        return status;
}

/* Each node asks for its own files. If each of many nodes listed the files of all, the work would grow with the square of their
 * number. */
static enum nebula_status find_places_one_by_one(struct store *store, struct plan *plan, struct nebula_error *error)
{
        struct store_entry entry;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < plan->file_count && !status; i++) {
                struct plan_file *file = &plan->files[i];

                if (file->carried)
                        continue;
                status = file_key(plan->directory, NULL, file->name, key, error);
                if (!status)
                        status = store->ops->stat(store, key, &entry, error);
                file->is_apart = status != NEBULA_NOT_FOUND;
                if (!status)
                        store_entry_done(&entry);
                if (status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT)
                        status = NEBULA_OK;
        }
        return status;
}

static enum nebula_status find_places_in_list(struct store *store, struct plan *plan, struct nebula_error *error)
{
        struct store_list taken;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status;

        snprintf(key, sizeof key, "%s/", plan->directory);
        status = store_list_all(store, key, false, &taken, error);
        if (status)
                return status;
        for (size_t i = 0; i < plan->file_count && taken.count && !status; i++) {
                status = file_key(plan->directory, NULL, plan->files[i].name, key, error);
                plan->files[i].is_apart = !plan->files[i].carried && !status && store_list_find(&taken, key);
        }
        store_list_done(&taken);
        return status;
}

enum nebula_status plan_set_number(struct store *store, struct plan *plan, struct nebula_error *error)
{
        return tag_log_next(store, plan->tag, plan->log_number, &plan->next_number, error);
}

/* Only the first entry of a log names files in place. Even if <tag>/<name> is free, a suspended agent may still put the view of an
 * earlier version there. */
enum nebula_status plan_find_places(struct store *store, struct plan *plan, struct nebula_error *error)
{
        if (plan->next_number == 1)
                return (plan->spread ? find_places_one_by_one : find_places_in_list)(store, plan, error);
        for (size_t i = 0; i < plan->file_count; i++)
                plan->files[i].is_apart = !plan->files[i].carried;
        return NEBULA_OK;
}

static void find_carried(struct plan *plan)
{
        for (size_t i = 0; i < plan->file_count; i++) {
                struct plan_file *file = &plan->files[i];
                const struct manifest_file *stored = manifest_find_file(&plan->before, file->name);

                file->carried = file->stored && file->generation != plan->generation && stored && stored->generation == file->generation &&
                                stored->rank == file->rank && stored->size == file->size;
                file->before_index = file->carried ? (size_t)(stored - plan->before.files) : 0;
        }
}

/* Finds the files that storage has from an older generation, and sets numbers later than those in storage. */
enum nebula_status plan_carry_over(struct store *store, struct plan *plan, struct nebula_error *error)
{
        enum nebula_status status;
        size_t kept = 0;

        if (plan->spread && plan->before.generation && plan->before.generation >= plan->generation)
                return error_set(error, NEBULA_CORRUPT, 0,
                                 "\"%.150s\" in storage was written by run \"%.100s\" while run \"%.100s\" wrote it too", plan->tag,
                                 plan->before.run, plan->run);
        find_carried(plan);
        status = plan_check_carried(store, plan, error);
        if (status)
                return status;
        if (plan->before.generation >= plan->generation)
                plan->generation = plan->before.generation + 1;
        if (plan->before.sequence >= plan->sequence)
                plan->sequence = plan->before.sequence + 1;
        for (size_t i = 0; i < plan->file_count; i++) {
                struct plan_file *file = &plan->files[i];

                if (plan->spread && (file->carried || !file->image))
                        continue; /* the writer of the manifest carries it over */
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
