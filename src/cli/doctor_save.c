#include "cli/doctor_save.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/target.h"
#include "cli/term.h"
#include "os/os.h"
#include "store/manifest_load.h"
#include "store/manifest_read.h"
#include "store/place.h"
#include "store/record.h"

#define BYTES ((uint64_t)16 << 20)
#define TAG "doctor"
#define NAME "file"
#define PATH_NAME "NEBULA_PERSISTENT_STORAGE_PATH" /* the URL can hold a secret, which a command line would show */
#define WAIT_MS 120000

/* Bytes that no storage can compress. */
static uint64_t *make_bytes(void)
{
        uint64_t *data = malloc(BYTES);

        for (uint64_t i = 0; data && i < BYTES / sizeof *data; i++)
                data[i] = ((i + 1) * UINT64_C(0x9E3779B97F4A7C15)) ^ (i << 29);
        return data;
}

static enum nebula_status open_session(const char *path, nebula_session **ret_session, struct nebula_error *error)
{
        struct nebula_options options;

        nebula_options_init(&options);
        options.persist_path = path;
        options.job = "nebula-doctor";
        options.retention_count = 1;
        options.persist_interval_s = 3600; /* the test says when */
        return nebula_session_open(&options, ret_session, error);
}

int doctor_save_and_die(void)
{
        const char *path = getenv(PATH_NAME);
        struct nebula_range range = { .data = make_bytes(), .size = BYTES };
        nebula_checkpoint *checkpoint;
        nebula_session *session;
        struct nebula_error error;

        if (!path || !range.data)
                return CLI_USAGE;
        if (open_session(path, &session, &error) || nebula_checkpoint_begin(session, TAG, NEBULA_FILES_ALL_RANKS, &checkpoint, &error) ||
            nebula_checkpoint_save_bytes(checkpoint, NAME, &range, 1, &error) || nebula_checkpoint_commit(checkpoint, &error) ||
            nebula_checkpoint_wait(checkpoint, NEBULA_STATE_COMMITTED, WAIT_MS, &error))
                return cli_fail(false, &error);
        abort(); /* as a trainer that crashes: nothing is closed */
}

struct life {
        char path[TARGET_PATH_MAX]; /* of the scratch storage */
        struct store *store;
        nebula_session *session;
        nebula_checkpoint *checkpoint;
        const uint64_t *data;
};

static enum nebula_status save_and_kill(struct life *life, struct nebula_error *error)
{
        char *words[] = { (char[]){ "nebula" }, (char[]){ "doctor" }, (char[]){ "--save-and-die" }, NULL };
        const char *set = getenv(PATH_NAME);
        char *url = place_signed(life->path), *before = set ? strdup(set) : NULL;
        int code = 0, result = -1;

        if (url && !setenv(PATH_NAME, url, 1))
                result = os->spawn("/proc/self/exe", words, NULL, &code);
        if (before)
                setenv(PATH_NAME, before, 1);
        else
                unsetenv(PATH_NAME);
        place_forget(before);
        place_forget(url);
        if (result < 0)
                return error_set(error, NEBULA_UNAVAILABLE, -result, "a process to save with does not start");
        if (code < 128) /* it was to die by a signal */
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the save failed: `%s=PATH nebula doctor --save-and-die` says why, and the agent's log", PATH_NAME);
        return NEBULA_OK;
}

static enum nebula_status load_from_memory(struct life *life, struct nebula_error *error)
{
        nebula_map *map = NULL;
        enum nebula_status status = open_session(life->path, &life->session, error);

        if (!status)
                status = nebula_checkpoint_find(life->session, TAG, NULL, &life->checkpoint, error);
        if (!status)
                status = nebula_checkpoint_map(life->checkpoint, NAME, &map, error);
        if (!status && (nebula_map_size(map) != BYTES || memcmp(nebula_map_data(map), life->data, BYTES)))
                status = error_set(error, NEBULA_CORRUPT, 0, "other bytes were loaded than were saved");
        nebula_map_free(map);
        return status;
}

static enum nebula_status make_durable(struct life *life, struct nebula_error *error)
{
        return nebula_checkpoint_wait(life->checkpoint, NEBULA_STATE_DURABLE, WAIT_MS, error);
}

