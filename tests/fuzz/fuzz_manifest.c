/*
 * Reads hostile bytes as records, manifests, removals, node documents and object names: once unchanged, and once sealed again, so
 * that mutations pass the checksum.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/announce.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"
#include "store/record.h"
#include "store/tag_log.h"
#include "sum/sum.h"

#define SEAL_BYTES 29 /* ,"crc64":"0123456789abcdef"} and a newline */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct nebula_error error;

static void demand(int condition, const char *what)
{
        if (condition)
                return;
        fprintf(stderr, "fuzz_manifest: %s\n", what);
        abort();
}

/* An accepted document can be written and accepted again, and has each of its files. */
static void parse_record(const char *text, size_t size)
{
        struct record record = { 0 }, again = { 0 };
        struct record_file taken;
        char *written;

        if (record_parse(text, size, &record, &error))
                return;
        demand(writing_is_sound(record.writing) && record.rank_count, "a record has no name");
        demand(!record_format(&record, &written, &size, &error), "cannot format a record that was read");
        demand(!record_parse(written, size, &again, &error), "cannot read a record that was written");
        demand(again.file_count == record.file_count && again.rank_count == record.rank_count, "files or ranks were lost");
        for (size_t i = 0; i < record.file_count; i++) {
                struct manifest_file file = { .name = record.files[i].name, .size = record.files[i].size, .rank = record.files[i].rank,
                                              .is_apart = record.files[i].is_apart };

                demand(!record_take_file(&again, &file, &taken, &error), "a file is not found by its name");
                record_file_done(&taken);
        }
        free(written);
        record_done(&again);
        record_done(&record);
}

/* Its keys are those of objects of its tag. */
static void check_keys(const struct manifest *manifest)
{
        char directory[256], key[MANIFEST_KEY_MAX];

        if (name_encode(manifest->tag, directory, NULL))
                return;
        for (size_t i = 0; i < manifest->file_count; i++) {
                const char *path;

                demand(!manifest_file_key(manifest, &manifest->files[i], key, &error), "a file has no key");
                path = manifest->files[i].is_apart ? manifest_behind_private(key, directory) : manifest_behind(key, directory);
                demand(path != NULL, "a file lies outside its tag");
                if (manifest->files[i].is_apart)
                        demand(manifest_entry(path).kind == ENTRY_APART, "a file that lies apart is not known as one");
                else
                        demand(!strchr(path, '/') && strcmp(path, ".") && strcmp(path, "..") && strcmp(path, MANIFEST_DIRECTORY), "a file's key leads out");
                demand(manifest_find_file(manifest, manifest->files[i].name) == &manifest->files[i], "a file is not found by its name");
        }
        for (size_t i = 0; i < manifest->record_count; i++) {
                demand(!record_key(directory, manifest->records[i].writing, manifest->records[i].rank, key, &error), "a record has no key");
                demand(manifest_entry(manifest_behind_private(key, directory)).kind == ENTRY_RECORD, "a record is not known as one");
        }
}

/* A space before the seal leaves the whole text to the JSON parser, which finds the same. `manifest` is NULL if the text was refused. */
static void parse_as_json(const char *text, size_t size, const struct manifest *manifest)
{
        struct manifest other = { 0 };
        size_t body = size - SEAL_BYTES;
        char *spaced = malloc(size + 64);

        demand(spaced != NULL, "no memory");
        memcpy(spaced, text, body);
        spaced[body++] = ' ';
        size = body + (size_t)sprintf(spaced + body, ",\"crc64\":\"%016" PRIx64 "\"}\n", sum_crc64(0, spaced, body));
        if (manifest_parse(spaced, size, &other, &error)) {
                demand(!manifest, "the JSON parser refuses a manifest that was read");
        } else {
                demand(manifest != NULL, "the JSON parser reads a manifest that was refused");
                demand(other.file_count == manifest->file_count && other.record_count == manifest->record_count, "the JSON parser finds other lists");
                for (size_t i = 0; i < other.file_count; i++)
                        demand(!strcmp(other.files[i].name, manifest->files[i].name) && other.files[i].size == manifest->files[i].size &&
                               other.files[i].rank == manifest->files[i].rank && other.files[i].record == manifest->files[i].record &&
                               other.files[i].is_apart == manifest->files[i].is_apart,
                               "the JSON parser finds another file");
                for (size_t i = 0; i < other.record_count; i++)
                        demand(!memcmp(&other.records[i], &manifest->records[i], sizeof other.records[i]), "the JSON parser finds another record");
                manifest_done(&other);
        }
        free(spaced);
}

