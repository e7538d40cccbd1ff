#include "ipc/ipc.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/vars.h"
#include "os/os.h"
#include "tap.h"

/* Two ends of a connection, and the last frame that one of them has received. */
static int ends[2];
static struct ipc_frame frame;
static struct nebula_error error;

static void open_ends(void)
{
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
                abort();
        memset(&error, 0, sizeof error);
}

static void close_ends(void)
{
        ipc_frame_done(&frame);
        close(ends[0]);
        if (ends[1] >= 0)
                close(ends[1]);
}

static void write_raw(const void *data, size_t size)
{
        if (write(ends[1], data, size) != (ssize_t)size)
                abort();
}

/* Closes the writing end, and receives the raw bytes that were written. */
static enum nebula_status receive_last(void)
{
        close(ends[1]);
        ends[1] = -1;
        return ipc_receive(ends[0], &frame, &error);
}

static const struct ipc_header good = { .magic = IPC_MAGIC, .type = IPC_BEGIN, .size = sizeof(struct ipc_begin) };

static void a_request_arrives_as_it_was_sent(void)
{
        struct ipc_begin begin = { .file_count = -2, .tag = "global_step5" };

        open_ends();
        CHECK(ipc_send(ends[1], IPC_BEGIN, NEBULA_OK, &begin, sizeof begin, -1, &error) == NEBULA_OK);
        CHECK(ipc_receive(ends[0], &frame, &error) == NEBULA_OK);
        CHECK(frame.header.type == IPC_BEGIN && frame.header.size == sizeof begin && !frame.header.has_fd);
        CHECK(memcmp(frame.payload, &begin, sizeof begin) == 0);
        CHECK(ipc_request_check(&frame, &error) == NEBULA_OK);
        close_ends();
}

struct bulk {
        const char *data;
        size_t size;
};

static void *send_bulk(void *argument)
{
        const struct bulk *bulk = argument;

        ipc_send(ends[1], IPC_REPORT, NEBULA_OK, bulk->data, bulk->size, -1, NULL);
        return NULL;
}

static void a_payload_larger_than_any_socket_buffer_arrives_whole(void)
{
        struct bulk bulk = { malloc(3u << 20), 3u << 20 };
        pthread_t thread;

        for (size_t i = 0; i < bulk.size; i++)
                ((char *)(uintptr_t)bulk.data)[i] = (char)(i * 7 + i / 4096);
        open_ends();
        pthread_create(&thread, NULL, send_bulk, &bulk);
        CHECK(ipc_receive(ends[0], &frame, &error) == NEBULA_OK);
        pthread_join(thread, NULL);
        CHECK(frame.header.size == bulk.size && memcmp(frame.payload, bulk.data, bulk.size) == 0);
        CHECK(((char *)frame.payload)[bulk.size] == '\0');
        close_ends();
        free((void *)(uintptr_t)bulk.data);
}

static void a_payload_beyond_the_limit_is_not_sent(void)
{
        open_ends();
        CHECK(ipc_send(ends[1], IPC_REPORT, NEBULA_OK, "", (size_t)IPC_PAYLOAD_MAX + 1, -1, &error) == NEBULA_INVALID);
        CHECK(receive_last() == NEBULA_UNAVAILABLE); /* nothing was sent */
        close_ends();
}

static void *answer_with_a_long_text(void *argument)
{
        struct ipc_frame request = { 0 };

        if (ipc_receive(ends[1], &request, NULL) == NEBULA_OK)
                ipc_send_text(ends[1], IPC_REPORT, argument, (size_t)IPC_PAYLOAD_MAX + 5, NULL);
        ipc_frame_done(&request);
        return NULL;
}

static void a_text_that_is_larger_than_a_frame_arrives_whole(void)
{
        size_t size = (size_t)IPC_PAYLOAD_MAX + 5;
        struct ipc_report report = { .report = NEBULA_REPORT_VERSIONS };
        char *text = malloc(size + 1);
        pthread_t thread;
        bool is_broken;

        if (!text)
                abort();
        for (size_t i = 0; i < size; i++)
                text[i] = (char)('a' + i % 23);
        open_ends();
        pthread_create(&thread, NULL, answer_with_a_long_text, text);
        CHECK(ipc_call(ends[0], IPC_REPORT, &report, sizeof report, -1, &frame, &is_broken, &error) == NEBULA_OK);
        CHECK(frame.header.size == size && !memcmp(frame.payload, text, size) && !((char *)frame.payload)[size]);
        CHECK(!frame.header.has_fd && !is_broken);
        pthread_join(thread, NULL);
        close_ends();
        free(text);
}

