#include "store/rebuild.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/document.h"
#include "store/index.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"
#include "store/scan.h"
#include "store/signature.h"
#include "store/writer_private.h"

struct rebuilding {
        struct store *store;
        const struct manifest *known; /* NULL: memory has no version of the tag, or another one */
        struct manifest row;          /* of the index, brief */
        bool has_row, was_durable;    /* was_durable: memory knows that the known version was */
        char directory[256], key[MANIFEST_KEY_MAX]; /* key: of the manifest that is damaged or missing */
        uint64_t newest, number;      /* of the newest entry that is there, and of that manifest */
};
struct comparing {
        const struct rebuilding *rebuilding;
        const struct manifest *manifest;
};

static enum nebula_status refuse(const struct rebuilding *rebuilding, const char *why, struct nebula_error *error)
{
        return error_set(error, NEBULA_CORRUPT, 0, "%s/%s cannot be made again: %s; if another storage has the version, repair it with --from PATH", rebuilding->store->root,
                         rebuilding->key, why);
}

static bool is_same(const struct manifest *a, const struct manifest *b)
{
        return a->sequence == b->sequence && a->writing == b->writing && a->world == b->world && !strcmp(a->run, b->run) && !strcmp(a->job, b->job) &&
               line_began(&a->line) == line_began(&b->line);
}

/* `newest`: the number of the newest entry that is there. */
static enum nebula_status find_row(struct rebuilding *rebuilding, uint64_t newest, bool is_unsound, struct nebula_error *error)
{
        struct index index;
        uint64_t removed = 0;
        enum nebula_status status = tag_log_removed(rebuilding->store, rebuilding->directory, &removed, error);

        if (!status)
                status = index_load(rebuilding->store, &index, error);
        if (status)
                return status;
        rebuilding->has_row = index_find(&index, rebuilding->directory, &rebuilding->row);
        index_done(&index);
        if (rebuilding->has_row && (is_unsound ? rebuilding->row.number != newest : rebuilding->row.number <= newest || rebuilding->row.number <= removed))
                rebuilding->has_row = false;
        rebuilding->newest = newest;
        rebuilding->number = rebuilding->has_row ? rebuilding->row.number : newest;
        return tag_log_key(rebuilding->directory, rebuilding->number, rebuilding->key, error);
}

/* All versions of a line have the same list of lines, so another version's manifest has it, too. */
static enum nebula_status find_line(const struct rebuilding *rebuilding, struct line *ret_line, struct nebula_error *error)
{
        uint64_t began = line_began(&rebuilding->row.line);
        struct manifest_scan scan;
        bool is_found = false;
        enum nebula_status status = manifest_scan(rebuilding->store, &scan, error);

        if (status)
                return status;
        for (size_t i = 0; i < scan.count && !is_found; i++) {
                is_found = !strcmp(scan.manifests[i].job, rebuilding->row.job) && line_began(&scan.manifests[i].line) == began;
                if (is_found)
                        *ret_line = scan.manifests[i].line;
        }
        manifest_scan_done(&scan);
        return is_found ? NEBULA_OK : refuse(rebuilding, "its line of history is known neither from memory nor from another version", error);
}

static enum nebula_status fill_head(const struct rebuilding *rebuilding, struct manifest *head, struct nebula_error *error)
{
        const struct manifest *row = rebuilding->has_row ? &rebuilding->row : NULL, *known = rebuilding->known, *any = row ? row : known;

        strcpy(head->tag, any->tag);
        strcpy(head->job, any->job);
        strcpy(head->run, any->run);
        if (row)
                strcpy(head->thinned, row->thinned);
        head->number = rebuilding->number;
        head->writing = any->writing;
        head->sequence = any->sequence;
        head->step = name_step(head->tag);
        head->world = any->world;
        if (known)
                head->line = known->line;
        else if (line_began(&row->line))
                return find_line(rebuilding, &head->line, error);
        return NEBULA_OK;
}

typedef bool take_record(void *argument, const char *writing, const struct record *record);

