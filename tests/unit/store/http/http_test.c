/* The transport against a server that answers as the test says. */
#include <pthread.h>
#include <stdatomic.h>

#include "base/error.h"
#include "os/os.h"
#include "store/http/http.h"
#include "store/lanes.h"
#include "store/http/server.h"
#include "tap.h"
#include "test_dir.h"

#define BIG_BYTES ((3u << 20) + 17)

static struct nebula_error error;
static struct http_response response;
static char url[128];

/* Settings with short pauses and limits. */
static struct http_settings quick(void)
{
        static struct http_settings real;

        if (!real.slowest)
                real = http_settings_now();
        struct http_settings settings = real;

        settings.quiet_ms = 1000;
        settings.answer_ms = 2000;
        settings.retry_ms = 3000;
        settings.retry_new_ms = 3000;
        settings.pause_ms = 4;
        settings.pause_max_ms = 30;
        settings.halve_ms = 20;
        return settings;
}

static struct server *begin(server_handler *handler, void *argument)
{
        struct http_settings settings = quick();
        struct server *server = server_start(handler, argument, false);

        http_response_done(&response);
        http_settings_set(&settings);
        snprintf(url, sizeof url, "http://127.0.0.1:%d/c/key?sig=SECRET", server_port(server));
        return server;
}

static atomic_ullong retries; /* of the last request */

static enum nebula_status send_body(const char *method, const void *body, size_t size)
{
        struct http_request request = { .method = method, .url = url, .body = body, .body_size = size, .retries = &retries };

        http_response_done(&response);
        memset(&error, 0, sizeof error);
        atomic_store(&retries, 0);
        return http_send(&request, &response, &error);
}

static enum nebula_status get(void)
{
        return send_body("GET", NULL, 0);
}

static void echo(struct server_call *call, void *argument)
{
        char *seen = argument;

        if (seen)
                snprintf(seen, 1024, "%s", call->head);
        server_answer(call, 200, "X-Thing: one\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\n", call->body, call->body_size);
}

static void the_request_on_the_wire_holds_what_was_said_and_no_more(void)
{
        struct http_header headers[] = { { "x-ms-date", "now" }, { "x-empty", "" } };
        struct http_request request = { .method = "PUT", .url = url, .headers = headers, .header_count = 2, .body = "hello", .body_size = 5 };
        char seen[1024], wanted[256];
        struct server *server = begin(echo, seen);

        CHECK(http_send(&request, &response, &error) == NEBULA_OK && response.status == 200 && response.tries == 1);
        snprintf(wanted, sizeof wanted, "PUT /c/key?sig=SECRET HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nx-ms-date: now\r\nx-empty:\r\nContent-Length: 5\r\n\r\n",
                 server_port(server));
        CHECK(!strcmp(seen, wanted));
        CHECK(response.text_size == 5 && !strcmp(response.text, "hello"));
        CHECK(!strcmp(http_field(&response, "x-thing"), "one") && !http_field(&response, "x-other"));
        http_response_done(&response);
        request = (struct http_request){ .method = "DELETE", .url = url };
        CHECK(http_send(&request, &response, &error) == NEBULA_OK);
        CHECK(!strncmp(seen, "DELETE /c/key?sig=SECRET HTTP/1.1\r\nHost:", 40) && !strstr(seen, "Content-") && !strstr(seen, "Accept"));
        http_response_done(&response);
        request = (struct http_request){ .method = "PUT", .url = url };
        CHECK(http_send(&request, &response, &error) == NEBULA_OK && strstr(seen, "Content-Length: 0\r\n"));
        http_response_done(&response);
        request = (struct http_request){ .method = "HEAD", .url = url };
        CHECK(http_send(&request, &response, &error) == NEBULA_OK && !strncmp(seen, "HEAD ", 5) && response.text_size == 0);
        server_stop(server);
}

static char *make_big(void)
{
        char *data = malloc(BIG_BYTES);

        for (size_t i = 0; i < BIG_BYTES; i++)
                data[i] = (char)(i * 31 + (i >> 12));
        return data;
}

static atomic_ullong moved; /* of the last request that counts it */

