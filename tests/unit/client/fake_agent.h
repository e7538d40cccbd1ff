/*
 * fake_agent.h - an agent for tests of the client: the whole protocol in
 * memory, with faults that the test chooses.
 *
 *      fake_start();               listens in $NEBULA_RUNTIME_DIR
 *      fake_dies_at(IPC_IMAGE, 1); the next such request kills the agent, and another takes its place
 *      fake_stop();
 */
#ifndef NB_TESTS_FAKE_AGENT_H
#define NB_TESTS_FAKE_AGENT_H

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "image/image.h"
#include "ipc/ipc.h"
#include "os/os.h"
#include "sum/sum.h"

#define FAKE_COUNT_MAX 256
#define FAKE_SPARE_BYTES (4u << 20)
#define FAKE_TYPE_COUNT (IPC_TYPE_LAST + 1)

struct fake_image {
        uint64_t id, version_id, size;
        uint32_t format;
        int fd;
        bool is_captured;
        char name[IPC_NAME_MAX];
};
struct fake_version {
        uint64_t id;
        bool is_committed;
        char tag[IPC_NAME_MAX];
};

static struct {
        pthread_mutex_t lock; /* guards all of it */
        pthread_cond_t moved;
        int listen_fd;
        pthread_t thread;
        int connections[FAKE_COUNT_MAX]; /* open ones; -1: free */
        size_t live_count;
        uint64_t nonce, next_id;
        struct fake_image images[FAKE_COUNT_MAX];
        struct fake_version versions[FAKE_COUNT_MAX];
        size_t image_count, version_count;
        struct ipc_hello hello; /* the last one */
        struct ipc_captured captured;
        struct ipc_copied copied; /* the last one */
        int wrong_sum_count;
        uint64_t summed_bytes; /* of the last file */
        int torn_count;           /* bytes other than 'a' in ranges that were reported as copied */
        int commit_count, captured_at_commit; /* captured_at_commit: files of that version, at the last one */
        int captured_at_configure; /* files, at the last one */
        uint32_t commit_has_saved; /* of the last COMMIT */
        int seen[FAKE_TYPE_COUNT];
        /* the script */
        int die_at[FAKE_TYPE_COUNT];
        bool forgets; /* the agent that comes after a death knows nothing */
        enum nebula_status refuse[FAKE_TYPE_COUNT];
        bool lends_too_little;
        bool stored_is_gone; /* the bytes of files are in storage, and a read of one fails */
        bool was_written_again; /* storage had other bytes */
        bool lends_parts;       /* of a file whose bytes the client then asks for */
        uint64_t origin;        /* of all files */
        uint32_t spare_count; /* so many spare images are still to be lent */
        bool spares_follow;   /* none is ready, and one will follow */
        bool lends_spare;     /* the next save is lent the newest image again */
        int image_refusals; /* so many requests for one are refused, each after it has begun its version */
} fake = { .lock = PTHREAD_MUTEX_INITIALIZER, .moved = PTHREAD_COND_INITIALIZER };

static void fake_forget(void)
{
        for (size_t i = 0; i < fake.image_count; i++)
                os->close(fake.images[i].fd);
        fake.image_count = fake.version_count = 0;
}

static struct fake_version *fake_version(uint64_t id)
{
        for (size_t i = 0; i < fake.version_count; i++)
                if (fake.versions[i].id == id)
                        return &fake.versions[i];
        return NULL;
}

static struct fake_image *fake_image(uint64_t version_id, const char *name)
{
        for (size_t i = fake.image_count; i-- > 0;)
                if (fake.images[i].version_id == version_id && !strcmp(fake.images[i].name, name))
                        return &fake.images[i];
        return NULL;
}

static void fake_refuse(int fd, enum ipc_type type, enum nebula_status status)
{
        struct nebula_error failure = { .status = status, .message = "the fake agent refuses" };

        ipc_send_error(fd, type, &failure, 0, NULL);
}

static uint64_t fake_begun(const char *tag)
{
        struct fake_version *version;

        for (size_t i = 0; i < fake.version_count; i++)
                if (!strcmp(fake.versions[i].tag, tag))
                        return fake.versions[i].id;
        version = &fake.versions[fake.version_count++ % FAKE_COUNT_MAX];
        *version = (struct fake_version){ .id = ++fake.next_id };
        memcpy(version->tag, tag, sizeof version->tag);
        return version->id;
}

