/*
 * sink.h - declarations that the files of the benchmark's object store share.
 *
 *      sink.c          connections, requests, limits and counts
 *      sink_objects.c  the answers of S3 and Azure Blob
 *      sink_uploads.c  the same for objects that come in parts
 */
#ifndef NB_BENCH_SINK_H
#define NB_BENCH_SINK_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/uio.h>

#define PATTERN_BYTES (4u << 20)

struct link; /* one connection */

struct call {
        struct link *link;
        const char *head;    /* the request line and the fields, NUL-terminated */
        char method[16];
        char path[1100];     /* decoded */
        const char *query;   /* as it came, without '?' */
        uint64_t body_bytes; /* still to be read, by sink_take or sink_drop */
        const char *told;    /* the target, for the list of requests; NULL: it is there already, or the request is one of the test's own */
        double came_s;
};

/* A field by its name in lower case, copied; "" when there is none. */
const char *sink_field(const struct call *call, const char *name, char *value, size_t size);
/* A parameter of the query, decoded; false when there is none. */
bool sink_param(const struct call *call, const char *name, char *value, size_t size);
/* The body, which the caller frees; NULL: the connection has ended. */
char *sink_take(struct call *call);
/* Reads the body and throws it away, without a copy. False: the connection has ended. */
bool sink_drop(struct call *call);
/* `fields`: "Name: value\r\n" for each. */
void sink_answer(struct call *call, int status, const char *fields, const void *body, uint64_t size);
/* The same with the pieces of a body, one after the other. */
void sink_answer_pieces(struct call *call, int status, const char *fields, const struct iovec *pieces, size_t count);
/* The same with bytes of the pattern, from `offset` on. */
void sink_answer_pattern(struct call *call, int status, const char *fields, uint64_t offset, uint64_t size);

/* sink_objects.c. `keeps`: bodies of any size; else those of more than a MiB are dropped, and the pattern is read in their place. */
void objects_init(bool keeps);
void objects_serve(struct call *call);

#endif
