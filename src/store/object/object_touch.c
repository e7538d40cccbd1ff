/* A sweep removes temporary objects that nothing has written to for some time. A service may not count the parts of an upload as writes.
 * One thread of the upload therefore touches its temporary objects from time to time, from the first part until the upload is published or
 * dropped. */
#include <stdlib.h>

#include "os/thread.h"
#include "store/object/object.h"

struct object_touching {
        struct object_store *store;
        const struct store_upload *upload;
        struct lock lock; /* for `ended` */
        pthread_cond_t ended;
        atomic_bool stop;
        pthread_t thread;
};

/* False: the upload is over. */
static bool wait_for_next(struct object_touching *touching)
{
        lock_take(&touching->lock);
        if (!atomic_load(&touching->stop))
                lock_wait_for(&touching->lock, &touching->ended, touching->store->service->limits->touch_ms);
        lock_give(&touching->lock);
        return !atomic_load(&touching->stop);
}

static void *run(void *argument)
{
        struct object_touching *touching = argument;
        const struct store_upload *upload = touching->upload;

        while (wait_for_next(touching))
                for (size_t i = 0; i < upload->count && !atomic_load(&touching->stop); i++)
                        touching->store->service->steps->touch(touching->store, upload, &upload->objects[i], &touching->stop);
        return NULL;
}

static void done(struct object_touching *touching)
{
        pthread_cond_destroy(&touching->ended);
        lock_done(&touching->lock);
        free(touching);
}

void object_touch_begin(struct object_store *store, struct store_upload *upload)
{
        struct object_touching *touching;

        if (!store->service->steps->touch)
                return;
        touching = calloc(1, sizeof *touching);
        if (!touching)
                return;
        *touching = (struct object_touching){ .store = store, .upload = upload };
        lock_init(&touching->lock, LOCK_OBJECT_TOUCH);
        os_cond_init(&touching->ended);
        if (os_thread_start(&touching->thread, run, touching, false))
                done(touching);
        else
                upload->touching = touching;
}

void object_touch_end(struct store_upload *upload)
{
        struct object_touching *touching = upload->touching;

        if (!touching)
                return;
        lock_take(&touching->lock);
        atomic_store(&touching->stop, true);
        pthread_cond_signal(&touching->ended);
        lock_give(&touching->lock);
        pthread_join(touching->thread, NULL);
        done(touching);
        upload->touching = NULL;
}
