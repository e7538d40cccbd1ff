/*
 * Saves a file. The client lays out everything that is known beforehand; then the agent lends an image, and the
 * values are captured into it. A plan is a list of parts; one function decides how to capture them.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"
#include "image/image.h"
#include "os/ending.h"
#include "os/os.h"
#include "sum/sum.h"

#define PREPARED_NS 20000000 /* after this time the mappings may have changed */

/* One file to be saved. */
struct plan {
        struct nebula_checkpoint *checkpoint;
        char name[IPC_NAME_MAX];
        enum ipc_format format;
        uint64_t size;
        struct zip_layout layout; /* only of a zip */
        const void *pickle;
        struct capture_part *parts;
        size_t part_count;
        const uint64_t *offsets;        /* the offset of each range in the image */
        size_t cow_count;               /* the first cow_count parts may be copied after save returned */
        const struct nebula_keep *keep; /* NULL: the caller may free the memory when save returns */
        int64_t begun_ns;               /* when save was called */
        int64_t prepared_ns;            /* when `capture` was prepared; 0: not yet */
        struct cow_capture *capture;    /* the parts to protect; NULL: everything is copied at once */
        bool ask_huge;
};

/* An image loan, mapped. */
struct lent {
        uint64_t image_id, capacity_bytes;
        void *data;
        bool lacks_pages;
        bool follows; /* an earlier copy of the file is in progress, which this save must not overtake */
};

static void plan_done(struct plan *plan)
{
        if (plan->format == IPC_FORMAT_ZIP)
                zip_layout_done(&plan->layout);
        cow_free(plan->capture);
        free(plan->parts);
}

static enum nebula_status plan_init(struct plan *plan, struct nebula_checkpoint *checkpoint, const char *name,
                                    enum ipc_format format, size_t count, struct nebula_error *error)
{
        enum nebula_status status;
        char encoded[256];

        *plan = (struct plan){ .checkpoint = checkpoint, .format = format, .begun_ns = os->now_ns() };
        if (!checkpoint || !name)
                return error_set(error, NEBULA_INVALID, 0, "a save needs a checkpoint and a file's name");
        status = name_encode(name, encoded, error);
        if (status == NEBULA_OK)
                status = client_text(plan->name, sizeof plan->name, name, "the file's name", error);
        if (status != NEBULA_OK)
                return status;
        plan->parts = calloc(count ? count : 1, sizeof *plan->parts);
        if (!plan->parts)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of %zu ranges", count);
        return NEBULA_OK;
}

static enum nebula_status check_ranges(const struct plan *plan, const struct nebula_range *ranges, size_t count,
                                       struct nebula_error *error)
{
        bool may_lack = plan->keep && plan->keep->fill;

        if (count > 0 && !ranges)
                return error_set(error, NEBULA_INVALID, 0, "the count of ranges is %zu, but the pointer to them is NULL", count);
        for (size_t i = 0; i < count; i++) {
                if (ranges[i].size > 0 && !ranges[i].data && !may_lack)
                        return error_set(error, NEBULA_INVALID, 0, "range %zu has %llu bytes, but no address", i,
                                         (unsigned long long)ranges[i].size);
        }
        return NEBULA_OK;
}

static enum nebula_status plan_keep(struct plan *plan, const struct nebula_keep *keep, struct nebula_error *error)
{
        if (keep && !keep->release)
                return error_set(error, NEBULA_INVALID, 0, "nebula_keep needs the function `release`");
        if (keep && !keep->fill != !keep->filled)
                return error_set(error, NEBULA_INVALID, 0, "nebula_keep needs both `fill` and `filled`, or neither");
        plan->keep = keep;
        return NEBULA_OK;
}

static void add_parts_that(struct plan *plan, const struct nebula_range *ranges, const uint64_t *offsets, size_t count,
                           bool is_unprotectable)
{
        const unsigned char *flags = plan->keep ? plan->keep->is_unprotectable : NULL;

        for (size_t i = 0; i < count; i++)
                if (ranges[i].size > 0 && ranges[i].data && (flags && flags[i]) == is_unprotectable)
                        plan->parts[plan->part_count++] = (struct capture_part){ ranges[i].data, ranges[i].size, offsets[i] };
}

