/* The number of running requests per host. Its limit follows the host's answers as a TCP window follows lost packets: it grows by one
 * after as many successes as its value. An answer that says "too much" halves it, at most once within http_settings.halve_ms, because
 * requests that ran together get that answer together. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "os/lock.h"
#include "os/os.h"
#include "os/thread.h"
#include "store/http/http_private.h"

#define WAIT_MS 200               /* between two checks for the end of the request */
#define BURST_NS 50000000LL       /* of the limit of bytes per second */

static struct lock lock = LOCK_INIT(LOCK_HTTP_HOSTS); /* guards the hosts and the rate */
static struct http_host *hosts;
static int64_t rate_free_ns; /* when the bytes taken so far will have passed */

static void host_reset(struct http_host *host)
{
        host->limit = http_settings.width_first;
        host->successes = 0;
        host->has_answered = host->is_troubled = host->repeats_ids = false;
        host->cut_ns = 0;
}

struct http_host *http_host_find(const struct url *url)
{
        char name[sizeof hosts->name];
        struct http_host *host;

        snprintf(name, sizeof name, "%s://%s:%d", url->scheme, url->host, url->port > 0 ? url->port : 0);
        lock_take(&lock);
        for (host = hosts; host && strcmp(host->name, name); host = host->next)
                ;
        if (!host && (host = calloc(1, sizeof *host))) {
                memcpy(host->name, name, sizeof name);
                os_cond_init(&host->small_left);
                os_cond_init(&host->large_left);
                host_reset(host);
                host->next = hosts;
                hosts = host;
        }
        lock_give(&lock);
        return host;
}

static bool has_room(const struct http_host *host, bool is_small)
{
        return host->busy < host->limit + (is_small ? HTTP_SMALL_SPARE : 0);
}

/* Lock held. Wakes as many threads as there is room for. With a large object, most of its threads wait here. */
static void wake(struct http_host *host)
{
        pthread_cond_signal(&host->small_left);
        for (uint32_t i = host->busy; i < host->limit && i < host->busy + 2; i++) /* one request has ended, and the limit may have grown by one */
                pthread_cond_signal(&host->large_left);
}

bool http_host_enter(struct http_host *host, const struct http_request *request, bool is_small, int64_t until_ns)
{
        bool may_enter = true;

        lock_take(&lock);
        while (may_enter && !has_room(host, is_small)) {
                lock_wait_for(&lock, is_small ? &host->small_left : &host->large_left, WAIT_MS);
                may_enter = !http_is_stopped(request) && os->now_ns() < until_ns;
        }
        if (may_enter)
                host->busy++;
        else
                wake(host); /* in its place */
        lock_give(&lock);
        return may_enter;
}

/* Lock held. */
static void widen(struct http_host *host)
{
        host->successes++;
        if (host->successes >= host->limit && host->limit < http_settings.width_max) {
                host->limit++;
                host->successes = 0;
        }
}

/* Lock held. */
static void narrow(struct http_host *host, int64_t now_ns)
{
        if (host->cut_ns && now_ns - host->cut_ns < http_settings.halve_ms * 1000000)
                return;
        host->limit = host->limit > 1 ? host->limit / 2 : 1;
        host->successes = 0;
        host->cut_ns = now_ns;
}

void http_host_leave(struct http_host *host, enum http_verdict verdict, const char *what)
{
        int64_t now_ns = os->now_ns(), troubled_ns;
        bool is_well, changes;

        lock_take(&lock);
        host->busy--;
        if (verdict == HTTP_VERDICT_FINE)
                widen(host);
        if (verdict == HTTP_VERDICT_OVERLOADED)
                narrow(host, now_ns);
        is_well = verdict == HTTP_VERDICT_FINE;
        changes = verdict != HTTP_VERDICT_NONE && host->is_troubled == is_well;
        if (changes && !is_well)
                host->troubled_ns = now_ns;
        if (changes)
                host->is_troubled = !is_well;
        troubled_ns = host->troubled_ns;
        host->has_answered = host->has_answered || verdict <= HTTP_VERDICT_ILL;
        wake(host);
        lock_give(&lock);
        if (changes && is_well)
                log_event(LOG_LEVEL_INFO, "%s answers again, after %.1f s", host->name, (double)(now_ns - troubled_ns) / 1e9);
        else if (changes)
                log_event(LOG_LEVEL_WARN, "%s: %s; requests are repeated until it answers again", host->name, what);
}

bool http_host_has_answered(struct http_host *host)
{
        bool has;

        lock_take(&lock);
        has = host->has_answered;
        lock_give(&lock);
        return has;
}

bool http_host_has_ids(struct http_host *host)
{
        bool has;

        lock_take(&lock);
        has = !host->repeats_ids;
        lock_give(&lock);
        return has;
}

void http_host_repeats_ids(struct http_host *host)
{
        lock_take(&lock);
        host->repeats_ids = true;
        lock_give(&lock);
}

void http_host_forget_all(void)
{
        lock_take(&lock);
        for (struct http_host *host = hosts; host; host = host->next)
                host_reset(host);
        rate_free_ns = 0;
        lock_give(&lock);
}

void http_rate_take(uint64_t bytes)
{
        int64_t now_ns, wait_ns;

        if (http_settings.megabytes_per_s <= 0 || !bytes)
                return;
        lock_take(&lock);
        now_ns = os->now_ns();
        if (rate_free_ns < now_ns - BURST_NS)
                rate_free_ns = now_ns - BURST_NS;
        wait_ns = rate_free_ns - now_ns;
        rate_free_ns += (int64_t)((double)bytes * 1000 / http_settings.megabytes_per_s);
        lock_give(&lock);
        if (wait_ns > 0)
                os->sleep_ms((wait_ns + 999999) / 1000000);
}
