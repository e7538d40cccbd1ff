/* nebula inspect: files, ranks, sizes and times of one version; records of one file. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/about.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/mapped.h"
#include "cli/numbers.h"
#include "cli/sparse.h"
#include "cli/table.h"
#include "cli/target.h"
#include "cli/vouch.h"
#include "image/torch_pickle.h"
#include "os/os.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/pins.h"
#include "store/record.h"

/* The number of records of a zip image; -1 if it is no zip or cannot be read. */
static int64_t count_records(struct store *store, const struct manifest *manifest, const struct manifest_file *file,
                             const struct record_file *recorded)
{
        struct zip_entry *entries;
        struct sparse sparse;
        char key[MANIFEST_KEY_MAX];
        size_t count;
        int64_t result = -1;

        if (manifest_file_key(manifest, file, key, NULL) || sparse_open_recorded(store, key, recorded, &sparse, NULL))
                return -1;
        if (!sparse_records(&sparse, &entries, &count, NULL)) {
                result = sparse_end(&sparse, NEBULA_OK, NULL) ? -1 : (int64_t)count;
                free(entries);
        }
        sparse_close(&sparse);
        return result;
}

static json_t *describe_file(struct store *store, const struct manifest *manifest, const struct manifest_file *file,
                             const struct record *record)
{
        char path[MANIFEST_KEY_MAX] = "";
        json_t *result;

        manifest_file_path(manifest, file, path, NULL);
        result = json_pack("{s:s, s:s, s:I, s:I, s:I}", "name", file->name, "path", path, "size", (json_int_t)file->size, "rank",
                           (json_int_t)file->rank, "sequence", (json_int_t)manifest_file_sequence(manifest, file));

        for (size_t i = 0; i < record->file_count; i++) {
                const struct record_file *one = &record->files[i];

                if (strcmp(one->name, file->name))
                        continue;
                json_object_set_new(result, "format", json_string(one->is_zip ? "zip" : "raw"));
                json_object_set_new(result, "chunk_bytes", json_integer((json_int_t)one->chunk_bytes));
                json_object_set_new(result, "chunk_count", json_integer((json_int_t)one->chunk_count));
                if (one->is_zip)
                        json_object_set_new(result, "record_count", json_integer(count_records(store, manifest, file, one)));
        }
        return result;
}

static int by_name(const void *a, const void *b)
{
        return strcmp(text_of(*(json_t *const *)a, "name"), text_of(*(json_t *const *)b, "name"));
}

/* The manifest has them in the order of their records. If there is no memory, that order stays. */
static void sort_by_name(json_t *files)
{
        size_t count = json_array_size(files);
        json_t **list = count > 1 ? calloc(count, sizeof *list) : NULL;

        for (size_t i = 0; list && i < count; i++)
                list[i] = json_incref(json_array_get(files, i));
        if (list) {
                qsort(list, count, sizeof *list, by_name);
                json_array_clear(files);
        }
        for (size_t i = 0; list && i < count; i++)
                json_array_append_new(files, list[i]);
        free(list);
}

