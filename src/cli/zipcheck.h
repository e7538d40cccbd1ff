/*
 * zipcheck.h - the CRC-32 of every record of a zip image, computed while its
 * chunks pass by in any order on several threads.
 *
 *      zipcheck_begin(&check, entries, count, chunk_bytes)   takes the entries of zip_read over
 *      zipcheck_chunk(&check, data, offset, size)      for every chunk, also at the same time
 *      zipcheck_wrong(&check, i)                       afterwards
 *      zipcheck_done(&check)
 */
#ifndef NB_CLI_ZIPCHECK_H
#define NB_CLI_ZIPCHECK_H

#include "image/image.h"

struct zipcheck_segment {
        uint64_t offset, size; /* inside one chunk */
        size_t entry;
        uint32_t crc32;
};
struct zipcheck {
        struct zip_entry *entries; /* in the order of the file */
        size_t entry_count;
        struct zipcheck_segment *segments; /* by offset; each is written by the one thread that has its chunk */
        size_t segment_count;
};

/* `entries` as zip_read gives them: in the order of the file, none inside another. Frees them also on failure. */
enum nebula_status zipcheck_begin(struct zipcheck *ret_check, struct zip_entry *entries, size_t count,
                                  uint32_t chunk_bytes, struct nebula_error *error);
void zipcheck_chunk(struct zipcheck *check, const void *data, uint64_t offset, uint64_t size);
/* Whether record `index` differs from its CRC-32; all chunks must have passed by. */
bool zipcheck_wrong(const struct zipcheck *check, size_t index);
void zipcheck_done(struct zipcheck *check);

#endif
