#include "cli/metrics.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "cli/cli_agent.h"
#include "cli/history.h"
#include "cli/ledger.h"
#include "cli/verdict.h"
#include "cli/verified.h"
#include "os/lock.h"
#include "os/os.h"
#include "os/thread.h"

#define STORED_WAIT_MS 5000 /* Prometheus waits 10 s for an answer */
#define AHEAD_S 60 /* by which the clocks of two nodes may differ */

static void add(struct buf *buf, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(struct buf *buf, const char *format, ...)
{
        char text[512];
        va_list arguments;

        va_start(arguments, format);
        vsnprintf(text, sizeof text, format, arguments);
        va_end(arguments);
        buf_add_text(buf, text);
}

static void add_head(struct buf *buf, const char *name, const char *type, const char *help)
{
        add(buf, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* Writes 17 digits; for a value that is not finite, the format's own words. */
static void add_value(struct buf *buf, const char *name, const char *labels, double value)
{
        buf_add_text(buf, name);
        buf_add_text(buf, labels);
        if (isfinite(value))
                add(buf, " %.17g\n", value);
        else
                add(buf, " %s\n", isnan(value) ? "NaN" : value > 0 ? "+Inf" : "-Inf");
}

static void add_one(struct buf *buf, const char *name, const char *type, const char *help, double value)
{
        add_head(buf, name, type, help);
        add_value(buf, name, "", value);
}

static const double blocked_bounds[] = { 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, INFINITY };
static const double persist_bounds[] = { 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, INFINITY };

/* is_persist: the time of writing to storage, for versions that were written; else the time that a save blocked, for all versions. */
static void add_histogram(struct buf *buf, const char *name, const char *labels, const struct history *history, bool is_persist)
{
        const double *bounds = is_persist ? persist_bounds : blocked_bounds;
        size_t bound_count = is_persist ? sizeof persist_bounds / sizeof *bounds : sizeof blocked_bounds / sizeof *bounds;
        uint64_t counts[16] = { 0 }, count = 0;
        char text[64];
        double sum = 0;

        for (size_t i = 0; i < history->count; i++) {
                double value = is_persist ? history->rows[i].persist_s : history->rows[i].blocked_s;

                if (is_persist && history->rows[i].durable <= 0)
                        continue;
                count++;
                sum += value;
                for (size_t b = 0; b < bound_count; b++)
                        counts[b] += value <= bounds[b];
        }
        for (size_t b = 0; b < bound_count; b++) {
                snprintf(text, sizeof text, isfinite(bounds[b]) ? "%g" : "+Inf", bounds[b]);
                add(buf, "%s_bucket{%s%sle=\"%s\"} %" PRIu64 "\n", name, labels, *labels ? "," : "", text, counts[b]);
        }
        snprintf(text, sizeof text, *labels ? "{%s}" : "%s", labels);
        add(buf, "%s_sum%s %.17g\n%s_count%s %" PRIu64 "\n", name, text, sum, name, text, count);
}

enum tier { MEMORY, STORAGE, TIERS };
static const char *const tier_labels[TIERS] = { "{tier=\"memory\"}", "{tier=\"storage\"}" };

static double reached(const struct history_row *row, enum tier tier)
{
        return tier == MEMORY ? row->committed : row->durable;
}

static void add_tiers(struct buf *buf, const char *name, const double values[TIERS])
{
        for (int tier = 0; tier < TIERS; tier++)
                if (!isnan(values[tier]))
                        add_value(buf, name, tier_labels[tier], values[tier]);
}

static void add_results(struct buf *buf, const struct history *history)
{
        static const char *const name = "nebula_checkpoints_total";
        uint64_t good[TIERS] = { 0 }, bad[TIERS] = { 0 };

        for (size_t i = 0; i < history->count; i++) {
                const struct history_row *row = &history->rows[i];
                bool has_failed = !strcmp(row->result, "failed");

                good[MEMORY] += row->committed > 0;
                bad[MEMORY] += has_failed && row->committed <= 0;
                good[STORAGE] += row->durable > 0;
                bad[STORAGE] += has_failed && row->committed > 0 && row->durable <= 0;
        }
        add_head(buf, name, "counter", "Versions that reached a tier, or failed on the way to it.");
        for (int tier = 0; tier < TIERS; tier++) {
                add(buf, "%s{tier=\"%s\",result=\"success\"} %" PRIu64 "\n", name, tier == MEMORY ? "memory" : "storage", good[tier]);
                add(buf, "%s{tier=\"%s\",result=\"failure\"} %" PRIu64 "\n", name, tier == MEMORY ? "memory" : "storage", bad[tier]);
        }
}

static void add_newest(struct buf *buf, const struct history *history)
{
        double times[TIERS] = { NAN, NAN }, steps[TIERS] = { NAN, NAN }, bytes[TIERS] = { 0 };
        const struct history_row *newest = NULL;
        double now = (double)os->wall_ns() / 1e9;

        for (size_t i = 0; i < history->count; i++) {
                const struct history_row *row = &history->rows[i];

                newest = row->committed > 0 && row->committed <= now + AHEAD_S ? row : newest;
                for (int tier = 0; tier < TIERS; tier++) {
                        double at = reached(row, (enum tier)tier);

                        if (at <= 0)
                                continue;
                        bytes[tier] += (double)row->size;
                        if (at > now + AHEAD_S)
                                continue; /* the clock has been set back since: a version after it is the last one */
                        if (isnan(times[tier]) || at >= times[tier]) {
                                times[tier] = at;
                                steps[tier] = row->step >= 0 ? (double)row->step : steps[tier];
                        }
                }
        }
        add_head(buf, "nebula_checkpoint_bytes_written_total", "counter", "Bytes of the versions that reached a tier.");
        add_tiers(buf, "nebula_checkpoint_bytes_written_total", bytes);
        add_head(buf, "nebula_checkpoint_last_success_timestamp_seconds", "gauge", "When the last version reached a tier, seconds since 1970.");
        add_tiers(buf, "nebula_checkpoint_last_success_timestamp_seconds", times);
        add_head(buf, "nebula_checkpoint_last_step", "gauge", "The step of the last version that reached a tier.");
        add_tiers(buf, "nebula_checkpoint_last_step", steps);
        if (newest)
                add_one(buf, "nebula_checkpoint_size_bytes", "gauge", "Bytes of the last version.", (double)newest->size);
}

static void add_ledger(struct buf *buf, const struct history *history)
{
        struct ledger ledger;

        if (ledger_make(history, &ledger, NULL))
                return;
        add_head(buf, "nebula_restores_total", "counter", "Restarts of the job that went on from a version, by the tier that it was read from.");
        for (int tier = HISTORY_TIER_UNKNOWN; tier < HISTORY_TIERS; tier++)
                if (tier != HISTORY_TIER_UNKNOWN || ledger.restored[tier])
                        add(buf, "nebula_restores_total{tier=\"%s\"} %zu\n", history_tier_names[tier], ledger.restored[tier]);
        if (ledger_total(&ledger) <= 0)
                return;
        add_one(buf, "nebula_goodput_ratio", "gauge", "Share of the time between the first and the last save that was training that stayed.",
                ledger_goodput(&ledger));
        add_head(buf, "nebula_badput_seconds_total", "counter", "The rest of that time.");
        for (int kind = LEDGER_BLOCKED; kind < LEDGER_PAUSED; kind++)
                add(buf, "nebula_badput_seconds_total{kind=\"%s\"} %.17g\n", ledger_names[kind], ledger.seconds[kind]);
}

static void add_history(struct buf *buf, const char *path, const char *given)
{
        struct history history;

        if (history_load(given, path, &history, NULL))
                return;
        add_head(buf, "nebula_checkpoint_blocked_seconds", "histogram", "How long a save stopped training.");
        add_histogram(buf, "nebula_checkpoint_blocked_seconds", "", &history, false);
        add_head(buf, "nebula_checkpoint_persist_seconds", "histogram", "How long the writing of a version took.");
        add_histogram(buf, "nebula_checkpoint_persist_seconds", "tier=\"storage\"", &history, true);
        add_results(buf, &history);
        add_newest(buf, &history);
        add_ledger(buf, &history);
        history_done(&history);
}

#define LABEL_MAX 1024

/* The value of a label. Prometheus reads UTF-8, so what is not printable becomes '?'. A very long text loses its beginning. */
static const char *escape(const char *text, char escaped[LABEL_MAX])
{
        size_t length = strlen(text), used = 0;

        text += length > LABEL_MAX / 2 - 1 ? length - (LABEL_MAX / 2 - 1) : 0;
        while (((unsigned char)*text & 0xC0) == 0x80) /* the rest of a character */
                text++;
        for (; *text; text++) {
                if (*text == '"' || *text == '\\')
                        escaped[used++] = '\\';
                escaped[used++] = (unsigned char)*text < ' ' || *text == 127 ? '?' : *text;
        }
        escaped[used] = 0;
        return escaped;
}

/* Adds the steps that the trainers of this node have made. */
static void add_steps(struct buf *buf, const json_t *jobs, const char *path, bool is_one)
{
        static const struct { const char *name, *type, *help, *key; } metrics[] = {
                { "nebula_step", "gauge", "The step of the rank of this node that lags behind.", "step" },
                { "nebula_seconds_since_step", "gauge", "Since that rank's last step.", "seconds" },
                { "nebula_step_limit_seconds", "gauge", "After this time without a step the job counts as hung.", "limit" },
                { "nebula_hangs_total", "counter", "How often the job has hung.", "hangs" },
        };
        char labels[2 * LABEL_MAX + 32], name[LABEL_MAX], where[LABEL_MAX];
        const json_t *one, *steps;
        size_t index;

        for (size_t i = 0; i < sizeof metrics / sizeof *metrics; i++) {
                bool has_head = false;

                json_array_foreach(jobs, index, one) {
                        steps = json_object_get(one, "steps");
                        if (!steps || (is_one && strcmp(text_of(one, "path"), path)))
                                continue;
                        if (!has_head)
                                add_head(buf, metrics[i].name, metrics[i].type, metrics[i].help);
                        has_head = true;
                        snprintf(labels, sizeof labels, "{job=\"%s\",path=\"%s\"}", escape(text_of(one, "job"), name),
                                 escape(text_of(one, "path"), where));
                        add_value(buf, metrics[i].name, labels, number_of(steps, metrics[i].key));
                }
        }
}

/* Adds the jobs of the path; "": all jobs. */
static void add_jobs(struct buf *buf, const json_t *status, const char *path)
{
        const char *spelled = text_of(status, "path"); /* the path as the jobs spell it; "": the agent is an older one */
        const char *const verdict = "nebula_job_verdict";
        const json_t *jobs = json_object_get(status, "jobs"), *sessions = json_object_get(status, "sessions"), *one;
        char labels[2 * LABEL_MAX + 32], name[LABEL_MAX], where[LABEL_MAX];
        static const char *const found_names[] = { "rotten", "stale", "not_finite", "left_memory" };
        double found[sizeof found_names / sizeof *found_names] = { 0 };
        double unsaved = 0, unsaved_bytes = 0, failures = 0, world = 0;
        size_t index;

        add_head(buf, verdict, "gauge", "The agent's verdict on a job: 0 fine, 1 at risk, 2 broken.");
        json_array_foreach(jobs, index, one) {
                if (*path && strcmp(text_of(one, "path"), *spelled ? spelled : path))
                        continue;
                unsaved += number_of(one, "unsaved_count");
                unsaved_bytes += number_of(one, "unsaved_bytes");
                failures += number_of(one, "storage_failure_count");
                for (size_t i = 0; i < sizeof found / sizeof *found; i++)
                        found[i] += number_of(json_object_get(one, "findings"), found_names[i]);
                if (verdict_number(json_object_get(one, "verdict")) < 0 || !(*text_of(one, "path") || number_of(one, "trainer_count") > 0))
                        continue;
                snprintf(labels, sizeof labels, "{job=\"%s\",path=\"%s\"}", escape(text_of(one, "job"), name), escape(text_of(one, "path"), where));
                add_value(buf, verdict, labels, verdict_number(json_object_get(one, "verdict")));
        }
        add_steps(buf, jobs, *spelled ? spelled : path, *path);
        json_array_foreach(sessions, index, one)
                if (!*path || !strcmp(text_of(one, "path"), *spelled ? spelled : path))
                        world = number_of(one, "world") > world ? number_of(one, "world") : world;
        add_one(buf, "nebula_checkpoint_in_progress", "gauge", "Versions that are not in storage yet.", unsaved);
        add_one(buf, "nebula_checkpoint_unsaved_bytes", "gauge", "Their bytes.", unsaved_bytes);
        add_one(buf, "nebula_storage_retries_total", "counter", "Writings to storage that failed and were or will be tried again.", failures);
        add_head(buf, "nebula_findings_total", "counter", "Versions whose bytes in memory have changed, with the values of the one before, and with a NaN or an infinite value.");
        for (size_t i = 0; i < sizeof found / sizeof *found; i++)
                add(buf, "nebula_findings_total{kind=\"%s\"} %.17g\n", found_names[i], found[i]);
        add_one(buf, "nebula_world_size", "gauge", "Ranks of the job that runs; 0: none does.", world);
}

static void add_requests(struct buf *buf, const json_t *stores)
{
        static const char *const name = "nebula_storage_requests_total";
        const json_t *store, *outcomes, *number;
        const char *operation, *outcome;
        size_t index;

        if (!json_array_size(stores))
                return;
        add_head(buf, name, "counter", "Requests to storage by this node's agent.");
        json_array_foreach(stores, index, store)
                json_object_foreach((json_t *)json_object_get(store, "requests"), operation, outcomes)
                        json_object_foreach((json_t *)outcomes, outcome, number)
                                add(buf, "%s{store=\"%s\",operation=\"%s\",outcome=\"%s\"} %.17g\n", name, text_of(store, "store"), operation,
                                    outcome, json_number_value(number));
        add_head(buf, "nebula_storage_request_retries_total", "counter", "HTTP requests to storage that were sent again.");
        json_array_foreach(stores, index, store)
                add(buf, "nebula_storage_request_retries_total{store=\"%s\"} %.17g\n", text_of(store, "store"), number_of(store, "retries"));
        add_head(buf, "nebula_storage_bytes_total", "counter", "Bytes that this node's agent read from storage and sent to it.");
        json_array_foreach(stores, index, store) {
                add(buf, "nebula_storage_bytes_total{store=\"%s\",direction=\"read\"} %.17g\n", text_of(store, "store"), number_of(store, "read_bytes"));
                add(buf, "nebula_storage_bytes_total{store=\"%s\",direction=\"written\"} %.17g\n", text_of(store, "store"),
                    number_of(store, "written_bytes"));
        }
}

static void add_agent(struct buf *buf, const char *path)
{
        struct cli_agent *agent = NULL;
        const json_t *about;
        json_t *status = NULL;
        bool is_up = cli_agent_open_if_any(path, &agent) && !cli_agent_report(agent, NEBULA_REPORT_STATUS, path, &status, NULL);

        add_one(buf, "nebula_agent_up", "gauge", "1 if this node's agent answers.", is_up);
        if (is_up) {
                about = json_object_get(status, "agent");
                add_head(buf, "nebula_buffer_bytes", "gauge", "The memory tier of this node.");
                add_value(buf, "nebula_buffer_bytes", "{state=\"used\"}", number_of(about, "memory_used"));
                add_value(buf, "nebula_buffer_bytes", "{state=\"limit\"}", number_of(about, "memory_budget"));
                add_jobs(buf, status, path);
                add_requests(buf, json_object_get(status, "storage"));
        }
        json_decref(status);
        cli_agent_close(agent);
}

/* Of a directory: in an object store, each scrape would cost a request. */
static void add_verified(struct buf *buf, const char *path)
{
        struct store *store;
        json_t *verified;
        size_t damaged;
        double latest;

        if (strstr(path, "://") || store_open(path, &store, NULL))
                return;
        verified = verified_load(store);
        verified_sum(verified, &damaged, &latest);
        if (json_object_size(verified)) {
                add_one(buf, "nebula_checkpoint_verified_timestamp_seconds", "gauge", "When a version was verified last, seconds since 1970.", latest);
                add_one(buf, "nebula_checkpoints_damaged", "gauge", "Versions whose last verification found damage.", (double)damaged);
        }
        json_decref(verified);
        store_close(store);
}

/* One thread at a time reads from storage: a storage that hangs holds that thread, and not those that answer. */
static struct {
        struct lock lock;
        pthread_cond_t ended;
        char *text; /* of the last reading that has ended; NULL: none has */
        size_t size;
        uint64_t count; /* readings that have ended */
        bool is_reading;
} stored = { .lock = LOCK_INIT(LOCK_METRICS) };
static pthread_once_t stored_once = PTHREAD_ONCE_INIT;

struct reading {
        char *path, *history; /* history NULL: that of the path */
};

static void reading_free(struct reading *reading)
{
        if (reading) {
                free(reading->path);
                free(reading->history);
        }
        free(reading);
}

static void *read_stored(void *argument)
{
        struct reading *reading = argument;
        struct buf buf = { 0 };
        size_t size = 0;
        char *text;

        if (*reading->path || reading->history)
                add_history(&buf, reading->path, reading->history);
        if (*reading->path)
                add_verified(&buf, reading->path);
        text = buf_take(&buf, &size);
        reading_free(reading);
        lock_take(&stored.lock);
        free(stored.text);
        stored.text = text;
        stored.size = text ? size : 0;
        stored.count++;
        stored.is_reading = false;
        pthread_cond_broadcast(&stored.ended);
        lock_give(&stored.lock);
        return NULL;
}

/* The caller holds the lock. */
static bool start_reading(const char *path, const char *history)
{
        struct reading *reading = calloc(1, sizeof *reading);

        if (reading) {
                reading->path = strdup(path);
                reading->history = history ? strdup(history) : NULL;
        }
        if (!reading || !reading->path || (history && !reading->history) || os_thread_start(NULL, read_stored, reading, false)) {
                reading_free(reading);
                return false;
        }
        return true;
}

static void begin_once(void)
{
        os_cond_init(&stored.ended);
}

/* If storage does not answer in time, the numbers are those of the last reading. */
static void add_stored(struct buf *buf, const char *path, const char *history)
{
        int64_t until_ns = os->now_ns() + STORED_WAIT_MS * INT64_C(1000000), left_ms;
        uint64_t before;

        pthread_once(&stored_once, begin_once);
        lock_take(&stored.lock);
        before = stored.count;
        stored.is_reading = stored.is_reading || start_reading(path, history);
        while (stored.is_reading && stored.count == before && (left_ms = (until_ns - os->now_ns()) / 1000000) > 0)
                lock_wait_for(&stored.lock, &stored.ended, left_ms);
        if (stored.size)
                buf_add(buf, stored.text, stored.size);
        lock_give(&stored.lock);
}

char *metrics_text(const char *path, const char *history, size_t *ret_size)
{
        struct buf buf = { 0 };

        add_agent(&buf, path);
        add_stored(&buf, path, history);
        return buf_take(&buf, ret_size);
}
