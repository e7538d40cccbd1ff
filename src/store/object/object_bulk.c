/*
 * Reads a large object, or ranges of it, in pieces, several at once. All pieces are of one content: the stamp of the first is the condition of the others.
 *
 * When all pieces are taken, one thread watches those that are still running. If a piece takes twice as long as 95 of 100 pieces took, the
 * thread requests it a second time (a hedge), into memory of its own. The first answer counts:
 *
 *      RUNS ---> TAKEN   the piece's own thread got the bytes, and checks them; the hedge is stopped
 *        `-----> HEDGED  the hedge got the bytes: it stops the own thread, waits until that has left the piece, copies and checks the bytes
 *
 * So only one thread at a time writes to a piece, and none after its chunks were right. A read has at most one running hedge.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "os/os.h"
#include "store/lanes.h"
#include "store/object/object.h"

#define MS_NS INT64_C(1000000)
#define LOOK_MS 5        /* between two checks of the running pieces */
#define LIMIT_LOOKS 20   /* the limit is computed again after so many checks */
#define SAMPLES_MIN 4u

enum piece_state { PIECE_RUNS, PIECE_TAKEN, PIECE_HEDGED };

struct piece {
        struct http_watch watch;
        atomic_int state;
        atomic_bool stop;    /* ends the own thread's request */
        atomic_bool is_done; /* so is the hedge's */
        atomic_bool is_left; /* the own thread will not write any more */
        bool was_hedged;
};

struct reading {
        struct object_store *store;
        const char *key;
        char *data;
        const struct store_range *places; /* of all pieces */
        size_t place_count;
        uint64_t piece_bytes; /* of the largest */
        uint32_t chunk_bytes;
        store_check *check;
        void *argument;
        struct store_stamp stamp;
        size_t first; /* index of lanes_run's first piece */
        size_t count; /* of lanes_run's */
        struct piece *pieces; /* lanes_run's */
        atomic_size_t done;
};

/* NULL: no memory. */
static uint64_t *make_sums(const struct reading *reading, uint64_t size, struct nebula_error *error)
{
        uint64_t *sums = calloc((size_t)(size / reading->chunk_bytes + 1), sizeof *sums);

        if (!sums)
                object_no_memory(reading->store, error);
        return sums;
}

/* *done: bytes of the piece whose chunks are right, up to the first wrong one. `sums`: of the chunks after *done. */
static enum nebula_status check_chunks(const struct reading *reading, uint64_t offset, uint64_t size, const uint64_t *sums, uint64_t *done,
                                       struct nebula_error *error)
{
        for (; *done < size; sums++) {
                uint64_t left = size - *done, chunk = left < reading->chunk_bytes ? left : reading->chunk_bytes;
                enum nebula_status status = NEBULA_OK;

                if (reading->check)
                        status = reading->check(reading->argument, reading->data + offset + *done, offset + *done, chunk, sums, error);
                if (status)
                        return status;
                *done += chunk;
        }
        return NEBULA_OK;
}

/* The range after `done`. */
static struct object_reading range_of(const struct reading *reading, size_t index, uint64_t done, uint64_t *sums, const atomic_bool *stop)
{
        uint64_t offset = reading->places[index].offset + done;

        return (struct object_reading){ .key = reading->key, .data = reading->data + offset, .offset = offset, .size = reading->places[index].size - done,
                                      .sums = reading->check ? sums : NULL, .chunk_bytes = reading->chunk_bytes, .stop = stop };
}

/* Reads wrong chunks once more: if the bytes were changed on the way, they are right the second time. Right chunks are not read again:
 * an upload of the same memory may be sending them. */
static enum nebula_status check_piece(struct reading *reading, size_t index, uint64_t *sums, const atomic_bool *stop, struct nebula_error *error)
{
        uint64_t offset = reading->places[index].offset, size = reading->places[index].size, done = 0;
        struct store_stamp stamp = reading->stamp;
        struct object_reading range;
        enum nebula_status status = check_chunks(reading, offset, size, sums, &done, error);

        if (status != NEBULA_CORRUPT)
                return status;
        range = range_of(reading, index, done, sums, stop);
        status = object_read_range(reading->store, &range, &stamp, error);
        return status ? status : check_chunks(reading, offset, size, sums, &done, error);
}