static enum nebula_status load_from_storage(struct life *life, struct nebula_error *error)
{
        struct manifest manifest = { 0 };
        struct record_file recorded = { 0 };
        void *data = NULL;
        int result = os->map(-1, 0, BYTES, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_ANONYMOUS, &data);
        enum nebula_status status = result < 0 ? error_set(error, NEBULA_NO_MEMORY, -result, "no memory to load into") : manifest_load(life->store, TAG, &manifest, error);

        if (!status)
                status = manifest_load_file(life->store, &manifest, NAME, &recorded, error);
        if (!status && recorded.size == BYTES)
                status = manifest_read_file(life->store, &manifest, &recorded, data, error);
        if (!status && (recorded.size != BYTES || memcmp(data, life->data, BYTES)))
                status = error_set(error, NEBULA_CORRUPT, 0, "other bytes were loaded than were saved");
        record_file_done(&recorded);
        manifest_done(&manifest);
        if (result >= 0)
                os->unmap(data, BYTES);
        return status;
}

static void leave(struct life *life)
{
        nebula_checkpoint_free(life->checkpoint);
        nebula_session_close(life->session);
        life->checkpoint = NULL;
        life->session = NULL;
}

static enum nebula_status remove_all(struct life *life, struct nebula_error *error)
{
        struct store_list list;
        enum nebula_status status;

        leave(life);
        status = store_list_all(life->store, "", true, &list, error);
        if (status)
                return status == NEBULA_NOT_FOUND ? NEBULA_OK : status;
        for (size_t i = 0; i < list.count && !status; i++)
                status = store_remove_one(life->store, list.entries[i].key, error);
        store_list_done(&list);
        if (*life->path == '/')
                os_remove_tree(life->path); /* empty directories */
        return status;
}

bool doctor_save(const char *path, json_t **ret_steps)
{
        static const struct {
                const char *name, *found;
                enum nebula_status (*run)(struct life *life, struct nebula_error *error);
        } steps[] = {
                { "save and kill", "16 MiB were saved and committed by a process that died then", save_and_kill },
                { "load from memory", "the agent has them, equal", load_from_memory },
                { "make durable", "they are in storage, synced", make_durable },
                { "load from storage", "they are equal, and verified", load_from_storage },
                { "remove", "nothing is left in storage", remove_all },
        };
        struct life life = { 0 };
        struct nebula_error error = { 0 };
        char name[80];
        bool is_good = *path;
        json_t *list = json_array();
        uint64_t *data = make_bytes();

        life.data = data;
        snprintf(name, sizeof name, MANIFEST_DIRECTORY "/doctor-save-%" PRIu32 "-%" PRId64, os->pid(), os->wall_ns());
        is_good = is_good && data && !target_below(path, name, life.path, &error) && !store_open(life.path, &life.store, &error);
        if (!is_good)
                json_array_append_new(list, json_pack("{s:s, s:b, s:f, s:s}", "check", "save", "ok", 0, "seconds", 0.0, "found", *path ? error.message : "no storage path is known: give --path DIR"));
        for (size_t i = 0; is_good && i < CLI_COUNT(steps); i++) {
                int64_t begun_ns = os->now_ns();

                is_good = !steps[i].run(&life, &error);
                text_make_printable(error.message);
                json_array_append_new(list, json_pack("{s:s, s:b, s:f, s:s}", "check", steps[i].name, "ok", is_good, "seconds",
                                                      (double)(os->now_ns() - begun_ns) / 1e9, "found", is_good ? steps[i].found : error.message));
        }
        if (!is_good && life.store)
                remove_all(&life, NULL);
        if (life.store)
                store_close(life.store);
        free(data);
        *ret_steps = list;
        return is_good;
}

void doctor_save_print(const json_t *steps)
{
        char time[HUMAN_MAX];

        for (size_t i = 0; i < json_array_size(steps); i++) {
                const json_t *step = json_array_get(steps, i);
                bool is_ok = json_is_true(json_object_get(step, "ok"));

                printf("%-22s ", text_of(step, "check"));
                term_print(is_ok ? STYLE_GOOD : STYLE_BAD, "%-5s", is_ok ? "ok" : "BAD");
                term_print(STYLE_PLAIN, "%s, %s\n", text_of(step, "found"), human_duration(number_of(step, "seconds"), time));
        }
}
