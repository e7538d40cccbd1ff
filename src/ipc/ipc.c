/* Frames: a header, its payload, and at most one file descriptor. */
#include "ipc/ipc.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"

/* Up to this size, header and payload leave in one call. For larger payloads the extra copy costs more than a second call. */
#define SEND_TOGETHER_BYTES 16384u
#define CAPACITY_MIN 4096u

static enum nebula_status gone(struct nebula_error *error, int result, const char *doing)
{
        if (result == -ENODATA || result == -EPIPE || result == -ECONNRESET)
                return error_set(error, NEBULA_UNAVAILABLE, result == -ENODATA ? 0 : -result,
                                 "the other end closed the connection while %s", doing);
        return error_set(error, NEBULA_UNAVAILABLE, -result, "the connection failed while %s", doing);
}

/* The descriptor is sent with the first bytes only. */
static int send_all(int fd, const void *data, size_t size, int passed_fd)
{
        const char *at = data;

        while (size > 0) {
                int64_t sent = os->send(fd, at, size, passed_fd);

                if (sent == -EINTR)
                        continue;
                if (sent < 0)
                        return (int)sent;
                if (sent == 0)
                        return -EPIPE;
                passed_fd = -1;
                at += sent;
                size -= (size_t)sent;
        }
        return 0;
}

static enum nebula_status send_frame(int fd, const struct ipc_header *header, const void *payload, int passed_fd,
                                     struct nebula_error *error)
{
        char together[SEND_TOGETHER_BYTES];
        size_t size = header->size;
        int result;

        if (sizeof *header + size <= sizeof together) {
                memcpy(together, header, sizeof *header);
                if (size > 0)
                        memcpy(together + sizeof *header, payload, size);
                result = send_all(fd, together, sizeof *header + size, passed_fd);
        } else {
                result = send_all(fd, header, sizeof *header, passed_fd);
                if (result == 0)
                        result = send_all(fd, payload, size, -1);
        }
        return result == 0 ? NEBULA_OK : gone(error, result, "a frame was sent");
}

enum nebula_status ipc_send(int fd, enum ipc_type type, enum nebula_status status, const void *payload, size_t size,
                            int passed_fd, struct nebula_error *error)
{
        struct ipc_header header = {
                .magic = IPC_MAGIC, .type = (uint16_t)type, .has_fd = passed_fd >= 0, .size = (uint32_t)size,
                .status = (int32_t)status,
        };

        if (size > IPC_PAYLOAD_MAX)
                return error_set(error, NEBULA_INVALID, 0, "a frame of %zu bytes is larger than the limit of %u", size,
                                 IPC_PAYLOAD_MAX);
        return send_frame(fd, &header, payload, passed_fd, error);
}

enum nebula_status ipc_send_text(int fd, enum ipc_type type, const char *text, size_t size, struct nebula_error *error)
{
        enum nebula_status status;
        int file, result;

        if (size <= IPC_PAYLOAD_MAX)
                return ipc_send(fd, type, NEBULA_OK, text, size, -1, error);
        if (size > IPC_REPORT_MAX)
                return error_set(error, NEBULA_INVALID, 0, "a text of %zu bytes is larger than the limit of %u", size, IPC_REPORT_MAX);
        file = os->memfd("nebula-report");
        if (file < 0)
                return error_set(error, NEBULA_NO_MEMORY, -file, "no memory for a text of %zu bytes", size);
        result = os_write_at(file, text, size, 0);
        status = result < 0 ? error_set(error, NEBULA_NO_MEMORY, -result, "no memory for a text of %zu bytes", size) :
                              ipc_send(fd, type, NEBULA_OK, NULL, 0, file, error);
        os->close(file);
        return status;
}

enum nebula_status ipc_send_error(int fd, enum ipc_type type, const struct nebula_error *failure, uint64_t version_id,
                                  struct nebula_error *error)
{
        char payload[sizeof failure->message + 1 + sizeof version_id];
        size_t size = strnlen(failure->message, sizeof failure->message);
        struct ipc_header header = {
                .magic = IPC_MAGIC, .type = (uint16_t)type,
                .status = (int32_t)failure->status, .sys_errno = failure->sys_errno, .http_status = failure->http_status,
        };

        memcpy(payload, failure->message, size);
        if (version_id) {
                payload[size++] = '\0';
                memcpy(payload + size, &version_id, sizeof version_id);
                size += sizeof version_id;
        }
        header.size = (uint32_t)size;
        return send_frame(fd, &header, payload, -1, error);
}

