/*
 * A mini-app: five fields of a gas on a grid of blocks, advanced by a stencil of seven points, whose ranks exchange borders, and which saves
 * every few steps by one of several libraries. `make bench-mpi` compiles it once for each library; see bench/mpi.py.
 *
 *     miniapp PLACE CELLS STEPS SAVE_EVERY WAITS CRASH_AT
 *
 * CELLS: of each edge of the grid. WAITS 1: it waits after each save until the version is durable. CRASH_AT: the last rank kills itself in that
 * step; 0: never. Rank 0 prints one line of JSON.
 */
#include <fcntl.h>
#include <ftw.h>
#include <mpi.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FIELDS 5
#define SAVES_MAX 256

struct grid {
        size_t edge, plane, layers, from; /* this rank has `layers` planes from plane `from` */
        double *now[FIELDS], *next[FIELDS];
        long step;
};

static int rank, world;
static const char *place;

static void check(int is_well, const char *what)
{
        if (is_well)
                return;
        fprintf(stderr, "miniapp: rank %d: %s\n", rank, what);
        MPI_Abort(MPI_COMM_WORLD, 1);
}

/* The calls of a library. library_wait returns when the library says that the newest version is stored. */
static void library_open(struct grid *grid);
static int library_resume(struct grid *grid);
static void library_save(struct grid *grid);
static void library_wait(void);
static void library_close(void);

#if defined(WITH_NEBULA)
#include <nebula_mpi.h>

static nebula_session *session;
static nebula_checkpoint *newest;
static struct nebula_error error;
static const char *const names[FIELDS] = { "density", "energy", "x", "y", "z" };

static struct nebula_block block_of(const struct grid *grid)
{
        return (struct nebula_block){ .dtype = NEBULA_DTYPE_F64, .dim_count = 3, .global = { grid->edge, grid->edge, grid->edge },
                                      .from = { grid->from }, .size = { grid->layers, grid->edge, grid->edge } };
}

static void library_open(struct grid *grid)
{
        (void)grid;
        check(nebula_mpi_open(MPI_COMM_WORLD, place, &session, &error) == NEBULA_OK, error.message);
}

static int library_resume(struct grid *grid)
{
        struct nebula_block block = block_of(grid);
        nebula_checkpoint *found;
        enum nebula_status status = nebula_mpi_latest(MPI_COMM_WORLD, session, &found, &error);

        if (status == NEBULA_NOT_FOUND)
                return 0;
        check(status == NEBULA_OK, error.message);
        for (int i = 0; i < FIELDS; i++)
                check(nebula_mpi_load_block(MPI_COMM_WORLD, found, names[i], &block, grid->now[i] + grid->plane, &error) == NEBULA_OK, error.message);
        grid->step = strtol(nebula_checkpoint_tag(found) + strlen("step"), NULL, 10);
        nebula_checkpoint_free(found);
        return 1;
}

static void library_save(struct grid *grid)
{
        struct nebula_block block = block_of(grid);
        char tag[32];

        nebula_checkpoint_free(newest);
        snprintf(tag, sizeof tag, "step%ld", grid->step);
        check(nebula_mpi_begin(MPI_COMM_WORLD, session, tag, &newest, &error) == NEBULA_OK, error.message);
        for (int i = 0; i < FIELDS; i++)
                check(nebula_mpi_save_block(MPI_COMM_WORLD, newest, names[i], &block, grid->now[i] + grid->plane, &error) == NEBULA_OK, error.message);
        check(nebula_mpi_commit(MPI_COMM_WORLD, newest, &error) == NEBULA_OK, error.message);
}

static void library_wait(void)
{
        check(nebula_checkpoint_wait(newest, NEBULA_STATE_DURABLE, 120000, &error) == NEBULA_OK, error.message);
}

static void library_close(void)
{
        nebula_checkpoint_free(newest);
        nebula_session_close(session);
}

#elif defined(WITH_VELOC)
#include <veloc.h>

static int version;

static void library_open(struct grid *grid)
{
        check(VELOC_Init(MPI_COMM_WORLD, getenv("VELOC_CONFIG")) == VELOC_SUCCESS, "VELOC_Init failed");
        VELOC_Mem_protect(FIELDS, &grid->step, 1, sizeof grid->step);
}

static void protect(struct grid *grid)
{
        for (int i = 0; i < FIELDS; i++)
                VELOC_Mem_protect(i, grid->now[i] + grid->plane, grid->layers * grid->plane, sizeof(double));
}

static int library_resume(struct grid *grid)
{
        version = VELOC_Restart_test("miniapp", 0);
        if (version <= 0)
                return 0;
        protect(grid);
        check(VELOC_Restart("miniapp", version) == VELOC_SUCCESS, "VELOC_Restart failed");
        return 1;
}

