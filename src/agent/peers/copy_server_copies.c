/* The copies that this node keeps for others, and their budget. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/memory/page_maker.h"
#include "agent/peers/copy_server_private.h"
#include "agent/peers/slots_private.h"
#include "base/error.h"
#include "sum/sum.h"

static size_t piece_count(uint64_t size)
{
        return (size_t)((size + PEER_PIECE_BYTES - 1) / PEER_PIECE_BYTES);
}

static uint64_t capacity_of(const struct peer_copy *what)
{
        uint64_t sum = 0;

        for (size_t i = 0; i < what->file_count; i++) {
                uint64_t capacity = what->files[i].held ? memory_capacity(what->files[i].size) : 0;

                if (capacity > UINT64_MAX / 4 || sum > UINT64_MAX / 4)
                        return UINT64_MAX;
                sum += capacity;
        }
        return sum;
}

static void copy_free(struct copy_server *server, struct copy *copy)
{
        struct catalogue *catalogue = server->catalogue;

        if (!copy)
                return;
        catalogue_lock(catalogue);
        catalogue->memory->room_pending++;
        catalogue_unlock(catalogue);
        for (size_t i = 0; i < copy->what.file_count; i++) {
                if (copy->images && copy->images[i])
                        memory_release(catalogue->memory, copy->images[i]);
                if (copy->chunks)
                        free(copy->chunks[i]);
        }
        catalogue_lock(catalogue);
        memory_unreserve(catalogue->memory, copy->capacity);
        catalogue->memory->room_pending--;
        catalogue_signal(catalogue); /* a save may wait for room */
        catalogue_unlock(catalogue);
        free(copy->images);
        free(copy->chunks);
        peer_copy_done(&copy->what);
        free(copy);
}

struct copy *copy_server_copies_collect(struct copy_server *server)
{
        struct copy *taken = NULL;

        for (struct copy **link = &server->copies; *link;) {
                struct copy *copy = *link;

                if (!copy->dropped || copy->users) {
                        link = &copy->next;
                        continue;
                }
                *link = copy->next;
                server->used -= copy->capacity;
                copy->next = taken;
                taken = copy;
        }
        return taken;
}

void copy_server_copies_free(struct copy_server *server, struct copy *taken)
{
        while (taken) {
                struct copy *next = taken->next;

                copy_free(server, taken);
                taken = next;
        }
}

static bool is_from_owner(const struct visitor *visitor, const struct copy *copy)
{
        return visitor->is_owner && visitor->peer && visitor->peer->hello.nonce == copy->owner_nonce && copy_server_copy_is_for(copy, visitor->peer);
}

void copy_server_copy_spoilt(struct copy_server *server, struct copy *copy, size_t file)
{
        bool was_dropped;

        lock_take(&server->copy_server_lock);
        was_dropped = copy->dropped;
        copy->dropped = true;
        for (size_t i = 0; i < VISITOR_MAX && !was_dropped; i++) {
                const struct visitor *visitor = server->visitors[i];

                if (visitor && is_from_owner(visitor, copy))
                        peer_shutdown(visitor->peer); /* the owner connects again, and offers what it has */
        }
        lock_give(&server->copy_server_lock);
        if (!was_dropped)
                log_event(LOG_LEVEL_ERROR, "bytes of \"%s\" of %s have changed in this node's copy for node \"%s\", so the copy goes: test this node's memory",
                          copy->what.files[file].name, copy->what.tag, copy->what.owner);
}

void copy_server_copy_read(struct copy_server *server, struct copy *copy)
{
        struct copy *taken;

        lock_take(&server->copy_server_lock);
        copy->users--;
        taken = copy_server_copies_collect(server);
        lock_give(&server->copy_server_lock);
        copy_server_copies_free(server, taken);
}

static bool owner_connected(const struct copy_server *server, const struct copy *copy)
{
        for (size_t i = 0; i < VISITOR_MAX; i++) {
                const struct visitor *visitor = server->visitors[i];

                if (visitor && visitor->is_owner && visitor->peer && !strcmp(visitor->peer->hello.node, copy->what.owner))
                        return true;
        }
        return false;
}

/* Whether its owner has gone and no thread reads it. */
static bool may_go(const struct copy_server *server, const struct copy *copy)
{
        return !copy->users && !owner_connected(server, copy);
}

