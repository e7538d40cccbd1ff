/* Chooses the credential that the environment offers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "store/azure/azure_private.h"
#include "store/http/crypt.h"
#include "store/place.h"

static enum nebula_status use_key(const char *text, const char *source, struct azure_credential *credential, struct nebula_error *error)
{
        credential->proof = AZURE_PROOF_KEY;
        credential->source = source;
        if (!crypt_base64_decode(text, credential->key, sizeof credential->key, &credential->key_size) || !credential->key_size)
                return error_set(error, NEBULA_INVALID, 0, "%s: the account's key is not base64; copy it again", source);
        return NEBULA_OK;
}

#define SAS_FILE_MAX (64u << 10)

struct azure_old_sas {
        struct azure_old_sas *next;
        char *text;
};

static enum nebula_status use_sas(const char *text, const char *source, struct azure_credential *credential, struct nebula_error *error)
{
        text += *text == '?';
        credential->proof = AZURE_PROOF_SAS;
        credential->source = source;
        if (!strstr(text, "sig=") || strpbrk(text, " \t\r\n#?\"'"))
                return error_set(error, NEBULA_INVALID, 0, "%s: this is not a SAS; a SAS contains \"sig=\" and neither blanks nor '?' nor quotation marks", source);
        credential->sas = strdup(text);
        return credential->sas ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a SAS");
}

/* Reads the file, without the blanks at its end. */
static enum nebula_status read_sas(const char *file, char **ret_text, struct nebula_error *error)
{
        char *text;
        size_t size;
        int result = os_read_file(file, SAS_FILE_MAX, &text, &size);

        if (result)
                return error_set(error, NEBULA_INVALID, -result, "AZURE_STORAGE_SAS_TOKEN_FILE: cannot read %.300s", file);
        while (size && strchr(" \t\r\n", text[size - 1]))
                text[--size] = 0;
        *ret_text = text;
        return NEBULA_OK;
}

static enum nebula_status use_sas_file(const char *file, struct azure_credential *credential, struct nebula_error *error)
{
        char *text = NULL;
        enum nebula_status status = read_sas(file, &text, error);

        if (status)
                return status;
        status = use_sas(text, "the SAS of AZURE_STORAGE_SAS_TOKEN_FILE", credential, error);
        object_forget(text);
        credential->sas_file = strdup(file);
        return status || credential->sas_file ? status : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a SAS");
}

/* The SAS that the file has now, or the last one with which a trainer named the storage path. */
static enum nebula_status find_new(const struct azure_credential *credential, struct azure_credential *found)
{
        enum nebula_status status = NEBULA_NOT_FOUND;
        char *query;

        if (credential->sas_file)
                return use_sas_file(credential->sas_file, found, NULL);
        query = place_query(credential->place);
        if (query)
                status = use_sas(query, credential->source, found, NULL);
        place_forget(query);
        return status;
}

bool azure_credential_renew(struct azure_credential *credential, const char *used)
{
        struct azure_credential found = { 0 };
        struct azure_old_sas *old;

        if (!credential->sas_file && !credential->place)
                return false;
        if (used != credential->sas) /* another thread has read the file since */
                return true;
        old = malloc(sizeof *old);
        if (!old || find_new(credential, &found) || !strcmp(found.sas, used)) {
                free(old);
                azure_credential_done(&found);
                return false;
        }
        *old = (struct azure_old_sas){ credential->old, credential->sas };
        credential->old = old;
        credential->sas = found.sas;
        found.sas = NULL;
        azure_credential_done(&found);
        return true;
}

/* Uses the connection string if it is for this account. */
static enum nebula_status use_connection(const struct azure_address *address, bool *ret_used, struct azure_credential *credential,
                                         struct nebula_error *error)
{
        static const char source[] = "AZURE_STORAGE_CONNECTION_STRING";
        struct azure_connection connection = { 0 };
        enum nebula_status status;

        *ret_used = false;
        if (!conf_env(source))
                return NEBULA_OK;
        status = azure_connection_parse(conf_env(source), &connection, error);
        if (!status && !strcmp(connection.account, address->account) && (connection.key || connection.sas)) {
                *ret_used = true;
                status = connection.key ? use_key(connection.key, source, credential, error) : use_sas(connection.sas, source, credential, error);
        }
        azure_connection_done(&connection);
        return status;
}

/* AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY may be lists of as many names and keys. NULL: the account is not in the list, or no memory. */
static char *key_of(const char *wanted)
{
        const char *names = conf_env("AZURE_STORAGE_ACCOUNT"), *keys = conf_env("AZURE_STORAGE_KEY");
        size_t size = strlen(wanted);

        if (!names || !keys)
                return keys ? strdup(keys) : NULL;
        while (*names && *keys && (strcspn(names, ",") != size || strncmp(names, wanted, size))) {
                names += strcspn(names, ",");
                names += *names == ',';
                keys += strcspn(keys, ",");
                keys += *keys == ',';
        }
        return *names && *keys ? strndup(keys, strcspn(keys, ",")) : NULL;
}

/* The secret of a variable, unless its companion variable names another account. */
static const char *secret_of(const char *secret, const char *account, const char *wanted)
{
        const char *named = conf_env(account);

        return !named || !strcmp(named, wanted) ? conf_env(secret) : NULL;
}

static enum nebula_status find(const struct azure_address *address, struct azure_credential *credential, struct nebula_error *error)
{
        const char *text;
        enum nebula_status status;
        bool is_used;
        char *key;

        if (address->sas) {
                credential->place = address->place;
                return use_sas(address->sas, "the SAS of the storage path", credential, error);
        }
        status = use_connection(address, &is_used, credential, error);
        if (status || is_used)
                return status;
        if ((key = key_of(address->account))) {
                status = use_key(key, "AZURE_STORAGE_KEY", credential, error);
                object_forget(key);
                return status;
        }
        if (conf_env("AZUREML_BLOB_ACCOUNT_NAME") && (text = secret_of("AZUREML_BLOB_ACCOUNT_KEY", "AZUREML_BLOB_ACCOUNT_NAME", address->account)))
                return use_key(text, "AZUREML_BLOB_ACCOUNT_KEY", credential, error);
        if ((text = secret_of("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_ACCOUNT", address->account)))
                return use_sas(text, "AZURE_STORAGE_SAS_TOKEN", credential, error);
        if ((text = secret_of("AZURE_STORAGE_SAS_TOKEN_FILE", "AZURE_STORAGE_ACCOUNT", address->account)))
                return use_sas_file(text, credential, error);
        credential->proof = AZURE_PROOF_TOKEN;
        credential->identity = azure_identity_find();
        if (!credential->identity)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for an identity");
        return NEBULA_OK;
}

enum nebula_status azure_credential_find(const struct azure_address *address, struct azure_credential *ret_credential, struct nebula_error *error)
{
        struct azure_credential credential = { 0 };
        enum nebula_status status = find(address, &credential, error);

        if (status) {
                azure_credential_done(&credential);
                return status;
        }
        *ret_credential = credential;
        crypt_forget(credential.key, sizeof credential.key);
        return NEBULA_OK;
}

const char *azure_credential_name(const struct azure_credential *credential)
{
        return credential->source ? credential->source : object_oauth_name(credential->identity);
}

void azure_credential_done(struct azure_credential *credential)
{
        for (struct azure_old_sas *old = credential->old, *next; old; old = next) {
                next = old->next;
                object_forget(old->text);
                free(old);
        }
        free(credential->sas_file);
        object_forget(credential->sas);
        crypt_forget(credential->key, sizeof credential->key);
        *credential = (struct azure_credential){ 0 };
}
