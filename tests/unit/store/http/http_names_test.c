/* Names of hosts that cannot be looked up for a while: this program's getaddrinfo takes the place of the system's. */
#include <dlfcn.h>
#include <netdb.h>
#include <stdatomic.h>

#include "os/os.h"
#include "store/http/http.h"
#include "store/http/server.h"
#include "tap.h"

#define NAME "storage.test"

static struct nebula_error error;
static atomic_uint looked_up;      /* how often */
static atomic_uint fails;          /* so many look-ups of NAME fail from now on */

/* What libcurl calls. NAME is this machine. */
__attribute__((visibility("default"))) int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                                                        struct addrinfo **ret_found)
{
        int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
        bool is_ours = node && !strcmp(node, NAME);
        void *symbol = dlsym(RTLD_NEXT, "getaddrinfo");

        memcpy(&real, &symbol, sizeof real);
        if (is_ours)
                atomic_fetch_add(&looked_up, 1);
        if (is_ours && atomic_load(&fails)) {
                atomic_fetch_sub(&fails, 1);
                return EAI_AGAIN;
        }
        return real(is_ours ? "127.0.0.1" : node, service, hints, ret_found);
}

static void answer(struct server_call *call, void *argument)
{
        (void)argument;
        server_say(call, 200, "", "here");
}

static struct server *begin(char *url, size_t size, int64_t retry_ms)
{
        struct server *server = server_start(answer, NULL, false);
        struct http_settings settings;

        unsetenv("http_proxy");
        setenv("no_proxy", "*", 1);
        setenv("NEBULA_STORE_ALLOW_HTTP", "1", 1);
        settings = http_settings_now();
        settings.pause_ms = settings.pause_max_ms = 2;
        settings.retry_new_ms = retry_ms;
        http_settings_set(&settings);
        atomic_store(&looked_up, 0);
        snprintf(url, size, "http://" NAME ":%d/c", server_port(server));
        return server;
}

/*
 * fault (Object stores): A host's name cannot be looked up for a while.
 * result: The driver asks until it can.
 */
static void a_name_that_comes_back_is_asked_again(void)
{
        struct http_response response;
        char url[100];
        struct server *server = begin(url, sizeof url, 60000);
        struct http_request request = { .method = "GET", .url = url };

        atomic_store(&fails, 20);
        CHECK(http_send(&request, &response, &error) == NEBULA_OK && response.status == 200 && response.tries == 21);
        CHECK(atomic_load(&looked_up) == 21 && server_requests(server) == 1);
        http_response_done(&response);
        server_stop(server);
}

static void a_name_that_stays_away_is_said(void)
{
        struct http_response response;
        char url[100];
        struct server *server = begin(url, sizeof url, 50);
        struct http_request request = { .method = "GET", .url = url };

        atomic_store(&fails, 1000000);
        CHECK(http_send(&request, &response, &error) == NEBULA_UNAVAILABLE && strstr(error.message, NAME));
        CHECK(atomic_load(&looked_up) > 1 && !server_requests(server));
        printf("# %s\n", error.message);
        atomic_store(&fails, 0);
        server_stop(server);
}

TAP_MAIN(TEST(a_name_that_stays_away_is_said), TEST(a_name_that_comes_back_is_asked_again))
