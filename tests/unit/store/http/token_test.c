/* Tokens that a process shares: one thread fetches, and the others wait only if they must. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"
#include "store/object/object.h"
#include "tap.h"

#define THREADS 8

/* A service that gives tokens "token-1", "token-2" and so on, each after `held` was cleared. */
static struct service {
        atomic_uint asked;
        atomic_bool held, fails;
        atomic_llong life_s;
} service;

static enum nebula_status fetch(void *source, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        char text[32];

        snprintf(text, sizeof text, "token-%u", atomic_fetch_add(&service.asked, 1) + 1);
        while (atomic_load(&service.held))
                os->sleep_ms(1);
        if (atomic_load(&service.fails))
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the service is away");
        *ret_text = strdup(text);
        *ret_life_s = atomic_load(&service.life_s);
        return NEBULA_OK;
}

static void done(void *source)
{
}

static struct object_token *begin(int64_t life_s)
{
        struct http_settings settings = http_settings_now();

        settings.retry_ms = settings.answer_ms = 5000;
        http_settings_set(&settings);
        object_token_forget_all();
        atomic_store(&service.asked, 0);
        atomic_store(&service.held, false);
        atomic_store(&service.fails, false);
        atomic_store(&service.life_s, life_s);
        return object_token_find(&(struct object_token_source){ "someone", fetch, NULL, done });
}

struct getter {
        pthread_t thread;
        struct object_token *token;
        uint64_t refused, serial;
        char text[32];
        enum nebula_status status;
        struct nebula_error error;
        atomic_bool is_over;
};

static void *get(void *argument)
{
        struct getter *getter = argument;
        char *text;

        getter->status = object_token_get(getter->token, getter->refused, &text, &getter->serial, &getter->error);
        if (!getter->status) {
                snprintf(getter->text, sizeof getter->text, "%s", text);
                object_forget(text);
        }
        atomic_store(&getter->is_over, true);
        return NULL;
}

static void start(struct getter *getter, struct object_token *token, uint64_t refused)
{
        memset(getter, 0, sizeof *getter);
        getter->token = token;
        getter->refused = refused;
        if (os_thread_start(&getter->thread, get, getter, false))
                abort();
}

static void wait_until_asked(unsigned count)
{
        for (int i = 0; i < 50000 && atomic_load(&service.asked) < count; i++)
                os->sleep_ms(1);
}

static void one_thread_fetches_and_the_others_wait_for_it(void)
{
        struct object_token *token = begin(3600);
        struct getter getters[THREADS];

        atomic_store(&service.held, true);
        for (size_t i = 0; i < THREADS; i++)
                start(&getters[i], token, 0);
        wait_until_asked(1);
        os->sleep_ms(20);
        for (size_t i = 0; i < THREADS; i++)
                CHECK(!atomic_load(&getters[i].is_over));
        atomic_store(&service.held, false);
        for (size_t i = 0; i < THREADS; i++) {
                pthread_join(getters[i].thread, NULL);
                CHECK(!getters[i].status && !strcmp(getters[i].text, "token-1"));
        }
        CHECK(atomic_load(&service.asked) == 1);
}

static void a_failure_reaches_every_waiting_thread(void)
{
        struct object_token *token = begin(3600);
        struct getter getters[THREADS];

        atomic_store(&service.held, true);
        atomic_store(&service.fails, true);
        start(&getters[0], token, 0);
        wait_until_asked(1);
        for (size_t i = 1; i < THREADS; i++)
                start(&getters[i], token, 0);
        os->sleep_ms(50);
        atomic_store(&service.held, false);
        for (size_t i = 0; i < THREADS; i++) {
                pthread_join(getters[i].thread, NULL);
                CHECK(getters[i].status == NEBULA_UNAVAILABLE && strstr(getters[i].error.message, "is away"));
        }
        CHECK(atomic_load(&service.asked) < THREADS);
        atomic_store(&service.fails, false);
        start(&getters[0], token, 0);
        pthread_join(getters[0].thread, NULL);
        CHECK(!getters[0].status);
}

/* A life of 4 s: a new one is fetched after 2 s. */
static void others_use_the_old_token_while_a_new_one_is_fetched(void)
{
        struct object_token *token = begin(4);
        struct getter first, renewing, other;

        start(&first, token, 0);
        pthread_join(first.thread, NULL);
        atomic_store(&service.held, true);
        os->sleep_ms(2100);
        start(&renewing, token, 0);
        wait_until_asked(2);
        start(&other, token, 0);
        for (int i = 0; i < 10000 && !atomic_load(&other.is_over); i++)
                os->sleep_ms(1);
        CHECK(atomic_load(&other.is_over) && !atomic_load(&renewing.is_over));
        atomic_store(&service.held, false);
        pthread_join(renewing.thread, NULL);
        pthread_join(other.thread, NULL);
        CHECK(!strcmp(first.text, "token-1") && !strcmp(other.text, "token-1") && !strcmp(renewing.text, "token-2"));
}

static void a_waiting_thread_gives_up_at_the_deadline(void)
{
        struct object_token *token = begin(3600);
        struct http_settings settings = http_settings_now();
        struct getter fetching, waiting;

        settings.retry_ms = settings.answer_ms = 20;
        http_settings_set(&settings);
        atomic_store(&service.held, true);
        start(&fetching, token, 0);
        wait_until_asked(1);
        start(&waiting, token, 0);
        for (int i = 0; i < 20000 && !atomic_load(&waiting.is_over); i++)
                os->sleep_ms(1);
        CHECK(atomic_load(&waiting.is_over));
        atomic_store(&service.held, false);
        pthread_join(waiting.thread, NULL);
        pthread_join(fetching.thread, NULL);
        CHECK(waiting.status == NEBULA_TIMEOUT && !fetching.status);
}

static void a_refused_token_is_not_handed_out_again(void)
{
        struct object_token *token = begin(3600);
        struct getter getter;

        start(&getter, token, 0);
        pthread_join(getter.thread, NULL);
        start(&getter, token, getter.serial);
        pthread_join(getter.thread, NULL);
        CHECK(!getter.status && !strcmp(getter.text, "token-2"));
        start(&getter, token, 1); /* was refused long ago */
        pthread_join(getter.thread, NULL);
        CHECK(!strcmp(getter.text, "token-2") && atomic_load(&service.asked) == 2);
        object_token_forget_all();
}

TAP_MAIN(TEST(one_thread_fetches_and_the_others_wait_for_it), TEST(a_failure_reaches_every_waiting_thread),
         TEST(others_use_the_old_token_while_a_new_one_is_fetched), TEST(a_waiting_thread_gives_up_at_the_deadline),
         TEST(a_refused_token_is_not_handed_out_again))
