/* A program that watches for a cloud's notice hears it from the agent, which asks a metadata service in this process. */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "agent/agent_client.h"
#include "agent/catalogue/catalogue.h"
#include "agent/clients/evictions.h"
#include "agent/memory/memory.h"
#include "agent/rooms.h"
#include "store/http/http.h"
#include "store/http/server.h"
#include "tap.h"

enum state { QUIET, LEAVES, FOREIGN, PAUSES, BROKEN };

static struct cloud {
        struct server *server;
        atomic_int state;
        atomic_uint asked;  /* for notices */
        atomic_uint tokens; /* that AWS has given */
} cloud;

static struct test_place place;
static struct agent *agent;
static nebula_session *session;

static void serve_azure(struct server_call *call)
{
        char date[HTTP_DATE_SIZE], text[600], value[16];
        int state = atomic_load(&cloud.state);

        if (strcmp(server_field(call, "metadata", value, sizeof value), "true")) {
                server_say(call, 400, "", "Bad request");
                return;
        }
        if (strstr(call->target, "/compute/name?")) {
                server_say(call, 200, "", "vm_3");
                return;
        }
        atomic_fetch_add(&cloud.asked, 1);
        http_date_format((int64_t)time(NULL) + 45, date);
        snprintf(text, sizeof text, "{\"DocumentIncarnation\":1,\"Events\":[{\"EventId\":\"A1\",\"EventType\":\"%s\",\"Resources\":[\"vm_2\",\"%s\"],\"NotBefore\":\"%s\"}]}",
                 state == PAUSES ? "Freeze" : "Preempt", state == FOREIGN ? "vm_33" : "vm_3", date);
        server_say(call, 200, "", state == QUIET ? "{\"DocumentIncarnation\":1,\"Events\":[]}" : text);
}

/* Each token is valid until the state changes to BROKEN. */
static void serve_aws(struct server_call *call)
{
        char text[200], value[40], wanted[40];
        struct tm tm;
        time_t when = time(NULL) + 100;

        if (!strcmp(call->method, "PUT")) {
                snprintf(text, sizeof text, "token-%u", atomic_fetch_add(&cloud.tokens, 1) + 1);
                server_say(call, 200, "", text);
                return;
        }
        atomic_fetch_add(&cloud.asked, 1);
        snprintf(wanted, sizeof wanted, "token-%u", atomic_load(&cloud.tokens));
        if (strcmp(server_field(call, "x-aws-ec2-metadata-token", value, sizeof value), wanted)) {
                server_say(call, 401, "", "Unauthorized");
                return;
        }
        gmtime_r(&when, &tm);
        strftime(text, sizeof text, "{\"action\": \"terminate\", \"time\": \"%Y-%m-%dT%H:%M:%SZ\"}", &tm);
        server_say(call, atomic_load(&cloud.state) == LEAVES ? 200 : 404, "", text);
}

static void serve(struct server_call *call, void *argument)
{
        char value[16];

        (void)argument;
        if (atomic_load(&cloud.state) == BROKEN) {
                atomic_fetch_add(&cloud.asked, 1);
                server_say(call, 503, "", "broken");
        } else if (!strncmp(call->target, "/metadata/", 10)) {
                serve_azure(call);
        } else if (!strncmp(call->target, "/latest/", 8)) {
                serve_aws(call);
        } else {
                atomic_fetch_add(&cloud.asked, 1);
                server_say(call, strcmp(server_field(call, "metadata-flavor", value, sizeof value), "Google") ? 403 : 200, "",
                           atomic_load(&cloud.state) == LEAVES ? "TRUE" : "FALSE");
        }
}

static void cloud_begin(notice_ask *function)
{
        char url[64];

        notice_offer(function);
        atomic_store(&cloud.state, QUIET);
        atomic_store(&cloud.asked, 0);
        cloud.server = server_start(serve, NULL, false);
        snprintf(url, sizeof url, "http://127.0.0.1:%d/", server_port(cloud.server));
        setenv("NEBULA_METADATA_URL", url, 1);
        setenv("http_proxy", "http://127.0.0.1:9", 1); /* a proxy has another machine's metadata */
}

/* Threads of this process, not a process of its own: a fork would copy the locks that the server's threads hold. */
static void agent_begin(void)
{
        if (agent_start(&place.place, true, &agent, NULL))
                abort();
}

