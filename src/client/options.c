/* Checks the caller's options once and puts them into the form of a request. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "base/text.h"
#include "client/client.h"
#include "os/os.h"
#include "os/os_create.h"

void nebula_options_init(struct nebula_options *options)
{
        if (!options)
                return; /* nebula_session_open reports what is missing */
        *options = (struct nebula_options){
                .struct_size = sizeof *options,
                .persist_interval_s = 0,
                .retention_count = 1,
                .world = 1,
                .local_world = 1,
                .on_full = NEBULA_ON_FULL_WAIT,
        };
}

enum nebula_status client_text(char *to, size_t size, const char *value, const char *what, struct nebula_error *error)
{
        size_t length = value ? strlen(value) : 0;

        if (length >= size)
                return error_set(error, NEBULA_INVALID, 0, "%s is %zu bytes long, at most %zu are possible: \"%.60s...\"",
                                 what, length, size - 1, value);
        memset(to, 0, size); /* zeroed, because settings are compared byte by byte */
        if (length > 0)
                memcpy(to, value, length);
        return NEBULA_OK;
}

/* For texts that go into JSON documents: if one is not UTF-8, every checkpoint would fail later. */
static enum nebula_status utf8_text(char *to, size_t size, const char *value, const char *what, struct nebula_error *error)
{
        if (value && !text_is_utf8(value, strlen(value)))
                return error_set(error, NEBULA_INVALID, 0, "%s is not valid UTF-8: \"%.200s\"", what, value);
        return client_text(to, size, value, what, error);
}

enum nebula_status client_persist_path(char to[IPC_PATH_MAX], const char *value, struct nebula_error *error)
{
        if (value && value[0] != '\0' && value[0] != '/' && !strstr(value, "://"))
                return error_set(error, NEBULA_INVALID, 0,
                                 "the storage path is \"%.200s\": it must be absolute, since the agent runs elsewhere",
                                 value);
        return utf8_text(to, IPC_PATH_MAX, value, "the storage path", error);
}

static enum nebula_status check_numbers(const struct nebula_options *options, struct nebula_error *error)
{
        if (options->struct_size != sizeof *options)
                return error_set(error, NEBULA_INVALID, 0,
                                 "the options have %zu bytes instead of %zu: call nebula_options_init first, and compile "
                                 "against the header of this library", options->struct_size, sizeof *options);
        if (options->world == 0 || options->rank >= options->world)
                return error_set(error, NEBULA_INVALID, 0, "rank %u of %u does not exist: rank is 0 to world - 1",
                                 options->rank, options->world);
        if (options->local_world == 0 || options->local_rank >= options->local_world)
                return error_set(error, NEBULA_INVALID, 0, "local rank %u of %u does not exist: it is 0 to local_world - 1",
                                 options->local_rank, options->local_world);
        if (options->retention_count == 0)
                return error_set(error, NEBULA_INVALID, 0, "retention_count is 0: at least one version is kept in memory");
        if (!isfinite(options->persist_interval_s) || options->persist_interval_s < 0)
                return error_set(error, NEBULA_INVALID, 0, "persist_interval_s is %g: it is 0 or more seconds",
                                 options->persist_interval_s);
        if (options->is_reader && options->is_spare)
                return error_set(error, NEBULA_INVALID, 0, "is_reader and is_spare are both set: a session is one of them");
        if (options->keep_best && (!options->keep_last || !options->keep_best_count))
                return error_set(error, NEBULA_INVALID, 0, "keep_best excepts versions from keep_last, so keep_last and keep_best_count are 1 or more");
        if ((unsigned)options->on_full > NEBULA_ON_FULL_SKIP)
                return error_set(error, NEBULA_INVALID, 0, "on_full is %u: there is no such choice",
                                 (unsigned)options->on_full);
        return NEBULA_OK;
}

static enum nebula_status read_texts(const struct nebula_options *options, struct client_settings *settings,
                                     struct nebula_error *error)
{
        struct ipc_hello *hello = &settings->hello;
        enum nebula_status status;