/* The whole answer as JSON; the text for people is printed from it. */
static json_t *describe(struct store *store, const struct manifest *manifest)
{
        json_t *files = json_array(), *ranks = json_array(), *about = about_load(store, manifest), *version;
        struct pins pins = { 0 };
        const struct pin *pin;

        pins_load(store, true, &pins, NULL);
        pin = pins_find(&pins, manifest->tag);
        for (size_t r = 0; r < manifest->record_count; r++) {
                const struct manifest_record *entry = &manifest->records[r];
                struct record record = { 0 };
                struct nebula_error error = { 0 };

                if (manifest_load_record(store, manifest, r, &record, &error))
                        json_array_append_new(ranks, json_pack("{s:I, s:I, s:s}", "rank", (json_int_t)entry->rank, "sequence",
                                                               (json_int_t)entry->sequence, "reason", error.message));
                for (size_t i = 0; i < record.rank_count; i++)
                        json_array_append_new(ranks, json_pack("{s:I, s:I, s:f, s:f, s:f}", "rank", (json_int_t)record.ranks[i].rank,
                                                               "sequence", (json_int_t)entry->sequence, "begun", record.ranks[i].begun,
                                                               "captured", record.ranks[i].captured, "persisted", record.persisted));
                for (size_t i = 0; i < manifest->file_count; i++)
                        if (manifest->files[i].record == r)
                                json_array_append_new(files, describe_file(store, manifest, &manifest->files[i], &record));
                record_done(&record);
        }
        sort_by_name(files);
        version = json_pack("{s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:f, s:I, s:s, s:o, s:o, s:s?}", "tag", manifest->tag, "state",
                         nebula_state_name(NEBULA_STATE_DURABLE), "job", manifest->job, "run", manifest->run, "sequence", (json_int_t)manifest->sequence, "entry", (json_int_t)manifest->number, "step",
                         (json_int_t)manifest->step, "world", (json_int_t)manifest->world, "committed_at",
                         (double)manifest->sequence / 1e9, "size", (json_int_t)manifest_size(manifest), "path",
                         store->root, "files", files, "ranks", ranks, "pinned", pin ? pin->reason : NULL);
        json_object_set_new(version, "signatures", vouch_list(store, manifest));
        if (about) {
                json_object_set(version, "metrics", json_object_get(about, "metrics"));
                json_object_set(version, "metadata", json_object_get(about, "metadata"));
        }
        json_decref(about);
        pins_done(&pins);
        return version;
}

static int64_t integer(const json_t *object, const char *key)
{
        return (int64_t)json_integer_value(json_object_get(object, key));
}

/* The commit of the earlier version that wrote this file or rank; "-": this version did. */
static const char *origin(const json_t *version, const json_t *row, char text[HUMAN_MAX])
{
        int64_t sequence = integer(row, "sequence");

        return sequence == integer(version, "sequence") ? "-" : human_time((double)sequence / 1e9, text);
}

static void print_files(const json_t *version)
{
        static const struct table_column columns[] = {
                { "FILE", TABLE_LEFT, true }, { "RANK", TABLE_RIGHT, false }, { "FROM", TABLE_LEFT, false },
                { "SIZE", TABLE_RIGHT, false }, { "FORMAT", TABLE_LEFT, false }, { "RECORDS", TABLE_RIGHT, false },
                { "CHUNKS", TABLE_RIGHT, false },
        };
        const json_t *files = json_object_get(version, "files");
        struct table *table = table_new(columns, CLI_COUNT(columns));
        char size[HUMAN_MAX], text[HUMAN_MAX];

        for (size_t i = 0; i < json_array_size(files); i++) {
                const json_t *file = json_array_get(files, i);
                const json_t *records = json_object_get(file, "record_count");

                table_cell(table, STYLE_PLAIN, "%s", text_of(file, "name"));
                table_cell(table, STYLE_PLAIN, "%" PRId64, integer(file, "rank"));
                table_cell(table, STYLE_PLAIN, "%s", origin(version, file, text));
                table_cell(table, STYLE_PLAIN, "%s", human_size((uint64_t)integer(file, "size"), size));
                table_cell(table, STYLE_PLAIN, "%s", text_of(file, "format"));
                if (records && json_integer_value(records) >= 0)
                        table_cell(table, STYLE_PLAIN, "%" JSON_INTEGER_FORMAT, json_integer_value(records));
                else
                        table_cell(table, records ? STYLE_BAD : STYLE_PLAIN, "%s", records ? "unsound" : "-");
                table_cell(table, STYLE_PLAIN, "%" PRId64, integer(file, "chunk_count"));
        }
        table_print(table, stdout, term_columns(), term_has_colour());
        table_free(table);
}

