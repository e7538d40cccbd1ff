/* Answers the requests of peers about the copies on this node. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/peers/copy_server_private.h"
#include "agent/persist/memory_scrub.h"
#include "agent/restore/restore.h"
#include "base/error.h"
#include "sum/sum.h"

static enum nebula_status serve_offer(struct visitor *visitor, struct nebula_error *error)
{
        struct copy_server *server = visitor->server;
        struct peer *peer = visitor->peer;
        struct nebula_error refusal = { 0 };
        struct peer_copy offer;
        bool there = false;
        enum nebula_status status = peer_copy_parse(peer->body, peer->header.size, &offer, error);

        if (status)
                return status;
        copy_server_drop_incoming(visitor);
        lock_take(&server->copy_server_lock);
        visitor->is_owner = true;
        for (struct copy *copy = server->copies; copy; copy = copy->next)
                there = there || (copy_server_copy_is_for(copy, peer) && copy->owner_id == offer.id && !copy->dropped &&
                                  copy->what.sequence == offer.sequence && !strcmp(copy->what.owner, peer->hello.node));
        lock_give(&server->copy_server_lock);
        if (there) {
                peer_copy_done(&offer);
                return peer_send_answer(peer, NEBULA_BUSY, "it is here already", error);
        }
        visitor->incoming = copy_server_copy_new(server, peer, &offer, &refusal);
        peer_copy_done(&offer);
        visitor->file = 0;
        visitor->offset = 0;
        visitor->trouble = (struct nebula_error){ 0 };
        if (!visitor->incoming)
                log_event(LOG_LEVEL_WARN, "no room for a copy of node \"%s\": %s", peer->hello.node, refusal.message);
        return peer_send_answer(peer, visitor->incoming ? NEBULA_OK : refusal.status, refusal.message, error);
}

/* Moves to the file that the next piece must belong to. */
static void next_file(struct visitor *visitor)
{
        const struct peer_copy *what = &visitor->incoming->what;

        while (visitor->file < what->file_count &&
               (!what->files[visitor->file].held || visitor->offset >= what->files[visitor->file].size)) {
                visitor->file++;
                visitor->offset = 0;
        }
}

static enum nebula_status serve_data(struct visitor *visitor, struct nebula_error *error)
{
        struct peer *peer = visitor->peer;
        struct copy *copy = visitor->incoming;
        size_t size = peer_take_size(peer);
        const struct peer_file *file;
        uint64_t left;
        enum nebula_status status;

        if (!copy || visitor->trouble.status)
                return peer_take(peer, NULL, error);
        next_file(visitor);
        file = visitor->file < copy->what.file_count ? &copy->what.files[visitor->file] : NULL;
        left = file ? file->size - visitor->offset : 0;
        if (!file || peer->data.file != visitor->file || peer->data.offset != visitor->offset ||
            size != (left < PEER_PIECE_BYTES ? left : PEER_PIECE_BYTES)) {
                error_set(&visitor->trouble, NEBULA_CORRUPT, 0, "a piece of file %u at offset %" PRIu64 " is out of order",
                          peer->data.file, peer->data.offset);
                return peer_take(peer, NULL, error);
        }
        status = peer_take(peer, (char *)copy->images[visitor->file]->data + visitor->offset, &visitor->trouble);
        if (status && status != NEBULA_CORRUPT) {
                if (error)
                        *error = visitor->trouble;
                return status;
        }
        copy->chunks[visitor->file][visitor->offset / PEER_PIECE_BYTES] = peer->data.crc64;
        visitor->offset += size;
        return NEBULA_OK;
}

static enum nebula_status serve_seal(struct visitor *visitor, struct nebula_error *error)
{
        struct copy_server *server = visitor->server;
        struct peer *peer = visitor->peer;
        struct copy *copy = visitor->incoming, *taken;
        struct nebula_error refusal = visitor->trouble;

