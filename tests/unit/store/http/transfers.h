/* transfers.h - transfers under faults: each is right, or fails. */
#ifndef NB_TESTS_STORE_TRANSFERS_H
#define NB_TESTS_STORE_TRANSFERS_H

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "store/http/faults.h"
#include "store/store.h"
#include "sum/sum.h"
#include "tap.h"

#define TRANSFER_CHUNK (16u << 10)

static inline enum nebula_status check_chunk(void *argument, const void *data, uint64_t offset, uint64_t size, const uint64_t *crc64,
                                             struct nebula_error *ret_error)
{
        return memcmp((const char *)argument + offset, data, size) || *crc64 != sum_crc64(0, data, size) ?
                       error_set(ret_error, NEBULA_CORRUPT, 0, "chunk at %llu", (unsigned long long)offset) : NEBULA_OK;
}

/* Returns the bytes that the test's server has under a key; NULL: it has none. A test whose server is another process passes NULL as the function. */
typedef const void *(*transfer_find)(const char *key, size_t *ret_size);

/* Uploads an object, reads it back and removes it. True if all of that worked. `back` has room for `size` bytes. */
static inline bool transfer(struct store *to, const char *key, const char *data, size_t size, char *back, transfer_find find)
{
        struct store_object object = { .key = key, .data = data, .size = size };
        struct store_upload *upload;
        struct nebula_error failure;
        const void *found;
        size_t found_size;
        enum nebula_status status;

        status = to->ops->upload(to, &object, 1, &upload, &failure);
        if (!status)
                status = to->ops->publish(to, upload, &failure);
        CHECK(status != NEBULA_BUSY); /* no other writer */
        if (find) {
                found = find(key, &found_size);
                CHECK(found ? found_size == size && !memcmp(found, data, size) : status != NEBULA_OK);
        }
        memset(back, 0, size);
        if (!status)
                status = to->ops->read_bulk(to, key, back, size, TRANSFER_CHUNK, check_chunk, (void *)(uintptr_t)data, &failure);
        if (status)
                printf("# %s: %s\n", key, failure.message);
        else
                CHECK(!memcmp(back, data, size));
        CHECK(store_remove_one(to, key, &failure) == NEBULA_OK);
        return !status;
}

#endif
