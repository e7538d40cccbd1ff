#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/document.h"
#include "store/manifest.h"
#include "store/manifest_private.h"

static json_t *format_file(const struct manifest_file *file)
{
        return json_pack("{s:s, s:s, s:I, s:I, s:I}", "name", file->name, "path", file->path, "size",
                         (json_int_t)file->size, "rank", (json_int_t)file->rank, "generation",
                         (json_int_t)file->generation);
}

static json_t *format_record(const struct manifest_record *record)
{
        return json_pack("{s:I, s:I, s:s, s:I, s:o}", "rank", (json_int_t)record->rank, "generation",
                         (json_int_t)record->generation, "path", record->path, "size", (json_int_t)record->size,
                         "crc64", document_hex(record->crc64));
}

enum nebula_status manifest_format(const struct manifest *manifest, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        json_t *body = document_new("manifest");
        json_t *files = json_array(), *records = json_array();
        json_t *head = json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I}", "tag", manifest->tag, "job", manifest->job,
                                 "run", manifest->run, "generation", (json_int_t)manifest->generation, "step",
                                 (json_int_t)manifest->step, "world", (json_int_t)manifest->world, "sequence",
                                 (json_int_t)manifest->sequence);
        enum nebula_status status = document_check_numbers(manifest->tag, manifest->generation, manifest->sequence, error);
        int failed = status || !body || !files || !records || !head || json_object_update(body, head) ||
                     (*manifest->host && json_object_set_new(body, "host", json_string(manifest->host)));

        for (size_t i = 0; !failed && i < manifest->file_count; i++)
                failed = json_array_append_new(files, format_file(&manifest->files[i]));
        for (size_t i = 0; !failed && i < manifest->record_count; i++)
                failed = json_array_append_new(records, format_record(&manifest->records[i]));
        failed = failed || !line_format(&manifest->line, body) || json_object_set(body, "files", files) || json_object_set(body, "records", records);
        if (!status)
                status = failed ? error_set(error, NEBULA_INVALID, 0,
                                            "cannot format the manifest of \"%s\": a name is not UTF-8, or memory is out",
                                            manifest->tag) :
                                  document_format(body, ret_text, ret_size, error);
        json_decref(body);
        json_decref(files);
        json_decref(records);
        json_decref(head);
        return status;
}

static void parse_files(struct document_reader *reader, const json_t *files, struct manifest *manifest)
{
        size_t count = json_array_size(files);

        if (reader->status || !count)
                return;
        manifest->files = calloc(count, sizeof *manifest->files);
        if (!manifest->files) {
                reader->status = error_set(reader->error, NEBULA_NO_MEMORY, 0, "no memory for %zu files", count);
                return;
        }
        manifest->file_count = count;
        for (size_t i = 0; i < count && !reader->status; i++) {
                struct manifest_file *file = &manifest->files[i];
                const json_t *object = json_array_get(files, i);

                document_text(reader, object, "name", 0, file->name, sizeof file->name);
                document_text(reader, object, "path", 0, file->path, sizeof file->path);
                file->size = document_size(reader, object);
                file->rank = document_rank(reader, object);
                file->generation = document_generation(reader, object, manifest->generation);
                if (!reader->status && !manifest_path_is_of(file->path, file->name))
                        document_wrong(reader, "path", "is not where a file of that name lies");
        }
}

static void parse_records(struct document_reader *reader, const json_t *records, struct manifest *manifest)
{
        size_t count = json_array_size(records);

        if (reader->status || !count)
                return;
        manifest->records = calloc(count, sizeof *manifest->records);
        if (!manifest->records) {
                reader->status = error_set(reader->error, NEBULA_NO_MEMORY, 0, "no memory for %zu records", count);
                return;
        }
        manifest->record_count = count;
        for (size_t i = 0; i < count && !reader->status; i++) {
                struct manifest_record *record = &manifest->records[i];
                const json_t *object = json_array_get(records, i);
                char expected[64];

                record->rank = document_rank(reader, object);
                record->generation = document_generation(reader, object, manifest->generation);
                document_text(reader, object, "path", 0, record->path, sizeof record->path);
                record->size = document_u64(reader, object, "size", DOCUMENT_TEXT_MAX);
                record->crc64 = document_crc64(reader, json_object_get(object, "crc64"), "crc64");
                if (reader->status)
                        return;
                record_path(record->rank, record->generation, expected);
                if (strcmp(record->path, expected))
                        document_wrong(reader, "path", "is not where that record belongs");
        }
}

