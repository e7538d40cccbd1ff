#include "store/document.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/store.h"
#include "sum/sum.h"

#define SEAL_KEY ",\"crc64\":"
_Static_assert(sizeof SEAL_KEY - 1 + 18 + 2 == DOCUMENT_SEAL_BYTES, "key, quoted digits, brace and newline");

json_t *document_new(const char *kind)
{
        return json_pack("{s:s, s:s}", "nebula", kind, "version", DOCUMENT_VERSION);
}

bool document_is(const char *text, const char *kind)
{
        char begin[64];
        int length = snprintf(begin, sizeof begin, "{\"nebula\":\"%s\",", kind);

        return !strncmp(text, begin, (size_t)length);
}

json_t *document_hex(uint64_t value)
{
        return json_sprintf("%016" PRIx64, value);
}

static int crc64_from_text(const char *text, uint64_t *ret_crc64)
{
        uint64_t value = 0;

        for (size_t i = 0; i < 16; i++) {
                char c = text[i];

                if (c >= '0' && c <= '9')
                        value = value << 4 | (uint64_t)(c - '0');
                else if (c >= 'a' && c <= 'f')
                        value = value << 4 | (uint64_t)(c - 'a' + 10);
                else
                        return -1;
        }
        *ret_crc64 = value;
        return 0;
}

enum nebula_status document_format_with(json_t *body, const char *lists, size_t lists_size, char **ret_text, size_t *ret_size,
                                        struct nebula_error *error)
{
        /* 16 digits preserve the microseconds of a time since 1970, without a tail of nines. */
        const size_t flags = JSON_COMPACT | JSON_REAL_PRECISION(16);
        size_t body_size = json_dumpb(body, NULL, 0, flags), size;
        uint64_t crc64;
        char *text;

        if (body_size == 0)
                return error_set(error, NEBULA_NO_MEMORY, 0, "cannot format a JSON document");
        size = body_size - 1 + lists_size; /* the lists and the seal replace the closing brace */
        if (size + DOCUMENT_SEAL_BYTES > DOCUMENT_TEXT_MAX)
                return error_set(error, NEBULA_INVALID, 0, "a document of %zu bytes is more than the %u that can be read: save fewer or smaller files",
                                 size + DOCUMENT_SEAL_BYTES, DOCUMENT_TEXT_MAX);
        text = malloc(size + DOCUMENT_SEAL_BYTES + 1);
        if (!text)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a JSON document of %zu bytes", size + DOCUMENT_SEAL_BYTES);
        if (json_dumpb(body, text, body_size, flags) != body_size) {
                free(text);
                return error_set(error, NEBULA_NO_MEMORY, 0, "cannot format a JSON document");
        }
        if (lists_size)
                memcpy(text + body_size - 1, lists, lists_size);
        crc64 = sum_crc64(0, text, size);
        size += (size_t)snprintf(text + size, DOCUMENT_SEAL_BYTES + 1, SEAL_KEY "\"%016" PRIx64 "\"}\n", crc64);
        *ret_text = text;
        *ret_size = size;
        return NEBULA_OK;
}

enum nebula_status document_format(json_t *body, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        return document_format_with(body, NULL, 0, ret_text, ret_size, error);
}

bool document_hex_value(const char *text, uint64_t *ret_value)
{
        return strlen(text) == 16 && !crc64_from_text(text, ret_value);
}

enum nebula_status document_check_seal(const char *text, size_t size, const char *kind, struct nebula_error *error)
{
        const char *seal;
        uint64_t expected, found;

        if (size > DOCUMENT_TEXT_MAX)
                return error_set(error, NEBULA_CORRUPT, 0, "the %s has %zu bytes, more than the %u allowed", kind, size,
                                 DOCUMENT_TEXT_MAX);
        if (size <= DOCUMENT_SEAL_BYTES)
                return error_set(error, NEBULA_CORRUPT, 0, "the %s is cut off after %zu bytes", kind, size);
        seal = text + size - DOCUMENT_SEAL_BYTES;
        if (memcmp(seal, SEAL_KEY "\"", sizeof SEAL_KEY) || memcmp(text + size - 3, "\"}\n", 3) ||
            crc64_from_text(seal + sizeof SEAL_KEY, &expected))
                return error_set(error, NEBULA_CORRUPT, 0,
                                 "the %s does not end with its checksum: it is cut off or was edited", kind);
        found = sum_crc64(0, text, size - DOCUMENT_SEAL_BYTES);
        if (found != expected)
                return error_set(error, NEBULA_CORRUPT, 0,
                                 "the %s is damaged: its checksum is %016" PRIx64 ", it should be %016" PRIx64, kind,
                                 found, expected);
        return NEBULA_OK;
}

