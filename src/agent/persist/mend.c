#include "agent/persist/mend.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/memory_policy.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/persist/due.h"
#include "agent/persist/persist_seal.h"
#include "agent/persist/slots_private.h"
#include "agent/persist/storage.h"
#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_publish.h"
#include "store/repair_object.h"
#include "store/verify.h"


/* A file of the version that memory has, too. */
struct kept {
        char name[IPC_NAME_MAX];
        uint64_t size;
        struct image *image; /* held */
};
struct mending {
        struct catalogue *catalogue;
        const struct version *version; /* pinned */
        struct verify_watch watch;
        struct store *store;
        struct manifest manifest;
        struct kept *files;
        size_t file_count;
        struct records records;
        bool is_any; /* a file or a record was written again */
};

static bool is_due(const struct version *version)
{
        return version->stored && version->copy == COPY_DOUBTED && !version->is_remote;
}

bool mend_pending(const struct job *job, int64_t since_ns)
{
        for (const struct version *version = job->live; version; version = version->next_live)
                if (is_due(version) && version->persist->failed_ns < since_ns)
                        return true;
        return false;
}

/* Whether the agent ends, or the version was written again or removed. */
static bool is_over(void *argument)
{
        const struct mending *mending = argument;
        bool is_so;

        catalogue_lock(mending->catalogue);
        is_so = mending->catalogue->stopping || !is_due(mending->version);
        catalogue_unlock(mending->catalogue);
        return is_so;
}

/* Lock held. */
static enum nebula_status keep_files(struct mending *mending, const struct version *version, struct nebula_error *error)
{
        mending->files = calloc(version->file_count + 1, sizeof *mending->files);
        if (!mending->files)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to compare \"%s\" with storage", version->tag);
        for (size_t i = 0; i < version->file_count; i++) {
                const struct agent_file *file = &version->files[i];
                struct kept *kept = &mending->files[mending->file_count];

                if (!file->image)
                        continue;
                *kept = (struct kept){ .size = file->size, .image = file->image };
                memcpy(kept->name, file->name, sizeof kept->name);
                memory_hold(kept->image);
                mending->file_count++;
        }
        return records_copy(version, &mending->records, error);
}

/* Lock held. */
static void mending_done(struct mending *mending)
{
        for (size_t i = 0; i < mending->file_count; i++)
                memory_drop(mending->catalogue->memory, mending->files[i].image);
        free(mending->files);
        records_done(&mending->records);
        manifest_done(&mending->manifest);
}

static enum nebula_status write_again(struct mending *mending, const struct kept *kept, const char *key, const struct record_file *recorded,
                                      struct nebula_error *error)
{
        struct repair_source source = { .size = kept->size, .watch = &mending->watch };
        void *data;
        enum nebula_status status = sealing_map(mending->catalogue, kept->image, &data, error);

        if (status)
                return status;
        source.data = data;
        status = repair_object(mending->store, &mending->manifest, key, recorded, &source, error);
        sealing_unmap(mending->catalogue, kept->image);
        if (!status)
                log_event(LOG_LEVEL_WARN, "\"%s\" of %s was damaged in %s, and is written again from memory", kept->name, mending->manifest.tag,
                          mending->store->root);
        mending->is_any |= !status;
        return status;
}

/* kept NULL: memory does not have the file, so it is only compared. */
static enum nebula_status mend_file(struct mending *mending, const struct manifest_file *file, const struct kept *kept, struct nebula_error *error)
{
        struct record_file recorded = { 0 };
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = manifest_file_key(&mending->manifest, file, key, error);

        if (!status)
                status = manifest_load_file(mending->store, &mending->manifest, file->name, &recorded, error);
        if (!status) {
                status = verify_file(mending->store, key, &recorded, &mending->watch, error);
                if (kept && (status == NEBULA_CORRUPT || status == NEBULA_NOT_FOUND))
                        status = write_again(mending, kept, key, &recorded, error);
        }
        record_file_done(&recorded);
        return status;
}

static bool has_kept(const struct mending *mending, const char *name)
{
        for (size_t i = 0; i < mending->file_count; i++)
                if (!strcmp(mending->files[i].name, name))
                        return true;
        return false;
}

/* Of the files that memory does not have, because they are another node's or have left it. Before they are read, a file must have been
 * written again: otherwise the damage is in one of them. */
static enum nebula_status check_rest(struct mending *mending, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < mending->manifest.file_count && !status; i++) {
                const struct manifest_file *file = &mending->manifest.files[i];

                if (has_kept(mending, file->name))
                        continue;
                status = mending->is_any ? mend_file(mending, file, NULL, error) :
                         error_set(error, NEBULA_CORRUPT, 0, "the damage is in a file that this node's memory does not have, such as \"%.200s\"", file->name);
        }
        return status;
}

/* The damage is found again with the files, if there is no text of the record. */
static enum nebula_status mend_records(struct mending *mending, struct nebula_error *error)
{
        const struct manifest *manifest = &mending->manifest;
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < manifest->record_count && !status; i++) {
                const struct record_text *kept = records_find(&mending->records, manifest, i);
                struct record record = { 0 };
                enum nebula_status damage = kept ? manifest_load_record(mending->store, manifest, i, &record, NULL) : NEBULA_OK;

                record_done(&record);
                if (damage != NEBULA_CORRUPT && damage != NEBULA_NOT_FOUND)
                        continue;
                status = repair_record(mending->store, manifest, i, kept->text, kept->size, error);
                if (!status)
                        log_event(LOG_LEVEL_WARN, "the record of rank %" PRIu32 " of %s was damaged in %s, and is written again from memory",
                                  manifest->records[i].rank, manifest->tag, mending->store->root);
                mending->is_any |= !status;
        }
        return status;
}

