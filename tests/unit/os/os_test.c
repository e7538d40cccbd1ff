#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/bulk_private.h"
#include "os/os.h"
#include "os/thread.h"
#include "tap.h"
#include "test_dir.h"

static char dir[256], path[512], other[512];

static void begin(void)
{
        test_dir_make(dir);
        snprintf(path, sizeof path, "%s/file", dir);
        snprintf(other, sizeof other, "%s/other", dir);
}

static void end(void)
{
        test_dir_remove(dir);
}

static void failures_are_negative_errnos(void)
{
        struct os_stat found;
        struct os_dir *listing;

        begin();
        CHECK(os->open(path, OS_READ) == -ENOENT);
        CHECK(os->stat(path, true, &found) == -ENOENT);
        CHECK(os->opendir(path, &listing) == -ENOENT);
        CHECK(os->close(-1) == -EBADF);
        CHECK(os->mkdir(dir, 0700) == -EEXIST);
        CHECK(os->unlink(dir) == -EISDIR);
        end();
}

static void written_bytes_are_read_back_at_any_offset(void)
{
        char data[10];
        int fd;

        begin();
        fd = os->open(path, OS_READ | OS_WRITE | OS_CREATE | OS_EXCLUSIVE);
        REQUIRE(fd >= 0);
        CHECK(os_write_at(fd, "hello world", 11, 5) == 0);
        CHECK(os_read_at(fd, data, 5, 11) == 0);
        CHECK(!memcmp(data, "world", 5));
        CHECK(os_read_at(fd, data, 10, 11) == -ENODATA);
        CHECK(os->truncate(fd, 3) == 0);
        CHECK(os_read_at(fd, data, 1, 3) == -ENODATA);
        CHECK(os_sync(fd) == 0);
        CHECK(os->close(fd) == 0);
        CHECK(os->open(path, OS_WRITE | OS_CREATE | OS_EXCLUSIVE) == -EEXIST);
        end();
}

static void private_files_are_closed_to_others(void)
{
        struct os_stat found;
        int fd;

        begin();
        fd = os->open(path, OS_WRITE | OS_CREATE);
        REQUIRE(fd >= 0);
        CHECK(os->fstat(fd, &found) == 0);
        CHECK((found.mode & 077) == 0 && found.kind == OS_KIND_FILE && found.uid == os->uid());
        os->close(fd);
        end();
}

static void a_link_is_not_followed_when_told_so(void)
{
        struct os_stat found;
        char command[600];

        begin();
        snprintf(command, sizeof command, "ln -s /etc/passwd %s", path);
        REQUIRE(system(command) == 0);
        CHECK(os->open(path, OS_READ | OS_NOFOLLOW) == -ELOOP);
        CHECK(os->stat(path, false, &found) == 0 && found.kind == OS_KIND_LINK);
        CHECK(os->stat(path, true, &found) == 0 && found.kind == OS_KIND_FILE);
        end();
}

static void a_fifo_in_the_place_of_a_file_blocks_no_caller(void)
{
        char *text, byte;
        size_t size;
        int fd;

        begin();
        REQUIRE(!mkfifo(path, 0600));
        fd = os->open(path, OS_READ); /* no thread writes to it */
        REQUIRE(fd >= 0);
        CHECK(os_read_at(fd, &byte, 1, 0) == -ESPIPE);
        CHECK(!os->close(fd));
        CHECK(os->open(path, OS_WRITE) == -ENXIO);
        CHECK(os_read_file(path, 100, &text, &size) == -ESPIPE);
        end();
}

static void the_flags_of_an_open_file_are_those_that_were_asked_for(void)
{
        int fd;

        begin();
        fd = os->open(path, OS_WRITE | OS_CREATE | OS_APPEND);
        REQUIRE(fd >= 0);
        CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC);
        CHECK((fcntl(fd, F_GETFL) & (O_ACCMODE | O_APPEND | O_NONBLOCK)) == (O_WRONLY | O_APPEND));
        CHECK(!os->close(fd));
        end();
}

static void a_lock_excludes_a_second_holder(void)
{
        int first, second;

        begin();
        first = os->open(path, OS_WRITE | OS_CREATE);
        second = os->open(path, OS_WRITE);
        REQUIRE(first >= 0 && second >= 0);
        CHECK(os->lock(first, OS_LOCK_ALONE) == 0);
        CHECK(os->lock(second, OS_LOCK_ALONE) == -EAGAIN);
        os->close(first);
        CHECK(os->lock(second, OS_LOCK_ALONE) == 0);
        os->close(second);
        end();
}