static void *answer_with_a_pipe(void *argument)
{
        struct ipc_frame request = { 0 };

        if (ipc_receive(ends[1], &request, NULL) == NEBULA_OK)
                ipc_send(ends[1], IPC_REPORT, NEBULA_OK, NULL, 0, *(int *)argument, NULL);
        ipc_frame_done(&request);
        return NULL;
}

static void a_text_that_is_no_file_is_refused_and_not_waited_for(void)
{
        struct ipc_report report = { .report = NEBULA_REPORT_VERSIONS };
        pthread_t thread;
        bool is_broken;
        int pipes[2];

        if (pipe(pipes))
                abort();
        open_ends();
        pthread_create(&thread, NULL, answer_with_a_pipe, &pipes[0]);
        CHECK(ipc_call(ends[0], IPC_REPORT, &report, sizeof report, -1, &frame, &is_broken, &error) == NEBULA_INVALID);
        pthread_join(thread, NULL);
        close_ends();
        close(pipes[0]);
        close(pipes[1]);
}

static void garbled_magic_is_refused(void)
{
        struct ipc_header header = good;

        header.magic ^= 0x100;
        open_ends();
        write_raw(&header, sizeof header);
        CHECK(receive_last() == NEBULA_INVALID);
        CHECK(strstr(error.message, "protocol"));
        close_ends();
}

static void unknown_types_are_refused(void)
{
        static const uint16_t types[] = { 0, IPC_TYPE_LAST + 1, 0xffff };

        for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
                struct ipc_header header = good;

                header.type = types[i];
                open_ends();
                write_raw(&header, sizeof header);
                CHECK(receive_last() == NEBULA_INVALID);
                close_ends();
        }
}

static void a_claim_of_too_many_bytes_is_refused_before_memory_is_taken(void)
{
        struct ipc_header header = good;

        header.size = IPC_PAYLOAD_MAX + 1;
        open_ends();
        write_raw(&header, sizeof header);
        CHECK(receive_last() == NEBULA_INVALID);
        CHECK(frame.capacity == 0);
        close_ends();
}

static void death_at_every_byte_of_a_frame_is_told_as_such(void)
{
        struct ipc_begin begin = { .tag = "x" };
        char bytes[sizeof good + sizeof begin];

        memcpy(bytes, &good, sizeof good);
        memcpy(bytes + sizeof good, &begin, sizeof begin);
        for (size_t size = 0; size < sizeof bytes; size++) {
                open_ends();
                write_raw(bytes, size);
                CHECK(receive_last() == NEBULA_UNAVAILABLE);
                close_ends();
        }
}

static void sending_to_the_dead_is_an_error_and_no_signal(void)
{
        struct ipc_version version = { 1 };

        open_ends();
        close(ends[0]);
        CHECK(ipc_send(ends[1], IPC_COMMIT, NEBULA_OK, &version, sizeof version, -1, &error) == NEBULA_UNAVAILABLE);
        ends[0] = dup(ends[1]);
        close_ends();
}

static void a_text_without_its_end_is_refused(void)
{
        struct ipc_begin begin;

        memset(&begin, 'a', sizeof begin);
        open_ends();
        ipc_send(ends[1], IPC_BEGIN, NEBULA_OK, &begin, sizeof begin, -1, &error);
        CHECK(ipc_receive(ends[0], &frame, &error) == NEBULA_OK);
        CHECK(ipc_request_check(&frame, &error) == NEBULA_INVALID);
        close_ends();
}

static void every_text_of_a_greeting_is_checked(void)
{
        static const size_t last[] = { /* the last byte of each */
                offsetof(struct ipc_hello, output_dir) - 1, offsetof(struct ipc_hello, job) - 1,
                offsetof(struct ipc_hello, run) - 1, offsetof(struct ipc_hello, run) + IPC_NAME_MAX - 1,
        };
        static struct ipc_hello hello;

        for (size_t i = 0; i < sizeof last / sizeof last[0]; i++) {
                struct ipc_frame request = { .header = { .magic = IPC_MAGIC, .type = IPC_HELLO, .size = sizeof hello },
                                             .payload = &hello, .fd = -1 };

                memset(&hello, 0, sizeof hello);
                hello.version = IPC_VERSION;
                CHECK(ipc_request_check(&request, &error) == NEBULA_OK);
                memset(i == 0 ? hello.persist_path : i == 1 ? hello.output_dir : i == 2 ? hello.job : hello.run, 'x',
                       i < 2 ? IPC_PATH_MAX : IPC_NAME_MAX);
                CHECK(((char *)&hello)[last[i]] == 'x');
                CHECK(ipc_request_check(&request, &error) == NEBULA_INVALID);
        }
}

