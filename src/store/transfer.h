/*
 * transfer.h - copies a version from one store to another.
 *
 *      transfer_look      what the destination has of this tag
 *      transfer_version   copies the version, unless the destination has it
 *
 * Each chunk is compared with its checksum before it is sent. The copy is a writing of its own: the destination gets new records and the
 * next entry of the tag's log, which is the commit. Job, run, step, line of history and times do not change. All files count as written
 * by the copy.
 *
 * Restart: the names of the copy's writings follow from the source version and from the number that the copy's entry will have. Claims
 * are made first. A later call finds them, checks the files that exist, and copies the others. A concurrent call shares the work in the
 * same way.
 *
 * Memory: if the source store lends descriptors, the file is mapped. Otherwise the whole file is fetched: into memory if it takes no more
 * than a quarter of the free memory, else into an unnamed file in $TMPDIR or /var/tmp.
 *
 * Threads: `progress` is called from several threads at once.
 */
#ifndef NB_STORE_TRANSFER_H
#define NB_STORE_TRANSFER_H

#include "store/manifest.h"

enum transfer_state {
        TRANSFER_ABSENT,  /* the destination has no version of the tag */
        TRANSFER_PRESENT, /* it has this version: the same names, sizes and checksums */
        TRANSFER_OTHER,   /* it has a different or damaged version */
};

struct transfer {
        struct store *from, *to;
        bool replaces;                                    /* replace another version of the tag */
        void (*progress)(void *argument, uint64_t bytes); /* `bytes` more bytes are at the destination; may be NULL */
        void (*complain)(void *argument, const char *message); /* the version is there, but what it replaces could not be removed; may be NULL */
        void *argument;
};

enum nebula_status transfer_look(const struct transfer *transfer, const struct manifest *source, enum transfer_state *ret_state,
                                 struct nebula_error *error);
/* *ret_state: what the destination had before. NEBULA_BUSY: it has another version, and `replaces` is false. NEBULA_CORRUPT: the source
 * is damaged. */
enum nebula_status transfer_version(const struct transfer *transfer, const struct manifest *source, enum transfer_state *ret_state,
                                    struct nebula_error *error);

#endif
