/* nebula diff: which tensors of two versions differ, and by how much. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/human.h"
#include "cli/numbers.h"
#include "cli/sparse.h"
#include "cli/table.h"
#include "cli/target.h"
#include "image/torch_pickle.h"
#include "store/manifest_load.h"
#include "store/record.h"

struct side {
        struct store *store;
        struct manifest manifest;
};
struct diff {
        struct side a, b;
        json_t *files;
        size_t equal_files, equal_tensors, changed, other, only_a, only_b; /* all but the first count tensors */
        size_t differing_files; /* without tensors, or with other contents that differ */
};

/* Keeps tensors of the same name in the order of the file. */
static int by_name(const void *a, const void *b)
{
        const struct torch_tensor *x = a, *y = b;
        int order = strcmp(x->name, y->name);

        return order ? order : (x->offset > y->offset) - (x->offset < y->offset);
}

static json_t *describe(const struct torch_tensor *tensor, const char *result)
{
        return json_pack("{s:s, s:s, s:s, s:o}", "name", tensor->name, "result", result, "dtype", torch_dtype_name(tensor->dtype), "shape",
                         numbers_shape_json(tensor));
}

static bool same_shape(const struct torch_tensor *a, const struct torch_tensor *b)
{
        return a->dim_count == b->dim_count && !memcmp(a->shape, b->shape, a->dim_count * sizeof *a->shape);
}

static uint64_t bytes_of(const struct torch_tensor *tensor)
{
        return tensor->elements * torch_dtype_size(tensor->dtype);
}

/* Reads the tensor, or its whole storage if it is not contiguous. */
static enum nebula_status fetch(struct sparse *file, const struct torch_tensor *tensor, struct nebula_error *error)
{
        return tensor->is_contiguous ? sparse_need(file, tensor->offset, bytes_of(tensor), error)
                                     : sparse_need(file, tensor->storage_offset, tensor->storage_size, error);
}

static void add_difference(json_t *row, const struct difference *difference, uint64_t elements)
{
        json_object_set_new(row, "differing", json_integer((json_int_t)difference->differing));
        json_object_set_new(row, "elements", json_integer((json_int_t)elements));
        if (difference->is_integer && difference->largest_integer > INT64_MAX)
                json_object_set_new(row, "largest", json_real((double)difference->largest_integer));
        else
                json_object_set_new(row, "largest", difference->is_integer ? json_integer((json_int_t)difference->largest_integer)
                                                                           : numbers_json(difference->largest));
}

/* Compares checksums first: equal chunks are not read. */
static enum nebula_status compare_values(struct diff *diff, struct sparse *file_a, const struct torch_tensor *a, struct sparse *file_b,
                                         const struct torch_tensor *b, json_t *rows, struct nebula_error *error)
{
        struct difference difference;
        bool is_same = !a->elements;
        enum nebula_status status = NEBULA_OK;
        json_t *row;

        if (a->elements && a->is_contiguous && b->is_contiguous && a->offset == b->offset)
                status = sparse_same(file_a, file_b, a->offset, bytes_of(a), &is_same, error);
        if (!status && !is_same)
                status = fetch(file_a, a, error);
        if (!status && !is_same)
                status = fetch(file_b, b, error);
        if (status)
                return status;
        if (is_same) {
                diff->equal_tensors++;
                return NEBULA_OK;
        }
        difference = numbers_difference(file_a->data, a, file_b->data, b);
        if (!difference.differing) {
                diff->equal_tensors++;
                return NEBULA_OK;
        }
        diff->changed++;
        row = describe(a, "changed");
        add_difference(row, &difference, a->elements);
        json_array_append_new(rows, row);
        return NEBULA_OK;
}

static void add_other(struct diff *diff, const struct torch_tensor *a, const struct torch_tensor *b, json_t *rows)
{
        json_t *row = describe(a, a->dtype != b->dtype ? "other dtype" : "other shape");

        diff->other++;
        json_object_set_new(row, "dtype_b", json_string(torch_dtype_name(b->dtype)));
        json_object_set_new(row, "shape_b", numbers_shape_json(b));
        json_array_append_new(rows, row);
}

