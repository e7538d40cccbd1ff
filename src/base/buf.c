#include "base/buf.h"

#include <stdlib.h>
#include <string.h>

static void forget(struct buf *buf)
{
        if (buf->is_secret && buf->data)
                explicit_bzero(buf->data, buf->capacity);
        free(buf->data);
}

/* A larger block with the same bytes. NULL: no memory; the old one is still there. */
static char *move_secret(struct buf *buf, size_t capacity)
{
        char *data = malloc(capacity);

        if (!data)
                return NULL;
        if (buf->size)
                memcpy(data, buf->data, buf->size);
        forget(buf);
        return data;
}

/* Makes room for `size` more bytes and a closing NUL. */
static bool grow(struct buf *buf, size_t size)
{
        size_t needed, capacity = buf->capacity ? buf->capacity : 256;
        char *data;

        if (buf->failed || __builtin_add_overflow(buf->size, size, &needed) || needed > PTRDIFF_MAX / 2) {
                buf->failed = true;
                return false;
        }
        if (needed < buf->capacity)
                return true;
        while (capacity <= needed)
                capacity *= 2;
        data = buf->is_secret ? move_secret(buf, capacity) : realloc(buf->data, capacity);
        if (!data) {
                buf->failed = true;
                return false;
        }
        buf->data = data;
        buf->capacity = capacity;
        return true;
}

void buf_add(struct buf *buf, const void *data, size_t size)
{
        if (!grow(buf, size))
                return;
        if (size) /* data may be NULL if size is 0 */
                memcpy(buf->data + buf->size, data, size);
        buf->size += size;
}

void buf_add_text(struct buf *buf, const char *text)
{
        buf_add(buf, text, strlen(text));
}

void buf_add_byte(struct buf *buf, uint8_t byte)
{
        buf_add(buf, &byte, 1);
}

void buf_add_le(struct buf *buf, uint64_t value, size_t size)
{
        uint8_t bytes[8];

        for (size_t k = 0; k < sizeof bytes; k++)
                bytes[k] = (uint8_t)(value >> (8 * k));
        buf_add(buf, bytes, size < sizeof bytes ? size : sizeof bytes);
}

char *buf_take(struct buf *buf, size_t *ret_size)
{
        char *data;

        if (!grow(buf, 0)) {
                buf_done(buf);
                return NULL;
        }
        data = buf->data;
        data[buf->size] = '\0';
        *ret_size = buf->size;
        *buf = (struct buf){ .is_secret = buf->is_secret };
        return data;
}

void buf_done(struct buf *buf)
{
        forget(buf);
        *buf = (struct buf){ .is_secret = buf->is_secret };
}
