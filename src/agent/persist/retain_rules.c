/* Which versions in storage no rule of the job keeps. The worker of the list decides without the lock (known.h). */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/log.h"
#include "agent/persist/persist_private.h"
#include "agent/persist/slots_private.h"
#include "base/error.h"
#include "store/manifest_load.h"
#include "store/metrics.h"
#include "store/order.h"

static enum nebula_status no_memory(struct nebula_error *error)
{
        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to apply the rules");
}

/* The runs whose versions stay, because they go on elsewhere; the caller frees them. And the newest run. */
static struct rival *copy_rivals(struct catalogue *catalogue, const struct job *job, size_t *ret_count, char ret_newest[IPC_NAME_MAX])
{
        struct rival *rivals;

        catalogue_lock(catalogue);
        memcpy(ret_newest, ancestry_newest(job), IPC_NAME_MAX);
        rivals = ancestry_rivals(job, ret_count);
        catalogue_unlock(catalogue);
        return rivals;
}

static bool is_of_rival(const struct rival *rivals, size_t count, const char *run)
{
        for (size_t i = 0; i < count; i++)
                if (!strcmp(rivals[i].run, run))
                        return true;
        return false;
}

/* The rules, and for each one with a metric the values of all versions in the list. */
struct rules {
        struct keep_rule of_job[KEEP_RULES_MAX];
        struct order_rule list[KEEP_RULES_MAX];
        double *metrics[KEEP_RULES_MAX];
        uint32_t count;
        char text[512]; /* as the user gave them */
};

static void add_text(struct rules *rules, const struct keep_rule *rule)
{
        size_t size = sizeof rules->text, used = strlen(rules->text);

        const struct {
                const char *name;
                uint64_t value;
        } words[] = { { "every", rule->every }, { "hourly", rule->hourly }, { "daily", rule->daily }, { "weekly", rule->weekly }, { "within", rule->within_s } };

        used += (size_t)snprintf(rules->text + used, size - used, "%skeep_last=%u", used ? "; " : "", rule->last);
        for (size_t i = 0; i < sizeof words / sizeof *words; i++)
                if (used < size && words[i].value)
                        used += (size_t)snprintf(rules->text + used, size - used, ", keep_%s=%" PRIu64, words[i].name, words[i].value);
        if (used < size && rule->best)
                snprintf(rules->text + used, size - used, ", keep_best=Best('%s', '%s', %u)", rule->metric, rule->best_is_largest ? "max" : "min",
                         rule->best);
}

static struct rules copy_rules(struct catalogue *catalogue, const struct job *job)
{
        struct rules rules = { 0 };

        catalogue_lock(catalogue);
        rules.count = job->settings.rule_count;
        memcpy(rules.of_job, job->settings.rules, rules.count * sizeof rules.of_job[0]);
        catalogue_unlock(catalogue);
        for (uint32_t i = 0; i < rules.count; i++) {
                const struct keep_rule *rule = &rules.of_job[i];

                rules.list[i] = (struct order_rule){ .last = rule->last, .every = rule->every, .best = rule->best, .best_is_largest = rule->best_is_largest,
                                                    .hourly = rule->hourly, .daily = rule->daily, .weekly = rule->weekly, .within_s = rule->within_s };
                add_text(&rules, rule);
        }
        return rules;
}

static void rules_done(struct rules *rules)
{
        for (uint32_t i = 0; i < rules->count; i++)
                free(rules->metrics[i]);
}

/* The metrics of a version, from the file that it has in storage. Each is read once. */
static enum nebula_status metrics_of(struct job *job, struct store *store, const struct manifest *manifest, const json_t **ret_metrics,
                                     struct nebula_error *error)
{
        json_t *known = json_object_get(job->storage->metrics, manifest->tag), *metrics;
        struct manifest read = { 0 };
        enum nebula_status status;

        if (known && (uint64_t)json_integer_value(json_array_get(known, 0)) == manifest->sequence) {
                *ret_metrics = json_array_get(known, 1);
                return NEBULA_OK;
        }
        status = manifest_load(store, manifest->tag, &read, error);
        if (!status && read.sequence == manifest->sequence)
                status = metrics_load(store, &read, &metrics, error);
        else if (!status || status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT)
                status = (metrics = json_object()) ? NEBULA_OK : no_memory(error); /* another version by now, or none */
        manifest_done(&read);
        if (status)
                return status;
        *ret_metrics = metrics;
        known = json_pack("[I, o]", (json_int_t)manifest->sequence, metrics);
        if (!job->storage->metrics)
                job->storage->metrics = json_object();
        return json_object_set_new(job->storage->metrics, manifest->tag, known) ? no_memory(error) : NEBULA_OK;
}

