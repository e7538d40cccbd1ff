/* Checks with one listing of the tag's objects that all objects of a manifest exist. The listing and the look at the last removal are
 * independent: a removal that has taken objects of the manifest before its entry was made had ended by then. */
#include <inttypes.h>
#include <string.h>

#include "base/error.h"
#include "store/lanes.h"
#include "store/manifest_check.h"
#include "store/manifest_keys.h"
#include "store/manifest_private.h"
#include "store/tag_log.h"

struct checking {
        struct store *store;
        const struct manifest *manifest;
        char directory[256];
        struct store_list objects;
        uint64_t removed;   /* the number of the last removal that has ended */
        int64_t written_ns; /* when the first of its own records was written */
};

static enum nebula_status find_object(const struct checking *checking, const char *key, uint64_t size, int64_t *ret_time_ns,
                                      struct nebula_error *error)
{
        const struct store_entry *entry = store_list_find(&checking->objects, key);
        struct store_entry found = { 0 };
        enum nebula_status status;

        if (!entry || entry->is_prefix || entry->is_link) { /* a listing may be old */
                status = checking->store->ops->stat(checking->store, key, &found, error);
                if (status)
                        return status;
                entry = &found;
        }
        status = store_check_size(checking->store, key, entry->size, size, error);
        if (!status)
                *ret_time_ns = entry->time_ns;
        store_entry_done(&found);
        return status;
}

static enum nebula_status check_records(struct checking *checking, struct nebula_error *error)
{
        const struct manifest *manifest = checking->manifest;
        int64_t time_ns;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < manifest->record_count && !status; i++) {
                const struct manifest_record *record = &manifest->records[i];

                status = record_key(checking->directory, record->writing, record->rank, key, error);
                if (!status)
                        status = find_object(checking, key, record->size, &time_ns, error);
                if (status == NEBULA_NOT_FOUND)
                        return error_set(error, NEBULA_NOT_FOUND, 0, "%.150s/%.300s, which has the checksums, is missing", checking->store->root, key);
                if (!status && record->sequence == manifest->sequence && time_ns < checking->written_ns)
                        checking->written_ns = time_ns;
        }
        return status;
}

static enum nebula_status check_files(const struct checking *checking, struct nebula_error *error)
{
        const struct manifest *manifest = checking->manifest;
        int64_t time_ns;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < manifest->file_count && !status; i++) {
                status = manifest_file_key(manifest, &manifest->files[i], key, error);
                if (!status)
                        status = find_object(checking, key, manifest->files[i].size, &time_ns, error);
                if (status == NEBULA_NOT_FOUND)
                        return error_set(error, NEBULA_NOT_FOUND, 0, "file \"%.200s\" of checkpoint \"%.100s\" is missing from %.150s",
                                         manifest->files[i].name, manifest->tag, checking->store->root);
        }
        return status;
}

/* A sweep lists the tag, makes its sweep object, and then looks for new entries of the log. If that object is younger than the version's
 * first record, the listing may contain these objects before their manifest existed, and the sweep may still remove them. */
static enum nebula_status check_sweeps(const struct checking *checking, struct nebula_error *error)
{
        for (size_t i = 0; i < checking->objects.count; i++) {
                const struct store_entry *object = &checking->objects.entries[i];
                const char *name = manifest_behind_private(object->key, checking->directory);

                if (name && manifest_entry(name).kind == ENTRY_SWEEP && object->time_ns >= checking->written_ns)
                        return error_set(error, NEBULA_BUSY, 0, "%s/%s: another program removes files of this writing, because it found no entry for it",
                                         checking->store->root, object->key);
        }
        return NEBULA_OK;
}

