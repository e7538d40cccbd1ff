/*
 * trust.h - what a program wants of signatures: the policy, the keys that it trusts, and the key with which it signs.
 *
 * store_open makes it from the settings NEBULA_SIGNATURES, NEBULA_TRUSTED_KEYS and NEBULA_SIGN_KEY (conf_env), so that everything that reads
 * or writes a version through a store follows them (signature.h).
 *
 * Key files are PEM. The file of trusted keys has one public key after the other. Other users may write neither file, nor read a private key.
 *
 * Threads: a trust is constant once store_open has returned, except for what its lock guards.
 */
#ifndef NB_STORE_TRUST_H
#define NB_STORE_TRUST_H

#include <stdbool.h>
#include <stddef.h>

#include "nebula.h"
#include "os/lock.h"

#define TRUST_ID_SIZE 17       /* of the id of a key: 16 hex digits of the SHA-256 of its 32 bytes, and a NUL */
#define TRUST_KEYS_MAX 64      /* trusted keys: a search asks for a signature by each of them */
#define TRUST_FILE_MAX 65536   /* bytes of a file of keys */
#define TRUST_PATH_MAX 4096

enum trust_policy {
        TRUST_OFF,     /* no signature is read */
        TRUST_PREFER,  /* a version that is signed must be as it was signed; others are read, too */
        TRUST_REQUIRE, /* only versions that a trusted key has signed are read */
};

struct evp_pkey_st;
struct signature;
struct trust_key {
        struct evp_pkey_st *key;
        char id[TRUST_ID_SIZE];
};
struct trust {
        enum trust_policy policy;
        struct trust_key own;  /* signs what this program writes, and is trusted; key NULL: nothing is signed */
        struct trust_key keys[TRUST_KEYS_MAX];
        size_t key_count;

        struct lock lock;
        struct signature *last; /* the signature that was read last: a version's files are opened one after the other */
};

/* By the settings. *ret_trust is NULL if they name no policy and no key. NEBULA_INVALID says which file or setting is wrong. */
enum nebula_status trust_new(struct trust **ret_trust, struct nebula_error *error);
void trust_free(struct trust *trust); /* NULL is fine */
/* The policy that the settings name, without the keys. A word that it does not know counts as TRUST_REQUIRE. */
enum trust_policy trust_policy(void);
/* A store that was opened for the same job before had `former` (NULL: none). Its policy stays if it is the stricter one: a session that asks for
 * less does not take the check away from another. */
enum nebula_status trust_keep(struct trust **trust, const struct trust *former, struct nebula_error *error);

/* The path of the file of trusted keys: NEBULA_TRUSTED_KEYS, or nebula/trusted_keys in the user's directory of settings. NEBULA_INVALID: neither
 * is known. */
enum nebula_status trust_path(char ret_path[TRUST_PATH_MAX], struct nebula_error *error);
/* Reads a file with one private key. */
enum nebula_status trust_read_private(const char *path, struct evp_pkey_st **ret_key, struct nebula_error *error);
/* Reads a file of public Ed25519 keys, at most TRUST_KEYS_MAX. The caller frees each key. */
enum nebula_status trust_read_public(const char *path, bool is_trusted, struct trust_key *ret_keys, size_t *ret_count, struct nebula_error *error);
/* False: it is not an Ed25519 key. */
bool trust_key_id(const struct evp_pkey_st *key, char ret_id[TRUST_ID_SIZE]);

#endif
