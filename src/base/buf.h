/*
 * buf.h - bytes that grow.
 *
 * Start with a zeroed struct, add to it, and check `failed` once at the end:
 * after an allocation fails, all further additions do nothing. buf_take hands
 * the bytes to the caller.
 *
 * Bytes of a secret: set is_secret before the first addition. Memory that the
 * struct gives back, also when it grows, is overwritten first.
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
        bool failed;    /* an allocation failed */
        bool is_secret;
};

void buf_add(struct buf *buf, const void *data, size_t size);
void buf_add_text(struct buf *buf, const char *text); /* without its NUL */
void buf_add_byte(struct buf *buf, uint8_t byte);
/* Adds the low `size` bytes of `value`, least significant byte first. */
void buf_add_le(struct buf *buf, uint64_t value, size_t size);
/* Returns the bytes, which the caller frees, and empties the struct. A NUL follows the bytes; *ret_size does not
 * count it. NULL if an allocation failed. */
char *buf_take(struct buf *buf, size_t *ret_size);
void buf_done(struct buf *buf);

#endif
