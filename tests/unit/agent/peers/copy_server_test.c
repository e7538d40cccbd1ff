/* Copies that an agent keeps for other nodes, and their budget. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent/agent_catalogue.h"
#include "agent/peers/copy_server_private.h"
#include "tap.h"

#define COPY_BYTES (1u << 20)

/* Offers a copy with one file, as that node. */
static struct copy *offer(struct copy_server *server, const char *node, const char *tag, uint64_t size, struct nebula_error *error)
{
        struct peer *peer = calloc(1, sizeof *peer);
        struct peer_copy what = { .files = calloc(1, sizeof *what.files), .file_count = 1 };
        struct copy *copy;

        if (!peer || !what.files)
                abort();
        snprintf(peer->hello.node, sizeof peer->hello.node, "%s", node);
        snprintf(what.tag, sizeof what.tag, "%s", tag);
        what.files[0] = (struct peer_file){ .name = "a", .size = size, .held = true };
        copy = copy_server_copy_new(server, peer, &what, error);
        peer_copy_done(&what);
        free(peer);
        return copy;
}

/* Keeps a copy that has arrived completely. */
static bool keep(struct copy_server *server, const char *node, const char *tag)
{
        struct copy *copy = offer(server, node, tag, COPY_BYTES, NULL);

        if (!copy)
                return false;
        copy->age = server->next_age++;
        copy->next = server->copies;
        server->copies = copy;
        return true;
}

static bool holds(const struct copy_server *server, const char *tag)
{
        for (const struct copy *copy = server->copies; copy; copy = copy->next)
                if (!strcmp(copy->what.tag, tag))
                        return true;
        return false;
}

static void a_copy_that_no_room_can_be_made_for_costs_no_other_copy(void)
{
        struct nebula_error error = { 0 };
        struct copy_server *server;
        struct copy *taken;
        struct bench bench;

        bench_init(&bench, NULL, "");
        REQUIRE(!copy_server_new(&bench.catalogue, "here", &server, &error));
        REQUIRE(keep(server, "lost1", "old") && keep(server, "lost2", "young"));
        server->budget = server->used;
        CHECK(!offer(server, "third", "large", 3 * server->used, &error) && error.status == NEBULA_NO_MEMORY);
        CHECK(holds(server, "old") && holds(server, "young"));
        /* A copy that fits replaces the oldest one. */
        taken = offer(server, "third", "small", COPY_BYTES, &error);
        CHECK(taken && !holds(server, "old") && holds(server, "young"));
        if (taken) {
                taken->next = server->copies;
                server->copies = taken;
        }
        copy_server_free(server);
        bench_done(&bench, true);
}

/* Those of another job or secret, and those that are dropped, are left out. */
static void the_copies_that_are_kept_for_a_job_are_listed_with_their_files(void)
{
        struct nebula_error error = { 0 };
        struct peer_listing listing = { 0 };
        struct copy_server *server;
        struct bench bench;

        bench_init(&bench, NULL, "");
        strcpy(bench.job->copies->identity, "secret");
        REQUIRE(!copy_server_new(&bench.catalogue, "here", &server, &error));
        for (const char *const *tag = (const char *const[]){ "mine", "other job", "other secret", "dropped", NULL }; *tag; tag++) {
                REQUIRE(keep(server, "lost", *tag));
                strcpy(server->copies->identity, "secret");
                strcpy(server->copies->job, bench.job->name);
                strcpy(server->copies->path, bench.job->persist_path);
                server->copies->what.files[0].rank = 7;
        }
        server->copies->dropped = true;
        strcpy(server->copies->next->identity, "other");
        strcpy(server->copies->next->next->job, "other");
        REQUIRE(!copy_server_kept(server, bench.job, &listing, &error));
        CHECK(listing.count == 1 && !strcmp(listing.copies[0].tag, "mine") && listing.copies[0].file_count == 1 && listing.copies[0].files[0].rank == 7);
        peer_listing_done(&listing);
        *bench.job->copies->identity = 0; /* it asks for no copies: the secret is not known */
        REQUIRE(!copy_server_kept(server, bench.job, &listing, &error));
        CHECK(listing.count == 0);
        peer_listing_done(&listing);
        copy_server_free(server);
        bench_done(&bench, true);
}

