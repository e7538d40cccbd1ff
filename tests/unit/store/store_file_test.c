/* Behaviour of the file driver alone: links, directories, temporary files, mounts, and calls that a file system lacks. */
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "one_file_store.h"

static void a_url_chooses_the_driver(void)
{
        char url[300];

        test_dir_make(dir);
        snprintf(url, sizeof url, "file://%s/root///", dir);
        REQUIRE(store_open(url, &store, &error) == NEBULA_OK);
        CHECK(store->ops == &store_file && !strcmp(store->root + strlen(store->root) - 5, "/root"));
        close_file();
        CHECK(store_open("relative/path", &store, &error) == NEBULA_INVALID);
        CHECK(store_open("file://host/path", &store, &error) == NEBULA_INVALID);
        CHECK(store_open("gopher://x/y", &store, &error) == NEBULA_INVALID && strstr(error.message, "gopher"));
        CHECK(store_open("s3:/bucket/run", &store, &error) == NEBULA_INVALID && strstr(error.message, "lost a '/'")); /* pathlib.Path makes that of a URL */
        CHECK(store_open("/home/me/az:/account/data", &store, &error) == NEBULA_INVALID && strstr(error.message, "lost a '/'"));
        store_close(NULL);
}

static void opening_makes_nothing(void)
{
        struct os_stat found;

        open_file();
        CHECK(os->stat(store->root, true, &found) == -ENOENT);
        close_file();
}

static void a_link_is_replaced_or_removed_itself(void)
{
        open_file();
        CHECK(set("t/x", "x") == NEBULA_OK);
        run_shell("echo -n precious > target && ln -s ../../target root/t/link && ln -s ../target root/top");
        CHECK(set("t/link", "object") == NEBULA_OK);
        CHECK(!strcmp(get("t/link"), "object"));
        CHECK(store_remove_one(store, "top", &error) == NEBULA_OK);
        run_shell("test \"$(cat target)\" = precious && touch root/was_kept");
        CHECK(!strcmp(get("was_kept"), ""));
        close_file();
}

/* fault: as test_a_link_in_the_place_of_a_directory_is_followed_by_nothing */
/* Links that another user has put into a path. The root itself is reached through a link. */
static void nothing_below_the_root_leads_out_of_it(void)
{
        static const char *const keys[] = { "evil/l/x", "evil/.nebula/x", "gone/x" };
        struct store_entry entry;
        struct store_page page;
        char path[600], *text;
        bool direct;
        int fd;

        open_file();
        store_close(store);
        run_shell("mkdir -p real/evil outside/deep && ln -s real root && echo -n precious > outside/x && ln -s ../../outside real/evil/l && "
                  "ln -s ../../outside real/evil/.nebula && ln -s ../outside real/gone");
        snprintf(path, sizeof path, "%s/root", dir);
        REQUIRE(store_open(path, &store, &error) == NEBULA_OK);
        CHECK(set("t/x", "x") == NEBULA_OK);
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
                char other[600], directory[600];

                snprintf(other, sizeof other, "%s%s", keys[i], "y");
                snprintf(directory, sizeof directory, "%.*s/deep/", (int)(strrchr(keys[i], '/') - keys[i]), keys[i]);
                CHECK(set(other, "mine") == NEBULA_STORAGE && strstr(error.message, "symbolic link") && error.sys_errno == ELOOP);
                CHECK(set(keys[i], "mine") == NEBULA_STORAGE);
                CHECK(store->ops->get(store, keys[i], 100, &text, NULL, NULL, &error) == NEBULA_CORRUPT && strstr(error.message, "symbolic link"));
                CHECK(store->ops->read(store, keys[i], other, 0, 1, &error) == NEBULA_CORRUPT);
                CHECK(store->ops->open_read(store, keys[i], false, &fd, &direct, &error) == NEBULA_CORRUPT);
                CHECK(store->ops->stat(store, keys[i], &entry, &error) == NEBULA_CORRUPT);
                CHECK(store->ops->copy(store, keys[i], "t/taken", STORE_ALWAYS, &error) == NEBULA_CORRUPT);
                CHECK(store->ops->copy(store, "t/x", other, STORE_ALWAYS, &error) == NEBULA_STORAGE);
                CHECK(store_remove_one(store, keys[i], &error) == NEBULA_STORAGE && strstr(error.message, "symbolic link"));
                CHECK(store->ops->list(store, directory, true, NULL, &page, &error) == NEBULA_CORRUPT && strstr(error.message, "symbolic link"));
        }
        CHECK(set("evil/x", "x") == NEBULA_STORAGE && strstr(error.message, "symbolic link")); /* its temporary file would lie outside the root */
        run_shell("test \"$(cat outside/x)\" = precious && test -d outside/deep && test $(ls -A outside | wc -l) = 2 && touch root/was_kept");
        CHECK(!strcmp(get("was_kept"), "") && !strcmp(get("t/x"), "x"));
        close_file();
}