static void fake_begin(int fd, const struct ipc_begin *request)
{
        struct ipc_begun answer = { .version_id = fake_begun(request->tag) };

        ipc_send(fd, IPC_BEGIN, NEBULA_OK, &answer, sizeof answer, -1, NULL);
}

static void fake_lend(int fd, const struct ipc_image *request)
{
        static struct ipc_granted answer;
        uint64_t version_id = request->version_id ? request->version_id : fake_begun(request->tag);
        struct fake_image *image;

        if (fake.image_refusals > 0) {
                fake.image_refusals--;
                fake_refuse(fd, IPC_IMAGE, NEBULA_NO_MEMORY);
                return;
        }
        if (fake.lends_spare) {
                image = &fake.images[fake.image_count - 1];
                image->version_id = version_id;
                image->size = request->size;
                image->format = request->format;
        } else {
                image = &fake.images[fake.image_count++ % FAKE_COUNT_MAX];
                *image = (struct fake_image){ .id = ++fake.next_id, .version_id = version_id, .size = request->size,
                                              .format = request->format, .fd = os->memfd("fake") };
        }
        memcpy(image->name, request->name, sizeof image->name);
        memset(&answer, 0, sizeof answer);
        answer.image_id = image->id;
        answer.version_id = version_id;
        answer.capacity_bytes = fake.lends_spare ? FAKE_SPARE_BYTES : (request->size / (2u << 20) + 1) * (2u << 20);
        os->truncate(image->fd, answer.capacity_bytes);
        if (fake.lends_too_little)
                answer.capacity_bytes = 1;
        answer.live_ids[answer.live_count++] = image->id;
        ipc_send(fd, IPC_IMAGE, NEBULA_OK, &answer, sizeof answer, image->fd, NULL);
}

static void fake_lend_spare(int fd)
{
        struct ipc_spare_image answer = { .left_count = fake.spares_follow };
        struct fake_image *image;

        if (fake.spare_count) {
                image = &fake.images[fake.image_count++ % FAKE_COUNT_MAX];
                *image = (struct fake_image){ .id = ++fake.next_id, .fd = os->memfd("fake") };
                os->truncate(image->fd, FAKE_SPARE_BYTES);
                answer = (struct ipc_spare_image){ image->id, FAKE_SPARE_BYTES, --fake.spare_count, 0 };
        }
        ipc_send(fd, IPC_SPARE, NEBULA_OK, &answer, sizeof answer, answer.image_id ? fake.images[fake.image_count - 1].fd : -1, NULL);
}

static void fake_commit(uint64_t version_id)
{
        fake_version(version_id)->is_committed = true;
        fake.commit_count++;
        fake.captured_at_commit = 0;
        for (size_t i = 0; i < fake.image_count; i++)
                fake.captured_at_commit += fake.images[i].version_id == version_id && fake.images[i].is_captured;
}

/* Checks the client's sums of the first `size` bytes of the file: in order and right. */
static void fake_look_at_sums(const struct fake_image *image, uint64_t size, uint32_t count)
{
        uint64_t end = 0;

        for (uint32_t i = 0; i < count; i++) {
                struct image_sum sum;
                uint32_t crc32 = 0;
                uint64_t crc64 = 0;
                void *bytes;

                os->pread(image->fd, &sum, sizeof sum, image_sums_offset(image->size) + i * sizeof sum);
                if (sum.offset < end || sum.size > IMAGE_CHUNK_BYTES || sum.offset + sum.size > size) {
                        fake.wrong_sum_count++;
                        return;
                }
                end = sum.offset + sum.size;
                bytes = malloc(sum.size);
                os->pread(image->fd, bytes, sum.size, sum.offset);
                sum_both(bytes, sum.size, &crc32, &crc64);
                free(bytes);
                fake.wrong_sum_count += crc32 != sum.crc32 || crc64 != sum.crc64;
                fake.summed_bytes += sum.size;
        }
}

