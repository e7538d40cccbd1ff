/*
 * manifest_read.h - reads the files of a version, and checks every chunk.
 */
#ifndef NB_STORE_MANIFEST_READ_H
#define NB_STORE_MANIFEST_READ_H

#include "store/record.h"

/* Reads a whole file into `data` (mapped, recorded->size bytes) and checks every chunk; a mismatch names file and offset.
 * `recorded` comes from manifest_load_file. */
enum nebula_status manifest_read_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                      void *data, struct nebula_error *error);
/* The key of the file's object, which must exist with the right size. For manifest_read_chunks. */
enum nebula_status manifest_locate_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                        char ret_key[MANIFEST_KEY_MAX], struct nebula_error *error);
/* Reads and checks ranges of whole chunks. `data`: the address of the file's first byte. For stores with read_chunks. */
enum nebula_status manifest_read_chunks(struct store *store, const char *key, const struct record_file *recorded, void *data,
                                        const struct store_range *ranges, size_t count, struct nebula_error *error);
/* Bytes of files that both have read in this process, those of running reads included. */
uint64_t manifest_read_bytes(void);
/* Opens the file as a descriptor (STORE_LENDS_FD); the reader checks the bytes. is_shared: as of the store's open_read. */
enum nebula_status manifest_open_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                      bool is_shared, int *ret_fd, bool *ret_direct, struct nebula_error *error);

#endif