static void add_parts(struct plan *plan, const struct nebula_range *ranges, const uint64_t *offsets, size_t count)
{
        add_parts_that(plan, ranges, offsets, count, false);
        plan->cow_count = plan->part_count;
        add_parts_that(plan, ranges, offsets, count, true);
        plan->offsets = offsets;
}

enum client_capture session_capture_setting(struct nebula_session *session)
{
        enum client_capture setting;

        lock_take(&session->settings_lock);
        setting = session->settings.capture;
        lock_give(&session->settings_lock);
        return setting;
}

/* Whether copy-on-write is possible: the caller keeps its memory, enough of it can be protected, and the copying threads run. */
static bool can_use_cow(const struct plan *plan, enum client_capture setting)
{
        uint64_t size = 0;

        if (!plan->keep || setting == CLIENT_CAPTURE_COPY || !ending_may_linger())
                return false;
        for (size_t i = 0; i < plan->cow_count; i++)
                size += plan->parts[i].size >= COW_PART_BYTES ? plan->parts[i].size : 0;
        return size >= (setting == CLIENT_CAPTURE_COW ? COW_PART_BYTES : CLIENT_COW_BYTES) && cow_available(NULL) == NEBULA_OK &&
               copies_ready(plan->checkpoint->session) == NEBULA_OK;
}

/* Chooses how to fix the values: copy-on-write if possible and either demanded or cheaper. */
static void prepare_capture(struct plan *plan)
{
        enum client_capture setting = session_capture_setting(plan->checkpoint->session);

        cow_free(plan->capture);
        plan->capture = NULL;
        plan->ask_huge = false;
        if (!can_use_cow(plan, setting))
                return;
        plan->ask_huge = setting == CLIENT_CAPTURE_AUTO && !cow_pays(plan->parts, plan->cow_count);
        if (!plan->ask_huge)
                cow_prepare(plan->parts, plan->cow_count, &plan->capture, NULL);
}

/* The work that needs no image, done while the agent finds one. `argument` is the plan. */
static void prepare(void *argument)
{
        struct plan *plan = argument;

        prepare_capture(plan);
        if ((plan->ask_huge || (plan->capture && cow_has_files(plan->capture))) && cow_own(plan->parts, plan->cow_count))
                prepare_capture(plan);
        plan->prepared_ns = os->now_ns();
}

static enum nebula_status request_image(struct plan *plan, struct lent *lent, struct nebula_error *error)
{
        struct nebula_session *session = plan->checkpoint->session;
        struct ipc_image request = { .size = plan->size, .format = plan->format };
        struct client_call call;
        uint64_t live_ids[IPC_LIVE_MAX + CLIENT_COPY_MAX + 2];
        const struct client_copy *unsent;
        struct client_way way;
        const struct ipc_granted *granted;
        enum nebula_status status;
        size_t live_count;
        int fd;

        checkpoint_image_call(plan->checkpoint, plan->name, &request, &call);
        call.meanwhile = prepare;
        call.argument = plan;
        status = session_call(session, &call, error);
        checkpoint_know_image(plan->checkpoint, &session->wire);
        if (status != NEBULA_OK)
                return status;
        granted = session->wire.frame.payload;
        if (granted->capacity_bytes < plan->size || granted->live_count > IPC_LIVE_MAX)
                return session_break(session, error, "the agent lent an image of %llu bytes for a file of %llu",
                                     (unsigned long long)granted->capacity_bytes, (unsigned long long)plan->size);
        lent->image_id = granted->image_id;
        lent->capacity_bytes = granted->capacity_bytes;
        lent->lacks_pages = granted->lacks_pages;
        status = session_make_pool(session, error);
        if (status != NEBULA_OK)
                return status;
        /* A new agent may give the same id again. A copy may still write to the old mapping, so wait for it before
         * the old mapping is replaced. */
        status = copies_make_way(session, plan->checkpoint->tag, plan->name, granted->image_id, &way, error);
        if (status != NEBULA_OK)
                return status;
        lent->follows = way.has_file;
        memcpy(live_ids, granted->live_ids, granted->live_count * sizeof *live_ids);
        memcpy(live_ids + granted->live_count, way.images, way.image_count * sizeof *live_ids);
        live_count = granted->live_count + way.image_count;
        live_ids[live_count++] = spares_image(session);
        unsent = atomic_load(&session->unsent);
        /* A copy is unsent because no agent could be reached; this agent may not know its image, which is then the only
         * source of the file. */
        if (unsent)
                live_ids[live_count++] = unsent->image_id;
        capture_pool_keep(session->pool, live_ids, live_count);
        spares_await(session, granted->image_id);
        fd = session->wire.frame.fd;
        session->wire.frame.fd = -1;
        return capture_pool_map(session->pool, granted->image_id, fd, granted->capacity_bytes, &lent->data, error);
}

