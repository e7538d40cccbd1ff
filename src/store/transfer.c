#include "store/transfer.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/document.h"
#include "store/index.h"
#include "store/manifest_private.h"
#include "store/tag_log.h"
#include "store/transfer_private.h"
#include "store/verify.h"
#include "sum/sum.h"

#define TRIES_MAX 5
#define BEAT_NS (300 * INT64_C(1000000000)) /* a sweep removes objects that are 15 minutes old */

/* One record of the copy. */
struct part {
        struct record record;        /* of the copy; it owns its texts and chunks */
        const struct manifest_file **files; /* of the source, in the order of record.files */
        char *text;
        size_t size;
        bool is_found; /* an earlier call made its claim or record */
};

struct copying {
        const struct transfer *transfer;
        const struct manifest *source;
        struct tag_log log; /* the destination's */
        char directory[256];
        uint64_t generation, sequence, next_number;
        struct part *parts;
        size_t part_count;
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

static enum nebula_status read_log(const struct transfer *transfer, const struct manifest *source, struct tag_log *ret_log,
                                   enum transfer_state *ret_state, struct nebula_error *error)
{
        enum nebula_status status = tag_log_head(transfer->to, source->tag, ret_log, error);

        if (status)
                return status;
        if (ret_log->is_unsound && ret_log->unsound.status != NEBULA_CORRUPT) {
                if (error)
                        *error = ret_log->unsound;
                return ret_log->unsound.status;
        }
        return compare(transfer, source, ret_log, ret_state, error);
}

enum nebula_status transfer_look(const struct transfer *transfer, const struct manifest *source, enum transfer_state *ret_state,
                                 struct nebula_error *error)
{
        struct tag_log log = { 0 };
        enum nebula_status status = read_log(transfer, source, &log, ret_state, error);

        tag_log_done(&log);
        return status;
}

/* The name of the copy's writing. Calls that find the same source and the same log choose the same name. */
static void name_writing(const struct copying *copying, const char *writing, unsigned attempt, char ret_name[WRITING_MAX])
{
        char run[512];

        snprintf(run, sizeof run, "copy of %s, %" PRIu64 ", entry %" PRIu64, writing, copying->source->sequence, copying->next_number);
        writing_name(copying->source->job, run, copying->generation, attempt, ret_name);
}

static enum nebula_status take_files(struct part *part, struct record *record, const struct manifest *source, size_t index,
                                     struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        part->files = calloc(source->file_count + 1, sizeof *part->files);
        part->record.files = calloc(source->file_count + 1, sizeof *part->record.files);
        if (!part->files || !part->record.files)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the files of \"%s\"", source->tag);
        for (size_t i = 0; i < source->file_count && !status; i++) {
                if (source->files[i].record != index)
                        continue;
                part->files[part->record.file_count] = &source->files[i];
                status = record_take_file(record, &source->files[i], &part->record.files[part->record.file_count], error);
                part->record.file_count += !status;
        }
        return status;
}

static enum nebula_status make_part(struct copying *copying, size_t index, unsigned attempt, struct nebula_error *error)
{
        struct part *part = &copying->parts[index];
        struct record record = { 0 };
        enum nebula_status status = manifest_load_record(copying->transfer->from, copying->source, index, &record, error);

        if (status)
                return status;
        part->record = record;
        part->record.files = NULL;
        part->record.file_count = 0;
        part->record.by_name = NULL;
        record.ranks = NULL; /* the part's now */
        record.rank_count = 0;
        status = take_files(part, &record, copying->source, index, error);
        name_writing(copying, record.writing, attempt, part->record.writing);
        part->record.number = copying->next_number;
        part->record.generation = copying->generation;
        record_done(&record);
        return status;
}

/* As for an agent (persist_plan.c): only the first entry of a log has files in place, and only where the names are free. */
static enum nebula_status find_places(struct copying *copying, struct nebula_error *error)
{
        struct store_list taken = { 0 };
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status;

        status = manifest_key(key, copying->directory, "", error);
        if (!status && copying->next_number == 1)
                status = store_list_all(copying->transfer->to, key, false, &taken, error);
        for (size_t p = 0; p < copying->part_count && !status; p++)
                for (size_t i = 0; i < copying->parts[p].record.file_count && !status; i++) {
                        struct record_file *file = &copying->parts[p].record.files[i];

                        status = file_key(copying->directory, NULL, file->name, key, error);
                        file->is_apart = copying->next_number != 1 || (!status && store_list_find(&taken, key));
                }
        store_list_done(&taken);
        return status;
}

