/*
 * Large versions. With 300,000 files, a step that takes quadratic time (45,000,000,000 comparisons) exceeds the time of this test.
 * The manifest has another order than the record, and the rank changes from file to file, as in a hostile document.
 */
#include <malloc.h>

#include "kinds.h"
#include "store/document.h"
#include "store/manifest.h"
#include "store/manifest_check.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/record.h"
#include "store/verify.h"
#include "sum/sum.h"

#define FILES 300000u
#define RANKS 100000u
#define WRITING "w0123456789abcdef-1-0badcafe"

/* Two orders of the files. */
static uint32_t stride(uint32_t index)
{
        return (uint32_t)(index * UINT64_C(7919) % FILES);
}

static void name_of(uint32_t index, char ret_name[16])
{
        snprintf(ret_name, 16, "f%06u", index);
}

static char byte_of(uint32_t index)
{
        return (char)(index * 31 + index / 251);
}

static char *format_record(size_t *ret_size)
{
        struct record record = { .tag = "t", .writing = WRITING, .number = 1, .world = RANKS, .persisted = 1, .rank_count = RANKS,
                                 .file_count = FILES };
        uint64_t *sums = calloc(FILES, sizeof *sums);
        char *text;

        record.ranks = calloc(RANKS, sizeof *record.ranks);
        record.files = calloc(FILES, sizeof *record.files);
        if (!sums || !record.ranks || !record.files)
                abort();
        for (uint32_t i = 0; i < RANKS; i++)
                record.ranks[i].rank = i;
        for (uint32_t i = 0; i < FILES; i++) {
                char byte = byte_of(stride(i));

                sums[i] = sum_crc64(0, &byte, 1);
                record.files[i] = (struct record_file){ .size = 1, .rank = i % RANKS * UINT32_C(7919) % RANKS, .chunk_bytes = 1, .chunks = &sums[i],
                                                        .chunk_count = 1 };
                name_of(stride(i), record.files[i].name);
        }
        if (record_format(&record, &text, ret_size, &error)) {
                printf("# %s\n", error.message);
                abort();
        }
        free(record.ranks);
        free(record.files);
        free(sums);
        return text;
}

static uint32_t rank_of(uint32_t place)
{
        return place % RANKS * UINT32_C(7919) % RANKS;
}

/* From the last name to the first. */
static char *format_manifest(const char *record_text, size_t record_size, size_t *ret_size)
{
        struct manifest manifest = { .tag = "t", .number = 1, .writing = 1, .sequence = 1, .step = -1, .world = RANKS };
        uint32_t *ranks = calloc(FILES, sizeof *ranks);
        char *text;

        if (!ranks || manifest_reserve(&manifest, FILES, 1, &error))
                abort();
        for (uint32_t i = 0; i < FILES; i++)
                ranks[stride(i)] = rank_of(i);
        for (uint32_t i = FILES; i--;) {
                char name[16];
                struct manifest_file file = { .name = name, .size = 1, .rank = ranks[i] };

                name_of(i, name);
                if (manifest_add_file(&manifest, &file, &error))
                        abort();
        }
        manifest.records[manifest.record_count++] =
                (struct manifest_record){ WRITING, record_size, sum_crc64(0, record_text, record_size), 1, 0 };
        if (manifest_format(&manifest, &text, ret_size, &error)) {
                printf("# %s\n", error.message);
                abort();
        }
        manifest_done(&manifest);
        free(ranks);
        return text;
}

static void put_files(void)
{
        for (uint32_t i = 0; i < FILES; i++) {
                char name[16], key[32], byte = byte_of(i);

                name_of(i, name);
                snprintf(key, sizeof key, "t/%s", name);
                if (store->ops->put(store, key, &byte, 1, STORE_ALWAYS, NULL, NULL, &error))
                        abort();
        }
}

static size_t good_count;

static void count_good(void *argument, const struct manifest_file *file, enum nebula_status status, const struct nebula_error *failure)
{
        (void)argument;
        (void)file;
        (void)failure;
        good_count += !status;
}

