#include <stdatomic.h>
#include <stdint.h>

#include "image/image.h"
#include "image/torch_pickle.h"
#include "image/zip_format.h"
#include "sum/sum.h"
#include "tap.h"

/* An image of `count` tensors of growing size, sealed. */
struct made {
        uint8_t *data;
        uint64_t size;
        struct zip_layout layout;
        struct nebula_tensor *tensors;
        uint64_t *chunks;
        size_t chunk_count;
};

static struct nebula_error error;

static void made_done(struct made *made)
{
        for (size_t k = 0; k < made->layout.storage_count; k++)
                free((void *)(uintptr_t)made->tensors[k].name);
        zip_layout_done(&made->layout);
        free(made->tensors);
        free(made->data);
        free(made->chunks);
}

static enum nebula_status make_unsealed(struct made *made, size_t count)
{
        uint64_t *sizes = calloc(count + 1, sizeof *sizes);
        enum nebula_status status;
        size_t pickle_size;
        char *pickle = NULL;

        *made = (struct made){ .tensors = calloc(count + 1, sizeof *made->tensors) };
        for (size_t k = 0; k < count; k++) {
                char name[48];

                snprintf(name, sizeof name, "layer.%zu.weight", k);
                made->tensors[k] = (struct nebula_tensor){ .name = strdup(name), .dtype = NEBULA_DTYPE_F32, .dim_count = 2,
                                                           .shape = { k * k, 3 } };
                sizes[k] = pickle_tensor_size(&made->tensors[k]);
        }
        status = pickle_flat_dict(made->tensors, count, &pickle, &pickle_size, &error);
        if (status == NEBULA_OK)
                status = zip_layout_init(&made->layout, pickle_size, sizes, count, &error);
        if (status == NEBULA_OK) {
                made->size = made->layout.size;
                made->data = malloc((size_t)made->size);
                memset(made->data, 0xcc, (size_t)made->size); /* pooled memory is not zeroed */
                zip_layout_write(&made->layout, pickle, made->data);
                for (size_t k = 0; k < count; k++)
                        memset(made->data + made->layout.storage_offsets[k], (int)(k * 31 + 1), (size_t)sizes[k]);
        }
        free(pickle);
        free(sizes);
        return status;
}

static enum nebula_status make(struct made *made, size_t count, uint32_t chunk_bytes)
{
        enum nebula_status status = make_unsealed(made, count);

        if (status == NEBULA_OK)
                status = image_seal(made->data, made->size, true, chunk_bytes, &made->chunks, &made->chunk_count, &error);
        return status;
}

static void every_payload_is_aligned_and_in_order(void)
{
        struct made made;
        uint64_t last = 0;

        REQUIRE(make(&made, 100, 4096) == NEBULA_OK);
        CHECK(made.layout.pickle_offset % IMAGE_ALIGNMENT == 0);
        for (size_t k = 0; k < 100; k++) {
                CHECK(made.layout.storage_offsets[k] % IMAGE_ALIGNMENT == 0);
                CHECK(made.layout.storage_offsets[k] > last);
                last = made.layout.storage_offsets[k];
        }
        made_done(&made);
}

static void layouts_of_huge_storages_place_every_payload(void)
{
        uint64_t sizes[] = { UINT64_C(5) << 30, 64, UINT32_MAX, UINT32_MAX - 1 };
        struct zip_layout layout;

        REQUIRE(zip_layout_init(&layout, 100, sizes, 4, &error) == NEBULA_OK);
        for (size_t k = 1; k < 4; k++)
                CHECK(layout.storage_offsets[k] >= layout.storage_offsets[k - 1] + sizes[k - 1]);
        for (size_t k = 0; k < 4; k++)
                CHECK(layout.storage_offsets[k] % IMAGE_ALIGNMENT == 0);
        CHECK(layout.size > (UINT64_C(13) << 30));
        zip_layout_done(&layout);
}

static void sizes_that_overflow_are_refused(void)
{
        uint64_t sizes[] = { UINT64_MAX - 100, UINT64_MAX / 2 };
        struct zip_layout layout;

        CHECK(zip_layout_init(&layout, 10, sizes, 1, &error) == NEBULA_INVALID);
        CHECK(zip_layout_init(&layout, 10, sizes + 1, 1, &error) == NEBULA_INVALID);
        CHECK(zip_layout_init(&layout, SIZE_MAX, NULL, 0, &error) == NEBULA_INVALID);
        CHECK(zip_layout_init(&layout, 10, sizes, SIZE_MAX, &error) == NEBULA_INVALID);
}