static void library_save(struct grid *grid)
{
        protect(grid); /* the fields change places with those of the step before */
        check(VELOC_Checkpoint("miniapp", (int)grid->step) == VELOC_SUCCESS, "VELOC_Checkpoint failed");
}

static void library_wait(void)
{
        check(VELOC_Checkpoint_wait() == VELOC_SUCCESS, "VELOC_Checkpoint_wait failed");
}

static void library_close(void)
{
        VELOC_Finalize(0);
}

#else /* SCR, and plain files, are files that the program itself writes */
#if defined(WITH_SCR)
#include <scr.h>
#endif

static void transfer(struct grid *grid, const char *path, int writes)
{
        FILE *file = fopen(path, writes ? "w" : "r");
        size_t count = grid->layers * grid->plane, done;

        check(file != NULL, path);
        setvbuf(file, NULL, _IONBF, 0);
        done = writes ? fwrite(&grid->step, sizeof grid->step, 1, file) : fread(&grid->step, sizeof grid->step, 1, file);
        for (int i = 0; i < FIELDS; i++) {
                double *data = grid->now[i] + grid->plane;

                done += writes ? fwrite(data, sizeof *data, count, file) : fread(data, sizeof *data, count, file);
        }
        check(done == 1 + FIELDS * count && fclose(file) == 0, path);
}

#if defined(WITH_SCR)
static void library_open(struct grid *grid)
{
        (void)grid;
        check(SCR_Init() == SCR_SUCCESS, "SCR_Init failed");
}

static int library_resume(struct grid *grid)
{
        char name[SCR_MAX_FILENAME], file[SCR_MAX_FILENAME];
        int found = 0;

        SCR_Have_restart(&found, name);
        if (!found)
                return 0;
        SCR_Start_restart(name);
        snprintf(name, sizeof name, "rank%d", rank);
        check(SCR_Route_file(name, file) == SCR_SUCCESS, "SCR_Route_file failed");
        transfer(grid, file, 0);
        check(SCR_Complete_restart(1) == SCR_SUCCESS, "SCR_Complete_restart failed");
        return 1;
}

static void library_save(struct grid *grid)
{
        char name[SCR_MAX_FILENAME], file[SCR_MAX_FILENAME];

        snprintf(name, sizeof name, "step%ld", grid->step);
        check(SCR_Start_output(name, SCR_FLAG_CHECKPOINT) == SCR_SUCCESS, "SCR_Start_output failed");
        snprintf(name, sizeof name, "%s/step%ld/rank%d", place, grid->step, rank);
        check(SCR_Route_file(name, file) == SCR_SUCCESS, "SCR_Route_file failed");
        transfer(grid, file, 1);
        check(SCR_Complete_output(1) == SCR_SUCCESS, "SCR_Complete_output failed");
}

static void library_wait(void) /* SCR_FLUSH_ASYNC=0: SCR_Complete_output has waited */
{
}

static void library_close(void)
{
        SCR_Finalize();
}
#else
static void library_open(struct grid *grid)
{
        (void)grid;
}

static void path_of(char *path, size_t size, const char *end)
{
        snprintf(path, size, "%s/rank%d%s", place, rank, end);
}

static int library_resume(struct grid *grid)
{
        char path[4096];
        int found;

        path_of(path, sizeof path, "");
        found = access(path, R_OK) == 0;
        if (found)
                transfer(grid, path, 0);
        return found;
}

static void library_save(struct grid *grid)
{
        char path[4096], made[4096];

        path_of(path, sizeof path, "");
        path_of(made, sizeof made, ".new");
        transfer(grid, made, 1);
        check(rename(made, path) == 0, path);
}

static void library_wait(void)
{
}

static void library_close(void)
{
}
#endif
#endif

