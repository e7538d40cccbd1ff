/* nebula sign: signs versions, makes keys, says which are trusted, and signs an exported directory for OpenSSF's model_signing. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/bundle.h"
#include "cli/cli.h"
#include "cli/table.h"
#include "cli/target.h"
#include "cli/vouch.h"
#include "os/os.h"
#include "store/http/crypt.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/scan.h"
#include "store/signature.h"
#include "store/trust.h"

#define LOCK_WAIT_MS 10000 /* for another command that changes the trusted keys */

/* Creates a file with its bytes, readable by its user alone if it is secret. It never replaces one. */
static enum nebula_status create_file(const char *path, const char *text, bool is_secret, struct nebula_error *error)
{
        int fd = os->open(path, OS_WRITE | OS_CREATE | OS_EXCLUSIVE | (is_secret ? 0 : OS_SHARED)), result = fd;

        if (fd >= 0) {
                result = os_write_at(fd, text, strlen(text), 0);
                if (!result)
                        result = os_sync(fd);
                os->close(fd);
                if (result < 0) /* a full disk: the next try may make it */
                        os->unlink(path);
        }
        if (result < 0)
                return error_set(error, result == -EEXIST ? NEBULA_BUSY : error_status_of_errno(-result), -result, "%.300s cannot be made%s", path,
                                 result == -EEXIST ? ": it exists, and a key is never overwritten" : "");
        return NEBULA_OK;
}

static int new_key(bool json, const char *given, bool is_p256)
{
        struct evp_pkey_st *key = crypt_key_new(is_p256 ? CRYPT_P256 : CRYPT_ED25519);
        char *secret = key ? crypt_key_pem(key, true) : NULL, *public = key ? crypt_key_pem(key, false) : NULL, path[TARGET_PATH_MAX];
        char public_path[TARGET_PATH_MAX + 8], id[TRUST_ID_SIZE] = "";
        struct nebula_error error = { 0 };
        enum nebula_status status = target_absolute(given, path, &error);

        snprintf(public_path, sizeof public_path, "%s.pub", path);
        if (!status && (!secret || !public))
                status = error_set(&error, NEBULA_NO_MEMORY, 0, "OpenSSL of this machine makes no such key");
        if (!status)
                status = create_file(path, secret, true, &error);
        if (!status && (status = create_file(public_path, public, false, &error)))
                os->unlink(path); /* a private key alone would be in the way of the next try */
        if (!status && !is_p256)
                trust_key_id(key, id);
        if (secret)
                crypt_forget(secret, strlen(secret));
        free(secret);
        free(public);
        crypt_key_free(key);
        if (status)
                return cli_fail(json, &error);
        if (json)
                return cli_print_json(json_pack("{s:s, s:s, s:s}", "key", id, "private", path, "public", public_path), CLI_OK);
        term_print(STYLE_PLAIN, "%s: the private key%s%s; keep it secret\n%s: the public key; give it to readers, who run `%s`\n", path, *id ? " of " : "", id,
                   public_path, is_p256 ? "model_signing verify key" : "nebula sign --trust");
        return CLI_OK;
}

static int show_trusted(bool json)
{
        struct trust_key keys[TRUST_KEYS_MAX];
        struct nebula_error error = { 0 };
        struct os_stat found;
        char path[TRUST_PATH_MAX];
        size_t count = 0;
        json_t *list = json_array();
        enum nebula_status status = trust_path(path, &error);

        if (!status && os->stat(path, true, &found) != -ENOENT)
                status = trust_read_public(path, true, keys, &count, &error);
        for (size_t i = 0; i < count; i++) {
                json_array_append_new(list, json_string(keys[i].id));
                crypt_key_free(keys[i].key);
        }
        if (status) {
                json_decref(list);
                return cli_fail(json, &error);
        }
        if (json)
                return cli_print_json(json_pack("{s:s, s:o}", "path", path, "trusted", list), CLI_OK);
        for (size_t i = 0; i < count; i++)
                term_print(STYLE_PLAIN, "%s\n", keys[i].id);
        term_print(STYLE_PLAIN, "%s\n", count ? "are trusted" : "no key is trusted");
        term_print(STYLE_PLAIN, "%s\n", path);
        json_decref(list);
        return CLI_OK;
}

/* Makes the directory of the list, and locks it: of two commands at once, each would write the list without the change of the other. Goes on
 * without a lock where the file system has none. Returns the descriptor that holds the lock; < 0: there is none. */
static enum nebula_status lock_trusted(char *path, int *ret_fd, struct nebula_error *error)
{
        char *slash = strrchr(path, '/');
        int64_t until_ns = os->now_ns() + LOCK_WAIT_MS * INT64_C(1000000);
        int result;

