#include "agent/clients/verdict.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "agent/clients/events.h"
#include "agent/commit/node_documents.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/peers/replica.h"
#include "agent/persist/due.h"
#include "agent/persist/progress.h"
#include "agent/pulse/pulse.h"
#include "os/os.h"

#define LOOK_NS (SECOND_NS / 5)      /* however often something changes */
#define TICK_NS SECOND_NS /* while time alone can change a verdict */
#define STALE_FACTOR 3               /* of the most steps between two versions */
#define SAY_FIRST_NS (60 * SECOND_NS)
#define SAY_MOST_NS (3600 * SECOND_NS)

static const char *const state_names[] = { "fine", "at risk", "broken" };

/* Facts on the versions of the job's present run. */
struct facts {
        const struct version *failed;   /* the newest version that is not open any more, if it has failed */
        size_t failed_count;            /* so many in a row, with that one */
        const struct version *late;     /* the newest one that waits long for other ranks */
        size_t late_count;
        const struct version *complete; /* the newest complete one in memory */
        const struct version *unwritten;/* the oldest one that storage is to have and has not */
        size_t unwritten_count;
        double behind_since;            /* the first commit after the newest durable version; 0: none */
        double write_s;                 /* how long the writing of the newest durable one took */
        uint64_t leaving;               /* bytes of versions that may leave memory */
        bool has_open;
        const struct manifest *durable;
};

static void gather_decided(const struct version *version, bool *is_decided, struct facts *facts)
{
        if (version_open(version) || !version->part_count || version->is_remote || *is_decided)
                return;
        if (version->life.state != NEBULA_STATE_FAILED) {
                *is_decided = true;
                return;
        }
        if (version->superseded) /* its tag has begun again */
                return;
        facts->failed = facts->failed ? facts->failed : version;
        facts->failed_count++;
}

static void gather_version(const struct job *job, const struct version *version, struct facts *facts)
{
        double committed = lifecycle_at(&version->life, NEBULA_STATE_COMMITTED), seconds = version_progress(version).seconds;

        facts->has_open |= version_open(version);
        if (version_open(version) && version->late_at > 0) {
                facts->late = facts->late ? facts->late : version;
                facts->late_count++;
        }
        if (version->in_memory && lifecycle_complete(version->life.state) && !facts->complete)
                facts->complete = version;
        if (version->in_memory && version_is_safe(version) && !version->pins && !version->leases)
                facts->leaving += version_size(version);
        if (due_is_unwritten(version) && !version->is_remote) {
                facts->unwritten = version;
                facts->unwritten_count++;
        }
        if (seconds > 0 && !(facts->write_s > 0))
                facts->write_s = seconds;
        if (committed > 0 && job->persist_path[0] && (!facts->durable || version->sequence > facts->durable->sequence))
                facts->behind_since = committed; /* the list is newest first */
}

static struct facts gather(const struct job *job)
{
        struct facts facts = { .durable = known_newest(&job->known) };
        bool is_decided = false;

        for (const struct version *version = job->versions; version; version = version->next)
                if (!strcmp(version->run, job->run)) {
                        gather_decided(version, &is_decided, &facts);
                        gather_version(job, version, &facts);
                }
        return facts;
}

static void set(struct job_verdict *verdict, enum verdict_state state, enum verdict_kind kind, double since, const char *cure)
{
        verdict->state = state;
        verdict->kind = kind;
        verdict->since = since;
        snprintf(verdict->cure, sizeof verdict->cure, "%s", cure);
}

