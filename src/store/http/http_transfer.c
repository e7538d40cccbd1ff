/* One try of a request. libcurl asks this code for bytes to send, and gives it the bytes that arrive. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/conf.h"
#include "os/os.h"
#include "store/http/http_private.h"
#include "sum/sum.h"

#define MINUTE_MS 60000
#define LOOK_MS 50 /* between two checks for the end of a transfer */

struct transfer {
        const struct http_request *request;
        CURL *curl;
        uint64_t sent;          /* bytes of the body that libcurl has taken */
        uint64_t into_size;
        unsigned again;         /* so often libcurl has sent the body again by itself */
        struct buf text, fields;
        int64_t moved_ns;       /* when the last byte moved */
        curl_off_t put;         /* bytes of the body that were sent */
        uint64_t counted;          /* those of them that request->moved has */
        bool is_success;        /* the status is 2xx */
        bool has_begun;         /* a byte of the answer has arrived */
        bool is_quiet, is_stopped, is_too_long, is_flooded;
};

static size_t give_body(char *to, size_t unit, size_t count, void *argument)
{
        struct transfer *transfer = argument;
        uint64_t left = transfer->request->body_size - transfer->sent;
        size_t size = unit * count < left ? unit * count : (size_t)left;

        http_rate_take(size);
        memcpy(to, (const char *)transfer->request->body + transfer->sent, size);
        transfer->sent += size;
        transfer->moved_ns = os->now_ns();
        return size;
}

/* Lets libcurl send the body again: it does so if the server had closed an idle connection. */
static int seek_body(void *argument, curl_off_t offset, int origin)
{
        struct transfer *transfer = argument;

        if (origin != SEEK_SET || offset < 0 || (uint64_t)offset > transfer->request->body_size)
                return CURL_SEEKFUNC_FAIL;
        transfer->again++;
        transfer->sent = (uint64_t)offset;
        return CURL_SEEKFUNC_OK;
}

/* Resets the answer at each status line: of interim answers and a proxy's answers only the last counts. */
static void begin_answer(struct transfer *transfer, const char *line, size_t size)
{
        const char *blank = memchr(line, ' ', size);

        transfer->fields.size = transfer->text.size = 0;
        transfer->into_size = 0;
        transfer->is_success = blank && blank + 1 < line + size && blank[1] == '2';
}

static size_t take_field(char *line, size_t unit, size_t count, void *argument)
{
        struct transfer *transfer = argument;
        size_t size = unit * count, whole = size, name;
        const char *colon;

        transfer->moved_ns = os->now_ns();
        transfer->has_begun = true;
        if (size > 5 && !memcmp(line, "HTTP/", 5)) {
                begin_answer(transfer, line, size);
                return whole;
        }
        while (size && strchr(" \t\r\n", line[size - 1]))
                size--;
        colon = memchr(line, ':', size);
        if (!colon)
                return whole;
        if (transfer->fields.size + size > HTTP_FIELDS_MAX) {
                transfer->is_flooded = true;
                return 0;
        }
        name = (size_t)(colon - line);
        for (size_t i = 0; i < name; i++)
                buf_add_byte(&transfer->fields, (uint8_t)(line[i] >= 'A' && line[i] <= 'Z' ? line[i] + ('a' - 'A') : line[i]));
        buf_add_byte(&transfer->fields, 0);
        for (name++; name < size && (line[name] == ' ' || line[name] == '\t'); name++)
                ;
        buf_add(&transfer->fields, line + name, size - name);
        buf_add_byte(&transfer->fields, 0);
        return whole;
}

/* Copies arrived bytes; the caller has checked the room. Bypasses the cache, because these bytes are not read soon. */
static void take_into(struct transfer *transfer, const char *from, uint64_t size)
{
        const struct http_request *request = transfer->request;

        while (size) {
                uint64_t at = transfer->into_size, within = request->into_sums ? at % request->into_chunk : 0;
                uint64_t left = request->into_sums ? request->into_chunk - within : size, part = size < left ? size : left;

                if (request->into_sums) {
                        uint64_t *sum = &request->into_sums[at / request->into_chunk];

                        *sum = sum_crc64(within ? *sum : 0, from, (size_t)part);
                }
                sum_copy_stream((char *)request->into + at, from, (size_t)part);
                transfer->into_size += part;
                from += part;
                size -= part;
        }
}

