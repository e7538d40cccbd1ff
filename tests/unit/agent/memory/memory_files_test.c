/* Small files of the memory directory: their order, their failures, and the threads that wait for them. */
#include <errno.h>

#include "agent/agent_catalogue.h"
#include "agent/memory/memory_files.h"
#include "agent/memory/survival_log.h"
#include "os/thread.h"
#include "tap.h"
#include "test_dir.h"

#define ID 0x123u

static char root[256], memory[300], path[400];
static struct os_table table;
static atomic_int waiting, is_stuck, failures_left;

static int64_t write_as_reported(int fd, const void *data, size_t size, uint64_t offset)
{
        if (atomic_load(&failures_left) > 0 && atomic_fetch_sub(&failures_left, 1) > 0)
                return -ENOSPC;
        atomic_fetch_add(&waiting, 1);
        while (atomic_load(&is_stuck))
                os_linux.sleep_ms(1);
        atomic_fetch_sub(&waiting, 1);
        return os_linux.pwrite(fd, data, size, offset);
}

static void begin(struct bench *bench)
{
        test_dir_make_quick(root);
        snprintf(memory, sizeof memory, "%s/memory", root);
        snprintf(path, sizeof path, "%s/%016x.x", memory, ID);
        table = os_linux;
        table.pwrite = write_as_reported;
        os = &table;
        atomic_store(&is_stuck, 0);
        atomic_store(&failures_left, 0);
        bench_init(bench, memory, "");
}

static void end(struct bench *bench)
{
        bench_done(bench, true);
        os = &os_linux;
        os_remove_tree(root);
}

static void add(struct bench *bench, struct memory_file *file, enum memory_file_kind kind, uint64_t offset, const char *text, bool is_looked_for)
{
        struct memory_file_task task = { .file = file, .kind = kind, .id = ID, .suffix = ".x", .data = strdup(text), .size = strlen(text),
                                         .offset = offset, .is_looked_for = is_looked_for };

        CHECK(memory_files_add(bench->catalogue.memory, &task));
}

/* Does all tasks that were added. Returns the number of failures. */
static unsigned do_added(struct bench *bench)
{
        struct memory_files *files = &bench->catalogue.memory->files;
        struct memory_file_task *failed, *next;
        unsigned count = 0;

        memory_files_write(bench->catalogue.memory, memory_files_added(files));
        CHECK(!memory_files_are_due(files));
        for (failed = memory_files_failed(files); failed; failed = next, count++) {
                next = failed->next;
                memory_file_task_free(failed);
        }
        return count;
}

static bool file_holds(const char *text)
{
        char *data;
        size_t size;
        bool same;

        if (os_read_file(path, 1000, &data, &size))
                return false;
        same = size == strlen(text) && !memcmp(data, text, size);
        free(data);
        return same;
}

static void tasks_are_done_in_the_order_in_which_they_were_added(void)
{
        struct memory_file *file = memory_file_new();
        struct os_stat stat;
        struct bench bench;

        begin(&bench);
        add(&bench, file, MEMORY_FILE_REPLACE, 0, "ab", false);
        add(&bench, file, MEMORY_FILE_APPEND, 2, "cd", false);
        CHECK(os->stat(path, false, &stat) == -ENOENT);
        CHECK(do_added(&bench) == 0 && file_holds("abcd"));
        add(&bench, file, MEMORY_FILE_APPEND, 4, "ef", true);
        CHECK(do_added(&bench) == 0 && file_holds("abcdef"));
        add(&bench, file, MEMORY_FILE_APPEND, 6, "gh", false);
        memory_files_remove(bench.catalogue.memory, file, ID, ".x");
        CHECK(do_added(&bench) == 0 && os->stat(path, false, &stat) == -ENOENT);
        memory_file_drop(file);
        end(&bench);
}

