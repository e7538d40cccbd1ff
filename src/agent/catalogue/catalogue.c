/* The lock, its waiters, and sessions. */
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/catalogue.h"
#include "agent/catalogue/memory_policy.h"
#include "agent/catalogue/room.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "os/os.h"
#include "os/thread.h"

/* Bits of `wakes`. */
#define WAKE_MOVED 1u
#define WAKE_WORK 2u /* this one and WAKE_EVENT: of the lane `woken` */
#define WAKE_PAGES 4u
#define WAKE_CLOCK 8u
#define WAKE_COPY 16u
#define WAKE_EVENT 32u
#define WAKE_CAPTURED 64u /* the first of REACHED_COUNT bits */
#define WAKE_REACHED (WAKE_CAPTURED << REACHED_COUNT)
#define WAKE_VERSIONS (((1u << 2 * REACHED_COUNT) - 1) * WAKE_CAPTURED)

/* The conditions that were signalled under the lock. */
struct signalled {
        uint32_t wakes;
        struct lane *woken; /* NULL: all lanes */
        struct lane *lanes; /* a lane stays where it is in the list for as long as the catalogue, so that it can be read without the lock */
};

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

void catalogue_init(struct catalogue *catalogue, const struct room *const *rooms, struct memory *memory)
{
        memset(catalogue, 0, sizeof *catalogue);
        catalogue->rooms = rooms;
        catalogue->memory = memory;
        lock_init(&catalogue->catalogue_lock, LOCK_CATALOGUE);
        os_cond_init(&catalogue->moved);
        os_cond_init(&catalogue->clock);
        os_cond_init(&catalogue->pages);
        os_cond_init(&catalogue->copy);
        catalogue->agent_nonce = memory_random_id();
        catalogue->started_ns = catalogue->idle_since_ns = os->now_ns();
        catalogue->started = catalogue_now();
        catalogue->memory_wait_s = 300;
}

void catalogue_done(struct catalogue *catalogue)
{
        catalogue_free_jobs(catalogue);
        for (const struct room *const *room = catalogue->rooms; *room; room++)
                if ((*room)->catalogue_ends)
                        (*room)->catalogue_ends(catalogue);
        pthread_cond_destroy(&catalogue->moved);
        pthread_cond_destroy(&catalogue->clock);
        pthread_cond_destroy(&catalogue->pages);
        pthread_cond_destroy(&catalogue->copy);
        lock_done(&catalogue->catalogue_lock);
}

void catalogue_lock(struct catalogue *catalogue)
{
        lock_take(&catalogue->catalogue_lock);
        log_hold();
}

/* Whether lines of the log, or files, were described under the lock and are not written yet, or are to be described. */
static bool has_writes(const struct catalogue *catalogue)
{
        return catalogue->marked || log_is_held() || memory_files_are_due(&catalogue->memory->files);
}

void version_mark(struct catalogue *catalogue, struct version *version)
{
        if (version->is_marked)
                return;
        version->is_marked = true;
        version->next_marked = catalogue->marked;
        catalogue->marked = version;
}

void version_mark_files(struct catalogue *catalogue, struct version *version)
{
        version->files_changed = true;
        version_mark(catalogue, version);
}

void version_describe(struct catalogue *catalogue, struct version *version)
{
        struct version **link = &catalogue->marked;

        if (!version->is_marked)
                return;
        while (*link != version)
                link = &(*link)->next_marked;
        *link = version->next_marked;
        version->is_marked = false;
        for (const struct room *const *room = catalogue->rooms; *room; room++)
                if ((*room)->describe)
                        (*room)->describe(catalogue, version);
}

static void describe_marked(struct catalogue *catalogue)
{
        while (catalogue->marked)
                version_describe(catalogue, catalogue->marked);
}

