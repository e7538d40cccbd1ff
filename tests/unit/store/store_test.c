/* The operations that go away, on files. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "os/os.h"
#include "store/store.h"
#include "tap.h"
#include "test_dir.h"

#define BIG_BYTES ((6u << 20) + 777)

static char dir[256];
static struct store *store;
static struct nebula_error error;

/* Runs a promise on an empty store whose root is not there yet. */
static void each(void (*promise)(void))
{
        char root[300];

        test_dir_make(dir);
        snprintf(root, sizeof root, "%s/some/root", dir);
        REQUIRE(store_open(root, &store, &error) == NEBULA_OK);
        promise();
        store_close(store);
        test_dir_remove(dir);
}

static enum nebula_status put(const char *key, const char *text)
{
        return store->ops->old_write(store, key, text, strlen(text), &error);
}

/* The text of an object; "-" when there is none, "!" for any other failure. */
static const char *get(const char *key)
{
        static char text[4096];
        enum nebula_status status;
        char *data;
        size_t size;

        status = old_read_text(store, key, sizeof text - 1, &data, &size, &error);
        if (status)
                return status == NEBULA_NOT_FOUND ? "-" : "!";
        memcpy(text, data, size + 1);
        free(data);
        return text;
}

static void *make_big(unsigned seed)
{
        unsigned char *data = aligned_alloc(4096, 8u << 20);

        for (size_t i = 0; i < 8u << 20; i++)
                data[i] = (unsigned char)(i * 31 + (i >> 12) + seed);
        return data;
}

static void write_and_read(void)
{
        char bytes[4] = "";

        CHECK(put("latest", "tag\n") == NEBULA_OK);
        CHECK(put("tag/model.pt", "0123456789") == NEBULA_OK);
        CHECK(put("tag/.nebula/deep/er/x", "") == NEBULA_OK);
        CHECK(!strcmp(get("latest"), "tag\n"));
        CHECK(!strcmp(get("tag/model.pt"), "0123456789"));
        CHECK(!strcmp(get("tag/.nebula/deep/er/x"), ""));
        CHECK(store->ops->read(store, "tag/model.pt", bytes, 4, 3, &error) == NEBULA_OK);
        CHECK(!memcmp(bytes, "456", 3));
}

static void what_is_written_is_read(void)
{
        each(write_and_read);
}

static void replace(void)
{
        CHECK(put("t/x", "a long first text") == NEBULA_OK);
        CHECK(put("t/x", "short") == NEBULA_OK);
        CHECK(!strcmp(get("t/x"), "short"));
}

static void a_second_write_replaces_the_first(void)
{
        each(replace);
}

static enum nebula_status create(const char *key, const char *text)
{
        return store->ops->old_create(store, key, text, strlen(text), &error);
}

static void only_one_creates(void)
{
        CHECK(create("t/x", "first") == NEBULA_OK && !strcmp(get("t/x"), "first"));
        CHECK(create("t/x", "second") == NEBULA_BUSY && strstr(error.message, "t/x") && !strcmp(get("t/x"), "first"));
        CHECK(put("t/x", "third") == NEBULA_OK && create("t/x", "fourth") == NEBULA_BUSY && !strcmp(get("t/x"), "third"));
        CHECK(store->ops->old_remove(store, "t/x", &error) == NEBULA_OK && create("t/x", "fifth") == NEBULA_OK && !strcmp(get("t/x"), "fifth"));
}

static int link_refused(const char *root, const char *key, const char *to_root, const char *to)
{
        return -EPERM;
}

static void an_object_is_created_only_where_none_is(void)
{
        const struct os_table *real = os;
        struct os_table table = *os;

        each(only_one_creates);
        table.link_below = link_refused; /* a file system without links */
        os = &table;
        each(only_one_creates);
        os = real;
}