static void more_records_than_16_bits_count_are_read_back(void)
{
        size_t count = 70000, entry_count;
        uint64_t *sizes = calloc(count, sizeof *sizes);
        struct zip_layout layout;
        struct zip_entry *entries;
        uint8_t *image;

        REQUIRE(zip_layout_init(&layout, 2, sizes, count, &error) == NEBULA_OK);
        image = malloc((size_t)layout.size);
        zip_layout_write(&layout, "}.", image);
        REQUIRE(zip_read(image, layout.size, &entries, &entry_count, &error) == NEBULA_OK);
        CHECK(entry_count == count + 3);
        CHECK(strcmp(entries[count + 2].name, "archive/data/69999") == 0);
        free(entries);
        free(image);
        free(sizes);
        zip_layout_done(&layout);
}

static void the_places_of_records_follow_from_the_directory_alone(void)
{
        struct zip_entry *whole, *found;
        size_t count, found_count;
        struct made made;
        char *bare;

        REQUIRE(make(&made, 50, 4096) == NEBULA_OK);
        REQUIRE(zip_read(made.data, made.size, &whole, &count, &error) == NEBULA_OK);
        bare = calloc(1, (size_t)made.size);
        memcpy(bare + made.layout.directory_offset, made.data + made.layout.directory_offset, (size_t)(made.size - made.layout.directory_offset));
        REQUIRE(zip_read_directory(bare, made.size, &found, &found_count, &error) == NEBULA_OK);
        CHECK(found_count == count);
        for (size_t k = 0; k < count; k++)
                CHECK(found[k].payload_offset == whole[k].payload_offset && found[k].size == whole[k].size && !strcmp(found[k].name, whole[k].name));
        free(found);
        bare[made.layout.directory_offset + 8] |= 8; /* sizes after the payload, as other writers do it */
        CHECK(zip_read_directory(bare, made.size, &found, &found_count, &error) == NEBULA_INVALID && strstr(error.message, "archive/data.pkl"));
        free(bare);
        free(whole);
        made_done(&made);
}

static enum nebula_status find_tensor(const void *data, uint64_t size, const char *name, struct nebula_tensor *ret_tensor)
{
        struct torch_tensors tensors;
        enum nebula_status status = torch_tensors_find(data, size, &tensors, &error);

        if (status)
                return status;
        status = torch_tensors_pick(&tensors, data, name, ret_tensor, &error);
        torch_tensors_done(&tensors);
        return status;
}

static void a_file_without_storages_is_whole(void)
{
        struct nebula_tensor tensor;
        struct made made;

        REQUIRE(make(&made, 0, 4096) == NEBULA_OK);
        CHECK(zip_verify(made.data, made.size, &error) == NEBULA_OK);
        CHECK(find_tensor(made.data, made.size, "w", &tensor) == NEBULA_NOT_FOUND);
        made_done(&made);
}

static void every_tensor_is_found_again(void)
{
        struct torch_tensors all;
        struct made made;

        REQUIRE(make(&made, 50, 4096) == NEBULA_OK);
        REQUIRE(torch_tensors_find(made.data, made.size, &all, &error) == NEBULA_OK);
        REQUIRE(all.count == 50);
        for (size_t k = 0; k < all.count; k++) {
                const struct nebula_tensor *want = &made.tensors[k];
                struct nebula_tensor found;

                REQUIRE(torch_tensors_pick(&all, made.data, want->name, &found, &error) == NEBULA_OK);
                CHECK(found.dtype == want->dtype && found.dim_count == 2 && found.shape[0] == k * k && found.shape[1] == 3);
                CHECK(found.data == made.data + made.layout.storage_offsets[k]);
                CHECK(strcmp(all.list[k].name, want->name) == 0);
        }
        torch_tensors_done(&all);
        made_done(&made);
}

static void looking_for_one_tensor_gives_its_caller_s_name(void)
{
        static const char name[] = "layer.3.weight";
        struct nebula_tensor found;
        struct made made;

        REQUIRE(make(&made, 5, 4096) == NEBULA_OK);
        REQUIRE(find_tensor(made.data, made.size, name, &found) == NEBULA_OK);
        CHECK(found.name == name && found.shape[0] == 9);
        CHECK(find_tensor(made.data, made.size, "layer.3", &found) == NEBULA_NOT_FOUND);
        CHECK(found.name == name); /* untouched on failure */
        made_done(&made);
}

