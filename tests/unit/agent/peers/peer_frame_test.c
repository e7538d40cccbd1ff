#include "agent/peers/peer_frame.h"
#include "agent/peers/tls.h"
#include "os/os.h"
#include "os/thread.h"
#include "store/document.h"
#include "tap.h"

static void write_header(uint8_t *bytes, enum peer_type type, uint64_t number, uint32_t size)
{
        peer_header_write(&(struct peer_header){ .type = type, .number = number, .size = size, .crc64 = 77 }, bytes);
}

static enum nebula_status read_header(const uint8_t *bytes, uint64_t number, struct nebula_error *error)
{
        struct peer_header header;

        return peer_header_read(bytes, number, &header, error);
}

static void a_header_comes_back_as_it_was_written(void)
{
        uint8_t bytes[PEER_HEADER_BYTES];
        struct peer_header header;

        write_header(bytes, PEER_OFFER, 41, 1000);
        REQUIRE(!peer_header_read(bytes, 41, &header, NULL));
        CHECK(header.type == PEER_OFFER && header.number == 41 && header.size == 1000 && header.crc64 == 77);
        CHECK(!memcmp(bytes, "NEBP", 4));
}

static void a_frame_that_comes_twice_or_out_of_turn_is_refused(void)
{
        uint8_t bytes[PEER_HEADER_BYTES];
        struct nebula_error error;

        write_header(bytes, PEER_SEAL, 5, 10);
        CHECK(!read_header(bytes, 5, &error));
        CHECK(read_header(bytes, 6, &error) == NEBULA_CORRUPT && strstr(error.message, "number 5 where 6"));
        CHECK(read_header(bytes, 4, &error) == NEBULA_CORRUPT);
}

static void every_flipped_bit_of_the_fixed_part_is_refused(void)
{
        uint8_t bytes[PEER_HEADER_BYTES];

        for (unsigned bit = 0; bit < 8 * 24; bit++) {
                struct peer_header header;

                write_header(bytes, PEER_DATA, 9, PEER_HEAD_BYTES + PEER_PIECE_BYTES);
                bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
                /* A changed type or size may be valid. Then the frame is read as another one, and the checksum of its body is wrong. */
                if (!peer_header_read(bytes, 9, &header, NULL))
                        CHECK(bit / 8 == 6 || (bit / 8 >= 16 && bit / 8 < 20));
        }
}

static void sizes_are_bounded_by_the_type(void)
{
        uint8_t bytes[PEER_HEADER_BYTES];

        write_header(bytes, PEER_DATA, 1, PEER_HEAD_BYTES - 1);
        CHECK(read_header(bytes, 1, NULL) == NEBULA_CORRUPT);
        write_header(bytes, PEER_DATA, 1, PEER_HEAD_BYTES + PEER_PIECE_BYTES + 1);
        CHECK(read_header(bytes, 1, NULL) == NEBULA_CORRUPT);
        write_header(bytes, PEER_LISTED, 1, PEER_TEXT_MAX + 1);
        CHECK(read_header(bytes, 1, NULL) == NEBULA_CORRUPT);
        write_header(bytes, (enum peer_type)0, 1, 0);
        CHECK(read_header(bytes, 1, NULL) == NEBULA_CORRUPT);
}

