#include "store/manifest_check.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_remove.h"
#include "store/record.h"
#include "store/transfer.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/document.h"
#include "store/manifest_private.h"
#include "store/signature.h"
#include "store/transfer_private.h"
#include "store/verify.h"
#include "store/writer.h"
#include "sum/sum.h"

#define TRIES_MAX 5
#define BEAT_NS (300 * SECOND_NS) /* a sweep removes objects that are 15 minutes old */

struct copying {
        const struct transfer *transfer;
        const struct manifest *source;
        struct writer writer;
        const struct manifest_file ***files; /* per share: the source's, in the order of its record's */
        unsigned attempt;
        _Atomic int64_t beat_ns;
};

/* A checksum of the contents of a version that does not depend on the order of its files. */
static enum nebula_status fingerprint(struct store *store, const struct manifest *manifest, uint64_t *ret_sum, struct nebula_error *error)
{
        uint32_t *order = manifest_files_by_record(manifest);
        uint64_t sum = 0;
        size_t at = 0;
        enum nebula_status status = NEBULA_OK;

        if (!order)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the files of \"%s\"", manifest->tag);
        for (size_t r = 0; r < manifest->record_count && !status; r++) {
                struct record record = { 0 };

                status = manifest_load_record(store, manifest, r, &record, error);
                for (; !status && at < manifest->file_count && manifest->files[order[at]].record == r; at++) {
                        struct record_file file = { 0 };
                        uint64_t one;

                        status = record_take_file(&record, &manifest->files[order[at]], &file, error);
                        one = sum_crc64(0, file.name, strlen(file.name) + 1);
                        one = sum_crc64(one, &file.size, sizeof file.size);
                        one = sum_crc64(one, &file.rank, sizeof file.rank);
                        one = sum_crc64(one, &file.chunk_bytes, sizeof file.chunk_bytes);
                        if (!status && file.chunk_count)
                                one = sum_crc64(one, file.chunks, file.chunk_count * sizeof *file.chunks);
                        sum += one;
                        record_file_done(&file);
                }
                record_done(&record);
        }
        free(order);
        if (!status)
                *ret_sum = sum;
        return status;
}

static enum nebula_status compare(const struct transfer *transfer, const struct manifest *source, const struct tag_log *log,
                                  enum transfer_state *ret_state, struct nebula_error *error)
{
        const struct manifest *there = &log->manifest;
        uint64_t ours, theirs;
        enum nebula_status status;

        *ret_state = TRANSFER_OTHER;
        if (!log->number || log->is_removal) {
                *ret_state = TRANSFER_ABSENT;
                return NEBULA_OK;
        }
        if (log->is_unsound || strcmp(source->job, there->job) || strcmp(source->run, there->run) || source->world != there->world ||
            source->file_count != there->file_count)
                return NEBULA_OK;
        status = fingerprint(transfer->from, source, &ours, error);
        if (status)
                return status;
        status = fingerprint(transfer->to, there, &theirs, error);
        if (status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT) /* it is damaged */
                return NEBULA_OK;
        if (status || ours != theirs)
                return status;
        status = manifest_check_present(transfer->to, there, error);
        if (!status)
                *ret_state = TRANSFER_PRESENT;
        return status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT ? NEBULA_OK : status;
}

static enum nebula_status begin(const struct transfer *transfer, const struct manifest *source, struct writer *writer,
                                enum transfer_state *ret_state, struct nebula_error *error)
{
        enum nebula_status status;

        strcpy(writer->manifest.tag, source->tag);
        status = writer_begin(writer, error);
        return status ? status : compare(transfer, source, &writer->before, ret_state, error);
}

enum nebula_status transfer_look(const struct transfer *transfer, const struct manifest *source, enum transfer_state *ret_state,
                                 struct nebula_error *error)
{
        struct writer writer;
        enum nebula_status status = writer_init(&writer, transfer->to, NULL, NULL, source->tag, error);

        if (!status)
                status = begin(transfer, source, &writer, ret_state, error);
        writer_done(&writer);
        return status;
}

/* The name of the copy's writing. Calls that find the same source and the same log choose the same name. */
static void name_writing(const struct copying *copying, const char *writing, char ret_name[WRITING_MAX])
{
        const struct manifest *copy = &copying->writer.manifest;
        char run[512];

        snprintf(run, sizeof run, "copy of %s, %" PRIu64 ", entry %" PRIu64, writing, copying->source->sequence, copy->number);
        writing_name(copying->source->job, run, copy->writing, copying->attempt, ret_name);
}

