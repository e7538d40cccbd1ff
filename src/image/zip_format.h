/*
 * zip_format.h - the parts of the zip format that an image uses (PKWARE's APPNOTE 6.3). For the files of src/image only.
 *
 * All fields are little-endian and unaligned.
 */
#ifndef NB_IMAGE_ZIP_FORMAT_H
#define NB_IMAGE_ZIP_FORMAT_H

#include <stdint.h>
#include <string.h>

#define ZIP_LOCAL_SIGNATURE 0x04034b50u
#define ZIP_LOCAL_BYTES 30u
#define ZIP_LOCAL_CRC_AT 14u
#define ZIP_CENTRAL_SIGNATURE 0x02014b50u
#define ZIP_CENTRAL_BYTES 46u
#define ZIP_CENTRAL_CRC_AT 16u
#define ZIP_END_SIGNATURE 0x06054b50u
#define ZIP_END_BYTES 22u
#define ZIP_END64_SIGNATURE 0x06064b50u
#define ZIP_END64_BYTES 56u
#define ZIP_LOCATOR_SIGNATURE 0x07064b50u
#define ZIP_LOCATOR_BYTES 20u

#define ZIP_EXTRA_ZIP64 0x0001u
#define ZIP_EXTRA_PADDING 0x4246u /* "FB", the padding's id in files of torch.save */
#define ZIP_EXTRA_HEAD_BYTES 4u   /* id and size */
#define ZIP_LOCAL_ZIP64_BYTES (ZIP_EXTRA_HEAD_BYTES + 16u)

/* A field with this value has its real value in the zip64 extra field or the zip64 end. */
#define ZIP_IN_ZIP64_32 UINT32_MAX
#define ZIP_IN_ZIP64_16 UINT16_MAX

#define ZIP_FLAG_ENCRYPTED 0x0001u
#define ZIP_FLAG_DESCRIPTOR 0x0008u /* CRC and sizes follow the payload */
#define ZIP_FLAG_UTF8 0x0800u

static inline uint16_t zip_get16(const uint8_t *at)
{
        return (uint16_t)(at[0] | at[1] << 8);
}

static inline uint32_t zip_get32(const uint8_t *at)
{
        return zip_get16(at) | (uint32_t)zip_get16(at + 2) << 16;
}

static inline uint64_t zip_get64(const uint8_t *at)
{
        return zip_get32(at) | (uint64_t)zip_get32(at + 4) << 32;
}

/* Each of these returns the place of the next field. */
static inline uint8_t *zip_put16(uint8_t *at, uint32_t value)
{
        at[0] = (uint8_t)value;
        at[1] = (uint8_t)(value >> 8);
        return at + 2;
}

static inline uint8_t *zip_put32(uint8_t *at, uint32_t value)
{
        return zip_put16(zip_put16(at, value), value >> 16);
}

static inline uint8_t *zip_put64(uint8_t *at, uint64_t value)
{
        return zip_put32(zip_put32(at, (uint32_t)value), (uint32_t)(value >> 32));
}

#endif
