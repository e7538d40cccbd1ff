/*
 * object.h - the code that the drivers of object stores share. Only these drivers include it.
 *
 *      object_small.c    the operations on small objects, and removal
 *      object_list.c     listings in XML
 *      object_read.c     ranges
 *      object_parts.c    the parts of an upload: their sizes and their order
 *      object_sum.c      checksums of bodies
 *      object_touch.c    keeps the temporary objects of an upload young
 *      object_refer.c    the parts of an object that has bytes of another one
 *      object_resume.c   the parts that an interrupted upload left in the service
 *      object_name.c     keys as names of objects
 *      object_address.c  the parts of a storage path
 *      object_call.c     small texts of a request
 *      object_redirect.c reads that the service sends to another place
 *      object_fail.c     messages about answers that are not a success
 *      object_token.c    secrets that expire, shared by the process
 *      object_sigv4.c    signatures of S3 and of Google
 *      object_jwt.c      signed tokens that services take in exchange for bearer tokens
 *      object_oauth.c    bearer tokens of services that speak OAuth
 *      object_program.c  programs that print a secret
 *
 * A driver describes its service in a struct object_service. An object of key `k` has the name PREFIX + encoded `k` in the service.
 * Every write stores an id of its own in the object's metadata. If an answer is lost, the driver recognizes its write by that id.
 */
#ifndef NB_STORE_OBJECT_OBJECT_H
#define NB_STORE_OBJECT_OBJECT_H

#include "base/vars.h"
#include "base/buf.h"
#include "os/lock.h"
#include "store/http/http.h"
#include "store/http/url.h"
#include "store/http/xml.h"
#include "store/store_private.h"

#define OBJECT_ID_SIZE 17                /* of the id of a write, as 16 hex digits */
#define OBJECT_CODE_SIZE 64
#define OBJECT_SUM_SIZE 32               /* of a checksum as text */
#define OBJECT_QUOTED_SIZE (sizeof(struct store_stamp) + 2)
#define OBJECT_PARAMS_MAX 8
#define OBJECT_HEADERS_MAX 12

struct object_store;

/* The limits of a service. Emulators do not enforce them; tests make them small. */
struct object_limits {
        uint64_t part_bytes;      /* of a part of a large object */
        uint64_t parts_good;      /* more parts than this are made larger, up to part_bytes_good */
        uint64_t part_bytes_good;
        uint64_t part_bytes_max;
        uint64_t parts_min, parts_max;
        uint64_t refer_bytes;     /* smallest part that is taken from another object, and smallest part next to one; 0: no limit */
        uint64_t read_bytes;      /* of one request of a read */
        unsigned page_entries;    /* of a listing; 0: the server's default */
        int64_t touch_ms;         /* between two touches of a temporary object (object_steps.touch) */
};

/* One request. */
struct object_param {
        const char *name, *value; /* value NULL: only the name is sent */
};
struct object_call {
        const char *method;
        const char *key;  /* of the object; NULL: the container itself */
        struct object_param params[OBJECT_PARAMS_MAX];
        size_t param_count;
        struct http_header headers[OBJECT_HEADERS_MAX];
        size_t header_count;
        struct http_header source; /* of Azure: names another object. Each try adds its SAS to the value. A name of NULL: there is none */
        const void *body;
        uint64_t body_size;
        const uint64_t *body_sum; /* the CRC-64 of the body; NULL: it was not computed yet */
        void *into;
        uint64_t into_size;
        uint64_t *into_sums; /* http.h */
        uint64_t into_chunk;
        size_t text_max;
        int64_t answer_ms;
        atomic_ullong *moved; /* http.h */
        const atomic_bool *stop, *stop_too;
        struct http_watch *watch;
};
void object_param(struct object_call *call, const char *name, const char *value);
/* `value` NULL: adds no header. Both texts stay the caller's and must last until the call is over. */
void object_header(struct object_call *call, const char *name, const char *value);
void object_sort_params(struct object_call *call);
void object_sort_headers(struct http_header *headers, size_t count);
void object_query(struct buf *buf, const struct object_call *call);