/* Moves the files of `record` to the share, each with its place. */
static enum nebula_status take_files(struct copying *copying, struct writer_share *share, struct record *record, size_t index,
                                     struct nebula_error *error)
{
        const struct manifest *source = copying->source;
        const struct manifest_file **files = copying->files[index] = calloc(source->file_count + 1, sizeof *files);
        struct record *to = &share->record;
        enum nebula_status status = NEBULA_OK;

        to->files = calloc(source->file_count + 1, sizeof *to->files);
        if (!files || !to->files)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the files of \"%s\"", source->tag);
        for (size_t i = 0; i < source->file_count && !status; i++) {
                struct record_file *file = &to->files[to->file_count];

                if (source->files[i].record != index)
                        continue;
                files[to->file_count] = &source->files[i];
                status = record_take_file(record, &source->files[i], file, error);
                to->file_count += !status;
                if (!status)
                        status = writer_is_apart(&copying->writer, file->name, &file->is_apart, error);
        }
        return status;
}

/* The record of the copy has the ranks and times of the source's. */
static enum nebula_status describe_one(struct copying *copying, size_t index, struct nebula_error *error)
{
        struct record record = { 0 };
        struct writer_share *share;
        enum nebula_status status = manifest_load_record(copying->transfer->from, copying->source, index, &record, error);

        if (status)
                return status;
        share = writer_add_share(&copying->writer, error);
        if (!share) {
                record_done(&record);
                return NEBULA_NO_MEMORY;
        }
        share->record = record;
        share->record.files = NULL;
        share->record.file_count = 0;
        share->record.by_name = NULL;
        record.ranks = NULL; /* the share's now */
        record.rank_count = 0;
        name_writing(copying, record.writing, share->record.writing);
        share->record.number = copying->writer.manifest.number;
        status = take_files(copying, share, &record, index, error);
        record_done(&record);
        return status;
}

static enum nebula_status describe(void *argument, struct nebula_error *error)
{
        struct copying *copying = argument;
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < copying->source->record_count && !status; i++)
                status = describe_one(copying, i, error);
        return status;
}

/* Writes the claim again from time to time, so that it stays young. */
static void beat(void *argument)
{
        struct copying *copying = argument;
        int64_t last = atomic_load(&copying->beat_ns), now = os->now_ns();

        if (now - last >= BEAT_NS && atomic_compare_exchange_strong(&copying->beat_ns, &last, now))
                writer_touch(&copying->writer, &copying->writer.shares[0]);
}

static void on_verified(void *argument, uint64_t bytes)
{
        const struct transfer *transfer = argument;

        if (transfer->progress)
                transfer->progress(transfer->argument, bytes);
}

/* NEBULA_OK: the object is this file. Otherwise it is absent or different. */
static enum nebula_status check_there(const struct copying *copying, const char *key, const struct record_file *file)
{
        const struct verify_watch watch = { .argument = (void *)copying->transfer, .progress = on_verified };
        struct store_entry entry;

        if (copying->transfer->to->ops->stat(copying->transfer->to, key, &entry, NULL))
                return NEBULA_NOT_FOUND;
        store_entry_done(&entry);
        return verify_file(copying->transfer->to, key, file, &watch, NULL);
}

/* Removes a different object, which an interrupted try of this writing left. */
static void clear_apart(const struct copying *copying, const char *key, const struct record_file *file)
{
        if (file->is_apart)
                store_remove_one(copying->transfer->to, key, NULL);
}

static enum nebula_status copy_file(struct copying *copying, size_t share_index, size_t index, struct nebula_error *error)
{
        const struct writer_share *share = &copying->writer.shares[share_index];
        const struct record_file *file = &share->record.files[index];
        const struct transfer_pulse pulse = { beat, NULL, copying };
        char from_key[MANIFEST_KEY_MAX], to_key[MANIFEST_KEY_MAX];
        enum nebula_status status = manifest_file_key(copying->source, copying->files[share_index][index], from_key, error), there;

        if (!status)
                status = file_key(copying->writer.directory, file->is_apart ? share->record.writing : NULL, file->name, to_key, error);
        if (status)
                return status;
        if (share->is_found) {
                there = check_there(copying, to_key, file);
                if (!there)
                        return NEBULA_OK;
                if (there == NEBULA_CORRUPT)
                        clear_apart(copying, to_key, file);
        }
        status = transfer_object(copying->transfer, from_key, to_key, file, &pulse, error);
        if (status != NEBULA_BUSY)
                return status;
        copying->writer.is_overtaken = check_there(copying, to_key, file) != NEBULA_OK;
        return copying->writer.is_overtaken ? NEBULA_BUSY : NEBULA_OK;
}

