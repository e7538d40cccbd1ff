/*
 * The power fails at every moment of a run, with many outcomes each. Objects
 * that a store reported as durable are there; every other object is complete or
 * absent.
 */
/* fault: as crash/agent_crash_test.c */
#include <errno.h>

#include "os/os.h"
#include "os/os_crash.h"
#include "store/store.h"
#include "tap.h"
#include "test_dir.h"

#define SEEDS os_crash_seeds(8) /* more with NEBULA_TEST_NIGHTLY=1 */
#define BIG_BYTES ((1u << 20) + 333)
#define PROMISES_MAX 64

static char base[256], root[300], after[300];
static struct store *store;
static struct nebula_error error;

/* From `from` on the object `key` has been promised to be of kind `kind`; '-': absent. */
struct promise {
        uint64_t begun, from;
        const char *key;
        char kind;
};
static struct promise promises[PROMISES_MAX];
static size_t promise_count;
static uint64_t last;

static void begin(void)
{
        test_dir_make_quick(base);
        snprintf(root, sizeof root, "%s/root", base);
        snprintf(after, sizeof after, "%s/after", base);
        promise_count = 0;
        if (os->mkdir(root, 0700) || os_crash_begin(root))
                abort();
        if (store_open(root, &store, &error))
                abort();
}

static void promise(uint64_t begun, const char *key, char kind)
{
        promises[promise_count++] = (struct promise){ begun, os_crash_position(), key, kind };
}

static void put_as(const char *key, char kind, uint64_t size, enum store_condition condition)
{
        uint64_t begun = os_crash_position();
        char *data = aligned_alloc(4096, (size + 4095) / 4096 * 4096);

        memset(data, kind, size);
        CHECK(store->ops->put(store, key, data, size, condition, NULL, NULL, &error) == NEBULA_OK);
        promise(begun, key, kind);
        free(data);
}

static void put(const char *key, char kind, uint64_t size)
{
        put_as(key, kind, size, STORE_ALWAYS);
}

static void take_away(const char *key)
{
        uint64_t begun = os_crash_position();

        CHECK(store_remove_one(store, key, &error) == NEBULA_OK);
        promise(begun, key, '-');
}

static struct store_stamp stamp_of(const char *key)
{
        struct store_stamp stamp = { "" };
        struct store_entry entry;

        if (store->ops->stat(store, key, &entry, &error))
                return stamp;
        stamp = entry.stamp;
        store_entry_done(&entry);
        return stamp;
}

static void take_away_if(const char *key, struct store_stamp stamp, char kind_after)
{
        uint64_t begun = os_crash_position();

        CHECK(store->ops->remove(store, &(struct store_victim){ key, stamp }, 1, &error) == NEBULA_OK);
        promise(begun, key, kind_after);
}

static void copy(const char *from, const char *to, enum store_condition condition, char kind)
{
        uint64_t begun = os_crash_position();

        CHECK(store->ops->copy(store, from, to, condition, &error) == NEBULA_OK);
        promise(begun, to, kind);
}

/* The object in the surviving state: its kind; '-': absent; '!': torn. */
static char look(const char *key)
{
        char path[600], kind;
        char *data;
        size_t size;

        snprintf(path, sizeof path, "%s/%s", after, key);
        if (os_read_file(path, 8u << 20, &data, &size))
                return '-';
        kind = (size == 100 || size == BIG_BYTES) && data[0] ? data[0] : '!';
        for (size_t i = 0; i < size; i++)
                if (data[i] != kind)
                        kind = '!';
        free(data);
        return kind;
}

/* The last promise before `at` must hold, or the result of a later call that had begun. */
static bool is_allowed(const char *key, char kind, uint64_t at)
{
        bool is_fine = kind == '-';

        for (size_t i = 0; i < promise_count; i++) {
                if (strcmp(promises[i].key, key) || promises[i].begun > at)
                        continue;
                is_fine = kind == promises[i].kind || (promises[i].from > at && is_fine);
        }
        return is_fine;
}

static void check_state(uint64_t at, uint64_t seed)
{
        for (size_t i = 0; i < promise_count; i++) {
                const char *key = promises[i].key;
                char kind = look(key);
                bool is_as_promised = is_allowed(key, kind, at);

                if (!is_as_promised)
                        printf("# power lost at %llu of %llu, seed %llu: %s is '%c'\n", (unsigned long long)at,
                               (unsigned long long)last, (unsigned long long)seed, key, kind);
                CHECK(is_as_promised);
        }
}

