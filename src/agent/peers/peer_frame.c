#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/catalogue.h"
#include "agent/peers/peer_frame.h"
#include "base/error.h"
#include "store/document.h"
#include "store/line_document.h"

#define KIND "peer"

static void put(uint8_t *to, uint64_t value, size_t size)
{
        for (size_t i = 0; i < size; i++)
                to[i] = (uint8_t)(value >> 8 * i);
}

static uint64_t get(const uint8_t *from, size_t size)
{
        uint64_t value = 0;

        for (size_t i = 0; i < size; i++)
                value |= (uint64_t)from[i] << 8 * i;
        return value;
}

void peer_header_write(const struct peer_header *header, uint8_t bytes[PEER_HEADER_BYTES])
{
        put(bytes, PEER_MAGIC, 4);
        put(bytes + 4, PEER_VERSION, 2);
        put(bytes + 6, (uint64_t)header->type, 2);
        put(bytes + 8, header->number, 8);
        put(bytes + 16, header->size, 4);
        put(bytes + 20, 0, 4);
        put(bytes + 24, header->crc64, 8);
}

enum nebula_status peer_header_read(const uint8_t bytes[PEER_HEADER_BYTES], uint64_t expected_number, struct peer_header *ret_header,
                                    struct nebula_error *error)
{
        uint64_t type = get(bytes + 6, 2), number = get(bytes + 8, 8), size = get(bytes + 16, 4);

        if (get(bytes, 4) != PEER_MAGIC || get(bytes + 20, 4))
                return error_set(error, NEBULA_CORRUPT, 0, "these bytes are not a frame of a peer");
        if (get(bytes + 4, 2) != PEER_VERSION)
                return error_set(error, NEBULA_CORRUPT, 0, "the peer speaks version %u, and this agent %u", (unsigned)get(bytes + 4, 2),
                                 PEER_VERSION);
        if (number != expected_number)
                return error_set(error, NEBULA_CORRUPT, 0, "a frame has number %" PRIu64 " where %" PRIu64
                                 " is due: it was sent again, or one is missing", number, expected_number);
        if (type < PEER_HELLO || type > PEER_PART)
                return error_set(error, NEBULA_CORRUPT, 0, "there is no frame of type %u", (unsigned)type);
        if (type == PEER_DATA ? size < PEER_HEAD_BYTES || size > PEER_HEAD_BYTES + PEER_PIECE_BYTES : size > PEER_TEXT_MAX)
                return error_set(error, NEBULA_CORRUPT, 0, "a frame of type %u cannot have %u bytes", (unsigned)type, (unsigned)size);
        *ret_header = (struct peer_header){ .type = (enum peer_type)type, .number = number, .size = (uint32_t)size,
                                            .crc64 = get(bytes + 24, 8) };
        return NEBULA_OK;
}

void peer_data_write(const struct peer_data *data, uint8_t bytes[PEER_HEAD_BYTES])
{
        put(bytes, data->copy, 8);
        put(bytes + 8, data->offset, 8);
        put(bytes + 16, data->file, 4);
        put(bytes + 20, 0, 4);
        put(bytes + 24, data->crc64, 8);
}

void peer_data_read(const uint8_t bytes[PEER_HEAD_BYTES], struct peer_data *ret_data)
{
        *ret_data = (struct peer_data){ .copy = get(bytes, 8), .offset = get(bytes + 8, 8), .file = (uint32_t)get(bytes + 16, 4),
                                        .crc64 = get(bytes + 24, 8) };
}

/* Documents. */

static enum nebula_status no_memory(struct nebula_error *error)
{
        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a frame to a peer");
}

/* Takes `members` over. */
static enum nebula_status format(json_t *members, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        json_t *body = document_new(KIND);
        enum nebula_status status;

        if (!members || !body || json_object_update(body, members))
                status = no_memory(error);
        else
                status = document_format(body, ret_text, ret_size, error);
        json_decref(members);
        json_decref(body);
        return status;
}

enum nebula_status peer_hello_format(const struct peer_hello *hello, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        return format(json_pack("{s:s, s:s, s:s, s:o, s:b}", "node", hello->node, "job", hello->job, "path", hello->path, "nonce",
                                document_hex(hello->nonce), "reader", hello->is_reader), ret_text, ret_size, error);
}

enum nebula_status peer_hello_parse(const char *text, size_t size, struct peer_hello *ret_hello, struct nebula_error *error)
{
        struct document_reader reader = { .kind = KIND, .error = error };
        json_t *body;
        enum nebula_status status = document_parse(text, size, KIND, &body, error);