static void a_whole_file_is_read_up_to_its_limit(void)
{
        char *data;
        size_t size;

        begin();
        CHECK(os_read_file(path, 100, &data, &size) == -ENOENT);
        REQUIRE(os_write_file_atomic(path, "0123456789", 10) == 0);
        REQUIRE(os_read_file(path, 10, &data, &size) == 0);
        CHECK(size == 10 && !strcmp(data, "0123456789"));
        free(data);
        CHECK(os_read_file(path, 9, &data, &size) == -EFBIG);
        CHECK(os_read_file(dir, 100, &data, &size) == -EISDIR);
        /* Files of /proc tell no size. */
        REQUIRE(os_read_file("/proc/self/status", 1 << 20, &data, &size) == 0);
        CHECK(size > 100 && strlen(data) == size);
        free(data);
        CHECK(os_read_file("/proc/self/status", 50, &data, &size) == -EFBIG);
        end();
}

static size_t entry_count(const char *of)
{
        char name[256];
        struct os_dir *listing;
        size_t count = 0;

        if (os->opendir(of, &listing))
                return SIZE_MAX;
        while (os->readdir(listing, name, sizeof name) == 1)
                count++;
        os->closedir(listing);
        return count;
}

static void an_atomic_write_replaces_and_leaves_no_temporary_file(void)
{
        char *data;
        size_t size;

        begin();
        CHECK(os_write_file_atomic(path, "old", 3) == 0);
        CHECK(os_write_file_atomic(path, "newer", 5) == 0);
        REQUIRE(os_read_file(path, 100, &data, &size) == 0);
        CHECK(!strcmp(data, "newer"));
        free(data);
        CHECK(entry_count(dir) == 1);
        CHECK(os->mkdir(other, 0700) == 0);
        CHECK(os_write_file_atomic(other, "x", 1) < 0);
        CHECK(entry_count(dir) == 2);
        end();
}

static void directories_are_made_and_trees_removed_without_following_links(void)
{
        char deep[600], kept[600], command[1300];
        struct os_stat found;

        begin();
        snprintf(deep, sizeof deep, "%s/a//b/c/", dir);
        CHECK(os_make_dirs(deep, 0755) == 0);
        CHECK(os_make_dirs(deep, 0755) == 0);
        CHECK(os->stat(deep, true, &found) == 0 && found.kind == OS_KIND_DIRECTORY);
        snprintf(kept, sizeof kept, "%s/kept", dir);
        CHECK(os_write_file_atomic(kept, "x", 1) == 0);
        CHECK(os_make_dirs(kept, 0755) == -ENOTDIR);
        snprintf(command, sizeof command, "ln -s %s %s/a/link", dir, dir);
        REQUIRE(system(command) == 0);
        snprintf(deep, sizeof deep, "%s/a", dir);
        CHECK(os_remove_tree(deep) == 0);
        CHECK(os->stat(deep, false, &found) == -ENOENT);
        CHECK(os->stat(kept, false, &found) == 0);
        CHECK(os_remove_tree(deep) == 0);
        end();
}

/* <dir>/root with real/file, and links in it to <dir>/outside, which holds one file. */
static void make_links(void)
{
        char command[2000];

        snprintf(command, sizeof command,
                 "cd %s && mkdir root root/real outside && echo precious >outside/file && echo mine >root/real/file && "
                 "ln -s %s/outside root/out && ln -s real root/inside && ln -s ../outside/file root/file && ln -s root again && "
                 "ln -s %s/outside/new root/dangling", dir, dir, dir);
        if (system(command))
                abort();
        snprintf(path, sizeof path, "%s/root", dir);
}

/* A key that leads through a link, or out: every call refuses it with `expected`, and does nothing. */
static void check_refused(const char *through, int expected)
{
        struct os_dir *listing;
        struct os_stat found;
        char key[600], made[600];

        snprintf(key, sizeof key, "%s/file", through);
        snprintf(made, sizeof made, "%s/new", through);
        CHECK(os->open_below(path, key, OS_READ) == expected);
        CHECK(os->open_below(path, made, OS_WRITE | OS_CREATE | OS_EXCLUSIVE) == expected);
        CHECK(os->stat_below(path, key, &found) == expected);
        CHECK(os->rename_below(path, key, "taken") == expected);
        CHECK(os->rename_below(path, "real/file", made) == expected);
        CHECK(os->rename_new_below(path, key, "taken") == expected && os->rename_new_below(path, "real/file", made) == expected);
        CHECK(os->link_below(path, key, dir, "other") == expected);
        CHECK(os->unlink_below(path, key) == expected);
        CHECK(os->mkdir_below(path, made, 0755) == expected);
        CHECK(os->rmdir_below(path, made) == expected);
        CHECK(os->opendir_below(path, through, &listing) == expected);
        CHECK(os_sync_dir_below(path, through) == expected);
}

