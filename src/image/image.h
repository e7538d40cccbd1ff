/*
 * image.h - the bytes of a checkpoint file, laid out before they are copied.
 *
 * An image is exactly what torch.load reads: a zip archive of stored records
 * whose payloads are 64-byte aligned. Its layout follows from the pickle and
 * the sizes of the storages alone, so the order of work is
 *
 *      zip_layout_init       sizes in, offsets out; nothing is copied
 *      zip_layout_write      headers, pickle and directory into mapped memory
 *      (the caller copies each storage to zip_layout.storage_offsets[k])
 *      image_seal            fills in the CRC-32 of every record and returns the
 *                            CRC-64 of every chunk, in one pass; a raw file only the latter
 *
 * Until sealed, the CRC fields hold 0; torch.load does not look at them.
 * Record order: data.pkl, byteorder, version, data/0 ... data/N-1; the
 * directory prefix is "archive/"; no .format_version record, no data
 * descriptors; zip64 fields only where a size or offset needs them.
 *
 * Threads: no shared state. Errors: as in error.h.
 */
#ifndef NB_IMAGE_IMAGE_H
#define NB_IMAGE_IMAGE_H

#include <stdbool.h>

#include "nebula.h"

#define IMAGE_ALIGNMENT 64u
#define IMAGE_CHUNK_BYTES (4u << 20) /* one CRC-64 each: a manifest of 1 TiB stays under 5 MB */

struct zip_layout {
        uint64_t size;             /* bytes of the whole image */
        uint64_t *storage_offsets; /* one per storage: where its payload begins */
        size_t storage_count;
        uint64_t pickle_offset;
        struct zip_record *records; /* private to zip_layout.c */
        size_t record_count;
        uint64_t directory_offset;
};

enum nebula_status zip_layout_init(struct zip_layout *layout, size_t pickle_size, const uint64_t *storage_sizes,
                                   size_t storage_count, struct nebula_error *error);
/* Writes everything but the storages into `image` (layout->size bytes). Gaps between records are zeroed too. */
void zip_layout_write(const struct zip_layout *layout, const void *pickle, void *image);
void zip_layout_done(struct zip_layout *layout);

/* The pickle (protocol 2) of a dict {name: tensor}, as torch.save writes it; storage k belongs to tensors[k]. */
enum nebula_status pickle_flat_dict(const struct nebula_tensor *tensors, size_t count, char **ret_pickle,
                                    size_t *ret_size, struct nebula_error *error);
uint64_t pickle_tensor_size(const struct nebula_tensor *tensor); /* bytes of its payload; UINT64_MAX on overflow */

/*
 * Checks `data` (any bytes, hostile ones too) as a zip image: bounds, directory, headers. Entries come in the order in
 * which they lie in the file, do not overlap, and end before the directory; records are stored, not compressed. Files
 * that torch.save wrote are read too. A broken file is NEBULA_CORRUPT, a zip of another kind NEBULA_INVALID. zip_read does not
 * compare CRC-32 fields: the agent writes them into an image while trainers read it. zip_verify does.
 * ret_entries: caller frees.
 */
struct zip_entry {
        char name[256];
        uint64_t header_offset, payload_offset, size;
        uint64_t directory_crc_offset, header_crc_offset; /* where the CRC-32 fields stand */
        uint32_t crc32, header_crc32; /* as the directory has it, and as the record's header has it */
        bool has_descriptor; /* the CRC-32 also stands behind the payload, as torch.save does it */
};
enum nebula_status zip_read(const void *data, uint64_t size, struct zip_entry **ret_entries, size_t *ret_count,
                            struct nebula_error *error);
/* For a file of which only some is there yet. Where its directory begins, from the last ZIP_TAIL_BYTES; and where the header of each
 * record begins, from the directory. Offsets are not compared with the file's size, and are the caller's to free. */
#define ZIP_TAIL_BYTES 4096u
enum nebula_status zip_find_directory(const void *data, uint64_t size, uint64_t *ret_offset, struct nebula_error *error);
enum nebula_status zip_find_headers(const void *data, uint64_t size, uint64_t **ret_offsets, size_t *ret_count,
                                    struct nebula_error *error);
/* Recomputes every record's CRC-32; on mismatch the error names record and offset. */
enum nebula_status zip_verify(const void *data, uint64_t size, struct nebula_error *error);
/*
 * Reads back the dict that pickle_flat_dict wrote (a strict subset of pickle; anything else is NEBULA_INVALID).
 * ret_tensor->name is `name`, ret_tensor->data points into `data`. Each call reads the whole directory: who looks for
 * many tensors makes an index.
 */
enum nebula_status zip_find_tensor(const void *data, uint64_t size, const char *name,
                                   struct nebula_tensor *ret_tensor, struct nebula_error *error);

/* The same for many: all tensors of an image. `data` must stay while the index is used; names belong to the index. */
struct image_index;
enum nebula_status image_index_new(const void *data, uint64_t size, struct image_index **ret_index,
                                   struct nebula_error *error);
