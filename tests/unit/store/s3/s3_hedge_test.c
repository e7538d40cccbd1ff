/* A large object with slow ranges: the requests that the driver repeats, and the answer that counts. */
#include <pthread.h>
#include <stdatomic.h>

#include "base/error.h"
#include "os/os.h"
#include "store/s3/fake_s3.h"
#include "store/s3/s3_private.h"
#include "sum/sum.h"
#include "tap.h"

#define PIECE (64u << 10)
#define PIECES 24u
#define BIG_BYTES (PIECES * PIECE - 777)
#define SLOW_MAX 3

/* A range whose first request waits until something else has happened. */
struct slow {
        uint64_t first;          /* byte of the range */
        int64_t stall_ms;        /* so long at most; the server then answers */
        enum fake_fault second;  /* of the second request for it */
        atomic_uint asked;       /* requests for it */
        atomic_bool is_stalling;
        atomic_bool came_during; /* the second request came while the first waited */
};

static struct nebula_error error;
static struct fake_s3 fake;
static struct server *server;
static struct store *store;
static struct object_limits limits;
static struct slow slow[SLOW_MAX];
static atomic_int hedges, hedges_most; /* second requests at the same time */

/* Called with the fake's lock held. */
static enum fake_fault fault_of(const struct server_call *call, void *argument)
{
        char range[64];
        unsigned long long first = 0;

        (void)argument;
        if (sscanf(server_field(call, "range", range, sizeof range), "bytes=%llu-", &first) != 1)
                return FAKE_NONE;
        for (size_t i = 0; i < SLOW_MAX; i++)
                if (slow[i].first == first && first && atomic_load(&slow[i].asked) == 2)
                        return slow[i].second;
        return FAKE_NONE;
}

static void serve(struct server_call *call, void *argument)
{
        char range[64];
        unsigned long long first = 0;
        struct slow *found = NULL;
        unsigned number = 0;

        if (sscanf(server_field(call, "range", range, sizeof range), "bytes=%llu-", &first) == 1)
                for (size_t i = 0; i < SLOW_MAX && first; i++)
                        found = slow[i].first == first ? &slow[i] : found;
        if (found)
                number = atomic_fetch_add(&found->asked, 1) + 1;
        if (number == 1) {
                atomic_store(&found->is_stalling, true);
                server_stall(call, found->stall_ms);
                atomic_store(&found->is_stalling, false);
        } else if (number == 2) {
                int now = atomic_fetch_add(&hedges, 1) + 1;

                if (now > atomic_load(&hedges_most))
                        atomic_store(&hedges_most, now);
                atomic_store(&found->came_during, atomic_load(&found->is_stalling));
                server_stall(call, 30); /* so that another one would be seen beside it */
        }
        fake_serve(call, argument);
        if (number == 2)
                atomic_fetch_sub(&hedges, 1);
}

static char *begin(void)
{
        static struct http_settings real;
        struct http_settings settings;
        struct store_upload *upload;
        struct store_object object = { .key = "m.pt", .size = BIG_BYTES };
        char url[64], *data = malloc(BIG_BYTES);

        for (size_t i = 0; i < BIG_BYTES; i++)
                data[i] = (char)(i * 2654435761u >> 13);
        if (!real.slowest) {
                real = http_settings_now();
                limits = s3_limits;
        }
        settings = real;
        settings.quiet_ms = settings.answer_ms = 20000;
        settings.pause_ms = settings.pause_max_ms = 2;
        settings.hedge_ms = 20;
        http_settings_set(&settings);
        s3_limits = limits;
        s3_asks_stores = false;
        s3_limits.part_bytes = s3_limits.part_bytes_good = s3_limits.read_bytes = PIECE;
        fake_init(&fake);
        fake.fault = fault_of;
        server = server_start(serve, &fake, false);
        object_token_forget_all();
        snprintf(url, sizeof url, "http://127.0.0.1:%d", server_port(server));
        setenv("AWS_ENDPOINT_URL", url, 1);
        setenv("HOME", "/nonexistent", 1);
        setenv("AWS_ACCESS_KEY_ID", "AKID", 1);
        setenv("AWS_SECRET_ACCESS_KEY", "SECRET", 1);
        setenv("AWS_REGION", "eu-west-1", 1);
        atomic_store(&hedges_most, 0);
        if (store_s3.open("s3://data/run", &store, &error))
                abort();
        object.data = data;
        if (store->ops->upload(store, &object, 1, &upload, &error) || store->ops->publish(store, upload, &error))
                abort();
        return data;
}