static void fake_captured(int fd, const struct ipc_captured *request)
{
        for (size_t i = 0; i < fake.image_count; i++) {
                if (fake.images[i].id == request->image_id) {
                        fake.images[i].is_captured = true;
                        fake.summed_bytes = 0;
                        fake_look_at_sums(&fake.images[i], fake.images[i].size, request->sum_count);
                        fake.captured = *request;
                        if (request->commits)
                                fake_commit(fake.images[i].version_id);
                        ipc_send(fd, IPC_CAPTURED, NEBULA_OK, NULL, 0, -1, NULL);
                        return;
                }
        }
        fake_refuse(fd, IPC_CAPTURED, NEBULA_NOT_FOUND);
}

/* Of files of which every byte is 'a'. */
static void fake_copied(int fd, const struct ipc_copied *request)
{
        char read[4096];

        fake.copied = *request;
        for (size_t i = 0; i < fake.image_count; i++)
                if (fake.images[i].id == request->image_id)
                        fake_look_at_sums(&fake.images[i], request->size, request->sum_count);
        for (size_t i = 0; i < fake.image_count; i++)
                for (uint64_t at = 0; fake.images[i].id == request->image_id && at + sizeof read <= request->size; at += 64 * sizeof read) {
                        os->pread(fake.images[i].fd, read, sizeof read, at);
                        fake.torn_count += read[0] != 'a' || memcmp(read, read + 1, sizeof read - 1) != 0;
                }
        ipc_send(fd, IPC_COPIED, NEBULA_OK, NULL, 0, -1, NULL);
}

static void fake_wait(int fd, const struct ipc_wait *request)
{
        int64_t end_ns = os->now_ns() + request->timeout_ms * 1000000;
        struct fake_version *version;

        while ((version = fake_version(request->version_id)) && !version->is_committed &&
               (request->timeout_ms < 0 || os->now_ns() < end_ns)) {
                pthread_mutex_unlock(&fake.lock);
                os->sleep_ms(2);
                pthread_mutex_lock(&fake.lock);
        }
        if (version && version->is_committed)
                ipc_send(fd, IPC_WAIT, NEBULA_OK, NULL, 0, -1, NULL);
        else
                fake_refuse(fd, IPC_WAIT, version ? NEBULA_TIMEOUT : NEBULA_NOT_FOUND);
}

static void fake_find(int fd, const struct ipc_find *request)
{
        struct ipc_found answer = { .step = -1, .state = NEBULA_STATE_COMMITTED };

        for (size_t i = fake.version_count; i-- > 0;) {
                const struct fake_version *version = &fake.versions[i];

                if (!version->is_committed || (request->tag[0] != '\0' && strcmp(request->tag, version->tag)))
                        continue;
                answer.version_id = version->id;
                memcpy(answer.tag, version->tag, sizeof answer.tag);
                ipc_send(fd, IPC_FIND, NEBULA_OK, &answer, sizeof answer, -1, NULL);
                return;
        }
        fake_refuse(fd, IPC_FIND, NEBULA_NOT_FOUND);
}

/* A file of one chunk that was cut off meanwhile. The image has the same bytes, unless the file was written again. */
static void fake_open_stored(int fd, const struct fake_image *image)
{
        size_t size = sizeof(struct ipc_opened) + sizeof(uint64_t);
        struct ipc_opened *answer = calloc(1, size);
        char *bytes = calloc(1, image->size);
        int file = os->memfd("stored");

        *answer = (struct ipc_opened){ .size = image->size, .format = image->format, .chunk_bytes = IMAGE_CHUNK_BYTES, .chunk_count = 1 };
        os->pread(image->fd, bytes, image->size, 0);
        bytes[0] ^= fake.was_written_again;
        answer->crc64[0] = sum_crc64(0, bytes, image->size);
        ipc_send(fd, IPC_OPEN, NEBULA_OK, answer, size, file, NULL);
        free(bytes);
        free(answer);
        os->close(file);
}

