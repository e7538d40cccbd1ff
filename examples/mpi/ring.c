/*
 * ring: each rank of an MPI job heats its part of a ring, and exchanges borders with its neighbours. It saves every 50 steps, and
 * continues exactly where the job was killed. See README.md.
 */
#include <mpi.h>
#include <nebula.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CELLS 1000 /* of each rank */
#define STEPS 400
#define SAVE_EVERY 50

static int rank, world;

static void check(enum nebula_status status, const struct nebula_error *error)
{
        if (status == NEBULA_OK)
                return;
        fprintf(stderr, "ring: rank %d: %s\n", rank, error->message);
        MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Ranks of one node share an agent, which waits for all of them before a checkpoint is complete. */
static nebula_session *open_session(const char *path)
{
        struct nebula_options options;
        struct nebula_error error;
        nebula_session *session = NULL;
        MPI_Comm node;
        int local_rank, local_world;

        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
        MPI_Comm_rank(node, &local_rank);
        MPI_Comm_size(node, &local_world);
        MPI_Comm_free(&node);
        nebula_options_init(&options);
        options.persist_path = path;
        options.rank = (uint32_t)rank, options.world = (uint32_t)world;
        options.local_rank = (uint32_t)local_rank, options.local_world = (uint32_t)local_world;
        check(nebula_session_open(&options, &session, &error), &error);
        return session;
}

static void file_name(char text[32])
{
        snprintf(text, 32, "ring-%d.pt", rank);
}

static void save(nebula_session *session, const double *heat, long step)
{
        const struct nebula_tensor tensor = { .name = "heat", .dtype = NEBULA_DTYPE_F64, .dim_count = 1, .shape = { CELLS }, .data = heat };
        struct nebula_error error;
        nebula_checkpoint *checkpoint = NULL;
        char tag[32], name[32];

        snprintf(tag, sizeof tag, "step%ld", step);
        file_name(name);
        check(nebula_checkpoint_begin(session, tag, NEBULA_FILES_ALL_RANKS, &checkpoint, &error), &error);
        check(nebula_checkpoint_save_tensors(checkpoint, name, &tensor, 1, &error), &error);
        check(nebula_checkpoint_commit(checkpoint, &error), &error);
        nebula_checkpoint_free(checkpoint);
}

/* Rank 0 finds the newest complete checkpoint, and all load that one. Returns its step; 0: there is none. */
static long resume(nebula_session *session, double *heat)
{
        struct nebula_error error;
        nebula_checkpoint *checkpoint = NULL;
        nebula_map *map = NULL;
        struct nebula_tensor found;
        char tag[256] = "", name[32];

        if (rank == 0) {
                enum nebula_status status = nebula_checkpoint_latest(session, NULL, &checkpoint, &error);

                if (status == NEBULA_OK)
                        snprintf(tag, sizeof tag, "%s", nebula_checkpoint_tag(checkpoint));
                else if (status != NEBULA_NOT_FOUND)
                        check(status, &error);
                nebula_checkpoint_free(checkpoint);
        }
        MPI_Bcast(tag, sizeof tag, MPI_CHAR, 0, MPI_COMM_WORLD);
        if (!tag[0])
                return 0;
        file_name(name);
        check(nebula_checkpoint_find(session, tag, NULL, &checkpoint, &error), &error);
        check(nebula_checkpoint_map(checkpoint, name, &map, &error), &error);
        check(nebula_map_tensor(map, "heat", &found, &error), &error);
        memcpy(heat, found.data, CELLS * sizeof *heat);
        nebula_map_free(map);
        nebula_checkpoint_free(checkpoint);
        return strtol(tag + strlen("step"), NULL, 10);
}

static void advance(double *heat)
{
        double old[CELLS + 2];
        int left = (rank + world - 1) % world, right = (rank + 1) % world;

        memcpy(old + 1, heat, CELLS * sizeof *heat);
        MPI_Sendrecv(heat + CELLS - 1, 1, MPI_DOUBLE, right, 0, old, 1, MPI_DOUBLE, left, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Sendrecv(heat, 1, MPI_DOUBLE, left, 1, old + CELLS + 1, 1, MPI_DOUBLE, right, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int i = 0; i < CELLS; i++)
                heat[i] = old[i + 1] + 0.25 * (old[i] - 2 * old[i + 1] + old[i + 2]);
}

int main(int argc, char **argv)
{
        static double heat[CELLS];
        struct nebula_error error;
        double sum = 0, total;
        long step;

        MPI_Init(&argc, &argv);
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &world);
        if (argc < 2 || argc > 3) {
                fprintf(stderr, "usage: ring DIRECTORY [STEP IN WHICH THE LAST RANK KILLS ITSELF]\n");
                MPI_Abort(MPI_COMM_WORLD, 2);
        }
        long crash_at = argc > 2 ? strtol(argv[2], NULL, 10) : 0;
        nebula_session *session = open_session(argv[1]);

        for (int i = 0; i < CELLS; i++)
                heat[i] = (double)((rank * CELLS + i) % 17);
        step = resume(session, heat);
        if (rank == 0)
                printf("%s from step %ld\n", step ? "resuming" : "starting", step), fflush(stdout);
        while (step < STEPS) {
                advance(heat);
                step++;
                if (step == crash_at && rank == world - 1)
                        raise(SIGKILL);
                if (step % SAVE_EVERY == 0)
                        save(session, heat, step);
        }
        check(nebula_session_flush(session, NULL, 60000, &error), &error);
        nebula_session_close(session);
        for (int i = 0; i < CELLS; i++)
                sum += heat[i] * (i % 7 + 1);
        MPI_Reduce(&sum, &total, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
        if (rank == 0)
                printf("step %ld checksum %a\n", step, total);
        MPI_Finalize();
        return 0;
}
