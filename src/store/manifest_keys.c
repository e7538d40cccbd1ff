/* Keys of the objects of a version, and the kind of an object by its key. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/announce.h"
#include "store/document.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"
#include "store/store.h"
#include "sum/sum.h"

#define PRIVATE_PREFIX MANIFEST_DIRECTORY "/"

void writing_prefix(const char *job, const char *run, uint64_t writing, char ret_prefix[WRITING_MAX])
{
        uint64_t sum = sum_crc64(sum_crc64(0, job, strlen(job) + 1), run, strlen(run));

        snprintf(ret_prefix, WRITING_MAX, "w%016" PRIx64 "-%" PRIu64 "-", sum, writing);
}

void writing_name(const char *job, const char *run, uint64_t writing, uint32_t attempt, char ret_name[WRITING_MAX])
{
        size_t length;

        writing_prefix(job, run, writing, ret_name);
        length = strlen(ret_name);
        snprintf(ret_name + length, WRITING_MAX - length, "%08" PRIx32, attempt);
}

static bool has_digits(const char **text, size_t least, size_t most, const char *digits)
{
        size_t count = strspn(*text, digits);

        if (count < least || count > most)
                return false;
        *text += count;
        return true;
}

/* Length of the name of a writing at the start of `text`; 0: there is none. */
static size_t writing_length(const char *text)
{
        const char *at = text, *hex = "0123456789abcdef", *decimal = "0123456789";

        if (*at++ != 'w' || !has_digits(&at, 16, 16, hex) || *at++ != '-' || !has_digits(&at, 1, 19, decimal) || *at++ != '-' ||
            !has_digits(&at, 8, 8, hex))
                return 0;
        return (size_t)(at - text);
}

bool writing_is_sound(const char *name)
{
        size_t length = writing_length(name);

        return length && !name[length];
}

/* Parses "<digits>.json" after `name`; false: it is something else. 18 digits stay below INT64_MAX. */
static bool number_of(const char *name, uint64_t *ret_number)
{
        size_t digits = strspn(name, "0123456789");

        if (!digits || digits > 18 || strcmp(name + digits, ".json"))
                return false;
        *ret_number = strtoull(name, NULL, 10);
        return true;
}

/* Parses "<sequence>-<key>.json", whose key has 16 hex digits. */
static bool signed_sequence(const char *name, uint64_t *ret_sequence)
{
        const char *at = name;

        if (!has_digits(&at, 1, 19, "0123456789") || *at++ != '-' || !has_digits(&at, 16, 16, "0123456789abcdef") || strcmp(at, ".json"))
                return false;
        *ret_sequence = strtoull(name, NULL, 10);
        return true;
}

bool manifest_is_format_1(const char *name)
{
        const char *number = name + (!strncmp(name, "claim-", 6) ? 6 : 5);
        uint64_t value;
        size_t digits;

        if (!strcmp(name, "manifest.json"))
                return true;
        if (strncmp(name, "rank-", 5) && strncmp(name, "claim-", 6))
                return false;
        digits = strspn(number, "0123456789");
        if (!digits || digits > 18)
                return false;
        return number_of(number, &value) || (!strncmp(number + digits, ".g", 2) && number_of(number + digits + 2, &value));
}

struct manifest_entry manifest_entry(const char *name)
{
        struct manifest_entry entry = { ENTRY_FOREIGN, 0, "", 0 };
        struct announce_name announced;
        size_t length = writing_length(name);
        uint64_t rank, number;

        if (length && name[length] == '/' && !strchr(name + length + 1, '/')) {
                entry.kind = ENTRY_APART;
        } else if (length && !strncmp(name + length, ".record-", 8) && number_of(name + length + 8, &rank) && rank <= UINT32_MAX) {
                entry.kind = ENTRY_RECORD;
                entry.rank = (uint32_t)rank;
        } else if (length && !strncmp(name + length, ".claim-", 7) && number_of(name + length + 7, &rank) && rank <= UINT32_MAX) {
                entry.kind = ENTRY_CLAIM;
                entry.rank = (uint32_t)rank;
        } else if (!strncmp(name, "manifest-", 9)) {
                if (number_of(name + 9, &number) && name[9] != '0' && number <= DOCUMENT_NUMBER_MAX) {
                        entry.kind = ENTRY_MANIFEST;
                        entry.number = number;
                }
        } else if (!strncmp(name, "signature-", 10)) {
                if (signed_sequence(name + 10, &entry.number))
                        entry.kind = ENTRY_SIGNATURE;
        } else if (!strncmp(name, "tmp-", 4)) {
                entry.kind = ENTRY_TEMPORARY;
        } else if (announce_name_parse(name, &announced)) {
                entry.kind = ENTRY_COMMITTING;
                strcpy(entry.writing, announced.writing);
        } else if (!strncmp(name, "sweep-", 6)) {
                entry.kind = ENTRY_SWEEP;
        }
        if (entry.kind == ENTRY_RECORD || entry.kind == ENTRY_CLAIM || entry.kind == ENTRY_APART)
                memcpy(entry.writing, name, length);
        return entry;
}