static void a_copy_comes_back_with_its_files_and_ranks(void)
{
        uint32_t ranks[3] = { 3, 4, 5 };
        struct peer_file files[2] = { { .name = "a \"quoted\" name", .size = 5u << 20, .rank = 3, .held = true,
                                        .format = IPC_FORMAT_RAW },
                                      { .name = "b", .size = 1, .rank = 4, .origin = 1 } };
        struct peer_copy copy = { .id = UINT64_MAX, .writing = 2, .sequence = 1766312345160000000, .owner = "n", .tag = "global_step5",
                                  .run = "r", .world = 8, .files = files, .file_count = 2, .ranks = ranks, .rank_count = 3 }, back;
        char *text;
        size_t size;

        REQUIRE(!peer_copy_format(&copy, &text, &size, NULL));
        REQUIRE(!peer_copy_parse(text, size, &back, NULL));
        CHECK(back.id == copy.id && back.sequence == copy.sequence && back.world == 8 && back.file_count == 2);
        CHECK(!strcmp(back.files[0].name, files[0].name) && back.files[0].held && back.files[0].format == IPC_FORMAT_RAW);
        CHECK(back.rank_count == 3 && !memcmp(back.ranks, ranks, sizeof ranks));
        CHECK(!back.files[1].held && back.files[1].origin == 1 && back.files[1].rank == 4);
        peer_copy_done(&back);
        for (size_t cut = 0; cut < size; cut++)
                CHECK(peer_copy_parse(text, cut, &back, NULL) == NEBULA_CORRUPT);
        for (size_t i = 0; i < size; i++) {
                text[i] ^= 4;
                CHECK(peer_copy_parse(text, size, &back, NULL));
                text[i] ^= 4;
        }
        free(text);
}

static void a_request_for_a_chunk_comes_back_as_it_was_written_and_no_part_of_it_is_one(void)
{
        struct peer_part part = { .tag = "global_step7", .name = "model.pt", .sequence = 1u << 20, .origin = 3, .chunk = 4000000000u }, back;
        char *text;
        size_t size;

        REQUIRE(!peer_part_format(&part, &text, &size, NULL));
        REQUIRE(!peer_part_parse(text, size, &back, NULL));
        CHECK(!strcmp(back.tag, part.tag) && !strcmp(back.name, part.name) && back.sequence == part.sequence && back.origin == 3 &&
              back.chunk == part.chunk);
        for (size_t cut = 0; cut < size; cut++)
                CHECK(peer_part_parse(text, cut, &back, NULL) == NEBULA_CORRUPT);
        free(text);
}

static void a_copy_of_an_earlier_build_has_the_ranks_of_its_files(void)
{
        struct peer_file files[2] = { { .name = "a", .rank = 3 }, { .name = "b", .rank = 4 } };
        struct peer_copy copy = { .id = 1, .writing = 1, .sequence = 1, .owner = "n", .tag = "t", .run = "r", .world = 8, .files = files,
                                  .file_count = 2 }, back;
        char *text, *without;
        size_t size;
        json_t *body;

        REQUIRE(!peer_copy_format(&copy, &text, &size, NULL));
        body = json_loadb(text, size, 0, NULL);
        free(text);
        REQUIRE(body && !json_object_del(body, "ranks") && !json_object_del(body, "crc64"));
        REQUIRE(!document_format(body, &without, &size, NULL));
        json_decref(body);
        REQUIRE(!peer_copy_parse(without, size, &back, NULL));
        CHECK(back.rank_count == 2 && back.ranks[0] == 3 && back.ranks[1] == 4);
        peer_copy_done(&back);
        free(without);
}

/* Two ends of a real socket. */

struct server {
        int fd;
        struct tls_key key;
        struct tls *tls;
        enum nebula_status status;
        struct nebula_error error;
};

static bool find(void *argument, const char *identity, struct tls_key *ret_key)
{
        struct server *server = argument;

        *ret_key = server->key;
        return !strcmp(identity, server->key.identity);
}

static void *serve(void *argument)
{
        struct server *server = argument;
        struct tls_key used;

        server->status = peer_tls_accept(server->fd, find, server, 5000, &server->tls, &used, &server->error);
        return NULL;
}

static enum nebula_status shake(struct server *server, const struct tls_key *client_key, int fds[2], struct tls **ret_tls,
                                struct nebula_error *error)
{
        pthread_t thread;
        enum nebula_status status;

        if (os->socketpair(fds) < 0)
                abort();
        server->fd = fds[1];
        os_thread_start(&thread, serve, server, false);
        status = peer_tls_connect(fds[0], client_key, 5000, ret_tls, error);
        if (status)
                os->shutdown(fds[0]);
        pthread_join(thread, NULL);
        return status;
}

