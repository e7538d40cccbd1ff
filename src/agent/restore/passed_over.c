#include <stdio.h>
#include <string.h>

#include "agent/log.h"
#include "agent/restore/passed_over.h"
#include "image/image.h"
#include "store/scan.h"

void passed_add(struct passed *passed, const char *tag, const char *reason)
{
        struct ipc_passed *one = &passed->list[passed->count];

        if (passed->count == IPC_PASSED_MAX)
                return;
        passed->count++;
        snprintf(one->tag, sizeof one->tag, "%s", tag);
        snprintf(one->reason, sizeof one->reason, "%s", reason);
}

/* True if both tags carry a step and this one's is smaller. */
static bool is_older(const char *tag, const struct manifest *found)
{
        return name_follows_step(tag) && name_follows_step(found->tag) && name_step(tag) < found->step;
}

void passed_scan(struct passed *passed, struct store *store, const struct manifest_scan *scan, const struct manifest *found)
{
        for (size_t i = 0; i < scan->broken_count && i < MANIFEST_BROKEN_MAX; i++)
                if (!is_older(scan->broken_list[i].tag, found))
                        passed_add(passed, scan->broken_list[i].tag, scan->broken_list[i].reason);
        for (size_t i = 0; i < scan->bare_count && passed->count < IPC_PASSED_MAX; i++) {
                struct manifest_broken bare;

                if (is_older(scan->bare[i], found) || !strcmp(scan->bare[i], found->tag) || !manifest_is_bare(store, scan->bare[i], &bare))
                        continue;
                log_event(LOG_LEVEL_WARN, "%s is passed over: %s", bare.tag, bare.reason);
                passed_add(passed, bare.tag, bare.reason);
        }
}

void passed_report(const struct passed *passed, struct ipc_found *found)
{
        found->passed_count = 0;
        for (uint32_t i = 0; i < passed->count; i++) {
                const char *tag = passed->list[i].tag;
                bool is_older = name_follows_step(tag) && name_follows_step(found->tag) && name_step(tag) < found->step;

                if (!is_older && strcmp(tag, found->tag))
                        found->passed[found->passed_count++] = passed->list[i];
        }
}
