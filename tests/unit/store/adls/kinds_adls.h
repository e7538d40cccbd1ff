/* kinds_adls.h - Azure Data Lake Storage for the tests that run on every kind of store (kinds.h), on tests/servers/dfs.py. */
#ifndef NB_TESTS_STORE_KINDS_ADLS_H
#define NB_TESTS_STORE_KINDS_ADLS_H

#include "os/os.h"
#include "store/adls/adls_private.h"

static inline struct store *again_adls(void)
{
        struct store *opened;

        if (store_adls.open(kind_root, &opened, &error))
                abort();
        return opened;
}

/* A prefix of its own for each test. */
static inline struct store *begin_adls(void)
{
        static struct object_limits limits;
        unsigned number;

        if (!limits.part_bytes)
                limits = adls_limits;
        adls_limits = limits;
        os->random(&number, sizeof number);
        snprintf(kind_root, sizeof kind_root, "abfss://nebula@datalake.dfs.core.windows.net/run/%08x", number);
        return again_adls();
}

/* Many parts, many ranges, many pages. */
static inline struct store *begin_adls_in_pieces(void)
{
        struct store *opened = begin_adls();

        adls_limits.part_bytes = adls_limits.part_bytes_good = 256u << 10;
        adls_limits.read_bytes = 1;
        adls_limits.page_entries = 2;
        return opened;
}

static inline void end_adls(void)
{
}

static struct object_limits *const kind_limits __attribute__((unused)) = &adls_limits;
static const bool kind_parts_min __attribute__((unused)) = false;

#if NB_TEST_ADLS > 1
#define KINDS_ADLS { "adls", begin_adls, again_adls, end_adls }, { "adls in small pieces", begin_adls_in_pieces, again_adls, end_adls }
#else
#define KINDS_ADLS { "adls", begin_adls, again_adls, end_adls }
#endif

#endif
