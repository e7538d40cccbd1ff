#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/peers/replica_private.h"
#include "agent/peers/share.h"
#include "agent/peers/slots_private.h"
#include "agent/persist/persist_seal.h"
#include "agent/persist/storage.h"
#include "base/error.h"
#include "os/os.h"

struct outgoing_file {
        struct peer_file what;
        struct image *image; /* held and mapped; NULL: this node does not have it */
        uint64_t *chunks;    /* a piece is a chunk */
};
struct outgoing {
        struct peer_copy what;
        struct outgoing_file *files;
};

_Static_assert(PEER_PIECE_BYTES == IMAGE_CHUNK_BYTES, "a piece of a copy is a chunk of its image");

static void outgoing_done(struct catalogue *catalogue, struct outgoing *outgoing)
{
        for (size_t i = 0; outgoing->files && i < outgoing->what.file_count; i++) {
                if (outgoing->files[i].image)
                        storage_unseal(catalogue, outgoing->files[i].image);
                free(outgoing->files[i].chunks);
        }
        peer_copy_done(&outgoing->what);
        free(outgoing->files);
}

/* Collects the files of a pinned version to send, and seals its images. No lock held. */
static enum nebula_status outgoing_init(struct catalogue *catalogue, struct version *version, struct outgoing *outgoing,
                                        struct nebula_error *error)
{
        struct peer_copy *what = &outgoing->what;
        enum nebula_status status;

        catalogue_lock(catalogue);
        status = share_describe(version, what, error);
        outgoing->files = calloc(version->file_count + 1, sizeof *outgoing->files);
        if (!status && !outgoing->files)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to copy \"%.200s\"", version->tag);
        catalogue_unlock(catalogue);
        for (size_t i = 0; !status && i < what->file_count; i++) {
                struct outgoing_file *to = &outgoing->files[i];

                if (what->files[i].held)
                        status = storage_seal(catalogue, version, what->files[i].name, &to->image, &to->chunks, error);
        }
        return status;
}

static bool is_stopping(struct catalogue *catalogue)
{
        bool stopping;

        catalogue_lock(catalogue);
        stopping = catalogue->stopping;
        catalogue_unlock(catalogue);
        return stopping;
}

/* Sleeps until the bound allows `sent` bytes since `start_ns`. */
static void pace(const struct replica *replica, uint64_t sent, int64_t start_ns)
{
        int64_t due;

        if (!replica->bytes_per_s)
                return;
        due = start_ns + (int64_t)((double)sent / (double)replica->bytes_per_s * 1e9);
        if (due > os->now_ns())
                os->sleep_ms((due - os->now_ns()) / 1000000);
}

static enum nebula_status send_pieces(struct replica *replica, struct peer *peer, const struct outgoing *outgoing, uint64_t *ret_sent,
                                      struct nebula_error *error)
{
        int64_t start = os->now_ns();
        uint64_t sent = 0;
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; !status && i < outgoing->what.file_count; i++) {
                const struct peer_file *file = &outgoing->what.files[i];
                const char *bytes = file->held ? outgoing->files[i].image->data : NULL;

                for (uint64_t at = 0; !status && file->held && at < file->size; at += PEER_PIECE_BYTES) {
                        uint64_t left = file->size - at;
                        size_t size = left < PEER_PIECE_BYTES ? (size_t)left : PEER_PIECE_BYTES;
                        struct peer_data data = { .copy = outgoing->what.id, .file = (uint32_t)i, .offset = at,
                                                  .crc64 = outgoing->files[i].chunks[at / PEER_PIECE_BYTES] };

                        status = peer_send_data(peer, &data, bytes + at, size, error);
                        sent += size;
                        pace(replica, sent, start);
                        if (!status && is_stopping(replica->catalogue))
                                status = error_set(error, NEBULA_UNAVAILABLE, 0, "the agent is ending");
                }
        }
        *ret_sent = sent;
        return status;
}

