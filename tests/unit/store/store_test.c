/* The operations of the file driver that go away, and what is its own. */
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

/* -- the file driver's own -- */

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

static int link_without_an_answer(const char *root, const char *key, const char *to_root, const char *to)
{
        int result = os_linux.link_below(root, key, to_root, to);

        return result ? result : -EEXIST;
}

/* NFS asks again when an answer was lost, and is told that it is there. */
static void an_object_whose_creation_had_no_answer_is_created(void)
{
        const struct os_table *real = os;
        struct os_table table = *os;

        open_file();
        table.link_below = link_without_an_answer;
        os = &table;
        CHECK(create("t/x", "first") == NEBULA_OK && !strcmp(get("t/x"), "first"));
        os = real;
        end_file();
}

static void run_shell(const char *command)
{
        char text[1000];

        snprintf(text, sizeof text, "cd %s && %s", dir, command);
        if (system(text))
                printf("# failed: %s\n", text);
}

static void a_url_chooses_the_driver(void)
{
        char url[300];

        test_dir_make(dir);
        snprintf(url, sizeof url, "file://%s/root///", dir);
        REQUIRE(store_open(url, &store, &error) == NEBULA_OK);
        CHECK(store->ops == &store_file && !strcmp(store->root + strlen(store->root) - 5, "/root"));
        end_file();
        CHECK(store_open("relative/path", &store, &error) == NEBULA_INVALID);
        CHECK(store_open("file://host/path", &store, &error) == NEBULA_INVALID);
        CHECK(store_open("gopher://x/y", &store, &error) == NEBULA_INVALID && strstr(error.message, "gopher"));
        store_close(NULL);
}

static void opening_makes_nothing(void)
{
        struct os_stat found;

        open_file();
        CHECK(os->stat(store->root, true, &found) == -ENOENT);
        end_file();
}

static void a_link_is_replaced_or_removed_itself(void)
{
        open_file();
        CHECK(put("t/x", "x") == NEBULA_OK);
        run_shell("echo -n precious > target && ln -s ../../target root/t/link && ln -s ../target root/top");
        CHECK(put("t/link", "object") == NEBULA_OK);
        CHECK(!strcmp(get("t/link"), "object"));
        CHECK(store->ops->old_remove(store, "top", &error) == NEBULA_OK);
        run_shell("test \"$(cat target)\" = precious && touch root/was_kept");
        CHECK(!strcmp(get("was_kept"), ""));
        end_file();
}

/* What was planted in a path that others may write to. The root itself is found through a link. */
static void nothing_below_the_root_leads_out_of_it(void)
{
        static const char *const keys[] = { "evil/l/x", "evil/.nebula/x", "gone/x" };
        struct old_entry entry;
        struct old_list found;
        char path[600], *text;
        bool direct;
        size_t size;
        int fd;

        open_file();
        store_close(store);
        run_shell("mkdir -p real/evil outside/deep && ln -s real root && echo -n precious > outside/x && ln -s ../../outside real/evil/l && "
                  "ln -s ../../outside real/evil/.nebula && ln -s ../outside real/gone");
        snprintf(path, sizeof path, "%s/root", dir);
        REQUIRE(store_open(path, &store, &error) == NEBULA_OK);
        CHECK(put("t/x", "x") == NEBULA_OK);
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
                char other[600], directory[600];

                snprintf(other, sizeof other, "%s%s", keys[i], "y");
                snprintf(directory, sizeof directory, "%.*s/deep", (int)(strrchr(keys[i], '/') - keys[i]), keys[i]);
                CHECK(put(other, "mine") == NEBULA_STORAGE && strstr(error.message, "symbolic link") && error.sys_errno == ELOOP);
                CHECK(put(keys[i], "mine") == NEBULA_STORAGE);
                CHECK(old_read_text(store, keys[i], 100, &text, &size, &error) == NEBULA_CORRUPT && strstr(error.message, "symbolic link"));
                CHECK(store->ops->read(store, keys[i], other, 0, 1, &error) == NEBULA_CORRUPT);
                CHECK(store->ops->open_read(store, keys[i], &fd, &direct, &error) == NEBULA_CORRUPT);
                CHECK(store->ops->old_stat(store, keys[i], &entry, &error) == NEBULA_CORRUPT);
                CHECK(store->ops->old_move(store, keys[i], "t/taken", &error) && store->ops->old_move(store, "t/x", other, &error));
                CHECK(store->ops->old_remove(store, keys[i], &error) == NEBULA_STORAGE && strstr(error.message, "symbolic link"));
                CHECK(store->ops->old_remove_directory(store, directory, &error) == NEBULA_STORAGE);
                CHECK(store->ops->old_list(store, directory, &found, &error) == NEBULA_CORRUPT);
        }
        CHECK(put("evil/x", "x") == NEBULA_STORAGE && strstr(error.message, "symbolic link")); /* its temporary file would lie outside */
        run_shell("test \"$(cat outside/x)\" = precious && test -d outside/deep && test $(ls -A outside | wc -l) = 2 && touch root/was_kept");
        CHECK(!strcmp(get("was_kept"), "") && !strcmp(get("t/x"), "x"));
        end_file();
}

