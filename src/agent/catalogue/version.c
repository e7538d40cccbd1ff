/* A version: begins, moves from state to state, fails, is forgotten. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/catalogue.h"
#include "agent/catalogue/room.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "base/error.h"
#include "os/os.h"

struct version *version_new(struct catalogue *catalogue, struct job *job, const char *tag, struct nebula_error *error)
{
        struct version *version = room_new_version(catalogue->rooms, sizeof *version);

        if (!version) {
                error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe checkpoint \"%s\"", tag);
                return NULL;
        }
        version->id = memory_random_id();
        version->job = job;
        snprintf(version->tag, sizeof version->tag, "%s", tag);
        snprintf(version->run, sizeof version->run, "%s", job->run);
        version->step = name_step(tag);
        version->world = job->settings.world;
        version->file_goal = NEBULA_FILES_OPEN;
        version->activity_ns = os->now_ns();
        lifecycle_init(&version->life, NEBULA_STATE_CAPTURING, catalogue_now());
        for (const struct room *const *room = catalogue->rooms; *room; room++)
                if ((*room)->version_begins)
                        (*room)->version_begins(version);
        version->next = job->versions;
        version->next_live = job->live;
        job->versions = job->live = version;
        job->tag_counts[job_tag_slot(version->tag)]++;
        return version;
}

void version_drop_loans(struct catalogue *catalogue, struct version *version)
{
        while (version->loans) {
                struct image_loan *loan = version->loans;

                version->loans = loan->next;
                /* The trainer may still be copying into the image: never lend it again. */
                loan->image->exposed = true;
                image_set_copied(loan->image, IMAGE_GIVEN_UP);
                memory_drop(catalogue->memory, loan->image);
                free(loan);
        }
}

void version_free(struct catalogue *catalogue, struct version *version)
{
        struct job *job = version->job;
        struct version **link = &job->versions;

        while (*link && *link != version)
                link = &(*link)->next;
        if (*link)
                *link = version->next;
        for (link = &job->live; *link && *link != version;)
                link = &(*link)->next_live;
        if (*link)
                *link = version->next_live;
        version_describe(catalogue, version);
        job->tombstone_count -= version->is_tombstone;
        job->tag_counts[job_tag_slot(version->tag)]--;
        version_set_copy(catalogue, version, COPY_TRUSTED);
        version_drop_loans(catalogue, version);
        version_files_done(catalogue, version);
        for (const struct room *const *room = catalogue->rooms; *room; room++)
                if ((*room)->version_ends)
                        (*room)->version_ends(version);
        free(version->parts);
        free(version->idle_parts);
        free(version);
}

void version_move(struct catalogue *catalogue, struct version *version, enum nebula_state state)
{
        char what[400];

        if (!lifecycle_move(&version->life, state, catalogue_moment(catalogue))) {
                snprintf(what, sizeof what, "checkpoint \"%s\" cannot go from %s to %s", version->tag,
                         nebula_state_name(version->life.state), nebula_state_name(state));
                catalogue_panic(catalogue, what);
                return;
        }
        version->activity_ns = os->now_ns();
        if (state == NEBULA_STATE_CAPTURED) { /* other waiters, and the survival log, wait for the next state */
                version_signal_captured(catalogue, version);
                return;
        }
        version_changed(catalogue, version);
        if (state == NEBULA_STATE_DURABLE || state == NEBULA_STATE_FAILED || catalogue->has_readers)
                catalogue_signal_event(catalogue, version->job);
}

void version_fail(struct catalogue *catalogue, struct version *version, enum nebula_status status, const char *format, ...)
{
        char message[sizeof version->error.message];
        va_list arguments;

        if (version->life.state == NEBULA_STATE_FAILED)
                return;
        va_start(arguments, format);
        vsnprintf(message, sizeof message, format, arguments);
        va_end(arguments);
        error_set(&version->error, status, 0, "%s", message); /* error_set repairs a character that was cut */
        if (version->gives_way)
                version->job->given_way_count++;
        version->failed_by_storage = lifecycle_complete(version->life.state) && version->in_memory && status != NEBULA_CORRUPT;
        log_event(LOG_LEVEL_WARN, "%s failed: %s", version->tag, version->error.message);
        version_move(catalogue, version, NEBULA_STATE_FAILED);
        if (!version->failed_by_storage)
                version_forget_memory(catalogue, version);
}

void version_forget_memory(struct catalogue *catalogue, struct version *version)
{
        version_drop_loans(catalogue, version);
        for (size_t i = 0; i < version->file_count; i++) {
                struct agent_file *file = &version->files[i];

                if (file->image)
                        memory_drop(catalogue->memory, file->image);
                if (file->sparse)
                        memory_drop(catalogue->memory, file->sparse);
                file->sparse = NULL;
                file->image = NULL;
        }
        if (version->in_memory && !version->stored && lifecycle_complete(version->life.state))
                version->superseded = true;
        version->in_memory = version->failed_by_storage = false;
        for (const struct room *const *room = catalogue->rooms; *room; room++)
                if ((*room)->version_leaves_memory)
                        (*room)->version_leaves_memory(version);
        version_changed(catalogue, version);
}