        if (status)
                return status;
        memset(ret_hello, 0, sizeof *ret_hello);
        document_text(&reader, body, "node", 0, ret_hello->node, sizeof ret_hello->node);
        document_text(&reader, body, "job", 1, ret_hello->job, sizeof ret_hello->job);
        document_text(&reader, body, "path", 1, ret_hello->path, sizeof ret_hello->path);
        ret_hello->nonce = document_crc64(&reader, json_object_get(body, "nonce"), "nonce");
        ret_hello->is_reader = json_is_true(json_object_get(body, "reader"));
        json_decref(body);
        return reader.status;
}

static json_t *copy_json(const struct peer_copy *copy)
{
        json_t *files = json_array(), *ranks = json_array(), *body;
        int failed = 0;

        for (size_t i = 0; i < copy->rank_count; i++)
                failed |= json_array_append_new(ranks, json_integer((json_int_t)copy->ranks[i]));
        for (size_t i = 0; i < copy->file_count; i++) {
                const struct peer_file *file = &copy->files[i];

                failed |= json_array_append_new(files, json_pack("{s:s, s:I, s:I, s:I, s:s, s:b}", "name", file->name, "rank",
                                                                 (json_int_t)file->rank, "size", (json_int_t)file->size, "origin",
                                                                 (json_int_t)file->origin, "format",
                                                                 file->format == IPC_FORMAT_ZIP ? "zip" : "raw", "held", (int)file->held));
        }
        if (failed) {
                json_decref(files);
                json_decref(ranks);
                return NULL;
        }
        body = json_pack("{s:o, s:s, s:s, s:s, s:I, s:I, s:I, s:o, s:o}", "id", document_hex(copy->id), "owner", copy->owner, "tag", copy->tag,
                         "run", copy->run, "writing", (json_int_t)copy->writing, "sequence", (json_int_t)copy->sequence,
                         "world", (json_int_t)copy->world, "ranks", ranks, "files", files);
        if (body && !line_format(&copy->line, body)) {
                json_decref(body);
                return NULL;
        }
        return body;
}

static void read_file(struct document_reader *reader, const json_t *object, struct peer_file *file)
{
        char kind[8];

        document_text(reader, object, "name", 0, file->name, sizeof file->name);
        file->rank = document_rank(reader, object);
        file->size = document_size(reader, object);
        file->origin = document_u64(reader, object, "origin", DOCUMENT_SEQUENCE_MAX);
        document_text(reader, object, "format", 0, kind, sizeof kind);
        file->format = !reader->status && strcmp(kind, "zip") ? IPC_FORMAT_RAW : IPC_FORMAT_ZIP;
        file->held = json_is_true(json_object_get(object, "held"));
}

/* Earlier builds of 0.2 sent no list: then the ranks are those of the files. */
static void read_ranks(struct document_reader *reader, const json_t *ranks, struct peer_copy *copy)
{
        size_t count = ranks ? json_array_size(ranks) : copy->file_count;

        if ((ranks && !json_is_array(ranks)) || count > PEER_FILE_MAX) {
                document_wrong(reader, "ranks", "is no list, or has too many entries");
                return;
        }
        copy->ranks = calloc(count + 1, sizeof *copy->ranks);
        if (!copy->ranks) {
                reader->status = no_memory(reader->error);
                return;
        }
        while (!reader->status && copy->rank_count < count) {
                const json_t *rank = json_array_get(ranks, copy->rank_count);
                json_int_t number = ranks ? json_integer_value(rank) : (json_int_t)copy->files[copy->rank_count].rank;

                if ((ranks && !json_is_integer(rank)) || number < 0 || number >= DOCUMENT_WORLD_MAX)
                        document_wrong(reader, "ranks", "has an entry that is no rank");
                copy->ranks[copy->rank_count++] = (uint32_t)number;
        }
}

