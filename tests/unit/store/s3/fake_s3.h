/* fake_s3.h - the part of S3 that the driver uses, on the tests' server, with simulated faults (faults.h). */
#ifndef NB_TESTS_STORE_FAKE_S3_H
#define NB_TESTS_STORE_FAKE_S3_H

#include <pthread.h>

#include "store/http/faults.h"

#define FAKE_OBJECTS 64
#define FAKE_UPLOADS 64
#define FAKE_PARTS 64

struct fake_part {
        char *data;
        size_t size;
        char etag[40];
};
struct fake_upload {
        char path[300]; /* "": the place is free */
        char writer[64];
        unsigned id;
        struct fake_part parts[FAKE_PARTS];
};
struct fake_object {
        char path[300];
        char *data; /* NULL: there is none */
        size_t size;
        unsigned etag;
        char writer[64]; /* x-amz-meta-nebula */
};
/* What a store lacks that speaks the protocol. */
enum fake_lacks {
        FAKE_LACKS_METADATA = 1 << 0,
        FAKE_LACKS_PUT_CONDITION = 1 << 1,
        FAKE_LACKS_COMPLETE_CONDITION = 1 << 2,
        FAKE_LACKS_REMOVAL_CONDITION = 1 << 3,
        FAKE_LACKS_GET_CONDITION = 1 << 4,
        FAKE_LACKS_SUMS = 1 << 5,  /* 501 */
        FAKE_LACKS_MARKS = 1 << 6, /* no ids of requests; its lists are empty */
        FAKE_REPLACES_WHILE_READ = 1 << 7, /* each read is followed by another write of the object */
};
struct fake_s3 {
        unsigned lacks;
        pthread_mutex_t lock;
        struct fake_object objects[FAKE_OBJECTS];
        struct fake_upload uploads[FAKE_UPLOADS];
        unsigned etags, uploads_begun;
        bool refuses_conditional_removal; /* 501 */
        bool lists_no_sums;               /* of parts */
        char error_in_200[64];            /* "": none; else the code that the next completion has in a body of 200; "cut": the body ends early */
        unsigned conflicts;               /* so many completions are refused because another is running, which succeeds with the last of them */
        char access[64];                  /* "": every key is taken; else 400 ExpiredToken for others */
        char region[32];                  /* "": every region is; else 400 for signatures of others */
        /* Which fault the request has; NULL: none has one. Called with the lock held. */
        enum fake_fault (*fault)(const struct server_call *call, void *argument);
        void *argument;
        char last_head[8192]; /* of the last request */
        char last_body[4096];
        uint64_t body_bytes;    /* of all parts that were sent */
        char copy_head[8192];   /* of the last part that was to be taken from another object */
        int copy_status;        /* 0: such parts are taken; else they are refused with this status; 200: with a failure in its body */
        enum { FAKE_COPY_CRC64, FAKE_COPY_MD5, FAKE_COPY_NO_SUM } copy_sums; /* how the answer says the checksum of such a part */
        bool replaces_source;   /* just before such a part is made, another program writes over its source */
};

void fake_init(struct fake_s3 *fake);
void fake_done(struct fake_s3 *fake);
/* server_start(fake_serve, fake, false) */
void fake_serve(struct server_call *call, void *argument);
/* NULL: there is no such object. Nothing is under way. */
struct fake_object *fake_find(struct fake_s3 *fake, const char *path);
unsigned fake_uploads_open(const struct fake_s3 *fake);
/* Drops uploads as a rule of the bucket does; returns how many. */
unsigned fake_uploads_drop(struct fake_s3 *fake);

#endif
