#include <stdio.h>
#include <string.h>

#include "agent/log.h"
#include "agent/restore/passed_over.h"
#include "image/image.h"
#include "store/scan.h"

static void add(struct ipc_passed list[IPC_PASSED_MAX], uint32_t *count, const char *tag, const char *reason)
{
        struct ipc_passed *one = &list[*count];

        if (*count == IPC_PASSED_MAX)
                return;
        (*count)++;
        snprintf(one->tag, sizeof one->tag, "%s", tag);
        snprintf(one->reason, sizeof one->reason, "%s", reason);
}

void passed_add(struct passed *passed, const char *tag, const char *reason)
{
        add(passed->list, &passed->count, tag, reason);
}

/* True if both tags carry a step and this one's is smaller. */
static bool is_older(const char *tag, const char *found, int64_t step)
{
        return name_follows_step(tag) && name_follows_step(found) && name_step(tag) < step;
}

void passed_scan(struct passed *passed, struct store *store, const struct manifest_scan *scan, const struct manifest *found)
{
        for (size_t i = 0; i < scan->broken_count && i < MANIFEST_BROKEN_MAX; i++)
                if (!is_older(scan->broken_list[i].tag, found->tag, found->step))
                        passed_add(passed, scan->broken_list[i].tag, scan->broken_list[i].reason);
        for (size_t i = 0; i < scan->bare_count && passed->count < IPC_PASSED_MAX; i++) {
                struct manifest_broken bare;

                if (is_older(scan->bare[i], found->tag, found->step) || !strcmp(scan->bare[i], found->tag) || !manifest_is_bare(store, scan->bare[i], &bare))
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

                if (!is_older(tag, found->tag, found->step) && strcmp(tag, found->tag))
                        found->passed[found->passed_count++] = passed->list[i];
        }
}

void passed_also(struct ipc_found *found, const char *tag, const char *reason)
{
        if (!is_older(tag, found->tag, found->step))
                add(found->passed, &found->passed_count, tag, reason);
}
