/*
 * kinds_s3.h - S3 for the tests that run on every kind of store (kinds.h). The environment names the server, the keys, and a bucket
 * "nebula": scripts/moto.sh runs a test with such a server.
 */
#ifndef NB_TESTS_STORE_KINDS_S3_H
#define NB_TESTS_STORE_KINDS_S3_H

#include "os/os.h"
#include "store/s3/s3_private.h"

static inline struct store *again_s3(void)
{
        struct store *opened;

        if (store_s3.open(kind_root, &opened, &error))
                abort();
        return opened;
}

/* A prefix of its own for each test. */
static inline struct store *begin_s3(void)
{
        static struct object_limits limits;
        unsigned number;

        if (!limits.part_bytes)
                limits = s3_limits;
        s3_limits = limits;
        os->random(&number, sizeof number);
        snprintf(kind_root, sizeof kind_root, "s3://nebula/run/%08x", number);
        return again_s3();
}

/* Two parts, many ranges, many pages. Less than 5 MiB is no part for S3 unless it is the last one. */
static inline struct store *begin_s3_in_pieces(void)
{
        struct store *opened = begin_s3();

        s3_limits.part_bytes = s3_limits.part_bytes_good = 5u << 20;
        s3_limits.read_bytes = 1;
        s3_limits.page_entries = 2;
        return opened;
}

static inline void end_s3(void)
{
}

#if NB_TEST_S3 > 1
#define KINDS_S3 { "s3", begin_s3, again_s3, end_s3 }, { "s3 in small pieces", begin_s3_in_pieces, again_s3, end_s3 }
#else
#define KINDS_S3 { "s3", begin_s3, again_s3, end_s3 }
#endif

#endif