/* The kinds of operations, for error messages. */
enum object_deed { OBJECT_READ, OBJECT_LIST, OBJECT_WRITE, OBJECT_REMOVE, OBJECT_COPY };

/* The elements of a listing in XML. */
struct object_listing {
        const char *root, *entry, *name, *size, *stamp, *time, *folded, *folded_name, *next;
        size_t depth; /* of an entry; 1: the outermost element */
};

struct object_part;
struct object_upload;
/* One step of one object of an upload; may run on several threads. */
typedef enum nebula_status object_step(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                       struct nebula_error *error);
/* Sends one part of one object; may run on several threads. */
struct object_range {
        uint64_t index, offset, size; /* index: of the part */
        bool refers;                  /* the source has these bytes */
        bool has_sum;                 /* the producer of the bytes reported their CRC-64 */
        uint64_t sum;
        atomic_ullong *moved; /* http.h */
};
typedef enum nebula_status object_send_part(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                            const struct object_range *range, const void *data, const atomic_bool *stop,
                                            struct nebula_error *error);
/* Makes a part from a range of the object's source, if the source still has object->source_stamp. `data` holds the same bytes. After any
 * failure the part is sent. May run on several threads. */
typedef enum nebula_status object_refer_part(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                             const struct object_range *range, const void *data, const atomic_bool *stop,
                                             struct nebula_error *error);
/* The requests with which a service takes large objects (object_parts.c). All steps but send and publish may be NULL. */
struct object_steps {
        object_step *begin;     /* before the first part */
        object_send_part *send;
        object_refer_part *refer; /* NULL: the service cannot take a part from another object */
        object_step *end;       /* after the last part */
        /* Makes the service count the temporary object as written now. NULL: each part does. A failure has no consequence: the next step
         * of the upload meets its cause. Runs beside all other steps. */
        void (*touch)(struct object_store *store, const struct store_upload *upload, const struct object_upload *object,
                      const atomic_bool *stop);
        object_step *publish;   /* makes the object, if there is none */
        /* Removes the results of the earlier steps, unless `is_over`. Some steps may not have run. */
        void (*abort)(struct object_store *store, const struct object_upload *object);
        bool in_order;          /* of an interrupted upload, only the first bytes can be used */
        bool can_resume;        /* `begin` looks for the parts of `former`, and sets `text` */
        bool puts_small;        /* a small object takes one request, which publish makes */
};

struct object_service {
        const char *metadata; /* the header field with the id of a write */
        const char *range;    /* the header field that asks for a range */
        bool counts_bytes;    /* true: names have up to 1024 bytes; false: 1024 characters, with 254 per component */
        const char *marks[2]; /* header fields: each answer of the service has at least one, a proxy's answer has none */
        const struct object_listing *listing;
        struct object_limits *limits;
        /* NEBULA_OK: the server answered, with any status. */
        enum nebula_status (*send)(struct object_store *store, const struct object_call *call, struct http_response *ret_response,
                                   struct nebula_error *error);
        /* The error for an answer that is not a success. Never NEBULA_OK. A missing container holds no object and accepts none. */
        enum nebula_status (*fail)(const struct object_store *store, enum object_deed deed, const char *key,
                                   const struct http_response *response, struct nebula_error *error);
        void (*stamp)(const struct http_response *response, struct store_stamp *ret_stamp);
        void (*condition)(struct object_call *call, enum store_condition condition, const struct store_stamp *seen,
                          char text[OBJECT_QUOTED_SIZE]);
        /* Whether the condition of a write failed, or a concurrent write prevented it. */
        bool (*condition_failed)(const struct http_response *response);
        /* NULL, or finds the id of the write, for a service that does not return it in a header field; "": the object is foreign. */
        void (*writer)(const struct http_response *response, char ret_id[OBJECT_ID_SIZE]);
        /* NULL, or whether the answer is about an object, for a service that has directories. */
        bool (*is_object)(const struct http_response *response);
        /* Adds the headers that declare the body an object, and its checksum. */
        void (*add_object)(const struct object_store *store, struct object_call *call, char sum[OBJECT_SUM_SIZE]);
        /* Adds the parameters of a listing. */
        void (*add_listing)(struct object_call *call, const char *prefix, bool deep, const char *entries, const char *from);
        /* Adds the headers that a removal needs besides its condition. */
        void (*add_removal)(struct object_call *call);
        /* Why the condition of a removal failed: there is another object (true), or the server does not support the condition
         * (*ret_is_unknown). */
        bool (*is_other)(const struct http_response *response, bool *ret_is_unknown);
        const struct object_steps *steps;
};

