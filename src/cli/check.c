#include "cli/check.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/mapped.h"
#include "cli/sparse.h"
#include "cli/term.h"
#include "cli/vouch.h"
#include "cli/zipcheck.h"
#include "os/os.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/record.h"
#include "store/scan.h"
#include "store/signature.h"
#include "store/tag_log.h"
#include "store/verify.h"

bool check_ok(const json_t *object)
{
        return json_is_true(json_object_get(object, "ok"));
}

static json_t *new_file(const char *name, const char *path, uint64_t size)
{
        return json_pack("{s:s, s:s, s:I, s:b, s:[]}", "name", name, "path", path, "size", (json_int_t)size, "ok", 1,
                         "damage");
}

static void add_damage(json_t *file, uint64_t offset, uint64_t size, const char *message)
{
        json_t *damages = json_object_get(file, "damage");
        size_t at = json_array_size(damages);

        json_object_set_new(file, "ok", json_false());
        /* Sorted by offset: threads find damage in any order, and people read it in the order of the file. */
        while (at && json_integer_value(json_object_get(json_array_get(damages, at - 1), "offset")) > (json_int_t)offset)
                at--;
        json_array_insert_new(damages, at, json_pack("{s:I, s:I, s:s}", "offset", (json_int_t)offset, "size", (json_int_t)size,
                                                     "message", message));
}

/* One file that verify_file is checking. */
struct file_check {
        json_t *file;
        struct nebula_error *outage;
        struct zipcheck zip;
        bool has_zip;
};

static struct {
        double bytes_per_s; /* 0: no limit */
        double owed_s;      /* time that the bytes so far should have taken, after `since_ns` */
        int64_t since_ns;
} rate;

void check_set_rate(double bytes_per_s)
{
        rate.bytes_per_s = bytes_per_s;
        rate.since_ns = os->now_ns();
        rate.owed_s = 0;
}

void check_read(uint64_t bytes)
{
        double left_s;

        progress_add(bytes);
        if (rate.bytes_per_s <= 0)
                return;
        rate.owed_s += (double)bytes / rate.bytes_per_s;
        left_s = rate.owed_s - (double)(os->now_ns() - rate.since_ns) / 1e9;
        if (left_s > 0)
                os->sleep_ms((int64_t)(left_s * 1000) + 1);
        else
                check_set_rate(rate.bytes_per_s); /* storage is slower: time that was not used is not made up for */
}

static void on_progress(void *argument, uint64_t bytes)
{
        (void)argument;
        check_read(bytes);
}

static bool is_outage(const struct nebula_error *error, struct nebula_error *outage)
{
        if (store_class(error) != STORE_AGAIN)
                return false;
        *outage = *error;
        return true;
}

static void on_damage(void *argument, uint64_t offset, uint64_t size, const struct nebula_error *error)
{
        struct file_check *check = argument;

        if (!is_outage(error, check->outage))
                add_damage(check->file, offset, size, error->message);
}

static void on_chunk(void *argument, const void *data, uint64_t offset, uint64_t size)
{
        struct file_check *check = argument;

        if (check->has_zip)
                zipcheck_chunk(&check->zip, data, offset, size);
}

/* Adds the names of the damaged records: records that the range touches and whose own checksum is wrong too. */
static void name_records(const struct zipcheck *zip, json_t *damage)
{
        uint64_t offset = (uint64_t)json_integer_value(json_object_get(damage, "offset"));
        uint64_t end = offset + (uint64_t)json_integer_value(json_object_get(damage, "size"));
        json_t *records = json_array();

        for (size_t i = 0; i < zip->entry_count && end > offset; i++) {
                const struct zip_entry *entry = &zip->entries[i];

                if (entry->payload_offset < end && entry->payload_offset + entry->size > offset && zipcheck_wrong(zip, i))
                        json_array_append_new(records, json_string(entry->name));
        }
        if (json_array_size(records))
                json_object_set(damage, "record_names", records);
        json_decref(records);
}