static void no_temporary_file_stays(void)
{
        struct old_list found;

        open_file();
        CHECK(put("t/x", "x") == NEBULA_OK && put("latest", "t") == NEBULA_OK);
        CHECK(put("t/dir/x", "x") == NEBULA_OK && put("t/dir", "is a directory") == NEBULA_STORAGE);
        REQUIRE(store->ops->old_list(store, "t/.nebula", &found, &error) == NEBULA_OK);
        CHECK(found.count == 0);
        old_list_done(&found);
        REQUIRE(store->ops->old_list(store, "", &found, &error) == NEBULA_OK);
        CHECK(found.count == 2);
        old_list_done(&found);
        end_file();
}

static void a_root_that_was_removed_is_made_again(void)
{
        open_file();
        CHECK(put("t/x", "one") == NEBULA_OK);
        run_shell("rm -rf root");
        CHECK(!strcmp(get("t/x"), "-"));
        CHECK(put("t/x", "two") == NEBULA_OK);
        CHECK(!strcmp(get("t/x"), "two"));
        run_shell("rm -rf root && echo > root");
        CHECK(put("t/x", "three") == NEBULA_STORAGE);
        CHECK(strstr(error.message, "/root/t/x"));
        run_shell("rm root");
        CHECK(put("t/x", "four") == NEBULA_OK);
        end_file();
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

static unsigned sync_count;

static int count_sync(int fd)
{
        sync_count++;
        return os_linux.fsync(fd);
}

/* The file, its directory, and the entries of the two directories that were made for it. */
static void a_removal_elsewhere_costs_a_write_no_sync(void)
{
        const struct os_table *real = os;
        struct os_table table = *os;

        open_file();
        CHECK(put("a/x", "1") == NEBULA_OK && put("a/.nebula/y", "1") == NEBULA_OK);
        table.fsync = count_sync;
        os = &table;
        sync_count = 0;
        CHECK(put("b/x", "1") == NEBULA_OK);
        CHECK(sync_count == 4);
        CHECK(store->ops->old_remove(store, "a/x", &error) == NEBULA_OK && store->ops->old_remove(store, "a/.nebula/y", &error) == NEBULA_OK);
        CHECK(store->ops->old_remove_directory(store, "a/.nebula", &error) == NEBULA_OK);
        CHECK(store->ops->old_remove_directory(store, "a", &error) == NEBULA_OK);
        sync_count = 0;
        CHECK(put("c/x", "1") == NEBULA_OK);
        CHECK(sync_count == 4);
        /* What was removed is synced anew when it comes again. */
        sync_count = 0;
        CHECK(put("a/x", "1") == NEBULA_OK);
        CHECK(sync_count == 4);
        os = real;
        end_file();
}

static const char *replacement;

/* As another agent does it, at the worst time. */
static int replace_after(int result, const char *root, const char *key)
{
        const char *text = replacement;
        char path[600];

        replacement = NULL;
        snprintf(path, sizeof path, "%s/%s", root, key);
        if (text && !result && !strcmp(key, "x"))
                CHECK(!os_write_file_atomic(path, text, strlen(text)));
        else if (text)
                replacement = text;
        return result;
}

static int replace_after_stat(const char *root, const char *key, struct os_stat *ret_stat)
{
        return replace_after(os_linux.stat_below(root, key, ret_stat), root, key);
}

static int replace_after_open(const char *root, const char *key, int flags)
{
        int fd = os_linux.open_below(root, key, flags);

        return flags & OS_WRITE || fd < 0 ? fd : fd + replace_after(0, root, key);
}

static void a_text_that_is_replaced_while_it_is_read_is_the_old_or_the_new_one(void)
{
        const struct os_table *real = os;
        struct os_table table = *os;
        static const char *const texts[] = { "short", "a much longer one" };

        open_file();
        table.stat_below = replace_after_stat;
        table.open_below = replace_after_open;
        for (int i = 0; i < 2; i++) {
                const char *found;

                CHECK(put("x", "0123456789") == NEBULA_OK);
                replacement = texts[i];
                os = &table;
                found = get("x");
                os = real;
                CHECK(!replacement && (!strcmp(found, "0123456789") || !strcmp(found, texts[i])));
                CHECK(!strcmp(get("x"), texts[i]));
        }
        end_file();
}

static void a_fifo_in_the_place_of_a_text_is_damage_and_holds_nobody_up(void)
{
        char path[600], *text;
        size_t size;

        open_file();
        CHECK(put("a", "x") == NEBULA_OK);
        snprintf(path, sizeof path, "%s/fifo", store->root);
        REQUIRE(!mkfifo(path, 0600));
        CHECK(old_read_text(store, "fifo", 100, &text, &size, &error) == NEBULA_CORRUPT);
        end_file();
}

static bool is_mounted;

/* The root as a mount point: another device than what lies above it. */
static int stat_mounted(const char *path, bool follow, struct os_stat *ret_stat)
{
        int result = os_linux.stat(path, follow, ret_stat);
        size_t length = strlen(store->root);

        if (!strncmp(path, store->root, length) && strncmp(path + length, "/..", 3) && is_mounted)
                ret_stat->device++;
        return result;
}

static void a_root_whose_mount_has_gone_takes_nothing_until_it_is_back(void)
{
        const struct os_table *real = os;
        struct os_table table = *os;
        char path[600];

        open_file();
        table.stat = stat_mounted;
        os = &table;
        is_mounted = true;
        CHECK(put("a/x", "1") == NEBULA_OK);
        is_mounted = false;
        for (int i = 0; i < 3; i++)
                CHECK(put("b/x", "2") == NEBULA_STORAGE && strstr(error.message, "is gone"));
        snprintf(path, sizeof path, "%s/b", store->root);
        CHECK(access(path, F_OK));
        is_mounted = true;
        CHECK(put("b/x", "3") == NEBULA_OK && !strcmp(get("b/x"), "3"));
        os = real;
        end_file();
        /* What was never one need not become one. */
        open_file();
        CHECK(put("a/x", "1") == NEBULA_OK && put("b/x", "2") == NEBULA_OK);
        end_file();
}

/* As for a user who may list the root, but not enter it. */
static int stat_refused(struct os_dir *listing, const char *name, struct os_stat *ret_stat)
{
        return -EACCES;
}

static void a_root_that_may_not_be_entered_is_no_empty_one(void)
{
        const struct os_table *real = os;
        struct os_table table = *os;
        struct old_list found;

        open_file();
        run_shell("mkdir root && ln -s ../target root/link");
        REQUIRE(store->ops->old_list(store, "", &found, &error) == NEBULA_OK); /* a link that leads nowhere */
        CHECK(found.count == 1 && found.entries[0].is_link && !found.entries[0].is_directory);
        old_list_done(&found);
        table.stat_entry = stat_refused;
        os = &table;
        run_shell("mkdir root/t");
        CHECK(store->ops->old_list(store, "", &found, &error) == NEBULA_STORAGE && strstr(error.message, "root"));
        CHECK(error.sys_errno == EACCES);
        os = real;
        end_file();
}

static int open_none(const char *root, const char *key, int flags)
{
        return flags & OS_CREATE ? -ENOSPC : os_linux.open_below(root, key, flags);
}

static void a_full_disk_with_bytes_to_spare_says_what_else_may_have_run_out(void)
{
        const struct os_table *real = os;
        struct os_table table = *os;

        open_file();
        CHECK(put("t/x", "x") == NEBULA_OK);
        table.open_below = open_none;
        os = &table;
        CHECK(put("t/y", "y") == NEBULA_NO_SPACE && strstr(error.message, "needs 1 bytes") && strstr(error.message, "inodes or a quota"));
        os = real;
        end_file();
}

TAP_MAIN(TEST(a_full_disk_with_bytes_to_spare_says_what_else_may_have_run_out),
         TEST(a_root_that_may_not_be_entered_is_no_empty_one), TEST(a_root_whose_mount_has_gone_takes_nothing_until_it_is_back),
         TEST(a_fifo_in_the_place_of_a_text_is_damage_and_holds_nobody_up),
         TEST(what_is_written_is_read), TEST(a_text_that_is_replaced_while_it_is_read_is_the_old_or_the_new_one), TEST(a_second_write_replaces_the_first), TEST(an_object_is_created_only_where_none_is), TEST(an_object_whose_creation_had_no_answer_is_created),
         TEST(what_is_absent_is_not_found_and_its_removal_fine), TEST(an_object_that_is_too_short_is_corrupt),
         TEST(a_large_object_is_checked_chunk_by_chunk), TEST(a_move_replaces_and_makes_directories),
         TEST(a_listing_has_every_object_and_directory), TEST(only_what_is_empty_is_removed),
         TEST(no_key_leads_out_of_the_store), TEST(a_text_has_a_limit), TEST(threads_write_at_the_same_time),
         TEST(a_url_chooses_the_driver), TEST(opening_makes_nothing), TEST(a_link_is_replaced_or_removed_itself), TEST(nothing_below_the_root_leads_out_of_it),
         TEST(no_temporary_file_stays), TEST(a_root_that_was_removed_is_made_again),
         TEST(a_move_between_two_names_of_one_file_leaves_the_new_one), TEST(a_removal_elsewhere_costs_a_write_no_sync))