static void read_copy(struct document_reader *reader, const json_t *object, struct peer_copy *copy)
{
        const json_t *files;

        memset(copy, 0, sizeof *copy);
        copy->id = document_crc64(reader, json_object_get(object, "id"), "id");
        document_text(reader, object, "owner", 0, copy->owner, sizeof copy->owner);
        document_text(reader, object, "tag", 0, copy->tag, sizeof copy->tag);
        document_text(reader, object, "run", 1, copy->run, sizeof copy->run);
        copy->writing = document_writing(reader, object);
        copy->sequence = document_sequence(reader, object);
        copy->world = document_world(reader, object);
        line_parse(reader, object, &copy->line);
        files = document_array(reader, object, "files");
        if (reader->status)
                return;
        if (json_array_size(files) > PEER_FILE_MAX) {
                document_wrong(reader, "files", "has too many entries");
                return;
        }
        copy->files = calloc(json_array_size(files) + 1, sizeof *copy->files);
        if (!copy->files) {
                reader->status = no_memory(reader->error);
                return;
        }
        while (!reader->status && copy->file_count < json_array_size(files)) {
                read_file(reader, json_array_get(files, copy->file_count), &copy->files[copy->file_count]);
                copy->file_count++;
        }
        if (!reader->status)
                read_ranks(reader, json_object_get(object, "ranks"), copy);
}

enum nebula_status peer_copy_format(const struct peer_copy *copy, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        return format(copy_json(copy), ret_text, ret_size, error);
}

enum nebula_status peer_copy_parse(const char *text, size_t size, struct peer_copy *ret_copy, struct nebula_error *error)
{
        struct document_reader reader = { .kind = KIND, .error = error };
        struct peer_copy copy;
        json_t *body;
        enum nebula_status status = document_parse(text, size, KIND, &body, error);

        if (status)
                return status;
        read_copy(&reader, body, &copy);
        json_decref(body);
        if (reader.status)
                peer_copy_done(&copy);
        else
                *ret_copy = copy;
        return reader.status;
}

enum nebula_status peer_copy_lists(const struct peer_copy *from, struct peer_copy *to, struct nebula_error *error)
{
        to->files = calloc(from->file_count + 1, sizeof *to->files);
        to->ranks = calloc(from->rank_count + 1, sizeof *to->ranks);
        if (!to->files || !to->ranks) {
                peer_copy_done(to);
                return no_memory(error);
        }
        if (from->file_count)
                memcpy(to->files, from->files, from->file_count * sizeof *to->files);
        if (from->rank_count)
                memcpy(to->ranks, from->ranks, from->rank_count * sizeof *to->ranks);
        return NEBULA_OK;
}

void peer_copy_done(struct peer_copy *copy)
{
        free(copy->files);
        free(copy->ranks);
        copy->files = NULL;
        copy->ranks = NULL;
        copy->file_count = copy->rank_count = 0;
}

#define LISTING_FRAME_BYTES 256u /* of its text, more than all that is not a copy */

enum nebula_status peer_listing_format(const struct peer_listing *listing, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        json_t *copies = json_array();
        size_t room = PEER_TEXT_MAX - LISTING_FRAME_BYTES;

        for (size_t i = 0; i < listing->count; i++) {
                json_t *copy = copy_json(&listing->copies[i]);
                size_t size = copy ? json_dumpb(copy, NULL, 0, JSON_COMPACT) + 1 : 0;

                if (size > room) {
                        json_decref(copy); /* older ones may be smaller */
                        continue;
                }
                room -= size;
                if (json_array_append_new(copies, copy)) {
                        json_decref(copies);
                        return no_memory(error);
                }
        }
        return format(json_pack("{s:o}", "copies", copies), ret_text, ret_size, error);
}

enum nebula_status peer_listing_parse(const char *text, size_t size, struct peer_listing *ret_listing, struct nebula_error *error)
{
        struct document_reader reader = { .kind = KIND, .error = error };
        struct peer_listing listing = { 0 };
        const json_t *copies;
        json_t *body;
        enum nebula_status status = document_parse(text, size, KIND, &body, error);

        if (status)
                return status;
        copies = document_array(&reader, body, "copies");
        if (!reader.status && json_array_size(copies) > PEER_COPY_MAX)
                document_wrong(&reader, "copies", "has too many entries");
        if (!reader.status && !(listing.copies = calloc(json_array_size(copies) + 1, sizeof *listing.copies)))
                reader.status = no_memory(error);
        while (!reader.status && listing.count < json_array_size(copies)) {
                read_copy(&reader, json_array_get(copies, listing.count), &listing.copies[listing.count]);
                listing.count++;
        }
        json_decref(body);
        if (reader.status)
                peer_listing_done(&listing);
        else
                *ret_listing = listing;
        return reader.status;
}

void peer_listing_done(struct peer_listing *listing)
{
        for (size_t i = 0; i < listing->count; i++)
                peer_copy_done(&listing->copies[i]);
        free(listing->copies);
        memset(listing, 0, sizeof *listing);
}

