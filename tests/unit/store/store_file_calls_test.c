/* The file driver if system calls are missing, answers get lost, or another process acts between two of its calls. */
#include <errno.h>
#include <sys/stat.h>

#include "one_file_store.h"
#include "os/bulk.h"

#define FILE_BYTES (1u << 20) /* smaller files are never read without the page cache */

/* Uses `table` in place of the system calls, from open_file to close_file. */
static const struct os_table *real;
static struct os_table table;

static void open_with_table(void)
{
        open_file();
        real = os;
        table = *os;
        os = &table;
}

static void close_with_table(void)
{
        os = real;
        close_file();
}

static int no_link(const char *root, const char *key, const char *to_root, const char *to)
{
        return -EPERM;
}

static int no_rename_new(const char *root, const char *from, const char *to)
{
        return -EINVAL;
}

static int no_clone(int fd, int from)
{
        return -EOPNOTSUPP;
}

static void an_object_is_created_only_where_none_is_without_links(void)
{
        struct store_object object = { "t/z", "1", 1, NULL };
        struct store_upload *upload;

        for (int i = 0; i < 2; i++) {
                open_with_table();
                table.link_below = no_link;
                if (i)
                        table.rename_new_below = no_rename_new;
                CHECK(create("t/x", "1") == NEBULA_OK && create("t/x", "2") == NEBULA_BUSY && !strcmp(get("t/x"), "1"));
                CHECK(set("t/x", "3") == NEBULA_OK && !strcmp(get("t/x"), "3"));
                REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
                CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && !strcmp(get("t/z"), "1") && !strcmp(keys("", true), "t/x t/z "));
                close_with_table();
        }
}

static int link_without_an_answer(const char *root, const char *key, const char *to_root, const char *to)
{
        int result = os_linux.link_below(root, key, to_root, to);

        return result ? result : -EEXIST;
}

/* If an answer gets lost, NFS asks again, and is told that the name exists. */
static void an_object_whose_creation_had_no_answer_is_created(void)
{
        open_with_table();
        table.link_below = link_without_an_answer;
        CHECK(create("t/x", "first") == NEBULA_OK && !strcmp(get("t/x"), "first"));
        CHECK(create("t/x", "second") == NEBULA_BUSY && !strcmp(get("t/x"), "first"));
        close_with_table();
}

static int rename_without_an_answer(const char *root, const char *from, const char *to)
{
        int result = os_linux.rename_below(root, from, to);

        return result ? result : -ENOENT;
}

static void an_object_whose_replacement_had_no_answer_is_replaced(void)
{
        open_with_table();
        CHECK(set("t/x", "first") == NEBULA_OK);
        table.rename_below = rename_without_an_answer;
        CHECK(set("t/x", "second") == NEBULA_OK && !strcmp(get("t/x"), "second"));
        close_with_table();
}

static unsigned sync_count;

static int count_sync(int fd)
{
        sync_count++;
        return os_linux.fsync(fd);
}

/* Syncs the file, its directory, and the entries of the two new directories. */
static void a_removal_elsewhere_costs_a_write_no_sync(void)
{
        open_with_table();
        CHECK(set("a/x", "1") == NEBULA_OK && set("a/.nebula/y", "1") == NEBULA_OK);
        table.fsync = count_sync;
        sync_count = 0;
        CHECK(set("b/x", "1") == NEBULA_OK);
        CHECK(sync_count == 4);
        CHECK(store_remove_one(store, "a/x", &error) == NEBULA_OK && store_remove_one(store, "a/.nebula/y", &error) == NEBULA_OK);
        sync_count = 0;
        CHECK(set("c/x", "1") == NEBULA_OK);
        CHECK(sync_count == 4);
        /* a removed directory is synced again when it is made again */
        sync_count = 0;
        CHECK(set("a/x", "1") == NEBULA_OK);
        CHECK(sync_count == 4);
        close_with_table();
}

/* The other process may die before it has synced the directory. */
static void a_directory_that_another_process_made_anew_is_synced_anew(void)
{
        open_with_table();
        CHECK(set("a/d/x", "1") == NEBULA_OK && set("a/d/y", "1") == NEBULA_OK);
        table.fsync = count_sync;
        sync_count = 0;
        CHECK(set("a/d/z", "1") == NEBULA_OK && sync_count == 2); /* the file and its directory */
        run_shell("rm -r root/a && sleep 0.02 && mkdir -p root/a/d root/a/.nebula");
        sync_count = 0;
        CHECK(set("a/d/x", "1") == NEBULA_OK && sync_count > 4); /* and the entries of a, d and the root */
        close_with_table();
}

