/* The files that a version takes over from the writing of its tag before it. Their bytes are read again, or a disk that has lost bits would
 * damage a version that is called durable. Object stores check what they keep by themselves, and reading it would cost traffic. */
#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "agent/persist/persist_private.h"
#include "base/error.h"
#include "store/verify.h"

struct check {
        struct plan *plan;
        enum nebula_status status; /* of a file that neither storage nor memory has */
        struct nebula_error error;
};

static void judge(void *argument, const struct manifest_file *file, enum nebula_status status, const struct nebula_error *error)
{
        struct check *check = argument;
        struct plan *plan = check->plan;
        const struct manifest_file *before = plan->writer.before.manifest.files;

        for (size_t i = 0; status && i < plan->file_count; i++) {
                struct plan_file *own = &plan->files[i];

                if (!own->carried || &before[own->before_index] != file)
                        continue;
                if ((status == NEBULA_CORRUPT || status == NEBULA_NOT_FOUND) && own->image) {
                        own->carried = false;
                        log_event(LOG_LEVEL_WARN, "file \"%.200s\" of \"%.100s\" is written again from memory: %.250s", own->name,
                                  plan->version->tag, error->message);
                } else if (!check->status) {
                        check->status = status;
                        check->error = *error;
                }
        }
}

enum nebula_status plan_check_carried(struct plan *plan, struct nebula_error *error)
{
        struct store *store = plan->writer.store;
        const struct manifest *before = &plan->writer.before.manifest;
        struct check check = { .plan = plan };
        bool *wanted = calloc(before->file_count + 1, sizeof *wanted), is_any = false;
        enum nebula_status status = NEBULA_OK;

        if (!wanted)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to check the files of \"%s\"", plan->version->tag);
        for (size_t i = 0; i < plan->file_count; i++)
                if (plan->files[i].carried)
                        is_any = wanted[plan->files[i].before_index] = true;
        if (is_any && store->ops->features(store) & STORE_PATHS) {
                status = manifest_verify(store, before, wanted, judge, &check, error);
                if (status == NEBULA_CORRUPT || status == NEBULA_NOT_FOUND)
                        status = NEBULA_OK; /* judged, file by file */
        }
        free(wanted);
        if (status || !check.status)
                return status;
        return error_set(error, check.status, 0, "\"%.150s\" takes a file over that is damaged in storage, and no memory has it: %.300s. Save this "
                         "file again, or save under another tag", plan->version->tag, check.error.message);
}
