/* Reads hostile bytes as a survival log: once as the whole file, and once as the body of a record with a correct head and checksum. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "agent/memory/memory.h"
#include "agent/memory/survival_record.h"
#include "agent/rooms.h"
#include "sum/sum.h"

#define HEAD_BYTES 32u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_note(const void *data, size_t size)
{
        static struct memory memory;
        struct catalogue catalogue;

        memset(&memory, 0, sizeof memory);
        catalogue_init(&catalogue, agent_rooms, &memory);
        strcpy(memory.directory, "/nowhere"); /* where no image is found */
        if (!survival_record_read(&catalogue, 1, data, size, NULL)) {
                size_t again_size;
                void *again = survival_record_format(catalogue.jobs->versions, 0, &again_size);

                /* A log that is read and written again has the same content, except loans and images, which this test cannot adopt. */
                if (!again || catalogue.jobs->versions->loans)
                        abort();
                free(again);
        }
        catalogue_done(&catalogue);
}

/* A sound record of this body at `record`; its files are said to begin at `files_at`. */
static size_t make_record(char *record, const uint8_t *body, size_t size, uint64_t first_file, uint64_t files_at)
{
        const uint32_t magic = 0x544f4e4e, version = 5;
        uint64_t whole = HEAD_BYTES + size + 8, crc;

        memcpy(record, &magic, 4);
        memcpy(record + 4, &version, 4);
        memcpy(record + 8, &whole, 8);
        memcpy(record + 16, &first_file, 8);
        memcpy(record + 24, &files_at, 8);
        if (size)
                memcpy(record + HEAD_BYTES, body, size);
        crc = sum_crc64(0, record, HEAD_BYTES + size);
        memcpy(record + HEAD_BYTES + size, &crc, 8);
        return whole;
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
        char *records = malloc(2 * (HEAD_BYTES + size + 8));
        size_t first;

        read_note(input, size);
        if (!records)
                return 0;
        first = make_record(records, input, size, 0, HEAD_BYTES + size / 2);
        read_note(records, first);
        read_note(records, first + make_record(records + first, input, size, size % 3, HEAD_BYTES));
        free(records);
        return 0;
}
