/*
 * sink.c - an object store on loopback that is as cheap as possible, so that the client of a benchmark is the bottleneck.
 *
 *      bench-sink [--keep] [--mbps N]
 *
 * It prints its port, serves until its input ends, and accepts any signature. It speaks S3 (also multipart uploads, conditions, lists,
 * copies and removals), and the part of Azure Blob that transfers need. Without --keep the kernel drops large bodies (MSG_TRUNC), and
 * reads of them return a pattern from the page cache (sendfile). The object .../pattern-BYTES always exists. --mbps: the sink accepts so
 * many MB/s of bodies, over all connections.
 *
 * GET /__counts__ answers with one JSON object: requests, lists among them, bytes in and out, and the CPU seconds of this process.
 * GET /__latency__?ms=N delays all later answers by N ms.
 * GET /__requests__ answers with a line for each request since the last such question: when it came and when it was answered, in ms, its
 * method, and its target.
 */
#include "sink.h"

#include <arpa/inet.h>
#include <limits.h>
#include <malloc.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define HEAD_MAX (32u << 10)
#define PIECE_BYTES (1u << 20)
#define SLOW_PIECE_BYTES (64u << 10) /* with --mbps */

struct link {
        int fd;
        bool is_over;
        char head[HEAD_MAX + 1];
        size_t used; /* bytes in head: of the request, and after it */
};

static atomic_ullong requests, put_count, get_count, list_count, in_bytes, out_bytes;
static atomic_uint latency_ms;
static int pattern_fd;
static double mbps;
static pthread_mutex_t rate_lock = PTHREAD_MUTEX_INITIALIZER;
static double rate_free_s;

static pthread_mutex_t told_lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *told; /* the lines of /__requests__ */
static char *told_text;
static size_t told_size;