static const char *replacement;

/* Acts as another agent at the worst time. */
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
        static const char *const texts[] = { "short", "a much longer one" };

        open_with_table();
        os = real;
        table.stat_below = replace_after_stat;
        table.open_below = replace_after_open;
        for (int i = 0; i < 2; i++) {
                const char *found;

                CHECK(set("x", "0123456789") == NEBULA_OK);
                replacement = texts[i];
                os = &table;
                found = get("x");
                os = real;
                CHECK(!replacement && (!strcmp(found, "0123456789") || !strcmp(found, texts[i])));
                CHECK(!strcmp(get("x"), texts[i]));
        }
        close_with_table();
}


/* Between the check of the victim and its removal, another process replaces it. With `third`, yet another process takes the key once it
 * is free. */
static const char *second, *third;

static int rename_late(const char *root, const char *from, const char *to)
{
        char path[600];
        int result;

        snprintf(path, sizeof path, "%s/%s", root, from);
        if (second && os_write_file_atomic(path, second, strlen(second)))
                abort();
        result = os_linux.rename_below(root, from, to);
        if (third && os_write_file_atomic(path, third, strlen(third)))
                abort();
        return result;
}

static void a_removal_gives_back_what_it_did_not_mean(void)
{
        struct store_victim victim = { .key = "t/x" };

        open_with_table();
        CHECK(set("t/x", "first") == NEBULA_OK);
        victim.stamp = stamp_of("t/x");
        second = "the second";
        table.rename_below = rename_late;
        for (int links = 2; links--;) {
                CHECK(store->ops->remove(store, &victim, 1, &error) == NEBULA_OK);
                CHECK(!strcmp(get("t/x"), "the second") && !strcmp(keys("", true), "t/x "));
                table.rename_below = os_linux.rename_below;
                CHECK(set("t/x", "first") == NEBULA_OK);
                victim.stamp = stamp_of("t/x");
                table.rename_below = rename_late;
                table.link_below = no_link;
        }
        third = "the third";
        CHECK(store->ops->remove(store, &victim, 1, &error) == NEBULA_OK && !strcmp(get("t/x"), "the third"));
        CHECK(strstr(keys("", true), "t/.nebula/tmp-")); /* where the second one is */
        second = third = NULL;
        close_with_table();
}

static uint64_t inode_of(const char *key)
{
        struct os_stat found = { 0 };

        os_linux.stat_below(store->root, key, &found);
        return found.inode;
}

/* Acts as a file system that shares blocks. */
static int clone_slowly(int fd, int from)
{
        char bytes[100];
        int64_t size = os_linux.pread(from, bytes, sizeof bytes, 0);

        return os_linux.pwrite(fd, bytes, (size_t)size, 0) == size ? 0 : -EIO;
}

static void a_copy_shares_blocks_or_is_a_second_name_or_has_the_bytes(void)
{
        for (int way = 0; way < 3; way++) {
                open_with_table();
                table.clone = way ? no_clone : clone_slowly;
                table.link_below = way == 2 ? no_link : os_linux.link_below;
                CHECK(set("t/x", "bytes") == NEBULA_OK);
                for (int i = 0; i < 2; i++)
                        CHECK(store->ops->copy(store, "t/x", "v/x", STORE_ALWAYS, &error) == NEBULA_OK && !strcmp(get("v/x"), "bytes"));
                CHECK(store->ops->copy(store, "t/x", "v/x", STORE_IF_ABSENT, &error) == NEBULA_BUSY);
                CHECK((inode_of("t/x") == inode_of("v/x")) == (way == 1) && !strcmp(keys("", true), "t/x v/x "));
                CHECK(set("t/x", "others") == NEBULA_OK && !strcmp(get("v/x"), "bytes"));
                close_with_table();
        }
}

/* A server whose clock is an hour ahead. */
#define HOUR_NS (INT64_C(3600) * 1000000000)
static int temp_count;

static int fstat_ahead(int fd, struct os_stat *ret_stat)
{
        int result = os_linux.fstat(fd, ret_stat);

        temp_count++;
        ret_stat->mtime_ns += HOUR_NS;
        return result;
}

static void the_time_is_the_file_systems(void)
{
        int64_t first, now;
        struct os_stat root;

        open_with_table();
        CHECK(store->ops->clock(store, &now, &error) == NEBULA_OK && os->stat(store->root, true, &root) == -ENOENT);
        CHECK(set("t/x", "1") == NEBULA_OK);
        table.fstat = fstat_ahead;
        temp_count = 0;
        CHECK(store->ops->clock(store, &first, &error) == NEBULA_OK && store->ops->clock(store, &now, &error) == NEBULA_OK);
        CHECK(first >= os->wall_ns() + HOUR_NS - 10000000000 && first <= os->wall_ns() + HOUR_NS && now >= first && now < first + 10000000000);
        CHECK(temp_count == 1); /* it is not read each time */
        CHECK(!strcmp(keys("", true), "t/x "));
        close_with_table();
}