/* Captures by a copy, which always works. */
static void capture_now(const struct plan *plan, struct capture_pool *pool, const struct lent *lent, struct ipc_captured *captured)
{
        struct image_sums sums = image_sums_in(lent->data, plan->size, lent->capacity_bytes);
        struct capture_job job = {
                .image = lent->data, .parts = plan->parts, .count = plan->part_count,
                .is_fresh = capture_pool_take_fresh(pool, lent->data),
                .sums = sums.list && sum_copies_both_unnoticed() ? &sums : NULL, /* training waits for this copy */
        };

        capture_copy_begin(&job);
        if (plan->format == IPC_FORMAT_ZIP)
                zip_layout_write(&plan->layout, plan->pickle, lent->data);
        captured->cpu_ns = capture_copy_end(&job);
        image_sums_sort(&sums, 0);
        captured->sum_count = sums.count;
}

/* Tells the agent that the image will never be filled, so that it does not wait. */
static void abandon(struct nebula_session *session, uint64_t image_id, const char *reason)
{
        struct ipc_abandon request = { .image_id = image_id };
        struct client_call call = {
                .type = IPC_ABANDON, .request = &request, .size = sizeof request, .timeout_ms = CLIENT_ANSWER_MS,
        };

        memcpy(request.reason, reason, strnlen(reason, sizeof request.reason - 1));
        session_call(session, &call, NULL); /* the first failure is the one to report */
}

/* Fixes the values by protection and returns the capture, which the caller frees. Returns the processor time so far, in ns. */
static int64_t capture_cow(struct plan *plan, struct capture_pool *pool, const struct lent *lent, struct cow_capture **ret_capture)
{
        struct image_sums sums = image_sums_in(lent->data, plan->size, lent->capacity_bytes);
        int64_t begun_ns = os->thread_cpu_ns();
        void *image = lent->data;

        *ret_capture = plan->capture;
        plan->capture = NULL;
        cow_sum(*ret_capture, &sums);
        cow_begin(*ret_capture, image, plan->parts, plan->cow_count);
        capture_pool_take_fresh(pool, image);
        if (plan->format == IPC_FORMAT_ZIP)
                zip_layout_write(&plan->layout, plan->pickle, image);
        capture_copy(image, plan->parts + plan->cow_count, plan->part_count - plan->cow_count);
        return os->thread_cpu_ns() - begun_ns;
}

/* NULL: an allocation failed. */
static struct client_copy *new_copy(const struct plan *plan, const struct lent *lent, const struct ipc_captured *captured)
{
        struct client_copy *copy = calloc(1, sizeof *copy);

        if (!copy)
                return NULL;
        *copy = (struct client_copy){
                .checkpoint = plan->checkpoint, .image = lent->data, .image_id = lent->image_id, .size = plan->size,
                .agent_nonce = plan->checkpoint->session->wire.agent_nonce, .format = plan->format, .captured = *captured,
        };
        memcpy(copy->name, plan->name, sizeof copy->name);
        return copy;
}

/* Takes `capture` over. When the file is complete, the client reports that to the agent, and the caller's memory is released.
 * `is_filling`: call `filled` then. */
static enum nebula_status copy_later(const struct plan *plan, const struct lent *lent, struct cow_capture *capture,
                                     bool is_filling, const struct ipc_captured *captured, struct nebula_error *error)
{
        struct nebula_session *session = plan->checkpoint->session;
        struct client_copy *copy = new_copy(plan, lent, captured);

        if (!copy) {
                cow_free(capture);
                if (is_filling)
                        plan->keep->filled(plan->keep->argument, NULL);
                abandon(session, lent->image_id, "no memory to follow a copy");
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to follow the copy of \"%.80s\"", plan->name);
        }
        copy->capture = capture;
        if (plan->keep) {
                copy->release = plan->keep->release;
                copy->filled = is_filling ? plan->keep->filled : NULL;
                copy->argument = plan->keep->argument;
        }
        copy->large = capture ? malloc(plan->cow_count * sizeof *copy->large) : NULL;
        for (size_t i = 0; copy->large && i < plan->cow_count; i++)
                if (plan->parts[i].size >= COW_PART_BYTES)
                        copy->large[copy->large_count++] = plan->parts[i];
        copies_add(session, copy);
        return NEBULA_OK;
}