static void print_ranks(const json_t *version)
{
        static const struct table_column columns[] = {
                { "RANK", TABLE_RIGHT, false }, { "FROM", TABLE_LEFT, false }, { "BEGUN", TABLE_LEFT, false },
                { "CAPTURED", TABLE_RIGHT, false }, { "IN STORAGE", TABLE_RIGHT, false },
        };
        const json_t *ranks = json_object_get(version, "ranks");
        struct table *table = table_new(columns, CLI_COUNT(columns));
        char text[HUMAN_MAX];

        for (size_t i = 0; i < json_array_size(ranks); i++) {
                const json_t *rank = json_array_get(ranks, i);
                double begun = number_of(rank, "begun");

                table_cell(table, STYLE_PLAIN, "%" PRId64, integer(rank, "rank"));
                table_cell(table, STYLE_PLAIN, "%s", origin(version, rank, text));
                if (json_object_get(rank, "reason")) {
                        table_cell(table, STYLE_BAD, "record not sound");
                        table_cell(table, STYLE_PLAIN, "%s", "");
                        table_cell(table, STYLE_PLAIN, "%s", "");
                        continue;
                }
                table_cell(table, STYLE_PLAIN, "%s", human_time(begun, text));
                table_cell(table, STYLE_PLAIN, "+%s", human_duration(number_of(rank, "captured") - begun, text));
                table_cell(table, STYLE_PLAIN, "+%s", human_duration(number_of(rank, "persisted") - begun, text));
        }
        table_print(table, stdout, term_columns(), term_has_colour());
        table_free(table);
}

static void print_said(const json_t *version, const char *name)
{
        char *text = about_text(json_object_get(version, name));

        if (text)
                term_print(STYLE_PLAIN, "  %-10s  %s\n", name, text);
        free(text);
}

static void print_version(const json_t *version)
{
        char size[HUMAN_MAX], time[HUMAN_MAX], age[HUMAN_MAX];
        double committed = number_of(version, "committed_at");
        int64_t step = integer(version, "step");
        char *signed_by = vouch_text(json_object_get(version, "signatures"));

        term_print(STYLE_BOLD, "%s", text_of(version, "tag"));
        printf("  %s in %zu file%s\n", human_size((uint64_t)integer(version, "size"), size),
               json_array_size(json_object_get(version, "files")),
               json_array_size(json_object_get(version, "files")) == 1 ? "" : "s");
        printf("  committed   %s (%s)\n", human_time(committed, time), human_age(committed, (double)os->wall_ns() / 1e9, age));
        if (step >= 0)
                printf("  step        %" PRId64 "\n", step);
        printf("  entry       %" PRId64 "\n", integer(version, "entry"));
        printf("  world       %" PRId64 "\n", integer(version, "world"));
        if (*text_of(version, "job"))
                term_print(STYLE_PLAIN, "  job         %s\n", text_of(version, "job"));
        if (*text_of(version, "run"))
                term_print(STYLE_PLAIN, "  run         %s\n", text_of(version, "run"));
        term_print(STYLE_PLAIN, "  storage     %s\n", text_of(version, "path"));
        print_said(version, "metrics");
        print_said(version, "metadata");
        if (signed_by)
                term_print(STYLE_PLAIN, "  signature   %s\n", signed_by);
        free(signed_by);
        if (json_is_string(json_object_get(version, "pinned")))
                term_print(STYLE_PLAIN, "  pinned      %s\n", *text_of(version, "pinned") ? text_of(version, "pinned") : "yes");
        printf("\n");
        print_files(version);
        printf("\n");
        print_ranks(version);
}

static json_t *describe_records(const struct zip_entry *entries, size_t count)
{
        json_t *records = json_array();
        char digits[16];

        for (size_t i = 0; i < count; i++) {
                snprintf(digits, sizeof digits, "%08" PRIx32, entries[i].crc32);
                json_array_append_new(records, json_pack("{s:s, s:I, s:I, s:s}", "name", entries[i].name, "offset",
                                                         (json_int_t)entries[i].payload_offset, "size",
                                                         (json_int_t)entries[i].size, "crc32", digits));
        }
        return records;
}

