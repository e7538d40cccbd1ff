/*
 * bundle.h - signs the files of a directory in the format of OpenSSF Model Signing 1.0: a Sigstore bundle with a DSSE envelope, whose payload is an
 * in-toto statement with the SHA-256 of each file. `model_signing verify key` checks it. That program takes elliptic curves alone, so the key is
 * one on P-256.
 *
 * Threads: no shared state.
 */
#ifndef NB_CLI_BUNDLE_H
#define NB_CLI_BUNDLE_H

#include <stddef.h>

#include "nebula.h"

#define BUNDLE_NAME "model.sig"

/* Writes <directory>/model.sig, and replaces an older one. NEBULA_INVALID: the directory has a link or another thing that is no file, or the key is of
 * another kind. */
enum nebula_status bundle_write(const char *directory, const char *key_path, size_t *ret_count, struct nebula_error *error);

#endif
