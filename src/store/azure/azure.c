/* The driver of Azure Blob Storage: opening, and the table of its service. */
#include "store/azure/azure.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/azure/azure_private.h"

struct object_limits azure_limits = {
        .part_bytes = 8u << 20,
        .parts_good = 1000,
        .part_bytes_good = 64u << 20,
        .part_bytes_max = UINT64_C(4000) << 20,
        .parts_max = 50000,
        .read_bytes = 8u << 20,
};

static bool condition_failed(const struct http_response *response)
{
        return response->status == 412 || (response->status == 409 && !strcmp(azure_code(response), "BlobAlreadyExists"));
}

static void add_object(const struct object_store *store, struct object_call *call, char sum[OBJECT_SUM_SIZE])
{
        azure_crc64_text(object_body_sum(call), sum);
        object_header(call, "x-ms-blob-type", "BlockBlob");
        object_header(call, "x-ms-content-crc64", sum);
}

static void add_listing(struct object_call *call, const char *prefix, bool deep, const char *entries, const char *from)
{
        object_param(call, "restype", "container");
        object_param(call, "comp", "list");
        if (*prefix)
                object_param(call, "prefix", prefix);
        if (!deep)
                object_param(call, "delimiter", "/");
        if (entries)
                object_param(call, "maxresults", entries);
        if (from)
                object_param(call, "marker", from);
}

static void add_removal(struct object_call *call)
{
        object_header(call, "x-ms-delete-snapshots", "include");
}

static bool is_other(const struct http_response *response, bool *ret_is_unknown)
{
        return !strcmp(azure_code(response), "ConditionNotMet");
}

static const struct object_listing listing = {
        .root = "EnumerationResults", .entry = "Blob", .name = "Name", .size = "Content-Length", .stamp = "Etag", .time = "Last-Modified",
        .folded = "BlobPrefix", .folded_name = "Name", .next = "NextMarker", .depth = 3,
};

static const struct object_service service = {
        .metadata = AZURE_METADATA,
        .range = "x-ms-range",
        .marks = { "x-ms-request-id" },
        .listing = &listing,
        .limits = &azure_limits,
        .send = azure_send,
        .fail = azure_fail,
        .stamp = object_etag,
        .condition = object_etag_condition,
        .condition_failed = condition_failed,
        .add_object = add_object,
        .add_listing = add_listing,
        .add_removal = add_removal,
        .is_other = is_other,
        .steps = &azure_steps,
};

static enum nebula_status azure_open(const char *url, struct store **ret_store, struct nebula_error *error)
{
        struct azure_store *azure = calloc(1, sizeof *azure);
        enum nebula_status status;

        if (!azure)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open a storage path");
        status = azure_address_parse(url, &azure->address, error);
        if (status) {
                free(azure);
                return status;
        }
        azure->object = (struct object_store){ { &store_azure, azure->address.root }, &service, azure->address.prefix };
        azure->object.vars = vars_hold(vars_now());
        lock_init(&azure->lock, LOCK_OBJECT_STORE);
        *ret_store = &azure->object.store;
        return NEBULA_OK;
}

void azure_close(struct store *store)
{
        struct azure_store *azure = (struct azure_store *)store;

        object_token_drop(azure->credential.identity);
        azure_credential_done(&azure->credential);
        vars_drop(azure->object.vars);
        azure_address_done(&azure->address);
        lock_done(&azure->lock);
        free(azure);
}

static unsigned azure_features(struct store *store)
{
        return STORE_FAR | STORE_LISTS_FRESH | STORE_COPIES | STORE_PUTS_IF_SAME | STORE_REFERS;
}

const struct store_ops store_azure = {
        .scheme = "az",
        .open = azure_open,
        .close = azure_close,
        .features = azure_features,
        .put = object_put,
        .get = object_get,
        .upload = object_upload,
        .publish = object_publish,
        .abort = object_abort,
        .read = object_read,
        .read_bulk = object_read_bulk,
        .read_chunks = object_read_chunks,
        .list = object_list,
        .stat = object_stat,
        .remove = object_remove,
        .clock = object_clock,
        .copy = azure_copy,
        .free_bytes = object_free_bytes,
        .reach = azure_reach,
};