static void chunk_checksums_equal_those_of_the_sealed_bytes(void)
{
        static const uint32_t chunk_sizes[] = { 1, 7, 64, 1000, 20000, 65536, 1u << 20, UINT32_MAX };

        for (size_t c = 0; c < sizeof chunk_sizes / sizeof chunk_sizes[0]; c++) {
                uint32_t chunk_bytes = chunk_sizes[c];
                struct made made;

                REQUIRE(make(&made, 60, chunk_bytes) == NEBULA_OK); /* payloads from 0 to 41 KB */
                CHECK(made.chunk_count == (made.size + chunk_bytes - 1) / chunk_bytes);
                CHECK(zip_verify(made.data, made.size, &error) == NEBULA_OK);
                for (size_t k = 0; k < made.chunk_count; k++) {
                        uint64_t at = k * (uint64_t)chunk_bytes, left = made.size - at;

                        CHECK(made.chunks[k] == sum_crc64(0, made.data + at, left < chunk_bytes ? left : chunk_bytes));
                }
                made_done(&made);
        }
}

/* A copy, and the result of its reports. */
struct told {
        const uint8_t *from;
        uint8_t *to;
        uint64_t size, first;
        uint32_t chunk_bytes;
        size_t count, bad_sums;
};

static void copy_reported(void *argument, uint64_t offset, uint64_t crc64)
{
        struct told *told = argument;
        uint64_t left = told->size - offset;

        if (!told->count++)
                told->first = offset;
        if (left > told->chunk_bytes)
                left = told->chunk_bytes;
        memcpy(told->to + offset, told->from + offset, left);
        told->bad_sums += sum_crc64(0, told->from + offset, left) != crc64;
}

static void every_chunk_is_told_once_and_final(void)
{
        static const uint32_t chunk_sizes[] = { 64, 4096, 300000, 4u << 20 };
        uint64_t sizes[] = { 3000001, 5, 1200000, 0, 100, 700000, 262144 };

        for (size_t c = 0; c < sizeof chunk_sizes / sizeof chunk_sizes[0]; c++) {
                struct told told = { .chunk_bytes = chunk_sizes[c] };
                struct image_flow flow = { .ready = copy_reported, .argument = &told };
                struct zip_layout layout;
                size_t chunk_count;
                uint64_t *chunks;
                uint8_t *image;

                REQUIRE(zip_layout_init(&layout, 2, sizes, 7, &error) == NEBULA_OK);
                told.from = image = calloc(1, (size_t)layout.size);
                told.to = malloc((size_t)layout.size);
                told.size = layout.size;
                memset(told.to, 0xee, (size_t)layout.size);
                zip_layout_write(&layout, "}.", image);
                for (size_t k = 0; k < 7; k++)
                        memset(image + layout.storage_offsets[k], (int)k + 1, (size_t)sizes[k]);
                REQUIRE(image_seal_flowing(image, layout.size, true, told.chunk_bytes, &flow, &chunks, &chunk_count, &error) == NEBULA_OK);
                CHECK(told.count == chunk_count && !told.bad_sums);
                CHECK(!memcmp(told.to, image, (size_t)layout.size));
                if (told.chunk_bytes == 300000)
                        CHECK(told.first == 300000); /* a large payload need not wait for its header */
                free(chunks);
                free(told.to);
                free(image);
                zip_layout_done(&layout);
        }
}

#define ABSENT 0xee

/* A file that is copied in steps: headers and directory are there, payloads are not. */
struct arriving {
        const uint8_t *from;
        uint8_t *to;
        uint64_t there, last;
};

static bool arrive(void *argument, uint64_t size)
{
        struct arriving *arriving = argument;

        if (size > arriving->last)
                return false;
        while (arriving->there < size) {
                const uint8_t *absent = memchr(arriving->to + arriving->there, ABSENT, size - arriving->there);

                arriving->there = absent ? (uint64_t)(absent - arriving->to) : size;
                for (; arriving->there < size && arriving->to[arriving->there] == ABSENT; arriving->there++)
                        arriving->to[arriving->there] = arriving->from[arriving->there];
        }
        return true;
}

