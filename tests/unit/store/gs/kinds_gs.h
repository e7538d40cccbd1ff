/* kinds_gs.h - Google Cloud Storage for the tests that run on every kind of store (kinds.h), on tests/servers/gs.py. */
#ifndef NB_TESTS_STORE_KINDS_GS_H
#define NB_TESTS_STORE_KINDS_GS_H

#include "os/os.h"
#include "store/gs/gs_private.h"

static inline struct store *again_gs(void)
{
        struct store *opened;

        if (store_gs.open(kind_root, &opened, &error))
                abort();
        return opened;
}

/* A prefix of its own for each test, with a character that stands otherwise in XML. */
static inline struct store *begin_gs(void)
{
        static struct object_limits limits;
        unsigned number;

        if (!limits.part_bytes)
                limits = gs_limits;
        gs_limits = limits;
        os->random(&number, sizeof number);
        snprintf(kind_root, sizeof kind_root, "gs://nebula/run%%26/%08x", number);
        return again_gs();
}

/* Two parts, many ranges, many pages, and a token in place of a key. */
static inline struct store *begin_gs_in_pieces(void)
{
        struct store *opened;

        setenv("GOOGLE_OAUTH_ACCESS_TOKEN", "SECRET_BEARER", 1);
        unsetenv("GS_ACCESS_KEY_ID");
        opened = begin_gs();
        gs_limits.part_bytes = gs_limits.part_bytes_good = 5u << 20;
        gs_limits.read_bytes = 1;
        gs_limits.page_entries = 2;
        return opened;
}

static inline void end_gs(void)
{
        setenv("GS_ACCESS_KEY_ID", "GOOG1ENEBULA", 1);
}

/* 5 MiB at least in a part. */
static struct object_limits *const kind_limits __attribute__((unused)) = &gs_limits;
static const bool kind_parts_min __attribute__((unused)) = true;

#if NB_TEST_GS > 1
#define KINDS_GS { "gs", begin_gs, again_gs, end_gs }, { "gs in small pieces", begin_gs_in_pieces, again_gs, end_gs }
#else
#define KINDS_GS { "gs", begin_gs, again_gs, end_gs }
#endif

#endif
