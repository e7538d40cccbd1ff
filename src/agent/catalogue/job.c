#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/catalogue.h"
#include "agent/catalogue/room.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "os/os.h"
#include "os/os_create.h"
#include "os/thread.h"

static void job_free(struct catalogue *catalogue, struct job **link)
{
        struct job *job = *link, **in_lane = &job->lane->jobs;

        *link = job->next;
        while (*in_lane != job)
                in_lane = &(*in_lane)->next_in_lane;
        *in_lane = job->next_in_lane;
        while (job->versions)
                version_free(catalogue, job->versions);
        while (job->sessions) {
                struct session *session = job->sessions;

                job->sessions = session->next;
                free(session);
        }
        for (const struct room *const *room = catalogue->rooms; *room; room++)
                if ((*room)->job_ends)
                        (*room)->job_ends(job);
        known_done(&job->known);
        free(job);
}

void catalogue_free_jobs(struct catalogue *catalogue)
{
        while (catalogue->jobs)
                job_free(catalogue, &catalogue->jobs);
        while (catalogue->lanes) {
                struct lane *lane = catalogue->lanes;

                catalogue->lanes = lane->next;
                pthread_cond_destroy(&lane->work);
                pthread_cond_destroy(&lane->event);
                free(lane);
        }
}

struct job *catalogue_job(struct catalogue *catalogue, const char *persist_path, const char *name)
{
        for (struct job *job = catalogue->jobs; job; job = job->next)
                if (!strcmp(job->persist_path, persist_path) && !strcmp(job->name, name))
                        return job;
        return NULL;
}

static struct lane *lane_get(struct catalogue *catalogue, const char *persist_path)
{
        struct lane *lane;

        for (struct job *job = catalogue->jobs; job; job = job->next)
                if (!strcmp(job->persist_path, persist_path))
                        return job->lane;
        for (lane = catalogue->lanes; lane; lane = lane->next)
                if (!lane->jobs && !lane->is_running && !lane->is_mending) {
                        lane->waited_in_vain = false;
                        return lane;
                }
        lane = calloc(1, sizeof *lane);
        if (!lane)
                return NULL;
        lane->catalogue = catalogue;
        os_cond_init(&lane->work);
        os_cond_init(&lane->event);
        lane->next = catalogue->lanes;
        catalogue->lanes = lane;
        return lane;
}

struct job *catalogue_job_get(struct catalogue *catalogue, const char *persist_path, const char *name)
{
        struct job *job = catalogue_job(catalogue, persist_path, name);

        if (job)
                return job;
        job = room_new_job(catalogue->rooms, sizeof *job);
        if (!job)
                return NULL;
        job->lane = lane_get(catalogue, persist_path);
        if (!job->lane) {
                free(job);
                return NULL;
        }
        snprintf(job->persist_path, sizeof job->persist_path, "%s", persist_path);
        snprintf(job->spelling, sizeof job->spelling, "%s", persist_path);
        snprintf(job->name, sizeof job->name, "%s", name);
        job->settings.retention_count = 1;
        job->settings.umask = job->settings.group = OS_CREATE_UNKNOWN;
        job->settings.world = 1;
        for (const struct room *const *room = catalogue->rooms; *room; room++)
                if ((*room)->job_begins)
                        (*room)->job_begins(job);
        job->next = catalogue->jobs;
        catalogue->jobs = job;
        job->next_in_lane = job->lane->jobs;
        job->lane->jobs = job;
        return job;
}

void catalogue_job_ask_storage(struct job *job)
{
        job->is_scanned = false;
        job->scans_asked++;
}

static void tell_rooms(const struct catalogue *catalogue, struct job *job)
{
        for (const struct room *const *room = catalogue->rooms; *room; room++)
                if ((*room)->job_configured)
                        (*room)->job_configured(catalogue, job);
}

void catalogue_job_await(struct catalogue *catalogue, struct job *job, const struct ipc_hello *settings, const char *spelling)
{
        snprintf(job->spelling, sizeof job->spelling, "%s", spelling);
        job->settings.umask = settings->umask;
        job->settings.group = settings->group;
        tell_rooms(catalogue, job);
        if (settings->memory_bytes)
                memory_configure(catalogue->memory, settings->memory_bytes);
}

void catalogue_job_configure(struct catalogue *catalogue, struct job *job, const struct ipc_hello *settings, const char *spelling)
{
        snprintf(job->spelling, sizeof job->spelling, "%s", spelling);
        if (strcmp(job->run, settings->run)) {
                catalogue_job_ask_storage(job);
                job->settings.awaited_rules = 0;
        }
        memcpy(job->output_dir, settings->output_dir, sizeof job->output_dir);
        memcpy(job->run, settings->run, sizeof job->run);
        job->settings.umask = settings->umask;
        job->settings.group = settings->group;
        job->settings.persist_interval_s = settings->persist_interval_s;
        job->settings.retention_count = settings->retention_count ? settings->retention_count : 1;
        job->settings.rules[0] = catalogue_rule(settings);
        job->settings.rule_count = job->settings.rules[0].last != 0;
        job->settings.on_full = settings->on_full;
        job->settings.replica_count = settings->replica_count;
        job->settings.has_spares = settings->has_spares != 0;
        job->settings.world = settings->world;
        job->settings.local_world = settings->local_world;
        job->history_broken = false;
        if (job->persist_path[0] && !job->is_scanned)
                job->scan_due = true;
        tell_rooms(catalogue, job);
        if (settings->memory_bytes)
                memory_configure(catalogue->memory, settings->memory_bytes);
}

