/*
 * zipcheck.h - computes the CRC-32 of every record of a zip image from its chunks, which may
 * come in any order on several threads.
 *
 *     zipcheck_begin(&check, entries, count, chunk_bytes)   takes over the entries of zip_read
 *     zipcheck_chunk(&check, data, offset, size)      for every chunk, on any thread
 *     zipcheck_wrong(&check, i)                       after all chunks
 *     zipcheck_done(&check)
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
        struct zipcheck_segment *segments; /* sorted by offset; the thread that has the chunk writes it */
        size_t segment_count;
};

/* `entries` as zip_read returns them: in the order of the file, without overlaps. Frees them on failure too. */
enum nebula_status zipcheck_begin(struct zipcheck *ret_check, struct zip_entry *entries, size_t count,
                                  uint32_t chunk_bytes, struct nebula_error *error);
void zipcheck_chunk(struct zipcheck *check, const void *data, uint64_t offset, uint64_t size);
/* Whether record `index` differs from its CRC-32. Call it after all chunks. */
bool zipcheck_wrong(const struct zipcheck *check, size_t index);
void zipcheck_done(struct zipcheck *check);

#endif
