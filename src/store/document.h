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
#include <stdbool.h>

#include "nebula.h"

#define DOCUMENT_MAJOR 2u
#define DOCUMENT_VERSION "2.0"
#define DOCUMENT_SEAL_BYTES 29u /* ,"crc64":"<16 digits>"} and a newline */
#define DOCUMENT_TEXT_MAX (32u << 20) /* a record of 1 TiB in chunks of 4 MiB is 5 MB; keeps hostile ones cheap */

/* The largest numbers that a document may hold. Readers refuse more, so arithmetic on a number from a document does not overflow.
 * Writers refuse more, too: they write no version that readers would refuse. */
#define DOCUMENT_SEQUENCE_MAX UINT64_C(7258118400000000000) /* the year 2200, in ns since 1970 */
#define DOCUMENT_TIME_MAX 7258118400.0                      /* the same in seconds */
#define DOCUMENT_NUMBER_MAX (UINT64_C(1) << 48)         /* writings of one tag, entries of its log: one per ms takes 8,900 years */
#define DOCUMENT_WORLD_MAX (1u << 20)                       /* ranks: 64 times the largest job in docs/scale.md */
#define DOCUMENT_SIZE_MAX (UINT64_C(1) << 44)               /* bytes of a file: the sum over a document stays below 2^63 */

/* An object with "nebula" and "version"; NULL: no memory. */
json_t *document_new(const char *kind);
/* The text of `body` with its checksum, NUL-terminated; the caller frees it. `body` stays the caller's. NEBULA_INVALID: the text is
 * longer than readers accept. */
enum nebula_status document_format(json_t *body, char **ret_text, size_t *ret_size, struct nebula_error *error);
/* The same with `lists`, the text of more members, after those of `body`: each with a comma before it. */
enum nebula_status document_format_with(json_t *body, const char *lists, size_t lists_size, char **ret_text, size_t *ret_size,
                                        struct nebula_error *error);
/* Call this before a version gets these numbers. NEBULA_INVALID: readers would refuse a document with them. */
enum nebula_status document_check_numbers(const char *tag, uint64_t writing, uint64_t sequence, struct nebula_error *error);
/* The same for the number of an entry in the log of a tag. */
enum nebula_status document_check_number(const char *tag, uint64_t number, struct nebula_error *error);
/* Checks checksum, kind and version. NEBULA_CORRUPT says what is wrong. The caller decrefs *ret_body. */
enum nebula_status document_parse(const char *text, size_t size, const char *kind, json_t **ret_body,
                                  struct nebula_error *error);

/* The two halves of document_parse: the seal of the text, and the rest. The second does not look at the seal, so that `text` may be a part
 * of a document whose seal was checked. */
enum nebula_status document_check_seal(const char *text, size_t size, const char *kind, struct nebula_error *error);
enum nebula_status document_parse_checked(const char *text, size_t size, const char *kind, json_t **ret_body, struct nebula_error *error);

/* The text of the object `key`, which is a document. A text whose seal is wrong is read once more: a bit may have changed on the way. The result may
 * still be unsound: parse it. */
struct store;
struct store_stamp;
enum nebula_status document_get(struct store *store, const char *key, char **ret_text, size_t *ret_size, struct store_stamp *ret_stamp,
                                struct nebula_error *error);

/* Whether a text begins as a document of that kind does. */
bool document_is(const char *text, const char *kind);

struct document_reader {
        const char *kind;
        enum nebula_status status;
        struct nebula_error *error;
};
uint64_t document_u64(struct document_reader *reader, const json_t *object, const char *key, uint64_t max);
/* Read required numbers, within the limits above: "sequence" and "writing" are not 0, a "rank" is below the most ranks. */
uint64_t document_sequence(struct document_reader *reader, const json_t *object);
uint64_t document_writing(struct document_reader *reader, const json_t *object);
uint64_t document_number(struct document_reader *reader, const json_t *object); /* of an entry in the log of a tag */
uint32_t document_rank(struct document_reader *reader, const json_t *object);
uint32_t document_world(struct document_reader *reader, const json_t *object);
uint64_t document_size(struct document_reader *reader, const json_t *object);
double document_time(struct document_reader *reader, const json_t *object, const char *key);
int64_t document_step(struct document_reader *reader, const json_t *object, const char *key); /* >= -1 */
/* Copies a string shorter than `size` bytes; an empty one only if `may_be_empty`. */
void document_text(struct document_reader *reader, const json_t *object, const char *key, int may_be_empty,
                   char *ret_text, size_t size);
/* `value` is a string of 16 hex digits; `key` names it in the error. */
uint64_t document_crc64(struct document_reader *reader, const json_t *value, const char *key);
/* The array at `key`; NULL when the reader failed. */
json_t *document_array(struct document_reader *reader, const json_t *object, const char *key);
/* Marks the reader as failed; `what` says what is wrong with field `key`. */
void document_wrong(struct document_reader *reader, const char *key, const char *what);

/* A checksum or id as 16 hex digits; NULL: no memory. */
json_t *document_hex(uint64_t value);
/* The number of a text of 16 hex digits; false: it is none. */
bool document_hex_value(const char *text, uint64_t *ret_value);

#endif
