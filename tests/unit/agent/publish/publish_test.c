#include <string.h>
#include <unistd.h>
#include <utime.h>

#include "agent/agent_publish.h"
#include "agent/agent_storage.h"
#include "agent/commit/commit.h"
#include "agent/log.h"
#include "agent/publish/publish_private.h"
#include "agent/restore/restore.h"
#include "base/error.h"
#include "store/pins.h"
#include "tap.h"
#include "test_dir.h"

static char base[256], storage[300], memory[300], out[300];
static const unsigned seeds[] = { 1, 5, 9, 0 };
static struct bench bench;

static void begin(void)
{
        test_dir_make_quick(base);
        storage_beside(base, storage, sizeof storage);
        snprintf(memory, sizeof memory, "%s/memory", base);
        snprintf(out, sizeof out, "%s/out", base);
        bench_init(&bench, memory, storage);
        bench.catalogue.sweep_age_s = 900;
}

static void end(void)
{
        bench_done(&bench, true);
        test_dir_remove(base);
        if (storage_is_mem())
                storage_remove(storage);
}

/* Starts the next agent, as if this one was killed. It adopts the memory directory. */
static void next_agent(void)
{
        bench_done(&bench, false);
        bench_init(&bench, memory, storage);
        bench.catalogue.sweep_age_s = 900;
        publish_adopt_all(&bench.catalogue);
        storage_scan(&bench.catalogue, bench.job, &bench.error);
}

static const char *at(const char *name)
{
        static char paths[4][400];
        static int next;

        next = (next + 1) % 4;
        snprintf(paths[next], sizeof paths[next], "%s/%s", out, name);
        return paths[next];
}

static char found_tag(const char *path)
{
        char name[IPC_NAME_MAX];
        struct publish_look look;
        struct version *version;
        bool open;

        publish_look(path, &look);
        catalogue_lock(&bench.catalogue);
        version = publish_find(&bench.catalogue, bench.job, path, &look, name, &open);
        catalogue_unlock(&bench.catalogue);
        return version ? version->tag[0] : '-';
}

static void only_clean_absolute_paths_and_known_files_are_taken(void)
{
        static const char *const wrong[] = { "x", "/", "", "/a/", "/a/../b", "/a/..", "//a", "/a//b" };
        struct version *version;

        begin();
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version);
        for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
                CHECK(ask(&bench, version, "a", wrong[i], "") == NEBULA_INVALID);
                CHECK(ask_removal(&bench, wrong[i]) == NEBULA_INVALID);
        }
        CHECK(ask(&bench, version, "nothing", at("x"), "") == NEBULA_NOT_FOUND);
        CHECK(ask(&bench, version, "", at("x"), "") == NEBULA_INVALID); /* a directory needs a staging directory */
        CHECK(!ask(&bench, version, "a", "/a..b/..c", ""));
        CHECK(bench.job->publishes && !bench.job->publishes->next);
        end();
}

static void neither_a_storage_path_nor_what_holds_one_is_removed(void)
{
        char inside[400], beside[400];

        NEEDS_FILES("storage is a directory");
        begin();
        snprintf(inside, sizeof inside, "%s/a", storage);
        snprintf(beside, sizeof beside, "%s2", storage);
        CHECK(ask_removal(&bench, storage) == NEBULA_INVALID && strstr(bench.error.message, "stays"));
        CHECK(ask_removal(&bench, base) == NEBULA_INVALID);
        CHECK(!bench.job->publishes);
        CHECK(!ask_removal(&bench, inside) && !ask_removal(&bench, beside));
        end();
}

static void nothing_appears_before_its_version_is_stored(void)
{
        struct version *version;

        begin();
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "a", at("x"), ""));
        CHECK(work(&bench, 9) && look_file(at("x"), seeds) == '-');
        CHECK(publish_waits(version) && found_tag(at("x")) == 'a');
        CHECK(!bench_persist(&bench, version) && work(&bench, 9));
        CHECK(look_file(at("x"), seeds) == 'a' && !publish_waits(version) && found_tag(at("x")) == 'a');
        end();
}

static int refuse_first(const char *from, const char *to)
{
        return strcmp(to, at("1")) ? os_linux.rename(from, to) : -ENOSPC;
}

static int refuse_all(const char *from, const char *to)
{
        return strncmp(to, out, strlen(out)) ? os_linux.rename(from, to) : -ENOSPC;
}

