/*
 * heat.c - a program that computes for long and does not lose its work.
 *
 * Heat spreads over a square plate whose upper edge is hot. The program saves
 * the plate every few steps. A run that was killed continues from the newest
 * complete checkpoint, and ends with the same checksum as an undisturbed run.
 *
 *      heat --path /scratch/heat                   runs to the end
 *      heat --path /scratch/heat --crash-at 700    kills itself in step 700
 *      heat --path /scratch/heat                   continues where it was
 *
 * The files are torch files: torch.load("/scratch/heat/step1000/plate.pt").
 */
#include <inttypes.h>
#include <limits.h>
#include <nebula.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FILE_NAME "plate.pt"

struct settings {
        const char *path; /* NULL: checkpoints stay in memory */
        long size, steps, save_every, crash_at;
};

struct plate {
        uint64_t size;
        int64_t step;
        double *now, *next; /* size x size */
};

static bool plate_init(struct plate *plate, uint64_t size)
{
        *plate = (struct plate){ .size = size, .now = calloc(size * size, sizeof(double)),
                                 .next = calloc(size * size, sizeof(double)) };
        if (!plate->now || !plate->next)
                return false;
        for (uint64_t x = 0; x < size; x++)
                plate->now[x] = plate->next[x] = 100;
        return true;
}

static void plate_done(struct plate *plate)
{
        free(plate->now);
        free(plate->next);
}

static void plate_step(struct plate *plate)
{
        uint64_t n = plate->size;
        const double *now = plate->now;
        double *swap;

        for (uint64_t y = 1; y + 1 < n; y++) {
                for (uint64_t x = 1; x + 1 < n; x++) {
                        uint64_t i = y * n + x;

                        plate->next[i] = now[i] + 0.2 * (now[i - 1] + now[i + 1] + now[i - n] + now[i + n] - 4 * now[i]);
                }
        }
        swap = plate->now;
        plate->now = plate->next;
        plate->next = swap;
        plate->step++;
}

/* FNV-1a over the bits of every value: one different bit gives another number. */
static uint64_t plate_checksum(const struct plate *plate)
{
        const unsigned char *bytes = (const unsigned char *)plate->now;
        uint64_t sum = 0xcbf29ce484222325u;

        for (uint64_t i = 0; i < plate->size * plate->size * sizeof(double); i++)
                sum = (sum ^ bytes[i]) * 0x100000001b3u;
        return sum;
}

/* A failed checkpoint must not end the computation: the program prints the failure, and the next one may succeed. */
static bool plate_save(struct plate *plate, nebula_session *session)
{
        struct nebula_tensor tensors[] = {
                { .name = "u", .dtype = NEBULA_DTYPE_F64, .dim_count = 2, .shape = { plate->size, plate->size },
                  .data = plate->now },
                { .name = "step", .dtype = NEBULA_DTYPE_I64, .dim_count = 0, .data = &plate->step },
        };
        nebula_checkpoint *checkpoint = NULL;
        struct nebula_error error;
        enum nebula_status status;
        char tag[32];

        snprintf(tag, sizeof tag, "step%" PRId64, plate->step);
        status = nebula_checkpoint_begin(session, tag, 1, &checkpoint, &error);
        if (status == NEBULA_OK)
                status = nebula_checkpoint_save_tensors(checkpoint, FILE_NAME, tensors, 2, &error);
        if (status == NEBULA_OK)
                status = nebula_checkpoint_commit(checkpoint, &error);
        if (status != NEBULA_OK)
                fprintf(stderr, "heat: %s was not saved: %s\n", tag, error.message);
        nebula_checkpoint_free(checkpoint);
        return status == NEBULA_OK;
}

/* Reads the plate from a mapped file. */
static enum nebula_status plate_read(struct plate *plate, const nebula_map *map, struct nebula_error *error)
{
        struct nebula_tensor u, step;
        enum nebula_status status;

        status = nebula_map_tensor(map, "u", &u, error);
        if (status == NEBULA_OK)
                status = nebula_map_tensor(map, "step", &step, error);
        if (status != NEBULA_OK)
                return status;
        if (u.dtype != NEBULA_DTYPE_F64 || u.dim_count != 2 || u.shape[0] != plate->size || u.shape[1] != plate->size ||
            step.dtype != NEBULA_DTYPE_I64 || step.dim_count != 0) {
                snprintf(error->message, sizeof error->message, "the checkpoint is of a plate of another size");
                return NEBULA_INVALID;
        }
        memcpy(plate->now, u.data, plate->size * plate->size * sizeof(double));
        memcpy(&plate->step, step.data, sizeof plate->step);
        return NEBULA_OK;
}

