/* Repeats a request until it has a final answer, or the time for repeating is over. */
#include "store/http/http.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "base/error.h"
#include "os/os.h"
#include "store/http/crypt.h"
#include "store/http/http_private.h"
#include "sum/sum.h"

#define MS_NS 1000000LL
#define PRINTED_MAX 300
#define SLICE_MS 100 /* between two looks at *stop */
#define ASKED_MS_MAX 86400000LL /* longest pause that a server's answer may ask for: longer than any request is repeated */
#define UNDER_WAY_MS 86400000LL /* longest wait of a request for its turn: the running ones all have deadlines */

/* One call of http_send. */
struct sending {
        const struct http_request *request;
        struct http_host *host;
        char printed[PRINTED_MAX]; /* "PUT https://host/path" */
        unsigned failures;         /* tries without a final answer */
        int64_t failed_ns;         /* the first of them */
        bool was_refused, was_stale;
        uint64_t doubted;  /* the id of an answer that had come before on its connection; 0: none */
        char text[CURL_ERROR_SIZE];
};

void http_fields_add(struct http_fields *fields, const char *name, const char *value)
{
        struct buf line = { .is_secret = true };
        struct curl_slist *grown = NULL;
        char *text;
        size_t size;

        buf_add_text(&line, name);
        /* libcurl sends an empty field if the name ends with ';', and leaves its own out if nothing follows ':'. */
        buf_add_text(&line, *value ? ": " : ";");
        buf_add_text(&line, value);
        text = buf_take(&line, &size);
        if (text && !strpbrk(text, "\r\n"))
                grown = curl_slist_append(fields->list, text);
        if (grown)
                fields->list = grown;
        else
                fields->failed = true;
        if (text)
                crypt_forget(text, size);
        free(text);
}

/* Overwrites the fields: they hold credentials. */
static void forget_fields(struct http_fields *fields)
{
        for (struct curl_slist *line = fields->list; line; line = line->next)
                crypt_forget(line->data, strlen(line->data));
        curl_slist_free_all(fields->list);
}

/* Suppresses fields that libcurl adds. "Expect" makes it wait for an interim answer, which not every store sends. */
static void leave_out(struct http_fields *fields)
{
        static const char *const names[] = { "Expect:", "Accept:" };

        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
                struct curl_slist *grown = curl_slist_append(fields->list, names[i]);

                if (grown)
                        fields->list = grown;
                else
                        fields->failed = true;
        }
}

static enum nebula_status make_fields(struct sending *sending, struct http_fields *fields, struct nebula_error *error)
{
        const struct http_request *request = sending->request;
        enum nebula_status status = NEBULA_OK;

        leave_out(fields);
        for (size_t i = 0; i < request->header_count; i++)
                http_fields_add(fields, request->headers[i].name, request->headers[i].value);
        if (request->sign)
                status = request->sign(request->sign_argument, sending->was_refused, fields, error);
        if (!status && fields->failed)
                status = error_set(error, NEBULA_INVALID, 0, "%s: the header holds a line end, or there is no memory for it", sending->printed);
        return status;
}

bool http_is_stopped(const struct http_request *request)
{
        return (request->stop && atomic_load(request->stop)) || (request->stop_too && atomic_load(request->stop_too));
}

static bool is_stopped(const struct sending *sending)
{
        return http_is_stopped(sending->request);
}

static enum nebula_status stopped(const struct sending *sending, struct nebula_error *error)
{
        return error_set(error, NEBULA_UNAVAILABLE, 0, "%s: the request was stopped", sending->printed);
}

static bool is_repeatable(int status)
{
        return status == 408 || status == 429 || status == 500 || (status >= 502 && status <= 504);
}

static enum http_verdict verdict_of(enum http_outcome outcome, int status)
{
        if (outcome == HTTP_OUTCOME_ANSWER)
                return status == 429 || status == 503 ? HTTP_VERDICT_OVERLOADED : is_repeatable(status) ? HTTP_VERDICT_ILL : HTTP_VERDICT_FINE;
        if (outcome == HTTP_OUTCOME_NONE || outcome == HTTP_OUTCOME_SLOW || outcome == HTTP_OUTCOME_NEVER)
                return HTTP_VERDICT_FAILED;
        return HTTP_VERDICT_NONE;
}

/* Services give each answer an id. 0: this one has none. */
static uint64_t answer_id(const struct http_response *response)
{
        static const char *const names[] = { "x-amz-request-id", "x-ms-request-id", "x-guploader-uploadid", "x-amzn-requestid" };
        const char *id = NULL;

        for (size_t i = 0; i < sizeof names / sizeof *names && !id; i++)
                id = http_field(response, names[i]);
        return id ? sum_crc64(0, id, strlen(id)) : 0;
}

/* Whether the answer is a copy of the one before: then it answers another request. If a fresh connection gives that id again, too, the host does
 * not distinguish its answers. */
static bool is_copy(struct sending *sending, struct http_connection *connection, const struct http_response *response)
{
        uint64_t id = answer_id(response), before = connection->answer_id;

        connection->answer_id = id;
        if (id && id == sending->doubted)
                http_host_repeats_ids(sending->host);
        if (!id || id != before || !http_host_has_ids(sending->host))
                return false;
        sending->doubted = id;
        return true;
}

