/* Listings in XML: one page of the service is one page of the store. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/object/object.h"

#define PAGE_TEXT_MAX (64u << 20) /* 5,000 entries with names of 1,024 characters and metadata stay far below */

/* The state of a listing that is being read. */
struct listing {
        const struct object_store *store;
        const struct object_listing *names;
        const char *prefix; /* that keys begin with */
        struct store_page page;
        char *next;
        bool is_truncated; /* the service says that there is a next page */
        /* The entry whose element is open: */
        struct store_entry entry;
        bool is_directory, name_is_encoded;
        bool no_memory;
};

static bool is(const struct xml_item *item, const char *name)
{
        return !strcmp(item->name, name);
}

/* The key of a name, without the root's prefix. */
static bool decode(const char *name, char **ret_key)
{
        struct buf key = { 0 }, again = { 0 };
        char *text, *back;
        bool is_ours, is_whole;

        object_name_decode(&key, name);
        text = object_take(&key);
        object_name_encode(&again, text ? text : "");
        back = object_take(&again);
        is_whole = text && back;
        is_ours = is_whole && !strcmp(back, name);
        free(back);
        if (is_ours)
                *ret_key = text;
        else
                free(text);
        return is_whole;
}

bool object_key_of(const struct object_store *store, const char *name, char **ret_key)
{
        size_t before = strlen(store->prefix);

        *ret_key = NULL;
        return strncmp(name, store->prefix, before) || decode(name + before, ret_key);
}

/* Azure writes names that XML cannot hold with %XX, and marks them. */
static char *key_of(struct listing *listing, const char *name)
{
        struct buf buf = { 0 };
        char *plain, *key = NULL;

        if (!listing->name_is_encoded)
                buf_add_text(&buf, name);
        else if (!url_decode(&buf, name, strlen(name)))
                buf.size = 0;
        plain = object_take(&buf);
        if (!plain || !object_key_of(listing->store, plain, &key))
                listing->no_memory = true;
        free(plain);
        return key;
}

/* Skips directories of accounts with a hierarchy, and the markers "name/" that other programs make for directories. */
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

/* Takes a value of an entry. False: it is not valid. */
static bool take_value(struct listing *listing, const struct xml_item *item)
{
        struct store_entry *entry = &listing->entry;
        int64_t seconds;
        char *end;

        if (is(item, listing->names->name) || is(item, listing->names->folded_name)) {
                free(entry->key);
                entry->key = key_of(listing, item->text);
        } else if (is(item, listing->names->size)) {
                entry->size = strtoull(item->text, &end, 10);
                return *item->text && !*end;
        } else if (is(item, listing->names->stamp)) {
                object_etag_text(item->text, &entry->stamp);
        } else if (is(item, listing->names->time)) {
                if (!http_date_parse(item->text, &seconds) && !http_date_parse_iso(item->text, &seconds))
                        return false;
                entry->time_ns = seconds * SECOND_NS;
        } else if (is(item, "ResourceType")) {
                listing->is_directory = !strcmp(item->text, "directory");
        }
        return true;
}

static bool take_item(struct listing *listing, const struct xml_item *item)
{
        const struct object_listing *names = listing->names;

        if (item->kind == XML_BEGIN) {
                if (is(item, listing->names->name))
                        listing->name_is_encoded = memmem(item->attributes, item->attributes_size, "Encoded=\"true\"", 14) != NULL;
                return true;
        }
        if (item->depth == 2 && is(item, names->next)) {
                listing->next = *item->text ? strdup(item->text) : NULL;
                listing->no_memory = listing->no_memory || (*item->text && !listing->next);
        } else if (item->depth == 2 && is(item, "IsTruncated")) {
                listing->is_truncated = !strcmp(item->text, "true");
        } else if (item->depth == names->depth && (is(item, names->entry) || is(item, names->folded))) {
                add_entry(listing, is(item, names->folded));
        } else if (item->depth > names->depth) {
                return take_value(listing, item);
        }
        return true;
}

/* False: the text is not a listing. */
static bool read_page(struct listing *listing, const struct http_response *response)
{
        struct xml_item item;
        struct xml xml;
        bool is_sound = true;

        xml_init(&xml, response->text, response->text_size);
        while (is_sound && xml_next(&xml, &item))
                is_sound = (item.depth > 1 || is(&item, listing->names->root)) && take_item(listing, &item);
        is_sound = is_sound && !xml.is_broken && (listing->next || !listing->is_truncated);
        listing->no_memory = listing->no_memory || xml.no_memory;
        xml_done(&xml);
        return is_sound;
}

