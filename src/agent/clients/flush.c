/* FLUSH: waits until every version that this rank has committed, or the one of a tag, is durable. */
#include <inttypes.h>
#include <string.h>

#include "agent/clients/events.h"
#include "agent/clients/waits_private.h"
#include "agent/commit/commit.h"
#include "agent/commit/commit_end.h"
#include "agent/commit/commit_rule.h"
#include "agent/persist/due.h"
#include "agent/persist/progress.h"
#include "agent/persist/retain.h"
#include "agent/publish/publish.h"
#include "base/error.h"
#include "os/os.h"

#define RULES_NS (10 * SECOND_NS)

/* Whether the parts of other ranks are so late that a flush of everything does not wait longer: those ranks may never save. */
static bool others_are_late(const struct catalogue *catalogue, const struct version *version)
{
        return version_open(version) && !version->loans && event_is_late(catalogue, version);
}

/* Whether a FLUSH of all tags covers this incomplete version: this rank has closed its part, or is about to. */
static bool flush_covers_open(const struct version *version, const struct session *session, const struct part *own)
{
        if (own && (version->loans || version->file_goal == NEBULA_FILES_OPEN) && commit_parts_end(version))
                return true;
        return own && own->closed && !own->spoken_for && version->file_goal != NEBULA_FILES_OPEN && !strcmp(version->run, session->run);
}

/* Whether FLUSH covers this version and the version is not done. */
static bool flush_covers(const struct version *version, const struct session *session, const char *tag)
{
        const struct part *own = version_part((struct version *)version, session->rank);

        if (*tag && strcmp(tag, version->tag))
                return false;
        if (version->life.state == NEBULA_STATE_FAILED || version->superseded || version->is_remote)
                return false;
        if (!version_open(version))
                return version->job->persist_path[0] &&
                       ((!version->stored && version->life.state != NEBULA_STATE_DURABLE) || publish_waits(version));
        if (*tag)
                return own != NULL;
        return flush_covers_open(version, session, own);
}

/* Why the newest version that the flush waits for is not durable yet. */
static enum nebula_status flush_timeout(const struct connection *connection, const char *tag, struct nebula_error *error)
{
        struct nebula_error why = { 0 };

        for (const struct version *version = connection->session->job->versions; version; version = version->next)
                if (flush_covers(version, connection->session, tag)) {
                        if (wait_others_are_silent(connection->catalogue, version))
                                wait_in_vain(connection->catalogue, version, &why);
                        else
                                wait_timeout(version, &why);
                        return error_set(error, NEBULA_TIMEOUT, 0, "not everything is %s yet: %.450s",
                                         version->job->persist_path[0] ? "durable" : "complete", why.message);
                }
        return error_set(error, NEBULA_TIMEOUT, 0, "not everything is durable yet");
}

/* Whether the flush waits only for other ranks, and these are silent. */
static bool flush_in_vain(const struct connection *connection, const char *tag)
{
        bool any = false;

        for (const struct version *version = connection->session->job->versions; version; version = version->next)
                if (flush_covers(version, connection->session, tag)) {
                        if (!wait_others_are_silent(connection->catalogue, version) &&
                            (*tag || !others_are_late(connection->catalogue, version)))
                                return false;
                        any = true;
                }
        return any;
}

/* Checks the flush once and asks for what is not durable. True when all is durable. */
static bool flush_done(struct connection *connection, const char *tag)
{
        struct job *job = connection->session->job;
        bool done = *tag || !(publish_pending(connection->catalogue, job, INT64_MAX) || publish_removes(job));

        for (struct version *version = job->versions; version; version = version->next)
                if (flush_covers(version, connection->session, tag)) {
                        done = false;
                        if (!version->wanted) {
                                due_want_now(version);
                                catalogue_signal_job(connection->catalogue, version->job);
                        }
                }
        return done;
}

/* Reports versions that another run has replaced since the last report to this session: their saves are lost. */
static enum nebula_status given_way(struct session *session, struct nebula_error *error)
{
        const struct job *job = session->job;
        uint64_t count = job->given_way_count - session->given_way_reported;