static void make_key(struct tls_key *key, unsigned number)
{
        char secret[32];

        snprintf(secret, sizeof secret, "the secret of job %08u", number);
        if (peer_tls_key_init(key, secret, strlen(secret), NULL))
                abort();
}

/*
 * fault (The machine and other users): An agent has more jobs in its life than it keeps secrets for.
 * result: It drops the secrets of jobs that are over.
 */
/* Jobs come and go for as long as the agent lives. */
static void the_secrets_of_jobs_that_are_over_make_way(void)
{
        struct nebula_error error = { 0 };
        struct copy_server *server;
        struct tls_key key;
        struct bench bench;

        bench_init(&bench, NULL, "");
        bench_join(&bench);
        REQUIRE(!copy_server_new(&bench.catalogue, "here", &server, &error));
        make_key(&key, 0);
        strcpy(bench.job->copies->identity, key.identity);
        CHECK(!copy_server_add_key(server, &key, &error)); /* a job with trainers */
        make_key(&key, 1);
        REQUIRE(keep(server, "lost", "old"));
        strcpy(server->copies->identity, key.identity);
        CHECK(!copy_server_add_key(server, &key, &error)); /* a job with a copy */
        for (unsigned i = 2; i < 1000; i++) {
                make_key(&key, i);
                CHECK(!copy_server_add_key(server, &key, &error) && !copy_server_add_key(server, &key, &error));
        }
        CHECK(server->key_count == 3);
        make_key(&key, 0);
        CHECK(!strcmp(server->keys[0].identity, key.identity));
        make_key(&key, 1);
        CHECK(!strcmp(server->keys[1].identity, key.identity));
        bench_leave(&bench);
        copy_server_free(server);
        bench_done(&bench, true);
}

/* fault: as the_secrets_of_jobs_that_are_over_make_way */
/* The server keeps many secrets that are in use, up to a limit. */
static void the_secrets_of_jobs_that_go_on_are_kept(void)
{
        struct nebula_error error = { 0 };
        struct copy_server *server;
        struct tls_key key;
        struct bench bench;

        bench_init(&bench, NULL, "");
        REQUIRE(!copy_server_new(&bench.catalogue, "here", &server, &error));
        for (unsigned i = 0; i < 100; i++) {
                REQUIRE(keep(server, "lost", "a"));
                make_key(&key, i);
                strcpy(server->copies->identity, key.identity);
                CHECK(!copy_server_add_key(server, &key, &error));
        }
        CHECK(server->key_count == 100);
        free(server->keys);
        server->keys = calloc(KEY_MAX, sizeof *server->keys);
        server->key_count = server->key_capacity = KEY_MAX;
        for (size_t i = 0; i < KEY_MAX; i++)
                server->keys[i] = key;
        make_key(&key, 100);
        CHECK(copy_server_add_key(server, &key, &error) == NEBULA_INVALID && strstr(error.message, "4096"));
        copy_server_free(server);
        bench_done(&bench, true);
}

/* Connections that send nothing, or stop within the handshake, and connect again as soon as they are closed. */
#define CROWD 600

static atomic_bool crowding;
static struct member crowded;
static bool crowd_speaks;

/* Sends the first bytes of a handshake. */
static int speak_from_elsewhere(void)
{
        struct sockaddr_in own = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(0x7f000002) }, there = own;
        int fd = socket(AF_INET, SOCK_STREAM, 0);

        there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        there.sin_port = htons(crowded.port);
        if (fd < 0 || bind(fd, (struct sockaddr *)&own, sizeof own) || connect(fd, (struct sockaddr *)&there, sizeof there) ||
            send(fd, "\x16\x03\x01\x02", 4, MSG_NOSIGNAL) != 4) {
                close(fd);
                return -1;
        }
        return fd;
}

static void *crowd(void *argument)
{
        int fds[CROWD / 4];

        (void)argument;
        for (size_t i = 0; i < CROWD / 4; i++)
                fds[i] = -1;
        while (crowding) {
                for (size_t i = 0; i < CROWD / 4 && crowding; i++) {
                        if (fds[i] >= 0 && !os->poll(fds[i], 0))
                                continue;
                        if (fds[i] >= 0)
                                os->close(fds[i]);
                        fds[i] = crowd_speaks ? speak_from_elsewhere() : os->tcp_connect(crowded.address, crowded.port, 1000);
                }
                os->sleep_ms(50); /* the crowd takes the server's places, and not all of the processor */
        }
        for (size_t i = 0; i < CROWD / 4; i++)
                if (fds[i] >= 0)
                        os->close(fds[i]);
        return NULL;
}

