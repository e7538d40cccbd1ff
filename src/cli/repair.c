#include "cli/repair.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/check.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/mapped.h"
#include "os/os.h"
#include "image/image.h"
#include "store/document.h"
#include "store/index.h"
#include "store/line_document.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_publish.h"
#include "store/record.h"
#include "store/rebuild.h"
#include "store/repair_object.h"
#include "store/transfer.h"

#define NUMBERS_MAX 64 /* of earlier entries whose record carries over */

static bool repair_from(struct store *store, const struct manifest *manifest, const char *key, const struct record_file *file, const struct repair_source *source)
{
        struct nebula_error error = { 0 };
        enum nebula_status status = repair_object(store, manifest, key, file, source, &error);

        if (status && status != NEBULA_INVALID)
                cli_complain("%s", error.message);
        return !status;
}

/* The agent gives the file from its memory, or from that of another node. */
static bool from_memory(struct store *store, const struct manifest *manifest, const char *key, const struct record_file *file)
{
        struct cli_agent *agent = NULL;
        struct mapped mapped;
        struct repair_source source;
        uint64_t id;
        bool is_repaired = false;

        if (!cli_agent_open_if_any(store->root, &agent))
                return false;
        if (!cli_agent_find(agent, store->root, manifest->tag, &id, NULL) &&
            !mapped_open_memory(agent, id, file->name, &mapped, NULL)) {
                source = (struct repair_source){ .data = mapped.data, .size = mapped.size };
                is_repaired = repair_from(store, manifest, key, file, &source);
                mapped_close(&mapped);
        }
        cli_agent_close(agent);
        return is_repaired;
}

static bool from_store(struct store *store, const struct manifest *manifest, struct store *from, const char *key, const struct record_file *file)
{
        struct manifest there = { 0 };
        const struct manifest_file *found;
        struct repair_source source = { .from = from };
        bool is_repaired = false;

        if (manifest_load(from, manifest->tag, &there, NULL))
                return false;
        found = manifest_find_file(&there, file->name);
        if (found && found->size == file->size && !manifest_file_key(&there, found, source.key, NULL))
                is_repaired = repair_from(store, manifest, key, file, &source);
        manifest_done(&there);
        return is_repaired;
}

/* NULL: there is no sound copy. */
static const char *repair_file(struct store *store, const struct manifest *manifest, struct store *from, const char *name)
{
        const struct manifest_file *file = manifest_find_file(manifest, name);
        struct record_file recorded = { 0 };
        struct record record = { 0 };
        char key[MANIFEST_KEY_MAX];
        const char *source = NULL;

        if (!file || manifest_load_record(store, manifest, file->record, &record, NULL))
                return NULL;
        if (!record_take_file(&record, file, &recorded, NULL) && !manifest_file_key(manifest, file, key, NULL)) {
                if (from_memory(store, manifest, key, &recorded))
                        source = "memory";
                else if (from && from_store(store, manifest, from, key, &recorded))
                        source = from->root;
        }
        record_file_done(&recorded);
        record_done(&record);
        return source;
}

void repair_version(struct store *store, const struct manifest *manifest, struct store *from, json_t *version)
{
        json_t *files = json_object_get(version, "files"), *documents = json_object_get(version, "documents"), *one;
        bool is_whole = true, is_any = false;
        size_t i;

        json_array_foreach(documents, i, one)
                is_whole = is_whole && check_ok(one);
        json_array_foreach(files, i, one) {
                const char *name = json_string_value(json_object_get(one, "name"));
                const char *source = check_ok(one) ? NULL : repair_file(store, manifest, from, name);

                if (!source && !check_ok(one))
                        cli_complain("%s of %s was not repaired from memory%s%s", name, manifest->tag,
                                     from ? ", nor from " : "; --from names another storage that has it", from ? from->root : "");
                if (source) {
                        json_object_set_new(one, "ok", json_true());
                        json_object_set_new(one, "damage", json_array());
                        json_object_set_new(one, "repaired", json_string(source));
                        is_any = true;
                }
                is_whole = is_whole && check_ok(one);
        }
        if (is_any) /* views of the repaired files */
                manifest_publish(store, manifest, NULL, NULL);
        json_object_set_new(version, "ok", json_boolean(is_whole));
}

/* The record as this store's own writer made it: a copy's record differs in names and places alone. */
static void make_own(const struct manifest *manifest, size_t index, uint64_t number, struct record *record)
{
        strcpy(record->writing, manifest->records[index].writing);
        record->number = number;
        for (size_t i = 0; i < record->file_count; i++) {
                const struct manifest_file *file = manifest_find_file(manifest, record->files[i].name);

                record->files[i].is_apart = file && file->is_apart;
        }
}

