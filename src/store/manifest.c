#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"
#include "store/document.h"
#include "store/line_document.h"
#include "store/manifest.h"
#include "store/manifest_private.h"

#define NAMES_BLOCK_BYTES (64u << 10)

/* Names lie one after the other in blocks that never move. */
struct manifest_names {
        struct manifest_names *next;
        size_t used, size;
        char bytes[];
};

static const char *keep_name(struct manifest *manifest, const char *name)
{
        size_t size = strlen(name) + 1;
        struct manifest_names *names = manifest->names;
        char *to;

        if (!names || names->size - names->used < size) {
                /* Many checkpoints have few files: the first block is small. */
                size_t room = names ? NAMES_BLOCK_BYTES : size * 8;

                names = malloc(sizeof *names + (room < size ? size : room));
                if (!names)
                        return NULL;
                *names = (struct manifest_names){ manifest->names, 0, room < size ? size : room };
                manifest->names = names;
        }
        to = names->bytes + names->used;
        names->used += size;
        memcpy(to, name, size);
        return to;
}

enum nebula_status manifest_reserve(struct manifest *manifest, size_t files, size_t records, struct nebula_error *error)
{
        struct manifest_file *more_files = realloc(manifest->files, (manifest->file_count + files + 1) * sizeof *more_files);
        struct manifest_record *more_records;

        if (more_files)
                manifest->files = more_files;
        more_records = more_files ? realloc(manifest->records, (manifest->record_count + records + 1) * sizeof *more_records) : NULL;
        if (!more_records)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a manifest of %zu files", manifest->file_count + files);
        manifest->records = more_records;
        return NEBULA_OK;
}

enum nebula_status manifest_add_file(struct manifest *manifest, const struct manifest_file *file, struct nebula_error *error)
{
        const char *name = keep_name(manifest, file->name);

        if (!name)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", manifest->tag);
        manifest->files[manifest->file_count] = *file;
        manifest->files[manifest->file_count++].name = name;
        return NEBULA_OK;
}

void manifest_done(struct manifest *manifest)
{
        while (manifest->names) {
                struct manifest_names *next = manifest->names->next;

                free(manifest->names);
                manifest->names = next;
        }
        free(manifest->files);
        free(manifest->records);
        free(manifest->by_name);
        manifest->by_name = NULL;
        manifest->files = NULL;
        manifest->records = NULL;
        manifest->file_count = manifest->record_count = 0;
        manifest->is_brief = false;
}

uint64_t manifest_file_sequence(const struct manifest *manifest, const struct manifest_file *file)
{
        return file->record < manifest->record_count ? manifest->records[file->record].sequence : 0;
}

uint64_t manifest_file_origin(const struct manifest *manifest, const struct manifest_file *file)
{
        uint64_t sequence = manifest_file_sequence(manifest, file);

        return sequence == manifest->sequence ? 0 : sequence;
}

/* The bytes of the files that this writing made. */
static uint64_t own_bytes(const struct manifest *manifest)
{
        uint64_t bytes = 0;

        for (size_t i = 0; i < manifest->file_count; i++)
                if (!manifest_file_origin(manifest, &manifest->files[i]))
                        bytes += manifest->files[i].size;
        return bytes;
}

size_t manifest_count(const struct manifest *manifest)
{
        return manifest->is_brief ? manifest->all_files : manifest->file_count;
}

uint64_t manifest_size(const struct manifest *manifest)
{
        uint64_t size = 0;

        for (size_t i = 0; i < manifest->file_count; i++)
                size += manifest->files[i].size;
        return manifest->is_brief ? manifest->size : size;
}

uint64_t manifest_written(const struct manifest *manifest)
{
        return manifest->is_brief ? manifest->written : own_bytes(manifest) - manifest->referred;
}

void manifest_copy_brief(const struct manifest *manifest, struct manifest *ret_copy)
{
        *ret_copy = *manifest;
        ret_copy->is_brief = true;
        ret_copy->size = manifest_size(manifest);
        ret_copy->written = manifest_written(manifest);
        ret_copy->all_files = manifest_count(manifest);
        ret_copy->file_count = ret_copy->record_count = 0;
        ret_copy->files = NULL;
        ret_copy->records = NULL;
        ret_copy->names = NULL;
        ret_copy->by_name = NULL;
}

void manifest_make_brief(struct manifest *manifest)
{
        struct manifest brief;

        manifest_copy_brief(manifest, &brief);
        manifest_done(manifest);
        *manifest = brief;
}

static enum nebula_status check_numbers(const struct manifest *manifest, struct nebula_error *error)
{
        enum nebula_status status = document_check_numbers(manifest->tag, manifest->writing, manifest->sequence, error);