static void nothing_is_appended_behind_a_task_that_failed(void)
{
        struct memory_file *file = memory_file_new();
        struct bench bench;

        begin(&bench);
        add(&bench, file, MEMORY_FILE_REPLACE, 0, "ab", false);
        CHECK(do_added(&bench) == 0);
        atomic_store(&failures_left, 1);
        add(&bench, file, MEMORY_FILE_APPEND, 2, "cd", false);
        add(&bench, file, MEMORY_FILE_APPEND, 4, "ef", false);
        CHECK(do_added(&bench) == 2 && file_holds("ab"));
        add(&bench, file, MEMORY_FILE_REPLACE, 0, "new", false);
        add(&bench, file, MEMORY_FILE_APPEND, 3, "er", false);
        CHECK(do_added(&bench) == 0 && file_holds("newer"));
        CHECK(!os->unlink(path));
        add(&bench, file, MEMORY_FILE_APPEND, 5, "!", true);
        CHECK(do_added(&bench) == 1);
        memory_file_drop(file);
        end(&bench);
}

static void a_survival_log_that_could_not_be_gone_on_with_is_begun_anew(void)
{
        struct version *version;
        struct bench bench;

        begin(&bench);
        version = bench_version(&bench, "t", 1, 2);
        REQUIRE(version);
        atomic_store(&failures_left, 1);
        catalogue_lock(&bench.catalogue);
        version->wanted = true;
        survival_log_write(&bench.catalogue, version);
        catalogue_unlock(&bench.catalogue);
        CHECK(atomic_load(&failures_left) == 0 && version->survival->bytes == version->survival->begun_bytes);
        bench_done(&bench, false);
        bench_init(&bench, memory, "");
        CHECK(bench.job->versions && bench.job->versions->wanted);
        end(&bench);
}

struct teller {
        struct bench *bench;
        struct version *version; /* NULL: it describes nothing */
        atomic_bool has_lock, has_answered;
};

static void *tell(void *argument)
{
        struct teller *teller = argument;

        catalogue_lock(&teller->bench->catalogue);
        atomic_store(&teller->has_lock, true);
        if (teller->version)
                survival_log_write(&teller->bench->catalogue, teller->version);
        catalogue_unlock(&teller->bench->catalogue);
        atomic_store(&teller->has_answered, true);
        return NULL;
}

static bool await(const atomic_bool *flag)
{
        for (int i = 0; i < 50000 && !atomic_load(flag); i++)
                os->sleep_ms(1);
        return atomic_load(flag);
}

static void a_file_that_hangs_keeps_answers_back_and_not_the_lock(void)
{
        struct teller writer = { 0 }, other = { 0 };
        pthread_t threads[2];
        struct bench bench;

        begin(&bench);
        writer.bench = other.bench = &bench;
        writer.version = bench_version(&bench, "t", 1, 2);
        REQUIRE(writer.version);
        atomic_store(&is_stuck, 1);
        REQUIRE(!os_thread_start(&threads[0], tell, &writer, false));
        while (!atomic_load(&waiting))
                os->sleep_ms(1);
        REQUIRE(!os_thread_start(&threads[1], tell, &other, false));
        CHECK(await(&other.has_lock));
        os->sleep_ms(50);
        /* its answer may describe a change that is not in the file yet */
        CHECK(!atomic_load(&writer.has_answered) && !atomic_load(&other.has_answered));
        atomic_store(&is_stuck, 0);
        CHECK(await(&writer.has_answered) && await(&other.has_answered));
        pthread_join(threads[0], NULL);
        pthread_join(threads[1], NULL);
        end(&bench);
}

static void a_wait_comes_after_what_was_described(void)
{
        struct version *version;
        struct bench bench;

        begin(&bench);
        version = bench_version(&bench, "t", 1, 2);
        REQUIRE(version);
        catalogue_lock(&bench.catalogue);
        survival_log_write(&bench.catalogue, version);
        CHECK(memory_files_are_due(&bench.catalogue.memory->files));
        catalogue_wait(&bench.catalogue, &bench.catalogue.moved, -1); /* no other thread would end this wait */
        CHECK(!memory_files_are_due(&bench.catalogue.memory->files));
        catalogue_unlock(&bench.catalogue);
        end(&bench);
}

TAP_MAIN(TEST(tasks_are_done_in_the_order_in_which_they_were_added), TEST(nothing_is_appended_behind_a_task_that_failed),
         TEST(a_survival_log_that_could_not_be_gone_on_with_is_begun_anew), TEST(a_file_that_hangs_keeps_answers_back_and_not_the_lock),
         TEST(a_wait_comes_after_what_was_described))