static enum nebula_status part_key(const struct copying *copying, const struct part *part, bool is_claim, char ret_key[MANIFEST_KEY_MAX],
                                   struct nebula_error *error)
{
        return (is_claim ? claim_key : record_key)(copying->directory, part->record.writing, part->record.ranks[0].rank, ret_key, error);
}

/* Takes the places of the files from the claim or record of an earlier call. */
static enum nebula_status adopt(const struct copying *copying, struct part *part, bool is_claim, struct nebula_error *error)
{
        struct record found = { 0 };
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;
        enum nebula_status status = part_key(copying, part, is_claim, key, error);

        if (!status)
                status = document_get(copying->transfer->to, key, &text, &size, NULL, error);
        if (status)
                return status;
        status = record_parse(text, size, &found, error);
        free(text);
        for (size_t i = 0; i < part->record.file_count && !status; i++)
                if (found.number != part->record.number || found.file_count != part->record.file_count || strcmp(found.files[i].name, part->record.files[i].name))
                        status = error_set(error, NEBULA_CORRUPT, 0, "%s/%s is of another version", copying->transfer->to->root, key);
                else
                        part->record.files[i].is_apart = found.files[i].is_apart;
        part->is_found = !status;
        record_done(&found);
        return status;
}

static enum nebula_status claim(struct copying *copying, struct part *part, struct nebula_error *error)
{
        struct store *to = copying->transfer->to;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = adopt(copying, part, false, error);

        if (status == NEBULA_NOT_FOUND)
                status = adopt(copying, part, true, error);
        if (status && status != NEBULA_NOT_FOUND)
                return status;
        status = record_format(&part->record, &part->text, &part->size, error);
        if (!status && !part->is_found)
                status = part_key(copying, part, true, key, error);
        if (!status && !part->is_found)
                status = to->ops->put(to, key, part->text, part->size, STORE_ALWAYS, NULL, NULL, error);
        return status;
}