/* The rest of the request may have any form, because another version may have changed it. */
static void a_greeting_of_another_version_is_told_so(void)
{
        static const uint32_t sizes[] = { sizeof(uint32_t), sizeof(struct ipc_hello) - 8, sizeof(struct ipc_hello),
                                          sizeof(struct ipc_hello) + 8 };
        static char payload[sizeof(struct ipc_hello) + 8];
        uint32_t version = IPC_VERSION + 1;

        memcpy(payload, &version, sizeof version);
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                struct ipc_frame request = { .header = { .type = IPC_HELLO, .size = sizes[i] }, .payload = payload, .fd = -1 };

                CHECK(ipc_request_check(&request, &error) == NEBULA_UNAVAILABLE);
                CHECK(error.sys_errno == EPROTO && strstr(error.message, "nebula stop"));
        }
}

static void a_request_of_the_wrong_size_is_refused(void)
{
        for (uint16_t type = IPC_HELLO; type <= IPC_TYPE_LAST; type++) {
                static char payload[sizeof(struct ipc_hello) + 1];
                struct ipc_frame request = { .header = { .type = type }, .payload = payload, .fd = -1 };
                uint32_t version = type == IPC_HELLO ? IPC_VERSION : 0;

                memcpy(payload, &version, sizeof version);

                CHECK(ipc_request_size((enum ipc_type)type) > 0);
                request.header.size = (uint32_t)ipc_request_size((enum ipc_type)type);
                CHECK(ipc_request_check(&request, &error) == NEBULA_OK);
                request.header.size--;
                CHECK(ipc_request_check(&request, &error) == NEBULA_INVALID);
                request.header.size += 2;
                payload[request.header.size - 1] = 'x';
                CHECK(ipc_request_check(&request, &error) == NEBULA_INVALID);
                payload[request.header.size - 1] = 0;
        }
        CHECK(ipc_request_size((enum ipc_type)0) == 0 && ipc_request_size((enum ipc_type)(IPC_TYPE_LAST + 1)) == 0);
}

static void a_greeting_may_bring_variables(void)
{
        static char payload[sizeof(struct ipc_hello) + VARS_MAX + 1];
        static const struct {
                uint16_t type;
                uint32_t extra;
                enum nebula_status status;
        } cases[] = { { IPC_HELLO, 5, NEBULA_OK }, { IPC_CONFIGURE, 5, NEBULA_OK }, { IPC_HELLO, VARS_MAX, NEBULA_OK }, { IPC_HELLO, VARS_MAX + 1, NEBULA_INVALID },
                      { IPC_HELLO, 4, NEBULA_INVALID }, { IPC_BEGIN, 5, NEBULA_INVALID } };
        uint32_t version = IPC_VERSION;

        memcpy(payload, &version, sizeof version);
        memcpy(payload + sizeof(struct ipc_hello), "A=bc", 5);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
                struct ipc_frame request = { .header = { .type = cases[i].type }, .payload = payload, .fd = -1 };

                request.header.size = (uint32_t)ipc_request_size((enum ipc_type)cases[i].type) + cases[i].extra;
                CHECK(ipc_request_check(&request, &error) == cases[i].status);
        }
}

static void a_descriptor_travels_with_its_frame(void)
{
        struct ipc_opened opened = { .size = 5 };
        char text[6] = "";
        int file = os->memfd("ipc-test");

        REQUIRE(file >= 0);
        CHECK(pwrite(file, "hello", 5, 0) == 5);
        open_ends();
        CHECK(ipc_send(ends[1], IPC_OPEN, NEBULA_OK, &opened, sizeof opened, file, &error) == NEBULA_OK);
        close(file);
        CHECK(ipc_receive(ends[0], &frame, &error) == NEBULA_OK);
        REQUIRE(frame.header.has_fd && frame.fd >= 0);
        CHECK(pread(frame.fd, text, 5, 0) == 5 && strcmp(text, "hello") == 0);
        CHECK(fcntl(frame.fd, F_GETFD) & FD_CLOEXEC);
        close_ends();
}