static bool plate_resume(struct plate *plate, nebula_session *session)
{
        nebula_checkpoint *checkpoint = NULL;
        nebula_map *map = NULL;
        struct nebula_error error;
        enum nebula_status status;

        status = nebula_checkpoint_latest(session, NULL, &checkpoint, &error);
        if (status == NEBULA_NOT_FOUND) {
                printf("starting from step 0\n");
                return true;
        }
        if (status == NEBULA_OK)
                status = nebula_checkpoint_map(checkpoint, FILE_NAME, &map, &error);
        if (status == NEBULA_OK)
                status = plate_read(plate, map, &error);
        if (status == NEBULA_OK)
                printf("resuming from step %" PRId64 "\n", plate->step);
        else
                fprintf(stderr, "heat: cannot resume: %s\n", error.message);
        nebula_map_free(map);
        nebula_checkpoint_free(checkpoint);
        return status == NEBULA_OK;
}

static bool run(struct plate *plate, const struct settings *settings, nebula_session *session)
{
        struct nebula_error error;

        if (!plate_resume(plate, session))
                return false;
        while (plate->step < settings->steps) {
                plate_step(plate);
                if (plate->step == settings->crash_at) {
                        fflush(stdout);
                        raise(SIGKILL);
                }
                if (plate->step % settings->save_every == 0)
                        plate_save(plate, session);
        }
        printf("step %" PRId64 " checksum %016" PRIx64 "\n", plate->step, plate_checksum(plate));
        if (settings->path && nebula_session_flush(session, NULL, 60000, &error) != NEBULA_OK) {
                fprintf(stderr, "heat: not everything is in storage yet: %s\n", error.message);
                return false;
        }
        return true;
}

static bool read_number(const char *text, long *ret_number)
{
        char *end;
        long number = strtol(text, &end, 10);

        if (*text == '\0' || *end != '\0' || number <= 0 || number > INT_MAX)
                return false;
        *ret_number = number;
        return true;
}

static bool read_settings(int argc, char **argv, struct settings *settings)
{
        static char path[PATH_MAX];

        *settings = (struct settings){ .size = 512, .steps = 1000, .save_every = 100 };
        for (int i = 1; i < argc; i += 2) {
                const char *value = i + 1 < argc ? argv[i + 1] : "";
                bool good = false;

                if (!strcmp(argv[i], "--path") && value[0] != '\0') {
                        char here[PATH_MAX] = "";

                        good = value[0] == '/' || strstr(value, "://") || getcwd(here, sizeof here);
                        good = good && snprintf(path, sizeof path, "%s%s%s", here, here[0] ? "/" : "", value) < PATH_MAX;
                        settings->path = path;
                } else if (!strcmp(argv[i], "--size")) {
                        good = read_number(value, &settings->size) && settings->size >= 3 && settings->size <= 32768;
                } else if (!strcmp(argv[i], "--steps")) {
                        good = read_number(value, &settings->steps);
                } else if (!strcmp(argv[i], "--save-every")) {
                        good = read_number(value, &settings->save_every);
                } else if (!strcmp(argv[i], "--crash-at")) {
                        good = read_number(value, &settings->crash_at);
                }
                if (!good) {
                        fprintf(stderr, "usage: heat [--path DIR or URL] [--size N] [--steps N] [--save-every N] [--crash-at N]\n");
                        return false;
                }
        }
        return true;
}

int main(int argc, char **argv)
{
        struct nebula_options options;
        struct nebula_error error;
        nebula_session *session = NULL;
        struct settings settings;
        struct plate plate;
        bool done = false;

        if (!read_settings(argc, argv, &settings))
                return 2;
        nebula_options_init(&options);
        options.persist_path = settings.path;
        options.job = "heat";
        if (nebula_session_open(&options, &session, &error) != NEBULA_OK) {
                fprintf(stderr, "heat: %s\n", error.message);
                return 1;
        }
        if (plate_init(&plate, (uint64_t)settings.size))
                done = run(&plate, &settings, session);
        plate_done(&plate);
        nebula_session_close(session);
        return done ? 0 : 1;
}