/* Tells the peer which copies to keep: those of versions that this node has in memory. */
static enum nebula_status send_keep(struct replica *replica, struct channel *channel, uint64_t newest, size_t most, struct nebula_error *error)
{
        struct catalogue *catalogue = replica->catalogue;
        struct peer_keep keep = { 0 };
        struct peer_answer answer;
        size_t count = 0, size;
        char *text;
        enum nebula_status status;

        catalogue_lock(catalogue);
        for (const struct version *version = channel->job->versions; version; version = version->next)
                count++;
        keep.ids = calloc(count + 1, sizeof *keep.ids);
        for (const struct version *version = channel->job->versions; keep.ids && version && keep.count < most; version = version->next)
                if (version->in_memory && (version->id == newest || version->copies->nonces[channel->index] == channel->peer->hello.nonce))
                        keep.ids[keep.count++] = version->id;
        catalogue_unlock(catalogue);
        status = keep.ids ? peer_keep_format(&keep, &text, &size, error) : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list");
        if (!status) {
                status = peer_ask(channel->peer, PEER_KEEP, text, size, &answer, error);
                free(text);
        }
        peer_keep_done(&keep);
        return status;
}

void replica_take_back(struct replica *replica, struct channel *channel)
{
        send_keep(replica, channel, 0, 0, NULL);
}

static enum nebula_status offer(struct replica *replica, struct channel *channel, const struct outgoing *outgoing, struct peer_answer *answer,
                                struct nebula_error *error)
{
        char *text;
        size_t size;
        enum nebula_status status = peer_copy_format(&outgoing->what, &text, &size, error);

        if (status)
                return status;
        status = peer_ask(channel->peer, PEER_OFFER, text, size, answer, error);
        if (!status && answer->status == NEBULA_NO_MEMORY) {
                /* No room beside the older copies: the peer drops them. The newest copy alone is better than an old one. */
                status = send_keep(replica, channel, outgoing->what.id, 0, error);
                if (!status)
                        status = peer_ask(channel->peer, PEER_OFFER, text, size, answer, error);
        }
        free(text);
        return status;
}

enum nebula_status replica_send(struct replica *replica, struct channel *channel, struct version *version, bool *ret_broken,
                                struct nebula_error *error)
{
        struct outgoing outgoing = { 0 };
        struct peer_keep seal = { .ids = &outgoing.what.id, .count = 1 };
        struct peer_answer answer = { 0 };
        int64_t start = os->now_ns();
        uint64_t sent = 0;
        char *text;
        size_t size;
        enum nebula_status status = outgoing_init(replica->catalogue, version, &outgoing, error);

        *ret_broken = false;
        if (status)
                goto done;
        strcpy(outgoing.what.owner, replica->node);
        *ret_broken = true;
        status = offer(replica, channel, &outgoing, &answer, error);
        if (!status && answer.status != NEBULA_BUSY) {
                if (!answer.status) {
                        status = send_pieces(replica, channel->peer, &outgoing, &sent, error);
                        if (!status)
                                status = peer_keep_format(&seal, &text, &size, error);
                        if (!status) {
                                status = peer_ask(channel->peer, PEER_SEAL, text, size, &answer, error);
                                free(text);
                        }
                }
                if (!status && answer.status) {
                        *ret_broken = false;
                        status = error_set(error, answer.status, 0, "node \"%.60s\" does not keep it: %.380s", channel->peer->hello.node,
                                           answer.message);
                }
        }
        if (!status)
                status = send_keep(replica, channel, version->id, SIZE_MAX, error);
        if (!status)
                log_event(LOG_LEVEL_INFO, "%s is replicated on node \"%s\": %" PRIu64 " MiB in %.2f s", outgoing.what.tag,
                          channel->peer->hello.node, sent >> 20, (double)(os->now_ns() - start) / 1e9);
done:
        outgoing_done(replica->catalogue, &outgoing);
        return status;
}
