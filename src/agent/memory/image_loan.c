#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "agent/catalogue/memory_policy.h"
#include "agent/commit/commit.h"
#include "agent/commit/commit_rule.h"
#include "agent/log.h"
#include "agent/memory/image_loan.h"
#include "agent/memory/memory.h"
#include "agent/memory/page_maker.h"
#include "agent/memory/spill.h"
#include "agent/persist/progress.h"
#include "base/error.h"
#include "os/os.h"

#define LOOK_AGAIN_MS 500

static uint64_t mib(uint64_t bytes)
{
        return (bytes >> 20) + (bytes % (1u << 20) != 0);
}

static enum nebula_status too_large(const struct catalogue *catalogue, const struct ipc_image *request, struct nebula_error *error)
{
        return error_set(error, NEBULA_NO_MEMORY, 0,
                         "file \"%.150s\" needs %" PRIu64 " MiB, and the memory tier's budget is %" PRIu64
                         " MiB: raise NEBULA_MEMORY_BUFFER_SIZE", request->name, mib(memory_capacity(request->size)),
                         catalogue->memory->budget >> 20);
}

static enum nebula_status nothing_to_free(const struct catalogue *catalogue, const struct ipc_image *request,
                                          const struct nebula_error *storage, struct nebula_error *error)
{
        char lack[200];

        memory_lacks(catalogue->memory, lack, sizeof lack);
        if (lack[0])
                return error_set(error, NEBULA_NO_MEMORY, 0, "no image for file \"%.100s\": %s%s%.200s", request->name, lack,
                                 storage ? "; storage fails: " : "", storage ? storage->message : "");
        return error_set(error, NEBULA_NO_MEMORY, 0,
                         "file \"%.100s\" needs %" PRIu64 " MiB, and %" PRIu64 " of the memory tier's %" PRIu64
                         " MiB are in use by versions that must stay, %" PRIu64 " MiB are free on this machine%s%.200s", request->name,
                         mib(memory_capacity(request->size)), catalogue->memory->used >> 20, catalogue->memory->budget >> 20,
                         os->memory_free() >> 20, storage ? "; storage fails: " : "", storage ? storage->message : "");
}

/* Whether a save has waited long enough for memory. If storage hangs, only the first save waits; later ones fail at
 * once until a version has become durable there again. */
static bool waited_enough(const struct catalogue *catalogue, const struct job *job, int64_t since_ns, bool room_follows)
{
        struct lane *lane = job->lane;

        if (os->now_ns() - since_ns <= (int64_t)catalogue->memory_wait_s * SECOND_NS)
                return lane->waited_in_vain && !room_follows;
        if (!lane->waited_in_vain)
                log_event(LOG_LEVEL_WARN, "waited for memory for %" PRIu64 " s in vain: further saves that find none fail at once "
                          "until a version has become durable in %s", catalogue->memory_wait_s,
                          job->persist_path[0] ? job->persist_path : "any storage");
        return lane->waited_in_vain = true;
}

/* Whether some version is being written to storage and can leave memory afterwards. Asks the workers to write one. `target` is the version
 * that waits. */
static bool relief_in_sight(struct catalogue *catalogue, const struct version *target, const struct nebula_error **ret_storage)
{
        bool hope = false;

        *ret_storage = NULL;
        for (struct job *job = catalogue->jobs; job; job = job->next)
                for (struct version *version = job->versions; version; version = version->next) {
                        /* Its background copies will complete it; it can leave memory then. */
                        if (version != target && version_open(version) && version->loans && commit_parts_end(version))
                                hope = true;
                        if (!version->in_memory || !lifecycle_complete(version->life.state) || version->stored ||
                            !job->persist_path[0])
                                continue;
                        if (version_progress(version).attempt)
                                *ret_storage = job_progress(job).error;
                        else {
                                version->wanted = true;
                                hope = true;
                        }
                }
        return hope;
}

struct waiting {
        int64_t since_ns;
        bool said, no_spill;
};

