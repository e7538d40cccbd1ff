#include "store/manifest_load.h"
#include "store/manifest_read.h"
#include "store/metrics.h"
#include "store/record.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

#define METRICS_BYTES_MAX (1u << 20) /* metadata of a version is small; a larger file has no metrics that count */
#define PAGE 4096u

/* NEBULA_CORRUPT, NEBULA_NOT_FOUND: no such text. */
static enum nebula_status read_file(struct store *store, const struct manifest *manifest, const struct manifest_file *file, json_t **ret_document,
                                    struct nebula_error *error)
{
        struct record_file recorded;
        char *text = aligned_alloc(PAGE, (file->size + PAGE) / PAGE * PAGE);
        enum nebula_status status;

        if (!text)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the metrics of \"%.200s\"", manifest->tag);
        status = manifest_load_file(store, manifest, file->name, &recorded, error);
        if (!status) {
                status = manifest_read_file(store, manifest, &recorded, text, error);
                record_file_done(&recorded);
        }
        *ret_document = status ? NULL : json_loadb(text, file->size, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, NULL);
        free(text);
        return status;
}

enum nebula_status metrics_load(struct store *store, const struct manifest *manifest, json_t **ret_metrics, struct nebula_error *error)
{
        const struct manifest_file *file = manifest_find_file(manifest, METRICS_FILE);
        json_t *document = NULL, *metrics;
        enum nebula_status status = NEBULA_OK;

        if (file && file->size <= METRICS_BYTES_MAX)
                status = read_file(store, manifest, file, &document, error);
        if (status && status != NEBULA_CORRUPT && status != NEBULA_NOT_FOUND)
                return status;
        metrics = json_object_get(document, "metrics");
        metrics = json_is_object(metrics) ? json_incref(metrics) : json_object();
        json_decref(document);
        if (!metrics)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the metrics of \"%.200s\"", manifest->tag);
        *ret_metrics = metrics;
        return NEBULA_OK;
}

double metrics_value(const json_t *metrics, const char *name)
{
        const json_t *value = json_object_get(metrics, name);
        const char *text = json_string_value(value);

        if (json_is_number(value))
                return json_number_value(value);
        if (text && !strcmp(text, "inf"))
                return INFINITY;
        return text && !strcmp(text, "-inf") ? -INFINITY : NAN;
}
