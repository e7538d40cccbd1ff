/* The driver of S3: opening, and the table of its service. */
#include "store/s3/s3.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/conf.h"
#include "base/error.h"
#include "store/s3/s3_private.h"

struct object_limits s3_limits = {
        .part_bytes = 8u << 20,
        .parts_good = 1000,
        .part_bytes_good = 64u << 20,
        .part_bytes_max = UINT64_C(5) << 30,
        .parts_min = 1, /* S3 takes an empty part, but no upload without parts */
        .parts_max = 10000,
        .refer_bytes = 5u << 20,
        .read_bytes = 8u << 20,
};

const struct object_sigv4 s3_sigv4 = {
        .algorithm = "AWS4-HMAC-SHA256", .key_prefix = "AWS4", .service = "s3", .terminator = "aws4_request", .date_name = "x-amz-date",
        .hash_name = "x-amz-content-sha256", .session_name = "x-amz-security-token",
};

static void add_object(const struct object_store *store, struct object_call *call, char sum[OBJECT_SUM_SIZE])
{
        const struct s3_store *s3 = (const struct s3_store *)store;

        if (!atomic_load(&s3->has_sums))
                return;
        s3_crc64_text(object_body_sum(call), sum);
        object_header(call, "x-amz-checksum-crc64nvme", sum);
        object_header(call, "x-amz-sdk-checksum-algorithm", "CRC64NVME"); /* a bucket with object lock takes no object without it */
}

static void add_removal(struct object_call *call)
{
}

static bool is_other(const struct http_response *response, bool *ret_is_unknown)
{
        *ret_is_unknown = response->status == 501;
        return s3_condition_failed(response);
}

bool s3_asks_stores = true;

static const struct object_listing listing = {
        .root = "ListBucketResult", .entry = "Contents", .name = "Key", .size = "Size", .stamp = "ETag", .time = "LastModified",
        .folded = "CommonPrefixes", .folded_name = "Prefix", .next = "NextContinuationToken", .depth = 2,
};

static const struct object_service service = {
        .metadata = S3_METADATA,
        .range = "Range",
        .counts_bytes = true,
        .marks = { "x-amz-request-id", "x-amzn-requestid" },
        .listing = &listing,
        .limits = &s3_limits,
        .send = s3_send,
        .fail = s3_fail,
        .stamp = object_etag,
        .condition = object_etag_condition,
        .condition_failed = s3_condition_failed,
        .add_object = add_object,
        .add_listing = s3_add_listing,
        .add_removal = add_removal,
        .is_other = is_other,
        .steps = &s3_steps,
};

bool store_s3_takes(const char *url)
{
        return !strncmp(url, "s3://", 5);
}

static bool wants_sums(void)
{
        const char *said = conf_env("AWS_REQUEST_CHECKSUM_CALCULATION");
        char *of_profile = said ? NULL : s3_profile_value("request_checksum_calculation");
        bool is_so = said ? strcasecmp(said, "when_required") : !of_profile || strcasecmp(of_profile, "when_required");

        free(of_profile);
        return is_so;
}

static enum nebula_status s3_open(const char *url, struct store **ret_store, struct nebula_error *error)
{
        struct s3_store *s3 = calloc(1, sizeof *s3);
        enum nebula_status status;

        if (!s3)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open a storage path");
        status = s3_address_parse(url, "s3://", &s3->address, error);
        if (status) {
                free(s3);
                return status;
        }
        s3->object = (struct object_store){ { &store_s3, s3->address.root }, &service, s3->address.prefix };
        s3->object.vars = vars_hold(vars_now());
        atomic_init(&s3->has_sums, wants_sums());
        atomic_init(&s3->keeps_ids, true);
        if (s3->address.endpoint && s3_asks_stores) {
                atomic_init(&s3->uploads, S3_UPLOADS_UNKNOWN);
                atomic_init(&s3->object.doubts_puts, true);
                atomic_init(&s3->object.removal_trust, OBJECT_DOUBT);
        }
        lock_init(&s3->lock, LOCK_OBJECT_STORE);
        *ret_store = &s3->object.store;
        return NEBULA_OK;
}

static void s3_close(struct store *store)
{
        struct s3_store *s3 = (struct s3_store *)store;

        s3_address_done(&s3->address);
        object_token_drop(s3->keys);
        vars_drop(s3->object.vars);
        free((char *)(uintptr_t)s3->object.trust.path);
        lock_done(&s3->lock);
        free(s3);
}

static unsigned s3_features(struct store *store)
{
        bool refers = !atomic_load(&((struct s3_store *)store)->object.never_refers);

        return STORE_FAR | STORE_LISTS_FRESH | STORE_COPIES | STORE_PUTS_IF_SAME | (refers ? STORE_REFERS : 0u);
}

const struct store_ops store_s3 = {
        .scheme = "s3",
        .open = s3_open,
        .close = s3_close,
        .features = s3_features,
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
        .copy = s3_copy,
        .free_bytes = object_free_bytes,
        .reach = s3_reach,
        .lacks = s3_lacks,
};