/* Checks the zip's own checksums. They show which records are damaged, and find an image that was never sealed. */
static void judge_zip(struct file_check *check)
{
        json_t *damages = json_object_get(check->file, "damage");
        bool was_sound = check_ok(check->file);
        char message[400];

        for (size_t i = 0; i < json_array_size(damages); i++)
                name_records(&check->zip, json_array_get(damages, i));
        for (size_t i = 0; i < check->zip.entry_count && was_sound; i++) {
                const struct zip_entry *entry = &check->zip.entries[i];

                if (!zipcheck_wrong(&check->zip, i))
                        continue;
                snprintf(message, sizeof message, "the record %s does not match its CRC-32", entry->name);
                add_damage(check->file, entry->payload_offset, entry->size, message);
        }
}

static void begin_zip(struct file_check *check, struct sparse *sparse, struct nebula_error *ret_unsound)
{
        struct zip_entry *entries = NULL;
        size_t count;
        enum nebula_status status = sparse_end(sparse, sparse_records(sparse, &entries, &count, ret_unsound), ret_unsound);

        if (status)
                free(entries);
        check->has_zip = !status && !zipcheck_begin(&check->zip, entries, count, sparse->recorded.chunk_bytes, ret_unsound);
}

static void check_bytes(struct store *store, const char *key, const struct record_file *recorded, json_t *file, struct nebula_error *outage)
{
        struct file_check check = { .file = file, .outage = outage };
        const struct verify_watch watch = {
                .argument = &check, .progress = on_progress, .damage = on_damage, .chunk = on_chunk,
        };
        struct nebula_error unsound = { 0 };
        struct sparse sparse = { 0 };

        if (recorded->is_zip && !sparse_open_recorded(store, key, recorded, &sparse, &unsound))
                begin_zip(&check, &sparse, &unsound);
        sparse_close(&sparse);
        if (!unsound.status || !is_outage(&unsound, outage))
                verify_file(store, key, recorded, &watch, NULL);
        if (check.has_zip)
                judge_zip(&check);
        else if (recorded->is_zip && check_ok(file))
                add_damage(file, 0, recorded->size, unsound.message);
        if (check.has_zip)
                zipcheck_done(&check.zip);
}

static json_t *new_stored_file(const struct manifest *manifest, const struct manifest_file *file)
{
        char path[MANIFEST_KEY_MAX] = "";

        manifest_file_path(manifest, file, path, NULL);
        return new_file(file->name, path, file->size);
}

static json_t *check_file(struct store *store, const struct manifest *manifest, const struct manifest_file *entry,
                          struct record *record, struct nebula_error *outage)
{
        json_t *file = new_stored_file(manifest, entry);
        struct record_file recorded = { 0 };
        struct nebula_error error;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = record_take_file(record, entry, &recorded, &error);

        if (!status)
                status = manifest_file_key(manifest, entry, key, &error);
        if (file && !status)
                check_bytes(store, key, &recorded, file, outage);
        if (file && status)
                add_damage(file, 0, entry->size, error.message);
        record_file_done(&recorded);
        return file;
}

