/* Jobs, sessions and waiters. version.c has the versions, files.c their files. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/catalogue/catalogue.h"
#include "agent/clients/location.h"
#include "agent/clients/history.h"
#include "agent/log.h"
#include "agent/memory/survival_log.h"
#include "agent/persist/lease.h"
#include "agent/persist/storage.h"
#include "agent/publish/publish.h"
#include "os/os.h"
#include "os/os_create.h"
#include "os/thread.h"

/* Bits of `wakes`. */
#define WAKE_MOVED 1u
#define WAKE_WORK 2u
#define WAKE_PAGES 4u
#define WAKE_CLOCK 8u
#define WAKE_COPY 16u
#define WAKE_EVENT 32u
#define WAKE_CAPTURED 64u /* the first of REACHED_COUNT bits */
#define WAKE_REACHED (WAKE_CAPTURED << REACHED_COUNT)
#define WAKE_VERSIONS (((1u << 2 * REACHED_COUNT) - 1) * WAKE_CAPTURED)

double catalogue_now(void)
{
        return (double)os->wall_ns() / 1e9;
}

double catalogue_moment(struct catalogue *catalogue)
{
        double now = catalogue_now();

        catalogue->last_moment = now > catalogue->last_moment ? now : catalogue->last_moment + 1e-6;
        return catalogue->last_moment;
}

void catalogue_init(struct catalogue *catalogue)
{
        memset(catalogue, 0, sizeof *catalogue);
        lock_init(&catalogue->catalogue_lock, LOCK_CATALOGUE);
        os_cond_init(&catalogue->moved);
        os_cond_init(&catalogue->work);
        os_cond_init(&catalogue->clock);
        os_cond_init(&catalogue->pages);
        os_cond_init(&catalogue->copy);
        os_cond_init(&catalogue->event);
        catalogue->agent_nonce = memory_random_id();
        catalogue->started_ns = catalogue->idle_since_ns = os->now_ns();
        catalogue->started = catalogue_now();
        catalogue->memory_wait_s = 300;
}

static void job_free(struct catalogue *catalogue, struct job **link)
{
        struct job *job = *link;

        *link = job->next;
        while (job->versions)
                version_free(catalogue, job->versions);
        known_done(&job->storage.known);
        json_decref(job->storage.metrics);
        lease_forget(job);
        free(job->storage.removed);
        for (size_t i = 0; i < job->storage.half_removed_count; i++)
                known_free(job->storage.half_removed[i]);
        free(job->storage.half_removed);
        unfinished_done(&job->storage.ended);
        ancestry_done(job);
        storage_close(job);
        free(job->runs.gone);
        free(job);
}

void catalogue_done(struct catalogue *catalogue)
{
        while (catalogue->jobs)
                job_free(catalogue, &catalogue->jobs);
        location_done(catalogue);
        while (catalogue->lanes) {
                struct lane *lane = catalogue->lanes;

                catalogue->lanes = lane->next;
                free(lane);
        }
        while (catalogue->sessions) {
                struct session *session = catalogue->sessions;

                catalogue->sessions = session->next;
                free(session);
        }
        pthread_cond_destroy(&catalogue->moved);
        pthread_cond_destroy(&catalogue->work);
        pthread_cond_destroy(&catalogue->clock);
        pthread_cond_destroy(&catalogue->pages);
        pthread_cond_destroy(&catalogue->copy);
        pthread_cond_destroy(&catalogue->event);
        lock_done(&catalogue->catalogue_lock);
}

void catalogue_lock(struct catalogue *catalogue)
{
        lock_take(&catalogue->catalogue_lock);
        log_hold();
}

/* Whether lines of the log, or files, were described under the lock and are not written yet. */
static bool has_writes(const struct catalogue *catalogue)
{
        return log_is_held() || memory_files_are_due(&catalogue->memory.files);
}

/* Call without the lock. A file that could not be written is described anew, or its loss is logged. */
static void write_described(struct catalogue *catalogue, uint64_t number)
{
        struct memory_file_task *failed, *next;

        log_let_go();
        if (!memory_files_write(&catalogue->memory, number))
                return;
        catalogue_lock(catalogue);
        for (failed = memory_files_failed(&catalogue->memory.files); failed; failed = next) {
                next = failed->next;
                if (failed->file)
                        survival_log_mend(catalogue, failed);
                else
                        publish_lose_list(failed->result);
                memory_file_task_free(failed);
        }
        catalogue_unlock(catalogue);
}

