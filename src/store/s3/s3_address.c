/* Finds the host, bucket and region of a storage path. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "store/s3/s3_private.h"

/* Whether S3 takes the name. No other text becomes part of a host name. */
static bool is_bucket(const char *text)
{
        size_t size = strlen(text);

        return size >= 3 && size < S3_BUCKET_MAX && strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789-._") == size && *text != '-' &&
               *text != '.' && text[size - 1] != '-' && text[size - 1] != '.' && !strstr(text, "..");
}

/* NULL with NEBULA_OK: none is set, so AWS is used. */
static enum nebula_status find_endpoint(char **ret_endpoint, struct nebula_error *error)
{
        static const char *const names[] = { "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL" };
        const char *text = NULL;
        char *of_profile = NULL;
        struct url url;

        for (size_t i = 0; !text && i < sizeof names / sizeof *names; i++)
                text = conf_env(names[i]);
        if (!text)
                text = of_profile = s3_profile_value("endpoint_url");
        *ret_endpoint = NULL;
        if (!text)
                return NEBULA_OK;
        if (!url_split(text, &url) || (strcmp(url.scheme, "https") && strcmp(url.scheme, "http")) || *url.query) {
                free(of_profile);
                return error_set(error, NEBULA_INVALID, 0, "AWS_ENDPOINT_URL, or endpoint_url of the profile, is not https://host:port or https://host:port/path");
        }
        *ret_endpoint = object_make_endpoint_with_path(&url);
        free(of_profile);
        return *ret_endpoint ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open a storage path");
}

enum nebula_status s3_address_parse(const char *text, const char *scheme, struct s3_address *ret_address, struct nebula_error *error)
{
        const char *style = conf_env("NEBULA_S3_STYLE");
        struct s3_address address = { 0 };
        enum nebula_status status;
        struct url url;
        char form[120];

        if (url_split(text, &url) && (*url.query || url.port > 0))
                return object_wrong_url(text, "has a port or a query; AWS_ENDPOINT_URL, or STORAGE_EMULATOR_HOST for gs://, names another server", error);
        if (!url_split(text, &url)) {
                snprintf(form, sizeof form, "is no %sBUCKET/PREFIX, where bytes other than letters, digits and -._~ are written as %%XX", scheme);
                return object_wrong_url(text, form, error);
        }
        /* Case matters in a bucket's name, but not in a host's. */
        if (!is_bucket(url.host) || strncmp(strstr(text, "://") + 3, url.host, strlen(url.host)))
                return object_wrong_url(text, "names no bucket: 3 to 63 small letters, digits, hyphens and dots", error);
        if (style && strcmp(style, "path") && strcmp(style, "virtual"))
                return error_set(error, NEBULA_INVALID, 0, "NEBULA_S3_STYLE is neither \"path\" nor \"virtual\"");
        snprintf(address.bucket, sizeof address.bucket, "%.63s", url.host);
        address.prefix = object_make_prefix(url.path, url.path_size);
        if (!address.prefix)
                return object_wrong_url(text, "has a wrong path after the bucket: " OBJECT_PREFIX_RULE, error);
        status = strcmp(scheme, "s3://") ? NEBULA_OK : find_endpoint(&address.endpoint, error);
        address.root = status ? NULL : object_make_root(scheme, address.bucket, address.prefix);
        if (!status && !address.root)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open a storage path");
        if (status) {
                s3_address_done(&address);
                return status;
        }
        /* A certificate for *.s3.amazonaws.com does not cover names with more dots. */
        address.is_virtual = style ? !strcmp(style, "virtual") : !address.endpoint && !strpbrk(address.bucket, "._");
        *ret_address = address;
        return NEBULA_OK;
}

void s3_address_done(struct s3_address *address)
{
        free(address->prefix);
        free(address->root);
        free(address->endpoint);
        *address = (struct s3_address){ 0 };
}

/* Whether the text is a region: it becomes part of host names. */
static bool is_region(const char *text)
{
        size_t size = text ? strlen(text) : 0;

        return size && size < S3_REGION_MAX && strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789-") == size;
}

void s3_region_find(char ret_region[S3_REGION_MAX])
{
        const char *text = conf_env("AWS_REGION") ? conf_env("AWS_REGION") : conf_env("AWS_DEFAULT_REGION");
        char *of_profile = text ? NULL : s3_profile_value("region");

        if (!text)
                text = of_profile;
        snprintf(ret_region, S3_REGION_MAX, "%s", is_region(text) ? text : "us-east-1");
        free(of_profile);
}

void s3_add_host(struct buf *buf, const char *service, const char *region)
{
        buf_add_text(buf, service);
        buf_add_byte(buf, '.');
        buf_add_text(buf, region);
        buf_add_text(buf, strncmp(region, "cn-", 3) ? ".amazonaws.com" : ".amazonaws.com.cn");
}

void s3_add_bucket(struct buf *buf, const struct s3_address *address, const char *region)
{
        const char *host = address->endpoint ? strstr(address->endpoint, "://") + 3 : NULL;

        if (host)
                buf_add(buf, address->endpoint, (size_t)(host - address->endpoint));
        else
                buf_add_text(buf, "https://");
        if (address->is_virtual) {
                buf_add_text(buf, address->bucket);
                buf_add_byte(buf, '.');
        }
        if (host)
                buf_add_text(buf, host);
        else
                s3_add_host(buf, "s3", region);
        if (!address->is_virtual) {
                buf_add_byte(buf, '/');
                buf_add_text(buf, address->bucket);
        }
}
