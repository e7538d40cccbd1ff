/* The choice of the nodes that get copies. */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "agent/peers/copy_finder.h"
#include "agent/catalogue/memory_policy.h"
#include "agent/agent_catalogue.h"
#include "agent/agent_storage.h"
#include "agent/memory/page_maker.h"
#include "agent/peers/member.h"
#include "agent/peers/replica.h"
#include "tap.h"
#include "test_dir.h"

#define GONE 30 /* members whose hosts no longer exist: a connection to one is not even refused */

static struct os_table table;
static _Atomic int64_t ahead_ns;
static atomic_bool asked[GONE + 1];

static int64_t later(void)
{
        return os_linux.now_ns() + ahead_ns;
}

static int connect_in_vain(const char *address, uint16_t port, int64_t timeout_ms)
{
        (void)address;
        if (port <= GONE)
                asked[port] = true;
        ahead_ns += timeout_ms * 1000000;
        return -ETIMEDOUT;
}

static bool all_asked(void)
{
        for (int i = 1; i <= GONE; i++)
                if (!asked[i])
                        return false;
        return true;
}

/* As a greeting does; the pin stands for its session. */
static void ask_for_a_copy(struct job *job)
{
        job->settings.replica_count = 1;
        job->is_served = true;
        job->pins++;
}

static void let_pass_until(int64_t end)
{
        for (int64_t ahead = ahead_ns, now; (now = os_linux.now_ns() + ahead) < end;)
                atomic_compare_exchange_strong(&ahead_ns, &ahead, ahead + end - now);
}

/* A connection that fails after its time limit. The limits of connections that are tried at once end at the same time. */
static int connect_in_vain_beside_others(const char *address, uint16_t port, int64_t timeout_ms)
{
        int64_t end = later() + timeout_ms * 1000000;

        (void)address;
        if (port <= GONE)
                asked[port] = true;
        usleep(100000);
        let_pass_until(end);
        return -ETIMEDOUT;
}

static char directory[256];

/* Starts an agent whose peers are all gone. */
static void begin_among_the_gone(struct bench *bench)
{
        char path[300], peers[32 * GONE] = "";
        int fd;

        test_dir_make(directory);
        snprintf(path, sizeof path, "%s/secret", directory);
        fd = os->open(path, OS_WRITE | OS_CREATE | OS_EXCLUSIVE);
        if (fd < 0 || os_write_at(fd, "0123456789abcdef0123456789abcdef", 32, 0) || os->close(fd))
                abort();
        for (int i = 1; i <= GONE; i++)
                snprintf(peers + strlen(peers), sizeof peers - strlen(peers), "127.0.0.1:%d,", i);
        setenv("NEBULA_SECRET_FILE", path, 1);
        setenv("NEBULA_PEERS", peers, 1);
        setenv("NEBULA_LISTEN", "127.0.0.1:0", 1);
        bench_init(bench, NULL, "");
        ask_for_a_copy(bench->job);
        memset(asked, 0, sizeof asked);
        table = *os;
        table.now_ns = later;
}

static void end_among_the_gone(struct bench *bench)
{
        catalogue_lock(&bench->catalogue);
        bench->catalogue.stopping = true;
        pthread_cond_broadcast(&bench->catalogue.copy);
        catalogue_unlock(&bench->catalogue);
        replica_stop(&bench->catalogue);
        os = &os_linux;
        bench_done(bench, true);
        test_dir_remove(directory);
}

static void every_member_is_asked_however_many_before_it_are_gone(void)
{
        struct bench bench;

        begin_among_the_gone(&bench);
        REQUIRE(bench_version(&bench, "a", 1, 2));
        table.tcp_connect = connect_in_vain;
        os = &table;
        REQUIRE(!replica_start(&bench.catalogue, &bench.error));
        for (int tries = 0; tries < 5000 && !all_asked(); tries++) {
                ahead_ns += INT64_C(6000000000); /* the pause after a failure has passed */
                catalogue_lock(&bench.catalogue);
                pthread_cond_broadcast(&bench.catalogue.copy);
                catalogue_unlock(&bench.catalogue);
                usleep(2000);
        }
        CHECK(all_asked());
        end_among_the_gone(&bench);
}

