#include "cli/metrics_server.h"

#include "base/error.h"

#ifdef NB_HAVE_CIVETWEB
#include <arpa/inet.h>
#include <civetweb.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/metrics.h"
#include "os/os.h"

#define CONTENT_TYPE "text/plain; version=0.0.4; charset=utf-8"

struct serving {
        const char *path, *history;
        char failure[200]; /* civetweb's last message */
};

static int respond(struct mg_connection *connection, int status, const char *reason, const char *header, const char *type, const char *text,
                   size_t size)
{
        const struct mg_request_info *request = mg_get_request_info(connection);

        mg_printf(connection, "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nConnection: close\r\n%s\r\n", status, reason, type,
                  size, header);
        if (strcmp(request->request_method, "HEAD") != 0)
                mg_write(connection, text, size);
        return status;
}

static int respond_text(struct mg_connection *connection, int status, const char *reason, const char *header, const char *text)
{
        return respond(connection, status, reason, header, "text/plain; charset=utf-8", text, strlen(text));
}

static int answer(struct mg_connection *connection, void *argument)
{
        const struct mg_request_info *request = mg_get_request_info(connection);
        const struct serving *serving = argument;
        size_t size;
        char *text;
        int status;

        if (strcmp(request->request_method, "GET") != 0 && strcmp(request->request_method, "HEAD") != 0)
                return respond_text(connection, 405, "Method Not Allowed", "Allow: GET, HEAD\r\n", "only GET and HEAD are answered\n");
        if (!request->local_uri || strcmp(request->local_uri, "/metrics") != 0)
                return respond_text(connection, 404, "Not Found", "", "only /metrics is here\n");
        text = metrics_text(serving->path, serving->history, &size);
        if (!text)
                return respond_text(connection, 500, "Internal Server Error", "", "no memory for the metrics\n");
        status = respond(connection, 200, "OK", "", CONTENT_TYPE, text, size);
        free(text);
        return status;
}

static int keep_message(const struct mg_connection *connection, const char *message)
{
        struct serving *serving = mg_get_user_data(mg_get_context(connection));

        snprintf(serving->failure, sizeof serving->failure, "%s", message);
        return 1;
}

/* Splits `text`, PORT or ADDRESS:PORT, into civetweb's form and the address. False: it is neither. */
static bool parse(const char *text, char ret_listen[80], char ret_host[64])
{
        const char *port = strrchr(text, ':');
        size_t length = port ? (size_t)(port - text) : 0;
        unsigned char parsed[sizeof(struct in6_addr)];
        unsigned long number;
        bool is_bracketed = length > 2 && text[0] == '[' && text[length - 1] == ']';
        char *end;

        port = port ? port + 1 : text;
        number = strtoul(port, &end, 10);
        if (*port < '0' || *port > '9' || *end || number > 65535 || length >= 64)
                return false;
        if (length)
                snprintf(ret_host, 64, "%.*s", (int)(is_bracketed ? length - 2 : length), text + is_bracketed);
        else
                strcpy(ret_host, "127.0.0.1");
        if (inet_pton(AF_INET, ret_host, parsed) == 1)
                snprintf(ret_listen, 80, "%s:%lu", ret_host, number);
        else
                snprintf(ret_listen, 80, "[%s]:%lu", ret_host, number);
        return inet_pton(AF_INET, ret_host, parsed) == 1 || inet_pton(AF_INET6, ret_host, parsed) == 1;
}

enum nebula_status metrics_serve(const char *text, const char *path, const char *history, struct nebula_error *error)
{
        struct serving serving = { .path = path, .history = history };
        const struct mg_callbacks callbacks = { .log_message = keep_message };
        char listen[80], host[64];
        /* civetweb serves no directory and no scripts: `answer` handles every request. A client that sends half a request takes a thread until
         * the request has taken 2 s: Prometheus waits 10 s, and its request must find a thread before. */
        const char *options[] = { "listening_ports", listen, "num_threads", "64", "request_timeout_ms", "2000", NULL };
        struct mg_server_port port;
        struct mg_context *server;

        if (!parse(text, listen, host))
                return error_set(error, NEBULA_INVALID, 0, "--listen takes PORT, ADDRESS:PORT or [ADDRESS]:PORT with a numeric address, not \"%.100s\"",
                                 text);
        mg_init_library(0);
        server = mg_start(&callbacks, &serving, options);
        if (!server)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "cannot listen at %.100s: the port may be taken (%s)", text, serving.failure);
        mg_set_request_handler(server, "**", answer, &serving);
        if (mg_get_server_ports(server, 1, &port) != 1)
                port.port = 0;
        printf(strchr(host, ':') ? "http://[%s]:%d/metrics\n" : "http://%s:%d/metrics\n", host, port.port);
        fflush(stdout);
        for (;;)
                os->sleep_ms(INT32_MAX); /* until Ctrl-C, which needs no clean-up */
}
#else
enum nebula_status metrics_serve(const char *text, const char *path, const char *history, struct nebula_error *error)
{
        (void)path;
        (void)history;
        return error_set(error, NEBULA_UNAVAILABLE, 0, "cannot listen at %.100s: this build has no civetweb; use --textfile", text);
}
#endif
