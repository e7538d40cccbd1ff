/*
 * kinds_azure.h - Azure Blob Storage for the tests that run on every kind of store (kinds.h). AZURE_STORAGE_CONNECTION_STRING names
 * the account: scripts/azurite.sh runs a test with an emulator.
 */
#ifndef NB_TESTS_STORE_KINDS_AZURE_H
#define NB_TESTS_STORE_KINDS_AZURE_H

#include "os/os.h"
#include "store/azure/azure_private.h"

static inline void make_container(struct azure_store *azure)
{
        struct object_call call = { .method = "PUT" };
        struct http_response response;

        object_param(&call, "restype", "container");
        if (azure_send(&azure->object, &call, &response, &error) || (response.status != 201 && response.status != 409)) {
                printf("# the container cannot be made: %s\n", error.message);
                abort();
        }
        http_response_done(&response);
}

static inline struct store *again_azure(void)
{
        struct store *opened;

        if (store_azure.open(kind_root, &opened, &error))
                abort();
        return opened;
}

/* A prefix of its own for each test. */
static inline struct store *begin_azure(void)
{
        static struct object_limits limits;
        struct store *opened;
        unsigned number;

        if (!limits.part_bytes)
                limits = azure_limits;
        azure_limits = limits;
        os->random(&number, sizeof number);
        snprintf(kind_root, sizeof kind_root, "az://devstoreaccount1/nebula/run/%08x", number);
        opened = again_azure();
        make_container((struct azure_store *)opened);
        return opened;
}

/* Many blocks, many ranges, many pages. */
static inline struct store *begin_azure_in_pieces(void)
{
        struct store *opened = begin_azure();

        azure_limits.part_bytes = azure_limits.part_bytes_good = 256u << 10;
        azure_limits.read_bytes = 1;
        azure_limits.page_entries = 2;
        return opened;
}

static inline void end_azure(void)
{
}

#if NB_TEST_AZURE > 1
#define KINDS_AZURE { "azure", begin_azure, again_azure, end_azure }, { "azure in small pieces", begin_azure_in_pieces, again_azure, end_azure }
#else
#define KINDS_AZURE { "azure", begin_azure, again_azure, end_azure }
#endif

#endif