        return status ? status : document_check_number(manifest->tag, manifest->number, error);
}

enum nebula_status manifest_format(const struct manifest *manifest, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        json_t *body = document_new("manifest");
        json_t *head = json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I}", "tag", manifest->tag, "job", manifest->job,
                                 "run", manifest->run, "number", (json_int_t)manifest->number, "writing", (json_int_t)manifest->writing, "step",
                                 (json_int_t)manifest->step, "world", (json_int_t)manifest->world, "sequence",
                                 (json_int_t)manifest->sequence);
        enum nebula_status status = check_numbers(manifest, error);
        struct buf lists = { 0 };
        int failed = status || !body || !head || json_object_update(body, head) ||
                     (*manifest->host && json_object_set_new(body, "host", json_string(manifest->host))) ||
                     (manifest->referred && json_object_set_new(body, "referred", json_integer((json_int_t)manifest->referred))) ||
                     (*manifest->thinned && json_object_set_new(body, "thinned", json_string(manifest->thinned)));

        failed = failed || !line_format(&manifest->line, body) || !manifest_lists_write(manifest, &lists);
        if (!status)
                status = failed ? error_set(error, NEBULA_INVALID, 0,
                                            "cannot format the manifest of \"%s\": a name is not UTF-8, or memory is out",
                                            manifest->tag) :
                                  document_format_with(body, lists.data, lists.size, ret_text, ret_size, error);
        buf_done(&lists);
        json_decref(body);
        json_decref(head);
        return status;
}

static void parse_files(struct document_reader *reader, const json_t *files, struct manifest *manifest)
{
        size_t count = json_array_size(files);

        if (reader->status)
                return;
        reader->status = manifest_reserve(manifest, count, 0, reader->error);
        for (size_t i = 0; i < count && !reader->status; i++) {
                const json_t *object = json_array_get(files, i);
                char name[MANIFEST_NAME_MAX], encoded[256];
                struct manifest_file file = { .name = name };

                document_text(reader, object, "name", 0, name, sizeof name);
                file.size = document_size(reader, object);
                file.rank = document_rank(reader, object);
                file.record = (uint32_t)document_u64(reader, object, "record", DOCUMENT_WORLD_MAX);
                file.is_apart = json_is_true(json_object_get(object, "apart"));
                if (!reader->status && name_encode(name, encoded, NULL))
                        document_wrong(reader, "name", "is not the name of a file");
                if (!reader->status)
                        reader->status = manifest_add_file(manifest, &file, reader->error);
        }
}

static void parse_records(struct document_reader *reader, const json_t *records, struct manifest *manifest)
{
        size_t count = json_array_size(records);

        if (reader->status)
                return;
        reader->status = manifest_reserve(manifest, 0, count, reader->error);
        for (size_t i = 0; i < count && !reader->status; i++) {
                struct manifest_record *record = &manifest->records[i];
                const json_t *object = json_array_get(records, i);

                memset(record, 0, sizeof *record);
                manifest->record_count = i + 1;
                record->rank = document_rank(reader, object);
                record->sequence = document_sequence(reader, object);
                document_text(reader, object, "writing", 0, record->writing, sizeof record->writing);
                record->size = document_u64(reader, object, "size", DOCUMENT_TEXT_MAX);
                record->crc64 = document_crc64(reader, json_object_get(object, "crc64"), "crc64");
                if (!reader->status && !writing_is_sound(record->writing))
                        document_wrong(reader, "writing", "is not the name of a writing");
        }
}

/* A record is of this version, or of an earlier one. */
static void check_sequences(struct document_reader *reader, const struct manifest *manifest)
{
        bool is_sound = true;

        for (size_t i = 0; i < manifest->record_count; i++)
                is_sound = is_sound && manifest->records[i].sequence <= manifest->sequence;
        if (!is_sound)
                document_wrong(reader, "sequence", "of a record is later than that of the version");
}