static void check_below(void)
{
        struct os_stat found;
        struct os_dir *listing;
        char again[300], *text;
        size_t size;
        int fd, result;

        check_refused("out", -ELOOP);
        check_refused("inside", -ELOOP);
        check_refused("..", -EXDEV);
        /* The last name: a link is not followed, but it can be looked at, replaced and removed as itself. */
        CHECK(os->open_below(path, "file", OS_READ) == -ELOOP);
        CHECK(os->open_below(path, "file", OS_WRITE | OS_TRUNCATE) == -ELOOP);
        CHECK(os->open_below(path, "dangling", OS_WRITE | OS_CREATE) < 0);
        CHECK(os->link_below(path, "file", dir, "other") == -ELOOP);
        CHECK(!os->stat_below(path, "file", &found) && found.kind == OS_KIND_LINK);
        CHECK(!os->rename_below(path, "file", "moved") && !os->unlink_below(path, "moved"));
        CHECK(os->mkdir_below(path, "out", 0755) == -EEXIST && os->rmdir_below(path, "out") == -ENOTDIR);
        /* The content of a root, and the path to it, are up to its owner. */
        snprintf(again, sizeof again, "%s/again", dir);
        CHECK(!os->stat_below(again, "real/file", &found) && found.size == 5);
        CHECK(!os->stat_below(again, "", &found) && found.kind == OS_KIND_DIRECTORY);
        CHECK(!os->mkdir_below(again, "real/d", 0755) && !os_sync_dir_below(again, "real") && !os->rmdir_below(again, "real/d"));
        CHECK(os->link_below(path, "real/file", path, "out/new") == -ELOOP && !os->link_below(path, "real/file", dir, "other"));
        REQUIRE(!os->opendir_below(path, "real", &listing));
        CHECK(!os->stat_entry(listing, "file", &found) && found.size == 5);
        os->closedir(listing);
        fd = os->open_below(path, "real/new", OS_READ | OS_WRITE | OS_CREATE | OS_EXCLUSIVE);
        CHECK(fd >= 0 && !os->fstat(fd, &found) && found.mode == 0600);
        os->close(fd);
        CHECK(os->open_below(path, "real/none/x", OS_READ) == -ENOENT && os->open_below(path, "real/new/x", OS_READ) == -ENOTDIR);
        /* -EINVAL: a file system that cannot do it */
        result = os->rename_new_below(path, "real/file", "real/new");
        CHECK(result == -EEXIST || result == -EINVAL);
        CHECK(!os->stat_below(path, "real/file", &found) && found.size == 5 && !found.born_ns);
        CHECK(!os->unlink_below(path, "real/new") && !os->rename_below(path, "real/file", "file") && !os->rename_below(path, "file", "real/file"));
        snprintf(again, sizeof again, "%s/outside/file", dir);
        CHECK(!os_read_file(again, 100, &text, &size) && size == 9);
        free(text);
        snprintf(again, sizeof again, "%s/outside/new", dir);
        CHECK(os->stat(again, false, &found) == -ENOENT);
}

static void below_a_root_no_link_is_followed(void)
{
        begin();
        make_links();
        check_below();
        end();
}

/* From here on openat2 is refused as in a container, or is not there as in an older kernel. */
static bool refuse_openat2(int number)
{
        struct sock_filter filter[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat2, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)number),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = { sizeof filter / sizeof filter[0], filter };

        return !prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

