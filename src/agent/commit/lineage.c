#include <inttypes.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/commit/carry_over.h"
#include "agent/commit/commit.h"
#include "agent/commit/lineage.h"
#include "agent/commit/slots_private.h"
#include "agent/log.h"
#include "image/image.h"

/* Of one version; ranks may have read its files from several tiers. */
static void join_sources(struct lineage_base *base, const struct lineage_base *other)
{
        if (other->read_at && other->step == base->step && other->has_source && (!base->has_source || other->source > base->source)) {
                base->source = other->source;
                base->has_source = true;
        }
}

void lineage_read(struct session *session, const struct version *version, enum ipc_source source)
{
        struct lineage_base before = session->loaded;

        if (version->job != session->job || !name_follows_step(version->tag) || !version->sequence)
                return;
        session->loaded = (struct lineage_base){ .read_at = job_next_sequence(session->job), .step = version->step, .line = version->line,
                                                .source = source, .has_source = true };
        join_sources(&session->loaded, &before);
}

void lineage_save(struct version *version, const struct session *session)
{
        struct lineage_base before = version->base;

        version->stopped = session->job->runs->stopped;
        version->stepped = session->job->runs->stepped;
        if (session->loaded.read_at > version->base.read_at) {
                version->base = session->loaded;
                join_sources(&version->base, &before);
        } else {
                join_sources(&version->base, &session->loaded);
        }
}

/* The newest version of a line, among those that can be loaded and those known in storage. */
struct head {
        struct order_entry entry;
        const char *run, *tag; /* run NULL: there is none */
};

static void compare(struct head *head, const char *tag, uint64_t sequence, const struct line *line, const char *run)
{
        struct order_entry entry = order_entry(tag, sequence, line);

        if (entry.follows_step && (!head->run || !order_is_newest_of(&head->entry, &entry)))
                *head = (struct head){ entry, run, tag };
}

static bool is_of_newest_run(const struct version *version)
{
        return version->ancestry->beginning == version->job->runs->beginning;
}

/* Looks at versions that were committed before `version` only. A later call may find newer ones than `version`. The versions in storage came
 * before each version of the newest run, also if a clock says otherwise. */
static struct head find_head(const struct version *version)
{
        const struct job *job = version->job;
        struct head head = { 0 };

        for (const struct version *other = job->versions; other; other = other->next)
                if (other != version && !other->is_gone && other->sequence && (!version->sequence || other->sequence < version->sequence) &&
                    (other->stored || other->is_remote || (other->in_memory && (lifecycle_complete(other->life.state) || other->failed_by_storage))))
                        compare(&head, other->tag, other->sequence, &other->line, other->run);
        if (job->known.newest.what[0] && (is_of_newest_run(version) || !version->sequence)) {
                const struct manifest *manifest = job->known.newest.what[0];

                compare(&head, manifest->tag, manifest->sequence, &manifest->line, manifest->run);
                return head;
        }
        for (size_t i = 0; i < job->known.count; i++) {
                const struct manifest *manifest = job->known.list[i];

                if (!strcmp(manifest->job, job->name) && manifest->sequence < version->sequence)
                        compare(&head, manifest->tag, manifest->sequence, &manifest->line, manifest->run);
        }
        return head;
}

static bool is_own(const struct head *head, const struct version *version)
{
        return !strcmp(head->run, version->run);
}

/* Whether the run has begun from a version that a later line had abandoned. That version's line then continues. */
static bool comes_from_abandoned(const struct head *head, const struct version *version)
{
        return version->base.read_at && !is_own(head, version) && version->base.step < version->step &&
               !line_holds(head->entry.line, &version->base.line, version->base.step);
}

/* Whether the head was begun after `version`: the two were saved at the same time and committed in the other order. The list of versions is
 * newest first. */
static bool was_begun_later(const struct head *head, const struct version *version)
{
        for (const struct version *other = version->job->versions; other && other != version; other = other->next)
                if (other->sequence == head->entry.sequence && !strcmp(other->tag, head->tag))
                        return true;
        return false;
}

/* Whether the version's run has saved its tag before: then it changes a version of its line, and goes on. */
static bool is_rewritten(const struct version *version)
{
        const struct manifest *stored = job_stored(version->job, version->tag);

        if (stored && !strcmp(stored->run, version->run))
                return true;
        for (const struct version *other = version->job->versions; other; other = other->next)
                if (other != version && other->sequence && !strcmp(other->tag, version->tag) && !strcmp(other->run, version->run))
                        return true;
        return false;
}

/* Whether it has files of an earlier writing of its tag: then it completes that one. */
static bool is_partial(const struct version *version)
{
        for (size_t i = 0; i < version->file_count; i++)
                if (version->files[i].origin)
                        return true;
        return false;
}

static bool is_back(const struct head *head, const struct version *version)
{
        const struct lineage_base *base = &version->base;

        if (version->step >= head->entry.step)
                return comes_from_abandoned(head, version);
        if (is_own(head, version) && (was_begun_later(head, version) || is_rewritten(version)))
                return base->read_at > head->entry.sequence && base->step < head->entry.step;
        return !(is_partial(version) && base->read_at && base->step >= head->entry.step && line_holds(head->entry.line, &base->line, base->step));
}

int64_t lineage_goes_back(const struct version *version)
{
        struct head head = find_head(version);

        if (!name_follows_step(version->tag) || !head.run || !is_back(&head, version))
                return LINEAGE_GOES_ON;
        return version->base.read_at && version->base.step < version->step ? version->base.step : version->step - 1;
}

/* Several nodes may report it for versions that were saved before the first of these was committed. An earlier run may have gone back to the
 * same step; the newest run then goes back once more. */
static bool has_gone_back(const struct head *head, const struct version *version, int64_t after)
{
        const struct line *line = head->entry.line;

        return is_own(head, version) && line && line->count && line->forks[line->count - 1].after == after &&
               version->base.read_at < line_began(line) && (!is_of_newest_run(version) || line_began(line) >= ancestry_begun(version->job));
}

void lineage_find(const struct version *version, uint64_t sequence, int64_t after, struct line *ret_line)
{
        struct head head = find_head(version);
        uint64_t before;

        memset(ret_line, 0, sizeof *ret_line);
        if (!name_follows_step(version->tag) || !head.run)
                return;
        *ret_line = *head.entry.line;
        if (after == LINEAGE_GOES_ON || has_gone_back(&head, version, after))
                return;
        before = line_began(ret_line);
        if (before >= DOCUMENT_SEQUENCE_MAX)
                return; /* only a planted document says so: no reader accepts a line that begins later */
        if (version->base.read_at)
                *ret_line = version->base.line;
        line_fork(ret_line, sequence > before ? sequence : before + 1, after);
        log_event(LOG_LEVEL_WARN, "%s begins a new line of history after step %" PRId64 ": later steps of the line before, up to %" PRId64
                  ", are abandoned, and stay until they are removed", version->tag, after, head.entry.step);
}

void lineage_set(struct version *version, uint64_t sequence)
{
        lineage_find(version, sequence, lineage_goes_back(version), &version->line);
        version->line_due = version->job->persist_path[0] && !version->job->is_scanned;
}