static void a_spare_image_comes_with_its_descriptor_and_no_image_without_one(void)
{
        struct ipc_spare_image spare = { 0 };
        struct ipc_frame answer = { .header = { .type = IPC_SPARE, .size = sizeof spare }, .payload = &spare, .fd = -1 };
        bool is_broken;

        for (uint64_t id = 0; id < 2; id++)
                for (uint16_t has_fd = 0; has_fd < 2; has_fd++) {
                        spare.image_id = id;
                        answer.header.has_fd = has_fd;
                        CHECK((ipc_answer_check(&answer, IPC_SPARE, &is_broken, &error) == NEBULA_OK) == (has_fd == id));
                }
}

static void a_received_descriptor_that_is_not_taken_is_closed(void)
{
        struct ipc_version version = { 1 };
        int kept;

        open_ends();
        ipc_send(ends[1], IPC_OPEN, NEBULA_OK, &version, sizeof version, ends[1], &error);
        ipc_send(ends[1], IPC_COMMIT, NEBULA_OK, &version, sizeof version, -1, &error);
        CHECK(ipc_receive(ends[0], &frame, &error) == NEBULA_OK);
        kept = frame.fd;
        CHECK(fcntl(kept, F_GETFD) >= 0);
        CHECK(ipc_receive(ends[0], &frame, &error) == NEBULA_OK);
        CHECK(frame.fd == -1 && fcntl(kept, F_GETFD) < 0);
        close_ends();
}

static void a_descriptor_that_was_taken_stays_open(void)
{
        struct ipc_version version = { 1 };
        int kept;

        open_ends();
        ipc_send(ends[1], IPC_OPEN, NEBULA_OK, &version, sizeof version, ends[1], &error);
        CHECK(ipc_receive(ends[0], &frame, &error) == NEBULA_OK);
        kept = frame.fd;
        frame.fd = -1;
        ipc_frame_done(&frame);
        CHECK(fcntl(kept, F_GETFD) >= 0);
        close(kept);
        close_ends();
}

static void promised_and_received_descriptors_must_agree(void)
{
        struct ipc_header header = good;
        struct ipc_begin begin = { .tag = "x" };

        header.has_fd = 1;
        open_ends();
        write_raw(&header, sizeof header);
        write_raw(&begin, sizeof begin);
        CHECK(receive_last() == NEBULA_INVALID);
        close_ends();

        open_ends(); /* one that comes unannounced, with the payload's bytes */
        write_raw(&good, sizeof good);
        CHECK(os->send(ends[1], &begin, sizeof begin, ends[1]) == (int64_t)sizeof begin);
        CHECK(receive_last() == NEBULA_INVALID);
        close_ends();
}

static void requests_that_come_together_or_in_pieces_are_received_one_by_one(void)
{
        static struct ipc_hello hello = { .version = IPC_VERSION, .job = "j" }; /* larger than an inbox */
        struct ipc_version version = { 7 };
        struct ipc_inbox inbox = { 0 };
        struct ipc_begin begin = { .file_count = -2, .tag = "global_step5" };
        char text[2 * sizeof good + sizeof begin];

        open_ends();
        CHECK(!ipc_send(ends[1], IPC_COMMIT, NEBULA_OK, &version, sizeof version, -1, &error));
        CHECK(!ipc_send(ends[1], IPC_HELLO, NEBULA_OK, &hello, sizeof hello, -1, &error));
        for (int i = 0; i < 20; i++) /* the inbox ends somewhere in them, in a header and in a payload */
                CHECK(!ipc_send(ends[1], IPC_BEGIN, NEBULA_OK, &begin, sizeof begin - 1 - (size_t)i, -1, &error));
        CHECK(!ipc_receive_request(ends[0], &inbox, &frame, &error));
        CHECK(frame.header.type == IPC_COMMIT && !memcmp(frame.payload, &version, sizeof version));
        CHECK(!ipc_receive_request(ends[0], &inbox, &frame, &error));
        CHECK(frame.header.type == IPC_HELLO && !memcmp(frame.payload, &hello, sizeof hello));
        for (int i = 0; i < 20; i++) {
                CHECK(!ipc_receive_request(ends[0], &inbox, &frame, &error));
                CHECK(frame.header.type == IPC_BEGIN && frame.header.size == sizeof begin - 1 - (size_t)i);
                CHECK(!memcmp(frame.payload, &begin, frame.header.size) && !((char *)frame.payload)[frame.header.size]);
        }
        CHECK(!inbox.count);
        memcpy(text, &good, sizeof good);
        memcpy(text + sizeof good, &begin, sizeof begin);
        memcpy(text + sizeof good + sizeof begin, &good, sizeof good);
        write_raw(text, 10);
        CHECK(os->poll(ends[0], 0) == 1);
        write_raw(text + 10, sizeof text - 11); /* the second header lacks its last byte */
        CHECK(!ipc_receive_request(ends[0], &inbox, &frame, &error));
        CHECK(frame.header.type == IPC_BEGIN && !memcmp(frame.payload, &begin, sizeof begin));
        close(ends[1]);
        ends[1] = -1;
        CHECK(ipc_receive_request(ends[0], &inbox, &frame, &error) == NEBULA_UNAVAILABLE);
        close_ends();
}