/* Reads all records of the tag, until `take` returns false. `record` NULL: it cannot be read. */
static enum nebula_status read_records(const struct rebuilding *rebuilding, take_record *take, void *argument, struct nebula_error *error)
{
        struct store_list list;
        char directory[MANIFEST_KEY_MAX];
        bool goes_on = true;
        enum nebula_status status = manifest_key(directory, rebuilding->directory, MANIFEST_DIRECTORY "/", error);

        if (!status)
                status = store_list_all(rebuilding->store, directory, false, &list, error);
        if (status)
                return status;
        for (size_t i = 0; i < list.count && goes_on && !status; i++) {
                const char *name = manifest_behind_private(list.entries[i].key, rebuilding->directory);
                struct manifest_entry entry = manifest_entry(name ? name : "");
                struct record record = { 0 };
                char *text;
                size_t size;

                if (entry.kind != ENTRY_RECORD)
                        continue;
                status = document_get(rebuilding->store, list.entries[i].key, &text, &size, NULL, error);
                if (status)
                        break;
                goes_on = take(argument, entry.writing, record_parse(text, size, &record, NULL) ? NULL : &record);
                record_done(&record);
                free(text);
        }
        store_list_done(&list);
        return status;
}

struct rivals {
        const char *prefix; /* of the version's own writing */
        uint64_t number;
        bool has_any;
};

static bool take_rival(void *argument, const char *writing, const struct record *record)
{
        struct rivals *rivals = argument;

        rivals->has_any = strncmp(writing, rivals->prefix, strlen(rivals->prefix)) && (!record || record->number == rivals->number);
        return !rivals->has_any;
}

/* Without the index, a record of another writing that was meant for this entry may be the version of the damaged manifest. */
static enum nebula_status check_rivals(const struct rebuilding *rebuilding, const char *prefix, struct nebula_error *error)
{
        struct rivals rivals = { .prefix = prefix, .number = rebuilding->number };
        enum nebula_status status = read_records(rebuilding, take_rival, &rivals, error);

        return status || !rivals.has_any ? status :
               refuse(rebuilding, "two runs have written records for it, and the index does not say whose version it was", error);
}

struct copies {
        const struct manifest *head;
        uint64_t number; /* the largest of a record of the run that is not above that of the manifest */
        uint8_t *covered;
        bool is_open;    /* two records with that number have the same rank */
};

static bool take_copy(void *argument, const char *writing, const struct record *record)
{
        struct copies *copies = argument;
        const struct manifest *head = copies->head;

        (void)writing;
        if (!record || strcmp(record->run, head->run) || strcmp(record->job, head->job) || strcmp(record->tag, head->tag) || record->world != head->world ||
            record->number > head->number || record->number < copies->number)
                return true;
        if (record->number > copies->number) {
                memset(copies->covered, 0, head->world);
                copies->is_open = false;
        }
        copies->number = record->number;
        for (size_t i = 0; i < record->rank_count; i++) {
                copies->is_open = copies->is_open || copies->covered[record->ranks[i].rank];
                copies->covered[record->ranks[i].rank] = 1;
        }
        return true;
}

/* The writings of a copy of a version (transfer.h) have names that do not follow from the version's run. */
static enum nebula_status gather_copied(const struct rebuilding *rebuilding, struct writer *writer, struct nebula_error *error)
{
        struct copies copies = { .head = &writer->manifest, .covered = calloc(writer->manifest.world, 1) };
        const struct writer_goal goal = { .prefix = "", .world = writer->manifest.world, .is_late = true };
        enum nebula_status status = copies.covered ? read_records(rebuilding, take_copy, &copies, error) :
                                    error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", writer->manifest.tag);

        free(copies.covered);
        if (!status && copies.is_open)
                status = refuse(rebuilding, "two records of it have the same rank", error);
        if (status || !copies.number)
                return status;
        writer->manifest.number = copies.number;
        writer->goal = &goal;
        status = writer_gather(writer, error);
        writer->goal = NULL;
        writer->manifest.number = rebuilding->number;
        return status;
}