/* The search takes no longer than a rank may wait for it. */
static void a_node_that_lost_its_memory_asks_every_member_at_its_first_look(void)
{
        struct ipc_find wanted = { 0 };
        struct bench bench;
        uint64_t id;

        begin_among_the_gone(&bench);
        table.tcp_connect = connect_in_vain_beside_others;
        os = &table;
        REQUIRE(!replica_start(&bench.catalogue, &bench.error));
        CHECK(replica_find(&bench.catalogue, bench.job, &bench.session, &wanted, &id, &bench.error) == NEBULA_NOT_FOUND);
        CHECK(all_asked());
        end_among_the_gone(&bench);
}

/* Leaves the record of a node without an agent, written so many days ago. */
static bool leave_record(const char *node, int64_t days)
{
        struct member member = { .address = "127.0.0.1", .port = 1, .nonce = 7 };
        struct timespec times[2] = { 0 };
        struct store *store;
        char path[400];
        bool is_there;

        snprintf(member.node, sizeof member.node, "%s", node);
        snprintf(path, sizeof path, "%s/.nebula/nodes/%s.json", directory, node);
        times[0].tv_sec = times[1].tv_sec = time(NULL) - days * 86400;
        store = storage_look(directory);
        is_there = !member_announce(store, &member, false, NULL) && !utimensat(AT_FDCWD, path, times, 0);
        store_close(store);
        return is_there;
}

static bool has_record(const char *node)
{
        struct store *store = storage_look(directory);
        struct member member;
        bool is_there = !member_load(store, node, false, &member, NULL);

        store_close(store);
        return is_there;
}

static bool record_comes(const char *node)
{
        for (int i = 0; i < 50000 && !has_record(node); i++)
                usleep(1000);
        return has_record(node);
}

static void an_old_record_is_removed_if_its_agent_does_not_answer_and_a_live_agent_makes_it_again_with_its_trainers(void)
{
        struct ipc_find wanted = { 0 };
        struct ipc_hello hello = { .replica_count = 1, .world = 1 };
        struct bench bench;
        char path[400];
        uint64_t id;

        test_dir_make(directory);
        unsetenv("NEBULA_SECRET_FILE");
        unsetenv("NEBULA_PEERS");
        setenv("NEBULA_NODE_ID", "here", 1);
        bench_init(&bench, NULL, directory);
        ask_for_a_copy(bench.job);
        bench_join(&bench);
        REQUIRE(leave_record("young", 0) && leave_record("old", 2));
        REQUIRE(!replica_start(&bench.catalogue, &bench.error));
        CHECK(record_comes("here"));
        CHECK(replica_find(&bench.catalogue, bench.job, &bench.session, &wanted, &id, &bench.error) == NEBULA_NOT_FOUND);
        CHECK(has_record("young") && !has_record("old") && has_record("here"));
        /* The copy sender also finds its peers through the records. */
        REQUIRE(leave_record("old", 2) && bench_version(&bench, "a", 1, 2));
        catalogue_lock(&bench.catalogue);
        catalogue_signal(&bench.catalogue);
        catalogue_unlock(&bench.catalogue);
        for (int i = 0; i < 50000 && has_record("old"); i++)
                usleep(1000);
        CHECK(has_record("young") && !has_record("old"));

        snprintf(path, sizeof path, "%s/.nebula/nodes/here.json", directory);
        CHECK(!unlink(path));
        catalogue_lock(&bench.catalogue);
        catalogue_job_configure(&bench.catalogue, bench.job, &hello, bench.job->persist_path);
        catalogue_signal(&bench.catalogue);
        catalogue_unlock(&bench.catalogue);
        CHECK(record_comes("here"));
        catalogue_lock(&bench.catalogue);
        bench.catalogue.stopping = true;
        bench_leave(&bench);
        pthread_cond_broadcast(&bench.catalogue.copy);
        catalogue_unlock(&bench.catalogue);
        replica_stop(&bench.catalogue);
        CHECK(!has_record("here"));
        unsetenv("NEBULA_NODE_ID");
        bench_done(&bench, true);
        test_dir_remove(directory);
}