/* Waits for nothing: a receive that waited would not return here, where nothing else follows. */
static void received_bytes_are_kept_until_the_request_is_complete(void)
{
        struct ipc_header large = { .magic = IPC_MAGIC, .type = IPC_HELLO, .size = sizeof(struct ipc_hello) };
        struct ipc_begin begin = { .file_count = 3, .tag = "t" };
        struct ipc_header header = { .magic = IPC_MAGIC, .type = IPC_BEGIN, .size = sizeof begin };
        struct ipc_inbox inbox = { 0 };

        open_ends();
        for (int round = 0; round < 20; round++) { /* wherever in the inbox it begins */
                write_raw(&header, sizeof header - 1);
                CHECK(!ipc_inbox_fill(ends[0], &inbox, &error) && ipc_inbox_held(&inbox) == IPC_HELD_PART);
                write_raw((char *)&header + sizeof header - 1, 1);
                CHECK(!ipc_inbox_fill(ends[0], &inbox, &error) && ipc_inbox_held(&inbox) == IPC_HELD_PART);
                write_raw(&begin, sizeof begin);
                CHECK(!ipc_send(ends[1], IPC_BEGIN, NEBULA_OK, &begin, sizeof begin, -1, &error));
                CHECK(!ipc_inbox_fill(ends[0], &inbox, &error));
                for (int i = 0; i < 2; i++) {
                        CHECK(ipc_inbox_held(&inbox) == IPC_HELD_WHOLE);
                        CHECK(!ipc_receive_request(ends[0], &inbox, &frame, &error));
                        CHECK(frame.header.type == IPC_BEGIN && !memcmp(frame.payload, &begin, sizeof begin));
                }
                CHECK(ipc_inbox_held(&inbox) == IPC_HELD_PART && !inbox.count);
        }
        write_raw(&large, sizeof large);
        CHECK(!ipc_inbox_fill(ends[0], &inbox, &error) && ipc_inbox_held(&inbox) == IPC_HELD_LARGE);
        inbox.count = 0;
        large.size = IPC_PAYLOAD_MAX + 1;
        write_raw(&large, sizeof large);
        CHECK(!ipc_inbox_fill(ends[0], &inbox, &error) && ipc_inbox_held(&inbox) == IPC_HELD_WHOLE);
        CHECK(ipc_receive_request(ends[0], &inbox, &frame, &error) == NEBULA_INVALID); /* and reads no more */
        inbox.count = 0;
        CHECK(!ipc_send(ends[1], IPC_BEGIN, NEBULA_OK, &begin, sizeof begin, ends[1], &error));
        CHECK(ipc_inbox_fill(ends[0], &inbox, &error) == NEBULA_INVALID); /* with a descriptor */
        close(ends[1]);
        ends[1] = -1;
        inbox.count = 0;
        CHECK(ipc_inbox_fill(ends[0], &inbox, &error) == NEBULA_UNAVAILABLE);
        close_ends();
}

static void a_request_with_a_descriptor_is_refused_and_the_descriptor_closed(void)
{
        struct ipc_version version = { 1 };
        struct ipc_inbox inbox = { 0 };
        int next;

        open_ends();
        CHECK(!ipc_send(ends[1], IPC_COMMIT, NEBULA_OK, &version, sizeof version, ends[1], &error));
        next = dup(ends[0]); /* the number of the next descriptor */
        close(next);
        CHECK(ipc_receive_request(ends[0], &inbox, &frame, &error) == NEBULA_INVALID);
        CHECK(fcntl(next, F_GETFD) < 0 && frame.fd == -1);
        close_ends();
}

