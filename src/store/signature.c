#include "store/signature.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/document.h"
#include "store/http/crypt.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"
#include "store/store.h"
#include "sum/sum.h"

#define SIGN_KEY ",\"ed25519\":\""
#define SIGN_HEX (2 * CRYPT_ED25519_BYTES)
#define SIGN_BYTES (sizeof SIGN_KEY - 1 + SIGN_HEX + 1) /* the member, before the seal of a document */

struct signed_file {
        const char *name; /* of `body` */
        uint64_t size;
        uint32_t rank;
        uint8_t sha256[CRYPT_SHA256_BYTES];
};
struct signature {
        char tag[256], job[256], run[256];
        uint64_t sequence;
        int64_t step;
        uint32_t world;
        struct signed_file *files; /* by name */
        size_t file_count;
        json_t *body;
};

void signature_free(struct signature *signature)
{
        if (!signature)
                return;
        json_decref(signature->body);
        free(signature->files);
        free(signature);
}

static void to_hex(const uint8_t *bytes, size_t size, char *ret_text)
{
        for (size_t i = 0; i < size; i++)
                snprintf(ret_text + 2 * i, 3, "%02x", bytes[i]);
}

static bool from_hex(const char *text, uint8_t *ret_bytes, size_t size)
{
        for (size_t i = 0; i < 2 * size; i++) {
                const char *digits = "0123456789abcdef", *found = text[i] ? strchr(digits, text[i]) : NULL;

                if (!found)
                        return false;
                ret_bytes[i / 2] = (uint8_t)(ret_bytes[i / 2] << 4 | (uint8_t)(found - digits));
        }
        return true;
}

bool signature_read_digest(const char *text, uint8_t ret_digest[CRYPT_SHA256_BYTES])
{
        return text && strlen(text) == 2 * CRYPT_SHA256_BYTES && from_hex(text, ret_digest, CRYPT_SHA256_BYTES);
}

json_t *signature_digest_text(const uint8_t digest[CRYPT_SHA256_BYTES])
{
        char text[2 * CRYPT_SHA256_BYTES + 1];

        to_hex(digest, CRYPT_SHA256_BYTES, text);
        return json_string(text);
}

enum nebula_status signature_seal(const struct trust *trust, char **text, size_t *size, struct nebula_error *error)
{
        size_t body = *size - DOCUMENT_SEAL_BYTES, length;
        uint8_t signature[CRYPT_SIGNATURE_MAX];
        char *sealed = malloc(*size + SIGN_BYTES + 1);

        if (!sealed || !crypt_key_sign(trust->own.key, *text, body, signature, &length) || length != CRYPT_ED25519_BYTES) {
                free(sealed);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a signature");
        }
        memcpy(sealed, *text, body);
        memcpy(sealed + body, SIGN_KEY, sizeof SIGN_KEY - 1);
        to_hex(signature, CRYPT_ED25519_BYTES, sealed + body + sizeof SIGN_KEY - 1);
        body += SIGN_BYTES;
        sealed[body - 1] = '"';
        *size = body + (size_t)snprintf(sealed + body, DOCUMENT_SEAL_BYTES + 1, ",\"crc64\":\"%016" PRIx64 "\"}\n", sum_crc64(0, sealed, body));
        free(*text);
        *text = sealed;
        return NEBULA_OK;
}

static bool is_signed_by(const struct trust_key *key, const char *text, size_t size)
{
        uint8_t signature[CRYPT_ED25519_BYTES] = { 0 };
        const char *member;

        if (size < SIGN_BYTES + DOCUMENT_SEAL_BYTES)
                return false;
        member = text + size - DOCUMENT_SEAL_BYTES - SIGN_BYTES;
        return !memcmp(member, SIGN_KEY, sizeof SIGN_KEY - 1) && member[SIGN_BYTES - 1] == '"' &&
               from_hex(member + sizeof SIGN_KEY - 1, signature, sizeof signature) &&
               crypt_key_verify(key->key, text, (size_t)(member - text), signature, sizeof signature);
}

bool signature_is_own(const struct trust *trust, const char *text, size_t size)
{
        return trust->own.key && is_signed_by(&trust->own, text, size);
}

