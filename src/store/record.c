#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/document.h"
#include "store/manifest.h"
#include "store/manifest_private.h"

static void private_path(const char *what, uint32_t rank, uint64_t generation, char ret_path[64])
{
        if (generation <= 1)
                snprintf(ret_path, 64, MANIFEST_DIRECTORY "/%s-%05" PRIu32 ".json", what, rank);
        else
                snprintf(ret_path, 64, MANIFEST_DIRECTORY "/%s-%05" PRIu32 ".g%" PRIu64 ".json", what, rank, generation);
}

void record_path(uint32_t rank, uint64_t generation, char ret_path[64])
{
        private_path("rank", rank, generation, ret_path);
}

void claim_path(uint32_t rank, uint64_t generation, char ret_path[64])
{
        private_path("claim", rank, generation, ret_path);
}

bool manifest_path_is_of(const char *path, const char *name)
{
        char encoded[256];

        return !name_encode(name, encoded, NULL) && !strcmp(path, encoded);
}

static json_t *format_file(const struct record_file *file)
{
        json_t *chunks = json_array();

        for (size_t i = 0; chunks && i < file->chunk_count; i++) {
                if (json_array_append_new(chunks, document_hex(file->chunks[i]))) {
                        json_decref(chunks);
                        chunks = NULL;
                }
        }
        if (!chunks)
                return NULL;
        return json_pack("{s:s, s:s, s:I, s:s, s:I, s:o}", "name", file->name, "path", file->path, "size",
                         (json_int_t)file->size, "format", file->is_zip ? "zip" : "raw", "chunk_bytes",
                         (json_int_t)file->chunk_bytes, "crc64", chunks);
}

enum nebula_status record_format(const struct record *record, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        json_t *body = document_new("record");
        json_t *files = json_array();
        json_t *head = json_pack("{s:s, s:s, s:s, s:I, s:I, s:I}", "tag", record->tag, "job", record->job, "run",
                                 record->run, "generation", (json_int_t)record->generation, "rank",
                                 (json_int_t)record->rank, "world", (json_int_t)record->world);
        json_t *times = json_pack("{s:f, s:f, s:f}", "begun", record->begun, "captured", record->captured, "persisted",
                                  record->persisted);
        enum nebula_status status;
        int failed = !body || !files || !head || !times || json_object_update(body, head);

        for (size_t i = 0; !failed && i < record->file_count; i++)
                failed = json_array_append_new(files, format_file(&record->files[i]));
        failed = failed || json_object_set(body, "files", files) || json_object_set(body, "times", times);
        status = failed ? error_set(error, NEBULA_INVALID, 0,
                                    "cannot format the record of rank %" PRIu32 " of \"%s\": a name is not UTF-8, or memory is out",
                                    record->rank, record->tag) :
                          document_format(body, ret_text, ret_size, error);
        json_decref(body);
        json_decref(files);
        json_decref(head);
        json_decref(times);
        return status;
}

/* `file` becomes the caller's to free also when the reader fails in the middle. */
static void parse_file(struct document_reader *reader, const json_t *object, struct record_file *file)
{
        char format[8] = "";
        json_t *chunks;

        document_text(reader, object, "name", 0, file->name, sizeof file->name);
        document_text(reader, object, "path", 0, file->path, sizeof file->path);
        document_text(reader, object, "format", 0, format, sizeof format);
        file->size = document_size(reader, object);
        file->chunk_bytes = (uint32_t)document_u64(reader, object, "chunk_bytes", MANIFEST_CHUNK_MAX);
        chunks = document_array(reader, object, "crc64");
        if (reader->status)
                return;
        file->is_zip = !strcmp(format, "zip");
        if (!file->is_zip && strcmp(format, "raw"))
                document_wrong(reader, "format", "is neither zip nor raw");
        if (!manifest_path_is_of(file->path, file->name))
                document_wrong(reader, "path", "is not where a file of that name lies");
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

enum nebula_status record_parse(const char *text, size_t size, struct record *ret_record, struct nebula_error *error)
{
        struct document_reader reader = { .kind = "record", .error = error };
        struct record record = { 0 };
        json_t *body, *times;
        enum nebula_status status = document_parse(text, size, "record", &body, error);

        if (status)
                return status;
        document_text(&reader, body, "tag", 0, record.tag, sizeof record.tag);
        document_text(&reader, body, "job", 1, record.job, sizeof record.job);
        document_text(&reader, body, "run", 1, record.run, sizeof record.run);
        record.generation = document_generation(&reader, body, UINT64_MAX);
        record.world = document_world(&reader, body);
        record.rank = document_rank(&reader, body);
        if (!reader.status && record.rank >= record.world)
                document_wrong(&reader, "rank", "is not below \"world\"");
        times = document_object(&reader, body, "times");
        record.begun = document_time(&reader, times, "begun");
        record.captured = document_time(&reader, times, "captured");
        record.persisted = document_time(&reader, times, "persisted");
        parse_files(&reader, document_array(&reader, body, "files"), &record);
        json_decref(body);
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
        record->files = NULL;
        record->file_count = 0;
}
