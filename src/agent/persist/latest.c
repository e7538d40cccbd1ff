/* "latest": a hint for programs that know no manifests (store/latest.h). */
#include "store/latest.h"

#include "agent/log.h"
#include "agent/persist/persist_private.h"
#include "agent/persist/slots_private.h"

void latest_write(struct store *store, struct job *job, const char *directory)
{
        struct nebula_error error = { 0 };
        enum nebula_status status = latest_put(store, directory, &job->persist->latest, &error);

        if (status == NEBULA_BUSY && !job->latest_reported)
                log_event(LOG_LEVEL_WARN, "%s", error.message);
        else if (status && status != NEBULA_BUSY)
                log_event(LOG_LEVEL_WARN, "the hint \"latest\" could not be written: %s", error.message);
        job->latest_reported = job->latest_reported || status == NEBULA_BUSY;
}

void latest_mend(struct catalogue *catalogue, struct job *job, struct store *store)
{
        char newest_directory[256] = "", dead[LATEST_DIRECTORY_MAX];
        const struct manifest *newest = known_newest(&job->known);

        if (newest && name_encode(newest->tag, newest_directory, NULL))
                newest_directory[0] = 0;
        if (!*newest_directory)
                return;
        latest_find_dead(store, dead);
        if (*dead && !latest_put(store, newest_directory, &job->persist->latest, NULL))
                log_event(LOG_LEVEL_WARN, "the hint \"latest\" in %s named %s, which is gone: it names %s now", job->persist_path, dead, newest_directory);
}