static void a_file_is_sealed_while_it_is_copied(void)
{
        static const uint32_t chunk_sizes[] = { 4096, 300000, 1u << 20, 4u << 20 };
        uint64_t sizes[] = { 5, 3000001, 100, 262144, 1200000, 0 };

        for (size_t c = 0; c < 2 * sizeof chunk_sizes / sizeof chunk_sizes[0]; c++) {
                uint32_t chunk_bytes = chunk_sizes[c / 2];
                bool is_zip = c % 2;
                struct arriving arriving = { .last = UINT64_MAX };
                struct image_flow flow = { .await = arrive, .argument = &arriving };
                struct zip_layout layout;
                uint64_t *chunks, *wanted;
                size_t chunk_count, wanted_count;
                uint8_t *whole, *image;

                REQUIRE(zip_layout_init(&layout, 2, sizes, 6, &error) == NEBULA_OK);
                whole = calloc(1, (size_t)layout.size);
                image = calloc(1, (size_t)layout.size);
                zip_layout_write(&layout, "}.", whole);
                for (size_t k = 0; k < 6; k++)
                        memset(whole + layout.storage_offsets[k], (int)k + 1, (size_t)sizes[k]);
                memset(image, ABSENT, (size_t)layout.size);
                zip_layout_write(&layout, "}.", image);
                arriving.to = image;
                arriving.from = whole;
                REQUIRE(image_seal_flowing(image, layout.size, is_zip, chunk_bytes, &flow, &chunks, &chunk_count, &error) == NEBULA_OK);
                REQUIRE(image_seal(whole, layout.size, is_zip, chunk_bytes, &wanted, &wanted_count, &error) == NEBULA_OK);
                CHECK(chunk_count == wanted_count && !memcmp(chunks, wanted, chunk_count * sizeof *chunks));
                CHECK(!memcmp(image, whole, (size_t)layout.size));
                free(chunks);
                free(wanted);
                for (arriving.last = 0; arriving.last < layout.size; arriving.last += layout.size / 7) {
                        arriving.there = 0;
                        CHECK(image_seal_flowing(image, layout.size, is_zip, chunk_bytes, &flow, &chunks, &chunk_count, &error) ==
                              NEBULA_BUSY);
                }
                free(whole);
                free(image);
                zip_layout_done(&layout);
        }
}

/* Sums some ranges of `image`, as a copy does, and then spoils them: later readers must not use them. */
static uint32_t sum_and_spoil(uint8_t *image, uint64_t start, uint64_t end, struct image_sum *sums, uint32_t count)
{
        for (uint64_t at = start + 1000; at < end; at += 150000) {
                struct image_sum *sum = &sums[count];
                uint64_t size = image_sum_size(at, end - at < 100000 ? end - at : 100000);

                if (size < IMAGE_SUM_MIN)
                        continue;
                *sum = (struct image_sum){ .offset = at, .size = (uint32_t)size };
                sum_both(image + at, (size_t)size, &sum->crc32, &sum->crc64);
                memset(image + at, 0x99, (size_t)size);
                count++;
        }
        return count;
}

static void bytes_summed_during_the_copy_are_not_read_again(void)
{
        uint64_t sizes[] = { 9000001, 5, 5200000, 0, 100, 700000, 262144 };

        for (int is_zip = 0; is_zip < 2; is_zip++) {
                struct image_sum sums[200];
                _Atomic uint32_t sum_count = 0;
                struct image_flow flow = { .sums = sums, .sum_count = &sum_count };
                uint64_t *chunks, *wanted;
                size_t chunk_count, wanted_count;
                struct zip_layout layout;
                struct zip_entry *entries, *wanted_entries;
                size_t entry_count;
                uint8_t *whole, *image;
                uint32_t count = 0;

                REQUIRE(zip_layout_init(&layout, 2, sizes, 7, &error) == NEBULA_OK);
                whole = calloc(1, (size_t)layout.size);
                zip_layout_write(&layout, "}.", whole);
                for (size_t k = 0; k < 7; k++)
                        for (uint64_t i = 0; i < sizes[k]; i++)
                                whole[layout.storage_offsets[k] + i] = (uint8_t)(i * 7 + i / 4096 + k);
                image = malloc((size_t)layout.size);
                memcpy(image, whole, (size_t)layout.size);
                for (size_t k = 0; k < 3; k += 2) /* the others are too small to be looked for */
                        count = sum_and_spoil(image, layout.storage_offsets[k], layout.storage_offsets[k] + sizes[k], sums, count);
                CHECK(count > 80);
                atomic_store(&sum_count, count);
                REQUIRE(image_seal_flowing(image, layout.size, is_zip, IMAGE_CHUNK_BYTES, &flow, &chunks, &chunk_count, &error) == NEBULA_OK);
                REQUIRE(image_seal(whole, layout.size, is_zip, IMAGE_CHUNK_BYTES, &wanted, &wanted_count, &error) == NEBULA_OK);
                CHECK(chunk_count == wanted_count && !memcmp(chunks, wanted, chunk_count * sizeof *chunks));
                REQUIRE(zip_read(image, layout.size, &entries, &entry_count, &error) == NEBULA_OK);
                REQUIRE(zip_read(whole, layout.size, &wanted_entries, &entry_count, &error) == NEBULA_OK);
                for (size_t k = 0; k < entry_count; k++)
                        CHECK(entries[k].crc32 == wanted_entries[k].crc32);
                free(entries);
                free(wanted_entries);
                free(chunks);
                free(wanted);
                free(whole);
                free(image);
                zip_layout_done(&layout);
        }
}

