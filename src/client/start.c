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
#define INLINE_LIBRARY "libnebula-agent.so"

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

enum nebula_status client_start_agent(const struct client_settings *settings, bool *ret_hopeless,
                                      struct nebula_error *error)
{
        char *argv[] = { (char[]){ PROGRAM }, (char[]){ "agent" }, (char[]){ "--daemon" }, NULL };
        struct ipc_place *place = malloc(sizeof *place); /* too large for a thread's stack */
        char path[IPC_PATH_MAX];
        enum nebula_status status;
        int exit_status = 0;
        int result;

        *ret_hopeless = true;
        if (!place)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to start the agent");
        *place = settings->place;
        status = ipc_place_make(place, error);
        free(place);
        if (status == NEBULA_OK)
                status = find_program(settings, path, error);
        if (status != NEBULA_OK)
                return status;
        result = os->spawn(path, argv, &exit_status);
        if (result < 0 && result != -ECHILD) /* -ECHILD: the program ignores SIGCHLD, so the exit status is lost */
                return error_set(error, NEBULA_UNAVAILABLE, -result, "the agent cannot be started: %.300s does not run",
                                 path);
        *ret_hopeless = false; /* an agent that was just ending may have caused the failure */
        if (exit_status != 0)
                return error_set(error, NEBULA_UNAVAILABLE, 0,
                                 "the agent did not start: `%.200s agent --daemon` ended with %d, see %.160s", path,
                                 exit_status, settings->place.log);
        return NEBULA_OK;
}

typedef int agent_inline(const char *runtime_dir, const char *memory_dir, char *error, size_t error_size);

static struct lock inline_lock = LOCK_INIT(LOCK_INLINE); /* guards the two variables below */
static uint32_t inline_pid; /* the process whose threads run the agent: this one, or one that it was forked from */
static struct ipc_place inline_place;

static enum nebula_status load_inline(agent_inline **ret_start, struct nebula_error *error)
{
        const char *chosen = getenv("NEBULA_AGENT_LIBRARY");
        char directory[IPC_PATH_MAX], beside[IPC_PATH_MAX + 32];
        void *library = NULL, *symbol;

        if (chosen && chosen[0] != '\0') {
                library = dlopen(chosen, RTLD_NOW | RTLD_LOCAL);
        } else {
                if (own_directory(directory, sizeof directory)) {
                        snprintf(beside, sizeof beside, "%s/" INLINE_LIBRARY, directory);
                        library = dlopen(beside, RTLD_NOW | RTLD_LOCAL);
                }
                if (!library)
                        library = dlopen(INLINE_LIBRARY, RTLD_NOW | RTLD_LOCAL);
        }
        if (!library)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "NEBULA_AGENT=inline, but the agent's library cannot be "
                                 "loaded (NEBULA_AGENT_LIBRARY can name it): %s", dlerror());
        symbol = dlsym(library, "nebula_agent_inline");
        if (!symbol) {
                dlclose(library);
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the agent's library has no nebula_agent_inline: it is of "
                                 "another version");
        }
        memcpy(ret_start, &symbol, sizeof symbol); /* ISO C has no cast from a data pointer to a function pointer */
        return NEBULA_OK;
}

/* Whether an agent listens there. The pid in the name proves nothing if its process is in another pid namespace. */
static bool answers(const char *directory)
{
        char path[IPC_PATH_MAX];
        int fd = (size_t)snprintf(path, sizeof path, "%s/agent.sock", directory) < sizeof path ? os->connect(path) : -1;

        if (fd >= 0)
                os->close(fd);
        return fd >= 0;
}

/* Removes the "i<pid>" directories of dead processes: a process cannot clean up after its own SIGKILL. */
static void remove_stale(const char *directory)
{
        char name[IPC_NAME_MAX], path[IPC_PATH_MAX];
        struct os_dir *dir;

        if (os->opendir(directory, &dir) != 0)
                return;
        while (os->readdir(dir, name, sizeof name) > 0) {
                char *end = name;
                unsigned long pid = name[0] == 'i' ? strtoul(name + 1, &end, 10) : 0;

                if (pid == 0 || pid > INT32_MAX || *end != '\0' || os->alive((uint32_t)pid))
                        continue;
                if ((size_t)snprintf(path, sizeof path, "%s/%s", directory, name) < sizeof path && !answers(path))
                        os_remove_tree(path);
        }
        os->closedir(dir);
}

static enum nebula_status start_inline(struct ipc_place *place, struct nebula_error *error)
{
        const char *memory = getenv("NEBULA_MEMORY_DIR");
        char text[IPC_TEXT_MAX] = "";
        agent_inline *start;
        size_t used;
        enum nebula_status status;
        int result;

        status = ipc_place_find(place, error);
        if (status == NEBULA_OK)
                status = ipc_place_make(place, error);
        if (status != NEBULA_OK)
                return status;
        remove_stale(place->directory);
        /* In a directory of its own beside a real agent's socket, so that this agent is never taken for one. */
        used = strlen(place->directory);
        snprintf(place->directory + used, sizeof place->directory - used, "/i%u", os->pid());
        result = snprintf(place->socket, sizeof place->socket, "%s/agent.sock", place->directory);
        if ((size_t)result >= sizeof place->socket)
                return error_set(error, NEBULA_INVALID, 0, "the runtime directory %.200s is too long for a socket: set "
                                 "NEBULA_RUNTIME_DIR to a shorter path", place->directory);
        status = ipc_place_make(place, error);
        if (status == NEBULA_OK)
                status = load_inline(&start, error);
        if (status != NEBULA_OK)
                return status;
        if (start(place->directory, memory && memory[0] != '\0' ? place->memory : NULL, text, sizeof text) != 0)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the agent cannot run in this process: %s", text);
        return NEBULA_OK;
}

enum nebula_status client_start_inline(struct ipc_place *place, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        lock_take(&inline_lock);
        /* A forked child uses its parent's agent, which has the parent's checkpoints. */
        if (inline_pid == 0 || (inline_pid != os->pid() && !os->alive(inline_pid))) {
                status = start_inline(&inline_place, error);
                if (status == NEBULA_OK)
                        inline_pid = os->pid();
        }
        if (status == NEBULA_OK)
                *place = inline_place;
        lock_give(&inline_lock);
        return status;
}

/* Another thread of the parent may have held the lock; that thread does not exist in the child. */
void client_inline_forked(void)
{
        lock_init(&inline_lock, LOCK_INLINE);
}