static void print_records(const struct zip_entry *entries, size_t count)
{
        static const struct table_column columns[] = {
                { "RECORD", TABLE_LEFT, true }, { "OFFSET", TABLE_RIGHT, false }, { "BYTES", TABLE_RIGHT, false },
                { "SIZE", TABLE_RIGHT, false }, { "CRC-32", TABLE_LEFT, false },
        };
        struct table *table = table_new(columns, CLI_COUNT(columns));
        char size[HUMAN_MAX];

        for (size_t i = 0; i < count; i++) {
                table_cell(table, STYLE_PLAIN, "%s", entries[i].name);
                table_cell(table, STYLE_PLAIN, "%" PRIu64, entries[i].payload_offset);
                table_cell(table, STYLE_PLAIN, "%" PRIu64, entries[i].size);
                table_cell(table, STYLE_PLAIN, "%s", human_size(entries[i].size, size));
                table_cell(table, STYLE_PLAIN, "%08" PRIx32, entries[i].crc32);
        }
        table_print(table, stdout, term_columns(), term_has_colour());
        table_free(table);
}

static json_t *describe_tensors(const void *data, const struct torch_tensors *tensors)
{
        json_t *rows = json_array();

        for (size_t i = 0; i < tensors->count; i++) {
                const struct torch_tensor *tensor = &tensors->list[i];
                struct numbers numbers = numbers_of(data, tensor);

                json_array_append_new(rows, json_pack("{s:s, s:s, s:o, s:I, s:o, s:o, s:o, s:I, s:I}", "name", tensor->name, "dtype",
                                                      torch_dtype_name(tensor->dtype), "shape", numbers_shape_json(tensor), "elements",
                                                      (json_int_t)tensor->elements, "norm", numbers_json(numbers.norm), "min", numbers_json(numbers.min),
                                                      "max", numbers_json(numbers.max), "nan", (json_int_t)numbers.nan_count, "infinite",
                                                      (json_int_t)numbers.infinite_count));
        }
        return rows;
}

static struct table *tabulate_tensors(const void *data, const struct torch_tensors *tensors)
{
        static const struct table_column columns[] = {
                { "TENSOR", TABLE_LEFT, true }, { "DTYPE", TABLE_LEFT, false }, { "SHAPE", TABLE_LEFT, true }, { "NORM", TABLE_RIGHT, false },
                { "MIN", TABLE_RIGHT, false }, { "MAX", TABLE_RIGHT, false }, { "NAN", TABLE_RIGHT, false }, { "INF", TABLE_RIGHT, false },
        };
        struct table *table = table_new(columns, CLI_COUNT(columns));

        for (size_t i = 0; i < tensors->count; i++) {
                const struct torch_tensor *tensor = &tensors->list[i];
                struct numbers numbers = numbers_of(data, tensor);
                char *shape = numbers_shape(tensor);

                table_cell(table, STYLE_PLAIN, "%s", tensor->name);
                table_cell(table, STYLE_PLAIN, "%s", torch_dtype_name(tensor->dtype));
                table_cell(table, STYLE_PLAIN, "%s", shape ? shape : "?");
                table_cell(table, STYLE_PLAIN, "%.6g", numbers.norm);
                table_cell(table, STYLE_PLAIN, "%.6g", numbers.min);
                table_cell(table, STYLE_PLAIN, "%.6g", numbers.max);
                table_cell(table, numbers.nan_count ? STYLE_BAD : STYLE_PLAIN, "%" PRIu64, numbers.nan_count);
                table_cell(table, numbers.infinite_count ? STYLE_BAD : STYLE_PLAIN, "%" PRIu64, numbers.infinite_count);
                free(shape);
        }
        return table;
}

static int inspect_tensors(bool json, const char *tag, const char *name, struct mapped *mapped, const char *place)
{
        struct torch_tensors tensors;
        struct nebula_error error;
        struct table *table = NULL;
        json_t *rows = NULL;
        enum nebula_status status = torch_tensors_find(mapped->data, mapped->size, &tensors, &error);
        int code = CLI_OK;

        if (status) {
                error_prefix(&error, "%s", place);
        } else {
                if (json)
                        rows = describe_tensors(mapped->data, &tensors);
                else
                        table = tabulate_tensors(mapped->data, &tensors);
                torch_tensors_done(&tensors);
        }
        status = mapped_end(mapped, place, status, &error);
        if (status)
                code = cli_fail(json, &error);
        else if (json)
                code = cli_print_json(json_pack("{s:s, s:s, s:O}", "tag", tag, "name", name, "tensors", rows), code);
        else
                table_print(table, stdout, term_columns(), term_has_colour());
        json_decref(rows);
        table_free(table);
        return code;
}

