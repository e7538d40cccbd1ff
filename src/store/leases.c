#include "store/leases.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "image/image.h"
#include "os/os.h"
#include "store/document.h"
#include "store/manifest.h"

#define PREFIX MANIFEST_DIRECTORY "/leases/"
#define REASON "a reader on another node has it"

static enum nebula_status lease_key(const char *tag, uint64_t id, char ret_key[MANIFEST_KEY_MAX], struct nebula_error *error)
{
        char directory[256];
        enum nebula_status status = name_encode(tag, directory, error);

        if (!status)
                snprintf(ret_key, MANIFEST_KEY_MAX, PREFIX "%s/%016" PRIx64, directory, id);
        return status;
}

enum nebula_status lease_put(struct store *store, const char *tag, uint64_t id, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX], host[256] = "", *text;
        struct os_stat root;
        size_t size;
        json_t *body;
        enum nebula_status status = lease_key(tag, id, key, error);

        if (!status && (store->ops->features(store) & STORE_PATHS) && os->stat(store->root, true, &root) < 0) /* not mounted: make none in its place */
                status = error_set(error, NEBULA_STORAGE, EAGAIN, "%s is not there", store->root);
        if (status)
                return status;
        if (os->host_name(host, sizeof host) < 0)
                host[0] = 0;
        body = document_new("lease");
        if (!body || json_object_set_new(body, "tag", json_string(tag)) || json_object_set_new(body, "host", json_string(host)) ||
            json_object_set_new(body, "time", json_integer(os->wall_ns() / SECOND_NS)))
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a lease");
        if (!status)
                status = document_format(body, &text, &size, error);
        json_decref(body);
        if (status)
                return status;
        status = store->ops->put(store, key, text, size, STORE_ALWAYS, NULL, NULL, error);
        free(text);
        return status;
}

void lease_drop(struct store *store, const char *tag, uint64_t id)
{
        char key[MANIFEST_KEY_MAX];

        if (!lease_key(tag, id, key, NULL))
                store_drop(store, key);
}

/* The tag that an object leases; false: it is no lease. */
static bool tag_of(const struct store_entry *entry, char ret_tag[256])
{
        const char *name = entry->key + strlen(PREFIX), *slash = strchr(name, '/');
        char directory[256], again[256];

        if (entry->is_prefix || entry->is_link || !slash || slash - name > 255 || strlen(slash + 1) != 16 || strspn(slash + 1, "0123456789abcdef") != 16)
                return false;
        snprintf(directory, sizeof directory, "%.*s", (int)(slash - name), name);
        return !name_decode(directory, ret_tag, NULL) && !name_encode(ret_tag, again, NULL) && !strcmp(directory, again);
}

static enum nebula_status add_pin(struct pins *pins, const char *tag, struct nebula_error *error)
{
        struct pin *grown = realloc(pins->list, (pins->count + 1) * sizeof *grown);
        char *reason = strdup(REASON);

        if (grown)
                pins->list = grown;
        if (!grown || !reason) {
                free(reason);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for leases");
        }
        grown[pins->count] = (struct pin){ .reason = reason, .is_lease = true };
        snprintf(grown[pins->count++].tag, sizeof grown->tag, "%s", tag);
        return NEBULA_OK;
}

/* The list may have waited, and the agent of the reader may have written the lease again since. */
static void drop_old(struct store *store, const char *key, int64_t now_ns)
{
        struct store_entry entry;

        if (!store->ops->stat(store, key, &entry, NULL) && entry.time_ns < now_ns - LEASE_NS)
                store_drop(store, key);
}

/* The clock has been set back since: from now on the lease ends as others do, unless its agent, which may live, writes it again. */
static void put_back(struct store *store, const char *tag, const char *key)
{
        lease_put(store, tag, strtoull(strrchr(key, '/') + 1, NULL, 16), NULL);
}

enum nebula_status leases_add(struct store *store, struct pins *pins, struct nebula_error *error)
{
        struct store_list list;
        int64_t now_ns = 0;
        enum nebula_status status = store_list_all(store, PREFIX, true, &list, error);

        if (status)
                return status == NEBULA_NOT_FOUND ? NEBULA_OK : status;
        if (list.count)
                status = store->ops->clock(store, &now_ns, error);
        for (size_t i = 0; i < list.count && !status; i++) {
                const struct store_entry *entry = &list.entries[i];
                char tag[256];

                if (!tag_of(entry, tag))
                        continue;
                if (entry->time_ns > now_ns + LEASE_NS)
                        put_back(store, tag, entry->key);
                if (entry->time_ns < now_ns - LEASE_NS)
                        drop_old(store, entry->key, now_ns);
                else if (!pins_find(pins, tag))
                        status = add_pin(pins, tag, error);
        }
        store_list_done(&list);
        return status;
}