/* The path of the failed one may be on a full disk, and the others elsewhere. */
static void a_publish_that_fails_does_not_hold_up_those_after_it(void)
{
        struct os_table table = *os;
        struct version *version;
        int64_t due = INT64_MAX;

        begin();
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !bench_persist(&bench, version));
        REQUIRE(!ask(&bench, version, "a", at("1"), "") && !ask(&bench, version, "a", at("2"), ""));
        table.rename = refuse_first;
        os = &table;
        catalogue_lock(&bench.catalogue);
        CHECK(publish_work(&bench.catalogue, bench.job, os->now_ns(), &due));
        CHECK(publish_work(&bench.catalogue, bench.job, os->now_ns(), &due));
        CHECK(!publish_work(&bench.catalogue, bench.job, os->now_ns(), &due) && due < INT64_MAX);
        catalogue_unlock(&bench.catalogue);
        CHECK(look_file(at("1"), seeds) == '-' && look_file(at("2"), seeds) == 'a');
        os = &os_linux;
        CHECK(work(&bench, 9) && look_file(at("1"), seeds) == 'a');
        end();
}

static void a_failing_publish_is_tried_less_and_less_often(void)
{
        struct os_table table = *os;
        struct version *version;
        int64_t last = 0;

        begin();
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !bench_persist(&bench, version) && !ask(&bench, version, "a", at("1"), ""));
        table.rename = refuse_first;
        os = &table;
        for (int i = 0; i < 12; i++) {
                int64_t due = INT64_MAX, now;

                CHECK(!work(&bench, 1));
                catalogue_lock(&bench.catalogue);
                now = os->now_ns();
                CHECK(!publish_work(&bench.catalogue, bench.job, now, &due));
                catalogue_unlock(&bench.catalogue);
                CHECK(due - now > (i < 7 ? last : 25 * INT64_C(1000000000)));
                last = due - now;
        }
        os = &os_linux;
        end();
}

static void a_removal_waits_for_every_publish_before_it(void)
{
        struct version *first, *second;

        begin();
        first = bench_version(&bench, "a", 1, 2);
        REQUIRE(first && !ask(&bench, first, "a", at("1"), "") && !bench_persist(&bench, first) && work(&bench, 9));
        second = bench_version(&bench, "b", 5, 2);
        REQUIRE(second && !ask(&bench, second, "a", at("2"), "") && !ask_removal(&bench, at("1")));
        CHECK(work(&bench, 9) && look_file(at("1"), seeds) == 'a' && found_tag(at("1")) == '-');
        next_agent();
        CHECK(work(&bench, 9) && look_file(at("1"), seeds) == 'a');
        second = bench.job->versions;
        while (second && strcmp(second->tag, "b"))
                second = second->next;
        REQUIRE(second && !bench_persist(&bench, second));
        CHECK(work(&bench, 9) && look_file(at("1"), seeds) == '-' && look_file(at("2"), seeds) == 'b');
        end();
}

static void a_removal_cancels_what_has_not_happened(void)
{
        struct version *version;

        begin();
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "a", at("x"), "") && !ask_removal(&bench, at("x")) &&
                !ask(&bench, version, "a", at("y"), ""));
        CHECK(!bench_persist(&bench, version) && work(&bench, 9));
        CHECK(look_file(at("x"), seeds) == '-' && look_file(at("y"), seeds) == 'a');
        end();
}

static bool is_stored(const char *tag)
{
        char prefix[300];

        snprintf(prefix, sizeof prefix, "%s/", tag);
        return storage_count(storage, prefix, "", NULL) > 0;
}

static void a_directory_that_was_removed_before_it_appeared_takes_its_version_along(void)
{
        struct version *first, *second;

        begin();
        stage(at("staging-1"), "a");
        stage(at("staging-2"), "b");
        first = bench_version(&bench, "a", 1, 2);
        second = bench_version(&bench, "b", 5, 2);
        REQUIRE(first && second && !ask(&bench, first, "", at("1"), at("staging-1")) &&
                !ask(&bench, second, "", at("2"), at("staging-2")) && !ask_removal(&bench, at("1")));
        REQUIRE(!bench_persist(&bench, first) && is_stored("a") && !bench_persist(&bench, second));
        CHECK(work(&bench, 9) && look_directory(at("1"), seeds) == '-' && look_directory(at("2"), seeds) == 'b');
        CHECK(!is_stored("a") && is_stored("b"));
        end();
}