/* Sends the request, and gives the connection back. */
static enum http_outcome transfer(struct sending *sending, struct http_connection *connection, const struct http_fields *fields,
                                  struct http_response *ret_response)
{
        const struct http_request *request = sending->request;
        int64_t begun_ns = os->now_ns();
        enum http_outcome outcome;

        if (request->watch)
                atomic_store(&request->watch->since_ns, begun_ns);
        outcome = http_transfer(connection, request, fields, ret_response, sending->text);
        if (request->watch)
                atomic_store(&request->watch->took_ns, os->now_ns() - begun_ns);
        if (request->watch)
                atomic_store(&request->watch->since_ns, 0);
        if (outcome == HTTP_OUTCOME_ANSWER && is_copy(sending, connection, ret_response)) {
                outcome = HTTP_OUTCOME_NONE;
                strcpy(sending->text, "the answer to the request before came again in its place");
                http_response_done(ret_response);
        }
        http_pool_give(connection, outcome == HTTP_OUTCOME_ANSWER && !request->is_local);
        return outcome;
}

/* Waits for its turn and tries once. *ret_response is zeroed unless the server answered. */
static enum nebula_status try_once(struct sending *sending, enum http_outcome *ret_outcome, struct http_response *ret_response,
                                   struct nebula_error *error)
{
        const struct http_request *request = sending->request;
        bool is_small = request->body_size + request->into_size <= HTTP_SMALL_BYTES;
        struct http_connection connection = { 0 };
        struct http_fields fields = { 0 };
        enum http_verdict verdict = HTTP_VERDICT_NONE;
        enum nebula_status status;
        char what[CURL_ERROR_SIZE + 32];

        *ret_response = (struct http_response){ 0 };
        if (!http_host_enter(sending->host, request, is_small, os->now_ns() + UNDER_WAY_MS * MS_NS))
                return stopped(sending, error);
        status = make_fields(sending, &fields, error);
        if (!status && !http_pool_take(sending->host, sending->doubted, &connection))
                status = error_set(error, NEBULA_NO_MEMORY, 0, "%s: no memory for a connection", sending->printed);
        if (!status) {
                *ret_outcome = transfer(sending, &connection, &fields, ret_response);
                verdict = verdict_of(*ret_outcome, ret_response->status);
        }
        if (*sending->text)
                snprintf(what, sizeof what, "%s", sending->text);
        else
                snprintf(what, sizeof what, "its answer is %d", ret_response->status);
        http_host_leave(sending->host, verdict, what);
        forget_fields(&fields);
        return status;
}

/* At most ASKED_MS_MAX. */
static int64_t pause_of(int64_t count, int64_t unit_ms)
{
        return count < ASKED_MS_MAX / unit_ms ? count * unit_ms : ASKED_MS_MAX;
}

/* The pause that the answer asks for, in seconds, as a date, or in milliseconds (Azure). -1: none. */
static int64_t asked_pause_ms(const struct http_response *response)
{
        const char *exact = http_field(response, "x-ms-retry-after-ms"), *value = http_field(response, "retry-after");
        int64_t now, then;

        if (exact && *exact >= '0' && *exact <= '9')
                return pause_of(strtoll(exact, NULL, 10), 1);
        if (value && *value >= '0' && *value <= '9')
                return pause_of(strtoll(value, NULL, 10), 1000);
        if (!value || !http_date_parse(value, &then))
                return -1;
        now = os->wall_ns() / (1000 * MS_NS);
        if (http_field(response, "date"))
                http_date_parse(http_field(response, "date"), &now);
        return then > now ? pause_of(then - now, 1000) : 0;
}

/* Half of the pause is random, so that clients which failed together do not return together. */
static int64_t pause_ms(const struct sending *sending, const struct http_response *response)
{
        unsigned doublings = sending->failures < 16 ? sending->failures - 1 : 15;
        int64_t pause = http_settings.pause_ms << doublings, asked = asked_pause_ms(response);
        uint32_t chance = 0;

        if (pause > http_settings.pause_max_ms)
                pause = http_settings.pause_max_ms;
        os->random(&chance, sizeof chance);
        pause = pause / 2 + (pause ? chance % (pause / 2 + 1) : 0);
        return asked > pause ? asked : pause;
}

/* False: the time for repeating is over. */
static bool pause_before_next(struct sending *sending, const struct http_response *response)
{
        int64_t limit_ms = sending->request->retry_ms, now_ns = os->now_ns(), pause, until_ns;

        if (!limit_ms)
                limit_ms = http_host_has_answered(sending->host) ? http_settings.retry_ms : http_settings.retry_new_ms;
        if (!sending->failures++)
                sending->failed_ns = now_ns;
        pause = pause_ms(sending, response);
        until_ns = now_ns + pause * MS_NS;
        if (limit_ms < 0 || until_ns - sending->failed_ns > limit_ms * MS_NS)
                return false;
        while (!is_stopped(sending) && (now_ns = os->now_ns()) < until_ns) {
                int64_t left_ms = (until_ns - now_ns + MS_NS - 1) / MS_NS;

                os->sleep_ms(left_ms < SLICE_MS ? left_ms : SLICE_MS);
        }
        return true;
}

