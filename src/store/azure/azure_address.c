/* Parses URLs and connection strings. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/conf.h"
#include "base/error.h"
#include "store/azure/azure_private.h"
#include "store/http/url.h"
#include "store/place.h"

/* the account of every emulator; its key is public */
#define EMULATOR_ACCOUNT "devstoreaccount1"
#define EMULATOR_KEY "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
#define EMULATOR_ENDPOINT "http://127.0.0.1:10000/" EMULATOR_ACCOUNT
#define CLOUD_SUFFIX "core.windows.net"

static bool is_true(const char *text, size_t size)
{
        return size == 4 && !strncasecmp(text, "true", 4);
}

/* "https", "account", "core.windows.net" and so on, in one text; NULL: no memory. */
static char *make_endpoint(const char *protocol, const char *account, const char *suffix)
{
        struct buf buf = { 0 };

        buf_add_text(&buf, protocol);
        buf_add_text(&buf, "://");
        buf_add_text(&buf, account);
        buf_add_text(&buf, ".blob.");
        buf_add_text(&buf, suffix);
        return object_take(&buf);
}

/* The account in an endpoint: in its path, or the first part of its host. */
static char *account_of(const char *endpoint)
{
        struct url url;

        if (!url_split(endpoint, &url))
                return NULL;
        return url.path_size > 1 ? strndup(url.path + 1, url.path_size - 1) : strndup(url.host, strcspn(url.host, "."));
}

static void trim_end(char *text)
{
        size_t size = strlen(text);

        while (size && text[size - 1] == '/')
                text[--size] = 0;
}

enum nebula_status azure_connection_parse(const char *text, struct azure_connection *ret_connection, struct nebula_error *error)
{
        struct azure_connection found = { 0 };
        char *protocol = NULL, *suffix = NULL;
        struct {
                const char *name;
                char **value;
        } fields[] = { { "AccountName", &found.account }, { "AccountKey", &found.key }, { "SharedAccessSignature", &found.sas },
                       { "BlobEndpoint", &found.endpoint }, { "DfsEndpoint", &found.dfs }, { "DefaultEndpointsProtocol", &protocol }, { "EndpointSuffix", &suffix } };
        bool is_emulator = false, is_whole = true;

        if (text && strchr(text, '"')) /* as files of variables for containers have it, which keep quotation marks */
                return error_set(error, NEBULA_INVALID, 0, "AZURE_STORAGE_CONNECTION_STRING has quotation marks: leave them out");
        for (const char *part = text; part && *part;) {
                size_t size = strcspn(part, ";"), name = strcspn(part, "=");
                const char *value = part + name + 1;

                if (name >= size) {
                        is_whole = size == strspn(part, " ") && is_whole;
                } else if (name == strlen("UseDevelopmentStorage") && !strncasecmp(part, "UseDevelopmentStorage", name)) {
                        is_emulator = is_true(value, size - name - 1);
                } else {
                        for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
                                if (name == strlen(fields[i].name) && !strncasecmp(part, fields[i].name, name) && !*fields[i].value)
                                        *fields[i].value = strndup(value, size - name - 1);
                }
                part += size + (part[size] == ';');
        }
        if (is_emulator) {
                azure_connection_done(&found);
                found = (struct azure_connection){ strdup(EMULATOR_ACCOUNT), strdup(EMULATOR_KEY), NULL, strdup(EMULATOR_ENDPOINT) };
        }
        if (!found.endpoint && found.account)
                found.endpoint = make_endpoint(protocol ? protocol : "https", found.account, suffix ? suffix : CLOUD_SUFFIX);
        if (found.endpoint)
                trim_end(found.endpoint);
        if (found.dfs)
                trim_end(found.dfs);
        if (!found.account && found.endpoint)
                found.account = account_of(found.endpoint);
        free(protocol);
        free(suffix);
        if (text && (!is_whole || !found.endpoint || !found.account)) {
                azure_connection_done(&found);
                return error_set(error, NEBULA_INVALID, 0,
                                 "AZURE_STORAGE_CONNECTION_STRING names no account and no BlobEndpoint, or is cut off");
        }
        *ret_connection = found;
        return NEBULA_OK;
}

void azure_connection_done(struct azure_connection *connection)
{
        free(connection->account);
        object_forget(connection->key);
        object_forget(connection->sas);
        free(connection->endpoint);
        free(connection->dfs);
        *connection = (struct azure_connection){ 0 };
}

/* Whether the text is small letters and digits. No other text becomes part of a host name. */
static bool is_account(const char *text)
{
        size_t size = strlen(text);

        return size >= 3 && size <= 24 && strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789") == size;
}

static bool is_container(const char *text)
{
        size_t size = strlen(text);

        return size >= 3 && size <= 63 && strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789-") == size && *text != '-' &&
               text[size - 1] != '-' && !strstr(text, "--");
}

/* az://: the endpoint of the connection string, if that is for the same account, as for emulators. */
static char *endpoint_of(const char *account)
{
        const char *text = conf_env("AZURE_STORAGE_CONNECTION_STRING");
        struct azure_connection connection = { 0 };
        char *endpoint = NULL;

        if (text && !azure_connection_parse(text, &connection, NULL) && !strcmp(connection.account, account))
                endpoint = strdup(connection.endpoint);
        azure_connection_done(&connection);
        return endpoint ? endpoint : make_endpoint("https", account, CLOUD_SUFFIX);
}