static enum nebula_status version_check(const json_t *body, const char *kind, struct nebula_error *error)
{
        const char *found_kind = json_string_value(json_object_get(body, "nebula"));
        const char *version = json_string_value(json_object_get(body, "version"));
        char *end;
        unsigned long major;

        if (!found_kind || strcmp(found_kind, kind))
                return error_set(error, NEBULA_CORRUPT, 0, "this is not a %s: \"nebula\" is \"%.40s\"", kind,
                                 found_kind ? found_kind : "");
        if (!version || version[0] < '0' || version[0] > '9')
                return error_set(error, NEBULA_CORRUPT, 0, "the %s has no version", kind);
        major = strtoul(version, &end, 10);
        if (*end != '.' || major != DOCUMENT_MAJOR)
                return error_set(error, NEBULA_CORRUPT, 0, "the %s has version %.40s, this Nebula reads version %u: use %s Nebula", kind,
                                 version, DOCUMENT_MAJOR, major < DOCUMENT_MAJOR ? "an older" : "a newer");
        return NEBULA_OK;
}

enum nebula_status document_parse_checked(const char *text, size_t size, const char *kind, json_t **ret_body, struct nebula_error *error)
{
        json_error_t problem;
        json_t *body;
        enum nebula_status status;

        body = json_loadb(text, size, JSON_REJECT_DUPLICATES, &problem);
        if (!body)
                return error_set(error, NEBULA_CORRUPT, 0, "the %s is not JSON: %s at byte %d", kind, problem.text,
                                 problem.position);
        status = json_is_object(body) ? version_check(body, kind, error) :
                                        error_set(error, NEBULA_CORRUPT, 0, "the %s is not a JSON object", kind);
        if (status) {
                json_decref(body);
                return status;
        }
        *ret_body = body;
        return NEBULA_OK;
}

enum nebula_status document_parse(const char *text, size_t size, const char *kind, json_t **ret_body,
                                  struct nebula_error *error)
{
        enum nebula_status status = document_check_seal(text, size, kind, error);

        return status ? status : document_parse_checked(text, size, kind, ret_body, error);
}

enum nebula_status document_get(struct store *store, const char *key, char **ret_text, size_t *ret_size, struct store_stamp *ret_stamp,
                                struct nebula_error *error)
{
        char *text;
        size_t size;
        enum nebula_status status = store->ops->get(store, key, DOCUMENT_TEXT_MAX, &text, &size, ret_stamp, error);

        if (!status && document_check_seal(text, size, "document", NULL)) {
                free(text);
                status = store->ops->get(store, key, DOCUMENT_TEXT_MAX, &text, &size, ret_stamp, error);
        }
        if (status)
                return status;
        *ret_text = text;
        *ret_size = size;
        return NEBULA_OK;
}

void document_wrong(struct document_reader *reader, const char *key, const char *what)
{
        if (!reader->status)
                reader->status = error_set(reader->error, NEBULA_CORRUPT, 0, "the %s is not valid: \"%s\" %s",
                                           reader->kind, key, what);
}

uint64_t document_u64(struct document_reader *reader, const json_t *object, const char *key, uint64_t max)
{
        const json_t *value = json_object_get(object, key);

        if (reader->status)
                return 0;
        if (!json_is_integer(value) || json_integer_value(value) < 0 || (uint64_t)json_integer_value(value) > max) {
                document_wrong(reader, key, "is missing or out of range");
                return 0;
        }
        return (uint64_t)json_integer_value(value);
}

