/* Listings: one page of Azure's is one page of ours. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/azure/azure_private.h"
#include "store/http/url.h"
#include "store/http/xml.h"

#define PAGE_TEXT_MAX (64u << 20) /* 5,000 entries with names of 1,024 characters and metadata stay far below */

/* What is being read. */
struct listing {
        const struct azure_store *azure;
        const char *prefix; /* that keys begin with */
        struct store_page page;
        char *next;
        /* Of the entry that is open: */
        struct store_entry entry;
        bool is_directory, name_is_encoded;
        bool no_memory;
};

static bool is(const struct xml_item *item, const char *name)
{
        return !strcmp(item->name, name);
}

static char *take(struct buf *buf, struct listing *listing)
{
        size_t size;
        char *text = buf_take(buf, &size);

        listing->no_memory = listing->no_memory || !text;
        return text;
}

/* The key of a blob's name behind the root's prefix. NULL: none that this driver gives to a blob. */
static char *decode(struct listing *listing, const char *name)
{
        struct buf key = { 0 }, again = { 0 };
        char *text, *back;
        bool is_ours;

        azure_name_decode(&key, name);
        text = take(&key, listing);
        azure_name_encode(&again, text ? text : "");
        back = take(&again, listing);
        is_ours = text && back && !strcmp(back, name);
        free(back);
        if (!is_ours)
                free(text);
        return is_ours ? text : NULL;
}

static char *key_of(struct listing *listing, const char *name)
{
        const char *before = listing->azure->address.prefix;
        struct buf buf = { 0 };
        char *whole, *key = NULL;

        if (!listing->name_is_encoded)
                buf_add_text(&buf, name);
        else if (!url_decode(&buf, name, strlen(name)))
                buf.size = 0;
        whole = take(&buf, listing);
        if (whole && !strncmp(whole, before, strlen(before)))
                key = decode(listing, whole + strlen(before));
        free(whole);
        return key;
}

/* Directories of accounts with a hierarchy are in lists, and so are the marks that other programs leave for them, "name/". */
static void add_entry(struct listing *listing, bool is_prefix)
{
        struct store_entry *entry = &listing->entry;
        size_t size = entry->key ? strlen(entry->key) : 0;

        bool is_wanted = entry->key && !strncmp(entry->key, listing->prefix, strlen(listing->prefix)) && !listing->is_directory;

        if (is_prefix && size && entry->key[size - 1] == '/')
                entry->key[size - 1] = 0;
        entry->is_prefix = is_prefix;
        if (is_wanted && store_key_sound(entry->key))
                listing->no_memory = store_page_add(&listing->page, entry) || listing->no_memory;
        store_entry_done(entry);
        listing->is_directory = false;
}

/* A value within an entry. False: it is not what the protocol says. */
static bool take_value(struct listing *listing, const struct xml_item *item)
{
        struct store_entry *entry = &listing->entry;
        int64_t seconds;
        char *end;

        if (is(item, "Name")) {
                free(entry->key);
                entry->key = key_of(listing, item->text);
        } else if (is(item, "Content-Length")) {
                entry->size = strtoull(item->text, &end, 10);
                return *item->text && !*end;
        } else if (is(item, "Etag")) {
                size_t quote = *item->text == '"', size = strlen(item->text);

                snprintf(entry->stamp.text, sizeof entry->stamp.text, "%.*s", (int)(size >= 2 * quote ? size - 2 * quote : 0), item->text + quote);
        } else if (is(item, "Last-Modified")) {
                if (!http_date_parse(item->text, &seconds))
                        return false;
                entry->time_ns = seconds * 1000000000;
        } else if (is(item, "ResourceType")) {
                listing->is_directory = !strcmp(item->text, "directory");
        }
        return true;
}

