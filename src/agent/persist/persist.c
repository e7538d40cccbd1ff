/* Writes one version to storage: the order of the steps. */
#include <string.h>

#include "agent/persist/persist_private.h"
#include "base/error.h"
#include "os/os.h"

/* Writes the files of this node and their record. */
static enum nebula_status write_share(struct catalogue *catalogue, struct store *store, const struct job *job, struct version *version,
                                      struct plan *plan, struct nebula_error *error)
{
        enum nebula_status status = plan_find_places(store, plan, error);

        if (!status)
                plan_find_sources(catalogue, store, version, plan);
        if (!status)
                status = persist_upload(catalogue, version, store, plan, error);
        if (!status && plan->is_ahead)
                status = plan_await_commit(catalogue, version, plan, error);
        if (!status)
                status = plan_look_again(catalogue, store, version, plan, error);
        if (!status)
                persist_end_try(catalogue, version, plan);
        if (!status)
                status = persist_write_record(store, job, version, plan, error);
        if (!status)
                status = plan_look_again(catalogue, store, version, plan, error);
        return status ? status : persist_publish(catalogue, version, store, plan, error);
}

enum nebula_status storage_persist(struct catalogue *catalogue, struct job *job, struct version *version,
                                   struct nebula_error *error)
{
        struct plan plan = { 0 };
        struct store *store = NULL;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        if (!status)
                status = plan_init(catalogue, version, &plan, error);
        if (!status && persist_only_waits(catalogue, store, version, &plan))
                status = persist_not_arrived(&plan, error);
        if (!status)
                status = plan_load_before(catalogue, store, version, &plan, error);
        if (status)
                goto done;
        if (plan.before.generation == plan.generation &&
            (plan.spread ? !strcmp(plan.before.run, plan.run) : plan.before.sequence == plan.sequence)) {
                /* An earlier agent, or the last attempt, may have written the manifest and ended before it could report that. */
                bool is_writer = !plan.spread || persist_is_writer(version, &plan);

                plan.manifest = plan.before;
                plan.sequence = plan.before.sequence;
                memset(&plan.before, 0, sizeof plan.before);
                if (is_writer)
                        status = persist_repeat_manifest(store, &plan, error);
                if (!status && is_writer)
                        status = persist_check(store, &plan, true, error);
                if (!status)
                        persist_conclude(catalogue, store, job, version, &plan, is_writer);
                goto done;
        }
        if (plan.is_ahead && plan.before.file_count) {
                status = error_set(error, NEBULA_BUSY, 0, "\"%.200s\" may carry files over from storage", plan.tag);
                goto done;
        }
        if (plan.spread && version->persist.recorded_here) {
                status = persist_gather(catalogue, store, job, version, &plan, error);
                goto done;
        }
        status = plan_carry_over(store, &plan, error);
        if (!status)
                status = plan_set_number(store, &plan, error);
        if (!status && !(plan.spread && version->adopted && persist_is_recorded(store, job, version, &plan)))
                status = write_share(catalogue, store, job, version, &plan, error);
        if (status)
                goto done;
        if (plan.spread) {
                catalogue_lock(catalogue);
                version->persist.recorded_here = true;
                version->persist.log_number = plan.next_number;
                version->nodes.waiting_since_ns = os->now_ns();
                version->nodes.poll_count = 0;
                catalogue_unlock(catalogue);
                status = persist_gather(catalogue, store, job, version, &plan, error);
                goto done;
        }
        status = persist_write_manifest(catalogue, store, job, version, &plan, error);
        if (!status)
                status = persist_check(store, &plan, false, error);
        if (!status)
                persist_conclude(catalogue, store, job, version, &plan, true);
done:
        if (status == NEBULA_INVALID && plan.record_text && !plan.record_stays)
                manifest_forsake(store, plan.tag, plan.writing); /* storage keeps another run's writing of the tag */
        plan_done(catalogue, &plan, store);
        return status;
}