static enum nebula_status read_first(struct reading *reading, struct nebula_error *error)
{
        uint64_t *sums = make_sums(reading, reading->places[0].size, error);
        struct object_reading range = range_of(reading, 0, 0, sums, NULL);
        enum nebula_status status = sums ? object_read_range(reading->store, &range, &reading->stamp, error) : NEBULA_NO_MEMORY;

        if (!status)
                status = check_piece(reading, 0, sums, NULL, error);
        free(sums);
        return status;
}

static bool take(struct piece *piece, enum piece_state state)
{
        int runs = PIECE_RUNS;

        return atomic_compare_exchange_strong(&piece->state, &runs, state);
}

static enum nebula_status read_piece(struct reading *reading, size_t turn, const atomic_bool *stop, struct nebula_error *error)
{
        size_t index = turn + reading->first;
        struct piece *piece = &reading->pieces[turn];
        struct store_stamp stamp = reading->stamp;
        uint64_t *sums = make_sums(reading, reading->places[index].size, error);
        struct object_reading range = range_of(reading, index, 0, sums, stop);
        enum nebula_status status = NEBULA_NO_MEMORY;

        range.stop_too = &piece->stop;
        range.watch = &piece->watch;
        if (sums)
                status = object_read_range(reading->store, &range, &stamp, error);
        if (!take(piece, PIECE_TAKEN)) {
                atomic_store(&piece->is_left, true);
                free(sums);
                return NEBULA_OK; /* the hedge's bytes are the result */
        }
        atomic_store(&piece->is_done, true);
        if (!status)
                status = check_piece(reading, index, sums, stop, error);
        atomic_fetch_add(&reading->done, 1);
        free(sums);
        return status;
}

static int by_time(const void *a, const void *b)
{
        int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

        return (x > y) - (x < y);
}

/* The time after which a piece is requested again; INT64_MAX: not known yet. */
static int64_t hedge_after_ns(const struct reading *reading)
{
        int64_t limit_ns = http_settings_now().hedge_ms * MS_NS, *times = calloc(reading->count, sizeof *times), found;
        size_t count = 0;

        for (size_t i = 0; times && i < reading->count; i++)
                if (atomic_load(&reading->pieces[i].is_done) && (times[count] = atomic_load(&reading->pieces[i].watch.took_ns)))
                        count++;
        if (count < SAMPLES_MIN) {
                free(times);
                return INT64_MAX;
        }
        qsort(times, count, sizeof *times, by_time);
        found = 2 * times[(count - 1) * 95 / 100];
        free(times);
        return found > limit_ns ? found : limit_ns;
}

/* The piece that has been running for longest. NULL: none for so long. */
static struct piece *slowest(const struct reading *reading, int64_t after_ns)
{
        int64_t now_ns = os->now_ns(), since_ns, most_ns = after_ns;
        struct piece *found = NULL;

        for (size_t i = 0; i < reading->count; i++) {
                struct piece *piece = &reading->pieces[i];

                since_ns = atomic_load(&piece->watch.since_ns);
                if (!since_ns || piece->was_hedged || now_ns - since_ns <= most_ns)
                        continue;
                most_ns = now_ns - since_ns;
                found = piece;
        }
        return found;
}

/* Reads the piece into `room`. A failure does not fail the read: the piece's own request is still running. */
static enum nebula_status hedge(struct reading *reading, struct piece *piece, char *room, const atomic_bool *stop, struct nebula_error *error)
{
        size_t index = (size_t)(piece - reading->pieces) + reading->first;
        uint64_t *sums = make_sums(reading, reading->places[index].size, NULL);
        struct object_reading range = range_of(reading, index, 0, sums, stop);
        struct store_stamp stamp = reading->stamp;
        char *to = range.data;
        enum nebula_status status = NEBULA_OK;

        piece->was_hedged = true;
        range.data = room;
        range.stop_too = &piece->is_done;
        if (sums && !object_read_range(reading->store, &range, &stamp, NULL) && take(piece, PIECE_HEDGED)) {
                atomic_store(&piece->stop, true);
                while (!atomic_load(&piece->is_left))
                        os->sleep_ms(1);
                memcpy(to, room, (size_t)range.size);
                status = check_piece(reading, index, sums, stop, error);
                atomic_fetch_add(&reading->done, 1);
                log_event(LOG_LEVEL_DEBUG, "%s/%s: a range was slow, and a second request for it came first", reading->store->store.root, reading->key);
        }
        free(sums);
        return status;
}

