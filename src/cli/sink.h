/*
 * sink.h - a file that appears under its name only when it is whole: a
 * temporary file beside it, written in any order, then synced and given its name.
 *
 * Threads: sink_write from several at once; its failure shows in sink_finish.
 */
#ifndef NB_CLI_SINK_H
#define NB_CLI_SINK_H

#include <stdatomic.h>
#include <stdbool.h>

#include "nebula.h"

struct sink {
        int fd;
        _Atomic int result; /* the first failed write: negative errno */
        char path[4608], temporary[4608];
};

enum nebula_status sink_begin(struct sink *sink, const char *directory, const char *name, uint64_t size,
                              struct nebula_error *error);
void sink_write(struct sink *sink, const void *data, uint64_t offset, uint64_t size);
/* NEBULA_BUSY: there is a file of that name, and it is not to be replaced. */
enum nebula_status sink_finish(struct sink *sink, bool replaces, struct nebula_error *error);
void sink_abandon(struct sink *sink);

#endif