static enum nebula_status key_of(const struct manifest *manifest, const char *id, char ret_key[MANIFEST_KEY_MAX], struct nebula_error *error)
{
        char directory[256], path[128];
        enum nebula_status status = name_encode(manifest->tag, directory, error);

        snprintf(path, sizeof path, MANIFEST_DIRECTORY "/signature-%" PRIu64 "-%s%s", manifest->sequence, id, *id ? ".json" : "");
        return status ? status : manifest_key(ret_key, directory, path, error);
}

static int by_name(const void *a, const void *b)
{
        return strcmp(((const struct signed_file *)a)->name, ((const struct signed_file *)b)->name);
}

static void parse_file(struct document_reader *reader, const json_t *entry, struct signed_file *file)
{
        const json_t *whole[] = { json_array_get(entry, 1), json_array_get(entry, 2) };
        json_int_t rank = json_integer_value(whole[0]), size = json_integer_value(whole[1]);

        file->name = json_string_value(json_array_get(entry, 0));
        file->rank = (uint32_t)rank;
        file->size = (uint64_t)size;
        if (!file->name || !json_is_integer(whole[0]) || !json_is_integer(whole[1]) || rank < 0 || rank >= DOCUMENT_WORLD_MAX || size < 0 ||
            !signature_read_digest(json_string_value(json_array_get(entry, 3)), file->sha256))
                document_wrong(reader, "files", "has an entry that is not a name, a rank, a size and a SHA-256");
}

static enum nebula_status parse(const char *text, size_t size, struct signature **ret_signature, struct nebula_error *error)
{
        struct document_reader reader = { .kind = "signature", .error = error };
        struct signature *signature = calloc(1, sizeof *signature);
        const json_t *files;
        enum nebula_status status = signature ? document_parse(text, size, "signature", &signature->body, error) :
                                                error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a signature");

        if (status) {
                free(signature);
                return status;
        }
        document_text(&reader, signature->body, "tag", 0, signature->tag, sizeof signature->tag);
        document_text(&reader, signature->body, "job", 1, signature->job, sizeof signature->job);
        document_text(&reader, signature->body, "run", 1, signature->run, sizeof signature->run);
        signature->sequence = document_sequence(&reader, signature->body);
        signature->step = document_step(&reader, signature->body, "step");
        signature->world = document_world(&reader, signature->body);
        files = document_array(&reader, signature->body, "files");
        signature->files = calloc(json_array_size(files) + 1, sizeof *signature->files);
        if (!signature->files)
                reader.status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a signature");
        for (size_t i = 0; i < json_array_size(files) && !reader.status; i++)
                parse_file(&reader, json_array_get(files, i), &signature->files[signature->file_count++]);
        if (reader.status) {
                signature_free(signature);
                return reader.status;
        }
        if (signature->file_count)
                qsort(signature->files, signature->file_count, sizeof *signature->files, by_name);
        *ret_signature = signature;
        return NEBULA_OK;
}

static const struct signed_file *find_file(const struct signature *signature, const char *name)
{
        const struct signed_file wanted = { .name = name };

        return signature->file_count ? bsearch(&wanted, signature->files, signature->file_count, sizeof wanted, by_name) : NULL;
}

static bool names_version(const struct signature *signature, const struct manifest *manifest)
{
        return !strcmp(signature->tag, manifest->tag) && !strcmp(signature->job, manifest->job) && !strcmp(signature->run, manifest->run) &&
               signature->sequence == manifest->sequence && signature->step == manifest->step &&
               signature->world == manifest->world;
}

/* A thinned version has fewer files than were signed. */
static enum nebula_status compare(const struct signature *signature, const struct manifest *manifest, struct nebula_error *error)
{
        if (!names_version(signature, manifest))
                return error_set(error, NEBULA_CORRUPT, 0, "it is the signature of another version, of \"%.150s\"", signature->tag);
        if (!*manifest->thinned && signature->file_count != manifest_count(manifest))
                return error_set(error, NEBULA_CORRUPT, 0, "%zu files were signed, and the version has %zu", signature->file_count, manifest_count(manifest));
        for (size_t i = 0; i < manifest->file_count; i++) {
                const struct manifest_file *file = &manifest->files[i];
                const struct signed_file *found = find_file(signature, file->name);

                if (!found || found->size != file->size || found->rank != file->rank)
                        return error_set(error, NEBULA_CORRUPT, 0, "the file \"%.150s\" is not the one that was signed", file->name);
        }
        return NEBULA_OK;
}

