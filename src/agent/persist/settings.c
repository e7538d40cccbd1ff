/* Writes the settings that the trainers of a job gave to init() beside its versions, for a person on another machine, or later. They are a hint. */
#include <stdio.h>
#include <stdlib.h>

#include "agent/catalogue/catalogue.h"
#include "agent/log.h"
#include "agent/persist/persist_private.h"
#include "agent/persist/settings.h"
#include "agent/persist/slots_private.h"
#include "base/error.h"
#include "store/document.h"
#include "sum/sum.h"

static json_t *rules_json(const struct job_settings *settings)
{
        json_t *rules = json_array();

        for (uint32_t i = 0; i < settings->rule_count; i++) {
                const struct keep_rule *rule = &settings->rules[i];

                json_array_append_new(rules, json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:b}", "keep_last", (json_int_t)rule->last, "keep_every", (json_int_t)rule->every,
                                                       "keep_hourly", (json_int_t)rule->hourly, "keep_daily", (json_int_t)rule->daily, "keep_weekly", (json_int_t)rule->weekly,
                                                       "keep_within", (json_int_t)rule->within_s, "keep_best", (json_int_t)rule->best, "metric", rule->metric, "largest",
                                                       rule->best_is_largest));
        }
        return rules;
}

json_t *settings_json(const struct job_settings *settings)
{
        static const char *const on_full[] = { "wait", "stream", "skip" };

        return json_pack("{s:f, s:I, s:s, s:I, s:I, s:s, s:o}", "persistent_time_interval", settings->persist_interval_s, "num_of_version_in_retention",
                         (json_int_t)settings->retention_count, "on_full", settings->on_full < 3 ? on_full[settings->on_full] : "", "replicas",
                         (json_int_t)settings->replica_count, "world", (json_int_t)settings->world, "keep_items", settings->items, "rules", rules_json(settings));
}

static enum nebula_status put(struct store *store, struct job *job, const struct job_settings *settings, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX], name[256] = "", *text;
        json_t *body;
        size_t size;
        uint64_t sum;
        enum nebula_status status = *job->name ? name_encode(job->name, name, error) : NEBULA_OK;

        if (status)
                return status;
        body = document_new("settings");
        if (!body || json_object_set_new(body, "job", json_string(job->name)) || json_object_set_new(body, "settings", settings_json(settings)))
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the settings of a job");
        if (!status)
                status = document_format(body, &text, &size, error);
        json_decref(body);
        if (status)
                return status;
        sum = sum_crc64(0, text, size);
        snprintf(key, sizeof key, SETTINGS_PREFIX "%s.json", name);
        if (sum != job->persist->settings_sum)
                status = store->ops->put(store, key, text, size, STORE_ALWAYS, NULL, NULL, error);
        if (!status)
                job->persist->settings_sum = sum;
        free(text);
        return status;
}

void settings_write(struct catalogue *catalogue, struct job *job, struct store *store)
{
        struct job_settings settings;
        struct nebula_error error = { 0 };

        catalogue_lock(catalogue);
        settings = job->settings;
        catalogue_unlock(catalogue);
        if (put(store, job, &settings, &error) && !job->persist->settings_failed) {
                job->persist->settings_failed = true;
                log_event(LOG_LEVEL_WARN, "the settings of the job could not be written to %s: %s", job->persist_path, error.message);
        }
}