/* Connections that have begun to speak and that the server has not sent away. The threads of others end as soon as they run. */
static unsigned speaking(struct copy_server *server)
{
        unsigned count = 0;

        lock_take(&server->copy_server_lock);
        for (size_t i = 0; i < VISITOR_MAX; i++)
                count += server->visitors[i] && !server->visitors[i]->is_proven && !server->visitors[i]->is_sent_away;
        lock_give(&server->copy_server_lock);
        return count;
}

#ifdef __SANITIZE_THREAD__ /* a server that is ten times as slow, beside other tests, needs a smaller crowd and more than the time of one handshake */
#define CROWD_THREADS 1
#define TRIES 3
#else
#define CROWD_THREADS 4
#define TRIES 1
#endif

static void check_crowd(bool speaks)
{
        struct peer_hello hello = { .node = "there", .nonce = 7 };
        struct nebula_error error = { 0 };
        struct copy_server *server;
        struct tls_key key;
        struct bench bench;
        pthread_t threads[CROWD_THREADS];
        unsigned served = 0, peers = getenv("NEBULA_TEST_NIGHTLY") ? 20 : 8;

        setenv("NEBULA_LISTEN", "127.0.0.1", 1);
        bench_init(&bench, NULL, "");
        REQUIRE(!copy_server_new(&bench.catalogue, "here", &server, &error));
        REQUIRE(!copy_server_open(server, &crowded, &error));
        bench_join(&bench);
        make_key(&key, 0);
        strcpy(bench.job->copies->identity, key.identity);
        REQUIRE(!copy_server_add_key(server, &key, &error));
        crowding = true;
        crowd_speaks = speaks;
        for (size_t i = 0; i < CROWD_THREADS; i++)
                REQUIRE(!pthread_create(&threads[i], NULL, crowd, NULL));
        os->sleep_ms(1000);
        for (unsigned i = 0; i < peers; i++) {
                struct peer *peer = NULL;

                for (unsigned try = 0; try < TRIES && !peer; try++)
                        if (peer_open(&crowded, &key, &hello, &peer, &error))
                                printf("# %s\n", error.message);
                if (peer) {
                        served++;
                        peer_free(peer);
                }
        }
        CHECK(speaking(server) <= 32);
        crowding = false;
        for (size_t i = 0; i < CROWD_THREADS; i++)
                pthread_join(threads[i], NULL);
        CHECK(served == peers);
        bench_leave(&bench);
        copy_server_free(server);
        bench_done(&bench, true);
        unsetenv("NEBULA_LISTEN");
}

/* Asks for the first piece of the version's first file, and takes it. */
static bool fetch_first(struct peer *peer, uint64_t version_id)
{
        struct peer_fetch fetch = { .copy = version_id };
        struct nebula_error error = { 0 };
        char *text;
        size_t size;
        bool result = false;

        if (peer_fetch_format(&fetch, &text, &size, &error))
                return false;
        if (!peer_send(peer, PEER_FETCH, text, size, &error) && !peer_receive(peer, &error) && peer->header.type == PEER_DATA)
                result = !peer_take(peer, NULL, &error);
        free(text);
        return result;
}

static uint32_t users_of(struct bench *bench, const struct image *image)
{
        uint32_t users;

        catalogue_lock(&bench->catalogue);
        users = image->users;
        catalogue_unlock(&bench->catalogue);
        return users;
}

/*
 * fault (The machine and other users): A peer that began to read a file from this node's memory hangs.
 * result: After 20 s the file's memory is free for saves again. If the peer comes back, it goes on where it was.
 */
