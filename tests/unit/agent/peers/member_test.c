/* The secret and the records of nodes are in a storage path to which other users may write. */
#include "agent/peers/member.h"

#include <errno.h>
#include <stdio.h>

#include "os/os.h"
#include "tap.h"
#include "test_dir.h"

#define OTHER 12345u

static char storage[256];
static struct tls_key key;
static struct nebula_error error;
static struct os_table table;
static uint32_t own_uid, server_uid; /* server_uid: whose the files are that this process makes; 0: its own */

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
        unsetenv("NEBULA_PEERS");
}

static void end(void)
{
        os = &os_linux;
        test_dir_remove(storage);
}

static enum nebula_status take(void)
{
        memset(&error, 0, sizeof error);
        return member_key(storage, &key, &error);
}

static uint32_t tell_uid(void)
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

/* As another user than the one that has made the files. */
static void become(uint32_t uid, uint32_t server)
{
        own_uid = uid;
        server_uid = server;
        table = os_linux;
        table.uid = tell_uid;
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
        CHECK(take() == NEBULA_INVALID && strstr(error.message, "is no file"));
        shell("rm .nebula/secret && mkdir -m 700 .nebula/secret");
        CHECK(take() == NEBULA_INVALID && strstr(error.message, "is no file"));
        shell("rmdir .nebula/secret && ln -s ../kept .nebula/secret");
        CHECK(take() != NEBULA_OK && error.sys_errno);
        shell("rm .nebula/secret && mv kept .nebula/secret");
        CHECK(take() == NEBULA_OK);
        shell("printf 'too short' >.nebula/secret");
        CHECK(take() == NEBULA_INVALID && strstr(error.message, "at least 16 bytes"));
        end();
}

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
        /* Root may read it, and refuses it too. */
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
static void what_a_server_gives_the_files_of_root_to_is_roots(void)
{
        begin();
        REQUIRE(take() == NEBULA_OK);
        become(0, 65534);
        CHECK(take() == NEBULA_OK);
        become(OTHER, 65534); /* of other users it gives nothing away */
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

static void nothing_is_made_behind_a_planted_link(void)
{
        static const char *const links[] = { ".nebula", ".nebula/nodes" };
        struct member own = { .node = "a", .address = "127.0.0.1", .port = 1, .nonce = 7 };

        for (size_t i = 0; i < sizeof links / sizeof links[0]; i++) {
                struct member_list list = { 0 };
                struct os_dir *dir;
                char command[600], outside[300], name[256];

                begin();
                snprintf(command, sizeof command, "mkdir -p outside .nebula && { [ %s = .nebula ] && rmdir .nebula; ln -s %s/outside %s; }",
                         links[i], storage, links[i]);
                shell(command);
                if (!i)
                        CHECK(take() != NEBULA_OK);
                CHECK(member_announce(storage, &own, &error) != NEBULA_OK);
                CHECK(member_names(storage, &list, &error) != NEBULA_OK || !list.count);
                member_list_done(&list);
                member_withdraw(storage, &own);
                snprintf(outside, sizeof outside, "%s/outside", storage);
                REQUIRE(!os->opendir(outside, &dir));
                CHECK(os->readdir(dir, name, sizeof name) == 0);
                os->closedir(dir);
                end();
        }
}

static void a_record_is_believed_that_is_ones_own_and_of_its_name(void)
{
        struct member own = { .node = "a", .address = "127.0.0.1", .port = 4711, .nonce = 7 }, there;
        struct member_list list = { 0 };

        begin();
        REQUIRE(!member_announce(storage, &own, &error) && !member_load(storage, "a", &there, &error));
        CHECK(there.port == 4711 && there.nonce == 7 && !strcmp(there.address, "127.0.0.1"));
        shell("cp .nebula/nodes/a.json .nebula/nodes/b.json && ln -s a.json .nebula/nodes/c.json && mkdir .nebula/nodes/d.json");
        REQUIRE(!member_names(storage, &list, &error));
        CHECK(list.count == 2);
        member_list_done(&list);
        CHECK(member_load(storage, "b", &there, &error) == NEBULA_CORRUPT && strstr(error.message, "that of node \"a\""));
        CHECK(member_load(storage, "c", &there, &error) != NEBULA_OK && member_load(storage, "d", &there, &error) != NEBULA_OK);
        become(OTHER, 0);
        REQUIRE(!member_names(storage, &list, &error));
        CHECK(!list.count);
        member_list_done(&list);
        CHECK(member_load(storage, "a", &there, &error) == NEBULA_INVALID && strstr(error.message, "not believed"));
        end();
}

static void a_record_that_leads_to_no_host_is_refused(void)
{
        static const char *const addresses[] = { "", "a b", "a/b", "-x;y", "\n", "host\x01" };
        struct member own = { .node = "a", .port = 1, .nonce = 7 }, there;

        for (size_t i = 0; i <= sizeof addresses / sizeof addresses[0]; i++) {
                bool no_port = i == sizeof addresses / sizeof addresses[0];
                char *text;
                size_t size;

                strcpy(own.address, no_port ? "127.0.0.1" : addresses[i]);
                own.port = no_port ? 0 : 1;
                REQUIRE(!member_format(&own, &text, &size, NULL));
                CHECK(member_read(text, size, &there, &error) == NEBULA_CORRUPT);
                free(text);
        }
}

TAP_MAIN(TEST(the_secret_is_a_private_file_with_one_name), TEST(a_secret_of_another_user_is_refused_and_named),
         TEST(what_a_server_gives_the_files_of_root_to_is_roots),
         TEST(a_secret_whose_maker_died_before_it_removed_the_first_name_is_taken), TEST(nothing_is_made_behind_a_planted_link),
         TEST(a_record_is_believed_that_is_ones_own_and_of_its_name), TEST(a_record_that_leads_to_no_host_is_refused))
