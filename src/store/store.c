/* Opens a store, and holds the code that all drivers share. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "store/store_private.h"
#include "sum/sum.h"
#include "store/trust.h"

#define OFFERS_MAX 8

static struct {
        const struct store_ops *ops;
        bool (*takes)(const char *url);
} offers[OFFERS_MAX];
static size_t offer_count;

void store_offer(const struct store_ops *ops, bool (*takes)(const char *url))
{
        if (offer_count == OFFERS_MAX)
                abort(); /* unreachable: the drivers are known at compile time */
        offers[offer_count].ops = ops;
        offers[offer_count++].takes = takes;
}

/* Length of the start of a URL that may be shown: a query may hold a signature, and the text before an '@' a password. */
static int harmless_length(const char *url)
{
        const char *host = strstr(url, "://"), *at;

        host = host ? host + 3 : url;
        at = memchr(host, '@', strcspn(host, "/?"));
        return (int)(at ? (size_t)(host - url) : strcspn(url, "?"));
}

/* Whether a component is a scheme, as in "/home/me/s3:/bucket/run". Python's pathlib.Path and os.path.abspath make that of a URL, and a
 * directory of this name on this machine would take what belongs into the object store. */
static bool was_url(const char *path)
{
        static const char *const schemes[] = { "az:", "abfs:", "abfss:", "s3:", "gs:", "https:", "http:", "file:" };

        for (size_t length; *path; path += length + (path[length] == '/')) {
                length = strcspn(path, "/");
                for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++)
                        if (length == strlen(schemes[i]) && !strncmp(path, schemes[i], length))
                                return true;
        }
        return false;
}

static enum nebula_status open_by_driver(const char *url, struct store **ret_store, struct nebula_error *error)
{
        const char *scheme_end = strstr(url, "://");
        bool is_web;

        if (!scheme_end && was_url(url))
                return error_set(error, NEBULA_INVALID, 0,
                                 "the storage path \"%.300s\" was a URL and has lost a '/', as pathlib.Path and os.path.abspath do it: "
                                 "give the URL as a text", url);
        if (url[0] == '/' || text_local_path(url) != url)
                return store_file.open(url, ret_store, error);
        is_web = !strncmp(url, "http://", 7) || !strncmp(url, "https://", 8);
        for (size_t i = 0; i < offer_count; i++)
                if (offers[i].takes(url))
                        return offers[i].ops->open(url, ret_store, error);
        if (!scheme_end)
                return error_set(error, NEBULA_INVALID, 0,
                                 "the storage path \"%.*s\" is neither an absolute path nor a URL", harmless_length(url), url);
        return error_set(error, NEBULA_INVALID, 0,
                         "the storage path \"%.*s\": there is no driver for \"%.*s\"%s; give a directory%s",
                         harmless_length(url), url, (int)(scheme_end - url), url, is_web ? " with such a host" : "",
                         offer_count ? ", or az://ACCOUNT/CONTAINER, abfss://CONTAINER@HOST, s3://BUCKET or gs://BUCKET, in small letters" : "");
}

enum nebula_status store_open(const char *url, struct store **ret_store, struct nebula_error *error)
{
        struct trust *trust = NULL;
        enum nebula_status status = trust_new(&trust, error);

        if (!status)
                status = open_by_driver(url, ret_store, error);
        if (status)
                trust_free(trust);
        else
                (*ret_store)->trust = trust;
        return status;
}

void store_close(struct store *store)
{
        struct trust *trust = store ? store->trust : NULL;

        if (store)
                store->ops->close(store);
        trust_free(trust);
}

bool store_key_sound(const char *key)
{
        if (strlen(key) >= STORE_KEY_MAX)
                return false;
        for (;;) {
                size_t length = strcspn(key, "/");

                if (!length || length > 255 || (length <= 2 && !strncmp(key, "..", length)))
                        return false;
                if (!key[length])
                        return true;
                key += length + 1;
        }
}