/* Writes the claim again from time to time, so that it stays young. */
static void beat(void *argument)
{
        struct copying *copying = argument;
        int64_t last = atomic_load(&copying->beat_ns), now = os->now_ns();
        const struct part *part = &copying->parts[0];
        char key[MANIFEST_KEY_MAX];

        if (now - last < BEAT_NS || !atomic_compare_exchange_strong(&copying->beat_ns, &last, now))
                return;
        if (!part_key(copying, part, true, key, NULL))
                copying->transfer->to->ops->put(copying->transfer->to, key, part->text, part->size, STORE_ALWAYS, NULL, NULL, NULL);
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

static enum nebula_status copy_file(struct copying *copying, const struct part *part, size_t index, struct nebula_error *error)
{
        const struct record_file *file = &part->record.files[index];
        const struct transfer_pulse pulse = { beat, copying };
        char from_key[MANIFEST_KEY_MAX], to_key[MANIFEST_KEY_MAX];
        enum nebula_status status = manifest_file_key(copying->source, part->files[index], from_key, error), there;

        if (!status)
                status = file_key(copying->directory, file->is_apart ? part->record.writing : NULL, file->name, to_key, error);
        if (status)
                return status;
        if (part->is_found) {
                there = check_there(copying, to_key, file);
                if (!there)
                        return NEBULA_OK;
                if (there == NEBULA_CORRUPT)
                        clear_apart(copying, to_key, file);
        }
        status = transfer_object(copying->transfer, from_key, to_key, file, &pulse, error);
        return status == NEBULA_BUSY && !check_there(copying, to_key, file) ? NEBULA_OK : status;
}

static enum nebula_status copy_files(struct copying *copying, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        atomic_store(&copying->beat_ns, os->now_ns());
        for (size_t p = 0; p < copying->part_count && !status; p++)
                for (size_t i = 0; i < copying->parts[p].record.file_count && !status; i++)
                        status = copy_file(copying, &copying->parts[p], i, error);
        return status;
}

/* The files are complete: replaces claims by records. */
static enum nebula_status show_records(const struct copying *copying, struct nebula_error *error)
{
        struct store *to = copying->transfer->to;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = NEBULA_OK;

        for (size_t p = 0; p < copying->part_count && !status; p++) {
                const struct part *part = &copying->parts[p];

                status = part_key(copying, part, false, key, error);
                if (!status)
                        status = to->ops->put(to, key, part->text, part->size, STORE_IF_ABSENT, NULL, NULL, error);
                if (status == NEBULA_BUSY) /* an earlier call's record, which adopt has compared */
                        status = NEBULA_OK;
                if (!status)
                        status = part_key(copying, part, true, key, error);
                if (!status)
                        store_drop(to, key);
        }
        return status;
}

static enum nebula_status fill_manifest(const struct copying *copying, struct manifest *manifest, struct nebula_error *error)
{
        const struct manifest *source = copying->source;
        enum nebula_status status = manifest_reserve(manifest, source->file_count, source->record_count, error);

        strcpy(manifest->tag, source->tag);
        strcpy(manifest->job, source->job);
        strcpy(manifest->run, source->run);
        strcpy(manifest->host, source->host);
        manifest->number = copying->next_number;
        manifest->generation = copying->generation;
        manifest->sequence = copying->sequence;
        manifest->step = source->step;
        manifest->world = source->world;
        manifest->line = source->line;
        for (size_t p = 0; p < copying->part_count && !status; p++) {
                const struct part *part = &copying->parts[p];
                struct manifest_record *entry = &manifest->records[manifest->record_count++];

                *entry = (struct manifest_record){ .size = part->size, .crc64 = sum_crc64(0, part->text, part->size),
                                                   .generation = copying->generation, .rank = part->record.ranks[0].rank };
                strcpy(entry->writing, part->record.writing);
                for (size_t i = 0; i < part->record.file_count && !status; i++) {
                        const struct record_file *own = &part->record.files[i];
                        const struct manifest_file file = { .name = own->name, .size = own->size, .generation = copying->generation,
                                                            .rank = own->rank, .record = (uint32_t)p, .is_apart = own->is_apart };

                        status = manifest_add_file(manifest, &file, error);
                }
        }
        return status ? status : manifest_sort_names(manifest, error);
}

static enum nebula_status enter(struct copying *copying, const struct manifest *manifest, struct nebula_error *error)
{
        struct store *to = copying->transfer->to;
        char *text;
        size_t size;
        enum nebula_status status = manifest_format(manifest, &text, &size, error);

        if (status)
                return status;
        status = index_put(to, manifest, error); /* before the entry, as an agent does */
        if (!status)
                status = tag_log_create(to, manifest->tag, manifest->number, text, size, error);
        if (status)
                index_remove(to, manifest, NULL);
        free(text);
        return status;
}

/* Checks that all objects exist and that no sweep removes them. Otherwise takes the entry back: NEBULA_BUSY. */
static enum nebula_status look_last(const struct copying *copying, const struct manifest *manifest, struct nebula_error *error)
{
        struct store *to = copying->transfer->to;
        enum nebula_status status = manifest_check_all(to, manifest, error);

        if (status != NEBULA_NOT_FOUND && status != NEBULA_CORRUPT && status != NEBULA_BUSY)
                return status;
        if (!manifest_is_gone(to, manifest))
                tag_log_take_back(to, manifest->tag, manifest->number, NULL);
        index_remove(to, manifest, NULL);
        if (error)
                error->status = NEBULA_BUSY;
        return NEBULA_BUSY;
}

/* The version is there already. Some stores refuse the removal of what it replaces. */
static enum nebula_status show(const struct copying *copying, const struct manifest *manifest, struct nebula_error *error)
{
        const struct transfer *transfer = copying->transfer;
        struct nebula_error failure = { 0 };
        enum nebula_status status = manifest_publish(transfer->to, manifest, &copying->log.manifest, &failure);

        if (status == NEBULA_BUSY && error)
                *error = failure;
        if (status && status != NEBULA_BUSY && transfer->complain)
                transfer->complain(transfer->argument, failure.message);
        return status == NEBULA_BUSY ? status : NEBULA_OK;
}

static enum nebula_status commit(struct copying *copying, struct nebula_error *error)
{
        struct store *to = copying->transfer->to;
        const struct manifest *before = &copying->log.manifest;
        struct manifest manifest = { 0 };
        uint64_t newest;
        enum nebula_status status = fill_manifest(copying, &manifest, error);

        if (!status)
                status = tag_log_number(to, copying->source->tag, &newest, error);
        if (!status && newest != copying->log.number)
                status = error_set(error, NEBULA_BUSY, 0, "\"%s\" was written or removed in %s meanwhile", manifest.tag, to->root);
        if (!status)
                status = enter(copying, &manifest, error);
        if (!status)
                status = look_last(copying, &manifest, error);
        if (!status && before->generation)
                index_remove(to, before, NULL);
        if (!status)
                status = show(copying, &manifest, error);
        manifest_done(&manifest);
        return status;
}

/* Continues the numbers of the destination's log, as a job's next writing of the tag would. */
static enum nebula_status choose_numbers(struct copying *copying, struct nebula_error *error)
{
        const struct manifest *source = copying->source, *before = &copying->log.manifest;

        copying->generation = source->generation > before->generation ? source->generation : before->generation + 1;
        copying->sequence = source->sequence > before->sequence ? source->sequence : before->sequence + 1;
        return document_check_numbers(source->tag, copying->generation, copying->sequence, error);
}

static enum nebula_status copy_once(struct copying *copying, unsigned attempt, struct nebula_error *error)
{
        const struct manifest *source = copying->source;
        enum nebula_status status = choose_numbers(copying, error);

        if (!status)
                status = tag_log_next(copying->transfer->to, source->tag, copying->log.number, &copying->next_number, error);
        copying->parts = calloc(source->record_count + 1, sizeof *copying->parts);
        if (!status && !copying->parts)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to copy \"%s\"", source->tag);
        while (!status && copying->part_count < source->record_count)
                status = make_part(copying, copying->part_count++, attempt, error);
        if (!status)
                status = find_places(copying, error);
        for (size_t p = 0; p < copying->part_count && !status; p++)
                status = claim(copying, &copying->parts[p], error);
        if (!status)
                status = copy_files(copying, error);
        if (!status)
                status = show_records(copying, error);
        return status ? status : commit(copying, error);
}