static int no_records(bool json, const char *name)
{
        struct nebula_error error;

        error_set(&error, NEBULA_INVALID, 0, "\"%s\" is not a torch file: it has no records", name);
        return cli_fail(json, &error);
}

static int show_records(bool json, const char *tag, const char *name, uint64_t size, const struct zip_entry *entries, size_t count)
{
        if (json)
                return cli_print_json(json_pack("{s:s, s:s, s:I, s:o}", "tag", tag, "name", name, "size", (json_int_t)size, "records",
                                                describe_records(entries, count)),
                                      CLI_OK);
        print_records(entries, count);
        return CLI_OK;
}

/* Prints the records of the mapped bytes. `place` names the file in an error message. */
static int inspect_mapped(bool json, bool tensors, const char *tag, const char *name, struct mapped *mapped, const char *place)
{
        struct zip_entry *entries = NULL;
        struct nebula_error error;
        enum nebula_status status;
        size_t count;
        int code;

        if (tensors)
                return inspect_tensors(json, tag, name, mapped, place);
        status = zip_read(mapped->data, mapped->size, &entries, &count, &error);
        if (status)
                error_prefix(&error, "%s", place);
        if (mapped_end(mapped, place, status, &error)) {
                free(entries);
                return cli_fail(json, &error);
        }
        code = show_records(json, tag, name, mapped->size, entries, count);
        free(entries);
        return code;
}

/* The same for a stored file, of which only its directory is read. */
static int inspect_stored(bool json, struct store *store, const struct manifest *manifest, const char *name, const char *place)
{
        struct zip_entry *entries = NULL;
        struct nebula_error error;
        struct sparse sparse;
        enum nebula_status status;
        size_t count;
        int code;

        if (sparse_open(store, manifest, name, &sparse, &error))
                return cli_fail(json, &error);
        status = sparse_records(&sparse, &entries, &count, &error);
        if (status == NEBULA_CORRUPT)
                error_prefix(&error, "%s", place);
        if (sparse_end(&sparse, status, &error)) {
                code = cli_fail(json, &error);
        } else {
                code = show_records(json, manifest->tag, name, sparse.size, entries, count);
        }
        free(entries);
        sparse_close(&sparse);
        return code;
}

static int inspect_file(bool json, bool tensors, struct store *store, const struct manifest *manifest, const char *name)
{
        const struct manifest_file *file = manifest_find_file(manifest, name);
        struct record_file recorded;
        struct nebula_error error;
        struct mapped mapped;
        char key[MANIFEST_KEY_MAX], place[TARGET_PATH_MAX + MANIFEST_KEY_MAX];
        bool is_raw = false;
        int code;

        if (!file) {
                error_set(&error, NEBULA_NOT_FOUND, 0, "\"%s\" has no file \"%s\"; see `nebula inspect %s`", manifest->tag,
                          name, manifest->tag);
                return cli_fail(json, &error);
        }
        if (!manifest_load_file(store, manifest, name, &recorded, NULL)) {
                is_raw = !recorded.is_zip;
                record_file_done(&recorded);
        }
        if (is_raw)
                return no_records(json, name);
        if (manifest_file_key(manifest, file, key, &error))
                return cli_fail(json, &error);
        snprintf(place, sizeof place, "%s/%s", store->root, key);
        if (!tensors)
                return inspect_stored(json, store, manifest, name, place);
        if (mapped_open(store, key, &mapped, &error))
                return cli_fail(json, &error);
        code = inspect_mapped(json, tensors, manifest->tag, name, &mapped, place);
        mapped_close(&mapped);
        return code;
}

/* Asks the agent for a version that is only in its memory, or younger there than in storage. */
static enum nebula_status ask_memory(const struct cli_common *common, const char *tag, uint64_t than, struct cli_agent **ret_agent,
                                     uint64_t *ret_version_id, json_t **ret_version)
{
        char path[TARGET_PATH_MAX];
        struct cli_agent *agent = NULL;
        enum nebula_status status = target_path(common->path, path, NULL);

        if (!status && !cli_agent_open_if_any(path, &agent))
                status = NEBULA_UNAVAILABLE;
        if (!status)
                status = cli_agent_find_younger(agent, path, tag, than, ret_version_id, ret_version, NULL);
        if (status)
                cli_agent_close(agent);
        else
                *ret_agent = agent;
        return status;
}

