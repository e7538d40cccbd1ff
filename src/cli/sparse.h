/*
 * sparse.h - a stored file at an address, of which only the parts that are asked for are read.
 *
 *      sparse_open        gives the file an address; reads nothing
 *      sparse_records     reads the places of a torch file's records
 *      sparse_structure   reads what torch_tensors_find looks at
 *      sparse_need        reads a range, in whole chunks, and compares each with its checksum
 *      sparse_end         says whether the disk gave all that was read
 *      sparse_close
 *
 * If the store is a directory, the file is mapped. Otherwise chunks are fetched into memory that is given to them one by one.
 *
 * Threads: one at a time per file.
 */
#ifndef NB_CLI_SPARSE_H
#define NB_CLI_SPARSE_H

#include "cli/mapped.h"
#include "image/image.h"
#include "store/manifest.h"
#include "store/record.h"

struct sparse {
        uint8_t *data; /* NULL if the file is empty */
        uint64_t size;
        struct store *store;
        char key[MANIFEST_KEY_MAX];
        struct record_file recorded;
        bool is_record_ours;
        bool is_mapped;
        struct mapped mapped; /* if is_mapped */
        bool *have; /* per chunk: it was read and is right */
};

enum nebula_status sparse_open(struct store *store, const struct manifest *manifest, const char *name, struct sparse *ret_sparse,
                               struct nebula_error *error);
/* The same for a caller who has the record of the file, and keeps it until sparse_close. */
enum nebula_status sparse_open_recorded(struct store *store, const char *key, const struct record_file *recorded, struct sparse *ret_sparse,
                                        struct nebula_error *error);
/* As zip_read, but compares no checksum of a chunk. In an object store it takes few requests: it does not read the headers of records in a
 * file that Nebula has laid out, so their CRC-32s count as those of the directory. The caller frees ret_entries. */
enum nebula_status sparse_records(struct sparse *sparse, struct zip_entry **ret_entries, size_t *ret_count, struct nebula_error *error);
enum nebula_status sparse_structure(struct sparse *sparse, struct nebula_error *error);
enum nebula_status sparse_need(struct sparse *sparse, uint64_t offset, uint64_t size, struct nebula_error *error);
/* As mapped_end: the caller has read what it needs, and asks before it reports anything of it. */
enum nebula_status sparse_end(struct sparse *sparse, enum nebula_status status, struct nebula_error *error);
void sparse_close(struct sparse *sparse); /* accepts a zeroed one */

/* Whether the range has the same bytes in both files. Chunks with equal checksums are not read. */
enum nebula_status sparse_same(struct sparse *a, struct sparse *b, uint64_t offset, uint64_t size, bool *ret_same, struct nebula_error *error);

#endif