/* Whether the list, with commas, has the name. */
static bool has_name(const char *list, const char *name)
{
        size_t size = strlen(name);

        for (; *list; list += strcspn(list, ","), list += *list == ',')
                if (strcspn(list, ",") == size && !strncmp(list, name, size))
                        return true;
        return false;
}

char *azure_url_beside(const char *account, const char *accounts, const char *rest)
{
        const char *text = conf_env("AZURE_STORAGE_CONNECTION_STRING");
        struct azure_connection connection = { 0 };
        struct buf buf = { 0 };
        struct url url;
        char *host = NULL;
        size_t size;

        if (text && !azure_connection_parse(text, &connection, NULL) && has_name(accounts, connection.account) &&
            strcmp(account, connection.account) && url_split(connection.endpoint, &url))
                host = object_make_endpoint(&url);
        size = host ? strlen(connection.account) : 0;
        if (host && url.path_size == size + 1 && !strncmp(url.path + 1, connection.account, size)) {
                buf_add_text(&buf, host);
                buf_add_byte(&buf, '/');
                buf_add_text(&buf, account);
        } else if (host && !strncmp(url.host, connection.account, size) && url.host[size] == '.') {
                size_t before = strlen(url.scheme) + strlen("://");

                buf_add(&buf, host, before);
                buf_add_text(&buf, account);
                buf_add_text(&buf, host + before + size);
        } else {
                buf_add_text(&buf, "az://");
                buf_add_text(&buf, account);
        }
        buf_add_text(&buf, rest);
        free(host);
        azure_connection_done(&connection);
        return object_take(&buf);
}

/* Host and port of a URL, and for an emulator the account, which is the first component of its paths. */
static char *endpoint_in(const struct url *url, const char *account, bool is_emulator)
{
        char *host = object_make_endpoint(url);
        struct buf buf = { 0 };

        if (!is_emulator || !host)
                return host;
        buf_add_text(&buf, host);
        buf_add_byte(&buf, '/');
        buf_add_text(&buf, account);
        free(host);
        return object_take(&buf);
}

static char *make_root(const struct azure_address *address, bool is_az)
{
        struct buf buf = { 0 };
        char *before, *root;

        buf_add_text(&buf, is_az ? "az://" : address->endpoint);
        buf_add_text(&buf, is_az ? address->account : "");
        buf_add_byte(&buf, '/');
        before = object_take(&buf);
        root = before ? object_make_root(before, address->container, address->prefix) : NULL;
        free(before);
        return root;
}

bool store_azure_takes(const char *text)
{
        struct url url;

        if (!strncmp(text, "az://", 5))
                return true;
        if (!url_split(text, &url) || (strcmp(url.scheme, "https") && strcmp(url.scheme, "http")))
                return false;
        return strstr(url.host, ".blob.") || url_is_loopback(&url);
}

enum nebula_status azure_address_parse(const char *text, struct azure_address *ret_address, struct nebula_error *error)
{
        struct azure_address address = { 0 };
        bool is_az = !strncmp(text, "az://", 5), is_emulator = false, is_named = true;
        const char *path;
        struct url url;
        size_t size;

        if (!url_split(text, &url))
                return object_wrong_url(text, "is no az://ACCOUNT/CONTAINER/PREFIX, where bytes other than letters, digits and -._~ are written as %XX", error);
        path = url.path;
        size = url.path_size;
        if (is_az) {
                snprintf(address.account, sizeof address.account, "%.*s", (int)sizeof address.account - 1, url.host);
                is_named = url.port < 0;
        } else if (url_is_loopback(&url)) {
                is_emulator = true;
                is_named = object_take_component(&path, &size, address.account, sizeof address.account);
        } else {
                snprintf(address.account, sizeof address.account, "%.*s", (int)(strcspn(url.host, ".") % sizeof address.account), url.host);
        }
        if (!is_named || !is_account(address.account))
                return object_wrong_url(text, "names no storage account: 3 to 24 small letters and digits", error);
        if (!object_take_component(&path, &size, address.container, sizeof address.container) || !is_container(address.container))
                return object_wrong_url(text, "names no container: 3 to 63 small letters, digits and single hyphens, after the account", error);
        address.prefix = object_make_prefix(path, size);
        if (!address.prefix)
                return object_wrong_url(text, "has a wrong path after the container: " OBJECT_PREFIX_RULE, error);
        address.endpoint = is_az ? endpoint_of(address.account) : endpoint_in(&url, address.account, is_emulator);
        address.place = strndup(text, strcspn(text, "?"));
        address.sas = *url.query ? strdup(url.query) : place_query(text);
        address.root = address.endpoint ? make_root(&address, is_az) : NULL;
        if (!address.root || !address.place || (*url.query && !address.sas)) {
                azure_address_done(&address);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open a storage path");
        }
        *ret_address = address;
        return NEBULA_OK;
}

void azure_address_done(struct azure_address *address)
{
        free(address->endpoint);
        free(address->prefix);
        free(address->place);
        object_forget(address->sas);
        free(address->root);
        *address = (struct azure_address){ 0 };
}
