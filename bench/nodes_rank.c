/*
 * nodes_rank.c - one rank of the job that bench/nodes.py plays.
 *
 *      nodes_rank save RANK WORLD LOCAL_RANK LOCAL_WORLD PATH REPLICAS STEPS STATE
 *      nodes_rank load RANK WORLD LOCAL_RANK LOCAL_WORLD PATH REPLICAS
 *      nodes_rank write DIRECTORY NODE FILES STEPS
 *
 * STEPS is a number, or FIRST-LAST. NODES_RUN names the start of the job.
 *
 * `save` writes STEPS versions of one shard and waits for each to be STATE ("durable" or "replicated"). It prints a line per step: the
 * step, and when the save began, when it was committed by this rank, when the version was committed, and when STATE was reached, in
 * seconds since 1970. Then it waits for its standard input to end. `load` finds the newest version, reads this rank's
 * shard, checks it, and prints the step and when it had it.
 *
 * `write` is one node of the machine's limit. For each line of its input it writes as many files of a shard's size into the step's directory,
 * which all nodes share. It writes each with O_DIRECT under a temporary name, syncs it and renames it. At the end it syncs the directory, and
 * prints the time.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "nebula.h"

#define VALUE_COUNT (1u << 16) /* 256 KiB, so that the agreement between nodes is measured and not the disk */
#define TIMEOUT_MS 300000

static double now(void)
{
        struct timespec at;

        clock_gettime(CLOCK_REALTIME, &at);
        return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static int fail(const char *what, const struct nebula_error *error)
{
        printf("failed %s: %s\n", what, error->message);
        return 1;
}

static int save(nebula_session *session, uint32_t rank, const char *steps, enum nebula_state state)
{
        float *data = calloc(VALUE_COUNT, sizeof *data);
        struct nebula_tensor tensor = { .name = "x", .dtype = NEBULA_DTYPE_F32, .dim_count = 1, .shape = { VALUE_COUNT }, .data = data };
        struct nebula_error error = { 0 };
        char tag[32], name[32];
        int first = 1, last = 0;

        if (!data)
                return 1;
        if (sscanf(steps, "%d-%d", &first, &last) == 1) {
                last = first;
                first = 1;
        }
        snprintf(name, sizeof name, "shard%u.pt", rank);
        for (int step = first; step <= last; step++) {
                nebula_checkpoint *checkpoint;
                double begun = now(), saved, committed;

                snprintf(tag, sizeof tag, "global_step%d", step);
                data[0] = (float)step;
                if (nebula_checkpoint_begin(session, tag, NEBULA_FILES_ALL_RANKS, &checkpoint, &error) ||
                    nebula_checkpoint_save_tensors(checkpoint, name, &tensor, 1, &error) || nebula_checkpoint_commit(checkpoint, &error))
                        return fail("save", &error);
                saved = now();
                if (nebula_checkpoint_wait(checkpoint, NEBULA_STATE_COMMITTED, TIMEOUT_MS, &error))
                        return fail("wait for committed", &error);
                committed = now();
                if (nebula_checkpoint_wait(checkpoint, state, TIMEOUT_MS, &error))
                        return fail("wait", &error);
                printf("step %d %.4f %.4f %.4f %.4f\n", step, begun, saved, committed, now());
                fflush(stdout);
                nebula_checkpoint_free(checkpoint);
        }
        free(data);
        (void)getchar();
        return 0;
}

static int load(nebula_session *session, uint32_t rank)
{
        struct nebula_error error = { 0 };
        nebula_checkpoint *checkpoint;
        nebula_map *map;
        struct nebula_tensor tensor;
        char name[32];
        int step;

        snprintf(name, sizeof name, "shard%u.pt", rank);
        if (nebula_checkpoint_latest(session, NULL, &checkpoint, &error))
                return fail("search", &error);
        if (nebula_checkpoint_map(checkpoint, name, &map, &error) || nebula_map_tensor(map, "x", &tensor, &error))
                return fail("load", &error);
        if (sscanf(nebula_checkpoint_tag(checkpoint), "global_step%d", &step) != 1 || *(const float *)tensor.data != (float)step) {
                printf("failed load: the shard holds another step's value than %s\n", nebula_checkpoint_tag(checkpoint));
                return 1;
        }
        printf("loaded %d %.4f\n", step, now());
        nebula_map_free(map);
        nebula_checkpoint_free(checkpoint);
        return 0;
}

static int write_plainly(const char *directory, int node, int files, int steps)
{
        size_t size = VALUE_COUNT * sizeof(float);
        char place[256], temporary[300], name[300], line[16];
        void *data = aligned_alloc(4096, size);
        int folder, file;

        if (!data)
                return 1;
        memset(data, 1, size);
        for (int step = 1; step <= steps && fgets(line, sizeof line, stdin); step++) {
                snprintf(place, sizeof place, "%s.%d", directory, step);
                if ((mkdir(place, 0700) && errno != EEXIST) || (folder = open(place, O_RDONLY | O_DIRECTORY)) < 0)
                        goto failed;
                for (int i = 0; i < files; i++) {
                        snprintf(temporary, sizeof temporary, "%s/.tmp%d-%d", place, node, i);
                        snprintf(name, sizeof name, "%s/shard%d-%d.pt", place, node, i);
                        file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_DIRECT, 0600);
                        if (file < 0 || write(file, data, size) != (ssize_t)size || fdatasync(file) || close(file) || rename(temporary, name))
                                goto failed;
                }
                if (fsync(folder) || close(folder))
                        goto failed;
                printf("step %d %.4f\n", step, now());
                fflush(stdout);
        }
        free(data);
        return 0;
failed:
        printf("failed: %m\n");
        return 1;
}

int main(int argc, char **argv)
{
        struct nebula_options options;
        struct nebula_error error = { 0 };
        nebula_session *session;
        int saving = argc == 10 && !strcmp(argv[1], "save"), result;

        if (argc == 6 && !strcmp(argv[1], "write"))
                return write_plainly(argv[2], atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
        if (!saving && !(argc == 8 && !strcmp(argv[1], "load"))) {
                fprintf(stderr, "usage: see the head of nodes_rank.c\n");
                return 2;
        }
        nebula_options_init(&options);
        options.rank = (uint32_t)atoi(argv[2]);
        options.world = (uint32_t)atoi(argv[3]);
        options.local_rank = (uint32_t)atoi(argv[4]);
        options.local_world = (uint32_t)atoi(argv[5]);
        options.persist_path = argv[6];
        options.replica_count = (uint32_t)atoi(argv[7]);
        options.run = getenv("NODES_RUN") ? getenv("NODES_RUN") : saving ? "run1" : "run2";
        /* Versions that wait for replication only stay in memory, so that storage cannot help after a loss of nodes. */
        options.persist_interval_s = saving && !strcmp(argv[9], "replicated") ? 1e6 : 0;
        if (nebula_session_open(&options, &session, &error))
                return fail("open", &error);
        result = saving ? save(session, options.rank, argv[8],
                               strcmp(argv[9], "replicated") ? NEBULA_STATE_DURABLE : NEBULA_STATE_REPLICATED) :
                          load(session, options.rank);
        nebula_session_close(session);
        return result;
}