/* NEBULA_NOT_FOUND when there is none of that name. */
enum nebula_status image_index_find(const struct image_index *index, const char *name,
                                    struct nebula_tensor *ret_tensor, struct nebula_error *error);
/* In the order of the dict. */
const struct nebula_tensor *image_index_tensors(const struct image_index *index, size_t *ret_count);
void image_index_free(struct image_index *index);

/*
 * What was summed while it was copied, which costs little, since the copy waits for memory: CRC-32 and CRC-64 of some ranges of a
 * file, none across a border of IMAGE_CHUNK_BYTES. The list lies behind the file, in the same image.
 */
struct image_sum {
        uint64_t offset;
        uint32_t size, crc32;
        uint64_t crc64;
};
/* Shorter ranges are summed in the time that it takes to join them to others. */
#define IMAGE_SUM_MIN (64u << 10)
/* A capacity for a file of `size` bytes and its sums: three for each MiB, where tensors are large two for each 4 MiB are needed. */
static inline uint64_t image_size_with_sums(uint64_t size)
{
        return size + size / (1u << 20) * 3 * sizeof(struct image_sum);
}
/* Where the list lies, and for how many there is room in an image of `capacity` bytes. */
static inline uint64_t image_sums_offset(uint64_t size)
{
        return (size + IMAGE_ALIGNMENT - 1) / IMAGE_ALIGNMENT * IMAGE_ALIGNMENT;
}
static inline uint32_t image_sums_room(uint64_t size, uint64_t capacity)
{
        uint64_t offset = image_sums_offset(size);
        uint64_t room = offset < capacity ? (capacity - offset) / sizeof(struct image_sum) : 0;

        return room < UINT32_MAX ? (uint32_t)room : UINT32_MAX;
}
/* One that is being made, in any order: whoever adds to it does so under a lock, or as the only one. What has no room is lost, and
 * summed later. */
struct image_sums {
        struct image_sum *list; /* NULL: nothing is summed */
        uint32_t count, room;
};
/* Of a file of `size` bytes in an image; list is NULL where summing is no part of a copy on this machine. */
struct image_sums image_sums_in(void *image, uint64_t size, uint64_t capacity);
void image_sums_add(struct image_sums *sums, const struct image_sum *sum);
/* By offset, as sealing wants them: from `first` on. */
void image_sums_sort(struct image_sums *sums, uint32_t first);
/* How much of a range of `size` bytes at `offset` one of them may be of. */
static inline uint64_t image_sum_size(uint64_t offset, uint64_t size)
{
        uint64_t left = IMAGE_CHUNK_BYTES - offset % IMAGE_CHUNK_BYTES;

        return size < left ? size : left;
}

/* Seals: is_zip images get their CRC-32 fields filled in place. ret_chunks: caller frees; count = ceil(size / chunk). */
enum nebula_status image_seal(void *data, uint64_t size, bool is_zip, uint32_t chunk_bytes, uint64_t **ret_chunks,
                              size_t *ret_count, struct nebula_error *error);
/*
 * The same for an image that is still being copied, and for who wants its bytes as soon as they are final. What save() lays out,
 * headers and directory, is there as soon as anything is: before that, the image holds what another file left in it.
 */
struct image_flow {
        /* Until the first `size` bytes are there; false ends the sealing with NEBULA_BUSY. NULL: all are. */
        bool (*await)(void *argument, uint64_t size);
        /* Once for each chunk, by its offset; not in order. NULL: nobody wants to know. */
        void (*ready)(void *argument, uint64_t offset);
        void *argument;
        /* By offset: of these bytes nothing is read. More may be added while others are awaited. NULL: there are none. */
        const struct image_sum *sums;
        const _Atomic uint32_t *sum_count;
};
enum nebula_status image_seal_flowing(void *data, uint64_t size, bool is_zip, uint32_t chunk_bytes, const struct image_flow *flow,
                                      uint64_t **ret_chunks, size_t *ret_count, struct nebula_error *error);
/* For who reads an image that another process may be sealing just now: in a copy of its own it fills in the CRC-32s that are
 * not there yet. Those that are there must be right. */
enum nebula_status image_seal_rest(void *data, uint64_t size, struct nebula_error *error);

/* Names: a tag or file name as a path component and back. Percent-encodes '/', '%', control bytes, and the
 * first byte of ".", "..", ".nebula..." and "latest". Refuses empty, invalid UTF-8 and what would exceed 255 bytes encoded. */
enum nebula_status name_encode(const char *name, char ret_text[256], struct nebula_error *error);
enum nebula_status name_decode(const char *text, char ret_name[256], struct nebula_error *error);
/* N of "global_stepN" or of a trailing number ("step12", "checkpoint-12"); -1 when there is none. */
int64_t name_step(const char *tag);
/* Versions of tags global_step<n> come by n; all others by their commits, whatever number they name. */
bool name_follows_step(const char *tag);

#endif