/* The order of keys; a prefix is sorted as if it ended with '/'. */
static int by_key(const void *left, const void *right)
{
        const struct store_entry *a = left, *b = right;
        size_t size_a = strlen(a->key), size_b = strlen(b->key), both = size_a < size_b ? size_a : size_b;
        int order = memcmp(a->key, b->key, both);

        if (order)
                return order;
        /* One begins with the other: the next byte of the longer one decides. */
        return (int)(unsigned char)(a->key[both] ? a->key[both] : a->is_prefix ? '/' : 0) -
               (int)(unsigned char)(b->key[both] ? b->key[both] : b->is_prefix ? '/' : 0);
}

void object_sort_page(struct store_page *page)
{
        if (page->count)
                qsort(page->entries, page->count, sizeof *page->entries, by_key);
}

enum nebula_status object_check_next(const struct object_store *store, const char *from, const char *next, struct nebula_error *error)
{
        if (!from || !next || strcmp(from, next))
                return NEBULA_OK;
        return error_set(error, NEBULA_STORAGE, 0, "cannot list %s: the service gives the same page again and again", store->store.root);
}

static enum nebula_status take_page(struct object_store *store, const char *prefix, const char *from, const struct http_response *response,
                                    struct store_page *ret_page, struct nebula_error *error)
{
        struct listing listing = { .store = store, .names = store->service->listing, .prefix = prefix };
        bool is_sound = read_page(&listing, response);
        enum nebula_status status;

        store_entry_done(&listing.entry);
        listing.page.next = listing.next;
        if (listing.no_memory)
                status = object_no_memory(store, error);
        else if (!is_sound)
                status = error_set(error, NEBULA_STORAGE, 0, "cannot list %s: the answer is not a listing", store->store.root);
        else
                status = object_check_next(store, from, listing.next, error);
        if (status) {
                store_page_done(&listing.page);
                return status;
        }
        object_sort_page(&listing.page);
        *ret_page = listing.page;
        return NEBULA_OK;
}

static enum nebula_status ask_page(struct object_store *store, const struct object_call *call, const char *prefix, const char *from, bool *ret_is_unsound,
                                   struct store_page *ret_page, struct nebula_error *error)
{
        struct http_response response;
        enum nebula_status status = store->service->send(store, call, &response, error);

        *ret_is_unsound = false;
        if (status)
                return status;
        if (response.status == 200) {
                status = take_page(store, prefix, from, &response, ret_page, error);
                *ret_is_unsound = status == NEBULA_STORAGE;
        } else { /* 404, too: a prefix without objects gives an empty list, so it is the container that is missing */
                status = store->service->fail(store, OBJECT_LIST, prefix, &response, error);
        }
        http_response_done(&response);
        return status;
}

/* `after`: the name in whose place the list begins; NULL: at its beginning, or where `from` says. */
static enum nebula_status list(struct store *base, const char *prefix, bool deep, const char *from, const char *after, struct store_page *ret_page,
                               struct nebula_error *error)
{
        struct object_store *store = (struct object_store *)base;
        struct object_call call = { .method = "GET", .text_max = PAGE_TEXT_MAX };
        enum nebula_status status;
        struct buf buf = { 0 };
        char *whole, entries[16];
        bool is_unsound;

        if (!store_prefix_sound(prefix))
                return error_set(error, NEBULA_INVALID, 0, "\"%.300s\" is not a prefix of keys of %s", prefix, base->root);
        buf_add_text(&buf, store->prefix);
        object_name_begin(&buf, prefix);
        whole = object_take(&buf);
        if (!whole)
                return object_no_memory(store, error);
        snprintf(entries, sizeof entries, "%u", store->service->limits->page_entries);
        store->service->add_listing(&call, whole, deep, store->service->limits->page_entries ? entries : NULL, from);
        if (after)
                object_param(&call, "start-after", after);
        status = ask_page(store, &call, prefix, from, &is_unsound, ret_page, error);
        if (is_unsound) /* it may have been cut or changed on the way */
                status = ask_page(store, &call, prefix, from, &is_unsound, ret_page, error);
        free(whole);
        return status;
}

enum nebula_status object_list(struct store *base, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                               struct nebula_error *error)
{
        return list(base, prefix, deep, from, NULL, ret_page, error);
}

/* Some servers ignore the place, or refuse it. */
enum nebula_status object_list_after(struct store *base, const char *key, struct store_page *ret_page, struct nebula_error *error)
{
        struct object_store *store = (struct object_store *)base;
        struct store_page page = { 0 };
        struct buf buf = { 0 };
        enum nebula_status status;
        char *after;

        buf_add_text(&buf, store->prefix);
        object_name_begin(&buf, key);
        after = object_take(&buf);
        if (!after)
                return object_no_memory(store, error);
        status = list(base, "", true, NULL, after, &page, error);
        free(after);
        if (!status && page.count && strcmp(page.entries[0].key, key) <= 0) {
                store_page_done(&page);
                return error_set(error, NEBULA_INVALID, 0, "the service of %s begins no list at a name", base->root);
        }
        if (!status)
                *ret_page = page;
        return status;
}