static void absent(void)
{
        struct old_entry entry;
        struct old_list list;
        char byte;

        CHECK(store->ops->read(store, "t/x", &byte, 0, 1, &error) == NEBULA_NOT_FOUND);
        CHECK(error.status == NEBULA_NOT_FOUND && strstr(error.message, "t/x"));
        CHECK(store->ops->read_bulk(store, "t/x", &byte, 1, 4096, NULL, NULL, &error) == NEBULA_NOT_FOUND);
        CHECK(store->ops->old_stat(store, "t/x", &entry, &error) == NEBULA_NOT_FOUND);
        CHECK(store->ops->old_list(store, "t", &list, &error) == NEBULA_NOT_FOUND);
        CHECK(store->ops->old_move(store, "t/x", "t/y", &error) == NEBULA_NOT_FOUND);
        CHECK(store->ops->old_remove(store, "t/x", &error) == NEBULA_OK);
        CHECK(store->ops->old_remove_directory(store, "t", &error) == NEBULA_OK);
        CHECK(put("t", "a file") == NEBULA_OK);
        CHECK(store->ops->old_stat(store, "t/x", &entry, &error) == NEBULA_NOT_FOUND);
        CHECK(store->ops->old_list(store, "t", &list, &error) == NEBULA_NOT_FOUND);
        CHECK(store->ops->read(store, "t/x", &byte, 0, 1, &error) == NEBULA_NOT_FOUND);
        CHECK(store->ops->old_remove(store, "t/x", &error) == NEBULA_OK);
        CHECK(put("t/x", "below a file") != NEBULA_OK);
        CHECK(!strcmp(get("t"), "a file"));
}

static void what_is_absent_is_not_found_and_its_removal_fine(void)
{
        each(absent);
}

static void cut_off(void)
{
        char bytes[20];

        CHECK(put("t/x", "0123456789") == NEBULA_OK);
        CHECK(store->ops->read(store, "t/x", bytes, 5, 6, &error) == NEBULA_CORRUPT);
        CHECK(strstr(error.message, "t/x") && strstr(error.message, "10 bytes"));
        CHECK(store->ops->read_bulk(store, "t/x", bytes, 11, 4096, NULL, NULL, &error) == NEBULA_CORRUPT);
        CHECK(store->ops->read(store, "t/x", bytes, 5, 5, &error) == NEBULA_OK);
}

static void an_object_that_is_too_short_is_corrupt(void)
{
        each(cut_off);
}

struct seen {
        atomic_uint_fast64_t bytes, calls;
        const unsigned char *expected;
        uint32_t chunk_bytes;
};

static enum nebula_status check_chunk(void *argument, const void *data, uint64_t offset, uint64_t size,
                                      struct nebula_error *ret_error)
{
        struct seen *seen = argument;

        atomic_fetch_add(&seen->bytes, size);
        atomic_fetch_add(&seen->calls, 1);
        if (offset % seen->chunk_bytes || memcmp(data, seen->expected + offset, size))
                return error_set(ret_error, NEBULA_CORRUPT, 0, "chunk at %llu differs", (unsigned long long)offset);
        return NEBULA_OK;
}

static void bulk(void)
{
        unsigned char *data = make_big(1), *back = make_big(2);
        struct seen seen = { .expected = data, .chunk_bytes = 1u << 20 };

        CHECK(store->ops->old_write(store, "t/big", data, BIG_BYTES, &error) == NEBULA_OK);
        CHECK(store->ops->read_bulk(store, "t/big", back, BIG_BYTES, 1u << 20, check_chunk, &seen, &error) == NEBULA_OK);
        CHECK(seen.bytes == BIG_BYTES && seen.calls == 7);
        CHECK(!memcmp(data, back, BIG_BYTES));
        /* From memory and into chunks that O_DIRECT can't take. */
        CHECK(store->ops->old_write(store, "t/odd", data + 1, BIG_BYTES, &error) == NEBULA_OK);
        seen = (struct seen){ .expected = data + 1, .chunk_bytes = 1000003 };
        CHECK(store->ops->read_bulk(store, "t/odd", back + 3, BIG_BYTES, 1000003, check_chunk, &seen, &error) == NEBULA_OK);
        CHECK(seen.bytes == BIG_BYTES);
        data[3u << 20] ^= 1;
        seen = (struct seen){ .expected = data, .chunk_bytes = 1u << 20 };
        CHECK(store->ops->read_bulk(store, "t/big", back, BIG_BYTES, 1u << 20, check_chunk, &seen, &error) == NEBULA_CORRUPT);
        CHECK(strstr(error.message, "3145728"));
        free(data);
        free(back);
}

