/* Saves a matrix by rows, or loads it by columns, and prints for each rank: rank, status, wrong elements, message. For test_installed.py. */
#include <nebula_mpi.h>

#define ROWS 7
#define COLUMNS 11

/* Each rank has some rows, or some columns; of more than ROWS ranks some have no row. */
static struct nebula_block part_of(int rank, int world, int dimension)
{
        struct nebula_block made = { .dtype = NEBULA_DTYPE_F32, .dim_count = 2, .global = { ROWS, COLUMNS }, .size = { ROWS, COLUMNS } };

        made.global[2] = (uint64_t)rank; /* beyond dim_count: has no meaning */
        made.from[dimension] = made.global[dimension] * (uint64_t)rank / (uint64_t)world;
        made.size[dimension] = made.global[dimension] * ((uint64_t)rank + 1) / (uint64_t)world - made.from[dimension];
        return made;
}

/* A file that names the whole matrix, and has one row of it. */
static enum nebula_status save_less(nebula_checkpoint *checkpoint, const struct nebula_block *block, const float *data, struct nebula_error *error)
{
        struct nebula_tensor tensors[2] = { { .name = "block", .dtype = NEBULA_DTYPE_I64, .dim_count = 1, .shape = { NEBULA_MPI_NUMBERS } },
                                            { .name = "data", .dtype = NEBULA_DTYPE_F32, .dim_count = 2, .shape = { 1, COLUMNS }, .data = data } };
        int64_t numbers[NEBULA_MPI_NUMBERS];

        nebula_mpi_describe(block, 1, numbers);
        tensors[0].data = numbers;
        return nebula_checkpoint_save_tensors(checkpoint, "matrix.0", tensors, 2, error);
}

static char name[202] = "matrix";

static enum nebula_status save(nebula_session *session, const struct nebula_block *block, int is_less, float *data, struct nebula_error *error)
{
        nebula_checkpoint *checkpoint;
        enum nebula_status status;

        for (uint64_t i = 0; i < block->size[0]; i++)
                for (uint64_t k = 0; k < COLUMNS; k++)
                        data[i * COLUMNS + k] = (float)((block->from[0] + i) * 100 + k);
        status = nebula_mpi_begin(MPI_COMM_WORLD, session, "step1", &checkpoint, error);
        if (!status && is_less)
                status = save_less(checkpoint, block, data, error);
        else if (!status)
                status = nebula_mpi_save_block(MPI_COMM_WORLD, checkpoint, name, block, data, error);
        if (!status)
                status = nebula_mpi_commit(MPI_COMM_WORLD, checkpoint, error);
        if (!status)
                status = nebula_mpi_agree(MPI_COMM_WORLD, nebula_checkpoint_wait(checkpoint, NEBULA_STATE_DURABLE, 60000, error), error);
        nebula_checkpoint_free(checkpoint);
        return status;
}

static enum nebula_status load(nebula_session *session, const struct nebula_block *block, float *data, int *ret_wrong, struct nebula_error *error)
{
        nebula_checkpoint *checkpoint;
        enum nebula_status status = nebula_mpi_latest(MPI_COMM_WORLD, session, &checkpoint, error);

        if (!status)
                status = nebula_mpi_load_block(MPI_COMM_WORLD, checkpoint, name, block, data, error);
        for (uint64_t i = 0; i < ROWS && !status; i++)
                for (uint64_t k = 0; k < block->size[1]; k++)
                        *ret_wrong += data[i * block->size[1] + k] != (float)(i * 100 + block->from[1] + k);
        nebula_checkpoint_free(checkpoint);
        return status;
}

int main(int argc, char **argv)
{
        static float data[ROWS * COLUMNS];
        struct nebula_error error = { 0 };
        struct nebula_block block;
        nebula_session *session;
        enum nebula_status status;
        int rank, world, wrong = 0, is_save, is_less;

        MPI_Init(&argc, &argv);
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &world);
        if (argc != 3 || nebula_mpi_open(MPI_COMM_WORLD, argv[1], &session, &error))
                MPI_Abort(MPI_COMM_WORLD, 2);
        is_less = !strcmp(argv[2], "save less");
        is_save = !strncmp(argv[2], "save", 4);
        if (strstr(argv[2], "long name"))
                memset(name, 'm', sizeof name - 1);
        block = part_of(rank, world, !is_save);
        if (!strcmp(argv[2], "save overlaps") || !strcmp(argv[2], "save a gap"))
                block.size[0] += rank < world - 1; /* the first row of the next rank, too */
        if (!strcmp(argv[2], "save a gap"))
                block.size[0] -= rank == world - 1; /* no rank has the last row */
        if (!strcmp(argv[2], "another type") && rank == world - 1)
                block.dtype = NEBULA_DTYPE_F64;
        status = is_save ? save(session, &block, is_less, data, &error) : load(session, &block, data, &wrong, &error);
        printf("%d %s %d %s\n", rank, nebula_status_name(status), wrong, status ? error.message : "");
        nebula_session_close(session);
        MPI_Finalize();
        return 0;
}
