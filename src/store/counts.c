#include "store/counts.h"

#include <string.h>

#include "os/lock.h"

#define KINDS_MAX 8

const char *const store_operation_names[STORE_OPERATIONS] = { "put", "get", "upload", "publish", "read", "open", "list", "stat", "remove", "clock", "copy" };
const char *const store_outcome_names[STORE_OUTCOMES] = { "success", "absent", "refused", "failure" };

struct kind {
        const struct store_ops *driver;
        struct store_ops ops; /* counts, then calls the driver */
        atomic_ullong requests[STORE_OPERATIONS][STORE_OUTCOMES], read_bytes, written_bytes, retries;
};
static struct kind kinds[KINDS_MAX];
static atomic_size_t kind_count;
static struct lock adding = LOCK_INIT(LOCK_STORE_COUNTS);

static struct kind *kind_of(const struct store *store)
{
        for (size_t i = 0; i < atomic_load(&kind_count); i++)
                if (!strcmp(kinds[i].driver->scheme, store->ops->scheme))
                        return &kinds[i];
        return NULL;
}

static enum nebula_status count(struct kind *kind, enum store_operation operation, atomic_ullong *bytes, uint64_t size, enum nebula_status status)
{
        enum store_outcome outcome = !status ? STORE_OUTCOME_SUCCESS : status == NEBULA_NOT_FOUND ? STORE_OUTCOME_ABSENT :
                                     status == NEBULA_BUSY ? STORE_OUTCOME_REFUSED : STORE_OUTCOME_FAILURE;

        atomic_fetch_add_explicit(&kind->requests[operation][outcome], 1, memory_order_relaxed);
        if (!status && bytes)
                atomic_fetch_add_explicit(bytes, size, memory_order_relaxed);
        return status;
}

static enum nebula_status put(struct store *store, const char *key, const void *data, uint64_t size, enum store_condition condition,
                              const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct kind *kind = kind_of(store);

        return count(kind, STORE_OP_PUT, &kind->written_bytes, size, kind->driver->put(store, key, data, size, condition, seen, ret_stamp, error));
}

static enum nebula_status get(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                              struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct kind *kind = kind_of(store);
        size_t size = 0;
        enum nebula_status status = kind->driver->get(store, key, limit, ret_text, &size, ret_stamp, error);

        if (!status && ret_size)
                *ret_size = size;
        return count(kind, STORE_OP_GET, &kind->read_bytes, size, status);
}

static enum nebula_status upload(struct store *store, const struct store_object *objects, size_t object_count, struct store_upload **ret_upload,
                                 struct nebula_error *error)
{
        struct kind *kind = kind_of(store);
        enum nebula_status status = kind->driver->upload(store, objects, object_count, ret_upload, error);
        uint64_t size = 0;

        for (size_t i = 0; i < object_count; i++)
                size += objects[i].size -
                        (!status && objects[i].ret_written ? objects[i].ret_written->referred + objects[i].ret_written->resumed : 0);
        return count(kind, STORE_OP_UPLOAD, &kind->written_bytes, size, status);
}

static enum nebula_status publish(struct store *store, struct store_upload *upload, struct nebula_error *error)
{
        struct kind *kind = kind_of(store);

        return count(kind, STORE_OP_PUBLISH, NULL, 0, kind->driver->publish(store, upload, error));
}

static enum nebula_status read_some(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size, struct nebula_error *error)
{
        struct kind *kind = kind_of(store);

        return count(kind, STORE_OP_READ, &kind->read_bytes, size, kind->driver->read(store, key, data, offset, size, error));
}

static enum nebula_status read_bulk(struct store *store, const char *key, void *data, uint64_t size, uint32_t chunk_bytes, store_check *check,
                                    void *argument, struct nebula_error *error)
{
        struct kind *kind = kind_of(store);

        return count(kind, STORE_OP_READ, &kind->read_bytes, size,
                     kind->driver->read_bulk(store, key, data, size, chunk_bytes, check, argument, error));
}

static enum nebula_status read_chunks(struct store *store, const char *key, void *data, const struct store_range *ranges, size_t range_count,
                                      uint32_t chunk_bytes, store_check *check, void *argument, struct nebula_error *error)
{
        struct kind *kind = kind_of(store);
        uint64_t size = 0;

        for (size_t i = 0; i < range_count; i++)
                size += ranges[i].size;
        return count(kind, STORE_OP_READ, &kind->read_bytes, size,
                     kind->driver->read_chunks(store, key, data, ranges, range_count, chunk_bytes, check, argument, error));
}

