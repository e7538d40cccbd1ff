#include "cli/bundle.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "os/os.h"
#include "store/http/crypt.h"
#include "store/signature.h"

#define PATH_SIZE 4600
#define DEPTH_MAX 32
#define PIECE_BYTES (1u << 20)
#define PAYLOAD_TYPE "application/vnd.in-toto+json"

struct listing {
        char root[PATH_SIZE];
        char **names; /* below root */
        size_t count, room;
};

/* The bundle itself, and the names that model_signing leaves out by itself. */
static const char *const ignored[] = { BUNDLE_NAME, ".git", ".gitattributes", ".github", ".gitignore" };

static bool is_ignored(const char *name)
{
        for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++)
                if (!strcmp(name, ignored[i]))
                        return true;
        return false;
}

static enum nebula_status add(struct listing *listing, const char *name, struct nebula_error *error)
{
        if (listing->count == listing->room) {
                size_t room = 2 * listing->room + 64;
                char **names = realloc(listing->names, room * sizeof *names);

                if (!names)
                        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to list %.300s", listing->root);
                listing->names = names;
                listing->room = room;
        }
        listing->names[listing->count] = strdup(name);
        return listing->names[listing->count++] ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to list %.300s", listing->root);
}

static enum nebula_status walk(struct listing *listing, const char *below, int depth, struct nebula_error *error)
{
        char name[300], path[PATH_SIZE];
        struct os_dir *dir;
        struct os_stat found;
        int result = os->opendir_below(listing->root, below, &dir);
        enum nebula_status status = NEBULA_OK;

        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "%.300s/%.300s cannot be listed", listing->root, below);
        while (!status && (result = os->readdir(dir, name, sizeof name)) > 0) {
                if (!depth && is_ignored(name))
                        continue;
                if (snprintf(path, sizeof path, "%s%s%s", below, *below ? "/" : "", name) >= (int)sizeof path || !text_is_utf8(path, strlen(path)))
                        status = error_set(error, NEBULA_INVALID, 0, "the name of %.300s is too long, or not UTF-8", path);
                else if ((result = os->stat_entry(dir, name, &found)) < 0)
                        status = error_set(error, error_status_of_errno(-result), -result, "%.300s cannot be read", path);
                else if (found.kind == OS_KIND_DIRECTORY && depth < DEPTH_MAX)
                        status = walk(listing, path, depth + 1, error);
                else if (found.kind == OS_KIND_FILE)
                        status = add(listing, path, error);
                else
                        status = error_set(error, NEBULA_INVALID, 0, "%.300s/%.300s is no regular file: a bundle signs files alone", listing->root, path);
        }
        os->closedir(dir);
        if (!status && result < 0)
                status = error_set(error, error_status_of_errno(-result), -result, "%.300s/%.300s cannot be listed", listing->root, below);
        return status;
}

static enum nebula_status sum(const char *root, const char *name, uint8_t ret_digest[CRYPT_SHA256_BYTES], struct nebula_error *error)
{
        struct evp_md_ctx_st *sum = crypt_sum_begin();
        char *piece = malloc(PIECE_BYTES);
        int fd = os->open_below(root, name, OS_READ);
        int64_t result = fd < 0 ? fd : sum && piece ? 1 : -ENOMEM;

        for (uint64_t offset = 0; result > 0; offset += (uint64_t)result) {
                do
                        result = os->pread(fd, piece, PIECE_BYTES, offset);
                while (result == -EINTR);
                if (result > 0 && !crypt_sum_add(sum, piece, (size_t)result))
                        result = -ENOMEM;
        }
        if (fd >= 0)
                os->close(fd);
        free(piece);
        if (sum && !crypt_sum_end(sum, ret_digest) && !result)
                result = -ENOMEM;
        return result < 0 ? error_set(error, error_status_of_errno((int)-result), (int)-result, "%.300s/%.300s cannot be read", root, name) : NEBULA_OK;
}