static size_t take_body(char *from, size_t unit, size_t count, void *argument)
{
        struct transfer *transfer = argument;
        const struct http_request *request = transfer->request;
        size_t size = unit * count, room;

        http_rate_take(size);
        transfer->moved_ns = os->now_ns();
        if (request->into && transfer->is_success) {
                if (size > request->into_size - transfer->into_size) {
                        transfer->is_too_long = true;
                        return 0;
                }
                take_into(transfer, from, size);
                return size;
        }
        room = !transfer->is_success ? HTTP_ERROR_MAX : request->text_max ? request->text_max : HTTP_TEXT_MAX;
        if (size > room - transfer->text.size) {
                transfer->is_too_long = transfer->is_success;
                buf_add(&transfer->text, from, room - transfer->text.size);
                return transfer->is_success ? 0 : size;
        }
        buf_add(&transfer->text, from, size);
        return size;
}

static void report_moved(struct transfer *transfer, uint64_t bytes)
{
        if (transfer->request->moved)
                atomic_fetch_add(transfer->request->moved, bytes - transfer->counted); /* modulo 2^64 */
        transfer->counted = bytes;
}

/* Whether the transfer must end early. */
static bool must_end(struct transfer *transfer)
{
        const struct http_request *request = transfer->request;
        bool is_under_way = transfer->has_begun || (transfer->sent && transfer->sent < request->body_size);
        int64_t now_ns = os->now_ns(), limit_ms = http_settings.quiet_ms;
        curl_off_t put = 0;

        /* libcurl takes pieces of a body long before it sends them, so the bytes sent show progress. */
        curl_easy_getinfo(transfer->curl, CURLINFO_SIZE_UPLOAD_T, &put);
        if (put != transfer->put) {
                transfer->put = put;
                transfer->moved_ns = now_ns;
                report_moved(transfer, (uint64_t)put);
        }
        if (!is_under_way)
                limit_ms = request->answer_ms ? request->answer_ms : http_settings.answer_ms;
        transfer->is_stopped = http_is_stopped(request);
        transfer->is_quiet = now_ns - transfer->moved_ns > limit_ms * 1000000;
        return transfer->is_stopped || transfer->is_quiet;
}

/* The bundle that the request names, else that of the environment. */
static struct http_trust find_bundle(const struct http_trust *trust)
{
        static const char *const sources[] = { "$SSL_CERT_FILE", "$CURL_CA_BUNDLE", "$REQUESTS_CA_BUNDLE" };

        if (trust->path)
                return *trust;
        for (size_t i = 0; i < sizeof sources / sizeof sources[0]; i++)
                if (conf_env(sources[i] + 1))
                        return (struct http_trust){ conf_env(sources[i] + 1), sources[i] };
        return (struct http_trust){ 0 };
}

/* NULL: the system's certificates. */
static const char *trust_source(const struct http_trust *trust)
{
        struct http_trust bundle = find_bundle(trust);

        return bundle.path ? bundle.source : conf_env("SSL_CERT_DIR") ? "$SSL_CERT_DIR" : NULL;
}

void http_describe(const char *url, const struct http_trust *trust, char *ret_text, size_t size)
{
        const char *source = trust_source(trust);
        struct url split;

        if (!strncmp(url, "https://", 8))
                snprintf(ret_text, size, "https, TLS 1.2 or newer, certificates of %s", source ? source : "the system");
        else if (url_split(url, &split) && url_is_loopback(&split))
                snprintf(ret_text, size, "http, to this machine only");
        else
                snprintf(ret_text, size, "http: keys and data cross the network unencrypted");
}

/* Where systems keep their trusted certificates. A libcurl built for one system knows the place; the wheel's libcurl is built for all of
 * them. */
static const char *system_bundle(void)
{
#if LIBCURL_VERSION_NUM >= 0x075400
        static const char *const places[] = {
                "/etc/ssl/certs/ca-certificates.crt", /* Debian, Ubuntu, Arch, Alpine */
                "/etc/pki/tls/certs/ca-bundle.crt",   /* Fedora, RHEL, Amazon Linux */
                "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
                "/etc/ssl/ca-bundle.pem",             /* SUSE */
                "/etc/ssl/cert.pem",
        };
        const curl_version_info_data *built = curl_version_info(CURLVERSION_NOW);
        struct os_stat found;

        for (size_t i = 0; !built->cainfo && !built->capath && i < sizeof places / sizeof places[0]; i++)
                if (!os->stat(places[i], true, &found))
                        return places[i];
#endif
        return NULL;
}

static bool is_directory(const char *path)
{
        struct os_stat found;

        return !os->stat(path, true, &found) && found.kind == OS_KIND_DIRECTORY;
}