static void no_temporary_file_stays(void)
{
        open_file();
        CHECK(set("t/x", "x") == NEBULA_OK && set("latest", "t") == NEBULA_OK && create("t/x", "y") == NEBULA_BUSY);
        CHECK(set("t/dir/x", "x") == NEBULA_OK && set("t/dir", "is a directory") == NEBULA_STORAGE);
        CHECK(store->ops->copy(store, "t/x", "t/y", STORE_ALWAYS, &error) == NEBULA_OK && store_remove_one(store, "t/y", &error) == NEBULA_OK);
        CHECK(!strcmp(keys("", true), "latest t/dir/x t/x "));
        run_shell("test $(find root -name '*tmp-*' | wc -l) = 0 && touch root/none");
        CHECK(!strcmp(get("none"), ""));
        close_file();
}

static void temporary_files_and_links_are_listed_as_such(void)
{
        static const char *const temporary[] = { ".nebula-tmp-1-2", "t/.nebula/tmp-3-4" }, *const others[] = {
                "t", "t/x", "t/tmp-1", "t/.nebula", "t/.nebula/tmp", "t/.nebula/tmp-1/x", "t/u/.nebula/tmp-1", ".nebula", "t/.nebula-tmp-1", ".nebula/tmp-1/x" };
        struct store_list list;

        for (size_t i = 0; i < sizeof temporary / sizeof *temporary; i++)
                CHECK(store_is_temporary(temporary[i]));
        for (size_t i = 0; i < sizeof others / sizeof *others; i++)
                CHECK(!store_is_temporary(others[i]));
        open_file();
        run_shell("mkdir -p root/t/.nebula && touch root/.nebula-tmp-1-2 root/t/.nebula/tmp-3-4 root/t/x && ln -s ../nowhere root/t/link");
        REQUIRE(store_list_all(store, "", true, &list, &error) == NEBULA_OK && list.count == 4);
        CHECK(store_is_temporary(list.entries[0].key) && store_is_temporary(list.entries[1].key));
        CHECK(!strcmp(list.entries[2].key, "t/link") && list.entries[2].is_link && !list.entries[3].is_link);
        for (size_t i = 0; i < list.count; i++)
                CHECK(store->ops->remove(store, &(struct store_victim){ list.entries[i].key, list.entries[i].stamp }, 1, &error) == NEBULA_OK);
        store_list_done(&list);
        run_shell("test $(ls -A root | wc -l) = 0 && touch root/empty");
        CHECK(!strcmp(keys("", true), "empty "));
        close_file();
}

static void directories_go_with_their_last_object_and_no_others(void)
{
        struct store_victim victims[] = { { .key = "a/b/x" }, { .key = "a/y" }, { .key = "c/d/x" }, { .key = "e/x" } };

        open_file();
        for (int i = 0; i < 4; i++)
                CHECK(set(victims[i].key, "1") == NEBULA_OK);
        run_shell("mkdir root/never-ours && touch root/c/theirs");
        CHECK(store->ops->remove(store, victims, 4, &error) == NEBULA_OK);
        run_shell("test -d root/never-ours && test \"$(ls root root/c | tr '\\n' ' ')\" = 'root: c never-ours  root/c: theirs ' && touch root/good");
        CHECK(!strcmp(get("good"), ""));
        CHECK(store_remove_one(store, "c/theirs", &error) == NEBULA_OK && store_remove_one(store, "good", &error) == NEBULA_OK);
        run_shell("rmdir root/never-ours && test -d root && touch root/kept");
        CHECK(!strcmp(keys("", false), "kept/") || !strcmp(keys("", false), "kept "));
        close_file();
}

static void an_obstacle_is_named(void)
{
        struct store_object object = { "t/x/y", "1", 1, NULL };
        struct store_upload *upload;

        open_file();
        CHECK(set("t/x", "a file") == NEBULA_OK && set("t/d/x", "1") == NEBULA_OK);
        CHECK(create("t/x/y", "1") == NEBULA_STORAGE && strstr(error.message, "t/x is a file where a directory is to be"));
        CHECK(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_STORAGE && strstr(error.message, "t/x is a file"));
        CHECK(set("t/d", "1") == NEBULA_STORAGE && strstr(error.message, "t/d is a directory where a file is to be"));
        CHECK(create("t/d", "1") == NEBULA_STORAGE && strstr(error.message, "t/d is a directory where a file is to be"));
        CHECK(store_class(&error) == STORE_NEVER);
        run_shell("mkdir -p root/u && touch root/u/.nebula");
        CHECK(create("u/x", "1") == NEBULA_STORAGE && strstr(error.message, "u/.nebula is a file"));
        close_file();
}