static void check_all(void)
{
        last = os_crash_position();
        os_crash_end();
        for (uint64_t at = 0; at <= last; at++)
                for (uint64_t seed = 0; seed < SEEDS; seed++) {
                        REQUIRE(os_crash_materialise(at, seed, after) == 0);
                        check_state(at, seed);
                }
        store_close(store);
        os_crash_free();
        test_dir_remove(base);
}

static void a_first_write_survives_from_its_return_on(void)
{
        begin();
        put("tag/deep/x", 'a', 100);
        put("latest", 'b', 100);
        put("tag/y", 'c', 100);
        check_all();
}

static void a_large_write_survives_from_its_return_on(void)
{
        for (int engine = 0; engine < 2; engine++) {
                begin();
                CHECK(bulk_engine_force((enum bulk_engine)engine) == 0);
                put("tag/x", 'a', BIG_BYTES);
                put("tag/x", 'b', BIG_BYTES);
                check_all();
        }
}

/* More objects than are uploaded at once, of both sizes, in two directories. */
static void many_that_were_uploaded_survive_from_their_publishing_on(void)
{
        static char keys[18][20];
        struct store_object objects[18];
        struct store_upload *upload;
        uint64_t begun;

        begin();
        for (int i = 0; i < 18; i++) {
                uint64_t size = i == 3 ? BIG_BYTES : 100;
                char *data = aligned_alloc(4096, (size + 4095) / 4096 * 4096);

                memset(data, 'a' + i, size);
                snprintf(keys[i], sizeof keys[i], "tag/%sx%d", i % 2 ? ".nebula/" : "", i);
                objects[i] = (struct store_object){ .key = keys[i], .data = data, .size = size };
        }
        REQUIRE(store->ops->upload(store, objects, 18, &upload, &error) == NEBULA_OK);
        begun = os_crash_position(); /* until now none of them has its name */
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK);
        for (int i = 0; i < 18; i++) {
                promise(begun, keys[i], (char)('a' + i));
                free((char *)(uintptr_t)objects[i].data);
        }
        check_all();
}

/* fault: as a_source_that_is_gone_or_another_object_costs_nothing_but_sending */
/* It shares the blocks of a file that is removed later. */
static void a_file_that_shares_blocks_survives_from_its_publishing_on(void)
{
        struct store_source source = { .key = "first/x", .size = BIG_BYTES };
        char *data = aligned_alloc(4096, (BIG_BYTES + 4095) / 4096 * 4096);
        struct store_written written = { .referred = 0 };
        struct bulk_feed feed;
        struct store_object object = { .key = "second/x", .data = data, .size = BIG_BYTES, .feed = &feed, .source = &source, .ret_written = &written };
        struct store_upload *upload;
        uint64_t begun;

        begin();
        put("first/x", 'a', BIG_BYTES);
        snprintf(source.mark.text, sizeof source.mark.text, "%s", stamp_of("first/x").text);
        memset(data, 'a', BIG_BYTES);
        REQUIRE(!bulk_feed_init_pieces(&feed, BIG_BYTES));
        bulk_feed_report_same(&feed, 0);
        bulk_feed_end(&feed);
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK && written.referred == BIG_BYTES);
        begun = os_crash_position();
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK);
        promise(begun, "second/x", 'a');
        take_away("first/x");
        bulk_feed_done(&feed);
        free(data);
        check_all();
}

static void a_creation_survives_from_its_return_on(void)
{
        begin();
        put_as("tag/.nebula/manifest-1.json", 'a', 100, STORE_IF_ABSENT);
        put_as("tag/deep/x", 'b', 100, STORE_IF_ABSENT);
        CHECK(store_put_text(store, "tag/deep/x", "c", STORE_IF_ABSENT, &error) == NEBULA_BUSY);
        put_as("top", 'd', 100, STORE_IF_ABSENT);
        check_all();
}

static void a_second_write_leaves_the_first_or_itself(void)
{
        begin();
        put("tag/x", 'a', 100);
        put("tag/x", 'b', 100);
        put("tag/x", 'c', 100);
        put("latest", 'd', 100);
        put("latest", 'e', 100);
        check_all();
}

static void a_removal_survives_from_its_return_on(void)
{
        begin();
        put("tag/x", 'a', 100);
        take_away("tag/x");
        put("tag/x", 'b', 100);
        take_away("tag/x");
        check_all();
}

