/* The faults of the driver `mem`. */
#include <inttypes.h>

#include "base/error.h"
#include "os/os.h"
#include "store/store_mem_private.h"

void store_mem_faults(struct store *store, const struct mem_faults *faults)
{
        struct mem_volume *volume = mem_volume_of(store);

        lock_take(&volume->lock);
        volume->faults = faults ? *faults : (struct mem_faults){ 0 };
        volume->call_count = volume->write_count = 0;
        lock_give(&volume->lock);
}

uint64_t store_mem_calls(struct store *store)
{
        struct mem_volume *volume = mem_volume_of(store);
        uint64_t count;

        lock_take(&volume->lock);
        count = volume->call_count;
        lock_give(&volume->lock);
        return count;
}

uint64_t store_mem_writes(struct store *store)
{
        struct mem_volume *volume = mem_volume_of(store);
        uint64_t count;

        lock_take(&volume->lock);
        count = volume->write_count;
        lock_give(&volume->lock);
        return count;
}

/* The HTTP status of the call; 0: it succeeds. */
static int answer_of(const struct mem_faults *faults, uint64_t call)
{
        if (faults->fail_at && (call == faults->fail_at || (faults->goes_on && call > faults->fail_at)))
                return 500;
        return faults->throttle_every && !(call % faults->throttle_every) ? 503 : 0;
}

enum nebula_status mem_begin(struct store *store, const char *key, struct nebula_error *error)
{
        struct mem_volume *volume = mem_volume_of(store);
        int64_t latency_ms;
        int http_status;

        lock_take(&volume->lock);
        latency_ms = volume->faults.latency_ms;
        http_status = answer_of(&volume->faults, ++volume->call_count);
        lock_give(&volume->lock);
        if (latency_ms)
                os->sleep_ms(latency_ms);
        if (!http_status)
                return NEBULA_OK;
        error_set(error, NEBULA_STORAGE, 0, "%s/%s: the store answers %d", store->root, key, http_status);
        if (error)
                error->http_status = http_status;
        return NEBULA_STORAGE;
}

enum nebula_status mem_answer(struct mem_volume *volume, const char *key, struct nebula_error *error)
{
        if (++volume->write_count != volume->faults.lose_at)
                return NEBULA_OK;
        return error_set(error, NEBULA_TIMEOUT, 0, "%s/%s: the store gives no answer", volume->url, key);
}

enum nebula_status mem_no_memory(const struct store *store, struct nebula_error *error)
{
        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for an object of %s", store->root);
}

enum nebula_status mem_not_found(const struct store *store, const char *key, struct nebula_error *error)
{
        return error_set(error, NEBULA_NOT_FOUND, 0, "%s/%s: there is no such object", store->root, key);
}
