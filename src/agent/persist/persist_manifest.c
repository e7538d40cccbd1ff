/* Writes the manifest, which makes a version durable. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "agent/persist/persist_private.h"
#include "base/error.h"
#include "os/os.h"
#include "store/index.h"
#include "store/tag_log.h"

void persist_fill_manifest(const struct job *job, const struct version *version, struct plan *plan)
{
        struct manifest *manifest = &plan->manifest;

        strcpy(manifest->tag, plan->tag);
        strcpy(manifest->job, job->name);
        strcpy(manifest->run, version->run);
        manifest->generation = plan->generation;
        manifest->sequence = plan->sequence;
        manifest->step = version->step;
        manifest->world = version->world;
        manifest->line = plan->line;
        if (plan->spread || os->host_name(manifest->host, sizeof manifest->host) < 0)
                manifest->host[0] = 0; /* every node would write the same bytes */
}

static enum nebula_status put_manifest(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        char *text;
        size_t size;
        enum nebula_status status = manifest_format(manifest, &text, &size, error);

        if (status)
                return status;
        status = tag_log_create(store, manifest->tag, manifest->number, text, size, error);
        free(text);
        return status;
}

enum nebula_status persist_commit(struct catalogue *catalogue, struct store *store, struct version *version, struct plan *plan,
                                  struct nebula_error *error)
{
        enum nebula_status status = plan_look_again(catalogue, store, version, plan, error);

        plan->manifest.number = plan->next_number;
        if (!status)
                status = manifest_sort_names(&plan->manifest, error);
        /* The index comes first. Readers pass over an index entry without a version, but they would not see a version without an index
         * entry as the newest. */
        if (!status)
                status = index_put(store, &plan->manifest, error);
        if (!status)
                status = put_manifest(store, &plan->manifest, error);
        if (status != NEBULA_BUSY)
                return status;
        index_remove(store, &plan->manifest, NULL);
        status = plan_look_again(catalogue, store, version, plan, error);
        return status ? status : error_set(error, NEBULA_STORAGE, 0, "another agent has made entry %" PRIu64 " of \"%.200s\" first",
                                           plan->manifest.number, plan->tag);
}

/* An earlier attempt may have seen a failure although its entry was made. The driver syncs the entry that it finds. */
enum nebula_status persist_repeat_manifest(struct store *store, const struct plan *plan, struct nebula_error *error)
{
        enum nebula_status status = index_put(store, &plan->manifest, error);

        if (!status)
                status = put_manifest(store, &plan->manifest, error);
        return status == NEBULA_BUSY ? NEBULA_OK : status;
}

enum nebula_status persist_check(struct store *store, struct plan *plan, bool is_found, struct nebula_error *error)
{
        struct nebula_error failure = { 0 };
        enum nebula_status status = manifest_check_all(store, &plan->manifest, &failure);

        if (status == NEBULA_BUSY && (is_found || plan->spread))
                return error_set(error, NEBULA_STORAGE, 0, "the agent checks \"%.150s\" again later: %.250s", plan->tag, failure.message);
        if (status != NEBULA_NOT_FOUND && status != NEBULA_CORRUPT && status != NEBULA_BUSY) {
                if (status && error)
                        *error = failure;
                return status;
        }
        plan->is_taken_back = true;
        if (!manifest_is_gone(store, &plan->manifest)) /* without this, the next attempt would find everything written */
                tag_log_take_back(store, plan->tag, plan->manifest.number, NULL);
        index_remove(store, &plan->manifest, NULL);
        return error_set(error, NEBULA_STORAGE, 0, "another program has removed or replaced files of \"%.150s\" while it was written: %.250s",
                         plan->tag, failure.message);
}

enum nebula_status persist_add_carried(struct plan *plan, const bool *is_carried, struct nebula_error *error)
{
        struct manifest *manifest = &plan->manifest;
        const struct manifest *before = &plan->before;
        uint32_t *moved = calloc(before->record_count + 1, sizeof *moved); /* 1 + index in `manifest` of a record of `before` */
        enum nebula_status status;

        if (!moved)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", plan->tag);
        status = manifest_reserve(manifest, before->file_count, before->record_count, error);
        for (size_t i = 0; i < before->file_count && !status; i++) {
                struct manifest_file file = before->files[i];

                if (!is_carried[i])
                        continue;
                if (!moved[file.record]) {
                        manifest->records[manifest->record_count++] = before->records[file.record];
                        moved[file.record] = (uint32_t)manifest->record_count;
                }
                file.record = moved[file.record] - 1;
                status = manifest_add_file(manifest, &file, error);
        }
        free(moved);
        return status;
}

static enum nebula_status add_own(struct plan *plan, struct nebula_error *error)
{
        bool *is_carried = calloc(plan->before.file_count + 1, sizeof *is_carried);
        enum nebula_status status = is_carried ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", plan->tag);

        for (size_t i = 0; i < plan->file_count && !status; i++) {
                const struct plan_file *own = &plan->files[i];
                struct manifest_file file = {
                        .name = own->name, .size = own->size, .generation = own->generation, .rank = own->rank, .is_apart = own->is_apart,
                };

                if (own->carried) {
                        is_carried[own->before_index] = true;
                        continue;
                }
                status = manifest_add_file(&plan->manifest, &file, error);
                plan->manifest.referred += own->written.referred;
        }
        if (!status)
                status = persist_add_carried(plan, is_carried, error);
        free(is_carried);
        return status;
}

enum nebula_status persist_write_manifest(struct catalogue *catalogue, struct store *store, const struct job *job,
                                          struct version *version, struct plan *plan, struct nebula_error *error)
{
        struct manifest *manifest = &plan->manifest;
        enum nebula_status status;

        persist_fill_manifest(job, version, plan);
        status = manifest_reserve(manifest, plan->file_count, 1, error);
        if (!status && plan->record_text)
                persist_describe_record(plan, &manifest->records[manifest->record_count++]);
        if (!status)
                status = add_own(plan, error);
        return status ? status : persist_commit(catalogue, store, version, plan, error);
}
