#include "ipc/ipc.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/os.h"
#include "tap.h"

static struct ipc_place place;
static struct nebula_error error;

static void clear(void)
{
        unsetenv("NEBULA_RUNTIME_DIR");
        unsetenv("XDG_RUNTIME_DIR");
        unsetenv("NEBULA_MEMORY_DIR");
        unsetenv("NEBULA_NODE_ID");
        memset(&error, 0, sizeof error);
}

static void nebula_s_own_variable_chooses_and_no_shell_s(void)
{
        char expected[64];

        clear();
        snprintf(expected, sizeof expected, "/tmp/nebula-%u", os->uid());
        CHECK(ipc_place_find(&place, &error) == NEBULA_OK && strcmp(place.directory, expected) == 0);
        setenv("XDG_RUNTIME_DIR", "/run/user/7", 1);
        CHECK(ipc_place_find(&place, &error) == NEBULA_OK && strcmp(place.directory, expected) == 0);
        setenv("NEBULA_RUNTIME_DIR", "/x/y", 1);
        CHECK(ipc_place_find(&place, &error) == NEBULA_OK && strcmp(place.directory, "/x/y") == 0);
        CHECK(strcmp(place.socket, "/x/y/agent.sock") == 0 && strcmp(place.lock, "/x/y/agent.lock") == 0 &&
              strcmp(place.log, "/x/y/agent.log") == 0);
}

static void nodes_that_share_a_directory_are_kept_apart(void)
{
        char expected[64];

        clear();
        setenv("NEBULA_NODE_ID", "n3", 1);
        setenv("NEBULA_RUNTIME_DIR", "/x/y", 1);
        snprintf(expected, sizeof expected, "/dev/shm/nebula-%u-n3", os->uid());
        CHECK(ipc_place_find(&place, &error) == NEBULA_OK);
        CHECK(strcmp(place.directory, "/x/y-n3") == 0 && strcmp(place.memory, expected) == 0);
        setenv("NEBULA_MEMORY_DIR", "/m", 1);
        CHECK(ipc_place_find(&place, &error) == NEBULA_OK && strcmp(place.memory, "/m") == 0);
        setenv("NEBULA_NODE_ID", "../up", 1);
        CHECK(ipc_place_find(&place, &error) == NEBULA_INVALID);
}

static void relative_paths_are_refused(void)
{
        clear();
        setenv("NEBULA_RUNTIME_DIR", "x", 1);
        CHECK(ipc_place_find(&place, &error) == NEBULA_INVALID && strstr(error.message, "NEBULA_RUNTIME_DIR"));
        clear();
        setenv("NEBULA_MEMORY_DIR", "x", 1);
        CHECK(ipc_place_find(&place, &error) == NEBULA_INVALID && strstr(error.message, "NEBULA_MEMORY_DIR"));
}

static void a_path_too_long_for_a_socket_is_refused_with_advice(void)
{
        char path[200];

        clear();
        memset(path, 'd', sizeof path);
        path[0] = '/';
        path[sizeof path - 1] = '\0';
        setenv("NEBULA_RUNTIME_DIR", path, 1);
        CHECK(ipc_place_find(&place, &error) == NEBULA_INVALID && strstr(error.message, "shorter"));
}

static void the_directory_is_made_private(void)
{
        char base[] = "/tmp/nebula-place-XXXXXX";
        char path[64];
        struct stat stat_;

        clear();
        REQUIRE(mkdtemp(base));
        snprintf(path, sizeof path, "%s/a/b", base);
        setenv("NEBULA_RUNTIME_DIR", path, 1);
        CHECK(ipc_place_find(&place, &error) == NEBULA_OK);
        CHECK(ipc_place_make(&place, &error) == NEBULA_OK);
        CHECK(stat(path, &stat_) == 0 && (stat_.st_mode & 0777) == 0700);
        CHECK(ipc_place_make(&place, &error) == NEBULA_OK); /* again is fine */
        CHECK(chmod(path, 0750) == 0);
        CHECK(ipc_place_make(&place, &error) == NEBULA_UNAVAILABLE && strstr(error.message, "chmod"));
        os_remove_tree(base);
}

static uint32_t another_uid(void)
{
        return os_linux.uid() + 1;
}