/* The next publish of the path cancels the removal, which would have removed the staged files, too. */
static void staged_files_go_when_another_directory_takes_the_place(void)
{
        struct version *first, *second;
        struct os_stat stat;

        for (int restarts = 0; restarts < 2; restarts++) {
                begin();
                stage(at("staging-1"), "a");
                stage(at("staging-2"), "b");
                first = bench_version(&bench, "a", 1, 2);
                second = bench_version(&bench, "b", 5, 2);
                REQUIRE(first && second && !ask(&bench, first, "", at("1"), at("staging-1")) && !ask_removal(&bench, at("1")) &&
                        !ask(&bench, second, "", at("1"), at("staging-2")));
                REQUIRE(!bench_persist(&bench, first) && !bench_persist(&bench, second));
                if (restarts)
                        next_agent();
                CHECK(work(&bench, 9) && look_directory(at("1"), seeds) == 'b');
                CHECK(os->stat(at("staging-1"), false, &stat) == -ENOENT && is_stored("a") && is_stored("b"));
                end();
        }
}

/* A framework may give each checkpoint the same staging directory. */
static void staged_files_that_a_later_directory_needs_too_stay(void)
{
        struct version *first, *second, *third;

        begin();
        stage(at("staging"), "b");
        stage(at("staging-2"), "c");
        first = bench_version(&bench, "a", 1, 2);
        second = bench_version(&bench, "b", 5, 2);
        third = bench_version(&bench, "c", 9, 2);
        REQUIRE(first && second && third && !ask(&bench, first, "", at("1"), at("staging")) && !ask_removal(&bench, at("1")) &&
                !ask(&bench, second, "", at("1"), at("staging")) && !ask_removal(&bench, at("1")) &&
                !ask(&bench, third, "", at("1"), at("staging-2")) && !ask(&bench, second, "", at("2"), at("staging")));
        REQUIRE(!bench_persist(&bench, first) && !bench_persist(&bench, second) && !bench_persist(&bench, third));
        CHECK(work(&bench, 9) && look_directory(at("1"), seeds) == 'c' && look_directory(at("2"), seeds) == 'b');
        end();
}

static void a_version_that_is_read_goes_when_it_is_not_read_any_more(void)
{
        struct version *version;

        begin();
        stage(at("staging"), "a");
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "", at("1"), at("staging")) && !bench_persist(&bench, version) && work(&bench, 9));
        version->pins++;
        REQUIRE(!ask_removal(&bench, at("1")));
        CHECK(work(&bench, 9) && look_directory(at("1"), seeds) == 'a' && is_stored("a"));
        CHECK(publish_removes(bench.job)); /* a flush waits for it */
        version->pins--;
        CHECK(work(&bench, 9) && look_directory(at("1"), seeds) == '-' && !is_stored("a") && !bench.job->publishes && !publish_removes(bench.job));
        end();
}

/* fault (Storage): A framework removes the directory of a checkpoint that a person has pinned.
 * result: The directory goes. The version stays in storage. */
static void the_version_of_a_pinned_tag_stays_when_its_directory_is_removed(void)
{
        struct version *version;
        struct store *store;

        begin();
        stage(at("staging"), "a");
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "", at("1"), at("staging")) && !bench_persist(&bench, version) && work(&bench, 9));
        REQUIRE(!storage_open(&bench.catalogue, bench.job, &store, &bench.error) && !pin_put(store, "a", "figure 3", &bench.error));
        REQUIRE(!ask_removal(&bench, at("1")));
        CHECK(work(&bench, 9) && look_directory(at("1"), seeds) == '-' && is_stored("a") && version->stored && !bench.job->publishes);
        end();
}

/* The program saves the tag again before the removal has happened. */
static void a_removal_leaves_a_version_that_is_being_written_again(void)
{
        struct version *version;
        uint64_t id = 0;

        begin();
        stage(at("staging"), "a");
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "", at("1"), at("staging")) && !bench_persist(&bench, version) && work(&bench, 9));
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "a", NEBULA_FILES_ALL_RANKS, &bench.error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench.catalogue);
        REQUIRE(id && !bench_save(&bench, &id, "a", 5) && !ask_removal(&bench, at("1")));
        CHECK(work(&bench, 9) && look_directory(at("1"), seeds) == '-' && is_stored("a"));
        end();
}

static const struct store_ops *stored_ops;

static enum nebula_status refuse_manifest(struct store *store, const struct store_victim *victims, size_t count, struct nebula_error *error)
{
        for (size_t i = 0; i < count; i++)
                if (strstr(victims[i].key, "/manifest-"))
                        return error_set(error, NEBULA_STORAGE, EIO, "%s stays", victims[i].key);
        return stored_ops->remove(store, victims, count, error);
}