bool store_prefix_sound(const char *prefix)
{
        char parent[STORE_KEY_MAX];
        const char *slash = strrchr(prefix, '/');
        size_t length = slash ? (size_t)(slash - prefix) : 0;

        if (strlen(prefix) >= STORE_KEY_MAX)
                return false;
        memcpy(parent, prefix, length);
        parent[length] = 0;
        return !slash || store_key_sound(parent);
}

bool store_is_temporary(const char *key)
{
        const char *slash = strchr(key, '/');

        if (!slash)
                return !strncmp(key, STORE_TEMP_TOP, strlen(STORE_TEMP_TOP));
        slash++;
        return !strncmp(slash, STORE_TEMP_BELOW, strlen(STORE_TEMP_BELOW)) && !strchr(slash + strlen(STORE_TEMP_BELOW), '/');
}

bool store_make_room(void **entries, size_t count, size_t size)
{
        void *grown;

        if (count & (count - 1))
                return true;
        grown = realloc(*entries, (count ? count * 2 : 1) * size);
        if (grown)
                *entries = grown;
        return grown;
}

enum nebula_status store_page_add(struct store_page *page, const struct store_entry *entry)
{
        void *entries = page->entries;
        char *key = strdup(entry->key);

        if (!key || !store_make_room(&entries, page->count, sizeof *entry)) {
                free(key);
                return NEBULA_NO_MEMORY;
        }
        page->entries = entries;
        page->entries[page->count] = *entry;
        page->entries[page->count++].key = key;
        return NEBULA_OK;
}

/* Moves the entries of the page to the end of the list. */
static enum nebula_status take_page(struct store_list *list, struct store_page *page, const struct store *store, struct nebula_error *error)
{
        struct store_entry *grown = realloc(list->entries, (list->count + page->count + 1) * sizeof *grown);

        if (!grown)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to list %.400s", store->root);
        list->entries = grown;
        if (page->count)
                memcpy(grown + list->count, page->entries, page->count * sizeof *grown);
        list->count += page->count;
        page->count = 0;
        return NEBULA_OK;
}

/* Compares places in a list: a prefix stands where the keys after its '/' are. */
static int compare_places(const struct store_entry *entry, const char *key, const char *end)
{
        const char *entry_end = entry->is_prefix ? "/" : "";
        size_t i = 0, length = strlen(entry->key), key_length = strlen(key);

        while (i < length && i < key_length && entry->key[i] == key[i])
                i++;
        return (unsigned char)(i < length ? entry->key[i] : *entry_end) - (unsigned char)(i < key_length ? key[i] : *end);
}

static int by_place(const void *a, const void *b)
{
        const struct store_entry *x = a, *y = b;

        return compare_places(x, y->key, y->is_prefix ? "/" : "");
}

/* A service lists by names, which some keys have in another order (object_name.c). Each page is sorted, but not the one after it. */
static void sort(struct store_list *list)
{
        bool is_sorted = true;

        for (size_t i = 1; i < list->count && is_sorted; i++)
                is_sorted = by_place(&list->entries[i - 1], &list->entries[i]) <= 0;
        if (!is_sorted)
                qsort(list->entries, list->count, sizeof *list->entries, by_place);
}

enum nebula_status store_list_all(struct store *store, const char *prefix, bool deep, struct store_list *ret_list, struct nebula_error *error)
{
        struct store_list list = { 0 };
        enum nebula_status status;
        char *from = NULL;

        do {
                struct store_page page = { 0 };

                status = store->ops->list(store, prefix, deep, from, &page, error);
                free(from);
                from = NULL;
                if (!status)
                        status = take_page(&list, &page, store, error);
                if (!status) {
                        from = page.next;
                        page.next = NULL;
                }
                store_page_done(&page);
        } while (!status && from);
        sort(&list);
        if (status)
                store_list_done(&list);
        else
                *ret_list = list;
        return status;
}

static const struct store_entry *find_place(const struct store_list *list, const char *key, const char *end)
{
        size_t low = 0, high = list->count;

        while (low < high) {
                size_t middle = low + (high - low) / 2;
                int order = compare_places(&list->entries[middle], key, end);

                if (!order)
                        return &list->entries[middle];
                if (order < 0)
                        low = middle + 1;
                else
                        high = middle;
        }
        return NULL;
}

