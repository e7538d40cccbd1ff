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
#include "store/metrics.h"
#include "store/order.h"

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

        used += (size_t)snprintf(rules->text + used, size - used, "%skeep_last=%u", used ? "; " : "", rule->last);
        if (used < size && rule->every)
                used += (size_t)snprintf(rules->text + used, size - used, ", keep_every=%" PRIu64, rule->every);
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

                rules.list[i] = (struct order_rule){ .last = rule->last, .every = rule->every, .best = rule->best, .best_is_largest = rule->best_is_largest };
                add_text(&rules, rule);
        }
        return rules;
}

static void rules_done(struct rules *rules)
{
        for (uint32_t i = 0; i < rules->count; i++)
                free(rules->metrics[i]);
}

/* The metrics of a version, from the file that it has in storage. Each is read once. NULL: storage fails, or there is no memory. */
static const json_t *metrics_of(struct job *job, struct store *store, const struct manifest *manifest)
{
        json_t *known = json_object_get(job->storage->metrics, manifest->tag), *metrics;

        if (known && (uint64_t)json_integer_value(json_array_get(known, 0)) == manifest->sequence)
                return json_array_get(known, 1);
        if (metrics_load(store, manifest, &metrics, NULL))
                return NULL;
        known = json_pack("[I, o]", (json_int_t)manifest->sequence, metrics);
        if (!job->storage->metrics)
                job->storage->metrics = json_object();
        return json_object_set_new(job->storage->metrics, manifest->tag, known) ? NULL : metrics;
}

static void report_missing(struct job *job, const struct keep_rule *rule)
{
        if (!job->storage->metric_reported)
                log_event(LOG_LEVEL_WARN, "no version in %s has a value of the metric \"%s\" of keep_best, so all stay until one has", job->persist_path,
                          rule->metric);
        job->storage->metric_reported = true;
}

/* Finds the values for a rule with a metric. False: they are not known, so nothing may be removed now. */
static bool find_metrics(struct job *job, struct store *store, struct rules *rules, uint32_t index)
{
        const struct known_versions *known = &job->known;
        double *values = calloc(known->count + 1, sizeof *values);
        bool has_any = false;

        rules->metrics[index] = values;
        rules->list[index].metrics = values;
        for (size_t i = 0; values && i < known->count; i++) {
                bool is_own = !strcmp(known->list[i]->job, job->name);
                const json_t *metrics = is_own ? metrics_of(job, store, known->list[i]) : NULL;

                if (is_own && !metrics)
                        return false;
                values[i] = metrics_value(metrics, rules->of_job[index].metric);
                has_any = has_any || !isnan(values[i]);
        }
        if (values && !has_any)
                report_missing(job, &rules->of_job[index]);
        return values;
}

static void list_dropped(const struct known_versions *known, const bool *stay, const char *newest_run, struct dropped *ret_dropped)
{
        size_t count = 0;

        for (size_t i = 0; i < known->count; i++)
                count += !stay[i];
        ret_dropped->tags = count ? calloc(count, sizeof *ret_dropped->tags) : NULL;
        for (size_t i = 0; ret_dropped->tags && i < known->count; i++) {
                if (stay[i])
                        continue;
                strcpy(ret_dropped->tags[ret_dropped->count++], known->list[i]->tag);
                ret_dropped->has_other_runs |= strcmp(known->list[i]->run, newest_run) != 0;
        }
}

void retain_decide(struct catalogue *catalogue, struct job *job, struct store *store, struct dropped *ret_dropped)
{
        const struct known_versions *known = &job->known;
        struct rules rules = copy_rules(catalogue, job);
        char newest_run[IPC_NAME_MAX];
        size_t rival_count;
        struct rival *rivals = copy_rivals(catalogue, job, &rival_count, newest_run);
        struct order_entry *entries = calloc(known->count + 1, sizeof *entries);
        bool *stay = calloc(known->count + 1, sizeof *stay), is_known = rivals && entries && stay;

        *ret_dropped = (struct dropped){ 0 };
        for (uint32_t i = 0; i < rules.count && is_known; i++)
                is_known = !rules.list[i].best || find_metrics(job, store, &rules, i);
        for (size_t i = 0; i < known->count && is_known; i++) {
                const struct manifest *manifest = known->list[i];

                entries[i] = order_entry(manifest->tag, manifest->sequence, &manifest->line);
                entries[i].counts = !strcmp(manifest->job, job->name) && !is_of_rival(rivals, rival_count, manifest->run);
        }
        if (is_known && order_mark(entries, known->count) && order_stay(entries, known->count, rules.list, rules.count, stay))
                list_dropped(known, stay, newest_run, ret_dropped);
        memcpy(ret_dropped->rules, rules.text, sizeof rules.text);
        rules_done(&rules);
        free(rivals);
        free(entries);
        free(stay);
}
