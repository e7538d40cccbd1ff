/*
 * Two ranks on two nodes of one machine: each has an agent and memory of its own. For test_installed.py.
 *
 *      two_nodes STORE save TAG VALUE STATE    each rank saves its row, and waits for the state
 *      two_nodes STORE half TAG VALUE          rank 0 does not commit, and the program ends when rank 1's agent has announced its part
 *      two_nodes STORE load                    each rank loads its row
 *
 * Each rank prints: rank, status, the value of its row, message.
 */
#include <nebula_mpi.h>

#include <glob.h>
#include <unistd.h>

#define COLUMNS (1 << 18)

static int rank;
static float row[COLUMNS];

static void become_a_node(const char *variable)
{
        char place[4096];

        snprintf(place, sizeof place, "%s-%d", getenv(variable), rank);
        setenv(variable, place, 1);
}

static enum nebula_status save(nebula_session *session, const char *tag, float value, nebula_checkpoint **ret_checkpoint, struct nebula_error *error)
{
        struct nebula_block block = { .dtype = NEBULA_DTYPE_F32, .dim_count = 2, .global = { 2, COLUMNS }, .from = { (uint64_t)rank }, .size = { 1, COLUMNS } };
        enum nebula_status status = nebula_mpi_begin(MPI_COMM_WORLD, session, tag, ret_checkpoint, error);

        for (int i = 0; i < COLUMNS; i++)
                row[i] = value;
        return status ? status : nebula_mpi_save_block(MPI_COMM_WORLD, *ret_checkpoint, "matrix", &block, row, error);
}

static void await_announcement(const char *store, const char *tag)
{
        char pattern[4096];
        glob_t found;

        snprintf(pattern, sizeof pattern, "%s/%s/.nebula/captured-*", store, tag);
        while (glob(pattern, 0, NULL, &found))
                usleep(10000);
        globfree(&found);
}

static enum nebula_status load(nebula_session *session, nebula_checkpoint **ret_checkpoint, struct nebula_error *error)
{
        struct nebula_block block = { .dtype = NEBULA_DTYPE_F32, .dim_count = 2, .global = { 2, COLUMNS }, .from = { (uint64_t)rank }, .size = { 1, COLUMNS } };
        enum nebula_status status = nebula_mpi_latest(MPI_COMM_WORLD, session, ret_checkpoint, error);

        return status ? status : nebula_mpi_load_block(MPI_COMM_WORLD, *ret_checkpoint, "matrix", &block, row, error);
}

int main(int argc, char **argv)
{
        struct nebula_error error = { 0 };
        struct nebula_options options;
        nebula_session *session;
        nebula_checkpoint *checkpoint = NULL;
        enum nebula_status status;

        MPI_Init(&argc, &argv);
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        become_a_node("NEBULA_RUNTIME_DIR"), become_a_node("NEBULA_MEMORY_DIR");
        nebula_options_init(&options);
        nebula_mpi_options(MPI_COMM_WORLD, &options);
        options.local_rank = 0, options.local_world = 1, options.persist_path = argv[1];
        if (argc < 3 || nebula_session_open(&options, &session, &error))
                MPI_Abort(MPI_COMM_WORLD, 2);
        if (!strcmp(argv[2], "load")) {
                status = load(session, &checkpoint, &error);
        } else {
                status = save(session, argv[3], strtof(argv[4], NULL), &checkpoint, &error);
                if (!status && (argc > 5 || rank == 1))
                        status = nebula_checkpoint_commit(checkpoint, &error);
                if (!status && argc > 5)
                        status = nebula_checkpoint_wait(checkpoint, !strcmp(argv[5], "durable") ? NEBULA_STATE_DURABLE : NEBULA_STATE_COMMITTED, 30000, &error);
                else if (!status && rank == 1)
                        await_announcement(argv[1], argv[3]);
        }
        printf("%d %s %g %s\n", rank, nebula_status_name(status), status ? 0.0 : (double)row[0], status ? error.message : nebula_checkpoint_tag(checkpoint)), fflush(stdout);
        MPI_Barrier(MPI_COMM_WORLD);
        nebula_checkpoint_free(checkpoint);
        nebula_session_close(session);
        MPI_Finalize();
        return 0;
}