struct object_store {
        struct store store; /* must be first: the driver casts between the two */
        const struct object_service *service;
        const char *prefix; /* "", or it ends with '/' */
        struct http_trust trust;
        struct vars *vars; /* the variables of clouds that count for this store: those of the thread that opened it. NULL: the process's own */
        /* What the store has shown since it was opened. 0: it is known to keep its service's promises. */
        atomic_bool doubts_puts;  /* whether it honours If-None-Match: the first write finds out */
        atomic_int removal_trust; /* enum object_trust: whether it honours the condition of a removal */
        atomic_bool never_refers; /* it takes no part from another object */
};
enum object_trust { OBJECT_TRUST, OBJECT_DOUBT, OBJECT_NO_TRUST };

/* object_fail.c: adds from where this process has its credentials, if that is not its own environment. */
void object_report_origin(const struct object_store *store, struct nebula_error *error);

/* object_call.c */
void object_new_id(char ret_id[OBJECT_ID_SIZE]);
/* Reads the ETag of an answer, without its quotes. */
void object_etag(const struct http_response *response, struct store_stamp *ret_stamp);
void object_etag_text(const char *text, struct store_stamp *ret_stamp);
/* The stamp in quotes, as a condition. */
const char *object_quoted(const struct store_stamp *stamp, char ret_text[OBJECT_QUOTED_SIZE]);
/* Conditions by If-Match and If-None-Match. */
void object_etag_condition(struct object_call *call, enum store_condition condition, const struct store_stamp *seen,
                           char text[OBJECT_QUOTED_SIZE]);
/* 2xx. */
bool object_is_done(const struct http_response *response);
enum nebula_status object_no_memory(const struct object_store *store, struct nebula_error *error);
/* Adds the object's name, encoded for a URL. */
void object_add_name(struct buf *buf, const struct object_store *store, const char *key);
/* Sends the request, signed by `sign`. Sends it again if `is_changed` says that the body was changed on the way. */
enum nebula_status object_send(const struct object_store *store, const struct object_call *call, const char *url, http_sign *sign, void *argument,
                               bool (*is_changed)(const struct http_response *response), struct http_response *ret_response,
                               struct nebula_error *error);
/* object_redirect.c: if the answer sends a read to another place, asks there without credentials, and gives that place's answer, which is a
 * success or 416. An answer that sends a write elsewhere is a failure. All other answers stay as they are. */
enum nebula_status object_follow(const struct object_store *store, const struct object_call *call, const struct http_request *origin,
                                 struct http_response *response, struct nebula_error *error);
char *object_take(struct buf *buf);
/* Overwrite a secret and free it. NULL is fine. */
void object_forget(char *secret);
void object_forget_bytes(void *secret, size_t size); /* a text into which NULs were written, or NULL */
/* Overwrites the texts in a JSON object, and drops it. The parser's own buffers are not overwritten. */
struct json_t;
void object_forget_json(struct json_t *body);