static char held_up[300];
static atomic_bool hangs, is_held;

static int open_or_hang(const char *path, int flags)
{
        while (hangs && !strcmp(path, held_up)) {
                is_held = true;
                usleep(1000);
        }
        return os_linux.open(path, flags);
}

static bool ended(struct bench *bench)
{
        bool result;

        catalogue_lock(&bench->catalogue);
        result = replica_ended(&bench->catalogue);
        catalogue_unlock(&bench->catalogue);
        return result;
}

/* The agent then ends without that thread, as it ends without a worker whose storage hangs. */
static void a_thread_that_a_file_system_holds_is_known_not_to_have_ended(void)
{
        struct bench bench;

        snprintf(held_up, sizeof held_up, "/nowhere/secret");
        setenv("NEBULA_SECRET_FILE", held_up, 1);
        bench_init(&bench, NULL, "");
        REQUIRE(bench_version(&bench, "a", 1, 2));
        ask_for_a_copy(bench.job);
        hangs = true;
        table = os_linux;
        table.open = open_or_hang;
        os = &table;
        CHECK(ended(&bench)); /* the thread was never started */
        REQUIRE(!replica_start(&bench.catalogue, &bench.error));
        for (int i = 0; i < 50000 && !is_held; i++)
                usleep(1000);
        catalogue_lock(&bench.catalogue);
        bench.catalogue.stopping = true;
        pthread_cond_broadcast(&bench.catalogue.copy);
        catalogue_unlock(&bench.catalogue);
        usleep(20000);
        CHECK(is_held && !ended(&bench));
        hangs = false;
        for (int i = 0; i < 50000 && !ended(&bench); i++)
                usleep(1000);
        CHECK(ended(&bench));
        replica_stop(&bench.catalogue);
        os = &os_linux;
        bench_done(&bench, true);
}

static struct bench *_Atomic sender; /* its version fails as soon as a part of it is sent */
static struct version *sent;

/* Runs when the sender waits to keep its rate limit. At this moment the worker finds that storage will never have the version, and a save
 * takes all the free memory. */
static void fail_what_is_sent(int64_t ms)
{
        if (!sender) {
                os_linux.sleep_ms(ms);
                return;
        }
        catalogue_lock(&sender->catalogue);
        version_fail(&sender->catalogue, sent, NEBULA_CORRUPT, "a file that was carried over is gone");
        while (policy_reclaim(&sender->catalogue))
                ;
        while (page_maker_discard(&sender->catalogue))
                ;
        catalogue_unlock(&sender->catalogue);
        sender = NULL;
}

static bool start_node(struct bench *bench, const char *name)
{
        setenv("NEBULA_NODE_ID", name, 1);
        bench_init(bench, NULL, directory);
        ask_for_a_copy(bench->job);
        return !replica_start(&bench->catalogue, &bench->error);
}

static void stop_node(struct bench *bench)
{
        catalogue_lock(&bench->catalogue);
        bench->catalogue.stopping = true;
        pthread_cond_broadcast(&bench->catalogue.copy);
        catalogue_unlock(&bench->catalogue);
        replica_stop(&bench->catalogue);
        bench_done(bench, true);
}

