#include "image/finite.h"

#include <string.h>

#define BLOCK_BYTES 1024u

/* Compilers make vector code of a loop whose length is fixed. */
#define DEFINE_BLOCK(name, type)                                                      \
        static bool name(const uint8_t *data, size_t size, type mask, type bits)      \
        {                                                                             \
                type block[BLOCK_BYTES / sizeof(type)];                               \
                type found = 0;                                                       \
                                                                                      \
                memset(block, 0, sizeof block);                                       \
                memcpy(block, data, size);                                            \
                for (size_t i = 0; i < BLOCK_BYTES / sizeof(type); i++)               \
                        found |= (type)((block[i] & mask) == bits);                   \
                return !found;                                                        \
        }
DEFINE_BLOCK(block_8, uint8_t)
DEFINE_BLOCK(block_16, uint16_t)
DEFINE_BLOCK(block_32, uint32_t)
DEFINE_BLOCK(block_64, uint64_t)

static bool is_finite(const uint8_t *data, size_t size, enum torch_dtype dtype)
{
        switch (dtype) {
        case TORCH_F64:
        case TORCH_C128:
                return block_64(data, size, UINT64_C(0x7ff0000000000000), UINT64_C(0x7ff0000000000000));
        case TORCH_F32:
        case TORCH_C64:
                return block_32(data, size, 0x7f800000u, 0x7f800000u);
        case TORCH_F16:
                return block_16(data, size, 0x7c00u, 0x7c00u);
        case TORCH_BF16:
                return block_16(data, size, 0x7f80u, 0x7f80u);
        case TORCH_F8_E5M2:
                return block_8(data, size, 0x7cu, 0x7cu);
        case TORCH_F8_E4M3: /* it has no infinity */
                return block_8(data, size, 0x7fu, 0x7fu);
        default:
                return true;
        }
}

bool finite_all(const void *data, uint64_t size, enum torch_dtype dtype)
{
        const uint8_t *at = data;

        for (uint64_t offset = 0; offset < size; offset += BLOCK_BYTES)
                if (!is_finite(at + offset, size - offset < BLOCK_BYTES ? (size_t)(size - offset) : BLOCK_BYTES, dtype))
                        return false;
        return true;
}

bool finite_sample(const void *data, uint64_t size, enum torch_dtype dtype)
{
        for (uint64_t offset = 0; offset < size; offset += FINITE_STRIDE_BYTES)
                if (!finite_all((const uint8_t *)data + offset, size - offset < FINITE_SAMPLE_BYTES ? size - offset : FINITE_SAMPLE_BYTES, dtype))
                        return false;
        return true;
}
