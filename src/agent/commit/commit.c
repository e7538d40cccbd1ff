/* Requests of a rank: it begins a tag, saves files, and closes its part. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/carry_over.h"
#include "agent/commit/commit.h"
#include "agent/commit/commit_end.h"
#include "agent/commit/commit_rule.h"
#include "agent/commit/lineage.h"
#include "agent/commit/world.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/persist/progress.h"
#include "base/error.h"
#include "image/image.h"
#include "os/os.h"
#include "store/document.h"

static struct part *own_part(struct version *version, const struct session *session, struct nebula_error *error)
{
        struct part *part = version_part_get(version, session->rank);

        if (!part) {
                error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe rank %u", session->rank);
                return NULL;
        }
        part->nonce = session->nonce;
        part->pid = session->pid;
        part->seen_pid = session->seen_pid;
        part->begun_again = false;
        lineage_save(version, session);
        return part;
}

/* Whether this rank may still add to `version`. A rank that has committed starts anew; an open-ended or counted part reopens. A
 * version that another run left open stays apart: its ranks were killed together with the agent. */
static bool rank_may_add(struct version *version, const struct session *session)
{
        const struct part *part = version_part(version, session->rank);

        if (strcmp(version->run, session->run))
                return false;
        /* a launcher may start more ranks under the same run name */
        if (session->rank >= version->world)
                return false;
        /* A share that was announced to other nodes does not change. A rank without a part may still join. */
        if (version->is_spread && part && version->file_goal <= 0)
                return version_open(version) && !part->closed;
        return version_open(version) &&
               (!part || !part->closed || part->spoken_for || version->file_goal != NEBULA_FILES_ALL_RANKS);
}

static struct version *open_version(const struct session *session, const char *tag)
{
        for (struct version *version = session->job->live; version; version = version->next_live)
                if (!strcmp(version->tag, tag) && rank_may_add(version, session))
                        return version;
        return NULL;
}

static struct version *new_writing(struct catalogue *catalogue, struct session *session, const char *tag,
                                      int64_t file_goal, struct nebula_error *error)
{
        struct job *job = session->job;
        struct version *before = job_may_have(job, tag) ? job->versions : NULL, *version;

        while (before && strcmp(before->tag, tag))
                before = before->next;
        version = version_new(catalogue, job, tag, error);
        if (!version)
                return NULL;
        if (strcmp(version->run, session->run)) { /* the job may have a later run */
                memcpy(version->run, session->run, sizeof version->run);
                version->writing = 0; /* it is no writing before itself */
                version->writing = world_next_writing(job, tag, version->run);
        }
        version->world = session->world;
        version->file_goal = file_goal;
        for (size_t i = 0; before && i < before->idle_count; i++) {
                struct part *part = before->idle_parts[i].rank == session->rank ?
                                            NULL : version_part_get(version, before->idle_parts[i].rank);

                if (!part)
                        continue;
                *part = before->idle_parts[i];
                part->closed = part->spoken_for = true;
        }
        if (before)
                before->idle_count = 0;
        return version;
}

static void forget_idle(struct job *job, const char *tag, uint32_t rank)
{
        bool any = false;

        for (struct version *version = job->may_have_idle ? job->versions : NULL; version; version = version->next) {
                for (size_t i = 0; !strcmp(version->tag, tag) && i < version->idle_count; i++)
                        if (version->idle_parts[i].rank == rank)
                                version->idle_parts[i--] = version->idle_parts[--version->idle_count];
                any = any || version->idle_count;
        }
        job->may_have_idle = any;
}

struct version *commit_begin(struct catalogue *catalogue, struct session *session, const char *tag, int64_t file_goal,
                             struct nebula_error *error)
{
        struct job *job = session->job;
        struct version *version;
        char encoded[256];