/* In a process whose descriptors 0 to 2 are closed. */
static bool every_descriptor_is_above_standard(void)
{
        char data[4], address[64];
        int pair[2], passed, listener, tcp;
        uint16_t port;
        bool are;

        for (int i = 0; i < 3; i++)
                close(i);
        are = os->open(path, OS_WRITE | OS_CREATE) > 2 && os->open(path, OS_WRITE | OS_CREATE | OS_SHARED) > 2 &&
              os->open_below(dir, "below", OS_WRITE | OS_CREATE) > 2 && os->memfd("test") > 2 && os->watch_open() > 2 &&
              os->socketpair(pair) == 0 && pair[0] > 2 && pair[1] > 2 && os->duplicate(pair[0]) > 2;
        listener = os->listen(other);
        are = are && listener > 2 && os->connect(other) > 2 && os->accept(listener) > 2;
        tcp = os->tcp_listen("127.0.0.1", 0, &port);
        are = are && tcp > 2 && os->tcp_connect("127.0.0.1", port, 10000) > 2 && os->tcp_accept(tcp, address, sizeof address) > 2;
        are = are && os->send(pair[0], "abc", 3, tcp) == 3 && os->receive(pair[1], data, 3, &passed) == 3 && passed > 2;
        for (int i = 0; i < 3; i++)
                are = are && fcntl(i, F_GETFD) < 0;
        return are;
}

/* fault: as test_a_trainer_without_standard_output_prints_into_no_socket_and_no_image */
static void a_program_without_standard_output_prints_into_no_descriptor_of_ours(void)
{
        int status = -1;
        pid_t child;

        begin();
        child = fork();
        if (!child)
                _exit(every_descriptor_is_above_standard() ? 0 : 1);
        CHECK(child > 0 && waitpid(child, &status, 0) == child && !status);
        end();
}

static void below_a_root_no_link_is_followed_where_the_kernel_does_not_help(void)
{
        static const int errors[] = { ENOSYS, EPERM };

        for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
                int status = -1;
                pid_t child;

                begin();
                make_links();
                child = fork();
                if (!child) {
                        CHECK(refuse_openat2(errors[i]) && syscall(SYS_openat2, -1, "x", NULL, 0) < 0 && errno == errors[i]);
                        check_below();
                        _exit(tap_failed_checks ? 1 : 0);
                }
                CHECK(child > 0 && waitpid(child, &status, 0) == child && !status);
                end();
        }
}

static atomic_bool swapping;

static void *swap(void *unused)
{
        char one[600], two[600];

        (void)unused;
        snprintf(one, sizeof one, "%s/real", path);
        snprintf(two, sizeof two, "%s/out", path);
        while (swapping)
                os->exchange(one, two);
        return NULL;
}

/* fault: as test_a_link_in_the_place_of_a_directory_is_followed_by_nothing */
static void a_directory_that_changes_places_with_a_link_leads_nowhere_out(void)
{
        struct os_dir *listing;
        pthread_t thread;
        unsigned hits = 0;

        begin();
        make_links();
        swapping = true;
        REQUIRE(!pthread_create(&thread, NULL, swap, NULL));
        for (int i = 0; i < 20000; i++) {
                int fd = os->open_below(path, "real/x", OS_WRITE | OS_CREATE | OS_EXCLUSIVE);

                hits += fd >= 0;
                if (fd >= 0)
                        os->close(fd);
                os->rename_below(path, "real/x", "real/y");
                os->unlink_below(path, "real/y");
                os->mkdir_below(path, "real/d", 0755);
                os->rmdir_below(path, "real/d");
                if (!os->opendir_below(path, "real", &listing)) {
                        struct os_stat found;

                        CHECK(os->stat_entry(listing, "file", &found) || found.size == 5);
                        os->closedir(listing);
                }
        }
        swapping = false;
        pthread_join(thread, NULL);
        CHECK(hits > 0); /* it was a directory now and then */
        snprintf(other, sizeof other, "%s/outside", dir);
        REQUIRE(!os->opendir(other, &listing));
        for (char name[256]; os->readdir(listing, name, sizeof name) > 0;)
                CHECK(!strcmp(name, "file"));
        os->closedir(listing);
        end();
}

static void a_descriptor_travels_with_its_bytes(void)
{
        char data[4] = "";
        int fds[2], passed, memory = os->memfd("test");
        uint32_t uid, pid;

        REQUIRE(memory >= 0 && os->socketpair(fds) == 0);
        CHECK(os_write_at(memory, "seen", 4, 0) == 0);
        CHECK(os->send(fds[0], "abc", 3, memory) == 3);
        os->close(memory);
        CHECK(os->poll(fds[1], 1000) == 1);
        CHECK(os->receive(fds[1], data, 3, &passed) == 3);
        REQUIRE(passed >= 0);
        CHECK(!memcmp(data, "abc", 3) && os_read_at(passed, data, 4, 0) == 0 && !memcmp(data, "seen", 4));
        os->close(passed);
        CHECK(os->send(fds[0], "d", 1, -1) == 1);
        CHECK(os->receive(fds[1], data, 3, &passed) == 1 && passed == -1);
        CHECK(os->peer(fds[1], &uid, &pid) == 0 && uid == os->uid() && pid == os->pid());
        os->close(fds[0]);
        CHECK(os->receive(fds[1], data, 3, &passed) == 0);
        CHECK(os->send(fds[1], "x", 1, -1) == -EPIPE);
        os->close(fds[1]);
}

