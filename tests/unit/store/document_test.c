/* Manifests and removals as texts: a written text can be read, an unsound one is refused. */
#include "base/error.h"
#include "golden.h"
#include "store/manifest.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/tag_log.h"


static enum nebula_status parse_manifest(const char *text, size_t size, struct nebula_error *error)
{
        struct manifest manifest = { 0 };
        enum nebula_status status = manifest_parse(text, size, &manifest, error);

        manifest_done(&manifest);
        return status;
}

static enum nebula_status parse_removal(const char *text, size_t size, struct nebula_error *error)
{
        struct removal removal;

        return removal_parse(text, size, &removal, error);
}

/* ---- written documents are read again ---- */

/* The status of formatting a document of `size` bytes, and of parsing it. */
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

static void written_documents_are_short_enough_to_be_read(void)
{
        enum nebula_status parsed;

        CHECK(format_and_parse(DOCUMENT_TEXT_MAX, &parsed) == NEBULA_OK && parsed == NEBULA_OK);
        CHECK(format_and_parse(DOCUMENT_TEXT_MAX + 1, &parsed) == NEBULA_INVALID);
}

static void a_manifest_comes_back_as_it_was_written(void)
{
        struct manifest written = { .tag = "global_step7", .job = "j", .run = "r", .host = "h", .number = 5, .writing = 4, .sequence = 9,
                                    .step = 7, .world = 2, .line = { 1, { { 8, 3 } } } }, read;
        struct manifest_file file = { "x", 10, 1, 0, true };
        char *text;
        size_t size;

        REQUIRE(!manifest_reserve(&written, 1, 1, NULL) && !manifest_add_file(&written, &file, NULL));
        written.records[written.record_count++] = (struct manifest_record){ WRITING, 100, 0xf1, 9, 1 };
        REQUIRE(!manifest_format(&written, &text, &size, NULL));
        REQUIRE(!manifest_parse(text, size, &read, NULL));
        CHECK(!strcmp(read.tag, "global_step7") && !strcmp(read.job, "j") && !strcmp(read.run, "r") && !strcmp(read.host, "h"));
        CHECK(read.number == 5 && read.writing == 4 && read.sequence == 9 && read.step == 7 && read.world == 2);
        CHECK(read.line.count == 1 && read.line.forks[0].began == 8 && read.line.forks[0].after == 3 && !read.is_damaged && !read.is_abandoned);
        REQUIRE(read.file_count == 1 && read.record_count == 1);
        CHECK(!strcmp(read.files[0].name, "x") && read.files[0].size == 10 && manifest_file_sequence(&read, &read.files[0]) == 9 && !manifest_file_origin(&read, &read.files[0]) && read.files[0].rank == 1);
        CHECK(read.files[0].is_apart && read.files[0].record == 0);
        CHECK(!strcmp(read.records[0].writing, WRITING) && read.records[0].size == 100 && read.records[0].crc64 == 0xf1 && read.records[0].rank == 1);
        manifest_done(&read);
        manifest_done(&written);
        free(text);
}

static void a_removal_comes_back_as_it_was_written(void)
{
        struct removal written = { "a/b", 17 }, read;
        char *text;
        size_t size;

        REQUIRE(!removal_format(&written, &text, &size, NULL) && document_is(text, "removal"));
        REQUIRE(!removal_parse(text, size, &read, NULL));
        CHECK(!strcmp(read.tag, "a/b") && read.number == 17);
        free(text);
}

static void nothing_is_as_good_as_done(void)
{
        struct manifest manifest = { 0 };
        struct tag_log log = { 0 };

        manifest_done(&manifest);
        tag_log_done(&log);
        manifest_done(&manifest);
}

/* ---- golden files ---- */

