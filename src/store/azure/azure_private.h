/*
 * azure_private.h - what the files of the Azure driver share. Nobody else includes it.
 *
 *      azure.c             opening, and the operations on small objects
 *      azure_address.c     what a URL and a connection string name
 *      azure_name.c        keys as names of blobs
 *      azure_credential.c  how the driver proves who asks
 *      azure_token.c       bearer tokens, shared by the process
 *      azure_call.c        one request
 *      azure_sign.c        its signature
 *      azure_fail.c        what its failure means
 *      azure_copy.c        copies inside the account
 *      azure_list.c        listings
 *      azure_upload.c      blocks, and the list that makes them a blob
 *      azure_read.c        ranges
 */
#ifndef NB_STORE_AZURE_AZURE_PRIVATE_H
#define NB_STORE_AZURE_AZURE_PRIVATE_H

#include "base/buf.h"
#include "os/lock.h"
#include "store/azure/azure.h"
#include "store/http/http.h"
#include "store/store_private.h"

#define AZURE_VERSION "2021-12-02"       /* of the protocol: old enough for every cloud, new enough for CRC-64 and large blocks */
#define AZURE_ACCOUNT_MAX 64
#define AZURE_CONTAINER_MAX 64
#define AZURE_KEY_MAX 128                /* bytes of an account's key; Azure's have 64 */
#define AZURE_ID_SIZE 17                 /* of the number of a write, as 16 hex digits */
#define AZURE_METADATA "x-ms-meta-nebula"

/* What Azure takes at most, which an emulator does not check. Tests make them small. */
struct azure_limits {
        uint64_t block_bytes;     /* of a block */
        uint64_t blocks_good;     /* with more of them, blocks are larger, up to block_bytes_good */
        uint64_t block_bytes_good;
        uint64_t block_bytes_max;
        uint64_t blocks_max;
        uint64_t read_bytes;      /* of one request of a read */
        unsigned page_entries;    /* of a listing; 0: as the server likes */
};
extern struct azure_limits azure_limits;

/* azure_address.c */
struct azure_address {
        char account[AZURE_ACCOUNT_MAX], container[AZURE_CONTAINER_MAX];
        char *endpoint; /* "https://account.blob.core.windows.net", with no '/' at its end */
        char *prefix;   /* "", or it ends with '/' */
        char *sas;      /* that the URL holds; NULL: none */
        char *root;     /* for messages: without a secret */
};
enum nebula_status azure_address_parse(const char *url, struct azure_address *ret_address, struct nebula_error *error);
void azure_address_done(struct azure_address *address);

/* AZURE_STORAGE_CONNECTION_STRING. Each text is NULL when it is not named. */
struct azure_connection {
        char *account, *key, *sas, *endpoint;
};
/* Zeroed when the variable is not set. The error does not repeat the text. */
enum nebula_status azure_connection_parse(const char *text, struct azure_connection *ret_connection, struct nebula_error *error);
void azure_connection_done(struct azure_connection *connection);

/* azure_name.c. A name decodes to the key that encodes to it. */
void azure_name_encode(struct buf *buf, const char *key);
void azure_name_decode(struct buf *buf, const char *name);
/* A text that the names of all keys begin with which begin with `prefix`; as long as can be said. */
void azure_name_begin(struct buf *buf, const char *prefix);

/* azure_token.c: one for each identity that this process uses; they stay. */
struct azure_identity;
/* NULL: the environment names no identity, not even one of this machine that may exist. */
struct azure_identity *azure_identity_find(void);
const char *azure_identity_name(const struct azure_identity *identity);
/* A token that is valid now. `refused`: the serial of one that the store did not take; 0: none. The caller frees *ret_token. */
enum nebula_status azure_identity_token(struct azure_identity *identity, uint64_t refused, char **ret_token, uint64_t *ret_serial,
                                        struct nebula_error *error);
void azure_identity_forget_all(void); /* for tests: nothing may be under way */

/* azure_credential.c */
enum azure_proof { AZURE_PROOF_KEY, AZURE_PROOF_SAS, AZURE_PROOF_TOKEN };
struct azure_credential {
        enum azure_proof proof;
        uint8_t key[AZURE_KEY_MAX];
        size_t key_size;
        char *sas; /* without '?' at its beginning */
        struct azure_identity *identity;
        const char *source; /* for messages: which variable, which identity */
};
enum nebula_status azure_credential_find(const struct azure_address *address, struct azure_credential *ret_credential, struct nebula_error *error);
void azure_credential_done(struct azure_credential *credential);

struct azure_store {
        struct store store; /* first: a struct store of this driver is one of these */
        struct azure_address address;
        struct lock lock;   /* guards the rest; what has been found stays and may be read without it */
        bool has_credential;
        struct azure_credential credential;
};