        if (name_encode(tag, encoded, error))
                return NULL;
        if (file_goal < NEBULA_FILES_ALL_RANKS || !file_goal) {
                error_set(error, NEBULA_INVALID, 0, "checkpoint \"%s\" cannot have %" PRId64 " files", tag, file_goal);
                return NULL;
        }
        session->has_begun = true;
        commit_close_open(catalogue, job, session->rank, tag);
        forget_idle(job, tag, session->rank);
        version = open_version(session, tag);
        for (struct version *other = !version && job_may_have(job, tag) ? job->versions : NULL; other; other = other->next)
                if (!strcmp(other->tag, tag) && other->life.state != NEBULA_STATE_FAILED && !(other->superseded && strcmp(other->run, session->run))) {
                        struct part *own = version_part(other, session->rank);

                        other->next_goal = file_goal;
                        if (own)
                                own->begun_again = true;
                        return other; /* whole, or closed by this rank: the rank's next save begins the next writing */
                }
        if (!version)
                version = new_writing(catalogue, session, tag, file_goal, error);
        if (!version || !own_part(version, session, error))
                return NULL;
        if (version->file_goal == NEBULA_FILES_OPEN)
                version->file_goal = file_goal;
        version->activity_ns = os->now_ns();
        return version;
}

struct version *commit_known(const struct session *session, const char *tag, uint64_t writing, struct nebula_error *error)
{
        struct job *job = session->job;
        struct version *known = NULL;

        for (struct version *version = job_may_have(job, tag) ? job->versions : NULL; version; version = version->next)
                if (!strcmp(version->tag, tag) && !strcmp(version->run, session->run) && version->writing >= writing &&
                    (!known || version->writing < known->writing))
                        known = version;
        if (!known)
                error_set(error, NEBULA_NOT_FOUND, 0, "memory has no checkpoint \"%s\"", tag);
        return known;
}

struct version *commit_target(struct catalogue *catalogue, struct session *session, struct version *version,
                              struct nebula_error *error)
{
        struct version *target = version;
        struct part *part;

        if (version->life.state == NEBULA_STATE_FAILED && version->file_count) {
                error_set(error, NEBULA_FAILED, 0, "checkpoint \"%s\" has failed, begin it again: %.300s", version->tag,
                          version->error.message);
                return NULL;
        }
        if (!rank_may_add(version, session)) {
                version->superseded |= version->life.state == NEBULA_STATE_FAILED; /* by the writing that takes this rank's first file */
                target = open_version(session, version->tag);
                if (!target)
                        target = new_writing(catalogue, session, version->tag,
                                                version->next_goal ? version->next_goal : version->file_goal, error);
        }
        part = target ? own_part(target, session, error) : NULL;
        if (!part)
                return NULL;
        part->closed = part->spoken_for = false;
        return target;
}

static void drop_loan(struct catalogue *catalogue, struct version *version, struct image_loan *loan)
{
        struct image_loan **link = &version->loans;

        while (*link != loan)
                link = &(*link)->next;
        *link = loan->next;
        image_set_copied(loan->image, IMAGE_GIVEN_UP);
        memory_drop(catalogue->memory, loan->image);
        free(loan);
}

/* A trainer asks for a name again in two cases: it saves the file again while its earlier copy still runs, or an agent was killed
 * after it had logged the loan and before it answered. In both cases the earlier image does not become part of the version. It is lent
 * to no other trainer, since this one may be writing into it. */
static void drop_earlier_loan(struct catalogue *catalogue, const struct session *session, struct version *version, const char *name)
{
        for (struct image_loan *loan = version->loans, *next; loan; loan = next) {
                next = loan->next;
                if (loan->nonce != session->nonce || loan->rank != session->rank || strcmp(loan->name, name))
                        continue;
                loan->image->exposed = true;
                drop_loan(catalogue, version, loan);
        }
}