static void exchange(const struct grid *grid, double *field)
{
        int before = (rank + world - 1) % world, after = (rank + 1) % world, count = (int)grid->plane;
        double *last = field + grid->layers * grid->plane;

        MPI_Sendrecv(last, count, MPI_DOUBLE, after, 0, field, count, MPI_DOUBLE, before, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Sendrecv(field + grid->plane, count, MPI_DOUBLE, before, 1, last + grid->plane, count, MPI_DOUBLE, after, 1, MPI_COMM_WORLD,
                     MPI_STATUS_IGNORE);
}

/* Each field spreads to its neighbours, and is driven by the next field; the grid is a torus. */
static void advance(struct grid *grid)
{
        size_t edge = grid->edge, plane = grid->plane;

        for (int i = 0; i < FIELDS; i++)
                exchange(grid, grid->now[i]);
        for (int i = 0; i < FIELDS; i++) {
                const double *field = grid->now[i], *driver = grid->now[(i + 1) % FIELDS];
                double *next = grid->next[i];

                for (size_t z = 1; z <= grid->layers; z++)
                        for (size_t y = 0; y < edge; y++) {
                                const double *row = field + z * plane + y * edge;
                                const double *up = field + z * plane + (y ? y - 1 : edge - 1) * edge;
                                const double *down = field + z * plane + (y + 1 < edge ? y + 1 : 0) * edge;

                                for (size_t x = 0; x < edge; x++) {
                                        double near = row[x ? x - 1 : edge - 1] + row[x + 1 < edge ? x + 1 : 0] + up[x] + down[x] +
                                                      row[x - plane] + row[x + plane];

                                        next[z * plane + y * edge + x] = 0.4 * row[x] + 0.099 * near + 0.001 * driver[z * plane + y * edge + x];
                                }
                        }
        }
        for (int i = 0; i < FIELDS; i++) {
                double *old = grid->now[i];

                grid->now[i] = grid->next[i];
                grid->next[i] = old;
        }
        grid->step++;
}

static void begin(struct grid *grid, size_t edge)
{
        grid->edge = edge;
        grid->plane = edge * edge;
        grid->from = edge * (size_t)rank / (size_t)world;
        grid->layers = edge * ((size_t)rank + 1) / (size_t)world - grid->from;
        for (int i = 0; i < FIELDS; i++) {
                grid->now[i] = malloc((grid->layers + 2) * grid->plane * sizeof(double));
                grid->next[i] = malloc((grid->layers + 2) * grid->plane * sizeof(double));
                check(grid->now[i] && grid->next[i], "no memory");
                for (size_t k = 0; k < (grid->layers + 2) * grid->plane; k++)
                        grid->now[i][k] = grid->next[i][k] = (double)((grid->from * grid->plane + k) * (size_t)(i + 3) % 1009);
        }
}

/* The same for any number of ranks. */
static uint64_t checksum(const struct grid *grid)
{
        uint64_t own = 0, sum = 0;

        for (int i = 0; i < FIELDS; i++)
                for (size_t k = 0; k < grid->layers * grid->plane; k++) {
                        uint64_t bits;

                        memcpy(&bits, grid->now[i] + grid->plane + k, sizeof bits);
                        own += bits * ((grid->from * grid->plane + k) * FIELDS + (size_t)i + 1);
                }
        MPI_Allreduce(&own, &sum, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
        return sum;
}

static int sync_one(const char *path, const struct stat *about, int kind, struct FTW *where)
{
        int file = kind == FTW_F || kind == FTW_DP ? open(path, O_RDONLY) : -1;

        (void)about, (void)where;
        if (file >= 0) {
                fsync(file);
                close(file);
        }
        return 0;
}

/* Libraries that sync nothing get what they lack; files that are synced already cost next to nothing. */
static void sync_storage(void)
{
        if (rank == 0)
                nftw(place, sync_one, 64, FTW_PHYS | FTW_DEPTH);
        MPI_Barrier(MPI_COMM_WORLD);
}

static double slowest(double begun)
{
        double own = MPI_Wtime() - begun, most;

        MPI_Allreduce(&own, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        return most;
}

static void print(const char *name, const double *seconds, int count)
{
        printf("\"%s\": [", name);
        for (int i = 0; i < count; i++)
                printf("%s%.6f", i ? ", " : "", seconds[i]);
        printf("], ");
}

int main(int argc, char **argv)
{
        static double blocked[SAVES_MAX], durable[SAVES_MAX];
        static struct grid grid;
        int count = 0, waits, resumed, provided;
        long steps, every, crash_at, from;
        double begun, seconds;
        uint64_t sum;

        MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &world);
        check(argc == 7, "usage: miniapp PLACE CELLS STEPS SAVE_EVERY WAITS CRASH_AT");
        place = argv[1];
        steps = atol(argv[3]), every = atol(argv[4]), waits = atoi(argv[5]), crash_at = atol(argv[6]);
        begin(&grid, (size_t)atol(argv[2]));
        library_open(&grid);
        resumed = library_resume(&grid);
        from = grid.step;
        MPI_Barrier(MPI_COMM_WORLD);
        begun = MPI_Wtime();
        while (grid.step < steps) {
                double call;

                advance(&grid);
                if (grid.step == crash_at && rank == world - 1)
                        raise(SIGKILL);
                if (!every || grid.step % every || count == SAVES_MAX)
                        continue;
                MPI_Barrier(MPI_COMM_WORLD);
                call = MPI_Wtime();
                library_save(&grid);
                blocked[count] = slowest(call);
                if (waits) {
                        library_wait();
                        sync_storage();
                        durable[count] = slowest(call);
                }
                count++;
        }
        seconds = slowest(begun);
        sum = checksum(&grid);
        library_close();
        if (rank == 0) {
                printf("{");
                print("blocked", blocked, count);
                print("durable", durable, waits ? count : 0);
                printf("\"resumed\": %d, \"from\": %ld, \"seconds\": %.6f, \"sum\": \"%016llx\"}\n", resumed, from, seconds, (unsigned long long)sum);
        }
        MPI_Finalize();
        return 0;
}