/* Whether the damaged manifest still has the text. */
static bool names(const struct rebuilding *rebuilding, const char *part)
{
        size_t size;
        char *text;
        bool result;

        if (document_get(rebuilding->store, rebuilding->key, &text, &size, NULL, NULL))
                return false;
        result = memmem(text, size, part, strlen(part));
        free(text);
        return result;
}

/* The name of a try's writing has random digits, so only its own manifest has it. */
static bool is_named(const struct rebuilding *rebuilding, const struct manifest *gathered)
{
        bool result = false;

        for (size_t i = 0; i < gathered->record_count && !result; i++)
                result = names(rebuilding, gathered->records[i].writing);
        return result;
}

/* Without the index, all ranks must have a record. If the damaged entry does not name the writing, it may be a removal of that version: then the records
 * of an earlier entry do not count. */
static enum nebula_status gather(const struct rebuilding *rebuilding, struct writer *writer, struct nebula_error *error)
{
        struct manifest *head = &writer->manifest;
        uint32_t *ranks = calloc(head->world, sizeof *ranks);
        char prefix[WRITING_MAX];
        struct writer_goal goal = { .prefix = prefix, .ranks = ranks, .rank_count = rebuilding->has_row ? 0 : head->world, .world = head->world, .is_late = true };
        enum nebula_status status;

        if (!ranks)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", head->tag);
        for (uint32_t rank = 0; rank < head->world; rank++)
                ranks[rank] = rank;
        writing_prefix(head->job, head->run, head->writing, prefix);
        writer->goal = &goal;
        goal.is_earlier = rebuilding->has_row || names(rebuilding, prefix);
        status = rebuilding->has_row ? NEBULA_OK : check_rivals(rebuilding, prefix, error);
        if (!status)
                status = writer_gather(writer, error);
        if (status == NEBULA_BUSY)
                status = refuse(rebuilding, "a record of it is missing, too", error);
        writer->goal = NULL;
        free(ranks);
        if (!status && !head->record_count && rebuilding->has_row)
                status = gather_copied(rebuilding, writer, error);
        if (!status && !rebuilding->has_row && !rebuilding->was_durable && !is_named(rebuilding, head))
                status = refuse(rebuilding, "the index has no entry of it, and nothing shows that it was the version in memory", error);
        return status;
}

static bool matches(const char *patterns, const char *name)
{
        for (const char *at = patterns; *at; at += strcspn(at, ","), at += *at == ',') {
                char pattern[THIN_TEXT_MAX];

                snprintf(pattern, sizeof pattern, "%.*s", (int)strcspn(at, ","), at);
                if (!fnmatch(pattern, name, 0))
                        return true;
        }
        return false;
}

static enum nebula_status compare(void *argument, struct nebula_error *error)
{
        const struct comparing *comparing = argument;
        const struct rebuilding *rebuilding = comparing->rebuilding;
        const struct manifest *manifest = comparing->manifest, *row = &rebuilding->row, *known = rebuilding->known;

        if (rebuilding->has_row && (manifest_count(manifest) != manifest_count(row) || manifest_size(manifest) != manifest_size(row) ||
                                    manifest_written(manifest) != manifest_written(row)))
                return refuse(rebuilding, "its records do not name the files that the index counts", error);
        for (size_t i = 0; known && i < known->file_count; i++) {
                const struct manifest_file *one = &known->files[i], *found = manifest_find_file(manifest, one->name);

                if (found ? found->size != one->size || found->rank != one->rank : !matches(manifest->thinned, one->name))
                        return refuse(rebuilding, "memory has a file that its records do not name", error);
        }
        return signature_check(rebuilding->store, manifest, error);
}

static void copy_head(const struct manifest *from, struct manifest *to)
{
        strcpy(to->job, from->job);
        strcpy(to->run, from->run);
        strcpy(to->thinned, from->thinned);
        to->writing = from->writing;
        to->sequence = from->sequence;
        to->step = from->step;
        to->world = from->world;
        to->line = from->line;
        to->referred = *from->thinned ? 0 : from->referred; /* as thin.c */
}