/* NEBULA_CORRUPT: there is one, and it does not hold. */
static enum nebula_status load_by(struct store *store, const struct trust_key *key, const struct manifest *manifest, struct signature **ret_signature,
                                  struct nebula_error *error)
{
        struct signature *signature = NULL;
        char at[MANIFEST_KEY_MAX], *text;
        size_t size;
        enum nebula_status status = key_of(manifest, key->id, at, error);

        if (!status)
                status = document_get(store, at, &text, &size, NULL, error);
        if (status)
                return status;
        status = is_signed_by(key, text, size) ? parse(text, size, &signature, error) :
                                                error_set(error, NEBULA_CORRUPT, 0, "key %s has not signed it: it was changed or cut off", key->id);
        free(text);
        if (!status)
                status = compare(signature, manifest, error);
        if (status) {
                signature_free(signature);
                error_prefix(error, "%.200s/%.300s", store->root, at);
                return status;
        }
        *ret_signature = signature;
        return NEBULA_OK;
}

/* NEBULA_NOT_FOUND: no trusted key has signed the version. If one key's signature does not hold, another's may. */
static enum nebula_status load(struct store *store, const struct manifest *manifest, struct signature **ret_signature, struct nebula_error *error)
{
        const struct trust *trust = store->trust;
        struct nebula_error failure = { 0 }, first = { 0 };
        enum nebula_status status = NEBULA_NOT_FOUND;

        if (trust->own.key)
                status = load_by(store, &trust->own, manifest, ret_signature, &failure);
        for (size_t i = 0; status && i < trust->key_count; i++) {
                if (status != NEBULA_NOT_FOUND && !first.status)
                        first = failure;
                status = load_by(store, &trust->keys[i], manifest, ret_signature, &failure);
        }
        if (!status)
                return status;
        if (first.status || status != NEBULA_NOT_FOUND) {
                status = first.status ? first.status : status;
                if (error)
                        *error = first.status ? first : failure;
                return status;
        }
        return error_set(error, NEBULA_NOT_FOUND, 0, "no trusted key has signed \"%.150s\" in %.200s: sign it with `nebula sign`, or trust its key",
                         manifest->tag, store->root);
}

/* Looks a file up in the signature of a version; `name` NULL: only whether there is a signature. *ret_found: NULL, or the file's entry. */
static enum nebula_status look_up(struct store *store, const struct manifest *manifest, const char *name, struct signed_file *ret_file,
                                  struct nebula_error *error)
{
        struct trust *trust = store->trust;
        const struct signed_file *found = NULL;
        struct signature *signature = NULL;
        bool is_known;
        enum nebula_status status = NEBULA_OK;

        lock_take(&trust->lock);
        is_known = trust->last && !compare(trust->last, manifest, NULL);
        lock_give(&trust->lock);
        if (!is_known)
                status = load(store, manifest, &signature, error);
        if (status)
                return status;
        lock_take(&trust->lock);
        if (signature) {
                signature_free(trust->last);
                trust->last = signature;
        }
        is_known = trust->last && !compare(trust->last, manifest, NULL);
        if (is_known && name)
                found = find_file(trust->last, name);
        if (found)
                *ret_file = *found;
        lock_give(&trust->lock);
        if (!is_known) /* another thread has read another version meanwhile */
                return look_up(store, manifest, name, ret_file, error);
        return !name || found ? NEBULA_OK : error_set(error, NEBULA_CORRUPT, 0, "the file \"%.150s\" of \"%.150s\" is not signed", name, manifest->tag);
}

bool signature_counts(const struct store *store)
{
        return store->trust && store->trust->policy != TRUST_OFF;
}