struct keep_rule catalogue_rule(const struct ipc_hello *settings)
{
        struct keep_rule rule = { .last = settings->keep_last, .every = settings->keep_every, .best = settings->keep_best_count,
                                  .best_is_largest = settings->keep_best_is_largest != 0, .hourly = settings->keep_hourly, .daily = settings->keep_daily,
                                  .weekly = settings->keep_weekly, .within_s = settings->keep_within_s };

        memcpy(rule.metric, settings->keep_best, sizeof rule.metric);
        memcpy(rule.items, settings->keep_items, sizeof rule.items);
        return rule;
}

bool catalogue_has_rules(const struct job *job)
{
        return job->settings.rule_count || job->settings.items[0];
}

static bool is_same_rule(const struct keep_rule *a, const struct keep_rule *b)
{
        return a->last == b->last && a->every == b->every && a->best == b->best && a->best_is_largest == b->best_is_largest && a->hourly == b->hourly &&
               a->daily == b->daily && a->weekly == b->weekly && a->within_s == b->within_s &&
               !strcmp(a->metric, b->metric);
}

static bool has_rule(const struct job_settings *settings, const struct keep_rule *rule)
{
        for (uint32_t i = 0; i < settings->rule_count; i++)
                if (is_same_rule(&settings->rules[i], rule))
                        return true;
        return false;
}

void catalogue_gather_rules(struct job *job)
{
        struct job_settings *settings = &job->settings;
        bool is_first = true;

        settings->rule_count = 0;
        settings->items[0] = 0;
        for (const struct session *session = job->sessions; session; session = session->next) {
                if (session->role != IPC_ROLE_TRAINER || !session->connection_count || strcmp(session->run, job->run))
                        continue;
                if (is_first)
                        memcpy(settings->items, session->rule.items, sizeof settings->items);
                else if (strcmp(settings->items, session->rule.items))
                        settings->items[0] = 0;
                is_first = false;
                if (!session->rule.last || has_rule(settings, &session->rule))
                        continue;
                if (settings->rule_count == KEEP_RULES_MAX) {
                        log_event(LOG_LEVEL_WARN, "no version is removed from %s: its sessions have more than %d rules", job->persist_path, KEEP_RULES_MAX);
                        settings->rule_count = 0;
                        return;
                }
                settings->rules[settings->rule_count++] = session->rule;
        }
        if (settings->rule_count < settings->awaited_rules)
                settings->rule_count = 0;
        else
                settings->awaited_rules = 0;
        job->retain_due |= catalogue_has_rules(job) && job->is_remover; /* a session that was away may have left some undone */
}

void catalogue_create_as(const struct job *job)
{
        os_create_as(job->settings.umask, job->settings.group);
}

bool catalogue_job_is_needed(const struct catalogue *catalogue, const struct job *job)
{
        if (job->pins || job->scan_due || job->sessions)
                return true;
        for (const struct room *const *room = catalogue->rooms; *room; room++)
                if ((*room)->job_works && (*room)->job_works(job))
                        return true;
        for (const struct version *version = job->versions; version; version = version->next)
                if (version->in_memory || version->pins || version->is_spread || version->life.state < NEBULA_STATE_COMMITTED)
                        return true;
        for (const struct job *other = job->last_guest ? catalogue->jobs : NULL; other; other = other->next)
                for (const struct session *session = other->sessions; session; session = session->next)
                        if (session->number <= job->last_guest)
                                return true;
        return false;
}

static void forget_images(struct catalogue *catalogue, const struct job *job)
{
        for (struct image *image = catalogue->memory->images, *next; image; image = next) {
                next = image->next;
                if (image->job != job)
                        continue;
                image->job = NULL;
                if (!image->users) {
                        memory_doom(catalogue->memory, image);
                        catalogue_signal_pages(catalogue);
                }
        }
}

bool catalogue_forget_job(struct catalogue *catalogue, struct job **link, int64_t now_ns, int64_t *due)
{
        struct job *job = *link;
        bool is_needed = catalogue->draining /* a drain counts the failures of all versions */ || job->is_served || catalogue_job_is_needed(catalogue, job);
        int64_t until;

        job->left_ns = is_needed ? 0 : job->left_ns ? job->left_ns : now_ns;
        until = job->left_ns + (int64_t)catalogue->linger_s * SECOND_NS;
        if (is_needed || now_ns < until) {
                *due = !is_needed && until < *due ? until : *due;
                return false;
        }
        while (job->versions)
                version_free(catalogue, job->versions); /* before their images lose the job */
        forget_images(catalogue, job);
        catalogue_signal_lane(catalogue, job->lane); /* its worker may end */
        job_free(catalogue, link);
        return true;
}

/* FNV-1a. */
size_t job_tag_slot(const char *tag)
{
        uint32_t hash = 2166136261u;

        for (; *tag; tag++)
                hash = (hash ^ (unsigned char)*tag) * 16777619u;
        return (hash ^ hash >> 16) % TAG_SLOTS;
}

bool job_may_have(const struct job *job, const char *tag)
{
        return job->tag_counts[job_tag_slot(tag)];
}

const struct manifest *job_stored(const struct job *job, const char *tag)
{
        const struct manifest *manifest = known_find(&job->known, tag);

        return manifest && !strcmp(manifest->job, job->name) ? manifest : NULL;
}

void job_saw_sequence(struct job *job, uint64_t sequence)
{
        if (sequence > job->last_sequence)
                job->last_sequence = sequence < DOCUMENT_SEQUENCE_MAX ? sequence : DOCUMENT_SEQUENCE_MAX;
}

uint64_t job_next_sequence(struct job *job)
{
        int64_t now = os->wall_ns();

        job_saw_sequence(job, job->last_sequence + 1);
        if (now > 0)
                job_saw_sequence(job, (uint64_t)now);
        return job->last_sequence;
}