static double now_s(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void rate_take(size_t bytes)
{
        double wait_s, now = now_s();

        if (mbps <= 0)
                return;
        pthread_mutex_lock(&rate_lock);
        if (rate_free_s < now)
                rate_free_s = now;
        wait_s = rate_free_s - now;
        rate_free_s += (double)bytes / (mbps * 1e6);
        pthread_mutex_unlock(&rate_lock);
        usleep((useconds_t)(wait_s * 1e6));
}

const char *sink_field(const struct call *call, const char *name, char *value, size_t size)
{
        size_t length = strlen(name);

        *value = 0;
        for (const char *line = strstr(call->head, "\r\n"); line && line[2]; line = strstr(line + 2, "\r\n"))
                if (!strncasecmp(line + 2, name, length) && line[2 + length] == ':') {
                        line += 2 + length + 1;
                        line += strspn(line, " ");
                        snprintf(value, size, "%.*s", (int)strcspn(line, "\r"), line);
                        break;
                }
        return value;
}

static void decode(const char *text, size_t length, char *ret_text, size_t size)
{
        size_t used = 0;

        for (size_t i = 0; i < length && used + 1 < size; i++) {
                char digits[3] = { 0 };

                if (text[i] == '%' && i + 2 < length) {
                        memcpy(digits, text + i + 1, 2);
                        ret_text[used++] = (char)strtoul(digits, NULL, 16);
                        i += 2;
                } else {
                        ret_text[used++] = text[i];
                }
        }
        ret_text[used] = 0;
}

bool sink_param(const struct call *call, const char *name, char *value, size_t size)
{
        size_t length = strlen(name);

        for (const char *at = call->query; *at; at += *at == '&') {
                size_t all = strcspn(at, "&");

                if (!strncmp(at, name, length) && (at[length] == '=' || length == all)) {
                        size_t skipped = length < all ? length + 1 : all;

                        decode(at + skipped, all - skipped, value, size);
                        return true;
                }
                at += all;
        }
        return false;
}

/* Bytes that arrived with the head are the beginning of the body. */
static size_t take_early(struct call *call, char *to)
{
        struct link *link = call->link;
        size_t head = strlen(call->head), size = link->used - head;

        if (size > call->body_bytes)
                size = (size_t)call->body_bytes;
        if (to)
                memcpy(to, link->head + head, size);
        memmove(link->head + head, link->head + head + size, link->used - head - size);
        link->used -= size;
        call->body_bytes -= size;
        return size;
}

static bool read_body(struct call *call, char *to)
{
        size_t done = take_early(call, to), most = mbps > 0 ? SLOW_PIECE_BYTES : PIECE_BYTES;

        atomic_fetch_add(&in_bytes, done + call->body_bytes);
        while (call->body_bytes) {
                size_t piece = call->body_bytes < most ? (size_t)call->body_bytes : most;
                ssize_t got;

                rate_take(piece);
                got = recv(call->link->fd, to ? to + done : NULL, piece, to ? MSG_WAITALL : MSG_TRUNC);
                if (got <= 0) {
                        call->link->is_over = true;
                        return false;
                }
                done += (size_t)got;
                call->body_bytes -= (size_t)got;
        }
        return true;
}

char *sink_take(struct call *call)
{
        uint64_t size = call->body_bytes;
        char *body = malloc(size + 1);

        if (body && read_body(call, body)) {
                body[size] = 0;
                return body;
        }
        free(body);
        return NULL;
}

bool sink_drop(struct call *call)
{
        return read_body(call, NULL);
}

static void give(struct link *link, const char *data, uint64_t size, int flags)
{
        while (size && !link->is_over) {
                ssize_t done = send(link->fd, data, size, MSG_NOSIGNAL | flags);

                if (done <= 0) {
                        link->is_over = true;
                        return;
                }
                data += done;
                size -= (uint64_t)done;
        }
}

/* Called before the answer is sent, so that the next request of the same client stands after this one. */
static void tell(struct call *call)
{
        pthread_mutex_lock(&told_lock);
        if (!told)
                told = open_memstream(&told_text, &told_size);
        fprintf(told, "%.3f %.3f %s %s\n", call->came_s * 1e3, now_s() * 1e3, call->method, call->told);
        pthread_mutex_unlock(&told_lock);
        call->told = NULL;
}

static void give_head(struct call *call, int status, const char *fields, uint64_t size, bool has_more)
{
        char head[4096], date[64];
        static atomic_ullong last_id; /* an answer with the id of the answer before counts as none */
        unsigned long long id = atomic_fetch_add(&last_id, 1) + 1;
        time_t now = time(NULL);
        struct tm when;
        int length;

        if (call->told)
                tell(call);
        strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", gmtime_r(&now, &when));
        length = snprintf(head, sizeof head, "HTTP/1.1 %d Said\r\nDate: %s\r\nx-amz-request-id: %llu\r\nx-ms-request-id: %llu\r\n%s%s%llu\r\n\r\n",
                          status, date, id, id, fields, strstr(fields, "Content-Length") ? "X-Size: " : "Content-Length: ", (unsigned long long)size);
        give(call->link, head, (uint64_t)length, has_more ? MSG_MORE : 0);
}

void sink_answer_pieces(struct call *call, int status, const char *fields, const struct iovec *pieces, size_t count)
{
        bool is_head = !strcmp(call->method, "HEAD");
        uint64_t size = 0;

        for (size_t i = 0; i < count; i++)
                size += pieces[i].iov_len;
        give_head(call, status, fields, size, size && !is_head);
        if (is_head)
                return;
        atomic_fetch_add(&out_bytes, size);
        for (size_t i = 0; i < count; i++)
                give(call->link, pieces[i].iov_base, pieces[i].iov_len, i + 1 < count ? MSG_MORE : 0);
}

void sink_answer(struct call *call, int status, const char *fields, const void *body, uint64_t size)
{
        struct iovec piece = { .iov_base = (void *)(uintptr_t)body, .iov_len = size };

        sink_answer_pieces(call, status, fields, &piece, 1);
}

void sink_answer_pattern(struct call *call, int status, const char *fields, uint64_t offset, uint64_t size)
{
        if (!strcmp(call->method, "HEAD")) {
                give_head(call, status, fields, size, false);
                return;
        }
        give_head(call, status, fields, size, true);
        atomic_fetch_add(&out_bytes, size);
        while (size && !call->link->is_over) {
                off_t at = (off_t)(offset % PATTERN_BYTES);
                uint64_t left = PATTERN_BYTES - (uint64_t)at;
                ssize_t done = sendfile(call->link->fd, pattern_fd, &at, left < size ? left : size);

                if (done <= 0)
                        call->link->is_over = true;
                else
                        offset += (uint64_t)done, size -= (uint64_t)done;
        }
}

static void report_counts(struct call *call)
{
        struct rusage usage;
        char text[400];
        int size;

        getrusage(RUSAGE_SELF, &usage);
        size = snprintf(text, sizeof text, "{\"requests\": %llu, \"puts\": %llu, \"gets\": %llu, \"lists\": %llu, \"in_bytes\": %llu, \"out_bytes\": %llu, \"cpu_s\": %.6f}",
                        atomic_load(&requests), atomic_load(&put_count), atomic_load(&get_count), atomic_load(&list_count), atomic_load(&in_bytes), atomic_load(&out_bytes),
                        (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) + (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6);
        sink_answer(call, 200, "", text, (uint64_t)size);
}

static void report_requests(struct call *call)
{
        pthread_mutex_lock(&told_lock);
        if (told)
                fclose(told);
        sink_answer(call, 200, "", told ? told_text : "", told ? told_size : 0);
        if (told)
                free(told_text);
        told = NULL;
        pthread_mutex_unlock(&told_lock);
}

static bool read_head(struct link *link, size_t *ret_size)
{
        for (;;) {
                char *end = memmem(link->head, link->used, "\r\n\r\n", 4);
                ssize_t got;

                if (end) {
                        *ret_size = (size_t)(end - link->head) + 4;
                        return true;
                }
                if (link->used == HEAD_MAX)
                        return false;
                got = recv(link->fd, link->head + link->used, HEAD_MAX - link->used, 0);
                if (got <= 0)
                        return false;
                link->used += (size_t)got;
        }
}

static void serve_one(struct link *link, size_t size)
{
        struct call call = { .link = link };
        char *head = strndup(link->head, size), target[3000] = "", value[64];
        size_t path;

        call.head = head;
        sscanf(head, "%15s %2999s", call.method, target);
        path = strcspn(target, "?");
        decode(target, path, call.path, sizeof call.path);
        call.query = target + path + (target[path] == '?');
        call.body_bytes = strtoull(sink_field(&call, "content-length", value, sizeof value), NULL, 10);
        if (*sink_field(&call, "expect", value, sizeof value))
                give(link, "HTTP/1.1 100 Continue\r\n\r\n", 25, 0);
        if (!strcmp(call.path, "/__counts__")) {
                report_counts(&call);
        } else if (!strcmp(call.path, "/__requests__")) {
                report_requests(&call);
        } else if (!strcmp(call.path, "/__latency__")) {
                atomic_store(&latency_ms, sink_param(&call, "ms", value, sizeof value) ? (unsigned)strtoul(value, NULL, 10) : 0);
                sink_answer(&call, 200, "", "", 0);
        } else {
                call.told = target;
                call.came_s = now_s();
                usleep(atomic_load(&latency_ms) * 1000);
                atomic_fetch_add(&requests, 1);
                atomic_fetch_add(&list_count, sink_param(&call, "list-type", value, sizeof value));
                atomic_fetch_add(!strcmp(call.method, "PUT") ? &put_count : &get_count, !strcmp(call.method, "PUT") || !strcmp(call.method, "GET"));
                objects_serve(&call);
        }
        memmove(link->head, link->head + size, link->used - size);
        link->used -= size;
        free(head);
}

static void *serve(void *argument)
{
        struct link *link = argument;
        size_t size;

        while (!link->is_over && read_head(link, &size))
                serve_one(link, size);
        close(link->fd);
        free(link);
        return NULL;
}

/* 8 bytes by a generator that the client repeats. */
static void make_pattern(void)
{
        uint64_t *words, state = 88172645463325252u;

        pattern_fd = memfd_create("pattern", 0);
        if (pattern_fd < 0 || ftruncate(pattern_fd, PATTERN_BYTES))
                abort();
        words = mmap(NULL, PATTERN_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, pattern_fd, 0);
        if (words == MAP_FAILED)
                abort();
        for (size_t i = 0; i < PATTERN_BYTES / sizeof *words; i++) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                words[i] = state;
        }
        munmap(words, PATTERN_BYTES);
}

static void *accept_all(void *argument)
{
        int server = *(int *)argument, fd, one = 1;

        while ((fd = accept(server, NULL, NULL)) >= 0) {
                struct link *link = calloc(1, sizeof *link);
                pthread_t thread;

                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                link->fd = fd;
                if (pthread_create(&thread, NULL, serve, link))
                        abort();
                pthread_detach(thread);
        }
        return NULL;
}

/* Bodies lie in memory of earlier ones: new pages cost more than the copy into them. */
static void keep_memory(void)
{
        mallopt(M_ARENA_MAX, 1);
        mallopt(M_MMAP_THRESHOLD, 32 << 20);
        mallopt(M_TRIM_THRESHOLD, INT_MAX);
}

int main(int argc, char **argv)
{
        struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
        socklen_t size = sizeof address;
        bool keeps = false;
        pthread_t thread;
        int server;

        for (int i = 1; i < argc; i++) {
                keeps = keeps || !strcmp(argv[i], "--keep");
                if (!strcmp(argv[i], "--mbps") && i + 1 < argc)
                        mbps = strtod(argv[++i], NULL);
        }
        signal(SIGPIPE, SIG_IGN);
        keep_memory();
        make_pattern();
        objects_init(keeps);
        server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (bind(server, (struct sockaddr *)&address, sizeof address) || listen(server, 256) ||
            getsockname(server, (struct sockaddr *)&address, &size) || pthread_create(&thread, NULL, accept_all, &server))
                abort();
        printf("%d\n", ntohs(address.sin_port));
        fflush(stdout);
        while (getchar() != EOF)
                ;
        return 0;
}