/* The policy decides on the status of a look for a signature. *ret_is_there: one holds. */
static enum nebula_status judge(const struct store *store, enum nebula_status status, struct nebula_error *failure, bool *ret_is_there,
                                struct nebula_error *error)
{
        *ret_is_there = !status;
        if (!status || (status == NEBULA_NOT_FOUND && store->trust->policy == TRUST_PREFER))
                return NEBULA_OK;
        if (status == NEBULA_NOT_FOUND)
                status = failure->status = NEBULA_CORRUPT;
        if (error)
                *error = *failure;
        return status;
}

enum nebula_status signature_check(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        struct nebula_error failure = { 0 };
        bool is_there;

        return signature_counts(store) ? judge(store, look_up(store, manifest, NULL, NULL, &failure), &failure, &is_there, error) : NEBULA_OK;
}

enum nebula_status signature_take(struct store *store, const struct manifest *manifest, struct record_file *file, struct nebula_error *error)
{
        struct nebula_error failure = { 0 };
        struct signed_file found;
        bool is_there;
        enum nebula_status status;

        if (!signature_counts(store))
                return NEBULA_OK;
        status = judge(store, look_up(store, manifest, file->name, &found, &failure), &failure, &is_there, error);
        file->is_signed = !status && is_there;
        if (file->is_signed)
                memcpy(file->sha256, found.sha256, sizeof file->sha256);
        return status;
}

enum nebula_status signature_match(const struct record_file *file, const void *data, struct nebula_error *error)
{
        uint8_t digest[CRYPT_SHA256_BYTES];

        if (!file->is_signed || (crypt_sha256(data, file->size, digest) && !memcmp(digest, file->sha256, sizeof digest)))
                return NEBULA_OK;
        return error_set(error, NEBULA_CORRUPT, 0, "\"%.200s\" is not what was signed: its SHA-256 differs. Something has replaced it", file->name);
}

enum nebula_status signature_known(struct store *store, const struct manifest *manifest, const char *name, uint8_t ret_digest[CRYPT_SHA256_BYTES])
{
        struct signed_file found;
        enum nebula_status status = store->trust ? look_up(store, manifest, name, &found, NULL) : NEBULA_NOT_FOUND;

        if (!status)
                memcpy(ret_digest, found.sha256, CRYPT_SHA256_BYTES);
        return status;
}

static json_t *format_files(const struct manifest *manifest, const uint8_t (*digests)[CRYPT_SHA256_BYTES])
{
        json_t *files = json_array();

        for (size_t i = 0; files && i < manifest->file_count; i++) {
                const struct manifest_file *file = &manifest->files[i];

                if (json_array_append_new(files, json_pack("[s, I, I, o]", file->name, (json_int_t)file->rank, (json_int_t)file->size,
                                                           signature_digest_text(digests[i])))) {
                        json_decref(files);
                        files = NULL;
                }
        }
        return files;
}

static bool is_there(struct store *store, const char *key, const char *text, size_t size)
{
        char *found;
        size_t found_size;
        bool is_same;

        if (document_get(store, key, &found, &found_size, NULL, NULL))
                return false;
        is_same = found_size == size && !memcmp(found, text, size);
        free(found);
        return is_same;
}

/* An object of that name with other bytes is no signature of this key: it may be replaced. */
static enum nebula_status put_once(struct store *store, const char *key, const char *text, size_t size, struct nebula_error *error)
{
        enum nebula_status status = store->ops->put(store, key, text, size, STORE_IF_ABSENT, NULL, NULL, error);

        if (status == NEBULA_BUSY)
                status = is_there(store, key, text, size) ? NEBULA_OK : store->ops->put(store, key, text, size, STORE_ALWAYS, NULL, NULL, error);
        return status;
}

enum nebula_status signature_put(struct store *store, const struct manifest *manifest, const uint8_t (*digests)[CRYPT_SHA256_BYTES],
                                 struct nebula_error *error)
{
        const struct trust *trust = store->trust;
        json_t *body = document_new("signature"), *head, *files = format_files(manifest, digests);
        char key[MANIFEST_KEY_MAX], *text = NULL;
        size_t size;
        enum nebula_status status = key_of(manifest, trust->own.id, key, error);

