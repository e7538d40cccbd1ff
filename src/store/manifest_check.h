/*
 * manifest_check.h - checks that all objects of a version are in storage.
 */
#ifndef NB_STORE_MANIFEST_CHECK_H
#define NB_STORE_MANIFEST_CHECK_H

#include "store/manifest.h"

/* Checks with one listing that all files and records of the manifest exist with the right sizes: else NEBULA_NOT_FOUND or
 * NEBULA_CORRUPT. */
enum nebula_status manifest_check_present(struct store *store, const struct manifest *manifest, struct nebula_error *error);
/* The same after the commit, and checks that no entry followed: then the version is durable. NEBULA_NOT_FOUND: an object is missing, a
 * newer entry was made, or a removal has ended. NEBULA_BUSY: all objects exist, but a running sweep may remove some of them. Then the
 * caller takes the version back, unless another agent may have called it durable: such a version is checked again later. */
enum nebula_status manifest_check_all(struct store *store, const struct manifest *manifest, struct nebula_error *error);

/* Reads the manifest of an entry of the index, and lists the objects of its tag at the same time: one round trip in a far store. False: the log of the
 * tag says otherwise, an object is missing, or storage fails. The caller then looks at one after the other, and learns which. */
bool manifest_load_present(struct store *store, const struct manifest *row, struct manifest *ret_manifest);

#endif
