/* fake_azure.h - the part of Azure Blob Storage that the driver uses, on the tests' server, with simulated faults (faults.h). */
#ifndef NB_TESTS_STORE_FAKE_AZURE_H
#define NB_TESTS_STORE_FAKE_AZURE_H

#include <pthread.h>

#include "store/http/faults.h"

#define FAKE_BLOBS 64
#define FAKE_BLOCKS 256

struct fake_block {
        char id[100];
        char *data;
        size_t size;
};
struct fake_blob {
        char path[300]; /* "": the place is free */
        char *data;     /* NULL: only blocks */
        size_t size;
        unsigned etag;
        char writer[64]; /* x-ms-meta-nebula */
        struct fake_block blocks[FAKE_BLOCKS];
        size_t block_count;
};
struct fake_azure {
        pthread_mutex_t lock;
        struct fake_blob blobs[FAKE_BLOBS];
        unsigned etags;
        /* Which fault the request has; NULL: none has one. Called with the lock held. */
        enum fake_fault (*fault)(const struct server_call *call, void *argument);
        void *argument;
        char last_head[4096]; /* of the last request */
        char last_body[4096];
        uint64_t body_bytes;  /* of all blocks that were sent */
        char copy_head[4096]; /* of the last block that was to be taken from another blob */
        int copy_status;      /* 0: such blocks are taken; else they are refused with this status */
        bool replaces_source; /* just before such a block is made, another program writes over its source */
        char token[64];       /* "": no request is refused; else the only bearer token that is taken */
};

void fake_init(struct fake_azure *fake);
void fake_done(struct fake_azure *fake);
/* server_start(fake_serve, fake, false) */
void fake_serve(struct server_call *call, void *argument);
/* NULL: no committed blob has that path. Nothing is under way. */
struct fake_blob *fake_find(struct fake_azure *fake, const char *path);

#endif
