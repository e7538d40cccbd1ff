#include "store/manifest.h"

#include <inttypes.h>
#include <stdatomic.h>

#include "store/document.h"
#include "store/manifest_private.h"
#include "store/store_mem.h"
#include "sum/sum.h"
#include "tap.h"

#define CHUNK 4096u

/* ---- documents ---- */

static char *golden(const char *name, size_t *ret_size)
{
        char path[1024];
        const char *slash = strrchr(__FILE__, '/');
        FILE *file;
        char *text;

        /* __FILE__ is relative to the build directory, where meson runs tests; by hand it may be the source's root. */
        snprintf(path, sizeof path, "%.*s/../../golden/%s", (int)(slash - __FILE__), __FILE__, name);
        file = fopen(path, "rb");
        if (!file && !strncmp(path, "../", 3))
                file = fopen(path + 3, "rb");
        if (!file)
                return NULL;
        text = calloc(1, 65536);
        *ret_size = fread(text, 1, 65535, file);
        fclose(file);
        return text;
}

/* The status of a document of `size` bytes, and of reading it, if there is one. */
static enum nebula_status format_and_parse(size_t size, enum nebula_status *ret_parsed)
{
        struct nebula_error error;
        json_t *body = document_new("record"), *read;
        char *text = NULL, *filling = malloc(size);
        enum nebula_status status;
        size_t bare;

        *ret_parsed = NEBULA_INTERNAL;
        json_object_set_new(body, "filling", json_string(""));
        if (document_format(body, &text, &bare, &error))
                abort();
        free(text);
        memset(filling, 'x', size);
        json_object_set_new(body, "filling", json_stringn(filling, size - bare));
        status = document_format(body, &text, &bare, &error);
        if (!status) {
                CHECK(bare == size);
                *ret_parsed = document_parse(text, size, "record", &read, &error);
                if (!*ret_parsed)
                        json_decref(read);
                free(text);
        }
        json_decref(body);
        free(filling);
        return status;
}

static void what_is_written_is_not_too_long_to_be_read(void)
{
        enum nebula_status parsed;

        CHECK(format_and_parse(DOCUMENT_TEXT_MAX, &parsed) == NEBULA_OK && parsed == NEBULA_OK);
        CHECK(format_and_parse(DOCUMENT_TEXT_MAX + 1, &parsed) == NEBULA_INVALID);
}

/* The text of `body`, a JSON object without its closing brace, with its seal. */
static char *seal(const char *body, size_t *ret_size)
{
        size_t size = strlen(body);
        char *text = malloc(size + 64);

        memcpy(text, body, size);
        *ret_size = size + (size_t)sprintf(text + size, ",\"crc64\":\"%016" PRIx64 "\"}\n", sum_crc64(0, body, size));
        return text;
}

static enum nebula_status parse_sealed_manifest(const char *body)
{
        struct manifest manifest = { 0 };
        size_t size;
        char *text = seal(body, &size);
        enum nebula_status status = manifest_parse(text, size, &manifest, NULL);

        manifest_done(&manifest);
        free(text);
        return status;
}

static enum nebula_status parse_sealed_record(const char *body)
{
        struct record record = { 0 };
        size_t size;
        char *text = seal(body, &size);
        enum nebula_status status = record_parse(text, size, &record, NULL);

        record_done(&record);
        free(text);
        return status;
}

static void a_record_comes_back_as_it_was_written(void)
{
        uint64_t chunks[3] = { 1, 0xffffffffffffffff, 0x00f1000000000000 };
        struct record_file files[2] = {
                { .name = "a/b", .path = "a%2Fb", .size = 2 * CHUNK + 1, .is_zip = true, .chunk_bytes = CHUNK, .chunks = chunks, .chunk_count = 3 },
                { .name = "empty", .path = "empty", .chunk_bytes = CHUNK },
        };
        struct record written = { .tag = "t", .job = "j", .run = "r", .generation = 3, .rank = 1, .world = 2, .files = files,
                                  .file_count = 2, .begun = 1766312345.120001, .captured = 1766312345.16, .persisted = 1 };
        struct record read;
        char *text;
        size_t size;

        REQUIRE(record_format(&written, &text, &size, NULL) == NEBULA_OK);
        CHECK(size == strlen(text) && text[size - 1] == '\n');
        REQUIRE(record_parse(text, size, &read, NULL) == NEBULA_OK);
        CHECK(!strcmp(read.tag, "t") && !strcmp(read.job, "j") && !strcmp(read.run, "r"));
        CHECK(read.generation == 3 && read.rank == 1 && read.world == 2 && read.file_count == 2);
        CHECK(read.begun == written.begun && read.captured == written.captured && read.persisted == 1);
        CHECK(!strcmp(read.files[0].name, "a/b") && !strcmp(read.files[0].path, "a%2Fb"));
        CHECK(read.files[0].size == 2 * CHUNK + 1 && read.files[0].is_zip && read.files[0].chunk_count == 3);
        CHECK(!memcmp(read.files[0].chunks, chunks, sizeof chunks));
        CHECK(!read.files[1].is_zip && read.files[1].size == 0 && read.files[1].chunk_count == 0);
        record_done(&read);
        free(text);
}

static void the_golden_record_of_version_1_0_is_read(void)
{
        struct record record;
        struct nebula_error error;
        size_t size;
        char *text = golden("record-1.0.json", &size);

        REQUIRE(text);
        REQUIRE(record_parse(text, size, &record, &error) == NEBULA_OK);
        CHECK(!strcmp(record.tag, "global_step500") && record.rank == 3 && record.world == 8 && record.generation == 2);
        REQUIRE(record.file_count == 2);
        CHECK(!strcmp(record.files[0].name, "model/rank3 \xc3\xa9.pt") && record.files[0].is_zip);
        CHECK(record.files[0].size == 10240 && record.files[0].chunk_count == 3 && record.files[0].chunk_bytes == 4096);
        CHECK(record.captured == 1766312345.25);
        record_done(&record);
        free(text);
}