static uint64_t fs_type;

static int space_of_type(const char *path, struct os_space *ret_space)
{
        int result = os_linux.space(path, ret_space);

        ret_space->fs_type = fs_type;
        return result;
}

static unsigned features_on(uint64_t type)
{
        unsigned found;

        open_with_table();
        table.space = space_of_type;
        fs_type = type;
        found = store->ops->features(store);
        fs_type = 0xef53;
        CHECK(store->ops->features(store) == found);
        close_with_table();
        return found;
}

static void features_depend_on_the_file_system(void)
{
        unsigned always = STORE_PATHS | STORE_LENDS_FD | STORE_OWNERS | STORE_COPIES;

        CHECK(features_on(0xef53) == (always | STORE_LISTS_FRESH | STORE_VIEW_IS_FREE)); /* ext4 */
        CHECK(features_on(0x6969) == (always | STORE_VIEW_IS_FREE | STORE_REFERS));                     /* NFS */
        CHECK(features_on(0xff534d42) == always);                                        /* SMB */
}

static uint64_t cached_bytes;

static int64_t cached_below_a_limit(int fd, void *data, size_t size, uint64_t offset)
{
        return offset + size <= cached_bytes ? (int64_t)size : -EAGAIN;
}

static int open_as_without_page_cache(const char *root, const char *key, int flags)
{
        return flags & OS_DIRECT ? os_linux.open_below(root, "t/direct", OS_READ) : os_linux.open_below(root, key, flags);
}

static char first_byte(int fd)
{
        char byte = 0;

        CHECK(os_linux.pread(fd, &byte, 1, 0) == 1);
        os_linux.close(fd);
        return byte;
}

/* The content shows which file was read: t/direct stands for the disk. */
static void a_file_is_read_from_the_page_cache_if_all_of_it_is_there(void)
{
        static char bytes[FILE_BYTES], read[FILE_BYTES] __attribute__((aligned(BULK_PAGE_BYTES)));

        open_with_table();
        memset(bytes, 'd', sizeof bytes);
        CHECK(store->ops->put(store, "t/direct", bytes, sizeof bytes, STORE_ALWAYS, NULL, NULL, &error) == NEBULA_OK);
        memset(bytes, 'c', sizeof bytes);
        CHECK(store->ops->put(store, "t/x", bytes, sizeof bytes, STORE_ALWAYS, NULL, NULL, &error) == NEBULA_OK);
        table.open_below = open_as_without_page_cache;
        table.pread_cached = cached_below_a_limit;
        for (int i = 0; i < 3; i++) {
                bool is_cached = i == 0, is_direct = is_cached;
                int fd = -1;

                cached_bytes = i == 0 ? sizeof bytes : i == 1 ? sizeof bytes - BULK_PAGE_BYTES : 0;
                CHECK(store->ops->open_read(store, "t/x", false, &fd, &is_direct, &error) == NEBULA_OK);
                CHECK(is_direct == !is_cached && first_byte(fd) == (is_cached ? 'c' : 'd'));
                CHECK(store->ops->read_bulk(store, "t/x", read, sizeof read, BULK_PAGE_BYTES, NULL, NULL, &error) == NEBULA_OK);
                CHECK(read[0] == (is_cached ? 'c' : 'd'));
        }
        close_with_table();
}

static int stale_reads;

/* As on NFS where another node has replaced the file since it was opened. */
static int64_t pread_stale(int fd, void *data, size_t size, uint64_t offset)
{
        return stale_reads-- > 0 ? -ESTALE : real->pread(fd, data, size, offset);
}

/*
 * fault (Storage): Another node replaces a small file while a reader reads it (ESTALE of NFS).
 * result: The reader opens it again, and gets the old or the new text.
 */
static void a_file_that_another_node_replaces_while_it_is_read_is_opened_anew(void)
{
        char text[8], *back;

        open_with_table();
        CHECK(set("t/x", "new") == NEBULA_OK);
        table.pread = pread_stale;
        stale_reads = 3;
        CHECK(store->ops->get(store, "t/x", 100, &back, NULL, NULL, &error) == NEBULA_OK && !strcmp(back, "new"));
        free(back);
        stale_reads = 3;
        CHECK(store->ops->read(store, "t/x", text, 1, 2, &error) == NEBULA_OK && !memcmp(text, "ew", 2));
        stale_reads = 1000000; /* a server that has lost the file for good */
        CHECK(store->ops->get(store, "t/x", 100, &back, NULL, NULL, &error) == NEBULA_STORAGE && error.sys_errno == ESTALE);
        close_with_table();
}