/* Checks a record and all files that it lists. `order`: indices of files, those of this record first. */
static void check_record(struct store *store, const struct manifest *manifest, size_t index, const uint32_t *order, size_t count,
                         const char *only_name, struct check_part *part, json_t *version, struct nebula_error *outage)
{
        const struct manifest_record *entry = &manifest->records[index];
        char key[MANIFEST_KEY_MAX] = "", *path = key;
        json_t *document;
        struct record record = { 0 };
        struct nebula_error error;
        enum nebula_status lost = manifest_load_record(store, manifest, index, &record, &error);

        if (lost && is_outage(&error, outage))
                return;
        if (!record_key("", entry->writing, entry->rank, key, NULL))
                path = key + 1;
        document = new_file(path, path, entry->size);
        if (lost) {
                add_damage(document, 0, entry->size, error.message);
                json_object_set_new(version, "ok", json_false());
        }
        json_array_append_new(json_object_get(version, "documents"), document);
        for (size_t i = 0; i < count && manifest->files[order[i]].record == index && !outage->status && !(part && part->is_over); i++) {
                const struct manifest_file *one = &manifest->files[order[i]];
                json_t *file;

                if (only_name && strcmp(only_name, one->name))
                        continue;
                if (part && part->done < part->skip) {
                        part->done++;
                        continue;
                }
                if (lost) {
                        file = new_stored_file(manifest, one);
                        add_damage(file, 0, one->size, "cannot be checked: the record that holds its checksums is damaged");
                } else {
                        file = check_file(store, manifest, one, &record, outage);
                }
                if (!check_ok(file))
                        json_object_set_new(version, "ok", json_false());
                if (part && !check_ok(file))
                        part->has_damage = true;
                json_array_append_new(json_object_get(version, "files"), file);
                if (part && !outage->status) {
                        part->done++;
                        part->is_over = part->ends(part->argument, one->size);
                }
        }
        record_done(&record);
}

static bool vouches_for(const struct manifest *manifest, size_t index, const char *name)
{
        const struct manifest_file *file = manifest_find_file(manifest, name);

        return file && file->record == index;
}

json_t *check_version(struct store *store, const struct manifest *manifest, const char *only_name, struct check_part *part,
                      struct nebula_error *ret_outage)
{
        json_t *version = json_pack("{s:s, s:I, s:b, s:I, s:[], s:[]}", "tag", manifest->tag, "sequence",
                                    (json_int_t)manifest->sequence, "ok", 1, "size",
                                    (json_int_t)manifest_size(manifest), "documents", "files");
        uint32_t *order = manifest_files_by_record(manifest);

        *ret_outage = (struct nebula_error){ 0 };
        for (size_t i = 0, at = 0; version && order && i < manifest->record_count && !ret_outage->status && !(part && part->is_over); i++) {
                if (!only_name || vouches_for(manifest, i, only_name))
                        check_record(store, manifest, i, order + at, manifest->file_count - at, only_name, part, version, ret_outage);
                while (at < manifest->file_count && manifest->files[order[at]].record == i)
                        at++;
        }
        if (!order) { /* no memory: NULL, as from json_pack */
                json_decref(version);
                version = NULL;
        }
        free(order);
        return version;
}

/* Whether the other file has the same bytes where this one is damaged. */
static bool has_same(const struct record_file *own, const struct record_file *other, const json_t *damages)
{
        for (size_t i = 0; own->chunk_bytes == other->chunk_bytes && i < json_array_size(damages); i++) {
                const json_t *one = json_array_get(damages, i);
                size_t chunk = (size_t)json_integer_value(json_object_get(one, "offset")) / own->chunk_bytes;

                if (chunk < own->chunk_count && chunk < other->chunk_count && own->chunks[chunk] == other->chunks[chunk])
                        return true;
        }
        return false;
}

static void name_sharers(struct store *store, const struct manifest *manifest, const struct manifest_scan *scan, json_t *file)
{
        const char *name = json_string_value(json_object_get(file, "name"));
        struct record_file own = { 0 };
        json_t *tags = json_array();

        if (manifest_load_file(store, manifest, name, &own, NULL)) {
                json_decref(tags);
                return;
        }
        for (size_t i = 0; i < scan->count; i++) {
                struct record_file other = { 0 };

                if (!strcmp(scan->manifests[i].tag, manifest->tag) || manifest_load_file(store, &scan->manifests[i], name, &other, NULL))
                        continue;
                if (has_same(&own, &other, json_object_get(file, "damage")))
                        json_array_append_new(tags, json_string(scan->manifests[i].tag));
                record_file_done(&other);
        }
        record_file_done(&own);
        if (json_array_size(tags))
                json_object_set(file, "same_in", tags);
        json_decref(tags);
}