        *slash = 0;
        result = slash == path ? 0 : os_make_dirs(path, 0700);
        *ret_fd = os->open(slash == path ? "/" : path, OS_READ);
        *slash = '/';
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "the directory of %.300s cannot be made", path);
        while (*ret_fd >= 0 && (result = os->lock(*ret_fd, OS_LOCK_ALONE)) == -EAGAIN && os->now_ns() < until_ns)
                os->sleep_ms(10);
        return result == -EAGAIN ? error_set(error, NEBULA_BUSY, 0, "another command changes %.300s; try again", path) : NEBULA_OK;
}

/* Writes the trusted keys but `without`, and those of the file `with`. */
static enum nebula_status change_trusted(const char *with, const char *without, struct nebula_error *error)
{
        struct trust_key keys[2 * TRUST_KEYS_MAX];
        struct os_stat found;
        char path[TRUST_PATH_MAX], given[TARGET_PATH_MAX], text[TRUST_FILE_MAX];
        size_t count = 0, added = 0, kept = 0, used = 0;
        bool is_known = false;
        int result = 0, lock_fd = -1;
        enum nebula_status status = trust_path(path, error);

        if (!status)
                status = lock_trusted(path, &lock_fd, error);
        if (!status && os->stat(path, true, &found) != -ENOENT)
                status = trust_read_public(path, true, keys, &count, error);
        if (!status && with)
                status = target_absolute(with, given, error);
        if (!status && with)
                status = trust_read_public(given, false, keys + count, &added, error);
        if (!status && with && !added)
                status = error_set(error, NEBULA_INVALID, 0, "%.300s has no public key", given);
        for (size_t i = 0; i < count + added; i++) {
                char *pem = crypt_key_pem(keys[i].key, false);
                bool is_double = without && !strcmp(without, keys[i].id);

                is_known = is_known || is_double;
                for (size_t k = 0; k < i && !is_double; k++)
                        is_double = !strcmp(keys[k].id, keys[i].id);
                if (!status && !is_double && (!pem || kept++ == TRUST_KEYS_MAX || used + strlen(pem) + 1 > sizeof text))
                        status = error_set(error, NEBULA_INVALID, 0, "there is no room for more trusted keys in %.300s", path);
                if (!status && !is_double)
                        used += (size_t)snprintf(text + used, sizeof text - used, "%s", pem);
                free(pem);
        }
        for (size_t i = 0; i < count + added; i++)
                crypt_key_free(keys[i].key);
        if (!status && without && !is_known)
                status = error_set(error, NEBULA_NOT_FOUND, 0, "no key %.100s is trusted in %.300s", without, path);
        if (!status)
                result = os_write_file_atomic(path, text, used);
        if (result < 0)
                status = error_set(error, error_status_of_errno(-result), -result, "%.300s cannot be written", path);
        if (lock_fd >= 0)
                os->close(lock_fd);
        return status;
}

/* A key that this program trusts may have signed other bytes. */
static enum nebula_status sum_file(struct store *store, const struct manifest *manifest, const struct manifest_file *file, struct record *record,
                                   uint8_t ret_digest[32], struct nebula_error *error)
{
        struct record_file recorded = { 0 };
        uint8_t known[32];
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = record_take_file(record, file, &recorded, error);

        if (!status)
                status = manifest_file_key(manifest, file, key, error);
        if (!status)
                status = vouch_sum(store, key, &recorded, ret_digest, error);
        record_file_done(&recorded);
        if (!status && !signature_known(store, manifest, file->name, known) && memcmp(known, ret_digest, sizeof known))
                status = error_set(error, NEBULA_CORRUPT, 0, "%.200s/%.300s is not what a trusted key has signed: something has replaced it", store->root, key);
        return status;
}

static enum nebula_status sign_version(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        uint8_t (*digests)[32] = calloc(manifest->file_count + 1, sizeof *digests);
        uint32_t *order = manifest_files_by_record(manifest);
        size_t at = 0;
        enum nebula_status status = digests && order ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to sign \"%s\"", manifest->tag);

        progress_begin(manifest->tag, manifest_size(manifest));
        for (size_t r = 0; r < manifest->record_count && !status; r++) {
                struct record record = { 0 };

                status = manifest_load_record(store, manifest, r, &record, error);
                for (; !status && at < manifest->file_count && manifest->files[order[at]].record == r; at++)
                        status = sum_file(store, manifest, &manifest->files[order[at]], &record, digests[order[at]], error);
                record_done(&record);
        }
        progress_end();
        if (!status)
                status = signature_put(store, manifest, (const uint8_t (*)[32])digests, error);
        free(order);
        free(digests);
        return status;
}

