#include "base/vars.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"

struct vars {
        atomic_uint holders;
        size_t size;
        char origin[200];
        char text[];
};

static _Thread_local struct vars *entered;
static char own_origin[200];

/* All that drivers of object stores ask for, and the settings of signatures, which a job brings in the same way. */
static const char *const names[] = {
        "AWS_ACCESS_KEY_ID", "AWS_CA_BUNDLE", "AWS_CONFIG_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
        "AWS_ENDPOINT_URL_SSO", "AWS_ENDPOINT_URL_STS", "AWS_PROFILE", "AWS_REGION",
        "AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME",
        "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE", "AZUREML_BLOB_ACCOUNT_KEY", "AZUREML_BLOB_ACCOUNT_NAME",
        "AZURE_AUTHORITY_HOST", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_POD_IDENTITY_AUTHORITY_HOST", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_TOKEN_FILE",
        "AZURE_TENANT_ID", "DEFAULT_IDENTITY_CLIENT_ID", "GCE_METADATA_HOST",
        "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_QUOTA_PROJECT",
        "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES", "GOOGLE_OAUTH_ACCESS_TOKEN", "GOOGLE_TOKEN_URL",
        "GS_ACCESS_KEY_ID", "GS_SECRET_ACCESS_KEY", "IDENTITY_ENDPOINT", "IDENTITY_HEADER",
        "MSI_ENDPOINT", "MSI_SECRET", "NEBULA_S3_STYLE", "NEBULA_SIGNATURES", "NEBULA_SIGN_KEY", "NEBULA_TRUSTED_KEYS",
        "STORAGE_EMULATOR_HOST",
};

bool vars_is_of_cloud(const char *name)
{
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
                size_t length = strlen(names[i]);

                if (!strncmp(name, names[i], length) && (!name[length] || name[length] == '='))
                        return true;
        }
        return false;
}

struct vars *vars_new(const char *text, size_t size, const char *origin)
{
        struct vars *vars = malloc(sizeof *vars + size + 1);

        if (!vars)
                return NULL;
        atomic_init(&vars->holders, 1);
        vars->size = size;
        snprintf(vars->origin, sizeof vars->origin, "%s", origin);
        memcpy(vars->text, text, size);
        vars->text[size] = 0;
        return vars;
}

enum nebula_status vars_collect(char *const *environment, struct vars **ret_vars, struct nebula_error *error)
{
        struct buf buf = { .is_secret = true };
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; environment && environment[i]; i++)
                if (vars_is_of_cloud(environment[i]))
                        buf_add(&buf, environment[i], strlen(environment[i]) + 1);
        *ret_vars = NULL;
        if (buf.size > VARS_MAX)
                status = error_set(error, NEBULA_INVALID, 0, "the environment's variables for object stores (AWS_..., AZURE_..., GOOGLE_...) have %zu bytes, "
                                   "and Nebula passes on %u: shorten them", buf.size, VARS_MAX);
        else if (buf.failed || (buf.size && !(*ret_vars = vars_new((const char *)buf.data, buf.size, ""))))
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for variables of object stores");
        buf_done(&buf);
        return status;
}

const char *vars_text(const struct vars *vars, size_t *ret_size)
{
        *ret_size = vars ? vars->size : 0;
        return vars ? vars->text : "";
}

struct vars *vars_hold(struct vars *vars)
{
        if (vars)
                atomic_fetch_add(&vars->holders, 1);
        return vars;
}

void vars_drop(struct vars *vars)
{
        if (!vars || atomic_fetch_sub(&vars->holders, 1) != 1)
                return;
        explicit_bzero(vars->text, vars->size);
        free(vars);
}

bool vars_same(const struct vars *a, const struct vars *b)
{
        return a == b || (a && b && a->size == b->size && !memcmp(a->text, b->text, a->size));
}

struct vars *vars_enter(struct vars *vars)
{
        struct vars *before = entered;

        entered = vars;
        return before;
}

void vars_leave(struct vars *before)
{
        entered = before;
}

struct vars *vars_now(void)
{
        return entered;
}

const char *vars_value(const char *name)
{
        size_t length = strlen(name);

        for (const char *at = entered->text; at < entered->text + entered->size; at += strlen(at) + 1)
                if (!strncmp(at, name, length) && at[length] == '=')
                        return at + length + 1;
        return NULL;
}

const char *vars_origin(void)
{
        return entered ? entered->origin : own_origin;
}

void vars_forget_own(void)
{
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
                unsetenv(names[i]);
}

void vars_own_origin(const char *origin)
{
        snprintf(own_origin, sizeof own_origin, "%s", origin);
}
