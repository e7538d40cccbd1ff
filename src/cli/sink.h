/*
 * sink.h - a file that appears under its name only when it is whole: a
 * temporary file beside it, written in any order, then synced, and given its name
 * when those are whole too that it belongs with.
 *
 * Threads: sink_write from several at once; its failure shows in sink_sync.
 */
#ifndef NB_CLI_SINK_H
#define NB_CLI_SINK_H

#include <stdatomic.h>
#include <stdbool.h>

#include "nebula.h"

struct sink {
        int fd; /* -1: nothing more is written */
        _Atomic int result; /* the first failed write: negative errno */
        char path[4608], temporary[4608];
};

enum nebula_status sink_begin(struct sink *sink, const char *directory, const char *name, uint64_t size,
                              struct nebula_error *error);
void sink_write(struct sink *sink, const void *data, uint64_t offset, uint64_t size);
/* After it, and whatever came of it, the sink is to be placed or abandoned. */
enum nebula_status sink_sync(struct sink *sink, struct nebula_error *error);
/* NEBULA_BUSY: there is a file of that name, and it is not to be replaced. */
enum nebula_status sink_place(struct sink *sink, bool replaces, struct nebula_error *error);
void sink_abandon(struct sink *sink);

#endif
