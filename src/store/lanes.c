#include "store/lanes.h"

#include <pthread.h>

#include "os/lock.h"
#include "os/thread.h"

struct lanes {
        size_t count;
        lanes_piece *piece;
        void *argument;
        atomic_size_t next;
        atomic_bool stop;
        struct lock lock; /* guards the rest */
        enum nebula_status status;
        struct nebula_error *error;
};

static void *run(void *argument)
{
        struct lanes *lanes = argument;
        size_t index;

        while (!atomic_load(&lanes->stop) && (index = atomic_fetch_add(&lanes->next, 1)) < lanes->count) {
                struct nebula_error error = { 0 };
                enum nebula_status status = lanes->piece(lanes->argument, index, &lanes->stop, &error);

                if (!status)
                        continue;
                lock_take(&lanes->lock);
                if (!lanes->status) {
                        lanes->status = status;
                        if (lanes->error)
                                *lanes->error = error;
                }
                atomic_store(&lanes->stop, true);
                lock_give(&lanes->lock);
        }
        return NULL;
}

enum nebula_status lanes_run(size_t count, uint32_t width, lanes_piece *piece, void *argument, struct nebula_error *error)
{
        struct lanes lanes = { .count = count, .piece = piece, .argument = argument, .error = error };
        pthread_t threads[LANES_MAX];
        size_t wanted = width < LANES_MAX ? width : LANES_MAX, started = 0;

        lock_init(&lanes.lock, LOCK_LANES);
        if (wanted > count)
                wanted = count;
        while (started + 1 < wanted && !os_thread_start(&threads[started], run, &lanes, false))
                started++;
        run(&lanes);
        while (started)
                pthread_join(threads[--started], NULL);
        lock_done(&lanes.lock);
        return lanes.status;
}
