/* Makes the manifest of a version of several nodes from the records of all. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/world.h"
#include "agent/log.h"
#include "agent/persist/persist_private.h"
#include "base/error.h"
#include "os/os.h"
#include "store/announce.h"
#include "store/document.h"
#include "store/tag_log.h"
#include "sum/sum.h"

#define SECOND_NS INT64_C(1000000000)

/* The result of one look at the tag's records. */
struct gathering {
        struct store *store;
        struct plan *plan;
        const struct committed *committed;
        uint8_t *covered; /* per rank of the world */
        bool is_late;     /* the nodes had time: read the records that are there, even if some are missing */
};

bool persist_is_writer(const struct version *version, const struct plan *plan)
{
        bool writes = version->nodes.leads;

        for (size_t i = 0; i < plan->part_count; i++)
                writes = writes || !plan->parts[i].rank;
        return writes;
}

static enum nebula_status rank_missing(const struct gathering *gathering, uint32_t rank, struct nebula_error *error)
{
        return error_set(error, NEBULA_BUSY, 0, "the record of rank %" PRIu32 " of \"%.200s\", which is on another node, has not arrived", rank,
                         gathering->plan->tag);
}

/* A log entry that is younger than the files of a record may be a removal that has listed them and still removes them, so such a
 * record does not count. A failed attempt may have left a record whose files are gone, so ranks that another record covers are not
 * taken twice. */
static bool adds_ranks(const struct gathering *gathering, const struct record *record)
{
        const struct plan *plan = gathering->plan;

        if (strcmp(record->run, plan->run) || strcmp(record->tag, plan->tag) || record->number != plan->next_number ||
            record->generation != plan->generation ||
            record->world != plan->manifest.world)
                return false;
        for (size_t i = 0; i < record->rank_count; i++)
                if (gathering->covered[record->ranks[i].rank])
                        return false;
        return true;
}

static enum nebula_status add_record(struct gathering *gathering, const struct record *record, const char *text, size_t size,
                                     struct nebula_error *error)
{
        struct manifest *manifest = &gathering->plan->manifest;
        struct manifest_record *entry;
        enum nebula_status status = manifest_reserve(manifest, record->file_count, 1, error);

        if (status)
                return status;
        entry = &manifest->records[manifest->record_count++];
        *entry = (struct manifest_record){ .size = size, .generation = record->generation, .rank = record->ranks[0].rank,
                                           .crc64 = sum_crc64(0, text, size) };
        strcpy(entry->writing, record->writing);
        for (size_t i = 0; i < record->rank_count; i++)
                gathering->covered[record->ranks[i].rank] = 1;
        for (size_t i = 0; i < record->file_count && !status; i++) {
                const struct record_file *own = &record->files[i];
                const struct manifest_file file = {
                        .name = own->name, .size = own->size, .generation = record->generation, .rank = own->rank,
                        .record = (uint32_t)(entry - manifest->records), .is_apart = own->is_apart,
                };

                status = manifest_add_file(manifest, &file, error);
                manifest->referred += own->referred;
        }
        return status;
}

static enum nebula_status gather_record(struct gathering *gathering, const char *key, struct nebula_error *error)
{
        struct record record = { 0 };
        char *text;
        size_t size;
        enum nebula_status status = document_get(gathering->store, key, &text, &size, NULL, error);

        if (status)
                return status == NEBULA_NOT_FOUND ? NEBULA_OK : status;
        if (!record_parse(text, size, &record, NULL) && adds_ranks(gathering, &record))
                status = add_record(gathering, &record, text, size, error);
        record_done(&record);
        free(text);
        return status;
}

static int newest_first(const void *a, const void *b)
{
        const struct store_entry *x = a, *y = b;

        return x->time_ns != y->time_ns ? (x->time_ns < y->time_ns ? 1 : -1) : strcmp(x->key, y->key);
}

/* Each record is read once, and none before there is one per node. */
static enum nebula_status gather_records(struct gathering *gathering, const struct version *version, struct nebula_error *error)
{
        char prefix[MANIFEST_KEY_MAX], writing[WRITING_MAX];
        struct store_list list;
        size_t count = 0;
        enum nebula_status status;

