/* The records of nodes are in a storage path to which other users may write. */
#include "agent/peers/member.h"

#include "agent/agent_storage.h"

#define OTHER 12345u

static char storage[256];
static struct store *store;
static struct nebula_error error;
static struct os_table table;
static uint32_t own_uid;

/* True: it succeeds. */
static bool shell(const char *command)
{
        char text[1000];

        snprintf(text, sizeof text, "cd %s && %s", storage, command);
        return !system(text);
}

static void begin(void)
{
        unsetenv("NEBULA_PEERS");
        storage_make(storage);
        store = storage_look(storage);
}

static void end(void)
{
        os = &os_linux;
        store_close(store);
        storage_remove(storage);
}

static uint32_t report_uid(void)
{
        return own_uid;
}

/* Acts as another user than the one that made the files. */
static void become(uint32_t uid)
{
        own_uid = uid;
        table = os_linux;
        table.uid = report_uid;
        os = &table;
}

/* A server with root_squash: files that root makes belong to the user nobody. */
static int stat_as_nobody(int fd, struct os_stat *ret_stat)
{
        int result = os_linux.fstat(fd, ret_stat);

        if (!result)
                ret_stat->uid = 65534;
        return result;
}

/* Returns the number of nodes. -1: the list cannot be read. */
static int count_nodes(void)
{
        struct member_list list = { 0 };
        int count;

        if (member_names(store, &list, &error))
                return -1;
        count = (int)list.count;
        member_list_done(&list);
        return count;
}

static void a_record_is_found_until_its_agent_takes_it_back(void)
{
        struct member own = { .node = "a/b", .address = "127.0.0.1", .port = 4711, .nonce = 7 }, other = own, there;

        begin();
        other.nonce = 8;
        CHECK(count_nodes() == 0 && member_load(store, "a/b", false, &there, &error) == NEBULA_NOT_FOUND);
        CHECK(!member_announce(store, &own, false, &error) && !member_announce(store, &own, false, &error) && count_nodes() == 1);
        REQUIRE(!member_load(store, "a/b", false, &there, &error));
        CHECK(there.port == 4711 && there.nonce == 7 && !strcmp(there.address, "127.0.0.1") && !strcmp(there.node, "a/b"));
        member_withdraw(store, &other, false); /* the predecessor of the agent whose record is stored */
        CHECK(count_nodes() == 1);
        member_withdraw(store, &own, false);
        CHECK(count_nodes() == 0);
        end();
}

static void a_spare_node_is_listed_behind_the_nodes_with_ranks_and_is_none_of_them(void)
{
        struct member a = { .node = "a", .address = "127.0.0.1", .port = 1, .nonce = 7 }, b = a, there;
        struct member_list list;

        begin();
        strcpy(b.node, "b.spare");
        REQUIRE(!member_announce(store, &a, true, &error) && !member_announce(store, &b, true, &error) && !member_announce(store, &b, false, &error));
        REQUIRE(!member_names(store, &list, &error));
        CHECK(list.count == 1 && list.spare_count == 2 && !strcmp(list.names[0], "b.spare") && !strcmp(list.names[1], "a"));
        member_list_done(&list);
        CHECK(!member_load(store, "a", true, &there, &error) && member_load(store, "a", false, &there, &error) == NEBULA_NOT_FOUND);
        b.nonce = 8; /* the next agent of that node */
        member_withdraw(store, &b, true);
        member_replace(store, &b, false);
        REQUIRE(!member_names(store, &list, &error));
        CHECK(list.count == 1 && list.spare_count == 1 && !strcmp(list.names[1], "a"));
        member_list_done(&list);
        end();
}