/* copy_server_lock held. Drops the oldest copies whose owners have gone, if that makes enough room. True: there is room. */
static bool make_room(struct copy_server *server, uint64_t capacity, struct copy **ret_taken)
{
        uint64_t staying = server->used;

        for (const struct copy *copy = server->copies; copy; copy = copy->next)
                staying -= may_go(server, copy) ? copy->capacity : 0;
        if (staying > server->budget || capacity > server->budget - staying)
                return false;
        while (server->used > server->budget || capacity > server->budget - server->used) {
                struct copy *oldest = NULL, *taken, *last;

                for (struct copy *copy = server->copies; copy; copy = copy->next)
                        if (may_go(server, copy) && (!oldest || copy->age < oldest->age))
                                oldest = copy;
                oldest->dropped = true;
                taken = last = copy_server_copies_collect(server);
                while (last && last->next)
                        last = last->next;
                if (last) {
                        last->next = *ret_taken;
                        *ret_taken = taken;
                }
        }
        return true;
}

bool copy_server_copy_is_for(const struct copy *copy, const struct peer *peer)
{
        return !strcmp(copy->identity, peer->key.identity) && (peer->hello.is_reader || !strcmp(copy->job, peer->hello.job)) &&
               !strcmp(copy->path, peer->hello.path);
}

static bool is_of_job(const struct copy *copy, const struct job *job)
{
        return !copy->dropped && *job->copies->identity && !strcmp(copy->identity, job->copies->identity) && !strcmp(copy->job, job->name) &&
               (!strcmp(copy->path, job->spelling) || !strcmp(copy->path, job->persist_path));
}

static enum nebula_status add_kept(struct peer_listing *listing, const struct peer_copy *what, struct nebula_error *error)
{
        struct peer_copy *to = &listing->copies[listing->count];
        enum nebula_status status;

        *to = *what;
        status = peer_copy_lists(what, to, error);
        listing->count += !status;
        return status;
}

enum nebula_status copy_server_kept(struct copy_server *server, const struct job *job, struct peer_listing *ret_listing,
                                    struct nebula_error *error)
{
        struct peer_listing listing = { .copies = calloc(PEER_COPY_MAX, sizeof *listing.copies) };
        enum nebula_status status = NEBULA_OK;

        if (!listing.copies)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to list copies");
        lock_take(&server->copy_server_lock);
        catalogue_lock(server->catalogue);
        for (const struct copy *copy = server->copies; copy && !status && listing.count < PEER_COPY_MAX; copy = copy->next)
                if (is_of_job(copy, job))
                        status = add_kept(&listing, &copy->what, error);
        catalogue_unlock(server->catalogue);
        lock_give(&server->copy_server_lock);
        if (status)
                peer_listing_done(&listing);
        else
                *ret_listing = listing;
        return status;
}

/* Both locks held. The file's number in the copy; SIZE_MAX: it does not have these bytes. */
static size_t file_of(const struct copy *copy, const char *tag, uint64_t sequence, const char *name, uint64_t size)
{
        for (size_t i = 0; copy->what.sequence == sequence && !strcmp(copy->what.tag, tag) && i < copy->what.file_count; i++)
                if (copy->images[i] && copy->what.files[i].size == size && !strcmp(copy->what.files[i].name, name))
                        return i;
        return SIZE_MAX;
}

/* A copy with that file, to be read until copy_server_copy_read; NULL: there is none. */
static struct copy *copy_with(struct copy_server *server, const struct job *job, const char *tag, uint64_t sequence, const char *name,
                              uint64_t size, size_t *ret_file)
{
        struct copy *copy;

        lock_take(&server->copy_server_lock);
        catalogue_lock(server->catalogue);
        for (copy = server->copies; copy; copy = copy->next)
                if (is_of_job(copy, job) && (*ret_file = file_of(copy, tag, sequence, name, size)) != SIZE_MAX)
                        break;
        if (copy)
                copy->users++;
        catalogue_unlock(server->catalogue);
        lock_give(&server->copy_server_lock);
        return copy;
}

