/*
 * sparse.h - a stored file at an address, of which only the parts that are asked for are read.
 *
 *      sparse_open        gives the file an address; reads nothing
 *      sparse_structure   reads what torch_tensors_find looks at
 *      sparse_need        reads a range, in whole chunks, and compares each with its checksum
 *      sparse_close
 *
 * If the store is a directory, the file is mapped. Otherwise chunks are fetched into memory that is given to them one by one.
 *
 * Threads: one at a time per file.
 */
#ifndef NB_CLI_SPARSE_H
#define NB_CLI_SPARSE_H

#include "store/manifest.h"

struct sparse {
        uint8_t *data; /* NULL if the file is empty */
        uint64_t size;
        struct store *store;
        char key[MANIFEST_KEY_MAX];
        struct record_file recorded;
        bool is_mapped;
        bool *have; /* per chunk: it was read and is right */
};

enum nebula_status sparse_open(struct store *store, const struct manifest *manifest, const char *name, struct sparse *ret_sparse,
                               struct nebula_error *error);
enum nebula_status sparse_structure(struct sparse *sparse, struct nebula_error *error);
enum nebula_status sparse_need(struct sparse *sparse, uint64_t offset, uint64_t size, struct nebula_error *error);
void sparse_close(struct sparse *sparse); /* accepts a zeroed one */

/* Whether the range has the same bytes in both files. Chunks with equal checksums are not read. */
enum nebula_status sparse_same(struct sparse *a, struct sparse *b, uint64_t offset, uint64_t size, bool *ret_same, struct nebula_error *error);

#endif
