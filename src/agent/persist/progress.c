#include <string.h>

#include "agent/persist/progress.h"
#include "agent/persist/slots_private.h"

struct version_progress version_progress(const struct version *version)
{
        const struct version_persist *persist = version->persist;

        return (struct version_progress){
                .seconds = persist->seconds, .bytes = persist->bytes, .written_bytes = persist->written_bytes,
                .moved_bytes = atomic_load(&persist->moved_bytes), .attempt = persist->attempt, .tried_ahead = persist->tried_ahead,
                .recorded_here = persist->recorded_here,
        };
}

struct job_progress job_progress(const struct job *job)
{
        return (struct job_progress){
                .is_busy = job->persist->is_busy, .is_scanning = job->storage->is_scanning, .attempt = job->persist->attempt, .failure_count = job->persist->failure_count,
                .error = &job->storage->error, .error_at = job->storage->error_at,
                .failing_since_ns = job->persist->attempt ? job->persist->failing_since_ns : 0, .damage = job->storage->damage,
        };
}

void progress_set_busy(struct job *job, bool is_busy)
{
        job->persist->is_busy = is_busy;
}

void progress_works(struct job *job)
{
        memset(&job->storage->error, 0, sizeof job->storage->error);
}

void progress_failed(struct version *version, int64_t now_ns)
{
        version->persist->failed_ns = now_ns;
}

const struct unfinished *progress_uploads(const struct version *version)
{
        return &version->persist->unfinished;
}

void progress_adopt(struct version *version, struct unfinished *uploads)
{
        unfinished_done(&version->persist->unfinished);
        version->persist->unfinished = *uploads;
}
