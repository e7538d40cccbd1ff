/*
 * Reads the pickles that pickle.c writes, opcode for opcode. A cursor takes each expected
 * opcode or fails. Nothing is executed, so a hostile pickle is at worst refused.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "image/image.h"
#include "image/pickle.h"

struct image_index {
        struct nebula_tensor *tensors;
        size_t count;
        const struct nebula_tensor **by_name;
        char *names; /* all names, each with its NUL */
};

struct cursor {
        const uint8_t *at, *end;
        bool failed; /* once set, all further results are empty */
};

static const uint8_t *take(struct cursor *cursor, size_t size)
{
        const uint8_t *at = cursor->at;

        if (cursor->failed || (size_t)(cursor->end - at) < size) {
                cursor->failed = true;
                return NULL;
        }
        cursor->at += size;
        return at;
}

static void expect(struct cursor *cursor, const char *text)
{
        size_t size = strlen(text);
        const uint8_t *at = take(cursor, size);

        if (at && memcmp(at, text, size) != 0)
                cursor->failed = true;
}

static void expect_byte(struct cursor *cursor, uint8_t byte)
{
        const uint8_t *at = take(cursor, 1);

        if (at && *at != byte)
                cursor->failed = true;
}

static bool next_is(struct cursor *cursor, uint8_t byte)
{
        return !cursor->failed && cursor->at < cursor->end && *cursor->at == byte;
}

static uint64_t take_le(struct cursor *cursor, size_t size)
{
        const uint8_t *at = take(cursor, size);
        uint64_t value = 0;

        for (size_t k = 0; at && k < size; k++)
                value |= (uint64_t)at[k] << (8 * k);
        return value;
}

static uint64_t take_integer(struct cursor *cursor)
{
        const uint8_t *opcode = take(cursor, 1);
        uint64_t value;

        switch (opcode ? *opcode : 0) {
        case PICKLE_BININT1:
                return take_le(cursor, 1);
        case PICKLE_BININT2:
                return take_le(cursor, 2);
        case PICKLE_BININT:
                value = take_le(cursor, 4);
                cursor->failed = cursor->failed || value > INT32_MAX; /* negative */
                return value;
        case PICKLE_LONG1:
                expect_byte(cursor, 8);
                value = take_le(cursor, 8);
                cursor->failed = cursor->failed || value > INT64_MAX;
                return value;
        default:
                cursor->failed = true;
                return 0;
        }
}

static const char *take_string(struct cursor *cursor, size_t *ret_size)
{
        expect_byte(cursor, PICKLE_BINUNICODE);
        *ret_size = (size_t)take_le(cursor, 4);
        return (const char *)take(cursor, *ret_size);
}

static void expect_string(struct cursor *cursor, const char *text)
{
        size_t size;
        const char *found = take_string(cursor, &size);

        if (found && (size != strlen(text) || memcmp(found, text, size) != 0))
                cursor->failed = true;
}

static uint32_t take_tuple(struct cursor *cursor, uint64_t values[NEBULA_DIM_MAX])
{
        uint32_t count = 0;

        if (next_is(cursor, PICKLE_EMPTY_TUPLE)) {
                take(cursor, 1);
                return 0;
        }
        expect_byte(cursor, PICKLE_MARK);
        while (!cursor->failed && !next_is(cursor, PICKLE_TUPLE)) {
                if (count == NEBULA_DIM_MAX) {
                        cursor->failed = true;
                        return 0;
                }
                values[count++] = take_integer(cursor);
        }
        expect_byte(cursor, PICKLE_TUPLE);
        return count;
}

static enum nebula_dtype take_dtype(struct cursor *cursor)
{
        expect(cursor, PICKLE_TORCH);
        for (unsigned k = 0; k < PICKLE_DTYPE_COUNT && !cursor->failed; k++) {
                size_t size = strlen(pickle_dtypes[k].storage);

                if ((size_t)(cursor->end - cursor->at) > size && memcmp(cursor->at, pickle_dtypes[k].storage, size) == 0 &&
                    cursor->at[size] == '\n') {
                        take(cursor, size + 1);
                        return (enum nebula_dtype)k;
                }
        }
        cursor->failed = true;
        return NEBULA_DTYPE_U8;
}