/* The newest entry of the log, by the listing. */
static uint64_t newest_entry(const struct checking *checking)
{
        uint64_t newest = 0;

        for (size_t i = 0; i < checking->objects.count; i++) {
                const char *name = manifest_behind_private(checking->objects.entries[i].key, checking->directory);
                struct manifest_entry entry = { .kind = ENTRY_FOREIGN };

                if (name)
                        entry = manifest_entry(name);
                if (entry.kind == ENTRY_MANIFEST && entry.number > newest)
                        newest = entry.number;
        }
        return newest;
}

static enum nebula_status check_log(const struct checking *checking, struct nebula_error *error)
{
        const struct manifest *manifest = checking->manifest;
        uint64_t newest = newest_entry(checking);
        enum nebula_status status = NEBULA_OK;

        if (newest < manifest->number) /* a listing may be old */
                status = tag_log_number(checking->store, manifest->tag, &newest, error);
        if (status)
                return status;
        if (newest == manifest->number && checking->removed < manifest->number)
                return NEBULA_OK;
        return error_set(error, NEBULA_NOT_FOUND, 0, "\"%.200s\" was written again or removed meanwhile", manifest->tag);
}

static enum nebula_status list_objects(struct checking *checking, struct nebula_error *error)
{
        char prefix[MANIFEST_KEY_MAX];
        enum nebula_status status = manifest_key(prefix, checking->directory, "", error);

        return status ? status : store_list_all(checking->store, prefix, true, &checking->objects, error);
}

static enum nebula_status read_one(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *error)
{
        struct checking *checking = argument;

        (void)stop;
        return index ? tag_log_removed(checking->store, checking->directory, &checking->removed, error) : list_objects(checking, error);
}

static enum nebula_status begin(struct checking *checking, bool is_last_look, struct nebula_error *error)
{
        uint32_t width = checking->store->ops->features(checking->store) & STORE_FAR ? 2 : 1;
        enum nebula_status status = name_encode(checking->manifest->tag, checking->directory, error);

        return status ? status : lanes_run(is_last_look ? 2 : 1, width, read_one, checking, error);
}

static enum nebula_status check(struct store *store, const struct manifest *manifest, bool is_last_look, struct nebula_error *error)
{
        struct checking checking = { .store = store, .manifest = manifest, .written_ns = INT64_MAX };
        enum nebula_status status = begin(&checking, is_last_look, error);

        if (!status)
                status = check_records(&checking, error);
        if (!status)
                status = check_files(&checking, error);
        if (!status && is_last_look)
                status = check_log(&checking, error);
        if (!status && is_last_look)
                status = check_sweeps(&checking, error);
        store_list_done(&checking.objects);
        return status;
}

enum nebula_status manifest_check_present(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        return check(store, manifest, false, error);
}

enum nebula_status manifest_check_all(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        return check(store, manifest, true, error);
}

struct guess {
        struct checking checking;
        const struct manifest *row;
        struct tag_log log;
};

static enum nebula_status read_guess(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *error)
{
        struct guess *guess = argument;

        (void)stop;
        if (!index)
                return list_objects(&guess->checking, error);
        return tag_log_entry(guess->checking.store, guess->row->tag, guess->row->number, &guess->log, error);
}

bool manifest_load_present(struct store *store, const struct manifest *row, struct manifest *ret_manifest)
{
        struct guess guess = { .checking = { .store = store, .written_ns = INT64_MAX }, .row = row };
        struct checking *checking = &guess.checking;
        const struct manifest *manifest = &guess.log.manifest;
        uint32_t needed = STORE_FAR | STORE_LISTS_FRESH;
        bool is_present;

        if ((store->ops->features(store) & needed) != needed || name_encode(row->tag, checking->directory, NULL))
                return false;
        checking->manifest = manifest;
        is_present = !lanes_run(2, 2, read_guess, &guess, NULL) && manifest->sequence == row->sequence &&
                     newest_entry(checking) == row->number && !check_records(checking, NULL) && !check_files(checking, NULL);
        store_list_done(&checking->objects);
        if (is_present)
                *ret_manifest = *manifest;
        else
                tag_log_done(&guess.log);
        return is_present;
}