static void a_version_that_fails_while_it_is_sent_keeps_its_memory_until_it_was(void)
{
        struct bench bench, there;
        struct version *version;
        uint64_t server = 0;

        test_dir_make(directory);
        setenv("NEBULA_PEER_MBPS", "1", 1);
        table = os_linux;
        table.sleep_ms = fail_what_is_sent;
        os = &table;
        REQUIRE(start_node(&there, "there") && record_comes("there"));
        REQUIRE(start_node(&bench, "here"));
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version);
        catalogue_lock(&bench.catalogue);
        sent = version;
        sender = &bench;
        catalogue_signal(&bench.catalogue);
        catalogue_unlock(&bench.catalogue);
        for (int i = 0; i < 50000 && !server; i++) {
                usleep(1000);
                catalogue_lock(&bench.catalogue);
                server = version->copies->nonces[0];
                catalogue_unlock(&bench.catalogue);
        }
        CHECK(server == there.catalogue.agent_nonce && !sender);
        catalogue_lock(&bench.catalogue);
        CHECK(version->life.state == NEBULA_STATE_FAILED && !version->in_memory);
        catalogue_unlock(&bench.catalogue);
        stop_node(&bench);
        stop_node(&there);
        os = &os_linux;
        unsetenv("NEBULA_NODE_ID");
        unsetenv("NEBULA_PEER_MBPS");
        test_dir_remove(directory);
}

static enum nebula_status fetch(struct bench *bench, struct job *job, const struct version *of, const char *name, unsigned char *data)
{
        return replica_fetch(&bench->catalogue, job, of->tag, of->sequence, name, data, BENCH_FILE_BYTES, &bench->error);
}

static void a_reader_of_the_same_job_reads_this_node_s_versions_in_place(void)
{
        static unsigned char data[BENCH_FILE_BYTES];
        struct bench bench, there;
        struct version *version;
        struct job *other;
        bool same = true;

        test_dir_make(directory);
        setenv("NEBULA_PEER_MEMORY", "4K", 1); /* no node keeps a copy */
        REQUIRE(start_node(&there, "there") && record_comes("there"));
        REQUIRE(start_node(&bench, "here") && record_comes("here"));
        version = bench_version(&there, "tag", 1, 2);
        REQUIRE(version);
        CHECK(!fetch(&bench, bench.job, version, "b", data));
        for (size_t i = 0; i < BENCH_FILE_BYTES; i++)
                same = same && data[i] == bench_byte(2, i);
        CHECK(same);
        CHECK(fetch(&bench, bench.job, version, "c", data) == NEBULA_NOT_FOUND);
        /* Another job with the same secret and storage. */
        catalogue_lock(&bench.catalogue);
        other = catalogue_job_get(&bench.catalogue, directory, "other");
        ask_for_a_copy(other);
        catalogue_unlock(&bench.catalogue);
        CHECK(fetch(&bench, other, version, "b", data) == NEBULA_NOT_FOUND);
        /* The version has left memory. */
        catalogue_lock(&there.catalogue);
        version_fail(&there.catalogue, version, NEBULA_CORRUPT, "gone");
        catalogue_unlock(&there.catalogue);
        CHECK(fetch(&bench, bench.job, version, "b", data) == NEBULA_NOT_FOUND);
        stop_node(&bench);
        stop_node(&there);
        unsetenv("NEBULA_NODE_ID");
        unsetenv("NEBULA_PEER_MEMORY");
        test_dir_remove(directory);
}

TAP_MAIN(TEST(a_reader_of_the_same_job_reads_this_node_s_versions_in_place),
         TEST(a_version_that_fails_while_it_is_sent_keeps_its_memory_until_it_was),
         TEST(an_old_record_is_removed_if_its_agent_does_not_answer_and_a_live_agent_makes_it_again_with_its_trainers),
         TEST(every_member_is_asked_however_many_before_it_are_gone),
         TEST(a_node_that_lost_its_memory_asks_every_member_at_its_first_look),
         TEST(a_thread_that_a_file_system_holds_is_known_not_to_have_ended))