static int stale_lists;

/* As on NFS where another node has removed the directory since it was opened. */
static int readdir_stale(struct os_dir *listing, char *name, size_t size)
{
        int result = real->readdir(listing, name, size);

        return result > 0 && !strcmp(name, "y") && stale_lists-- > 0 ? -ESTALE : result;
}

/*
 * fault (Storage): Another node removes a directory while it is listed (ESTALE of NFS).
 * result: The agent lists anew.
 */
static void a_directory_that_another_node_removes_while_it_is_listed_is_listed_anew(void)
{
        struct store_page page;

        open_with_table();
        CHECK(!set("t/x", "1") && !set("t/y", "1") && !set("s/x", "1"));
        table.readdir = readdir_stale;
        stale_lists = 3;
        CHECK(!strcmp(keys("", true), "s/x t/x t/y ") && stale_lists < 0);
        stale_lists = 1;
        CHECK(!strcmp(keys("t/", false), "t/x t/y "));
        stale_lists = 1000000;
        CHECK(store->ops->list(store, "", true, NULL, &page, &error) == NEBULA_STORAGE && error.sys_errno == ESTALE && strstr(error.message, "root/t:"));
        close_with_table();
}

static int item_result;
static bool is_all;

static int stat_entry_damaged(struct os_dir *listing, const char *name, struct os_stat *ret_stat)
{
        return is_all || !strcmp(name, "bad") ? item_result : real->stat_entry(listing, name, ret_stat);
}

/*
 * fault (Storage): The inode of one item of the storage path is damaged (EUCLEAN), or a file system that was mounted there has died (ENOTCONN).
 * result: The item counts as a checkpoint that cannot be read. The others are found.
 */
static void an_item_that_cannot_be_read_hides_no_other_in_the_root_and_is_named_elsewhere(void)
{
        static const int results[] = { -EIO, -EUCLEAN, -ENOTCONN, -ESTALE };
        struct store_page page;

        for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
                open_with_table();
                CHECK(!set("t/x", "1") && !set("bad", "1") && !set("t/bad", "1"));
                item_result = results[i];
                table.stat_entry = stat_entry_damaged;
                REQUIRE(store->ops->list(store, "", false, NULL, &page, &error) == NEBULA_OK);
                CHECK(page.count == 2 && !strcmp(page.entries[0].key, "bad") && page.entries[0].is_prefix && !strcmp(page.entries[1].key, "t"));
                store_page_done(&page);
                CHECK(store->ops->list(store, "t/", false, NULL, &page, &error) == NEBULA_STORAGE && strstr(error.message, "root/t/bad:"));
                CHECK(store->ops->list(store, "", true, NULL, &page, &error) == NEBULA_STORAGE && strstr(error.message, "root/bad:"));
                is_all = true;
                CHECK(store->ops->list(store, "", false, NULL, &page, &error) == NEBULA_STORAGE && error.sys_errno == -item_result);
                is_all = false;
                item_result = -EACCES; /* the directory may not be entered */
                CHECK(store->ops->list(store, "", false, NULL, &page, &error) == NEBULA_STORAGE && error.sys_errno == EACCES);
                close_with_table();
        }
}

TAP_MAIN(TEST(a_directory_that_another_node_removes_while_it_is_listed_is_listed_anew), TEST(an_item_that_cannot_be_read_hides_no_other_in_the_root_and_is_named_elsewhere),
         TEST(a_file_that_another_node_replaces_while_it_is_read_is_opened_anew), TEST(an_object_is_created_only_where_none_is_without_links), TEST(an_object_whose_creation_had_no_answer_is_created),
         TEST(an_object_whose_replacement_had_no_answer_is_replaced), TEST(a_removal_elsewhere_costs_a_write_no_sync),
         TEST(a_directory_that_another_process_made_anew_is_synced_anew),
         TEST(a_text_that_is_replaced_while_it_is_read_is_the_old_or_the_new_one), TEST(a_removal_gives_back_what_it_did_not_mean),
         TEST(a_copy_shares_blocks_or_is_a_second_name_or_has_the_bytes), TEST(a_file_is_read_from_the_page_cache_if_all_of_it_is_there),
         TEST(the_time_is_the_file_systems), TEST(features_depend_on_the_file_system))
