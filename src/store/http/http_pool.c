/* The idle connections of this process. Each is a pair of libcurl's handles with at most one connection. The most recent one is used
 * first, so that unneeded connections grow old and are closed. All of them share the resolved names and the TLS sessions. */
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "os/lock.h"
#include "os/os.h"
#include "store/http/http_private.h"

#define POOL_MAX 64

struct http_settings http_settings = {
        .connect_ms = 10000,
        .quiet_ms = 5000,
        .answer_ms = 30000,
        .retry_ms = 120000,
        .retry_new_ms = 15000,
        .pause_ms = 300,
        .pause_max_ms = 10000,
        .halve_ms = 1000,
        .small_bytes = 1u << 20,
        .hedge_ms = 100,
        .slowest = 64u << 10,
        .width_first = 8,
        .width_max = 64,
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool is_ready, allows_plain;
static struct nebula_error not_ready;
static CURLSH *shared;
static struct lock shared_lock = LOCK_INIT(LOCK_HTTP_SHARED), names_lock = LOCK_INIT(LOCK_HTTP_NAMES),
                   sessions_lock = LOCK_INIT(LOCK_HTTP_SESSIONS);
static struct lock lock = LOCK_INIT(LOCK_HTTP_POOL); /* guards the rest */
static struct http_connection waiting[POOL_MAX];
static size_t waiting_count;

static struct lock *lock_of(curl_lock_data data)
{
        return data == CURL_LOCK_DATA_DNS ? &names_lock : data == CURL_LOCK_DATA_SSL_SESSION ? &sessions_lock : &shared_lock;
}

static void lock_shared(CURL *curl, curl_lock_data data, curl_lock_access access, void *argument)
{
        lock_take(lock_of(data));
}

static void unlock_shared(CURL *curl, curl_lock_data data, void *argument)
{
        lock_give(lock_of(data));
}

static enum nebula_status read_environment(struct nebula_error *error)
{
        const char *limit = conf_env("NEBULA_STORE_MBPS"), *plain = conf_env("NEBULA_STORE_ALLOW_HTTP");
        enum nebula_status status = NEBULA_OK;

        allows_plain = plain && !strcmp(plain, "1");
        if (limit)
                status = conf_parse_number("NEBULA_STORE_MBPS", limit, &http_settings.megabytes_per_s, error);
        /* Limits the connections so that each gets at least 1 MB/s: a slower one only delays the others. */
        if (http_settings.megabytes_per_s > 0 && http_settings.megabytes_per_s < http_settings.width_max)
                http_settings.width_max = http_settings.megabytes_per_s > 2 ? (uint32_t)http_settings.megabytes_per_s : 2;
        if (http_settings.width_first > http_settings.width_max)
                http_settings.width_first = http_settings.width_max;
        return status;
}

static void init(void)
{
        if (read_environment(&not_ready))
                return;
        if (curl_global_init(CURL_GLOBAL_ALL) || !(shared = curl_share_init())) {
                error_set(&not_ready, NEBULA_NO_MEMORY, 0, "libcurl does not start: no memory");
                return;
        }
        curl_share_setopt(shared, CURLSHOPT_LOCKFUNC, lock_shared);
        curl_share_setopt(shared, CURLSHOPT_UNLOCKFUNC, unlock_shared);
        curl_share_setopt(shared, CURLSHOPT_SHARE, CURL_LOCK_DATA_DNS);
        curl_share_setopt(shared, CURLSHOPT_SHARE, CURL_LOCK_DATA_SSL_SESSION);
        is_ready = true;
}

enum nebula_status http_pool_ready(struct nebula_error *error)
{
        pthread_once(&once, init);
        return is_ready ? NEBULA_OK : error_set(error, not_ready.status, 0, "%s", not_ready.message);
}

bool http_pool_allows_plain(void)
{
        return allows_plain;
}

uint32_t http_width(void)
{
        return http_pool_ready(NULL) ? 1 : http_settings.width_max;
}

static void end(struct http_connection *connection)
{
        curl_easy_cleanup(connection->curl);
        curl_multi_cleanup(connection->multi);
        *connection = (struct http_connection){ 0 };
}

struct http_settings http_settings_now(void)
{
        http_pool_ready(NULL);
        return http_settings;
}

void http_settings_set(const struct http_settings *settings)
{
        http_pool_ready(NULL);
        http_settings = *settings;
        http_host_forget_all();
        lock_take(&lock);
        while (waiting_count)
                end(&waiting[--waiting_count]);
        lock_give(&lock);
}

static bool take_idle(const struct http_host *host, struct http_connection *ret_connection)
{
        bool is_found = false;

        lock_take(&lock);
        for (size_t i = waiting_count; i-- > 0 && !is_found;)
                if (waiting[i].host == host) {
                        *ret_connection = waiting[i];
                        memmove(&waiting[i], &waiting[i + 1], (--waiting_count - i) * sizeof *waiting);
                        is_found = true;
                }
        lock_give(&lock);
        return is_found;
}

bool http_pool_take(const struct http_host *host, bool is_fresh, struct http_connection *ret_connection)
{
        struct http_connection found = { 0 };

        while (!is_fresh && !found.curl && take_idle(host, &found))
                if (found.fd == CURL_SOCKET_BAD || os->poll(found.fd, 0))
                        end(&found);
        if (!found.curl)
                found = (struct http_connection){ .curl = curl_easy_init(), .multi = curl_multi_init(), .host = host, .fd = CURL_SOCKET_BAD };
        if (!found.curl || !found.multi) {
                end(&found);
                return false;
        }
        curl_easy_reset(found.curl);
        curl_easy_setopt(found.curl, CURLOPT_SHARE, shared);
        curl_multi_setopt(found.multi, CURLMOPT_MAXCONNECTS, 1L);
        *ret_connection = found;
        return true;
}

void http_pool_give(struct http_connection *connection, bool is_good)
{
        struct http_connection spare = *connection;

        if (is_good) {
                lock_take(&lock);
                spare = (struct http_connection){ 0 };
                if (waiting_count == POOL_MAX) {
                        spare = waiting[0];
                        memmove(&waiting[0], &waiting[1], --waiting_count * sizeof *waiting);
                }
                waiting[waiting_count++] = *connection;
                lock_give(&lock);
        }
        end(&spare);
        *connection = (struct http_connection){ 0 };
}
