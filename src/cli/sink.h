/*
 * sink.h - an output file that appears under its name only when it is complete.
 * It is a temporary file beside the name, written in any order, then synced. It
 * gets its name when all files of the same set are complete.
 *
 * Threads: several threads may call sink_write; a failed write is reported by
 * sink_sync.
 */
#ifndef NB_CLI_SINK_H
#define NB_CLI_SINK_H

#include <stdatomic.h>
#include <stdbool.h>

#include "nebula.h"

struct sink {
        int fd; /* -1: no more writes */
        _Atomic int result; /* negative errno of the first failed write */
        char path[4608], temporary[4608];
};

enum nebula_status sink_begin(struct sink *sink, const char *directory, const char *name, uint64_t size,
                              struct nebula_error *error);
void sink_write(struct sink *sink, const void *data, uint64_t offset, uint64_t size);
/* After sink_sync, also after a failed one, call sink_place or sink_abandon. */
enum nebula_status sink_sync(struct sink *sink, struct nebula_error *error);
/* NEBULA_BUSY: a file of that name exists and may not be replaced. */
enum nebula_status sink_place(struct sink *sink, bool replaces, struct nebula_error *error);
void sink_abandon(struct sink *sink);

#endif
