#include "cli/metrics_server.h"

#include "base/error.h"

#ifdef NB_HAVE_MICROHTTPD
#include <arpa/inet.h>
#include <microhttpd.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/metrics.h"
#include "os/os.h"

#define CONNECTIONS_MAX 16u
#define IDLE_S 10u
#define CONTENT_TYPE "text/plain; version=0.0.4; charset=utf-8"

struct serving {
        const char *path, *history;
};

static enum MHD_Result respond(struct MHD_Connection *connection, unsigned status, const char *type, char *text, size_t size,
                               enum MHD_ResponseMemoryMode mode)
{
        struct MHD_Response *response = MHD_create_response_from_buffer(size, text, mode);
        enum MHD_Result result;

        if (!response)
                return MHD_NO;
        MHD_add_response_header(response, "Content-Type", type);
        if (status == MHD_HTTP_METHOD_NOT_ALLOWED)
                MHD_add_response_header(response, "Allow", "GET, HEAD");
        result = MHD_queue_response(connection, status, response);
        MHD_destroy_response(response);
        return result;
}

static enum MHD_Result respond_text(struct MHD_Connection *connection, unsigned status, char *text)
{
        return respond(connection, status, "text/plain; charset=utf-8", text, strlen(text), MHD_RESPMEM_PERSISTENT);
}

/* libmicrohttpd calls it once with the head of a request, and again with and behind its body. */
static enum MHD_Result answer(void *argument, struct MHD_Connection *connection, const char *url, const char *method, const char *version,
                              const char *upload_data, size_t *upload_size, void **request)
{
        static char begun, not_here[] = "only /metrics is here\n", not_so[] = "only GET and HEAD are answered\n";
        const struct serving *serving = argument;
        size_t size;
        char *text;

        (void)version;
        (void)upload_data;
        if (!*request) {
                *request = &begun;
                return MHD_YES;
        }
        if (*upload_size) {
                *upload_size = 0;
                return MHD_YES;
        }
        if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0)
                return respond_text(connection, MHD_HTTP_METHOD_NOT_ALLOWED, not_so);
        if (strcmp(url, "/metrics") != 0)
                return respond_text(connection, MHD_HTTP_NOT_FOUND, not_here);
        text = metrics_text(serving->path, serving->history, &size);
        return text ? respond(connection, MHD_HTTP_OK, CONTENT_TYPE, text, size, MHD_RESPMEM_MUST_FREE) : MHD_NO;
}

union address {
        struct sockaddr any;
        struct sockaddr_in four;
        struct sockaddr_in6 six;
};

static bool parse(const char *text, union address *ret_address)
{
        char host[64] = "127.0.0.1", *end;
        const char *port = strrchr(text, ':');
        unsigned long number = strtoul(port ? port + 1 : text, &end, 10);
        size_t length = port ? (size_t)(port - text) : 0;

        if (*end || end == (port ? port + 1 : text) || number > 65535 || length >= sizeof host)
                return false;
        if (length) {
                bool is_bracketed = text[0] == '[' && text[length - 1] == ']' && length > 2;

                snprintf(host, sizeof host, "%.*s", (int)(is_bracketed ? length - 2 : length), text + is_bracketed);
        }
        memset(ret_address, 0, sizeof *ret_address);
        if (inet_pton(AF_INET, host, &ret_address->four.sin_addr) == 1) {
                ret_address->four.sin_family = AF_INET;
                ret_address->four.sin_port = htons((uint16_t)number);
                return true;
        }
        ret_address->six.sin6_family = AF_INET6;
        ret_address->six.sin6_port = htons((uint16_t)number);
        return inet_pton(AF_INET6, host, &ret_address->six.sin6_addr) == 1;
}

enum nebula_status metrics_serve(const char *text, const char *path, const char *history, struct nebula_error *error)
{
        struct serving serving = { path, history };
        const union MHD_DaemonInfo *info;
        struct MHD_Daemon *server;
        union address address;
        unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_AUTO;
        char shown[INET6_ADDRSTRLEN] = "";

        if (!parse(text, &address))
                return error_set(error, NEBULA_INVALID, 0, "--listen takes PORT, ADDRESS:PORT or [ADDRESS]:PORT with a numeric address, not \"%.100s\"",
                                 text);
        if (address.any.sa_family == AF_INET6)
                flags |= MHD_USE_IPv6;
        server = MHD_start_daemon(flags, 0, NULL, NULL, answer, &serving, MHD_OPTION_SOCK_ADDR, &address.any, MHD_OPTION_CONNECTION_LIMIT,
                                  CONNECTIONS_MAX, MHD_OPTION_CONNECTION_TIMEOUT, IDLE_S, MHD_OPTION_END);
        if (!server)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "cannot listen at %.100s: the port may be taken", text);
        info = MHD_get_daemon_info(server, MHD_DAEMON_INFO_BIND_PORT);
        if (address.any.sa_family == AF_INET6)
                inet_ntop(AF_INET6, &address.six.sin6_addr, shown, sizeof shown);
        else
                inet_ntop(AF_INET, &address.four.sin_addr, shown, sizeof shown);
        printf(address.any.sa_family == AF_INET6 ? "http://[%s]:%u/metrics\n" : "http://%s:%u/metrics\n", shown, info ? info->port : 0u);
        fflush(stdout);
        for (;;)
                os->sleep_ms(INT32_MAX); /* until Ctrl-C, which needs no clean-up */
}
#else
enum nebula_status metrics_serve(const char *text, const char *path, const char *history, struct nebula_error *error)
{
        (void)path;
        (void)history;
        return error_set(error, NEBULA_UNAVAILABLE, 0, "cannot listen at %.100s: this build has no libmicrohttpd; use --textfile", text);
}
#endif
