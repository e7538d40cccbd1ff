/* Bearer tokens. The environment names at most one identity, in the order of make_identity; without one, the machine's own or the
 * login of the az command may exist. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "store/azure/azure_private.h"

#define IMDS_HOST "http://169.254.169.254"
#define LOGIN_HOST "https://login.microsoftonline.com"

static const char *client_id(void)
{
        return conf_env("AZURE_CLIENT_ID") ? conf_env("AZURE_CLIENT_ID") : conf_env("DEFAULT_IDENTITY_CLIENT_ID");
}

/* Prepares a GET from a service of this machine. */
static void ask_service(struct object_oauth *identity, const char *name, const char *endpoint, const char *version, const char *id_name,
                        const char *header, const char *secret)
{
        struct buf buf = { 0 };

        buf_add_text(&buf, endpoint);
        object_oauth_pair(&buf, strchr(endpoint, '?') ? "&" : "?", "api-version", version);
        object_oauth_pair(&buf, "&", "resource", AZURE_RESOURCE);
        if (client_id())
                object_oauth_pair(&buf, "&", id_name, client_id());
        identity->url = object_take(&buf);
        identity->name = strdup(name);
        identity->header = strdup(header);
        identity->secret = strdup(secret);
}

/* Prepares a POST to the tenant's directory. `secret` NULL: uses a signed file of the cluster. */
static void ask_directory(struct object_oauth *identity, const char *name, const char *secret)
{
        const char *host = conf_env("AZURE_AUTHORITY_HOST") ? conf_env("AZURE_AUTHORITY_HOST") : LOGIN_HOST;
        size_t length = strlen(host);
        struct buf buf = { .is_secret = true };

        buf_add(&buf, host, length - (host[length - 1] == '/'));
        buf_add_byte(&buf, '/');
        url_encode(&buf, conf_env("AZURE_TENANT_ID"), "");
        buf_add_text(&buf, "/oauth2/v2.0/token");
        identity->url = object_take(&buf);
        object_oauth_pair(&buf, "", "client_id", conf_env("AZURE_CLIENT_ID"));
        object_oauth_pair(&buf, "&", "grant_type", "client_credentials");
        object_oauth_pair(&buf, "&", "scope", AZURE_RESOURCE ".default");
        if (secret)
                object_oauth_pair(&buf, "&", "client_secret", secret);
        else
                object_oauth_pair(&buf, "&", "client_assertion_type", "urn:ietf:params:oauth:client-assertion-type:jwt-bearer");
        identity->form = object_take(&buf);
        identity->name = strdup(name);
        if (!secret)
                identity->assertion = strdup(conf_env("AZURE_FEDERATED_TOKEN_FILE"));
}

static void make_identity(struct object_oauth *identity)
{
        bool has_tenant = conf_env("AZURE_CLIENT_ID") && conf_env("AZURE_TENANT_ID");
        const char *imds = conf_env("AZURE_POD_IDENTITY_AUTHORITY_HOST");
        char endpoint[300];

        if (has_tenant && conf_env("AZURE_CLIENT_SECRET")) {
                ask_directory(identity, "the application of AZURE_CLIENT_ID", conf_env("AZURE_CLIENT_SECRET"));
        } else if (has_tenant && conf_env("AZURE_FEDERATED_TOKEN_FILE")) {
                ask_directory(identity, "the workload identity of AZURE_FEDERATED_TOKEN_FILE", NULL);
        } else if (conf_env("IDENTITY_ENDPOINT") && conf_env("IDENTITY_HEADER")) {
                ask_service(identity, "the identity of IDENTITY_ENDPOINT", conf_env("IDENTITY_ENDPOINT"), "2019-08-01", "client_id",
                            "X-IDENTITY-HEADER", conf_env("IDENTITY_HEADER"));
        } else if (conf_env("MSI_ENDPOINT") && conf_env("MSI_SECRET")) {
                ask_service(identity, "the identity of MSI_ENDPOINT", conf_env("MSI_ENDPOINT"), "2017-09-01", "clientid", "secret",
                            conf_env("MSI_SECRET"));
        } else {
                snprintf(endpoint, sizeof endpoint, "%.200s/metadata/identity/oauth2/token", imds ? imds : IMDS_HOST);
                ask_service(identity, "the managed identity of this machine", endpoint, "2018-02-01", "client_id", "Metadata", "true");
                identity->is_machine = true;
                identity->log_in = azure_login;
                identity->login_name = "the login of az";
        }
}

struct object_token *azure_identity_find(void)
{
        struct object_oauth identity = { .missing = "the environment holds no key, SAS or identity for this account" };

        make_identity(&identity);
        return object_oauth_find(&identity);
}