static bool is_sealed(const char *text, size_t size)
{
        char expected[64];

        if (size <= SEAL_BYTES)
                return false;
        sprintf(expected, ",\"crc64\":\"%016" PRIx64 "\"}\n", sum_crc64(0, text, size - SEAL_BYTES));
        return !memcmp(text + size - SEAL_BYTES, expected, SEAL_BYTES);
}

static void parse_manifest(const char *text, size_t size)
{
        struct manifest manifest = { 0 }, again = { 0 };
        uint32_t *order;
        char *written;

        if (manifest_parse(text, size, &manifest, &error)) {
                if (is_sealed(text, size))
                        parse_as_json(text, size, NULL);
                return;
        }
        parse_as_json(text, size, &manifest);
        check_keys(&manifest);
        order = manifest_files_by_record(&manifest);
        for (size_t i = 1; i < manifest.file_count; i++)
                demand(manifest.files[order[i - 1]].record <= manifest.files[order[i]].record, "files are out of order");
        free(order);
        demand(!manifest_format(&manifest, &written, &size, &error), "cannot format a manifest that was read");
        demand(!manifest_parse(written, size, &again, &error), "cannot read a manifest that was written");
        demand(again.file_count == manifest.file_count && again.record_count == manifest.record_count && again.number == manifest.number, "files were lost");
        free(written);
        manifest_done(&again);
        manifest_done(&manifest);
}

static void parse_removal(const char *text, size_t size)
{
        struct removal removal, again;
        char *written;

        if (removal_parse(text, size, &removal, &error))
                return;
        demand(!removal_format(&removal, &written, &size, &error), "cannot format a removal that was read");
        demand(!removal_parse(written, size, &again, &error), "cannot read a removal that was written");
        demand(again.number == removal.number && !strcmp(again.tag, removal.tag), "a removal has changed");
        free(written);
}

static void parse_captured(const char *text, size_t size)
{
        struct captured captured = { 0 }, again = { 0 };
        char *written;

        if (captured_parse(text, size, &captured, &error))
                return;
        demand(!captured_format(&captured, &written, &size, &error), "cannot format a captured document that was read");
        demand(!captured_parse(written, size, &again, &error), "cannot read a captured document that was written");
        demand(again.rank_count == captured.rank_count, "ranks were lost");
        free(written);
        captured_done(&again);
        captured_done(&captured);
}

static void parse_committed(const char *text, size_t size)
{
        struct committed committed = { 0 }, again = { 0 };
        char *written;

        if (committed_parse(text, size, &committed, &error))
                return;
        demand(!committed_format(&committed, &written, &size, &error), "cannot format a committed document that was read");
        demand(!committed_parse(written, size, &again, &error), "cannot read a committed document that was written");
        demand(again.rank_count == committed.rank_count && again.node_count == committed.node_count, "ranks were lost");
        free(written);
        committed_done(&again);
        committed_done(&committed);
}

static void parse(const char *text, size_t size)
{
        parse_record(text, size);
        parse_manifest(text, size);
        parse_removal(text, size);
        parse_captured(text, size);
        parse_committed(text, size);
}

/* `name` ends with a NUL. */
static void look_at_name(const char *name)
{
        struct manifest_entry entry = manifest_entry(name);
        bool has_writing = entry.kind == ENTRY_RECORD || entry.kind == ENTRY_CLAIM || entry.kind == ENTRY_APART;

        demand(writing_is_sound(entry.writing) == has_writing, "an object of a writing has no writing, or another has one");
        demand(!entry.number == (entry.kind != ENTRY_MANIFEST), "an entry of a log has no number, or another has one");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
        size_t body = size > SEAL_BYTES ? size - SEAL_BYTES : size;
        char *text = malloc(size + SEAL_BYTES + 1);

        demand(text != NULL, "no memory");
        memcpy(text, data, size);
        text[size] = 0;
        look_at_name(text);
        parse(text, size);
        sprintf(text + body, ",\"crc64\":\"%016" PRIx64 "\"}\n", sum_crc64(0, data, body));
        parse(text, body + SEAL_BYTES);
        free(text);
        return 0;
}