static void node_begin(notice_ask *function)
{
        struct nebula_error error = { 0 };
        struct nebula_options options;

        place_init(&place);
        cloud_begin(function);
        setenv("NEBULA_RUNTIME_DIR", place.place.directory, 1);
        setenv("NEBULA_MEMORY_DIR", place.place.memory, 1);
        agent_begin();
        nebula_options_init(&options);
        session = NULL;
        if (nebula_session_open(&options, &session, &error))
                printf("# %s\n", error.message);
}

static void node_end(void)
{
        nebula_session_close(session);
        agent_stop(agent, true);
        server_stop(cloud.server);
        place_done(&place);
}

static nebula_watch *watch(enum nebula_cloud of)
{
        nebula_watch *opened = NULL;

        return nebula_watch_open_cloud(session, of, &opened, NULL) ? NULL : opened;
}

/* Of a machine that stays for a time between `least` and `most`. */
static bool hears(nebula_watch *from, const char *text, double least, double most)
{
        struct nebula_event event;
        struct nebula_error error = { 0 };

        if (nebula_watch_next(from, 20000, &event, &error)) {
                printf("# %s\n", error.message);
                return false;
        }
        if (event.kind != NEBULA_EVENT_EVICTION || strcmp(event.text, text) || event.seconds < least || event.seconds > most)
                printf("# %d %s %f\n", (int)event.kind, event.text, event.seconds);
        return event.kind == NEBULA_EVENT_EVICTION && !strcmp(event.text, text) && event.seconds >= least && event.seconds <= most;
}

static bool hears_nothing(nebula_watch *from, unsigned questions)
{
        unsigned asked = atomic_load(&cloud.asked);
        struct nebula_event event;

        for (int i = 0; i < 2000 && atomic_load(&cloud.asked) < asked + questions; i++)
                if (nebula_watch_next(from, 100, &event, NULL) != NEBULA_TIMEOUT)
                        return false;
        return atomic_load(&cloud.asked) >= asked + questions;
}

static void a_watch_hears_the_notice_of_each_cloud(void)
{
        static const struct {
                enum nebula_cloud cloud;
                const char *text;
                double least, most;
        } cases[] = {
                { NEBULA_CLOUD_AZURE, "Azure's scheduled event Preempt", 25, 45 },
                { NEBULA_CLOUD_AWS, "AWS's spot notice terminate", 80, 100 },
                { NEBULA_CLOUD_GCE, "GCE's preemption", 30, 30 },
        };

        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
                nebula_watch *first, *second;
                struct nebula_event event;

                node_begin(metadata_ask);
                REQUIRE(session && (first = watch(cases[i].cloud)));
                CHECK(hears_nothing(first, 2));
                atomic_store(&cloud.state, LEAVES);
                CHECK(hears(first, cases[i].text, cases[i].least, cases[i].most));
                CHECK(nebula_watch_next(first, 1200, &event, NULL) == NEBULA_TIMEOUT); /* the event comes once */
                second = watch(cases[i].cloud);
                CHECK(hears(second, cases[i].text, cases[i].least, cases[i].most)); /* and to a program that begins later */
                nebula_watch_close(second);
                nebula_watch_close(first);
                node_end();
        }
}

static void events_of_other_machines_and_those_that_end_nothing_are_no_notice(void)
{
        nebula_watch *azure;

        node_begin(metadata_ask);
        REQUIRE(session && (azure = watch(NEBULA_CLOUD_AZURE)));
        atomic_store(&cloud.state, FOREIGN);
        CHECK(hears_nothing(azure, 2));
        atomic_store(&cloud.state, PAUSES);
        CHECK(hears_nothing(azure, 2));
        nebula_watch_close(azure);
        node_end();
}

struct waiter_thread {
        pthread_t thread;
        nebula_watch *watch;
        enum nebula_status status;
};

static void *wait_for_notice(void *argument)
{
        struct waiter_thread *waiter = argument;
        struct nebula_event event;

        waiter->status = nebula_watch_next(waiter->watch, 3500, &event, NULL);
        return NULL;
}

static void watches_of_one_node_share_a_question_per_second_and_no_watch_no_question(void)
{
        struct waiter_thread waiters[4] = { 0 };
        int64_t begun_ns = os->now_ns();
        unsigned asked;

        node_begin(metadata_ask);
        REQUIRE(session);
        for (size_t i = 0; i < 4; i++) {
                REQUIRE((waiters[i].watch = watch(NEBULA_CLOUD_GCE)));
                pthread_create(&waiters[i].thread, NULL, wait_for_notice, &waiters[i]);
        }
        for (size_t i = 0; i < 4; i++) {
                pthread_join(waiters[i].thread, NULL);
                CHECK(waiters[i].status == NEBULA_TIMEOUT);
                nebula_watch_close(waiters[i].watch);
        }
        asked = atomic_load(&cloud.asked);
        CHECK(asked >= 1 && asked <= 2 + (os->now_ns() - begun_ns) / 1000000000); /* some five, and not four times as many */
        usleep(1500000);
        CHECK(atomic_load(&cloud.asked) == asked);
        node_end();
}