static void a_version_of_300_000_files_in_one_record_is_parsed_looked_up_and_verified(void)
{
        struct manifest manifest;
        char key[MANIFEST_KEY_MAX], *record_text, *text;
        size_t record_size, size, found = 0;

        store = begin_mem_with(&(struct mem_faults){ .page_entries = FILES + 10 });
        record_text = format_record(&record_size);
        text = format_manifest(record_text, record_size, &size);
        REQUIRE(!record_key("t", WRITING, 0, key, &error) && !store->ops->put(store, key, record_text, record_size, STORE_ALWAYS, NULL, NULL, &error));
        REQUIRE(!store->ops->put(store, "t/.nebula/manifest-1.json", text, size, STORE_ALWAYS, NULL, NULL, &error));
        put_files();
        REQUIRE(!manifest_load(store, "t", &manifest, &error) && manifest.file_count == FILES);
        for (uint32_t i = 0; i < FILES; i++) {
                const struct manifest_file *file;
                char name[16];

                name_of(i, name);
                file = manifest_find_file(&manifest, name);
                found += file && !strcmp(file->name, name);
        }
        CHECK(found == FILES && !manifest_find_file(&manifest, "f"));
        CHECK(!manifest_check_all(store, &manifest, &error));
        REQUIRE(!store->ops->put(store, "t/f123456", "!", 1, STORE_ALWAYS, NULL, NULL, &error));
        good_count = 0;
        CHECK(manifest_verify(store, &manifest, NULL, count_good, NULL, &error) == NEBULA_CORRUPT && strstr(error.message, "f123456"));
        CHECK(good_count == FILES - 1);
        manifest_done(&manifest);
        free(record_text);
        free(text);
        store_close(store);
        end_mem();
}

static void the_files_of_each_record_are_found_together(void)
{
        struct manifest_file files[] = { { .name = "a", .record = 2 }, { .name = "b", .record = 0 }, { .name = "c", .record = 2 },
                                         { .name = "d", .record = 3 }, { .name = "e", .record = 0 } };
        struct manifest_record records[5] = { 0 };
        struct manifest manifest = { .files = files, .file_count = 5, .records = records, .record_count = 5 }, empty = { 0 };
        const uint32_t expected[] = { 1, 4, 0, 2, 3 };
        uint32_t *order = manifest_files_by_record(&manifest);

        REQUIRE(order);
        CHECK(!memcmp(order, expected, sizeof expected));
        free(order);
        order = manifest_files_by_record(&empty);
        CHECK(order);
        free(order);
}

/* ---- memory ---- */

#define JOB_FILES 16384u
#define JOB_RECORDS 2048u
#define JOB_BYTES_MAX ((size_t)2 << 20)

/* With DeepSpeed's file names. */
static char *format_job(size_t *ret_size)
{
        struct manifest manifest = { .tag = "global_step500", .job = "job", .run = "run", .number = 1, .writing = 1, .sequence = 1, .step = 500,
                                     .world = JOB_FILES };
        char name[64], *text;

        if (manifest_reserve(&manifest, JOB_FILES, JOB_RECORDS, NULL))
                abort();
        for (uint32_t i = 0; i < JOB_FILES; i++) {
                struct manifest_file file = { name, UINT64_C(1) << 30, i, i / (JOB_FILES / JOB_RECORDS), false };

                snprintf(name, sizeof name, "zero_pp_rank_%u_mp_rank_00_optim_states.pt", i);
                if (manifest_add_file(&manifest, &file, NULL))
                        abort();
        }
        for (uint32_t i = 0; i < JOB_RECORDS; i++) {
                struct manifest_record *record = &manifest.records[manifest.record_count++];

                *record = (struct manifest_record){ .size = 50000, .crc64 = i, .sequence = 1, .rank = i * (JOB_FILES / JOB_RECORDS) };
                writing_name("job", "run", 1, i, record->writing);
        }
        if (manifest_format(&manifest, &text, ret_size, NULL))
                abort();
        manifest_done(&manifest);
        return text;
}

static void a_manifest_of_16_384_files_on_2_048_records_takes_2_mib_at_most(void)
{
        struct manifest manifest;
        size_t size, names = 0, bytes, allocated;
        char *text = format_job(&size);
        struct mallinfo2 before = mallinfo2(), after;

        REQUIRE(!manifest_parse(text, size, &manifest, NULL));
        after = mallinfo2();
        for (size_t i = 0; i < manifest.file_count; i++)
                names += strlen(manifest.files[i].name) + 1;
        bytes = sizeof manifest + manifest.file_count * (sizeof *manifest.files + sizeof *manifest.by_name) +
                manifest.record_count * sizeof *manifest.records + names;
        allocated = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd; /* 0 under a sanitizer */
        printf("# %zu bytes of text, %zu in structs and names (%zu names), %zu allocated\n", size, bytes, names, allocated);
        CHECK(bytes <= JOB_BYTES_MAX && allocated <= JOB_BYTES_MAX);
        manifest_done(&manifest);
        free(text);
}

TAP_MAIN(TEST(a_manifest_of_16_384_files_on_2_048_records_takes_2_mib_at_most), TEST(the_files_of_each_record_are_found_together),
         TEST(a_version_of_300_000_files_in_one_record_is_parsed_looked_up_and_verified))