static void the_golden_manifest_of_version_1_0_is_read(void)
{
        struct manifest manifest;
        size_t size;
        char *text = golden("manifest-1.0.json", &size);

        REQUIRE(text);
        REQUIRE(manifest_parse(text, size, &manifest, NULL) == NEBULA_OK);
        CHECK(!strcmp(manifest.job, "gpt") && manifest.step == 500 && manifest.sequence == 1766312345160000000);
        REQUIRE(manifest.file_count == 3 && manifest.record_count == 2);
        CHECK(manifest.files[2].generation == 1 && manifest.files[2].size == 77 && manifest.files[0].rank == 3);
        CHECK(manifest.records[1].crc64 == 0x00f1e2d3c4b5a697 && manifest.records[1].size == 1234);
        manifest_done(&manifest);
        free(text);
}

static void writing_the_golden_manifest_again_gives_the_same_bytes(void)
{
        struct manifest manifest;
        size_t size, again_size;
        char *text = golden("manifest-1.0.json", &size), *again;

        REQUIRE(text && manifest_parse(text, size, &manifest, NULL) == NEBULA_OK);
        REQUIRE(manifest_format(&manifest, &again, &again_size, NULL) == NEBULA_OK);
        CHECK(again_size == size && !memcmp(text, again, size));
        manifest_done(&manifest);
        free(again);
        free(text);
}

static void every_flipped_bit_and_every_cut_of_a_document_is_found(void)
{
        struct manifest manifest = { 0 };
        struct record record = { 0 };
        size_t size;
        char *text = golden("record-1.0.json", &size);

        REQUIRE(text);
        for (size_t i = 0; i < 8 * size; i++) {
                text[i / 8] = (char)(text[i / 8] ^ 1 << i % 8);
                CHECK(record_parse(text, size, &record, NULL) == NEBULA_CORRUPT);
                text[i / 8] = (char)(text[i / 8] ^ 1 << i % 8);
        }
        for (size_t cut = 0; cut < size; cut++)
                CHECK(record_parse(text, cut, &record, NULL) == NEBULA_CORRUPT);
        CHECK(manifest_parse(text, size, &manifest, NULL) == NEBULA_CORRUPT); /* a record is no manifest */
        free(text);
}

#define MANIFEST(version, extra, files, records) \
        "{\"nebula\":\"manifest\",\"version\":\"" version "\"," extra "\"tag\":\"t\",\"job\":\"\",\"run\":\"\",\"generation\":2," \
        "\"step\":-1,\"world\":1,\"sequence\":5,\"files\":[" files "],\"records\":[" records "]"
#define FILE_OF(name, path, rank, generation) \
        "{\"name\":\"" name "\",\"path\":\"" path "\",\"size\":1,\"rank\":" #rank ",\"generation\":" #generation "}"
#define RECORD_OF(path, rank, generation) \
        "{\"rank\":" #rank ",\"generation\":" #generation ",\"path\":\"" path "\",\"size\":1,\"crc64\":\"0123456789abcdef\"}"
#define RECORD_0 RECORD_OF(".nebula/rank-00000.json", 0, 1)

static void unknown_fields_and_minor_versions_are_accepted(void)
{
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", "", "")) == NEBULA_OK);
        CHECK(parse_sealed_manifest(MANIFEST("1.7", "\"future\":{\"x\":[1]},", FILE_OF("a", "a", 0, 1), RECORD_0)) == NEBULA_OK);
}

static void an_unknown_major_version_is_refused_and_says_so(void)
{
        struct manifest manifest;
        struct nebula_error error;
        size_t size;
        char *text = seal(MANIFEST("2.0", "", "", ""), &size);

        CHECK(manifest_parse(text, size, &manifest, &error) == NEBULA_CORRUPT);
        CHECK(strstr(error.message, "2.0") && strstr(error.message, "newer"));
        free(text);
        CHECK(parse_sealed_manifest(MANIFEST("10.0", "", "", "")) == NEBULA_CORRUPT);
        CHECK(parse_sealed_manifest(MANIFEST("", "", "", "")) == NEBULA_CORRUPT);
}

static void a_sealed_lie_is_refused(void)
{
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", FILE_OF("a", "../a", 0, 1), RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", FILE_OF("a", "/etc/x", 0, 1), RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", FILE_OF("a", "x/../../a", 0, 1), RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", FILE_OF("a", ".nebula/manifest.json", 0, 1), RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", FILE_OF("a", "a/", 0, 1), RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", FILE_OF("a", "a", 0, 1), "")) == NEBULA_CORRUPT); /* no record */
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", FILE_OF("a", "a", 0, 3), RECORD_0)) == NEBULA_CORRUPT); /* future */
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", FILE_OF("a", "a", 0, 1) "," FILE_OF("a", "b", 0, 1), RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", FILE_OF("a", "a", 0, 1) "," FILE_OF("b", "a", 0, 1), RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", "", RECORD_0 "," RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", "", RECORD_OF("../rank-00000.json", 0, 1))) == NEBULA_CORRUPT);
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "\"tag\":\"u\",", "", "")) == NEBULA_CORRUPT); /* twice */
        CHECK(parse_sealed_manifest("[1") == NEBULA_CORRUPT);
}

/* Paths that stay below the tag's directory lead elsewhere too, where a link stands in the place of a directory. */
static void a_path_that_the_name_does_not_give_is_refused(void)
{
        static const char *const paths[] = { "l/.bashrc", "b", "a/a", "./a", "a//a", "A", "%61", "latest", "" };
        char body[600];

        for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
                snprintf(body, sizeof body, MANIFEST("1.0", "", FILE_OF("a", "%s", 0, 1), RECORD_0), paths[i]);
                CHECK(parse_sealed_manifest(body) == NEBULA_CORRUPT);
        }
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", FILE_OF("l/x", "l%2Fx", 0, 1), RECORD_0)) == NEBULA_OK);
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", FILE_OF("l/x", "l/x", 0, 1), RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", FILE_OF(".nebula", "%2Enebula", 0, 1), RECORD_0)) == NEBULA_OK);
        CHECK(parse_sealed_manifest(MANIFEST("1.0", "", FILE_OF(".nebula", ".nebula", 0, 1), RECORD_0)) == NEBULA_CORRUPT);
}