const char *manifest_behind(const char *key, const char *directory)
{
        size_t length = strlen(directory);

        return !strncmp(key, directory, length) && key[length] == '/' ? key + length + 1 : NULL;
}

const char *manifest_behind_private(const char *key, const char *directory)
{
        const char *path = manifest_behind(key, directory);

        return path && !strncmp(path, PRIVATE_PREFIX, sizeof PRIVATE_PREFIX - 1) ? path + sizeof PRIVATE_PREFIX - 1 : NULL;
}

enum nebula_status manifest_key(char ret_key[MANIFEST_KEY_MAX], const char *directory, const char *path,
                                struct nebula_error *error)
{
        int length = snprintf(ret_key, MANIFEST_KEY_MAX, "%s/%s", directory, path);

        if (length < 0 || length >= MANIFEST_KEY_MAX)
                return error_set(error, NEBULA_INVALID, 0, "the path \"%.80s...\" is too long", path);
        return NEBULA_OK;
}

static enum nebula_status describing_key(const char *directory, const char *writing, const char *kind, uint32_t first_rank,
                                         char ret_key[MANIFEST_KEY_MAX], struct nebula_error *error)
{
        char path[WRITING_MAX + 64];

        snprintf(path, sizeof path, PRIVATE_PREFIX "%s.%s-%05" PRIu32 ".json", writing, kind, first_rank);
        return manifest_key(ret_key, directory, path, error);
}

enum nebula_status record_key(const char *directory, const char *writing, uint32_t first_rank, char ret_key[MANIFEST_KEY_MAX],
                              struct nebula_error *error)
{
        return describing_key(directory, writing, "record", first_rank, ret_key, error);
}

enum nebula_status claim_key(const char *directory, const char *writing, uint32_t first_rank, char ret_key[MANIFEST_KEY_MAX],
                             struct nebula_error *error)
{
        return describing_key(directory, writing, "claim", first_rank, ret_key, error);
}

enum nebula_status file_key(const char *directory, const char *writing, const char *name, char ret_key[MANIFEST_KEY_MAX],
                            struct nebula_error *error)
{
        char encoded[256], path[WRITING_MAX + 300];
        enum nebula_status status = name_encode(name, encoded, error);

        if (status)
                return status;
        if (!writing)
                return manifest_key(ret_key, directory, encoded, error);
        snprintf(path, sizeof path, PRIVATE_PREFIX "%s/%s", writing, encoded);
        return manifest_key(ret_key, directory, path, error);
}

enum nebula_status manifest_file_key(const struct manifest *manifest, const struct manifest_file *file, char ret_key[MANIFEST_KEY_MAX],
                                     struct nebula_error *error)
{
        char directory[256];
        enum nebula_status status = name_encode(manifest->tag, directory, error);

        if (status)
                return status;
        return file_key(directory, file->is_apart ? manifest->records[file->record].writing : NULL, file->name, ret_key, error);
}

enum nebula_status manifest_file_path(const struct manifest *manifest, const struct manifest_file *file, char ret_path[MANIFEST_KEY_MAX],
                                      struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = manifest_file_key(manifest, file, key, error);

        if (!status)
                strcpy(ret_path, strchr(key, '/') + 1); /* the encoded tag has no '/' */
        return status;
}

bool manifest_names_record(const struct manifest *manifest, const struct manifest_entry *entry)
{
        for (size_t i = 0; manifest && i < manifest->record_count; i++)
                if (manifest->records[i].rank == entry->rank && !strcmp(manifest->records[i].writing, entry->writing))
                        return true;
        return false;
}

bool manifest_names(const struct manifest *manifest, const struct manifest_entry *entry, const char *key)
{
        const struct manifest_file *file;
        char name[MANIFEST_NAME_MAX], own[MANIFEST_KEY_MAX];

        if (entry->kind == ENTRY_RECORD)
                return manifest_names_record(manifest, entry);
        if (entry->kind == ENTRY_SIGNATURE)
                return manifest && entry->number == manifest->sequence;
        if (!manifest || entry->kind != ENTRY_APART || name_decode(strrchr(key, '/') + 1, name, NULL))
                return false;
        file = manifest_find_file(manifest, name);
        return file && file->is_apart && !manifest_file_key(manifest, file, own, NULL) && !strcmp(own, key);
}
