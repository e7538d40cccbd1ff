#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"

/* Messages become Python strings and JSON, so they must be UTF-8. A cut in the middle of a character, at the end or
 * by a format's precision, breaks that. */
static void make_text(char *text, size_t size)
{
        size_t length = strlen(text);

        if (length == size - 1) {
                while (length > 0 && ((unsigned char)text[length - 1] & 0xc0) == 0x80)
                        length--;
                if (length > 0 && (unsigned char)text[length - 1] >= 0xc0)
                        text[length - 1] = '\0';
        }
        text_make_utf8(text);
}

/* Truncates what does not fit: part of a message with a path of 4,096 bytes is better than no message. */
static void append(char *message, size_t size, const char *text)
{
        size_t used = strlen(message), length = strnlen(text, size - 1 - used);

        memcpy(message + used, text, length);
        message[used + length] = '\0';
}

#undef error_set
enum nebula_status error_set(struct nebula_error *error, enum nebula_status status, int sys_errno,
                             const char *format, ...)
{
        char message[sizeof error->message]; /* a separate buffer: an argument may be the old message */
        va_list arguments;

        if (!error)
                return status;
        va_start(arguments, format);
        vsnprintf(message, sizeof message, format, arguments);
        va_end(arguments);
        if (sys_errno) {
                char buffer[128];

                append(message, sizeof message, ": ");
                append(message, sizeof message, strerror_r(sys_errno, buffer, sizeof buffer));
        }
        make_text(message, sizeof message);
        error->status = status;
        error->sys_errno = sys_errno;
        error->http_status = 0;
        memcpy(error->message, message, sizeof message);
        return status;
}

enum nebula_status error_status_of_errno(int sys_errno)
{
        switch (sys_errno) {
        case ENOSPC:
        case EDQUOT:
                return NEBULA_NO_SPACE;
        case ENOENT:
                return NEBULA_NOT_FOUND;
        case ENOMEM:
                return NEBULA_NO_MEMORY;
        default:
                return NEBULA_STORAGE;
        }
}

void error_suffix(struct nebula_error *error, const char *text)
{
        if (!error)
                return;
        append(error->message, sizeof error->message, text);
        make_text(error->message, sizeof error->message);
}

void error_prefix(struct nebula_error *error, const char *format, ...)
{
        char message[sizeof error->message];
        va_list arguments;

        if (!error)
                return;
        va_start(arguments, format);
        vsnprintf(message, sizeof message, format, arguments);
        va_end(arguments);
        append(message, sizeof message, ": ");
        append(message, sizeof message, error->message);
        make_text(message, sizeof message);
        memcpy(error->message, message, sizeof message);
}