        session->given_way_reported = job->given_way_count;
        for (const struct version *version = count ? job->versions : NULL; version; version = version->next)
                if (version->gives_way && version->life.state == NEBULA_STATE_FAILED && !strcmp(version->run, session->run))
                        return error_set(error, NEBULA_FAILED, 0, "checkpoint \"%.80s\", and %" PRIu64 " others, failed: %.380s", version->tag,
                                         count - 1, version->error.message);
        return NEBULA_OK;
}

/*
 * The result of a flush: that of the newest version of the tag. If the tag is "", the newest complete version, whenever it
 * failed, and every version that failed since the flush began or was replaced by another run's.
 */
static enum nebula_status flush_result(struct session *session, struct job *job, const char *tag, int64_t since_ns, struct nebula_error *error)
{
        bool is_newest = true, was_whole;

        if (!*tag && session->job == job && given_way(session, error))
                return error->status;

        for (const struct version *version = job->versions; version; version = version->next) {
                if (*tag && strcmp(tag, version->tag))
                        continue;
                was_whole = lifecycle_at(&version->life, NEBULA_STATE_COMMITTED) > 0;
                if (version->life.state == NEBULA_STATE_FAILED &&
                    (*tag || (was_whole && (is_newest || version->activity_ns >= since_ns))))
                        return version_failure(version, error);
                if (*tag)
                        return version->stored ? publish_failure(job, version, error) : wait_durable_refused(version, error);
                is_newest = is_newest && !was_whole;
        }
        return *tag ? error_set(error, NEBULA_NOT_FOUND, 0, "there is no checkpoint \"%s\" to flush", tag) :
                      publish_failure(job, NULL, error);
}

/* Whether versions that no rule keeps any more are about to be removed. */
static bool retains(const struct catalogue *catalogue, const struct job *job)
{
        return job->persist_path[0] && catalogue_has_rules(job) && job->is_remover && (retain_goes_on(job) || job_progress(job).is_busy) &&
               !catalogue_resumes(job);
}

/* A program that has flushed expects no more versions than its rules keep. Many removals go on after the flush. Lock held. */
static enum nebula_status await_rules(struct connection *connection, const struct job *job, int64_t until, struct nebula_error *error)
{
        int64_t limit = os->now_ns() + RULES_NS;
        enum nebula_status status = NEBULA_OK;
        bool timeout = false;

        while (!status && !timeout && retains(connection->catalogue, job))
                status = wait_slice(connection, &connection->catalogue->moved, limit < until ? limit : until, &timeout, error);
        return status;
}

enum nebula_status request_flush(struct connection *connection, const void *payload, struct answer *answer, struct nebula_error *error)
{
        const struct ipc_flush *request = payload;
        struct catalogue *catalogue = connection->catalogue;
        struct job *job;
        int64_t until = wait_deadline(request->timeout_ms), since = os->now_ns();
        enum nebula_status status = NEBULA_OK;
        bool timeout = false;

        catalogue_lock(catalogue);
        job = connection->session->job;
        commit_close_open(catalogue, job, connection->session->rank, NULL);
        if (!job->persist_path[0] && *request->tag) {
                catalogue_unlock(catalogue);
                return error_set(error, NEBULA_INVALID, 0, "nothing can be flushed: no persistent storage path is set");
        }
        job->pins++; /* another connection may move the session to another job meanwhile */
        while (!status && !timeout && !flush_done(connection, request->tag)) {
                timeout = flush_in_vain(connection, request->tag);
                if (!timeout)
                        status = wait_slice(connection, &catalogue->moved, until, &timeout, error);
        }
        if (!status && !timeout && !*request->tag)
                status = await_rules(connection, job, until, error);
        if (!status && timeout && !flush_done(connection, request->tag))
                status = flush_timeout(connection, request->tag, error);
        else if (!status && job->persist_path[0])
                status = flush_result(connection->session, job, request->tag, since, error);
        job->pins--;
        catalogue_unlock(catalogue);
        return status;
}
