/*
 * adls_private.h - declarations that the files of the ADLS driver share.
 *
 *      adls.c        opening, and the table of the service
 *      adls_list.c   listings in JSON
 *      adls_write.c  temporary files, and the rename that makes one the object; small objects
 *      adls_upload.c large objects
 *      adls_resume.c the temporary file of an interrupted upload
 *      adls_remove.c removals of files and of directories that become empty
 */
#ifndef NB_STORE_ADLS_ADLS_PRIVATE_H
#define NB_STORE_ADLS_ADLS_PRIVATE_H

#include "store/adls/adls.h"
#include "store/azure/azure_private.h"

extern struct object_limits adls_limits;

/* adls.c */
/* The value of a property of the file; "": it has none. False: it has more than `room` bytes with its NUL, or is not valid. */
bool adls_property(const struct http_response *response, const char *name, char *ret_text, size_t room);
enum nebula_status adls_fail(const struct object_store *store, enum object_deed deed, const char *key, const struct http_response *response,
                             struct nebula_error *error);

/* adls_list.c, adls_write.c, adls_remove.c: operations */
enum nebula_status adls_list(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                             struct nebula_error *error);
enum nebula_status adls_put(struct store *store, const char *key, const void *data, uint64_t size, enum store_condition condition,
                            const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error);
extern const struct object_steps adls_steps;
enum nebula_status adls_forget(struct store *store, const char *key, const char *text, struct nebula_error *error);
enum nebula_status adls_remove(struct store *store, const struct store_victim *victims, size_t count, struct nebula_error *error);

/* adls_write.c: requests. `key`: of the object, for messages; `place`: of its temporary file. */
#define ADLS_SENT "nebula_sent"  /* the property with the bytes that were sent (adls_resume.c) */
#define ADLS_SENT_SIZE 72        /* of its text */
enum adls_flushing {
        ADLS_FLUSH_ALL,   /* the file is complete */
        ADLS_FLUSH_FIRST, /* bytes after the first ones stay, for a later flush */
        ADLS_FLUSH_DROP,  /* bytes after the first ones are dropped */
};
enum nebula_status adls_create(struct object_store *store, const char *key, const char *place, const char *id, struct nebula_error *error);
enum nebula_status adls_append(struct object_store *store, const char *key, const char *place, const struct object_range *range, const void *data,
                               const atomic_bool *stop, struct nebula_error *error);
/* Makes the first `size` bytes durable. */
enum nebula_status adls_flush(struct object_store *store, const char *key, const char *place, uint64_t size, enum adls_flushing how,
                              struct nebula_error *error);
/* Replaces all properties of the temporary file. `sent` NULL: it has no ADLS_SENT. */
enum nebula_status adls_set_properties(struct object_store *store, const struct object_upload *object, const char *sent, const atomic_bool *stop,
                                       struct nebula_error *error);
/* An object_try. NEBULA_NOT_FOUND: the condition failed, but there is no object. */
struct adls_renaming {
        struct object_store *store;
        const char *place, *key, *id;
        enum store_condition condition;
        const struct store_stamp *seen;
        struct store_stamp stamp; /* "": not in the answer */
};
object_try adls_rename;

/* adls_resume.c: the first bytes of a file. */
struct adls_sent {
        uint64_t size, sum; /* sum: their CRC-64 */
};
/* The text of ADLS_SENT: the file has the first bytes `sent[0]`, or, if their flush has not happened, `sent[1]`. */
void adls_sent_text(const struct adls_sent sent[2], char ret_text[ADLS_SENT_SIZE]);
/* Takes over the temporary file of the upload `former`, under the name object->place. The object gets the id of that upload. *ret_sent: what
 * the file has. Its size is 0: the file is gone or of no use, and the caller creates another. */
enum nebula_status adls_resume(struct object_store *store, struct object_upload *object, struct adls_sent *ret_sent, struct nebula_error *error);
/* Sets the text by which a later upload finds the temporary file. */
enum nebula_status adls_resume_describe(const struct object_store *store, struct object_upload *object, struct nebula_error *error);

#endif