/* Every byte is in the image: reports that to the agent. For NEBULA_FILES_ALL_RANKS this can wait for the commit, because
 * without the commit the version is never complete. */
static enum nebula_status report_captured(const struct plan *plan, const struct lent *lent, struct ipc_captured *captured,
                                        struct nebula_error *error)
{
        struct nebula_checkpoint *checkpoint = plan->checkpoint;
        struct client_call call = {
                .type = IPC_CAPTURED, .request = captured, .size = sizeof *captured, .timeout_ms = CLIENT_ANSWER_MS,
        };
        bool commit_follows = checkpoint->file_count == NEBULA_FILES_ALL_RANKS &&
                              !copies_are_under_way(checkpoint->session, checkpoint) &&
                              !atomic_load(&checkpoint->session->unsent); /* else an earlier one could not be reported */
        struct client_copy *copy = commit_follows ? new_copy(plan, lent, captured) : NULL;
        enum nebula_status status;

        if (copy) {
                session_report_later(checkpoint->session, copy);
                return NEBULA_OK;
        }
        status = session_call(checkpoint->session, &call, error);
        if (status == NEBULA_OK)
                checkpoint_saved(checkpoint, false);
        return status;
}

static enum nebula_status no_pages(const struct plan *plan, struct nebula_error *error)
{
        return error_set(error, NEBULA_NO_MEMORY, 0, "this machine has no memory left for the image of \"%.80s\"", plan->name);
}

/* Makes the pages of a new image that no background copy makes. */
static enum nebula_status make_pages(struct plan *plan, struct capture_pool *pool, const struct lent *lent, struct nebula_error *error)
{
        bool is_made;

        if (!lent->lacks_pages || (plan->keep && plan->keep->fill)) /* begin_filling has made them */
                return NEBULA_OK;
        is_made = plan->capture ? cow_make(plan->capture, lent->data, lent->capacity_bytes) : capture_populate(lent->data, lent->capacity_bytes);
        if (!plan->capture)
                capture_pool_take_fresh(pool, lent->data);
        return is_made ? NEBULA_OK : no_pages(plan, error);
}

/* Starts the caller's own writes to the image, or waits for them. If they fail, saving again would not help. First
 * makes the image's pages on several threads: a device registers memory page by page on one thread, ten times faster
 * if the pages are there. */
static enum nebula_status begin_filling(const struct plan *plan, struct capture_pool *pool, const struct lent *lent,
                                        struct nebula_error *error)
{
        const struct nebula_keep *keep = plan->keep;

        if ((capture_pool_take_fresh(pool, lent->data) || lent->lacks_pages) && !capture_populate(lent->data, lent->capacity_bytes) && lent->lacks_pages)
                return no_pages(plan, error);
        error_set(error, NEBULA_FAILED, 0, "the caller could not fill the image of \"%.80s\"", plan->name);
        return keep->fill(keep->argument, lent->data, lent->capacity_bytes, plan->offsets, error) == NEBULA_OK ?
               NEBULA_OK : NEBULA_FAILED;
}

static enum nebula_status end_filling(const struct plan *plan, struct nebula_error *error)
{
        error_set(error, NEBULA_FAILED, 0, "the caller could not fill the image of \"%.80s\"", plan->name);
        return plan->keep->filled(plan->keep->argument, error) == NEBULA_OK ? NEBULA_OK : NEBULA_FAILED;
}

/* One attempt to save. The caller holds request_lock. NEBULA_NOT_FOUND: the agent lost the image, and the values are
 * still in the caller's memory. *ret_releases: the caller's memory is released now; otherwise copies.c does that
 * later. */
static enum nebula_status save_once(struct plan *plan, bool *ret_releases, struct nebula_error *error)
{
        struct nebula_session *session = plan->checkpoint->session;
        struct ipc_captured captured = { 0 };
        struct nebula_error why;
        struct lent lent = { 0 };
        struct cow_capture *capture = NULL;
        int64_t started_ns = 0;
        enum nebula_status status;
        bool is_filling = plan->keep && plan->keep->fill, is_later;

