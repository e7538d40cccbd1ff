/*
 * azure_private.h - declarations that the files of the Azure drivers share.
 *
 *      azure.c             opening, and the table of the service
 *      azure_address.c     parses URLs and connection strings
 *      azure_credential.c  chooses the credential
 *      azure_token.c       the identity that gets bearer tokens
 *      azure_login.c       the login of the az command
 *      azure_call.c        one request
 *      azure_sign.c        its signature
 *      azure_source.c      a blob that the service reads for this store
 *      azure_fail.c        messages about its failure
 *      azure_reach.c       describes credential and transport to a person
 *      azure_copy.c        copies inside the account
 *      azure_upload.c      blocks, and the list that makes them a blob
 */
#ifndef NB_STORE_AZURE_AZURE_PRIVATE_H
#define NB_STORE_AZURE_AZURE_PRIVATE_H

#include "store/azure/azure.h"
#include "store/object/object.h"

#define AZURE_VERSION "2021-12-02"       /* of the protocol: supported by every cloud, with CRC-64 and large blocks */
#define AZURE_ACCOUNT_MAX 64
#define AZURE_CONTAINER_MAX 64
#define AZURE_KEY_MAX 128                /* bytes of an account's key; Azure's have 64 */
#define AZURE_RESOURCE "https://storage.azure.com/" /* for which tokens are issued, in every cloud */
#define AZURE_METADATA "x-ms-meta-nebula"

extern struct object_limits azure_limits;

/* azure_address.c */
struct azure_address {
        char account[AZURE_ACCOUNT_MAX], container[AZURE_CONTAINER_MAX];
        char *endpoint; /* "https://account.blob.core.windows.net", with no '/' at its end */
        char *prefix;   /* "", or it ends with '/' */
        char *place;    /* the URL without its query */
        char *sas;      /* the SAS in the URL, or the one that was kept for it (store/place.h); NULL: none */
        char *root;     /* for messages; without a secret */
};
enum nebula_status azure_address_parse(const char *url, struct azure_address *ret_address, struct nebula_error *error);
void azure_address_done(struct azure_address *address);

/* AZURE_STORAGE_CONNECTION_STRING. A text is NULL if the string lacks it. */
struct azure_connection {
        char *account, *key, *sas, *endpoint, *dfs;
};
/* Zeroed if the variable is not set. The error does not repeat the text. */
enum nebula_status azure_connection_parse(const char *text, struct azure_connection *ret_connection, struct nebula_error *error);
void azure_connection_done(struct azure_connection *connection);

/* azure_token.c. The identity that the environment names; else the machine's own or the login of az, which may not exist. NULL: no memory. */
struct object_token *azure_identity_find(void);

/* azure_login.c: fetches a token. NEBULA_NOT_FOUND: the machine has no az command. */
object_token_fetch azure_login;

/* azure_credential.c */
enum azure_proof { AZURE_PROOF_KEY, AZURE_PROOF_SAS, AZURE_PROOF_TOKEN };
struct azure_credential {
        enum azure_proof proof;
        uint8_t key[AZURE_KEY_MAX];
        size_t key_size;
        _Atomic(char *) sas;  /* without the leading '?'; a SAS from a file or of the storage path is replaced when there is a new one */
        char *sas_file;       /* the file that it was read from; NULL: none */
        const char *place;    /* the storage path that it belongs to, of the address; NULL: none */
        struct azure_old_sas *old; /* replaced ones, which other threads may still read: kept until the store is closed */
        struct object_token *identity;
        const char *source; /* the variable, for messages; NULL: an identity */
};
enum nebula_status azure_credential_find(const struct azure_address *address, struct azure_credential *ret_credential, struct nebula_error *error);
void azure_credential_done(struct azure_credential *credential);
/* The variable or identity, for messages. */
const char *azure_credential_name(const struct azure_credential *credential);
/* After an answer that refused `used`: whether there is another SAS now. Reads the file again, or takes the one of a trainer that has come
 * since (lock held). */
bool azure_credential_renew(struct azure_credential *credential, const char *used);

struct azure_store {
        struct object_store object; /* first */
        struct azure_address address;
        atomic_bool refuses_flushes; /* of ADLS: the service does not flush the first bytes of a file while others are appended */
        struct lock lock;           /* guards the rest; a credential that was found is read without the lock, and only its SAS may change. Of
                                     * ADLS: also the progress of uploads */
        bool has_credential;
        struct azure_credential credential;
};

/* azure_call.c */
enum nebula_status azure_send(struct object_store *store, const struct object_call *call, struct http_response *ret_response,
                              struct nebula_error *error);
/* The URL of a blob, without a SAS. NULL: no memory. */
char *azure_blob_url(const struct azure_store *azure, const char *key);
void azure_crc64_text(uint64_t crc, char ret_text[OBJECT_SUM_SIZE]);

/* Finds the credential, unless it was found before. */
enum nebula_status azure_find_credential(struct azure_store *azure, struct nebula_error *error);

/* azure.c */
void azure_close(struct store *store);

/* azure_sas.c: a parameter of a SAS that is not secret, decoded; "": it has none. */
void azure_sas_param(const char *sas, const char *name, char *ret_text, size_t size);
/* Whether a SAS that ends at this time, its parameter `se`, has ended. "": it has no end. */
bool azure_sas_is_past(const char *end);
/* Says why the service refuses this SAS for this deed, as far as the text of the SAS shows it. "": the text shows no reason. */
void azure_sas_advice(const struct azure_credential *credential, enum object_deed deed, char *ret_text, size_t size);

/* azure_reach.c */
enum nebula_status azure_reach(struct store *store, struct store_reach *ret_reach, struct nebula_error *error);

/* azure_fail.c */
enum nebula_status azure_fail(const struct object_store *store, enum object_deed deed, const char *key, const struct http_response *response,
                              struct nebula_error *error);
/* The x-ms-error-code of an answer; "": none. */
const char *azure_code(const struct http_response *response);

/* azure_sign.c: signs one try. The argument is a struct azure_signing. */
struct azure_signing {
        struct azure_store *azure;
        const struct object_call *call;
        const char *path;
        uint64_t serial; /* of the token that the last try used */
};
enum nebula_status azure_sign(void *argument, bool was_refused, struct http_fields *fields, struct nebula_error *error);
/* The text that the account's key signs. NULL: no memory. */
char *azure_string_to_sign(const char *account, const char *path, const struct object_call *call, const char *date);

/* azure_source.c: the URL by which the service reads a blob, for object_call.source, and the header that must go with it, or NULL. Both hold
 * secrets: object_forget. */
enum nebula_status azure_source(struct object_store *store, const char *key, char **ret_url, char **ret_bearer, struct nebula_error *error);

/* azure_copy.c, azure_upload.c: operations */
enum nebula_status azure_copy(struct store *store, const char *from, const char *to, enum store_condition condition, struct nebula_error *error);
extern const struct object_steps azure_steps;

#endif