void version_give_way(struct catalogue *catalogue, struct version *version, uint64_t sequence)
{
        if (version->sequence >= sequence || version->stored || version->is_spread || version->superseded ||
            !lifecycle_complete(version->life.state))
                return;
        log_event(LOG_LEVEL_INFO, "%s is not persisted: a later writing of the tag is durable", version->tag);
        version->superseded = true;
        version_changed(catalogue, version);
}

enum nebula_status version_failure(const struct version *version, struct nebula_error *error)
{
        bool is_of_storage = version->error.status == NEBULA_STORAGE || version->error.status == NEBULA_NO_SPACE;

        error_set(error, is_of_storage ? version->error.status : NEBULA_FAILED, version->error.sys_errno, "checkpoint \"%.100s\" failed: %.380s",
                  version->tag, version->error.message);
        if (error)
                error->http_status = version->error.http_status;
        return is_of_storage ? version->error.status : NEBULA_FAILED;
}

void version_replaced(struct catalogue *catalogue, struct version *version)
{
        if (!version->superseded)
                log_event(LOG_LEVEL_INFO, "%s in memory counts no more: storage has a later writing of the tag", version->tag);
        version->superseded = true;
        version->stored = false;
        if (!version->pins)
                version_forget_memory(catalogue, version);
        else
                version_changed(catalogue, version);
}

struct part *version_part(struct version *version, uint32_t rank)
{
        for (size_t i = 0; i < version->part_count; i++)
                if (version->parts[i].rank == rank)
                        return &version->parts[i];
        return NULL;
}

struct part *version_part_get(struct version *version, uint32_t rank)
{
        struct part *part = version_part(version, rank), *parts;

        if (part)
                return part;
        parts = realloc(version->parts, (version->part_count + 1) * sizeof *parts);
        if (!parts)
                return NULL;
        version->parts = parts;
        part = &parts[version->part_count++];
        *part = (struct part){ .rank = rank, .begun = catalogue_now() };
        return part;
}

bool version_is_safe(const struct version *version)
{
        return version->stored && version->copy == COPY_TRUSTED;
}

void version_set_copy(struct catalogue *catalogue, struct version *version, enum version_copy copy)
{
        catalogue->doubted_count -= version->copy != COPY_TRUSTED;
        catalogue->doubted_count += copy != COPY_TRUSTED;
        version->copy = copy;
}

void version_judge_copy(struct catalogue *catalogue, struct version *version, bool is_whole, const char *why)
{
        bool has_image = false;
        enum version_copy copy;

        for (size_t i = 0; i < version->file_count; i++)
                has_image = has_image || version->files[i].image;
        copy = is_whole ? COPY_TRUSTED : has_image ? COPY_DOUBTED : COPY_DAMAGED;
        if (!version->stored || version->copy == copy)
                return;
        version_set_copy(catalogue, version, copy);
        for (size_t i = 0; i < version->file_count; i++)
                version->files[i].stored = is_whole;
        if (is_whole)
                log_event(LOG_LEVEL_INFO, "%s is whole in %s again", version->tag, version->job->persist_path);
        else
                log_event(LOG_LEVEL_ERROR, "%s is damaged in %s, so it does not count as durable: %s", version->tag, version->job->persist_path, why);
        version_mark_files(catalogue, version);
        catalogue_signal_job(catalogue, version->job);
}

void catalogue_judge_copies(struct catalogue *catalogue, const char *persist_path, const char *tag, uint64_t sequence, bool is_whole, const char *why)
{
        for (struct job *job = catalogue->jobs; job; job = job->next)
                for (struct version *version = strcmp(job->persist_path, persist_path) ? NULL : job->versions; version; version = version->next)
                        if (!strcmp(version->tag, tag) && (!sequence || version_is(version, sequence)))
                                version_judge_copy(catalogue, version, is_whole, why);
}

bool catalogue_doubts(const struct catalogue *catalogue, const char *persist_path, const struct manifest *manifest)
{
        for (const struct job *job = catalogue->doubted_count ? catalogue->jobs : NULL; job; job = job->next)
                for (const struct version *version = strcmp(job->persist_path, persist_path) ? NULL : job->versions; version; version = version->next)
                        if (version->copy != COPY_TRUSTED && version_is(version, manifest->sequence) && !strcmp(version->tag, manifest->tag))
                                return true;
        return false;
}

void version_renumber(struct version *version, uint64_t sequence)
{
        if (!version->first_sequence && sequence != version->sequence)
                version->first_sequence = version->sequence;
        version->sequence = sequence;
}

bool version_follows(const struct version *version, uint64_t sequence)
{
        return !version->sequence || version->sequence > sequence;
}

bool version_is(const struct version *version, uint64_t sequence)
{
        return version->sequence == sequence;
}