static int inspect_memory_file(bool json, bool tensors, struct cli_agent *agent, uint64_t version_id, const json_t *version, const char *name)
{
        const json_t *files = json_object_get(version, "files");
        struct nebula_error error;
        struct mapped mapped;
        int code;

        for (size_t i = 0; i < json_array_size(files); i++) {
                const json_t *file = json_array_get(files, i);

                if (!strcmp(text_of(file, "name"), name) && !strcmp(text_of(file, "format"), "raw"))
                        return no_records(json, name);
        }
        if (mapped_open_memory(agent, version_id, name, &mapped, &error))
                return cli_fail(json, &error);
        code = inspect_mapped(json, tensors, text_of(version, "tag"), name, &mapped, "in the agent's memory");
        mapped_close(&mapped);
        return code;
}

static void print_remembered(const json_t *version)
{
        char size[HUMAN_MAX];

        term_print(STYLE_BOLD, "%s", text_of(version, "tag"));
        printf("  %s, %s, in the agent's memory\n\n", human_size((uint64_t)integer(version, "size"), size), text_of(version, "state"));
        print_files(version);
}

/* The agent's report in the form of describe(). It has no times of ranks. */
static json_t *describe_remembered(struct store *store, const json_t *version)
{
        static const char *const same[] = { "tag", "job", "run", "sequence", "step", "world", "state", "committed_at", "size", "files" };
        struct pins pins = { 0 };
        const struct pin *pin = store && !pins_load(store, true, &pins, NULL) ? pins_find(&pins, text_of(version, "tag")) : NULL;
        json_t *body = json_pack("{s:s, s:[], s:s?}", "path", text_of(version, "persist_path"), "ranks", "pinned", pin ? pin->reason : NULL);

        for (size_t i = 0; i < CLI_COUNT(same); i++)
                json_object_set(body, same[i], json_object_get(version, same[i]));
        pins_done(&pins);
        return body;
}

static int answer(bool json, json_t *version, void (*print)(const json_t *version))
{
        if (json)
                return cli_print_json(version, CLI_OK);
        print(version);
        json_decref(version);
        return CLI_OK;
}

int command_inspect(int argc, char **argv)
{
        struct cli_common common = { 0 };
        bool tensors = false;
        const struct args_option options[] = { CLI_COMMON(common), { "tensors", ARGS_FLAG, &tensors } };
        struct store *store = NULL;
        struct manifest manifest = { 0 };
        struct cli_agent *agent;
        uint64_t version_id;
        struct nebula_error error;
        enum nebula_status stored;
        struct args args;
        const char *name;
        json_t *version;
        int code;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 1, 2))
                return CLI_USAGE;
        if (tensors && args.count < 2)
                return cli_usage_error("inspect", "--tensors takes the NAME of a file");
        stored = target_open(common.path, &store, &error);
        if (!stored)
                stored = target_load(store, args.positionals[0], &manifest, NULL, &error);
        name = args.count == 2 ? args.positionals[1] : NULL;
        if (stored != NEBULA_CORRUPT && !ask_memory(&common, args.positionals[0], manifest.sequence, &agent, &version_id, &version)) {
                if (name) {
                        code = inspect_memory_file(common.json, tensors, agent, version_id, version, name);
                        json_decref(version);
                } else {
                        code = answer(common.json, describe_remembered(store, version), print_remembered);
                        json_decref(version);
                }
                cli_agent_close(agent);
        } else if (stored) {
                code = cli_fail(common.json, &error);
        } else if (name) {
                code = inspect_file(common.json, tensors, store, &manifest, name);
        } else {
                code = answer(common.json, describe(store, &manifest), print_version);
        }
        manifest_done(&manifest);
        if (store)
                store_close(store);
        return code;
}
