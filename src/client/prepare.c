/* Memory for the first save, made while the program still prepares itself. */
#include <stdlib.h>

#include "base/error.h"
#include "client/client.h"
#include "image/image.h"
#include "os/ending.h"

/* Starts what a capture needs, and has the ranges that exist joined into huge pages. Even if most of their pages are huge already, those at
 * the ends are not: protecting 32 MiB of small pages takes the first save longer than 2 GiB of huge ones. */
static void prepare_ranges(struct nebula_session *session, const struct nebula_range *ranges, size_t count)
{
        struct capture_part *parts = calloc(count ? count : 1, sizeof *parts);
        enum client_capture setting = session_capture_setting(session);
        size_t part_count = 0;
        uint64_t size = 0;

        for (size_t i = 0; parts && i < count; i++) {
                if (!ranges[i].data || ranges[i].size < COW_PART_BYTES)
                        continue;
                parts[part_count++] = (struct capture_part){ ranges[i].data, ranges[i].size, 0 };
                size += ranges[i].size;
        }
        if (parts && setting != CLIENT_CAPTURE_COPY && size >= CLIENT_COW_BYTES && ending_may_linger() && !cow_available(NULL) &&
            !copies_ready(session) && setting == CLIENT_CAPTURE_AUTO)
                cow_advise_huge(parts, part_count);
        free(parts);
}

static enum nebula_status file_size(size_t pickle_size, const struct nebula_range *ranges, size_t count, uint64_t *ret_size,
                                    struct nebula_error *error)
{
        uint64_t *sizes = calloc(count ? count : 1, sizeof *sizes);
        struct zip_layout layout;
        enum nebula_status status = NEBULA_OK;

        if (!sizes)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of %zu sizes", count);
        *ret_size = 0;
        for (size_t i = 0; i < count && !status; i++) {
                sizes[i] = ranges[i].size;
                if (ranges[i].size > INT64_MAX - *ret_size)
                        status = error_set(error, NEBULA_INVALID, 0, "the ranges are together larger than any file");
                else
                        *ret_size += ranges[i].size;
        }
        if (!status && pickle_size) {
                status = zip_layout_init(&layout, pickle_size, sizes, count, error);
                if (!status) {
                        *ret_size = layout.size;
                        zip_layout_done(&layout);
                }
        }
        free(sizes);
        return status;
}

enum nebula_status nebula_session_prepare(nebula_session *session, size_t pickle_size, const struct nebula_range *ranges, size_t count,
                                          struct nebula_error *ret_error)
{
        struct ipc_prepare request = { 0 };
        struct client_call call = {
                .type = IPC_PREPARE, .request = &request, .size = sizeof request, .timeout_ms = CLIENT_ANSWER_MS,
        };
        enum nebula_status status;

        if (!session || (count && !ranges))
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_session_prepare needs a session and ranges");
        status = file_size(pickle_size, ranges, count, &request.size, ret_error);
        if (status)
                return status;
        lock_take(&session->request_lock);
        status = session_call(session, &call, ret_error);
        lock_give(&session->request_lock);
        prepare_ranges(session, ranges, count);
        if (status == NEBULA_OK)
                spares_start(session);
        return status;
}
