/* Makes objects visible. Each temporary file gets its key by a link, which replaces nothing, or by a rename, which replaces an older
 * object. Then each directory is synced once. Last, the temporary names are removed. */
#include <errno.h>
#include <stdlib.h>

#include "base/error.h"
#include "store/store_file_private.h"

/* A rename removes the temporary name. After a link it stays until file_end_upload. */
static int place_all(struct store *store, struct store_upload *upload, enum store_condition condition, size_t *ret_at)
{
        for (size_t i = 0; i < upload->count; i++) {
                struct file_placing *file = &upload->files[i];
                int result = file_place(store, file, condition);

                *ret_at = i;
                if (result)
                        return result;
                if (condition == STORE_ALWAYS) {
                        free(file->temp);
                        file->temp = NULL;
                }
        }
        return file_place_sync(store, upload->files, upload->count, ret_at);
}

/* Makes the object that has the key durable: a writer that got a failure may put its object again and find it. */
static int sync_taken(struct store *store, const struct file_placing *file)
{
        size_t at;
        int result = file_place_sync(store, file, 1, &at);

        return result ? result : -EEXIST;
}

static enum nebula_status publish_as(struct store *store, struct store_upload *upload, enum store_condition condition,
                                     struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;
        size_t at = 0;
        int result = place_all(store, upload, condition, &at);

        if (result == -EEXIST && condition == STORE_IF_ABSENT)
                result = sync_taken(store, &upload->files[at]);
        if (result == -EEXIST && condition == STORE_IF_ABSENT) {
                status = error_set(error, NEBULA_BUSY, EEXIST, "%s/%s is there already", store->root, upload->files[at].key);
        } else if (result) {
                file_dirs_forget(((struct file_store *)store)->dirs);
                status = file_write_error(store, upload->files[at].key, upload->files[at].made.size, result, error);
        }
        file_end_upload(store, upload);
        return status;
}

enum nebula_status file_publish(struct store *store, struct store_upload *upload, struct nebula_error *error)
{
        return publish_as(store, upload, STORE_IF_ABSENT, error);
}

enum nebula_status file_put(struct store *store, const char *key, const void *data, uint64_t size, enum store_condition condition,
                            const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct store_object object = { .key = key, .data = data, .size = size };
        struct store_upload *upload;
        struct store_stamp stamp;
        enum nebula_status status;

        (void)seen;
        if (condition == STORE_IF_SAME)
                return error_set(error, NEBULA_INVALID, 0, "can't write %s/%s: this driver does not support STORE_IF_SAME", store->root, key);
        status = file_upload(store, &object, 1, &upload, error);
        if (status)
                return status;
        stamp = file_stamp(&upload->files[0].made);
        status = publish_as(store, upload, condition, error);
        if (!status && ret_stamp)
                *ret_stamp = stamp;
        return status;
}
