/* An attempt goes on with the uploads of one that was interrupted: the agent was killed, or storage failed. Both have the same keys, since they
 * have the name of one try. They may share it because the first one has not written its record: nothing that it made can be seen, and no
 * request is under way that would make it visible. */
#include "agent/persist/persist_private.h"
#include "agent/persist/slots_private.h"
#include "os/os.h"

uint32_t persist_choose_try(const struct version *version)
{
        uint32_t attempt = version->persist->unfinished.attempt;

        if (!version->persist->unfinished.count)
                os->random(&attempt, sizeof attempt);
        return attempt;
}

/* The next agent learns of the upload before its first part is sent. */
static void report_began(void *argument, const char *key, const char *text, bool is_last)
{
        const struct plan *plan = argument;
        struct version *version = plan->version;

        catalogue_lock(plan->catalogue);
        version->persist->unfinished.attempt = plan->attempt;
        unfinished_set(&version->persist->unfinished, key, text);
        if (is_last)
                version_mark(plan->catalogue, version);
        catalogue_unlock(plan->catalogue);
}

void persist_set_resume(struct plan *plan, struct plan_file *file, const char *key)
{
        file->resume = (struct store_resume){ unfinished_find(&plan->version->persist->unfinished, key), report_began, plan };
}

void persist_end_try(struct plan *plan)
{
        struct version *version = plan->version;
        bool is_any;

        catalogue_lock(plan->catalogue);
        is_any = version->persist->unfinished.count;
        unfinished_move(&version->persist->unfinished, &plan->unfinished);
        if (is_any)
                version_mark(plan->catalogue, version);
        catalogue_unlock(plan->catalogue);
}

void persist_forget(struct store *store, const struct unfinished *list, bool only_unused)
{
        for (size_t i = 0; i < list->count && store->ops->forget; i++)
                if (!(only_unused && list->uploads[i].is_used) && store->ops->forget(store, list->uploads[i].key, list->uploads[i].text, NULL))
                        return;
}