/* A manifest, without its closing brace, that is sound but for one number. */
static enum nebula_status parse_with(const char *generation, const char *step, const char *world, const char *sequence,
                                     const char *size, const char *rank)
{
        char body[1200];

        snprintf(body, sizeof body,
                 "{\"nebula\":\"manifest\",\"version\":\"1.0\",\"tag\":\"t7\",\"job\":\"\",\"run\":\"\",\"generation\":%s,\"step\":%s,"
                 "\"world\":%s,\"sequence\":%s,\"files\":[{\"name\":\"a\",\"path\":\"a\",\"size\":%s,\"rank\":%s,\"generation\":1}],"
                 "\"records\":[{\"rank\":%s,\"generation\":1,\"path\":\".nebula/rank-%05u.json\",\"size\":1,"
                 "\"crc64\":\"0123456789abcdef\"}]",
                 generation, step, world, sequence, size, rank, rank, (unsigned)strtoul(rank, NULL, 10));
        return parse_sealed_manifest(body);
}

static void a_number_that_no_checkpoint_has_is_refused(void)
{
        static const char *const impossible[] = { "-1", "9223372036854775807", "9223372036854775808", "1e300", "1.5", "\"1\"", "null" };

        CHECK(!parse_with("1", "7", "1", "1", "0", "0"));
        CHECK(!parse_with("281474976710656", "7", "1048576", "7258118400000000000", "17592186044416", "1048575"));
        for (size_t i = 0; i < sizeof impossible / sizeof *impossible; i++) {
                const char *bad = impossible[i];

                CHECK(parse_with(bad, "7", "1", "1", "0", "0") == NEBULA_CORRUPT);
                CHECK(parse_with("1", bad, "1", "1", "0", "0") == NEBULA_CORRUPT);
                CHECK(parse_with("1", "7", bad, "1", "0", "0") == NEBULA_CORRUPT);
                CHECK(parse_with("1", "7", "1", bad, "0", "0") == NEBULA_CORRUPT);
                CHECK(parse_with("1", "7", "1", "1", bad, "0") == NEBULA_CORRUPT);
                CHECK(parse_with("1", "7", "1", "1", "0", bad) == NEBULA_CORRUPT);
        }
        CHECK(parse_with("0", "7", "1", "1", "0", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("281474976710657", "7", "1", "1", "0", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("1", "8", "1", "1", "0", "0") == NEBULA_CORRUPT); /* the tag says 7 */
        CHECK(parse_with("1", "7", "0", "1", "0", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("1", "7", "1048577", "1", "0", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("1", "7", "1", "0", "0", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("1", "7", "1", "7258118400000000001", "0", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("1", "7", "1", "1", "17592186044417", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("1", "7", "1", "1", "0", "1048576") == NEBULA_CORRUPT);
}

/* What nobody would read is not written. */
static void a_manifest_with_numbers_that_are_refused_is_not_written(void)
{
        struct manifest manifest = { .tag = "t", .generation = DOCUMENT_GENERATION_MAX, .step = -1, .world = 1,
                                     .sequence = DOCUMENT_SEQUENCE_MAX };
        char *text;
        size_t size;

        REQUIRE(!manifest_format(&manifest, &text, &size, NULL));
        free(text);
        manifest.sequence++;
        CHECK(manifest_format(&manifest, &text, &size, NULL) == NEBULA_INVALID);
        manifest.sequence--;
        manifest.generation++;
        CHECK(manifest_format(&manifest, &text, &size, NULL) == NEBULA_INVALID);
}

#define RECORD(rank, files) \
        "{\"nebula\":\"record\",\"version\":\"1.0\",\"tag\":\"t\",\"job\":\"\",\"run\":\"\",\"generation\":1,\"rank\":" #rank \
        ",\"world\":2,\"files\":[" files "],\"times\":{\"begun\":1,\"captured\":2,\"persisted\":3.5}"
#define RECORD_FILE(size, format, chunk, crcs) \
        "{\"name\":\"a\",\"path\":\"a\",\"size\":" #size ",\"format\":\"" format "\",\"chunk_bytes\":" #chunk ",\"crc64\":[" crcs "]}"

static void a_record_that_does_not_add_up_is_refused(void)
{
        CHECK(parse_sealed_record(RECORD(1, RECORD_FILE(4097, "raw", 4096, "\"0123456789abcdef\",\"0123456789abcdef\""))) == NEBULA_OK);
        CHECK(parse_sealed_record(RECORD(1, RECORD_FILE(4097, "raw", 4096, "\"0123456789abcdef\""))) == NEBULA_CORRUPT);
        CHECK(parse_sealed_record(RECORD(1, RECORD_FILE(1, "raw", 0, "\"0123456789abcdef\""))) == NEBULA_CORRUPT);
        CHECK(parse_sealed_record(RECORD(1, RECORD_FILE(1, "raw", 4294967295, "\"0123456789abcdef\""))) == NEBULA_CORRUPT);
        CHECK(parse_sealed_record(RECORD(1, RECORD_FILE(-1, "raw", 4096, ""))) == NEBULA_CORRUPT);
        CHECK(parse_sealed_record(RECORD(1, RECORD_FILE(1, "tar", 4096, "\"0123456789abcdef\""))) == NEBULA_CORRUPT);
        CHECK(parse_sealed_record(RECORD(1, RECORD_FILE(1, "raw", 4096, "\"0123456789ABCDEF\""))) == NEBULA_CORRUPT);
        CHECK(parse_sealed_record(RECORD(1, RECORD_FILE(1, "raw", 4096, "17"))) == NEBULA_CORRUPT);
        CHECK(parse_sealed_record(RECORD(2, "")) == NEBULA_CORRUPT);
        CHECK(parse_sealed_record(RECORD(1, "7")) == NEBULA_CORRUPT);
        CHECK(parse_sealed_record(RECORD(1, "{\"name\":\"a\",\"path\":\"l/a\",\"size\":0,\"format\":\"raw\",\"chunk_bytes\":1,"
                                            "\"crc64\":[]}")) == NEBULA_CORRUPT);
}

/* ---- versions in a store ---- */

static struct store *new_store(void)
{
        struct store *store = NULL;

        store_mem_forget("mem:");
        if (store_mem.open("mem:", &store, NULL))
                abort();
        return store;
}

static void put(struct store *store, const char *key, const void *data, size_t size)
{
        if (store->ops->old_write(store, key, data, size, NULL))
                abort();
}

static bool has(struct store *store, const char *key)
{
        struct old_entry entry;

        if (store->ops->old_stat(store, key, &entry, NULL))
                return false;
        old_entry_done(&entry);
        return true;
}

static void fill(char *data, size_t size, unsigned seed)
{
        for (size_t i = 0; i < size; i++)
                data[i] = (char)(i * 31 + seed + i / 251);
}

#define FILE_BYTES (3 * CHUNK + 17)

/*
 * Writes generation `generation` of `tag` by rank 0 with one file `name`, in place or waiting, and a manifest that
 * also carries over what `older` (may be NULL) has and this one does not write.
 */
static void write_version(struct store *store, const char *tag, uint64_t generation, uint64_t sequence, const char *name,
                          bool waits, const struct manifest *older, bool with_manifest)
{
        char data[FILE_BYTES], key[1200], path[64], *text;
        uint64_t chunks[4];
        struct record_file file = { .size = FILE_BYTES, .chunk_bytes = CHUNK, .chunks = chunks, .chunk_count = 4 };
        struct record record = { .generation = generation, .world = 1, .files = &file, .file_count = 1 };
        struct manifest_file files[8] = { { .size = FILE_BYTES, .generation = generation } };
        struct manifest_record records[8] = { { .generation = generation } };
        struct manifest manifest = { .generation = generation, .sequence = sequence, .step = name_step(tag), .world = 1,
                                     .files = files, .file_count = 1, .records = records, .record_count = 1 };
        size_t size;

        fill(data, sizeof data, (unsigned)(generation * 7 + (unsigned char)name[0]));
        for (size_t i = 0; i < 4; i++)
                chunks[i] = sum_crc64(0, data + i * CHUNK, i < 3 ? CHUNK : 17);
        strcpy(record.tag, tag);
        strcpy(manifest.tag, tag);
        strcpy(file.name, name);
        strcpy(file.path, name);
        strcpy(files[0].name, name);
        strcpy(files[0].path, name);
        if (waits)
                snprintf(key, sizeof key, "%s/.nebula/g%" PRIu64 "/%s", tag, generation, name);
        else
                snprintf(key, sizeof key, "%s/%s", tag, name);
        put(store, key, data, sizeof data);
        if (record_format(&record, &text, &size, NULL))
                abort();
        record_path(0, generation, path);
        snprintf(key, sizeof key, "%s/%s", tag, path);
        put(store, key, text, size);
        strcpy(records[0].path, path);
        records[0].size = size;
        records[0].crc64 = sum_crc64(0, text, size);
        free(text);
        for (size_t i = 0; older && i < older->file_count; i++) {
                if (!strcmp(older->files[i].name, name))
                        continue;
                files[manifest.file_count++] = older->files[i];
                for (size_t r = 0; r < older->record_count; r++)
                        if (older->records[r].generation == older->files[i].generation)
                                records[manifest.record_count++] = older->records[r];
        }
        if (!with_manifest)
                return;
        if (manifest_format(&manifest, &text, &size, NULL))
                abort();
        snprintf(key, sizeof key, "%s/.nebula/manifest.json", tag);
        put(store, key, text, size);
        free(text);
}

static void flip(struct store *store, const char *key, uint64_t offset)
{
        struct old_entry entry;
        char *data;

        if (store->ops->old_stat(store, key, &entry, NULL))
                abort();
        data = malloc(entry.size);
        if (store->ops->read(store, key, data, 0, entry.size, NULL))
                abort();
        data[offset] = (char)(data[offset] ^ 4);
        put(store, key, data, entry.size);
        free(data);
        old_entry_done(&entry);
}

static enum nebula_status read_file(struct store *store, const struct manifest *manifest, const char *name, void *data,
                                    struct nebula_error *error)
{
        struct record_file recorded = { 0 };
        enum nebula_status status = manifest_load_file(store, manifest, name, &recorded, error);

        if (!status)
                status = manifest_read_file(store, manifest, &recorded, data, error);
        record_file_done(&recorded);
        return status;
}

static bool reads_back(struct store *store, const struct manifest *manifest, const char *name, unsigned seed)
{
        char data[FILE_BYTES], expected[FILE_BYTES];

        fill(expected, sizeof expected, seed);
        return read_file(store, manifest, name, data, NULL) == NEBULA_OK &&
               !memcmp(data, expected, sizeof data);
}

static void a_file_is_read_back_and_a_flipped_byte_is_named_with_its_offset(void)
{
        struct store *store = new_store();
        struct manifest manifest;
        struct nebula_error error;
        char data[FILE_BYTES];

        write_version(store, "t", 1, 5, "model.pt", false, NULL, true);
        REQUIRE(manifest_load(store, "t", &manifest, &error) == NEBULA_OK);
        CHECK(reads_back(store, &manifest, "model.pt", 7 + 'm'));
        CHECK(read_file(store, &manifest, "absent", data, &error) == NEBULA_NOT_FOUND);
        flip(store, "t/model.pt", 2 * CHUNK + 9);
        CHECK(read_file(store, &manifest, "model.pt", data, &error) == NEBULA_CORRUPT);
        CHECK(strstr(error.message, "t/model.pt") && strstr(error.message, "8192"));
        manifest_done(&manifest);
        store_close(store);
}

static void a_file_of_another_length_is_found(void)
{
        struct store *store = new_store();
        struct manifest manifest;
        struct nebula_error error;
        char data[FILE_BYTES + 1] = { 0 };

        write_version(store, "t", 1, 5, "f", false, NULL, true);
        REQUIRE(manifest_load(store, "t", &manifest, &error) == NEBULA_OK);
        fill(data, FILE_BYTES, 7 + 'f');
        put(store, "t/f", data, FILE_BYTES - 1);
        CHECK(read_file(store, &manifest, "f", data, &error) == NEBULA_CORRUPT);
        CHECK(manifest_verify(store, &manifest, NULL, NULL, &error) == NEBULA_CORRUPT);
        CHECK(strstr(error.message, "cut off"));
        put(store, "t/f", data, FILE_BYTES + 1);
        CHECK(manifest_verify(store, &manifest, NULL, NULL, &error) == NEBULA_CORRUPT);
        store->ops->old_remove(store, "t/f", NULL);
        CHECK(manifest_verify(store, &manifest, NULL, NULL, &error) == NEBULA_NOT_FOUND);
        manifest_done(&manifest);
        store_close(store);
}

struct verdicts {
        size_t good, bad;
};

static void count_verdict(void *argument, const struct manifest_file *file, enum nebula_status status,
                          const struct nebula_error *error)
{
        struct verdicts *verdicts = argument;

        (void)file;
        (void)error;
        if (status)
                verdicts->bad++;
        else
                verdicts->good++;
}

static void verify_goes_on_after_a_bad_file(void)
{
        struct store *store = new_store();
        struct manifest one, two;
        struct verdicts verdicts = { 0 };
        struct nebula_error error;

        write_version(store, "t", 1, 5, "a", false, NULL, true);
        REQUIRE(manifest_load(store, "t", &one, NULL) == NEBULA_OK);
        write_version(store, "t", 2, 6, "b", true, &one, true);
        REQUIRE(manifest_load(store, "t", &two, NULL) == NEBULA_OK);
        CHECK(two.file_count == 2);
        CHECK(manifest_verify(store, &two, count_verdict, &verdicts, &error) == NEBULA_OK && verdicts.good == 2);
        flip(store, "t/.nebula/g2/b", 1);
        verdicts = (struct verdicts){ 0 };
        CHECK(manifest_verify(store, &two, count_verdict, &verdicts, &error) == NEBULA_CORRUPT);
        CHECK(verdicts.good == 1 && verdicts.bad == 1);
        flip(store, "t/.nebula/rank-00000.json", 40);
        verdicts = (struct verdicts){ 0 };
        CHECK(manifest_verify(store, &two, count_verdict, &verdicts, &error) == NEBULA_CORRUPT && verdicts.bad == 2);
        manifest_done(&one);
        manifest_done(&two);
        store_close(store);
}

static void a_record_that_was_rewritten_under_its_manifest_is_found(void)
{
        struct store *store = new_store();
        struct manifest manifest;
        struct record record;
        struct nebula_error error;

        write_version(store, "t", 1, 5, "a", false, NULL, true);
        REQUIRE(manifest_load(store, "t", &manifest, NULL) == NEBULA_OK);
        write_version(store, "t", 1, 5, "b", false, NULL, false); /* sound in itself, but not the one */
        CHECK(manifest_load_record(store, &manifest, 0, &record, &error) == NEBULA_CORRUPT);
        manifest_done(&manifest);
        store_close(store);
}

static void a_renamed_directory_is_refused_and_says_why(void)
{
        struct store *store = new_store();
        struct manifest manifest;
        struct nebula_error error;
        struct old_entry entry;
        char text[4096];

        write_version(store, "t", 1, 5, "a", false, NULL, true);
        REQUIRE(!store->ops->old_stat(store, "t/.nebula/manifest.json", &entry, NULL));
        REQUIRE(!store->ops->read(store, "t/.nebula/manifest.json", text, 0, entry.size, NULL));
        put(store, "copy/.nebula/manifest.json", text, entry.size);
        old_entry_done(&entry);
        CHECK(manifest_load(store, "copy", &manifest, &error) == NEBULA_CORRUPT && strstr(error.message, "renamed"));
        CHECK(manifest_load(store, "none", &manifest, &error) == NEBULA_NOT_FOUND);
        store_close(store);
}

static void a_rewritten_file_is_read_where_it_waits_and_then_in_place(void)
{
        struct store *store = new_store();
        struct manifest one, two;

        write_version(store, "t", 1, 5, "a", false, NULL, true);
        write_version(store, "t", 1, 5, "keep", false, NULL, false);
        REQUIRE(manifest_load(store, "t", &one, NULL) == NEBULA_OK);
        write_version(store, "t", 2, 6, "a", true, NULL, false);
        CHECK(reads_back(store, &one, "a", 7 + 'a') == false); /* its record was replaced above: never a mixture */
        manifest_done(&one);
        write_version(store, "t", 1, 5, "a", false, NULL, true);
        REQUIRE(manifest_load(store, "t", &one, NULL) == NEBULA_OK);
        CHECK(reads_back(store, &one, "a", 7 + 'a')); /* the second writing is not visible yet */
        write_version(store, "t", 2, 6, "a", true, &one, true);
        REQUIRE(manifest_load(store, "t", &two, NULL) == NEBULA_OK);
        CHECK(reads_back(store, &two, "a", 14 + 'a'));
        put(store, "t/.nebula/g3/a", "x", 1); /* somebody writes the third */
        put(store, "t/.nebula/g1/stale", "x", 1);
        put(store, "t/foreign", "x", 1);
        CHECK(manifest_settle(store, &two, NULL) == NEBULA_OK);
        CHECK(!has(store, "t/.nebula/g2/a") && reads_back(store, &two, "a", 14 + 'a'));
        CHECK(!has(store, "t/.nebula/rank-00000.json") && !has(store, "t/.nebula/g1/stale"));
        CHECK(has(store, "t/.nebula/g3/a") && has(store, "t/foreign"));
        CHECK(manifest_settle(store, &two, NULL) == NEBULA_OK);
        CHECK(reads_back(store, &two, "a", 14 + 'a'));
        manifest_done(&one);
        manifest_done(&two);
        store_close(store);
}

static atomic_uint reads_left;
static struct manifest settled;

static enum nebula_status read_after_settling(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size,
                                              struct nebula_error *error)
{
        if (atomic_fetch_sub(&reads_left, 1) == 1 && manifest_settle(store, &settled, NULL))
                abort();
        return store_mem.read(store, key, data, offset, size, error);
}

/* Whoever checks it has asked where it is, and reads the first or the third of its chunks. */
static void a_file_that_is_put_in_its_place_while_it_is_checked_is_not_damaged(void)
{
        for (unsigned reads = 1; reads <= 3; reads += 2) {
                struct store *store = new_store();
                struct store_ops ops = store_mem;

                write_version(store, "t", 2, 6, "a", true, NULL, true);
                REQUIRE(manifest_load(store, "t", &settled, NULL) == NEBULA_OK);
                ops.read = read_after_settling;
                atomic_store(&reads_left, reads);
                store->ops = &ops;
                CHECK(manifest_verify(store, &settled, NULL, NULL, NULL) == NEBULA_OK);
                store->ops = &store_mem;
                CHECK(has(store, "t/a") && !has(store, "t/.nebula/g2/a"));
                flip(store, "t/a", 30);
                CHECK(manifest_verify(store, &settled, NULL, NULL, NULL) == NEBULA_CORRUPT);
                manifest_done(&settled);
                store_close(store);
        }
}

static void remove_takes_all_that_is_ours_and_nothing_else(void)
{
        struct store *store = new_store();
        struct manifest manifest;
        size_t swept;

        write_version(store, "t", 1, 5, "a", false, NULL, true);
        put(store, "t/.nebula/tmp-9-1", "x", 1);
        put(store, "t/.nebula/g1/a", "x", 1);
        put(store, "t/.nebula/committed.json", "x", 1);
        REQUIRE(manifest_load(store, "t", &manifest, NULL) == NEBULA_OK);
        put(store, "t/foreign", "x", 1);
        CHECK(manifest_remove(store, &manifest, NULL) == NEBULA_OK);
        CHECK(!has(store, "t/a") && !has(store, "t/.nebula/manifest.json") && !has(store, "t/.nebula/rank-00000.json"));
        CHECK(!has(store, "t/.nebula/g1/a") && !has(store, "t/.nebula/committed.json"));
        CHECK(has(store, "t/foreign"));
        CHECK(has(store, "t/.nebula/tmp-9-1")); /* somebody may be writing it */
        CHECK(manifest_sweep(store, -1, &swept, NULL) == NEBULA_OK && !has(store, "t/.nebula/tmp-9-1"));
        CHECK(manifest_remove(store, &manifest, NULL) == NEBULA_OK); /* again is fine */
        manifest_done(&manifest);
        store_close(store);
}

static void a_version_that_was_written_again_is_not_removed_in_the_name_of_the_old_one(void)
{
        struct store *store = new_store();
        struct manifest old, now;

        write_version(store, "t", 1, 5, "a", false, NULL, true);
        REQUIRE(manifest_load(store, "t", &old, NULL) == NEBULA_OK);
        write_version(store, "t", 2, 6, "a", false, NULL, true);
        CHECK(manifest_remove(store, &old, NULL) == NEBULA_BUSY);
        REQUIRE(manifest_load(store, "t", &now, NULL) == NEBULA_OK);
        CHECK(now.generation == 2 && manifest_verify(store, &now, NULL, NULL, NULL) == NEBULA_OK);
        CHECK(manifest_remove(store, &now, NULL) == NEBULA_OK && !has(store, "t/a"));
        manifest_done(&old);
        manifest_done(&now);
        store_close(store);
}

static size_t removals_until;
static const struct manifest *carried;

static enum nebula_status remove_and_write_again(struct store *store, const char *key, struct nebula_error *error)
{
        enum nebula_status status = store_mem.old_remove(store, key, error);

        if (removals_until && !--removals_until)
                write_version(store, "t", 2, 6, "a", true, carried, true);
        return status;
}

/* By another program: after the manifest went, when it still knew the file to carry over, or after that file went. */
static void a_tag_that_is_written_again_while_it_is_removed_keeps_what_it_needs(void)
{
        for (size_t removals = 1; removals <= 2; removals++) {
                struct store *store = new_store();
                struct store_ops ops = store_mem;
                struct manifest old, now;

                write_version(store, "t", 1, 5, removals == 1 ? "keep" : "a", false, NULL, true);
                REQUIRE(manifest_load(store, "t", &old, NULL) == NEBULA_OK);
                ops.old_remove = remove_and_write_again;
                removals_until = removals;
                carried = removals == 1 ? &old : NULL;
                store->ops = &ops;
                CHECK(manifest_remove(store, &old, NULL) == NEBULA_OK && !removals_until);
                store->ops = &store_mem;
                REQUIRE(manifest_load(store, "t", &now, NULL) == NEBULA_OK);
                CHECK(now.generation == 2 && now.file_count == 3 - removals);
                CHECK(manifest_verify(store, &now, NULL, NULL, NULL) == NEBULA_OK);
                manifest_done(&old);
                manifest_done(&now);
                store_close(store);
        }
}

/* A store whose removals fail from the k-th on: a crash in the middle. */
static size_t removals_left;
static struct store_ops dying_ops;

static enum nebula_status dying_remove(struct store *store, const char *key, struct nebula_error *error)
{
        if (!removals_left)
                return NEBULA_STORAGE;
        removals_left--;
        return store_mem.old_remove(store, key, error);
}

static enum nebula_status blind_read(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                     struct nebula_error *error)
{
        return NEBULA_STORAGE;
}

/* It may be a later writing, in a format of tomorrow. */
static void what_cannot_be_looked_at_is_not_removed(void)
{
        struct store *store = new_store();
        struct manifest manifest;
        struct nebula_error error;

        write_version(store, "t", 1, 5, "a", false, NULL, true);
        REQUIRE(manifest_load(store, "t", &manifest, NULL) == NEBULA_OK);
        dying_ops = store_mem;
        dying_ops.old_read_text = blind_read;
        store->ops = &dying_ops;
        CHECK(manifest_remove(store, &manifest, &error) == NEBULA_STORAGE);
        store->ops = &store_mem;
        CHECK(has(store, "t/a") && has(store, "t/.nebula/manifest.json") && has(store, "t/.nebula/rank-00000.json"));
        put(store, "t/.nebula/manifest.json", "damaged", 7);
        CHECK(manifest_remove(store, &manifest, &error) == NEBULA_CORRUPT && *error.message);
        CHECK(has(store, "t/a") && has(store, "t/.nebula/manifest.json") && has(store, "t/.nebula/rank-00000.json"));
        manifest_done(&manifest);
        store_close(store);
}

static void a_remove_that_dies_leaves_a_whole_version_or_debris_that_a_sweep_takes(void)
{
        for (size_t k = 0;; k++) {
                struct store *store = new_store();
                struct manifest manifest, found = { 0 };
                enum nebula_status died;
                size_t swept;

                write_version(store, "t", 1, 5, "a", false, NULL, true);
                REQUIRE(manifest_load(store, "t", &manifest, NULL) == NEBULA_OK);
                dying_ops = store_mem;
                dying_ops.old_remove = dying_remove;
                removals_left = k;
                store->ops = &dying_ops;
                died = manifest_remove(store, &manifest, NULL);
                store->ops = &store_mem;
                if (manifest_load(store, "t", &found, NULL) == NEBULA_OK) {
                        CHECK(k == 0 && manifest_verify(store, &found, NULL, NULL, NULL) == NEBULA_OK);
                } else {
                        CHECK(manifest_sweep(store, 0, &swept, NULL) == NEBULA_OK);
                        CHECK(!has(store, "t/a") && !has(store, "t/.nebula/rank-00000.json"));
                }
                manifest_done(&found);
                manifest_done(&manifest);
                store_close(store);
                if (!died)
                        break;
                REQUIRE(k < 100);
        }
}

static void a_sweep_takes_old_debris_and_leaves_what_is_young_foreign_or_whole(void)
{
        const int64_t hour_ns = INT64_C(3600) * 1000000000;
        struct store *store = new_store();
        struct manifest manifest;
        size_t swept = 99;

        write_version(store, "whole", 1, 5, "a", false, NULL, true);
        write_version(store, "torn", 1, 6, "a", false, NULL, false);
        put(store, "torn/mine", "x", 1);
        put(store, "whole/.nebula/g2/a", "x", 1);
        put(store, "whole/.nebula/tmp-1-1", "x", 1);
        put(store, "foreign/a", "x", 1);
        put(store, ".nebula-tmp-1-1", "x", 1);
        CHECK(manifest_sweep(store, hour_ns, &swept, NULL) == NEBULA_OK && swept == 0);
        CHECK(has(store, "torn/a") && has(store, "whole/.nebula/tmp-1-1") && has(store, ".nebula-tmp-1-1"));
        CHECK(manifest_sweep(store, -hour_ns, &swept, NULL) == NEBULA_OK && swept == 3);
        CHECK(!has(store, "torn/a") && !has(store, "torn/.nebula/rank-00000.json") && has(store, "torn/mine"));
        CHECK(!has(store, "whole/.nebula/g2/a") && !has(store, "whole/.nebula/tmp-1-1") && !has(store, ".nebula-tmp-1-1"));
        CHECK(has(store, "foreign/a"));
        REQUIRE(manifest_load(store, "whole", &manifest, NULL) == NEBULA_OK);
        CHECK(manifest_verify(store, &manifest, NULL, NULL, NULL) == NEBULA_OK);
        manifest_done(&manifest);
        flip(store, "whole/.nebula/manifest.json", 30); /* a person may still want it */
        CHECK(manifest_sweep(store, -hour_ns, &swept, NULL) == NEBULA_OK && swept == 0 && has(store, "whole/a"));
        store_close(store);
}

static unsigned looks_left;

/* The tag is written again between two looks into it. */
static enum nebula_status list_and_write_again(struct store *store, const char *prefix, struct old_list *ret_list,
                                               struct nebula_error *error)
{
        if (!strcmp(prefix, "torn/.nebula") && looks_left && !--looks_left) {
                store->ops = &store_mem;
                write_version(store, "torn", 2, 7, "b", false, NULL, false);
                store->ops = &dying_ops;
        }
        return store_mem.old_list(store, prefix, ret_list, error);
}

static void a_sweep_leaves_what_has_come_since_it_looked_how_old_all_is(void)
{
        for (unsigned looks = 2; looks <= 3; looks++) {
                struct store *store = new_store();
                size_t swept;

                looks_left = looks;
                write_version(store, "torn", 1, 6, "a", false, NULL, false);
                dying_ops = store_mem;
                dying_ops.old_list = list_and_write_again;
                store->ops = &dying_ops;
                CHECK(manifest_sweep(store, 0, &swept, NULL) == NEBULA_OK && swept == 1);
                store->ops = &store_mem;
                CHECK(!looks_left && !has(store, "torn/a") && !has(store, "torn/.nebula/rank-00000.json"));
                CHECK(has(store, "torn/b") && has(store, "torn/.nebula/rank-00000.g2.json"));
                store_close(store);
        }
}

static void a_scan_lists_the_sound_oldest_first_and_counts_the_broken(void)
{
        struct store *store = new_store();
        struct manifest_scan scan;

        write_version(store, "global_step20", 1, 30, "a", false, NULL, true);
        write_version(store, "global_step100", 1, 20, "a", false, NULL, true);
        write_version(store, "torn", 1, 40, "a", false, NULL, false);
        write_version(store, "broken", 1, 50, "a", false, NULL, true);
        flip(store, "broken/.nebula/manifest.json", 30);
        put(store, "latest", "global_step20\n", 14);
        put(store, "foreign/file", "x", 1);
        REQUIRE(manifest_scan(store, &scan, NULL) == NEBULA_OK);
        REQUIRE(scan.count == 2);
        CHECK(!strcmp(scan.manifests[0].tag, "global_step100") && !strcmp(scan.manifests[1].tag, "global_step20"));
        CHECK(scan.broken_count == 1 && strstr(scan.broken, "broken/.nebula/manifest.json"));
        CHECK(manifest_scan_newest(&scan, "") == 0);  /* the larger step, though committed before */
        CHECK(manifest_scan_newest(&scan, "other") == -1);
        manifest_scan_done(&scan);
        write_version(store, "best9", 1, 25, "a", false, NULL, true);
        REQUIRE(manifest_scan(store, &scan, NULL) == NEBULA_OK && scan.count == 3);
        CHECK(!strcmp(scan.manifests[manifest_scan_newest(&scan, NULL)].tag, "best9")); /* committed after global_step100 */
        manifest_scan_done(&scan);
        store_close(store);
}

static struct {
        void (*then)(struct store *store); /* another program, just before a manifest is read; once, unless it is set again */
        size_t root_lists, reads, round;
} meanwhile;
static struct store_ops meanwhile_ops;

static void let_go(struct store *store, const char *tag)
{
        struct manifest manifest;

        if (manifest_load(store, tag, &manifest, NULL) || manifest_remove(store, &manifest, NULL))
                abort();
        manifest_done(&manifest);
}

static void act(struct store *store)
{
        void (*then)(struct store *) = meanwhile.then;

        if (!then)
                return;
        meanwhile.then = NULL;
        store->ops = &store_mem;
        then(store);
        store->ops = &meanwhile_ops;
}

static enum nebula_status read_meanwhile(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                         struct nebula_error *error)
{
        meanwhile.reads++;
        act(store);
        return store_mem.old_read_text(store, key, limit, ret_text, ret_size, error);
}

static enum nebula_status list_meanwhile(struct store *store, const char *prefix, struct old_list *ret_list,
                                         struct nebula_error *error)
{
        meanwhile.root_lists += !*prefix;
        return store_mem.old_list(store, prefix, ret_list, error);
}

static void begin_meanwhile(struct store *store, void (*then)(struct store *store))
{
        memset(&meanwhile, 0, sizeof meanwhile);
        meanwhile.then = then;
        meanwhile_ops = store_mem;
        meanwhile_ops.old_read_text = read_meanwhile;
        meanwhile_ops.old_list = list_meanwhile;
        store->ops = &meanwhile_ops;
}

/* Sequence of the newest, 0: nothing there. */
static uint64_t newest_sequence(struct store *store)
{
        struct manifest_scan scan;
        uint64_t sequence = 0;
        int64_t newest;

        if (manifest_scan(store, &scan, NULL))
                abort();
        newest = manifest_scan_newest(&scan, NULL);
        if (newest >= 0)
                sequence = scan.manifests[newest].sequence;
        manifest_scan_done(&scan);
        return sequence;
}

static void save_the_next(struct store *store)
{
        char tag[32], before[32];

        snprintf(before, sizeof before, "global_step%zu", ++meanwhile.round);
        snprintf(tag, sizeof tag, "global_step%zu", meanwhile.round + 1);
        write_version(store, tag, 1, meanwhile.round + 1, "a", false, NULL, true);
        let_go(store, before);
        if (meanwhile.round % 5)
                meanwhile.then = save_the_next;
}

static void lost_and_found_of_another_user_is_no_checkpoint(void)
{
        char name[] = "lost+found", tag[256];
        struct old_entry entry = { .name = name, .is_directory = true, .is_foreign = true };

        CHECK(!manifest_tag_of(&entry, tag));
        entry.is_foreign = false;
        CHECK(manifest_tag_of(&entry, tag) && !strcmp(tag, name)); /* somebody's tag */
}

/* As with keep_last=1, whose one version is another each time it is looked at. */
static void a_scan_finds_what_took_the_place_of_what_it_had_listed(void)
{
        struct store *store = new_store();

        write_version(store, "global_step1", 1, 1, "a", false, NULL, true);
        begin_meanwhile(store, save_the_next);
        CHECK(newest_sequence(store) == 6 && meanwhile.round == 5);
        meanwhile.then = save_the_next;
        CHECK(newest_sequence(store) == 11 && meanwhile.round == 10);
        store_close(store);
}

static void go_on_for_ever(struct store *store)
{
        save_the_next(store);
        meanwhile.then = go_on_for_ever;
}

static void a_scan_ends_also_where_versions_come_and_go_for_ever(void)
{
        struct store *store = new_store();

        write_version(store, "global_step1", 1, 1, "a", false, NULL, true);
        begin_meanwhile(store, go_on_for_ever);
        newest_sequence(store);
        CHECK(meanwhile.root_lists > 10 && meanwhile.root_lists < 30);
        store_close(store);
}

static void complete_a(struct store *store)
{
        write_version(store, "a", 1, 20, "x", false, NULL, true);
        if (store->ops->old_remove(store, "b/.nebula/manifest.json", NULL))
                abort();
}

static void look_at_a_first(struct store *store)
{
        meanwhile.then = complete_a;
}

/* Both directories stand all the time. */
static void a_scan_finds_what_was_completed_after_its_look_when_the_other_is_being_removed(void)
{
        struct store *store = new_store();

        write_version(store, "a", 1, 20, "x", false, NULL, false);
        write_version(store, "b", 1, 10, "x", false, NULL, true);
        begin_meanwhile(store, look_at_a_first);
        CHECK(newest_sequence(store) == 20);
        store_close(store);
}

static void a_scan_of_what_stands_still_reads_each_manifest_once(void)
{
        struct store *store = new_store();
        char name[32];

        for (int i = 0; i < 8; i++) {
                snprintf(name, sizeof name, "foreign%d/file", i);
                put(store, name, "x", 1);
        }
        write_version(store, "global_step1", 1, 1, "a", false, NULL, true);
        write_version(store, "global_step2", 1, 2, "a", false, NULL, true);
        begin_meanwhile(store, NULL);
        CHECK(newest_sequence(store) == 2 && meanwhile.root_lists == 2 && meanwhile.reads == 10);
        store_close(store);
}

TAP_MAIN(TEST(lost_and_found_of_another_user_is_no_checkpoint), TEST(what_is_written_is_not_too_long_to_be_read),
         TEST(a_record_comes_back_as_it_was_written),
         TEST(the_golden_record_of_version_1_0_is_read),
         TEST(the_golden_manifest_of_version_1_0_is_read),
         TEST(writing_the_golden_manifest_again_gives_the_same_bytes),
         TEST(every_flipped_bit_and_every_cut_of_a_document_is_found),
         TEST(unknown_fields_and_minor_versions_are_accepted),
         TEST(an_unknown_major_version_is_refused_and_says_so),
         TEST(a_path_that_the_name_does_not_give_is_refused), TEST(a_number_that_no_checkpoint_has_is_refused),
         TEST(a_manifest_with_numbers_that_are_refused_is_not_written), TEST(a_sealed_lie_is_refused),
         TEST(a_record_that_does_not_add_up_is_refused),
         TEST(a_file_is_read_back_and_a_flipped_byte_is_named_with_its_offset),
         TEST(a_file_of_another_length_is_found),
         TEST(verify_goes_on_after_a_bad_file),
         TEST(a_record_that_was_rewritten_under_its_manifest_is_found),
         TEST(a_renamed_directory_is_refused_and_says_why),
         TEST(a_rewritten_file_is_read_where_it_waits_and_then_in_place),
         TEST(remove_takes_all_that_is_ours_and_nothing_else),
         TEST(a_version_that_was_written_again_is_not_removed_in_the_name_of_the_old_one),
         TEST(what_cannot_be_looked_at_is_not_removed),
         TEST(a_remove_that_dies_leaves_a_whole_version_or_debris_that_a_sweep_takes),
         TEST(a_sweep_takes_old_debris_and_leaves_what_is_young_foreign_or_whole),
         TEST(a_sweep_leaves_what_has_come_since_it_looked_how_old_all_is),
         TEST(a_tag_that_is_written_again_while_it_is_removed_keeps_what_it_needs),
         TEST(a_file_that_is_put_in_its_place_while_it_is_checked_is_not_damaged),
         TEST(a_scan_lists_the_sound_oldest_first_and_counts_the_broken),
         TEST(a_scan_finds_what_took_the_place_of_what_it_had_listed),
         TEST(a_scan_ends_also_where_versions_come_and_go_for_ever),
         TEST(a_scan_finds_what_was_completed_after_its_look_when_the_other_is_being_removed),
         TEST(a_scan_of_what_stands_still_reads_each_manifest_once))
