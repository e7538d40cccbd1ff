/* Reads hostile bytes as an image: no byte outside is read, and an image that can be sealed verifies afterwards. */
#include <stdlib.h>
#include <string.h>

#include "image/image.h"
#include "sum/sum.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool condition)
{
        if (!condition)
                abort();
}

/* Every payload that is handed out can be read to its end. */
static void read_tensors(const uint8_t *data, size_t size)
{
        struct image_index *index;
        const struct nebula_tensor *tensors;
        struct nebula_tensor found;
        size_t count;

        if (image_index_new(data, size, &index, NULL) != NEBULA_OK)
                return;
        tensors = image_index_tensors(index, &count);
        for (size_t k = 0; k < count; k++) {
                require(image_index_find(index, tensors[k].name, &found, NULL) == NEBULA_OK);
                require(found.data == tensors[k].data);
                sum_crc32(0, found.data, (size_t)pickle_tensor_size(&found));
        }
        image_index_free(index);
}

static void seal_copy(const uint8_t *data, size_t size, uint32_t chunk_bytes)
{
        uint8_t *copy = malloc(size + 1);
        uint64_t *chunks;
        size_t count;

        require(copy != NULL);
        if (size)
                memcpy(copy, data, size);
        if (image_seal(copy, size, true, chunk_bytes, &chunks, &count, NULL) == NEBULA_OK) {
                require(zip_verify(copy, size, NULL) == NEBULA_OK);
                for (size_t k = 0; k < count; k++) {
                        size_t at = k * chunk_bytes, left = size - at;

                        require(chunks[k] == sum_crc64(0, copy + at, left < chunk_bytes ? left : chunk_bytes));
                }
                free(chunks);
        }
        free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
        struct nebula_tensor tensor;
        struct nebula_error error;

        zip_verify(data, size, &error);
        zip_find_tensor(data, size, "w", &tensor, &error);
        read_tensors(data, size);
        seal_copy(data, size, 97);
        return 0;
}
