/* Variables of clouds that another process brought. */
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/vars.h"
#include "tap.h"

static char *environment[] = { "HOME=/root", "AWS_REGION=here", "AZURE_STORAGE_KEY=k=", "NEBULA_S3_STYLE=path", "NEBULA_S3_STYLES=no", "AWS_PROFILE=", "AWS_OTHER=no", NULL };

static void only_variables_of_clouds_are_collected(void)
{
        struct nebula_error error;
        struct vars *vars;
        char large[VARS_MAX + 64] = "AWS_SESSION_TOKEN=";
        const char *text;
        size_t size;

        REQUIRE(!vars_collect(environment, &vars, &error));
        text = vars_text(vars, &size);
        CHECK(size == 16 + 21 + 21 + 13 && !memcmp(text, "AWS_REGION=here\0AZURE_STORAGE_KEY=k=\0NEBULA_S3_STYLE=path\0AWS_PROFILE=", size));
        vars_drop(vars);
        CHECK(!vars_collect((char *[]){ "HOME=/", NULL }, &vars, &error) && !vars && !vars_collect(NULL, &vars, &error) && !vars);
        vars_text(NULL, &size);
        CHECK(!size);
        memset(large + strlen(large), 'x', VARS_MAX);
        CHECK(vars_collect((char *[]){ large, NULL }, &vars, &error) == NEBULA_INVALID && !vars);
}

static void entered_variables_count_in_place_of_the_process_s(void)
{
        struct vars *vars, *other = vars_new("AWS_REGION=there", 17, "another process brought them"), *before;

        REQUIRE(!vars_collect(environment, &vars, NULL));

        setenv("AWS_REGION", "own", 1);
        setenv("AWS_ACCESS_KEY_ID", "own", 1);
        setenv("NEBULA_OTHER", "own", 1);
        CHECK(!strcmp(conf_env("AWS_REGION"), "own") && !*vars_origin());
        before = vars_enter(other);
        CHECK(!before && !strcmp(conf_env("AWS_REGION"), "there") && !conf_env("AWS_ACCESS_KEY_ID") && !strcmp(conf_env("NEBULA_OTHER"), "own"));
        CHECK(!strcmp(vars_origin(), "another process brought them"));
        before = vars_enter(vars);
        CHECK(before == other && !strcmp(conf_env("AZURE_STORAGE_KEY"), "k=") && !conf_env("AWS_PROFILE"));
        vars_leave(before);
        CHECK(!strcmp(conf_env("AWS_REGION"), "there"));
        vars_leave(NULL);
        CHECK(!strcmp(conf_env("AWS_ACCESS_KEY_ID"), "own"));
        vars_own_origin("the agent");
        CHECK(!strcmp(vars_origin(), "the agent"));
        CHECK(vars_same(vars, vars) && !vars_same(vars, other) && !vars_same(vars, NULL) && vars_same(NULL, NULL));
        vars_drop(vars);
        vars_drop(other);
}

/* An agent that a trainer has started. */
static void a_process_can_forget_its_own_variables_of_clouds(void)
{
        setenv("AWS_SECRET_ACCESS_KEY", "own", 1);
        setenv("NEBULA_OTHER", "own", 1);
        vars_forget_own();
        CHECK(!conf_env("AWS_SECRET_ACCESS_KEY") && !strcmp(conf_env("NEBULA_OTHER"), "own"));
}

TAP_MAIN(TEST(only_variables_of_clouds_are_collected), TEST(a_process_can_forget_its_own_variables_of_clouds), TEST(entered_variables_count_in_place_of_the_process_s))
