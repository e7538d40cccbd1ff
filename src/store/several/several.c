/* Opens the members, and passes each operation on to the member that has the key. */
#include "store/several/several.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/azure/azure.h"
#include "store/counts.h"
#include "store/manifest.h"
#include "store/several/several_private.h"
#include "store/store_private.h"
#include "sum/sum.h"

/* The name of the file whose key it is; NULL: the object is no file. */
static const char *file_name(const char *key)
{
        static const char private[] = MANIFEST_DIRECTORY "/";
        const char *name = strchr(key, '/');

        if (!name || !strncmp(key, MANIFEST_DIRECTORY, sizeof private - 2))
                return NULL;
        name++;
        if (strncmp(name, private, sizeof private - 1))
                return name;
        name = strchr(name + sizeof private - 1, '/'); /* after the writing */
        return name ? name + 1 : NULL;
}

size_t several_place(const char *key, size_t count)
{
        const char *name = file_name(key);
        uint64_t hash;

        if (!name)
                return 0;
        hash = sum_crc64(0, name, strlen(name));
        hash = (hash ^ hash >> 33) * UINT64_C(0xff51afd7ed558ccd); /* names that differ in a few bits are spread, too */
        return (size_t)((hash ^ hash >> 33) % count);
}

static struct store *member_of(struct store *store, const char *key)
{
        struct several *several = (struct several *)store;

        return several->members[several_place(key, several->count)];
}

struct store *several_member(struct store *store, size_t index)
{
        struct several *several = (struct several *)store;

        return store->ops == &store_several && index < several->count ? several->members[index] : NULL;
}

bool store_several_takes(const char *url)
{
        const char *names = strstr(url, "://");

        return names && memchr(names + 3, ',', strcspn(names + 3, "/?"));
}

static enum nebula_status wrong(const char *url, const char *what, struct nebula_error *error)
{
        return error_set(error, NEBULA_INVALID, 0, "the storage path \"%.*s\": %s", (int)strcspn(url, "?@"), url, what);
}

static void several_close(struct store *store)
{
        struct several *several = (struct several *)store;

        for (size_t i = 0; i < several->count; i++)
                store_close(several->members[i]);
        free(several->store.root);
        free(several);
}

static enum nebula_status open_member(struct several *several, const char *at, size_t size, const char *rest, struct nebula_error *error)
{
        const char *root = several->store.root, *names = strstr(root, "://") + 3;
        bool is_azure = !strncmp(root, "az", 2);
        char *list = strndup(names, strcspn(names, "/")), *name = strndup(at, size), *url = NULL;
        enum nebula_status status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open a storage path");

        if (list && name && is_azure)
                url = azure_url_beside(name, list, rest);
        else if (list && name && asprintf(&url, "s3://%s%s", name, rest) < 0)
                url = NULL;
        if (url)
                status = store_open(url, &several->members[several->count], error);
        if (!status)
                store_count(several->members[several->count++]);
        free(list);
        free(name);
        free(url);
        return status;
}

static enum nebula_status open_members(struct several *several, const char *url, struct nebula_error *error)
{
        const char *names = strstr(url, "://") + 3, *rest = names + strcspn(names, "/?");
        enum nebula_status status = NEBULA_OK;

        for (const char *name = names; name <= rest && !status;) {
                size_t size = strcspn(name, ",/?");

                if (!size || several->count == SEVERAL_MAX)
                        return wrong(url, size ? "it names more than 16 accounts or buckets" : "a name between two commas is missing", error);
                for (const char *other = names; other < name; other += strcspn(other, ",") + 1)
                        if (strcspn(other, ",/?") == size && !strncmp(other, name, size))
                                return wrong(url, "it names an account or bucket twice", error);
                status = open_member(several, name, size, rest, error);
                name += size + 1;
        }
        return status;
}

static enum nebula_status several_open(const char *url, struct store **ret_store, struct nebula_error *error)
{
        struct several *several;
        enum nebula_status status;

        if (strncmp(url, "az://", 5) && strncmp(url, "s3://", 5))
                return wrong(url, "only az:// and s3:// take several accounts or buckets", error);
        if (strchr(url, '?'))
                return wrong(url, "a SAS is of one account; AZURE_STORAGE_SAS_TOKEN is tried for all", error);
        several = calloc(1, sizeof *several);
        if (several)
                several->store = (struct store){ &store_several, strdup(url) };
        if (!several || !several->store.root) {
                free(several);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open a storage path");
        }
        status = open_members(several, url, error);
        if (status)
                several_close(&several->store);
        else
                *ret_store = &several->store;
        return status;
}

static unsigned several_features(struct store *store)
{
        struct several *several = (struct several *)store;
        unsigned features = ~0u;

        for (size_t i = 0; i < several->count; i++)
                features &= several->members[i]->ops->features(several->members[i]);
        return features;
}

static enum nebula_status several_put(struct store *store, const char *key, const void *data, uint64_t size, enum store_condition condition,
                                      const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct store *member = member_of(store, key);

        return member->ops->put(member, key, data, size, condition, seen, ret_stamp, error);
}

static enum nebula_status several_get(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                      struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct store *member = member_of(store, key);

        return member->ops->get(member, key, limit, ret_text, ret_size, ret_stamp, error);
}

static enum nebula_status several_forget(struct store *store, const char *key, const char *text, struct nebula_error *error)
{
        struct store *member = member_of(store, key);

        return member->ops->forget ? member->ops->forget(member, key, text, error) : NEBULA_OK;
}

static enum nebula_status several_read(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size, struct nebula_error *error)
{
        struct store *member = member_of(store, key);

        return member->ops->read(member, key, data, offset, size, error);
}