/* Waits until the client has told all bytes. The first request then fails, the second one succeeds, and the third one is refused. */
static void answer_when_reported(struct server_call *call, void *argument)
{
        atomic_uint *told = argument;

        for (int i = 0; i < 20000 && atomic_load(&moved) != BIG_BYTES; i++)
                os->sleep_ms(5);
        atomic_fetch_add(told, atomic_load(&moved) == BIG_BYTES);
        server_say(call, call->number == 1 ? 503 : call->number == 2 ? 201 : 404, "", "");
}

static void the_bytes_of_a_body_are_counted_while_they_move(void)
{
        atomic_uint told = 0;
        struct server *server = begin(answer_when_reported, &told);
        struct http_settings settings = quick();
        char *big = make_big();
        struct http_request request = { .method = "PUT", .url = url, .body = big, .body_size = BIG_BYTES, .moved = &moved };

        settings.answer_ms = 60000;
        http_settings_set(&settings);
        CHECK(http_send(&request, &response, &error) == NEBULA_OK && response.status == 201 && response.tries == 2);
        CHECK(atomic_load(&told) == 2 && atomic_load(&moved) == BIG_BYTES);
        http_response_done(&response);
        atomic_store(&moved, 0);
        CHECK(http_send(&request, &response, &error) == NEBULA_OK && response.status == 404);
        CHECK(atomic_load(&told) == 3 && !atomic_load(&moved));
        http_response_done(&response);
        free(big);
        server_stop(server);
}

static void bodies_go_out_of_memory_and_into_memory(void)
{
        struct server *server = begin(echo, NULL);
        char *big = make_big(), *back = calloc(1, BIG_BYTES + 1);
        struct http_request request = { .method = "PUT", .url = url, .body = big, .body_size = BIG_BYTES, .into = back, .into_size = BIG_BYTES };

        CHECK(http_send(&request, &response, &error) == NEBULA_OK && response.into_size == BIG_BYTES && !response.text);
        CHECK(!memcmp(big, back, BIG_BYTES) && !back[BIG_BYTES]);
        http_response_done(&response);
        back[BIG_BYTES - 1] = 'x';
        request.into_size = BIG_BYTES - 1;
        CHECK(http_send(&request, &response, &error) == NEBULA_CORRUPT && back[BIG_BYTES - 1] == 'x' && !response.fields);
        request = (struct http_request){ .method = "PUT", .url = url, .body = big, .body_size = 100, .text_max = 99 };
        CHECK(http_send(&request, &response, &error) == NEBULA_CORRUPT);
        free(big);
        free(back);
        server_stop(server);
}

static void requests_one_after_the_other_share_a_connection(void)
{
        struct server *server = begin(echo, NULL);

        for (int i = 0; i < 20; i++)
                CHECK(send_body("PUT", "x", 1) == NEBULA_OK);
        CHECK(server_requests(server) == 20 && server_connections(server) == 1);
        server_stop(server);
}

/* Writes the answer to a GET: its text is the request's number. */
static int print_answer(unsigned number, const char *fields, char text[256])
{
        return snprintf(text, 256, "HTTP/1.1 200 OK\r\n%sContent-Length: 4\r\n\r\n%04u", fields, number);
}

static void answer_twice_at_once(struct server_call *call, void *argument)
{
        const char *is_empty = argument;
        char text[600];
        int size = is_empty ? snprintf(text, 256, "HTTP/1.1 200 OK\r\nX-Number: %u\r\nContent-Length: 0\r\n\r\n", call->number)
                            : print_answer(call->number, "", text);

        memcpy(text + size, text, (size_t)size);
        server_raw(call, text, (size_t)size * 2);
}

/* fault: as an_answer_that_comes_again_is_not_that_of_the_next_request */
static void a_connection_with_unread_bytes_is_not_used_again(void)
{
        struct server *server = begin(answer_twice_at_once, NULL);
        char wanted[8];

        for (unsigned i = 1; i <= 20; i++) {
                snprintf(wanted, sizeof wanted, "%04u", i);
                CHECK(get() == NEBULA_OK && response.status == 200 && !strcmp(response.text, wanted));
        }
        server_stop(server);
        server = begin(answer_twice_at_once, "");
        for (unsigned i = 1; i <= 20; i++) {
                snprintf(wanted, sizeof wanted, "%u", i);
                CHECK(send_body("PUT", "x", 1) == NEBULA_OK && !strcmp(http_field(&response, "x-number"), wanted));
        }
        server_stop(server);
}