/* object_name.c. Decoding a name gives the key whose encoding it is. */
void object_name_encode(struct buf *buf, const char *key);
void object_name_decode(struct buf *buf, const char *name);
/* Adds the longest text with which the names of all keys begin that begin with `prefix`. */
void object_name_begin(struct buf *buf, const char *prefix);
/* NEBULA_INVALID: no object can have this key. */
enum nebula_status object_check_key(const struct object_store *store, const char *key, struct nebula_error *error);

/* object_address.c */
enum nebula_status object_wrong_url(const char *url, const char *what, struct nebula_error *error);
/* Takes the first component from a path. False: it is empty or too long. */
bool object_take_component(const char **path, size_t *path_size, char *ret_text, size_t room);
#define OBJECT_PREFIX_RULE "a component is empty, is . or .., ends with a dot or has more than 255 bytes, or there is a byte that no name can have"
/* The rest of the path, decoded, as a directory: "" or "a/b/". NULL: the path is not valid (OBJECT_PREFIX_RULE), or no memory. */
char *object_make_prefix(const char *path, size_t size);
/* "https://host:443", from a URL that has both. NULL: no memory. */
char *object_make_endpoint(const struct url *url);
/* The same with the path, which some stores have before the bucket. */
char *object_make_endpoint_with_path(const struct url *url);
/* "scheme://container/prefix", for messages. NULL: no memory. */
char *object_make_root(const char *before, const char *container, const char *prefix);

/* object_fail.c */
/* The error of this machine's clock, in words; "": it is too small to be the reason of a refused signature. */
const char *object_skew(const struct http_response *response, char *text, size_t size);
/* Sets the sentence and the status. `advice` "": there is none. */
/* What the service says beyond the code; "": nothing, or it may hold a secret. */
#define OBJECT_SENTENCE_SIZE 240
const char *object_sentence(const struct http_response *response, char *text, size_t size);
enum nebula_status object_refused(const struct object_store *store, enum nebula_status status, enum object_deed deed, const char *key,
                                  const struct http_response *response, const char *code, const char *advice, struct nebula_error *error);

/* object_token.c: one token for each identity that this process uses; tokens are never freed. */
struct object_token;
/* Fetches a text and its lifetime in seconds; INT64_MAX: it does not expire. */
typedef enum nebula_status object_token_fetch(void *source, char **ret_text, int64_t *ret_life_s, struct nebula_error *error);
struct object_token_source {
        const char *identity; /* equal texts are equal identities; may hold secrets */
        object_token_fetch *fetch;
        void *source;         /* the token takes it over */
        void (*done)(void *source);
};
/* NULL: no memory. The token takes over the source, or frees it. */
struct object_token *object_token_find(const struct object_token_source *source);
/* For each call of object_token_find. The last one overwrites the token. NULL is fine. */
void object_token_drop(struct object_token *token);
/* Returns a text that is valid now. `refused`: the serial of a text that the store refused; 0: none. The caller passes *ret_text to
 * object_forget. */
enum nebula_status object_token_get(struct object_token *token, uint64_t refused, char **ret_text, uint64_t *ret_serial,
                                    struct nebula_error *error);
void *object_token_source(const struct object_token *token);
void object_token_forget_all(void); /* for tests: no request may be running */
/* Adds "Authorization: Bearer TOKEN". */
enum nebula_status object_token_sign(struct object_token *token, uint64_t *serial, bool was_refused, struct http_fields *fields,
                                     struct nebula_error *error);

/* object_jwt.c: a signed token that says who asks. It owns the texts but the scope. */
struct object_jwt {
        char *key;    /* the RSA key in PEM */
        char *key_id; /* NULL: not sent */
        char *issuer, *audience;
        const char *scope;
};
/* Signs one that begins now. The caller passes *ret_text to object_forget. NEBULA_INVALID: the key cannot be used. */
enum nebula_status object_jwt_sign(const struct object_jwt *jwt, char **ret_text, struct nebula_error *error);
void object_jwt_free(struct object_jwt *jwt); /* NULL is fine */

