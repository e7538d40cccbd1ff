#include "store/trust.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "store/http/crypt.h"
#include "store/signature.h"

bool trust_key_id(const struct evp_pkey_st *key, char ret_id[TRUST_ID_SIZE])
{
        uint8_t bytes[CRYPT_PUBLIC_BYTES], digest[CRYPT_SHA256_BYTES];

        if (crypt_key_kind(key) != CRYPT_ED25519 || !crypt_key_bytes(key, bytes) || !crypt_sha256(bytes, sizeof bytes, digest))
                return false;
        for (size_t i = 0; i < (TRUST_ID_SIZE - 1) / 2; i++)
                snprintf(ret_id + 2 * i, 3, "%02x", digest[i]);
        return true;
}

static enum nebula_status check_file(const char *path, const struct os_stat *found, uint32_t open_to, struct nebula_error *error)
{
        if (found->kind != OS_KIND_FILE || (found->uid != os->uid() && found->uid))
                return error_set(error, NEBULA_INVALID, 0, "%.300s must be a file of user %u, because it has keys; its owner is user %u", path, os->uid(),
                                 found->uid);
        if (found->mode & open_to)
                return error_set(error, NEBULA_INVALID, 0, "the file of keys %.300s is open to other users (mode %03o): run chmod %s on it", path,
                                 found->mode & 0777u, open_to & 044 ? "600" : "go-w");
        if (found->size > TRUST_FILE_MAX)
                return error_set(error, NEBULA_INVALID, 0, "the file of keys %.300s has more than %d bytes", path, TRUST_FILE_MAX);
        return NEBULA_OK;
}

/* Checks and reads the file through one descriptor. `open_to`: bits of the mode that it must not have. */
static enum nebula_status read_keys(const char *path, uint32_t open_to, char **ret_text, struct nebula_error *error)
{
        struct os_stat found;
        char *text = NULL;
        int fd, result;
        enum nebula_status status = NEBULA_OK;

        if (path[0] != '/')
                return error_set(error, NEBULA_INVALID, 0, "the file of keys \"%.300s\" must be an absolute path: the agent reads it, too", path);
        fd = os->open(path, OS_READ);
        if (fd < 0)
                return error_set(error, NEBULA_INVALID, -fd, "the file of keys %.300s cannot be opened", path);
        result = os->fstat(fd, &found);
        if (!result)
                status = check_file(path, &found, open_to, error);
        if (!result && !status) {
                text = calloc(1, (size_t)found.size + 1);
                result = text ? os_read_at(fd, text, (size_t)found.size, 0) : -ENOMEM;
        }
        os->close(fd);
        if (!status && !result) {
                *ret_text = text;
                return NEBULA_OK;
        }
        free(text);
        return status ? status : error_set(error, NEBULA_INVALID, -result, "the file of keys %.300s cannot be read", path);
}

enum nebula_status trust_read_private(const char *path, struct evp_pkey_st **ret_key, struct nebula_error *error)
{
        char *text;
        enum nebula_status status = read_keys(path, 077, &text, error);

        if (status)
                return status;
        *ret_key = crypt_key_private(text);
        crypt_forget(text, strlen(text));
        free(text);
        return *ret_key ? NEBULA_OK : error_set(error, NEBULA_INVALID, 0, "%.300s has no private key without a password: make one with "
                                                "`nebula sign --new-key FILE`", path);
}

enum nebula_status trust_read_public(const char *path, bool is_trusted, struct trust_key *ret_keys, size_t *ret_count, struct nebula_error *error)
{
        char *text;
        const char *at;
        size_t count = 0;
        enum nebula_status status = read_keys(path, is_trusted ? 022 : 0, &text, error);

        if (status)
                return status;
        for (at = text; !status && strstr(at, "-----BEGIN");) {
                struct evp_pkey_st *key = strstr(at, "PRIVATE KEY") ? NULL : crypt_key_public(&at);

                if (!key || count == TRUST_KEYS_MAX || !trust_key_id(key, ret_keys[count].id)) {
                        crypt_key_free(key);
                        status = error_set(error, NEBULA_INVALID, 0, "key %zu of %.300s is not a public Ed25519 key in PEM, or there are more than %d",
                                           count + 1, path, TRUST_KEYS_MAX);
                } else {
                        ret_keys[count++].key = key;
                }
        }
        free(text);
        *ret_count = status ? 0 : count;
        while (status && count)
                crypt_key_free(ret_keys[--count].key);
        return status;
}

enum nebula_status trust_path(char ret_path[TRUST_PATH_MAX], struct nebula_error *error)
{
        const char *given = conf_env("NEBULA_TRUSTED_KEYS"), *config = conf_env("XDG_CONFIG_HOME"), *home = conf_env("HOME");
        int length;

        if (given)
                length = snprintf(ret_path, TRUST_PATH_MAX, "%s", given);
        else if (config || home)
                length = snprintf(ret_path, TRUST_PATH_MAX, "%s%s/nebula/trusted_keys", config ? config : home, config ? "" : "/.config");
        else
                return error_set(error, NEBULA_INVALID, 0, "where trusted keys are is not known: set NEBULA_TRUSTED_KEYS to a file of public keys");
        return length < TRUST_PATH_MAX ? NEBULA_OK : error_set(error, NEBULA_INVALID, 0, "the path of the trusted keys is too long");
}