/* Each fourth answer comes behind a copy of the answer before it, which arrives when the next request is under way. */
static void answer_late_again(struct server_call *call, void *argument)
{
        char *last = argument, copy[256], fields[64], text[256];
        int size;

        strcpy(copy, last);
        snprintf(fields, sizeof fields, "x-amz-request-id: %u\r\n", call->number);
        size = print_answer(call->number, fields, text);
        strcpy(last, text);
        if (call->number % 4 == 0)
                server_raw(call, copy, strlen(copy));
        server_raw(call, text, (size_t)size);
}

/*
 * fault (Storage): A server or a proxy sends an answer twice.
 * result: The copy answers no other request.
 */
static void an_answer_that_comes_again_is_not_that_of_the_next_request(void)
{
        char last[256] = "";
        struct server *server = begin(answer_late_again, last);
        unsigned before = 0;

        for (int i = 0; i < 20; i++) {
                unsigned number;

                CHECK(get() == NEBULA_OK && response.status == 200);
                number = (unsigned)atoi(response.text);
                CHECK(number > before && number == server_requests(server));
                before = number;
        }
        CHECK(before > 20 && server_connections(server) > 1);
        server_stop(server);
}

static void answer_with_one_id(struct server_call *call, void *argument)
{
        server_say(call, 200, "x-amz-request-id: 4442587FB7D0A2F9\r\n", "fine");
}

static void a_server_whose_answers_have_one_id_is_asked_once_more(void)
{
        struct server *server = begin(answer_with_one_id, NULL);

        for (int i = 0; i < 20; i++)
                CHECK(get() == NEBULA_OK && response.status == 200);
        CHECK(server_requests(server) == 21 && server_connections(server) == 2);
        server_stop(server);
}

struct burst {
        int status, times;
        const char *fields;
};

static void refuse_first(struct server_call *call, void *argument)
{
        const struct burst *burst = argument;

        if ((int)call->number <= burst->times)
                server_say(call, burst->status, burst->fields, "<Error/>");
        else
                server_answer(call, 200, "", call->body, call->body_size);
}

/*
 * fault (Object stores): The store answers 429, 500 or 503 in bursts, or with `Retry-After`.
 * result: The driver repeats the request, and obeys `Retry-After`.
 */
static void busy_answers_are_repeated_with_the_whole_body(void)
{
        static const int statuses[] = { 408, 429, 500, 502, 503, 504 };
        char *big = make_big();

        for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) {
                struct burst burst = { statuses[i], 3, "" };
                struct server *server = begin(refuse_first, &burst);
                struct http_request request = { .method = "PUT", .url = url, .body = big, .body_size = 1 << 20, .text_max = 1 << 20 };

                CHECK(http_send(&request, &response, &error) == NEBULA_OK && response.status == 200 && response.tries == 4);
                CHECK(response.text_size == 1 << 20 && !memcmp(response.text, big, 1 << 20));
                http_response_done(&response);
                server_stop(server);
        }
        free(big);
}

static void other_answers_are_not_repeated(void)
{
        static const int statuses[] = { 301, 400, 403, 404, 409, 412, 416, 501 };

        for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) {
                struct burst burst = { statuses[i], 1, "Location: http://127.0.0.1:1/\r\n" };
                struct server *server = begin(refuse_first, &burst);

                CHECK(get() == NEBULA_OK && response.status == statuses[i] && response.tries == 1 && !strcmp(response.text, "<Error/>"));
                server_stop(server);
        }
}

static void a_request_is_given_up_with_the_last_answer(void)
{
        struct burst burst = { 503, 1000000, "" };
        struct server *server = begin(refuse_first, &burst);
        struct http_settings settings = quick();

        settings.retry_ms = settings.retry_new_ms = 200;
        http_settings_set(&settings);
        CHECK(get() == NEBULA_OK && response.status == 503 && response.tries > 2 && server_requests(server) == response.tries);
        CHECK(retries == response.tries - 1);
        server_stop(server);
}

