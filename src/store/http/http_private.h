/*
 * http_private.h - declarations that the files of the transport share. No other file includes it.
 *
 *      http.c           repeats tries until one has an answer
 *      http_transfer.c  one try: moves bytes between memory and a connection
 *      http_pool.c      idle connections, and the state that all connections share
 *      http_host.c      limits the running requests per host, and the bytes per second
 */
#ifndef NB_STORE_HTTP_HTTP_PRIVATE_H
#define NB_STORE_HTTP_HTTP_PRIVATE_H

#include <curl/curl.h>
#include <pthread.h>

#include "base/buf.h"
#include "store/http/http.h"
#include "store/http/url.h"

#define HTTP_BUFFER_BYTES (256u << 10) /* of a connection, each way: it fits into the second-level cache */
#define HTTP_SMALL_BYTES (256u << 10)  /* a request with at most so many bytes need not wait for large ones */
#define HTTP_SMALL_SPARE 8u            /* that many small requests may exceed the limit */

struct http_fields {
        struct curl_slist *list;
        bool failed; /* no memory, or a field with a line end */
};

/* http.c: whether the request must end. */
bool http_is_stopped(const struct http_request *request);

/* http_host.c: hosts are never freed. */
struct http_host {
        struct http_host *next;
        char name[URL_HOST_MAX + 32]; /* "https://host:443" */
        /* Guarded by the lock of http_host.c: */
        uint32_t limit, busy, successes;
        pthread_cond_t small_left, large_left; /* signalled when there may be room for another request */
        bool has_answered, is_troubled;
        bool repeats_ids;    /* it gives several answers one id, so an id does not distinguish them */
        int64_t cut_ns;      /* when the limit was halved last */
        int64_t troubled_ns; /* since when it has not answered well */
};
/* FINE, OVERLOADED and ILL are answers. */
enum http_verdict { HTTP_VERDICT_FINE, HTTP_VERDICT_OVERLOADED, HTTP_VERDICT_ILL, HTTP_VERDICT_FAILED, HTTP_VERDICT_NONE };
/* NULL: no memory. */
struct http_host *http_host_find(const struct url *url);
/* Waits until one more request may run. False: until_ns is over, or the request must end. */
bool http_host_enter(struct http_host *host, const struct http_request *request, bool is_small, int64_t until_ns);
/* `what` describes the answer or failure for the log, when the host's trouble begins. */
void http_host_leave(struct http_host *host, enum http_verdict verdict, const char *what);
bool http_host_has_answered(struct http_host *host);
/* Whether the host gives each answer an id of its own, as far as is known. */
bool http_host_has_ids(struct http_host *host);
void http_host_repeats_ids(struct http_host *host);
void http_host_forget_all(void);
/* Waits until sending so many more bytes keeps the limit of bytes per second. */
void http_rate_take(uint64_t bytes);

/* http_pool.c */
struct http_connection {
        CURL *curl;
        CURLM *multi; /* holds the connection */
        const struct http_host *host;
        curl_socket_t fd;   /* of the connection; CURL_SOCKET_BAD: there is none */
        uint64_t answer_id; /* of its last answer; 0: it had none */
};
/* Reads the settings from the environment, once. */
enum nebula_status http_pool_ready(struct nebula_error *error);
extern struct http_settings http_settings;
bool http_pool_allows_plain(void);
/* Prefers an idle connection to this host, unless is_fresh; its options are reset. A connection on which bytes wait is closed: they are of no
 * request, or its end. False: no memory. */
bool http_pool_take(const struct http_host *host, bool is_fresh, struct http_connection *ret_connection);
/* `is_good`: the connection may be reused. */
void http_pool_give(struct http_connection *connection, bool is_good);

/* http_transfer.c */
enum http_outcome {
        HTTP_OUTCOME_ANSWER,
        HTTP_OUTCOME_STALE,    /* the server had closed the idle connection */
        HTTP_OUTCOME_NONE,     /* no answer; another try may get one */
        HTTP_OUTCOME_SLOW,     /* no answer in time; another try may get one */
        HTTP_OUTCOME_STOPPED,
        HTTP_OUTCOME_TOO_LONG, /* the answer has more bytes than the caller has room for */
        HTTP_OUTCOME_NEVER,    /* no answer, and another try gets none: the certificate is not trusted */
        HTTP_OUTCOME_NO_MEMORY,
};
/* `text` describes a failure. Writes ret_response if there is an answer. */
enum http_outcome http_transfer(struct http_connection *connection, const struct http_request *request, const struct http_fields *fields,
                                struct http_response *ret_response, char text[CURL_ERROR_SIZE]);

#endif