/* The trainer may write anything there: sealing must end, and bytes without a sum must be right. */
static void sums_of_any_kind_do_no_harm(void)
{
        static const struct image_sum odd[] = {
                { 0, 0, 0, 0 }, { UINT64_MAX, UINT32_MAX, 1, 1 }, { 100, UINT32_MAX, 1, 1 }, { 1u << 20, 5u << 20, 1, 1 }, { 50, 3, 0, 0 },
                { UINT64_MAX - 3, 2, 1, 1 }, { 0, 1, 1, 1 },
        };
        uint64_t sizes[] = { 3000001, 5000000 };

        for (size_t first = 0; first < sizeof odd / sizeof odd[0]; first++) {
                for (int is_zip = 0; is_zip < 2; is_zip++) {
                        _Atomic uint32_t sum_count = (uint32_t)(sizeof odd / sizeof odd[0] - first);
                        struct image_flow flow = { .sums = odd + first, .sum_count = &sum_count };
                        struct zip_layout layout;
                        size_t chunk_count;
                        uint64_t *chunks;
                        uint8_t *image;

                        REQUIRE(zip_layout_init(&layout, 2, sizes, 2, &error) == NEBULA_OK);
                        image = calloc(1, (size_t)layout.size);
                        zip_layout_write(&layout, "}.", image);
                        REQUIRE(image_seal_flowing(image, layout.size, is_zip, IMAGE_CHUNK_BYTES, &flow, &chunks, &chunk_count, &error) ==
                                NEBULA_OK);
                        CHECK(chunk_count == (layout.size + IMAGE_CHUNK_BYTES - 1) / IMAGE_CHUNK_BYTES);
                        CHECK(chunks[1] == sum_crc64(0, image + IMAGE_CHUNK_BYTES, (size_t)(layout.size - IMAGE_CHUNK_BYTES)));
                        free(chunks);
                        free(image);
                        zip_layout_done(&layout);
                }
        }
}

static void headers_are_found_by_the_directory_alone(void)
{
        uint64_t directory, *offsets;
        struct zip_entry *entries;
        size_t count, entry_count;
        struct made made;
        uint8_t *sparse;

        REQUIRE(make(&made, 300, 1u << 20) == NEBULA_OK);
        REQUIRE(zip_read(made.data, made.size, &entries, &entry_count, &error) == NEBULA_OK);
        sparse = calloc(1, made.size);
        memcpy(sparse + made.size - ZIP_TAIL_BYTES, made.data + made.size - ZIP_TAIL_BYTES, ZIP_TAIL_BYTES);
        REQUIRE(zip_find_directory(sparse, made.size, &directory, &error) == NEBULA_OK);
        CHECK(directory > entries[entry_count - 1].payload_offset && directory < made.size - ZIP_TAIL_BYTES);
        CHECK(zip_find_headers(sparse, made.size, &offsets, &count, &error) == NEBULA_CORRUPT); /* not there yet */
        memcpy(sparse + directory, made.data + directory, made.size - directory);
        REQUIRE(zip_find_headers(sparse, made.size, &offsets, &count, &error) == NEBULA_OK);
        CHECK(count == entry_count);
        for (size_t i = 0; i < count; i++)
                CHECK(offsets[i] == entries[i].header_offset);
        CHECK(zip_find_directory(sparse, made.size - 1, &directory, &error) == NEBULA_CORRUPT);
        free(offsets);
        free(entries);
        free(sparse);
        made_done(&made);
}

static void chunks_of_large_records_are_joined_from_their_pieces(void)
{
        static const uint32_t chunk_sizes[] = { 4096, 300000, 1u << 20, 4u << 20 };
        uint64_t sizes[] = { 5, 3000001, 100, 262144, 1200000, 0 };

        for (size_t c = 0; c < sizeof chunk_sizes / sizeof chunk_sizes[0]; c++) {
                uint32_t chunk_bytes = chunk_sizes[c];
                struct zip_layout layout;
                size_t chunk_count;
                uint64_t *chunks;
                uint8_t *image;

                REQUIRE(zip_layout_init(&layout, 2, sizes, 6, &error) == NEBULA_OK);
                image = malloc((size_t)layout.size);
                zip_layout_write(&layout, "}.", image);
                for (size_t k = 0; k < 6; k++) {
                        for (uint64_t at = 0; at < sizes[k]; at++)
                                image[layout.storage_offsets[k] + at] = (uint8_t)(at * 2654435761u >> 13);
                }
                REQUIRE(image_seal(image, layout.size, true, chunk_bytes, &chunks, &chunk_count, &error) == NEBULA_OK);
                CHECK(zip_verify(image, layout.size, &error) == NEBULA_OK);
                REQUIRE(chunk_count == (layout.size + chunk_bytes - 1) / chunk_bytes);
                for (size_t k = 0; k < chunk_count; k++) {
                        uint64_t at = k * (uint64_t)chunk_bytes, left = layout.size - at;

                        CHECK(chunks[k] == sum_crc64(0, image + at, left < chunk_bytes ? left : chunk_bytes));
                }
                free(chunks);
                free(image);
                zip_layout_done(&layout);
        }
}