/* fault: as busy_answers_are_repeated_with_the_whole_body */
static void retry_after_is_obeyed(void)
{
        struct burst burst = { 503, 1, "Retry-After: 1\r\n" }, exact = { 429, 1, "x-ms-retry-after-ms: 250\r\n" }, long_ = { 503, 1, "Retry-After: 3600\r\n" };
        struct server *server = begin(refuse_first, &burst);
        struct http_settings settings = quick();
        int64_t before = os->now_ns();

        CHECK(get() == NEBULA_OK && response.status == 200 && os->now_ns() - before >= 1000000000);
        server_stop(server);
        server = begin(refuse_first, &exact);
        before = os->now_ns();
        CHECK(get() == NEBULA_OK && response.status == 200 && os->now_ns() - before >= 250000000);
        server_stop(server);
        /* The pause is longer than the time for repeating: the answer is returned at once. */
        server = begin(refuse_first, &long_);
        settings.retry_ms = settings.retry_new_ms = 120000;
        http_settings_set(&settings);
        before = os->now_ns();
        CHECK(get() == NEBULA_OK && response.status == 503 && os->now_ns() - before < 60000000000);
        server_stop(server);
}

static void a_pause_of_ages_is_no_pause_before_now(void)
{
        static const char *const asked[] = { "Retry-After: 9223372036854775807\r\n", "Retry-After: 18446744073709552\r\n",
                                             "x-ms-retry-after-ms: 18446744073710\r\n", "Retry-After: Fri, 31 Dec 9999 23:59:59 GMT\r\n" };

        for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
                struct burst burst = { 503, 3, asked[i] };
                struct server *server = begin(refuse_first, &burst);

                CHECK(get() == NEBULA_OK && response.status == 503 && server_requests(server) == 1);
                server_stop(server);
        }
}

enum fault { FAULT_CLOSE, FAULT_RESET, FAULT_STALL, FAULT_TRUNCATE, FAULT_STALL_IN_BODY, FAULT_NONSENSE };

static void fail_first(struct server_call *call, void *argument)
{
        static const char half[] = "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf";

        if (call->number > 1) {
                server_say(call, 200, "", "whole");
                return;
        }
        switch (*(enum fault *)argument) {
        case FAULT_CLOSE:
                server_close(call);
                break;
        case FAULT_RESET:
                server_reset(call);
                break;
        case FAULT_STALL:
                server_stall(call, 5000);
                break;
        case FAULT_TRUNCATE:
                server_raw(call, half, sizeof half - 1);
                server_close(call);
                break;
        case FAULT_STALL_IN_BODY:
                server_raw(call, half, sizeof half - 1);
                server_stall(call, 5000);
                break;
        case FAULT_NONSENSE:
                server_raw(call, "\1\2\3nonsense\r\n\r\n", 15);
                server_close(call);
                break;
        }
}

static void a_connection_that_fails_is_made_anew(void)
{
        for (enum fault fault = FAULT_CLOSE; fault <= FAULT_NONSENSE; fault++) {
                struct server *server = begin(fail_first, &fault);

                CHECK(get() == NEBULA_OK && response.status == 200 && !strcmp(response.text, "whole") && response.tries == 2);
                if (error.status)
                        printf("# fault %d: %s\n", fault, error.message);
                server_stop(server);
        }
}

static void close_after_each(struct server_call *call, void *argument)
{
        server_say(call, 200, "", "fine");
        server_close(call);
}

/* The answer does not announce the end of the connection, as when a server closes idle ones. */
static void a_connection_that_was_closed_while_it_waited_costs_no_pause(void)
{
        struct http_settings settings = quick();
        struct server *server = begin(close_after_each, NULL);
        int64_t before;

        settings.pause_ms = settings.pause_max_ms = 120000;
        settings.retry_ms = settings.retry_new_ms = 600000;
        http_settings_set(&settings);
        before = os->now_ns();
        for (int i = 0; i < 10; i++)
                CHECK(send_body("PUT", "x", 1) == NEBULA_OK && response.status == 200);
        CHECK(os->now_ns() - before < 60000000000 && server_connections(server) == 10);
        server_stop(server);
}

