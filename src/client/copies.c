/*
 * Captures that go on after their save returned. One thread of the session waits for each capture, the oldest first, and
 * reports to the agent. It has a connection of its own, because a save may hold the session's connection while memory is full,
 * and only the end of a copy lets memory be freed. A second thread calls `release`, which may wait for a lock of the
 * program such as Python's: a thread that crashed with that lock waits in its signal handler for the copies (os/ending.h).
 *
 * The image holds the finished file. So if the agent dies meanwhile and its successor does not know the image, the file is
 * copied from the image: the program's memory has changed since.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"
#include "os/ending.h"
#include "os/os.h"
#include "os/thread.h"

/* The program needs some more time to return from the save. Copying at once would slow that down. A write to memory
 * that is not copied yet does not wait for this pause. */
#define COPY_AFTER_NS 2000000

/* A large file is written to storage while it is still being copied: the client reports each so many bytes to the agent. */
#define COPIED_BYTES (32u << 20)
#define COPIED_FROM (4 * (uint64_t)COPIED_BYTES) /* smallest file that is reported to the agent early */
#define COPIED_EVERY_MS 5
/* Pause after a write that had to wait: a program that overwrites everything may write for long without waiting again. */
#define COPIED_QUIET_NS 500000000

void copies_init(struct nebula_session *session)
{
        lock_init(&session->copies.copies_lock, LOCK_COPIES);
        os_cond_init(&session->copies.moved);
        session->copies.first = session->copies.released = NULL;
        session->copies.count = 0;
        session->copies.has_maker = session->copies.has_releaser = session->copies.is_ending = session->copies.closes_session = false;
}

void copies_fork(struct nebula_session *session)
{
        copies_init(session);
}

static enum nebula_status report(struct nebula_session *session, struct client_wire *wire, enum ipc_type type,
                               void *request, size_t size, struct nebula_error *error)
{
        struct client_call call = { .type = type, .request = request, .size = size, .timeout_ms = CLIENT_ANSWER_MS };

        return session_call_alone(session, wire, &call, error);
}

static enum nebula_status report_abandoned(struct nebula_session *session, struct client_wire *wire, const struct client_copy *copy,
                                         const char *reason)
{
        struct ipc_abandon request = { .image_id = copy->captured.image_id };

        memcpy(request.reason, reason, strnlen(reason, sizeof request.reason - 1));
        return report(session, wire, IPC_ABANDON, &request, sizeof request, NULL);
}

/* Copies the file from the old image into a new one. The answer in wire->frame has the new image and its fd. */
static enum nebula_status fill_again(struct client_wire *wire, const struct client_copy *copy, struct nebula_error *error)
{
        const struct ipc_granted *granted = wire->frame.payload;
        struct capture_part whole = { copy->image, copy->size, 0 };
        struct capture_job job = { .parts = &whole, .count = 1, .is_fresh = true };
        uint64_t capacity = granted->capacity_bytes;
        struct os_stat stat;
        void *image;
        int result;

        /* Touching a mapping beyond the end of its file would end the trainer with SIGBUS. */
        result = os->fstat(wire->frame.fd, &stat);
        if (result < 0 || stat.size < capacity || capacity < copy->size)
                return error_set(error, NEBULA_FAILED, result < 0 ? -result : 0,
                                 "the agent lent an image that does not hold %llu bytes", (unsigned long long)copy->size);
        result = os->map(wire->frame.fd, 0, capacity, OS_MAP_READ | OS_MAP_WRITE, &image);
        if (result < 0)
                return error_set(error, NEBULA_FAILED, -result, "an image of %llu bytes cannot be mapped",
                                 (unsigned long long)capacity);
        if (granted->lacks_pages && !capture_populate(image, capacity)) {
                os->unmap(image, capacity);
                return error_set(error, NEBULA_NO_MEMORY, 0, "this machine has no memory left for an image of %llu bytes", (unsigned long long)capacity);
        }
        job.image = image;
        capture_copy_begin(&job);
        capture_copy_end(&job);
        os->unmap(image, capacity);
        return NEBULA_OK;
}

/* Saves the file again at a new agent, which does not know the image. */
static enum nebula_status save_again(struct nebula_session *session, struct client_wire *wire, struct client_copy *copy,
                                     struct nebula_error *error)
{
        struct ipc_image request = { .size = copy->size, .format = copy->format };
        struct client_call call;
        enum nebula_status status;