static void watching_goes_on_with_the_next_agent(void)
{
        nebula_watch *aws;
        struct nebula_event event;

        node_begin(metadata_ask);
        REQUIRE(session && (aws = watch(NEBULA_CLOUD_AWS)));
        CHECK(hears_nothing(aws, 1));
        agent_stop(agent, false);
        agent_begin();
        CHECK(nebula_watch_next(aws, 5000, &event, NULL) == NEBULA_UNAVAILABLE);
        atomic_store(&cloud.state, LEAVES);
        CHECK(hears(aws, "AWS's spot notice terminate", 80, 100));
        nebula_watch_close(aws);
        node_end();
}

static void ask_now(struct catalogue *catalogue, unsigned times)
{
        for (unsigned i = 0; i < times; i++) {
                evictions_of(catalogue, NEBULA_CLOUD_AWS)->due_ns = 0;
                CHECK(!evictions_ask(catalogue, NEBULA_CLOUD_AWS, NULL));
        }
}

static void thirty_failures_in_a_row_are_an_event_and_the_next_answer_counts(void)
{
        static struct catalogue catalogue;
        static struct memory memory;
        struct evictions *aws;
        struct ipc_event event = { 0 };
        unsigned tokens;

        cloud_begin(metadata_ask);
        catalogue_init(&catalogue, agent_rooms, &memory);
        aws = evictions_of(&catalogue, NEBULA_CLOUD_AWS);
        REQUIRE(aws);
        catalogue_lock(&catalogue);
        ask_now(&catalogue, 1);
        tokens = atomic_load(&cloud.tokens);
        CHECK(tokens >= 1 && !aws->failures);
        atomic_store(&cloud.state, BROKEN);
        ask_now(&catalogue, 29);
        atomic_store(&cloud.state, QUIET);
        ask_now(&catalogue, 1);
        CHECK(atomic_load(&cloud.tokens) == tokens + 1 && !aws->failures); /* it does not rely on its earlier token */
        atomic_store(&cloud.state, BROKEN);
        ask_now(&catalogue, 29);
        CHECK(!evictions_event(aws, 0, &event));
        ask_now(&catalogue, 1);
        REQUIRE(evictions_event(aws, 0, &event));
        CHECK(event.kind == NEBULA_EVENT_METADATA && strstr(event.text, "answers 503"));
        ask_now(&catalogue, 3);
        CHECK(!evictions_event(aws, event.at, &event)); /* it comes once */
        atomic_store(&cloud.state, LEAVES);
        ask_now(&catalogue, 1);
        CHECK(evictions_event(aws, event.at, &event) && event.kind == NEBULA_EVENT_EVICTION);
        catalogue_unlock(&catalogue);
        catalogue_done(&catalogue);
        server_stop(cloud.server);
}

static void a_watch_of_no_cloud_or_with_an_agent_that_cannot_ask_is_refused(void)
{
        nebula_watch *none, *gce;
        struct nebula_event event;
        struct nebula_error error = { 0 };

        node_begin(NULL);
        REQUIRE(session && (none = watch((enum nebula_cloud)3)) && (gce = watch(NEBULA_CLOUD_GCE)));
        CHECK(nebula_watch_next(none, 1000, &event, &error) == NEBULA_INVALID);
        CHECK(nebula_watch_next(gce, 1000, &event, &error) == NEBULA_INVALID && strstr(error.message, "asks no metadata service"));
        nebula_watch_close(gce);
        nebula_watch_close(none);
        node_end();
}

TAP_MAIN(TEST(a_watch_hears_the_notice_of_each_cloud),
         TEST(events_of_other_machines_and_those_that_end_nothing_are_no_notice),
         TEST(watches_of_one_node_share_a_question_per_second_and_no_watch_no_question),
         TEST(watching_goes_on_with_the_next_agent),
         TEST(thirty_failures_in_a_row_are_an_event_and_the_next_answer_counts),
         TEST(a_watch_of_no_cloud_or_with_an_agent_that_cannot_ask_is_refused))
