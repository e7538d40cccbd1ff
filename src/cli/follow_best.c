#include "cli/follow_best.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/metrics.h"

bool follow_best_parse(const char *text, struct follow_best *ret_best)
{
        const char *colon = strrchr(text, ':');
        size_t size = colon ? (size_t)(colon - text) : strlen(text);
        struct follow_best best = { .is_largest = colon && !strcmp(colon, ":max"), .known = json_object() };

        if (!size || size >= sizeof best.metric || (colon && strcmp(colon, ":max") && strcmp(colon, ":min")) || !best.known) {
                json_decref(best.known);
                return false;
        }
        memcpy(best.metric, text, size);
        *ret_best = best;
        return true;
}

void follow_best_done(struct follow_best *best)
{
        json_decref(best->known);
}

/* The metric of one checkpoint; NaN: it has none. */
static enum nebula_status read_value(const struct follow_best *best, nebula_session *session, const char *tag, double *ret_value, struct nebula_error *error)
{
        nebula_checkpoint *found = NULL;
        nebula_map *map = NULL;
        json_t *document = NULL;
        enum nebula_status status = nebula_checkpoint_find(session, tag, NULL, &found, error);

        if (!status)
                status = nebula_checkpoint_map(found, METRICS_FILE, &map, error);
        if (!status)
                document = json_loadb(nebula_map_data(map), nebula_map_size(map), JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, NULL);
        *ret_value = metrics_value(json_object_get(document, "metrics"), best->metric);
        json_decref(document);
        nebula_map_free(map);
        nebula_checkpoint_free(found);
        return status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT ? NEBULA_OK : status;
}

static bool is_candidate(const json_t *row)
{
        const char *state = json_string_value(json_object_get(row, "state"));

        return state && json_string_value(json_object_get(row, "tag")) && !json_is_true(json_object_get(row, "abandoned")) &&
               (!strcmp(state, "committed") || !strcmp(state, "replicated") || !strcmp(state, "durable"));
}

static bool is_better(const struct follow_best *best, double value)
{
        return !isnan(value) && (!best->has_limit || (best->is_largest ? value > best->limit : value < best->limit));
}

/* The value of a row, which is read once. */
static enum nebula_status value_of(const struct follow_best *best, nebula_session *session, const json_t *row, json_t *known, double *ret_value,
                                   struct nebula_error *error)
{
        const char *tag = json_string_value(json_object_get(row, "tag"));
        char key[400];
        json_t *value;
        enum nebula_status status = NEBULA_OK;

        snprintf(key, sizeof key, "%.256s/%.6f", tag, json_number_value(json_object_get(row, "committed_at")));
        value = json_object_get(best->known, key);
        *ret_value = json_is_real(value) ? json_real_value(value) : metrics_value(NULL, best->metric);
        if (!value)
                status = read_value(best, session, tag, ret_value, error);
        if (!status)
                json_object_set_new(known, key, isfinite(*ret_value) ? json_real(*ret_value) : json_null());
        return status;
}

/* *ret_tag is of `rows`; NULL: none is better. */
static enum nebula_status choose(struct follow_best *best, nebula_session *session, const json_t *rows, const char **ret_tag, struct nebula_error *error)
{
        json_t *known = json_object(), *row;
        enum nebula_status status = NEBULA_OK;
        size_t i;

        *ret_tag = NULL;
        json_array_foreach(rows, i, row) {
                double value;

                if (status || !is_candidate(row))
                        continue;
                status = value_of(best, session, row, known, &value, error);
                if (status || !is_better(best, value))
                        continue;
                *ret_tag = json_string_value(json_object_get(row, "tag"));
                best->limit = value;
                best->has_limit = true;
        }
        json_decref(best->known);
        best->known = known;
        return status;
}

enum nebula_status follow_best_find(struct follow_best *best, nebula_session *session, nebula_checkpoint **ret_found, struct nebula_error *error)
{
        struct follow_best before = *best;
        char *text = NULL;
        const char *tag = NULL, *unread;
        json_t *report;
        enum nebula_status status = nebula_session_report(session, NEBULA_REPORT_VERSIONS, NULL, &text, error);

        *ret_found = NULL;
        if (status)
                return status;
        report = json_loads(text, 0, NULL);
        nebula_text_free(text);
        unread = json_string_value(json_object_get(report, "unread"));
        if (unread && *unread) /* a list of memory alone would pass for the whole one */
                status = error_set(error, NEBULA_STORAGE, 0, "%s", unread);
        if (!status)
                status = choose(best, session, json_object_get(report, "versions"), &tag, error);
        if (!status && tag)
                status = nebula_checkpoint_find(session, tag, NULL, ret_found, error);
        if (status) { /* the next look tries again */
                best->limit = before.limit;
                best->has_limit = before.has_limit;
        }
        json_decref(report);
        return status;
}