static void wake(struct catalogue *catalogue, uint32_t wakes)
{
        if (wakes & WAKE_MOVED)
                pthread_cond_broadcast(&catalogue->moved);
        if (wakes & WAKE_WORK)
                pthread_cond_broadcast(&catalogue->work);
        if (wakes & WAKE_CLOCK)
                pthread_cond_signal(&catalogue->clock);
        if (wakes & WAKE_PAGES)
                pthread_cond_signal(&catalogue->pages);
        if (wakes & WAKE_COPY)
                pthread_cond_signal(&catalogue->copy);
        if (wakes & WAKE_EVENT)
                pthread_cond_broadcast(&catalogue->event);
}

/* Takes the waiters whose wait is over off the list. */
static struct waiter *take_waiters(struct catalogue *catalogue, uint32_t wakes)
{
        struct waiter *over = NULL, **link = &catalogue->waiters;

        while (*link && wakes & WAKE_VERSIONS) {
                struct waiter *waiter = *link;

                if (!(waiter->wakes & wakes) || !waiter->is_over(waiter)) {
                        link = &waiter->next;
                        continue;
                }
                *link = waiter->next;
                waiter->next = over;
                over = waiter;
        }
        return over;
}

/* Collects the signalled conditions until no new one comes: the check of a waiter may signal more. */
static struct waiter *take_wakes(struct catalogue *catalogue, uint32_t *ret_wakes)
{
        struct waiter *over = take_waiters(catalogue, catalogue->wakes);

        *ret_wakes = catalogue->wakes;
        catalogue->wakes = 0;
        return over;
}

static void tell(struct waiter *over)
{
        while (over) {
                struct waiter *next = over->next; /* read before `tell`: the client may wait again as soon as it was told */

                over->tell(over);
                over = next;
        }
}

void catalogue_unlock(struct catalogue *catalogue)
{
        uint32_t wakes;
        struct waiter *over = take_wakes(catalogue, &wakes);
        uint64_t number = memory_files_added(&catalogue->memory.files);

        lock_give(&catalogue->catalogue_lock);
        write_described(catalogue, number); /* first: a thread that is woken before would wait for the same file */
        if (wakes)
                wake(catalogue, wakes);
        tell(over);
}

static void wake_with_lock(struct catalogue *catalogue)
{
        uint32_t wakes;
        struct waiter *over = take_wakes(catalogue, &wakes);

        wake(catalogue, wakes);
        tell(over);
}

void catalogue_unlock_last(struct catalogue *catalogue)
{
        wake_with_lock(catalogue);
        lock_give(&catalogue->catalogue_lock);
        log_let_go();
}

void catalogue_wait(struct catalogue *catalogue, pthread_cond_t *cond, int64_t timeout_ms)
{
        if (has_writes(catalogue)) { /* the wait may be long; and while files are written, it may end */
                catalogue_unlock(catalogue);
                catalogue_lock(catalogue);
                return;
        }
        wake_with_lock(catalogue);
        lock_wait_for(&catalogue->catalogue_lock, cond, timeout_ms);
}

void catalogue_await(struct catalogue *catalogue, struct waiter *waiter, uint64_t version_id, enum nebula_state state)
{
        waiter->wakes = (state == NEBULA_STATE_CAPTURED ? WAKE_CAPTURED : WAKE_REACHED) << version_id % REACHED_COUNT;
        waiter->next = catalogue->waiters;
        catalogue->waiters = waiter;
}

void catalogue_forget_waiter(struct catalogue *catalogue, struct waiter *waiter)
{
        struct waiter **link = &catalogue->waiters;

        while (*link && *link != waiter)
                link = &(*link)->next;
        if (*link)
                *link = waiter->next;
}

/* Few changes concern the page maker or the copy sender, so check before waking them: waking a thread costs more than the check. */
static uint32_t helpers_needed(const struct catalogue *catalogue)
{
        const struct memory *memory = &catalogue->memory;
        uint32_t wakes = catalogue->stopping ? WAKE_PAGES | WAKE_COPY : memory->doomed ? WAKE_PAGES : 0;

        if (!memory->joining && catalogue_small_image(catalogue))
                wakes |= WAKE_PAGES;
        for (const struct job *job = catalogue->jobs; job; job = job->next)
                wakes |= (job->spare_due ? WAKE_PAGES : 0) | (job->copies.count ? WAKE_COPY : 0);
        return wakes;
}

