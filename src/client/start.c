/* Finds the agent's program and starts it. */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"
#include "os/os.h"

#define PROGRAM "nebula"

static bool is_program(const char *path)
{
        struct os_stat stat;

        return os->stat(path, true, &stat) == 0 && stat.kind == OS_KIND_FILE && (stat.mode & 0111);
}

/* The directory of the file that contains this code: the library, the Python extension or the program. */
static bool own_directory(char *directory, size_t size)
{
        Dl_info info;
        char *slash;

        if (!dladdr((void *)(uintptr_t)&nebula_session_open, &info) || !info.dli_fname ||
            (size_t)snprintf(directory, size, "%s", info.dli_fname) >= size)
                return false;
        slash = strrchr(directory, '/');
        if (!slash)
                return false;
        *slash = '\0';
        return true;
}

static bool find_beside(char path[IPC_PATH_MAX])
{
        static const char *const places[] = { "", "/../bin", "/../../bin", "/../../../bin", "/../../../../bin" };
        char directory[IPC_PATH_MAX];

        if (!own_directory(directory, sizeof directory))
                return false;
        for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
                int length = snprintf(path, IPC_PATH_MAX, "%s%s/%s", directory, places[i], PROGRAM);

                if (length > 0 && length < IPC_PATH_MAX && is_program(path))
                        return true;
        }
        return false;
}

static bool find_in_path(char path[IPC_PATH_MAX])
{
        const char *at = getenv("PATH");

        while (at && *at != '\0') {
                int length = (int)strcspn(at, ":");
                int written = snprintf(path, IPC_PATH_MAX, "%.*s/%s", length, at, PROGRAM);

                if (length > 0 && written < IPC_PATH_MAX && is_program(path))
                        return true;
                at += length;
                at += *at == ':';
        }
        return false;
}

/* A path that the user chose is used or refused. No other is tried instead, because it may be of another version. */
static enum nebula_status find_program(const struct client_settings *settings, char path[IPC_PATH_MAX],
                                       struct nebula_error *error)
{
        const char *chosen = settings->agent_path[0] != '\0' ? settings->agent_path : getenv("NEBULA_AGENT_PATH");

        if (chosen && chosen[0] != '\0') {
                if (!is_program(chosen))
                        return error_set(error, NEBULA_UNAVAILABLE, 0,
                                         "the agent cannot be started: %.300s is not a program (from %s)", chosen,
                                         chosen == settings->agent_path ? "agent_path" : "NEBULA_AGENT_PATH");
                return client_text(path, IPC_PATH_MAX, chosen, "the agent's path", error);
        }
        if (find_beside(path) || find_in_path(path))
                return NEBULA_OK;
        return error_set(error, NEBULA_UNAVAILABLE, 0, "the agent cannot be started: there is no `" PROGRAM "` beside "
                         "this library or on the PATH: set NEBULA_AGENT_PATH to where it is installed");
}

enum nebula_status client_start_agent(const struct client_settings *settings, bool *ret_final,
                                      struct nebula_error *error)
{
        char *argv[] = { (char[]){ PROGRAM }, (char[]){ "agent" }, (char[]){ "--daemon" }, NULL };
        struct ipc_place *place = malloc(sizeof *place); /* too large for a thread's stack */
        char path[IPC_PATH_MAX];
        enum nebula_status status;
        int exit_status = 0;
        int result;

        *ret_final = true;
        if (!place)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to start the agent");
        *place = settings->place;
        status = ipc_place_make(place, error);
        free(place);
        if (status == NEBULA_OK)
                status = find_program(settings, path, error);
        if (status != NEBULA_OK)
                return status;
        result = os->spawn(path, argv, NULL, &exit_status);
        if (result < 0 && result != -ECHILD) /* -ECHILD: the program ignores SIGCHLD, so the exit status is lost */
                return error_set(error, NEBULA_UNAVAILABLE, -result, "the agent cannot be started: %.300s does not run",
                                 path);
        *ret_final = false; /* an agent that was just ending may have caused the failure */
        if (exit_status != 0)
                return error_set(error, NEBULA_UNAVAILABLE, 0,
                                 "the agent did not start: `%.200s agent --daemon` ended with %d, see %.160s", path,
                                 exit_status, settings->place.log);
        return NEBULA_OK;
}