static void a_large_object_is_checked_chunk_by_chunk(void)
{
        each(bulk);
}

static void move(void)
{
        CHECK(put("t/.nebula/g2/x", "new") == NEBULA_OK);
        CHECK(put("t/x", "old") == NEBULA_OK);
        CHECK(store->ops->old_move(store, "t/.nebula/g2/x", "t/x", &error) == NEBULA_OK);
        CHECK(!strcmp(get("t/x"), "new"));
        CHECK(!strcmp(get("t/.nebula/g2/x"), "-"));
        CHECK(store->ops->old_move(store, "t/x", "elsewhere/not/yet", &error) == NEBULA_OK);
        CHECK(!strcmp(get("elsewhere/not/yet"), "new"));
        CHECK(store->ops->old_move(store, "elsewhere/not/yet", "elsewhere/not/yet", &error) == NEBULA_OK);
        CHECK(!strcmp(get("elsewhere/not/yet"), "new"));
}

static void a_move_replaces_and_makes_directories(void)
{
        each(move);
}

static const struct old_entry *entry_of(const struct old_list *list, const char *name)
{
        for (size_t i = 0; i < list->count; i++)
                if (!strcmp(list->entries[i].name, name))
                        return &list->entries[i];
        return NULL;
}

static void list(void)
{
        struct old_list found;
        const struct old_entry *entry;
        struct old_entry one;

        for (int i = 0; i < 40; i++) {
                char key[32];

                snprintf(key, sizeof key, "t/many/%d", i);
                CHECK(put(key, "x") == NEBULA_OK);
        }
        CHECK(put("t/file", "12345") == NEBULA_OK && put("latest", "t") == NEBULA_OK);
        REQUIRE(store->ops->old_list(store, "t/many", &found, &error) == NEBULA_OK);
        CHECK(found.count == 40 && entry_of(&found, "0") && entry_of(&found, "39"));
        old_list_done(&found);
        REQUIRE(store->ops->old_list(store, "t", &found, &error) == NEBULA_OK);
        entry = entry_of(&found, "file");
        CHECK(entry && !entry->is_directory && entry->size == 5 && entry->mtime_ns > 1700000000ll * 1000000000);
        entry = entry_of(&found, "many");
        CHECK(entry && entry->is_directory);
        old_list_done(&found);
        CHECK(found.count == 0);
        REQUIRE(store->ops->old_list(store, "", &found, &error) == NEBULA_OK);
        CHECK(found.count == 2 && entry_of(&found, "t") && entry_of(&found, "latest"));
        old_list_done(&found);
        REQUIRE(store->ops->old_stat(store, "t/file", &one, &error) == NEBULA_OK);
        CHECK(!strcmp(one.name, "file") && one.size == 5 && !one.is_directory);
        old_entry_done(&one);
}

static void a_listing_has_every_object_and_directory(void)
{
        each(list);
}

static void take_away(void)
{
        struct old_entry entry;

        CHECK(put("t/a/x", "1") == NEBULA_OK);
        CHECK(store->ops->old_remove_directory(store, "t/a", &error) == NEBULA_STORAGE);
        CHECK(strstr(error.message, "t/a"));
        CHECK(store->ops->old_remove(store, "t/a", &error) == NEBULA_STORAGE);
        CHECK(!strcmp(get("t/a/x"), "1"));
        CHECK(store->ops->old_remove(store, "t/a/x", &error) == NEBULA_OK);
        CHECK(!strcmp(get("t/a/x"), "-"));
        CHECK(store->ops->old_remove_directory(store, "t/a", &error) == NEBULA_OK);
        CHECK(store->ops->old_stat(store, "t/a", &entry, &error) == NEBULA_NOT_FOUND);
        CHECK(put("t/a/x", "2") == NEBULA_OK);
        CHECK(!strcmp(get("t/a/x"), "2"));
}

static void only_what_is_empty_is_removed(void)
{
        each(take_away);
}