static void report_missing(struct job *job, const struct keep_rule *rule)
{
        if (!job->storage->metric_reported)
                log_event(LOG_LEVEL_WARN, "no version in %s has a value of the metric \"%s\" of keep_best, so all stay until one has", job->persist_path,
                          rule->metric);
        job->storage->metric_reported = true;
}

/* Finds the values for a rule with a metric. If one is not known, nothing may be removed. */
static enum nebula_status find_metrics(struct job *job, struct store *store, struct rules *rules, uint32_t index, struct nebula_error *error)
{
        const struct known_versions *known = &job->known;
        double *values = calloc(known->count + 1, sizeof *values);
        bool has_any = false;
        enum nebula_status status = values ? NEBULA_OK : no_memory(error);

        rules->metrics[index] = values;
        rules->list[index].metrics = values;
        for (size_t i = 0; !status && i < known->count; i++) {
                const json_t *metrics = NULL;

                if (!strcmp(known->list[i]->job, job->name))
                        status = metrics_of(job, store, known->list[i], &metrics, error);
                values[i] = metrics_value(metrics, rules->of_job[index].metric);
                has_any = has_any || !isnan(values[i]);
        }
        if (!status && !has_any)
                report_missing(job, &rules->of_job[index]);
        return status;
}

static enum nebula_status list_dropped(const struct known_versions *known, const bool *stay, const char *newest_run, struct dropped *ret_dropped,
                                       struct nebula_error *error)
{
        size_t count = 0;

        for (size_t i = 0; i < known->count; i++)
                count += !stay[i];
        ret_dropped->tags = calloc(count + 1, sizeof *ret_dropped->tags);
        if (!ret_dropped->tags)
                return no_memory(error);
        for (size_t i = 0; i < known->count; i++) {
                if (stay[i])
                        continue;
                strcpy(ret_dropped->tags[ret_dropped->count++], known->list[i]->tag);
                ret_dropped->has_other_runs |= strcmp(known->list[i]->run, newest_run) != 0;
        }
        return NEBULA_OK;
}

/* Finds the versions that the rules do not keep. */
static enum nebula_status decide(struct catalogue *catalogue, struct job *job, const struct order_rule *rules, size_t rule_count,
                                 struct dropped *ret_dropped, struct nebula_error *error)
{
        const struct known_versions *known = &job->known;
        char newest_run[IPC_NAME_MAX];
        size_t rival_count;
        struct rival *rivals = copy_rivals(catalogue, job, &rival_count, newest_run);
        struct order_entry *entries = calloc(known->count + 1, sizeof *entries);
        bool *stay = calloc(known->count + 1, sizeof *stay);
        enum nebula_status status = rivals && entries && stay ? NEBULA_OK : no_memory(error);

        for (size_t i = 0; i < known->count && !status; i++) {
                const struct manifest *manifest = known->list[i];

                entries[i] = order_entry(manifest->tag, manifest->sequence, &manifest->line);
                catalogue_lock(catalogue);
                entries[i].counts = !strcmp(manifest->job, job->name) && !is_of_rival(rivals, rival_count, manifest->run) && !catalogue_doubts(catalogue, job->persist_path, manifest);
                catalogue_unlock(catalogue);
        }
        if (!status && !(order_mark(entries, known->count) && order_stay(entries, known->count, rules, rule_count, stay, NULL)))
                status = no_memory(error);
        if (!status)
                status = list_dropped(known, stay, newest_run, ret_dropped, error);
        free(rivals);
        free(entries);
        free(stay);
        return status;
}

enum nebula_status retain_decide(struct catalogue *catalogue, struct job *job, struct store *store, struct dropped *ret_dropped, struct nebula_error *error)
{
        struct rules rules = copy_rules(catalogue, job);
        enum nebula_status status = NEBULA_OK;

        *ret_dropped = (struct dropped){ 0 };
        for (uint32_t i = 0; i < rules.count && !status; i++)
                if (rules.list[i].best)
                        status = find_metrics(job, store, &rules, i, error);
        if (!status)
                status = decide(catalogue, job, rules.list, rules.count, ret_dropped, error);
        memcpy(ret_dropped->rules, rules.text, sizeof rules.text);
        rules_done(&rules);
        return status;
}

enum nebula_status retain_decide_items(struct catalogue *catalogue, struct job *job, uint32_t last, struct dropped *ret_dropped,
                                       struct nebula_error *error)
{
        const struct order_rule rule = { .last = last };

        *ret_dropped = (struct dropped){ 0 };
        return decide(catalogue, job, &rule, 1, ret_dropped, error);
}