static void a_descriptor_for_which_a_process_has_no_number_is_an_error(void)
{
        struct rlimit limit, none;
        char data[4] = "";
        int fds[2], passed = -1;
        int64_t result;

        REQUIRE(os->socketpair(fds) == 0 && !getrlimit(RLIMIT_NOFILE, &limit));
        CHECK(os->send(fds[0], "abc", 3, fds[0]) == 3);
        none = limit;
        none.rlim_cur = 3;
        REQUIRE(!setrlimit(RLIMIT_NOFILE, &none));
        result = os->receive(fds[1], data, 3, &passed);
        CHECK(result == -EMFILE && passed == -1);
        REQUIRE(!setrlimit(RLIMIT_NOFILE, &limit));
        os->close(fds[0]);
        os->close(fds[1]);
}

static void a_socket_file_admits_users_that_may_open_it(void)
{
        struct os_stat found;
        char long_path[300];
        int listener, client, server;

        begin();
        listener = os->listen(path);
        REQUIRE(listener >= 0);
        CHECK(os->stat(path, false, &found) == 0 && (found.mode & 077) == 0);
        CHECK(os->listen(path) == -EADDRINUSE);
        CHECK(os->poll(listener, 0) == 0);
        client = os->connect(path);
        server = os->accept(listener);
        CHECK(client >= 0 && server >= 0);
        os->close(listener);
        os->close(client);
        os->close(server);
        CHECK(os->connect(path) == -ECONNREFUSED);
        memset(long_path, 'x', sizeof long_path - 1);
        long_path[sizeof long_path - 1] = 0;
        CHECK(os->connect(long_path) == -ENAMETOOLONG);
        end();
}

/* fault: as an_agent_that_is_silent_is_named_once_in_its_log */
/* Such as a stopped process: its queue takes some connections, and then no more. */
static void a_listener_that_never_accepts_blocks_no_connect(void)
{
        static int fds[1000];
        struct timeval limit = { .tv_sec = 1 };
        socklen_t size = sizeof limit;
        int listener, count = 0;

        begin();
        listener = os->listen(path);
        REQUIRE(listener >= 0);
        while (count < 1000 && (fds[count] = os->connect(path)) >= 0)
                count++;
        REQUIRE(count > 0 && count < 1000);
        CHECK(fds[count] == -EAGAIN);
        /* A connection that was accepted has no time limit. */
        CHECK(!getsockopt(fds[0], SOL_SOCKET, SO_SNDTIMEO, &limit, &size) && !limit.tv_sec && !limit.tv_usec);
        while (count-- > 0)
                os->close(fds[count]);
        os->close(listener);
        end();
}

static void ignore(int signal)
{
        (void)signal;
}

static void *accept_later(void *listener)
{
        os->sleep_ms(200);
        while (os->poll(*(int *)listener, 500) > 0)
                os->close(os->accept(*(int *)listener));
        return NULL;
}

/* Such as the timer of a profiler. */
static void signals_end_no_connect_that_waits_for_a_busy_listener(void)
{
        struct sigaction handler = { .sa_handler = ignore }, before; /* without SA_RESTART */
        struct itimerval often = { { 0, 20000 }, { 0, 20000 } }, never = { { 0, 0 }, { 0, 0 } };
        static int fds[1000];
        int listener, count = 0, fd;
        int64_t begun;
        pthread_t thread;
        sigset_t alarm, mask;

        begin();
        listener = os->listen(path);
        REQUIRE(listener >= 0);
        while (count < 1000 && (fds[count] = os->connect(path)) >= 0)
                count++;
        sigemptyset(&alarm);
        sigaddset(&alarm, SIGALRM);
        REQUIRE(!sigaction(SIGALRM, &handler, &before) && !pthread_sigmask(SIG_BLOCK, &alarm, &mask));
        REQUIRE(!setitimer(ITIMER_REAL, &often, NULL));
        pthread_sigmask(SIG_UNBLOCK, &alarm, NULL);
        begun = os->now_ns();
        CHECK(os->connect(path) == -EAGAIN && os->now_ns() - begun >= INT64_C(900000000));
        pthread_sigmask(SIG_BLOCK, &alarm, NULL);
        REQUIRE(!pthread_create(&thread, NULL, accept_later, &listener)); /* it inherits the mask */
        pthread_sigmask(SIG_UNBLOCK, &alarm, NULL);
        fd = os->connect(path);
        CHECK(fd >= 0);
        setitimer(ITIMER_REAL, &never, NULL);
        pthread_join(thread, NULL);
        sigaction(SIGALRM, &before, NULL);
        pthread_sigmask(SIG_SETMASK, &mask, NULL);
        os->close(fd);
        while (count-- > 0)
                os->close(fds[count]);
        os->close(listener);
        end();
}