static void a_request_of_an_impossible_size_is_refused_before_it_is_read(void)
{
        struct ipc_header header = good;
        struct ipc_inbox inbox = { 0 };

        header.size = IPC_PAYLOAD_MAX + 1;
        open_ends();
        write_raw(&header, sizeof header);
        CHECK(ipc_receive_request(ends[0], &inbox, &frame, &error) == NEBULA_INVALID);
        close_ends();
}

static void a_zeroed_frame_is_harmless(void)
{
        struct ipc_frame zeroed = { 0 };

        ipc_frame_done(&zeroed);
        CHECK(fcntl(0, F_GETFD) >= 0 || errno == EBADF); /* standard input was not taken for a descriptor of ours */
        memset(&zeroed, 0, sizeof zeroed);
        open_ends();
        write_raw("", 0);
        close(ends[1]);
        ends[1] = -1;
        CHECK(ipc_receive(ends[0], &zeroed, &error) == NEBULA_UNAVAILABLE);
        CHECK(zeroed.fd == -1);
        close_ends();
}

/* A table whose sockets move three bytes at a time and are interrupted every other call. */
static int tick;

static int64_t short_send(int fd, const void *data, size_t size, int passed_fd)
{
        return ++tick % 2 ? -EINTR : os_linux.send(fd, data, size < 3 ? size : 3, passed_fd);
}

static int64_t short_receive(int fd, void *data, size_t size, int *ret_passed_fd)
{
        return ++tick % 2 ? -EINTR : os_linux.receive(fd, data, size < 3 ? size : 3, ret_passed_fd);
}

static void interruptions_and_short_transfers_change_nothing(void)
{
        struct os_table table = *os;
        const struct os_table *before = os;
        struct ipc_begin begin = { .file_count = 3, .tag = "short" };

        table.send = short_send;
        table.receive = short_receive;
        open_ends();
        os = &table;
        CHECK(ipc_send(ends[1], IPC_BEGIN, NEBULA_OK, &begin, sizeof begin, ends[1], &error) == NEBULA_OK);
        CHECK(ipc_receive(ends[0], &frame, &error) == NEBULA_OK);
        os = before;
        CHECK(frame.header.has_fd && frame.fd >= 0);
        CHECK(frame.header.size == sizeof begin && memcmp(frame.payload, &begin, sizeof begin) == 0);
        close_ends();
}

static void a_refusal_arrives_in_words(void)
{
        struct nebula_error failure = { .status = NEBULA_NO_SPACE, .sys_errno = ENOSPC, .http_status = 507,
                                        .message = "the disk is full" };
        bool is_broken = true;

        open_ends();
        CHECK(ipc_send_error(ends[1], IPC_IMAGE, &failure, 77, &error) == NEBULA_OK);
        CHECK(ipc_receive(ends[0], &frame, &error) == NEBULA_OK);
        CHECK(ipc_answer_check(&frame, IPC_IMAGE, &is_broken, &error) == NEBULA_NO_SPACE);
        CHECK(!is_broken && error.status == NEBULA_NO_SPACE && error.sys_errno == ENOSPC && error.http_status == 507);
        CHECK(strcmp(error.message, "the disk is full") == 0 && ipc_refused_version(&frame) == 77);
        CHECK(ipc_send_error(ends[1], IPC_IMAGE, &failure, 0, &error) == NEBULA_OK);
        CHECK(ipc_receive(ends[0], &frame, &error) == NEBULA_OK && ipc_refused_version(&frame) == 0);
        close_ends();
}

static void an_answer_to_another_question_breaks_the_connection(void)
{
        struct ipc_state state = { 0 };
        bool is_broken = false;

        open_ends();
        ipc_send(ends[1], IPC_STATE, NEBULA_OK, &state, sizeof state, -1, &error);
        CHECK(ipc_receive(ends[0], &frame, &error) == NEBULA_OK);
        CHECK(ipc_answer_check(&frame, IPC_STATE, &is_broken, &error) == NEBULA_OK && !is_broken);
        CHECK(ipc_answer_check(&frame, IPC_BEGIN, &is_broken, &error) == NEBULA_INTERNAL && is_broken);
        frame.header.status = 77;
        CHECK(ipc_answer_check(&frame, IPC_STATE, &is_broken, &error) == NEBULA_INTERNAL && is_broken);
        close_ends();
}

