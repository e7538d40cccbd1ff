/* Large objects. Their parts are appended to a temporary file from the caller's memory, several at once, each as soon as it is final. An
 * append does not change the time of the file, so a long upload sets the properties of its file again from time to time. An upload that can
 * go on later (adls_resume.c) flushes the file from time to time: only flushed bytes outlive it. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "store/adls/adls_private.h"
#include "sum/sum.h"

#define FLUSHES_MAX 32u      /* of one upload */
#define FLUSH_PARTS_MIN 4u   /* between two flushes */

/* How much of the file an upload has sent that can go on later. The store's lock guards it. */
struct adls_progress {
        struct adls_sent found;      /* flushed by the interrupted upload with which this one goes on */
        struct adls_sent done;       /* the parts up to the first one that is still missing */
        uint64_t next;               /* index of the missing part */
        struct adls_sent flushed[2]; /* of the last flush and the one before it; written into the properties before the flush */
        bool is_busy;                /* a thread flushes or sets the properties */
        bool differs;                /* the file has other bytes than the object: no thread flushes it any more */
};

static struct azure_store *azure_of(struct object_store *store)
{
        return (struct azure_store *)store;
}

static bool may_resume(struct object_store *store, const struct object_upload *object)
{
        return object_may_resume(store, object) && !atomic_load(&azure_of(store)->refuses_flushes);
}

static enum nebula_status begin_resumable(struct object_store *store, struct object_upload *object, struct nebula_error *error)
{
        struct adls_progress *progress = calloc(1, sizeof *progress);
        enum nebula_status status;

        object->progress = progress;
        object->parts = calloc(object->part_count, sizeof *object->parts);
        if (!progress || !object->parts)
                return object_no_memory(store, error);
        status = adls_resume(store, object, &progress->found, error);
        if (!status && !progress->found.size)
                status = adls_create(store, object->key, object->place, object->id, error);
        progress->flushed[0] = progress->flushed[1] = progress->found;
        return status ? status : adls_resume_describe(store, object, error);
}

static enum nebula_status begin(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                struct nebula_error *error)
{
        object->place = object_make_place(upload, object);
        if (!object->place)
                return object_no_memory(store, error);
        return may_resume(store, object) ? begin_resumable(store, object, error) :
                                           adls_create(store, object->key, object->place, object->id, error);
}

/* The file is of no use for a later upload: this one removes it. */
static void keep_no_file(struct object_store *store, struct object_upload *object)
{
        lock_take(&azure_of(store)->lock);
        object->is_kept = false;
        lock_give(&azure_of(store)->lock);
}

/* Flushes the first bytes of the file, after its properties name them. */
static enum nebula_status flush(struct object_store *store, struct object_upload *object, const struct adls_sent *sent, enum adls_flushing how,
                                struct nebula_error *error)
{
        struct adls_progress *progress = object->progress;
        struct nebula_error failure = { 0 };
        char text[ADLS_SENT_SIZE];
        enum nebula_status status;

        lock_take(&azure_of(store)->lock);
        progress->flushed[1] = progress->flushed[0];
        progress->flushed[0] = *sent;
        adls_sent_text(progress->flushed, text);
        lock_give(&azure_of(store)->lock);
        status = adls_set_properties(store, object, text, NULL, error);
        if (status)
                return status;
        status = adls_flush(store, object->key, object->place, sent->size, how, &failure);
        if (failure.http_status == 400) {
                atomic_store(&azure_of(store)->refuses_flushes, true);
                keep_no_file(store, object);
                log_event(LOG_LEVEL_WARN, "%s", failure.message);
                return error_set(error, NEBULA_STORAGE, 0, "cannot write %s/%s: the service refuses to flush it in pieces; later writes flush once",
                                 store->store.root, object->key);
        }
        if (status && error)
                *error = failure;
        return status;
}

/* Counts a part that is in the file. False: the interrupted upload had sent other bytes. */
static bool count_part(struct object_upload *object, const struct object_range *range)
{
        struct adls_progress *progress = object->progress;
        struct adls_sent *done = &progress->done;

        object->parts[range->index] = (struct object_part){ .size = range->size, .sum = range->sum };
        while (progress->next < object->part_count && object->parts[progress->next].size) {
                const struct object_part *part = &object->parts[progress->next++];

                done->sum = sum_crc64_combine(done->sum, part->sum, part->size);
                done->size += part->size;
                if (done->size != progress->found.size)
                        continue;
                progress->differs = done->sum != progress->found.sum;
                if (progress->differs)
                        return false;
                atomic_fetch_add(&object->resumed, done->size);
        }
        return true;
}