/* on_full="stream": makes an image outside the memory tier. Drops the lock meanwhile. NULL: wait for memory instead. */
static struct image *stream(struct catalogue *catalogue, struct session *session, struct version *version, uint64_t capacity,
                            struct waiting *waiting)
{
        struct nebula_error error = { 0 };
        struct image *image = NULL;
        bool may_make;

        if (session->job->settings.on_full != NEBULA_ON_FULL_STREAM || waiting->no_spill)
                return NULL;
        may_make = !session->job->known.count;
        catalogue_create_as(session->job);
        catalogue_unlock(catalogue);
        if (spill_create(session->job->persist_path, may_make, capacity, &image, &error))
                log_event(LOG_LEVEL_WARN, "%s cannot be streamed to a local disk, so it waits for memory: %s", version->tag, error.message);
        catalogue_lock(catalogue);
        waiting->no_spill = !image;
        if (image) {
                image->job = session->job;
                memory_add(catalogue->memory, image);
                version->wanted = true; /* not only after the interval: until it is durable it does not survive the agent */
        }
        return image;
}

/* Makes room of `capacity` or waits for it. Drops the lock. NEBULA_OK means: try again. */
static enum nebula_status find_room(struct catalogue *catalogue, struct session *session, struct version *version,
                                    const struct ipc_image *request, bool (*given_up)(void *), void *argument,
                                    struct waiting *waiting, struct nebula_error *error)
{
        const struct nebula_error too_slow = { .message = "no version has become durable for too long (NEBULA_MEMORY_WAIT)" };
        const struct nebula_error *storage = NULL;
        bool room_follows = memory_follows(catalogue->memory);

        if (page_maker_discard(catalogue) || policy_reclaim(catalogue))
                return NEBULA_OK;
        if (!room_follows && session->job->settings.on_full == NEBULA_ON_FULL_SKIP) {
                nothing_to_free(catalogue, request, NULL, error);
                version_fail(catalogue, version, NEBULA_NO_MEMORY, "skipped, because the memory tier is full and on_full is \"skip\"");
                return NEBULA_NO_MEMORY;
        }
        if (!room_follows && !relief_in_sight(catalogue, version, &storage))
                return nothing_to_free(catalogue, request, storage, error);
        if (waited_enough(catalogue, session->job, waiting->since_ns, room_follows))
                return nothing_to_free(catalogue, request, storage ? storage : &too_slow, error);
        if (!waiting->said && !room_follows)
                log_event(LOG_LEVEL_INFO, "%s waits for memory: %" PRIu64 " of %" PRIu64 " MiB are in use", version->tag,
                         catalogue->memory->used >> 20, catalogue->memory->budget >> 20);
        waiting->said = waiting->said || !room_follows;
        catalogue_signal_work(catalogue); /* the workers must see the new request */
        catalogue_wait(catalogue, &catalogue->moved, LOOK_AGAIN_MS);
        if (catalogue->stopping)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the agent is ending");
        if (given_up(argument))
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the client is gone");
        return NEBULA_OK;
}

static enum nebula_status meanwhile(const struct version *version, struct nebula_error *error)
{
        return version->life.state == NEBULA_STATE_FAILED ?
                       error_set(error, NEBULA_FAILED, 0, "checkpoint \"%.150s\" failed while a file of it waited for memory: %.250s",
                                 version->tag, version->error.message) :
                       NEBULA_OK;
}

/* Gets an image for a file of an open version, and may wait for memory. `*ret_image` stays NULL if the version was committed meanwhile. */
static enum nebula_status new_image(struct catalogue *catalogue, struct session *session, struct version *version,
                                    const struct ipc_image *request, bool (*given_up)(void *), void *argument,
                                    struct waiting *waiting, struct image **ret_image, struct nebula_error *error)
{
        uint64_t capacity = memory_capacity(request->size);
        struct nebula_error full = { 0 };
        enum nebula_status status;
        bool named;