static void a_server_that_is_not_there_is_unavailable(void)
{
        struct http_settings settings = quick();
        struct server *server = begin(echo, NULL);

        server_stop(server);
        settings.retry_new_ms = 100;
        http_settings_set(&settings);
        CHECK(get() == NEBULA_UNAVAILABLE && strstr(error.message, "GET http://127.0.0.1:") && !strstr(error.message, "SECRET"));
        printf("# %s\n", error.message);
        snprintf(url, sizeof url, "https://no-such-host.invalid/c?sig=SECRET");
        CHECK(get() == NEBULA_UNAVAILABLE && strstr(error.message, "no-such-host.invalid") && !strstr(error.message, "SECRET"));
        printf("# %s\n", error.message);
}

static void stall_always(struct server_call *call, void *argument)
{
        server_stall(call, 10000);
        server_close(call);
}

static void *set_soon(void *argument)
{
        os->sleep_ms(100);
        atomic_store((atomic_bool *)argument, true);
        return NULL;
}

static void a_request_ends_when_it_is_told_to_stop(void)
{
        struct http_settings settings = quick();
        struct server *server = begin(stall_always, NULL);
        atomic_bool stop = false;
        struct http_request request = { .method = "GET", .url = url, .stop = &stop };
        int64_t before = os->now_ns();
        pthread_t thread;

        settings.answer_ms = 20000;
        http_settings_set(&settings);
        pthread_create(&thread, NULL, set_soon, &stop);
        CHECK(http_send(&request, &response, &error) == NEBULA_UNAVAILABLE && strstr(error.message, "stopped"));
        CHECK(os->now_ns() - before < 9000000000);
        pthread_join(thread, NULL);
        server_stop(server);
}

static void a_server_that_never_answers_is_a_timeout(void)
{
        struct server *server = begin(stall_always, NULL);
        struct http_request request = { .method = "GET", .url = url, .retry_ms = -1 };

        CHECK(http_send(&request, &response, &error) == NEBULA_TIMEOUT && !strstr(error.message, "SECRET"));
        server_stop(server);
}

static enum nebula_status sign(void *argument, bool was_refused, struct http_fields *fields, struct nebula_error *ret_error)
{
        char *token = argument;

        if (was_refused)
                strcpy(token, "Bearer new");
        http_fields_add(fields, "Authorization", token);
        return NEBULA_OK;
}

static void want_new_token(struct server_call *call, void *argument)
{
        char token[64];

        server_say(call, strcmp(server_field(call, "authorization", token, sizeof token), "Bearer new") ? 401 : 200, "", "");
}

static void a_refused_token_is_replaced_once(void)
{
        struct server *server = begin(want_new_token, NULL);
        char token[32] = "Bearer old";
        struct http_request request = { .method = "PUT", .url = url, .body = "x", .body_size = 1, .sign = sign, .sign_argument = token };

        CHECK(http_send(&request, &response, &error) == NEBULA_OK && response.status == 200 && response.tries == 2);
        server_stop(server);
        server = begin(refuse_first, &(struct burst){ 401, 10, "" });
        request.url = url;
        CHECK(http_send(&request, &response, &error) == NEBULA_OK && response.status == 401 && response.tries == 2);
        http_response_done(&response);
        server_stop(server);
}

static enum nebula_status sign_badly(void *argument, bool was_refused, struct http_fields *fields, struct nebula_error *ret_error)
{
        http_fields_add(fields, "x-name", "two\r\nx-lines: 1");
        return NEBULA_OK;
}

static void a_line_end_in_a_header_is_refused(void)
{
        struct server *server = begin(echo, NULL);
        struct http_request request = { .method = "GET", .url = url, .sign = sign_badly };

        CHECK(http_send(&request, &response, &error) == NEBULA_INVALID && !server_requests(server));
        server_stop(server);
}

static void plain_http_does_not_leave_this_machine(void)
{
        static const char *const far[] = { "http://example.com/?sig=SECRET", "http://127.0.0.1.example.com/", "http://10.0.0.1/", "ftp://127.0.0.1/" };
        struct http_request request = { .method = "GET" };

        for (size_t i = 0; i < sizeof far / sizeof *far; i++) {
                request.url = far[i];
                CHECK(http_send(&request, &response, &error) == NEBULA_INVALID && !strstr(error.message, "SECRET"));
        }
}

struct crowd {
        atomic_int now, most;
        int stall_ms; /* the time that an answer takes; 0: 10 */
        int room; /* a request beyond so many at once is answered 503 */
        atomic_int refused, served;
};