enum nebula_status peer_keep_format(const struct peer_keep *keep, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        json_t *ids = json_array();

        for (size_t i = 0; i < keep->count; i++)
                if (json_array_append_new(ids, document_hex(keep->ids[i]))) {
                        json_decref(ids);
                        return no_memory(error);
                }
        return format(json_pack("{s:o}", "ids", ids), ret_text, ret_size, error);
}

enum nebula_status peer_keep_parse(const char *text, size_t size, struct peer_keep *ret_keep, struct nebula_error *error)
{
        struct document_reader reader = { .kind = KIND, .error = error };
        struct peer_keep keep = { 0 };
        const json_t *ids;
        json_t *body;
        enum nebula_status status = document_parse(text, size, KIND, &body, error);

        if (status)
                return status;
        ids = document_array(&reader, body, "ids");
        if (!reader.status && json_array_size(ids) > PEER_FILE_MAX)
                document_wrong(&reader, "ids", "has too many entries");
        if (!reader.status && !(keep.ids = calloc(json_array_size(ids) + 1, sizeof *keep.ids)))
                reader.status = no_memory(error);
        while (!reader.status && keep.count < json_array_size(ids)) {
                keep.ids[keep.count] = document_crc64(&reader, json_array_get(ids, keep.count), "ids");
                keep.count++;
        }
        json_decref(body);
        if (reader.status)
                peer_keep_done(&keep);
        else
                *ret_keep = keep;
        return reader.status;
}

void peer_keep_done(struct peer_keep *keep)
{
        free(keep->ids);
        memset(keep, 0, sizeof *keep);
}

enum nebula_status peer_fetch_format(const struct peer_fetch *fetch, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        return format(json_pack("{s:o, s:I, s:I}", "copy", document_hex(fetch->copy), "file", (json_int_t)fetch->file, "offset",
                                (json_int_t)fetch->offset), ret_text, ret_size, error);
}

enum nebula_status peer_fetch_parse(const char *text, size_t size, struct peer_fetch *ret_fetch, struct nebula_error *error)
{
        struct document_reader reader = { .kind = KIND, .error = error };
        struct peer_fetch fetch;
        json_t *body;
        enum nebula_status status = document_parse(text, size, KIND, &body, error);

        if (status)
                return status;
        fetch.copy = document_crc64(&reader, json_object_get(body, "copy"), "copy");
        fetch.file = (uint32_t)document_u64(&reader, body, "file", PEER_FILE_MAX);
        fetch.offset = document_u64(&reader, body, "offset", DOCUMENT_SIZE_MAX);
        json_decref(body);
        if (!reader.status)
                *ret_fetch = fetch;
        return reader.status;
}

enum nebula_status peer_part_format(const struct peer_part *part, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        return format(json_pack("{s:s, s:s, s:I, s:I, s:I}", "tag", part->tag, "name", part->name, "sequence", (json_int_t)part->sequence,
                                "origin", (json_int_t)part->origin, "chunk", (json_int_t)part->chunk), ret_text, ret_size, error);
}

enum nebula_status peer_part_parse(const char *text, size_t size, struct peer_part *ret_part, struct nebula_error *error)
{
        struct document_reader reader = { .kind = KIND, .error = error };
        struct peer_part part = { 0 };
        json_t *body;
        enum nebula_status status = document_parse(text, size, KIND, &body, error);

        if (status)
                return status;
        document_text(&reader, body, "tag", 0, part.tag, sizeof part.tag);
        document_text(&reader, body, "name", 0, part.name, sizeof part.name);
        part.sequence = document_sequence(&reader, body);
        part.origin = document_u64(&reader, body, "origin", DOCUMENT_SEQUENCE_MAX);
        part.chunk = (uint32_t)document_u64(&reader, body, "chunk", UINT32_MAX);
        json_decref(body);
        if (!reader.status)
                *ret_part = part;
        return reader.status;
}

enum nebula_status peer_answer_format(const struct peer_answer *answer, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        return format(json_pack("{s:i, s:s}", "status", (int)answer->status, "message", answer->message), ret_text, ret_size, error);
}

enum nebula_status peer_answer_parse(const char *text, size_t size, struct peer_answer *ret_answer, struct nebula_error *error)
{
        struct document_reader reader = { .kind = KIND, .error = error };
        json_t *body;
        enum nebula_status status = document_parse(text, size, KIND, &body, error);

        if (status)
                return status;
        memset(ret_answer, 0, sizeof *ret_answer);
        ret_answer->status = (enum nebula_status)document_u64(&reader, body, "status", 100);
        document_text(&reader, body, "message", 1, ret_answer->message, sizeof ret_answer->message);
        json_decref(body);
        return reader.status;
}