/* Version "a" has become durable and its directory appeared and was removed, but storage did not let the version go. */
static bool remove_in_vain(void)
{
        static struct store_ops ops;
        struct version *version;

        stage(at("staging"), "a");
        version = bench_version(&bench, "a", 1, 2);
        if (!version || ask(&bench, version, "", at("1"), at("staging")) || bench_persist(&bench, version) || !work(&bench, 9) || ask_removal(&bench, at("1")))
                return false;
        stored_ops = bench.job->storage->store->ops;
        ops = *stored_ops;
        ops.remove = refuse_manifest;
        bench.job->storage->store->ops = &ops;
        work(&bench, 1);
        return look_directory(at("1"), seeds) == '-' && is_stored("a") && bench.job->publishes;
}

/* Otherwise a load would find it again, perhaps as the newest version. */
static void a_version_that_storage_does_not_let_go_goes_with_a_later_try(void)
{
        int64_t due = INT64_MAX, now;

        begin();
        REQUIRE(remove_in_vain());
        catalogue_lock(&bench.catalogue);
        now = os->now_ns();
        CHECK(!publish_work(&bench.catalogue, bench.job, now, &due) && due > now && due < INT64_MAX); /* the worker tries again, after a pause */
        catalogue_unlock(&bench.catalogue);
        bench.job->storage->store->ops = stored_ops;
        CHECK(work(&bench, 9) && !is_stored("a") && !bench.job->publishes);
        end();
}

/* fault (The machine and other users): The agent ends while storage does not remove the version of a removed directory, and another program makes
 * that directory again.
 * result: The next agent removes the version, and not the other program's directory. */
static void the_next_agent_does_not_remove_what_another_program_has_put_where_a_removed_directory_was(void)
{
        struct os_stat stat;

        begin();
        REQUIRE(remove_in_vain());
        bench.job->storage->store->ops = stored_ops;
        stage(at("1"), "another program's");
        next_agent();
        CHECK(work(&bench, 9) && !os->stat(at("1"), false, &stat) && !is_stored("a") && !bench.job->publishes);
        end();
}

static struct os_table watching;
static int looked, looked_locked;

static int watch_stat(const char *path, bool follow, struct os_stat *ret_stat)
{
        if (!strncmp(path, out, strlen(out))) {
                looked++;
                if (!lock_try(&bench.catalogue.catalogue_lock))
                        looked_locked++;
                else
                        lock_give(&bench.catalogue.catalogue_lock);
        }
        return os_linux.stat(path, follow, ret_stat);
}

static void a_file_system_that_may_hang_is_not_looked_at_with_the_lock(void)
{
        struct version *version;

        begin();
        watching = os_linux;
        watching.stat = watch_stat;
        os = &watching;
        stage(at("staging"), "a");
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "a", at("x"), "") && !ask(&bench, version, "", at("1"), at("staging")));
        CHECK(!bench_persist(&bench, version) && work(&bench, 9));
        CHECK(found_tag(at("x")) == 'a' && found_tag(at("1/a")) == 'a' && found_tag(at("1")) == 'a' && found_tag(at("2/a")) == '-');
        CHECK(looked > 4 && !looked_locked);
        os = &os_linux;
        end();
}

static void a_file_that_appears_between_the_look_and_the_lock_is_found(void)
{
        char name[IPC_NAME_MAX];
        struct publish_look look;
        struct version *version;
        bool open;

        begin();
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "a", at("x"), "") && !bench_persist(&bench, version));
        publish_look(at("x"), &look);
        CHECK(work(&bench, 9) && look_file(at("x"), seeds) == 'a');
        catalogue_lock(&bench.catalogue);
        CHECK(publish_find(&bench.catalogue, bench.job, at("x"), &look, name, &open) == version);
        catalogue_unlock(&bench.catalogue);
        end();
}

static void links_and_empty_directories_join_a_directory_that_is_there(void)
{
        struct version *version;
        struct os_stat stat;
        char text[16] = "";

        begin();
        stage(at("staging"), "a");
        REQUIRE(!os_make_dirs(at("staging/empty"), 0755) && !symlink("sub/config", at("staging/link")));
        REQUIRE(!os_make_dirs(at("1"), 0755));
        put_text(at("1/mine"), "kept");
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "", at("1"), at("staging")) && !bench_persist(&bench, version) && work(&bench, 9));
        CHECK(look_directory(at("1"), seeds) == 'a' && !os->stat(at("1/mine"), false, &stat));
        CHECK(os->readlink(at("1/link"), text, sizeof text) == 10 && !strcmp(text, "sub/config"));
        CHECK(!os->stat(at("1/empty"), false, &stat) && stat.kind == OS_KIND_DIRECTORY);
        CHECK(os->stat(at("staging"), false, &stat) == -ENOENT);
        end();
}

