#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/record.h"
#include "store/verify.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/lock.h"
#include "os/os.h"
#include "store/manifest_private.h"
#include "sum/sum.h"

#define THREADS_MAX 8

struct verify {
        struct store *store;
        const char *key;
        const struct record_file *file;
        const struct verify_watch *watch;
        uint64_t readable; /* bytes that exist, at most file->size */

        struct lock lock; /* guards everything below */
        size_t next;          /* the next chunk that no thread has taken */
        uint64_t first_offset;
        enum nebula_status status;
        struct nebula_error error;
};

/* Under the lock. */
static void note(struct verify *verify, uint64_t offset, uint64_t size, const struct nebula_error *failure)
{
        if (verify->watch->damage)
                verify->watch->damage(verify->watch->argument, offset, size, failure);
        if (verify->status && verify->first_offset <= offset)
                return;
        verify->first_offset = offset;
        verify->status = failure->status;
        verify->error = *failure;
}

static enum nebula_status read_chunk(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size, uint64_t crc64,
                                     struct nebula_error *error)
{
        enum nebula_status status = store->ops->read(store, key, data, offset, size, error);
        uint64_t found = status ? crc64 : sum_crc64(0, data, size);

        if (found == crc64)
                return status;
        return error_set(error, NEBULA_CORRUPT, 0,
                         "%s/%s: damaged between byte %" PRIu64 " and %" PRIu64 ": the checksum is %016" PRIx64 ", it should be %016" PRIx64, store->root, key,
                         offset, offset + size, found, crc64);
}

enum nebula_status verify_chunk(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size, uint64_t crc64,
                                struct nebula_error *error)
{
        enum nebula_status status = read_chunk(store, key, data, offset, size, crc64, error);

        return status == NEBULA_CORRUPT ? read_chunk(store, key, data, offset, size, crc64, error) : status;
}

enum nebula_status verify_goes_on(const struct verify_watch *watch, const char *key, struct nebula_error *error)
{
        bool is_over = watch && watch->is_over && watch->is_over(watch->argument);

        return is_over ? error_set(error, NEBULA_UNAVAILABLE, 0, "the check of %s was ended", key) : NEBULA_OK;
}

static enum nebula_status check_chunk(struct verify *verify, size_t index, void *buffer, uint64_t offset, uint64_t size,
                                      struct nebula_error *failure)
{
        enum nebula_status status = verify_goes_on(verify->watch, verify->key, failure);

        if (!status)
                status = verify_chunk(verify->store, verify->key, buffer, offset, size, verify->file->chunks[index], failure);

        if (verify->watch->chunk && (!status || status == NEBULA_CORRUPT))
                verify->watch->chunk(verify->watch->argument, buffer, offset, size);
        return status;
}

static void *work(void *argument)
{
        struct verify *verify = argument;
        uint32_t chunk_bytes = verify->file->chunk_bytes;
        struct nebula_error failure = { 0 };
        void *buffer = aligned_alloc(4096, ((size_t)chunk_bytes + 4095) & ~(size_t)4095);

        lock_take(&verify->lock);
        while (verify->next < verify->file->chunk_count) {
                size_t index = verify->next++;
                uint64_t offset = (uint64_t)index * chunk_bytes;
                uint64_t size = verify->file->size - offset < chunk_bytes ? verify->file->size - offset : chunk_bytes;
                enum nebula_status status;

                if (offset + size > verify->readable)
                        break; /* the file is cut off here, which is noted already */
                lock_give(&verify->lock);
                if (buffer)
                        status = check_chunk(verify, index, buffer, offset, size, &failure);
                else
                        status = error_set(&failure, NEBULA_NO_MEMORY, 0, "no memory for a chunk of %" PRIu32 " bytes", chunk_bytes);
                lock_take(&verify->lock);
                if (status)
                        note(verify, offset, size, &failure);
                if (status && store_class(&failure) == STORE_AGAIN)
                        verify->next = verify->file->chunk_count; /* each further chunk would wait as long */
                if (verify->watch->progress)
                        verify->watch->progress(verify->watch->argument, size);
        }
        lock_give(&verify->lock);
        free(buffer);
        return NULL;
}

