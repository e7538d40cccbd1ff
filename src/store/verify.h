/*
 * verify.h - checks every byte of a stored file against the checksums of its
 * record, without keeping the bytes: a few threads read a chunk each and check
 * it while others read. Unlike a load, it goes on after damage and reports all.
 *
 * The functions of `verify_watch` are called from the reading threads, one at
 * a time except `chunk` and `is_over`, which run on all of them at once.
 */
#ifndef NB_STORE_VERIFY_H
#define NB_STORE_VERIFY_H

#include "store/record.h"

struct verify_watch {
        void *argument;
        /* `bytes` more bytes were read. May be NULL. */
        void (*progress)(void *argument, uint64_t bytes);
        /* A damaged or unreadable range; size 0: the whole file. May be NULL. */
        void (*damage)(void *argument, uint64_t offset, uint64_t size, const struct nebula_error *error);
        /* A chunk as read, sound or not. May be NULL. */
        void (*chunk)(void *argument, const void *data, uint64_t offset, uint64_t size);
        /* Asked before each chunk. True: the call ends with NEBULA_UNAVAILABLE. May be NULL. */
        bool (*is_over)(void *argument);
};

/* NEBULA_UNAVAILABLE if watch->is_over says so. `watch` may be NULL. */
enum nebula_status verify_goes_on(const struct verify_watch *watch, const char *key, struct nebula_error *error);

/* Reads one chunk, whose checksum is known. Wrong bytes are read once more: a bit may have changed on the way. */
enum nebula_status verify_chunk(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size, uint64_t crc64,
                                struct nebula_error *error);
/* Checks the object `key` against `file`. Reads to the end, unless the store does not answer (STORE_AGAIN); returns the failure with the
 * lowest offset. */
enum nebula_status verify_file(struct store *store, const char *key, const struct record_file *file,
                               const struct verify_watch *watch, struct nebula_error *error);
/* Reads and checks files without keeping their bytes; calls `report` per file. `wanted`: by index in manifest->files; NULL: all. Goes on after a
 * bad file; returns the first failure. */
enum nebula_status manifest_verify(struct store *store, const struct manifest *manifest, const bool *wanted,
                                   void (*report)(void *argument, const struct manifest_file *file, enum nebula_status status,
                                                  const struct nebula_error *error),
                                   void *argument, struct nebula_error *error);

#endif
