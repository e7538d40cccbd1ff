/*
 * transfer.c - one large object to a store or from it, by Nebula's driver or by a bare loop over libcurl.
 *
 *      bench-transfer engine up|down URL BYTES
 *      bench-transfer curl up|down URL BYTES WIDTH
 *
 * engine: the store of URL gets an object, or gives its object "pattern-BYTES" (sink.c), each chunk compared with its CRC-64.
 * curl: WIDTH threads send or fetch pieces of 8 MiB as URL&partNumber=N, or ranges of URL: no signature, no checksum, no retry.
 *
 * Prints one JSON object: seconds, and CPU seconds of this process for them. Memory is there, and touched, before the clock starts.
 * Before an upload, the engine has the CRC-64 of each piece of 4 MiB, because the agent computes it for the record of a version. The CPU
 * seconds of this pass count, its time on the clock does not.
 */
#include <curl/curl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

#include "store/cloud.h"
#include "store/store.h"
#include "sum/sum.h"

#define PATTERN_BYTES (4u << 20) /* and a chunk, so that each has the same sum */
#define PIECE_BYTES (8u << 20)
#define WIDTH_MAX 64

struct mark {
        double wall_s, cpu_s;
};

static struct mark now(void)
{
        struct timespec time;
        struct rusage usage;

        clock_gettime(CLOCK_MONOTONIC, &time);
        getrusage(RUSAGE_SELF, &usage);
        return (struct mark){ (double)time.tv_sec + (double)time.tv_nsec / 1e9,
                              (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) + (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6 };
}

/* `more_s`: CPU seconds to add. */
static void tell(struct mark since, double more_s)
{
        struct mark until = now();

        printf("{\"wall_s\": %.6f, \"cpu_s\": %.6f}\n", until.wall_s - since.wall_s, until.cpu_s - since.cpu_s + more_s);
}

static void die(const char *what)
{
        fprintf(stderr, "bench-transfer: %s\n", what);
        exit(1);
}

/* As in sink.c. */
static void make_pattern(uint64_t *words)
{
        uint64_t state = 88172645463325252u;

        for (size_t i = 0; i < PATTERN_BYTES / sizeof *words; i++) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                words[i] = state;
        }
}