static enum nebula_status sign_some(struct store *store, const char *tag, bool all, json_t *signed_tags, struct nebula_error *error)
{
        struct manifest_scan scan = { 0 };
        struct manifest one = { 0 };
        enum nebula_status status = all ? manifest_scan(store, &scan, error) : target_load(store, tag, &one, NULL, error);

        for (size_t i = 0; !status && i < (all ? scan.count : 1); i++) {
                const struct manifest *manifest = all ? &scan.manifests[i] : &one;

                status = sign_version(store, manifest, error);
                if (!status)
                        json_array_append_new(signed_tags, json_string(manifest->tag));
        }
        manifest_done(&one);
        manifest_scan_done(&scan);
        return status;
}

static int sign(const struct cli_common *common, const char *tag, bool all)
{
        json_t *tags = json_array();
        struct nebula_error error = { 0 };
        struct store *store;
        int code = CLI_OK;

        if (target_open(common->path, &store, &error)) {
                json_decref(tags);
                return cli_fail(common->json, &error);
        }
        if (!store->trust || !store->trust->own.key)
                code = cli_usage_error("sign", "which key signs? Give --key FILE, or set NEBULA_SIGN_KEY. `nebula sign --new-key FILE` makes one");
        else if (sign_some(store, tag, all, tags, &error))
                code = cli_fail(common->json, &error);
        else if (common->json)
                code = cli_print_json(json_pack("{s:s, s:s, s:O}", "path", store->root, "key", store->trust->own.id, "signed", tags), CLI_OK);
        else
                for (size_t i = 0; i < json_array_size(tags); i++)
                        term_print(STYLE_PLAIN, "%s is signed by %s\n", json_string_value(json_array_get(tags, i)), store->trust->own.id);
        json_decref(tags);
        store_close(store);
        return code;
}

static int sign_directory(const struct cli_common *common, const char *directory, const char *key)
{
        char path[TARGET_PATH_MAX], key_path[TARGET_PATH_MAX];
        struct nebula_error error = { 0 };
        size_t count = 0;

        if (target_absolute(directory, path, &error) || target_absolute(key, key_path, &error) || bundle_write(path, key_path, &count, &error))
                return cli_fail(common->json, &error);
        if (common->json)
                return cli_print_json(json_pack("{s:s, s:I}", "path", path, "file_count", (json_int_t)count), CLI_OK);
        term_print(STYLE_PLAIN, "%s/model.sig: signs %zu files, for `model_signing verify key`\n", path, count);
        return CLI_OK;
}

int command_sign(int argc, char **argv)
{
        struct cli_common common = { 0 };
        const char *key = NULL, *made = NULL, *trusted = NULL, *distrusted = NULL, *bundle = NULL;
        bool all = false, p256 = false, shows = false;
        const struct args_option options[] = { CLI_COMMON(common), { "key", ARGS_TEXT, &key }, { "new-key", ARGS_TEXT, &made }, { "p256", ARGS_FLAG, &p256 },
                                               { "trust", ARGS_TEXT, &trusted }, { "distrust", ARGS_TEXT, &distrusted }, { "trusted", ARGS_FLAG, &shows },
                                               { "bundle", ARGS_TEXT, &bundle }, { "all", ARGS_FLAG, &all } };
        char path[TARGET_PATH_MAX];
        struct nebula_error error = { 0 };
        struct args args;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 1))
                return CLI_USAGE;
        if ((made != NULL) + (trusted != NULL) + (distrusted != NULL) + (bundle != NULL) + shows + (all || args.count) > 1)
                return cli_usage_error("sign", "it does one thing at a time: sign, --bundle, --new-key, --trust, --distrust or --trusted");
        if (made)
                return new_key(common.json, made, p256);
        if (trusted || distrusted) {
                if (change_trusted(trusted, distrusted, &error))
                        return cli_fail(common.json, &error);
                return show_trusted(common.json);
        }
        if (shows)
                return show_trusted(common.json);
        if (bundle)
                return key ? sign_directory(&common, bundle, key) : cli_usage_error("sign", "--bundle needs --key FILE, a P-256 key: `nebula sign --new-key FILE --p256`");
        if (key && target_absolute(key, path, &error))
                return cli_fail(common.json, &error);
        if (key)
                setenv("NEBULA_SIGN_KEY", path, 1);
        return sign(&common, args.count ? args.positionals[0] : NULL, all);
}
