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
        struct nebula_error error;

        zip_verify(data, size, &error);
        seal_copy(data, size, 97);
        return 0;
}