static enum nebula_status enter(const struct rebuilding *rebuilding, struct manifest *gathered, struct nebula_error *error)
{
        static const struct writer_source source = { .describe = compare };
        struct writer writer;
        struct comparing comparing = { rebuilding, &writer.manifest };
        enum nebula_status status = writer_init(&writer, rebuilding->store, &source, &comparing, gathered->tag, error);

        strcpy(writer.manifest.tag, gathered->tag);
        if (!status)
                status = writer_begin(&writer, error);
        if (!status && (writer.before.number != rebuilding->newest || (writer.before.number == rebuilding->number && !writer.before.is_unsound)))
                status = error_set(error, NEBULA_BUSY, 0, "\"%.200s\" was written again or removed meanwhile", gathered->tag);
        if (!status && !(writer.is_carried = calloc(gathered->file_count + 1, sizeof *writer.is_carried)))
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", gathered->tag);
        if (!status) {
                for (size_t i = 0; i < gathered->file_count; i++)
                        writer.is_carried[i] = !matches(gathered->thinned, gathered->files[i].name);
                copy_head(gathered, &writer.manifest);
                writer.before.manifest = *gathered;
                memset(gathered, 0, sizeof *gathered);
                status = writer_run(&writer, WRITER_REBUILD, error);
        }
        if (!status && rebuilding->has_row && writer.manifest.number != rebuilding->number)
                index_remove(rebuilding->store, &rebuilding->row, NULL);
        if (writer.is_overtaken && status && error)
                status = error->status = NEBULA_BUSY;
        writer_done(&writer);
        return status;
}

static enum nebula_status begin(struct rebuilding *rebuilding, const char *tag, struct nebula_error *error)
{
        struct tag_log head = { 0 };
        enum nebula_status status = name_encode(tag, rebuilding->directory, error);

        if (!status)
                status = tag_log_head(rebuilding->store, tag, &head, error);
        if (status)
                return status;
        status = find_row(rebuilding, head.number, head.is_unsound, error);
        if (!status && head.is_unsound && head.unsound.status != NEBULA_CORRUPT) {
                status = head.unsound.status;
                if (error)
                        *error = head.unsound;
        } else if (!status && !head.is_unsound && !rebuilding->has_row) {
                status = error_set(error, head.number && !head.is_removal ? NEBULA_BUSY : NEBULA_NOT_FOUND, 0, "no manifest of \"%.200s\" is damaged or missing", tag);
        }
        tag_log_done(&head);
        return status;
}

bool rebuild_is_lost(struct store *store, const char *tag)
{
        struct rebuilding rebuilding = { .store = store };
        bool is_lost = !begin(&rebuilding, tag, NULL) && rebuilding.has_row && rebuilding.newest < rebuilding.number;

        manifest_done(&rebuilding.row);
        return is_lost;
}

enum nebula_status rebuild_manifest(struct store *store, const char *tag, const struct manifest *known, bool was_durable, struct nebula_error *error)
{
        struct rebuilding rebuilding = { .store = store, .known = known, .was_durable = was_durable };
        struct writer scratch;
        enum nebula_status status = writer_init(&scratch, store, NULL, NULL, tag, error);

        if (!status)
                status = begin(&rebuilding, tag, error);
        if (rebuilding.has_row && known && !is_same(known, &rebuilding.row))
                rebuilding.known = NULL;
        if (!status && !rebuilding.has_row && !known)
                status = refuse(&rebuilding, "neither the index nor the memory of an agent says which version it was", error);
        if (!status)
                status = fill_head(&rebuilding, &scratch.manifest, error);
        if (!status)
                status = gather(&rebuilding, &scratch, error);
        if (!status)
                status = enter(&rebuilding, &scratch.manifest, error);
        manifest_done(&rebuilding.row);
        writer_done(&scratch);
        return status;
}
