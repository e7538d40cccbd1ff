/*
 * http.h - one request to an object store and its answer, over connections that the whole process shares.
 *
 *      struct http_request request = { .method = "PUT", .url = url, .body = data, .body_size = size, .sign = sign, ... };
 *      status = http_send(&request, &response, error);
 *      if (!status)
 *              ... response.status, http_field(&response, "etag"), response.text ...
 *      http_response_done(&response);
 *
 * http_send blocks. The calling thread moves the bytes, so the processors of all callers share the work of TLS. A body is sent from the
 * caller's memory, and the body of an answer is written `into` the caller's memory; each passes through one buffer of the connection,
 * of 256 KiB. Checksums of an answer are computed from that buffer while the processor's cache holds it. Parallel transfers need
 * parallel callers (lanes.h).
 *
 * http_send repeats a request if its connection failed or its answer is 408, 429, 500, 502, 503 or 504. It pauses longer each time and
 * obeys Retry-After, and stops http_settings.retry_ms after the first failure. If the server had closed an idle connection, the request
 * is repeated once without a pause. So a server may do a request more than once: the caller must consider that for an answer such as
 * "412, it exists".
 *
 * Each answer belongs to its request: a connection on which bytes wait is not used again, and an answer with the id of the answer before it counts
 * as none. Services of this machine (is_local) give no ids, so each request to them has a connection of its own.
 *
 * The limit of running requests per host follows the host's answers: each round of successes adds one, 429 and 503 halve it.
 * NEBULA_STORE_MBPS limits the sum of all bodies, in both directions.
 *
 * TLS certificates are verified, against request->trust, else SSL_CERT_FILE, CURL_CA_BUNDLE or REQUESTS_CA_BUNDLE if one is set. Plain
 * http is allowed only to this machine, unless NEBULA_STORE_ALLOW_HTTP=1. Redirects are not followed: the caller sees them as answers.
 *
 * Errors: NEBULA_UNAVAILABLE (no answer: name, connection, TLS; or request->stop was set), NEBULA_TIMEOUT (too slow), NEBULA_CORRUPT
 * (more bytes than the caller has room for), NEBULA_INVALID (a URL or a setting), and those of `sign`. Every answer of a server is
 * NEBULA_OK. Messages never hold a query, a header or a body.
 *
 * Ownership: the response belongs to the caller; it is zeroed after a failure. Threads: any, all at once.
 */
#ifndef NB_STORE_HTTP_HTTP_H
#define NB_STORE_HTTP_HTTP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "nebula.h"

#define HTTP_TEXT_MAX (1u << 20)    /* of an answer's body, unless the request says otherwise */
#define HTTP_ERROR_MAX (64u << 10)  /* of the body of an answer that is not 2xx; the rest is dropped */
#define HTTP_FIELDS_MAX (64u << 10) /* of an answer's header */

struct http_header {
        const char *name, *value;
};
struct http_fields; /* the header of one try */
/* Neither the name nor the value may hold a line end. */
void http_fields_add(struct http_fields *fields, const char *name, const char *value);

/* Adds the credentials. Called before each try; `was_refused`: the server answered 401 to the last try, so its credentials are no longer
 * valid. */
typedef enum nebula_status http_sign(void *argument, bool was_refused, struct http_fields *fields, struct nebula_error *error);

/* The certificates that are trusted. */
struct http_trust {
        const char *path;   /* a file, or a directory; NULL: those that the environment names, else those of the system */
        const char *source; /* for messages: "$SSL_CERT_FILE" */
};

struct http_watch {
        _Atomic int64_t since_ns; /* os->now_ns() when the running try began; 0: none is running */
        _Atomic int64_t took_ns;  /* time of the last ended try; 0: none has ended */
};

