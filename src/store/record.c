#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/document.h"
#include "store/manifest.h"
#include "store/manifest_private.h"
#include "store/record.h"
#include "store/signature.h"

static json_t *format_file(const struct record_file *file)
{
        json_t *chunks = json_array(), *object;

        for (size_t i = 0; chunks && i < file->chunk_count; i++) {
                if (json_array_append_new(chunks, document_hex(file->chunks[i]))) {
                        json_decref(chunks);
                        chunks = NULL;
                }
        }
        if (!chunks)
                return NULL;
        object = json_pack("{s:s, s:I, s:I, s:s, s:I, s:o}", "name", file->name, "rank", (json_int_t)file->rank, "size",
                           (json_int_t)file->size, "format", file->is_zip ? "zip" : "raw", "chunk_bytes", (json_int_t)file->chunk_bytes,
                           "crc64", chunks);
        if (object && ((file->is_apart && json_object_set_new(object, "apart", json_true())) ||
                       (*file->mark.text && json_object_set_new(object, "mark", json_string(file->mark.text))) ||
                       (file->referred && json_object_set_new(object, "referred", json_integer((json_int_t)file->referred))) ||
                       (file->has_sha256 && json_object_set_new(object, "sha256", signature_digest_text(file->sha256))))) {
                json_decref(object);
                return NULL;
        }
        return object;
}

static json_t *format_rank(const struct record_rank *rank)
{
        return json_pack("[I, f, f]", (json_int_t)rank->rank, rank->begun, rank->captured);
}

enum nebula_status record_format(const struct record *record, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        json_t *body = document_new("record");
        json_t *files = json_array(), *ranks = json_array();
        json_t *head = json_pack("{s:s, s:s, s:s, s:s, s:I, s:I, s:f}", "tag", record->tag, "job", record->job, "run",
                                 record->run, "writing", record->writing, "number", (json_int_t)record->number, "world",
                                 (json_int_t)record->world, "persisted", record->persisted);
        enum nebula_status status;
        int failed = !body || !files || !ranks || !head || json_object_update(body, head);

        for (size_t i = 0; !failed && i < record->rank_count; i++)
                failed = json_array_append_new(ranks, format_rank(&record->ranks[i]));
        for (size_t i = 0; !failed && i < record->file_count; i++)
                failed = json_array_append_new(files, format_file(&record->files[i]));
        failed = failed || json_object_set(body, "ranks", ranks) || json_object_set(body, "files", files);
        status = failed ? error_set(error, NEBULA_INVALID, 0,
                                    "cannot format the record of rank %" PRIu32 " of \"%s\": a name is not UTF-8, or memory is out",
                                    record->rank_count ? record->ranks[0].rank : 0, record->tag) :
                          document_format(body, ret_text, ret_size, error);
        json_decref(body);
        json_decref(files);
        json_decref(ranks);
        json_decref(head);
        return status;
}

/* The caller frees `file`, also if the reader fails. */
static void parse_file(struct document_reader *reader, const json_t *object, struct record_file *file)
{
        char format[8] = "", encoded[256];
        json_t *chunks;

        document_text(reader, object, "name", 0, file->name, sizeof file->name);
        document_text(reader, object, "format", 0, format, sizeof format);
        file->rank = document_rank(reader, object);
        file->size = document_size(reader, object);
        file->chunk_bytes = (uint32_t)document_u64(reader, object, "chunk_bytes", MANIFEST_CHUNK_MAX);
        file->is_apart = json_is_true(json_object_get(object, "apart"));
        if (json_object_get(object, "mark"))
                document_text(reader, object, "mark", 0, file->mark.text, sizeof file->mark.text);
        if (json_object_get(object, "referred"))
                file->referred = document_u64(reader, object, "referred", file->size);
        file->has_sha256 = json_object_get(object, "sha256") != NULL;
        if (file->has_sha256 && !signature_read_digest(json_string_value(json_object_get(object, "sha256")), file->sha256))
                document_wrong(reader, "sha256", "is not 64 hex digits");
        chunks = document_array(reader, object, "crc64");
        if (reader->status)
                return;
        file->is_zip = !strcmp(format, "zip");
        if (!file->is_zip && strcmp(format, "raw"))
                document_wrong(reader, "format", "is neither zip nor raw");
        if (name_encode(file->name, encoded, NULL))
                document_wrong(reader, "name", "is not the name of a file");
        if (!file->chunk_bytes)
                document_wrong(reader, "chunk_bytes", "is 0");
        else if (json_array_size(chunks) != file->size / file->chunk_bytes + (file->size % file->chunk_bytes != 0))
                document_wrong(reader, "crc64", "does not have one checksum per chunk");
        if (reader->status || !json_array_size(chunks))
                return;
        file->chunks = calloc(json_array_size(chunks), sizeof *file->chunks);
        if (!file->chunks) {
                reader->status = error_set(reader->error, NEBULA_NO_MEMORY, 0, "no memory for %zu checksums",
                                           json_array_size(chunks));
                return;
        }
        file->chunk_count = json_array_size(chunks);
        for (size_t i = 0; i < file->chunk_count; i++)
                file->chunks[i] = document_crc64(reader, json_array_get(chunks, i), "crc64");
}