        if (!copy)
                error_set(&refusal, NEBULA_INVALID, 0, "the peer sent a seal, but offered no copy before it");
        if (copy)
                next_file(visitor);
        if (copy && !refusal.status && visitor->file < copy->what.file_count)
                error_set(&refusal, NEBULA_CORRUPT, 0, "file \"%.100s\" did not arrive completely", copy->what.files[visitor->file].name);
        if (refusal.status) {
                copy_server_drop_incoming(visitor);
                log_event(LOG_LEVEL_WARN, "a copy that node \"%s\" sent is not kept: %s", peer->hello.node, refusal.message);
                return peer_send_answer(peer, refusal.status, refusal.message, error);
        }
        log_event(LOG_LEVEL_INFO, "holds %s for node \"%s\"", copy->what.tag, peer->hello.node);
        lock_take(&server->copy_server_lock); /* after it, other threads may drop the copy */
        /* An agent that did not know of this copy has sent it again: the older one is dropped. */
        for (struct copy *other = server->copies; other; other = other->next)
                if (copy_server_copy_is_for(other, peer) && other->owner_id == copy->owner_id && !strcmp(other->what.owner, copy->what.owner))
                        other->dropped = true;
        copy->age = server->next_age++;
        copy->next = server->copies;
        server->copies = copy;
        visitor->incoming = NULL;
        taken = copy_server_copies_collect(server);
        lock_give(&server->copy_server_lock);
        copy_server_copies_free(server, taken);
        return peer_send_answer(peer, NEBULA_OK, "", error);
}

static enum nebula_status serve_keep(struct visitor *visitor, struct nebula_error *error)
{
        struct copy_server *server = visitor->server;
        struct peer *peer = visitor->peer;
        struct peer_keep keep;
        struct copy *taken;
        enum nebula_status status = peer_keep_parse(peer->body, peer->header.size, &keep, error);

        if (status)
                return status;
        lock_take(&server->copy_server_lock);
        for (struct copy *copy = server->copies; copy; copy = copy->next) {
                bool kept = !copy_server_copy_is_for(copy, peer) || strcmp(copy->what.owner, peer->hello.node);

                for (size_t i = 0; !kept && i < keep.count; i++)
                        kept = keep.ids[i] == copy->owner_id;
                copy->dropped = copy->dropped || !kept;
        }
        taken = copy_server_copies_collect(server);
        lock_give(&server->copy_server_lock);
        copy_server_copies_free(server, taken);
        peer_keep_done(&keep);
        return peer_send_answer(peer, NEBULA_OK, "", error);
}

/* Copies for others first, newest first, then this node's own versions. */
static enum nebula_status serve_list(struct visitor *visitor, struct nebula_error *error)
{
        struct copy_server *server = visitor->server;
        struct peer_listing listing = { .copies = calloc(PEER_COPY_MAX, sizeof *listing.copies) };
        size_t copy_count, size;
        char *text = NULL;
        enum nebula_status status;

        if (!listing.copies)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a listing");
        lock_take(&server->copy_server_lock);
        for (const struct copy *copy = server->copies; copy && listing.count < PEER_COPY_MAX; copy = copy->next)
                if (copy_server_copy_is_for(copy, visitor->peer) && !copy->dropped)
                        listing.copies[listing.count++] = copy->what; /* the files stay the copy's */
        copy_count = listing.count;
        status = copy_server_own_list(visitor, &listing, PEER_COPY_MAX, error);
        if (!status)
                status = peer_listing_format(&listing, &text, &size, error);
        lock_give(&server->copy_server_lock);
        for (size_t i = copy_count; i < listing.count; i++)
                peer_copy_done(&listing.copies[i]);
        free(listing.copies);
        if (!status)
                status = peer_send(visitor->peer, PEER_LISTED, text, size, error);
        free(text);
        return status;
}

/* A piece of a copy that is kept for others. *ret_copy is used until copy_server_copy_read. */
static bool copy_piece(struct visitor *visitor, const struct peer_fetch *fetch, struct copy **ret_copy, struct piece *ret_piece)
{
        struct copy_server *server = visitor->server;
        struct copy *copy;
        uint64_t left;
        bool is_sound;

        lock_take(&server->copy_server_lock);
        copy = server->copies;
        while (copy && (copy->what.id != fetch->copy || !copy_server_copy_is_for(copy, visitor->peer) || copy->dropped))
                copy = copy->next;
        is_sound = copy && fetch->file < copy->what.file_count && copy->images[fetch->file] &&
                   fetch->offset < copy->what.files[fetch->file].size && fetch->offset % PEER_PIECE_BYTES == 0;
        if (is_sound)
                copy->users++;
        lock_give(&server->copy_server_lock);
        if (!is_sound)
                return false;
        left = copy->what.files[fetch->file].size - fetch->offset;
        *ret_piece = (struct piece){ .bytes = (const char *)copy->images[fetch->file]->data + fetch->offset,
                                     .size = left < PEER_PIECE_BYTES ? (size_t)left : PEER_PIECE_BYTES,
                                     .crc64 = copy->chunks[fetch->file][fetch->offset / PEER_PIECE_BYTES] };
        *ret_copy = copy;
        return true;
}

