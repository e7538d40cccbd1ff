/* The two long lists of a manifest's text. A JSON value for each of their entries costs 20 times as much time as the entries
 * themselves, and the agents of all nodes read the manifest of every version. So this file writes the entries as text, and reads
 * entries that were written so. Any other text is left to the JSON parser, which decides alone what is refused, and why. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"
#include "store/document.h"
#include "store/manifest_private.h"

#define FILES_KEY ",\"files\":["
#define RECORDS_KEY ",\"records\":["

/* ---- writing ---- */

static bool is_plain(char byte)
{
        return byte >= ' ' && byte <= '~' && byte != '"' && byte != '\\';
}

/* False: the text is not UTF-8, or memory is out. */
static bool add_string(struct buf *to, const char *text)
{
        size_t plain = 0;
        json_t *value;
        char *quoted;

        while (is_plain(text[plain]))
                plain++;
        if (!text[plain]) {
                buf_add_byte(to, '"');
                buf_add(to, text, plain);
                buf_add_byte(to, '"');
                return true;
        }
        value = json_string(text);
        quoted = value ? json_dumps(value, JSON_ENCODE_ANY) : NULL;
        if (quoted)
                buf_add_text(to, quoted);
        json_decref(value);
        free(quoted);
        return quoted != NULL;
}

static bool add_file(struct buf *to, const struct manifest_file *file)
{
        char numbers[160];

        buf_add_text(to, "{\"name\":");
        if (!add_string(to, file->name))
                return false;
        snprintf(numbers, sizeof numbers, ",\"size\":%" PRIu64 ",\"rank\":%" PRIu32 ",\"record\":%" PRIu32 "%s}",
                 file->size, file->rank, file->record, file->is_apart ? ",\"apart\":true" : "");
        buf_add_text(to, numbers);
        return true;
}

static void add_record(struct buf *to, const struct manifest_record *record)
{
        char text[WRITING_MAX + 160];

        snprintf(text, sizeof text, "{\"rank\":%" PRIu32 ",\"sequence\":%" PRIu64 ",\"writing\":\"%s\",\"size\":%" PRIu64 ",\"crc64\":\"%016" PRIx64 "\"}",
                 record->rank, record->sequence, record->writing, record->size, record->crc64);
        buf_add_text(to, text);
}

bool manifest_lists_write(const struct manifest *manifest, struct buf *to)
{
        buf_add_text(to, FILES_KEY);
        for (size_t i = 0; i < manifest->file_count; i++) {
                if (i)
                        buf_add_byte(to, ',');
                if (!add_file(to, &manifest->files[i]))
                        return false;
        }
        buf_add_text(to, "]" RECORDS_KEY);
        for (size_t i = 0; i < manifest->record_count; i++) {
                if (i)
                        buf_add_byte(to, ',');
                add_record(to, &manifest->records[i]);
        }
        buf_add_byte(to, ']');
        return !to->failed;
}

/* ---- reading ---- */

/* `is_other`: the text at `at` is not what this file writes. Later steps then do nothing. */
struct reading {
        const char *at, *end;
        bool is_other;
};

static bool has(struct reading *reading, const char *text)
{
        size_t length = strlen(text);

        if (reading->is_other || (size_t)(reading->end - reading->at) < length || memcmp(reading->at, text, length))
                return false;
        reading->at += length;
        return true;
}

static void expect(struct reading *reading, const char *text)
{
        if (!has(reading, text))
                reading->is_other = true;
}

/* A number without sign and leading zeros. */
static uint64_t number(struct reading *reading, const char *before, uint64_t least, uint64_t most)
{
        const char *first;
        uint64_t value = 0;

        expect(reading, before);
        first = reading->at;
        while (!reading->is_other && reading->at < reading->end && *reading->at >= '0' && *reading->at <= '9' && reading->at - first < 18)
                value = value * 10 + (uint64_t)(*reading->at++ - '0');
        if (reading->at == first || (*first == '0' && reading->at - first > 1) || value < least || value > most)
                reading->is_other = true;
        return value;
}

/* A text without escapes, which is not empty. */
static void string(struct reading *reading, const char *before, char *ret_text, size_t size)
{
        const char *first;
        size_t length;

        expect(reading, before);
        expect(reading, "\"");
        first = reading->at;
        while (!reading->is_other && reading->at < reading->end && is_plain(*reading->at))
                reading->at++;
        length = (size_t)(reading->at - first);
        if (!length || length >= size)
                reading->is_other = true;
        expect(reading, "\"");
        ret_text[0] = 0;
        if (reading->is_other)
                return;
        memcpy(ret_text, first, length);
        ret_text[length] = 0;
}

