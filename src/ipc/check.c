/* One table of the well-formed requests and answers, and the call that sends a request and receives its answer. */
#include "ipc/ipc.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "base/error.h"
#include "base/vars.h"
#include "os/os.h"

#define TEXT_COUNT_MAX 6

struct text {
        size_t offset, size;
};
#define TEXT(type, member) { offsetof(struct type, member), sizeof ((struct type *)0)->member }

/* One row per type: the size of the request, its strings, the size of the answer. */
static const struct {
        size_t request_size, answer_size;
        struct text texts[TEXT_COUNT_MAX]; /* ends at the first of size 0 */
} rules[] = {
        [IPC_HELLO] = { sizeof(struct ipc_hello), sizeof(struct ipc_welcome),
                        { TEXT(ipc_hello, persist_path), TEXT(ipc_hello, output_dir), TEXT(ipc_hello, job),
                          TEXT(ipc_hello, run), TEXT(ipc_hello, keep_best), TEXT(ipc_hello, keep_items) } },
        [IPC_CONFIGURE] = { sizeof(struct ipc_hello), 0,
                            { TEXT(ipc_hello, persist_path), TEXT(ipc_hello, output_dir), TEXT(ipc_hello, job),
                              TEXT(ipc_hello, run), TEXT(ipc_hello, keep_best), TEXT(ipc_hello, keep_items) } },
        [IPC_BEGIN] = { sizeof(struct ipc_begin), sizeof(struct ipc_begun), { TEXT(ipc_begin, tag) } },
        [IPC_IMAGE] = { sizeof(struct ipc_image), sizeof(struct ipc_granted), { TEXT(ipc_image, name), TEXT(ipc_image, tag) } },
        [IPC_CAPTURED] = { sizeof(struct ipc_captured), 0, { { 0, 0 } } },
        [IPC_ABANDON] = { sizeof(struct ipc_abandon), 0, { TEXT(ipc_abandon, reason) } },
        [IPC_COMMIT] = { sizeof(struct ipc_commit), 0, { { 0, 0 } } },
        [IPC_FAIL] = { sizeof(struct ipc_fail), 0, { TEXT(ipc_fail, reason) } },
        [IPC_WAIT] = { sizeof(struct ipc_wait), 0, { { 0, 0 } } },
        [IPC_STATE] = { sizeof(struct ipc_version), sizeof(struct ipc_state), { { 0, 0 } } },
        [IPC_FIND] = { sizeof(struct ipc_find), sizeof(struct ipc_found),
                       { TEXT(ipc_find, persist_path), TEXT(ipc_find, tag) } },
        [IPC_OPEN] = { sizeof(struct ipc_open), SIZE_MAX, { TEXT(ipc_open, name) } },
        [IPC_FLUSH] = { sizeof(struct ipc_flush), 0, { TEXT(ipc_flush, tag) } },
        [IPC_REPORT] = { sizeof(struct ipc_report), SIZE_MAX, { TEXT(ipc_report, persist_path) } },
        [IPC_DESCRIBE] = { sizeof(struct ipc_version), SIZE_MAX, { { 0, 0 } } },
        [IPC_STOP] = { sizeof(struct ipc_stop), 0, { { 0, 0 } } },
        [IPC_PUBLISH] = { sizeof(struct ipc_publish), 0,
                          { TEXT(ipc_publish, name), TEXT(ipc_publish, path), TEXT(ipc_publish, staging) } },
        [IPC_UNPUBLISH] = { sizeof(struct ipc_path), 0, { TEXT(ipc_path, path) } },
        [IPC_FIND_PATH] = { sizeof(struct ipc_path), sizeof(struct ipc_found_path), { TEXT(ipc_path, path) } },
        [IPC_WATCH] = { sizeof(struct ipc_watch), sizeof(struct ipc_event), { { 0, 0 } } },
        [IPC_COPIED] = { sizeof(struct ipc_copied), 0, { { 0, 0 } } },
        [IPC_PREPARE] = { sizeof(struct ipc_prepare), 0, { { 0, 0 } } },
        [IPC_FETCH] = { sizeof(struct ipc_fetch), 0, { { 0, 0 } } },
        [IPC_KEEP] = { sizeof(struct ipc_keep), 0, { TEXT(ipc_keep, tag), TEXT(ipc_keep, reason) } },
        [IPC_COMPARED] = { sizeof(struct ipc_compared), 0, { TEXT(ipc_compared, tag) } },
        [IPC_RECORDS] = { sizeof(struct ipc_version), SIZE_MAX, { { 0, 0 } } },
        [IPC_SPARE] = { sizeof(struct ipc_spare), sizeof(struct ipc_spare_image), { { 0, 0 } } },
};

