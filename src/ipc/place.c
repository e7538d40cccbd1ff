/* Finds the agent of this user and node. */
#include "ipc/ipc.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"

/* The agent's working directory is "/", so a relative path would mean two different places. */
static enum nebula_status absolute(const char *name, const char *value, struct nebula_error *error)
{
        if (value && value[0] != '/')
                return error_set(error, NEBULA_INVALID, 0, "%s is \"%s\": it must be an absolute path", name, value);
        return NEBULA_OK;
}

static enum nebula_status node_suffix(char *suffix, size_t size, struct nebula_error *error)
{
        const char *id = conf_env("NEBULA_NODE_ID");

        suffix[0] = '\0';
        if (!id)
                return NEBULA_OK;
        if (strchr(id, '/') || strlen(id) + 2 > size)
                return error_set(error, NEBULA_INVALID, 0,
                                 "NEBULA_NODE_ID is \"%.80s\": it must be shorter than %zu bytes and hold no '/'", id,
                                 size - 1);
        snprintf(suffix, size, "-%s", id);
        return NEBULA_OK;
}

/* Removes doubled slashes, "." and slashes at the end: otherwise two spellings of a directory would become two
 * places once a suffix is added. */
static void tidy(const char *value, char *text, size_t size)
{
        size_t used = 0;

        for (; *value && used + 1 < size; value++) {
                bool is_slash = *value == '/' && used && text[used - 1] == '/';
                bool is_dot = *value == '.' && used && text[used - 1] == '/' && (value[1] == '/' || !value[1]);

                if (!is_slash && !is_dot)
                        text[used++] = *value;
        }
        while (used > 1 && text[used - 1] == '/')
                used--;
        text[used] = '\0';
}

static bool join(char *text, size_t size, const char *a, const char *b, const char *c)
{
        int length = snprintf(text, size, "%s%s%s", a, b, c);

        return length >= 0 && (size_t)length < size;
}

static bool name_files(struct ipc_place *place)
{
        return join(place->lock, sizeof place->lock, place->directory, "/agent.lock", "") &&
               join(place->log, sizeof place->log, place->directory, "/agent.log", "") &&
               join(place->socket, sizeof place->socket, place->directory, "/agent.sock", "");
}

static void add_other(struct ipc_place *place, const char *runtime, const char *suffix)
{
        char *to = place->others[place->other_count], socket[sizeof place->socket];

        if (runtime[0] != '/' || !join(to, sizeof place->others[0], runtime, "/nebula", suffix) ||
            !join(socket, sizeof socket, to, "/agent.sock", ""))
                return;
        place->other_count += !place->other_count || strcmp(to, place->others[0]) != 0;
}

static void add_others(struct ipc_place *place, const char *suffix)
{
        const char *xdg = conf_env("XDG_RUNTIME_DIR");
        char of_user[48];

        snprintf(of_user, sizeof of_user, "/run/user/%u", os->uid());
        if (xdg)
                add_other(place, xdg, suffix);
        add_other(place, of_user, suffix);
}

enum nebula_status ipc_place_find(struct ipc_place *ret_place, struct nebula_error *error)
{
        const char *runtime = conf_env("NEBULA_RUNTIME_DIR");
        const char *memory = conf_env("NEBULA_MEMORY_DIR");
        struct ipc_place place = { 0 };
        char suffix[64], user[32], chosen[IPC_PATH_MAX];
        enum nebula_status status;
        bool fits, memory_fits;

        status = absolute("NEBULA_RUNTIME_DIR", runtime, error);
        if (status == NEBULA_OK)
                status = absolute("NEBULA_MEMORY_DIR", memory, error);
        if (status == NEBULA_OK)
                status = node_suffix(suffix, sizeof suffix, error);
        if (status != NEBULA_OK)
                return status;

