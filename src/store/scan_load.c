#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"
#include "store/scan.h"
#include "store/scan_private.h"

#define LOADS_AT_ONCE 64
#define LOOK_TAGS 250 /* in a row, by one thread: a page of 1,000 objects has about as many tags of few files */
#define TELL_MS 1000
#define POLL_MS 20

/* In the place of a failure that cannot be copied. */
static struct nebula_error no_memory_left = { .status = NEBULA_NO_MEMORY, .message = "no memory to list the checkpoints" };

bool loading_ends(const struct nebula_error *failure)
{
        return failure->status == NEBULA_NO_MEMORY || (failure->status != NEBULA_NOT_FOUND && store_class(failure) == STORE_AGAIN);
}

const struct nebula_error *loading_failure(const struct loading *loading)
{
        for (size_t i = 0; i < loading->list->count; i++)
                if (loading->failures[i] && loading_ends(loading->failures[i]))
                        return loading->failures[i];
        return NULL;
}

static void fail(struct loading *loading, size_t i, const struct nebula_error *failure)
{
        struct nebula_error *copy = malloc(sizeof *copy);

        if (copy)
                *copy = *failure;
        loading->failures[i] = copy ? copy : &no_memory_left;
        atomic_store(&loading->states[i], LOAD_FAILED);
        if (loading_ends(loading->failures[i]))
                atomic_store(&loading->stops, true);
}

/* Finds the heads of tags in a row. If a list fails, the tag is looked at again by itself. */
static void *look_at_some(void *argument)
{
        struct loading *loading = argument;
        size_t block;

        while (!atomic_load(&loading->stops) && (block = atomic_fetch_add(&loading->next, 1)) * LOOK_TAGS < loading->list->count) {
                struct lister lister = { .store = loading->store };

                for (size_t i = block * LOOK_TAGS; i < (block + 1) * LOOK_TAGS && i < loading->list->count && !lister.is_sparse; i++)
                        loading->has_head[i] = !tag_log_look(loading->store, &lister, loading->list->entries[i].key, &loading->heads[i], NULL);
                lister_done(&lister);
        }
        return NULL;
}

static int compare_tags(const void *a, const void *b)
{
        const struct manifest *const *x = a, *const *y = b;

        return strcmp((*x)->tag, (*y)->tag);
}

/* Takes over the manifest of this head, if it is known. */
static bool take_known(struct loading *loading, size_t i, const char *tag, const struct tag_head *head)
{
        size_t low = 0, high = loading->known_count;

        while (low < high) {
                size_t middle = low + (high - low) / 2;
                int order = strcmp(loading->known[middle]->tag, tag);

                if (!order) {
                        const struct manifest *known = loading->known[middle];

                        if (known->number != head->number || (known->stamp && known->stamp != head->stamp))
                                return false;
                        loading->manifests[i] = *known;
                        loading->manifests[i].stamp = head->stamp;
                        loading->manifests[i].is_damaged = false;
                        loading->taken[middle] = true;
                        return true;
                }
                if (order < 0)
                        low = middle + 1;
                else
                        high = middle;
        }
        return false;
}

/* Reads the newest entry of a tag. If it is gone, a newer one was made, or the tag was removed. */
static enum nebula_status load(struct loading *loading, size_t i, const char *tag, struct nebula_error *error)
{
        struct tag_head *head = &loading->heads[i];
        enum nebula_status status = NEBULA_OK;
        struct tag_log log;

        if (!loading->has_head[i])
                status = tag_log_look(loading->store, NULL, loading->list->entries[i].key, head, error);
        if (status || (head->number && take_known(loading, i, tag, head)))
                return status;
        status = head->number ? tag_log_entry(loading->store, tag, head->number, &log, error) : NEBULA_NOT_FOUND;
        if (status == NEBULA_NOT_FOUND)
                return manifest_load(loading->store, tag, &loading->manifests[i], error);
        if (status)
                return status;
        if (log.is_unsound) {
                *error = log.unsound;
                return log.unsound.status;
        }
        if (log.is_removal)
                return error_set(error, NEBULA_NOT_FOUND, 0, "%s holds no checkpoint \"%s\"", loading->store->root, tag);
        loading->manifests[i] = log.manifest;
        loading->manifests[i].stamp = head->stamp;
        return NEBULA_OK;
}

static void *load_some(void *argument)
{
        struct loading *loading = argument;
        struct nebula_error failure;
        char tag[256];
        size_t at;

        while (!atomic_load(&loading->stops) && (at = atomic_fetch_add(&loading->next, 1)) < loading->list->count) {
                size_t i = loading->order[at];

                failure = (struct nebula_error){ 0 };
                if (manifest_tag_of(&loading->list->entries[i], tag)) {
                        if (load(loading, i, tag, &failure)) {
                                fail(loading, i, &failure);
                        } else {
                                if (loading->options && loading->options->by_index)
                                        manifest_make_brief(&loading->manifests[i]);
                                atomic_store(&loading->states[i], LOAD_HAS_MANIFEST);
                        }
                }
                atomic_fetch_add(&loading->done, 1);
        }
        return NULL;
}