        head = json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:s}", "tag", manifest->tag, "job", manifest->job, "run", manifest->run, "sequence",
                         (json_int_t)manifest->sequence, "step", (json_int_t)manifest->step, "world",
                         (json_int_t)manifest->world, "key", trust->own.id);
        if (!status && (!body || !files || !head || json_object_update(body, head) || json_object_set(body, "files", files)))
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the signature of \"%s\"", manifest->tag);
        if (!status)
                status = document_format(body, &text, &size, error);
        if (!status)
                status = signature_seal(trust, &text, &size, error);
        if (!status)
                status = put_once(store, key, text, size, error);
        free(text);
        json_decref(body);
        json_decref(files);
        json_decref(head);
        return status;
}

static enum nebula_status list_objects(struct store *store, const struct manifest *manifest, struct store_list *ret_list, struct nebula_error *error)
{
        char prefix[MANIFEST_KEY_MAX];
        enum nebula_status status = key_of(manifest, "", prefix, error);

        return status ? status : store_list_all(store, prefix, false, ret_list, error);
}

static enum nebula_status copy_one(struct store *from, const char *key, struct store *to, struct nebula_error *error)
{
        char *text;
        size_t size;
        enum nebula_status status = document_get(from, key, &text, &size, NULL, error);

        if (status)
                return status;
        status = put_once(to, key, text, size, error);
        free(text);
        return status;
}

static bool is_signature(const struct store_entry *entry)
{
        return !entry->is_prefix && manifest_entry(strrchr(entry->key, '/') + 1).kind == ENTRY_SIGNATURE;
}

enum nebula_status signature_copy(struct store *from, const struct manifest *source, struct store *to, const struct manifest *copy, bool *ret_is_lost,
                                  struct nebula_error *error)
{
        bool is_same = source->sequence == copy->sequence;
        struct store_list list;
        enum nebula_status status = list_objects(from, source, &list, error);

        *ret_is_lost = false;
        if (status)
                return status;
        for (size_t i = 0; i < list.count && !status; i++) {
                if (is_signature(&list.entries[i]) && is_same)
                        status = copy_one(from, list.entries[i].key, to, error);
                else
                        *ret_is_lost = *ret_is_lost || is_signature(&list.entries[i]);
        }
        store_list_done(&list);
        return status;
}

static const struct trust_key *trusted(const struct trust *trust, const char *id)
{
        if (trust && trust->own.key && !strcmp(trust->own.id, id))
                return &trust->own;
        for (size_t i = 0; trust && i < trust->key_count; i++)
                if (!strcmp(trust->keys[i].id, id))
                        return &trust->keys[i];
        return NULL;
}

static void describe(struct store *store, const struct manifest *manifest, const char *object, struct signature_key *ret_key)
{
        struct nebula_error failure = { 0 };
        struct signature *signature = NULL;
        const struct trust_key *key;
        enum nebula_status status;

        memcpy(ret_key->id, strrchr(object, '-') + 1, TRUST_ID_SIZE - 1);
        key = trusted(store->trust, ret_key->id);
        if (!key)
                return;
        status = load_by(store, key, manifest, &signature, &failure);
        ret_key->is_trusted = !status;
        ret_key->is_wrong = status != NEBULA_OK;
        snprintf(ret_key->why, sizeof ret_key->why, "%s", status ? failure.message : "");
        signature_free(signature);
}

enum nebula_status signature_list(struct store *store, const struct manifest *manifest, struct signature_key **ret_keys, size_t *ret_count,
                                  struct nebula_error *error)
{
        struct store_list list;
        enum nebula_status status = list_objects(store, manifest, &list, error);

        if (status)
                return status;
        *ret_count = 0;
        *ret_keys = calloc(list.count + 1, sizeof **ret_keys);
        for (size_t i = 0; *ret_keys && i < list.count; i++) {
                if (is_signature(&list.entries[i]))
                        describe(store, manifest, list.entries[i].key, &(*ret_keys)[(*ret_count)++]);
        }
        store_list_done(&list);
        return *ret_keys ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the signatures of \"%s\"", manifest->tag);
}