/* The records "data/0", "data/1", ... by their number. */
struct storages {
        const struct zip_entry **entries;
        size_t count;
};

/* A number in a record's name: decimal, no leading zero. */
static bool read_number(const char *text, size_t size, size_t limit, size_t *ret_number)
{
        size_t number = 0;

        if (size == 0 || size > 18 || (text[0] == '0' && size > 1))
                return false;
        for (size_t k = 0; k < size; k++) {
                if (text[k] < '0' || text[k] > '9')
                        return false;
                number = number * 10 + (size_t)(text[k] - '0');
        }
        if (number >= limit)
                return false;
        *ret_number = number;
        return true;
}

/* Reads one value of the dict. Its payload is the storage that the key names. */
static void take_tensor(struct cursor *cursor, const struct storages *storages, const uint8_t *bytes,
                        struct nebula_tensor *tensor)
{
        uint64_t count, strides[NEBULA_DIM_MAX], expected[NEBULA_DIM_MAX], size;
        const struct zip_entry *entry;
        size_t key_size, key = 0;
        const char *text;
        uint32_t stride_count;

        expect(cursor, PICKLE_REBUILD);
        expect_byte(cursor, PICKLE_MARK);
        expect_byte(cursor, PICKLE_MARK);
        expect_string(cursor, "storage");
        tensor->dtype = take_dtype(cursor);
        text = take_string(cursor, &key_size);
        if (!text || !read_number(text, key_size, storages->count, &key) || !storages->entries[key]) {
                cursor->failed = true;
                return;
        }
        entry = storages->entries[key];
        expect_string(cursor, "cpu");
        count = take_integer(cursor);
        expect_byte(cursor, PICKLE_TUPLE);
        expect_byte(cursor, PICKLE_BINPERSID);
        if (take_integer(cursor) != 0) /* offset in the storage */
                cursor->failed = true;
        tensor->dim_count = take_tuple(cursor, tensor->shape);
        stride_count = take_tuple(cursor, strides);
        expect_byte(cursor, PICKLE_NEWFALSE);
        expect(cursor, PICKLE_HOOKS);
        expect_byte(cursor, PICKLE_TUPLE);
        expect_byte(cursor, PICKLE_REDUCE);
        size = cursor->failed ? UINT64_MAX : pickle_tensor_size(tensor);
        if (size == UINT64_MAX || size != entry->size || size / pickle_dtypes[tensor->dtype].item_bytes != count ||
            stride_count != tensor->dim_count || entry->payload_offset % IMAGE_ALIGNMENT != 0) {
                cursor->failed = true;
                return;
        }
        pickle_strides(tensor, expected);
        if (memcmp(strides, expected, stride_count * sizeof *strides) != 0)
                cursor->failed = true;
        tensor->data = bytes + entry->payload_offset;
}

static int compare_names(const void *a, const void *b)
{
        return strcmp((*(const struct nebula_tensor *const *)a)->name, (*(const struct nebula_tensor *const *)b)->name);
}

/* Fills the index from the pickle; false if the pickle is not one of ours. The arrays have room for every storage. */
static bool read_dict(struct image_index *index, const struct storages *storages, const uint8_t *bytes,
                      const struct zip_entry *pickle)
{
        struct cursor cursor = { .at = bytes + pickle->payload_offset };
        char *name_at = index->names;

        cursor.end = cursor.at + pickle->size;
        expect(&cursor, PICKLE_BEGIN);
        while (next_is(&cursor, PICKLE_BINUNICODE)) {
                struct nebula_tensor *tensor = &index->tensors[index->count];
                size_t size;
                const char *name = take_string(&cursor, &size);

                if (!name || memchr(name, '\0', size) || index->count == storages->count)
                        return false;
                tensor->name = memcpy(name_at, name, size); /* names_at has room: `names` is as large as the pickle */
                name_at[size] = '\0';
                name_at += size + 1;
                take_tensor(&cursor, storages, bytes, tensor);
                if (cursor.failed)
                        return false;
                index->by_name[index->count++] = tensor;
        }
        expect(&cursor, PICKLE_FINISH);
        if (cursor.failed || cursor.at != cursor.end)
                return false;
        qsort(index->by_name, index->count, sizeof *index->by_name, compare_names);
        for (size_t k = 1; k < index->count; k++) {
                if (compare_names(&index->by_name[k - 1], &index->by_name[k]) == 0)
                        return false;
        }
        return true;
}