        writing_prefix(version->job->name, version->run, version->nodes.writing, writing);
        snprintf(prefix, sizeof prefix, "%s/" MANIFEST_DIRECTORY "/%s", gathering->plan->directory, writing);
        status = store_list_all(gathering->store, prefix, false, &list, error);
        if (status)
                return status;
        for (size_t i = 0; i < list.count; i++) {
                if (strstr(list.entries[i].key, ".record-"))
                        list.entries[count++] = list.entries[i];
                else
                        store_entry_done(&list.entries[i]);
        }
        list.count = count;
        if (count < gathering->committed->node_count && !gathering->is_late)
                status = error_set(error, NEBULA_BUSY, 0, "\"%.200s\" has %zu of %zu records: each node writes one", gathering->plan->tag,
                                   count, gathering->committed->node_count);
        if (!status && count)
                qsort(list.entries, count, sizeof *list.entries, newest_first);
        for (size_t i = 0; i < count && !status; i++)
                status = gather_record(gathering, list.entries[i].key, error);
        store_list_done(&list);
        for (size_t i = 0; i < gathering->committed->rank_count && !status; i++)
                if (!gathering->covered[gathering->committed->ranks[i]])
                        status = rank_missing(gathering, gathering->committed->ranks[i], error);
        return status;
}

static int compare_names(const void *a, const void *b)
{
        const struct manifest_file *const *one = a, *const *other = b;

        return strcmp((*one)->name, (*other)->name);
}

/* Within a node, the last file of a name wins. Two nodes that saved one name have no order, and readers refuse a manifest that names
 * both files. */
static enum nebula_status refuse_shared_names(const struct plan *plan, struct nebula_error *error)
{
        size_t count = plan->manifest.file_count;
        const struct manifest_file **files = calloc(count + 1, sizeof *files);
        enum nebula_status status = NEBULA_OK;

        if (!files)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", plan->tag);
        for (size_t i = 0; i < count; i++)
                files[i] = &plan->manifest.files[i];
        qsort(files, count, sizeof *files, compare_names);
        for (size_t i = 1; i < count && !status; i++) {
                const struct manifest_file *a = files[i - 1], *b = files[i];

                if (!strcmp(a->name, b->name))
                        status = error_set(error, NEBULA_INVALID, 0,
                                           "rank %" PRIu32 " and rank %" PRIu32 ", which are on different nodes, both saved file \"%.150s\" of "
                                           "\"%.150s\": give each its own name", a->rank < b->rank ? a->rank : b->rank,
                                           a->rank < b->rank ? b->rank : a->rank, a->name, plan->tag);
        }
        free(files);
        return status;
}

/* Adds files of the earlier version that no rank has written again, except those of ranks outside the world. */
static enum nebula_status add_carried(struct plan *plan, struct nebula_error *error)
{
        const struct manifest *before = &plan->before;
        bool *is_carried = calloc(before->file_count + 1, sizeof *is_carried);
        enum nebula_status status;

        if (!is_carried)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", plan->tag);
        for (size_t i = 0; i < before->file_count; i++)
                is_carried[i] = before->files[i].rank < plan->manifest.world;
        for (size_t i = 0; i < plan->manifest.file_count; i++) {
                const struct manifest_file *old = manifest_find_file(before, plan->manifest.files[i].name);

                if (old)
                        is_carried[old - before->files] = false;
        }
        status = persist_add_carried(plan, is_carried, error);
        free(is_carried);
        return status;
}

/* False within the time in which documents usually arrive by themselves. */
static bool has_waited(const struct version *version)
{
        return os->now_ns() - version->nodes.waiting_since_ns > SECOND_NS;
}

/* Call while other nodes have not written their records. A suspended agent may have replaced the document that tells them to, and a
 * program that removed the tag may have removed this node's record: this function writes both again. */
static void keep_others_going(struct catalogue *catalogue, struct store *store, const struct job *job, struct version *version, struct plan *plan)
{
        bool is_due = !(version->nodes.poll_count & (version->nodes.poll_count - 1)); /* less and less often */

        world_keep_committed(catalogue, store, version);
        if (!is_due || plan_carry_over(store, plan, NULL) || plan_set_number(store, plan, NULL) || persist_is_recorded(store, job, version, plan))
                return;
        log_event(LOG_LEVEL_WARN, "%s: another program has removed the record of this node, or is about to: the node writes its share again",
                  plan->tag);
        catalogue_lock(catalogue);
        version->persist.recorded_here = false;
        catalogue_unlock(catalogue);
}

static enum nebula_status read_committed(struct store *store, const struct version *version, const struct plan *plan, struct committed *ret_committed, struct nebula_error *error)
{
        struct committed committed = { 0 };
        enum nebula_status status = world_read_committed(store, plan->tag, &committed, error);