static void many_keys_are_listed_in_pages(void)
{
        struct store_list list;
        struct store_page page;
        size_t pages = 0;
        char *from = NULL;

        open_file();
        run_shell("mkdir -p root/a root/b/c && cd root/a && seq -f %04g 0 1299 | xargs touch && cd ../b/c && seq -f %04g 0 1299 | xargs touch");
        REQUIRE(store_list_all(store, "", true, &list, &error) == NEBULA_OK);
        CHECK(list.count == 2600 && !strcmp(list.entries[0].key, "a/0000") && !strcmp(list.entries[2599].key, "b/c/1299"));
        for (size_t i = 1; i < list.count; i++)
                CHECK(strcmp(list.entries[i - 1].key, list.entries[i].key) < 0);
        store_list_done(&list);
        do {
                REQUIRE(store->ops->list(store, "b/", true, from, &page, &error) == NEBULA_OK);
                CHECK(page.count <= 1000);
                free(from);
                from = page.next;
                page.next = NULL;
                store_page_done(&page);
                pages++;
        } while (from);
        CHECK(pages == 2);
        close_file();
}

static size_t looks;

static int count_look(struct os_dir *open, const char *name, struct os_stat *ret_stat)
{
        looks++;
        return os_linux.stat_entry(open, name, ret_stat);
}

static void a_large_directory_is_not_read_once_per_thousand_entries(void)
{
        struct os_table table = *os;
        struct store_list list;

        open_file();
        run_shell("mkdir root && cd root && seq -f t%05g 1 6000 | xargs touch");
        table.stat_entry = count_look;
        os = &table;
        REQUIRE(store_list_all(store, "", false, &list, &error) == NEBULA_OK);
        os = &os_linux;
        CHECK(list.count == 6000 && !strcmp(list.entries[0].key, "t00001") && !strcmp(list.entries[5999].key, "t06000"));
        CHECK(looks <= 2 * list.count);
        store_list_done(&list);
        close_file();
}

static void a_root_that_was_removed_is_made_again(void)
{
        open_file();
        CHECK(set("t/x", "one") == NEBULA_OK);
        run_shell("rm -rf root");
        CHECK(!strcmp(get("t/x"), "-"));
        CHECK(set("t/x", "two") == NEBULA_OK);
        CHECK(!strcmp(get("t/x"), "two"));
        run_shell("rm -rf root && echo > root");
        CHECK(set("t/x", "three") == NEBULA_STORAGE);
        CHECK(strstr(error.message, "/root/t/x"));
        run_shell("rm root");
        CHECK(set("t/x", "four") == NEBULA_OK);
        close_file();
}

static void a_fifo_in_the_place_of_a_text_is_damage_and_blocks_no_caller(void)
{
        char path[600], *text;

        open_file();
        CHECK(set("a", "x") == NEBULA_OK);
        snprintf(path, sizeof path, "%s/fifo", store->root);
        REQUIRE(!mkfifo(path, 0600));
        CHECK(store->ops->get(store, "fifo", 100, &text, NULL, NULL, &error) == NEBULA_CORRUPT && strstr(error.message, "not a regular file"));
        close_file();
}

static bool is_mounted;
static char mount_point[512];

/* The device of a mount point, and of all below it, differs from that of its parent. */
static int stat_mounted(const char *path, bool follow, struct os_stat *ret_stat)
{
        int result = os_linux.stat(path, follow, ret_stat);

        if (!strncmp(path, mount_point, strlen(mount_point)) && is_mounted)
                ret_stat->device++;
        return result;
}

/*
 * fault (Storage): The path was a mount point, or lay below one, and the mount has gone.
 * result: The agent writes nothing to the disk below it, and no history. It reports an error until a file system is
 * mounted there again.
 */
static void a_root_whose_mount_has_gone_takes_nothing_until_it_is_back(void)
{
        const struct os_table *real = os;
        struct os_table table = *os;
        char path[600];

        open_file();
        strcpy(mount_point, store->root);
        table.stat = stat_mounted;
        os = &table;
        is_mounted = true;
        CHECK(set("a/x", "1") == NEBULA_OK);
        is_mounted = false;
        for (int i = 0; i < 3; i++)
                CHECK(set("b/x", "2") == NEBULA_STORAGE && strstr(error.message, "is gone"));
        snprintf(path, sizeof path, "%s/b", store->root);
        CHECK(access(path, F_OK));
        is_mounted = true;
        CHECK(set("b/x", "3") == NEBULA_OK && !strcmp(get("b/x"), "3"));
        os = real;
        close_file();
        /* A root that was never a mount point need not become one. */
        open_file();
        CHECK(set("a/x", "1") == NEBULA_OK && set("b/x", "2") == NEBULA_OK);
        close_file();
}

