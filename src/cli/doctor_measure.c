/* nebula doctor --measure: the speeds at which this machine copies memory, and writes to and reads from the storage path. */
#include "cli/doctor_measure.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/human.h"
#include "cli/term.h"
#include "os/os.h"
#include "os/thread.h"
#include "store/store.h"
#include "sum/sum.h"

#define MEASURE_BYTES ((uint64_t)256 << 20)
#define MEASURE_THREADS 8u
#define MEASURE_CHUNK (4u << 20)
#define MEASURE_PASSES 5u

struct copy_share {
        char *to;
        const char *from;
        uint64_t size;
};

static void *copy_share_run(void *argument)
{
        const struct copy_share *share = argument;

        sum_copy_stream(share->to, share->from, share->size);
        return NULL;
}

/* Seconds for one copy of MEASURE_BYTES by `threads` threads. */
static double copy_once(char *to, const char *from, uint32_t threads)
{
        struct copy_share shares[MEASURE_THREADS];
        pthread_t ids[MEASURE_THREADS];
        int64_t begun_ns = os->now_ns();
        uint64_t piece = MEASURE_BYTES / threads;
        uint32_t started = 1;

        for (uint32_t i = 0; i < threads; i++)
                shares[i] = (struct copy_share){ to + i * piece, from + i * piece, piece };
        while (started < threads && !os_thread_start(&ids[started], copy_share_run, &shares[started], false))
                started++;
        copy_share_run(&shares[0]);
        for (uint32_t i = started; i < threads; i++)
                copy_share_run(&shares[i]);
        for (uint32_t i = 1; i < started; i++)
                pthread_join(ids[i], NULL);
        return (double)(os->now_ns() - begun_ns) / 1e9;
}

/* The best of several passes: the first one makes page tables. */
static double copy_rate(char *to, const char *from)
{
        uint32_t threads = os->cpu_count();
        double best = 0;

        threads = threads > MEASURE_THREADS ? MEASURE_THREADS : threads;
        while (MEASURE_BYTES % (threads * 4096u))
                threads--;
        for (unsigned i = 0; i < MEASURE_PASSES; i++) {
                double seconds = copy_once(to, from, threads);

                if (best == 0 || seconds < best)
                        best = seconds;
        }
        return (double)MEASURE_BYTES / best;
}

static double sum_rate(const char *data)
{
        int64_t begun_ns = os->now_ns();
        uint32_t crc32 = 0;
        uint64_t crc64 = 0;

        for (uint64_t offset = 0; offset < MEASURE_BYTES; offset += MEASURE_CHUNK)
                sum_both(data + offset, MEASURE_CHUNK, &crc32, &crc64);
        return (double)MEASURE_BYTES * 1e9 / (double)(os->now_ns() - begun_ns);
}

static enum nebula_status write_and_read(struct store *store, const char *from, char *to, struct doctor_limits *limits, struct nebula_error *error)
{
        struct store_object object = { .data = from, .size = MEASURE_BYTES };
        struct store_upload *upload = NULL;
        char key[64];
        int64_t begun_ns = os->now_ns();
        enum nebula_status status;

        snprintf(key, sizeof key, ".nebula/measure-%" PRIu32 "-%" PRId64, os->pid(), os->wall_ns());
        object.key = key;
        status = store->ops->upload(store, &object, 1, &upload, error);
        if (status)
                return status;
        status = store->ops->publish(store, upload, error);
        if (status)
                return status;
        limits->write = (double)MEASURE_BYTES * 1e9 / (double)(os->now_ns() - begun_ns);
        begun_ns = os->now_ns();
        status = store->ops->read_bulk(store, key, to, MEASURE_BYTES, MEASURE_CHUNK, NULL, NULL, error);
        if (!status) {
                limits->read = (double)MEASURE_BYTES * 1e9 / (double)(os->now_ns() - begun_ns);
                if (memcmp(from, to, MEASURE_BYTES))
                        status = error_set(error, NEBULA_CORRUPT, 0, "%s: other bytes were read than were written", key);
        }
        if (status)
                store_remove_one(store, key, NULL);
        else
                status = store_remove_one(store, key, error);
        return status;
}

/* Bytes that no storage can compress. */
static void fill(char *data)
{
        for (uint64_t i = 0; i < MEASURE_BYTES; i += 8) {
                uint64_t value = (i + 1) * UINT64_C(0x9E3779B97F4A7C15);

                value ^= value >> 29;
                memcpy(data + i, &value, 8);
        }
}

static enum nebula_status measure(const char *path, char *from, char *to, struct doctor_limits *limits, struct nebula_error *error)
{
        struct store *store;
        enum nebula_status status;

        fill(from);
        limits->copy = copy_rate(to, from);
        limits->sum = sum_rate(from);
        if (!*path)
                return NEBULA_OK;
        status = store_open(path, &store, error);
        if (status)
                return status;
        status = write_and_read(store, from, to, limits, error);
        store_close(store);
        return status;
}

enum nebula_status doctor_measure(const char *path, struct doctor_limits *ret_limits, struct nebula_error *error)
{
        struct doctor_limits limits = { .bytes = MEASURE_BYTES, .memory = os->memory_free() };
        void *from, *to;
        enum nebula_status status;
        int result = os->map(-1, 0, MEASURE_BYTES, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE | OS_MAP_ANONYMOUS, &from);

        if (result < 0)
                return error_set(error, NEBULA_NO_MEMORY, -result, "no memory to measure with");
        result = os->map(-1, 0, MEASURE_BYTES, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_ANONYMOUS, &to);
        if (result < 0) {
                os->unmap(from, MEASURE_BYTES);
                return error_set(error, NEBULA_NO_MEMORY, -result, "no shared memory to measure with");
        }
        status = measure(path, from, to, &limits, error);
        *ret_limits = limits;
        os->unmap(to, MEASURE_BYTES);
        os->unmap(from, MEASURE_BYTES);
        return status;
}

static json_t *rate_or_null(double rate)
{
        return rate > 0 ? json_real(rate) : json_null();
}

json_t *doctor_limits_json(const struct doctor_limits *limits, const struct nebula_error *error)
{
        json_t *result = json_pack("{s:I, s:I, s:o, s:o, s:o, s:o}", "measured_bytes", (json_int_t)limits->bytes, "free_memory_bytes",
                                   (json_int_t)limits->memory, "copy_bytes_per_s", rate_or_null(limits->copy), "sum_bytes_per_s",
                                   rate_or_null(limits->sum), "write_bytes_per_s", rate_or_null(limits->write), "read_bytes_per_s",
                                   rate_or_null(limits->read));

        if (result && error->status)
                json_object_set_new(result, "reason", json_string(error->message));
        return result;
}

static void print_rate(const char *name, double rate, const char *what)
{
        char text[HUMAN_MAX];

        if (rate > 0)
                printf("%-22s ok   %s/s %s\n", name, human_size((uint64_t)rate, text), what);
}

void doctor_limits_print(const struct doctor_limits *limits, const struct nebula_error *error)
{
        print_rate("memory copy", limits->copy, "on up to 8 threads");
        print_rate("checksums", limits->sum, "on one thread");
        print_rate("storage write", limits->write, "durable");
        print_rate("storage read", limits->read, "");
        if (error->status)
                term_print(STYLE_BAD, "%-22s BAD  %s\n", "storage speed", error->message);
}