static bool put_record(struct store *store, const struct manifest *manifest, size_t index, struct record *record)
{
        bool is_put = false;

        for (uint64_t back = 0; back < NUMBERS_MAX && back < manifest->number && !is_put; back++) {
                struct nebula_error error = { 0 };
                char *text;
                size_t size;

                make_own(manifest, index, manifest->number - back, record);
                if (record_format(record, &text, &size, NULL))
                        return false;
                is_put = repair_is_record(manifest, index, text, size) && !repair_record(store, manifest, index, text, size, &error);
                free(text);
                if (error.status)
                        cli_complain("%s", error.message);
        }
        return is_put;
}

/* NULL: no agent of this node has the version. */
static json_t *remembered_records(struct store *store, const char *tag)
{
        struct cli_agent *agent = NULL;
        json_t *texts = NULL;
        uint64_t id;

        if (!cli_agent_open_if_any(store->root, &agent))
                return NULL;
        if (!cli_agent_find(agent, store->root, tag, &id, NULL))
                cli_agent_records(agent, id, &texts, NULL);
        cli_agent_close(agent);
        return texts;
}

static bool record_from_memory(struct store *store, const struct manifest *manifest, size_t index, const json_t *texts)
{
        struct nebula_error error = { 0 };
        const json_t *one;
        size_t i;
        bool is_put = false;

        json_array_foreach(texts, i, one)
                if (!is_put && repair_is_record(manifest, index, json_string_value(one), json_string_length(one)))
                        is_put = !repair_record(store, manifest, index, json_string_value(one), json_string_length(one), &error);
        if (error.status)
                cli_complain("%s", error.message);
        return is_put;
}

static bool record_from_copy(struct store *store, const struct manifest *manifest, size_t index, struct store *from, const struct manifest *there)
{
        bool is_put = false;

        for (size_t i = 0; i < there->record_count && !is_put; i++) {
                struct record record = { 0 };

                is_put = !manifest_load_record(from, there, i, &record, NULL) && put_record(store, manifest, index, &record);
                record_done(&record);
        }
        return is_put;
}

static bool is_damaged(struct store *store, const struct manifest *manifest, size_t index)
{
        struct record record = { 0 };
        enum nebula_status status = manifest_load_record(store, manifest, index, &record, NULL);

        record_done(&record);
        return status == NEBULA_CORRUPT || status == NEBULA_NOT_FOUND;
}

const char *repair_records(struct store *store, const struct manifest *manifest, struct store *from)
{
        struct manifest there = { 0 };
        json_t *texts = NULL;
        const char *source = NULL;
        bool is_asked = false;

        for (size_t i = 0; i < manifest->record_count; i++) {
                if (!is_damaged(store, manifest, i))
                        continue;
                if (!is_asked) {
                        texts = remembered_records(store, manifest->tag);
                        if (from)
                                manifest_load(from, manifest->tag, &there, NULL);
                }
                is_asked = true;
                if (record_from_memory(store, manifest, i, texts))
                        source = "memory";
                else if (from && record_from_copy(store, manifest, i, from, &there))
                        source = from->root;
                else
                        cli_complain("the record of rank %" PRIu32 " of %s was not repaired from memory%s%s", manifest->records[i].rank, manifest->tag,
                                     from ? ", nor from " : "; --from names another storage that has it", from ? from->root : "");
        }
        json_decref(texts);
        manifest_done(&there);
        return source;
}

/* The manifest that names the records is damaged, too, and the index says that it was the version in memory. A record that can be read stays. */
static bool put_remembered(struct store *store, const char *tag)
{
        json_t *texts = remembered_records(store, tag), *one;
        char directory[256], key[MANIFEST_KEY_MAX], *text;
        size_t size, i;
        bool is_any = false;

        json_array_foreach(texts, i, one) {
                struct record record = { 0 }, found = { 0 };
                enum nebula_status status = record_parse(json_string_value(one), json_string_length(one), &record, NULL);

                if (!status && !strcmp(record.tag, tag) && !name_encode(tag, directory, NULL) &&
                    !record_key(directory, record.writing, record.ranks[0].rank, key, NULL)) {
                        status = document_get(store, key, &text, &size, NULL, NULL);
                        if (!status) {
                                status = record_parse(text, size, &found, NULL);
                                free(text);
                        }
                        if (status == NEBULA_CORRUPT || status == NEBULA_NOT_FOUND)
                                is_any |= !store->ops->put(store, key, json_string_value(one), json_string_length(one), STORE_ALWAYS, NULL, NULL, NULL);
                }
                record_done(&record);
                record_done(&found);
        }
        json_decref(texts);
        return is_any;
}

