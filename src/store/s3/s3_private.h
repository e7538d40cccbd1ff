/*
 * s3_private.h - declarations that the files of the S3 driver share. The driver of Google Cloud Storage includes it, too: its XML API is
 * like S3.
 *
 *      s3.c             opening, and the table of the service
 *      s3_address.c     host, bucket and region of a storage path
 *      s3_credential.c  finds the keys
 *      s3_lend.c        keys that a service lends for some time
 *      s3_role.c        keys of a profile's role or login
 *      s3_process.c     keys that a profile's program prints
 *      s3_profile.c     the files of AWS's command
 *      s3_trust.c       the certificates that AWS's tools trust
 *      s3_call.c        one request
 *      s3_fail.c        messages about its failure
 *      s3_probe.c       what a store lacks that only speaks the protocol
 *      s3_copy.c        copies inside the store
 *      s3_multipart.c   multipart uploads
 *      s3_resume.c      an upload that goes on with the parts of an interrupted one
 *      s3_sweep.c       uploads that an agent left which died
 */
#ifndef NB_STORE_S3_S3_PRIVATE_H
#define NB_STORE_S3_S3_PRIVATE_H

#include "store/object/object.h"
#include "store/s3/s3.h"

#define S3_METADATA "x-amz-meta-nebula"
#define S3_BUCKET_MAX 64
#define S3_REGION_MAX 64
#define S3_SOURCE_MAX 160

extern struct object_limits s3_limits;
extern const struct object_sigv4 s3_sigv4;

/* s3_address.c */
struct s3_address {
        char bucket[S3_BUCKET_MAX];
        char *prefix;   /* "", or it ends with '/' */
        char *root;     /* for messages */
        char *endpoint; /* "https://host:443"; NULL: that of AWS in the region */
        bool is_virtual; /* the bucket's name is a part of the host's */
};
/* `scheme`: with "://". */
enum nebula_status s3_address_parse(const char *url, const char *scheme, struct s3_address *ret_address, struct nebula_error *error);
void s3_address_done(struct s3_address *address);
/* From the environment or the profile; else us-east-1. */
void s3_region_find(char ret_region[S3_REGION_MAX]);
/* The URL of the bucket, without '/' at its end. */
void s3_add_bucket(struct buf *buf, const struct s3_address *address, const char *region);
/* Adds the host of an AWS service in a region. */
void s3_add_host(struct buf *buf, const char *service, const char *region);

/* s3_profile.c: the value in the credentials file, else in the configuration file. NULL: none. The caller passes it to object_forget. */
char *s3_profile_value(const char *name);
/* The same of another profile, or of a section such as "sso-session NAME". */
char *s3_profile_value_of(const char *profile, const char *name);
bool s3_profile_has(const char *profile, const char *name);
const char *s3_profile_name(void);
/* The certificates that AWS's variable or the profile names. The caller frees ret_trust->path. */
void s3_trust_find(struct http_trust *ret_trust);
/* A request to another service of AWS, or to one that lends keys, with these certificates. */
enum nebula_status s3_ask(struct http_request request, struct http_response *ret_response, struct nebula_error *error);

/* s3_credential.c: finds the source of keys. A token's text is access, secret and session, each followed by '\n'. */
struct object_token *s3_keys_find(char ret_source[S3_SOURCE_MAX], struct nebula_error *error);
/* The keys that stand in the files for the profile, or that its program prints. NULL with error: neither, or no memory. */
struct object_token *s3_profile_keys(const char *profile, struct nebula_error *error);
char *s3_keys_text(const char *access, const char *secret, const char *session);
/* Splits such a text in place. */
void s3_keys_split(char *text, struct object_sigv4_key *ret_key);

/* s3_lend.c */
enum s3_lender { S3_WEB_IDENTITY, S3_CONTAINER, S3_MACHINE };
/* NULL: no memory. */
struct object_token *s3_lend_find(enum s3_lender lender);
/* The URL of STS. NULL: no memory. */
char *s3_sts_url(void);
/* Reads the keys from an answer of STS. `borrower`: who gets them, for messages. */
enum nebula_status s3_lend_read(const char *borrower, const struct http_response *response, char **ret_text, int64_t *ret_life_s,
                                struct nebula_error *error);
/* The seconds until a time like "2026-11-26T21:30:00Z" or "2026-11-26T22:30:00.5+01:00"; NULL or another text: some minutes. */
int64_t s3_life_of(const char *expiration);
/* Overwrites and frees an answer. */
void s3_forget_answer(struct http_response *response);

/* s3_process.c: the keys that credential_process of the profile prints. NULL: no memory. */
struct object_token *s3_process_find(const char *profile);

/* s3_role.c: whether the profile names a role or a login, and its keys. NULL with error: it lacks something, or no memory. */
bool s3_role_is_asked(const char *profile);
struct object_token *s3_role_find(const char *profile, struct nebula_error *error);

/* How a large object keeps from replacing another one (s3_probe.c). */
enum s3_uploads {
        S3_UPLOADS_CHECKED,  /* the completion has a condition */
        S3_UPLOADS_RESERVED, /* a small object under its key comes first */
        S3_UPLOADS_UNKNOWN,
};
extern bool s3_asks_stores; /* false in tests of exact requests: every store keeps S3's promises */