/* object_oauth.c: how to request a token from a service. It owns the texts. */
struct object_oauth {
        char *name;            /* for messages */
        char *url, *form;      /* form: the body of a POST; NULL: the request is a GET */
        char *assertion;       /* the file whose text follows the form; NULL: none */
        struct object_jwt *jwt; /* its signed text follows the form; NULL: none */
        char *header, *secret; /* a header that the service requires; NULL: none */
        const char *missing;   /* the settings that are missing, for the error if the machine's own service does not answer */
        bool is_machine;       /* the service of the machine itself: it answers quickly or does not exist */
        object_token_fetch *log_in;     /* tried if the service gives no token, with the source NULL; NULL: none. NEBULA_NOT_FOUND: there is no login */
        const char *login_name;         /* for messages */
        _Atomic(const char *) used;     /* the name of the one that gave the newest token */
};
void object_oauth_pair(struct buf *buf, const char *separator, const char *name, const char *value);
/* Takes over the texts, also after a failure. NULL: no memory. */
struct object_token *object_oauth_find(struct object_oauth *oauth);
/* The name of the service, or of the login, that gave the newest token. The token is one of object_oauth_find. */
const char *object_oauth_name(const struct object_token *token);
/* The token in an answer. `name`: of its member. NULL: the answer holds none, or no memory. Frees the answer, which may be NULL. */
char *object_oauth_read(struct json_t *answer, const char *name, int64_t *ret_life_s);

/* object_program.c: lets a shell run a command of the user, without input, and parses what it prints, at most 64 KiB. *ret_printed NULL: that
 * is not JSON. Messages begin with `name` and hold nothing that the program printed. The caller passes *ret_printed to object_forget_json. */
enum nebula_status object_program_run(const char *name, const char *command, int64_t timeout_ms, struct json_t **ret_printed, struct nebula_error *error);

/* object_sigv4.c: signature version 4. */
#define OBJECT_SIGV4_TIME_SIZE 17 /* "20130524T000000Z" */
#define OBJECT_SHA256_SIZE 65     /* 64 hex digits */
#define OBJECT_UNSIGNED "UNSIGNED-PAYLOAD"
struct object_sigv4 {
        const char *algorithm, *key_prefix, *service, *terminator, *date_name, *hash_name, *session_name;
};
struct object_sigv4_key {
        const char *access, *secret, *session; /* session "": the key has none */
};
void object_sigv4_time(int64_t seconds, char ret_text[OBJECT_SIGV4_TIME_SIZE]);
/* False: OpenSSL has no memory for it. */
bool object_sha256_text(const void *data, size_t size, char ret_text[OBJECT_SHA256_SIZE]);
/* The value of Authorization for a request with these header fields, in lower case and sorted. `hash`: of the body, or OBJECT_UNSIGNED.
 * NULL: no memory. */
char *object_sigv4_sign(const struct object_sigv4 *sigv4, const struct object_sigv4_key *key, const char *region, const char *time,
                        const struct object_call *call, const char *path, const struct http_header *headers, size_t count, const char *hash);
/* Signs the call's header: adds the signature and the fields that it needs. */
enum nebula_status object_sigv4_fields(const struct object_sigv4 *sigv4, const struct object_sigv4_key *key, const char *region,
                                       int64_t seconds, const struct object_call *call, const char *url, const char *hash,
                                       struct http_fields *fields, struct nebula_error *error);

/* object_small.c: finds the object that has the key. NEBULA_NOT_FOUND: there is none. `ret_id`: of the write that made it; "" if it is
 * foreign. */
enum nebula_status object_look(struct object_store *store, const char *key, struct store_entry *ret_entry, char ret_id[OBJECT_ID_SIZE],
                               struct nebula_error *error);
/* Finds the object because of which the condition of write `id` failed. NEBULA_OK: this write made it, and its answer was lost.
 * NEBULA_BUSY: another write made it. NEBULA_NOT_FOUND: there is none, or the one that was seen; the write may try again. `seen`: for
 * STORE_IF_SAME, else NULL. */
