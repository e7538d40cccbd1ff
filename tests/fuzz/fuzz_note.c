/* A note in the memory directory: the file as it is, and its bytes as the body of a record that is sound. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "agent/note_record.h"
#include "sum/sum.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_note(const void *data, size_t size)
{
        struct catalogue catalogue;

        catalogue_init(&catalogue);
        strcpy(catalogue.memory.directory, "/nowhere"); /* where no image is found */
        if (!note_record_read(&catalogue, 1, data, size, NULL)) {
                size_t again_size;
                void *again = note_record_format(catalogue.jobs->versions, &again_size);

                /* What was read is what is written, but for grants and images, which cannot have been taken over. */
                if (!again || catalogue.jobs->versions->grants)
                        abort();
                free(again);
        }
        catalogue_done(&catalogue);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
        const uint32_t magic = 0x544f4e4e, version = 1;
        uint64_t whole = 16 + size + 8, crc;
        char *record = malloc(whole);

        read_note(input, size);
        if (!record)
                return 0;
        memcpy(record, &magic, 4);
        memcpy(record + 4, &version, 4);
        memcpy(record + 8, &whole, 8);
        if (size)
                memcpy(record + 16, input, size);
        crc = sum_crc64(0, record, 16 + size);
        memcpy(record + 16 + size, &crc, 8);
        read_note(record, whole);
        free(record);
        return 0;
}
