/*
 * An image of the agent that has only those chunks of a stored file that trainers asked for. This process maps the image, asks the agent for
 * the chunks that it needs, and then reads them in the map. The agent has checked them.
 *
 * The agent may drop the image, and another agent does not have it. Then this process opens the file again. The chunks of the new image are
 * copied into the first map, because the program knows the addresses there.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"
#include "os/os.h"

#define OPENS_MAX 3

struct client_partial {
        uint64_t image_id; /* 0: the agent has the whole file in memory now, and `other` maps it */
        uint64_t size, chunk_bytes, chunk_count, origin;
        bool *present;
        void *other; /* the map of a later image; NULL: the chunks appear in the first map */
};

struct client_partial *partial_new(const struct ipc_opened *opened)
{
        struct client_partial *partial = calloc(1, sizeof *partial);

        if (!partial)
                return NULL;
        *partial = (struct client_partial){ .image_id = opened->image_id, .size = opened->size, .chunk_bytes = opened->chunk_bytes,
                                          .chunk_count = opened->chunk_count, .origin = opened->origin };
        partial->present = calloc(partial->chunk_count + 1, sizeof *partial->present); /* + 1: calloc of 0 items may return NULL */
        if (!partial->present) {
                free(partial);
                return NULL;
        }
        return partial;
}

void partial_free(struct client_partial *partial)
{
        if (!partial)
                return;
        if (partial->other)
                os->unmap(partial->other, partial->size);
        free(partial->present);
        free(partial);
}

/* Marks the chunks of the parts that are not there. Returns their number. */
static uint64_t mark_absent(const struct client_partial *partial, const struct nebula_part *parts, size_t count, bool *wanted)
{
        uint64_t found = 0;

        for (size_t i = 0; i < count; i++) {
                uint64_t end = parts[i].offset + parts[i].size;

                for (uint64_t chunk = parts[i].offset / partial->chunk_bytes; parts[i].size && chunk * partial->chunk_bytes < end; chunk++) {
                        if (partial->present[chunk] || wanted[chunk])
                                continue;
                        wanted[chunk] = true;
                        found++;
                }
        }
        return found;
}

static enum nebula_status ask(const struct client_partial *partial, nebula_session *session, struct ipc_fetch *request, struct nebula_error *error)
{
        struct client_wire wire = { .fd = -1 };
        struct client_call call = { .type = IPC_FETCH, .request = request, .size = sizeof *request, .timeout_ms = -1 };
        enum nebula_status status;

        request->image_id = partial->image_id;
        status = session_call_alone(session, &wire, &call, error);
        session_wire_done(session, &wire);
        return status;
}

/* Asks the agent for the wanted chunks, some runs of them at a time. */
static enum nebula_status ask_for(const struct client_partial *partial, nebula_session *session, const bool *wanted, struct nebula_error *error)
{
        struct ipc_fetch request = { 0 };
        enum nebula_status status = NEBULA_OK;

        for (uint64_t chunk = 0; chunk < partial->chunk_count && !status; chunk++) {
                if (!wanted[chunk])
                        continue;
                if (chunk && wanted[chunk - 1] && request.run_count) {
                        request.runs[request.run_count - 1].count++;
                        continue;
                }
                if (request.run_count == IPC_RUNS_MAX) {
                        status = ask(partial, session, &request, error);
                        request.run_count = 0;
                }
                request.runs[request.run_count++] = (struct ipc_run){ (uint32_t)chunk, 1 };
        }
        return status || !request.run_count ? status : ask(partial, session, &request, error);
}

/* The wanted chunks are there now. */
static void take(struct client_partial *partial, void *data, const bool *wanted)
{
        for (uint64_t chunk = 0; chunk < partial->chunk_count; chunk++) {
                uint64_t offset = chunk * partial->chunk_bytes;
                uint64_t size = partial->size - offset < partial->chunk_bytes ? partial->size - offset : partial->chunk_bytes;

                if (!wanted[chunk])
                        continue;
                if (partial->other)
                        memcpy((char *)data + offset, (const char *)partial->other + offset, size);
                partial->present[chunk] = true;
        }
}

/* The agent has dropped the image: maps another one, or the whole file if the agent has that now. */
static enum nebula_status reopen(struct client_partial *partial, nebula_checkpoint *checkpoint, const char *name, struct nebula_error *error)
{
        struct client_wire wire = { .fd = -1 };
        enum nebula_status status = map_open_file(checkpoint, name, IPC_READS_PARTS, &wire, error);
        struct os_stat stat;
        void *other = NULL;
        int result;

        if (status == NEBULA_OK) {
                const struct ipc_opened *opened = wire.frame.payload;

                if (opened->size != partial->size || opened->origin != partial->origin ||
                    (opened->chunk_bytes && (!opened->image_id || opened->chunk_bytes != partial->chunk_bytes)))
                        status = error_set(error, NEBULA_FAILED, 0, "\"%s\" of checkpoint \"%s\" was written again while it was read", name,
                                           checkpoint->tag);
                result = os->fstat(wire.frame.fd, &stat);
                if (!result && stat.size < partial->size)
                        result = -EINVAL;
                if (!result && status == NEBULA_OK)
                        result = os->map(wire.frame.fd, 0, partial->size, OS_MAP_READ | OS_MAP_PRIVATE, &other);
                if (result < 0 && status == NEBULA_OK)
                        status = error_set(error, error_status_of_errno(-result), -result, "a file of %llu bytes cannot be mapped",
                                           (unsigned long long)partial->size);
                if (status == NEBULA_OK) {
                        if (partial->other)
                                os->unmap(partial->other, partial->size);
                        partial->other = other;
                        partial->image_id = opened->image_id;
                }
        }
        session_wire_done(checkpoint->session, &wire);
        return status;
}

enum nebula_status partial_fetch(struct client_partial *partial, nebula_checkpoint *checkpoint, const char *name, void *data,
                                const struct nebula_part *parts, size_t count, struct nebula_error *error)
{
        bool *wanted = calloc(partial->chunk_count + 1, sizeof *wanted);
        enum nebula_status status = NEBULA_OK;
        int opens = 0;

        if (!wanted)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the chunks of a file");
        if (mark_absent(partial, parts, count, wanted)) {
                do
                        status = partial->image_id ? ask_for(partial, checkpoint->session, wanted, error) : NEBULA_OK;
                while (status == NEBULA_BUSY && opens++ < OPENS_MAX && (status = reopen(partial, checkpoint, name, error)) == NEBULA_OK);
                if (status == NEBULA_OK)
                        take(partial, data, wanted);
        }
        free(wanted);
        return status;
}