static void *look_at_signals(void *mask)
{
        pthread_sigmask(SIG_SETMASK, NULL, mask);
        return NULL;
}

/* A fault whose signal is blocked ends the program without its handlers, so its place would be unknown. */
static void threads_leave_signals_to_the_program_but_those_of_their_own_faults(void)
{
        static const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL };
        pthread_t thread;
        sigset_t mask;

        for (int is_bulk = 0; is_bulk < 2; is_bulk++) {
                sigemptyset(&mask);
                REQUIRE(!(is_bulk ? bulk_start(&thread, look_at_signals, &mask) : os_thread_start(&thread, look_at_signals, &mask, false)));
                pthread_join(thread, NULL);
                CHECK(sigismember(&mask, SIGTERM) && sigismember(&mask, SIGCHLD) && sigismember(&mask, SIGUSR1));
                for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
                        CHECK(!sigismember(&mask, faults[i]));
        }
}

static void *sleep_until_reported(void *pipe)
{
        char byte;

        return read(*(int *)pipe, &byte, 1) == 1 ? pipe : NULL;
}

static void a_thread_is_kept_off_the_processor_of_the_caller_where_there_is_another(void)
{
        cpu_set_t all, alone, before, now;
        pthread_t thread;
        void *told;
        int ends[2], here;

        REQUIRE(pipe(ends) == 0 && sched_getaffinity(0, sizeof all, &all) == 0);
        REQUIRE(os_thread_start(&thread, sleep_until_reported, &ends[0], false) == 0);
        here = sched_getcpu();
        CPU_ZERO(&alone);
        CPU_SET(here, &alone);
        REQUIRE(sched_setaffinity(0, sizeof alone, &alone) == 0);
        if (CPU_COUNT(&all) > 1) {
                CHECK(os_thread_keep_off(thread, &before) && CPU_EQUAL(&before, &all));
                CHECK(pthread_getaffinity_np(thread, sizeof now, &now) == 0 && !CPU_ISSET(here, &now));
                CHECK(CPU_COUNT(&now) == CPU_COUNT(&all) - 1);
        }
        CHECK(pthread_setaffinity_np(thread, sizeof alone, &alone) == 0);
        CHECK(!os_thread_keep_off(thread, &before));
        CHECK(pthread_getaffinity_np(thread, sizeof now, &now) == 0 && CPU_EQUAL(&now, &alone));
        CHECK(sched_setaffinity(0, sizeof all, &all) == 0);
        CHECK(write(ends[1], "", 1) == 1 && pthread_join(thread, &told) == 0 && told);
        close(ends[0]);
        close(ends[1]);
}

static void memory_is_mapped_shared_and_punched(void)
{
        void *data, *again;
        int fd = os->memfd("test");

        REQUIRE(fd >= 0 && os->truncate(fd, 8192) == 0);
        REQUIRE(os->map(fd, 0, 8192, OS_MAP_READ | OS_MAP_WRITE, &data) == 0);
        REQUIRE(os->map(fd, 0, 8192, OS_MAP_READ, &again) == 0);
        memset(data, 7, 8192);
        CHECK(((char *)again)[5000] == 7);
        CHECK(os->punch(fd, 4096, 4096) == 0);
        CHECK(((char *)again)[5000] == 0 && ((char *)again)[5] == 7);
        CHECK(os->unmap(data, 8192) == 0 && os->unmap(again, 8192) == 0);
        CHECK(os->map(-1, 0, 4096, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE | OS_MAP_ANONYMOUS, &data) == 0);
        CHECK(os->advise(data, 4096, OS_ADVISE_DONTNEED) == 0);
        CHECK(os->unmap(data, 4096) == 0);
        os->close(fd);
}

