/* One version to storage: the order of the steps. */
#include <string.h>

#include "agent/persist/persist_private.h"
#include "base/error.h"
#include "os/os.h"

enum nebula_status storage_persist(struct catalogue *catalogue, struct job *job, struct version *version,
                                   struct nebula_error *error)
{
        struct plan plan = { 0 };
        struct store *store = NULL;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        if (!status)
                status = plan_init(catalogue, version, &plan, error);
        if (!status)
                status = plan_load_before(catalogue, store, version, &plan, error);
        if (status)
                goto done;
        if (plan.before.generation == plan.generation &&
            (plan.spread ? !strcmp(plan.before.run, plan.run) : plan.before.sequence == plan.sequence)) {
                /* An agent before this one got as far as the manifest, and not to saying so; or the last try did. */
                plan.manifest = plan.before;
                plan.sequence = plan.before.sequence;
                memset(&plan.before, 0, sizeof plan.before);
                status = persist_repeat_manifest(store, version, &plan, error);
                if (!status)
                        status = persist_check(store, &plan, error);
                if (!status)
                        persist_conclude(catalogue, store, job, version, &plan);
                goto done;
        }
        if (plan.is_ahead && plan.before.file_count) {
                status = error_set(error, NEBULA_BUSY, 0, "\"%.200s\" may carry files over from storage", plan.tag);
                goto done;
        }
        if (plan.spread && version->recorded_here) {
                status = persist_gather(catalogue, store, job, version, &plan, error);
                goto done;
        }
        if (plan.before.file_count)
                persist_settle(store, &plan, &plan.before); /* what still waits there would be lost to a reader otherwise */
        status = plan_carry_over(&plan, error);
        if (!status)
                status = persist_stage(catalogue, version, store, &plan, error);
        if (!status && plan.is_ahead)
                status = plan_await_commit(catalogue, version, &plan, error);
        if (!status)
                status = plan_look_again(catalogue, store, version, &plan, error);
        if (!status)
                status = persist_write_records(catalogue, store, job, version, &plan, error);
        if (!status)
                status = plan_look_again(catalogue, store, version, &plan, error);
        if (!status)
                status = persist_place(store, &plan, error);
        if (!status && plan.spread) {
                catalogue_lock(catalogue);
                version->recorded_here = true;
                version->waiting_since_ns = os->now_ns();
                version->poll_count = 0;
                catalogue_unlock(catalogue);
                status = persist_gather(catalogue, store, job, version, &plan, error);
                goto done;
        }
        if (!status)
                status = persist_write_manifest(catalogue, store, job, version, &plan, error);
        if (!status)
                status = persist_check(store, &plan, error);
        if (!status)
                persist_conclude(catalogue, store, job, version, &plan);
done:
        if (status == NEBULA_INVALID)
                persist_leave(store, &plan);
        plan_done(catalogue, &plan, store);
        if (status && plan.is_ahead)
                manifest_remove_directories(store, plan.directory); /* nobody is to find a checkpoint that nobody committed */
        return status;
}
