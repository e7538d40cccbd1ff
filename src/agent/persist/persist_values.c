/*
 * Looks at the values of a version while its images are mapped for storage: whether they are those of the version before, and whether a float tensor has
 * a NaN or an infinite value. A job that trains on after either has lost time that a program's own log often does not show.
 *
 * It knows torch files, DCP's files, which are torch files one after the other, and safetensors. Of other bytes nothing says which are floats.
 *
 * A directory of a torch file has the CRC-32 of each storage, so the first question costs no read of the values. The second one reads a sample: a NaN spreads
 * to whole tensors within a step.
 */
#include <endian.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/findings.h"
#include "agent/persist/persist_private.h"
#include "agent/persist/slots_private.h"
#include "image/finite.h"
#include "image/torch_pickle.h"
#include "sum/sum.h"

#define COUNTS_BYTES (64u << 10) /* a smaller file may hold a step, random numbers or a place in the data: it says nothing about the model */

#define SAFETENSORS_HEAD_MAX (100u << 20) /* the format's own bound */
#define ITEMS_MAX 1000000u                /* torch files in one of DCP's */

/* The pickle of many small tensors takes longer than their checksums. In each fourth version the look takes about 3 % of
 * the persist's processor time. */
#define MANY 1000u
#define SMALL_BYTES (64u << 10)
#define LOOK_EVERY 4u

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

/* Files may come in any order. `entries`: NULL for a file that is no torch file. */
static void sum_file(struct plan_values *values, const struct plan_file *file, const struct zip_entry *entries, size_t count)
{
        uint64_t sum = sum_crc64(0, file->name, strlen(file->name) + 1);

        if (file->size < COUNTS_BYTES)
                return;
        values->has_any = true;
        if (!entries)
                sum = sum_crc64(sum, file->chunks, file->chunk_count * sizeof *file->chunks);
        for (size_t i = 0, end; i < count; i = end) { /* few calls: each has its cost */
                uint64_t batch[256][2];

                for (end = i; end < count && end < i + 256; end++) {
                        batch[end - i][0] = is_value(entries[end].name) ? entries[end].size : 0;
                        batch[end - i][1] = is_value(entries[end].name) ? entries[end].crc32 : 0;
                }
                sum = sum_crc64(sum, batch, (end - i) * sizeof *batch);
        }
        values->sum += sum;
}

static void judge(struct look *look, const char *name, const void *data, uint64_t size, enum torch_dtype dtype)
{
        struct plan_values *values = &look->plan->values;
        bool reads_all = look->plan->catalogue->check_values == CATALOGUE_VALUES_ALL;

        if (*values->tensor || (reads_all ? finite_all : finite_sample)(data, size, dtype))
                return;
        if (*name)
                snprintf(values->tensor, sizeof values->tensor, "%s", name);
        else /* an item of DCP: its name is in another file */
                snprintf(values->tensor, sizeof values->tensor, "at byte %" PRIu64, (uint64_t)((const char *)data - (const char *)look->data));
        snprintf(values->file, sizeof values->file, "%s", look->file->name);
}

static bool is_left_out(struct look *look, size_t count)
{
        bool is_due = look->plan->job->persist->looks % LOOK_EVERY == 0 || look->plan->catalogue->check_values == CATALOGUE_VALUES_ALL;

        if (is_due || count < MANY || look->file->size / count >= SMALL_BYTES)
                return false;
        look->plan->values.has_gap = true;
        return true;
}

static void judge_torch(struct look *look, const void *data, const struct zip_entry *entries, size_t count)
{
        struct torch_tensors tensors;

        if (torch_tensors_find_in(data, entries, count, &tensors, NULL))
                return;
        for (size_t i = 0; i < tensors.count; i++) {
                const struct torch_tensor *tensor = &tensors.list[i];

                if (tensor->is_contiguous)
                        judge(look, tensor->name, (const char *)data + tensor->offset, tensor->elements * torch_dtype_size(tensor->dtype), tensor->dtype);
        }
        torch_tensors_done(&tensors);
}

/* {"name": {"dtype": "F32", "shape": [...], "data_offsets": [first, end]}, ...}, after 8 bytes with its size. */
static void judge_safetensors(struct look *look)
{
        static const struct { const char *name; enum torch_dtype dtype; } types[] = {
                { "F64", TORCH_F64 }, { "F32", TORCH_F32 }, { "F16", TORCH_F16 }, { "BF16", TORCH_BF16 }, { "F8_E5M2", TORCH_F8_E5M2 },
                { "F8_E4M3", TORCH_F8_E4M3 }, { "C64", TORCH_C64 },
        };
        const char *bytes = look->data, *name;
        uint64_t head, room, size = look->file->size;
        json_t *body = NULL, *one;

        if (size < 10 || bytes[8] != '{')
                return;
        memcpy(&head, bytes, sizeof head);
        head = le64toh(head);
        if (head <= size - 8 && head <= SAFETENSORS_HEAD_MAX)
                body = json_loadb(bytes + 8, head, JSON_ALLOW_NUL, NULL);
        room = size - 8 - head;
        json_object_foreach(body, name, one) {
                const json_t *offsets = json_object_get(one, "data_offsets"), *type = json_object_get(one, "dtype");
                json_int_t first = json_integer_value(json_array_get(offsets, 0)), end = json_integer_value(json_array_get(offsets, 1));

                for (size_t i = 0; i < sizeof types / sizeof *types && json_is_string(type); i++)
                        if (!strcmp(json_string_value(type), types[i].name) && first >= 0 && first <= end && (uint64_t)end <= room)
                                judge(look, name, bytes + 8 + head + first, (uint64_t)(end - first), types[i].dtype);
        }
        json_decref(body);
}

static void judge_items(struct look *look)
{
        uint64_t end = look->file->size, begin;

        for (size_t i = 0; i < ITEMS_MAX && end && zip_find_last(look->data, end, &begin); i++) {
                const char *item = (const char *)look->data + begin;
                struct zip_entry *entries;
                size_t count;

                if (!zip_read(item, end - begin, &entries, &count, NULL)) {
                        judge_torch(look, item, entries, count);
                        free(entries);
                }
                end = begin;
        }
        if (end == look->file->size)
                judge_safetensors(look);
}

void persist_look_at(struct plan *plan, const struct plan_file *file, const void *data)
{
        struct look look = { plan, file, data };
        struct zip_entry *entries = NULL;
        size_t count = 0;

        if (plan->catalogue->check_values == CATALOGUE_VALUES_OFF || !file->size)
                return;
        if (file->is_zip && zip_read_directory(data, file->size, &entries, &count, NULL) && zip_read(data, file->size, &entries, &count, NULL))
                entries = NULL;
        sum_file(&plan->values, file, entries, count);
        if (!*plan->values.tensor) {
                if (entries && !is_left_out(&look, count))
                        judge_torch(&look, data, entries, count);
                else if (!file->is_zip)
                        judge_items(&look);
        }
        free(entries);
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
        job->looks++;
        if (*values->tensor || !values->has_gap)
                job->was_not_finite = *values->tensor != 0;
        catalogue_unlock(plan->catalogue);
}