static unsigned long address_space(void)
{
        unsigned long pages = 0;
        FILE *file = fopen("/proc/self/statm", "r");

        if (file && fscanf(file, "%lu", &pages) != 1)
                pages = 0;
        if (file)
                fclose(file);
        return pages;
}

/* The file's huge pages can be huge pages of the address space, and nothing else of it is taken. */
static void a_large_file_is_mapped_where_its_huge_pages_fit(void)
{
        const uint64_t huge = 2u << 20, size = 2 * huge + 100, offsets[] = { 0, 4096, huge };
        int fd = os->memfd("test");
        unsigned long before;
        void *data;

        REQUIRE(fd >= 0 && os->truncate(fd, 4 * huge) == 0);
        for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
                before = address_space();
                REQUIRE(before && os->map(fd, offsets[i], size, OS_MAP_READ | OS_MAP_WRITE, &data) == 0);
                CHECK(((uintptr_t)data - offsets[i]) % huge == 0);
                CHECK(address_space() == before + 2 * huge / 4096 + 1);
                ((char *)data)[size - 1] = 'e';
                CHECK(os->unmap(data, size) == 0 && address_space() == before);
                REQUIRE(os->map(fd, offsets[i] + 2 * huge, 4096, OS_MAP_READ, &data) == 0);
                CHECK(((char *)data)[99] == 'e');
                os->unmap(data, 4096);
        }
        before = address_space();
        CHECK(os->map(-1, 0, huge, OS_MAP_READ | OS_MAP_WRITE, &data) == -EBADF && address_space() == before);
        os->close(fd);
}

static void a_program_runs_to_its_end(void)
{
        char *good[] = { (char *)"sh", (char *)"-c", (char *)"exit 7", NULL };
        char *killed[] = { (char *)"sh", (char *)"-c", (char *)"kill -9 $$", NULL };
        int code = -1;

        CHECK(os->spawn("/bin/sh", good, NULL, &code) == 0 && code == 7);
        CHECK(os->spawn("/bin/sh", killed, NULL, &code) == 0 && code == 128 + 9);
        CHECK(os->spawn("/nonexistent", good, NULL, &code) == -ENOENT);
}

static void a_program_has_the_given_stdio(void)
{
        char *words[] = { (char *)"sh", (char *)"-c", (char *)"cat; echo reason >&2", NULL };
        int in = os->memfd("in"), out = os->memfd("out"), wrong = os->memfd("error"), code = -1;
        char text[64] = "";

        CHECK(os_write_at(in, "question", 8, 0) == 0);
        CHECK(os->spawn("/bin/sh", words, (const int[3]){ in, out, wrong }, &code) == 0 && code == 0);
        CHECK(os->pread(out, text, sizeof text - 1, 0) == 8 && !strcmp(text, "question"));
        memset(text, 0, sizeof text);
        CHECK(os->pread(wrong, text, sizeof text - 1, 0) == 7 && !strcmp(text, "reason\n"));
        os->close(in);
        os->close(out);
        os->close(wrong);
}

static void a_program_inherits_the_descriptors_that_it_is_to(void)
{
        int fd = os->memfd("inherited");
        char command[64];

        snprintf(command, sizeof command, "test -e /proc/self/fd/%d", fd);
        CHECK(system(command) != 0);
        CHECK(os->inherit(fd, true) == 0 && system(command) == 0);
        CHECK(os->inherit(fd, false) == 0 && system(command) != 0);
        os->close(fd);
}

static char *const *shell(char *command)
{
        static char *argv[4];

        argv[0] = (char *)"sh";
        argv[1] = (char *)"-c";
        argv[2] = command;
        return argv;
}