static void end(char *data, char *back)
{
        store_close(store);
        server_stop(server);
        fake_done(&fake);
        memset(slow, 0, sizeof slow);
        free(data);
        free(back);
}

struct checking {
        const char *data;
        atomic_uint checks[PIECES];
};

static enum nebula_status check(void *argument, const void *data, uint64_t offset, uint64_t size, const uint64_t *crc64,
                                struct nebula_error *ret_error)
{
        struct checking *checking = argument;

        atomic_fetch_add(&checking->checks[offset / PIECE], 1);
        if (memcmp(checking->data + offset, data, size) || *crc64 != sum_crc64(0, data, size))
                return error_set(ret_error, NEBULA_CORRUPT, 0, "chunk at %llu", (unsigned long long)offset);
        return NEBULA_OK;
}

static char *read_all(const char *data, struct checking *checking)
{
        char *back = calloc(1, BIG_BYTES);

        memset(checking, 0, sizeof *checking);
        checking->data = data;
        CHECK(store->ops->read_bulk(store, "m.pt", back, BIG_BYTES, PIECE, check, checking, &error) == NEBULA_OK);
        CHECK(!memcmp(back, data, BIG_BYTES));
        return back;
}

/*
 * fault (Object stores): A range of a read comes slowly.
 * result: The driver asks for it a second time.
 */
static void a_slow_range_is_asked_for_again_and_the_first_answer_counts(void)
{
        struct checking checking;
        char *data, *back;

        slow[0] = (struct slow){ .first = 9 * PIECE, .stall_ms = 15000 };
        data = begin();
        back = read_all(data, &checking);
        CHECK(atomic_load(&slow[0].asked) == 2 && atomic_load(&slow[0].came_during));
        for (size_t i = 0; i < PIECES; i++)
                CHECK(atomic_load(&checking.checks[i]) == 1); /* each was handed over once */
        end(data, back);
}

static void a_second_answer_that_is_damaged_is_read_again(void)
{
        struct checking checking;
        char *data, *back;

        slow[0] = (struct slow){ .first = 9 * PIECE, .stall_ms = 15000, .second = FAKE_FLIP_ANSWER };
        data = begin();
        back = read_all(data, &checking);
        CHECK(atomic_load(&slow[0].asked) == 3 && atomic_load(&checking.checks[9]) == 2);
        end(data, back);
}

static void a_second_request_that_comes_later_changes_nothing(void)
{
        struct checking checking;
        char *data, *back;

        /* Its connection is reset, and repeated; the first request is answered meanwhile. */
        slow[0] = (struct slow){ .first = 9 * PIECE, .stall_ms = 300, .second = FAKE_STALL };
        data = begin();
        back = read_all(data, &checking);
        CHECK(atomic_load(&slow[0].asked) >= 2 && atomic_load(&checking.checks[9]) == 1);
        end(data, back);
}

static void one_range_at_a_time_is_asked_for_again(void)
{
        struct checking checking;
        char *data, *back;

        for (size_t i = 0; i < SLOW_MAX; i++)
                slow[i] = (struct slow){ .first = (9 + 4 * i) * PIECE, .stall_ms = 15000 };
        data = begin();
        back = read_all(data, &checking);
        for (size_t i = 0; i < SLOW_MAX; i++)
                CHECK(atomic_load(&slow[i].asked) == 2 && atomic_load(&slow[i].came_during));
        CHECK(atomic_load(&hedges_most) == 1);
        end(data, back);
}

static void a_limited_rate_asks_for_nothing_twice(void)
{
        struct http_settings settings;
        struct checking checking;
        char *data, *back;

        slow[0] = (struct slow){ .first = 9 * PIECE, .stall_ms = 300 };
        data = begin();
        settings = http_settings_now();
        settings.megabytes_per_s = 1000;
        http_settings_set(&settings);
        back = read_all(data, &checking);
        CHECK(atomic_load(&slow[0].asked) == 1);
        settings.megabytes_per_s = 0;
        http_settings_set(&settings);
        end(data, back);
}

TAP_MAIN(TEST(a_slow_range_is_asked_for_again_and_the_first_answer_counts), TEST(a_second_answer_that_is_damaged_is_read_again),
         TEST(a_second_request_that_comes_later_changes_nothing), TEST(one_range_at_a_time_is_asked_for_again),
         TEST(a_limited_rate_asks_for_nothing_twice))