static void parse_files(struct document_reader *reader, const json_t *files, struct record *record)
{
        size_t count = json_array_size(files);

        if (reader->status || !count)
                return;
        record->files = calloc(count, sizeof *record->files);
        if (!record->files) {
                reader->status = error_set(reader->error, NEBULA_NO_MEMORY, 0, "no memory for %zu files", count);
                return;
        }
        for (size_t i = 0; i < count && !reader->status; i++) {
                record->file_count = i + 1;
                parse_file(reader, json_array_get(files, i), &record->files[i]);
        }
}

static double time_of(const json_t *value)
{
        double time = json_number_value(value);

        return json_is_number(value) && time >= 0 && time <= DOCUMENT_TIME_MAX ? time : -1;
}

static void parse_ranks(struct document_reader *reader, const json_t *ranks, struct record *record)
{
        size_t count = json_array_size(ranks);

        if (reader->status)
                return;
        if (!count || count > record->world) {
                document_wrong(reader, "ranks", "is empty, or has more ranks than there are");
                return;
        }
        record->ranks = calloc(count, sizeof *record->ranks);
        if (!record->ranks) {
                reader->status = error_set(reader->error, NEBULA_NO_MEMORY, 0, "no memory for %zu ranks", count);
                return;
        }
        record->rank_count = count;
        for (size_t i = 0; i < count; i++) {
                const json_t *one = json_array_get(ranks, i), *number = json_array_get(one, 0);
                json_int_t rank = json_is_integer(number) ? json_integer_value(number) : -1;
                struct record_rank *to = &record->ranks[i];

                *to = (struct record_rank){ (uint32_t)rank, time_of(json_array_get(one, 1)), time_of(json_array_get(one, 2)) };
                if (rank < 0 || rank >= record->world || to->begun < 0 || to->captured < 0 || (i && to->rank <= record->ranks[i - 1].rank)) {
                        document_wrong(reader, "ranks", "has a rank that is out of range or out of order, or its time is not one since 1970");
                        return;
                }
        }
}

static bool covers(const struct record *record, uint32_t rank)
{
        size_t low = 0, high = record->rank_count;

        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (record->ranks[middle].rank == rank)
                        return true;
                if (record->ranks[middle].rank < rank)
                        low = middle + 1;
                else
                        high = middle;
        }
        return false;
}

static void check_ranks(struct document_reader *reader, const struct record *record)
{
        for (size_t i = 0; i < record->file_count && !reader->status; i++)
                if (!covers(record, record->files[i].rank))
                        document_wrong(reader, "files", "names a file of a rank that is not listed");
}

static int compare_names(const void *a, const void *b)
{
        return strcmp((*(const struct record_file *const *)a)->name, (*(const struct record_file *const *)b)->name);
}

/* Checks that no name occurs twice. Sorts, so that hostile lists cost n log n. */
static void sort_files(struct document_reader *reader, struct record *record)
{
        const struct record_file **files;

        if (reader->status)
                return;
        files = calloc(record->file_count + 1, sizeof *files);
        record->by_name = calloc(record->file_count + 1, sizeof *record->by_name);
        if (!files || !record->by_name)
                reader->status = error_set(reader->error, NEBULA_NO_MEMORY, 0, "no memory for %zu files", record->file_count);
        for (size_t i = 0; i < record->file_count && !reader->status; i++)
                files[i] = &record->files[i];
        if (!reader->status)
                qsort(files, record->file_count, sizeof *files, compare_names);
        for (size_t i = 0; i < record->file_count && !reader->status; i++) {
                record->by_name[i] = (uint32_t)(files[i] - record->files);
                if (i && !compare_names(&files[i - 1], &files[i]))
                        document_wrong(reader, "files", "names one file twice");
        }
        free(files);
}

enum nebula_status record_parse(const char *text, size_t size, struct record *ret_record, struct nebula_error *error)
{
        struct document_reader reader = { .kind = "record", .error = error };
        struct record record = { 0 };
        json_t *body;
        enum nebula_status status = document_parse(text, size, "record", &body, error);

        if (status)
                return status;
        document_text(&reader, body, "tag", 0, record.tag, sizeof record.tag);
        document_text(&reader, body, "job", 1, record.job, sizeof record.job);
        document_text(&reader, body, "run", 1, record.run, sizeof record.run);
        document_text(&reader, body, "writing", 0, record.writing, sizeof record.writing);
        if (!reader.status && !writing_is_sound(record.writing))
                document_wrong(&reader, "writing", "is not the name of a writing");
        record.number = document_number(&reader, body);
        record.world = document_world(&reader, body);
        record.persisted = document_time(&reader, body, "persisted");
        parse_ranks(&reader, document_array(&reader, body, "ranks"), &record);
        parse_files(&reader, document_array(&reader, body, "files"), &record);
        json_decref(body);
        check_ranks(&reader, &record);
        sort_files(&reader, &record);
        if (reader.status) {
                record_done(&record);
                return reader.status;
        }
        *ret_record = record;
        return NEBULA_OK;
}

void record_file_done(struct record_file *file)
{
        free(file->chunks);
        file->chunks = NULL;
        file->chunk_count = 0;
}

void record_done(struct record *record)
{
        for (size_t i = 0; i < record->file_count; i++)
                record_file_done(&record->files[i]);
        free(record->files);
        free(record->ranks);
        free(record->by_name);
        record->files = NULL;
        record->ranks = NULL;
        record->by_name = NULL;
        record->file_count = record->rank_count = 0;
}