/* Both lists are in the order of their names. */
static enum nebula_status compare_lists(struct diff *diff, struct sparse *file_a, const struct torch_tensors *list_a, struct sparse *file_b,
                                        const struct torch_tensors *list_b, json_t *rows, struct nebula_error *error)
{
        size_t i = 0, k = 0;
        enum nebula_status status = NEBULA_OK;

        while ((i < list_a->count || k < list_b->count) && !status) {
                const struct torch_tensor *a = i < list_a->count ? &list_a->list[i] : NULL, *b = k < list_b->count ? &list_b->list[k] : NULL;
                int order = !a ? 1 : !b ? -1 : strcmp(a->name, b->name);

                i += order <= 0;
                k += order >= 0;
                if (order < 0) {
                        diff->only_a++;
                        json_array_append_new(rows, describe(a, "only in a"));
                } else if (order > 0) {
                        diff->only_b++;
                        json_array_append_new(rows, describe(b, "only in b"));
                } else if (a->dtype != b->dtype || !same_shape(a, b)) {
                        add_other(diff, a, b, rows);
                } else {
                        status = compare_values(diff, file_a, a, file_b, b, rows, error);
                }
        }
        return status;
}

/* Compares all but the tensors: numbers, texts, and the structure of the objects. */
static bool same_pickle(const struct sparse *a, const struct torch_tensors *list_a, const struct sparse *b, const struct torch_tensors *list_b)
{
        return list_a->pickle_size == list_b->pickle_size && !memcmp(a->data + list_a->pickle_offset, b->data + list_b->pickle_offset, list_a->pickle_size);
}

static enum nebula_status compare_tensors(struct diff *diff, struct sparse *a, struct sparse *b, json_t *row, struct nebula_error *error)
{
        struct torch_tensors list_a = { 0 }, list_b = { 0 };
        size_t before = diff->changed + diff->other + diff->only_a + diff->only_b, equal = diff->equal_tensors;
        json_t *rows = json_array();
        bool is_same;
        enum nebula_status status = sparse_structure(a, error);

        if (!status)
                status = sparse_structure(b, error);
        if (!status)
                status = torch_tensors_find(a->data, a->size, &list_a, error);
        if (!status)
                status = torch_tensors_find(b->data, b->size, &list_b, error);
        if (!status) {
                if (list_a.count)
                        qsort(list_a.list, list_a.count, sizeof *list_a.list, by_name);
                if (list_b.count)
                        qsort(list_b.list, list_b.count, sizeof *list_b.list, by_name);
                status = compare_lists(diff, a, &list_a, b, &list_b, rows, error);
        }
        if (!status) {
                is_same = same_pickle(a, &list_a, b, &list_b);
                diff->differing_files += !is_same;
                before = diff->changed + diff->other + diff->only_a + diff->only_b - before;
                json_object_set_new(row, "result", json_string(before ? "changed" : is_same ? "equal tensors" : "other contents"));
                json_object_set_new(row, "other_contents_equal", json_boolean(is_same));
                json_object_set_new(row, "equal_tensors", json_integer((json_int_t)(diff->equal_tensors - equal)));
        }
        json_object_set_new(row, "tensors", rows);
        torch_tensors_done(&list_a);
        torch_tensors_done(&list_b);
        return status;
}

static bool same_chunks(const struct record_file *a, const struct record_file *b)
{
        return a->size == b->size && a->chunk_bytes == b->chunk_bytes && a->chunk_count == b->chunk_count &&
               (!a->chunk_count || !memcmp(a->chunks, b->chunks, a->chunk_count * sizeof *a->chunks));
}

static enum nebula_status compare_file(struct diff *diff, const char *name, json_t *row, struct nebula_error *error)
{
        struct sparse a = { 0 }, b = { 0 };
        struct nebula_error failure = { 0 };
        enum nebula_status status = sparse_open(diff->a.store, &diff->a.manifest, name, &a, error);

