/*
 * kinds_several.h - two accounts of Azure Blob Storage, or two buckets of S3, as one store, for the tests that run on every kind of store
 * (kinds.h). scripts/azurite.sh run --two, or scripts/moto.sh, runs a test with the server.
 */
#ifndef NB_TESTS_STORE_KINDS_SEVERAL_H
#define NB_TESTS_STORE_KINDS_SEVERAL_H

#include "os/os.h"
#include "store/azure/azure_private.h"
#include "store/cloud.h"
#include "store/several/several.h"

static inline struct store *again_several(void)
{
        return open_kind(kind_root);
}

static inline void make_containers(struct store *opened)
{
        struct store *member;

        for (size_t i = 0; (member = several_member(opened, i)); i++) {
                struct object_call call = { .method = "PUT" };
                struct http_response response;

                object_param(&call, "restype", "container");
                if (azure_send((struct object_store *)member, &call, &response, &error) || (response.status != 201 && response.status != 409)) {
                        printf("# the container cannot be made: %s\n", error.message);
                        abort();
                }
                http_response_done(&response);
        }
}

/* A prefix of its own for each test. */
static inline struct store *begin_several(void)
{
        static bool is_offered;
        struct store *opened;
        unsigned number;

        if (!is_offered)
                cloud_offer();
        is_offered = true;
        os->random(&number, sizeof number);
        snprintf(kind_root, sizeof kind_root, getenv("AWS_ENDPOINT_URL") ? "s3://nebula,nebula2/run/%08x" : "az://devstoreaccount1,nebulatwo/nebula/run/%08x",
                 number);
        opened = again_several();
        if (!getenv("AWS_ENDPOINT_URL"))
                make_containers(opened);
        return opened;
}

static inline void end_several(void)
{
}

#define KINDS_SEVERAL { "several", begin_several, again_several, end_several }

#endif