/* The last save of a name wins. If two ranks save shards under one name, one shard is lost, so the agent warns. */
static void warn_of_other_rank(struct version *version, const struct session *session, const char *name)
{
        const struct agent_file *file = version_file(version, name);
        const struct image_loan *loan = version->loans;
        uint32_t other;

        while (loan && (loan->rank == session->rank || strcmp(loan->name, name)))
                loan = loan->next;
        if (file && !file->origin && file->rank != session->rank)
                other = file->rank;
        else if (loan)
                other = loan->rank;
        else
                return;
        log_event(LOG_LEVEL_WARN, "%s: rank %u replaces file \"%s\" that rank %u has saved", version->tag, session->rank, name, other);
}

struct image_loan *commit_loan(struct catalogue *catalogue, struct session *session, struct version *version,
                               const struct ipc_image *request, struct image *image, struct nebula_error *error)
{
        struct image_loan *loan = calloc(1, sizeof *loan);

        if (!loan) {
                error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe file \"%s\"", request->name);
                return NULL;
        }
        *loan = (struct image_loan){
                .image = image,
                .size = request->size,
                .nonce = session->nonce,
                .format = (enum ipc_format)request->format,
                .rank = session->rank,
        };
        snprintf(loan->name, sizeof loan->name, "%s", request->name);
        warn_of_other_rank(version, session, loan->name);
        drop_earlier_loan(catalogue, session, version, loan->name);
        loan->next = version->loans;
        image->owner_nonce = session->nonce;
        image->job = session->job;
        image_set_copied(image, 0);
        memory_hold(image);
        version->loans = loan;
        version->in_memory = true;
        version->activity_ns = os->now_ns();
        return loan;
}

void commit_end_loan(struct catalogue *catalogue, struct version *version, struct image_loan *loan)
{
        drop_loan(catalogue, version, loan);
        version_mark(catalogue, version);
        commit_check(catalogue, version);
}

static void part_close(struct part *part)
{
        part->closed = true;
        part->spoken_for = false;
}

/* Other nodes and the clock of commit_quiet may wait for this part alone. */
static void signal_closed(struct catalogue *catalogue, const struct version *version)
{
        if (version->is_spread || version->file_goal == NEBULA_FILES_OPEN)
                catalogue_signal_job(catalogue, version->job);
}

/* Takes the checksums that the trainer computed while it copied. */
static enum nebula_status take_sums(const struct image_loan *loan, uint32_t count, struct nebula_error *error)
{
        if (count > image_sums_room(loan->size, loan->image->capacity))
                return error_set(error, NEBULA_INVALID, 0, "%u sums cannot lie after \"%.150s\"", count, loan->name);
        atomic_store(&loan->image->sum_count, count);
        return NEBULA_OK;
}

enum nebula_status commit_captured(struct catalogue *catalogue, struct version *version, struct image_loan *loan,
                                   const struct ipc_captured *request, struct nebula_error *error)
{
        struct agent_file *file = version_file(version, loan->name);
        struct part *part = version_part_get(version, loan->rank);
        struct image_loan **link = &version->loans;
        bool again = file && !file->origin && file->rank == loan->rank;
        enum nebula_status status = take_sums(loan, request->sum_count, error);

        if (status)
                return status;
        if (part && file)
                version_file_change(catalogue, version, file);
        else if (part)
                file = version_file_add(version, loan->name);
        if (!part || !file)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe file \"%s\"", loan->name);
        file->rank = loan->rank;
        file->format = loan->format;
        file->size = loan->size;
        file->origin = 0;
        file->image = loan->image; /* the loan's hold passes to the file */
        image_set_copied(file->image, IMAGE_WHOLE);
        if (file->image->lacks_pages)
                pthread_cond_signal(&catalogue->pages);
        while (*link != loan)
                link = &(*link)->next;
        *link = loan->next;
        free(loan);
        part->file_count += !again;
        part->blocked_ns += request->blocked_ns;
        part->copy_ns += request->copy_ns;
        part->cpu_ns += request->cpu_ns;
        part->fault_count += request->fault_count;
        if (!version_rank_copies(version, part->rank))
                part->captured = catalogue_now();
        if (request->commits)
                part_close(part);
        version->activity_ns = os->now_ns();
        version_mark(catalogue, version);
        commit_check(catalogue, version);
        version_signal_captured(catalogue, version);
        if (request->commits)
                signal_closed(catalogue, version);
        else if (version->is_spread || version->file_goal == NEBULA_FILES_OPEN)
                catalogue_signal_job_work(catalogue, version->job); /* the clock of commit_quiet */
        return NEBULA_OK;
}