static int compare_records(const void *a, const void *b)
{
        const struct manifest_record *x = *(const struct manifest_record *const *)a;
        const struct manifest_record *y = *(const struct manifest_record *const *)b;
        int order = strcmp(x->writing, y->writing);

        return order ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

static int compare_names(const void *a, const void *b)
{
        return strcmp((*(const struct manifest_file *const *)a)->name, (*(const struct manifest_file *const *)b)->name);
}

enum nebula_status manifest_sort_names(struct manifest *manifest, struct nebula_error *error)
{
        const struct manifest_file **files = calloc(manifest->file_count + 1, sizeof *files);
        uint32_t *by_name = calloc(manifest->file_count + 1, sizeof *by_name);

        if (!files || !by_name) {
                free(files);
                free(by_name);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the names of %zu files", manifest->file_count);
        }
        for (size_t i = 0; i < manifest->file_count; i++)
                files[i] = &manifest->files[i];
        qsort(files, manifest->file_count, sizeof *files, compare_names);
        for (size_t i = 0; i < manifest->file_count; i++)
                by_name[i] = (uint32_t)(files[i] - manifest->files);
        free(files);
        free(manifest->by_name);
        manifest->by_name = by_name;
        return NEBULA_OK;
}

static void check_files(struct document_reader *reader, const struct manifest *manifest)
{
        for (size_t i = 0; i < manifest->file_count; i++) {
                const struct manifest_file *file = &manifest->files[manifest->by_name[i]];

                if (i && !strcmp(manifest->files[manifest->by_name[i - 1]].name, file->name))
                        document_wrong(reader, "files", "names one file twice");
                if (file->record >= manifest->record_count)
                        document_wrong(reader, "files", "names a file of a record that is not listed");
        }
}

/* Checks that every file has its record, and that no name or record occurs twice. Sorts, so that hostile lists cost n log n. */
static void check_links(struct document_reader *reader, struct manifest *manifest)
{
        const struct manifest_record **records = calloc(manifest->record_count + 1, sizeof *records);

        if (!records) {
                reader->status = error_set(reader->error, NEBULA_NO_MEMORY, 0, "no memory to check the manifest");
                return;
        }
        for (size_t i = 0; i < manifest->record_count; i++)
                records[i] = &manifest->records[i];
        qsort(records, manifest->record_count, sizeof *records, compare_records);
        for (size_t i = 1; i < manifest->record_count; i++)
                if (!compare_records(&records[i - 1], &records[i]))
                        document_wrong(reader, "records", "names one record twice");
        free(records);
        if (!reader->status)
                reader->status = manifest_sort_names(manifest, reader->error);
        if (!reader->status)
                check_files(reader, manifest);
}

/* Reads the lists without JSON values, and the rest with them. False: the JSON parser has to read the whole text, and reports what is
 * wrong. */
static bool read_apart(const char *text, size_t size, struct manifest *manifest, json_t **ret_body)
{
        struct buf rest = { 0 };
        bool is_read = manifest_lists_read(text, size, manifest, &rest) &&
                       !document_parse_checked(rest.data, rest.size, "manifest", ret_body, NULL);

        buf_done(&rest);
        if (!is_read)
                manifest_done(manifest);
        return is_read;
}

enum nebula_status manifest_parse(const char *text, size_t size, struct manifest *ret_manifest, struct nebula_error *error)
{
        struct document_reader reader = { .kind = "manifest", .error = error };
        struct manifest manifest = { 0 };
        json_t *body;
        enum nebula_status status = document_check_seal(text, size, "manifest", error);
        bool has_lists = !status && read_apart(text, size, &manifest, &body);

        if (!status && !has_lists)
                status = document_parse_checked(text, size, "manifest", &body, error);
        if (status)
                return status;
        document_text(&reader, body, "tag", 0, manifest.tag, sizeof manifest.tag);
        document_text(&reader, body, "job", 1, manifest.job, sizeof manifest.job);
        document_text(&reader, body, "run", 1, manifest.run, sizeof manifest.run);
        if (json_object_get(body, "host"))
                document_text(&reader, body, "host", 1, manifest.host, sizeof manifest.host);
        if (json_object_get(body, "thinned"))
                document_text(&reader, body, "thinned", 1, manifest.thinned, sizeof manifest.thinned);
        manifest.number = document_number(&reader, body);
        manifest.writing = document_writing(&reader, body);
        manifest.step = document_step(&reader, body, "step");
        manifest.world = document_world(&reader, body);
        manifest.sequence = document_sequence(&reader, body);
        if (!reader.status && manifest.step != name_step(manifest.tag))
                document_wrong(&reader, "step", "is not that of the tag");
        line_parse(&reader, body, &manifest.line);
        if (!reader.status && line_began(&manifest.line) > manifest.sequence)
                document_wrong(&reader, "line", "began after this version");
        if (!has_lists) {
                parse_files(&reader, document_array(&reader, body, "files"), &manifest);
                parse_records(&reader, document_array(&reader, body, "records"), &manifest);
        }
        if (!reader.status)
                check_sequences(&reader, &manifest);
        if (json_object_get(body, "referred"))
                manifest.referred = document_u64(&reader, body, "referred", own_bytes(&manifest));
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