        snprintf(user, sizeof user, "%u", os->uid());
        tidy(runtime ? runtime : "", chosen, sizeof chosen);
        if (runtime)
                fits = join(place.directory, sizeof place.directory, chosen, suffix, "") && strlen(runtime) < sizeof chosen;
        else
                fits = join(place.directory, sizeof place.directory, "/tmp/nebula-", user, suffix);
        if (memory)
                memory_fits = join(place.memory, sizeof place.memory, memory, "", "");
        else
                memory_fits = join(place.memory, sizeof place.memory, "/dev/shm/nebula-", user, suffix);
        if (!fits || !name_files(&place))
                return error_set(error, NEBULA_INVALID, 0, "the runtime directory \"%.200s\" is too long for a socket "
                                 "(at most %zu bytes): set NEBULA_RUNTIME_DIR to a shorter path", place.directory,
                                 sizeof place.socket - sizeof "/agent.sock");
        if (!memory_fits)
                return error_set(error, NEBULA_INVALID, 0, "NEBULA_MEMORY_DIR is longer than %zu bytes", sizeof place.memory - 1);
        if (!runtime)
                add_others(&place, suffix);
        *ret_place = place;
        return NEBULA_OK;
}

int ipc_place_stat(const char *path, struct os_stat *ret_stat)
{
        struct os_stat link;
        int result = os->stat(path, false, &link);

        if (result < 0 || link.kind != OS_KIND_LINK || (link.uid != os->uid() && link.uid != 0)) {
                *ret_stat = link;
                return result;
        }
        return os->stat(path, true, ret_stat);
}

static enum nebula_status make_one(const struct ipc_place *place, struct nebula_error *error)
{
        struct os_stat stat;
        int result;

        result = ipc_place_stat(place->directory, &stat);
        if (result == -ENOENT) {
                result = os_make_dirs(place->directory, 0700);
                if (result == 0)
                        result = ipc_place_stat(place->directory, &stat);
        }
        if (result < 0)
                return error_set(error, NEBULA_UNAVAILABLE, -result, "the runtime directory %s cannot be made: set NEBULA_RUNTIME_DIR "
                                 "to a directory of your own", place->directory);
        if (stat.kind != OS_KIND_DIRECTORY)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "%s is not a directory: remove it, or set "
                                 "NEBULA_RUNTIME_DIR", place->directory);
        if (stat.uid != os->uid())
                return error_set(error, NEBULA_UNAVAILABLE, 0, "%s belongs to user %u, not to user %u: set "
                                 "NEBULA_RUNTIME_DIR to a directory of your own", place->directory, stat.uid, os->uid());
        if (stat.mode & 077)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "%s is open to other users (mode %03o): run chmod 700 on it",
                                 place->directory, stat.mode & 0777u);
        return NEBULA_OK;
}

enum nebula_status ipc_place_make(struct ipc_place *place, struct nebula_error *error)
{
        enum nebula_status status = make_one(place, error);
        char first[sizeof place->directory];

        strcpy(first, place->directory);
        for (uint32_t i = 0; status != NEBULA_OK && i < place->other_count; i++) {
                strcpy(place->directory, place->others[i]);
                if (name_files(place) && make_one(place, NULL) == NEBULA_OK)
                        return NEBULA_OK;
        }
        strcpy(place->directory, first);
        name_files(place);
        return status;
}

/* Skips sockets of other users. is_only: there are no other places, so the caller reports another user's socket. */
static int connect_own(const char *socket, bool is_only)
{
        uint32_t uid = 0, pid = 0;
        int fd = os->connect(socket);

        if (fd >= 0 && !is_only && (os->peer(fd, &uid, &pid) < 0 || uid != os->uid())) {
                os->close(fd);
                return -ECONNREFUSED;
        }
        return fd;
}

int ipc_place_connect(const struct ipc_place *place)
{
        int first = connect_own(place->socket, !place->other_count);

        for (uint32_t i = 0; first < 0 && i < place->other_count; i++) {
                char socket[sizeof place->socket];
                int fd = join(socket, sizeof socket, place->others[i], "/agent.sock", "") ? connect_own(socket, false) : -ENOENT;

                if (fd >= 0)
                        return fd;
        }
        return first;
}

enum nebula_status ipc_place_check_peer(int fd, const struct ipc_place *place, uint32_t *ret_pid, struct nebula_error *error)
{
        uint32_t uid = 0, pid = 0;
        int result = os->peer(fd, &uid, &pid);

        if (result < 0)
                return error_set(error, NEBULA_UNAVAILABLE, -result, "the owner of the process that listens on %s cannot be determined",
                                 place->socket);
        if (uid != os->uid())
                return error_set(error, NEBULA_UNAVAILABLE, 0, "user %u listens on %s, not user %u: set NEBULA_RUNTIME_DIR to a "
                                 "directory of your own", uid, place->socket, os->uid());
        *ret_pid = pid;
        return NEBULA_OK;
}
