#include "agent/pulse/pulse.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "agent/peers/member.h"
#include "agent/persist/storage.h"
#include "agent/pulse/hang_news.h"
#include "agent/pulse/slots_private.h"
#include "agent/pulse/stacks.h"
#include "os/os.h"
#include "os/thread.h"

#define EVERY_MOST_NS SECOND_NS
#define PARTS_OF_LIMIT 10 /* the agent looks so many times in the least limit */
#define SIGNAL_KILL 9
#define TRAINERS_MAX 64   /* of a node: more would only make the file longer */
#define FILES_KEPT 8
#define OTHERS_MS 10000 /* for the nodes of a job that hangs to notify each other */
#define OTHERS_S 60     /* their agents notice a hang within this time and its limit */

int pulse_open(const struct ipc_hello *hello, uint32_t seen_pid)
{
        char path[64];

        if (hello->role != IPC_ROLE_TRAINER || hello->pulse_fd < 0 || !seen_pid)
                return -1;
        snprintf(path, sizeof path, "/proc/%" PRIu32 "/fd/%" PRId32, seen_pid, hello->pulse_fd);
        return os->open(path, OS_READ);
}

static void drop(struct pulse **link)
{
        struct pulse *pulse = *link;

        *link = pulse->next;
        os->close(pulse->fd);
        free(pulse);
}

static bool is_same_file(int a, int b)
{
        struct os_stat one, other;

        return !os->fstat(a, &one) && !os->fstat(b, &other) && one.device == other.device && one.inode == other.inode;
}

void pulse_take(struct catalogue *catalogue, struct session *session, int fd)
{
        struct pulse *pulse;

        if (fd < 0)
                return;
        for (struct job *job = catalogue->jobs; job; job = job->next)
                for (struct pulse **link = &job->pulse->first; *link;) {
                        if ((*link)->nonce != session->nonce) {
                                link = &(*link)->next;
                        } else if (job == session->job && is_same_file((*link)->fd, fd)) {
                                os->close(fd); /* another connection of the session */
                                return;
                        } else {
                                drop(link);
                        }
                }
        pulse = calloc(1, sizeof *pulse);
        if (!pulse) {
                os->close(fd);
                return;
        }
        pulse->nonce = session->nonce;
        pulse->fd = fd;
        pulse->next = session->job->pulse->first;
        session->job->pulse->first = pulse;
        session->job->pulse->look_at_ns = 0;
        catalogue_signal_job_work(catalogue, session->job);
}

static int64_t least_ns(const struct catalogue *catalogue)
{
        return (int64_t)catalogue->hang_s * SECOND_NS;
}

static int64_t every_ns(const struct catalogue *catalogue)
{
        int64_t part = least_ns(catalogue) / PARTS_OF_LIMIT;

        return part < EVERY_MOST_NS ? part : EVERY_MOST_NS;
}

/* Reads the page, also of a trainer that has ended. */
static bool read_page(struct job_pulse *mine, const struct pulse *pulse, struct ipc_pulse *ret_seen)
{
        if (os_read_at(pulse->fd, ret_seen, sizeof *ret_seen, 0))
                return false;
        if (ret_seen->at_ns > mine->stepped_ns)
                mine->stepped_ns = ret_seen->at_ns;
        return true;
}

/* The trainer may write at this moment: then the next look sees it. */
static void sample(struct job_pulse *mine, struct pulse *pulse, int64_t now, int64_t every)
{
        struct ipc_pulse seen;

        if (!read_page(mine, pulse, &seen) || seen.phase_changes % 2) {
                pulse->pace.looked_ns = now;
                return;
        }
        seen.phase[sizeof seen.phase - 1] = 0;
        pulse->last = seen;
        pace_see(&pulse->pace, seen.beats, seen.phase, now, every);
}

struct report {
        struct catalogue *catalogue;
        struct job *job;
        size_t count;
        struct stacks_of processes[TRAINERS_MAX];
        char path[IPC_PATH_MAX];
        uint32_t world;
        char run[IPC_NAME_MAX];
        char last[IPC_TEXT_MAX]; /* the rank of the whole job that lags behind; "": not known, or all ranks are here */
};

static int by_beats(const void *a, const void *b)
{
        const struct stacks_of *one = a, *other = b;

        return (one->beats > other->beats) - (one->beats < other->beats);
}