bool copy_server_read(struct copy_server *server, const struct job *job, const char *tag, uint64_t sequence, const char *name, void *data, uint64_t size)
{
        size_t file;
        struct copy *copy = copy_with(server, job, tag, sequence, name, size, &file);
        bool is_sound = copy != NULL;

        for (uint64_t at = 0; is_sound && at < size; at += PEER_PIECE_BYTES) {
                size_t piece = size - at < PEER_PIECE_BYTES ? (size_t)(size - at) : PEER_PIECE_BYTES;
                uint32_t crc32 = 0;
                uint64_t crc64 = 0;

                sum_copy_both((char *)data + at, (const char *)copy->images[file]->data + at, piece, &crc32, &crc64);
                is_sound = crc64 == copy->chunks[file][at / PEER_PIECE_BYTES];
        }
        if (copy && !is_sound)
                copy_server_copy_spoilt(server, copy, file);
        if (copy)
                copy_server_copy_read(server, copy);
        return is_sound;
}

static enum nebula_status fill_copy(struct copy_server *server, struct copy *copy, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        copy->images = calloc(copy->what.file_count + 1, sizeof *copy->images);
        copy->chunks = calloc(copy->what.file_count + 1, sizeof *copy->chunks);
        if (!copy->images || !copy->chunks)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe a copy");
        for (size_t i = 0; !status && i < copy->what.file_count; i++) {
                const struct peer_file *file = &copy->what.files[i];
                void *data;

                if (!file->held)
                        continue;
                status = memory_create(server->catalogue->memory, memory_capacity(file->size), false, &copy->images[i], error);
                if (!status)
                        status = image_map(copy->images[i], &data, error);
                if (!status)
                        image_close(copy->images[i]);
                copy->chunks[i] = calloc(piece_count(file->size) + 1, sizeof *copy->chunks[i]);
                if (!status && !copy->chunks[i])
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe a copy");
        }
        return status;
}

struct copy *copy_server_copy_new(struct copy_server *server, const struct peer *peer, struct peer_copy *offer, struct nebula_error *error)
{
        struct catalogue *catalogue = server->catalogue;
        struct copy *copy = calloc(1, sizeof *copy), *taken = NULL;
        uint64_t capacity = capacity_of(offer);
        bool fits, named, reserved = false;

        if (!copy) {
                error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe a copy");
                return NULL;
        }
        lock_take(&server->copy_server_lock);
        fits = make_room(server, capacity, &taken);
        if (fits)
                server->used += capacity;
        lock_give(&server->copy_server_lock);
        copy_server_copies_free(server, taken);
        if (fits) {
                catalogue_lock(catalogue);
                do
                        reserved = memory_reserve(catalogue->memory, capacity, &named);
                while (!reserved && page_maker_discard(catalogue));
                catalogue_unlock(catalogue);
        }
        if (!reserved) {
                lock_take(&server->copy_server_lock);
                server->used -= fits ? capacity : 0;
                error_set(error, NEBULA_NO_MEMORY, 0,
                          "\"%.100s\" needs %" PRIu64 " MiB here, and of %" PRIu64 " MiB for copies %" PRIu64 " are in use: raise "
                          "NEBULA_PEER_MEMORY or NEBULA_MEMORY_BUFFER_SIZE", offer->tag, capacity >> 20, server->budget >> 20,
                          server->used >> 20);
                lock_give(&server->copy_server_lock);
                free(copy);
                return NULL;
        }
        copy->capacity = capacity;
        copy->what = *offer;
        memset(offer, 0, sizeof *offer);
        copy->owner_id = copy->what.id;
        copy->owner_nonce = peer->hello.nonce;
        copy->what.id = memory_random_id();
        snprintf(copy->what.owner, sizeof copy->what.owner, "%s", peer->hello.node);
        strcpy(copy->identity, peer->key.identity);
        strcpy(copy->job, peer->hello.job);
        strcpy(copy->path, peer->hello.path);
        if (!fill_copy(server, copy, error))
                return copy;
        lock_take(&server->copy_server_lock);
        server->used -= capacity;
        lock_give(&server->copy_server_lock);
        copy_free(server, copy);
        return NULL;
}

void copy_server_drop_incoming(struct visitor *visitor)
{
        struct copy_server *server = visitor->server;

        if (!visitor->incoming)
                return;
        lock_take(&server->copy_server_lock);
        server->used -= visitor->incoming->capacity;
        lock_give(&server->copy_server_lock);
        copy_free(server, visitor->incoming);
        visitor->incoming = NULL;
}