        checkpoint_image_call(copy->checkpoint, copy->name, &request, &call);
        status = session_call_alone(session, wire, &call, error);
        checkpoint_know_image(copy->checkpoint, wire);
        if (status != NEBULA_OK)
                return status;
        copy->captured.image_id = ((const struct ipc_granted *)wire->frame.payload)->image_id;
        copy->agent_nonce = wire->agent_nonce;
        copy->captured.sum_count = 0; /* the sums lie in the old image */
        status = checkpoint_check(copy->checkpoint, error);
        if (status == NEBULA_OK)
                status = fill_again(wire, copy, error);
        if (status == NEBULA_OK)
                status = report(session, wire, IPC_CAPTURED, &copy->captured, sizeof copy->captured, error);
        else
                report_abandoned(session, wire, copy, error->message);
        return status;
}

/* Whether `copy` is the last one that was not reported to the agent, so that its checkpoint's commit goes with it. */
static bool takes_commit(struct nebula_session *session, struct client_copy *copy)
{
        struct nebula_checkpoint *checkpoint = copy->checkpoint;
        bool takes = checkpoint->commit_is_due;

        for (const struct client_copy *other = session->copies.first; other; other = other->next)
                takes = takes && (other == copy || other->checkpoint != checkpoint || other->is_reported);
        if (takes)
                checkpoint->commit_is_due = false;
        copy->brings_commit |= takes;
        return takes;
}

static bool is_of_file(const struct client_copy *copy, const char *tag, const char *name)
{
        return strcmp(copy->checkpoint->tag, tag) == 0 && strcmp(copy->name, name) == 0;
}

/* Whether an agent rightly does not know the image, because the file was saved again. If a new agent answers, it has
 * forgotten all images. Then the later save must still be in progress, or the file would be lost. */
static bool was_replaced(struct nebula_session *session, const struct client_copy *copy, uint64_t agent_nonce)
{
        bool result;

        lock_take(&session->copies.copies_lock);
        result = copy->is_replaced && agent_nonce == copy->agent_nonce;
        for (const struct client_copy *later = copy->next; later && !result; later = later->next)
                result = is_of_file(later, copy->checkpoint->tag, copy->name);
        lock_give(&session->copies.copies_lock);
        return result;
}

/* `copy` failed; `status` is the agent's answer about it. Only the agent that lent the image is asked to fail the
 * version: a new agent might have a complete version of the same tag without this file. A version with a file count
 * lacks a file then, so it never becomes complete. */
static void lose(struct nebula_session *session, struct client_wire *wire, const struct client_copy *copy, enum nebula_status status,
                 const char *reason)
{
        struct nebula_checkpoint *checkpoint = copy->checkpoint;
        struct ipc_fail request = { 0 };
        struct client_call call = {
                .type = IPC_FAIL, .request = &request, .size = sizeof request, .version_id = &request.version_id,
                .checkpoint = checkpoint, .timeout_ms = CLIENT_ANSWER_MS,
        };

        if (checkpoint->file_count > 0 || atomic_load(&checkpoint->is_given_up) ||
            (status != NEBULA_UNAVAILABLE && wire->agent_nonce == copy->agent_nonce) || was_replaced(session, copy, wire->agent_nonce))
                return;
        atomic_store(&checkpoint->is_torn, true);
        memcpy(request.reason, reason, strnlen(reason, sizeof request.reason - 1));
        if (wire->fd >= 0) /* otherwise no rank has begun it again */
                session_call_alone(session, wire, &call, NULL);
}

/* Sends CAPTURED, and the commit if it was left to this copy. */
static enum nebula_status report_captured(struct nebula_session *session, struct client_wire *wire, struct client_copy *copy,
                                        struct nebula_error *error)
{
        struct ipc_commit request = { .has_saved = true };
        struct client_call commit = {
                .type = IPC_COMMIT, .request = &request, .size = sizeof request, .version_id = &request.version_id,
                .checkpoint = copy->checkpoint, .timeout_ms = CLIENT_ANSWER_MS,
        };
        enum nebula_status status;
        bool is_late;

        lock_take(&session->copies.copies_lock);
        copy->captured.commits = takes_commit(session, copy);
        lock_give(&session->copies.copies_lock);
        status = report(session, wire, IPC_CAPTURED, &copy->captured, sizeof copy->captured, error);
        if (status == NEBULA_NOT_FOUND && was_replaced(session, copy, wire->agent_nonce))
                status = NEBULA_OK;
        else if (status == NEBULA_NOT_FOUND && wire->agent_nonce != copy->agent_nonce &&
                 !atomic_load(&copy->checkpoint->is_given_up))
                status = save_again(session, wire, copy, error);
        if (status == NEBULA_OK)
                checkpoint_saved(copy->checkpoint, copy->captured.commits);
        else
                lose(session, wire, copy, status, error->message);
        lock_take(&session->copies.copies_lock);
        copy->is_reported = true;
        is_late = takes_commit(session, copy);
        lock_give(&session->copies.copies_lock);
        if (status != NEBULA_OK || !is_late)
                return status;
        status = session_call_alone(session, wire, &commit, error);
        if (status == NEBULA_OK)
                checkpoint_saved(copy->checkpoint, true);
        return status;
}