static int by_name(const void *a, const void *b)
{
        return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The subject's digest is that of all digests, in the order of the list. */
static enum nebula_status list_resources(const struct listing *listing, json_t *resources, json_t **ret_root, struct nebula_error *error)
{
        struct evp_md_ctx_st *all = crypt_sum_begin();
        uint8_t digest[CRYPT_SHA256_BYTES];
        enum nebula_status status = all ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a bundle");

        for (size_t i = 0; i < listing->count && !status; i++) {
                status = sum(listing->root, listing->names[i], digest, error);
                if (!status && (!crypt_sum_add(all, digest, sizeof digest) ||
                                json_array_append_new(resources, json_pack("{s:s, s:s, s:o}", "algorithm", "sha256", "name", listing->names[i], "digest",
                                                                           signature_digest_text(digest)))))
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a bundle");
        }
        if (all && !crypt_sum_end(all, digest) && !status)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a bundle");
        if (!status)
                *ret_root = signature_digest_text(digest);
        return status;
}

/* A JSON text of the statement. */
static enum nebula_status make_statement(const struct listing *listing, char **ret_text, struct nebula_error *error)
{
        json_t *resources = json_array(), *ignores = json_array(), *root = NULL, *statement = NULL;
        const char *slash = strrchr(listing->root, '/');
        enum nebula_status status = resources && ignores ? list_resources(listing, resources, &root, error) : NEBULA_NO_MEMORY;

        for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++)
                json_array_append_new(ignores, json_string(ignored[i]));
        if (!status)
                statement = json_pack("{s:s, s:[{s:s, s:{s:O}}], s:s, s:{s:{s:s, s:s, s:b, s:O}, s:O}}", "_type", "https://in-toto.io/Statement/v1", "subject",
                                      "name", slash && slash[1] ? slash + 1 : "model", "digest", "sha256", root, "predicateType", "https://model_signing/signature/v1.0",
                                      "predicate", "serialization", "method", "files", "hash_type", "sha256", "allow_symlinks", 0, "ignore_paths", ignores,
                                      "resources", resources);
        *ret_text = statement ? json_dumps(statement, JSON_COMPACT) : NULL;
        if (!status && !*ret_text)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a bundle");
        json_decref(statement);
        json_decref(root);
        json_decref(resources);
        json_decref(ignores);
        return status;
}

/* DSSE signs the type, the payload, and their lengths. */
static char *pre_authentication(const char *payload, size_t *ret_size)
{
        size_t room = strlen(payload) + 100;
        char *text = malloc(room);

        if (text)
                *ret_size = (size_t)snprintf(text, room, "DSSEv1 %zu " PAYLOAD_TYPE " %zu %s", sizeof PAYLOAD_TYPE - 1, strlen(payload), payload);
        return text;
}

static char *base64(const void *data, size_t size)
{
        char *text = malloc(CRYPT_BASE64_SIZE(size));

        if (text)
                crypt_base64(data, size, text);
        return text;
}

static char *make_bundle(struct evp_pkey_st *key, const char *payload)
{
        char *public = crypt_key_pem(key, false), *signature_text = NULL, *payload_text = base64(payload, strlen(payload)), *signed_text, *result = NULL;
        uint8_t digest[CRYPT_SHA256_BYTES], signature[CRYPT_SIGNATURE_MAX];
        size_t size, signature_size;
        json_t *bundle = NULL;

        signed_text = pre_authentication(payload, &size);
        if (public && payload_text && signed_text && crypt_sha256(public, strlen(public), digest) && crypt_key_sign(key, signed_text, size, signature, &signature_size))
                signature_text = base64(signature, signature_size);
        if (signature_text)
                bundle = json_pack("{s:s, s:{s:{s:o}, s:[]}, s:{s:s, s:s, s:[{s:s, s:s}]}}", "mediaType", "application/vnd.dev.sigstore.bundle.v0.3+json",
                                   "verificationMaterial", "publicKey", "hint", signature_digest_text(digest), "tlogEntries", "dsseEnvelope", "payload",
                                   payload_text, "payloadType", PAYLOAD_TYPE, "signatures", "sig", signature_text, "keyid", "");
        if (bundle)
                result = json_dumps(bundle, JSON_COMPACT);
        json_decref(bundle);
        free(signature_text);
        free(payload_text);
        free(signed_text);
        free(public);
        return result;
}

static enum nebula_status read_key(const char *path, struct evp_pkey_st **ret_key, struct nebula_error *error)
{
        enum nebula_status status = trust_read_private(path, ret_key, error);

        if (status || crypt_key_kind(*ret_key) == CRYPT_P256)
                return status;
        crypt_key_free(*ret_key);
        return error_set(error, NEBULA_INVALID, 0, "the key of %.300s is not on the curve P-256, and model_signing takes no other that Nebula makes: "
                         "`nebula sign --new-key FILE --p256`", path);
}

enum nebula_status bundle_write(const char *directory, const char *key_path, size_t *ret_count, struct nebula_error *error)
{
        struct listing listing = { 0 };
        struct evp_pkey_st *key = NULL;
        char path[PATH_SIZE + 16], *payload = NULL, *bundle = NULL;
        int result = 0;
        enum nebula_status status = read_key(key_path, &key, error);

        if (status)
                return status;
        snprintf(listing.root, sizeof listing.root, "%s", directory);
        status = walk(&listing, "", 0, error);
        if (!status && listing.count)
                qsort(listing.names, listing.count, sizeof *listing.names, by_name);
        if (!status)
                status = make_statement(&listing, &payload, error);
        if (!status && !(bundle = make_bundle(key, payload)))
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a bundle");
        snprintf(path, sizeof path, "%s/" BUNDLE_NAME, listing.root);
        if (!status)
                result = os_write_file_atomic(path, bundle, strlen(bundle));
        if (result < 0)
                status = error_set(error, error_status_of_errno(-result), -result, "%.300s cannot be written", path);
        *ret_count = listing.count;
        for (size_t i = 0; i < listing.count; i++)
                free(listing.names[i]);
        free(listing.names);
        free(payload);
        free(bundle);
        crypt_key_free(key);
        return status;
}