        status = request_image(plan, &lent, &why);
        if (status == NEBULA_OK)
                status = checkpoint_check(plan->checkpoint, &why);
        if (status == NEBULA_OK && is_filling)
                status = begin_filling(plan, session->pool, &lent, &why); /* first, because a device copies at the same time */
        if (status != NEBULA_OK)
                goto give_up;
        if (os->now_ns() - plan->prepared_ns > PREPARED_NS)
                prepare(plan);
        if (plan->ask_huge && !plan->capture && capture_pool_is_fresh(session->pool, lent.data)) /* a copy would wait for the pages of the image */
                cow_prepare(plan->parts, plan->cow_count, &plan->capture, NULL);
        status = make_pages(plan, session->pool, &lent, &why);
        if (status != NEBULA_OK)
                goto give_up;
        if (plan->capture) {
                started_ns = os->now_ns();
                captured.cpu_ns = capture_cow(plan, session->pool, &lent, &capture);
        } else {
                capture_now(plan, session->pool, &lent, &captured);
        }
        if (is_filling && !(plan->keep->may_overlap && ending_may_linger() && copies_ready(session) == NEBULA_OK)) {
                is_filling = false;
                status = end_filling(plan, &why);
                if (status != NEBULA_OK)
                        goto give_up;
        }
        captured.image_id = lent.image_id;
        captured.blocked_ns = os->now_ns() - plan->begun_ns;
        captured.copy_ns = capture ? started_ns - plan->begun_ns : captured.blocked_ns;
        is_later = capture || is_filling || (lent.follows && copies_ready(session) == NEBULA_OK);
        status = is_later ? copy_later(plan, &lent, capture, is_filling, &captured, error) : report_captured(plan, &lent, &captured, error);
        if (plan->ask_huge) /* so that later saves are cheaper */
                cow_advise_huge(plan->parts, plan->cow_count);
        if (is_later)
                return status;
        *ret_releases = status == NEBULA_OK && plan->keep;
        return status;

give_up:
        cow_free(capture);
        if (lent.image_id && !session->is_broken)
                abandon(session, lent.image_id, why.message);
        if (error)
                *error = why;
        return status;
}

static enum nebula_status save(struct plan *plan, struct nebula_error *error)
{
        struct nebula_session *session = plan->checkpoint->session;
        enum nebula_status status;
        bool releases = false, is_elsewhere;

        copies_begin(session, plan->checkpoint->tag, plan->name);
        atomic_store(&plan->checkpoint->is_given_up, false);
        /* A save to a checkpoint that was found begins another writing. So does one to a checkpoint that a different agent has now. */
        is_elsewhere = atomic_exchange(&plan->checkpoint->done_writing, 0) &&
                       atomic_load(&plan->checkpoint->agent_nonce) != atomic_load(&plan->checkpoint->saved_agent_nonce);
        if (atomic_exchange(&plan->checkpoint->is_found, false) || is_elsewhere)
                checkpoint_know(plan->checkpoint, 0, 0);
        status = save_once(plan, &releases, error);
        if (status == NEBULA_NOT_FOUND) {
                checkpoint_know(plan->checkpoint, 0, 0); /* the version id may be invalid too: find the version again by its tag */
                status = save_once(plan, &releases, error);
        }
        lock_give(&session->request_lock);
        if (releases) /* last, because it may free the checkpoint and close the session */
                plan->keep->release(plan->keep->argument, NULL);
        return status;
}

static enum nebula_status plan_pickle(struct plan *plan, const void *pickle, size_t pickle_size,
                                      const struct nebula_range *storages, size_t count, struct nebula_error *error)
{
        uint64_t *sizes = malloc((count ? count : 1) * sizeof *sizes);
        enum nebula_status status;

        if (!sizes)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of %zu sizes", count);
        for (size_t i = 0; i < count; i++)
                sizes[i] = storages[i].size;
        status = zip_layout_init(&plan->layout, pickle_size, sizes, count, error);
        free(sizes);
        if (status != NEBULA_OK)
                return status;
        plan->pickle = pickle;
        plan->size = plan->layout.size;
        add_parts(plan, storages, plan->layout.storage_offsets, count);
        return NEBULA_OK;
}

