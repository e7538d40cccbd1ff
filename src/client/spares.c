/*
 * Spare images: the agent makes them for a file that nebula_session_prepare has hinted. A thread of the session maps them, makes the
 * mapping's pages and calls the program, which may register them with a device. The first saves then find that done.
 *
 * The thread holds no lock while it works on an image. A save that is lent this image waits for it (spares_await).
 */
#include "base/error.h"
#include "client/client.h"
#include "os/os.h"
#include "os/thread.h"

#define STEP_BYTES (2u << 20)
/* Between two requests. The agent makes an image of 1 GiB in some tenths of a second, and may wait for memory first. */
#define PAUSE_LEAST_MS 5
#define PAUSE_MOST_MS 1000
#define GIVE_UP_MS 60000 /* after so long without an image */

struct spare {
        uint64_t image_id; /* 0: none is ready */
        void *data;
        uint64_t capacity_bytes;
        uint32_t left_count;
        void (*mapped)(void *argument, void *image, uint64_t capacity_bytes); /* or NULL */
        void *argument;
};

void spares_init(struct nebula_session *session)
{
        session->spares = (struct client_spares){ 0 };
        lock_init(&session->spares.spares_lock, LOCK_SPARES);
        os_cond_init(&session->spares.moved);
}

/* Maps the next spare image and makes it the one that the thread works on. */
static enum nebula_status next_spare(struct nebula_session *session, struct spare *spare)
{
        struct ipc_spare request = { 0 };
        struct client_call call = {
                .type = IPC_SPARE, .request = &request, .size = sizeof request, .timeout_ms = CLIENT_ANSWER_MS,
        };
        const struct ipc_spare_image *answer;
        enum nebula_status status;
        int fd;

        *spare = (struct spare){ 0 };
        lock_take(&session->request_lock);
        spare->mapped = session->mapped;
        spare->argument = session->mapped_argument;
        status = session_call(session, &call, NULL);
        if (status != NEBULA_OK)
                goto give_lock;
        answer = session->wire.frame.payload;
        spare->image_id = answer->image_id;
        spare->capacity_bytes = answer->capacity_bytes;
        spare->left_count = answer->left_count;
        if (!spare->image_id)
                goto give_lock;
        status = session_make_pool(session, NULL);
        if (status != NEBULA_OK)
                goto give_lock;
        fd = session->wire.frame.fd;
        session->wire.frame.fd = -1;
        status = capture_pool_map(session->pool, spare->image_id, fd, spare->capacity_bytes, &spare->data, NULL);
        if (status != NEBULA_OK)
                goto give_lock;
        capture_pool_take_fresh(session->pool, spare->data);
        lock_take(&session->spares.spares_lock);
        session->spares.image_id = spare->image_id;
        session->spares.is_awaited = false;
        lock_give(&session->spares.spares_lock);
give_lock:
        lock_give(&session->request_lock);
        return status;
}

static bool is_ending(struct nebula_session *session)
{
        bool result;

        lock_take(&session->spares.spares_lock);
        result = session->spares.is_ending;
        lock_give(&session->spares.spares_lock);
        return result;
}

/* Whether a save waits for the image, which no device will use: it takes less time to copy into a part of the pages than to make all. */
static bool is_awaited(struct nebula_session *session, const struct spare *spare)
{
        bool result;

        lock_take(&session->spares.spares_lock);
        result = session->spares.is_awaited && !spare->mapped;
        lock_give(&session->spares.spares_lock);
        return result;
}

/* Not by the threads that copy, because a save may need them. */
static void make_ready(struct nebula_session *session, const struct spare *spare)
{
        for (uint64_t at = 0; at < spare->capacity_bytes && !is_ending(session) && !is_awaited(session, spare); at += STEP_BYTES) {
                uint64_t left = spare->capacity_bytes - at;

                os->advise((char *)spare->data + at, left < STEP_BYTES ? left : STEP_BYTES, OS_ADVISE_POPULATE_WRITE);
        }
        if (spare->mapped && !is_ending(session))
                spare->mapped(spare->argument, spare->data, spare->capacity_bytes);
        lock_take(&session->spares.spares_lock);
        session->spares.image_id = 0;
        pthread_cond_broadcast(&session->spares.moved);
        lock_give(&session->spares.spares_lock);
}