static bool take_item(struct listing *listing, const struct xml_item *item)
{
        if (item->kind == XML_BEGIN) {
                if (is(item, "Name"))
                        listing->name_is_encoded = memmem(item->attributes, item->attributes_size, "Encoded=\"true\"", 14) != NULL;
                return true;
        }
        if (item->depth == 2 && is(item, "NextMarker")) {
                listing->next = *item->text ? strdup(item->text) : NULL;
                listing->no_memory = listing->no_memory || (*item->text && !listing->next);
        } else if (item->depth == 3 && (is(item, "Blob") || is(item, "BlobPrefix"))) {
                add_entry(listing, is(item, "BlobPrefix"));
        } else if (item->depth > 3) {
                return take_value(listing, item);
        }
        return true;
}

/* The text is EnumerationResults / Blobs / Blob or BlobPrefix. False: it is not. */
static bool read_page(struct listing *listing, const struct http_response *response)
{
        struct xml_item item;
        struct xml xml;
        bool is_sound = true;

        xml_init(&xml, response->text, response->text_size);
        while (is_sound && xml_next(&xml, &item))
                is_sound = (item.depth > 1 || is(&item, "EnumerationResults")) && take_item(listing, &item);
        is_sound = is_sound && !xml.is_broken;
        listing->no_memory = listing->no_memory || xml.no_memory;
        xml_done(&xml);
        return is_sound;
}

/* The order of keys, in which a prefix stands where its first object does. */
static int by_key(const void *left, const void *right)
{
        const struct store_entry *a = left, *b = right;
        size_t size_a = strlen(a->key), size_b = strlen(b->key), both = size_a < size_b ? size_a : size_b;
        int order = memcmp(a->key, b->key, both);

        if (order)
                return order;
        /* One begins with the other: what follows decides. */
        return (int)(unsigned char)(a->key[both] ? a->key[both] : a->is_prefix ? '/' : 0) -
               (int)(unsigned char)(b->key[both] ? b->key[both] : b->is_prefix ? '/' : 0);
}

static enum nebula_status take_page(struct azure_store *azure, const char *prefix, const struct http_response *response,
                                    struct store_page *ret_page, struct nebula_error *error)
{
        struct listing listing = { .azure = azure, .prefix = prefix };
        bool is_sound = read_page(&listing, response);

        store_entry_done(&listing.entry);
        listing.page.next = listing.next;
        if (listing.no_memory || !is_sound) {
                store_page_done(&listing.page);
                return listing.no_memory ? azure_no_memory(azure, error)
                                         : error_set(error, NEBULA_STORAGE, 0, "cannot list %s: the answer is no listing", azure->address.root);
        }
        if (listing.page.count)
                qsort(listing.page.entries, listing.page.count, sizeof *listing.page.entries, by_key);
        *ret_page = listing.page;
        return NEBULA_OK;
}

enum nebula_status azure_list(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                              struct nebula_error *error)
{
        struct azure_store *azure = (struct azure_store *)store;
        struct azure_call call = { .method = "GET", .text_max = PAGE_TEXT_MAX };
        struct http_response response;
        enum nebula_status status;
        struct buf buf = { 0 };
        char *whole, entries[16];
        size_t size;

        if (!store_prefix_sound(prefix))
                return error_set(error, NEBULA_INVALID, 0, "\"%.300s\" begins no key of %s", prefix, store->root);
        buf_add_text(&buf, azure->address.prefix);
        azure_name_begin(&buf, prefix);
        whole = buf_take(&buf, &size);
        if (!whole)
                return azure_no_memory(azure, error);
        azure_param(&call, "restype", "container");
        azure_param(&call, "comp", "list");
        if (*whole)
                azure_param(&call, "prefix", whole);
        if (!deep)
                azure_param(&call, "delimiter", "/");
        snprintf(entries, sizeof entries, "%u", azure_limits.page_entries);
        if (azure_limits.page_entries)
                azure_param(&call, "maxresults", entries);
        if (from)
                azure_param(&call, "marker", from);
        status = azure_send(azure, &call, &response, error);
        free(whole);
        if (status)
                return status;
        if (response.status == 200)
                status = take_page(azure, prefix, &response, ret_page, error);
        else if (response.status == 404)
                *ret_page = (struct store_page){ 0 };
        else
                status = azure_fail(azure, AZURE_LIST, prefix, &response, error);
        http_response_done(&response);
        return status;
}