static void say(struct job_verdict *verdict, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void say(struct job_verdict *verdict, const char *format, ...)
{
        size_t used = strlen(verdict->reason);
        va_list arguments;

        va_start(arguments, format);
        vsnprintf(verdict->reason + used, sizeof verdict->reason - used, format, arguments);
        va_end(arguments);
}

static void say_loss(struct job_verdict *verdict, const struct facts *facts)
{
        size_t count = facts->unwritten_count;

        if (!count)
                return;
        if (facts->durable)
                say(verdict, ", and %zu checkpoint%s after the durable \"%.100s\" %s only in memory", count, count > 1 ? "s" : "",
                    facts->durable->tag, count > 1 ? "are" : "is");
        else
                say(verdict, ", and %zu checkpoint%s only in memory: none is durable", count, count > 1 ? "s are" : " is");
}

static bool failed(const struct catalogue *catalogue, const struct job *job, const struct facts *facts, struct job_verdict *verdict)
{
        const struct version *version = facts->failed;
        bool is_full;

        if (!version || version->failed_by_storage)
                return false;
        is_full = version->error.status == NEBULA_NO_MEMORY;
        set(verdict, is_full ? VERDICT_AT_RISK : VERDICT_BROKEN, is_full ? VERDICT_MEMORY : VERDICT_FAILED,
            lifecycle_at(&version->life, NEBULA_STATE_FAILED),
            is_full               ? "raise NEBULA_MEMORY_BUFFER_SIZE, or save less often" :
            strstr(version->error.message, " ended before") || strstr(version->error.message, "trainers ") ?
                                    "start the rank's job again: it resumes from the newest checkpoint that can be loaded" :
                                    "the next save tries again; if it fails too, `nebula doctor` looks for the cause");
        say(verdict, "%s failed: %.300s", version->tag, version->error.message);
        if (facts->failed_count > 1)
                say(verdict, "; %zu checkpoints in a row have failed", facts->failed_count);
        return true;
}

/* If a second version waits too, the trainers go on without these ranks. */
static bool late(const struct catalogue *catalogue, const struct job *job, const struct facts *facts, struct job_verdict *verdict)
{
        char missing[160];
        bool is_broken;

        if (!facts->late)
                return false;
        world_missing(facts->late, missing, sizeof missing);
        is_broken = facts->late_count > 1 || catalogue_now() - facts->late->late_at >= (double)catalogue->give_up_s;
        set(verdict, is_broken ? VERDICT_BROKEN : VERDICT_AT_RISK, VERDICT_LATE, facts->late->late_at,
            "look whether these ranks still run; each rank is to commit, with or without files; if one rank alone saves, it gives init() world=1");
        say(verdict, "%s %s", facts->late->tag, missing);
        if (facts->late_count > 1)
                say(verdict, "; %zu older one%s too", facts->late_count - 1, facts->late_count > 2 ? "s do" : " does");
        return true;
}

static bool damaged(const struct catalogue *catalogue, const struct job *job, const struct facts *facts, struct job_verdict *verdict)
{
        const char *damage = job_progress(job).damage;

        if (!*damage)
                return false;
        set(verdict, VERDICT_BROKEN, VERDICT_DAMAGE, 0, "`nebula verify --all` names what is damaged; remove it with `nebula prune --tag TAG`");
        say(verdict, "storage has a damaged checkpoint: %s", damage);
        return true;
}

static const char *storage_cure(const struct nebula_error *error)
{
        switch (error->sys_errno) {
        case ENOSPC:
        case EDQUOT:
                return "make room there: remove files, or old checkpoints with `nebula prune`; the agent goes on by itself";
        case ENODEV:
        case ESTALE:
                return "mount that file system again; the agent goes on by itself";
        case EACCES:
        case EPERM:
        case EROFS:
                return "allow this user to write there; the agent goes on by itself";
        case ENOTDIR:
        case EEXIST:
                return "move away what lies in the place of the directory; the agent goes on by itself";
        default:
                return "`nebula doctor --path PATH` tries what the storage allows; the agent goes on by itself when it works";
        }
}

/* How long after a commit a version is to be durable: the job's interval, the time of a write, and some patience. */
static double allowed_s(const struct catalogue *catalogue, const struct job *job, const struct facts *facts)
{
        double write_s = 2 * facts->write_s, patience_s = (double)catalogue->takeover_s;

        return job->settings.persist_interval_s + (write_s > patience_s ? write_s : patience_s);
}

static bool storage_fails(const struct catalogue *catalogue, const struct job *job, const struct facts *facts, struct job_verdict *verdict)
{
        bool is_lost = facts->failed && facts->failed->failed_by_storage;
        struct job_progress progress = job_progress(job);
        const struct nebula_error *error = is_lost ? &facts->failed->error : progress.error;
        double since = progress.failing_since_ns ? catalogue_now() - (double)(os->now_ns() - progress.failing_since_ns) / 1e9 : 0;

        if (!is_lost && !error->message[0])
                return false;
        since = since > 0 ? since : verdict->kind == VERDICT_STORAGE ? verdict->since : catalogue_now();
        set(verdict, is_lost || catalogue_now() - since > 2 * allowed_s(catalogue, job, facts) ? VERDICT_BROKEN : VERDICT_AT_RISK, VERDICT_STORAGE,
            since, storage_cure(error));
        if (is_lost)
                say(verdict, "%s failed", facts->failed->tag);
        else
                say(verdict, "storage fails");
        say_loss(verdict, facts);
        say(verdict, ": %.400s", error->message);
        return true;
}

static bool lags(const struct catalogue *catalogue, const struct job *job, const struct facts *facts, struct job_verdict *verdict)
{
        double behind_s = catalogue_now() - facts->behind_since, allowed = allowed_s(catalogue, job, facts);
        bool is_broken = !facts->durable && job->is_scanned && !job_progress(job).is_busy && behind_s > 2 * allowed;

        if (!facts->unwritten || !(facts->behind_since > 0) || behind_s <= allowed)
                return false;
        set(verdict, is_broken ? VERDICT_BROKEN : VERDICT_AT_RISK, VERDICT_LAG, facts->behind_since,
            "raise persistent_time_interval, or use faster storage: `nebula doctor --measure --path PATH` measures it");
        say(verdict, "storage is slow: %s waits to become durable", facts->unwritten->tag);
        say_loss(verdict, facts);
        return true;
}

/* Whether the next version may have to wait for storage to make room. */
static void note_full(const struct catalogue *catalogue, const struct facts *facts, struct job_verdict *verdict)
{
        const struct memory *memory = catalogue->memory;
        uint64_t left = memory->used < memory->budget ? memory->budget - memory->used : 0;
        bool is_full = facts->unwritten && facts->complete &&
                       left + memory_free_bytes(memory, NULL) + facts->leaving < version_size(facts->complete);

        verdict->full_since_ns = !is_full ? 0 : verdict->full_since_ns ? verdict->full_since_ns : os->now_ns();
}

static bool memory_is_full(const struct catalogue *catalogue, const struct job *job, const struct facts *facts, struct job_verdict *verdict)
{
        const struct memory *memory = catalogue->memory;
        int64_t full_ns = verdict->full_since_ns ? os->now_ns() - verdict->full_since_ns : 0;

        if (!job->lane->waited_in_vain && (!full_ns || full_ns < (int64_t)catalogue->takeover_s * SECOND_NS))
                return false;
        set(verdict, VERDICT_AT_RISK, VERDICT_MEMORY, catalogue_now() - (double)full_ns / 1e9,
            "raise NEBULA_MEMORY_BUFFER_SIZE, save less often, or use faster storage");
        say(verdict, "memory is full: the next save waits until a version has become durable (%" PRIu64 " of %" PRIu64 " MiB are in use)",
            memory->used >> 20, memory->budget >> 20);
        say_loss(verdict, facts);
        return true;
}

static bool lacks_copies(const struct catalogue *catalogue, const struct job *job, const struct facts *facts, struct job_verdict *verdict)
{
        const struct version *version = facts->complete;
        double since = version ? lifecycle_at(&version->life, NEBULA_STATE_COMMITTED) + (double)catalogue->takeover_s : 0;
        const char *why = replica_error(job);
        uint32_t copies;

        if (!version || !job->settings.replica_count || catalogue_now() < since)
                return false;
        copies = replica_copies(version);
        if (copies >= job->settings.replica_count)
                return false;
        set(verdict, VERDICT_AT_RISK, VERDICT_COPIES, since, "see that the other nodes run, and that this one reaches them: `nebula doctor`");
        say(verdict, "%s has %" PRIu32 " of %" PRIu32 " copies in other nodes' memory%s%.300s", version->tag, copies, job->settings.replica_count,
            *why ? ": " : "", why);
        return true;
}

static bool has_rival(const struct catalogue *catalogue, const struct job *job, const struct facts *facts, struct job_verdict *verdict)
{
        if (!(job->rival_seen_at > 0) || !catalogue->memory->rival[0])
                return false;
        set(verdict, VERDICT_AT_RISK, VERDICT_RIVAL, job->rival_seen_at,
            "end that agent with `nebula stop`, or give all processes of this job the same NEBULA_RUNTIME_DIR");
        say(verdict, "another agent (%s) has versions of this job in memory, which this one cannot see", catalogue->memory->rival);
        return true;
}

static bool hangs(const struct catalogue *catalogue, const struct job *job, const struct facts *facts, struct job_verdict *verdict)
{
        const struct pulse_hang *hang = pulse_hang(job);

        if (!(hang->since > 0))
                return false;
        set(verdict, VERDICT_BROKEN, VERDICT_HUNG, hang->since,
            "read the stacks; kill the trainers, and they resume from memory (`nebula run --on-hang=restart` does both); name long work in nm.phase(...)");
        say(verdict, "the job makes no steps: %.500s", hang->text);
        return true;
}

/* How many steps the job makes between two versions, as far as it was seen. */
static void note_steps(const struct job *job, const struct facts *facts, struct job_verdict *verdict)
{
        int64_t step = pulse_step(job), steps = step - verdict->saved_step;

        if (step < 0 || !facts->complete)
                return;
        if (facts->complete->sequence != verdict->saved_sequence) {
                if (verdict->saved_sequence && steps > verdict->usual_steps)
                        verdict->usual_steps = steps;
                verdict->saved_sequence = facts->complete->sequence;
                verdict->saved_step = step;
        } else if (steps < 0) { /* it went back */
                verdict->saved_step = step;
        }
}

static bool saves_no_more(const struct catalogue *catalogue, const struct job *job, const struct facts *facts, struct job_verdict *verdict)
{
        int64_t steps = pulse_step(job) - verdict->saved_step;
        double since = facts->complete ? lifecycle_at(&facts->complete->life, NEBULA_STATE_COMMITTED) : 0;

        if (!facts->complete || verdict->usual_steps <= 0 || steps <= STALE_FACTOR * verdict->usual_steps ||
            catalogue_now() - since < (double)catalogue->takeover_s)
                return false;
        set(verdict, VERDICT_AT_RISK, VERDICT_STALE, since, "look at the program's log: why does it save no more? `nebula studio` can ask a Manager to save now");
        say(verdict, "no checkpoint is complete since %s: that is %" PRId64 " steps, and never were more than %" PRId64 " between two", facts->complete->tag,
            steps, verdict->usual_steps);
        return true;
}

typedef bool judge_fn(const struct catalogue *catalogue, const struct job *job, const struct facts *facts, struct job_verdict *verdict);

static judge_fn *const judges[] = { hangs, failed, late, damaged, storage_fails, memory_is_full, lags, saves_no_more, lacks_copies, has_rival };

/* The first trouble of the worst state. */
static struct job_verdict judge(const struct catalogue *catalogue, const struct job *job, const struct facts *facts)
{
        struct job_verdict worst = *job->verdict;

        set(&worst, VERDICT_FINE, VERDICT_NONE, 0, "");
        worst.reason[0] = 0;
        for (size_t i = 0; i < sizeof judges / sizeof *judges; i++) {
                struct job_verdict one = *job->verdict;

                one.reason[0] = 0;
                if (judges[i](catalogue, job, facts, &one) && one.state > worst.state)
                        worst = one;
        }
        return worst;
}

static void keep_time(const struct job_verdict *before, struct job_verdict *verdict)
{
        if (verdict->kind == before->kind && verdict->kind != VERDICT_NONE)
                verdict->since = before->since;
        else if (!(verdict->since > 0) && verdict->state)
                verdict->since = catalogue_now();
}

/* What the log says of one trouble grows rarer while it lasts. */
static void say_in_log(struct job *job, const struct job_verdict *before, struct job_verdict *verdict)
{
        const char *where = job->persist_path[0] ? job->persist_path : "memory only";
        bool is_new = verdict->kind != before->kind || verdict->state > before->state;
        int64_t now = os->now_ns();

        if (!verdict->state && before->state)
                log_event(LOG_LEVEL_INFO, "job \"%s\" in %s is fine again after %.0f s; it was %s: %s", job->name, where,
                          catalogue_now() - before->since, state_names[before->state], before->reason);
        if (!verdict->state || (!is_new && now < verdict->say_at_ns))
                return;
        verdict->pause_ns = is_new ? SAY_FIRST_NS : verdict->pause_ns < SAY_MOST_NS / 2 ? 2 * verdict->pause_ns : SAY_MOST_NS;
        verdict->say_at_ns = now + verdict->pause_ns;
        job->scan_due |= verdict->kind == VERDICT_DAMAGE && !is_new; /* it may have been removed */
        log_event(LOG_LEVEL_WARN, "job \"%s\" in %s is %s: %s; what to do: %s", job->name, where, state_names[verdict->state], verdict->reason,
                  verdict->cure);
}

/* Returns whether time alone can change the verdict. */
static bool update(struct catalogue *catalogue, struct job *job)
{
        struct job_verdict before = *job->verdict;
        struct facts facts;

        event_look_for_late(catalogue, job);
        facts = gather(job);
        note_full(catalogue, &facts, job->verdict);
        note_steps(job, &facts, job->verdict);
        *job->verdict = judge(catalogue, job, &facts);
        keep_time(&before, job->verdict);
        say_in_log(job, &before, job->verdict);
        return job->verdict->state || facts.unwritten || facts.has_open || job->verdict->usual_steps || (facts.complete && job->settings.replica_count);
}

void verdict_update(struct catalogue *catalogue, struct job *job)
{
        update(catalogue, job);
}

json_t *verdict_json(const struct job *job)
{
        const struct job_verdict *verdict = job->verdict;
        json_t *body = json_pack("{s:s}", "state", state_names[verdict->state]);

        if (body && verdict->state)
                json_object_update_new(body, json_pack("{s:f, s:s, s:s}", "since", verdict->since, "reason", verdict->reason, "cure", verdict->cure));
        return body;
}

int64_t verdict_look(struct catalogue *catalogue, int64_t now_ns)
{
        bool changes = false;

        if (now_ns < catalogue->verdict_at_ns)
                return catalogue->verdict_at_ns;
        for (struct job *job = catalogue->jobs; job; job = job->next)
                changes |= update(catalogue, job);
        catalogue->verdict_at_ns = now_ns + LOOK_NS;
        return changes ? now_ns + TICK_NS : INT64_MAX;
}
