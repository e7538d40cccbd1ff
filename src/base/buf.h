/*
 * buf.h - bytes that grow.
 *
 * Start with a zeroed struct, add, and look at `failed` once at the end: after
 * memory ran out, further additions do nothing. buf_take hands the bytes over.
 *
 * Threads: none of its own.
 */
#ifndef NB_BASE_BUF_H
#define NB_BASE_BUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct buf {
        char *data;
        size_t size, capacity;
        bool failed; /* no memory */
};

void buf_add(struct buf *buf, const void *data, size_t size);
void buf_add_text(struct buf *buf, const char *text); /* without its NUL */
void buf_add_byte(struct buf *buf, uint8_t byte);
/* The low `size` bytes of value, least significant first. */
void buf_add_le(struct buf *buf, uint64_t value, size_t size);
/* The bytes, with a NUL that *ret_size does not count; NULL when memory ran out. Leaves the struct zeroed. */
char *buf_take(struct buf *buf, size_t *ret_size);
void buf_done(struct buf *buf);

#endif
