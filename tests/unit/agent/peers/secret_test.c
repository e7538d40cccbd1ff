/* The secret is in a storage path to which other users may write. */
#include "agent/peers/secret.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "os/os.h"
#include "store/store_mem.h"
#include "tap.h"
#include "test_dir.h"

#define OTHER 12345u

static char storage[256];
static struct store *store;
static struct tls_key key;
static struct nebula_error error;
static struct os_table table;
static uint32_t own_uid, server_uid; /* server_uid: the owner of files that this process makes; 0: its own user */

/* True: it succeeds. */
static bool shell(const char *command)
{
        char text[1000];

        snprintf(text, sizeof text, "cd %s && %s", storage, command);
        return !system(text);
}

static void begin(void)
{
        test_dir_make_quick(storage);
        unsetenv("NEBULA_SECRET_FILE");
        if (store_open(storage, &store, NULL))
                abort();
}

static void end(void)
{
        os = &os_linux;
        store_close(store);
        test_dir_remove(storage);
}

static enum nebula_status take(void)
{
        memset(&error, 0, sizeof error);
        return secret_take(store, true, &key, &error);
}

static uint32_t report_uid(void)
{
        return own_uid;
}

static int stat_by_server(int fd, struct os_stat *ret_stat)
{
        int result = os_linux.fstat(fd, ret_stat);

        if (!result && server_uid)
                ret_stat->uid = server_uid;
        return result;
}

/* Acts as another user than the one that made the files. */
static void become(uint32_t uid, uint32_t server)
{
        own_uid = uid;
        server_uid = server;
        table = os_linux;
        table.uid = report_uid;
        table.fstat = stat_by_server;
        os = &table;
}

static void the_secret_is_a_private_file_with_one_name(void)
{
        begin();
        REQUIRE(take() == NEBULA_OK && take() == NEBULA_OK);
        CHECK(shell("test $(stat -c %a%h .nebula/secret) = 6001 && test $(ls -A .nebula | wc -l) = 1"));
        shell("chmod 640 .nebula/secret");
        CHECK(take() == NEBULA_INVALID && strstr(error.message, "chmod 600"));
        shell("chmod 600 .nebula/secret && ln .nebula/secret beside");
        CHECK(take() == NEBULA_INVALID && strstr(error.message, "2 names"));
        shell("rm beside && mv .nebula/secret kept && mkfifo -m 600 .nebula/secret");
        CHECK(take() == NEBULA_INVALID && strstr(error.message, "is not a regular file"));
        shell("rm .nebula/secret && mkdir -m 700 .nebula/secret");
        CHECK(take() == NEBULA_INVALID && strstr(error.message, "is not a regular file"));
        shell("rmdir .nebula/secret && ln -s ../kept .nebula/secret");
        CHECK(take() != NEBULA_OK && error.sys_errno);
        shell("rm .nebula/secret && mv kept .nebula/secret");
        CHECK(take() == NEBULA_OK);
        shell("printf 'too short' >.nebula/secret");
        CHECK(take() == NEBULA_INVALID && strstr(error.message, "at least 16 bytes"));
        end();
}

/*
 * fault (The machine and other users): Another user's secret, or record of a node, is in storage.
 * result: The agent refuses it, and names it in the log. It sends no copies until the file is removed.
 */
static void a_secret_of_another_user_is_refused_and_named(void)
{
        char number[32], file[300];

        begin();
        REQUIRE(take() == NEBULA_OK);
        become(OTHER, 0);
        snprintf(number, sizeof number, "user %u,", os_linux.uid());
        CHECK(take() == NEBULA_INVALID && strstr(error.message, number) && strstr(error.message, "12345") &&
              strstr(error.message, "NEBULA_SECRET_FILE"));
        os = &os_linux;
        CHECK(shell("cp -p .nebula/secret named"));
        /* Root can read the file, and refuses it, too. */
        if (!os_linux.uid() && shell("chown 12345 .nebula/secret"))
                CHECK(take() == NEBULA_INVALID && strstr(error.message, "user 12345,"));
        snprintf(file, sizeof file, "%s/named", storage);
        setenv("NEBULA_SECRET_FILE", file, 1);
        CHECK(take() == NEBULA_OK);
        become(OTHER, 0);
        CHECK(take() == NEBULA_INVALID && strstr(error.message, "12345"));
        unsetenv("NEBULA_SECRET_FILE");
        end();
}

/* A server with root_squash. */
static void the_user_that_a_server_maps_root_to_counts_as_root(void)
{
        begin();
        REQUIRE(take() == NEBULA_OK);
        become(0, 65534);
        CHECK(take() == NEBULA_OK);
        become(OTHER, 65534); /* it does not map other users */
        CHECK(take() == NEBULA_INVALID && strstr(error.message, "65534"));
        os = &os_linux;
        CHECK(shell("test $(ls -A .nebula | wc -l) = 1"));
        end();
}

static void a_secret_whose_maker_died_before_it_removed_the_first_name_is_taken(void)
{
        struct os_stat found;

        begin();
        REQUIRE(take() == NEBULA_OK);
        shell("ln .nebula/secret .nebula/secret.tmp-0123456789abcdef && echo x >.nebula/secret.tmp-other");
        CHECK(take() == NEBULA_OK);
        CHECK(os->stat_below(storage, ".nebula/secret.tmp-0123456789abcdef", &found) == -ENOENT);
        CHECK(!os->stat_below(storage, ".nebula/secret.tmp-other", &found));
        end();
}

static void a_secret_is_not_made_behind_a_planted_link(void)
{
        begin();
        CHECK(shell("mkdir outside && ln -s outside .nebula"));
        CHECK(take() != NEBULA_OK && shell("test -z \"$(ls -A outside)\""));
        end();
}

/* Every user who can read the bucket could read a secret in it. */
static void an_object_store_keeps_no_secret(void)
{
        char file[300];

        begin();
        store_close(store);
        store_mem_allow();
        REQUIRE(!store_open("mem://secret", &store, &error));
        CHECK(take() == NEBULA_INVALID && strstr(error.message, "NEBULA_SECRET_FILE"));
        CHECK(secret_take(NULL, true, &key, &error) == NEBULA_INVALID && strstr(error.message, "NEBULA_SECRET_FILE"));
        CHECK(shell("(umask 077 && echo 0123456789abcdef >named)"));
        snprintf(file, sizeof file, "%s/named", storage);
        setenv("NEBULA_SECRET_FILE", file, 1);
        CHECK(take() == NEBULA_OK);
        end();
}

TAP_MAIN(TEST(the_secret_is_a_private_file_with_one_name), TEST(a_secret_of_another_user_is_refused_and_named),
         TEST(the_user_that_a_server_maps_root_to_counts_as_root),
         TEST(a_secret_whose_maker_died_before_it_removed_the_first_name_is_taken), TEST(a_secret_is_not_made_behind_a_planted_link),
         TEST(an_object_store_keeps_no_secret))