/* Call without the lock. A file that could not be written is described anew, or its loss is logged. */
static void write_described(struct catalogue *catalogue, uint64_t number)
{
        struct memory_file_task *failed, *next;

        log_let_go();
        if (!memory_files_write(catalogue->memory, number))
                return;
        catalogue_lock(catalogue);
        for (failed = memory_files_failed(&catalogue->memory->files); failed; failed = next) {
                next = failed->next;
                for (const struct room *const *room = catalogue->rooms; *room; room++)
                        if ((*room)->file_failed)
                                (*room)->file_failed(catalogue, failed);
                memory_file_task_free(failed);
        }
        catalogue_unlock(catalogue);
}

static void wake_lane(struct lane *lane, uint32_t wakes)
{
        if (wakes & WAKE_WORK)
                pthread_cond_signal(&lane->work);
        if (wakes & WAKE_EVENT)
                pthread_cond_broadcast(&lane->event);
}

static void wake(struct catalogue *catalogue, const struct signalled *signalled)
{
        uint32_t wakes = signalled->wakes;

        if (wakes & WAKE_MOVED)
                pthread_cond_broadcast(&catalogue->moved);
        if (signalled->woken)
                wake_lane(signalled->woken, wakes);
        else if (wakes & (WAKE_WORK | WAKE_EVENT))
                for (struct lane *lane = signalled->lanes; lane; lane = lane->next)
                        wake_lane(lane, wakes);
        if (wakes & WAKE_CLOCK)
                pthread_cond_signal(&catalogue->clock);
        if (wakes & WAKE_PAGES)
                pthread_cond_signal(&catalogue->pages);
        if (wakes & WAKE_COPY)
                pthread_cond_signal(&catalogue->copy);
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
static struct waiter *take_wakes(struct catalogue *catalogue, struct signalled *ret)
{
        struct waiter *over = take_waiters(catalogue, catalogue->wakes);

        *ret = (struct signalled){ catalogue->wakes, catalogue->woken, catalogue->lanes };
        catalogue->wakes = 0;
        catalogue->woken = NULL;
        return over;
}

static void notify(struct waiter *over)
{
        while (over) {
                struct waiter *next = over->next; /* read before `notify`: the client may wait again as soon as it was notified */

                over->notify(over);
                over = next;
        }
}

void catalogue_unlock(struct catalogue *catalogue)
{
        struct signalled signalled;
        struct waiter *over = take_wakes(catalogue, &signalled);
        uint64_t number;

        describe_marked(catalogue);
        number = memory_files_added(&catalogue->memory->files);
        lock_give(&catalogue->catalogue_lock);
        write_described(catalogue, number); /* first: a thread that is woken before would wait for the same file */
        wake(catalogue, &signalled);
        notify(over);
}

static void wake_with_lock(struct catalogue *catalogue)
{
        struct signalled signalled;
        struct waiter *over = take_wakes(catalogue, &signalled);

        wake(catalogue, &signalled);
        notify(over);
}

void catalogue_unlock_last(struct catalogue *catalogue)
{
        wake_with_lock(catalogue);
        describe_marked(catalogue);
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
        const struct memory *memory = catalogue->memory;
        uint32_t wakes = catalogue->stopping ? WAKE_PAGES | WAKE_COPY : memory->doomed ? WAKE_PAGES : 0;

        if (!memory->joining && policy_small_image(catalogue))
                wakes |= WAKE_PAGES;
        return wakes | (memory->spares_due ? WAKE_PAGES : 0) | (catalogue->serves_jobs ? WAKE_COPY : 0);
}

/* Also wakes threads of the lane; NULL: of all lanes. Two lanes under one lock are rare, and wake all. */
static void signal_lane(struct catalogue *catalogue, struct lane *lane, uint32_t wakes)
{
        catalogue->woken = !(catalogue->wakes & (WAKE_WORK | WAKE_EVENT)) || catalogue->woken == lane ? lane : NULL;
        catalogue->wakes |= wakes;
}

static void signal_some(struct catalogue *catalogue, uint32_t others)
{
        catalogue->change_count++;
        catalogue->wakes |= others | WAKE_MOVED | helpers_needed(catalogue);
}

void catalogue_signal(struct catalogue *catalogue)
{
        signal_lane(catalogue, NULL, WAKE_WORK | (catalogue->stopping ? WAKE_EVENT : 0));
        signal_some(catalogue, WAKE_VERSIONS | WAKE_CLOCK);
}

void catalogue_signal_work(struct catalogue *catalogue)
{
        catalogue->change_count++;
        signal_lane(catalogue, NULL, WAKE_WORK);
        catalogue->wakes |= WAKE_CLOCK;
}

void catalogue_signal_worker(struct catalogue *catalogue, const struct job *job)
{
        catalogue->change_count++;
        signal_lane(catalogue, job->lane, WAKE_WORK);
}

void catalogue_signal_job_work(struct catalogue *catalogue, const struct job *job)
{
        catalogue_signal_worker(catalogue, job);
        catalogue->wakes |= WAKE_CLOCK;
}

void catalogue_signal_lane(struct catalogue *catalogue, struct lane *lane)
{
        signal_lane(catalogue, lane, WAKE_WORK);
        signal_some(catalogue, WAKE_VERSIONS | WAKE_CLOCK);
}

void catalogue_signal_job(struct catalogue *catalogue, const struct job *job)
{
        catalogue_signal_lane(catalogue, job->lane);
}

void catalogue_signal_pages(struct catalogue *catalogue)
{
        catalogue->wakes |= WAKE_PAGES;
}

void catalogue_signal_event(struct catalogue *catalogue, const struct job *job)
{
        signal_lane(catalogue, job ? job->lane : NULL, WAKE_EVENT);
}

void version_changed(struct catalogue *catalogue, struct version *version)
{
        struct job *job = version->job;

        version_mark(catalogue, version);
        if (job->persist_path[0] || version_result(version)) /* without a storage path there is nothing to persist */
                signal_lane(catalogue, job->lane, WAKE_WORK);
        signal_some(catalogue, (job->lane->is_running ? 0 : WAKE_CLOCK) | (WAKE_CAPTURED | WAKE_REACHED) << version->id % REACHED_COUNT);
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

struct session *catalogue_session(struct catalogue *catalogue, uint64_t nonce)
{
        for (const struct job *job = catalogue->jobs; job; job = job->next)
                for (struct session *session = job->sessions; session; session = session->next)
                        if (session->nonce == nonce)
                                return session;
        return NULL;
}

/* one: 1 or -1. */
static void count_session(const struct session *session, int one)
{
        bool trains = session->role == IPC_ROLE_TRAINER;

        if (!session->job)
                return;
        session->job->trainer_session_count += trains ? one : 0;
        session->job->trainer_count += trains && session->connection_count ? one : 0;
}

void catalogue_session_set(struct session *session, struct job *job, uint32_t role, uint32_t connection_count)
{
        count_session(session, -1);
        if (session->job && session->job != job) {
                struct session **link = &session->job->sessions;

                while (*link != session)
                        link = &(*link)->next;
                *link = session->next;
        }
        if (job && session->job != job) {
                session->next = job->sessions;
                job->sessions = session;
        }
        session->job = job;
        session->role = role;
        session->connection_count = connection_count;
        count_session(session, 1);
}

bool catalogue_is_spare(const struct job *job)
{
        const struct session *session = job->sessions;

        while (session && (session->role != IPC_ROLE_SPARE || !session->connection_count))
                session = session->next;
        return session && !job->trainer_count;
}

bool catalogue_resumes(const struct job *job)
{
        bool any = false;

        for (const struct session *session = job->sessions; session; session = session->next) {
                if (session->role != IPC_ROLE_TRAINER || !session->connection_count)
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
        if (before && before != version)
                catalogue_signal_job(catalogue, before->job); /* the worker writes leases into storage */
        if (version && before != version)
                catalogue_signal_job(catalogue, version->job);
}

bool catalogue_may_live(uint32_t seen_pid)
{
        return !seen_pid || os->alive(seen_pid);
}