static void a_raw_file_is_summed_and_not_touched(void)
{
        uint8_t data[100], before[100];
        uint64_t *chunks;
        size_t count;

        memset(data, 'x', sizeof data);
        memcpy(before, data, sizeof data);
        REQUIRE(image_seal(data, sizeof data, false, 64, &chunks, &count, &error) == NEBULA_OK);
        CHECK(count == 2 && chunks[0] == sum_crc64(0, data, 64) && chunks[1] == sum_crc64(0, data + 64, 36));
        CHECK(memcmp(data, before, sizeof data) == 0);
        free(chunks);
        REQUIRE(image_seal(data, 0, false, 64, &chunks, &count, &error) == NEBULA_OK);
        CHECK(count == 0);
        free(chunks);
}

static void sealing_twice_changes_nothing(void)
{
        struct made made;
        uint64_t *chunks;
        size_t count;

        REQUIRE(make(&made, 20, 512) == NEBULA_OK);
        REQUIRE(image_seal(made.data, made.size, true, 512, &chunks, &count, &error) == NEBULA_OK);
        CHECK(count == made.chunk_count && memcmp(chunks, made.chunks, count * sizeof *chunks) == 0);
        free(chunks);
        made_done(&made);
}

static void any_flipped_payload_bit_is_found_with_its_record(void)
{
        struct made made;

        REQUIRE(make(&made, 4, 4096) == NEBULA_OK);
        for (uint64_t k = 0; k < 108; k++) {
                uint64_t at = made.layout.storage_offsets[3] + k;

                made.data[at] ^= (uint8_t)(1u << k % 8);
                CHECK(zip_verify(made.data, made.size, &error) == NEBULA_CORRUPT);
                CHECK(strstr(error.message, "archive/data/3") != NULL);
                made.data[at] ^= (uint8_t)(1u << k % 8);
        }
        CHECK(zip_verify(made.data, made.size, &error) == NEBULA_OK);
        made_done(&made);
}

static void every_truncation_is_refused(void)
{
        struct made made;

        REQUIRE(make(&made, 3, 4096) == NEBULA_OK);
        for (uint64_t size = 0; size < made.size; size++) {
                uint8_t *copy = malloc((size_t)size + 1); /* apart, so that a sanitizer sees its end */
                struct zip_entry *entries;
                size_t count;

                memcpy(copy, made.data, (size_t)size);
                CHECK(zip_read(copy, size, &entries, &count, &error) == NEBULA_CORRUPT);
                free(copy);
        }
        made_done(&made);
}

static void an_image_that_is_being_sealed_is_completed_and_damage_in_it_is_still_found(void)
{
        struct zip_entry *entries;
        struct made made;
        size_t count;

        REQUIRE(make(&made, 3, 512) == NEBULA_OK);
        REQUIRE(zip_read(made.data, made.size, &entries, &count, &error) == NEBULA_OK && count > 3);
        for (size_t k = count - 2; k < count; k++) {
                memset(made.data + entries[k].header_crc_offset, 0, 4);
                memset(made.data + entries[k].directory_crc_offset, 0, 4);
        }
        CHECK(zip_verify(made.data, made.size, &error) == NEBULA_CORRUPT);
        memset(made.data + entries[0].directory_crc_offset, 0, 4); /* as far as a seal has come: a trainer that maps the image reads it */
        free(entries);
        REQUIRE(zip_read(made.data, made.size, &entries, &count, &error) == NEBULA_OK);
        CHECK(zip_verify(made.data, made.size, &error) == NEBULA_CORRUPT);
        CHECK(image_seal_rest(made.data, made.size, &error) == NEBULA_OK && zip_verify(made.data, made.size, &error) == NEBULA_OK);
        made.data[entries[0].payload_offset] ^= 1;
        CHECK(image_seal_rest(made.data, made.size, &error) == NEBULA_CORRUPT);
        free(entries);
        made_done(&made);
}

