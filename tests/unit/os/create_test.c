/* The permissions of new files. Each case runs in a process of its own, because os_umask_take works once per process. */
#include "os/os_create.h"

#include <errno.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "os/os.h"
#include "tap.h"

#define OTHER_GROUP 54321

static char base[64];

static unsigned mode_of(const char *name)
{
        char path[128];
        struct stat found;

        snprintf(path, sizeof path, "%s/%s", base, name);
        return stat(path, &found) ? 0xffff : found.st_mode & 07777;
}

static unsigned group_of(const char *name)
{
        char path[128];
        struct stat found;

        snprintf(path, sizeof path, "%s/%s", base, name);
        return stat(path, &found) ? 0xffff : found.st_gid;
}

static int make_file(const char *name, int flags)
{
        char path[128];
        int fd;

        snprintf(path, sizeof path, "%s/%s", base, name);
        fd = os->open(path, OS_WRITE | OS_CREATE | flags);
        if (fd >= 0)
                os->close(fd);
        return fd < 0 ? fd : 0;
}

static int make_directory(const char *name, uint32_t mode)
{
        char path[128];

        snprintf(path, sizeof path, "%s/%s", base, name);
        return os->mkdir(path, mode);
}

/* What `run` checks in a child counts here. */
static void in_child(void (*run)(void))
{
        int status = 1;
        pid_t pid;

        strcpy(base, "/tmp/nebula-create-XXXXXX");
        REQUIRE(mkdtemp(base));
        fflush(stdout);
        pid = fork();
        if (!pid) {
                run();
                fflush(stdout);
                _exit(tap_failed_checks != 0);
        }
        CHECK(waitpid(pid, &status, 0) == pid && !status);
        os_remove_tree(base);
}

static void as_it_is(void)
{
        umask(027);
        os_create_as(0, OS_CREATE_UNKNOWN);
        CHECK(!make_file("shared", OS_SHARED) && mode_of("shared") == 0640);
        CHECK(!make_file("private", 0) && mode_of("private") == 0600);
        CHECK(!make_directory("directory", 0777) && mode_of("directory") == 0750);
}

static void a_process_that_keeps_its_umask_makes_files_by_it(void)
{
        in_child(as_it_is);
}

static void as_reported(void)
{
        umask(027);
        os_umask_take();
        CHECK(!make_file("default", OS_SHARED) && mode_of("default") == 0640);
        os_create_as(002, OS_CREATE_UNKNOWN);
        CHECK(!make_file("a", OS_SHARED | OS_EXCLUSIVE) && mode_of("a") == 0664);
        CHECK(!make_directory("b", 0777) && mode_of("b") == 0775);
        CHECK(!make_file("private", 0) && mode_of("private") == 0600);
        CHECK(!make_directory("own", 0700) && mode_of("own") == 0700);
        os_create_as(077, OS_CREATE_UNKNOWN);
        CHECK(!make_file("c", OS_SHARED | OS_APPEND) && mode_of("c") == 0600);
        CHECK(!make_file("a", OS_SHARED) && mode_of("a") == 0664); /* it was there */
        CHECK(make_file("a", OS_SHARED | OS_EXCLUSIVE) == -EEXIST);
        os_create_as(OS_CREATE_UNKNOWN, OS_CREATE_UNKNOWN);
        CHECK(!make_directory("e", 0777) && mode_of("e") == 0750);
}

static void each_thread_of_an_agent_makes_files_by_the_umask_that_it_is_reported(void)
{
        in_child(as_reported);
}

static void below_acl(void)
{
        /* As `setfacl -d -m u::rwx,g::r-x,o::---,u:54321:rwx,m::rwx`: pairs of tag and rights, and whom they are of. */
        static const struct {
                uint32_t version;
                struct { uint16_t tag, rights; uint32_t id; } entries[5];
        } acl = { 2, { { 1, 7, UINT32_MAX }, { 2, 7, OTHER_GROUP }, { 4, 5, UINT32_MAX }, { 16, 7, UINT32_MAX }, { 32, 0, UINT32_MAX } } };

        if (setxattr(base, "system.posix_acl_default", &acl, sizeof acl, 0)) {
                printf("# no default ACLs in %s\n", base);
                return;
        }
        umask(077);
        CHECK(!make_file("native", OS_SHARED) && !make_directory("natives", 0777));
        os_umask_take();
        os_create_as(077, OS_CREATE_UNKNOWN);
        CHECK(!make_file("file", OS_SHARED) && mode_of("file") == mode_of("native") && mode_of("file") == 0660);
        CHECK(!make_directory("directory", 0777) && mode_of("directory") == mode_of("natives") && mode_of("directory") == 0770);
}

/* fault: as test_each_job_has_its_own_umask_though_one_agent_serves_them */
static void default_acls_take_the_place_of_the_umask_as_they_do_for_other_programs(void)
{
        in_child(below_acl);
}

static void in_groups(void)
{
        CHECK(!chown(base, (uid_t)-1, getegid()));
        os_umask_take();
        os_create_as(022, OTHER_GROUP);
        CHECK(!make_file("a", OS_SHARED) && !make_directory("b", 0777) && !make_file("private", 0));
        if (geteuid()) {
                CHECK(group_of("a") == getegid()); /* it is no member */
                return;
        }
        CHECK(group_of("a") == OTHER_GROUP && group_of("b") == OTHER_GROUP && group_of("private") == getegid());
        CHECK(!chown(base, (uid_t)-1, 4711) && !chmod(base, 02775));
        CHECK(!make_file("c", OS_SHARED) && !make_directory("d", 0777));
        CHECK(group_of("c") == 4711 && group_of("d") == 4711 && mode_of("d") == 02755);
}

static void files_have_the_group_that_the_thread_is_told_unless_their_directory_hands_down_its_own(void)
{
        in_child(in_groups);
}

static void self(void)
{
        uint32_t mask, group;

        umask(031);
        CHECK(geteuid() || !setegid(4711));
        os_create_self(&mask, &group);
        CHECK(mask == 031 && group == getegid());
}

static void a_process_knows_its_umask_and_group_without_changing_them(void)
{
        in_child(self);
}

TAP_MAIN(TEST(a_process_that_keeps_its_umask_makes_files_by_it), TEST(each_thread_of_an_agent_makes_files_by_the_umask_that_it_is_reported),
         TEST(default_acls_take_the_place_of_the_umask_as_they_do_for_other_programs),
         TEST(files_have_the_group_that_the_thread_is_told_unless_their_directory_hands_down_its_own),
         TEST(a_process_knows_its_umask_and_group_without_changing_them))
