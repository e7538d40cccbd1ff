/*
 * Looks at the values of a version while its images are mapped for storage: whether they are those of the version before, and whether a float tensor has
 * a NaN or an infinite value. A job that trains on after either has lost time that a program's own log often does not show.
 *
 * A directory of a torch file has the CRC-32 of each storage, so the first question costs no read of the values. The second one reads a sample: a NaN spreads
 * to whole tensors within a step.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "agent/background.h"
#include "agent/catalogue/findings.h"
#include "agent/persist/persist_private.h"
#include "agent/persist/slots_private.h"
#include "image/finite.h"
#include "image/torch_pickle.h"
#include "sum/sum.h"

#define COUNTS_BYTES (64u << 10) /* a smaller file may hold a step, random numbers or a place in the data: it says nothing about the model */

struct look {
        struct plan *plan;
        const struct plan_file *file;
        const void *data;
};

static bool is_value(const char *name)
{
        const char *slash = strrchr(name, '/');

        return slash && slash - name >= 4 && !strncmp(slash - 4, "data", 4);
}

/* Files and records may come in any order. */
static void sum_file(struct plan_values *values, const struct plan_file *file, const void *data)
{
        uint64_t of_name = sum_crc64(0, file->name, strlen(file->name) + 1);
        struct zip_entry *entries = NULL;
        size_t count = 0;

        if (file->size < COUNTS_BYTES)
                return;
        values->has_any = true;
        if (!file->is_zip || (zip_read_directory(data, file->size, &entries, &count, NULL) && zip_read(data, file->size, &entries, &count, NULL))) {
                values->sum += sum_crc64(of_name, file->chunks, file->chunk_count * sizeof *file->chunks);
                return;
        }
        for (size_t i = 0; i < count; i++) {
                uint64_t one = sum_crc64(of_name, entries[i].name, strlen(entries[i].name) + 1);

                if (is_value(entries[i].name)) {
                        one = sum_crc64(one, &entries[i].size, sizeof entries[i].size);
                        values->sum += sum_crc64(one, &entries[i].crc32, sizeof entries[i].crc32);
                }
        }
        free(entries);
}

static void find_not_finite(struct look *look)
{
        struct plan_values *values = &look->plan->values;
        struct torch_tensors tensors;
        bool reads_all = look->plan->catalogue->check_values == CATALOGUE_VALUES_ALL;

        if (*values->tensor || !look->file->is_zip || torch_tensors_find(look->data, look->file->size, &tensors, NULL))
                return;
        for (size_t i = 0; i < tensors.count && !*values->tensor; i++) {
                const struct torch_tensor *tensor = &tensors.list[i];
                uint64_t size = tensor->elements * torch_dtype_size(tensor->dtype);

                if (tensor->is_contiguous && !(reads_all ? finite_all : finite_sample)((const char *)look->data + tensor->offset, size, tensor->dtype)) {
                        snprintf(values->tensor, sizeof values->tensor, "%s", tensor->name);
                        snprintf(values->file, sizeof values->file, "%s", look->file->name);
                }
        }
        torch_tensors_done(&tensors);
}

static void look_at(void *argument)
{
        struct look *look = argument;

        sum_file(&look->plan->values, look->file, look->data);
        find_not_finite(look);
}

void persist_look_at(struct plan *plan, const struct plan_file *file, const void *data)
{
        struct look look = { plan, file, data };

        if (plan->catalogue->check_values != CATALOGUE_VALUES_OFF && file->size)
                background_run(look_at, &look);
}

void persist_judge_values(struct plan *plan)
{
        struct job_persist *job = plan->job->persist;
        const struct version *version = plan->version;
        const struct plan_values *values = &plan->values;

        if (plan->catalogue->check_values == CATALOGUE_VALUES_OFF || version->step < 0)
                return;
        catalogue_lock(plan->catalogue);
        if (values->has_any && job->has_values && version->step > job->values_step && values->sum == job->values_sum)
                finding_note(plan->catalogue, plan->job, FINDING_STALE, version->tag,
                             "its values are those of step %" PRId64 ": the program saves what it does not train, or trains nothing", job->values_step);
        if (*values->tensor && !job->was_not_finite)
                finding_note(plan->catalogue, plan->job, FINDING_NOT_FINITE, version->tag, "the tensor \"%.150s\" of \"%.150s\" has a NaN or an infinite value",
                             values->tensor, values->file);
        job->has_values = values->has_any;
        job->values_sum = values->sum;
        job->values_step = version->step;
        job->was_not_finite = *values->tensor != 0;
        catalogue_unlock(plan->catalogue);
}