static bool is_indexed(struct store *store, const struct manifest *there)
{
        struct manifest known = { 0 };
        struct index index;
        char directory[256];
        bool is_same;

        if (name_encode(there->tag, directory, NULL) || index_load(store, &index, NULL))
                return false;
        is_same = index_find(&index, directory, &known) && known.sequence == there->sequence && !strcmp(known.run, there->run) &&
                  !strcmp(known.job, there->job) && manifest_size(&known) == manifest_size(there);
        manifest_done(&known);
        index_done(&index);
        return is_same;
}

static bool from_copy(struct store *store, const char *tag, struct store *from)
{
        const struct transfer transfer = { .from = from, .to = store, .replaces = true };
        struct nebula_error error = { 0 };
        struct manifest there = { 0 };
        enum transfer_state state;
        bool is_repaired = false;

        if (manifest_load(from, tag, &there, NULL))
                return false;
        if (is_indexed(store, &there))
                is_repaired = !transfer_version(&transfer, &there, &state, &error);
        if (error.status)
                cli_complain("%s", error.message);
        manifest_done(&there);
        return is_repaired;
}

/* Files of the version itself. A file that carries over would need the record of another version. */
static bool take_file(const json_t *one, struct manifest *known)
{
        const struct manifest_file file = { .name = text_of(one, "name"), .size = (uint64_t)json_integer_value(json_object_get(one, "size")),
                                            .rank = (uint32_t)json_integer_value(json_object_get(one, "rank")) };

        return json_integer_value(json_object_get(one, "sequence")) == (json_int_t)known->sequence && !manifest_add_file(known, &file, NULL);
}

static bool take_head(const json_t *version, struct manifest *known)
{
        struct document_reader reader = { .kind = "version", .error = &(struct nebula_error){ 0 } };

        document_text(&reader, version, "tag", 0, known->tag, sizeof known->tag);
        document_text(&reader, version, "job", 1, known->job, sizeof known->job);
        document_text(&reader, version, "run", 1, known->run, sizeof known->run);
        known->sequence = document_sequence(&reader, version);
        known->writing = document_writing(&reader, version);
        known->world = document_world(&reader, version);
        line_parse(&reader, version, &known->line);
        return !reader.status;
}

/* Finds the version of a tag in the memory of this node's agent, which asks other nodes, too. */
static bool find_known(struct store *store, const char *tag, struct manifest *known, bool *ret_was_durable)
{
        struct cli_agent *agent = NULL;
        json_t *version = NULL, *files, *one;
        uint64_t id;
        size_t i;
        bool is_known;

        if (!cli_agent_open_if_any(store->root, &agent))
                return false;
        is_known = !cli_agent_find(agent, store->root, tag, &id, NULL) && !cli_agent_describe(agent, id, &version, NULL) && take_head(version, known);
        *ret_was_durable = is_known && number_of(version, "durable_at") > 0;
        files = json_object_get(version, "files");
        is_known = is_known && !manifest_reserve(known, json_array_size(files), 0, NULL);
        json_array_foreach(files, i, one)
                is_known = is_known && take_file(one, known);
        json_decref(version);
        cli_agent_close(agent);
        return is_known;
}

const char *repair_manifest(struct store *store, const char *tag, struct store *from, bool *ret_has_changed)
{
        struct manifest known = { 0 };
        struct nebula_error error = { 0 };
        /* A search by tag makes an agent take a version without a manifest for a removed one, so it is not asked then. */
        bool was_durable = false, is_known = !rebuild_is_lost(store, tag) && find_known(store, tag, &known, &was_durable);
        enum nebula_status status = rebuild_manifest(store, tag, is_known ? &known : NULL, was_durable, &error);

        if (status == NEBULA_CORRUPT && is_known && is_indexed(store, &known) && put_remembered(store, tag))
                status = rebuild_manifest(store, tag, &known, was_durable, &error);
        manifest_done(&known);
        *ret_has_changed = status == NEBULA_BUSY;
        if (!status)
                return is_known ? "memory" : "its records";
        if (status == NEBULA_BUSY)
                return NULL;
        if (from && from_copy(store, tag, from))
                return from->root;
        cli_complain("%s", error.message);
        return NULL;
}