static void parts_done(struct copying *copying)
{
        for (size_t p = 0; p < copying->part_count; p++) {
                record_done(&copying->parts[p].record);
                free(copying->parts[p].files);
                free(copying->parts[p].text);
        }
        free(copying->parts);
}

/* NEBULA_BUSY: this try met a conflict; another one may succeed. */
static enum nebula_status attempt(const struct transfer *transfer, const struct manifest *source, unsigned number, enum transfer_state *ret_state,
                                  bool *ret_refused, struct nebula_error *error)
{
        struct copying copying = { .transfer = transfer, .source = source };
        enum nebula_status status = name_encode(source->tag, copying.directory, error);

        if (!status)
                status = manifest_end_removal(transfer->to, source->tag, error);
        if (!status)
                status = read_log(transfer, source, &copying.log, ret_state, error);
        if (!status && *ret_state == TRANSFER_OTHER && !transfer->replaces) {
                *ret_refused = true;
                status = error_set(error, NEBULA_BUSY, 0, "%s holds another version of \"%s\"", transfer->to->root, source->tag);
        } else if (!status && *ret_state != TRANSFER_PRESENT) {
                status = copy_once(&copying, number, error);
        }
        parts_done(&copying);
        tag_log_done(&copying.log);
        return status;
}

enum nebula_status transfer_version(const struct transfer *transfer, const struct manifest *source, enum transfer_state *ret_state,
                                    struct nebula_error *error)
{
        enum transfer_state state = TRANSFER_ABSENT;
        bool is_refused = false;
        enum nebula_status status = NEBULA_BUSY;

        for (unsigned try = 0; try < TRIES_MAX && status == NEBULA_BUSY && !is_refused; try++)
                status = attempt(transfer, source, try, &state, &is_refused, error);
        if (status == NEBULA_BUSY && !is_refused)
                status = error_set(error, NEBULA_STORAGE, 0, "\"%s\" in %s was written or removed during each of %d tries to copy it", source->tag,
                                   transfer->to->root, TRIES_MAX);
        if (!status)
                *ret_state = state;
        return status;
}