/* Without this, each reader would find the damaged copy again, and no reader an older version. */
static bool is_spoilt(struct visitor *visitor, const struct peer_fetch *fetch, struct copy *copy, const struct piece *piece)
{
        struct catalogue *catalogue = visitor->server->catalogue;

        if (sum_crc64(0, piece->bytes, piece->size) == piece->crc64)
                return false;
        if (copy) {
                copy_server_copy_spoilt(visitor->server, copy, fetch->file);
                return true;
        }
        catalogue_lock(catalogue); /* a version of this node: it leaves memory when it is compared */
        memory_scrub_soon(catalogue, visitor->own.image);
        catalogue_unlock(catalogue);
        return true;
}

static enum nebula_status serve_fetch(struct visitor *visitor, struct nebula_error *error)
{
        struct peer *peer = visitor->peer;
        struct copy *copy = NULL;
        struct peer_fetch fetch;
        struct piece piece;
        enum nebula_status status = peer_fetch_parse(peer->body, peer->header.size, &fetch, error);

        if (status)
                return status;
        if (!copy_piece(visitor, &fetch, &copy, &piece) && !copy_server_own_piece(visitor, &fetch, &piece))
                return peer_send_answer(peer, NEBULA_NOT_FOUND, "there is no such piece here any more", error);
        if (is_spoilt(visitor, &fetch, copy, &piece))
                status = peer_send_answer(peer, NEBULA_CORRUPT, "its bytes have changed in the memory of that node", error);
        else
                status = peer_send_data(peer, &(struct peer_data){ .copy = fetch.copy, .file = fetch.file, .offset = fetch.offset, .crc64 = piece.crc64 },
                                        piece.bytes, piece.size, error);
        if (copy)
                copy_server_copy_read(visitor->server, copy);
        return status;
}

static enum nebula_status serve_part(struct visitor *visitor, struct nebula_error *error)
{
        struct catalogue *catalogue = visitor->server->catalogue;
        struct peer *peer = visitor->peer;
        struct nebula_error refusal = { 0 };
        struct restore_part part;
        struct peer_part wanted;
        struct job *job;
        enum nebula_status status = peer_part_parse(peer->body, peer->header.size, &wanted, error);

        if (status)
                return status;
        job = copy_server_own_job(visitor);
        if (!job)
                return peer_send_answer(peer, NEBULA_NOT_FOUND, "no rank of that job is here", error);
        status = restore_part(catalogue, job, &wanted, &part, &refusal);
        if (status) {
                status = peer_send_answer(peer, status, refusal.message, error);
        } else {
                status = peer_send_data(peer, &(struct peer_data){ .offset = part.offset, .crc64 = part.crc64 }, part.bytes, part.size, error);
                restore_part_done(catalogue, &part);
        }
        catalogue_lock(catalogue);
        job->pins--;
        catalogue_signal(catalogue);
        catalogue_unlock(catalogue);
        return status;
}

typedef enum nebula_status serve_run(struct visitor *visitor, struct nebula_error *error);

static serve_run *const serves[] = {
        [PEER_OFFER] = serve_offer, [PEER_DATA] = serve_data, [PEER_SEAL] = serve_seal, [PEER_KEEP] = serve_keep,
        [PEER_LIST] = serve_list,   [PEER_FETCH] = serve_fetch, [PEER_ANSWER] = NULL, [PEER_PART] = serve_part,
};

enum nebula_status copy_server_serve(struct visitor *visitor, struct nebula_error *error)
{
        unsigned type = visitor->peer->header.type;

        if (type >= sizeof serves / sizeof serves[0] || !serves[type] || (visitor->peer->hello.is_reader && type != PEER_LIST && type != PEER_FETCH))
                return error_set(error, NEBULA_CORRUPT, 0, "a frame of type %u is not a request", type);
        return serves[type](visitor, error);
}
