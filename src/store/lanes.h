/*
 * lanes.h - runs the pieces of one job on several threads: blocks to send, ranges to read, objects to remove.
 *
 *      status = lanes_run(count, http_width(), send_block, &job, error);
 *
 * Each thread takes the next index until all are taken. The first failure is the result; it sets `stop`, which the running pieces pass to
 * their requests (http_request.stop).
 *
 * The caller's thread works, too, and the others end before lanes_run returns. If threads cannot be started, fewer do the work.
 */
#ifndef NB_STORE_LANES_H
#define NB_STORE_LANES_H

#include <stdatomic.h>
#include <stddef.h>

#include "nebula.h"

#define LANES_MAX 64u

typedef enum nebula_status lanes_piece(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *error);

enum nebula_status lanes_run(size_t count, uint32_t width, lanes_piece *piece, void *argument, struct nebula_error *error);

#endif