        status = client_persist_path(hello->persist_path, options->persist_path, error);
        if (status == NEBULA_OK && options->output_dir && options->output_dir[0] != '\0' && options->output_dir[0] != '/')
                status = error_set(error, NEBULA_INVALID, 0, "output_dir is \"%.200s\": it must be an absolute path",
                                   options->output_dir);
        if (status == NEBULA_OK)
                status = client_text(hello->output_dir, sizeof hello->output_dir, options->output_dir, "output_dir", error);
        if (status == NEBULA_OK)
                status = utf8_text(hello->job, sizeof hello->job, options->job, "the name of the job", error);
        if (status == NEBULA_OK)
                status = utf8_text(hello->run, sizeof hello->run, options->run, "the name of the run", error);
        if (status == NEBULA_OK)
                status = utf8_text(hello->keep_items, sizeof hello->keep_items, options->keep_items, "keep_items", error);
        if (status == NEBULA_OK)
                status = utf8_text(hello->keep_best, sizeof hello->keep_best, options->keep_best, "the metric of keep_best", error);
        if (status == NEBULA_OK)
                status = client_text(settings->agent_path, sizeof settings->agent_path, options->agent_path,
                                     "agent_path", error);
        return status;
}

static enum nebula_status read_capture(enum client_capture *ret_capture, struct nebula_error *error)
{
        const char *wanted = getenv("NEBULA_CAPTURE");
        struct nebula_error why;

        *ret_capture = CLIENT_CAPTURE_AUTO;
        if (!wanted || wanted[0] == '\0' || strcmp(wanted, "auto") == 0)
                return NEBULA_OK;
        if (strcmp(wanted, "copy") == 0) {
                *ret_capture = CLIENT_CAPTURE_COPY;
                return NEBULA_OK;
        }
        if (strcmp(wanted, "cow") != 0)
                return error_set(error, NEBULA_INVALID, 0, "NEBULA_CAPTURE is \"%.60s\": it is auto, copy or cow", wanted);
        if (cow_available(&why) != NEBULA_OK)
                return error_set(error, NEBULA_INVALID, why.sys_errno, "NEBULA_CAPTURE=cow is not possible here, use auto: %.380s",
                                 why.message);
        *ret_capture = CLIENT_CAPTURE_COW;
        return NEBULA_OK;
}

extern char **environ;

enum nebula_status client_settings_read(const struct nebula_options *options, struct client_settings *settings,
                                        struct nebula_error *error)
{
        enum nebula_status status;

        memset(settings, 0, sizeof *settings);
        status = check_numbers(options, error);
        if (status == NEBULA_OK)
                status = read_texts(options, settings, error);
        if (status == NEBULA_OK)
                status = ipc_place_find(&settings->place, error);
        if (status == NEBULA_OK)
                status = read_capture(&settings->capture, error);
        if (status != NEBULA_OK)
                return status;
        settings->hello.version = IPC_VERSION;
        settings->hello.pulse_fd = -1;
        settings->hello.role = options->is_reader ? IPC_ROLE_READER : options->is_spare ? IPC_ROLE_SPARE : IPC_ROLE_TRAINER;
        settings->hello.pid = os->pid();
        settings->hello.rank = options->rank;
        settings->hello.world = options->world;
        settings->hello.local_rank = options->local_rank;
        settings->hello.local_world = options->local_world;
        settings->hello.retention_count = options->retention_count;
        settings->hello.on_full = options->on_full;
        settings->hello.keep_last = options->keep_last;
        settings->hello.keep_every = options->keep_every;
        settings->hello.keep_hourly = options->keep_hourly;
        settings->hello.keep_daily = options->keep_daily;
        settings->hello.keep_weekly = options->keep_weekly;
        settings->hello.keep_within_s = options->keep_within_s;
        settings->hello.keep_best_count = options->keep_best ? options->keep_best_count : 0;
        settings->hello.keep_best_is_largest = options->keep_best && options->keep_best_is_largest;
        settings->hello.replica_count = options->replica_count;
        settings->hello.has_spares = options->has_spares;
        settings->hello.memory_bytes = options->memory_bytes;
        settings->hello.persist_interval_s = options->persist_interval_s;
        os_create_self(&settings->hello.umask, &settings->hello.group);
        return vars_collect(environ, &settings->variables, error);
}