static void strange_keys(void)
{
        static const char *const bad[] = { "", "/", "/x", "x/", "a//b", ".", "..", "a/..", "../x", "a/./b" };
        char byte = 0, name[300];

        for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
                CHECK(store->ops->old_write(store, bad[i], "x", 1, &error) == NEBULA_INVALID);
                CHECK(store->ops->old_remove(store, bad[i], &error) == NEBULA_INVALID);
                CHECK(store->ops->old_remove_directory(store, bad[i], &error) == NEBULA_INVALID);
                CHECK(store->ops->old_move(store, bad[i], "x", &error) != NEBULA_OK);
                CHECK(store->ops->read(store, bad[i], &byte, 0, 1, &error) != NEBULA_OK);
        }
        memset(name, 'n', sizeof name - 1);
        name[sizeof name - 1] = 0;
        CHECK(put(name, "x") == NEBULA_INVALID);
        CHECK(put("...", "dots") == NEBULA_OK && put("..a/.b", "dots") == NEBULA_OK);
        CHECK(!strcmp(get("..a/.b"), "dots"));
}

static void no_key_leads_out_of_the_store(void)
{
        each(strange_keys);
}

static void limits(void)
{
        char *text;
        size_t size;
        uint64_t bytes;

        CHECK(put("x", "0123456789") == NEBULA_OK);
        CHECK(old_read_text(store, "x", 9, &text, &size, &error) == NEBULA_CORRUPT);
        REQUIRE(old_read_text(store, "x", 10, &text, &size, &error) == NEBULA_OK);
        CHECK(size == 10 && text[10] == 0);
        free(text);
        CHECK(store->ops->free_bytes(store, &bytes, &error) == NEBULA_OK && bytes > 0);
}

static void a_text_has_a_limit(void)
{
        each(limits);
}

static void *write_many(void *argument)
{
        const char *name = argument;
        struct nebula_error failure;

        for (int i = 0; i < 20; i++) {
                char key[64];

                snprintf(key, sizeof key, "t/%s/%d", name, i);
                if (store->ops->old_write(store, key, name, strlen(name), &failure) ||
                    store->ops->old_write(store, "t/common", name, strlen(name), &failure))
                        return argument;
        }
        return NULL;
}

static void together(void)
{
        static char names[4][8] = { "one", "two", "three", "four" };
        pthread_t threads[4];

        for (size_t i = 0; i < 4; i++)
                pthread_create(&threads[i], NULL, write_many, names[i]);
        for (size_t i = 0; i < 4; i++) {
                void *failed;

                pthread_join(threads[i], &failed);
                CHECK(!failed);
        }
        CHECK(!strcmp(get("t/three/19"), "three"));
        CHECK(strlen(get("t/common")) >= 3);
}

static void threads_write_at_the_same_time(void)
{
        each(together);
}

static void open_file(void)
{
        char root[300];

        test_dir_make(dir);
        snprintf(root, sizeof root, "%s/root", dir);
        if (store_open(root, &store, &error))
                abort();
}

static void end_file(void)
{
        store_close(store);
        test_dir_remove(dir);
}

static void run_shell(const char *command)
{
        char text[1000];

        snprintf(text, sizeof text, "cd %s && %s", dir, command);
        if (system(text))
                printf("# failed: %s\n", text);
}

static void a_move_between_two_names_of_one_file_leaves_the_new_one(void)
{
        open_file();
        CHECK(put("t/x", "text") == NEBULA_OK);
        run_shell("ln root/t/x root/t/y");
        CHECK(store->ops->old_move(store, "t/x", "t/y", &error) == NEBULA_OK);
        CHECK(!strcmp(get("t/x"), "-") && !strcmp(get("t/y"), "text"));
        end_file();
}

TAP_MAIN(TEST(what_is_written_is_read), TEST(a_second_write_replaces_the_first), TEST(an_object_is_created_only_where_none_is),
         TEST(what_is_absent_is_not_found_and_its_removal_fine), TEST(an_object_that_is_too_short_is_corrupt),
         TEST(a_large_object_is_checked_chunk_by_chunk), TEST(a_move_replaces_and_makes_directories),
         TEST(a_listing_has_every_object_and_directory), TEST(only_what_is_empty_is_removed),
         TEST(no_key_leads_out_of_the_store), TEST(a_text_has_a_limit), TEST(threads_write_at_the_same_time),
         TEST(a_move_between_two_names_of_one_file_leaves_the_new_one))