static void fake_open(int fd, const struct ipc_open *request)
{
        const struct fake_image *image = fake_image(request->version_id, request->name);
        struct ipc_opened answer = { 0 };

        if (!image) {
                fake_refuse(fd, IPC_OPEN, NEBULA_NOT_FOUND);
                return;
        }
        if (fake.stored_is_gone && request->reads_storage != IPC_READS_NONE) {
                fake_open_stored(fd, image);
                return;
        }
        answer.size = image->size;
        answer.format = image->format;
        answer.origin = fake.origin;
        if (fake.lends_parts && request->reads_storage == IPC_READS_PARTS) {
                answer.image_id = image->id;
                answer.chunk_bytes = IMAGE_CHUNK_BYTES;
                answer.chunk_count = (uint32_t)((image->size + IMAGE_CHUNK_BYTES - 1) / IMAGE_CHUNK_BYTES);
        }
        ipc_send(fd, IPC_OPEN, NEBULA_OK, &answer, sizeof answer, image->fd, NULL);
}

/* A request about a version that this agent does not know. */
static bool fake_is_stranger(const struct ipc_frame *frame)
{
        switch (frame->header.type) {
        case IPC_IMAGE:
                return *(const uint64_t *)frame->payload && !fake_version(*(const uint64_t *)frame->payload);
        case IPC_COMMIT: case IPC_FAIL: case IPC_WAIT: case IPC_STATE: case IPC_OPEN: case IPC_DESCRIBE:
                return !fake_version(*(const uint64_t *)frame->payload); /* all begin with version_id */
        default:
                return false;
        }
}

static void fake_answer(int fd, const struct ipc_frame *frame)
{
        enum ipc_type type = (enum ipc_type)frame->header.type;
        struct ipc_welcome welcome = { .agent_nonce = fake.nonce, .version = IPC_VERSION };
        struct ipc_state state = { 0 };

        if (fake.refuse[type] || fake_is_stranger(frame)) {
                fake_refuse(fd, type, fake.refuse[type] ? fake.refuse[type] : NEBULA_NOT_FOUND);
                return;
        }
        switch (type) {
        case IPC_HELLO:
                memcpy(&fake.hello, frame->payload, sizeof fake.hello);
                ipc_send(fd, type, NEBULA_OK, &welcome, sizeof welcome, -1, NULL);
                break;
        case IPC_CONFIGURE:
                memcpy(&fake.hello, frame->payload, sizeof fake.hello);
                fake.captured_at_configure = 0;
                for (size_t i = 0; i < fake.image_count; i++)
                        fake.captured_at_configure += fake.images[i].is_captured;
                ipc_send(fd, type, NEBULA_OK, NULL, 0, -1, NULL);
                break;
        case IPC_BEGIN:
                fake_begin(fd, frame->payload);
                break;
        case IPC_IMAGE:
                fake_lend(fd, frame->payload);
                break;
        case IPC_SPARE:
                fake_lend_spare(fd);
                break;
        case IPC_CAPTURED:
                fake_captured(fd, frame->payload);
                break;
        case IPC_COPIED:
                fake_copied(fd, frame->payload);
                break;
        case IPC_COMMIT:
                fake.commit_has_saved = ((const struct ipc_commit *)frame->payload)->has_saved;
                fake_commit(*(const uint64_t *)frame->payload);
                ipc_send(fd, type, NEBULA_OK, NULL, 0, -1, NULL);
                break;
        case IPC_STATE:
                state.state = fake_version(*(const uint64_t *)frame->payload)->is_committed ?
                              NEBULA_STATE_COMMITTED : NEBULA_STATE_CAPTURING;
                ipc_send(fd, type, NEBULA_OK, &state, sizeof state, -1, NULL);
                break;
        case IPC_WAIT:
                fake_wait(fd, frame->payload);
                break;
        case IPC_FIND:
                fake_find(fd, frame->payload);
                break;
        case IPC_OPEN:
                fake_open(fd, frame->payload);
                break;
        case IPC_REPORT: case IPC_DESCRIBE:
                ipc_send(fd, type, NEBULA_OK, "{\"a\":1}", 7, -1, NULL);
                break;
        default:
                ipc_send(fd, type, NEBULA_OK, NULL, 0, -1, NULL);
        }
}

/* As SIGKILL does: every connection ends without an answer. */
static void fake_die(void)
{
        for (size_t i = 0; i < FAKE_COUNT_MAX; i++)
                if (fake.connections[i] >= 0)
                        os->shutdown(fake.connections[i]);
        fake.nonce++;
        if (fake.forgets)
                fake_forget();
}