static void a_broken_zip_is_refused_by_seal_and_left_as_it_was(void)
{
        struct made made;
        uint64_t *chunks = NULL;
        uint8_t *before;
        size_t count;

        REQUIRE(make_unsealed(&made, 3) == NEBULA_OK);
        made.data[made.layout.directory_offset + 42] ^= 1; /* an entry that points one byte beside its header */
        before = malloc((size_t)made.size);
        memcpy(before, made.data, (size_t)made.size);
        CHECK(image_seal(made.data, made.size, true, 64, &chunks, &count, &error) == NEBULA_CORRUPT);
        CHECK(memcmp(before, made.data, (size_t)made.size) == 0);
        CHECK(chunks == NULL);
        free(before);
        made_done(&made);
}

static void records_that_overlap_are_refused(void)
{
        struct zip_entry *entries;
        struct made made;
        uint8_t *second;
        size_t count;

        REQUIRE(make(&made, 2, 64) == NEBULA_OK);
        /* The directory names the pickle twice: the second entry becomes a copy of the first. */
        second = made.data + made.layout.directory_offset + ZIP_CENTRAL_BYTES + strlen("archive/data.pkl");
        CHECK(zip_get32(second) == ZIP_CENTRAL_SIGNATURE);
        zip_put32(second + 42, 0);
        CHECK(zip_read(made.data, made.size, &entries, &count, &error) == NEBULA_CORRUPT);
        made_done(&made);
}

static void two_tensors_of_one_name_are_refused(void)
{
        struct nebula_tensor tensors[] = { { .name = "a" }, { .name = "b" }, { .name = "a" } };
        size_t size;
        char *pickle;

        CHECK(pickle_flat_dict(tensors, 3, &pickle, &size, &error) == NEBULA_INVALID);
        CHECK(strstr(error.message, "\"a\"") != NULL);
}

static void tensors_that_no_file_can_describe_are_refused(void)
{
        struct nebula_tensor tensors[] = {
                { .name = NULL },
                { .name = "\xff" },
                { .name = "a", .dtype = (enum nebula_dtype)99 },
                { .name = "a", .dim_count = NEBULA_DIM_MAX + 1 },
                { .name = "a", .dim_count = 2, .shape = { UINT64_C(1) << 40, UINT64_C(1) << 40 } },
                { .name = "a", .dim_count = 3, .shape = { 0, UINT64_C(1) << 40, UINT64_C(1) << 40 } },
        };
        size_t size;
        char *pickle;

        for (size_t k = 0; k < sizeof tensors / sizeof tensors[0]; k++)
                CHECK(pickle_flat_dict(&tensors[k], 1, &pickle, &size, &error) == NEBULA_INVALID);
}

/* A flipped bit in the pickle: no tensor, or one whose bytes all lie in the image. */
static void a_damaged_pickle_gives_no_byte_outside_of_the_image(void)
{
        struct nebula_tensor tensor;
        struct made made;
        uint8_t *pickle;
        size_t found = 0, refused = 0, pickle_size;

        REQUIRE(make(&made, 2, 64) == NEBULA_OK);
        pickle = made.data + made.layout.pickle_offset;
        pickle_size = made.layout.storage_offsets[0] - made.layout.pickle_offset;
        for (uint64_t k = 0; k < 8 * pickle_size; k++) {
                pickle[k / 8] ^= (uint8_t)(1u << k % 8);
                if (find_tensor(made.data, made.size, "layer.1.weight", &tensor)) {
                        refused++;
                } else {
                        CHECK((const uint8_t *)tensor.data >= made.data);
                        CHECK(pickle_tensor_size(&tensor) <= (uint64_t)(made.data + made.size - (const uint8_t *)tensor.data));
                        found++;
                }
                pickle[k / 8] ^= (uint8_t)(1u << k % 8);
        }
        CHECK(found && refused);
        CHECK(find_tensor(made.data, made.size, "layer.1.weight", &tensor) == NEBULA_OK);
        made_done(&made);
}

static void names_that_cannot_be_found_again_are_refused(void)
{
        struct nebula_tensor tensor = { .dtype = NEBULA_DTYPE_F32, .dim_count = 1, .shape = { 1 } };
        char name[TORCH_KEY_MAX + 2];
        size_t size;
        char *pickle;

        memset(name, 'n', sizeof name);
        name[TORCH_KEY_MAX + 1] = '\0';
        tensor.name = name;
        CHECK(pickle_flat_dict(&tensor, 1, &pickle, &size, &error) == NEBULA_INVALID && strstr(error.message, "longer than 1000"));
        tensor.name = name + TORCH_KEY_MAX + 1;
        CHECK(pickle_flat_dict(&tensor, 1, &pickle, &size, &error) == NEBULA_INVALID && strstr(error.message, "no name"));
        tensor.name = name + 1;
        REQUIRE(pickle_flat_dict(&tensor, 1, &pickle, &size, &error) == NEBULA_OK);
        free(pickle);
}