int64_t document_step(struct document_reader *reader, const json_t *object, const char *key)
{
        const json_t *value = json_object_get(object, key);

        if (reader->status)
                return 0;
        if (!json_is_integer(value) || json_integer_value(value) < -1) {
                document_wrong(reader, key, "is missing or out of range");
                return 0;
        }
        return (int64_t)json_integer_value(value);
}

enum nebula_status document_check_numbers(const char *tag, uint64_t writing, uint64_t sequence, struct nebula_error *error)
{
        if (writing && writing <= DOCUMENT_NUMBER_MAX && sequence && sequence <= DOCUMENT_SEQUENCE_MAX)
                return NEBULA_OK;
        return error_set(error, NEBULA_INVALID, 0,
                         "\"%.200s\" would get writing %" PRIu64 " and sequence %" PRIu64 ", which no reader takes: what lies in "
                         "storage under that tag holds impossible numbers; remove it there, or save under another tag",
                         tag, writing, sequence);
}

enum nebula_status document_check_number(const char *tag, uint64_t number, struct nebula_error *error)
{
        if (number && number <= DOCUMENT_NUMBER_MAX)
                return NEBULA_OK;
        return error_set(error, NEBULA_INVALID, 0,
                         "\"%.200s\" would get entry %" PRIu64 " of its log, which no reader takes: what lies in storage under that tag holds an "
                         "impossible number; remove it there, or save under another tag", tag, number);
}

static uint64_t read_positive(struct document_reader *reader, const json_t *object, const char *key, uint64_t max)
{
        uint64_t value = document_u64(reader, object, key, max);

        if (!reader->status && !value)
                document_wrong(reader, key, "is 0");
        return value;
}

uint64_t document_sequence(struct document_reader *reader, const json_t *object)
{
        return read_positive(reader, object, "sequence", DOCUMENT_SEQUENCE_MAX);
}

uint64_t document_writing(struct document_reader *reader, const json_t *object)
{
        return read_positive(reader, object, "writing", DOCUMENT_NUMBER_MAX);
}

uint64_t document_number(struct document_reader *reader, const json_t *object)
{
        return read_positive(reader, object, "number", DOCUMENT_NUMBER_MAX);
}

uint32_t document_rank(struct document_reader *reader, const json_t *object)
{
        return (uint32_t)document_u64(reader, object, "rank", DOCUMENT_WORLD_MAX - 1);
}

uint32_t document_world(struct document_reader *reader, const json_t *object)
{
        return (uint32_t)read_positive(reader, object, "world", DOCUMENT_WORLD_MAX);
}

uint64_t document_size(struct document_reader *reader, const json_t *object)
{
        return document_u64(reader, object, "size", DOCUMENT_SIZE_MAX);
}

double document_time(struct document_reader *reader, const json_t *object, const char *key)
{
        const json_t *value = json_object_get(object, key);
        double time = json_number_value(value);

        if (reader->status)
                return 0;
        if (!json_is_number(value) || !(time >= 0 && time <= DOCUMENT_TIME_MAX)) {
                document_wrong(reader, key, "is missing, or is not a time since 1970");
                return 0;
        }
        return time;
}

void document_text(struct document_reader *reader, const json_t *object, const char *key, int may_be_empty,
                   char *ret_text, size_t size)
{
        const json_t *value = json_object_get(object, key);
        size_t length = json_string_length(value);

        if (reader->status)
                return;
        if (!json_is_string(value) || length >= size || (!length && !may_be_empty)) {
                document_wrong(reader, key, "is missing, empty or too long");
                return;
        }
        memcpy(ret_text, json_string_value(value), length + 1);
}

uint64_t document_crc64(struct document_reader *reader, const json_t *value, const char *key)
{
        uint64_t crc64 = 0;

        if (reader->status)
                return 0;
        if (!json_is_string(value) || json_string_length(value) != 16 ||
            crc64_from_text(json_string_value(value), &crc64))
                document_wrong(reader, key, "is missing or not 16 hex digits");
        return crc64;
}

json_t *document_array(struct document_reader *reader, const json_t *object, const char *key)
{
        json_t *value = json_object_get(object, key);

        if (reader->status)
                return NULL;
        if (!json_is_array(value)) {
                document_wrong(reader, key, "is missing or no list");
                return NULL;
        }
        return value;
}