static void read_file(struct reading *reading, char name[MANIFEST_NAME_MAX], struct manifest_file *ret_file)
{
        char encoded[256];

        *ret_file = (struct manifest_file){ .name = name };
        string(reading, "{\"name\":", name, MANIFEST_NAME_MAX);
        ret_file->size = number(reading, ",\"size\":", 0, DOCUMENT_SIZE_MAX);
        ret_file->rank = (uint32_t)number(reading, ",\"rank\":", 0, DOCUMENT_WORLD_MAX - 1);
        ret_file->record = (uint32_t)number(reading, ",\"record\":", 0, DOCUMENT_WORLD_MAX);
        ret_file->is_apart = has(reading, ",\"apart\":true");
        expect(reading, "}");
        if (!reading->is_other && name_encode(name, encoded, NULL))
                reading->is_other = true;
}

static void read_record(struct reading *reading, struct manifest_record *ret_record)
{
        char crc64[17];

        *ret_record = (struct manifest_record){ 0 };
        ret_record->rank = (uint32_t)number(reading, "{\"rank\":", 0, DOCUMENT_WORLD_MAX - 1);
        ret_record->sequence = number(reading, ",\"sequence\":", 1, DOCUMENT_SEQUENCE_MAX);
        string(reading, ",\"writing\":", ret_record->writing, sizeof ret_record->writing);
        ret_record->size = number(reading, ",\"size\":", 0, DOCUMENT_TEXT_MAX);
        string(reading, ",\"crc64\":", crc64, sizeof crc64);
        expect(reading, "}");
        if (!reading->is_other && (!writing_is_sound(ret_record->writing) || !document_hex_value(crc64, &ret_record->crc64)))
                reading->is_other = true;
}

/* Makes room for one more entry. NEBULA_NO_MEMORY is left to the parser, which reports it. */
static void make_room(struct reading *reading, struct manifest *manifest, size_t count, bool is_file)
{
        if (!reading->is_other && !(count & (count - 1)) && /* 0, 1, 2, 4, ...: it doubles */
            manifest_reserve(manifest, is_file ? count + 1 : 0, is_file ? 0 : count + 1, NULL))
                reading->is_other = true;
}

static void read_files(struct reading *reading, struct manifest *manifest)
{
        if (has(reading, "]"))
                return;
        do {
                char name[MANIFEST_NAME_MAX];
                struct manifest_file file;

                read_file(reading, name, &file);
                make_room(reading, manifest, manifest->file_count, true);
                if (!reading->is_other && manifest_add_file(manifest, &file, NULL))
                        reading->is_other = true;
        } while (has(reading, ","));
        expect(reading, "]");
}

static void read_records(struct reading *reading, struct manifest *manifest)
{
        if (has(reading, "]"))
                return;
        do {
                struct manifest_record record;

                read_record(reading, &record);
                make_room(reading, manifest, manifest->record_count, false);
                if (!reading->is_other)
                        manifest->records[manifest->record_count++] = record;
        } while (has(reading, ","));
        expect(reading, "]");
}

/* The rest, where both lists are empty, is JSON exactly if the text is: in JSON, the first quote of FILES_KEY opens a name, because none
 * of the letters of "files" can follow a quote that closes a text. The lists are members of the document itself and not of an object in
 * it, because only the seal follows them, and the seal closes one brace. */
bool manifest_lists_read(const char *text, size_t size, struct manifest *manifest, struct buf *ret_rest)
{
        const char *files = size > DOCUMENT_SEAL_BYTES ? memmem(text, size, FILES_KEY, strlen(FILES_KEY)) : NULL;
        const char *end = text + size - DOCUMENT_SEAL_BYTES;
        struct reading reading = { files ? files + strlen(FILES_KEY) : NULL, end, !files || files + strlen(FILES_KEY) > end };

        read_files(&reading, manifest);
        expect(&reading, RECORDS_KEY);
        read_records(&reading, manifest);
        if (reading.is_other || reading.at != end || manifest_reserve(manifest, 0, 0, NULL)) /* which gives back spare room */
                return false;
        buf_add(ret_rest, text, (size_t)(files - text));
        buf_add_text(ret_rest, FILES_KEY "]" RECORDS_KEY "]");
        buf_add(ret_rest, end, DOCUMENT_SEAL_BYTES);
        return !ret_rest->failed;
}