/* A save may need the memory of a file that a peer has begun to read and does not go on with: it hangs, or has what it wanted. */
static void a_peer_that_asks_for_nothing_more_holds_no_memory(void)
{
        struct peer_hello hello = { .node = "there", .nonce = 7 };
        struct nebula_error error = { 0 };
        struct copy_server *server;
        struct version *version;
        const struct image *image;
        struct tls_key key;
        struct peer *peer;
        struct bench bench;
        struct member own;
        uint32_t users;

        setenv("NEBULA_LISTEN", "127.0.0.1", 1);
        bench_init(&bench, NULL, "");
        version = bench_version(&bench, "t", 1, 2);
        REQUIRE(version && !copy_server_new(&bench.catalogue, "here", &server, &error));
        make_key(&key, 0);
        strcpy(bench.job->copies->identity, key.identity);
        strcpy(hello.job, bench.job->name);
        strcpy(hello.path, bench.job->persist_path);
        image = version->files[0].image;
        users = users_of(&bench, image);
        server->hold_ns = 1;
        REQUIRE(!copy_server_open(server, &own, &error) && !copy_server_add_key(server, &key, &error) && !peer_open(&own, &key, &hello, &peer, &error));
        CHECK(fetch_first(peer, version->id));
        for (int i = 0; i < 200000 && users_of(&bench, image) > users; i++)
                os->sleep_ms(1);
        CHECK(users_of(&bench, image) == users);
        CHECK(fetch_first(peer, version->id)); /* it goes on where it was */
        peer_free(peer);
        copy_server_free(server);
        bench_done(&bench, true);
        unsetenv("NEBULA_LISTEN");
}

/* Closes so many connections, and serves the next one. */
struct host {
        int listen_fd;
        unsigned closes;
        struct tls_key key;
        bool served;
};

static bool find_own(void *argument, const char *identity, struct tls_key *ret_key)
{
        const struct host *host = argument;

        *ret_key = host->key;
        return !strcmp(identity, host->key.identity);
}

static void *be_host(void *argument)
{
        struct host *host = argument;
        struct peer *peer;
        char from[80];
        int fd;

        for (unsigned i = 0; (fd = os->tcp_accept(host->listen_fd, from, sizeof from)) >= 0; i++) {
                if (i == host->closes && !peer_serve(fd, find_own, host, "there", 8, &peer, NULL)) {
                        host->served = true;
                        peer_free(peer);
                        return NULL;
                }
                os->close(fd);
        }
        return NULL;
}

/* A server that is crowded closes connections, also those of its peers. */
static void check_closed(unsigned closes, bool is_served)
{
        struct peer_hello hello = { .node = "here", .nonce = 7 };
        struct member member = { .node = "there", .address = "127.0.0.1" };
        struct host host = { .closes = closes };
        struct nebula_error error = { 0 };
        struct peer *peer = NULL;
        pthread_t thread;
        enum nebula_status status;

        make_key(&host.key, 0);
        host.listen_fd = os->tcp_listen(member.address, 0, &member.port);
        REQUIRE(host.listen_fd >= 0 && !pthread_create(&thread, NULL, be_host, &host));
        status = peer_open(&member, &host.key, &hello, &peer, &error);
        CHECK(is_served ? !status && peer->hello.nonce == 8 : status == NEBULA_UNAVAILABLE && strstr(error.message, "there") != NULL);
        if (!status)
                peer_free(peer);
        os->shutdown(host.listen_fd);
        pthread_join(thread, NULL);
        os->close(host.listen_fd);
        CHECK(host.served == is_served);
}

static void a_connection_that_a_crowded_peer_closes_is_opened_again(void)
{
        check_closed(0, true);
        check_closed(3, true);
        check_closed(1000, false);
}

/*
 * fault (The machine and other users): Hundreds of silent connections come to the port for copies, again and again.
 * result: The agent closes each after 2 s, or when others wait. It serves agents of other nodes.
 */
static void a_crowd_that_says_nothing_keeps_no_peer_out(void)
{
        check_crowd(false);
}

/* fault: as a_crowd_that_says_nothing_keeps_no_peer_out */
static void a_crowd_of_another_host_that_only_begins_to_speak_keeps_no_peer_out(void)
{
        check_crowd(true);
}

TAP_MAIN(TEST(the_secrets_of_jobs_that_are_over_make_way), TEST(the_secrets_of_jobs_that_go_on_are_kept),
         TEST(a_peer_that_asks_for_nothing_more_holds_no_memory), TEST(a_connection_that_a_crowded_peer_closes_is_opened_again),
         TEST(a_crowd_that_says_nothing_keeps_no_peer_out), TEST(a_crowd_of_another_host_that_only_begins_to_speak_keeps_no_peer_out),
         TEST(a_copy_that_no_room_can_be_made_for_costs_no_other_copy),
         TEST(the_copies_that_are_kept_for_a_job_are_listed_with_their_files))