static enum nebula_status give_up(const struct sending *sending, enum http_outcome outcome, struct nebula_error *error)
{
        switch (outcome) {
        case HTTP_OUTCOME_STOPPED:
                return stopped(sending, error);
        case HTTP_OUTCOME_TOO_LONG:
                return error_set(error, NEBULA_CORRUPT, 0, "%s: the answer is longer than allowed", sending->printed);
        case HTTP_OUTCOME_NO_MEMORY:
                return error_set(error, NEBULA_NO_MEMORY, 0, "%s: no memory for the answer", sending->printed);
        case HTTP_OUTCOME_SLOW:
                return error_set(error, NEBULA_TIMEOUT, 0, "%s: no answer in time: %s", sending->printed, sending->text);
        default:
                return error_set(error, NEBULA_UNAVAILABLE, 0, "%s: no answer: %s", sending->printed, sending->text);
        }
}

static bool may_have_answer_later(enum http_outcome outcome)
{
        return outcome == HTTP_OUTCOME_NONE || outcome == HTTP_OUTCOME_STALE || outcome == HTTP_OUTCOME_SLOW;
}

/* True: try again now. False: the answer, or its absence, is the result. */
static bool try_again(struct sending *sending, enum http_outcome outcome, const struct http_response *response)
{
        if (outcome == HTTP_OUTCOME_STALE && !sending->was_stale)
                return sending->was_stale = true;
        if (outcome == HTTP_OUTCOME_ANSWER && response->status == 401 && sending->request->sign && !sending->was_refused)
                return sending->was_refused = true;
        if (outcome == HTTP_OUTCOME_ANSWER ? is_repeatable(response->status) : may_have_answer_later(outcome))
                return pause_before_next(sending, response);
        return false;
}

static enum nebula_status begin(struct sending *sending, struct nebula_error *error)
{
        const struct http_request *request = sending->request;
        char printed[PRINTED_MAX - 16];
        enum nebula_status status = http_pool_ready(error);
        struct url url;

        if (status)
                return status;
        url_print(request->url, printed, sizeof printed);
        snprintf(sending->printed, sizeof sending->printed, "%.8s %s", request->method, printed);
        if (!url_split(request->url, &url) || (strcmp(url.scheme, "https") && strcmp(url.scheme, "http")))
                return error_set(error, NEBULA_INVALID, 0, "%s: this is not a usable http URL", sending->printed);
        if (!strcmp(url.scheme, "http") && !url_is_loopback(&url) && !request->is_local && !http_pool_allows_plain())
                return error_set(error, NEBULA_INVALID, 0,
                                 "%s: this would send data and keys unencrypted: use https, or set NEBULA_STORE_ALLOW_HTTP=1", sending->printed);
        sending->host = http_host_find(&url);
        return sending->host ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "%s: no memory for a connection", sending->printed);
}

enum nebula_status http_send(const struct http_request *request, struct http_response *ret_response, struct nebula_error *error)
{
        struct sending sending = { .request = request };
        enum http_outcome outcome = HTTP_OUTCOME_NONE;
        enum nebula_status status;

        *ret_response = (struct http_response){ 0 };
        status = begin(&sending, error);
        for (unsigned tries = 1; !status; tries++) {
                struct http_response response;

                status = try_once(&sending, &outcome, &response, error);
                if (status)
                        break;
                if (!try_again(&sending, outcome, &response)) {
                        if (outcome != HTTP_OUTCOME_ANSWER)
                                return give_up(&sending, outcome, error);
                        response.tries += tries;
                        *ret_response = response;
                        break;
                }
                http_response_done(&response);
                if (request->retries)
                        atomic_fetch_add_explicit(request->retries, 1, memory_order_relaxed);
                if (is_stopped(&sending))
                        status = stopped(&sending, error);
        }
        return status;
}

const char *http_field(const struct http_response *response, const char *name)
{
        const char *at = response->fields, *end = at ? at + response->fields_size : NULL;

        while (at && at < end) {
                const char *value = at + strlen(at) + 1;

                if (!strcmp(at, name))
                        return value;
                at = value + strlen(value) + 1;
        }
        return NULL;
}

void http_field_put(struct http_response *response, const char *name, const char *value)
{
        size_t more = strlen(name) + strlen(value) + 2;
        char *fields = malloc(more + response->fields_size + 1);

        if (!fields)
                return;
        memcpy(fields, name, strlen(name) + 1);
        memcpy(fields + strlen(name) + 1, value, strlen(value) + 1);
        if (response->fields_size)
                memcpy(fields + more, response->fields, response->fields_size);
        free(response->fields);
        response->fields = fields;
        response->fields_size += more;
}

void http_response_done(struct http_response *response)
{
        free(response->text);
        free(response->fields);
        *response = (struct http_response){ 0 };
}