uint64_t ipc_refused_version(const struct ipc_frame *frame)
{
        const char *end = frame->header.status ? memchr(frame->payload, '\0', frame->header.size) : NULL;
        uint64_t version_id = 0;

        if (end && (size_t)((const char *)frame->payload + frame->header.size - end) == 1 + sizeof version_id)
                memcpy(&version_id, end + 1, sizeof version_id);
        return version_id;
}

static void close_untaken(struct ipc_frame *frame)
{
        if (frame->header.has_fd && frame->fd >= 0)
                os->close(frame->fd);
        frame->header.has_fd = 0;
        frame->fd = -1;
}

/* 0: nothing has come yet. */
static int64_t receive_some(int fd, void *data, size_t size, int *passed_fd)
{
        int came = -1;
        int64_t got = os->receive(fd, data, size, &came);

        if (came >= 0 && *passed_fd >= 0) { /* a second descriptor, which breaks a rule */
                os->close(came);
                return -EBADMSG;
        }
        if (came >= 0)
                *passed_fd = came;
        if (got == -EINTR)
                return 0;
        return got ? got : -ENODATA;
}

static int receive_all(int fd, void *data, size_t size, int *passed_fd)
{
        char *at = data;

        while (size > 0) {
                int64_t got = receive_some(fd, at, size, passed_fd);

                if (got < 0)
                        return (int)got;
                at += got;
                size -= (size_t)got;
        }
        return 0;
}

static enum nebula_status check_header(const struct ipc_header *header, struct nebula_error *error)
{
        if (header->magic != IPC_MAGIC)
                return error_set(error, NEBULA_INVALID, 0, "a frame begins with 0x%08x instead of 0x%08x: "
                                 "the other end does not speak Nebula's protocol", header->magic, IPC_MAGIC);
        if (header->type < IPC_HELLO || header->type > IPC_TYPE_LAST)
                return error_set(error, NEBULA_INVALID, 0, "a frame has the unknown type %u", header->type);
        if (header->has_fd > 1)
                return error_set(error, NEBULA_INVALID, 0, "a frame claims %u descriptors", header->has_fd);
        if (header->size > IPC_PAYLOAD_MAX)
                return error_set(error, NEBULA_INVALID, 0, "a frame claims %u bytes, more than the limit of %u",
                                 header->size, IPC_PAYLOAD_MAX);
        return NEBULA_OK;
}

/* Checked before memory is allocated: the other end is not trusted, and may claim any size. */
static enum nebula_status check_request_header(const struct ipc_header *header, struct nebula_error *error)
{
        enum nebula_status status = check_header(header, error);

        if (!status && header->size > IPC_REQUEST_MAX)
                status = error_set(error, NEBULA_INVALID, 0, "a request claims %u bytes, more than the limit of %u",
                                   header->size, IPC_REQUEST_MAX);
        return status;
}

static enum nebula_status reserve(struct ipc_frame *frame, size_t size, struct nebula_error *error)
{
        size_t capacity = size + 1 > CAPACITY_MIN ? size + 1 : CAPACITY_MIN;
        void *payload;

        if (capacity <= frame->capacity)
                return NEBULA_OK;
        payload = realloc(frame->payload, capacity);
        if (!payload)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a frame of %zu bytes", size);
        frame->payload = payload;
        frame->capacity = capacity;
        return NEBULA_OK;
}

enum nebula_status ipc_receive(int fd, struct ipc_frame *frame, struct nebula_error *error)
{
        struct ipc_header header;
        enum nebula_status status;
        int passed_fd = -1;
        int result;

        close_untaken(frame);
        result = receive_all(fd, &header, sizeof header, &passed_fd);
        if (result < 0)
                goto failed;
        status = check_header(&header, error);
        if (status == NEBULA_OK)
                status = reserve(frame, header.size, error);
        if (status != NEBULA_OK)
                goto drop_fd;
        result = receive_all(fd, frame->payload, header.size, &passed_fd);
        if (result < 0)
                goto failed;
        if (header.has_fd != (passed_fd >= 0)) {
                status = error_set(error, NEBULA_INVALID, 0, header.has_fd ?
                                   "a frame's header promised a file descriptor, but none came" :
                                   "a frame came with a file descriptor that its header did not announce");
                goto drop_fd;
        }
        ((char *)frame->payload)[header.size] = '\0';
        frame->header = header;
        frame->fd = passed_fd;
        return NEBULA_OK;

failed:
        if (result == -EBADMSG)
                status = error_set(error, NEBULA_INVALID, 0, "a frame came with more than one file descriptor");
        else
                status = gone(error, result, "a frame was received");
drop_fd:
        if (passed_fd >= 0)
                os->close(passed_fd);
        return status;
}