struct http_request {
        const char *method, *url;
        struct http_trust trust;
        const struct http_header *headers; /* besides those that `sign` adds */
        size_t header_count;
        http_sign *sign;                   /* NULL: without credentials */
        void *sign_argument;
        const void *body;
        uint64_t body_size;
        void *into;         /* gets the body of a 2xx; NULL: response->text gets it */
        uint64_t into_size; /* room */
        uint64_t *into_sums;  /* NULL, or gets the CRC-64 of each `into_chunk` bytes of the body; the last may be shorter */
        uint64_t into_chunk;
        size_t text_max;    /* bytes of text; 0: HTTP_TEXT_MAX */
        int64_t connect_ms; /* 0: http_settings.connect_ms */
        int64_t answer_ms;  /* from the request to the first byte of the answer; 0: http_settings.answer_ms */
        int64_t retry_ms;   /* 0: http_settings.retry_ms; < 0: one try only */
        bool answer_is_secret; /* http_send leaves no copy of the answer's text in freed memory */
        bool is_local;      /* to a service of this machine or its network card (tokens): no proxy, plain http is allowed */
        atomic_ullong *retries; /* NULL, or counts repeated tries */
        atomic_ullong *moved;   /* NULL, or counts the bytes of `body` while they are sent; those of a try without success are taken off again */
        const atomic_bool *stop, *stop_too; /* NULL, or the request ends once one is true */
        struct http_watch *watch; /* NULL, or gets the times of the tries */
};

struct http_response {
        int status;
        char *text;         /* NUL-terminated; NULL: there was none, or `into` got it */
        size_t text_size;
        uint64_t into_size; /* bytes that came */
        char *fields;       /* http_field reads them */
        size_t fields_size;
        unsigned tries;
};

enum nebula_status http_send(const struct http_request *request, struct http_response *ret_response, struct nebula_error *error);
/* The value of a header field, by its name in lower case; NULL: the answer has none. */
const char *http_field(const struct http_response *response, const char *name);
/* Puts a field in front of those of the answer, so that it counts. Without memory nothing changes. */
void http_field_put(struct http_response *response, const char *name, const char *value);
void http_response_done(struct http_response *response);
/* "Sun, 06 Nov 1994 08:49:37 GMT". */
#define HTTP_DATE_SIZE 32
void http_date_format(int64_t seconds, char ret_text[HTTP_DATE_SIZE]);
bool http_date_parse(const char *text, int64_t *ret_seconds);
/* "2009-10-12T17:50:30.000Z", or with a zone such as +02:00, to whole seconds. Without a zone the time is UTC. */
bool http_date_parse_iso(const char *text, int64_t *ret_seconds);
/* Describes the transport to a person: "https, ..." with the trusted certificates, or "http, ...". */
void http_describe(const char *url, const struct http_trust *trust, char *ret_text, size_t size);

/* The largest useful number of concurrent callers per host. */
uint32_t http_width(void);

struct http_settings {
        int64_t connect_ms;
        int64_t quiet_ms;       /* a running transfer fails if no byte moves for so long */
        int64_t answer_ms;      /* from the last byte of a request to the first of its answer */
        int64_t retry_ms;       /* from the first failure of a request until it fails for good */
        int64_t retry_new_ms;   /* the same for a host that has never answered this process, because its name may be wrong */
        int64_t pause_ms;       /* before the first repetition; doubles each time */
        int64_t pause_max_ms;
        int64_t halve_ms;       /* the limit of running requests is halved at most once in this time */
        uint64_t slowest;       /* bytes per second; a request has a minute plus the time of its bodies at this rate */
        uint32_t width_first, width_max; /* running requests per host */
        uint32_t small_bytes;   /* an object of so many bytes or fewer is one request (object_parts.c) */
        int64_t hedge_ms;       /* a slow range is requested a second time after so long at the earliest (object_bulk.c) */
        double megabytes_per_s; /* 10^6 bytes per second, all bodies together; 0: no limit */
};
struct http_settings http_settings_now(void);
/* For tests: replaces the settings and forgets all hosts. No request may be running. */
void http_settings_set(const struct http_settings *settings);

#endif