/* Returns after the pause, or as soon as the session ends or another file is hinted. */
static void pause_for(struct nebula_session *session, int64_t pause_ms)
{
        struct client_spares *spares = &session->spares;

        lock_take(&spares->spares_lock);
        if (!spares->is_ending && !spares->is_hinted)
                lock_wait_for(&spares->spares_lock, &spares->moved, pause_ms);
        spares->is_hinted = false; /* the next request asks for that file, too */
        lock_give(&spares->spares_lock);
}

/* True: a file was hinted after the last request. False: the thread ends, and the session is used no more unless the thread closes it. */
static bool goes_on(struct nebula_session *session, bool *ret_closes_session)
{
        struct client_spares *spares = &session->spares;
        bool result;

        lock_take(&spares->spares_lock);
        result = spares->is_hinted && !spares->is_ending;
        spares->is_hinted = false;
        spares->is_running = result;
        *ret_closes_session = spares->closes_session;
        if (spares->closes_session)
                spares->has_thread = false;
        lock_give(&spares->spares_lock);
        return result;
}

static void map_spares(struct nebula_session *session)
{
        int64_t pause_ms = PAUSE_LEAST_MS, since_ns = os->now_ns();
        struct spare spare;

        while (!is_ending(session) && os->now_ns() - since_ns < (int64_t)GIVE_UP_MS * 1000000) {
                if (next_spare(session, &spare) != NEBULA_OK)
                        return;
                if (spare.image_id) {
                        make_ready(session, &spare);
                        since_ns = os->now_ns();
                        pause_ms = PAUSE_LEAST_MS;
                }
                if (!spare.left_count)
                        return;
                if (!spare.image_id) {
                        pause_for(session, pause_ms);
                        pause_ms = pause_ms * 2 < PAUSE_MOST_MS ? pause_ms * 2 : PAUSE_MOST_MS;
                }
        }
}

static void *run(void *argument)
{
        struct nebula_session *session = argument;
        bool closes_session;

        do
                map_spares(session);
        while (goes_on(session, &closes_session));
        if (closes_session) {
                pthread_detach(pthread_self());
                nebula_session_close(session);
        }
        return NULL;
}

void spares_start(struct nebula_session *session)
{
        struct client_spares *spares = &session->spares;

        lock_take(&spares->spares_lock);
        spares->is_hinted = spares->is_running;
        if (!spares->is_running && !spares->is_ending) {
                if (spares->has_thread)
                        pthread_join(spares->thread, NULL); /* it has ended, or is about to */
                spares->has_thread = spares->is_running = os_thread_start_for_program(&spares->thread, run, session) == 0;
        }
        pthread_cond_broadcast(&spares->moved);
        lock_give(&spares->spares_lock);
}

uint64_t spares_image(struct nebula_session *session)
{
        uint64_t image_id;

        lock_take(&session->spares.spares_lock);
        image_id = session->spares.image_id;
        lock_give(&session->spares.spares_lock);
        return image_id;
}

static bool is_own_thread(const struct client_spares *spares)
{
        return spares->has_thread && pthread_equal(spares->thread, pthread_self());
}

void spares_await(struct nebula_session *session, uint64_t image_id)
{
        struct client_spares *spares = &session->spares;

        lock_take(&spares->spares_lock);
        spares->is_awaited = spares->image_id == image_id;
        while (spares->image_id == image_id && image_id && !is_own_thread(spares))
                lock_wait(&spares->spares_lock, &spares->moved);
        lock_give(&spares->spares_lock);
}

bool spares_close_later(struct nebula_session *session)
{
        struct client_spares *spares = &session->spares;
        bool is_own;

        lock_take(&spares->spares_lock);
        is_own = is_own_thread(spares);
        spares->is_ending |= is_own;
        spares->closes_session |= is_own;
        lock_give(&spares->spares_lock);
        return is_own;
}

void spares_end(struct nebula_session *session)
{
        struct client_spares *spares = &session->spares;
        bool joins;

        lock_take(&spares->spares_lock);
        joins = spares->has_thread && !is_own_thread(spares);
        spares->is_ending = true;
        if (joins)
                spares->has_thread = false;
        pthread_cond_broadcast(&spares->moved);
        lock_give(&spares->spares_lock);
        if (joins)
                pthread_join(spares->thread, NULL);
}

void spares_done(struct nebula_session *session)
{
        spares_end(session);
        lock_done(&session->spares.spares_lock);
}