static void run_threads(struct verify *verify)
{
        pthread_t threads[THREADS_MAX];
        uint32_t wanted = os->cpu_count() + 1, count = 0; /* one more than CPUs, because one thread usually waits for the disk */

        if (wanted > THREADS_MAX)
                wanted = THREADS_MAX;
        if (wanted > verify->file->chunk_count)
                wanted = (uint32_t)verify->file->chunk_count;
        while (count + 1 < wanted && !pthread_create(&threads[count], NULL, work, verify))
                count++;
        work(verify);
        for (uint32_t i = 0; i < count; i++)
                pthread_join(threads[i], NULL);
}

enum nebula_status verify_file(struct store *store, const char *key, const struct record_file *file,
                               const struct verify_watch *watch, struct nebula_error *error)
{
        struct verify verify = { .store = store, .key = key, .file = file, .watch = watch };
        struct nebula_error failure = { 0 };
        struct store_entry entry;
        uint64_t found;
        enum nebula_status status = store->ops->stat(store, key, &entry, &failure);

        lock_init(&verify.lock, LOCK_VERIFY);
        if (status) {
                note(&verify, 0, 0, &failure);
                goto out;
        }
        found = entry.size;
        store_entry_done(&entry);
        verify.readable = found < file->size ? found : file->size;
        if (store_check_size(store, key, found, file->size, &failure))
                note(&verify, verify.readable, 0, &failure);
        if (verify.readable)
                run_threads(&verify);
out:
        lock_done(&verify.lock);
        if (verify.status && error)
                *error = verify.error;
        return verify.status;
}

static enum nebula_status verify_recorded(struct store *store, const struct manifest *manifest,
                                          const struct manifest_file *file, struct record *record,
                                          struct nebula_error *error)
{
        const struct verify_watch watch = { 0 };
        struct record_file recorded = { 0 };
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = record_take_file(record, file, &recorded, error);

        if (status)
                return status;
        status = manifest_file_key(manifest, file, key, error);
        if (!status)
                status = verify_file(store, key, &recorded, &watch, error);
        record_file_done(&recorded);
        return status;
}

enum nebula_status manifest_verify(struct store *store, const struct manifest *manifest, const bool *wanted,
                                   void (*report)(void *argument, const struct manifest_file *file, enum nebula_status status,
                                                  const struct nebula_error *error),
                                   void *argument, struct nebula_error *error)
{
        uint32_t *order = manifest_files_by_record(manifest);
        size_t at = 0, count = 0;
        enum nebula_status first = NEBULA_OK;

        if (!order)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to verify %zu files", manifest->file_count);
        for (size_t i = 0; i < manifest->file_count; i++)
                if (!wanted || wanted[order[i]])
                        order[count++] = order[i];
        /* Record by record, so that each is loaded once. manifest_parse has checked that every file has one. */
        for (size_t r = 0; r < manifest->record_count; r++) {
                struct nebula_error lost = { 0 }, failure;
                struct record record = { 0 };
                enum nebula_status loaded = NEBULA_OK;

                if (!wanted || (at < count && manifest->files[order[at]].record == r))
                        loaded = manifest_load_record(store, manifest, r, &record, &lost);
                for (; at < count && manifest->files[order[at]].record == r; at++) {
                        const struct manifest_file *file = &manifest->files[order[at]];
                        enum nebula_status status = loaded;

                        failure = lost;
                        if (!loaded)
                                status = verify_recorded(store, manifest, file, &record, &failure);
                        if (report)
                                report(argument, file, status, &failure);
                        if (status && !first) {
                                first = status;
                                if (error)
                                        *error = failure;
                        }
                }
                if (loaded && !first) {
                        first = loaded;
                        if (error)
                                *error = lost;
                }
                record_done(&record);
        }
        free(order);
        return first;
}