static void report(struct loading *loading)
{
        struct manifest_scan newest = { .manifests = calloc(MANIFEST_TOLD_MAX, sizeof *newest.manifests) };

        for (size_t at = 0; newest.manifests && at < loading->list->count && newest.count < MANIFEST_TOLD_MAX; at++)
                if (atomic_load(&loading->states[loading->order[at]]) == LOAD_HAS_MANIFEST)
                        newest.manifests[newest.count++] = loading->manifests[loading->order[at]];
        if (newest.count)
                qsort(newest.manifests, newest.count, sizeof *newest.manifests, scan_compare);
        manifest_scan_mark(&newest);
        if (newest.manifests)
                loading->options->report(loading->options->argument, &newest, atomic_load(&loading->done), loading->list->count);
        free(newest.manifests); /* the lists in them are those of `loading` */
}

/* Runs `work` on several threads, and on the caller's. If the caller gets reports of the progress, its thread does no work. */
static void run(struct loading *loading, void *(*work)(void *), size_t step_count, bool reports)
{
        size_t most = !loading->store->ops->reach ? 1 : LOADS_AT_ONCE, count = 0;
        pthread_t threads[LOADS_AT_ONCE];
        int64_t reported_ns = os->now_ns();

        atomic_store(&loading->next, 0);
        while (count + !reports < most && count + !reports < step_count && !os_thread_start(&threads[count], work, loading, false))
                count++;
        while (reports && count && atomic_load(&loading->done) < step_count && !atomic_load(&loading->stops)) {
                os->sleep_ms(POLL_MS);
                if (os->now_ns() - reported_ns < TELL_MS * INT64_C(1000000))
                        continue;
                report(loading);
                reported_ns = os->now_ns();
        }
        if (!reports || !count)
                work(loading);
        for (size_t i = 0; i < count; i++)
                pthread_join(threads[i], NULL);
}

void loading_run(struct loading *loading)
{
        bool reports = loading->options && loading->options->report;

        if (loading->store->ops->list_after && loading->list->count > 1)
                run(loading, look_at_some, (loading->list->count + LOOK_TAGS - 1) / LOOK_TAGS, false);
        run(loading, load_some, loading->list->count, reports);
        for (size_t i = 0; i < loading->known_count; i++)
                if (loading->taken[i])
                        *loading->known[i] = (struct manifest){ 0 };
}

struct step {
        int64_t number; /* -1: the tag has none, and counts as new */
        uint32_t index;
};

static int compare_steps(const void *a, const void *b)
{
        const struct step *x = a, *y = b;

        if (x->number != y->number)
                return x->number == -1 || (y->number != -1 && x->number > y->number) ? -1 : 1;
        return x->index < y->index ? -1 : x->index > y->index;
}

static bool find_order(struct loading *loading)
{
        struct step *steps = calloc(loading->list->count + 1, sizeof *steps);
        char tag[256];

        for (size_t i = 0; steps && i < loading->list->count; i++)
                steps[i] = (struct step){ manifest_tag_of(&loading->list->entries[i], tag) ? name_step(tag) : -1, (uint32_t)i };
        if (steps && loading->list->count)
                qsort(steps, loading->list->count, sizeof *steps, compare_steps);
        for (size_t i = 0; steps && i < loading->list->count; i++)
                loading->order[i] = steps[i].index;
        free(steps);
        return steps;
}

enum nebula_status loading_init(struct loading *loading, struct store *store, const struct store_list *list,
                                const struct manifest_scan_options *options, struct manifest_scan *known, struct nebula_error *error)
{
        size_t count = list->count + 1;

        *loading = (struct loading){ .store = store, .list = list, .options = options, .known_count = known->count };
        loading->heads = calloc(count, sizeof *loading->heads);
        loading->has_head = calloc(count, sizeof *loading->has_head);
        loading->states = calloc(count, sizeof *loading->states);
        loading->manifests = calloc(count, sizeof *loading->manifests);
        loading->failures = calloc(count, sizeof *loading->failures);
        loading->order = calloc(count, sizeof *loading->order);
        loading->known = calloc(known->count + 1, sizeof *loading->known);
        loading->taken = calloc(known->count + 1, sizeof *loading->taken);
        if (!loading->heads || !loading->has_head || !loading->states || !loading->manifests || !loading->failures || !loading->order ||
            !loading->known || !loading->taken || !find_order(loading)) {
                loading_done(loading);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to list %zu checkpoints", list->count);
        }
        for (size_t i = 0; i < known->count; i++)
                loading->known[i] = &known->manifests[i];
        if (known->count)
                qsort(loading->known, known->count, sizeof *loading->known, compare_tags);
        return NEBULA_OK;
}

void loading_done(struct loading *loading)
{
        for (size_t i = 0; loading->failures && i < loading->list->count; i++)
                if (loading->failures[i] != &no_memory_left)
                        free(loading->failures[i]);
        for (size_t i = 0; loading->manifests && i < loading->list->count; i++)
                manifest_done(&loading->manifests[i]);
        free(loading->heads);
        free(loading->has_head);
        free(loading->states);
        free(loading->manifests);
        free(loading->failures);
        free(loading->order);
        free(loading->known);
        free(loading->taken);
}