/* Hedges slow pieces until all are read, or the read has failed. */
static enum nebula_status look_after(struct reading *reading, const atomic_bool *stop, struct nebula_error *error)
{
        int64_t after_ns = INT64_MAX;
        enum nebula_status status = NEBULA_OK;
        char *room = NULL;

        for (unsigned look = 0; !status && !atomic_load(stop) && atomic_load(&reading->done) < reading->count; look++) {
                struct piece *piece;

                if (look % LIMIT_LOOKS == 0)
                        after_ns = hedge_after_ns(reading);
                piece = slowest(reading, after_ns);
                if (piece && !room)
                        room = malloc((size_t)reading->piece_bytes);
                if (piece && room)
                        status = hedge(reading, piece, room, stop, error);
                else
                        os->sleep_ms(LOOK_MS);
        }
        free(room);
        return status;
}

static enum nebula_status run_turn(void *argument, size_t turn, const atomic_bool *stop, struct nebula_error *error)
{
        struct reading *reading = argument;

        return turn < reading->count ? read_piece(reading, turn, stop, error) : look_after(reading, stop, error);
}

static enum nebula_status read_others(struct reading *reading, struct nebula_error *error)
{
        bool may_hedge = http_settings_now().megabytes_per_s <= 0; /* with a rate limit, a second request saves no time */
        enum nebula_status status;

        reading->first = 1;
        reading->count = reading->place_count - 1;
        reading->pieces = calloc(reading->count + 1, sizeof *reading->pieces);
        if (!reading->pieces)
                return object_no_memory(reading->store, error);
        /* The last turn comes when all pieces are taken. */
        status = lanes_run(reading->count + (may_hedge && reading->count > SAMPLES_MIN), http_width(), run_turn, reading, error);
        free(reading->pieces);
        return status;
}

/* Cuts the ranges into pieces. NULL: no memory. */
static struct store_range *make_places(const struct store_range *ranges, size_t count, uint64_t piece_bytes, size_t *ret_count)
{
        struct store_range *places;
        size_t most = 0, used = 0;

        for (size_t i = 0; i < count; i++)
                most += (size_t)((ranges[i].size + piece_bytes - 1) / piece_bytes);
        places = calloc(most + 1, sizeof *places); /* + 1: calloc of 0 items may return NULL */
        for (size_t i = 0; places && i < count; i++)
                for (uint64_t done = 0; done < ranges[i].size; done += places[used++].size) {
                        uint64_t left = ranges[i].size - done;

                        places[used] = (struct store_range){ ranges[i].offset + done, left < piece_bytes ? left : piece_bytes };
                }
        *ret_count = used;
        return places;
}

enum nebula_status object_read_chunks(struct store *base, const char *key, void *data, const struct store_range *ranges, size_t count,
                                      uint32_t chunk_bytes, store_check *check, void *argument, struct nebula_error *error)
{
        struct object_store *store = (struct object_store *)base;
        struct reading reading = { .store = store, .key = key, .data = data, .chunk_bytes = chunk_bytes, .check = check, .argument = argument };
        uint64_t most = store->service->limits->read_bytes;
        enum nebula_status status = object_check_key(store, key, error);
        struct store_range *places;

        if (!status && !chunk_bytes)
                status = error_set(error, NEBULA_INVALID, 0, "%s/%s: chunks of no bytes", base->root, key);
        if (status)
                return status;
        reading.piece_bytes = chunk_bytes >= most ? chunk_bytes : most / chunk_bytes * chunk_bytes;
        reading.places = places = make_places(ranges, count, reading.piece_bytes, &reading.place_count);
        if (!places)
                return object_no_memory(store, error);
        if (reading.place_count)
                status = read_first(&reading, error);
        if (!status && reading.place_count > 1)
                status = read_others(&reading, error);
        free(places);
        return status;
}

enum nebula_status object_read_bulk(struct store *base, const char *key, void *data, uint64_t size, uint32_t chunk_bytes, store_check *check,
                                   void *argument, struct nebula_error *error)
{
        const struct store_range all = { 0, size };
        enum nebula_status status = object_read_chunks(base, key, data, &all, 1, chunk_bytes, check, argument, error);

        return status || size ? status : object_read(base, key, data, 0, 0, error);
}