/* NEBULA_BUSY: storage has another writing of the tag. */
static enum nebula_status mend(struct mending *mending, struct job *job, const char *tag, uint64_t sequence, struct nebula_error *error)
{
        enum nebula_status status = storage_open(mending->catalogue, job, &mending->store, error), of_file;

        if (!status)
                status = manifest_load(mending->store, tag, &mending->manifest, error);
        if (!status && mending->manifest.sequence != sequence)
                status = error_set(error, NEBULA_BUSY, 0, "storage has another writing of \"%.200s\"", tag);
        if (!status)
                status = mend_records(mending, error);
        for (size_t i = 0; i < mending->file_count && (!status || status == NEBULA_CORRUPT || status == NEBULA_INVALID); i++) {
                const struct manifest_file *file = manifest_find_file(&mending->manifest, mending->files[i].name);
                struct nebula_error failure = { 0 };

                of_file = file ? mend_file(mending, file, &mending->files[i], &failure) : NEBULA_OK; /* a file that is lost holds up no other */
                if (of_file) {
                        status = of_file;
                        *error = failure;
                }
        }
        if (!status)
                status = check_rest(mending, error);
        if (mending->is_any)
                manifest_publish(mending->store, &mending->manifest, NULL, NULL);
        return status;
}

static void conclude(struct catalogue *catalogue, struct version *version, enum nebula_status status, const struct nebula_error *error)
{
        struct version_persist *persist = version->persist;
        int64_t now = os->now_ns();
        bool is_final = status == NEBULA_CORRUPT || status == NEBULA_INVALID || status == NEBULA_NOT_FOUND || status == NEBULA_BUSY;

        if (!is_due(version))
                return; /* it was replaced or removed meanwhile */
        if (!status) {
                persist->attempt = 0;
                version_judge_copy(catalogue, version, true, NULL);
                return;
        }
        if (!persist->attempt++)
                persist->failing_since_ns = now;
        persist->failed_ns = now;
        persist->retry_at_ns = now + due_back_off(persist->attempt);
        if (persist->attempt == 1)
                log_event(LOG_LEVEL_WARN, "%s cannot be written again%s: %s", version->tag, is_final ? "" : ", the agent tries again", error->message);
        if (is_final || now - persist->failing_since_ns >= (int64_t)catalogue->give_up_s * SECOND_NS) {
                version_set_copy(catalogue, version, COPY_DAMAGED);
                version_changed(catalogue, version);
        }
}

/* Lock held on entry and return, released meanwhile. */
static void mend_one(struct catalogue *catalogue, struct version *version)
{
        struct mending mending = { .catalogue = catalogue, .version = version, .watch = { .argument = &mending, .is_over = is_over } };
        struct job *job = version->job;
        struct nebula_error error = { 0 };
        char tag[IPC_NAME_MAX];
        uint64_t sequence = version->sequence;
        enum nebula_status status = keep_files(&mending, version, &error);

        memcpy(tag, version->tag, sizeof tag);
        version->pins++;
        job->pins++;
        catalogue_create_as(job);
        catalogue_unlock(catalogue);
        if (!status)
                status = mend(&mending, job, tag, sequence, &error);
        catalogue_lock(catalogue);
        job->pins--;
        version->pins--;
        mending_done(&mending);
        if (!status || !catalogue->stopping)
                conclude(catalogue, version, status, &error);
        policy_retain(catalogue, job);
        catalogue_signal_job(catalogue, job);
}

static struct version *find_due(const struct lane *lane, int64_t now, int64_t *due)
{
        for (const struct job *job = lane->jobs; job; job = job->next_in_lane)
                for (struct version *version = job->live; version; version = version->next_live) {
                        if (!is_due(version))
                                continue;
                        if (version->persist->retry_at_ns <= now)
                                return version;
                        if (version->persist->retry_at_ns < *due)
                                *due = version->persist->retry_at_ns;
                }
        return NULL;
}

bool mend_work(struct catalogue *catalogue, const struct lane *lane, int64_t now, int64_t *due)
{
        struct version *version = find_due(lane, now, due);

        if (version)
                mend_one(catalogue, version);
        return version;
}

static void *mend_main(void *argument)
{
        struct lane *lane = argument;
        struct catalogue *catalogue = lane->catalogue;

        catalogue_lock(catalogue);
        while (!catalogue->stopping && mend_work(catalogue, lane, os->now_ns(), &(int64_t){ 0 }))
                ;
        lane->is_mending = false;
        catalogue->lane_count--;
        catalogue_signal_lane(catalogue, lane);
        catalogue_unlock_last(catalogue);
        return NULL;
}

void mend_start(struct catalogue *catalogue, struct lane *lane, int64_t now, int64_t *due)
{
        if (lane->is_mending || !find_due(lane, now, due))
                return;
        if (os_thread_start(NULL, mend_main, lane, true)) {
                *due = now + SECOND_NS < *due ? now + SECOND_NS : *due; /* out of threads or memory */
                return;
        }
        lane->is_mending = true; /* the thread waits for the lock */
        catalogue->lane_count++;
}
