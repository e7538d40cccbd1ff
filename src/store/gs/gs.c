/* The driver of Google Cloud Storage: opening, and the table of its service. */
#include "store/gs/gs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "store/gs/gs_private.h"
#include "store/http/crypt.h"
#include "sum/sum.h"

#define ENDPOINT "https://storage.googleapis.com"

struct object_limits gs_limits = {
        .part_bytes = 8u << 20,
        .parts_good = 1000,
        .part_bytes_good = 64u << 20,
        .part_bytes_max = UINT64_C(5) << 30,
        .parts_min = 1,
        .parts_max = 10000,
        .read_bytes = 8u << 20,
};

const struct object_sigv4 gs_sigv4 = {
        .algorithm = "GOOG4-HMAC-SHA256", .key_prefix = "GOOG4", .service = "storage", .terminator = "goog4_request", .date_name = "x-goog-date",
        .hash_name = "x-goog-content-sha256", .session_name = "x-goog-security-token",
};

static void add_object(const struct object_store *store, struct object_call *call, char sum[OBJECT_SUM_SIZE])
{
        uint32_t crc = sum_crc32c(0, call->body, call->body_size);
        const uint8_t bytes[] = { (uint8_t)(crc >> 24), (uint8_t)(crc >> 16), (uint8_t)(crc >> 8), (uint8_t)crc };

        strcpy(sum, "crc32c=");
        crypt_base64(bytes, sizeof bytes, sum + strlen(sum));
        object_header(call, "x-goog-hash", sum);
}

static void stamp(const struct http_response *response, struct store_stamp *ret_stamp)
{
        const char *generation = http_field(response, "x-goog-generation");

        snprintf(ret_stamp->text, sizeof ret_stamp->text, "%s", generation ? generation : "");
}

void gs_condition(struct object_call *call, enum store_condition condition, const struct store_stamp *seen, char text[OBJECT_QUOTED_SIZE])
{
        snprintf(text, OBJECT_QUOTED_SIZE, "%s", condition == STORE_IF_SAME ? seen->text : "0");
        object_header(call, "x-goog-if-generation-match", condition == STORE_ALWAYS ? NULL : text);
}

static bool condition_failed(const struct http_response *response)
{
        return response->status == 412;
}

static void add_removal(struct object_call *call)
{
}

static bool is_other(const struct http_response *response, bool *ret_is_unknown)
{
        return response->status == 412;
}

static const struct object_listing listing = {
        .root = "ListBucketResult", .entry = "Contents", .name = "Key", .size = "Size", .stamp = "Generation", .time = "LastModified",
        .folded = "CommonPrefixes", .folded_name = "Prefix", .next = "NextContinuationToken", .depth = 2,
};

static const struct object_service service = {
        .metadata = GS_METADATA,
        .range = "Range",
        .counts_bytes = true,
        .marks = { "x-guploader-uploadid" },
        .listing = &listing,
        .limits = &gs_limits,
        .send = gs_send,
        .fail = gs_fail,
        .stamp = stamp,
        .condition = gs_condition,
        .condition_failed = condition_failed,
        .add_object = add_object,
        .add_listing = s3_add_listing,
        .add_removal = add_removal,
        .is_other = is_other,
        .steps = &gs_steps,
};

bool store_gs_takes(const char *url)
{
        return !strncmp(url, "gs://", 5);
}

/* The endpoint of an emulator: "http://host:port", or without "http://". */
static enum nebula_status find_endpoint(char **ret_endpoint, struct nebula_error *error)
{
        const char *given = conf_env("STORAGE_EMULATOR_HOST");
        struct buf buf = { 0 };
        struct url url;
        char *text;

        if (given && !strstr(given, "://"))
                buf_add_text(&buf, "http://");
        buf_add_text(&buf, given ? given : ENDPOINT);
        text = object_take(&buf);
        if (text && (!url_split(text, &url) || *url.query)) {
                free(text);
                return error_set(error, NEBULA_INVALID, 0, "STORAGE_EMULATOR_HOST is not http://host:port or http://host:port/path");
        }
        *ret_endpoint = text ? object_make_endpoint_with_path(&url) : NULL;
        free(text);
        return *ret_endpoint ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open a storage path");
}

static enum nebula_status gs_open(const char *url, struct store **ret_store, struct nebula_error *error)
{
        struct gs_store *gs = calloc(1, sizeof *gs);
        struct s3_store *s3 = &gs->s3;
        enum nebula_status status;

        if (!gs)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open a storage path");
        status = s3_address_parse(url, "gs://", &s3->address, error);
        if (!status) {
                s3->address.is_virtual = false;
                status = find_endpoint(&s3->address.endpoint, error);
        }
        if (status) {
                s3_address_done(&s3->address);
                free(gs);
                return status;
        }
        s3->object = (struct object_store){ { &store_gs, s3->address.root }, &service, s3->address.prefix };
        s3->object.vars = vars_hold(vars_now());
        lock_init(&s3->lock, LOCK_OBJECT_STORE);
        *ret_store = &s3->object.store;
        return NEBULA_OK;
}

static void gs_close(struct store *store)
{
        struct gs_store *gs = (struct gs_store *)store;

        s3_address_done(&gs->s3.address);
        object_token_drop(gs->s3.keys);
        object_token_drop(gs->bearer);
        vars_drop(gs->s3.object.vars);
        lock_done(&gs->s3.lock);
        free(gs);
}

static unsigned gs_features(struct store *store)
{
        return STORE_FAR | STORE_LISTS_FRESH | STORE_COPIES | STORE_PUTS_IF_SAME;
}

const struct store_ops store_gs = {
        .scheme = "gs",
        .open = gs_open,
        .close = gs_close,
        .features = gs_features,
        .put = object_put,
        .get = object_get,
        .upload = object_upload,
        .publish = object_publish,
        .abort = object_abort,
        .forget = s3_resume_forget,
        .read = object_read,
        .read_bulk = object_read_bulk,
        .read_chunks = object_read_chunks,
        .list = object_list,
        .list_after = object_list_after,
        .stat = object_stat,
        .remove = object_remove,
        .sweep = s3_sweep,
        .clock = object_clock,
        .copy = gs_copy,
        .free_bytes = object_free_bytes,
        .reach = gs_reach,
};