enum nebula_status commit_copied(struct catalogue *catalogue, struct version *version, struct image_loan *loan,
                                 const struct ipc_copied *request, struct nebula_error *error)
{
        if (request->size > loan->size)
                return error_set(error, NEBULA_INVALID, 0, "%" PRIu64 " of %" PRIu64 " bytes of \"%.150s\" cannot be copied", request->size,
                                 loan->size, loan->name);
        if (request->size > atomic_load(&loan->image->copied)) {
                enum nebula_status status = take_sums(loan, request->sum_count, error);

                if (status)
                        return status;
                image_set_copied(loan->image, request->size);
        }
        loan->commits = request->commits != 0;
        if (!version_progress(version).tried_ahead)
                catalogue_signal_worker(catalogue, version->job);
        return NEBULA_OK;
}

static enum nebula_status remember_idle(struct version *version, const struct session *session, struct nebula_error *error)
{
        struct part *parts;

        for (size_t i = 0; i < version->idle_count; i++)
                if (version->idle_parts[i].rank == session->rank)
                        return NEBULA_OK;
        parts = realloc(version->idle_parts, (version->idle_count + 1) * sizeof *parts);
        if (!parts)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe rank %u", session->rank);
        version->idle_parts = parts;
        version->job->may_have_idle = true;
        parts[version->idle_count++] = (struct part){
                .rank = session->rank, .nonce = session->nonce, .pid = session->pid, .seen_pid = session->seen_pid,
                .begun = catalogue_now()
        };
        return NEBULA_OK;
}

/* has_saved: the version has files of the checkpoint that the rank commits. */
static enum nebula_status close_own(struct catalogue *catalogue, struct session *session, struct version *version, bool has_saved,
                                    struct nebula_error *error)
{
        struct part *part = version_part(version, session->rank);
        bool of_other_run = strcmp(version->run, session->run);

        if (!version_open(version) || (part && part->closed && !part->spoken_for) || of_other_run) {
                struct version *next = session->world > 1 ? open_version(session, version->tag) : NULL;

                if (version->file_goal > 0 && part && !part->closed && !of_other_run && lifecycle_complete(version->life.state) &&
                    (has_saved || !part->begun_again)) {
                        part_close(part); /* an earlier file has completed it */
                        return NEBULA_OK;
                }
                if (version->life.state == NEBULA_STATE_FAILED && !of_other_run)
                        return error_set(error, NEBULA_FAILED, 0, "checkpoint \"%s\" has failed: %.400s", version->tag,
                                         version->error.message);
                if (!next)
                        return session->world > 1 ? remember_idle(version, session, error) : NEBULA_OK;
                version = next;
        }
        part = own_part(version, session, error);
        if (!part)
                return NEBULA_NO_MEMORY;
        part_close(part);
        version->activity_ns = os->now_ns();
        version_mark(catalogue, version);
        commit_check(catalogue, version);
        signal_closed(catalogue, version);
        return NEBULA_OK;
}

enum nebula_status commit_part(struct catalogue *catalogue, struct session *session, struct version *version,
                               struct nebula_error *error)
{
        return close_own(catalogue, session, version, true, error);
}

enum nebula_status commit_nothing(struct catalogue *catalogue, struct session *session, struct version *version,
                                  struct nebula_error *error)
{
        return close_own(catalogue, session, version, false, error);
}