static void signal_some(struct catalogue *catalogue, uint32_t others)
{
        catalogue->change_count++;
        catalogue->wakes |= others | WAKE_MOVED | helpers_needed(catalogue);
}

void catalogue_signal(struct catalogue *catalogue)
{
        signal_some(catalogue, WAKE_VERSIONS | WAKE_WORK | WAKE_CLOCK | (catalogue->stopping ? WAKE_EVENT : 0));
}

void catalogue_signal_work(struct catalogue *catalogue)
{
        catalogue->change_count++;
        catalogue->wakes |= WAKE_WORK | WAKE_CLOCK;
}

void catalogue_signal_workers(struct catalogue *catalogue)
{
        catalogue->change_count++;
        catalogue->wakes |= WAKE_WORK;
}

void catalogue_signal_event(struct catalogue *catalogue)
{
        catalogue->wakes |= WAKE_EVENT;
}

void version_signal(struct catalogue *catalogue, const struct version *version)
{
        uint32_t starts = version->job->lane->is_running ? 0 : WAKE_CLOCK;
        /* Without a storage path there is nothing to persist. */
        uint32_t works = version->job->persist_path[0] || version_result(version) ? WAKE_WORK : 0;

        signal_some(catalogue, starts | works | (WAKE_CAPTURED | WAKE_REACHED) << version->id % REACHED_COUNT);
}

void version_signal_captured(struct catalogue *catalogue, const struct version *version)
{
        catalogue->wakes |= WAKE_CAPTURED << version->id % REACHED_COUNT;
}

void catalogue_panic(struct catalogue *catalogue, const char *what)
{
        log_event(LOG_LEVEL_ERROR, "BROKEN INVARIANT: %s; the agent ends here, and the next agent adopts the versions in memory", what);
        if (!catalogue->in_process) {
                log_let_go();
                abort();
        }
        catalogue->broken = true;
        catalogue_signal(catalogue);
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
        lane = calloc(1, sizeof *lane);
        if (!lane)
                return NULL;
        lane->catalogue = catalogue;
        lane->next = catalogue->lanes;
        catalogue->lanes = lane;
        return lane;
}

struct job *catalogue_job_get(struct catalogue *catalogue, const char *persist_path, const char *name)
{
        struct job *job = catalogue_job(catalogue, persist_path, name);

        if (job)
                return job;
        job = calloc(1, sizeof *job);
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
        job->settings.retention_count = 2;
        job->settings.umask = job->settings.group = OS_CREATE_UNKNOWN;
        job->settings.world = 1;
        job->persist.last_start_ns = INT64_MIN;
        job->next = catalogue->jobs;
        catalogue->jobs = job;
        return job;
}