static int compare_records(const void *a, const void *b)
{
        const struct manifest_record *x = *(const struct manifest_record *const *)a;
        const struct manifest_record *y = *(const struct manifest_record *const *)b;

        if (x->rank != y->rank)
                return x->rank < y->rank ? -1 : 1;
        return (x->generation > y->generation) - (x->generation < y->generation);
}

static int compare_paths(const void *a, const void *b)
{
        const struct manifest_file *x = *(const struct manifest_file *const *)a;
        const struct manifest_file *y = *(const struct manifest_file *const *)b;

        return strcmp(x->path, y->path);
}

static int compare_names(const void *a, const void *b)
{
        const struct manifest_file *x = *(const struct manifest_file *const *)a;
        const struct manifest_file *y = *(const struct manifest_file *const *)b;

        return strcmp(x->name, y->name);
}

/* Every file has its record, and no name, path or record stands twice. Sorted, so that hostile lists cost n log n. */
static void check_links(struct document_reader *reader, const struct manifest *manifest)
{
        const struct manifest_record **records = calloc(manifest->record_count + 1, sizeof *records);
        const struct manifest_file **files = calloc(manifest->file_count + 1, sizeof *files);

        if (!records || !files) {
                reader->status = error_set(reader->error, NEBULA_NO_MEMORY, 0, "no memory to check the manifest");
                goto out;
        }
        for (size_t i = 0; i < manifest->record_count; i++)
                records[i] = &manifest->records[i];
        for (size_t i = 0; i < manifest->file_count; i++)
                files[i] = &manifest->files[i];
        qsort(records, manifest->record_count, sizeof *records, compare_records);
        for (size_t i = 1; i < manifest->record_count; i++)
                if (!compare_records(&records[i - 1], &records[i]))
                        document_wrong(reader, "records", "names one record twice");
        qsort(files, manifest->file_count, sizeof *files, compare_paths);
        for (size_t i = 1; i < manifest->file_count; i++)
                if (!compare_paths(&files[i - 1], &files[i]))
                        document_wrong(reader, "files", "names one path twice");
        qsort(files, manifest->file_count, sizeof *files, compare_names);
        for (size_t i = 1; i < manifest->file_count; i++)
                if (!compare_names(&files[i - 1], &files[i]))
                        document_wrong(reader, "files", "names one file twice");
        for (size_t i = 0; i < manifest->file_count && !reader->status; i++) {
                struct manifest_record wanted = { .rank = files[i]->rank, .generation = files[i]->generation };
                const struct manifest_record *key = &wanted;

                if (!bsearch(&key, records, manifest->record_count, sizeof *records, compare_records))
                        document_wrong(reader, "files", "names a file of a record that is not listed");
        }
out:
        free(records);
        free(files);
}

enum nebula_status manifest_parse(const char *text, size_t size, struct manifest *ret_manifest, struct nebula_error *error)
{
        struct document_reader reader = { .kind = "manifest", .error = error };
        struct manifest manifest = { 0 };
        json_t *body;
        enum nebula_status status = document_parse(text, size, "manifest", &body, error);

        if (status)
                return status;
        document_text(&reader, body, "tag", 0, manifest.tag, sizeof manifest.tag);
        document_text(&reader, body, "job", 1, manifest.job, sizeof manifest.job);
        document_text(&reader, body, "run", 1, manifest.run, sizeof manifest.run);
        if (json_object_get(body, "host"))
                document_text(&reader, body, "host", 1, manifest.host, sizeof manifest.host);
        manifest.generation = document_generation(&reader, body, UINT64_MAX);
        manifest.step = document_step(&reader, body, "step");
        manifest.world = document_world(&reader, body);
        manifest.sequence = document_sequence(&reader, body);
        if (!reader.status && manifest.step != name_step(manifest.tag))
                document_wrong(&reader, "step", "is not that of the tag");
        line_parse(&reader, body, &manifest.line);
        if (!reader.status && line_began(&manifest.line) > manifest.sequence)
                document_wrong(&reader, "line", "began after this version");
        parse_files(&reader, document_array(&reader, body, "files"), &manifest);
        parse_records(&reader, document_array(&reader, body, "records"), &manifest);
        json_decref(body);
        if (!reader.status)
                check_links(&reader, &manifest);
        if (reader.status) {
                manifest_done(&manifest);
                return reader.status;
        }
        *ret_manifest = manifest;
        return NEBULA_OK;
}

void manifest_done(struct manifest *manifest)
{
        free(manifest->files);
        free(manifest->records);
        manifest->files = NULL;
        manifest->records = NULL;
        manifest->file_count = manifest->record_count = 0;
}
