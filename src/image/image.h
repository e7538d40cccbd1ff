/*
 * image.h - lays out the bytes of a checkpoint file before they are copied.
 *
 * An image is exactly the file that torch.load reads: a zip archive of stored
 * (uncompressed) records whose payloads are 64-byte aligned. Its layout follows from the
 * size of the pickle and the sizes of the storages alone. So the order of work is
 *
 *     zip_layout_init       sizes in, offsets out; copies nothing
 *     zip_layout_write      headers, pickle and directory into mapped memory
 *     (the caller copies each storage to zip_layout.storage_offsets[k])
 *     image_seal            fills in the CRC-32 of every record and returns the CRC-64
 *                           of every chunk, in one pass; for a raw file only the CRC-64
 *
 * Until an image is sealed, its CRC fields hold 0; torch.load does not read them. Record
 * order: data.pkl, byteorder, version, data/0 ... data/N-1. The directory prefix is
 * "archive/". There is no .format_version record and no data descriptor. zip64 fields exist
 * only where a size or offset needs them.
 *
 * Threads: no shared state. Errors: as in error.h.
 */
#ifndef NB_IMAGE_IMAGE_H
#define NB_IMAGE_IMAGE_H

#include <stdbool.h>

#include "nebula.h"

#define IMAGE_ALIGNMENT 64u
#define IMAGE_CHUNK_BYTES (4u << 20) /* each chunk has a CRC-64; a manifest of 1 TiB stays under 5 MB */

struct zip_layout {
        uint64_t size;             /* bytes of the whole image */
        uint64_t *storage_offsets; /* one per storage: the start of its payload */
        size_t storage_count;
        uint64_t pickle_offset;
        struct zip_record *records; /* private to zip_layout.c */
        size_t record_count;
        uint64_t directory_offset;
};

enum nebula_status zip_layout_init(struct zip_layout *layout, size_t pickle_size, const uint64_t *storage_sizes,
                                   size_t storage_count, struct nebula_error *error);
/* Writes all of `image` (layout->size bytes) except the storages. Zeroes the gaps between records too. */
void zip_layout_write(const struct zip_layout *layout, const void *pickle, void *image);
void zip_layout_done(struct zip_layout *layout);

/* The pickle (protocol 2) of a dict {name: tensor}, as torch.save writes it. Storage k belongs to tensors[k]. */
enum nebula_status pickle_flat_dict(const struct nebula_tensor *tensors, size_t count, char **ret_pickle,
                                    size_t *ret_size, struct nebula_error *error);
uint64_t pickle_tensor_size(const struct nebula_tensor *tensor); /* bytes of its payload; UINT64_MAX if they overflow */

/*
 * Checks `data`, which may be hostile, as a zip image: bounds, directory, headers. Returns the entries in the order of the
 * file. They do not overlap, end before the directory, and are stored, not compressed. Files that torch.save wrote are
 * accepted too. A broken file is NEBULA_CORRUPT; a zip of another kind is NEBULA_INVALID. zip_read does not compare CRC-32
 * fields, because the agent writes them into an image while trainers read it; zip_verify does. The caller frees
 * ret_entries.
 */
struct zip_entry {
        char name[256];
        uint64_t header_offset, payload_offset, size;
        uint64_t directory_crc_offset, header_crc_offset; /* offsets of the CRC-32 fields */
        uint32_t crc32, header_crc32; /* the values in the directory and in the record's header */
        bool has_descriptor; /* the CRC-32 also follows the payload, as torch.save writes it */
};
enum nebula_status zip_read(const void *data, uint64_t size, struct zip_entry **ret_entries, size_t *ret_count,
                            struct nebula_error *error);
/* Where the last archive begins in a file of several, one after the other, as torch's DCP writes them. False: no archive ends there. */
bool zip_find_last(const void *data, uint64_t size, uint64_t *ret_begin);
/* zip_read for a file of which only the directory is there: finds the places of the records without their headers. It works for files that
 * zip_layout_init has laid out: header_crc32 and header_crc_offset are 0. NEBULA_INVALID: another writer has made the file, so zip_read must
 * read its headers. */
enum nebula_status zip_read_directory(const void *data, uint64_t size, struct zip_entry **ret_entries, size_t *ret_count,
                                      struct nebula_error *error);
/* For a file that is not complete yet. zip_find_directory finds the start of the directory in the last
 * ZIP_TAIL_BYTES. zip_find_headers finds the header of each record in the directory. Neither compares offsets with
 * the file's size. The caller frees the offsets. */