static void *fake_connection(void *argument)
{
        int *slot = argument;
        struct ipc_frame frame = { 0 };

        while (ipc_receive(*slot, &frame, NULL) == NEBULA_OK && ipc_request_check(&frame, NULL) == NEBULA_OK) {
                pthread_mutex_lock(&fake.lock);
                fake.seen[frame.header.type]++;
                if (fake.die_at[frame.header.type] > 0) {
                        fake.die_at[frame.header.type]--;
                        fake_die();
                        pthread_mutex_unlock(&fake.lock);
                        break;
                }
                fake_answer(*slot, &frame);
                pthread_mutex_unlock(&fake.lock);
        }
        ipc_frame_done(&frame);
        pthread_mutex_lock(&fake.lock);
        os->close(*slot);
        *slot = -1;
        fake.live_count--;
        pthread_cond_broadcast(&fake.moved);
        pthread_mutex_unlock(&fake.lock);
        return NULL;
}

static void *fake_main(void *unused)
{
        int fd;

        (void)unused;
        while ((fd = os->accept(fake.listen_fd)) >= 0) {
                pthread_t thread;
                size_t slot = 0;

                pthread_mutex_lock(&fake.lock);
                while (fake.connections[slot] >= 0)
                        slot++;
                fake.connections[slot] = fd;
                fake.live_count++;
                pthread_mutex_unlock(&fake.lock);
                pthread_create(&thread, NULL, fake_connection, &fake.connections[slot]);
                pthread_detach(thread);
        }
        return NULL;
}

static int fake_seen(enum ipc_type type)
{
        int count;

        pthread_mutex_lock(&fake.lock);
        count = fake.seen[type];
        pthread_mutex_unlock(&fake.lock);
        return count;
}

static void fake_dies_at(enum ipc_type type, int times)
{
        pthread_mutex_lock(&fake.lock);
        fake.die_at[type] = times;
        pthread_mutex_unlock(&fake.lock);
}

static int fake_deaths_left(enum ipc_type type)
{
        int count;

        pthread_mutex_lock(&fake.lock);
        count = fake.die_at[type];
        pthread_mutex_unlock(&fake.lock);
        return count;
}

static void fake_start(void)
{
        struct ipc_place place;
        struct nebula_error error;

        fake.nonce = 1000;
        fake.next_id = 0;
        fake.forgets = fake.lends_too_little = fake.stored_is_gone = fake.was_written_again = fake.lends_parts = false;
        memset(fake.seen, 0, sizeof fake.seen);
        fake.commit_count = fake.image_refusals = 0;
        memset(fake.die_at, 0, sizeof fake.die_at);
        memset(fake.refuse, 0, sizeof fake.refuse);
        for (size_t i = 0; i < FAKE_COUNT_MAX; i++)
                fake.connections[i] = -1;
        if (ipc_place_find(&place, &error) || ipc_place_make(&place, &error))
                abort();
        os->unlink(place.socket);
        fake.listen_fd = os->listen(place.socket);
        if (fake.listen_fd < 0 || pthread_create(&fake.thread, NULL, fake_main, NULL))
                abort();
}

/* Returns when all clients have disconnected. */
static void fake_await_silence(void)
{
        pthread_mutex_lock(&fake.lock);
        while (fake.live_count > 0)
                pthread_cond_wait(&fake.moved, &fake.lock);
        pthread_mutex_unlock(&fake.lock);
}

static void fake_stop(void)
{
        struct ipc_place place;

        os->shutdown(fake.listen_fd);
        pthread_join(fake.thread, NULL);
        os->close(fake.listen_fd);
        pthread_mutex_lock(&fake.lock);
        for (size_t i = 0; i < FAKE_COUNT_MAX; i++)
                if (fake.connections[i] >= 0)
                        os->shutdown(fake.connections[i]);
        while (fake.live_count > 0)
                pthread_cond_wait(&fake.moved, &fake.lock);
        fake_forget();
        pthread_mutex_unlock(&fake.lock);
        if (ipc_place_find(&place, NULL) == NEBULA_OK)
                os->unlink(place.socket);
}

#endif