/* Tells the agent how far the copy is. False: the agent does not want to know. While the program waits for copies,
 * nothing is reported to the agent, because its work would take processors and memory bandwidth from them. */
static bool report_copied(struct nebula_session *session, struct client_wire *wire, struct client_copy *copy)
{
        struct ipc_copied request = { .image_id = copy->captured.image_id, .size = cow_copied(copy->capture) };

        if (request.size < copy->copied_size + COPIED_BYTES || request.size > copy->size) /* the whole file: CAPTURED follows */
                return true;
        if (os->now_ns() - cow_waited_ns(copy->capture) < COPIED_QUIET_NS)
                return true;
        copy->copied_size = request.size;
        request.sum_count = cow_summed(copy->capture, request.size);
        lock_take(&session->copies.copies_lock);
        request.commits = copy->checkpoint->commit_is_due;
        lock_give(&session->copies.copies_lock);
        return report(session, wire, IPC_COPIED, &request, sizeof request, NULL) == NEBULA_OK;
}

/* Waits for the copy and reports its progress to the agent. */
static enum nebula_status await_capture(struct nebula_session *session, struct client_wire *wire, struct client_copy *copy,
                                        struct nebula_error *error)
{
        bool is_told_of = copy->size >= COPIED_FROM;
        enum nebula_status status;

        while ((status = cow_wait(copy->capture, is_told_of ? COPIED_EVERY_MS : -1, error)) == NEBULA_TIMEOUT)
                is_told_of = report_copied(session, wire, copy);
        return status;
}

static enum nebula_status finish(struct nebula_session *session, struct client_wire *wire, struct client_copy *copy,
                                 struct nebula_error *error)
{
        struct cow_stats stats;
        enum nebula_status status = NEBULA_OK, cow_status = NEBULA_OK;

        if (copy->filled) {
                int64_t begun_ns = os->now_ns();

                status = copy->filled(copy->argument, error);
                copy->captured.copy_ns += os->now_ns() - begun_ns;
        }
        if (copy->capture) {
                cow_status = await_capture(session, wire, copy, status == NEBULA_OK ? error : NULL);
                cow_stats(copy->capture, &stats);
                copy->captured.copy_ns += stats.copy_ns;
                copy->captured.cpu_ns += stats.cpu_ns;
                copy->captured.fault_count = stats.fault_count;
                copy->captured.sum_count = cow_summed(copy->capture, UINT64_MAX);
                cow_free(copy->capture);
                copy->capture = NULL;
        }
        if (status == NEBULA_OK)
                status = cow_status;
        if (status == NEBULA_OK)
                status = checkpoint_check(copy->checkpoint, error);
        if (status == NEBULA_OK)
                return report_captured(session, wire, copy, error);
        lose(session, wire, copy, report_abandoned(session, wire, copy, error->message), error->message);
        lock_take(&session->copies.copies_lock);
        copy->is_reported = true;
        takes_commit(session, copy); /* without effect: the version has failed */
        lock_give(&session->copies.copies_lock);
        return status;
}

/* Moves the oldest copy to the list of the release thread. A thread that waits for the copy must not wait for its
 * release, because the release may wait for a lock of that thread. The caller holds copies_lock. */
static void hand_over_first(struct client_copies *copies)
{
        struct client_copy *copy = copies->first, **link = &copies->released;

        copies->first = copy->next;
        copy->next = NULL;
        while (*link)
                link = &(*link)->next;
        *link = copy;
        pthread_cond_broadcast(&copies->moved);
}

static void *make_copies(void *argument)
{
        struct nebula_session *session = argument;
        struct client_copies *copies = &session->copies;
        struct client_wire wire = { .fd = -1 };
        struct client_copy *copy;

        lock_take(&copies->copies_lock);
        for (;;) {
                while (!copies->first && !copies->is_ending)
                        lock_wait(&copies->copies_lock, &copies->moved);
                copy = copies->first;
                if (!copy)
                        break;
                lock_give(&copies->copies_lock);

                if (copy->capture && os->now_ns() < copy->added_ns + COPY_AFTER_NS)
                        os->sleep_ms(COPY_AFTER_NS / 1000000);
                if (finish(session, &wire, copy, &copy->failure) == NEBULA_OK)
                        copy->failure.status = NEBULA_OK; /* an earlier attempt may have failed */
                ending_done();
                if (copy->large) /* here, because it would delay save() */
                        cow_advise_huge(copy->large, copy->large_count);
                lock_take(&copies->copies_lock);
                hand_over_first(copies);
        }
        lock_give(&copies->copies_lock);
        client_wire_close(&wire);
        return NULL;
}