static int fill_once(int fd, struct ipc_inbox *inbox, int *passed_fd)
{
        int64_t got;

        memmove(inbox->data, inbox->data + inbox->start, inbox->count);
        inbox->start = 0;
        got = receive_some(fd, inbox->data + inbox->count, sizeof inbox->data - inbox->count, passed_fd);
        if (got < 0)
                return (int)got;
        inbox->count += (size_t)got;
        return 0;
}

/* Receives until `size` bytes are in the inbox, and takes further bytes that have come. */
static int fill(int fd, struct ipc_inbox *inbox, size_t size, int *passed_fd)
{
        int result = 0;

        while (result >= 0 && inbox->count < size)
                result = fill_once(fd, inbox, passed_fd);
        return result;
}

static enum nebula_status request_with_fd(struct nebula_error *error)
{
        return error_set(error, NEBULA_INVALID, 0, "a request came with a file descriptor: requests have none");
}

enum nebula_status ipc_inbox_fill(int fd, struct ipc_inbox *inbox, struct nebula_error *error)
{
        int passed_fd = -1, result = fill_once(fd, inbox, &passed_fd);

        if (passed_fd >= 0) {
                os->close(passed_fd);
                return request_with_fd(error);
        }
        return result < 0 ? gone(error, result, "a request was received") : NEBULA_OK;
}

enum ipc_held ipc_inbox_held(const struct ipc_inbox *inbox)
{
        struct ipc_header header;

        if (inbox->count < sizeof header)
                return IPC_HELD_PART;
        memcpy(&header, inbox->data + inbox->start, sizeof header);
        if (check_request_header(&header, NULL) != NEBULA_OK || inbox->count - sizeof header >= header.size)
                return IPC_HELD_WHOLE;
        return sizeof header + header.size > sizeof inbox->data ? IPC_HELD_LARGE : IPC_HELD_PART;
}

static void take(struct ipc_inbox *inbox, void *data, size_t size)
{
        memcpy(data, inbox->data + inbox->start, size);
        inbox->start += size;
        inbox->count -= size;
}

enum nebula_status ipc_receive_request(int fd, struct ipc_inbox *inbox, struct ipc_frame *frame, struct nebula_error *error)
{
        struct ipc_header header;
        enum nebula_status status;
        int passed_fd = -1, result = 0;
        size_t here;

        if (inbox->count < sizeof header)
                result = fill(fd, inbox, sizeof header, &passed_fd);
        if (result < 0) {
                status = gone(error, result, "a request was received");
                goto drop_fd;
        }
        take(inbox, &header, sizeof header);
        status = check_request_header(&header, error);
        if (status == NEBULA_OK)
                status = reserve(frame, header.size, error);
        if (status != NEBULA_OK)
                goto drop_fd;
        here = inbox->count < header.size ? inbox->count : header.size;
        take(inbox, frame->payload, here);
        result = receive_all(fd, (char *)frame->payload + here, header.size - here, &passed_fd);
        if (result < 0)
                status = gone(error, result, "a request was received");
        else if (header.has_fd || passed_fd >= 0)
                status = request_with_fd(error);
        ((char *)frame->payload)[header.size] = '\0';
        frame->header = header;
        frame->fd = -1;
drop_fd:
        if (passed_fd >= 0)
                os->close(passed_fd);
        return status;
}

enum nebula_status ipc_receive_text(struct ipc_frame *frame, struct nebula_error *error)
{
        enum nebula_status status;
        struct os_stat stat;
        int result = os->fstat(frame->fd, &stat);

        if (result < 0 || stat.kind != OS_KIND_FILE || stat.size > IPC_REPORT_MAX)
                return error_set(error, NEBULA_INVALID, result < 0 ? -result : 0, "a text came as a file descriptor, but that is not "
                                                                                  "a regular file of a valid size");
        status = reserve(frame, stat.size, error);
        if (status != NEBULA_OK)
                return status;
        for (uint64_t at = 0; at < stat.size;) {
                int64_t got = os->pread(frame->fd, (char *)frame->payload + at, stat.size - at, at);

                if (got == -EINTR)
                        continue;
                if (got <= 0)
                        return error_set(error, NEBULA_UNAVAILABLE, (int)-got, "a text of %llu bytes could not be read",
                                         (unsigned long long)stat.size);
                at += (uint64_t)got;
        }
        ((char *)frame->payload)[stat.size] = '\0';
        frame->header.size = (uint32_t)stat.size;
        close_untaken(frame);
        return NEBULA_OK;
}

void ipc_frame_done(struct ipc_frame *frame)
{
        close_untaken(frame);
        free(frame->payload);
        *frame = (struct ipc_frame){ .fd = -1 };
}