const struct store_entry *store_list_find(const struct store_list *list, const char *key)
{
        const struct store_entry *found = find_place(list, key, "");

        return found ? found : find_place(list, key, "/");
}

enum nebula_status store_put_text(struct store *store, const char *key, const char *text, enum store_condition condition,
                                  struct nebula_error *error)
{
        return store->ops->put(store, key, text, strlen(text), condition, NULL, NULL, error);
}

enum nebula_status store_remove_one(struct store *store, const char *key, struct nebula_error *error)
{
        struct store_victim victim = { .key = key };

        return store->ops->remove(store, &victim, 1, error);
}

enum nebula_status store_remove_before(struct store *store, const char *prefix, int64_t before_ns, struct nebula_error *error)
{
        struct store_list list;
        enum nebula_status status = store_list_all(store, prefix, true, &list, error);

        if (status)
                return status;
        for (size_t i = 0; i < list.count && !status; i++)
                if (!list.entries[i].is_foreign && !list.entries[i].is_prefix && list.entries[i].time_ns <= before_ns)
                        status = store_remove_one(store, list.entries[i].key, error);
        store_list_done(&list);
        return status;
}

void store_drop(struct store *store, const char *key)
{
        struct nebula_error error = { 0 };

        if (store_remove_one(store, key, &error))
                log_event(LOG_LEVEL_INFO, "%s; no reader looks at it", error.message);
}

enum nebula_status store_check_size(const struct store *store, const char *key, uint64_t found, uint64_t recorded, struct nebula_error *error)
{
        if (found == recorded)
                return NEBULA_OK;
        return error_set(error, NEBULA_CORRUPT, 0, "%s/%s: has %" PRIu64 " bytes, it should have %" PRIu64 ": %s", store->root, key, found, recorded,
                         found < recorded ? "it was cut off" : "something was added");
}

void store_page_done(struct store_page *page)
{
        struct store_list list = { page->entries, page->count };

        store_list_done(&list);
        free(page->next);
        *page = (struct store_page){ 0 };
}

void store_list_done(struct store_list *list)
{
        for (size_t i = 0; i < list->count; i++)
                store_entry_done(&list->entries[i]);
        free(list->entries);
        *list = (struct store_list){ 0 };
}

void store_entry_done(struct store_entry *entry)
{
        free(entry->key);
        *entry = (struct store_entry){ 0 };
}

/* Whether a server answers so when it is overloaded or restarting. */
static bool is_passing(int http_status)
{
        return http_status == 408 || http_status == 429 || (http_status >= 500 && http_status != 501 && http_status != 505 && http_status != 507);
}

/* Whether a file system keeps failing so until a person changes a right, a name or a mount. */
static bool is_lasting(int number)
{
        switch (number) {
        case EACCES:
        case EPERM:
        case EROFS:
        case EEXIST:
        case EISDIR:
        case ENOTDIR:
        case ENOTEMPTY:
        case ELOOP:
        case ENAMETOOLONG:
        case EFBIG:
        case EOPNOTSUPP:
                return true;
        default:
                return false;
        }
}

uint64_t store_chunk_sum(const void *data, uint64_t size, const uint64_t *crc64)
{
        return crc64 ? *crc64 : sum_crc64(0, data, (size_t)size);
}

enum store_class store_class(const struct nebula_error *error)
{
        switch (error->status) {
        case NEBULA_TIMEOUT:
        case NEBULA_UNAVAILABLE:
                return STORE_AGAIN;
        case NEBULA_BUSY:
        case NEBULA_NO_SPACE:
        case NEBULA_NO_MEMORY:
                return STORE_LATER;
        case NEBULA_STORAGE:
                if (error->http_status)
                        return is_passing(error->http_status) ? STORE_AGAIN : STORE_NEVER;
                return is_lasting(error->sys_errno) ? STORE_NEVER : STORE_LATER;
        default:
                return STORE_NEVER;
        }
}