static void the_golden_manifest_of_version_2_0_is_read(void)
{
        struct manifest manifest;
        char key[MANIFEST_KEY_MAX];
        size_t size;
        char *text = golden("manifest-2.0.json", &size);

        REQUIRE(manifest_parse(text, size, &manifest, NULL) == NEBULA_OK);
        CHECK(!strcmp(manifest.job, "gpt") && manifest.number == 4 && manifest.writing == 2 && manifest.step == 500);
        CHECK(manifest.sequence == 1766312345160000000 && !strcmp(manifest.host, "node-b") && manifest.line.count == 1);
        REQUIRE(manifest.file_count == 3 && manifest.record_count == 2);
        CHECK(manifest_file_origin(&manifest, &manifest.files[2]) == 1766312345000000000 && manifest.files[2].size == 77 && manifest.files[2].record == 1 && manifest.files[0].rank == 3);
        CHECK(manifest.records[1].crc64 == 0x00f1e2d3c4b5a697 && manifest.records[1].size == 1234 && manifest.records[0].rank == 2);
        CHECK(!manifest_file_key(&manifest, &manifest.files[0], key, NULL) && !strcmp(key, "global_step500/model%2Frank3 \xc3\xa9.pt"));
        CHECK(!manifest_file_key(&manifest, &manifest.files[1], key, NULL) &&
              !strcmp(key, "global_step500/.nebula/w7fb1b9bf9793b267-2-9c0a77e1/empty"));
        manifest_done(&manifest);
        free(text);
}

static void the_golden_removal_of_version_2_0_is_read(void)
{
        struct removal removal;
        size_t size;
        char *text = golden("removal-2.0.json", &size);

        REQUIRE(removal_parse(text, size, &removal, NULL) == NEBULA_OK);
        CHECK(!strcmp(removal.tag, "global_step500") && removal.number == 5);
        free(text);
}

static void writing_the_golden_documents_again_gives_the_same_bytes(void)
{
        struct manifest manifest = { 0 };
        struct removal removal = { 0 };
        char *texts[2], *again[2] = { 0 };
        size_t sizes[2], again_sizes[2];

        texts[0] = golden("manifest-2.0.json", &sizes[0]);
        texts[1] = golden("removal-2.0.json", &sizes[1]);
        REQUIRE(!manifest_parse(texts[0], sizes[0], &manifest, NULL) && !removal_parse(texts[1], sizes[1], &removal, NULL));
        REQUIRE(!manifest_format(&manifest, &again[0], &again_sizes[0], NULL) && !removal_format(&removal, &again[1], &again_sizes[1], NULL));
        for (size_t i = 0; i < 2; i++) {
                CHECK(again_sizes[i] == sizes[i] && !memcmp(texts[i], again[i], sizes[i]));
                free(texts[i]);
                free(again[i]);
        }
        manifest_done(&manifest);
}

static void every_flipped_bit_and_every_cut_is_found(void)
{
        check_damage(parse_manifest, "manifest-2.0.json");
        check_damage(parse_removal, "removal-2.0.json");
}

/* A record has a test of its own. */
static void no_document_is_taken_for_one_of_another_kind(void)
{
        static const char *const names[] = { "manifest-2.0.json", "removal-2.0.json", "record-2.0.json", "captured-2.0.json" };

        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
                size_t size;
                char *text = golden(names[i], &size);

                CHECK(parse_manifest(text, size, NULL) == (i == 0 ? NEBULA_OK : NEBULA_CORRUPT));
                CHECK(parse_removal(text, size, NULL) == (i == 1 ? NEBULA_OK : NEBULA_CORRUPT));
                free(text);
        }
}

/* ---- versions ---- */

#define MANIFEST(version, extra, files, records) \
        "{\"nebula\":\"manifest\",\"version\":\"" version "\"," extra "\"tag\":\"t\",\"job\":\"\",\"run\":\"\",\"number\":1,\"writing\":2," \
        "\"step\":-1,\"world\":1,\"sequence\":5,\"files\":[" files "],\"records\":[" records "]"
#define FILE_OF(name, record) "{\"name\":\"" name "\",\"size\":1,\"rank\":0,\"record\":" #record "}"
#define RECORD_OF(writing, rank, sequence) \
        "{\"rank\":" #rank ",\"sequence\":" #sequence ",\"writing\":\"" writing "\",\"size\":1,\"crc64\":\"0123456789abcdef\"}"
#define RECORD_0 RECORD_OF(WRITING, 0, 1)

static void unknown_fields_and_minor_versions_are_accepted(void)
{
        CHECK(parse_sealed(parse_manifest, MANIFEST("2.0", "", "", "")) == NEBULA_OK);
        CHECK(parse_sealed(parse_manifest, MANIFEST("2.7", "\"future\":{\"x\":[1]},", FILE_OF("a", 0), RECORD_0)) == NEBULA_OK);
        CHECK(parse_sealed(parse_removal, "{\"nebula\":\"removal\",\"version\":\"2.1\",\"why\":\"old\",\"tag\":\"t\",\"number\":1") == NEBULA_OK);
}