static enum nebula_status several_read_bulk(struct store *store, const char *key, void *data, uint64_t size, uint32_t chunk_bytes,
                                            store_check *check, void *argument, struct nebula_error *error)
{
        struct store *member = member_of(store, key);

        return member->ops->read_bulk(member, key, data, size, chunk_bytes, check, argument, error);
}

static enum nebula_status several_read_chunks(struct store *store, const char *key, void *data, const struct store_range *ranges, size_t count,
                                              uint32_t chunk_bytes, store_check *check, void *argument, struct nebula_error *error)
{
        struct store *member = member_of(store, key);

        return member->ops->read_chunks(member, key, data, ranges, count, chunk_bytes, check, argument, error);
}

static enum nebula_status several_stat(struct store *store, const char *key, struct store_entry *ret_entry, struct nebula_error *error)
{
        struct store *member = member_of(store, key);

        return member->ops->stat(member, key, ret_entry, error);
}

static enum nebula_status several_remove(struct store *store, const struct store_victim *victims, size_t count, struct nebula_error *error)
{
        struct several *several = (struct several *)store;
        struct store_victim *own = calloc(count + 1, sizeof *own);
        enum nebula_status status = own ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to remove from %s", store->root);

        for (size_t i = 0; i < several->count && !status; i++) {
                size_t own_count = 0;

                for (size_t k = 0; k < count; k++)
                        if (several_place(victims[k].key, several->count) == i)
                                own[own_count++] = victims[k];
                if (own_count)
                        status = several->members[i]->ops->remove(several->members[i], own, own_count, error);
        }
        free(own);
        return status;
}

static enum nebula_status several_sweep(struct store *store, store_sweep_limit *limit, void *argument, size_t *ret_count, struct nebula_error *error)
{
        struct several *several = (struct several *)store;
        enum nebula_status status = NEBULA_OK;
        size_t all = 0;

        for (size_t i = 0; i < several->count && !status; i++) {
                struct store *member = several->members[i];
                size_t count = 0;

                if (member->ops->sweep)
                        status = member->ops->sweep(member, limit, argument, &count, error);
                all += count;
        }
        if (!status)
                *ret_count = all;
        return status;
}

static enum nebula_status several_clock(struct store *store, int64_t *ret_ns, struct nebula_error *error)
{
        struct store *member = several_member(store, 0);

        return member->ops->clock(member, ret_ns, error);
}

/* Between two members: Nebula itself copies no file to another name. */
static enum nebula_status copy_across(struct store *source, const char *from, struct store *target, const char *to, enum store_condition condition,
                                      struct nebula_error *error)
{
        struct store_entry entry = { 0 };
        enum nebula_status status;
        char *data;

        if (!store_key_sound(to))
                return error_set(error, NEBULA_INVALID, 0, "%s/%s: no object can have this key", target->root, to);
        status = source->ops->stat(source, from, &entry, error);
        if (status)
                return status;
        data = malloc(entry.size + 1);
        status = data ? source->ops->read(source, from, data, 0, entry.size, error)
                      : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to copy %s/%s", source->root, from);
        if (!status)
                status = target->ops->put(target, to, data, entry.size, condition, NULL, NULL, error);
        free(data);
        store_entry_done(&entry);
        return status;
}

static enum nebula_status several_copy(struct store *store, const char *from, const char *to, enum store_condition condition,
                                       struct nebula_error *error)
{
        struct store *source = member_of(store, from), *target = member_of(store, to);

        return source == target ? source->ops->copy(source, from, to, condition, error) : copy_across(source, from, target, to, condition, error);
}

static enum nebula_status several_free_bytes(struct store *store, uint64_t *ret_bytes, struct nebula_error *error)
{
        struct store *member = several_member(store, 0);

        return member->ops->free_bytes(member, ret_bytes, error);
}

/* The transport is that of the first member: all have the same rules. */
/* What the first member lacks that lacks anything. */
static enum nebula_status several_lacks(struct store *store, char *ret_text, size_t size, struct nebula_error *error)
{
        struct several *several = (struct several *)store;
        enum nebula_status status = NEBULA_OK;

        *ret_text = 0;
        for (size_t i = 0; i < several->count && !status && !*ret_text; i++)
                if (several->members[i]->ops->lacks)
                        status = several->members[i]->ops->lacks(several->members[i], ret_text, size, error);
        return status;
}

static enum nebula_status several_reach(struct store *store, struct store_reach *ret_reach, struct nebula_error *error)
{
        struct several *several = (struct several *)store;
        struct store_reach all = { 0 };

        for (size_t i = 0; i < several->count; i++) {
                struct store_reach one = { 0 };
                size_t used = strlen(all.credential);
                enum nebula_status status = several->members[i]->ops->reach(several->members[i], &one, error);

                if (status)
                        return status;
                snprintf(all.credential + used, sizeof all.credential - used, "%s%s", i ? "; " : "", one.credential);
                memcpy(all.transport, i ? all.transport : one.transport, sizeof all.transport);
                all.is_expired = all.is_expired || one.is_expired;
        }
        *ret_reach = all;
        return NEBULA_OK;
}

/* The members are counted, by their own schemes (store_count). */
const struct store_ops store_several = {
        .scheme = "",
        .open = several_open,
        .close = several_close,
        .features = several_features,
        .put = several_put,
        .get = several_get,
        .upload = several_upload,
        .publish = several_publish,
        .abort = several_abort,
        .forget = several_forget,
        .read = several_read,
        .read_bulk = several_read_bulk,
        .read_chunks = several_read_chunks,
        .list = several_list,
        .stat = several_stat,
        .remove = several_remove,
        .sweep = several_sweep,
        .clock = several_clock,
        .copy = several_copy,
        .free_bytes = several_free_bytes,
        .reach = several_reach,
        .lacks = several_lacks,
};