static bool known(unsigned type)
{
        return type >= IPC_HELLO && type < sizeof rules / sizeof rules[0];
}

size_t ipc_request_size(enum ipc_type type)
{
        return known(type) ? rules[type].request_size : 0;
}

size_t ipc_answer_size(enum ipc_type type)
{
        return known(type) ? rules[type].answer_size : 0;
}

/* In every version of the protocol, a HELLO begins with the version. The rest may differ. */
static enum nebula_status check_version(const struct ipc_frame *frame, struct nebula_error *error)
{
        uint32_t version;

        if (frame->header.type != IPC_HELLO || frame->header.size < sizeof version)
                return NEBULA_OK;
        memcpy(&version, frame->payload, sizeof version);
        if (version == IPC_VERSION)
                return NEBULA_OK;
        error_set(error, NEBULA_UNAVAILABLE, 0, "an agent of another version of Nebula is running (it speaks version %u of the "
                  "protocol, this is version %u): end it with `nebula stop`", IPC_VERSION, version);
        if (error)
                error->sys_errno = IPC_OTHER_VERSION;
        return NEBULA_UNAVAILABLE;
}

/* A greeting may have variables behind its struct. */
static bool ends_with_variables(const struct ipc_frame *frame)
{
        unsigned type = frame->header.type;
        size_t size = frame->header.size, fixed = rules[type].request_size;

        return (type == IPC_HELLO || type == IPC_CONFIGURE) && size > fixed && size - fixed <= VARS_MAX && !((const char *)frame->payload)[size - 1];
}

enum nebula_status ipc_request_check(const struct ipc_frame *frame, struct nebula_error *error)
{
        unsigned type = frame->header.type;
        const char *payload = frame->payload;
        enum nebula_status status = check_version(frame, error);

        if (status)
                return status;
        if (!known(type))
                return error_set(error, NEBULA_INVALID, 0, "a request has the unknown type %u", type);
        if (frame->header.size != rules[type].request_size && !ends_with_variables(frame))
                return error_set(error, NEBULA_INVALID, 0, "a request of type %u has %u bytes instead of %zu", type,
                                 frame->header.size, rules[type].request_size);
        if (frame->header.has_fd)
                return error_set(error, NEBULA_INVALID, 0, "a request of type %u came with a file descriptor: requests have none", type);
        for (size_t i = 0; i < TEXT_COUNT_MAX && rules[type].texts[i].size > 0; i++) {
                const struct text *text = &rules[type].texts[i];

                if (!memchr(payload + text->offset, '\0', text->size))
                        return error_set(error, NEBULA_INVALID, 0,
                                         "the text at byte %zu of a request of type %u has no end", text->offset, type);
        }
        return NEBULA_OK;
}

static bool is_failure(int32_t status)
{
        switch (status) {
        case NEBULA_TIMEOUT: case NEBULA_BUSY: case NEBULA_NOT_FOUND: case NEBULA_STORAGE: case NEBULA_NO_SPACE:
        case NEBULA_CORRUPT: case NEBULA_FAILED: case NEBULA_NO_MEMORY: case NEBULA_UNAVAILABLE:
        case NEBULA_INTERNAL: case NEBULA_INVALID:
                return true;
        default:
                return false;
        }
}

/* The text of an error answer, cut if it is too long. The agent's text already contains the errno. */
static enum nebula_status refusal(const struct ipc_frame *frame, struct nebula_error *error)
{
        enum nebula_status status = (enum nebula_status)frame->header.status;
        size_t size = frame->header.size;

        if (!error)
                return status;
        if (size >= sizeof error->message)
                size = sizeof error->message - 1;
        error->status = status;
        error->sys_errno = frame->header.sys_errno;
        error->http_status = frame->header.http_status;
        memcpy(error->message, frame->payload, size);
        error->message[size] = '\0';
        return status;
}

/* The answer must hold one checksum per chunk that the client checks, and nothing else. */
static bool opened_is_sound(const struct ipc_frame *frame)
{
        const struct ipc_opened *opened = frame->payload;

        if (frame->header.size < sizeof *opened ||
            (frame->header.size - sizeof *opened) / sizeof opened->crc64[0] != (opened->image_id ? 0 : opened->chunk_count) ||
            (frame->header.size - sizeof *opened) % sizeof opened->crc64[0])
                return false;
        if (!opened->chunk_bytes)
                return !opened->chunk_count && !opened->image_id;
        return opened->chunk_count == opened->size / opened->chunk_bytes + (opened->size % opened->chunk_bytes != 0);
}

static bool is_text(enum ipc_type type)
{
        return type == IPC_REPORT || type == IPC_DESCRIBE || type == IPC_RECORDS;
}