/* libcurl's own default for the one counts beside the other, so both are set. */
static void set_trust(CURL *curl, const struct http_trust *trust)
{
        const char *file = find_bundle(trust).path, *directory = trust->path ? NULL : conf_env("SSL_CERT_DIR");

        if (file && is_directory(file)) { /* as REQUESTS_CA_BUNDLE can be */
                directory = file;
                file = NULL;
        }
        if (file || directory) {
                curl_easy_setopt(curl, CURLOPT_CAINFO, file);
                curl_easy_setopt(curl, CURLOPT_CAPATH, directory);
        } else if ((file = system_bundle())) {
                curl_easy_setopt(curl, CURLOPT_CAINFO, file);
        }
        curl_easy_setopt(curl, CURLOPT_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
}

static void set_method(CURL *curl, const struct http_request *request)
{
        if (!strcmp(request->method, "HEAD")) {
                curl_easy_setopt(curl, CURLOPT_NOBODY, 1L);
                return;
        }
        if (!strcmp(request->method, "GET"))
                return;
        curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, request->method);
        if (!strcmp(request->method, "DELETE") && !request->body_size)
                return;
        curl_easy_setopt(curl, CURLOPT_UPLOAD, 1L);
        curl_easy_setopt(curl, CURLOPT_INFILESIZE_LARGE, (curl_off_t)request->body_size);
}

static void set_limits(CURL *curl, const struct http_request *request)
{
        uint64_t bytes = request->body_size + request->into_size;

        curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS,
                         (long)(request->connect_ms ? request->connect_ms : http_settings.connect_ms));
        curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS,
                         (long)(MINUTE_MS + request->answer_ms + (int64_t)(bytes * 1000 / http_settings.slowest)));
        curl_easy_setopt(curl, CURLOPT_BUFFERSIZE, (long)HTTP_BUFFER_BYTES);
        curl_easy_setopt(curl, CURLOPT_UPLOAD_BUFFERSIZE, (long)HTTP_BUFFER_BYTES);
}

static void set_options(struct transfer *transfer, const struct http_fields *fields, char text[CURL_ERROR_SIZE])
{
        const struct http_request *request = transfer->request;
        CURL *curl = transfer->curl;
        struct url url;

        curl_easy_setopt(curl, CURLOPT_URL, request->url);
        curl_easy_setopt(curl, CURLOPT_PATH_AS_IS, 1L); /* send the path that was signed */
        curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
        curl_easy_setopt(curl, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
        curl_easy_setopt(curl, CURLOPT_HTTPHEADER, fields->list);
        curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, text);
        curl_easy_setopt(curl, CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
        curl_easy_setopt(curl, CURLOPT_READFUNCTION, give_body);
        curl_easy_setopt(curl, CURLOPT_READDATA, transfer);
        curl_easy_setopt(curl, CURLOPT_SEEKFUNCTION, seek_body);
        curl_easy_setopt(curl, CURLOPT_SEEKDATA, transfer);
        curl_easy_setopt(curl, CURLOPT_HEADERFUNCTION, take_field);
        curl_easy_setopt(curl, CURLOPT_HEADERDATA, transfer);
        curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, take_body);
        curl_easy_setopt(curl, CURLOPT_WRITEDATA, transfer);
        if (request->is_local || (url_split(request->url, &url) && url_is_loopback(&url)))
                curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");
        set_method(curl, request);
        set_limits(curl, request);
        set_trust(curl, &request->trust);
}

/* Runs the transfer. CURLE_ABORTED_BY_CALLBACK: it had to end early. */
static CURLcode drive(struct http_connection *connection, struct transfer *transfer)
{
        CURLcode code = CURLE_OUT_OF_MEMORY;
        int64_t looked_ns = os->now_ns();
        int running = 1, left;
        CURLMsg *message;

        if (curl_multi_add_handle(connection->multi, connection->curl))
                return code;
        for (;;) {
                if (curl_multi_perform(connection->multi, &running) || !running ||
                    curl_multi_poll(connection->multi, NULL, 0, LOOK_MS, NULL))
                        break;
                if (os->now_ns() - looked_ns < LOOK_MS * 1000000LL)
                        continue;
                looked_ns = os->now_ns();
                if (must_end(transfer))
                        break;
        }
        if (running)
                code = CURLE_ABORTED_BY_CALLBACK;
        else if ((message = curl_multi_info_read(connection->multi, &left)) != NULL)
                code = message->data.result;
        if (curl_easy_getinfo(connection->curl, CURLINFO_ACTIVESOCKET, &connection->fd))
                connection->fd = CURL_SOCKET_BAD;
        curl_multi_remove_handle(connection->multi, connection->curl);
        return code;
}

