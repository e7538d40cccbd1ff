/* The part of libnebula that walk.f90 uses: one session, and one file with three tensors. */
#include <nebula.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define FILE_NAME "walk.pt"

static nebula_session *session;

int walk_open(const char *path);
int walk_resume(int64_t *at, int64_t count, int64_t *random, int64_t *step);
int walk_save(const int64_t *at, int64_t count, const int64_t *random, const int64_t *step);
int walk_close(void);

static int told(enum nebula_status status, const struct nebula_error *error)
{
        if (status != NEBULA_OK && status != NEBULA_NOT_FOUND)
                fprintf(stderr, "walk: %s\n", error->message);
        return (int)status;
}

static struct nebula_tensor tensor(const char *name, int64_t count, const int64_t *data)
{
        return (struct nebula_tensor){ .name = name, .dtype = NEBULA_DTYPE_I64, .dim_count = 1, .shape = { (uint64_t)count }, .data = data };
}

int walk_open(const char *path)
{
        struct nebula_options options;
        struct nebula_error error;

        nebula_options_init(&options);
        options.persist_path = path;
        return told(nebula_session_open(&options, &session, &error), &error);
}

static enum nebula_status copy(const nebula_map *map, const char *name, int64_t *target, int64_t count, struct nebula_error *error)
{
        struct nebula_tensor found;
        enum nebula_status status = nebula_map_tensor(map, name, &found, error);

        if (status == NEBULA_OK && (found.dtype != NEBULA_DTYPE_I64 || found.shape[0] != (uint64_t)count)) {
                snprintf(error->message, sizeof error->message, "the checkpoint is of another number of walkers");
                status = NEBULA_INVALID;
        }
        if (status == NEBULA_OK)
                memcpy(target, found.data, (size_t)count * sizeof *target);
        return status;
}

int walk_resume(int64_t *at, int64_t count, int64_t *random, int64_t *step)
{
        struct nebula_error error;
        nebula_checkpoint *checkpoint = NULL;
        nebula_map *map = NULL;
        enum nebula_status status = nebula_checkpoint_latest(session, NULL, &checkpoint, &error);

        if (status == NEBULA_OK)
                status = nebula_checkpoint_map(checkpoint, FILE_NAME, &map, &error);
        if (status == NEBULA_OK)
                status = copy(map, "at", at, count, &error);
        if (status == NEBULA_OK)
                status = copy(map, "random", random, 1, &error);
        if (status == NEBULA_OK)
                status = copy(map, "step", step, 1, &error);
        nebula_map_free(map);
        nebula_checkpoint_free(checkpoint);
        return told(status, &error);
}

int walk_save(const int64_t *at, int64_t count, const int64_t *random, const int64_t *step)
{
        const struct nebula_tensor tensors[] = { tensor("at", count, at), tensor("random", 1, random), tensor("step", 1, step) };
        struct nebula_error error;
        nebula_checkpoint *checkpoint = NULL;
        char tag[32];
        enum nebula_status status;

        snprintf(tag, sizeof tag, "step%" PRId64, *step);
        status = nebula_checkpoint_begin(session, tag, 1, &checkpoint, &error);
        if (status == NEBULA_OK)
                status = nebula_checkpoint_save_tensors(checkpoint, FILE_NAME, tensors, 3, &error);
        if (status == NEBULA_OK)
                status = nebula_checkpoint_commit(checkpoint, &error);
        nebula_checkpoint_free(checkpoint);
        return told(status, &error);
}

int walk_close(void)
{
        struct nebula_error error;
        int status = told(nebula_session_flush(session, NULL, 60000, &error), &error);

        nebula_session_close(session);
        return status;
}