enum nebula_status object_look_who_wrote(struct object_store *store, const char *key, const char *id, enum store_condition condition,
                                         const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error);
enum nebula_status object_stat(struct store *store, const char *key, struct store_entry *ret_entry, struct nebula_error *error);
/* The same as STORE_IF_ABSENT, by the write `id`. */
enum nebula_status object_put_as(struct object_store *store, const char *key, const void *data, uint64_t size, const char *id, struct nebula_error *error);
enum nebula_status object_put(struct store *store, const char *key, const void *data, uint64_t size, enum store_condition condition,
                              const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error);
enum nebula_status object_get(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                              struct store_stamp *ret_stamp, struct nebula_error *error);
enum nebula_status object_remove(struct store *store, const struct store_victim *victims, size_t count, struct nebula_error *error);
enum nebula_status object_clock(struct store *store, int64_t *ret_ns, struct nebula_error *error);
enum nebula_status object_free_bytes(struct store *store, uint64_t *ret_bytes, struct nebula_error *error);
/* Repeats `once` while it returns NEBULA_NOT_FOUND: the condition failed although there is no object. Gives up after some tries. */
typedef enum nebula_status object_try(void *argument, struct nebula_error *error);
enum nebula_status object_try_again(struct object_store *store, const char *key, object_try *once, void *argument, struct nebula_error *error);

/* object_list.c, object_read.c */
enum nebula_status object_list(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                               struct nebula_error *error);
/* Sorts a page by keys; a prefix is sorted as if it ended with '/'. */
void object_sort_page(struct store_page *page);
/* Whether a listing goes on: a service that ignores the place `from` gives the same page, and the same `next`, for ever. */
enum nebula_status object_check_next(const struct object_store *store, const char *from, const char *next, struct nebula_error *error);
/* For services that know "start-after". */
enum nebula_status object_list_after(struct store *store, const char *key, struct store_page *ret_page, struct nebula_error *error);
/* The key of a name in a listing. *ret_key is NULL: these drivers give no object that name. False: no memory. */
bool object_key_of(const struct object_store *store, const char *name, char **ret_key);
enum nebula_status object_read(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size, struct nebula_error *error);
/* size > 0. `stamp`: the expected one; if it is "", the read takes any object and sets it. The other fields are as in struct
 * http_request. */
struct object_reading {
        const char *key;
        void *data;
        uint64_t offset, size;
        uint64_t *sums, chunk_bytes;
        const atomic_bool *stop, *stop_too;
        struct http_watch *watch;
};
enum nebula_status object_read_range(struct object_store *store, const struct object_reading *range, struct store_stamp *stamp,
                                     struct nebula_error *error);

/* object_bulk.c */
enum nebula_status object_read_bulk(struct store *store, const char *key, void *data, uint64_t size, uint32_t chunk_bytes, store_check *check,
                                    void *argument, struct nebula_error *error);
enum nebula_status object_read_chunks(struct store *store, const char *key, void *data, const struct store_range *ranges, size_t count,
                                      uint32_t chunk_bytes, store_check *check, void *argument, struct nebula_error *error);

/* object_sum.c */
/* The CRC-64 of the call's body. */
uint64_t object_body_sum(const struct object_call *call);
/* The CRC-64 of the bytes of a part. */
uint64_t object_range_sum(const struct object_range *range, const void *data);
/* Takes over the sum of a part that is about to be sent, if the producer reported those of all its pieces. */
void object_take_sum(const struct object_upload *object, struct object_range *range);