static bool found_is_sound(const struct ipc_found *found)
{
        bool sound = memchr(found->tag, '\0', sizeof found->tag) && found->passed_count <= IPC_PASSED_MAX;

        for (uint32_t i = 0; sound && i < found->passed_count; i++)
                sound = memchr(found->passed[i].tag, '\0', sizeof found->passed[i].tag) &&
                        memchr(found->passed[i].reason, '\0', sizeof found->passed[i].reason);
        return sound;
}

static bool wants_fd(const struct ipc_frame *frame, enum ipc_type type)
{
        if (type == IPC_SPARE)
                return frame->header.size >= sizeof(struct ipc_spare_image) && ((const struct ipc_spare_image *)frame->payload)->image_id;
        return type == IPC_IMAGE || type == IPC_OPEN || (is_text(type) && !frame->header.size);
}

enum nebula_status ipc_answer_check(const struct ipc_frame *frame, enum ipc_type type, bool *ret_broken,
                                    struct nebula_error *error)
{
        size_t size = ipc_answer_size(type);
        *ret_broken = true;
        if (frame->header.type != type)
                return error_set(error, NEBULA_INTERNAL, 0, "the agent answered a request of type %u with type %u",
                                 (unsigned)type, frame->header.type);
        if (is_failure(frame->header.status)) {
                *ret_broken = false;
                return refusal(frame, error);
        }
        if (frame->header.status != NEBULA_OK)
                return error_set(error, NEBULA_INTERNAL, 0, "the agent answered with the unknown status %d",
                                 frame->header.status);
        if (size != SIZE_MAX && frame->header.size != size)
                return error_set(error, NEBULA_INTERNAL, 0, "the answer to type %u has %u bytes instead of %zu",
                                 (unsigned)type, frame->header.size, size);
        if (type == IPC_OPEN && !opened_is_sound(frame))
                return error_set(error, NEBULA_INTERNAL, 0, "the agent opened a file with %u bytes about its checksums",
                                 frame->header.size);
        if (frame->header.has_fd != wants_fd(frame, type))
                return error_set(error, NEBULA_INTERNAL, 0, "the answer to type %u came %s a descriptor",
                                 (unsigned)type, frame->header.has_fd ? "with" : "without");
        if (type == IPC_FIND) {
                const struct ipc_found *found = frame->payload;

                if (!found_is_sound(found))
                        return error_set(error, NEBULA_INTERNAL, 0, "the agent's answer contains a tag without a closing NUL");
        }
        if (type == IPC_FIND_PATH) {
                const struct ipc_found_path *found = frame->payload;

                if (!found_is_sound(&found->found) || !memchr(found->name, '\0', sizeof found->name))
                        return error_set(error, NEBULA_INTERNAL, 0, "the agent's answer contains a file name without a closing NUL");
        }
        if (type == IPC_WATCH) {
                const struct ipc_event *event = frame->payload;

                if (!memchr(event->tag, '\0', sizeof event->tag) || !memchr(event->text, '\0', sizeof event->text))
                        return error_set(error, NEBULA_INTERNAL, 0, "the agent's answer contains a text without a closing NUL");
        }
        *ret_broken = false;
        return NEBULA_OK;
}

enum nebula_status ipc_call(int fd, enum ipc_type type, const void *payload, size_t size, int64_t timeout_ms,
                            struct ipc_frame *frame, bool *ret_broken, struct nebula_error *error)
{
        enum nebula_status status = ipc_send(fd, type, NEBULA_OK, payload, size, -1, error);

        *ret_broken = true;
        return status != NEBULA_OK ? status : ipc_await(fd, type, timeout_ms, frame, ret_broken, error);
}

enum nebula_status ipc_await(int fd, enum ipc_type type, int64_t timeout_ms, struct ipc_frame *frame, bool *ret_broken,
                             struct nebula_error *error)
{
        int64_t deadline_ns = timeout_ms < 0 ? -1 : os->now_ns() + timeout_ms * 1000000;
        enum nebula_status status;

        *ret_broken = true;
        while (deadline_ns >= 0) {
                int64_t left_ms = (deadline_ns - os->now_ns()) / 1000000;
                int ready = os->poll(fd, left_ms > 0 ? left_ms : 0);

                if (ready > 0 || (ready < 0 && left_ms > 0 && ready != -EINTR))
                        break; /* ipc_receive reports what is wrong */
                if (left_ms <= 0)
                        return error_set(error, NEBULA_TIMEOUT, 0, "gave no answer within %lld ms",
                                         (long long)timeout_ms);
        }
        status = ipc_receive(fd, frame, error);
        if (status != NEBULA_OK)
                return status;
        status = ipc_answer_check(frame, type, ret_broken, error);
        if (status == NEBULA_OK && is_text(type) && frame->header.has_fd)
                status = ipc_receive_text(frame, error);
        return status;
}