enum nebula_status nebula_checkpoint_save_pickle(nebula_checkpoint *checkpoint, const char *name, const void *pickle,
                                                 size_t pickle_size, const struct nebula_range *storages, size_t count,
                                                 struct nebula_error *ret_error)
{
        return nebula_checkpoint_save_pickle_kept(checkpoint, name, pickle, pickle_size, storages, count, NULL, ret_error);
}

enum nebula_status nebula_checkpoint_save_pickle_kept(nebula_checkpoint *checkpoint, const char *name, const void *pickle,
                                                      size_t pickle_size, const struct nebula_range *storages, size_t count,
                                                      const struct nebula_keep *keep, struct nebula_error *ret_error)
{
        struct plan plan;
        enum nebula_status status;

        status = plan_init(&plan, checkpoint, name, IPC_FORMAT_ZIP, count, ret_error);
        if (status == NEBULA_OK)
                status = plan_keep(&plan, keep, ret_error);
        if (status == NEBULA_OK && (!pickle || pickle_size == 0))
                status = error_set(ret_error, NEBULA_INVALID, 0, "the pickle of \"%.80s\" is empty", name);
        if (status == NEBULA_OK)
                status = check_ranges(&plan, storages, count, ret_error);
        if (status == NEBULA_OK)
                status = plan_pickle(&plan, pickle, pickle_size, storages, count, ret_error);
        if (status == NEBULA_OK)
                status = save(&plan, ret_error);
        plan_done(&plan);
        return status;
}

enum nebula_status nebula_checkpoint_save_bytes(nebula_checkpoint *checkpoint, const char *name,
                                                const struct nebula_range *ranges, size_t count,
                                                struct nebula_error *ret_error)
{
        return nebula_checkpoint_save_bytes_kept(checkpoint, name, ranges, count, NULL, ret_error);
}

enum nebula_status nebula_checkpoint_save_bytes_kept(nebula_checkpoint *checkpoint, const char *name,
                                                     const struct nebula_range *ranges, size_t count,
                                                     const struct nebula_keep *keep, struct nebula_error *ret_error)
{
        uint64_t *offsets = malloc((count ? count : 1) * sizeof *offsets);
        struct plan plan;
        enum nebula_status status;

        if (!offsets)
                return error_set(ret_error, NEBULA_NO_MEMORY, 0, "no memory for a list of %zu ranges", count);
        status = plan_init(&plan, checkpoint, name, IPC_FORMAT_RAW, count, ret_error);
        if (status == NEBULA_OK)
                status = plan_keep(&plan, keep, ret_error);
        if (status == NEBULA_OK)
                status = check_ranges(&plan, ranges, count, ret_error);
        for (size_t i = 0; status == NEBULA_OK && i < count; i++) {
                if (ranges[i].size > INT64_MAX - plan.size) {
                        status = error_set(ret_error, NEBULA_INVALID, 0, "the ranges of \"%.80s\" are together larger "
                                           "than any file", name);
                        break;
                }
                offsets[i] = plan.size;
                plan.size += ranges[i].size;
        }
        if (status == NEBULA_OK) {
                add_parts(&plan, ranges, offsets, count);
                status = save(&plan, ret_error);
        }
        plan_done(&plan);
        free(offsets);
        return status;
}

enum nebula_status nebula_checkpoint_save_tensors(nebula_checkpoint *checkpoint, const char *name,
                                                  const struct nebula_tensor *tensors, size_t count,
                                                  struct nebula_error *ret_error)
{
        struct nebula_range *ranges = NULL;
        char *pickle = NULL;
        size_t pickle_size;
        enum nebula_status status;

        if (count > 0 && !tensors)
                return error_set(ret_error, NEBULA_INVALID, 0, "the count of tensors is %zu, but the pointer to them is NULL", count);
        status = pickle_flat_dict(tensors, count, &pickle, &pickle_size, ret_error);
        if (status != NEBULA_OK)
                return status;
        ranges = malloc((count ? count : 1) * sizeof *ranges);
        if (!ranges) {
                status = error_set(ret_error, NEBULA_NO_MEMORY, 0, "no memory for a list of %zu ranges", count);
                goto free_pickle;
        }
        for (size_t i = 0; i < count; i++)
                ranges[i] = (struct nebula_range){ tensors[i].data, pickle_tensor_size(&tensors[i]) };
        status = nebula_checkpoint_save_pickle(checkpoint, name, pickle, pickle_size, ranges, count, ret_error);
        free(ranges);
free_pickle:
        free(pickle);
        return status;
}