void check_name_sharers(struct store *store, const struct manifest *manifest, json_t *version)
{
        json_t *files = json_object_get(version, "files"), *file;
        struct manifest_scan scan;
        size_t i;

        if (check_ok(version) || manifest_scan(store, &scan, NULL))
                return;
        json_array_foreach(files, i, file)
                if (!check_ok(file))
                        name_sharers(store, manifest, &scan, file);
        manifest_scan_done(&scan);
}

/* A file that is sound by its checksums, which another program can compute, too. */
static void compare_signed(struct store *store, const struct manifest *manifest, json_t *file)
{
        const char *name = json_string_value(json_object_get(file, "name"));
        struct record_file recorded = { 0 };
        struct nebula_error error = { 0 };
        char key[MANIFEST_KEY_MAX];
        uint8_t known[32], found[32];

        if (!check_ok(file) || signature_known(store, manifest, name, known))
                return;
        if (manifest_file_key(manifest, manifest_find_file(manifest, name), key, &error) || manifest_load_file(store, manifest, name, &recorded, &error) ||
            vouch_sum(store, key, &recorded, found, &error))
                add_damage(file, 0, recorded.size, error.message);
        else if (memcmp(known, found, sizeof known))
                add_damage(file, 0, recorded.size, "it is not what was signed: its SHA-256 differs, though the checksums fit. Something has replaced it");
        record_file_done(&recorded);
}

void check_signatures(struct store *store, const struct manifest *manifest, json_t *version)
{
        json_t *signatures = vouch_list(store, manifest), *files = json_object_get(version, "files"), *file, *one;
        size_t i;

        json_array_foreach(signatures, i, one) {
                json_t *document;

                if (strcmp(json_string_value(json_object_get(one, "state")), "wrong"))
                        continue;
                document = new_file("the signature", json_string_value(json_object_get(one, "key")), 0);
                add_damage(document, 0, 0, json_string_value(json_object_get(one, "reason")));
                json_array_append_new(json_object_get(version, "documents"), document);
                json_object_set_new(version, "ok", json_false());
        }
        json_array_foreach(files, i, file) {
                compare_signed(store, manifest, file);
                if (!check_ok(file))
                        json_object_set_new(version, "ok", json_false());
        }
        json_object_set_new(version, "signatures", signatures);
}

json_t *check_broken(struct store *store, const char *tag, const struct nebula_error *error)
{
        json_t *version = json_pack("{s:s, s:I, s:b, s:I, s:[], s:[]}", "tag", tag, "sequence", (json_int_t)0, "ok", 0,
                                    "size", (json_int_t)0, "documents", "files");
        char directory[256], key[MANIFEST_KEY_MAX] = "", *path = key;
        struct store_entry entry = { 0 };
        uint64_t number = 0;
        json_t *document;

        if (!tag_log_number(store, tag, &number, NULL) && !name_encode(tag, directory, NULL) && !tag_log_key(directory, number, key, NULL)) {
                path = strchr(key, '/') + 1;
                store->ops->stat(store, key, &entry, NULL);
        }
        document = new_file(path, path, entry.size);
        add_damage(document, 0, entry.size, error->message);
        store_entry_done(&entry);
        json_array_append_new(json_object_get(version, "documents"), document);
        return version;
}

json_t *check_lone_file(const char *path)
{
        struct nebula_error error;
        struct mapped mapped;
        enum nebula_status status;
        json_t *file;

        if (mapped_open_path(path, &mapped, &error)) {
                file = new_file(path, path, 0);
                add_damage(file, 0, 0, error.message);
                return file;
        }
        file = new_file(path, path, mapped.size);
        status = mapped_end(&mapped, path, zip_verify(mapped.data, mapped.size, &error), &error);
        if (status)
                add_damage(file, 0, mapped.size, error.message);
        progress_add(mapped.size);
        mapped_close(&mapped);
        return file;
}
