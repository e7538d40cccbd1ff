/* The driver of Azure Data Lake Storage: opening, and the table of its service. */
#include "store/adls/adls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "store/adls/adls_private.h"
#include "store/place.h"
#include "store/http/crypt.h"

struct object_limits adls_limits = {
        .part_bytes = 8u << 20,
        .parts_good = 1000,
        .part_bytes_good = 64u << 20,
        .part_bytes_max = UINT64_C(4000) << 20,
        .parts_max = 50000,
        .read_bytes = 8u << 20,
        .touch_ms = 180000,
};

bool adls_property(const struct http_response *response, const char *name, char *ret_text, size_t room)
{
        const char *text = http_field(response, "x-ms-properties");
        char encoded[CRYPT_BASE64_SIZE(ADLS_SENT_SIZE)];
        size_t size = 0, name_size = strlen(name), value_size;

        *ret_text = 0;
        for (; text && *text; text += strcspn(text, ","), text += strspn(text, ", ")) {
                if (strncmp(text, name, name_size) || text[name_size] != '=')
                        continue;
                value_size = strcspn(text + name_size + 1, ", ");
                if (value_size >= sizeof encoded)
                        return false;
                memcpy(encoded, text + name_size + 1, value_size);
                encoded[value_size] = 0;
                if (!crypt_base64_decode(encoded, ret_text, room - 1, &size))
                        size = 0;
                ret_text[size] = 0;
                return size;
        }
        return true;
}

static void writer(const struct http_response *response, char ret_id[OBJECT_ID_SIZE])
{
        adls_property(response, "nebula", ret_id, OBJECT_ID_SIZE);
}

static bool is_object(const struct http_response *response)
{
        const char *type = http_field(response, "x-ms-resource-type");

        return !type || strcmp(type, "directory");
}

/* Treats a directory as absent: it is not an object. */
enum nebula_status adls_fail(const struct object_store *store, enum object_deed deed, const char *key, const struct http_response *response,
                             struct nebula_error *error)
{
        static const char *const directory[] = { "PathIsDirectory", "InvalidResourceType", "ResourceTypeMismatch", "OperationNotSupportedOnDirectory" };

        for (size_t i = 0; deed == OBJECT_READ && i < sizeof directory / sizeof *directory; i++)
                if (!strcmp(azure_code(response), directory[i]))
                        return object_refused(store, NEBULA_NOT_FOUND, deed, key, response, azure_code(response), "", error);
        return azure_fail(store, deed, key, response, error);
}

static const struct object_service service = {
        .range = "Range",
        .marks = { "x-ms-request-id" },
        .limits = &adls_limits,
        .send = azure_send,
        .fail = adls_fail,
        .stamp = object_etag,
        .condition = object_etag_condition,
        .writer = writer,
        .is_object = is_object,
        .steps = &adls_steps,
};

bool store_adls_takes(const char *url)
{
        return !strncmp(url, "abfss://", 8) || !strncmp(url, "abfs://", 7);
}

/* Turns abfss://container@host/prefix into https://host/container/prefix. NULL: not such a URL, or no memory. */
static char *as_https(const char *url)
{
        const char *container = strstr(url, "://") + 3, *at = container + strcspn(container, "@/?"), *host = at + 1;
        struct buf buf = { .is_secret = true };
        size_t size;

        if (*at != '@')
                return NULL;
        size = strcspn(host, "/?");
        buf_add_text(&buf, "https://");
        buf_add(&buf, host, size);
        buf_add_byte(&buf, '/');
        buf_add(&buf, container, (size_t)(at - container));
        buf_add_text(&buf, host + size);
        return object_take(&buf);
}

/* The blob service does not speak this protocol, and a URL that Azure shows for a container names it. */
static bool is_of_blobs(const char *url)
{
        const char *host = strchr(url, '@');

        return host && memmem(host, strcspn(host, "/?"), ".blob.", strlen(".blob."));
}

/* "abfss://container@host" + "/prefix". */
static char *make_root(const struct azure_address *address)
{
        struct buf buf = { 0 };
        size_t size = strlen(address->prefix);

        buf_add_text(&buf, "abfss://");
        buf_add_text(&buf, address->container);
        buf_add_byte(&buf, '@');
        buf_add_text(&buf, strstr(address->endpoint, "://") + 3);
        buf_add_text(&buf, size ? "/" : "");
        buf_add(&buf, address->prefix, size ? size - 1 : 0);
        return object_take(&buf);
}

/* Uses the endpoint of a connection string that is for the same account. */
static enum nebula_status use_connection(struct azure_address *address, struct nebula_error *error)
{
        const char *text = conf_env("AZURE_STORAGE_CONNECTION_STRING");
        struct azure_connection connection = { 0 };
        enum nebula_status status = text ? azure_connection_parse(text, &connection, error) : NEBULA_OK;

        if (!status && connection.dfs && !strcmp(connection.account, address->account)) {
                free(address->endpoint);
                address->endpoint = connection.dfs;
                connection.dfs = NULL;
        }
        azure_connection_done(&connection);
        return status;
}

static enum nebula_status parse(const char *url, struct azure_address *ret_address, struct nebula_error *error)
{
        char *text = as_https(url), *root;
        enum nebula_status status;

        if (text && is_of_blobs(url)) {
                object_forget(text);
                return object_wrong_url(url, "names the blob service: write ACCOUNT.dfs.core.windows.net, or az://ACCOUNT/CONTAINER/PREFIX", error);
        }
        if (!text)
                return object_wrong_url(url, "is no abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX", error);
        status = azure_address_parse(text, ret_address, error);
        object_forget(text);
        if (status)
                return status;
        root = make_root(ret_address);
        free(ret_address->root);
        ret_address->root = root;
        free(ret_address->place);
        ret_address->place = strndup(url, strcspn(url, "?"));
        if (!ret_address->sas)
                ret_address->sas = place_query(url);
        status = root && ret_address->place ? use_connection(ret_address, error) : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open a storage path");
        if (status)
                azure_address_done(ret_address);
        return status;
}

static enum nebula_status adls_open(const char *url, struct store **ret_store, struct nebula_error *error)
{
        struct azure_store *azure = calloc(1, sizeof *azure);
        enum nebula_status status;

        if (!azure)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open a storage path");
        status = parse(url, &azure->address, error);
        if (status) {
                free(azure);
                return status;
        }
        azure->object = (struct object_store){ { &store_adls, azure->address.root }, &service, azure->address.prefix };
        azure->object.vars = vars_hold(vars_now());
        lock_init(&azure->lock, LOCK_OBJECT_STORE);
        *ret_store = &azure->object.store;
        return NEBULA_OK;
}

static unsigned adls_features(struct store *store)
{
        return STORE_FAR | STORE_LISTS_FRESH | STORE_PUTS_IF_SAME;
}

const struct store_ops store_adls = {
        .scheme = "abfss",
        .open = adls_open,
        .close = azure_close,
        .features = adls_features,
        .put = adls_put,
        .get = object_get,
        .upload = object_upload,
        .publish = object_publish,
        .abort = object_abort,
        .forget = adls_forget,
        .read = object_read,
        .read_bulk = object_read_bulk,
        .read_chunks = object_read_chunks,
        .list = adls_list,
        .stat = object_stat,
        .remove = adls_remove,
        .clock = object_clock,
        .free_bytes = object_free_bytes,
        .reach = azure_reach,
};