static void what_a_program_prints_is_read_within_a_time_and_a_size(void)
{
        static const char *const survivors[] = { "sleep 100", "sleep 100 & exit 0", "exec >&-; sleep 100", "(sleep 100) & exec >&-; wait", NULL };
        char text[8] = "";
        size_t size = 0;
        int code = -1;

        CHECK(os->run("/bin/sh", shell((char *)"printf 12345678; echo no >&2; cat; exit 7"), 60000, text, sizeof text, &size, &code) == 0);
        CHECK(code == 7 && size == 8 && !memcmp(text, "12345678", 8));
        CHECK(os->run("/bin/sh", shell((char *)"kill -9 $$"), 60000, text, sizeof text, &size, &code) == 0 && code == 128 + 9 && size == 0);
        CHECK(os->run("/bin/sh", shell((char *)"printf 123456789"), 60000, text, sizeof text, &size, &code) == -EFBIG);
        CHECK(os->run("/nonexistent", shell((char *)""), 60000, text, sizeof text, &size, &code) == -ENOENT);
        for (const char *const *command = survivors; *command; command++) {
                int64_t since_ns = os->now_ns();

                CHECK(os->run("/bin/sh", shell((char *)(uintptr_t)*command), 100, text, sizeof text, &size, &code) == -ETIMEDOUT);
                CHECK(os->now_ns() - since_ns < 50000000000); /* and none of its processes is left that would keep the pipe open */
        }
}

static void the_machine_tells_about_itself(void)
{
        int64_t before = os->now_ns(), cpu = os->thread_cpu_ns();
        struct os_space space;
        char bytes[64] = { 0 };
        size_t zeros = 0;

        os->sleep_ms(2);
        CHECK(os->now_ns() - before >= 2000000);
        CHECK(os->thread_cpu_ns() >= cpu);
        CHECK(os->wall_ns() > 1700000000ll * 1000000000);
        CHECK(os->cpu_count() >= 1);
        CHECK(os->memory_free() > 1 << 20);
        CHECK(os->memory_stalled() <= 1000);
        CHECK(os->space("/", &space) == 0 && space.total_bytes >= space.free_bytes && space.block_bytes);
        CHECK(os->random(bytes, sizeof bytes) == 0);
        for (size_t i = 0; i < sizeof bytes; i++)
                zeros += !bytes[i];
        CHECK(zeros < 32);
}

static void a_process_is_alive_until_it_ends(void)
{
        char text[64] = "";
        unsigned pid = 0;
        FILE *pipe = popen("echo $$; exec 1>&-; sleep 0.05", "r");

        CHECK(os->alive(os->pid()));
        CHECK(!os->alive(0));
        CHECK(!os->alive(0xffffffff));
        REQUIRE(pipe && fgets(text, sizeof text, pipe) && sscanf(text, "%u", &pid) == 1);
        CHECK(os->alive(pid));
        /* No process has waited for it yet: it is a zombie. */
        for (int i = 0; i < 2000 && os->alive(pid); i++)
                os->sleep_ms(10);
        CHECK(!os->alive(pid));
        pclose(pipe);
}

TAP_MAIN(TEST(failures_are_negative_errnos), TEST(written_bytes_are_read_back_at_any_offset),
         TEST(private_files_are_closed_to_others), TEST(a_link_is_not_followed_when_told_so),
         TEST(a_fifo_in_the_place_of_a_file_blocks_no_caller),
         TEST(the_flags_of_an_open_file_are_those_that_were_asked_for), TEST(a_lock_excludes_a_second_holder), TEST(a_whole_file_is_read_up_to_its_limit),
         TEST(an_atomic_write_replaces_and_leaves_no_temporary_file),
         TEST(directories_are_made_and_trees_removed_without_following_links),
         TEST(below_a_root_no_link_is_followed), TEST(below_a_root_no_link_is_followed_where_the_kernel_does_not_help),
         TEST(a_directory_that_changes_places_with_a_link_leads_nowhere_out),
         TEST(a_descriptor_travels_with_its_bytes), TEST(a_descriptor_for_which_a_process_has_no_number_is_an_error), TEST(a_program_without_standard_output_prints_into_no_descriptor_of_ours), TEST(a_socket_file_admits_users_that_may_open_it), TEST(a_listener_that_never_accepts_blocks_no_connect), TEST(signals_end_no_connect_that_waits_for_a_busy_listener),
        TEST(threads_leave_signals_to_the_program_but_those_of_their_own_faults),
         TEST(a_thread_is_kept_off_the_processor_of_the_caller_where_there_is_another),
         TEST(memory_is_mapped_shared_and_punched), TEST(a_large_file_is_mapped_where_its_huge_pages_fit), TEST(a_program_runs_to_its_end),
         TEST(a_program_has_the_given_stdio), TEST(a_program_inherits_the_descriptors_that_it_is_to), TEST(what_a_program_prints_is_read_within_a_time_and_a_size),
         TEST(the_machine_tells_about_itself), TEST(a_process_is_alive_until_it_ends))