static struct stacks_of describe(const struct catalogue *catalogue, const struct pulse *pulse, const struct session *session, int64_t now)
{
        struct stacks_of process = {
                .pid = session->seen_pid, .rank = session->rank, .signal = pulse->last.stack_signal, .fd = pulse->last.stack_fd,
                .is_ended = pulse->last.ends_hung, .beats = pulse->last.beats, .step = pulse->last.step,
                .silent_s = (double)(now - pulse->pace.since_ns) / 1e9,
                .limit_s = (double)pace_limit_ns(&pulse->pace, least_ns(catalogue)) / 1e9,
        };

        snprintf(process.phase, sizeof process.phase, "%s", pulse->last.phase);
        return process;
}

/* Tells the other nodes which rank of this one lags behind. On the node of rank 0, also finds the one of the whole job. */
static void ask_others(struct report *report)
{
        const struct stacks_of *first = &report->processes[0];
        struct hang_news own = { .rank = first->rank, .ranks = (uint32_t)report->count, .beats = first->beats, .step = first->step, .silent_s = first->silent_s }, last;
        struct nebula_error error;
        struct store *store;
        bool has_rank_0 = false;
        uint32_t ranks;
        enum nebula_status status;

        if (report->world <= report->count || !report->job->persist_path[0])
                return;
        snprintf(own.run, sizeof own.run, "%s", report->run);
        snprintf(own.phase, sizeof own.phase, "%s", first->phase);
        snprintf(own.file, sizeof own.file, "%.*s", HANG_FILE_MAX - 1, report->path);
        for (size_t i = 0; i < report->count; i++)
                has_rank_0 = has_rank_0 || !report->processes[i].rank;
        status = member_own_name(own.node, &error);
        if (!status)
                status = storage_open(report->catalogue, report->job, &store, &error);
        if (!status)
                status = hang_news_tell(store, &own, &error);
        if (!status && has_rank_0)
                status = hang_news_last(store, &own, report->world, (int64_t)((first->limit_s + OTHERS_S) * 1e9), OTHERS_MS, &last, &ranks, &error);
        if (status)
                log_event(LOG_LEVEL_WARN, "the nodes of a job that hangs could not notify each other where: %s", error.message);
        else if (has_rank_0)
                snprintf(report->last, sizeof report->last,
                         "rank %" PRIu32 " on node \"%.60s\" lags behind, of %" PRIu32 " of %" PRIu32 " ranks: it has taken %.0f s for %s%.40s after step %" PRIu64
                         "; its stacks are in %.200s there",
                         last.rank, last.node, ranks, report->world, last.silent_s, last.phase[0] ? "the phase " : "a step", last.phase, last.step, last.file);
}

static void write_file(const struct report *report)
{
        int64_t native_ms = STACKS_NATIVE_MS;
        char *text = NULL;
        size_t size = 0;
        FILE *file = open_memstream(&text, &size);

        if (!file)
                return;
        if (report->last[0])
                fprintf(file, "%s\n\n", report->last);
        for (size_t i = 0; i < report->count; i++)
                stacks_write(&report->processes[i], &native_ms, file);
        if (!fclose(file) && os_write_file_atomic(report->path, text, size))
                log_event(LOG_LEVEL_WARN, "%s could not be written", report->path);
        free(text);
}

static void *report_main(void *argument)
{
        struct report *report = argument;
        struct catalogue *catalogue = report->catalogue;

        ask_others(report);
        write_file(report);
        for (size_t i = 0; i < report->count; i++)
                if (report->processes[i].is_ended) {
                        log_event(LOG_LEVEL_WARN, "rank %u (process %u) hangs and is killed, because NEBULA_ON_HANG=restart is set",
                                  report->processes[i].rank, report->processes[i].pid);
                        os->signal(report->processes[i].pid, SIGNAL_KILL);
                }
        catalogue_lock(catalogue);
        if (report->last[0]) {
                snprintf(report->job->pulse->hang.text, sizeof report->job->pulse->hang.text, "%s", report->last);
                catalogue_signal_event(catalogue, report->job);
        }
        report->job->pulse->is_writing = false;
        report->job->pins--;
        catalogue->lane_count--;
        catalogue_signal(catalogue);
        catalogue_unlock_last(catalogue);
        free(report);
        return NULL;
}

