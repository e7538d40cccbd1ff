/* Fetches a file from the memory of a peer that holds it. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "agent/peers/replica_private.h"
#include "base/error.h"

#define WINDOW 4 /* pieces requested ahead */

static enum nebula_status ask_piece(struct peer *peer, uint64_t copy, uint32_t file, uint64_t offset, struct nebula_error *error)
{
        struct peer_fetch fetch = { .copy = copy, .file = file, .offset = offset };
        char *text;
        size_t size;
        enum nebula_status status = peer_fetch_format(&fetch, &text, &size, error);

        if (status)
                return status;
        status = peer_send(peer, PEER_FETCH, text, size, error);
        free(text);
        return status;
}

static enum nebula_status take_piece(struct peer *peer, uint64_t copy, uint32_t file, uint64_t offset, char *data, uint64_t size,
                                     struct nebula_error *error)
{
        uint64_t left = size - offset;
        struct peer_answer answer;
        enum nebula_status status = peer_receive(peer, error);

        if (status)
                return status;
        if (peer->header.type == PEER_ANSWER) {
                status = peer_answer_parse(peer->body, peer->header.size, &answer, error);
                return status ? status : error_set(error, answer.status == NEBULA_CORRUPT ? NEBULA_CORRUPT : NEBULA_NOT_FOUND, 0, "%s", answer.message);
        }
        if (peer->header.type != PEER_DATA || peer->data.copy != copy || peer->data.file != file || peer->data.offset != offset ||
            peer_take_size(peer) != (left < PEER_PIECE_BYTES ? left : PEER_PIECE_BYTES))
                return error_set(error, NEBULA_CORRUPT, 0, "the peer sent another part of a file than the agent asked for");
        return peer_take(peer, data + offset, error);
}

static enum nebula_status fetch_from(struct replica *replica, struct job *job, const struct member *member, uint64_t copy,
                                     uint32_t file, char *data, uint64_t size, struct nebula_error *error)
{
        bool only_reads = replica_only_reads(replica, job);
        struct peer_hello *hello = replica_hello(replica, job, only_reads);
        struct peer *peer = NULL;
        struct store *store;
        struct tls_key key;
        uint64_t asked = 0;
        enum nebula_status status = hello ? replica_store(replica, job, &store, error) :
                                            error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a connection");

        if (!status)
                status = secret_take(store, !only_reads, &key, error);

        if (!status)
                status = peer_open(member, &key, hello, &peer, error);
        for (uint64_t at = 0; !status && at < size; at += PEER_PIECE_BYTES) {
                while (!status && asked < size && asked < at + WINDOW * (uint64_t)PEER_PIECE_BYTES) {
                        status = ask_piece(peer, copy, file, asked, error);
                        asked += PEER_PIECE_BYTES;
                }
                if (!status)
                        status = take_piece(peer, copy, file, at, data, size, error);
        }
        peer_free(peer);
        free(hello);
        return status;
}

struct place {
        struct member member;
        uint64_t copy;
        uint32_t file;
};

/* All known places that hold the file. */
static struct place *find_places(struct replica *replica, struct job *job, bool is_again, const char *tag,
                                 uint64_t sequence, const char *name, uint64_t size, size_t *ret_count)
{
        struct peer_copies *peers;
        struct place *places = NULL, *grown;
        size_t count = 0;

        lock_take(&replica->peer_copies_lock);
        if (peer_copies_get(replica, job, is_again ? PEER_LISTING_NS : INT64_MAX, &peers, NULL))
                goto done;
        for (size_t i = 0; i < peers->count; i++)
                for (size_t j = 0; j < peers->members[i].listing.count; j++) {
                        const struct peer_copy *copy = &peers->members[i].listing.copies[j];

                        for (size_t k = 0; copy_is_of(copy, tag, sequence) && k < copy->file_count; k++) {
                                if (!copy->files[k].held || copy->files[k].size != size || strcmp(copy->files[k].name, name))
                                        continue;
                                grown = realloc(places, (count + 1) * sizeof *places);
                                if (!grown)
                                        goto done;
                                places = grown;
                                places[count++] = (struct place){ peers->members[i].member, copy->id, (uint32_t)k };
                        }
                }
done:
        lock_give(&replica->peer_copies_lock);
        *ret_count = count;
        return places;
}

enum nebula_status replica_fetch(struct catalogue *catalogue, struct job *job, const char *tag, uint64_t sequence,
                                 const char *name, void *data, uint64_t size, struct nebula_error *error)
{
        struct replica *replica = catalogue->replica;
        enum nebula_status status = NEBULA_NOT_FOUND;

        if (!replica)
                return error_set(error, NEBULA_NOT_FOUND, 0, "there are no peers");
        if (copy_server_read(replica->server, job, tag, sequence, name, data, size)) {
                log_event(LOG_LEVEL_INFO, "\"%s\" of %s: %" PRIu64 " MiB come from a copy in this node's own memory", name, tag, size >> 20);
                return NEBULA_OK;
        }
        error_set(error, NEBULA_NOT_FOUND, 0, "no peer holds \"%.100s\" of \"%.100s\" any more", name, tag);
        /* A copy may have moved since the listing: then all members are asked once more. */
        for (int round = 0; round < 2 && status; round++) {
                size_t count = 0;
                struct place *places = find_places(replica, job, round > 0, tag, sequence, name, size, &count);

                for (size_t i = 0; status && i < count; i++) {
                        status = fetch_from(replica, job, &places[i].member, places[i].copy, places[i].file, data, size, error);
                        if (!status)
                                log_event(LOG_LEVEL_INFO, "\"%s\" of %s: %" PRIu64 " MiB come from the memory of node \"%s\"", name, tag, size >> 20,
                                          places[i].member.node);
                        if (status)
                                log_event(LOG_LEVEL_WARN, "\"%s\" of %s could not be read from node \"%s\": %s", name, tag, places[i].member.node,
                                          error ? error->message : "");
                }
                free(places);
                if (status == NEBULA_CORRUPT)
                        replica_forget(replica, job); /* that peer drops the copy */
        }
        return status;
}
