/* transfer_private.h - declarations that the files of the transfer module share. Only they include it. */
#ifndef NB_STORE_TRANSFER_PRIVATE_H
#define NB_STORE_TRANSFER_PRIVATE_H

#include "store/record.h"
#include "store/transfer.h"

/* The functions of the caller that a transfer calls. */
struct transfer_pulse {
        /* Between two chunks, on any thread, so that the destination's sweep does not take a long copy for debris. */
        void (*beat)(void *argument);
        /* When all bytes are sent, before the object gets its key. A failure ends the copy. NULL: nothing. */
        enum nebula_status (*ready)(void *argument, struct nebula_error *error);
        void *argument;
};

/* Copies the object `from_key` to `to_key`, which must be free, and compares each chunk. NEBULA_BUSY: the key is taken. */
enum nebula_status transfer_object(const struct transfer *transfer, const char *from_key, const char *to_key, const struct record_file *file,
                                   const struct transfer_pulse *pulse, struct nebula_error *error);

#endif