        if (capacity > catalogue->memory->budget) {
                *ret_image = stream(catalogue, session, version, capacity, waiting);
                return *ret_image ? NEBULA_OK : too_large(catalogue, request, error);
        }
        for (;;) {
                struct image *image = memory_take(catalogue->memory, request->size, session->nonce, session->job);

                if (image) { /* an image became free while this thread waited */
                        *ret_image = image;
                        return NEBULA_OK;
                }
                if (memory_reserve(catalogue->memory, capacity, &named)) {
                        bool is_bare = memory_may_lack_pages(catalogue->memory, capacity, named);

                        catalogue_unlock(catalogue);
                        status = (is_bare ? memory_create_bare : memory_create)(catalogue->memory, capacity, named, &image, &full);
                        catalogue_lock(catalogue);
                        if (!status) {
                                image->job = session->job;
                                memory_add(catalogue->memory, image);
                                *ret_image = image;
                                return NEBULA_OK;
                        }
                        /* The machine has less memory than the budget allows; freeing images may help. */
                        memory_unreserve(catalogue->memory, capacity);
                        if (!page_maker_discard(catalogue) && !policy_reclaim(catalogue)) {
                                if (error)
                                        *error = full;
                                return status;
                        }
                        continue;
                }
                if (page_maker_discard(catalogue) || policy_reclaim(catalogue))
                        continue;
                image = catalogue->memory->room_pending ? NULL : stream(catalogue, session, version, capacity, waiting);
                if (image) {
                        *ret_image = image;
                        return NEBULA_OK;
                }
                status = find_room(catalogue, session, version, request, given_up, argument, waiting, error);
                if (status)
                        return status;
                if (!version_open(version))
                        return meanwhile(version, error);
        }
}

/* The version failed meanwhile. Its image becomes a free image of the job. An image on a disk is freed. */
static void refuse(struct catalogue *catalogue, struct image *image)
{
        if (!image)
                return;
        memory_hold(image);
        memory_drop(catalogue->memory, image);
}

enum nebula_status image_loan_open(struct catalogue *catalogue, struct session *session, const struct ipc_image *request,
                                   bool (*given_up)(void *argument), void *argument, struct version **ret_version,
                                   struct image_loan **ret_loan, struct nebula_error *error)
{
        struct version *version;
        struct job *job = session->job;
        struct image *image = NULL;
        struct waiting waiting = { .since_ns = os->now_ns() };
        char encoded[256];
        enum nebula_status status = name_encode(request->name, encoded, error);

        if (status)
                return status;
        version = request->version_id ? catalogue_version(catalogue, request->version_id) :
                                        commit_begin(catalogue, session, request->tag, request->file_count, error);
        if (!version && !request->version_id)
                return error->status;
        if (!version || version->job != job)
                return error_set(error, NEBULA_NOT_FOUND, 0, "the agent does not know this checkpoint: begin it again");
        *ret_version = version;
        if (request->format > IPC_FORMAT_RAW || request->size > INT64_MAX)
                return error_set(error, NEBULA_INVALID, 0, "file \"%s\" has an impossible size or format", request->name);
        *ret_loan = NULL;
        do { /* again if the version was committed while the file waited: the file belongs to the next writing then */
                version = commit_target(catalogue, session, version, error);
                if (!version) {
                        status = error->status;
                        break;
                }
                *ret_version = version;
                policy_make_way(catalogue, version);
                if (!image)
                        image = memory_take(catalogue->memory, request->size, session->nonce, job);
                if (image)
                        break;
                if (!given_up)
                        return NEBULA_OK;
                version->pins++;
                catalogue->memory->wanting++;
                status = new_image(catalogue, session, version, request, given_up, argument, &waiting, &image, error);
                catalogue->memory->wanting--;
                version->pins--;
                if (!status)
                        status = meanwhile(version, error);
        } while (!status && !version_open(version));
        if (!status)
                *ret_loan = commit_loan(catalogue, session, version, request, image, error);
        if (*ret_loan)
                return NEBULA_OK;
        refuse(catalogue, image);
        return status ? status : NEBULA_NO_MEMORY;
}

void image_loan_record(struct catalogue *catalogue, uint64_t version_id)
{
        struct version *version;

        catalogue_lock(catalogue);
        version = catalogue_version(catalogue, version_id);
        if (version && version_open(version))
                version_mark(catalogue, version);
        catalogue_unlock(catalogue);
}
