/* Large objects. The members upload their objects at the same time. Feeds become final one after the other, so a member's threads wait for
 * theirs while another member sends. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/thread.h"
#include "store/several/several_private.h"

struct share {
        struct store *member;
        struct store_object *objects;
        size_t count;
        struct store_upload *upload; /* NULL: nothing to publish or abort */
        enum nebula_status status;
        struct nebula_error error;
        pthread_t thread;
        bool is_started;
};
struct store_upload {
        size_t count;
        struct share shares[];
};

static void *run_share(void *argument)
{
        struct share *share = argument;

        share->status = share->member->ops->upload(share->member, share->objects, share->count, &share->upload, &share->error);
        return NULL;
}

static struct store_upload *divide(const struct several *several, const struct store_object *objects, size_t count)
{
        struct store_upload *upload = calloc(1, sizeof *upload + several->count * sizeof *upload->shares);
        bool has_memory = upload;

        for (size_t i = 0; i < several->count && has_memory; i++) {
                struct share *share = &upload->shares[i];

                share->member = several->members[i];
                share->objects = calloc(count + 1, sizeof *objects);
                has_memory = share->objects;
                upload->count = i + 1;
                for (size_t k = 0; k < count && has_memory; k++)
                        if (several_place(objects[k].key, several->count) == i)
                                share->objects[share->count++] = objects[k];
        }
        if (has_memory)
                return upload;
        several_abort((struct store *)(uintptr_t)&several->store, upload);
        return NULL;
}

/* The last member that has objects runs on this thread. */
static void run_all(struct store_upload *upload)
{
        struct share *last = NULL;

        for (size_t i = 0; i < upload->count; i++) {
                if (!upload->shares[i].count)
                        continue;
                if (last)
                        last->is_started = !os_thread_start(&last->thread, run_share, last, false);
                if (last && !last->is_started)
                        last->status = error_set(&last->error, NEBULA_NO_MEMORY, 0, "no thread to write to %s", last->member->root);
                last = &upload->shares[i];
        }
        if (last)
                run_share(last);
        for (size_t i = 0; i < upload->count; i++)
                if (upload->shares[i].is_started)
                        pthread_join(upload->shares[i].thread, NULL);
}

enum nebula_status several_upload(struct store *store, const struct store_object *objects, size_t count, struct store_upload **ret_upload,
                                  struct nebula_error *error)
{
        struct store_upload *upload = divide((struct several *)store, objects, count);
        enum nebula_status status = NEBULA_OK;

        if (!upload)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to write to %s", store->root);
        run_all(upload);
        for (size_t i = 0; i < upload->count && !status; i++) {
                status = upload->shares[i].status;
                if (status && error)
                        *error = upload->shares[i].error;
        }
        if (status)
                several_abort(store, upload);
        else
                *ret_upload = upload;
        return status;
}

enum nebula_status several_publish(struct store *store, struct store_upload *upload, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < upload->count && !status; i++) {
                struct share *share = &upload->shares[i];
                struct store_upload *own = share->upload;

                share->upload = NULL;
                if (own)
                        status = share->member->ops->publish(share->member, own, error);
        }
        several_abort(store, upload);
        return status;
}

void several_abort(struct store *store, struct store_upload *upload)
{
        for (size_t i = 0; upload && i < upload->count; i++) {
                struct share *share = &upload->shares[i];

                if (share->upload)
                        share->member->ops->abort(share->member, share->upload);
                free(share->objects);
        }
        free(upload);
}