static enum nebula_status open_read(struct store *store, const char *key, bool is_shared, int *ret_fd, bool *ret_direct,
                                    struct nebula_error *error)
{
        struct kind *kind = kind_of(store);

        return count(kind, STORE_OP_OPEN, NULL, 0, kind->driver->open_read(store, key, is_shared, ret_fd, ret_direct, error));
}

static enum nebula_status list(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                               struct nebula_error *error)
{
        struct kind *kind = kind_of(store);

        return count(kind, STORE_OP_LIST, NULL, 0, kind->driver->list(store, prefix, deep, from, ret_page, error));
}

static enum nebula_status list_after(struct store *store, const char *key, struct store_page *ret_page, struct nebula_error *error)
{
        struct kind *kind = kind_of(store);

        return count(kind, STORE_OP_LIST, NULL, 0, kind->driver->list_after(store, key, ret_page, error));
}

static enum nebula_status stat_one(struct store *store, const char *key, struct store_entry *ret_entry, struct nebula_error *error)
{
        struct kind *kind = kind_of(store);

        return count(kind, STORE_OP_STAT, NULL, 0, kind->driver->stat(store, key, ret_entry, error));
}

static enum nebula_status remove_some(struct store *store, const struct store_victim *victims, size_t victim_count, struct nebula_error *error)
{
        struct kind *kind = kind_of(store);

        return count(kind, STORE_OP_REMOVE, NULL, 0, kind->driver->remove(store, victims, victim_count, error));
}

static enum nebula_status clock_of(struct store *store, int64_t *ret_ns, struct nebula_error *error)
{
        struct kind *kind = kind_of(store);

        return count(kind, STORE_OP_CLOCK, NULL, 0, kind->driver->clock(store, ret_ns, error));
}

static enum nebula_status copy(struct store *store, const char *from, const char *to, enum store_condition condition, struct nebula_error *error)
{
        struct kind *kind = kind_of(store);

        return count(kind, STORE_OP_COPY, NULL, 0, kind->driver->copy(store, from, to, condition, error));
}

/* Copies the driver's table. Callers check for missing operations, so these stay missing. */
static struct store_ops counting(const struct store_ops *driver)
{
        struct store_ops ops = *driver;

        ops.put = driver->put ? put : NULL;
        ops.get = driver->get ? get : NULL;
        ops.upload = driver->upload ? upload : NULL;
        ops.publish = driver->publish ? publish : NULL;
        ops.read = driver->read ? read_some : NULL;
        ops.read_bulk = driver->read_bulk ? read_bulk : NULL;
        ops.read_chunks = driver->read_chunks ? read_chunks : NULL;
        ops.open_read = driver->open_read ? open_read : NULL;
        ops.list = driver->list ? list : NULL;
        ops.list_after = driver->list_after ? list_after : NULL;
        ops.stat = driver->stat ? stat_one : NULL;
        ops.remove = driver->remove ? remove_some : NULL;
        ops.clock = driver->clock ? clock_of : NULL;
        ops.copy = driver->copy ? copy : NULL;
        return ops;
}

void store_count(struct store *store)
{
        struct kind *kind;

        if (!*store->ops->scheme)
                return; /* its members are counted (several.h) */
        lock_take(&adding);
        kind = kind_of(store);
        if (!kind && kind_count < KINDS_MAX) {
                kind = &kinds[kind_count];
                kind->driver = store->ops;
                kind->ops = counting(store->ops);
                atomic_fetch_add(&kind_count, 1); /* readers see the kind only when it is complete */
        }
        lock_give(&adding);
        if (kind && store->ops == kind->driver)
                store->ops = &kind->ops;
}

bool store_counts_next(size_t *index, struct store_counts *ret_counts)
{
        struct kind *kind = &kinds[*index];

        if (*index >= atomic_load(&kind_count))
                return false;
        ++*index;
        *ret_counts = (struct store_counts){ .scheme = kind->driver->scheme, .read_bytes = atomic_load(&kind->read_bytes),
                                             .written_bytes = atomic_load(&kind->written_bytes), .retries = atomic_load(&kind->retries) };
        for (int operation = 0; operation < STORE_OPERATIONS; operation++)
                for (int outcome = 0; outcome < STORE_OUTCOMES; outcome++)
                        ret_counts->requests[operation][outcome] = atomic_load(&kind->requests[operation][outcome]);
        return true;
}

atomic_ullong *store_counts_retries(const struct store *store)
{
        struct kind *kind = kind_of(store);

        return kind ? &kind->retries : NULL;
}