#define ZIP_TAIL_BYTES 4096u
enum nebula_status zip_find_directory(const void *data, uint64_t size, uint64_t *ret_offset, struct nebula_error *error);
enum nebula_status zip_find_headers(const void *data, uint64_t size, uint64_t **ret_offsets, size_t *ret_count,
                                    struct nebula_error *error);
/* Recomputes every record's CRC-32. If one differs, the error names the record and the offset. */
enum nebula_status zip_verify(const void *data, uint64_t size, struct nebula_error *error);
/*
 * The CRC-32 and CRC-64 of ranges that were summed while they were copied. That costs little, because the copy waits for
 * memory. No range crosses a border of IMAGE_CHUNK_BYTES. The list of sums lies after the file, in the same image.
 */
struct image_sum {
        uint64_t offset;
        uint32_t size, crc32;
        uint64_t crc64;
};
/* For a shorter range, joining its sum to others takes longer than summing it again. */
#define IMAGE_SUM_MIN (64u << 10)
/* The capacity for a file of `size` bytes and its sums: three sums per MiB. Files of large tensors need two per 4 MiB. */
static inline uint64_t image_size_with_sums(uint64_t size)
{
        return size + size / (1u << 20) * 3 * sizeof(struct image_sum);
}
/* Where the list of sums begins, and how many sums fit into an image of `capacity` bytes. */
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
/* A list of sums that is being made, in any order. Add to it under a lock or from one thread only. Sums that do not
 * fit are dropped; sealing sums those ranges itself. */
struct image_sums {
        struct image_sum *list; /* NULL: the copy does not sum */
        uint32_t count, room;
};
/* The empty list of a file of `size` bytes in an image. `list` is NULL if copies on this machine have no time for sums. */
struct image_sums image_sums_in(void *image, uint64_t size, uint64_t capacity);
void image_sums_add(struct image_sums *sums, const struct image_sum *sum);
/* Sorts the sums from index `first` on by offset, as sealing needs them. */
void image_sums_sort(struct image_sums *sums, uint32_t first);
/* How many of the `size` bytes at `offset` one sum may cover. */
static inline uint64_t image_sum_size(uint64_t offset, uint64_t size)
{
        uint64_t left = IMAGE_CHUNK_BYTES - offset % IMAGE_CHUNK_BYTES;

        return size < left ? size : left;
}

/* Seals an image: fills in the CRC-32 fields of a zip, and returns the CRC-64 of each chunk, ceil(size / chunk) of
 * them. The caller frees ret_chunks. */
enum nebula_status image_seal(void *data, uint64_t size, bool is_zip, uint32_t chunk_bytes, uint64_t **ret_chunks,
                              size_t *ret_count, struct nebula_error *error);
/*
 * Seals an image that is still being copied, and reports chunks as soon as they are final. save() writes headers and
 * directory before the first byte counts as copied. Before that, the image holds another file's bytes.
 */
struct image_flow {
        /* Waits until the first `size` bytes are there. False ends the sealing with NEBULA_BUSY. NULL: all bytes are there. */
        bool (*await)(void *argument, uint64_t size);
        /* Called once for each final chunk with its offset and checksum, in any order. NULL: no call. */
        void (*ready)(void *argument, uint64_t offset, uint64_t crc64);
        void *argument;
        /* Known sums, sorted by offset: their bytes are not read. More may be added during `await`. NULL: none. */
        const struct image_sum *sums;
        const _Atomic uint32_t *sum_count;
};
enum nebula_status image_seal_flowing(void *data, uint64_t size, bool is_zip, uint32_t chunk_bytes, const struct image_flow *flow,
                                      uint64_t **ret_chunks, size_t *ret_count, struct nebula_error *error);
/* For a reader of an image that another process may be sealing. Fills in missing CRC-32 fields in a private copy.
 * Fields that are not zero must be right. */
enum nebula_status image_seal_rest(void *data, uint64_t size, struct nebula_error *error);

/* Converts a tag or file name to a path component and back. Percent-encodes '/', '%', control bytes, and the first
 * byte of ".", "..", ".nebula..." and "latest". Refuses an empty name, invalid UTF-8, and a name of more than 255
 * bytes when encoded. */
enum nebula_status name_encode(const char *name, char ret_text[256], struct nebula_error *error);
enum nebula_status name_decode(const char *text, char ret_name[256], struct nebula_error *error);
/* N of "global_stepN", or the number at the end ("step12", "checkpoint-12"); -1 if there is none. */
int64_t name_step(const char *tag);
/* True for tags global_step<n>, whose versions are ordered by n. All other versions are ordered by their commits,
 * even if their tag contains a number. */
bool name_follows_step(const char *tag);

#endif