static enum nebula_status read_policy(enum trust_policy *ret_policy, struct nebula_error *error)
{
        static const char *const words[] = { [TRUST_OFF] = "off", [TRUST_PREFER] = "prefer", [TRUST_REQUIRE] = "require" };
        const char *text = conf_env("NEBULA_SIGNATURES");

        *ret_policy = TRUST_OFF;
        for (size_t i = 0; text && i < sizeof words / sizeof *words; i++)
                if (!strcmp(text, words[i])) {
                        *ret_policy = (enum trust_policy)i;
                        return NEBULA_OK;
                }
        return text ? error_set(error, NEBULA_INVALID, 0, "NEBULA_SIGNATURES is \"%.60s\": it must be require, prefer or off", text) : NEBULA_OK;
}

enum trust_policy trust_policy(void)
{
        enum trust_policy policy;

        return read_policy(&policy, NULL) ? TRUST_REQUIRE : policy;
}

static enum nebula_status read_own(struct trust_key *own, struct nebula_error *error)
{
        const char *path = conf_env("NEBULA_SIGN_KEY");
        enum nebula_status status = path ? trust_read_private(path, &own->key, error) : NEBULA_OK;

        if (!status && path && !trust_key_id(own->key, own->id))
                status = error_set(error, NEBULA_INVALID, 0, "the key of %.300s is not an Ed25519 key: make one with `nebula sign --new-key FILE`", path);
        if (status)
                error_prefix(error, "NEBULA_SIGN_KEY");
        return status;
}

/* A user without that file trusts no key. Without a policy, keys only show which of them has signed: then a wrong file is no failure. */
static enum nebula_status read_trusted(struct trust *trust, struct nebula_error *error)
{
        struct nebula_error wrong = { 0 };
        struct os_stat found;
        char path[TRUST_PATH_MAX];
        enum nebula_status status = trust_path(path, &wrong);

        if (!status && !conf_env("NEBULA_TRUSTED_KEYS") && os->stat(path, true, &found) == -ENOENT)
                return NEBULA_OK;
        if (!status)
                status = trust_read_public(path, true, trust->keys, &trust->key_count, &wrong);
        if (!status || trust->policy == TRUST_OFF)
                return NEBULA_OK;
        if (error)
                *error = wrong;
        return status;
}

enum nebula_status trust_new(struct trust **ret_trust, struct nebula_error *error)
{
        struct trust *trust = calloc(1, sizeof *trust);
        enum nebula_status status = trust ? read_policy(&trust->policy, error) : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for keys");

        if (!trust)
                return status;
        lock_init(&trust->lock, LOCK_TRUST);
        if (!status)
                status = read_own(&trust->own, error);
        if (!status)
                status = read_trusted(trust, error);
        if (!status && trust->policy == TRUST_REQUIRE && !trust->key_count && !trust->own.key)
                status = error_set(error, NEBULA_INVALID, 0, "NEBULA_SIGNATURES=require, and no key is trusted: run `nebula sign --trust FILE.pub`");
        if (status || (trust->policy == TRUST_OFF && !trust->key_count && !trust->own.key)) {
                trust_free(trust);
                trust = NULL;
        }
        *ret_trust = trust;
        return status;
}

void trust_free(struct trust *trust)
{
        if (!trust)
                return;
        for (size_t i = 0; i < trust->key_count; i++)
                crypt_key_free(trust->keys[i].key);
        crypt_key_free(trust->own.key);
        signature_free(trust->last);
        lock_done(&trust->lock);
        free(trust);
}

static bool has_key(const struct trust *trust, const char *id)
{
        for (size_t i = 0; i < trust->key_count; i++)
                if (!strcmp(trust->keys[i].id, id))
                        return true;
        return false;
}

static bool add_key(struct trust *trust, const struct trust_key *key)
{
        if (!key->key || has_key(trust, key->id))
                return true;
        if (trust->key_count == TRUST_KEYS_MAX)
                return false;
        trust->keys[trust->key_count++] = (struct trust_key){ crypt_key_hold(key->key), "" };
        memcpy(trust->keys[trust->key_count - 1].id, key->id, TRUST_ID_SIZE);
        return true;
}

enum nebula_status trust_keep(struct trust **trust, const struct trust *former, struct nebula_error *error)
{
        bool is_whole = true;

        if (!former || former->policy <= (*trust ? (*trust)->policy : TRUST_OFF))
                return NEBULA_OK;
        if (!*trust) {
                *trust = calloc(1, sizeof **trust);
                if (!*trust)
                        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for keys");
                lock_init(&(*trust)->lock, LOCK_TRUST);
        }
        (*trust)->policy = former->policy;
        while ((*trust)->key_count) /* a session that asks for no check cannot add keys */
                crypt_key_free((*trust)->keys[--(*trust)->key_count].key);
        for (size_t i = 0; i < former->key_count; i++)
                is_whole = add_key(*trust, &former->keys[i]) && is_whole;
        return add_key(*trust, &former->own) && is_whole ? NEBULA_OK : error_set(error, NEBULA_INVALID, 0, "more than %d keys are trusted", TRUST_KEYS_MAX);
}
