/*
 * The power fails at every moment of publishing. A file and a directory appear and are replaced, complete or not at
 * all. From then on they stay and are never absent in between.
 */
/*
 * fault (Storage): Power loss while publishing.
 * result: A published path holds the old or the new file, whole. After the end of `flush` it holds the new one.
 */
#include <errno.h>

#include "agent/agent_publish.h"
#include "os/os_crash.h"
#include "tap.h"

#define SEEDS os_crash_seeds(10) /* more with NEBULA_TEST_NIGHTLY=1 */

static char root[64], tree[80], other[80], storage[96], out[96];
static const unsigned seeds[] = { 1, 5, 9, 13, 0 };

/* From `from` on, `path` holds `kind`. Between `begun` and `from` it may hold its earlier content. */
struct promise {
        uint64_t begun, from;
        bool is_directory;
        const char *path; /* below out */
        char kind;
};
static struct promise promises[16];
static size_t promise_count;

/* How a file gets to its path. */
static enum way { COPY, SHARE, WAY_COUNT } way;
static struct os_table copying;

static int share_nothing(int fd, int from)
{
        (void)fd;
        (void)from;
        return -EOPNOTSUPP;
}

static void promise(uint64_t begun, bool is_directory, const char *path, char kind)
{
        promises[promise_count++] = (struct promise){ begun, os_crash_position(), is_directory, path, kind };
}

static bool allowed(const struct promise *wanted, char kind, uint64_t at)
{
        bool fine = kind == '-';

        for (size_t i = 0; i < promise_count; i++)
                if (!strcmp(promises[i].path, wanted->path) && promises[i].begun <= at)
                        fine = kind == promises[i].kind || (promises[i].from > at && fine);
        return fine;
}

static void begin(struct bench *bench)
{
        snprintf(root, sizeof root, "/dev/shm/nebula-crash-XXXXXX");
        if (!mkdtemp(root))
                abort();
        snprintf(tree, sizeof tree, "%s/tree", root);
        snprintf(other, sizeof other, "%s/other", root);
        snprintf(storage, sizeof storage, "%s/storage", tree);
        snprintf(out, sizeof out, "%s/out", tree);
        promise_count = 0;
        if (os->mkdir(tree, 0755) || os_crash_begin(tree))
                abort();
        bench_init(bench, NULL, storage);
        if (way == COPY) {
                copying = *os;
                copying.clone = share_nothing;
                os = &copying;
        }
}

static void check_all(struct bench *bench)
{
        uint64_t last = os_crash_position();
        char path[200];

        os_crash_end();
        bench_done(bench, true);
        for (uint64_t at = 0; at <= last && !tap_failed_checks; at++)
                for (uint64_t seed = 0; seed < SEEDS; seed++) {
                        REQUIRE(!os_crash_materialise(at, seed, other));
                        for (size_t i = 0; i < promise_count; i++) {
                                const struct promise *p = &promises[i];
                                char kind;

                                snprintf(path, sizeof path, "%s/out/%s", other, p->path);
                                kind = p->is_directory ? look_directory(path, seeds) : look_file(path, seeds);
                                if (!allowed(p, kind, at))
                                        printf("# position %d of %d, seed %d: %s is '%c'\n", (int)at, (int)last, (int)seed, p->path, kind);
                                CHECK(allowed(p, kind, at));
                        }
                }
        os_crash_free();
        os_remove_tree(root);
}

static void publish_file(struct bench *bench, const char *tag, int which, const char *name)
{
        uint64_t begun = os_crash_position();
        struct version *version = bench_version(bench, tag, seeds[which], 2);
        char path[200];

        snprintf(path, sizeof path, "%s/%s", out, name);
        REQUIRE(version && !ask(bench, version, "a", path, "") && !bench_persist(bench, version));
        CHECK(work(bench, 9));
        promise(begun, false, name, (char)('a' + which));
}

static void publish_whole(struct bench *bench, const char *tag, int which, const char *name, bool replaces)
{
        uint64_t begun = os_crash_position();
        struct version *version = bench_version(bench, tag, seeds[which], 2);
        char path[200], staging[200], text[2] = { (char)('a' + which) };

        snprintf(path, sizeof path, "%s/%s", out, name);
        snprintf(staging, sizeof staging, "%s/.staging/%s", out, tag);
        stage(staging, text);
        if (replaces)
                REQUIRE(!ask_removal(bench, path));
        REQUIRE(version && !ask(bench, version, "", path, staging) && !bench_persist(bench, version));
        CHECK(work(bench, 9));
        promise(begun, true, name, (char)('a' + which));
}

static void take_away(struct bench *bench, bool is_directory, const char *name)
{
        uint64_t begun = os_crash_position();
        char path[200];

        snprintf(path, sizeof path, "%s/%s", out, name);
        CHECK(!ask_removal(bench, path) && work(bench, 9));
        promise(begun, is_directory, name, '-');
}

static void once_a_file_is_the_old_or_the_new_one_and_stays(void)
{
        struct bench bench;

        begin(&bench);
        publish_file(&bench, "t1", 0, "deep/x");
        publish_file(&bench, "t2", 1, "deep/x");
        take_away(&bench, false, "deep/x");
        publish_file(&bench, "t3", 2, "deep/x");
        check_all(&bench);
}

static void once_a_directory_is_whole_or_absent_and_stays(void)
{
        struct bench bench;

        begin(&bench);
        publish_whole(&bench, "t1", 0, "checkpoint-1", false);
        publish_whole(&bench, "t2", 1, "checkpoint-2", false);
        take_away(&bench, true, "checkpoint-1");
        check_all(&bench);
}

static void once_a_directory_that_is_replaced_is_never_gone(void)
{
        struct bench bench;

        begin(&bench);
        publish_whole(&bench, "t1", 0, "best", false);
        publish_whole(&bench, "t2", 1, "best", true);
        publish_whole(&bench, "t3", 2, "best", true);
        check_all(&bench);
}

/* Frameworks make the directories that they publish to, and do not sync them. */
static void once_directories_that_were_found_are_not_trusted(void)
{
        struct bench bench;
        char path[200];

        begin(&bench);
        snprintf(path, sizeof path, "%s/run/epoch", out);
        REQUIRE(!os->mkdir(out, 0755));
        snprintf(path, sizeof path, "%s/run", out);
        REQUIRE(!os->mkdir(path, 0755));
        publish_file(&bench, "t1", 0, "run/x");
        publish_whole(&bench, "t2", 1, "run/checkpoint-2", false);
        check_all(&bench);
}

/* Runs `once` for each way that a file gets to its path. */
static void every_way(void (*once)(void))
{
        for (way = COPY; way < WAY_COUNT && !tap_failed_checks; way++)
                once();
}

static void a_file_is_the_old_or_the_new_one_and_stays(void)
{
        every_way(once_a_file_is_the_old_or_the_new_one_and_stays);
}

static void a_directory_is_whole_or_absent_and_stays(void)
{
        every_way(once_a_directory_is_whole_or_absent_and_stays);
}

static void a_directory_that_is_replaced_is_never_gone(void)
{
        every_way(once_a_directory_that_is_replaced_is_never_gone);
}

static void directories_that_were_found_are_not_trusted(void)
{
        every_way(once_directories_that_were_found_are_not_trusted);
}

TAP_MAIN(TEST(a_file_is_the_old_or_the_new_one_and_stays), TEST(a_directory_is_whole_or_absent_and_stays),
         TEST(a_directory_that_is_replaced_is_never_gone), TEST(directories_that_were_found_are_not_trusted))