static enum nebula_status copy_files(void *argument, struct nebula_error *error)
{
        struct copying *copying = argument;
        enum nebula_status status = NEBULA_OK;

        atomic_store(&copying->beat_ns, os->now_ns());
        for (size_t s = 0; s < copying->writer.share_count && !status; s++)
                for (size_t i = 0; i < copying->writer.shares[s].record.file_count && !status; i++)
                        status = copy_file(copying, s, i, error);
        return status;
}

/* Some stores refuse the removal of what the version replaces. */
static void complain(void *argument, const struct nebula_error *error)
{
        const struct transfer *transfer = ((struct copying *)argument)->transfer;

        if (transfer->complain)
                transfer->complain(transfer->argument, error->message);
}

/* The copy keeps its signatures, which do not say where a version lies. */
static enum nebula_status attest(void *argument, struct nebula_error *error)
{
        struct copying *copying = argument;
        const struct transfer *transfer = copying->transfer;
        bool is_lost = false;
        enum nebula_status status = signature_copy(transfer->from, copying->source, transfer->to, &copying->writer.manifest, &is_lost, error);

        if (!status && is_lost && transfer->complain)
                transfer->complain(transfer->argument, "the copy is not signed: it follows another version of its tag and so has another number. "
                                                       "Sign it with `nebula sign`");
        return status;
}

/* Continues the numbers of the destination's log, as a job's next writing of the tag would. */
static enum nebula_status fill_head(struct copying *copying, struct nebula_error *error)
{
        const struct manifest *source = copying->source, *before = &copying->writer.before.manifest;
        struct manifest *copy = &copying->writer.manifest;

        strcpy(copy->job, source->job);
        strcpy(copy->run, source->run);
        strcpy(copy->host, source->host);
        strcpy(copy->thinned, source->thinned); /* the reason for files that it lacks */
        copy->writing = source->writing;
        copy->sequence = source->sequence > before->sequence ? source->sequence : before->sequence + 1;
        copy->step = source->step;
        copy->world = source->world;
        copy->line = source->line;
        return document_check_numbers(source->tag, copy->writing, copy->sequence, error);
}

static enum nebula_status copy_once(struct copying *copying, struct nebula_error *error)
{
        enum nebula_status status = fill_head(copying, error);

        copying->files = calloc(copying->source->record_count + 1, sizeof *copying->files);
        if (!status && !copying->files)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to copy \"%s\"", copying->source->tag);
        if (!status)
                status = writer_run(&copying->writer, WRITER_COPY, error);
        for (size_t i = 0; copying->files && i < copying->source->record_count; i++)
                free(copying->files[i]);
        free(copying->files);
        return status;
}

/* *ret_again: this try met a conflict, and another one may succeed. */
static enum nebula_status attempt(const struct transfer *transfer, const struct manifest *source, unsigned number, enum transfer_state *ret_state,
                                  bool *ret_again, struct nebula_error *error)
{
        static const struct writer_source files = { .describe = describe, .publish = copy_files, .attest = attest, .complain = complain };
        struct copying copying = { .transfer = transfer, .source = source, .attempt = number };
        struct writer *writer = &copying.writer;
        enum nebula_status status = writer_init(writer, transfer->to, &files, &copying, source->tag, error);

        if (!status)
                status = manifest_end_removal(transfer->to, source->tag, error);
        if (!status)
                status = begin(transfer, source, writer, ret_state, error);
        if (!status && *ret_state == TRANSFER_OTHER && !transfer->replaces)
                status = error_set(error, NEBULA_BUSY, 0, "%s holds another version of \"%s\"", transfer->to->root, source->tag);
        else if (!status && *ret_state != TRANSFER_PRESENT)
                status = copy_once(&copying, error);
        *ret_again = writer->is_overtaken || writer->is_followed;
        writer_done(writer);
        return status;
}

enum nebula_status transfer_version(const struct transfer *transfer, const struct manifest *source, enum transfer_state *ret_state,
                                    struct nebula_error *error)
{
        enum transfer_state state = TRANSFER_ABSENT;
        bool again = true;
        enum nebula_status status = NEBULA_OK;

        for (unsigned try = 0; try < TRIES_MAX && again; try++)
                status = attempt(transfer, source, try, &state, &again, error);
        if (again)
                status = error_set(error, NEBULA_STORAGE, 0, "\"%s\" in %s was written or removed during each of %d tries to copy it", source->tag,
                                   transfer->to->root, TRIES_MAX);
        if (!status)
                *ret_state = state;
        return status;
}