static void *release_copies(void *argument)
{
        struct nebula_session *session = argument;
        struct client_copies *copies = &session->copies;
        struct client_copy *copy;
        bool closes_session;

        lock_take(&copies->copies_lock);
        for (;;) {
                while (!copies->released && (copies->first || !copies->is_ending))
                        lock_wait(&copies->copies_lock, &copies->moved);
                copy = copies->released;
                if (!copy)
                        break;
                lock_give(&copies->copies_lock);
                if (copy->release)
                        copy->release(copy->argument, copy->failure.status == NEBULA_OK ? NULL : &copy->failure);
                lock_take(&copies->copies_lock);
                copies->released = copy->next;
                copies->count--;
                pthread_cond_broadcast(&copies->moved);
                nebula_checkpoint_free(copy->checkpoint);
                free(copy->large);
                free(copy);
        }
        closes_session = copies->closes_session;
        if (closes_session)
                copies->has_releaser = false;
        lock_give(&copies->copies_lock);
        if (closes_session) {
                pthread_detach(pthread_self());
                nebula_session_close(session);
        }
        return NULL;
}

/* Mostly true inside a `release`: a wait for all copies would wait for itself. The caller holds copies_lock. */
static bool is_own_thread(const struct client_copies *copies)
{
        return (copies->has_maker && pthread_equal(copies->maker, pthread_self())) ||
               (copies->has_releaser && pthread_equal(copies->releaser, pthread_self()));
}

bool copies_are_on_this_thread(struct nebula_session *session)
{
        bool is_own;

        lock_take(&session->copies.copies_lock);
        is_own = is_own_thread(&session->copies);
        lock_give(&session->copies.copies_lock);
        return is_own;
}

enum nebula_status copies_ready(struct nebula_session *session)
{
        struct client_copies *copies = &session->copies;
        bool is_ready;

        lock_take(&copies->copies_lock);
        if (!copies->has_releaser)
                copies->has_releaser = os_thread_start_for_program(&copies->releaser, release_copies, session) == 0;
        if (copies->has_releaser && !copies->has_maker)
                copies->has_maker = os_thread_start_for_program(&copies->maker, make_copies, session) == 0;
        is_ready = copies->has_maker && copies->count < CLIENT_COPY_MAX;
        lock_give(&copies->copies_lock);
        return is_ready ? NEBULA_OK : NEBULA_UNAVAILABLE;
}

void copies_add(struct nebula_session *session, struct client_copy *copy)
{
        struct client_copies *copies = &session->copies;
        struct client_copy **link = &copies->first;

        atomic_fetch_add(&copy->checkpoint->user_count, 1);
        copy->added_ns = os->now_ns();
        ending_begin();
        lock_take(&copies->copies_lock);
        while (*link)
                link = &(*link)->next;
        *link = copy;
        copies->count++;
        lock_give(&copies->copies_lock);
        pthread_cond_broadcast(&copies->moved); /* after unlocking, so that the waking thread need not wait for the lock */
}

/* The caller holds copies_lock. */
static bool are_under_way(const struct client_copies *copies, const struct nebula_checkpoint *checkpoint)
{
        const struct client_copy *copy = copies->first;

        while (copy && (copy->checkpoint != checkpoint || copy->is_reported))
                copy = copy->next;
        return copy != NULL;
}

bool copies_are_under_way(struct nebula_session *session, const struct nebula_checkpoint *checkpoint)
{
        bool is_under_way;

        lock_take(&session->copies.copies_lock);
        is_under_way = are_under_way(&session->copies, checkpoint);
        lock_give(&session->copies.copies_lock);
        return is_under_way;
}

bool copies_commit(struct nebula_session *session, struct nebula_checkpoint *checkpoint)
{
        bool is_under_way;

        lock_take(&session->copies.copies_lock);
        is_under_way = are_under_way(&session->copies, checkpoint);
        checkpoint->commit_is_due = is_under_way;
        lock_give(&session->copies.copies_lock);
        return is_under_way;
}