void catalogue_job_configure(struct catalogue *catalogue, struct job *job, const struct ipc_hello *settings, const char *spelling)
{
        snprintf(job->spelling, sizeof job->spelling, "%s", spelling);
        if (strcmp(job->run, settings->run)) {
                job->storage.is_scanned = false;
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
        job->copies.count = settings->replica_count;
        job->copies.is_served |= job->copies.count > 0;
        job->copies.announce_due |= catalogue_session_count(catalogue, job) == 1;
        job->settings.world = settings->world;
        job->settings.local_world = settings->local_world;
        job->history_broken = false;
        if (job->persist_path[0] && !job->storage.is_scanned)
                job->storage.scan_due = true;
        if (settings->memory_bytes)
                memory_configure(&catalogue->memory, settings->memory_bytes);
}

struct keep_rule catalogue_rule(const struct ipc_hello *settings)
{
        struct keep_rule rule = { .last = settings->keep_last, .every = settings->keep_every, .best = settings->keep_best_count,
                                  .best_is_largest = settings->keep_best_is_largest != 0 };

        memcpy(rule.metric, settings->keep_best, sizeof rule.metric);
        return rule;
}

static bool is_same_rule(const struct keep_rule *a, const struct keep_rule *b)
{
        return a->last == b->last && a->every == b->every && a->best == b->best && a->best_is_largest == b->best_is_largest &&
               !strcmp(a->metric, b->metric);
}

static bool has_rule(const struct job_settings *settings, const struct keep_rule *rule)
{
        for (uint32_t i = 0; i < settings->rule_count; i++)
                if (is_same_rule(&settings->rules[i], rule))
                        return true;
        return false;
}

void catalogue_gather_rules(const struct catalogue *catalogue, struct job *job)
{
        struct job_settings *settings = &job->settings;

        settings->rule_count = 0;
        for (const struct session *session = catalogue->sessions; session; session = session->next) {
                if (session->job != job || session->role != IPC_ROLE_TRAINER || !session->connection_count || strcmp(session->run, job->run) ||
                    !session->rule.last || has_rule(settings, &session->rule))
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
        job->storage.retain_due |= settings->rule_count && job->storage.is_remover; /* a session that was away may have left some undone */
}

void catalogue_create_as(const struct job *job)
{
        os_create_as(job->settings.umask, job->settings.group);
}

bool catalogue_job_is_needed(const struct catalogue *catalogue, const struct job *job)
{
        if (job->pins || job->persist.is_busy || job->storage.scan_due || job->storage.ended.count || job->publishes || history_pending(job))
                return true;
        for (const struct session *session = catalogue->sessions; session; session = session->next)
                if (session->job == job || session->number <= job->last_guest)
                        return true;
        for (const struct version *version = job->versions; version; version = version->next)
                if (version->in_memory || version->pins || version->nodes.spread || version->life.state < NEBULA_STATE_COMMITTED)
                        return true;
        return false;
}

static void forget_images(struct catalogue *catalogue, const struct job *job)
{
        for (struct image *image = catalogue->memory.images, *next; image; image = next) {
                next = image->next;
                if (image->job != job)
                        continue;
                image->job = NULL;
                if (!image->users) {
                        memory_doom(&catalogue->memory, image);
                        catalogue->wakes |= WAKE_PAGES;
                }
        }
}

static void forget_lanes(struct catalogue *catalogue)
{
        for (struct lane **link = &catalogue->lanes, *lane; (lane = *link);) {
                const struct job *job = catalogue->jobs;

                while (job && job->lane != lane)
                        job = job->next;
                if (job || lane->is_running) {
                        link = &lane->next;
                        continue;
                }
                *link = lane->next;
                free(lane);
        }
}

int64_t catalogue_forget_jobs(struct catalogue *catalogue, int64_t now_ns)
{
        int64_t due = INT64_MAX;

        if (catalogue->draining)
                return due; /* a drain counts the failures of all versions */
        for (struct job **link = &catalogue->jobs, *job; (job = *link);) {
                bool is_needed = job->copies.is_served || catalogue_job_is_needed(catalogue, job);
                int64_t until;

                job->left_ns = is_needed ? 0 : job->left_ns ? job->left_ns : now_ns;
                until = job->left_ns + (int64_t)catalogue->linger_s * 1000000000;
                if (is_needed || now_ns < until) {
                        due = !is_needed && until < due ? until : due;
                        link = &job->next;
                        continue;
                }
                while (job->versions)
                        version_free(catalogue, job->versions);
                forget_images(catalogue, job);
                job_free(catalogue, link);
        }
        forget_lanes(catalogue);
        return due;
}

struct session *catalogue_session(struct catalogue *catalogue, uint64_t nonce)
{
        for (struct session *session = catalogue->sessions; session; session = session->next)
                if (session->nonce == nonce)
                        return session;
        return NULL;
}

uint32_t catalogue_session_count(const struct catalogue *catalogue, const struct job *job)
{
        uint32_t count = 0;

        for (const struct session *session = catalogue->sessions; session; session = session->next)
                count += session->connection_count && session->role == IPC_ROLE_TRAINER && (!job || session->job == job);
        return count;
}

bool catalogue_resumes(const struct catalogue *catalogue, const struct job *job)
{
        bool any = false;

        for (const struct session *session = catalogue->sessions; session; session = session->next) {
                if (session->job != job || session->role != IPC_ROLE_TRAINER || !session->connection_count)
                        continue;
                if (session->has_begun)
                        return false;
                any = true;
        }
        return any;
}

void catalogue_lease(struct catalogue *catalogue, struct session *session, uint64_t version_id)
{
        struct version *before = session->leased ? catalogue_version(catalogue, session->leased) : NULL;
        struct version *version = version_id ? catalogue_version(catalogue, version_id) : NULL;

        if (before)
                before->leases--;
        if (version)
                version->leases++;
        session->leased = version ? version_id : 0;
        if (before != version)
                catalogue_signal(catalogue); /* the worker writes leases into storage */
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