/* object_parts.c */
struct object_part {
        struct store_stamp etag;
        uint64_t sum, size;
        bool has_sum; /* of a part that an earlier upload left: `sum` is known */
};
struct object_upload {
        char id[OBJECT_ID_SIZE]; /* of the write: that of the upload, or of the earlier upload that it goes on with */
        char *key;
        const char *data;
        uint64_t size, part_bytes, part_count;
        bool is_small;             /* no part is sent before: publish sends all bytes */
        void *small;               /* a copy of them; NULL: there are none */
        struct bulk_feed *feed;    /* NULL: all bytes are final */
        uint32_t *missing;         /* with a feed: the number of chunks of each part that are not final */
        uint64_t taken;            /* parts taken by threads */
        struct store_written *ret_written; /* may be NULL */
        /* NULL unless the object has a source that was found. With a source, part_count is an upper bound until all parts are taken. */
        const struct store_source *source;
        struct store_stamp source_stamp;
        uint8_t *fates;            /* per chunk of the feed: enum object_fate */
        uint64_t planned, part_min; /* planned: bytes before the next part; part_min: only the last part may be smaller */
        atomic_bool is_refused;    /* takes no more parts from the source */
        atomic_uint_fast64_t referred; /* bytes taken from the source */
        /* Owned by the driver; freed with the upload. */
        char *place;               /* the key of a temporary object; NULL: none is used */
        char *upload_id;           /* that the service gave */
        struct object_part *parts; /* the service's answer for each part */
        struct adls_progress *progress; /* of the driver of Azure Data Lake Storage */
        bool is_over;              /* nothing is left to abort; set by publish when it succeeds */
        /* Of an upload that can go on later (object_resume.c). */
        const struct store_resume *resume; /* NULL: it cannot. Not used after object_upload */
        char *text;                /* the driver's: finds the parts again; NULL: they end with this upload */
        bool is_kept;              /* the caller knows the text */
        struct object_part *found; /* parts that an earlier upload left, by their index; `size` 0: none. NULL: no part */
        atomic_uint_fast64_t resumed; /* their bytes that were taken */
};
struct object_touching;
struct store_upload {
        char id[OBJECT_ID_SIZE];
        struct object_touching *touching; /* NULL: no thread touches the temporary objects */
        size_t count;
        struct object_upload objects[];
};
/* object_touch.c: without memory for a thread, nothing touches the objects, and a sweep may remove them. */
void object_touch_begin(struct object_store *store, struct store_upload *upload);
void object_touch_end(struct store_upload *upload);

/* object_refer.c */
enum object_fate { OBJECT_NOT_FINAL, OBJECT_DIFFERS, OBJECT_SAME };
/* An object_step: finds the source that the caller named. If it is absent or has another mark, the object has no source. */
object_step object_find_source;
/* Plans the parts of an object with a source, after choose_parts. */
enum nebula_status object_plan_ranges(const struct object_store *store, struct object_upload *object, struct nebula_error *error);
/* Plans the next part of an object with a source. False: more chunks must be final first. */
bool object_next_range(struct object_upload *object, struct object_range *ret_range);
/* Makes the part from the source. False: the caller must send it. */
bool object_refer(struct object_store *store, const struct store_upload *upload, struct object_upload *object, const struct object_range *range,
                  const atomic_bool *stop);

/* object_resume.c: whether an interrupted upload of this object has a use. */
bool object_may_resume(const struct object_store *store, const struct object_upload *object);
/* Takes note of a part that an earlier upload left. False: no memory. Parts that this upload cannot have are left out. */
bool object_add_found(struct object_upload *object, uint64_t index, const struct object_part *part);
/* Takes the part from those that were found, if it has the same bytes. False: the caller must send it. */
bool object_take_found(struct object_upload *object, const struct object_range *range);
/* Tells the caller of the upload how its objects can go on later. */
void object_report_began(struct store_upload *upload);

/* The key of a temporary object for an upload whose service cannot hide it. NULL: no memory. */
char *object_make_place(const struct store_upload *upload, const struct object_upload *object);
enum nebula_status object_upload(struct store *store, const struct store_object *objects, size_t count, struct store_upload **ret_upload,
                                 struct nebula_error *error);
enum nebula_status object_publish(struct store *store, struct store_upload *upload, struct nebula_error *error);
void object_abort(struct store *store, struct store_upload *upload);

#endif