        if (!status)
                status = sparse_open(diff->b.store, &diff->b.manifest, name, &b, error);
        if (status)
                goto out;
        if (same_chunks(&a.recorded, &b.recorded)) {
                diff->equal_files++;
                json_object_set_new(row, "result", json_string("equal"));
                goto out;
        }
        status = a.recorded.is_zip && b.recorded.is_zip ? compare_tensors(diff, &a, &b, row, &failure) : NEBULA_INVALID;
        status = sparse_end(&b, sparse_end(&a, status, &failure), &failure);
        if (status == NEBULA_INVALID) { /* not a torch file, or one that only torch can read */
                diff->differing_files++;
                json_object_set_new(row, "result", json_string("changed"));
                if (*failure.message)
                        json_object_set_new(row, "reason", json_string(failure.message));
                status = NEBULA_OK;
        } else if (status && error) {
                *error = failure;
        }
out:
        sparse_close(&a);
        sparse_close(&b);
        return status;
}

static enum nebula_status compare_all(struct diff *diff, struct nebula_error *error)
{
        const struct manifest *a = &diff->a.manifest, *b = &diff->b.manifest;
        enum nebula_status status = NEBULA_OK;

        diff->files = json_array();
        for (size_t i = 0; i < a->file_count && !status; i++) {
                json_t *row = json_pack("{s:s}", "name", a->files[i].name);

                if (manifest_find_file(b, a->files[i].name)) {
                        status = compare_file(diff, a->files[i].name, row, error);
                } else {
                        diff->differing_files++;
                        json_object_set_new(row, "result", json_string("only in a"));
                }
                json_array_append_new(diff->files, row);
        }
        for (size_t i = 0; i < b->file_count && !status; i++) {
                if (manifest_find_file(a, b->files[i].name))
                        continue;
                diff->differing_files++;
                json_array_append_new(diff->files, json_pack("{s:s, s:s}", "name", b->files[i].name, "result", "only in b"));
        }
        return status;
}

static const char *text_at(const json_t *object, const char *key)
{
        const char *text = json_string_value(json_object_get(object, key));

        return text ? text : "";
}

static void shape_text(const json_t *shape, char *text, size_t size)
{
        size_t used = 0;

        snprintf(text, size, "%s", json_array_size(shape) ? "" : "()");
        for (size_t i = 0; i < json_array_size(shape) && used < size; i++)
                used += (size_t)snprintf(text + used, size - used, "%s%" JSON_INTEGER_FORMAT, i ? "x" : "", json_integer_value(json_array_get(shape, i)));
}

static void difference_text(const json_t *row, char *text, size_t size)
{
        const json_t *largest = json_object_get(row, "largest");
        char shape[200];

        if (!strncmp(text_at(row, "result"), "other", 5)) {
                shape_text(json_object_get(row, "shape_b"), shape, sizeof shape);
                snprintf(text, size, "%s, there %s %s", text_at(row, "result"), text_at(row, "dtype_b"), shape);
        } else if (!largest) {
                snprintf(text, size, "%s", text_at(row, "result"));
        } else {
                char number[64];

                if (json_is_integer(largest))
                        snprintf(number, sizeof number, "%" JSON_INTEGER_FORMAT, json_integer_value(largest));
                else if (json_is_real(largest))
                        snprintf(number, sizeof number, "%.6g", json_real_value(largest));
                else
                        snprintf(number, sizeof number, "%s", json_string_value(largest));
                snprintf(text, size, "largest difference %s, %" JSON_INTEGER_FORMAT " of %" JSON_INTEGER_FORMAT " differ", number,
                         json_integer_value(json_object_get(row, "differing")), json_integer_value(json_object_get(row, "elements")));
        }
}

static void print_tensors(struct table *table, const json_t *file)
{
        const json_t *rows = json_object_get(file, "tensors"), *row;
        char shape[200], text[400];
        size_t index;

        json_array_foreach(rows, index, row) {
                shape_text(json_object_get(row, "shape"), shape, sizeof shape);
                difference_text(row, text, sizeof text);
                table_cell(table, STYLE_PLAIN, "%s", text_at(file, "name"));
                table_cell(table, STYLE_PLAIN, "%s", text_at(row, "name"));
                table_cell(table, STYLE_PLAIN, "%s %s", text_at(row, "dtype"), shape);
                table_cell(table, STYLE_WARN, "%s", text);
        }
}