static void a_removal_takes_what_it_means_and_leaves_the_rest(void)
{
        struct store_stamp first;

        begin();
        put("tag/x", 'a', 100);
        first = stamp_of("tag/x");
        put("tag/x", 'b', 100);
        take_away_if("tag/x", first, 'b');
        take_away_if("tag/x", stamp_of("tag/x"), '-');
        put_as("tag/x", 'c', 100, STORE_IF_ABSENT);
        put("tag/y", 'd', 100);
        take_away_if("tag/y", stamp_of("tag/y"), '-');
        check_all();
}

static bool is_there(const char *key, const char *prefix)
{
        char path[600], name[256];
        struct os_dir *dir;
        bool found = false;

        snprintf(path, sizeof path, "%s/%s", after, key);
        if (os->opendir(path, &dir))
                return false;
        while (!found && os->readdir(dir, name, sizeof name) > 0)
                found = !strncmp(name, prefix, strlen(prefix));
        os->closedir(dir);
        return found;
}

/* Nothing looks for debris at a tag that is at rest. */
static void a_removal_leaves_no_temporary_name_from_its_return_on(void)
{
        begin();
        put("tag/x", 'a', 100);
        put("tag/y", 'b', 100);
        take_away_if("tag/x", stamp_of("tag/x"), '-');
        last = os_crash_position();
        os_crash_end();
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
                REQUIRE(os_crash_materialise(last, seed, after) == 0);
                CHECK(is_there("tag", "y") && !is_there("tag/.nebula", "tmp-"));
        }
        store_close(store);
        os_crash_free();
        test_dir_remove(base);
}

static int no_clone(int fd, int from)
{
        return -EOPNOTSUPP;
}

/* By shared blocks, and as a second name. */
static void a_copy_survives_from_its_return_on(void)
{
        for (int way = 0; way < 2; way++) {
                struct os_table table;

                begin();
                table = *os;
                if (way)
                        table.clone = no_clone;
                os = &table;
                put("tag/.nebula/w/x", 'a', 100);
                put("tag/x", 'o', 100);
                copy("tag/.nebula/w/x", "tag/x", STORE_ALWAYS, 'a');
                copy("tag/.nebula/w/x", "other/x", STORE_IF_ABSENT, 'a');
                put("tag/x", 'b', 100);
                take_away("tag/.nebula/w/x");
                check_all();
        }
}

/* Another process removes the last object and its directory, makes the directory again for its own object, and dies. */
static void a_directory_that_was_made_anew_is_not_trusted(void)
{
        struct store *other, *first;
        char path[400];

        begin();
        put("tag/deep/x", 'a', 100);
        first = store;
        REQUIRE(store_open(root, &other, &error) == NEBULA_OK);
        store = other;
        take_away("tag/deep/x");
        store = first;
        snprintf(path, sizeof path, "%s/tag", root);
        CHECK(os->mkdir(path, 0700) == 0);
        snprintf(path, sizeof path, "%s/tag/.nebula", root);
        CHECK(os->mkdir(path, 0700) == 0);
        snprintf(path, sizeof path, "%s/tag/deep", root);
        CHECK(os->mkdir(path, 0700) == 0);
        put("tag/deep/y", 'b', 100);
        put("tag/deep/x", 'c', 100);
        store_close(other);
        check_all();
}

/* The process that made the directories died before it synced them; the next process finds them. */
static void directories_that_were_found_are_not_trusted(void)
{
        char path[400];

        begin();
        snprintf(path, sizeof path, "%s/tag", root);
        CHECK(os->mkdir(path, 0700) == 0);
        snprintf(path, sizeof path, "%s/tag/.nebula", root);
        CHECK(os->mkdir(path, 0700) == 0);
        put("tag/x", 'a', 100);
        put("tag/.nebula/y", 'b', 100);
        check_all();
}

TAP_MAIN(TEST(a_first_write_survives_from_its_return_on), TEST(a_large_write_survives_from_its_return_on),
         TEST(many_that_were_uploaded_survive_from_their_publishing_on), TEST(a_file_that_shares_blocks_survives_from_its_publishing_on),
         TEST(a_creation_survives_from_its_return_on),
         TEST(a_second_write_leaves_the_first_or_itself), TEST(a_removal_survives_from_its_return_on),
         TEST(a_removal_takes_what_it_means_and_leaves_the_rest), TEST(a_removal_leaves_no_temporary_name_from_its_return_on),
         TEST(a_copy_survives_from_its_return_on),
         TEST(a_directory_that_was_made_anew_is_not_trusted), TEST(directories_that_were_found_are_not_trusted))
