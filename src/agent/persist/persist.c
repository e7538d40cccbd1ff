/* Brings one version to storage. store/writer.c has the steps; this node's memory is the source. */
#include "agent/commit/carry_over.h"
#include "agent/log.h"
#include "agent/persist/persist.h"
#include "agent/persist/persist_private.h"
#include "agent/persist/records.h"
#include "base/error.h"

static enum nebula_status upload(void *argument, struct nebula_error *error)
{
        struct plan *plan = argument;
        enum nebula_status status = persist_upload(plan, error);

        return !status && plan->is_ahead ? plan_await_commit(plan, error) : status;
}

static enum nebula_status describe(void *argument, struct nebula_error *error)
{
        persist_end_try(argument);
        return persist_describe(argument, error);
}

static enum nebula_status may_follow(void *argument, const struct manifest *before, struct nebula_error *error)
{
        return plan_check_owner(argument, before, error);
}

static void complain(void *argument, const struct nebula_error *error)
{
        log_event(LOG_LEVEL_WARN, "%s is durable, but a hint beside it is not, an entry of the index or a file for programs that know no manifests: %s",
                  ((struct plan *)argument)->writer.manifest.tag, error->message);
}

static void keep(void *argument, const char *text, size_t size)
{
        const struct plan *plan = argument;

        catalogue_lock(plan->catalogue);
        records_keep(plan->version, text, size);
        catalogue_unlock(plan->catalogue);
}

const struct writer_source persist_images = { .may_follow = may_follow, .upload = upload, .describe = describe, .publish = persist_publish,
                                              .complain = complain, .keep = keep };

/* A first writing of a tag, as far as this agent knows. */
static enum nebula_status persist_first(struct plan *plan, struct nebula_error *error)
{
        enum nebula_status status = writer_run(&plan->writer, WRITER_FIRST, error);

        if (!status)
                persist_conclude(plan, true);
        return status;
}

static enum nebula_status persist_alone(struct plan *plan, struct nebula_error *error)
{
        bool is_there;
        enum nebula_status status = plan_begin(plan, &is_there, error);

        if (status)
                return status;
        if (is_there)
                return persist_repeat(plan, error);
        if (plan->is_ahead && plan->writer.before.manifest.file_count)
                return error_set(error, NEBULA_BUSY, 0, "\"%.200s\" may carry files over from storage", plan->writer.manifest.tag);
        status = plan_carry_over(plan, error);
        if (!status)
                status = writer_run(&plan->writer, WRITER_ALONE, error);
        if (!status)
                persist_conclude(plan, true);
        return status;
}

/* *ret_again: the tag is not new after all. */
static enum nebula_status persist_once(struct catalogue *catalogue, struct version *version, struct store *store, bool is_new, bool *ret_again,
                                       struct nebula_error *error)
{
        struct plan plan;
        enum nebula_status status = plan_init(&plan, catalogue, version, store, error);

        is_new = is_new && !status && plan_is_first(&plan);
        if (!status)
                status = (plan.spread ? persist_for_nodes : is_new ? persist_first : persist_alone)(&plan, error);
        *ret_again = is_new && plan.writer.is_overtaken && !plan.is_ahead;
        if (status == NEBULA_INVALID && !plan.writer.has_shared_names) /* else other nodes learn from the record why the version fails */
                writer_forsake(&plan.writer);
        plan_done(&plan);
        return status;
}

static bool awaits(struct catalogue *catalogue, const struct version *version)
{
        bool result;

        catalogue_lock(catalogue);
        result = carry_over_awaits(version);
        catalogue_unlock(catalogue);
        return result;
}

enum nebula_status storage_persist(struct catalogue *catalogue, struct job *job, struct version *version,
                                   struct nebula_error *error)
{
        struct store *store;
        bool is_again = false;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        if (!status && awaits(catalogue, version))
                status = storage_scan(catalogue, job, error);
        if (!status && awaits(catalogue, version))
                status = error_set(error, NEBULA_UNAVAILABLE, 0, "the manifest of the \"%.200s\" before was not read", version->tag);
        if (!status)
                status = persist_once(catalogue, version, store, true, &is_again, error);
        return is_again ? persist_once(catalogue, version, store, false, &is_again, error) : status;
}
