/* Serves this node's own share of versions to a node that has lost its memory, or that loads a file that this node saved. The bytes
 * are sent from the images, without a copy. */
#include <stdlib.h>
#include <string.h>

#include "agent/memory/memory.h"
#include "agent/peers/copy_server_private.h"
#include "agent/peers/share.h"
#include "agent/peers/slots_private.h"
#include "agent/persist/persist_seal.h"
#include "agent/persist/storage.h"
#include "base/error.h"

static bool is_for(const struct job *job, const struct peer *peer)
{
        return *job->copies->identity && !strcmp(job->copies->identity, peer->key.identity) && (peer->hello.is_reader || !strcmp(job->name, peer->hello.job)) &&
               (!strcmp(job->spelling, peer->hello.path) || !strcmp(job->persist_path, peer->hello.path));
}

static bool is_shown(const struct version *version)
{
        return version->in_memory && !version->is_remote && (lifecycle_complete(version->life.state) || version->failed_by_storage);
}

struct job *copy_server_own_job(struct visitor *visitor)
{
        struct catalogue *catalogue = visitor->server->catalogue;
        struct job *job;

        catalogue_lock(catalogue);
        job = catalogue->jobs;
        while (job && !is_for(job, visitor->peer))
                job = job->next;
        if (job)
                job->pins++;
        catalogue_unlock(catalogue);
        return job;
}

/* Lock held. */
static enum nebula_status list_job(struct visitor *visitor, const struct job *job, struct peer_listing *listing, size_t room, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (const struct version *version = job->versions; version && !status && listing->count < room; version = version->next) {
                struct peer_copy *to = &listing->copies[listing->count];

                if (!is_shown(version))
                        continue;
                listing->count++;
                status = share_describe(version, to, error);
                strcpy(to->owner, visitor->server->node);
        }
        return status;
}

enum nebula_status copy_server_own_list(struct visitor *visitor, struct peer_listing *listing, size_t room, struct nebula_error *error)
{
        struct catalogue *catalogue = visitor->server->catalogue;
        enum nebula_status status = NEBULA_OK;

        if (visitor->peer->hello.nonce == catalogue->agent_nonce)
                return NEBULA_OK; /* it is this agent that asks */
        catalogue_lock(catalogue);
        for (const struct job *job = catalogue->jobs; job && !status; job = job->next)
                if (is_for(job, visitor->peer))
                        status = list_job(visitor, job, listing, room, error);
        catalogue_unlock(catalogue);
        return status;
}

void copy_server_own_close(struct visitor *visitor)
{
        struct catalogue *catalogue = visitor->server->catalogue;
        struct own_file *own = &visitor->own;

        if (own->image)
                storage_unseal(catalogue, own->image);
        free(own->chunks);
        memset(own, 0, sizeof *own);
}

/* Seals the requested file and holds it until the visitor asks for another. */
static bool own_open(struct visitor *visitor, const struct peer_fetch *fetch)
{
        struct catalogue *catalogue = visitor->server->catalogue;
        struct own_file *own = &visitor->own;
        const struct agent_file *file = NULL;
        char name[IPC_NAME_MAX];
        struct version *version;
        enum nebula_status status;

        if (own->image && own->version_id == fetch->copy && own->file == fetch->file)
                return true;
        copy_server_own_close(visitor);
        catalogue_lock(catalogue);
        version = catalogue_version(catalogue, fetch->copy);
        if (version && is_for(version->job, visitor->peer) && is_shown(version) && fetch->file < version->file_count)
                file = &version->files[fetch->file];
        if (!file || !share_holds(file)) {
                catalogue_unlock(catalogue);
                return false;
        }
        own->version_id = fetch->copy;
        own->file = fetch->file;
        own->size = file->size;
        strcpy(name, file->name);
        version->pins++;
        catalogue_unlock(catalogue);
        status = storage_seal(catalogue, version, name, &own->image, &own->chunks, NULL);
        catalogue_lock(catalogue);
        version->pins--;
        catalogue_signal(catalogue);
        catalogue_unlock(catalogue);
        return !status;
}

bool copy_server_own_piece(struct visitor *visitor, const struct peer_fetch *fetch, struct piece *ret_piece)
{
        const struct own_file *own = &visitor->own;
        uint64_t left;

        if (fetch->offset % PEER_PIECE_BYTES || !own_open(visitor, fetch) || fetch->offset >= own->size)
                return false;
        left = own->size - fetch->offset;
        *ret_piece = (struct piece){ .bytes = (const char *)own->image->data + fetch->offset,
                                     .size = left < PEER_PIECE_BYTES ? (size_t)left : PEER_PIECE_BYTES,
                                     .crc64 = own->chunks[fetch->offset / PEER_PIECE_BYTES] };
        return true;
}
