/*
 * vouch.h - what commands do with signatures (store/signature.h): they show who has signed a version, and compare its bytes.
 *
 * Threads: no shared state.
 */
#ifndef NB_CLI_VOUCH_H
#define NB_CLI_VOUCH_H

#include <jansson.h>

#include "store/record.h"

/* The SHA-256 of a stored file, whose chunks it checks. Calls check_read. */
enum nebula_status vouch_sum(struct store *store, const char *key, const struct record_file *file, uint8_t ret_digest[32], struct nebula_error *error);
/* [{"key", "state", "why"}]: state is "trusted", "unknown" or "wrong", and `why` says what is wrong. */
json_t *vouch_list(struct store *store, const struct manifest *manifest);
/* One line for people of vouch_list's result; the caller frees it. NULL: no key has signed. */
char *vouch_text(const json_t *signatures);
/* The same for a column: "ID", "ID (not trusted)" or "ID (BAD)". */
char *vouch_short(const json_t *signatures, bool *ret_is_wrong);

#endif