/* Finds the pickle and the storages among the entries. False if there is no pickle or if a record occurs twice. */
static bool sort_entries(const struct zip_entry *entries, size_t count, struct storages *storages,
                         const struct zip_entry **ret_pickle)
{
        static const char prefix[] = "archive/data/";
        const struct zip_entry *pickle = NULL;

        for (size_t k = 0; k < count; k++) {
                const char *name = entries[k].name;
                size_t number;

                if (strcmp(name, "archive/data.pkl") == 0) {
                        if (pickle)
                                return false;
                        pickle = &entries[k];
                } else if (strncmp(name, prefix, sizeof prefix - 1) == 0) {
                        name += sizeof prefix - 1;
                        if (!read_number(name, strlen(name), storages->count, &number) || storages->entries[number])
                                return false;
                        storages->entries[number] = &entries[k];
                }
        }
        *ret_pickle = pickle;
        return pickle != NULL;
}

enum nebula_status image_index_new(const void *data, uint64_t size, struct image_index **ret_index,
                                   struct nebula_error *error)
{
        const struct zip_entry *pickle;
        struct storages storages = { 0 };
        struct image_index *index = NULL;
        struct zip_entry *entries;
        size_t count;
        enum nebula_status status = zip_read(data, size, &entries, &count, error);

        if (status != NEBULA_OK)
                return status;
        storages.count = count;
        storages.entries = calloc(count + 1, sizeof *storages.entries);
        index = calloc(1, sizeof *index);
        if (!storages.entries || !index)
                goto no_memory;
        if (!sort_entries(entries, count, &storages, &pickle))
                goto foreign;
        index->tensors = calloc(count + 1, sizeof *index->tensors);
        index->by_name = calloc(count + 1, sizeof *index->by_name);
        index->names = malloc((size_t)pickle->size + 1); /* a name takes 5 bytes more in the pickle than here */
        if (!index->tensors || !index->by_name || !index->names)
                goto no_memory;
        if (!read_dict(index, &storages, data, pickle))
                goto foreign;
        *ret_index = index;
        index = NULL;
        goto done;
no_memory:
        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the index of %zu records", count);
        goto done;
foreign:
        status = error_set(error, NEBULA_INVALID, 0, "this file is not a dict of tensors that nebula_checkpoint_save_tensors wrote");
done:
        image_index_free(index);
        free(storages.entries);
        free(entries);
        return status;
}

enum nebula_status image_index_find(const struct image_index *index, const char *name,
                                    struct nebula_tensor *ret_tensor, struct nebula_error *error)
{
        size_t low = 0, high = index->count;

        while (low < high) {
                size_t middle = low + (high - low) / 2;
                int order = strcmp(name, index->by_name[middle]->name);

                if (order == 0) {
                        *ret_tensor = *index->by_name[middle];
                        return NEBULA_OK;
                }
                if (order < 0)
                        high = middle;
                else
                        low = middle + 1;
        }
        return error_set(error, NEBULA_NOT_FOUND, 0, "no tensor \"%s\" among the %zu of this file", name, index->count);
}

const struct nebula_tensor *image_index_tensors(const struct image_index *index, size_t *ret_count)
{
        *ret_count = index->count;
        return index->tensors;
}

void image_index_free(struct image_index *index)
{
        if (!index)
                return;
        free(index->tensors);
        free(index->by_name);
        free(index->names);
        free(index);
}

enum nebula_status zip_find_tensor(const void *data, uint64_t size, const char *name,
                                   struct nebula_tensor *ret_tensor, struct nebula_error *error)
{
        struct nebula_tensor tensor;
        struct image_index *index;
        enum nebula_status status = image_index_new(data, size, &index, error);

        if (status != NEBULA_OK)
                return status;
        status = image_index_find(index, name, &tensor, error);
        image_index_free(index);
        if (status != NEBULA_OK)
                return status;
        tensor.name = name;
        *ret_tensor = tensor;
        return NEBULA_OK;
}