static void serve_crowd(struct server_call *call, void *argument)
{
        struct crowd *crowd = argument;
        int now = atomic_fetch_add(&crowd->now, 1) + 1, most = atomic_load(&crowd->most);

        while (now > most && !atomic_compare_exchange_weak(&crowd->most, &most, now))
                ;
        server_stall(call, crowd->stall_ms ? crowd->stall_ms : 10);
        atomic_fetch_sub(&crowd->now, 1);
        atomic_fetch_add(now > crowd->room ? &crowd->refused : &crowd->served, 1);
        server_say(call, now > crowd->room ? 503 : 200, "", "");
}

static char crowd_data[300u << 10];

static enum nebula_status send_piece(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *ret_error)
{
        struct http_request request = { .method = "PUT", .url = url, .body = crowd_data, .body_size = sizeof crowd_data, .stop = stop };
        struct http_response answer;
        enum nebula_status status = http_send(&request, &answer, ret_error);

        if (!status && answer.status != 200)
                status = error_set(ret_error, NEBULA_STORAGE, 0, "the answer is %d", answer.status);
        http_response_done(&answer);
        return status;
}

static void requests_at_once_grow_with_success_up_to_the_limit(void)
{
        struct crowd crowd = { .room = 1000, .stall_ms = 100 }; /* long, so that requests overlap on a busy machine, too */
        struct server *server = begin(serve_crowd, &crowd);
        struct http_settings settings = quick();

        settings.width_first = 2;
        settings.width_max = 6;
        settings.quiet_ms = settings.answer_ms = 60000; /* after an answer that comes too late, the width shrinks */
        http_settings_set(&settings);
        CHECK(lanes_run(3, 20, send_piece, NULL, &error) == NEBULA_OK && atomic_load(&crowd.most) <= 3);
        CHECK(lanes_run(60, 20, send_piece, NULL, &error) == NEBULA_OK && atomic_load(&crowd.most) == 6);
        server_stop(server);
}

static void a_server_that_is_overloaded_gets_fewer_requests_at_once(void)
{
        struct crowd crowd = { .room = 3 };
        struct server *server = begin(serve_crowd, &crowd);
        struct http_settings settings = quick();

        settings.width_first = 24;
        http_settings_set(&settings);
        CHECK(lanes_run(150, 24, send_piece, NULL, &error) == NEBULA_OK && atomic_load(&crowd.served) == 150);
        printf("# %d were refused\n", atomic_load(&crowd.refused));
        CHECK(atomic_load(&crowd.refused) < 450);
        server_stop(server);
}

static void *send_large(void *argument)
{
        struct nebula_error lost;

        send_piece(NULL, 0, argument, &lost);
        return NULL;
}

static void stall_large(struct server_call *call, void *argument)
{
        if (call->body_size)
                server_stall(call, 10000);
        server_say(call, 200, "", "");
}

static void a_small_request_is_not_held_up_behind_large_ones(void)
{
        struct server *server = begin(stall_large, NULL);
        struct http_settings settings = quick();
        atomic_bool stop = false;
        pthread_t threads[3];
        int64_t before;

        settings.width_first = settings.width_max = 1;
        settings.answer_ms = 10000;
        http_settings_set(&settings);
        for (size_t i = 0; i < 3; i++)
                pthread_create(&threads[i], NULL, send_large, &stop);
        while (!server_connections(server))
                os->sleep_ms(1);
        before = os->now_ns();
        CHECK(get() == NEBULA_OK && os->now_ns() - before < 9000000000);
        atomic_store(&stop, true);
        for (size_t i = 0; i < 3; i++)
                pthread_join(threads[i], NULL);
        CHECK(server_connections(server) <= 2);
        server_stop(server);
}

static void the_sum_of_all_bodies_keeps_the_limit_of_bytes_per_second(void)
{
        struct crowd crowd = { .room = 1000 };
        struct server *server = begin(serve_crowd, &crowd);
        struct http_settings settings = quick();
        int64_t before;

        settings.megabytes_per_s = 5;
        http_settings_set(&settings);
        before = os->now_ns();
        CHECK(lanes_run(8, 4, send_piece, NULL, &error) == NEBULA_OK);
        /* 2.46 MB, of which 0.25 MB may come at once. */
        CHECK(os->now_ns() - before > 380000000);
        settings.megabytes_per_s = 0.02; /* two minutes, if it held */
        http_settings_set(&settings);
        settings.megabytes_per_s = 0;
        http_settings_set(&settings);
        before = os->now_ns();
        CHECK(lanes_run(8, 4, send_piece, NULL, &error) == NEBULA_OK && os->now_ns() - before < 60000000000);
        server_stop(server);
}

