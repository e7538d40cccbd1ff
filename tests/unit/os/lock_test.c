/* The order of locks, and the lock under which no files may be written. A child process makes each violation and is ended by it. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/lock.h"
#include "os/os.h"
#include "os/thread.h"
#include "tap.h"

static struct lock seal = LOCK_INIT(LOCK_SEAL), catalogue = LOCK_INIT(LOCK_CATALOGUE), feed = LOCK_INIT(LOCK_FEED);
static struct lock other_catalogue = LOCK_INIT(LOCK_CATALOGUE);
static pthread_cond_t cond;

/* Whether a child that does this ends by SIGABRT and prints both names. Without names: whether it ends normally and prints nothing. */
static bool ends(void (*work)(void), const char *first, const char *second)
{
        char said[16384] = ""; /* a sanitizer may have a word, too */
        size_t size = 0;
        int fds[2], how;
        pid_t child;
        ssize_t more;

        if (pipe(fds) || (child = fork()) < 0)
                return false;
        if (!child) {
                dup2(fds[1], 2);
                work();
                _exit(0);
        }
        close(fds[1]);
        while (size < sizeof said - 1 && (more = read(fds[0], said + size, sizeof said - 1 - size)) > 0)
                size += (size_t)more;
        close(fds[0]);
        waitpid(child, &how, 0);
        if (!first)
                return WIFEXITED(how) && !WEXITSTATUS(how) && size == 0;
        return WIFSIGNALED(how) && WTERMSIG(how) == SIGABRT && strstr(said, first) && strstr(said, second);
}

static void take_right(void)
{
        lock_take(&seal);
        lock_take(&catalogue);
        lock_take(&feed);
        lock_give(&seal); /* the order of giving is free */
        lock_give(&feed);
        lock_give(&catalogue);
        lock_take(&seal);
        lock_give(&seal);
}

static void take_wrong(void)
{
        lock_take(&catalogue);
        lock_take(&seal);
}

static void take_two_alike(void)
{
        lock_take(&catalogue);
        lock_take(&other_catalogue);
}

static void take_two_equal_parts_beside(void)
{
        lock_take(&catalogue);
        lock_take_beside(&other_catalogue);
        lock_give(&catalogue);
        lock_give(&other_catalogue);
}

static void try_wrong(void)
{
        lock_take(&catalogue);
        if (lock_try(&seal))
                lock_give(&seal);
        lock_give(&catalogue);
}

static void wait_right(void)
{
        lock_take(&seal);
        lock_take(&catalogue);
        lock_wait_for(&catalogue, &cond, 1);
        lock_give(&catalogue);
        lock_give(&seal);
}

/* Behind the wait it would take the first one while it holds the second. */
static void wait_wrong(void)
{
        lock_take(&catalogue);
        lock_take(&feed);
        lock_wait_for(&catalogue, &cond, 1);
}

static void give_what_is_not_held(void)
{
        lock_take(&seal);
        lock_give(&catalogue);
}

static void begin_anew_while_held(void)
{
        lock_take(&feed);
        lock_init(&feed, LOCK_FEED);
        lock_take(&catalogue);
        lock_give(&catalogue);
}

static void unlink_with_catalogue(void)
{
        lock_take(&catalogue);
        os->unlink("/nowhere/at/all");
}

static void unlink_below_with_catalogue(void)
{
        lock_take(&catalogue);
        os->unlink_below("/nowhere", "at/all");
}

static void create_with_catalogue(void)
{
        lock_take(&catalogue);
        os->open("/nowhere/at/all", OS_WRITE | OS_CREATE);
}

static void look_with_catalogue(void)
{
        struct os_stat stat;

        lock_take(&catalogue);
        os->stat("/", true, &stat);
        lock_give(&catalogue);
        os->unlink("/nowhere/at/all");
}

static void locks_that_are_taken_in_order_are_had(void)
{
        CHECK(ends(take_right, NULL, NULL));
        CHECK(ends(try_wrong, NULL, NULL));
        CHECK(ends(take_two_equal_parts_beside, NULL, NULL));
        CHECK(ends(wait_right, NULL, NULL));
        CHECK(ends(begin_anew_while_held, NULL, NULL));
}

static void a_lock_out_of_order_ends_the_process_with_both_names(void)
{
        CHECK(ends(take_wrong, "LOCK_SEAL", "LOCK_CATALOGUE"));
        CHECK(ends(take_two_alike, "LOCK_CATALOGUE", "LOCK_CATALOGUE"));
        CHECK(ends(wait_wrong, "LOCK_CATALOGUE", "LOCK_FEED"));
        CHECK(ends(give_what_is_not_held, "LOCK_CATALOGUE", "not hold"));
}

static void a_file_that_is_written_under_the_catalogues_lock_ends_the_process(void)
{
        CHECK(ends(unlink_with_catalogue, "unlink", "LOCK_CATALOGUE"));
        CHECK(ends(unlink_below_with_catalogue, "unlink", "LOCK_CATALOGUE"));
        CHECK(ends(create_with_catalogue, "open", "LOCK_CATALOGUE"));
        CHECK(ends(look_with_catalogue, NULL, NULL));
}

int main(void)
{
        static const struct tap_test tests[] = {
                TEST(locks_that_are_taken_in_order_are_had),
                TEST(a_lock_out_of_order_ends_the_process_with_both_names),
                TEST(a_file_that_is_written_under_the_catalogues_lock_ends_the_process),
        };

#ifndef NB_LOCK_CHECKS
        printf("1..0 # SKIP built without lock_checks\n");
        return 0;
#endif
        os_cond_init(&cond);
        return tap_run(tests, sizeof tests / sizeof tests[0]);
}
