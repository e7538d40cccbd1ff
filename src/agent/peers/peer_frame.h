/*
 * peer_frame.h - the frames between two agents, as bytes.
 *
 * A TLS stream carries frames: a header of 32 bytes, little-endian, then `size`
 * bytes. The first frame of each direction has number 1, the next 2, and so on.
 * So a frame that was left out, came twice or belongs to another connection is
 * noticed. The body of DATA is a head of 32 bytes and the bytes of one piece of
 * a file. All other bodies are documents (store/document.h) of kind "peer".
 *
 *      offset 0   magic u32   4 version u16   6 type u16    8 number u64
 *            16   size u32   20 zero u32     24 crc64 u64: of the body; of DATA, of its head
 *
 * The agent that connects sends requests, and the other end answers:
 *
 *      HELLO   the sender's node, and the job           -> HELLO   the other end's node
 *      OFFER   a version and its files                  -> ANSWER  memory is reserved for it, or not
 *      DATA    a piece of one of the files              -> nothing: the answer to SEAL reports a damaged piece
 *      SEAL    all pieces were sent                     -> ANSWER  the copy is complete and correct, or not
 *      KEEP    the versions that the sender still has   -> ANSWER  the others were dropped
 *      LIST    (empty)                                  -> LISTED  the copies of this job, and the server's own versions of it
 *      FETCH   a piece of a file of a copy              -> DATA, or ANSWER with the reason
 *      PART    a chunk of a file in storage             -> DATA, or ANSWER with the reason
 *
 * Received bytes are hostile until they were checked. Threads: no shared state.
 */
#ifndef NB_AGENT_PEERS_PEER_FRAME_H
#define NB_AGENT_PEERS_PEER_FRAME_H

#include <jansson.h>
#include <stdbool.h>

#include "ipc/ipc.h"
#include "nebula.h"
#include "store/line.h"

#define PEER_MAGIC 0x5042454eu /* "NEBP" */
#define PEER_VERSION 1u
#define PEER_HEADER_BYTES 32u
#define PEER_HEAD_BYTES 32u          /* of DATA */
#define PEER_PIECE_BYTES (4u << 20)  /* of a file; all pieces but the last have this size */
#define PEER_TEXT_MAX (8u << 20)     /* 16,384 files with long names */
#define PEER_FILE_MAX 65536u         /* of one copy */
#define PEER_COPY_MAX 1024u          /* in one listing */

enum peer_type { PEER_HELLO = 1, PEER_OFFER, PEER_DATA, PEER_SEAL, PEER_KEEP, PEER_LIST, PEER_LISTED, PEER_FETCH, PEER_ANSWER, PEER_PART };

struct peer_header {
        enum peer_type type;
        uint64_t number, crc64;
        uint32_t size;
};
void peer_header_write(const struct peer_header *header, uint8_t ret_bytes[PEER_HEADER_BYTES]);
/* NEBULA_CORRUPT: no frame, another version, a wrong number, or a size that its type cannot have. */
enum nebula_status peer_header_read(const uint8_t bytes[PEER_HEADER_BYTES], uint64_t expected_number, struct peer_header *ret_header,
                                    struct nebula_error *error);

/* The head of DATA. */
struct peer_data {
        uint64_t copy, offset, crc64; /* crc64: of the piece */
        uint32_t file;                /* its index in the copy */
};
void peer_data_write(const struct peer_data *data, uint8_t ret_bytes[PEER_HEAD_BYTES]);
void peer_data_read(const uint8_t bytes[PEER_HEAD_BYTES], struct peer_data *ret_data);

struct peer_hello {
        char node[IPC_NAME_MAX], job[IPC_NAME_MAX], path[IPC_PATH_MAX];
        uint64_t nonce;
        bool is_reader; /* of all jobs of the path; it sends LIST and FETCH alone */
};
struct peer_file {
        char name[IPC_NAME_MAX];
        uint64_t size, origin; /* origin: the sequence of the earlier version that wrote it; 0: this version */
        uint32_t rank;
        enum ipc_format format;
        bool held; /* false: an earlier version wrote the file, and only storage has it */
};
/* One node's share of a version. `id` is the owner's in OFFER, SEAL and KEEP, the server's in LISTED and FETCH. */
struct peer_copy {
        uint64_t id, writing, sequence;
        struct line line;
        char owner[IPC_NAME_MAX], tag[IPC_NAME_MAX], run[IPC_NAME_MAX];
        uint32_t world;
        struct peer_file *files;
        uint32_t *ranks; /* those that have a part in it, also without a file */
        size_t file_count, rank_count;
};
struct peer_listing {
        struct peer_copy *copies;
        size_t count;
};
struct peer_keep {
        uint64_t *ids;
        size_t count;
};
struct peer_fetch {
        uint64_t copy, offset;
        uint32_t file;
};
/* A chunk of a stored file, which the other end reads from storage if it has not done so. */
struct peer_part {
        char tag[IPC_NAME_MAX], name[IPC_NAME_MAX];
        uint64_t sequence, origin; /* of the version, and of the one that wrote the file */
        uint32_t chunk;
};
struct peer_answer {
        enum nebula_status status;
        char message[IPC_TEXT_MAX];
};

/* Bodies as text (free it), and back. The _done functions are fine on zeroed structs. */
enum nebula_status peer_hello_format(const struct peer_hello *hello, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status peer_hello_parse(const char *text, size_t size, struct peer_hello *ret_hello, struct nebula_error *error);
enum nebula_status peer_copy_format(const struct peer_copy *copy, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status peer_copy_parse(const char *text, size_t size, struct peer_copy *ret_copy, struct nebula_error *error);
/* Copies the lists of `from`, whose other members `to` has already. */
enum nebula_status peer_copy_lists(const struct peer_copy *from, struct peer_copy *to, struct nebula_error *error);
void peer_copy_done(struct peer_copy *copy);
/* As many of the copies, the first ones first, as a frame has room for. */
enum nebula_status peer_listing_format(const struct peer_listing *listing, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status peer_listing_parse(const char *text, size_t size, struct peer_listing *ret_listing, struct nebula_error *error);
void peer_listing_done(struct peer_listing *listing);
/* SEAL too: its one id. */
enum nebula_status peer_keep_format(const struct peer_keep *keep, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status peer_keep_parse(const char *text, size_t size, struct peer_keep *ret_keep, struct nebula_error *error);
void peer_keep_done(struct peer_keep *keep);
enum nebula_status peer_fetch_format(const struct peer_fetch *fetch, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status peer_fetch_parse(const char *text, size_t size, struct peer_fetch *ret_fetch, struct nebula_error *error);
enum nebula_status peer_part_format(const struct peer_part *part, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status peer_part_parse(const char *text, size_t size, struct peer_part *ret_part, struct nebula_error *error);
enum nebula_status peer_answer_format(const struct peer_answer *answer, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status peer_answer_parse(const char *text, size_t size, struct peer_answer *ret_answer, struct nebula_error *error);

#endif