static char *make_data(uint64_t size)
{
        char *data = mmap(NULL, size + PATTERN_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

        if (data == MAP_FAILED)
                die("no memory");
        make_pattern((uint64_t *)data);
        for (uint64_t at = PATTERN_BYTES; at < size; at += PATTERN_BYTES)
                memcpy(data + at, data, PATTERN_BYTES);
        return data;
}

static enum nebula_status check(void *argument, const void *data, uint64_t offset, uint64_t size, const uint64_t *crc64, struct nebula_error *error)
{
        const uint64_t *sum = argument;

        return size < PATTERN_BYTES || store_chunk_sum(data, size, crc64) == *sum ? NEBULA_OK : NEBULA_CORRUPT;
}

static enum nebula_status upload(struct store *store, const char *key, const char *data, uint64_t size, struct bulk_feed *feed, struct nebula_error *error)
{
        struct store_object object = { .key = key, .data = data, .size = size, .feed = feed };
        struct store_upload *upload;
        enum nebula_status status = store->ops->upload(store, &object, 1, &upload, error);

        return status ? status : store->ops->publish(store, upload, error);
}

/* The CPU seconds that the sums took. */
static double sum_pieces(struct bulk_feed *feed, const char *data, uint64_t size)
{
        struct mark since = now();

        if (bulk_feed_init_pieces(feed, size))
                die("no memory");
        for (uint64_t offset = 0; offset < size; offset += BULK_REQUEST_BYTES)
                bulk_feed_report_summed(feed, offset, sum_crc64(0, data + offset, BULK_REQUEST_BYTES), false);
        bulk_feed_end(feed);
        return now().cpu_s - since.cpu_s;
}

static void engine(bool is_up, const char *url, char *data, uint64_t size)
{
        struct nebula_error error = { 0 };
        enum nebula_status status;
        struct bulk_feed feed;
        struct store *store;
        struct mark since;
        double sums_s = 0;
        uint64_t sum = sum_crc64(0, data, PATTERN_BYTES);
        char key[64];

        cloud_offer();
        if (store_open(url, &store, &error))
                die(error.message);
        if (!is_up)
                memset(data, 0, size);
        else
                sums_s = sum_pieces(&feed, data, size);
        since = now();
        if (is_up) {
                snprintf(key, sizeof key, "up-%" PRIx64, (uint64_t)(since.wall_s * 1e6));
                status = upload(store, key, data, size, &feed, &error);
        } else {
                snprintf(key, sizeof key, "pattern-%" PRIu64, size);
                status = store->ops->read_bulk(store, key, data, size, PATTERN_BYTES, check, &sum, &error);
        }
        if (status)
                die(error.message);
        tell(since, sums_s);
        store_close(store);
}

struct raw {
        const char *url;
        char *data;
        uint64_t size;
        bool is_up;
        atomic_size_t next;
};
struct piece {
        char *at;
        size_t left;
};

static size_t give(char *to, size_t unit, size_t count, void *argument)
{
        struct piece *piece = argument;
        size_t size = unit * count < piece->left ? unit * count : piece->left;

        memcpy(to, piece->at, size);
        piece->at += size;
        piece->left -= size;
        return size;
}

static size_t take(char *from, size_t unit, size_t count, void *argument)
{
        struct piece *piece = argument;
        size_t size = unit * count < piece->left ? unit * count : piece->left;

        memcpy(piece->at, from, size);
        piece->at += size;
        piece->left -= size;
        return unit * count;
}

static size_t drop(char *from, size_t unit, size_t count, void *argument)
{
        return unit * count;
}

static void transfer_piece(struct raw *raw, CURL *curl, size_t index)
{
        uint64_t offset = (uint64_t)index * PIECE_BYTES, left = raw->size - offset, size = left < PIECE_BYTES ? left : PIECE_BYTES;
        struct piece piece = { raw->data + offset, (size_t)size };
        char text[1200];

        if (raw->is_up) {
                snprintf(text, sizeof text, "%s&partNumber=%zu", raw->url, index + 1);
                curl_easy_setopt(curl, CURLOPT_URL, text);
                curl_easy_setopt(curl, CURLOPT_UPLOAD, 1L);
                curl_easy_setopt(curl, CURLOPT_READFUNCTION, give);
                curl_easy_setopt(curl, CURLOPT_READDATA, &piece);
                curl_easy_setopt(curl, CURLOPT_INFILESIZE_LARGE, (curl_off_t)size);
                curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, drop);
        } else {
                snprintf(text, sizeof text, "%" PRIu64 "-%" PRIu64, offset, offset + size - 1);
                curl_easy_setopt(curl, CURLOPT_URL, raw->url);
                curl_easy_setopt(curl, CURLOPT_RANGE, text);
                curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, take);
                curl_easy_setopt(curl, CURLOPT_WRITEDATA, &piece);
        }
        if (curl_easy_perform(curl) || piece.left)
                die("libcurl's transfer failed");
}

static void *run_raw(void *argument)
{
        struct curl_slist *fields = curl_slist_append(NULL, "Expect:");
        CURL *curl = curl_easy_init();
        struct raw *raw = argument;
        size_t index;

        curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
        curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");
        curl_easy_setopt(curl, CURLOPT_HTTPHEADER, fields);
        curl_easy_setopt(curl, CURLOPT_FAILONERROR, 1L);
        curl_easy_setopt(curl, CURLOPT_BUFFERSIZE, 256L << 10);
        curl_easy_setopt(curl, CURLOPT_UPLOAD_BUFFERSIZE, 256L << 10);
        while ((index = atomic_fetch_add(&raw->next, 1)) * (uint64_t)PIECE_BYTES < raw->size)
                transfer_piece(raw, curl, index);
        curl_easy_cleanup(curl);
        curl_slist_free_all(fields);
        return NULL;
}

static void bare(bool is_up, const char *url, char *data, uint64_t size, int width)
{
        struct raw raw = { .url = url, .data = data, .size = size, .is_up = is_up };
        pthread_t threads[WIDTH_MAX];
        struct mark since;

        curl_global_init(CURL_GLOBAL_ALL);
        since = now();
        for (int i = 0; i < width; i++)
                if (pthread_create(&threads[i], NULL, run_raw, &raw))
                        die("no thread");
        for (int i = 0; i < width; i++)
                pthread_join(threads[i], NULL);
        tell(since, 0);
}

int main(int argc, char **argv)
{
        bool is_up = argc > 2 && !strcmp(argv[2], "up");
        uint64_t size = argc > 4 ? strtoull(argv[4], NULL, 10) : 0;
        int width = argc > 5 ? atoi(argv[5]) : 0;

        if (!size || size % PATTERN_BYTES || width > WIDTH_MAX)
                die("usage: engine|curl up|down URL BYTES [WIDTH]; BYTES in whole chunks of 4 MiB");
        if (strcmp(argv[1], "engine"))
                bare(is_up, argv[3], make_data(size), size, width);
        else
                engine(is_up, argv[3], make_data(size), size);
        return 0;
}