static bool is_refused(const char *body, const char *one, const char *other)
{
        struct nebula_error error = { 0 };
        size_t size;
        char *text = seal(body, &size);
        enum nebula_status status = parse_manifest(text, size, &error);

        free(text);
        return status == NEBULA_CORRUPT && strstr(error.message, one) && strstr(error.message, other);
}

static void another_major_version_is_refused_and_says_which_nebula_reads_it(void)
{
        CHECK(is_refused(MANIFEST("1.0", "", "", ""), "version 1.0", "use an older Nebula"));
        CHECK(is_refused(MANIFEST("3.0", "", "", ""), "version 3.0", "use a newer Nebula"));
        CHECK(is_refused(MANIFEST("20.0", "", "", ""), "20.0", "newer"));
        CHECK(is_refused(MANIFEST("", "", "", ""), "manifest", "no version"));
        CHECK(is_refused(MANIFEST("2", "", "", ""), "version 2", "") && is_refused(MANIFEST("2x.0", "", "", ""), "2x.0", ""));
}

/* Version 1.0 was never released, but development versions wrote it. */
static void a_manifest_of_version_1_0_is_refused_by_its_version(void)
{
        CHECK(is_refused("{\"nebula\":\"manifest\",\"version\":\"1.0\",\"tag\":\"t\",\"job\":\"\",\"run\":\"\",\"generation\":2,\"step\":-1,\"world\":1,"
                         "\"sequence\":5,\"files\":[{\"name\":\"a\",\"path\":\"a\",\"size\":1,\"rank\":0,\"generation\":1}],\"records\":["
                         "{\"rank\":0,\"generation\":1,\"path\":\".nebula/rank-00000.json\",\"size\":1,\"crc64\":\"0123456789abcdef\"}]",
                         "version 1.0", "older Nebula"));
}

/* ---- hostile documents ---- */

