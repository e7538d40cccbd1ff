/*
 * output_file.h - an output file that appears under its name only when it is complete.
 * It is a temporary file beside the name, written in any order, then synced. It
 * gets its name when all files of the same set are complete.
 *
 * Threads: several threads may call output_file_write; a failed write is reported by
 * output_file_sync.
 */
#ifndef NB_CLI_OUTPUT_FILE_H
#define NB_CLI_OUTPUT_FILE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "nebula.h"

struct output_file {
        int fd; /* -1: no more writes */
        _Atomic int result; /* negative errno of the first failed write */
        char path[4608], temporary[4608];
};

enum nebula_status output_file_begin(struct output_file *output, const char *directory, const char *name, uint64_t size,
                                     struct nebula_error *error);
void output_file_write(struct output_file *output, const void *data, uint64_t offset, uint64_t size);
/* After output_file_sync, also after a failed one, call output_file_place or output_file_abandon. */
enum nebula_status output_file_sync(struct output_file *output, struct nebula_error *error);
/* NEBULA_BUSY: a file of that name exists and may not be replaced. */
enum nebula_status output_file_place(struct output_file *output, bool replaces, struct nebula_error *error);
void output_file_abandon(struct output_file *output);

#endif
