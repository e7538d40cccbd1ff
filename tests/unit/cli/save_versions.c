/*
 * save_versions - a trainer for tests: saves global_step1 ... global_stepN through the library, waits until they are
 * committed, and dies without closing its session.
 *
 *      save_versions NEBULA_COMMAND PERSIST_PATH|- INTERVAL_SECONDS N [FILE]
 *
 * FILE: the file's name. With FILE the program prints "saved" and lives until its standard input ends.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nebula.h"

static void demand(enum nebula_status status, const struct nebula_error *error)
{
        if (!status)
                return;
        fprintf(stderr, "save_versions: %s\n", error->message);
        exit(1);
}

int main(int argc, char **argv)
{
        static float values[100000];
        struct nebula_tensor tensor = { .name = "a", .dtype = NEBULA_DTYPE_F32, .dim_count = 1, .shape = { 100000 }, .data = values };
        struct nebula_options options;
        struct nebula_error error;
        nebula_session *session;

        if (argc != 5 && argc != 6)
                return 2;
        nebula_options_init(&options);
        options.agent_path = argv[1];
        options.persist_path = strcmp(argv[2], "-") ? argv[2] : NULL;
        options.persist_interval_s = atof(argv[3]);
        demand(nebula_session_open(&options, &session, &error), &error);
        for (int step = 1; step <= atoi(argv[4]); step++) {
                nebula_checkpoint *checkpoint;
                const char *name = argc > 5 ? argv[5] : "model.pt";
                char tag[64];

                snprintf(tag, sizeof tag, "global_step%d", step);
                values[0] = (float)step;
                demand(nebula_checkpoint_begin(session, tag, NEBULA_FILES_ALL_RANKS, &checkpoint, &error), &error);
                demand(nebula_checkpoint_save_tensors(checkpoint, name, &tensor, 1, &error), &error);
                demand(nebula_checkpoint_commit(checkpoint, &error), &error);
                demand(nebula_checkpoint_wait(checkpoint, NEBULA_STATE_COMMITTED, 20000, &error), &error);
                nebula_checkpoint_free(checkpoint);
        }
        if (argc > 5 && puts("saved") >= 0 && !fflush(stdout))
                getchar();
        _Exit(0);
}
