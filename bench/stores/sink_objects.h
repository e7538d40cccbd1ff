/*
 * sink_objects.h - the objects of the benchmark's store, for the files that answer requests about them.
 *
 *      sink_objects.c  objects, and which request is which
 *      sink_uploads.c  objects that come in parts
 *
 * One lock guards all objects and uploads; no body is sent or received under it.
 */
#ifndef NB_BENCH_SINK_OBJECTS_H
#define NB_BENCH_SINK_OBJECTS_H

#include <pthread.h>
#include <time.h>

#include "sink.h"

struct bytes { /* an object's body; the last owner frees it */
        unsigned owners;
        uint64_t size;
        char *data;           /* NULL: its parts, or the pattern */
        struct bytes **parts; /* of an object that came in parts; each has data */
        size_t part_count;
};
#define OBJECT_LEVELS 10
struct object {
        struct object *next[OBJECT_LEVELS]; /* by key; of the lists 0 to levels - 1 */
        int levels;
        char *key;           /* "/bucket/name" */
        struct bytes *bytes;
        unsigned etag;
        time_t time;
        char writer[64];
};

extern pthread_mutex_t objects_lock;

/* Call these with the lock held. */
void objects_drop(struct bytes *bytes); /* NULL is fine */
struct object *objects_find(const char *key); /* NULL: there is none */
bool objects_holds(const struct call *call, const struct object *object); /* the condition of the request */

/* Call these without it. */
/* The pieces of [first, first + size) of a body whose bytes are kept; the caller frees the array, and owns `bytes` meanwhile. */
struct iovec *objects_pieces(const struct bytes *bytes, uint64_t first, uint64_t size, size_t *ret_count);
struct bytes *objects_receive(struct call *call); /* the body of a request; NULL: the connection has ended */
const char *objects_writer(const struct call *call, char writer[64]);
/* Makes the object, if the condition holds, takes `bytes`, and answers. */
void objects_make(struct call *call, const char *writer, struct bytes *bytes, int status, const char *text);
void objects_say(struct call *call, int status, const char *fields, const char *text);
void objects_refuse(struct call *call, int status, const char *code);

/* sink_uploads.c */
void uploads_begin(struct call *call);
void uploads_put_part(struct call *call, unsigned id, unsigned number);
void uploads_complete(struct call *call, unsigned id);
void uploads_abort(struct call *call, unsigned id);
/* A block of Azure, or the list that makes the blob of them. */
void uploads_put_block(struct call *call, bool is_list);

#endif