static void a_call_gives_up_on_a_silent_agent(void)
{
        struct ipc_version version = { 1 };
        bool is_broken = false;

        open_ends();
        CHECK(ipc_call(ends[0], IPC_COMMIT, &version, sizeof version, 20, &frame, &is_broken, &error) == NEBULA_TIMEOUT);
        CHECK(is_broken);
        close_ends();
}

static void a_call_returns_the_answer(void)
{
        struct ipc_begin begin = { .tag = "x" };
        struct ipc_begun begun = { 42 };
        bool is_broken = true;

        open_ends();
        ipc_send(ends[1], IPC_BEGIN, NEBULA_OK, &begun, sizeof begun, -1, &error);
        CHECK(ipc_call(ends[0], IPC_BEGIN, &begin, sizeof begin, 1000, &frame, &is_broken, &error) == NEBULA_OK);
        CHECK(!is_broken && ((struct ipc_begun *)frame.payload)->version_id == 42);
        close_ends();
}

/* Otherwise a sender could make its receiver allocate 16 MiB and wait for them. */
static void a_request_that_is_larger_than_any_is_refused_before_its_bytes_come(void)
{
        struct ipc_header header = good;
        struct ipc_inbox inbox = { 0 };

        for (unsigned type = IPC_HELLO; type <= IPC_TYPE_LAST; type++)
                CHECK(ipc_request_size((enum ipc_type)type) <= IPC_REQUEST_MAX);
        for (unsigned i = 0; i < 2; i++) {
                open_ends();
                header.type = i ? IPC_HELLO : IPC_BEGIN;
                header.size = IPC_REQUEST_MAX + 1;
                write_raw(&header, sizeof header);
                CHECK(!ipc_inbox_fill(ends[0], &inbox, &error) && ipc_inbox_held(&inbox) == IPC_HELD_WHOLE);
                close(ends[1]); /* nothing more comes */
                ends[1] = -1;
                CHECK(ipc_receive_request(ends[0], &inbox, &frame, &error) == NEBULA_INVALID);
                CHECK(strstr(error.message, "claims"));
                CHECK(frame.capacity < IPC_REQUEST_MAX);
                close_ends();
        }
}

TAP_MAIN(TEST(a_request_that_is_larger_than_any_is_refused_before_its_bytes_come),
        TEST(a_request_arrives_as_it_was_sent),
        TEST(a_payload_larger_than_any_socket_buffer_arrives_whole),
        TEST(a_payload_beyond_the_limit_is_not_sent),
        TEST(a_text_that_is_larger_than_a_frame_arrives_whole),
        TEST(a_text_that_is_no_file_is_refused_and_not_waited_for),
        TEST(garbled_magic_is_refused),
        TEST(unknown_types_are_refused),
        TEST(a_claim_of_too_many_bytes_is_refused_before_memory_is_taken),
        TEST(death_at_every_byte_of_a_frame_is_told_as_such),
        TEST(sending_to_the_dead_is_an_error_and_no_signal),
        TEST(a_text_without_its_end_is_refused),
        TEST(every_text_of_a_greeting_is_checked),
        TEST(a_greeting_of_another_version_is_told_so),
        TEST(a_request_of_the_wrong_size_is_refused), TEST(a_greeting_may_bring_variables),
        TEST(a_descriptor_travels_with_its_frame),
        TEST(a_spare_image_comes_with_its_descriptor_and_no_image_without_one),
                TEST(a_received_descriptor_that_is_not_taken_is_closed),
        TEST(a_descriptor_that_was_taken_stays_open),
        TEST(promised_and_received_descriptors_must_agree),
        TEST(requests_that_come_together_or_in_pieces_are_received_one_by_one),
        TEST(a_request_with_a_descriptor_is_refused_and_the_descriptor_closed),
        TEST(received_bytes_are_kept_until_the_request_is_complete),
        TEST(a_request_of_an_impossible_size_is_refused_before_it_is_read),
        TEST(a_zeroed_frame_is_harmless),
        TEST(interruptions_and_short_transfers_change_nothing),
        TEST(a_refusal_arrives_in_words),
        TEST(an_answer_to_another_question_breaks_the_connection),
        TEST(a_call_gives_up_on_a_silent_agent),
        TEST(a_call_returns_the_answer),
)