static void print_file(struct table *table, const json_t *file)
{
        const char *result = text_at(file, "result"), *reason = text_at(file, "reason");
        bool is_equal = !strncmp(result, "equal", 5);

        print_tensors(table, file);
        if (json_array_size(json_object_get(file, "tensors")) && json_is_true(json_object_get(file, "other_contents_equal")))
                return;
        table_cell(table, STYLE_PLAIN, "%s", text_at(file, "name"));
        table_cell(table, STYLE_DIM, "%s", json_object_get(file, "tensors") ? "(other)" : "(file)");
        table_cell(table, STYLE_PLAIN, "%s", "");
        if (json_object_get(file, "other_contents_equal"))
                table_cell(table, is_equal ? STYLE_GOOD : STYLE_WARN, "%s", is_equal ? "equal" : "differs");
        else
                table_cell(table, is_equal ? STYLE_GOOD : STYLE_WARN, "%s%s%s", is_equal ? "equal, by checksum" : result, *reason ? ": " : "", reason);
}

static bool is_equal(const struct diff *diff)
{
        return !(diff->changed + diff->other + diff->only_a + diff->only_b + diff->differing_files);
}

static void print_sum(const struct diff *diff)
{
        const struct {
                size_t count;
                const char *what;
        } parts[] = {
                { diff->equal_tensors, "equal" }, { diff->changed, "changed" }, { diff->other, "of other shape or dtype" },
                { diff->only_a, "only in the first" }, { diff->only_b, "only in the second" },
        };
        bool has_any = false;

        printf("%zu of %zu files equal by checksum", diff->equal_files, json_array_size(diff->files));
        for (size_t i = 0; i < CLI_COUNT(parts); i++) {
                if (parts[i].count)
                        printf("%s%zu %s", has_any ? ", " : "; tensors of the others: ", parts[i].count, parts[i].what);
                has_any = has_any || parts[i].count;
        }
        printf("\n");
}

static void print(const struct diff *diff)
{
        static const struct table_column columns[] = {
                { "FILE", TABLE_LEFT, true }, { "TENSOR", TABLE_LEFT, true }, { "TYPE", TABLE_LEFT, true }, { "", TABLE_LEFT, false },
        };
        struct table *table = table_new(columns, CLI_COUNT(columns));

        for (size_t i = 0; i < json_array_size(diff->files); i++)
                print_file(table, json_array_get(diff->files, i));
        table_print(table, stdout, term_columns(), term_has_colour());
        table_free(table);
        printf("\n");
        if (is_equal(diff))
                term_print(STYLE_GOOD, "equal: all %zu files\n", json_array_size(diff->files));
        else
                print_sum(diff);
}

static json_t *json_of(const struct diff *diff)
{
        return json_pack("{s:b, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:O}", "equal", is_equal(diff), "a", diff->a.manifest.tag, "b",
                         diff->b.manifest.tag, "equal_files", (json_int_t)diff->equal_files, "equal_tensors", (json_int_t)diff->equal_tensors, "changed",
                         (json_int_t)diff->changed, "other_shape_or_dtype", (json_int_t)diff->other, "only_in_a", (json_int_t)diff->only_a, "only_in_b",
                         (json_int_t)diff->only_b, "files", diff->files);
}

int command_diff(int argc, char **argv)
{
        struct cli_common common = { 0 };
        const char *with = NULL;
        const struct args_option options[] = { CLI_COMMON(common), { "with", ARGS_TEXT, &with } };
        struct diff diff = { 0 };
        struct nebula_error error;
        struct args args;
        int code;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 2, 2))
                return CLI_USAGE;
        if (target_open(common.path, &diff.a.store, &error) || target_open(with ? with : common.path, &diff.b.store, &error) ||
            target_load(diff.a.store, args.positionals[0], &diff.a.manifest, NULL, &error) ||
            target_load(diff.b.store, args.positionals[1], &diff.b.manifest, NULL, &error) || compare_all(&diff, &error)) {
                code = cli_fail(common.json, &error);
                goto out;
        }
        code = is_equal(&diff) ? CLI_OK : CLI_WRONG;
        if (common.json)
                code = cli_print_json(json_of(&diff), code);
        else
                print(&diff);
out:
        json_decref(diff.files);
        manifest_done(&diff.a.manifest);
        manifest_done(&diff.b.manifest);
        store_close(diff.a.store);
        store_close(diff.b.store);
        return code;
}