uint64_t version_file_sequence(const struct version *version, const struct agent_file *file)
{
        return file->origin ? file->origin : version->sequence;
}

bool version_wanted(const struct ipc_find *wanted, uint64_t sequence)
{
        return !wanted->sequence || wanted->sequence == sequence;
}

bool version_whole_in_memory(const struct version *version)
{
        if (!version->in_memory || !(lifecycle_complete(version->life.state) || version->failed_by_storage))
                return false;
        for (size_t i = 0; i < version->file_count; i++)
                if (!version->files[i].image && !version->stored)
                        return version->job->persist_path[0] != 0; /* its files were carried over from storage */
        return true;
}

static bool persistable(const struct version *version)
{
        return version->in_memory && !version->superseded && version->life.state != NEBULA_STATE_DURABLE &&
               lifecycle_complete(version->life.state);
}

uint64_t version_stored_sequence(const struct job *job)
{
        const struct manifest *newest = known_newest(&job->known);
        uint64_t sequence = newest ? newest->sequence : 0;

        for (const struct version *version = job->live; version; version = version->next_live)
                if (version->stored && version->sequence > sequence)
                        sequence = version->sequence;
        return sequence;
}

bool version_is_overtaken_by(const struct version *version, uint64_t stored_sequence)
{
        return !version->wanted && version->job->settings.persist_interval_s > 0 && stored_sequence > version->sequence;
}

bool version_unsaved(const struct version *version)
{
        const struct job *job = version->job;

        if (version->in_memory && version->stored && version->copy == COPY_DOUBTED)
                return true;
        if (!job->persist_path[0] || !persistable(version))
                return false;
        if (version->wanted || job->settings.persist_interval_s <= 0)
                return true;
        for (const struct version *other = job->live; other; other = other->next_live)
                if (persistable(other) && other->sequence > version->sequence)
                        return false;
        return !version_is_overtaken_by(version, version_stored_sequence(job));
}

uint64_t version_size(const struct version *version)
{
        uint64_t size = 0;

        for (size_t i = 0; i < version->file_count; i++)
                size += version->files[i].size;
        return size;
}

const char *version_result(const struct version *version)
{
        if (version->life.state == NEBULA_STATE_FAILED)
                return "failed";
        if (version->life.state == NEBULA_STATE_DURABLE)
                return "durable";
        if (version->superseded)
                return version->job->persist_path[0] ? "superseded" : "memory";
        return NULL;
}

struct version *catalogue_stored(struct catalogue *catalogue, struct job *job, const struct manifest *manifest)
{
        struct version *version;

        for (version = job->versions; version; version = version->next)
                if (!strcmp(version->tag, manifest->tag) && version_is(version, manifest->sequence) &&
                    version->life.state == NEBULA_STATE_DURABLE)
                        return version;
        version = version_new(catalogue, job, manifest->tag, NULL);
        if (!version)
                return NULL;
        version->sequence = manifest->sequence;
        version->line = manifest->line;
        version->step = manifest->step;
        version->world = manifest->world;
        version->stored = version->recorded = true;
        version->writing = manifest->writing;
        snprintf(version->run, sizeof version->run, "%s", manifest->run);
        lifecycle_init(&version->life, NEBULA_STATE_DURABLE, (double)manifest->sequence / 1e9);
        for (size_t i = 0; i < manifest->file_count; i++) {
                struct agent_file *file = version_file_add(version, manifest->files[i].name);

                if (!file) {
                        version_free(catalogue, version);
                        return NULL;
                }
                file->rank = manifest->files[i].rank;
                file->size = manifest->files[i].size;
                file->origin = manifest_file_origin(manifest, &manifest->files[i]);
                file->stored = true;
        }
        return version;
}

struct version *catalogue_version(struct catalogue *catalogue, uint64_t id)
{
        for (struct job *job = catalogue->jobs; job; job = job->next)
                for (struct version *version = job->versions; version; version = version->next)
                        if (version->id == id)
                                return version;
        return NULL;
}

struct version *catalogue_version_of_image(struct catalogue *catalogue, uint64_t image_id, struct image_loan **ret_loan)
{
        for (struct job *job = catalogue->jobs; job; job = job->next)
                for (struct version *version = job->live; version; version = version->next_live)
                        for (struct image_loan *loan = version->loans; loan; loan = loan->next)
                                if (loan->image->id == image_id) {
                                        *ret_loan = loan;
                                        return version;
                                }
        return NULL;
}

bool version_open(const struct version *version)
{
        return version->life.state == NEBULA_STATE_CAPTURING || version->life.state == NEBULA_STATE_CAPTURED;
}

const struct image_loan *version_loan_of(const struct version *version, uint32_t rank)
{
        const struct image_loan *loan = version->loans;

        while (loan && loan->rank != rank)
                loan = loan->next;
        return loan;
}

bool version_rank_copies(const struct version *version, uint32_t rank)
{
        return version_loan_of(version, rank) != NULL;
}