/* azure_call.c */
#define AZURE_PARAMS_MAX 8
#define AZURE_HEADERS_MAX 10
struct azure_param {
        const char *name, *value;
};
struct azure_call {
        const char *method;
        const char *key;  /* of the object; NULL: the container itself */
        struct azure_param params[AZURE_PARAMS_MAX];
        size_t param_count;
        struct http_header headers[AZURE_HEADERS_MAX];
        size_t header_count;
        const void *body;
        uint64_t body_size;
        void *into;
        uint64_t into_size;
        size_t text_max;
        int64_t answer_ms;
        const atomic_bool *stop;
};
void azure_param(struct azure_call *call, const char *name, const char *value);
/* `value` NULL: the header is left out. Both texts stay the caller's until the call is over. */
void azure_header(struct azure_call *call, const char *name, const char *value);
/* NEBULA_OK: the server answered, whatever it was. */
enum nebula_status azure_send(struct azure_store *azure, const struct azure_call *call, struct http_response *ret_response,
                              struct nebula_error *error);
/* azure_fail.c. What an answer that is no success means. Never NEBULA_OK. A container that is missing holds no object, and takes none. */
enum azure_deed { AZURE_READ, AZURE_LIST, AZURE_WRITE, AZURE_REMOVE, AZURE_COPY };
enum nebula_status azure_fail(const struct azure_store *azure, enum azure_deed deed, const char *key, const struct http_response *response,
                              struct nebula_error *error);
/* The answer's x-ms-error-code; "": it has none. */
const char *azure_code(const struct http_response *response);
/* The URL of a blob, with its SAS where `with_sas` and there is one. NULL: no memory. */
char *azure_blob_url(const struct azure_store *azure, const char *key, bool with_sas);
/* NEBULA_INVALID: no object can have this key. */
enum nebula_status azure_check_key(const struct azure_store *azure, const char *key, struct nebula_error *error);
/* azure_sign.c: the header of one try. Its argument is a struct azure_signing. */
struct azure_signing {
        struct azure_store *azure;
        const struct azure_call *call;
        const char *path;
        uint64_t serial; /* of the token that the last try used */
};
enum nebula_status azure_sign(void *argument, bool was_refused, struct http_fields *fields, struct nebula_error *error);
/* What the account's key signs. NULL: no memory. */
char *azure_string_to_sign(const char *account, const char *path, const struct azure_call *call, const char *date);
void azure_crc64_text(const void *data, uint64_t size, char ret_text[16]);
void azure_new_id(char ret_id[AZURE_ID_SIZE]);
/* The ETag of an answer, without its quotes. */
void azure_stamp(const struct http_response *response, struct store_stamp *ret_stamp);
/* The stamp as a condition: in quotes. */
#define AZURE_QUOTED_SIZE (sizeof(struct store_stamp) + 2)
const char *azure_quoted(const struct store_stamp *stamp, char ret_text[AZURE_QUOTED_SIZE]);
enum nebula_status azure_no_memory(const struct azure_store *azure, struct nebula_error *error);

/* azure.c: whether the condition of a write was not met. */
bool azure_condition_failed(const struct http_response *response);
/* What the condition of a write met. NEBULA_OK: the work of this very write `id`, whose first answer was lost; NEBULA_BUSY: another's;
 * NEBULA_NOT_FOUND: nothing, for STORE_IF_ABSENT. */
enum nebula_status azure_look_who_wrote(struct azure_store *azure, const char *key, const char *id, enum store_condition condition,
                                        struct store_stamp *ret_stamp, struct nebula_error *error);
/* What is at the key now. NEBULA_NOT_FOUND: nothing. `ret_id`: of the write that left it; "" when it is foreign. */
enum nebula_status azure_look(struct azure_store *azure, const char *key, struct store_entry *ret_entry, char ret_id[AZURE_ID_SIZE],
                              struct nebula_error *error);

/* azure_copy.c, azure_list.c, azure_upload.c, azure_read.c: operations */
enum nebula_status azure_copy(struct store *store, const char *from, const char *to, enum store_condition condition, struct nebula_error *error);
enum nebula_status azure_list(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                              struct nebula_error *error);
enum nebula_status azure_upload(struct store *store, const struct store_object *objects, size_t count, struct store_upload **ret_upload,
                                struct nebula_error *error);
enum nebula_status azure_publish(struct store *store, struct store_upload *upload, struct nebula_error *error);
void azure_abort(struct store *store, struct store_upload *upload);
enum nebula_status azure_read(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size, struct nebula_error *error);
enum nebula_status azure_read_bulk(struct store *store, const char *key, void *data, uint64_t size, uint32_t chunk_bytes, store_check *check,
                                   void *argument, struct nebula_error *error);

#endif