/* The lock is held. The thread has the job pinned, and the catalogue waits for it as for a worker. */
static void begin_report(struct catalogue *catalogue, struct job *job, int64_t now)
{
        struct report *report = calloc(1, sizeof *report);
        struct pulse_hang *hang = &job->pulse->hang;
        const struct stacks_of *first;
        const struct session *session;
        pthread_t thread;

        if (!report)
                return;
        report->catalogue = catalogue;
        report->job = job;
        for (struct pulse *pulse = job->pulse->first; pulse && report->count < TRAINERS_MAX; pulse = pulse->next)
                if (pulse->last.beats)
                        report->processes[report->count++] = describe(catalogue, pulse, catalogue_session(catalogue, pulse->nonce), now);
        qsort(report->processes, report->count, sizeof report->processes[0], by_beats);
        first = &report->processes[0];
        session = catalogue_session(catalogue, job->pulse->first->nonce);
        report->world = session->world;
        snprintf(report->run, sizeof report->run, "%s", session->run);
        snprintf(report->path, sizeof report->path, "%s/hang-%" PRIu64 ".txt", catalogue->runtime_dir, catalogue->hang_count++ % FILES_KEPT);
        hang->since = catalogue_now();
        hang->count++;
        snprintf(hang->text, sizeof hang->text,
                 "rank %" PRIu32 " has taken %.0f s for %s%.40s after step %" PRIu64 ", and its limit is %.0f s; the stacks of %zu rank%s of this node: %.250s",
                 first->rank, first->silent_s, first->phase[0] ? "the phase " : "a step", first->phase, first->step, first->limit_s,
                 report->count, report->count > 1 ? "s" : "", report->path);
        job->pins++;
        catalogue->lane_count++;
        job->pulse->is_writing = true;
        if (!os_thread_start(&thread, report_main, report, false)) {
                pthread_detach(thread);
        } else {
                job->pulse->is_writing = false;
                job->pins--;
                catalogue->lane_count--;
                free(report);
        }
        catalogue_signal_event(catalogue, job);
}

static void look_at(struct catalogue *catalogue, struct job *job, int64_t now)
{
        struct job_pulse *mine = job->pulse;
        bool any = false, all = true;

        for (struct pulse **link = &mine->first; *link;) {
                struct session *session = catalogue_session(catalogue, (*link)->nonce);

                sample(mine, *link, now, every_ns(catalogue));
                if (!session || session->job != job || !session->connection_count) {
                        drop(link);
                        continue;
                }
                if ((*link)->pace.beats) {
                        any = true;
                        all = all && pace_hangs(&(*link)->pace, now, least_ns(catalogue));
                }
                link = &(*link)->next;
        }
        if (any && all && !(mine->hang.since > 0) && !mine->is_writing)
                begin_report(catalogue, job, now);
        else if (!(any && all) && mine->hang.since > 0 && !mine->is_writing)
                mine->hang.since = 0;
}

int64_t pulse_look(struct catalogue *catalogue, int64_t now_ns)
{
        int64_t due = INT64_MAX;

        for (struct job *job = catalogue->hang_s ? catalogue->jobs : NULL; job; job = job->next) {
                if (!job->pulse->first)
                        continue;
                if (now_ns >= job->pulse->look_at_ns) {
                        look_at(catalogue, job, now_ns);
                        job->pulse->look_at_ns = now_ns + every_ns(catalogue);
                }
                due = due < job->pulse->look_at_ns ? due : job->pulse->look_at_ns;
        }
        return due;
}

const struct pulse_hang *pulse_hang(const struct job *job)
{
        return &job->pulse->hang;
}

static const struct pulse *last_of(const struct job *job)
{
        const struct pulse *last = NULL;

        for (const struct pulse *pulse = job->pulse->first; pulse; pulse = pulse->next)
                if (pulse->pace.beats && (!last || pulse->last.beats < last->last.beats))
                        last = pulse;
        return last;
}

int64_t pulse_step(const struct job *job)
{
        const struct pulse *last = last_of(job);

        return last ? (int64_t)last->last.step : -1;
}

json_t *pulse_json(const struct catalogue *catalogue, const struct job *job)
{
        const struct pulse *last = last_of(job);

        return !last ? NULL :
                       json_pack("{s:I, s:s, s:f, s:f, s:I}", "step", (json_int_t)last->last.step, "phase", last->last.phase, "seconds",
                                 (double)(os->now_ns() - last->pace.since_ns) / 1e9, "limit",
                                 (double)pace_limit_ns(&last->pace, least_ns(catalogue)) / 1e9, "hangs", (json_int_t)job->pulse->hang.count);
}

int64_t pulse_end_run(struct job *job)
{
        struct ipc_pulse seen;
        int64_t stepped_ns;

        for (struct pulse *pulse = job->pulse->first; pulse; pulse = pulse->next)
                read_page(job->pulse, pulse, &seen);
        stepped_ns = job->pulse->stepped_ns;
        job->pulse->stepped_ns = 0;
        return stepped_ns;
}

void pulse_forget(struct job *job)
{
        while (job->pulse->first)
                drop(&job->pulse->first);
}