static void a_sealed_lie_is_refused(void)
{
        CHECK(parse_sealed(parse_manifest, MANIFEST("2.0", "", FILE_OF("a", 0), RECORD_0)) == NEBULA_OK);
        CHECK(parse_sealed(parse_manifest, MANIFEST("2.0", "", FILE_OF("a", 0), "")) == NEBULA_CORRUPT); /* no record */
        CHECK(parse_sealed(parse_manifest, MANIFEST("2.0", "", FILE_OF("a", 1), RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_manifest, MANIFEST("2.0", "", FILE_OF("a", 4294967296), RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_manifest, MANIFEST("2.0", "", FILE_OF("a", -1), RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_manifest, MANIFEST("2.0", "", FILE_OF("a", 0), RECORD_OF(WRITING, 0, 6))) == NEBULA_CORRUPT); /* the future's */
        CHECK(parse_sealed(parse_manifest, MANIFEST("2.0", "", FILE_OF("a", 0) "," FILE_OF("a", 0), RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_manifest, MANIFEST("2.0", "", FILE_OF("", 0), RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_manifest, MANIFEST("2.0", "", "", RECORD_0 "," RECORD_0)) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_manifest, MANIFEST("2.0", "", "", RECORD_0 "," RECORD_OF(WRITING, 1, 1))) == NEBULA_OK);
        CHECK(parse_sealed(parse_manifest, MANIFEST("2.0", "\"tag\":\"u\",", "", "")) == NEBULA_CORRUPT); /* twice */
        CHECK(parse_sealed(parse_manifest, MANIFEST("2.0", "\"line\":[[6,1]],", "", "")) == NEBULA_CORRUPT); /* began after the version */
        CHECK(parse_sealed(parse_manifest, "[1") == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_manifest, "{\"nebula\":\"manifest\",\"version\":\"2.0\",\"tag\":\"\\u0000\"") == NEBULA_CORRUPT);
}

/*
 * fault (Storage): A manifest or record names a path that does not follow from its name, or an impossible number.
 * result: It counts as damaged. Nebula reads, moves and removes nothing at the path that it names.
 */
/* No document contains a key, so a name that looks like a path is only a name. */
static void a_name_leads_nowhere_else(void)
{
        static const char *const names[] = { "../a", "/etc/x", "x/../../a", ".nebula/manifest-1.json", "a/", "..", ".", "latest", "l/.bashrc" };

        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
                struct manifest manifest;
                char body[600], key[MANIFEST_KEY_MAX] = "", *text;
                size_t size;

                snprintf(body, sizeof body, MANIFEST("2.0", "", FILE_OF("%s", 0), RECORD_0), names[i]);
                text = seal(body, &size);
                REQUIRE(!manifest_parse(text, size, &manifest, NULL));
                CHECK(!manifest_file_key(&manifest, &manifest.files[0], key, NULL) && !strncmp(key, "t/", 2));
                CHECK(!strchr(key + 2, '/') && strcmp(key + 2, ".") && strcmp(key + 2, "..") && strncmp(key + 2, ".nebula", 7));
                manifest_done(&manifest);
                free(text);
        }
}

static void a_writing_that_is_no_name_of_one_is_refused(void)
{
        for (size_t i = 0; i < sizeof unsound_writings / sizeof *unsound_writings; i++) {
                char body[800];

                snprintf(body, sizeof body, MANIFEST("2.0", "", "", RECORD_OF("%s", 0, 1)), unsound_writings[i]);
                CHECK(parse_sealed(parse_manifest, body) == NEBULA_CORRUPT);
        }
}

/* ---- lists that are read without JSON values ---- */

static bool same_manifest(const struct manifest *one, const struct manifest *other)
{
        bool same = !strcmp(one->tag, other->tag) && one->writing == other->writing && one->file_count == other->file_count &&
                    one->record_count == other->record_count && one->referred == other->referred;

        for (size_t i = 0; same && i < one->file_count; i++) {
                const struct manifest_file *x = &one->files[i], *y = &other->files[i];

                same = !strcmp(x->name, y->name) && x->size == y->size && x->rank == y->rank &&
                       x->record == y->record && x->is_apart == y->is_apart && one->by_name[i] == other->by_name[i];
        }
        for (size_t i = 0; same && i < one->record_count; i++) {
                const struct manifest_record *x = &one->records[i], *y = &other->records[i];

                same = !strcmp(x->writing, y->writing) && x->size == y->size && x->crc64 == y->crc64 && x->sequence == y->sequence && x->rank == y->rank;
        }
        return same;
}

/* Copies `body` with a space after each name "files", which leaves all of it to the JSON parser. */
static void space_out(const char *body, char *ret_text)
{
        static const char key[] = "\"files\"";

        while (*body) {
                bool is_key = !strncmp(body, key, sizeof key - 1);

                ret_text += is_key ? sprintf(ret_text, "%s ", key) : sprintf(ret_text, "%c", *body);
                body += is_key ? sizeof key - 1 : 1;
        }
}

/* Reads `body` as it is, and spaced out. *ret_status: what both found. */
static bool reads_as_json(const char *body, enum nebula_status *ret_status)
{
        struct manifest manifests[2] = { { .world = 0 } };
        struct nebula_error errors[2] = { { .message = "" } };
        enum nebula_status found[2];
        bool same;

        for (int i = 0; i < 2; i++) {
                char spaced[2000], *text;
                size_t size;

                space_out(body, spaced);
                text = seal(i ? spaced : body, &size);
                found[i] = manifest_parse(text, size, &manifests[i], &errors[i]);
                free(text);
                errors[i].message[strcspn(errors[i].message, "0123456789")] = 0; /* the place, which spaces move */
        }
        same = found[0] == found[1] && !strcmp(errors[0].message, errors[1].message) && same_manifest(&manifests[0], &manifests[1]);
        *ret_status = found[0];
        manifest_done(&manifests[0]);
        manifest_done(&manifests[1]);
        return same;
}

#define APART_OF(name, tail) "{\"name\":\"" name "\",\"size\":7,\"rank\":0,\"record\":0" tail "}"
#define BOTH_LISTS "\"files\":[" FILE_OF("a", 0) "],\"records\":[" RECORD_0 "]"

static void a_manifest_is_read_the_same_however_its_json_is_written(void)
{
        static const char *const sound[] = {
                MANIFEST("2.0", "", "", ""),
                MANIFEST("2.0", "", FILE_OF("a", 0), RECORD_0),
                MANIFEST("2.0", "", FILE_OF("a", 0) "," APART_OF("b", ",\"apart\":true"), RECORD_0),
                MANIFEST("2.0", "", APART_OF("b", ",\"apart\":false"), RECORD_0),
                MANIFEST("2.0", "", APART_OF("b", ",\"new\":[{\"files\":[]}]"), RECORD_0),
                MANIFEST("2.0", "", "" FILE_OF("caf\xc3\xa9 \\\" \\\\ \\u0041/\x7f", 0) " , " FILE_OF("[{]}", 0), RECORD_0),
                MANIFEST("2.0", "", "{\"size\":1,\"name\":\"a\",\"record\":0,\"rank\":0,\"later\":1}", RECORD_0),
                MANIFEST("2.0", "\"referred\":1,", APART_OF("b", "") "," FILE_OF("a", 1), RECORD_0 "," RECORD_OF(WRITING, 1, 5)),
                MANIFEST("2.0", "\"extra\":{\"x\":1,\"files\":[],\"records\":[]},", FILE_OF("a", 0), RECORD_0),
                MANIFEST("2.0", "\"host\":\",\",", FILE_OF("a", 0), RECORD_0),
                MANIFEST("2.0", "", FILE_OF("a", 0), RECORD_0) ",\"late\":[]",
                MANIFEST("2.0", "", FILE_OF("a", 0), RECORD_OF(WRITING, 0, 5)) ",\"referred\":1",
        };
        static const char *const refused[] = {
                MANIFEST("2.0", "", FILE_OF("a", 0) ",", RECORD_0), MANIFEST("2.0", "", "," FILE_OF("a", 0), RECORD_0),
                MANIFEST("2.0", "", FILE_OF("a", 0) FILE_OF("b", 0), RECORD_0), MANIFEST("2.0", "", FILE_OF("a", 01), RECORD_0),
                MANIFEST("2.0", "", FILE_OF("a", 00), RECORD_0), MANIFEST("2.0", "", FILE_OF("a", ), RECORD_0),
                MANIFEST("2.0", "", FILE_OF("a", 0), RECORD_OF(WRITING, 0, 6)), MANIFEST("2.0", "", FILE_OF("", 0), RECORD_0),
                MANIFEST("2.0", "", FILE_OF("a\x01", 0), RECORD_0), MANIFEST("2.0", "", FILE_OF("\xff", 0), RECORD_0),
                MANIFEST("2.0", "", FILE_OF("a", 0), "{\"rank\":0,\"sequence\":1,\"writing\":\"" WRITING "\",\"size\":1,\"crc64\":\"0123\"}"),
                MANIFEST("2.0", BOTH_LISTS ",", FILE_OF("a", 0), RECORD_0), MANIFEST("2.0", "\"host\":\"x,\"files\":[],", FILE_OF("a", 0), RECORD_0),
                "{\"nebula\":\"manifest\",\"version\":\"2.0\",\"extra\":{\"x\":1," BOTH_LISTS "}",
                "{\"nebula\":\"manifest\",\"version\":\"2.0\",\"extra\":{\"x\":1," BOTH_LISTS, "," BOTH_LISTS, "{," BOTH_LISTS,
                "{\"nebula\":\"manifest\",\"version\":\"2.0\",\"files\":[" FILE_OF("a", 0) "]", BOTH_LISTS, ",\"files\":[",
        };
        enum nebula_status status;

        for (size_t i = 0; i < sizeof sound / sizeof *sound; i++)
                CHECK(reads_as_json(sound[i], &status) && !status);
        for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
                CHECK(reads_as_json(refused[i], &status) && status == NEBULA_CORRUPT);
}

static void a_name_that_json_has_to_escape_comes_back(void)
{
        static const char *const names[] = { "caf\xc3\xa9", "a\"b\\c", "line\nfeed\x01", "\x7f", "{},[]:", "/" };
        struct manifest written = { .tag = "t", .number = 1, .writing = 1, .sequence = 9, .step = -1, .world = 1 }, read;
        char *text;
        size_t size;

        REQUIRE(!manifest_reserve(&written, sizeof names / sizeof *names, 1, NULL));
        written.records[written.record_count++] = (struct manifest_record){ WRITING, 100, 0xf1, 1, 0 };
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
                REQUIRE(!manifest_add_file(&written, &(struct manifest_file){ names[i], i, 0, 0, false }, NULL));
        REQUIRE(!manifest_format(&written, &text, &size, NULL));
        REQUIRE(!manifest_parse(text, size, &read, NULL));
        REQUIRE(read.file_count == sizeof names / sizeof *names);
        for (size_t i = 0; i < read.file_count; i++)
                CHECK(!strcmp(read.files[i].name, names[i]) && read.files[i].size == i);
        manifest_done(&read);
        free(text);
        written.files[0].name = "\xff";
        CHECK(manifest_format(&written, &text, &size, NULL) == NEBULA_INVALID);
        manifest_done(&written);
}

/* A manifest without its closing brace, sound except for one number. */
static enum nebula_status parse_with(const char *number, const char *writing, const char *step, const char *world, const char *sequence,
                                     const char *size, const char *rank)
{
        char body[1200];

        snprintf(body, sizeof body,
                 "{\"nebula\":\"manifest\",\"version\":\"2.0\",\"tag\":\"t7\",\"job\":\"\",\"run\":\"\",\"number\":%s,\"writing\":%s,\"step\":%s,"
                 "\"world\":%s,\"sequence\":%s,\"files\":[{\"name\":\"a\",\"size\":%s,\"rank\":%s,\"record\":0}],"
                 "\"records\":[{\"rank\":%s,\"sequence\":1,\"writing\":\"" WRITING "\",\"size\":1,\"crc64\":\"0123456789abcdef\"}]",
                 number, writing, step, world, sequence, size, rank, rank);
        return parse_sealed(parse_manifest, body);
}

/* fault: as a_name_leads_nowhere_else */
static void a_number_that_no_checkpoint_has_is_refused(void)
{
        static const char *const impossible[] = { "-1", "9223372036854775807", "9223372036854775808", "1e300", "1.5", "\"1\"", "null", "[1]" };

        CHECK(!parse_with("1", "1", "7", "1", "1", "0", "0"));
        CHECK(!parse_with("281474976710656", "281474976710656", "7", "1048576", "7258118400000000000", "17592186044416", "1048575"));
        for (size_t i = 0; i < sizeof impossible / sizeof *impossible; i++) {
                const char *bad = impossible[i];

                CHECK(parse_with(bad, "1", "7", "1", "1", "0", "0") == NEBULA_CORRUPT);
                CHECK(parse_with("1", bad, "7", "1", "1", "0", "0") == NEBULA_CORRUPT);
                CHECK(parse_with("1", "1", bad, "1", "1", "0", "0") == NEBULA_CORRUPT);
                CHECK(parse_with("1", "1", "7", bad, "1", "0", "0") == NEBULA_CORRUPT);
                CHECK(parse_with("1", "1", "7", "1", bad, "0", "0") == NEBULA_CORRUPT);
                CHECK(parse_with("1", "1", "7", "1", "1", bad, "0") == NEBULA_CORRUPT);
                CHECK(parse_with("1", "1", "7", "1", "1", "0", bad) == NEBULA_CORRUPT);
        }
        CHECK(parse_with("0", "1", "7", "1", "1", "0", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("281474976710657", "1", "7", "1", "1", "0", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("1", "0", "7", "1", "1", "0", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("1", "281474976710657", "7", "1", "1", "0", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("1", "1", "8", "1", "1", "0", "0") == NEBULA_CORRUPT); /* the tag says 7 */
        CHECK(parse_with("1", "1", "7", "0", "1", "0", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("1", "1", "7", "1048577", "1", "0", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("1", "1", "7", "1", "0", "0", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("1", "1", "7", "1", "7258118400000000001", "0", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("1", "1", "7", "1", "1", "17592186044417", "0") == NEBULA_CORRUPT);
        CHECK(parse_with("1", "1", "7", "1", "1", "0", "1048576") == NEBULA_CORRUPT);
}

static void a_removal_with_an_impossible_number_or_no_tag_is_refused(void)
{
        static const char *const bad[] = { "\"tag\":\"t\",\"number\":0", "\"tag\":\"t\",\"number\":281474976710657", "\"tag\":\"t\",\"number\":-1",
                                           "\"tag\":\"t\",\"number\":\"1\"", "\"tag\":\"t\"", "\"tag\":\"\",\"number\":1", "\"number\":1", "\"tag\":7,\"number\":1" };
        char body[200];

        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
                snprintf(body, sizeof body, "{\"nebula\":\"removal\",\"version\":\"2.0\",%s", bad[i]);
                CHECK(parse_sealed(parse_removal, body) == NEBULA_CORRUPT);
        }
}

/* Documents that readers would refuse are not written. */
static void a_document_with_numbers_that_are_refused_is_not_written(void)
{
        struct manifest most = { .tag = "t", .number = DOCUMENT_NUMBER_MAX, .writing = DOCUMENT_NUMBER_MAX, .step = -1, .world = 1,
                                 .sequence = DOCUMENT_SEQUENCE_MAX };
        struct manifest bad[] = { most, most, most, most, most, most };
        struct removal removal = { "t", DOCUMENT_NUMBER_MAX };
        struct nebula_error error;
        char *text;
        size_t size;

        bad[0].number++;
        bad[1].number = 0;
        bad[2].writing++;
        bad[3].writing = 0;
        bad[4].sequence++;
        bad[5].sequence = 0;
        REQUIRE(!manifest_format(&most, &text, &size, NULL));
        free(text);
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
                CHECK(manifest_format(&bad[i], &text, &size, &error) == NEBULA_INVALID && strstr(error.message, "\"t\""));
        REQUIRE(!removal_format(&removal, &text, &size, NULL));
        free(text);
        removal.number++;
        CHECK(removal_format(&removal, &text, &size, NULL) == NEBULA_INVALID);
        removal.number = 0;
        CHECK(removal_format(&removal, &text, &size, NULL) == NEBULA_INVALID);
}

/* ---- a manifest that is being made ---- */

static void a_manifest_keeps_its_names_while_it_grows(void)
{
        struct manifest manifest = { .tag = "t" };
        char name[32], *long_name = calloc(1, MANIFEST_NAME_MAX);

        for (uint32_t i = 0; i < 3000; i++) {
                struct manifest_file file = { .name = name, .size = i };

                snprintf(name, sizeof name, "file-%u", i);
                REQUIRE(!manifest_reserve(&manifest, 1, i % 2, NULL) && !manifest_add_file(&manifest, &file, NULL));
        }
        memset(long_name, 'n', MANIFEST_NAME_MAX - 1);
        REQUIRE(!manifest_reserve(&manifest, 1, 0, NULL) && !manifest_add_file(&manifest, &(struct manifest_file){ .name = long_name }, NULL));
        memset(long_name, 'x', MANIFEST_NAME_MAX - 1);
        CHECK(manifest.file_count == 3001 && manifest.files[3000].name[0] == 'n' && !manifest.record_count);
        for (uint32_t i = 0; i < 3000; i++) {
                const struct manifest_file *found;

                snprintf(name, sizeof name, "file-%u", i);
                found = manifest_find_file(&manifest, name);
                CHECK(found == &manifest.files[i] && found->size == i);
        }
        CHECK(!manifest_find_file(&manifest, "file-") && !manifest_find_file(&manifest, "file-3000"));
        manifest_done(&manifest);
        free(long_name);
}

TAP_MAIN(TEST(written_documents_are_short_enough_to_be_read), TEST(a_manifest_comes_back_as_it_was_written),
         TEST(a_removal_comes_back_as_it_was_written), TEST(nothing_is_as_good_as_done), TEST(the_golden_manifest_of_version_2_0_is_read),
         TEST(the_golden_removal_of_version_2_0_is_read), TEST(writing_the_golden_documents_again_gives_the_same_bytes),
         TEST(every_flipped_bit_and_every_cut_is_found), TEST(no_document_is_taken_for_one_of_another_kind),
         TEST(unknown_fields_and_minor_versions_are_accepted), TEST(another_major_version_is_refused_and_says_which_nebula_reads_it),
         TEST(a_manifest_of_version_1_0_is_refused_by_its_version), TEST(a_sealed_lie_is_refused), TEST(a_name_leads_nowhere_else),
         TEST(a_writing_that_is_no_name_of_one_is_refused), TEST(a_number_that_no_checkpoint_has_is_refused),
         TEST(a_removal_with_an_impossible_number_or_no_tag_is_refused), TEST(a_document_with_numbers_that_are_refused_is_not_written),
         TEST(a_manifest_is_read_the_same_however_its_json_is_written), TEST(a_name_that_json_has_to_escape_comes_back),
         TEST(a_manifest_keeps_its_names_while_it_grows))
