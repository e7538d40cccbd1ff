/* Reads hostile bytes as the decrypted data of another agent: a stream of frames, whose bodies go to the reader of
 * their type, and the record of a node. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "agent/peers/member.h"
#include "agent/peers/peer_frame.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_body(enum peer_type type, const char *text, size_t size)
{
        struct peer_listing listing;
        struct peer_answer answer;
        struct peer_fetch fetch;
        struct peer_part part;
        struct peer_hello hello;
        struct peer_copy copy;
        struct peer_keep keep;
        struct peer_data data;

        switch (type) {
        case PEER_HELLO:
                peer_hello_parse(text, size, &hello, NULL);
                break;
        case PEER_OFFER:
                if (!peer_copy_parse(text, size, &copy, NULL)) {
                        char *again;
                        size_t again_size;

                        if (copy.file_count > PEER_FILE_MAX)
                                abort();
                        if (!peer_copy_format(&copy, &again, &again_size, NULL))
                                free(again);
                        peer_copy_done(&copy);
                }
                break;
        case PEER_SEAL:
        case PEER_KEEP:
                if (!peer_keep_parse(text, size, &keep, NULL))
                        peer_keep_done(&keep);
                break;
        case PEER_LISTED:
                if (!peer_listing_parse(text, size, &listing, NULL)) {
                        if (listing.count > PEER_COPY_MAX)
                                abort();
                        peer_listing_done(&listing);
                }
                break;
        case PEER_FETCH:
                peer_fetch_parse(text, size, &fetch, NULL);
                break;
        case PEER_PART:
                peer_part_parse(text, size, &part, NULL);
                break;
        case PEER_ANSWER:
                peer_answer_parse(text, size, &answer, NULL);
                break;
        case PEER_DATA:
                if (size < PEER_HEAD_BYTES)
                        abort(); /* the header's check lets no such frame pass */
                peer_data_read((const uint8_t *)text, &data);
                break;
        case PEER_LIST:
                break;
        }
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
        struct peer_header header;
        struct member member;
        char text[300];
        uint64_t number = 1;
        size_t length = size < sizeof text - 1 ? size : sizeof text - 1;

        memcpy(text, input, length);
        text[length] = 0;
        member_parse("fuzz", text, &member, NULL);
        member_read((const char *)input, size, &member, NULL);
        while (size >= PEER_HEADER_BYTES && !peer_header_read(input, number++, &header, NULL)) {
                char *body;

                input += PEER_HEADER_BYTES;
                size -= PEER_HEADER_BYTES;
                if (header.size > size)
                        break;
                body = malloc(header.size + 1u); /* of its own, so that a read beyond it is seen */
                if (!body)
                        break;
                memcpy(body, input, header.size);
                body[header.size] = 0;
                read_body(header.type, body, header.size);
                free(body);
                input += header.size;
                size -= header.size;
        }
        return 0;
}