static void a_file_or_another_users_link_in_its_place_is_refused(void)
{
        struct os_table table = *os;
        const struct os_table *before = os;
        char base[] = "/tmp/nebula-place-XXXXXX";
        char path[64];

        clear();
        REQUIRE(mkdtemp(base));
        snprintf(path, sizeof path, "%s/link", base);
        CHECK(symlink(base, path) == 0);
        setenv("NEBULA_RUNTIME_DIR", path, 1);
        CHECK(ipc_place_find(&place, &error) == NEBULA_OK);
        CHECK(ipc_place_make(&place, &error) == NEBULA_OK);
        table.uid = another_uid;
        os = &table;
        if (os_linux.uid()) /* a link of root's is no trap */
                CHECK(ipc_place_make(&place, &error) == NEBULA_UNAVAILABLE);
        os = before;
        CHECK(!unlink(path) && !symlink("/dev/null", path));
        CHECK(ipc_place_make(&place, &error) == NEBULA_UNAVAILABLE && strstr(error.message, "is not a directory"));
        os_remove_tree(base);
}

static int refuse_tmp(const char *path, uint32_t mode)
{
        return strncmp(path, "/tmp/nebula-", 12) ? os_linux.mkdir(path, mode) : -EROFS;
}

static void the_shell_s_directory_is_used_if_tmp_cannot_be_and_agents_are_found_in_both(void)
{
        struct os_table table = *os;
        const struct os_table *before = os;
        char base[] = "/tmp/place-XXXXXX";
        char expected[80];
        int fd, listens;

        clear();
        REQUIRE(mkdtemp(base));
        setenv("NEBULA_NODE_ID", "place-test", 1);
        setenv("XDG_RUNTIME_DIR", base, 1);
        CHECK(ipc_place_find(&place, &error) == NEBULA_OK && place.other_count == 2);
        CHECK(ipc_place_connect(&place) == -ENOENT);
        table.mkdir = refuse_tmp;
        os = &table;
        CHECK(ipc_place_make(&place, &error) == NEBULA_OK);
        os = before;
        snprintf(expected, sizeof expected, "%s/nebula-place-test", base);
        CHECK(!strcmp(place.directory, expected) && !strncmp(place.socket, expected, strlen(expected)));
        listens = os->listen(place.socket);
        CHECK(listens >= 0);
        CHECK(ipc_place_find(&place, &error) == NEBULA_OK && strcmp(place.directory, expected));
        fd = ipc_place_connect(&place);
        CHECK(fd >= 0 && !os->close(fd));
        os->close(listens);
        /* This directory cannot be used either, like that of a login on another machine. The message names the cure. */
        setenv("XDG_RUNTIME_DIR", "/proc/none", 1);
        CHECK(ipc_place_find(&place, &error) == NEBULA_OK);
        place.other_count = 1;
        os = &table;
        CHECK(ipc_place_make(&place, &error) == NEBULA_UNAVAILABLE && strstr(error.message, "set NEBULA_RUNTIME_DIR"));
        os = before;
        os_remove_tree(base);
}

static void another_users_directory_is_refused(void)
{
        struct os_table table = *os;
        const struct os_table *before = os;
        char base[] = "/tmp/nebula-place-XXXXXX";

        clear();
        REQUIRE(mkdtemp(base));
        setenv("NEBULA_RUNTIME_DIR", base, 1);
        CHECK(ipc_place_find(&place, &error) == NEBULA_OK);
        table.uid = another_uid;
        os = &table;
        CHECK(ipc_place_make(&place, &error) == NEBULA_UNAVAILABLE && strstr(error.message, "belongs to"));
        os = before;
        os_remove_tree(base);
}

TAP_MAIN(
        TEST(nebula_s_own_variable_chooses_and_no_shell_s),
        TEST(nodes_that_share_a_directory_are_kept_apart),
        TEST(relative_paths_are_refused),
        TEST(a_path_too_long_for_a_socket_is_refused_with_advice),
        TEST(the_directory_is_made_private),
        TEST(a_file_or_another_users_link_in_its_place_is_refused),
        TEST(the_shell_s_directory_is_used_if_tmp_cannot_be_and_agents_are_found_in_both),
        TEST(another_users_directory_is_refused),
)