static void a_job_without_storage_has_no_records(void)
{
        struct member own = { .node = "a", .address = "127.0.0.1", .port = 4711, .nonce = 7 }, there;
        struct member_list list;

        CHECK(member_announce(NULL, &own, false, &error) == NEBULA_INVALID && strstr(error.message, "NEBULA_PEERS"));
        CHECK(member_names(NULL, &list, &error) == NEBULA_INVALID && member_load(NULL, "a", false, &there, &error) == NEBULA_INVALID);
        member_remove_gone(NULL, "a", false, "b");
        member_withdraw(NULL, &own, false);
        setenv("NEBULA_PEERS", "h:1,[::1]:2", 1);
        REQUIRE(!member_names(NULL, &list, &error));
        CHECK(list.count == 2 && !member_announce(NULL, &own, false, &error) && !member_load(NULL, list.names[1], false, &there, &error) && there.port == 1);
        member_list_done(&list);
        unsetenv("NEBULA_PEERS");
}

static void nothing_is_made_behind_a_planted_link(void)
{
        static const char *const links[] = { ".nebula", ".nebula/nodes" };
        struct member own = { .node = "a", .address = "127.0.0.1", .port = 1, .nonce = 7 };

        NEEDS_FILES("links");
        for (size_t i = 0; i < sizeof links / sizeof links[0]; i++) {
                char command[600];

                begin();
                snprintf(command, sizeof command, "mkdir -p outside .nebula && { [ %s = .nebula ] && rmdir .nebula; ln -s %s/outside %s; }",
                         links[i], storage, links[i]);
                shell(command);
                CHECK(member_announce(store, &own, false, &error) != NEBULA_OK);
                CHECK(count_nodes() <= 0);
                member_withdraw(store, &own, false);
                CHECK(shell("test -z \"$(ls -A outside)\""));
                end();
        }
}

static void a_record_is_believed_that_is_of_its_name(void)
{
        struct member own = { .node = "a", .address = "127.0.0.1", .port = 4711, .nonce = 7 }, there;
        size_t size;
        char *text;

        begin();
        REQUIRE(!member_announce(store, &own, false, &error));
        text = storage_read(storage, ".nebula/nodes/a.json", &size);
        REQUIRE(text);
        storage_write(storage, ".nebula/nodes/b.json", text, size);
        free(text);
        CHECK(count_nodes() == 2 && member_load(store, "b", false, &there, &error) == NEBULA_CORRUPT && strstr(error.message, "it names node \"a\""));
        end();
}

/* fault: as a_secret_of_another_user_is_refused_and_named */
static void a_record_is_believed_that_is_a_file_of_ones_own(void)
{
        struct member own = { .node = "a", .address = "127.0.0.1", .port = 4711, .nonce = 7 }, there;

        NEEDS_FILES("links and owners");
        begin();
        REQUIRE(!member_announce(store, &own, false, &error));
        shell("ln -s a.json .nebula/nodes/c.json && mkdir .nebula/nodes/d.json");
        CHECK(count_nodes() == 1);
        CHECK(member_load(store, "c", false, &there, &error) != NEBULA_OK && member_load(store, "d", false, &there, &error) != NEBULA_OK);
        become(OTHER);
        store_close(store);
        store = storage_look(storage);
        CHECK(count_nodes() == 0);
        CHECK(member_load(store, "a", false, &there, &error) == NEBULA_INVALID && strstr(error.message, "does not trust it"));
        end();
}

/* A server with root_squash. A new agent has written no file yet from which it could learn that. */
static void records_that_a_server_gives_to_another_user_are_roots(void)
{
        NEEDS_FILES("owners");
        if (os_linux.uid())
                SKIP("needs to be root");
        begin();
        CHECK(shell("mkdir -p .nebula/nodes && echo x >.nebula/nodes/a.json && chown -R 65534 .nebula"));
        CHECK(count_nodes() == 0);
        table = os_linux;
        table.fstat = stat_as_nobody;
        os = &table;
        CHECK(count_nodes() == 1);
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

TAP_MAIN(TEST(a_record_is_found_until_its_agent_takes_it_back), TEST(a_spare_node_is_listed_behind_the_nodes_with_ranks_and_is_none_of_them),
         TEST(a_job_without_storage_has_no_records),
         TEST(nothing_is_made_behind_a_planted_link), TEST(a_record_is_believed_that_is_of_its_name),
         TEST(a_record_is_believed_that_is_a_file_of_ones_own), TEST(records_that_a_server_gives_to_another_user_are_roots),
         TEST(a_record_that_leads_to_no_host_is_refused))