static void ends_with_one_secret_talk_and_others_do_not(void)
{
        struct server server = { 0 };
        struct tls_key other;
        struct nebula_error error;
        struct tls *client;
        char text[6];
        int fds[2];

        CHECK(peer_tls_key_init(&other, "short", 5, &error) == NEBULA_INVALID);
        REQUIRE(!peer_tls_key_init(&server.key, "the secret of one job", 21, &error));
        REQUIRE(!peer_tls_key_init(&other, "the secret of another", 21, &error));
        CHECK(strcmp(server.key.identity, other.identity));
        REQUIRE(!shake(&server, &server.key, fds, &client, &error) && !server.status);
        CHECK(!peer_tls_send(client, "hello", 6, &error) && !peer_tls_receive(server.tls, text, 6, 5000, &error) && !strcmp(text, "hello"));
        CHECK(peer_tls_receive(server.tls, text, 1, 50, &error) == NEBULA_UNAVAILABLE && strstr(error.message, "silent"));
        peer_tls_free(client);
        peer_tls_free(server.tls);
        os->close(fds[0]);
        os->close(fds[1]);

        CHECK(shake(&server, &other, fds, &client, &error));
        CHECK(server.status == NEBULA_INVALID && strstr(server.error.message, "another secret"));
        os->close(fds[0]);
        os->close(fds[1]);

        /* The identity of the right key with another key. */
        strcpy(other.identity, server.key.identity);
        CHECK(shake(&server, &other, fds, &client, &error) && server.status);
        os->close(fds[0]);
        os->close(fds[1]);
}

/* A node may hold many copies of versions with many files. Their owners must find the newest of them. */
static void a_listing_that_would_be_too_long_has_the_newest_copies(void)
{
        enum { COPIES = 3, FILES = 20000 };
        struct peer_copy copies[COPIES] = { 0 };
        struct peer_listing listing = { .copies = copies, .count = COPIES }, found;
        struct nebula_error error;
        char *text;
        size_t size;

        for (unsigned i = 0; i < COPIES; i++) {
                copies[i] = (struct peer_copy){ .id = i + 1, .writing = 1, .sequence = COPIES - i, .owner = "node",
                                                .tag = "t", .run = "r", .world = 1, .file_count = i < 2 ? FILES : 1 };
                copies[i].files = calloc(FILES, sizeof *copies[i].files);
                REQUIRE(copies[i].files);
                for (unsigned j = 0; j < copies[i].file_count; j++) {
                        copies[i].files[j] = (struct peer_file){ .size = 1, .held = true };
                        snprintf(copies[i].files[j].name, sizeof copies[i].files[j].name, "%0200u", j);
                }
        }
        REQUIRE(!peer_listing_format(&listing, &text, &size, &error));
        CHECK(size <= PEER_TEXT_MAX && size > PEER_TEXT_MAX / 2);
        REQUIRE(!peer_listing_parse(text, size, &found, &error));
        CHECK(found.count == 2 && found.copies[0].id == 1 && found.copies[0].file_count == FILES);
        CHECK(found.copies[1].id == 3);
        peer_listing_done(&found);
        free(text);
        for (unsigned i = 0; i < COPIES; i++)
                free(copies[i].files);
}

TAP_MAIN(TEST(a_listing_that_would_be_too_long_has_the_newest_copies),
         TEST(a_header_comes_back_as_it_was_written), TEST(a_frame_that_comes_twice_or_out_of_turn_is_refused),
         TEST(every_flipped_bit_of_the_fixed_part_is_refused), TEST(sizes_are_bounded_by_the_type), TEST(a_copy_comes_back_with_its_files_and_ranks),
         TEST(a_request_for_a_chunk_comes_back_as_it_was_written_and_no_part_of_it_is_one),
         TEST(a_copy_of_an_earlier_build_has_the_ranks_of_its_files),
         TEST(ends_with_one_secret_talk_and_others_do_not))