static void a_certificate_is_trusted_only_when_the_bundle_holds_it(void)
{
        struct server *server = server_start(echo, NULL, true);
        struct http_settings settings = quick();
        char directory[256], bundle[300], hashed[320];

        http_settings_set(&settings);
        test_dir_make(directory);
        snprintf(bundle, sizeof bundle, "%s/bundle.pem", directory);
        REQUIRE(server_certificate(server, bundle));
        snprintf(url, sizeof url, "https://localhost:%d/c?sig=SECRET", server_port(server));
        unsetenv("SSL_CERT_FILE");
        unsetenv("CURL_CA_BUNDLE");
        unsetenv("REQUESTS_CA_BUNDLE");
        unsetenv("SSL_CERT_DIR");
        CHECK(get() == NEBULA_UNAVAILABLE && strstr(error.message, "certificate") && !strstr(error.message, "SECRET"));
        printf("# %s\n", error.message);
        CHECK(!server_requests(server) && strstr(error.message, "SSL_CERT_FILE"));
        setenv("CURL_CA_BUNDLE", bundle, 1);
        CHECK(get() == NEBULA_OK && response.status == 200);
        unsetenv("CURL_CA_BUNDLE");
        setenv("REQUESTS_CA_BUNDLE", bundle, 1);
        CHECK(get() == NEBULA_OK && response.status == 200);
        setenv("REQUESTS_CA_BUNDLE", directory, 1); /* a directory: OpenSSL finds certificates there by their names, which are hashes */
        CHECK(get() == NEBULA_UNAVAILABLE && strstr(error.message, "$REQUESTS_CA_BUNDLE"));
        snprintf(hashed, sizeof hashed, "openssl rehash %s", directory);
        CHECK(!system(hashed) && get() == NEBULA_OK);
        unsetenv("REQUESTS_CA_BUNDLE");
        setenv("SSL_CERT_FILE", bundle, 1);
        CHECK(send_body("PUT", "x", 1) == NEBULA_OK && response.status == 200);
        /* The name counts, too. */
        snprintf(url, sizeof url, "https://127.0.0.1:%d/c", server_port(server));
        CHECK(get() == NEBULA_UNAVAILABLE);
        unsetenv("SSL_CERT_FILE");
        test_dir_remove(directory);
        server_stop(server);
}

TAP_MAIN(TEST(the_request_on_the_wire_holds_what_was_said_and_no_more), TEST(bodies_go_out_of_memory_and_into_memory), TEST(the_bytes_of_a_body_are_counted_while_they_move),
         TEST(requests_one_after_the_other_share_a_connection), TEST(a_connection_with_unread_bytes_is_not_used_again),
         TEST(an_answer_that_comes_again_is_not_that_of_the_next_request), TEST(a_server_whose_answers_have_one_id_is_asked_once_more), TEST(busy_answers_are_repeated_with_the_whole_body),
         TEST(other_answers_are_not_repeated), TEST(a_request_is_given_up_with_the_last_answer), TEST(retry_after_is_obeyed), TEST(a_pause_of_ages_is_no_pause_before_now),
         TEST(a_connection_that_fails_is_made_anew), TEST(a_connection_that_was_closed_while_it_waited_costs_no_pause),
         TEST(a_server_that_is_not_there_is_unavailable), TEST(a_request_ends_when_it_is_told_to_stop),
         TEST(a_server_that_never_answers_is_a_timeout), TEST(a_refused_token_is_replaced_once), TEST(a_line_end_in_a_header_is_refused),
         TEST(plain_http_does_not_leave_this_machine), TEST(requests_at_once_grow_with_success_up_to_the_limit),
         TEST(a_server_that_is_overloaded_gets_fewer_requests_at_once), TEST(a_small_request_is_not_held_up_behind_large_ones),
         TEST(the_sum_of_all_bodies_keeps_the_limit_of_bytes_per_second), TEST(a_certificate_is_trusted_only_when_the_bundle_holds_it))
