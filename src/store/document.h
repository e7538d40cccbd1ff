/*
 * document.h - the envelope of every JSON document in storage.
 *
 * A document is one JSON object: first "nebula" (what it is) and "version",
 * last "crc64", the checksum of every byte before the text `,"crc64":`; the
 * file ends with `}` and a newline. So the tail has a fixed length and is
 * compared before a parser sees the rest.
 *
 *      json_t *body = document_new("record");
 *      ... json_object_set_new(body, ...) in the order to be written ...
 *      document_format(body, &text, &size, error);
 *
 *      document_parse(text, size, "record", &body, error);
 *      struct document_reader reader = { .kind = "record", .error = error };
 *      value.rank = (uint32_t)document_u64(&reader, body, "rank", UINT32_MAX);
 *      ... more fields ...
 *      if (reader.status) ...
 *
 * The reader's status is sticky: the first wrong field sets it and the error,
 * later calls return zeros, so that reading is straight-line code.
 *
 * Threads: no shared state.
 */
#ifndef NB_STORE_DOCUMENT_H
#define NB_STORE_DOCUMENT_H

#include <jansson.h>

#include "nebula.h"

#define DOCUMENT_VERSION "1.0"
#define DOCUMENT_TEXT_MAX (32u << 20) /* a record of 1 TiB in chunks of 4 MiB is 5 MB; keeps hostile ones cheap */

/* An object that holds "nebula" and "version"; NULL when memory is out. */
json_t *document_new(const char *kind);
/* The text of `body` with its checksum, NUL-terminated; the caller frees it. `body` stays the caller's. NEBULA_INVALID: nobody would
 * read one that is so long. */
enum nebula_status document_format(json_t *body, char **ret_text, size_t *ret_size, struct nebula_error *error);
/* Checks checksum, kind and version. NEBULA_CORRUPT says what is wrong. The caller decrefs *ret_body. */
enum nebula_status document_parse(const char *text, size_t size, const char *kind, json_t **ret_body,
                                  struct nebula_error *error);

struct document_reader {
        const char *kind;
        enum nebula_status status;
        struct nebula_error *error;
};
uint64_t document_u64(struct document_reader *reader, const json_t *object, const char *key, uint64_t max);
int64_t document_step(struct document_reader *reader, const json_t *object, const char *key); /* >= -1 */
double document_real(struct document_reader *reader, const json_t *object, const char *key);
/* Copies a string shorter than `size` bytes; an empty one only if `may_be_empty`. */
void document_text(struct document_reader *reader, const json_t *object, const char *key, int may_be_empty,
                   char *ret_text, size_t size);
/* `value` is a string of 16 hex digits; `key` names it in the error. */
uint64_t document_crc64(struct document_reader *reader, const json_t *value, const char *key);
/* The array or object at `key`; NULL when the reader failed. */
json_t *document_array(struct document_reader *reader, const json_t *object, const char *key);
json_t *document_object(struct document_reader *reader, const json_t *object, const char *key);
/* Marks the reader as failed: `what` is wrong with field `key`. */
void document_wrong(struct document_reader *reader, const char *key, const char *what);

/* A checksum or an id as it is written, 16 hex digits; NULL: no memory. */
json_t *document_hex(uint64_t value);

#endif
