/* Listings in JSON. The service lists a directory, or all below it, in its own order. So the driver lists the prefix's directory to the
 * end, leaves out entries that do not begin with the prefix, and sorts the rest: one page is the whole listing. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/adls/adls_private.h"

#define PAGE_TEXT_MAX (64u << 20)

struct listing {
        const struct object_store *store;
        const char *prefix;
        bool deep;
        struct store_page page;
};

static bool is_true(const json_t *value)
{
        return json_is_true(value) || (json_is_string(value) && !strcmp(json_string_value(value), "true"));
}

/* False: it is not valid. */
static bool read_size(const json_t *value, uint64_t *ret_size)
{
        const char *text = json_string_value(value);
        char *end;

        if (json_is_integer(value) && json_integer_value(value) >= 0) {
                *ret_size = (uint64_t)json_integer_value(value);
                return true;
        }
        if (!text || *text < '0' || *text > '9')
                return false;
        *ret_size = strtoull(text, &end, 10);
        return !*end;
}

static enum nebula_status broken(const struct listing *listing, struct nebula_error *error)
{
        return error_set(error, NEBULA_STORAGE, 0, "cannot list %s: the answer is not a listing", listing->store->store.root);
}

static enum nebula_status add(struct listing *listing, const json_t *path, struct nebula_error *error)
{
        const char *name = json_string_value(json_object_get(path, "name")), *etag = json_string_value(json_object_get(path, "etag"));
        const char *modified = json_string_value(json_object_get(path, "lastModified"));
        struct store_entry entry = { .is_prefix = is_true(json_object_get(path, "isDirectory")) };
        enum nebula_status status = NEBULA_OK;
        int64_t seconds = 0;

        if (!name)
                return broken(listing, error);
        if (!object_key_of(listing->store, name, &entry.key))
                return object_no_memory(listing->store, error);
        if (entry.is_prefix ? listing->deep : !read_size(json_object_get(path, "contentLength"), &entry.size) || !modified ||
                                                      !http_date_parse(modified, &seconds))
                status = entry.is_prefix ? NEBULA_OK : broken(listing, error);
        else if (entry.key && !strncmp(entry.key, listing->prefix, strlen(listing->prefix)) && store_key_sound(entry.key)) {
                if (!entry.is_prefix) {
                        entry.time_ns = seconds * SECOND_NS;
                        object_etag_text(etag ? etag : "", &entry.stamp);
                }
                if (store_page_add(&listing->page, &entry))
                        status = object_no_memory(listing->store, error);
        }
        store_entry_done(&entry);
        return status;
}

static enum nebula_status read_page(struct listing *listing, const struct http_response *response, struct nebula_error *error)
{
        json_t *body = json_loadb(response->text, response->text_size, 0, NULL), *paths = json_object_get(body, "paths"), *path;
        enum nebula_status status = json_is_array(paths) ? NEBULA_OK : broken(listing, error);
        size_t index;

        json_array_foreach(paths, index, path)
                if (!status)
                        status = add(listing, path, error);
        json_decref(body);
        return status;
}

/* *ret_next: NULL at the end. */
static enum nebula_status fetch(struct listing *listing, const char *directory, const char *from, char **ret_next, struct nebula_error *error)
{
        struct object_store *store = (struct object_store *)(uintptr_t)listing->store;
        struct object_call call = { .method = "GET", .text_max = PAGE_TEXT_MAX };
        struct http_response response;
        enum nebula_status status;
        char entries[16];
        const char *next;

        *ret_next = NULL;
        object_param(&call, "resource", "filesystem");
        object_param(&call, "recursive", listing->deep ? "true" : "false");
        if (*directory)
                object_param(&call, "directory", directory);
        snprintf(entries, sizeof entries, "%u", adls_limits.page_entries);
        if (adls_limits.page_entries)
                object_param(&call, "maxResults", entries);
        if (from)
                object_param(&call, "continuation", from);
        status = azure_send(store, &call, &response, error);
        if (status)
                return status;
        next = http_field(&response, "x-ms-continuation");
        if (response.status == 200)
                status = read_page(listing, &response, error);
        else if (strcmp(azure_code(&response), "PathNotFound") && strcmp(azure_code(&response), "PathIsNotDirectory"))
                status = adls_fail(store, OBJECT_LIST, listing->prefix, &response, error);
        if (!status && response.status == 200 && next && *next) {
                *ret_next = strdup(next);
                if (!*ret_next)
                        status = object_no_memory(store, error);
        }
        http_response_done(&response);
        return status ? status : object_check_next(store, from, *ret_next, error);
}

/* The directory that holds all keys that begin with the prefix: up to the last '/', without it. */
static char *directory_of(const struct object_store *store, const char *prefix)
{
        const char *slash = strrchr(prefix, '/');
        struct buf buf = { 0 };
        char *parent = strndup(prefix, slash ? (size_t)(slash - prefix) : 0), *whole;
        size_t size;

        buf_add_text(&buf, store->prefix);
        if (parent)
                object_name_encode(&buf, parent);
        else
                buf.failed = true;
        free(parent);
        whole = buf_take(&buf, &size);
        while (whole && size && whole[size - 1] == '/')
                whole[--size] = 0;
        return whole;
}

enum nebula_status adls_list(struct store *base, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                             struct nebula_error *error)
{
        struct listing listing = { .store = (struct object_store *)base, .prefix = prefix, .deep = deep };
        char *directory, *next = NULL;
        enum nebula_status status;

        if (!store_prefix_sound(prefix))
                return error_set(error, NEBULA_INVALID, 0, "\"%.300s\" is not a prefix of keys of %s", prefix, base->root);
        directory = directory_of(listing.store, prefix);
        if (!directory)
                return object_no_memory(listing.store, error);
        do {
                char *before = next;

                status = fetch(&listing, directory, before, &next, error);
                free(before);
        } while (!status && next);
        free(directory);
        free(next);
        if (status) {
                store_page_done(&listing.page);
                return status;
        }
        object_sort_page(&listing.page);
        *ret_page = listing.page;
        return NEBULA_OK;
}