        if (status)
                return status != NEBULA_NOT_FOUND && status != NEBULA_CORRUPT ? status :
                               error_set(error, NEBULA_BUSY, 0, "committed.json of \"%.200s\" no longer exists", plan->tag);
        *ret_committed = committed;
        if (strcmp(committed.of.run, plan->run) || committed.of.world != version->world || committed.generation != plan->generation) /* when that version is complete, this one fails */
                return error_set(error, NEBULA_BUSY, 0, "committed.json of \"%.200s\" belongs to a later writing", plan->tag);
        return NEBULA_OK;
}

/* Removes the records, so that each node writes its share again: the files were removed, or are about to be. */
static void drop_records(struct catalogue *catalogue, struct store *store, struct version *version, const struct plan *plan)
{
        const struct manifest *manifest = &plan->manifest;
        char key[MANIFEST_KEY_MAX];

        for (size_t i = 0; i < manifest->record_count; i++) {
                const struct manifest_record *record = &manifest->records[i];

                if (record->generation == manifest->generation && !record_key(plan->directory, record->writing, record->rank, key, NULL))
                        store_remove_one(store, key, NULL);
        }
        catalogue_lock(catalogue);
        version->persist.recorded_here = false;
        catalogue_unlock(catalogue);
}

static enum nebula_status write_manifest(struct catalogue *catalogue, struct store *store, const struct job *job, struct version *version,
                                         struct plan *plan, const struct committed *committed, struct nebula_error *error)
{
        struct gathering gathering = { .store = store, .plan = plan, .committed = committed, .is_late = has_waited(version) };
        enum nebula_status status;

        persist_fill_manifest(job, version, plan);
        status = plan_set_number(store, plan, error);
        if (status)
                return status;
        gathering.covered = calloc(version->world, 1);
        status = gathering.covered ? gather_records(&gathering, version, error) :
                                     error_set(error, NEBULA_NO_MEMORY, 0, "no memory for %" PRIu32 " ranks", version->world);
        free(gathering.covered);
        if (!status) {
                status = refuse_shared_names(plan, error);
                plan->record_stays = status != NEBULA_OK;
        }
        if (!status)
                status = add_carried(plan, error);
        if (!status)
                status = persist_commit(catalogue, store, version, plan, error);
        if (!status)
                status = persist_check(store, plan, false, error);
        if (plan->is_taken_back)
                drop_records(catalogue, store, version, plan);
        return status;
}

/* Whether this node writes the manifest, or has to now, because the node of rank 0 did not for a while. */
static bool has_to_write(const struct catalogue *catalogue, const struct version *version, const struct plan *plan)
{
        return persist_is_writer(version, plan) || os->now_ns() - version->nodes.waiting_since_ns > (int64_t)catalogue->takeover_s * SECOND_NS;
}

/* All records of a version are for one entry of the log, so the manifest has the number of this node's record. */
bool persist_only_waits(const struct catalogue *catalogue, struct store *store, const struct version *version, const struct plan *plan)
{
        struct store_entry entry;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status;

        if (!plan->spread || !version->persist.recorded_here || !version->persist.log_number || has_to_write(catalogue, version, plan) ||
            has_waited(version) || tag_log_key(plan->directory, version->persist.log_number, key, NULL))
                return false;
        status = store->ops->stat(store, key, &entry, NULL);
        if (!status)
                store_entry_done(&entry);
        return status == NEBULA_NOT_FOUND;
}

enum nebula_status persist_not_arrived(const struct plan *plan, struct nebula_error *error)
{
        return error_set(error, NEBULA_BUSY, 0, "the manifest of \"%.200s\", which the node of rank 0 writes, has not arrived", plan->tag);
}

/* Call when this node's record is in storage. The node of rank 0 writes the manifest once all records are there. If it does not for a
 * while, any other node does. The other nodes look for the manifest. */
enum nebula_status persist_gather(struct catalogue *catalogue, struct store *store, struct job *job, struct version *version,
                                  struct plan *plan, struct nebula_error *error)
{
        struct committed committed = { 0 };
        bool writes = has_to_write(catalogue, version, plan);
        enum nebula_status status;

        if (!writes && has_waited(version))
                keep_others_going(catalogue, store, job, version, plan);
        if (!writes)
                return persist_not_arrived(plan, error);
        status = read_committed(store, version, plan, &committed, error);
        if (!status)
                status = write_manifest(catalogue, store, job, version, plan, &committed, error);
        committed_done(&committed);
        if (!status)
                persist_conclude(catalogue, store, job, version, plan, true);
        if (status == NEBULA_BUSY && has_waited(version))
                keep_others_going(catalogue, store, job, version, plan);
        return status;
}
