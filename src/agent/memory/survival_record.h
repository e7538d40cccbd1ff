/*
 * survival_record.h - one version as a record of its survival log.
 *
 * Only the next agent on the same machine reads a survival log. Records are made several
 * times per saved file, with the catalogue's lock held, so they must be fast to make.
 *
 * Each change appends one record. When the file has 64 KiB and twice its first record, a new
 * file takes its place by a rename. The last whole record counts. A record names only files that
 * the records before it have not named, back to the last record whose first file is 0. It
 * repeats everything else. Numbers are as they lie in memory. Texts are their length (u32) and
 * bytes. Lines of history are their number (u32) and pairs of u64 and i64. A record has:
 *   - magic NNOT u32, version u32 (5), size u64: the size is that of the whole record, with magic and checksum
 *   - first file, files at u64: how many files the records before it name; the offset of its own files
 *   - storage path, name, output directory, run: texts; interval f64; retention u32; the number of rules for
 *     versions in storage u32, and the rule if there is one: keep_last u32; keep_every u64; the number of
 *     keep_best u32; the largest is the best u8; its metric: text; world, local_world u32; storage path as the
 *     trainer spelled it: text (the first one is a URL with its SAS if it has one: the file is readable by its
 *     user alone); newest run: text; its begin: u64; umask, group u32; bytes of the path up to the mount point
 *     on which the directory lies u32, or 0: the job; its storage path has no links in it
 *   - tag, run: texts; sequence u64; goal i64; writing, announced u64; its line; time at which its
 *     ranks read a file of an older version u64, the step i64 and line of that version; base u64; carries from
 *     u64; time of the state f64; world u32; state u8; flags u8: base: the sequence of the writing in storage
 *     that it may replace; carries from: the id of the version whose files it takes over once storage is
 *     read, or 0; flags: 1 ranks on other nodes, 2 a client waits for durability; the tier from which its ranks
 *     had read (the column read_tier of the history): 4 memory, 8 a peer, 12 storage, 0 not known
 *   - count u32; each: rank, pid, files u32; nonce u64; flags u8; begun, captured f64: ranks; flags: 1 closed, 2
 *     closed before it had begun
 *   - count u32; each: name; rank u32; format u8; size, origin, image u64: files; format: plus 128 if
 *     storage is known to have that writing; image 0: storage alone has it
 *   - count u32; each: the same, and nonce u64: images that are being filled
 *   - attempt u32; count u32; each: key, text: only if there are any: uploads that were begun and not ended, the
 *     number of their try, and the text by which the store finds each
 *   - CRC-64/NVME u64 of all bytes before it
 */
#ifndef NB_AGENT_MEMORY_SURVIVAL_RECORD_H
#define NB_AGENT_MEMORY_SURVIVAL_RECORD_H

#include "agent/catalogue/catalogue.h"

/* Returns bytes that the caller frees; NULL: an allocation failed. Files before first_file are left out, because
 * earlier records hold them. */
void *survival_record_format(const struct version *version, size_t first_file, size_t *ret_size);
/* Adds the version `id` that `data` describes to the catalogue and adopts its images. On failure it may have added
 * only the job, and images without users. NEBULA_CORRUPT: the log can never be used. */
enum nebula_status survival_record_read(struct catalogue *catalogue, uint64_t id, const void *data, size_t size,
                                    struct nebula_error *error);

#endif