/* The file stays until then. */
static void a_directory_takes_the_place_of_a_file_when_it_is_whole(void)
{
        struct version *version;
        struct os_stat stat;

        for (int restarts = 0; restarts < 2; restarts++) {
                begin();
                stage(at("staging"), "a");
                put_text(at("1"), "full");
                version = bench_version(&bench, "a", 1, 2);
                REQUIRE(version && !ask(&bench, version, "", at("1"), at("staging")) && work(&bench, 9));
                CHECK(!os->stat(at("1"), false, &stat) && stat.kind == OS_KIND_FILE);
                REQUIRE(!bench_persist(&bench, version));
                if (restarts)
                        next_agent();
                CHECK(work(&bench, 9) && look_directory(at("1"), seeds) == 'a' && debris_in(out) == 0);
                CHECK(os->stat(at("staging"), false, &stat) == -ENOENT);
                end();
        }
}

static void a_replaced_published_file_is_not_found(void)
{
        struct version *version;

        begin();
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "a", at("x"), "") && !bench_persist(&bench, version) && work(&bench, 9));
        CHECK(found_tag(at("x")) == 'a');
        CHECK(!os->unlink(at("x")));
        put_text(at("x"), "mine");
        CHECK(found_tag(at("x")) == '-');
        end();
}

static void forget_memory(struct version *version)
{
        catalogue_lock(&bench.catalogue);
        version->stored = true; /* as the worker sets it */
        version_forget_memory(&bench.catalogue, version);
        catalogue_unlock(&bench.catalogue);
}

static struct version *found_at(const char *path, char ret_name[IPC_NAME_MAX])
{
        struct publish_look look;
        struct version *version;
        bool open;

        publish_look(path, &look);
        catalogue_lock(&bench.catalogue);
        version = publish_find(&bench.catalogue, bench.job, path, &look, ret_name, &open);
        catalogue_unlock(&bench.catalogue);
        return version;
}

/*
 * fault (Storage): A tag whose file was published is committed again, or retention removes it from storage.
 * result: The published path can still be loaded: from the writing that carried the file over, else from the file at
 * that path.
 */
/* As Lightning's save_last does: the tag is committed once more, with one more file. */
static void a_handle_finds_files_that_a_later_writing_carried_over_and_not_those_that_it_replaced(void)
{
        struct version *first, *second, *found;
        struct ipc_open request = { .name = "a" };
        struct ipc_opened *opened;
        char name[IPC_NAME_MAX];
        int fd;

        begin();
        first = bench_version(&bench, "t", 1, 2);
        REQUIRE(first && !ask(&bench, first, "a", at("x"), "") && !ask(&bench, first, "b", at("y"), "") &&
                !bench_persist(&bench, first) && work(&bench, 9));
        second = bench_version(&bench, "t", 0, 5);
        REQUIRE(second && !bench_persist(&bench, second));
        forget_memory(first);
        forget_memory(second);
        found = found_at(at("x"), name);
        REQUIRE(found && found == second && !strcmp(name, "a"));
        request.version_id = found->id;
        REQUIRE(!restore_open(&bench.catalogue, NULL, &request, &opened, &fd, &bench.error));
        free(opened);
        os->close(fd);
        CHECK(!found_at(at("y"), name) && look_file(at("y"), (const unsigned[]){ 2, 0 }) == 'a');
        end();
}

/*
 * fault (Storage): Storage refuses for a while, and a later writing of a tag is durable before the one whose file is to
 * be published.
 * result: The file is published if the later writing has carried it over.
 */
/* Storage had failed, and the second was tried first. */
static void a_file_appears_although_a_later_writing_that_has_carried_it_over_was_durable_first(void)
{
        struct version *first, *second;

        begin();
        first = bench_version(&bench, "t", 1, 2);
        REQUIRE(first && !ask(&bench, first, "a", at("x"), "") && !ask(&bench, first, "b", at("y"), ""));
        second = bench_version(&bench, "t", 0, 5);
        REQUIRE(second && !bench_persist(&bench, second));
        catalogue_lock(&bench.catalogue);
        version_give_way(&bench.catalogue, first, second->sequence);
        CHECK(first->superseded);
        catalogue_unlock(&bench.catalogue);
        work(&bench, 9);
        CHECK(look_file(at("x"), (const unsigned[]){ 1, 0 }) == 'a' && access(at("y"), F_OK));
        end();
}