struct s3_store {
        struct object_store object; /* first */
        struct s3_address address;
        atomic_bool has_sums;       /* bodies carry their CRC-64 */
        atomic_bool refuses_sums;   /* the store does */
        atomic_bool lacks_part_copy; /* UploadPartCopy */
        atomic_bool keeps_ids;      /* metadata of objects */
        atomic_int uploads;         /* enum s3_uploads */
        struct lock lock;           /* guards the rest; keys that were found never change and are read without the lock */
        struct object_token *keys;
        char source[S3_SOURCE_MAX]; /* of the keys, for messages */
        char region[S3_REGION_MAX]; /* corrected when a server says that the bucket is in another region */
};

/* s3_call.c */
enum nebula_status s3_send(struct object_store *store, const struct object_call *call, struct http_response *ret_response,
                           struct nebula_error *error);
enum nebula_status s3_reach(struct store *store, struct store_reach *ret_reach, struct nebula_error *error);
/* The code in the body of an answer that is not a success; "": none. */
void s3_code(const struct http_response *response, char ret_code[OBJECT_CODE_SIZE]);
bool s3_is_code(const struct http_response *response, const char *code);
/* The text of an element, for instance an upload's id. NULL: absent, or no memory. */
char *s3_value(const struct http_response *response, const char *name);
/* Whether the answer says that another write of the key is running. It may be an earlier try of the same request. */
bool s3_is_under_way(const struct http_response *response);
bool s3_condition_failed(const struct http_response *response);
void s3_add_listing(struct object_call *call, const char *prefix, bool deep, const char *entries, const char *from);
/* For requests whose answer begins before their outcome is known: the body of a 200 may hold a failure. */
enum nebula_status s3_send_long(struct object_store *store, const struct object_call *call, struct http_response *ret_response,
                                struct nebula_error *error);

/* s3_fail.c */
enum nebula_status s3_fail(const struct object_store *store, enum object_deed deed, const char *key, const struct http_response *response,
                           struct nebula_error *error);
enum nebula_status s3_explain(const struct object_store *store, enum object_deed deed, const char *key, const struct http_response *response,
                              const char *source, const char *rights, struct nebula_error *error);

/* s3_multipart.c: the requests of an upload; the driver of Google uses them, too. `id`: of the write, for the metadata. */
enum nebula_status s3_multipart_begin(struct object_store *store, const char *key, const char *id, char **ret_upload_id, struct nebula_error *error);
enum nebula_status s3_multipart_send(struct object_store *store, const char *key, const char *upload_id,
                                     const struct object_range *range, const void *data, struct object_part *ret_part, const atomic_bool *stop,
                                     struct nebula_error *error);
/* The list of the parts for the completion. NULL: no memory. */
char *s3_multipart_list(const struct object_part *parts, uint64_t count, size_t *ret_size);
/* NEBULA_OK: the server answered. */
enum nebula_status s3_multipart_abort(struct object_store *store, const char *key, const char *upload_id, struct nebula_error *error);
extern const struct object_steps s3_steps;
/* Completes the upload, with the sum of all bytes if the store takes one. STORE_ALWAYS or STORE_IF_ABSENT. */
enum nebula_status s3_complete(struct object_store *store, const char *key, const char *id, const char *upload_id, enum store_condition condition,
                               const struct object_part *parts, uint64_t count, const uint64_t *sum, struct nebula_error *error);
void s3_crc64_text(uint64_t crc, char ret_text[OBJECT_SUM_SIZE]);
uint64_t s3_crc64_of(const char *text);

/* s3_resume.c. Finds the upload with which this one goes on, and its parts: sets upload_id and id. If the service does not have it any more, or
 * does not list it, the upload begins anew. */
enum nebula_status s3_resume_find(struct object_store *store, struct object_upload *object, struct nebula_error *error);
/* Sets the object's text, once it has an upload_id. */
enum nebula_status s3_resume_describe(struct object_store *store, struct object_upload *object, struct nebula_error *error);
enum nebula_status s3_resume_forget(struct store *store, const char *key, const char *text, struct nebula_error *error);

/* s3_sweep.c: an operation */
enum nebula_status s3_sweep(struct store *store, store_sweep_limit *limit, void *argument, size_t *ret_count, struct nebula_error *error);

/* s3_probe.c */
enum nebula_status s3_find_uploads(struct s3_store *s3, enum s3_uploads *ret_uploads, struct nebula_error *error);
/* Whether the answer says that the store does not know such requests. */
bool s3_is_lacking(const struct http_response *response);
/* NEBULA_BUSY: something has the key. A write that has reserved the key already reserves it again. */
enum nebula_status s3_reserve(struct object_store *store, const char *key, const char *id, struct nebula_error *error);
bool s3_is_reserved(struct object_store *store, const char *key, const char *id);
/* Removes the reservation if it is still there. */
void s3_release(struct object_store *store, const char *key, const char *id);
enum nebula_status s3_lacks(struct store *store, char *ret_text, size_t size, struct nebula_error *error);

/* s3_copy.c */
enum nebula_status s3_copy(struct store *store, const char *from, const char *to, enum store_condition condition, struct nebula_error *error);
object_refer_part s3_refer;

#endif
