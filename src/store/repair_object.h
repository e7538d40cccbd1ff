/*
 * repair_object.h - gives one damaged file or record of a stored version its bytes back. Every byte of the source is compared with the file's own
 * checksums, or with the checksum of the record in the manifest, before anything is written, so it does not matter whose it is.
 *
 * In a directory it writes the damaged chunks into the file, so that other names of the file are repaired, too; a missing file is written as a
 * whole. In an object store it sends the whole object, and then removes the damaged one. If it is interrupted after that, the file is missing, and a
 * later call repairs it.
 *
 * Threads: no shared state.
 */
#ifndef NB_STORE_REPAIR_OBJECT_H
#define NB_STORE_REPAIR_OBJECT_H

#include "store/manifest.h"
#include "store/record.h"
#include "store/store.h"
#include "store/verify.h"

/* Where sound bytes of one file come from. */
struct repair_source {
        struct store *from; /* NULL: in memory */
        const void *data;   /* in memory */
        uint64_t size;      /* of `data` */
        char key[MANIFEST_KEY_MAX];
        const struct verify_watch *watch; /* whose is_over ends the repair between two chunks of a damaged file in a directory; NULL: none */
};

/* Repairs the object `key` of the manifest, and checks it again. NEBULA_INVALID: the source is not the file; NEBULA_BUSY: the tag was written again
 * or removed since the manifest was read. Then nothing was written. NEBULA_UNAVAILABLE: source->watch has ended it;
 * a later call goes on. */
enum nebula_status repair_object(struct store *store, const struct manifest *manifest, const char *key, const struct record_file *file,
                                 const struct repair_source *source, struct nebula_error *error);

/* Whether the text is that of manifest->records[index], byte for byte. */
bool repair_is_record(const struct manifest *manifest, size_t index, const char *text, size_t size);
/* Puts that text in the place of the record. NEBULA_INVALID: it is not that record's; NEBULA_BUSY: as above. Then nothing was written. */
enum nebula_status repair_record(struct store *store, const struct manifest *manifest, size_t index, const char *text, size_t size,
                                 struct nebula_error *error);

#endif
