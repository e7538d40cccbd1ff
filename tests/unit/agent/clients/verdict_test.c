/* How often the log says a trouble that lasts. tests/python/test_verdict.py has a story for each trouble. */
#include "agent/clients/verdict.h"

#include "agent/agent_catalogue.h"
#include "agent/log.h"
#include "tap.h"
#include "test_dir.h"

static struct os_table table;
static int64_t ahead_ns;
static char base[256], file[300];

static int64_t later(void)
{
        return os_linux.now_ns() + ahead_ns;
}

static int count(const char *text, const char *wanted)
{
        int found = 0;

        for (const char *at = text; (at = strstr(at, wanted)); at += strlen(wanted))
                found++;
        return found;
}

static int lines_with(const char *wanted)
{
        char *text;
        size_t size;
        int found;

        if (os_read_file(file, 1 << 20, &text, &size))
                return -1;
        found = count(text, wanted);
        free(text);
        return found;
}

/* Looks once a second, as the agent does. */
static void let_pass(struct bench *bench, int seconds)
{
        for (int i = 0; i < seconds; i++) {
                ahead_ns += 1000000000;
                catalogue_lock(&bench->catalogue);
                verdict_update(&bench->catalogue, bench->job);
                catalogue_unlock(&bench->catalogue);
        }
}

/*
 * fault (Reports): A trouble lasts for hours.
 * result: The agent's log has one line, again after 1 min, 2 min, ... 1 h, and one when it has ended. The program's log
 * says it ever more rarely, and warns of the first durable version after it.
 */
static void a_trouble_has_one_line_again_ever_more_slowly_and_one_when_it_ends(void)
{
        static struct bench bench;

        test_dir_make_quick(base);
        snprintf(file, sizeof file, "%s/agent.log", base);
        REQUIRE(!log_open(file));
        bench_init(&bench, NULL, "");
        table = *os;
        table.now_ns = later;
        os = &table;
        let_pass(&bench, 100);
        CHECK(lines_with(" is at risk: ") == 0);
        strcpy(bench.memory.rival, "process 7");
        bench.job->rival_seen_at = 1;
        let_pass(&bench, 1);
        CHECK(lines_with(" is at risk: another agent (process 7)") == 1);
        let_pass(&bench, 59);
        CHECK(lines_with(" is at risk: ") == 1);
        let_pass(&bench, 1);
        CHECK(lines_with(" is at risk: ") == 2); /* after 1 min */
        let_pass(&bench, 119);
        CHECK(lines_with(" is at risk: ") == 2);
        let_pass(&bench, 1);
        CHECK(lines_with(" is at risk: ") == 3); /* 2 min later */
        let_pass(&bench, 24 * 3600);
        CHECK(lines_with(" is at risk: ") >= 23 && lines_with(" is at risk: ") <= 32); /* at last once an hour */
        CHECK(lines_with(" is fine again after ") == 0);
        bench.job->rival_seen_at = 0;
        let_pass(&bench, 100);
        CHECK(lines_with(" is fine again after ") == 1);
        os = &os_linux;
        log_close();
        bench_done(&bench, true);
        test_dir_remove(base);
}

TAP_MAIN(TEST(a_trouble_has_one_line_again_ever_more_slowly_and_one_when_it_ends))