/* Files of this project's first versions must be read for ever. */
static uint8_t *read_golden(const char *name, size_t *ret_size)
{
        char path[1024];
        const char *slash = strrchr(__FILE__, '/');
        uint8_t *data = malloc(1u << 20);
        FILE *file;

        snprintf(path, sizeof path, "%.*s/../../golden/%s", (int)(slash - __FILE__), __FILE__, name);
        file = fopen(path, "rb");
        *ret_size = file && data ? fread(data, 1, 1u << 20, file) : 0;
        if (file)
                fclose(file);
        return data;
}

static void the_golden_image_of_version_1_0_is_read(void)
{
        size_t size, chunk_count;
        uint8_t *data = read_golden("image-1.0.pt", &size);
        struct torch_tensors found;
        struct nebula_tensor tensors[4];
        uint64_t *chunks;

        REQUIRE(size > 0);
        CHECK(zip_verify(data, size, &error) == NEBULA_OK);
        REQUIRE(torch_tensors_find(data, size, &found, &error) == NEBULA_OK);
        REQUIRE(found.count == 4);
        for (size_t k = 0; k < 4; k++)
                REQUIRE(torch_tensors_pick(&found, data, found.list[k].name, &tensors[k], &error) == NEBULA_OK);
        CHECK(strcmp(tensors[0].name, "w") == 0 && tensors[0].dtype == NEBULA_DTYPE_F32 && tensors[0].dim_count == 2);
        CHECK(tensors[0].shape[0] == 3 && tensors[0].shape[1] == 4);
        CHECK(strcmp(tensors[1].name, "caf\xc3\xa9.bias") == 0 && tensors[1].dtype == NEBULA_DTYPE_F64 && tensors[1].dim_count == 0);
        CHECK(strcmp(tensors[2].name, "empty") == 0 && tensors[2].dtype == NEBULA_DTYPE_I64 && pickle_tensor_size(&tensors[2]) == 0);
        CHECK(strcmp(tensors[3].name, "flags") == 0 && tensors[3].dtype == NEBULA_DTYPE_BOOL && pickle_tensor_size(&tensors[3]) == 5);
        for (size_t k = 0; k < 48; k++)
                CHECK(((const uint8_t *)tensors[0].data)[k] == k * 7 % 251);
        REQUIRE(image_seal(data, size, true, IMAGE_CHUNK_BYTES, &chunks, &chunk_count, &error) == NEBULA_OK);
        CHECK(chunk_count == 1 && chunks[0] == UINT64_C(0xfb62654cdd5a88d2));
        free(chunks);
        torch_tensors_done(&found);
        free(data);
}

TAP_MAIN(TEST(the_golden_image_of_version_1_0_is_read), TEST(every_payload_is_aligned_and_in_order), TEST(layouts_of_huge_storages_place_every_payload),
         TEST(sizes_that_overflow_are_refused), TEST(more_records_than_16_bits_count_are_read_back),
         TEST(the_places_of_records_follow_from_the_directory_alone), TEST(a_file_without_storages_is_whole), TEST(every_tensor_is_found_again),
         TEST(looking_for_one_tensor_gives_its_caller_s_name), TEST(chunk_checksums_equal_those_of_the_sealed_bytes),
         TEST(every_chunk_is_told_once_and_final), TEST(chunks_of_large_records_are_joined_from_their_pieces),
         TEST(a_file_is_sealed_while_it_is_copied),
         TEST(bytes_summed_during_the_copy_are_not_read_again), TEST(sums_of_any_kind_do_no_harm), TEST(headers_are_found_by_the_directory_alone),
         TEST(a_raw_file_is_summed_and_not_touched), TEST(sealing_twice_changes_nothing),
         TEST(an_image_that_is_being_sealed_is_completed_and_damage_in_it_is_still_found),
         TEST(any_flipped_payload_bit_is_found_with_its_record), TEST(every_truncation_is_refused),
         TEST(a_broken_zip_is_refused_by_seal_and_left_as_it_was), TEST(records_that_overlap_are_refused),
         TEST(two_tensors_of_one_name_are_refused), TEST(tensors_that_no_file_can_describe_are_refused),
         TEST(a_damaged_pickle_gives_no_byte_outside_of_the_image), TEST(names_that_cannot_be_found_again_are_refused))