/* False on the copying thread itself. The caller holds copies_lock. */
static bool commit_is_under_way(const struct client_copies *copies, const char *tag)
{
        const struct client_copy *copy = copies->first;

        while (copy && !((copy->checkpoint->commit_is_due || copy->brings_commit) && strcmp(copy->checkpoint->tag, tag) == 0))
                copy = copy->next;
        return copy && !is_own_thread(copies);
}

void copies_lock_after_commit(struct nebula_session *session, const char *tag)
{
        struct client_copies *copies = &session->copies;

        lock_take(&session->request_lock);
        lock_take(&copies->copies_lock);
        while (commit_is_under_way(copies, tag)) {
                lock_give(&session->request_lock);
                lock_wait(&copies->copies_lock, &copies->moved);
                lock_give(&copies->copies_lock);
                lock_take(&session->request_lock);
                lock_take(&copies->copies_lock);
        }
        lock_give(&copies->copies_lock);
}

void copies_begin(struct nebula_session *session, const char *tag, const char *name)
{
        copies_lock_after_commit(session, tag);
        lock_take(&session->copies.copies_lock);
        for (struct client_copy *copy = session->copies.first; copy; copy = copy->next)
                copy->is_replaced |= is_of_file(copy, tag, name);
        lock_give(&session->copies.copies_lock);
}

enum nebula_status copies_await(struct nebula_session *session, uint64_t image_id, int64_t timeout_ms,
                                 struct nebula_error *error)
{
        struct client_copies *copies = &session->copies;
        int64_t end_ns = 0;
        enum nebula_status status = NEBULA_OK;

        if (client_patience_ms(timeout_ms) < 0)
                timeout_ms = -1; /* so large that it means no limit */
        if (timeout_ms >= 0)
                end_ns = os->now_ns() + timeout_ms * 1000000;
        lock_take(&copies->copies_lock);
        for (;;) {
                int64_t left_ms = timeout_ms < 0 ? -1 : (end_ns - os->now_ns() + 999999) / 1000000;
                const struct client_copy *copy = copies->first;

                while (copy && image_id && copy->image_id != image_id)
                        copy = copy->next;
                if (!copy && !image_id) /* the release thread waits only for the copies after the first */
                        copy = is_own_thread(copies) && copies->released ? copies->released->next : copies->released;
                if (!copy)
                        break;
                if (is_own_thread(copies)) {
                        status = error_set(error, NEBULA_BUSY, 0, "\"%.100s\" of checkpoint \"%.100s\" can be copied only after "
                                                                  "this `release` has returned", copy->name, copy->checkpoint->tag);
                        break;
                }
                if (timeout_ms >= 0 && left_ms <= 0) {
                        status = error_set(error, NEBULA_TIMEOUT, 0, "\"%.100s\" of checkpoint \"%.100s\" is still being copied",
                                           copy->name, copy->checkpoint->tag);
                        break;
                }
                lock_wait_for(&copies->copies_lock, &copies->moved, left_ms);
        }
        lock_give(&copies->copies_lock);
        return status;
}

enum nebula_status copies_make_way(struct nebula_session *session, const char *tag, const char *name, uint64_t image_id, struct client_way *ret_way,
                                   struct nebula_error *error)
{
        struct client_copies *copies = &session->copies;
        enum nebula_status status = copies_await(session, image_id, -1, error);

        if (status != NEBULA_OK)
                return status;
        *ret_way = (struct client_way){ 0 };
        lock_take(&copies->copies_lock);
        for (const struct client_copy *copy = copies->first; copy && ret_way->image_count < CLIENT_COPY_MAX; copy = copy->next) {
                ret_way->images[ret_way->image_count++] = copy->image_id;
                ret_way->has_file |= is_of_file(copy, tag, name);
        }
        lock_give(&copies->copies_lock);
        return NEBULA_OK;
}

bool copies_close_later(struct nebula_session *session)
{
        struct client_copies *copies = &session->copies;
        bool is_own;

        lock_take(&copies->copies_lock);
        is_own = is_own_thread(copies);
        if (is_own)
                copies->is_ending = copies->closes_session = true;
        pthread_cond_broadcast(&copies->moved);
        lock_give(&copies->copies_lock);
        return is_own;
}

void copies_done(struct nebula_session *session)
{
        struct client_copies *copies = &session->copies;
        bool has_maker, has_releaser;

        lock_take(&copies->copies_lock);
        copies->is_ending = true;
        has_maker = copies->has_maker;
        has_releaser = copies->has_releaser;
        pthread_cond_broadcast(&copies->moved);
        lock_give(&copies->copies_lock);
        if (has_maker)
                pthread_join(copies->maker, NULL);
        if (has_releaser)
                pthread_join(copies->releaser, NULL);
        lock_done(&copies->copies_lock);
}
