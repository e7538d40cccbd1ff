#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/numbers.h"
#include "cli/sparse.h"
#include "cli/stats.h"
#include "cli/table.h"
#include "image/torch_pickle.h"

static bool matches(const char *pattern, const char *name)
{
        return strpbrk(pattern, "*?[") ? !fnmatch(pattern, name, 0) : strstr(name, pattern) != NULL;
}

static json_t *row_of(const struct manifest *manifest, const char *file)
{
        return json_pack("{s:s, s:I, s:s}", "tag", manifest->tag, "step", (json_int_t)manifest->step, "file", file);
}

/* False: the file has tensors that could not be listed, or cannot be read. A file that is no torch file has none. */
static bool find_tensors(struct store *store, const struct manifest *manifest, const struct manifest_file *file, const char *pattern, json_t *found)
{
        struct sparse sparse = { 0 };
        struct torch_tensors tensors = { 0 };
        bool is_read = true;

        if (sparse_open(store, manifest, file->name, &sparse, NULL))
                return false;
        if (sparse.recorded.is_zip)
                is_read = !sparse_structure(&sparse, NULL) && !torch_tensors_find(sparse.data, sparse.size, &tensors, NULL);
        is_read = !sparse_end(&sparse, is_read ? NEBULA_OK : NEBULA_INVALID, NULL);
        for (size_t i = 0; is_read && i < tensors.count; i++) {
                json_t *row;

                if (!matches(pattern, tensors.list[i].name))
                        continue;
                row = row_of(manifest, file->name);
                json_object_set_new(row, "tensor", json_string(tensors.list[i].name));
                json_object_set_new(row, "dtype", json_string(torch_dtype_name(tensors.list[i].dtype)));
                json_object_set_new(row, "shape", numbers_shape_json(&tensors.list[i]));
                json_array_append_new(found, row);
        }
        torch_tensors_done(&tensors);
        sparse_close(&sparse);
        return is_read;
}

enum nebula_status find_load(struct store *store, const char *pattern, json_t **ret_found, struct nebula_error *error)
{
        struct manifest_scan scan;
        enum nebula_status status = manifest_scan(store, &scan, error);
        json_t *found;
        json_int_t unread = 0;

        if (status)
                return status;
        found = json_array();
        for (size_t i = 0; i < scan.count; i++) {
                const struct manifest *one = &scan.manifests[i];

                for (size_t f = 0; f < one->file_count; f++) {
                        if (matches(pattern, one->files[f].name)) {
                                json_t *row = row_of(one, one->files[f].name);

                                json_object_set_new(row, "size", json_integer((json_int_t)one->files[f].size));
                                json_array_append_new(found, row);
                        }
                        unread += !find_tensors(store, one, &one->files[f], pattern, found);
                }
        }
        *ret_found = json_pack("{s:s, s:s, s:o, s:I}", "path", store->root, "pattern", pattern, "matches", found, "unreadable_count", unread);
        manifest_scan_done(&scan);
        return NEBULA_OK;
}

static void shape_cell(struct table *table, const json_t *row)
{
        const json_t *shape = json_object_get(row, "shape");
        char text[200], size[HUMAN_MAX];
        size_t used;

        if (!shape) {
                table_cell(table, STYLE_PLAIN, "%s", human_size((uint64_t)number_of(row, "size"), size));
                return;
        }
        used = (size_t)snprintf(text, sizeof text, "%s ", text_of(row, "dtype"));
        for (size_t i = 0; i < json_array_size(shape) && used < sizeof text; i++)
                used += (size_t)snprintf(text + used, sizeof text - used, "%s%" JSON_INTEGER_FORMAT, i ? "x" : "", json_integer_value(json_array_get(shape, i)));
        table_cell(table, STYLE_PLAIN, "%s", text);
}

void find_print(const json_t *answer)
{
        static const struct table_column columns[] = {
                { "TAG", TABLE_LEFT, true }, { "FILE", TABLE_LEFT, true }, { "TENSOR", TABLE_LEFT, true }, { "SIZE", TABLE_LEFT, false },
        };
        const json_t *found = json_object_get(answer, "matches");
        struct table *table = table_new(columns, CLI_COUNT(columns));

        for (size_t i = 0; i < json_array_size(found); i++) {
                const json_t *row = json_array_get(found, i);

                table_cell(table, STYLE_PLAIN, "%s", text_of(row, "tag"));
                table_cell(table, STYLE_PLAIN, "%s", text_of(row, "file"));
                table_cell(table, STYLE_PLAIN, "%s", json_object_get(row, "tensor") ? text_of(row, "tensor") : "(file)");
                shape_cell(table, row);
        }
        if (json_array_size(found))
                table_print(table, stdout, term_columns(), term_has_colour());
        else
                term_print(STYLE_PLAIN, "no file and no tensor \"%s\" in %s\n", text_of(answer, "pattern"), text_of(answer, "path"));
        table_free(table);
        if (number_of(answer, "unreadable_count") > 0)
                cli_complain("the tensors of %.0f files cannot be listed: they are damaged, or hold objects that only torch can build", number_of(answer, "unreadable_count"));
}