/* fault: as a_handle_finds_files_that_a_later_writing_carried_over_and_not_those_that_it_replaced */
static void a_version_that_storage_does_not_have_any_more_is_not_found(void)
{
        struct version *version;

        begin();
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "a", at("x"), "") && !bench_persist(&bench, version) && work(&bench, 9));
        forget_memory(version);
        CHECK(found_tag(at("x")) == 'a');
        catalogue_lock(&bench.catalogue);
        while (bench.job->known.count) /* as retention does */
                known_free(known_take(&bench.job->known, bench.job->name, bench.job->known.list[0]->tag));
        catalogue_unlock(&bench.catalogue);
        CHECK(found_tag(at("x")) == '-' && look_file(at("x"), seeds) == 'a');
        end();
}

/* fault: as test_a_published_file_that_is_overwritten_in_place_leaves_the_durable_version_whole */
static void a_published_file_that_is_overwritten_in_place_leaves_the_stored_one_whole(void)
{
        struct version *version;
        struct os_stat there;
        char elsewhere[256], path[300];

        begin();
        test_dir_make(elsewhere);
        snprintf(path, sizeof path, "%s/x", elsewhere);
        stage(at("staging"), "a");
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "a", path, "") && !ask(&bench, version, "a", at("x"), "") &&
                !ask(&bench, version, "", at("whole"), at("staging")) && !bench_persist(&bench, version) && work(&bench, 9));
        CHECK(look_file(path, seeds) == 'a' && look_file(at("x"), seeds) == 'a' && look_directory(at("whole"), seeds) == 'a');
        CHECK(debris_in(elsewhere) == 0 && debris_in(out) == 0);
        CHECK(!os->stat(at("x"), false, &there) && there.link_count == 1);
        put_text(path, "theirs");
        put_text(at("x"), "theirs");
        put_text(at("whole/a"), "theirs");
        CHECK(stored_holds(bench.job->storage->store, bench.job->known.list[0], "a", seeds[0]));
        test_dir_remove(elsewhere);
        end();
}

static int cloned;

/* Simulates a file system that can share blocks. */
static int clone_by_copy(int fd, int from)
{
        static char data[BENCH_FILE_BYTES];

        cloned++;
        return os_linux.pread(from, data, sizeof data, 0) == sizeof data ? os_write_at(fd, data, sizeof data, 0) : -EIO;
}

static void blocks_are_shared_where_the_file_system_can(void)
{
        struct os_table table = *os;
        struct version *version;

        NEEDS_FILES("an object shares no blocks with a file");
        begin();
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "a", at("x"), "") && !bench_persist(&bench, version));
        table.clone = clone_by_copy;
        os = &table;
        cloned = 0;
        CHECK(work(&bench, 9) && look_file(at("x"), seeds) == 'a' && debris_in(out) == 0);
        CHECK(cloned == 1);
        os = &os_linux;
        end();
}

static void a_version_that_left_memory_is_copied_from_storage_without_memory(void)
{
        struct version *version;

        begin();
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "a", at("x"), "") && !bench_persist(&bench, version));
        forget_memory(version);
        bench.catalogue.memory->budget = 0;
        CHECK(work(&bench, 9) && look_file(at("x"), seeds) == 'a' && debris_in(out) == 0);
        end();
}

static void a_large_file_is_copied_from_storage_in_pieces(void)
{
        const size_t bytes = 2 * IMAGE_CHUNK_BYTES + 777;
        struct version *version;
        bool is_same;
        uint64_t id;
        char *data;
        size_t size;

        begin();
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "large", NEBULA_FILES_ALL_RANKS, &bench.error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench.catalogue);
        REQUIRE(id && !bench_save_bytes(&bench, &id, "a", 3, bytes));
        catalogue_lock(&bench.catalogue);
        version = catalogue_version(&bench.catalogue, id);
        CHECK(version && !commit_part(&bench.catalogue, &bench.session, version, &bench.error));
        catalogue_unlock(&bench.catalogue);
        REQUIRE(!ask(&bench, version, "a", at("x"), "") && !bench_persist(&bench, version));
        forget_memory(version);
        bench.catalogue.memory->budget = 0;
        publish_window_bytes = IMAGE_CHUNK_BYTES;
        CHECK(work(&bench, 9) && debris_in(out) == 0);
        publish_window_bytes = 64u << 20;
        REQUIRE(!os_read_file(at("x"), 2 * bytes, &data, &size));
        is_same = size == bytes;
        for (size_t i = 0; i < size && is_same; i++)
                is_same = (unsigned char)data[i] == bench_byte(3, i);
        CHECK(is_same);
        free(data);
        end();
}

static void a_damaged_stored_file_is_not_published(void)
{
        struct version *version;

        begin();
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "a", at("x"), "") && !bench_persist(&bench, version));
        forget_memory(version);
        storage_damage(storage, "a/a", 700);
        CHECK(work(&bench, 9) && look_file(at("x"), seeds) == '-' && debris_in(out) == 0);
        CHECK(bench.job->publishes && bench.job->publishes->state == PUBLISH_FAILED);
        CHECK(bench.job->publishes->error.status == NEBULA_CORRUPT);
        end();
}

