/*
 * referring.h - uploads of objects that have bytes of another object, for the tests of drivers. The including test has `store` and
 * `error`.
 */
#ifndef NB_TESTS_STORE_REFERRING_H
#define NB_TESTS_STORE_REFERRING_H

#include <stdlib.h>

#include "os/bulk.h"
#include "store/store.h"

#define REFERRING_CHUNK ((uint64_t)BULK_REQUEST_BYTES)
#define REFERRING_CHUNKS 6u
#define REFERRING_BYTES ((REFERRING_CHUNKS - 1) * REFERRING_CHUNK + 777)

static inline char *referring_make(void)
{
        char *data = malloc(REFERRING_BYTES);

        for (uint64_t i = 0; i < REFERRING_BYTES; i++)
                data[i] = (char)(i * 2654435761u >> 13);
        return data;
}

/* Uploads and publishes. `changed`: a bit for each chunk that differs from the source. Returns the number of sent bytes; UINT64_MAX: the
 * upload failed. */
static inline uint64_t referring_upload(struct store *to, const char *key, const char *data, unsigned changed, const struct store_source *source,
                                        struct store_mark *ret_mark, struct nebula_error *ret_error)
{
        struct store_written written = { .referred = 0 };
        struct bulk_feed feed;
        struct store_object object = { .key = key, .data = data, .size = REFERRING_BYTES, .feed = &feed, .source = source, .ret_written = &written };
        struct store_upload *upload;
        enum nebula_status status;

        if (bulk_feed_init_pieces(&feed, REFERRING_BYTES))
                return UINT64_MAX;
        for (unsigned i = 0; i < REFERRING_CHUNKS; i++)
                (changed >> i & 1 ? bulk_feed_report : bulk_feed_report_same)(&feed, i * REFERRING_CHUNK);
        bulk_feed_end(&feed);
        status = to->ops->upload(to, &object, 1, &upload, ret_error);
        if (!status)
                status = to->ops->publish(to, upload, ret_error);
        bulk_feed_done(&feed);
        if (ret_mark)
                *ret_mark = written.mark;
        return status ? UINT64_MAX : REFERRING_BYTES - written.referred;
}

#endif