/* fault: as a_root_whose_mount_has_gone_takes_nothing_until_it_is_back */
static void a_root_below_a_mount_that_has_gone_is_neither_empty_nor_made(void)
{
        const struct os_table *real = os;
        struct os_table table = *os;
        struct store_page page = { 0 };
        unsigned length;

        open_file();
        strcpy(mount_point, dir);
        table.stat = stat_mounted;
        os = &table;
        is_mounted = true;
        CHECK(set("a/x", "1") == NEBULA_OK);
        length = store->mount_length;
        CHECK(length == strlen(dir));
        store_close(store);
        /* The empty directory below the mount point, as the next agent sees it. */
        run_shell("rm -r root");
        is_mounted = false;
        store = again_file();
        store->mount_length = length;
        CHECK(store->ops->list(store, "", true, NULL, &page, &error) == NEBULA_STORAGE && strstr(error.message, "is gone"));
        CHECK(set("b/x", "2") == NEBULA_STORAGE && strstr(error.message, "is gone"));
        run_shell("test ! -e root");
        is_mounted = true;
        CHECK(set("b/x", "3") == NEBULA_OK && !strcmp(get("b/x"), "3"));
        os = real;
        close_file();
}

/* As for a user that may list the root but not enter its directories. */
static int stat_refused(struct os_dir *listing, const char *name, struct os_stat *ret_stat)
{
        return -EACCES;
}

/*
 * fault (Storage): The path can be listed, but not entered.
 * result: A resume and `nebula list` say that permission is denied. Training does not begin again from nothing without
 * a message.
 */
static void a_root_that_may_not_be_entered_is_no_empty_one(void)
{
        const struct os_table *real = os;
        struct os_table table = *os;
        struct store_page page;

        open_file();
        run_shell("mkdir -p root/t && touch root/t/x");
        table.stat_entry = stat_refused;
        os = &table;
        for (int deep = 0; deep < 2; deep++)
                CHECK(store->ops->list(store, "", deep, NULL, &page, &error) == NEBULA_STORAGE && strstr(error.message, "root") && error.sys_errno == EACCES);
        os = real;
        run_shell("rm -r root && touch root");
        CHECK(store->ops->list(store, "", true, NULL, &page, &error) == NEBULA_STORAGE && error.sys_errno == ENOTDIR);
        close_file();
}

static uint32_t another_user(void)
{
        return 12345;
}

static void an_object_of_another_user_is_foreign(void)
{
        const struct os_table *real = os;
        struct os_table table = *os;
        struct store_entry entry;
        struct store_list list;

        open_file();
        run_shell("mkdir root && touch root/x");
        table.uid = another_user;
        os = &table;
        REQUIRE(store->ops->stat(store, "x", &entry, &error) == NEBULA_OK && store_list_all(store, "", true, &list, &error) == NEBULA_OK);
        CHECK(entry.is_foreign && list.count == 1 && list.entries[0].is_foreign);
        store_entry_done(&entry);
        store_list_done(&list);
        /* A server that changes the owner of our files changes it to that user. */
        CHECK(set("y", "1") == NEBULA_OK && store->ops->stat(store, "x", &entry, &error) == NEBULA_OK && !entry.is_foreign);
        store_entry_done(&entry);
        os = real;
        close_file();
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
        CHECK(set("t/x", "x") == NEBULA_OK);
        table.open_below = open_none;
        os = &table;
        CHECK(set("t/y", "y") == NEBULA_NO_SPACE && strstr(error.message, "needs 1 bytes") && strstr(error.message, "inodes or a quota"));
        os = real;
        close_file();
}

TAP_MAIN(TEST(a_url_chooses_the_driver), TEST(opening_makes_nothing), TEST(a_link_is_replaced_or_removed_itself),
         TEST(nothing_below_the_root_leads_out_of_it), TEST(no_temporary_file_stays), TEST(temporary_files_and_links_are_listed_as_such),
         TEST(directories_go_with_their_last_object_and_no_others), TEST(an_obstacle_is_named), TEST(many_keys_are_listed_in_pages),
         TEST(a_large_directory_is_not_read_once_per_thousand_entries),
         TEST(a_root_that_was_removed_is_made_again), TEST(a_fifo_in_the_place_of_a_text_is_damage_and_blocks_no_caller),
         TEST(a_root_whose_mount_has_gone_takes_nothing_until_it_is_back),
         TEST(a_root_below_a_mount_that_has_gone_is_neither_empty_nor_made), TEST(a_root_that_may_not_be_entered_is_no_empty_one),
         TEST(an_object_of_another_user_is_foreign), TEST(a_full_disk_with_bytes_to_spare_says_what_else_may_have_run_out))
