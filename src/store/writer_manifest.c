/* The lists of files and records of the manifest that a writer makes. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/document.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"
#include "store/record.h"
#include "store/signature.h"
#include "store/writer_private.h"
#include "sum/sum.h"

static enum nebula_status no_memory(const struct writer *writer, struct nebula_error *error)
{
        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", writer->manifest.tag);
}

/* `text`: the record's. */
static enum nebula_status add_record(struct writer *writer, const struct record *record, const char *text, size_t size, struct nebula_error *error)
{
        struct manifest *manifest = &writer->manifest;
        bool is_believed = writer->store->trust && signature_is_own(writer->store->trust, text, size);
        uint32_t index = (uint32_t)manifest->record_count;
        enum nebula_status status = manifest_reserve(manifest, record->file_count, 1, error);

        if (status)
                return status;
        manifest->records[index] = (struct manifest_record){ .size = size, .crc64 = sum_crc64(0, text, size), .sequence = manifest->sequence,
                                                             .rank = record->ranks[0].rank };
        strcpy(manifest->records[index].writing, record->writing);
        manifest->record_count++;
        if (writer->source && writer->source->keep)
                writer->source->keep(writer->argument, text, size);
        for (size_t i = 0; i < record->file_count && !status; i++) {
                const struct record_file *own = &record->files[i];
                const struct manifest_file file = { .name = own->name, .size = own->size, .rank = own->rank, .record = index,
                                                    .is_apart = own->is_apart };

                status = manifest_add_file(manifest, &file, error);
                if (!status)
                        status = writer_note_digest(writer, own, is_believed, error);
                manifest->referred += own->referred;
        }
        return status;
}

/* Adds the files of the version before that carry over, with their records. */
static enum nebula_status add_carried(struct writer *writer, const bool *is_carried, struct nebula_error *error)
{
        struct manifest *manifest = &writer->manifest;
        const struct manifest *before = &writer->before.manifest;
        uint32_t *moved = calloc(before->record_count + 1, sizeof *moved); /* 1 + index in `manifest` of a record of `before` */
        enum nebula_status status;

        if (!moved)
                return no_memory(writer, error);
        status = manifest_reserve(manifest, before->file_count, before->record_count, error);
        for (size_t i = 0; i < before->file_count && !status; i++) {
                struct manifest_file file = before->files[i];

                if (!is_carried[i])
                        continue;
                if (!moved[file.record]) {
                        manifest->records[manifest->record_count++] = before->records[file.record];
                        moved[file.record] = (uint32_t)manifest->record_count;
                }
                file.record = moved[file.record] - 1;
                status = manifest_add_file(manifest, &file, error);
        }
        free(moved);
        return status;
}

enum nebula_status writer_compile(struct writer *writer, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < writer->share_count && !status; i++)
                status = add_record(writer, &writer->shares[i].record, writer->shares[i].text, writer->shares[i].size, error);
        if (!status && writer->is_carried)
                status = add_carried(writer, writer->is_carried, error);
        return status ? status : manifest_sort_names(&writer->manifest, error);
}

/* A log entry that is younger than the files of a record may be a removal that has listed them and still removes them, so such a record does not
 * count. A failed attempt may have left a record whose files are gone, so ranks that another record covers are not taken twice. */
static bool adds_ranks(const struct writer *writer, const uint8_t *covered, const struct record *record)
{
        const struct manifest *manifest = &writer->manifest;

        if (strcmp(record->run, manifest->run) || strcmp(record->tag, manifest->tag) ||
            (writer->goal->is_earlier ? record->number > manifest->number : record->number != manifest->number) || record->world != writer->goal->world)
                return false;
        for (size_t i = 0; i < record->rank_count; i++)
                if (covered[record->ranks[i].rank])
                        return false;
        return true;
}

static enum nebula_status gather_record(struct writer *writer, uint8_t *covered, const char *key, struct nebula_error *error)
{
        struct record record = { 0 };
        char *text;
        size_t size;
        enum nebula_status status = document_get(writer->store, key, &text, &size, NULL, error);

        if (status)
                return status == NEBULA_NOT_FOUND ? NEBULA_OK : status;
        if (!record_parse(text, size, &record, NULL) && adds_ranks(writer, covered, &record)) {
                for (size_t i = 0; i < record.rank_count; i++)
                        covered[record.ranks[i].rank] = 1;
                status = add_record(writer, &record, text, size, error);
        }
        record_done(&record);
        free(text);
        return status;
}