static void files_join_a_directory_and_the_label_comes_last(void)
{
        char *text;
        size_t size;
        struct version *version;

        begin();
        stage(at("best"), "z");
        stage(at("staging"), "a");
        put_text(at("best/kept"), "theirs");
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "", at("best"), at("staging")) && !bench_persist(&bench, version) && work(&bench, 9));
        CHECK(look_directory(at("best"), seeds) == 'a' && debris_in(out) == 0);
        REQUIRE(!os_read_file(at("best/kept"), 100, &text, &size));
        CHECK(!strcmp(text, "theirs"));
        free(text);
        end();
}

static bool put_debris(const char *name, bool is_old)
{
        struct utimbuf long_ago = { 1, 1 };

        put_text(at(name), "debris");
        return is_old && utime(at(name), &long_ago);
}

static void the_next_publish_removes_leftovers_of_dead_agents(void)
{
        struct version *version;
        struct os_stat stat;

        begin();
        REQUIRE(!os_make_dirs(at(".nebula-0123456789abcdef-old"), 0755) && !os_make_dirs(at("staging"), 0755));
        REQUIRE(!put_debris(".nebula-0123456789abcdef-old/model", true));
        utime(at(".nebula-0123456789abcdef-old"), &(struct utimbuf){ 1, 1 });
        REQUIRE(!put_debris(".nebula-0123456789abcde0-new", true) && !put_debris(".nebula-0123456789abcde1-new", false) &&
                !put_debris(".nebula-0123456789abcde2-own", true) && !put_debris(".nebula-short-new", true) &&
                !put_debris(".nebula-0123456789abcde3-new", true) && !put_debris("staging/.nebula-0123456789abcde4-new", false));
        REQUIRE(!os->link(at(".nebula-0123456789abcde3-new"), at("linked")));
        version = bench_version(&bench, "a", 1, 2);
        stage(at("staging"), "a");
        REQUIRE(version && !ask(&bench, version, "", at("best"), at("staging")) && !bench_persist(&bench, version) && work(&bench, 9));
        CHECK(os->stat(at(".nebula-0123456789abcdef-old"), false, &stat) == -ENOENT);
        CHECK(os->stat(at(".nebula-0123456789abcde0-new"), false, &stat) == -ENOENT);
        CHECK(!os->stat(at(".nebula-0123456789abcde1-new"), false, &stat)); /* another program's work in progress */
        CHECK(!os->stat(at(".nebula-0123456789abcde2-own"), false, &stat)); /* not names of Nebula */
        CHECK(!os->stat(at(".nebula-short-new"), false, &stat));
        CHECK(!os->stat(at(".nebula-0123456789abcde3-new"), false, &stat));
        CHECK(look_directory(at("best"), seeds) == 'a' && debris_in(at("best")) == 0);
        end();
}

static void find_list(char path[700])
{
        char name[300];
        struct os_dir *dir;
        uint64_t id;

        REQUIRE(!os->opendir(memory, &dir));
        path[0] = 0;
        while (os->readdir(dir, name, sizeof name) > 0)
                if (memory_image_name(name, ".publish", &id))
                        snprintf(path, 700, "%s/%s", memory, name);
        os->closedir(dir);
        REQUIRE(path[0]);
}

static void a_list_that_was_damaged_is_refused_as_a_whole(void)
{
        char path[700], *text;
        struct version *version;
        size_t size;

        begin();
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "a", at("x"), "") && !ask(&bench, version, "b", at("y"), ""));
        find_list(path);
        REQUIRE(!os_read_file(path, 1 << 20, &text, &size));
        text[size / 2] ^= 1;
        REQUIRE(!os_write_file_atomic(path, text, size));
        next_agent();
        CHECK(!bench.job->publishes);
        text[size / 2] ^= 1;
        REQUIRE(!os_write_file_atomic(path, text, size));
        free(text);
        next_agent();
        CHECK(bench.job->publishes && bench.job->publishes->next && !bench.job->publishes->next->next);
        end();
}