/* Blocks SIGPIPE, which would end the program: OpenSSL causes it by writing to a socket that the server has closed. */
static CURLcode perform(struct http_connection *connection, struct transfer *transfer)
{
        static const struct timespec at_once = { 0 };
        sigset_t pipe, before, waiting;
        bool was_waiting;
        CURLcode code;

        sigemptyset(&pipe);
        sigaddset(&pipe, SIGPIPE);
        sigpending(&waiting);
        was_waiting = sigismember(&waiting, SIGPIPE) == 1;
        pthread_sigmask(SIG_BLOCK, &pipe, &before);
        code = drive(connection, transfer);
        if (!was_waiting)
                while (sigtimedwait(&pipe, NULL, &at_once) == SIGPIPE)
                        ;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return code;
}

static enum http_outcome outcome_of(struct transfer *transfer, CURLcode code)
{
        long opened = 0;

        if (transfer->text.failed || transfer->fields.failed || code == CURLE_OUT_OF_MEMORY)
                return HTTP_OUTCOME_NO_MEMORY;
        if (transfer->is_stopped)
                return HTTP_OUTCOME_STOPPED;
        if (transfer->is_too_long || transfer->is_flooded)
                return HTTP_OUTCOME_TOO_LONG;
        switch (code) {
        case CURLE_OK:
                return HTTP_OUTCOME_ANSWER;
        case CURLE_OPERATION_TIMEDOUT:
        case CURLE_ABORTED_BY_CALLBACK:
                return HTTP_OUTCOME_SLOW;
        case CURLE_PEER_FAILED_VERIFICATION:
        case CURLE_SSL_CACERT_BADFILE:
        case CURLE_SSL_ISSUER_ERROR:
        case CURLE_URL_MALFORMAT:
                return HTTP_OUTCOME_NEVER;
        default:
                curl_easy_getinfo(transfer->curl, CURLINFO_NUM_CONNECTS, &opened);
                return opened || transfer->has_begun ? HTTP_OUTCOME_NONE : HTTP_OUTCOME_STALE;
        }
}

/* False: no memory. */
static bool hand_out(struct transfer *transfer, struct http_response *ret_response)
{
        struct http_response response = { .into_size = transfer->into_size, .tries = transfer->again };
        long status = 0;

        curl_easy_getinfo(transfer->curl, CURLINFO_RESPONSE_CODE, &status);
        response.status = (int)status;
        response.fields = buf_take(&transfer->fields, &response.fields_size);
        if (!transfer->request->into || !transfer->is_success)
                response.text = buf_take(&transfer->text, &response.text_size);
        if (!response.fields || (!response.text && !(transfer->request->into && transfer->is_success))) {
                http_response_done(&response);
                return false;
        }
        *ret_response = response;
        return true;
}

/* Adds what the user can do to libcurl's sentence. */
static void advise(CURLcode code, const struct http_trust *trust, char text[CURL_ERROR_SIZE])
{
        const char *source = trust_source(trust);
        char advice[120] = "";

        if (code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CACERT_BADFILE || code == CURLE_SSL_ISSUER_ERROR)
                snprintf(advice, sizeof advice, "; %s names the certificates that are trusted", source ? source : "SSL_CERT_FILE");
        else if (code == CURLE_SSL_CONNECT_ERROR && strstr(text, "wrong version number"))
                snprintf(advice, sizeof advice, "; the server seems to speak http without TLS");
        strncat(text, advice, CURL_ERROR_SIZE - 1 - strlen(text));
}

enum http_outcome http_transfer(struct http_connection *connection, const struct http_request *request, const struct http_fields *fields,
                                struct http_response *ret_response, char text[CURL_ERROR_SIZE])
{
        struct transfer transfer = { .request = request, .curl = connection->curl, .moved_ns = os->now_ns(),
                                     .text.is_secret = request->answer_is_secret };
        enum http_outcome outcome;
        CURLcode code;

        *text = 0;
        set_options(&transfer, fields, text);
        code = perform(connection, &transfer);
        outcome = outcome_of(&transfer, code);
        if (outcome == HTTP_OUTCOME_ANSWER && !hand_out(&transfer, ret_response))
                outcome = HTTP_OUTCOME_NO_MEMORY;
        report_moved(&transfer, outcome == HTTP_OUTCOME_ANSWER && transfer.is_success ? request->body_size : 0);
        if (transfer.is_quiet)
                strcpy(text, "no byte moved for too long");
        else if (code && !*text)
                strncat(text, curl_easy_strerror(code), CURL_ERROR_SIZE - 1);
        advise(code, &request->trust, text);
        buf_done(&transfer.text);
        buf_done(&transfer.fields);
        return outcome;
}