static int newest_first(const void *a, const void *b)
{
        const struct store_entry *x = a, *y = b;

        return x->time_ns != y->time_ns ? (x->time_ns < y->time_ns ? 1 : -1) : strcmp(x->key, y->key);
}

static enum nebula_status list_records(const struct writer *writer, struct store_list *ret_list, struct nebula_error *error)
{
        char path[WRITING_MAX + 16], prefix[MANIFEST_KEY_MAX];
        struct store_list list;
        size_t count = 0;
        enum nebula_status status;

        snprintf(path, sizeof path, MANIFEST_DIRECTORY "/%s", writer->goal->prefix);
        status = manifest_key(prefix, writer->directory, path, error);
        if (!status)
                status = store_list_all(writer->store, prefix, false, &list, error);
        if (status)
                return status;
        for (size_t i = 0; i < list.count; i++) {
                if (strstr(list.entries[i].key, ".record-"))
                        list.entries[count++] = list.entries[i];
                else
                        store_entry_done(&list.entries[i]);
        }
        list.count = count;
        if (count)
                qsort(list.entries, count, sizeof *list.entries, newest_first);
        *ret_list = list;
        return NEBULA_OK;
}

/* Each record is read once, and none before there is one per node. */
static enum nebula_status gather_records(struct writer *writer, uint8_t *covered, struct nebula_error *error)
{
        const struct writer_goal *goal = writer->goal;
        struct store_list list;
        enum nebula_status status = list_records(writer, &list, error);

        if (status)
                return status;
        if (list.count < goal->record_count && !goal->is_late)
                status = error_set(error, NEBULA_BUSY, 0, "\"%.200s\" has %zu of %zu records: each node writes one", writer->manifest.tag,
                                   list.count, goal->record_count);
        for (size_t i = 0; i < list.count && !status; i++)
                status = gather_record(writer, covered, list.entries[i].key, error);
        store_list_done(&list);
        for (size_t i = 0; i < goal->rank_count && !status; i++)
                if (!covered[goal->ranks[i]])
                        status = error_set(error, NEBULA_BUSY, 0, "the record of rank %" PRIu32 " of \"%.200s\", which is on another node, has not arrived",
                                           goal->ranks[i], writer->manifest.tag);
        return status;
}

/* Within a node, the last file of a name wins. Two nodes that saved one name have no order, and readers refuse a manifest that names both files. */
static enum nebula_status refuse_shared_names(struct writer *writer, struct nebula_error *error)
{
        const struct manifest *manifest = &writer->manifest;
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 1; i < manifest->file_count && !status; i++) {
                const struct manifest_file *a = &manifest->files[manifest->by_name[i - 1]], *b = &manifest->files[manifest->by_name[i]];

                if (strcmp(a->name, b->name))
                        continue;
                writer->has_shared_names = true;
                status = error_set(error, NEBULA_INVALID, 0,
                                   "rank %" PRIu32 " and rank %" PRIu32 ", which are on different nodes, both saved file \"%.150s\" of "
                                   "\"%.150s\": give each its own name", a->rank < b->rank ? a->rank : b->rank,
                                   a->rank < b->rank ? b->rank : a->rank, a->name, manifest->tag);
        }
        return status;
}

/* Files of the version before that no rank has written again, except those of ranks outside the world. */
static enum nebula_status carry_the_rest(struct writer *writer, struct nebula_error *error)
{
        const struct manifest *before = &writer->before.manifest;
        bool *is_carried = calloc(before->file_count + 1, sizeof *is_carried);
        enum nebula_status status;

        if (!is_carried)
                return no_memory(writer, error);
        for (size_t i = 0; i < before->file_count; i++)
                is_carried[i] = before->files[i].rank < writer->goal->world && !manifest_find_file(&writer->manifest, before->files[i].name);
        status = add_carried(writer, is_carried, error);
        free(is_carried);
        return status ? status : manifest_sort_names(&writer->manifest, error);
}

enum nebula_status writer_gather(struct writer *writer, struct nebula_error *error)
{
        uint8_t *covered = calloc(writer->goal->world, 1);
        enum nebula_status status = covered ? gather_records(writer, covered, error) : no_memory(writer, error);

        free(covered);
        if (!status)
                status = manifest_sort_names(&writer->manifest, error);
        if (!status)
                status = refuse_shared_names(writer, error);
        return status ? status : carry_the_rest(writer, error);
}