static void a_list_that_cannot_be_read_stays_and_the_log_says_so(void)
{
        char path[700], log[300], *text;
        struct version *version;
        struct os_stat stat;
        size_t size, log_size;
        int fd;

        begin();
        snprintf(log, sizeof log, "%s/agent.log", base);
        version = bench_version(&bench, "a", 1, 2);
        REQUIRE(version && !ask(&bench, version, "a", at("x"), ""));
        find_list(path);
        REQUIRE(!os->stat(path, false, &stat));
        size = stat.size;
        fd = os->open(path, OS_WRITE);
        REQUIRE(fd >= 0 && !os->truncate(fd, (32u << 20) + 1) && !log_open(log));
        next_agent();
        log_close();
        CHECK(!bench.job->publishes);
        REQUIRE(!os_read_file(log, 65536, &text, &log_size));
        CHECK(strstr(text, "publish requests wait") && strstr(text, path) && strstr(text, "File too large"));
        free(text);
        REQUIRE(!os->truncate(fd, size) && !os->close(fd));
        next_agent();
        CHECK(bench.job->publishes && !bench.job->publishes->next);
        end();
}

/* A publish is asked for while the version is still open. It waits for its path's file system, while a later save takes the version's memory. */
static void the_next_agent_publishes_a_version_that_it_finds_in_storage_alone(void)
{
        struct os_table refusing;
        struct version *version;
        uint64_t id = 0;

        begin();
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "a", NEBULA_FILES_ALL_RANKS, &bench.error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench.catalogue);
        REQUIRE(id && !bench_save(&bench, &id, "a", 1) && !ask(&bench, version, "a", at("1"), ""));
        stage(at("staging"), "a");
        REQUIRE(!ask(&bench, version, "", at("2"), at("staging")));
        catalogue_lock(&bench.catalogue);
        REQUIRE(!commit_part(&bench.catalogue, &bench.session, version, &bench.error));
        catalogue_unlock(&bench.catalogue);
        REQUIRE(!bench_persist(&bench, version));
        refusing = *os;
        refusing.rename = refuse_all;
        os = &refusing;
        CHECK(!work(&bench, 2));
        os = &os_linux;
        forget_memory(version);
        next_agent();
        REQUIRE(bench.job->publishes);
        CHECK(!catalogue_version(&bench.catalogue, id));
        CHECK(work(&bench, 9) && look_file(at("1"), seeds) == 'a' && look_directory(at("2"), seeds) == 'a');
        end();
}

TAP_MAIN(TEST(only_clean_absolute_paths_and_known_files_are_taken), TEST(neither_a_storage_path_nor_what_holds_one_is_removed),
         TEST(nothing_appears_before_its_version_is_stored),
         TEST(a_publish_that_fails_does_not_hold_up_those_after_it),
         TEST(a_failing_publish_is_tried_less_and_less_often),
         TEST(a_removal_waits_for_every_publish_before_it), TEST(a_removal_cancels_what_has_not_happened),
         TEST(a_directory_that_was_removed_before_it_appeared_takes_its_version_along),
         TEST(staged_files_go_when_another_directory_takes_the_place),
         TEST(staged_files_that_a_later_directory_needs_too_stay),
         TEST(a_version_that_storage_does_not_let_go_goes_with_a_later_try),
         TEST(the_next_agent_does_not_remove_what_another_program_has_put_where_a_removed_directory_was),
         TEST(a_version_that_is_read_goes_when_it_is_not_read_any_more), TEST(the_version_of_a_pinned_tag_stays_when_its_directory_is_removed), TEST(a_removal_leaves_a_version_that_is_being_written_again),
         TEST(a_file_system_that_may_hang_is_not_looked_at_with_the_lock),
         TEST(a_file_that_appears_between_the_look_and_the_lock_is_found),
         TEST(links_and_empty_directories_join_a_directory_that_is_there),
         TEST(a_directory_takes_the_place_of_a_file_when_it_is_whole),
         TEST(a_replaced_published_file_is_not_found),
         TEST(a_handle_finds_files_that_a_later_writing_carried_over_and_not_those_that_it_replaced),
         TEST(a_file_appears_although_a_later_writing_that_has_carried_it_over_was_durable_first),
         TEST(a_version_that_storage_does_not_have_any_more_is_not_found),
         TEST(a_published_file_that_is_overwritten_in_place_leaves_the_stored_one_whole),
         TEST(blocks_are_shared_where_the_file_system_can),
         TEST(a_version_that_left_memory_is_copied_from_storage_without_memory), TEST(a_large_file_is_copied_from_storage_in_pieces),
         TEST(a_damaged_stored_file_is_not_published),
         TEST(files_join_a_directory_and_the_label_comes_last), TEST(the_next_publish_removes_leftovers_of_dead_agents),
         TEST(a_list_that_was_damaged_is_refused_as_a_whole), TEST(a_list_that_cannot_be_read_stays_and_the_log_says_so),
         TEST(the_next_agent_publishes_a_version_that_it_finds_in_storage_alone))
