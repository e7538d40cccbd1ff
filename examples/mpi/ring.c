/*
 * ring: the ranks of an MPI job heat a ring, each its part, and exchange borders with their neighbours. They save every 50 steps, and
 * continue exactly where the job was killed, also on another number of ranks. See README.md.
 */
#include <nebula_mpi.h>

#include <signal.h>
#include <stdint.h>

#define CELLS 5000 /* of all ranks */
#define STEPS 400
#define SAVE_EVERY 50

static int rank, world;

static void check(enum nebula_status status, const struct nebula_error *error)
{
        if (status == NEBULA_OK)
                return;
        if (rank == 0)
                fprintf(stderr, "ring: %s\n", error->message);
        MPI_Abort(MPI_COMM_WORLD, 1);
}

static struct nebula_block own_part(void)
{
        uint64_t from = (uint64_t)CELLS * rank / world, end = (uint64_t)CELLS * (rank + 1) / world;

        return (struct nebula_block){ .dtype = NEBULA_DTYPE_F64, .dim_count = 1, .global = { CELLS }, .from = { from }, .size = { end - from } };
}

static void save(nebula_session *session, const struct nebula_block *part, const double *heat, long step)
{
        struct nebula_error error;
        nebula_checkpoint *checkpoint;
        char tag[32];

        snprintf(tag, sizeof tag, "step%ld", step);
        check(nebula_mpi_begin(MPI_COMM_WORLD, session, tag, &checkpoint, &error), &error);
        check(nebula_mpi_save_block(MPI_COMM_WORLD, checkpoint, "heat", part, heat, &error), &error);
        check(nebula_mpi_commit(MPI_COMM_WORLD, checkpoint, &error), &error);
        nebula_checkpoint_free(checkpoint);
}

/* Returns the step of the newest complete checkpoint; 0: there is none. */
static long resume(nebula_session *session, const struct nebula_block *part, double *heat)
{
        struct nebula_error error;
        nebula_checkpoint *checkpoint;
        enum nebula_status status = nebula_mpi_latest(MPI_COMM_WORLD, session, &checkpoint, &error);
        long step;

        if (status == NEBULA_NOT_FOUND)
                return 0;
        check(status, &error);
        check(nebula_mpi_load_block(MPI_COMM_WORLD, checkpoint, "heat", part, heat, &error), &error);
        step = strtol(nebula_checkpoint_tag(checkpoint) + strlen("step"), NULL, 10);
        nebula_checkpoint_free(checkpoint);
        return step;
}

static void advance(double *heat, int count)
{
        static double old[CELLS + 2];
        int left = (rank + world - 1) % world, right = (rank + 1) % world;

        memcpy(old + 1, heat, (size_t)count * sizeof *heat);
        MPI_Sendrecv(heat + count - 1, 1, MPI_DOUBLE, right, 0, old, 1, MPI_DOUBLE, left, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Sendrecv(heat, 1, MPI_DOUBLE, left, 1, old + count + 1, 1, MPI_DOUBLE, right, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int i = 0; i < count; i++)
                heat[i] = old[i + 1] + 0.25 * (old[i] - 2 * old[i + 1] + old[i + 2]);
}

/* The same for any number of ranks: a sum of the bits of all cells. */
static uint64_t checksum(const double *heat, const struct nebula_block *part)
{
        uint64_t sum = 0, total, bits;

        for (uint64_t i = 0; i < part->size[0]; i++) {
                memcpy(&bits, &heat[i], sizeof bits);
                sum += bits * (2 * (part->from[0] + i) + 1);
        }
        MPI_Allreduce(&sum, &total, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
        return total;
}

int main(int argc, char **argv)
{
        static double heat[CELLS];
        struct nebula_error error;
        struct nebula_block part;
        nebula_session *session;
        uint64_t sum;
        long step, crash_at;

        MPI_Init(&argc, &argv);
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &world);
        if (argc < 2 || argc > 3) {
                fprintf(stderr, "usage: ring DIRECTORY [STEP IN WHICH THE LAST RANK KILLS ITSELF]\n");
                MPI_Abort(MPI_COMM_WORLD, 2);
        }
        crash_at = argc > 2 ? strtol(argv[2], NULL, 10) : 0;
        part = own_part();
        check(nebula_mpi_open(MPI_COMM_WORLD, argv[1], &session, &error), &error);
        for (uint64_t i = 0; i < part.size[0]; i++)
                heat[i] = (double)((part.from[0] + i) % 17);
        step = resume(session, &part, heat);
        if (rank == 0)
                printf("%s from step %ld\n", step ? "resuming" : "starting", step), fflush(stdout);
        while (step < STEPS) {
                advance(heat, (int)part.size[0]);
                step++;
                if (step == crash_at && rank == world - 1)
                        raise(SIGKILL);
                if (step % SAVE_EVERY == 0)
                        save(session, &part, heat, step);
        }
        check(nebula_mpi_agree(MPI_COMM_WORLD, nebula_session_flush(session, NULL, 60000, &error), &error), &error);
        nebula_session_close(session);
        sum = checksum(heat, &part);
        if (rank == 0)
                printf("step %ld checksum %016llx\n", step, (unsigned long long)sum);
        MPI_Finalize();
        return 0;
}