/* Whether this thread flushes now, and what. */
static bool take_flush(const struct object_upload *object, struct adls_sent *ret_sent)
{
        struct adls_progress *progress = object->progress;
        uint64_t parts = (object->part_count + FLUSHES_MAX - 1) / FLUSHES_MAX;

        if (parts < FLUSH_PARTS_MIN)
                parts = FLUSH_PARTS_MIN;
        if (progress->is_busy || progress->differs || progress->done.size == object->size ||
            progress->done.size < progress->flushed[0].size + parts * object->part_bytes)
                return false;
        progress->is_busy = true;
        *ret_sent = progress->done;
        return true;
}

static enum nebula_status flush_when_due(struct object_store *store, struct object_upload *object, struct nebula_error *error)
{
        struct lock *lock = &azure_of(store)->lock;
        enum nebula_status status = NEBULA_OK;
        struct adls_sent sent;
        bool is_due;

        do {
                lock_take(lock);
                is_due = take_flush(object, &sent);
                lock_give(lock);
                if (!is_due)
                        break;
                status = flush(store, object, &sent, ADLS_FLUSH_FIRST, error);
                lock_take(lock);
                object->progress->is_busy = false;
                lock_give(lock);
        } while (!status);
        return status;
}

static enum nebula_status note_part(struct object_store *store, struct object_upload *object, const struct object_range *range,
                                    struct nebula_error *error)
{
        struct lock *lock = &azure_of(store)->lock;
        bool is_same;

        lock_take(lock);
        is_same = count_part(object, range);
        lock_give(lock);
        if (is_same)
                return flush_when_due(store, object, error);
        keep_no_file(store, object);
        return error_set(error, NEBULA_STORAGE, 0, "cannot write %s/%s: an interrupted upload had sent other bytes; the next try sends all",
                         store->store.root, object->key);
}

static enum nebula_status send_part(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                    const struct object_range *range, const void *data, const atomic_bool *stop, struct nebula_error *error)
{
        struct object_range summed = *range;
        enum nebula_status status = NEBULA_OK;

        summed.sum = object_range_sum(range, data);
        summed.has_sum = true;
        if (!object->progress || range->offset >= object->progress->found.size)
                status = adls_append(store, object->key, object->place, &summed, data, stop, error);
        return status || !object->progress ? status : note_part(store, object, &summed, error);
}

static enum nebula_status end(struct object_store *store, const struct store_upload *upload, struct object_upload *object, struct nebula_error *error)
{
        if (object->progress)
                return flush(store, object, &object->progress->done, ADLS_FLUSH_ALL, error);
        return adls_flush(store, object->key, object->place, object->size, ADLS_FLUSH_ALL, error);
}

static enum nebula_status publish(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                  struct nebula_error *error)
{
        struct adls_renaming renaming = { store, object->place, object->key, object->id, STORE_IF_ABSENT, NULL, { "" } };
        enum nebula_status status = object_try_again(store, object->key, adls_rename, &renaming, error);

        if (status == NEBULA_BUSY)
                object->is_kept = false;
        return status;
}

/* False: another thread sets them. *ret_text: "" if the upload cannot go on later. */
static bool begin_touch(struct azure_store *azure, struct adls_progress *progress, char ret_text[ADLS_SENT_SIZE])
{
        bool is_busy = false;

        *ret_text = 0;
        if (!progress)
                return true;
        lock_take(&azure->lock);
        is_busy = progress->is_busy;
        progress->is_busy = true;
        adls_sent_text(progress->flushed, ret_text);
        lock_give(&azure->lock);
        return !is_busy;
}

static void touch(struct object_store *store, const struct store_upload *upload, const struct object_upload *object, const atomic_bool *stop)
{
        char text[ADLS_SENT_SIZE];

        if (!begin_touch(azure_of(store), object->progress, text))
                return;
        adls_set_properties(store, object, *text ? text : NULL, stop, NULL);
        if (!object->progress)
                return;
        lock_take(&azure_of(store)->lock);
        object->progress->is_busy = false;
        lock_give(&azure_of(store)->lock);
}

static void remove_place(struct object_store *store, const struct object_upload *object)
{
        if (object->place)
                store_remove_one(&store->store, object->place, NULL);
}

const struct object_steps adls_steps = { .begin = begin, .in_order = true, .can_resume = true, .send = send_part, .end = end, .touch = touch,
                                         .publish = publish, .abort = remove_place };
