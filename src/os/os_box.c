#include "os/os_box.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#if !OS_BOX_HAS_CALLS
#elif defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#endif

#define X32_BIT 0x40000000u

/* Everything that the table of os.h, libc, OpenSSL, libcurl and io_uring ask for. The calls of a running agent come first. A call that an architecture or
 * an older libc does not know is left out by the preprocessor. */
#define CALL(name) __NR_##name,
#ifdef ARCH
static const uint32_t calls[] = {
        CALL(futex) CALL(read) CALL(write) CALL(pread64) CALL(pwrite64) CALL(epoll_pwait) CALL(sendmsg) CALL(recvmsg) CALL(clock_nanosleep) CALL(io_uring_enter)
        /* files */
        CALL(openat) CALL(close) CALL(readv) CALL(writev) CALL(preadv) CALL(pwritev) CALL(preadv2) CALL(pwritev2) CALL(lseek) CALL(fsync) CALL(fdatasync)
        CALL(sync_file_range) CALL(ftruncate) CALL(truncate) CALL(fallocate) CALL(fstat) CALL(newfstatat) CALL(statx) CALL(statfs) CALL(fstatfs) CALL(faccessat)
        CALL(renameat) CALL(renameat2) CALL(linkat) CALL(unlinkat) CALL(symlinkat) CALL(mkdirat) CALL(readlinkat) CALL(getdents64) CALL(getcwd) CALL(chdir)
        CALL(fchdir) CALL(umask) CALL(fchmod) CALL(fchmodat) CALL(fchown) CALL(fchownat) CALL(utimensat) CALL(copy_file_range) CALL(sendfile) CALL(ioctl)
        CALL(fcntl) CALL(flock) CALL(dup) CALL(dup3) CALL(memfd_create) CALL(fadvise64) CALL(readahead) CALL(pipe2) CALL(eventfd2)
        CALL(getxattr) CALL(lgetxattr) CALL(fgetxattr) CALL(setxattr) CALL(fsetxattr)
        /* memory */
        CALL(mmap) CALL(munmap) CALL(mremap) CALL(mprotect) CALL(madvise) CALL(mincore) CALL(mlock) CALL(mlock2) CALL(munlock) CALL(brk) CALL(msync) CALL(membarrier)
        CALL(get_mempolicy) CALL(mbind)
        /* sockets */
        CALL(socket) CALL(socketpair) CALL(bind) CALL(listen) CALL(accept) CALL(accept4) CALL(connect) CALL(getsockname) CALL(getpeername) CALL(getsockopt)
        CALL(setsockopt) CALL(sendto) CALL(recvfrom) CALL(sendmmsg) CALL(recvmmsg) CALL(shutdown) CALL(ppoll) CALL(pselect6) CALL(epoll_create1) CALL(epoll_ctl)
        CALL(io_uring_setup) CALL(io_uring_register)
        /* threads, signals, time, and what a process asks about itself */
        CALL(clone) CALL(exit) CALL(exit_group) CALL(set_robust_list) CALL(get_robust_list) CALL(set_tid_address) CALL(gettid) CALL(getpid) CALL(getppid)
        CALL(getuid) CALL(geteuid) CALL(getgid) CALL(getegid) CALL(getgroups) CALL(getresuid) CALL(getresgid) CALL(getpgid) CALL(getsid) CALL(setsid) CALL(setpgid)
        CALL(kill) CALL(tkill) CALL(tgkill) CALL(rt_sigaction) CALL(rt_sigprocmask) CALL(rt_sigreturn) CALL(rt_sigtimedwait) CALL(rt_sigpending)
        CALL(rt_sigsuspend) CALL(rt_sigqueueinfo) CALL(rt_tgsigqueueinfo) CALL(sigaltstack) CALL(restart_syscall) CALL(nanosleep) CALL(clock_gettime)
        CALL(clock_getres) CALL(gettimeofday) CALL(timerfd_create) CALL(timerfd_settime) CALL(timerfd_gettime) CALL(setitimer) CALL(getrandom) CALL(sched_yield)
        CALL(sched_getaffinity) CALL(sched_setaffinity) CALL(sched_getparam) CALL(sched_getscheduler) CALL(sched_get_priority_max) CALL(sched_get_priority_min)
        CALL(setpriority) CALL(getpriority) CALL(ioprio_set) CALL(ioprio_get) CALL(getrlimit) CALL(setrlimit) CALL(prlimit64) CALL(getrusage) CALL(sysinfo)
        CALL(uname) CALL(prctl) CALL(getcpu) CALL(wait4) CALL(waitid) CALL(times) CALL(capget)
#ifdef __NR_clone3
        CALL(clone3)
#endif
#ifdef __NR_rseq
        CALL(rseq)
#endif
#ifdef __NR_openat2
        CALL(openat2)
#endif
#ifdef __NR_faccessat2
        CALL(faccessat2)
#endif
#ifdef __NR_fchmodat2
        CALL(fchmodat2)
#endif
#ifdef __NR_close_range
        CALL(close_range)
#endif
#ifdef __NR_epoll_pwait2
        CALL(epoll_pwait2)
#endif
#ifdef __NR_pidfd_open
        CALL(pidfd_open) CALL(pidfd_send_signal)
#endif
#ifdef __NR_futex_waitv
        CALL(futex_waitv)
#endif
#ifdef __x86_64__ /* others have the newer forms alone */
        CALL(open) CALL(stat) CALL(lstat) CALL(access) CALL(rename) CALL(link) CALL(unlink) CALL(symlink) CALL(mkdir) CALL(rmdir) CALL(readlink) CALL(getdents)
        CALL(chmod) CALL(chown) CALL(lchown) CALL(dup2) CALL(pipe) CALL(eventfd) CALL(poll) CALL(select) CALL(epoll_create) CALL(epoll_wait) CALL(time) CALL(alarm)
        CALL(getpgrp) CALL(arch_prctl)
#endif
};
/* These are forbidden. All others do not exist, so that a newer libc takes the older call in place of a newer one. */
static const uint32_t forbidden[] = { CALL(execve) CALL(execveat) CALL(ptrace) CALL(process_vm_readv) CALL(process_vm_writev) };
#endif

static int refuse_other_calls(void)
{
#ifdef ARCH
        enum { HEAD = 6, COUNT = sizeof calls / sizeof *calls, REFUSED = sizeof forbidden / sizeof *forbidden };
        static struct sock_filter code[HEAD + 2 * COUNT + 2 * REFUSED + 1];
        struct sock_fprog program = { .len = sizeof code / sizeof *code, .filter = code };
        size_t at = 0;

        code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
        code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0);
        code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
        code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
        code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, X32_BIT, 0, 1);
        code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
        for (size_t i = 0; i < COUNT; i++) {
                code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], 0, 1);
                code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
        }
        for (size_t i = 0; i < REFUSED; i++) {
                code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, forbidden[i], 0, 1);
                code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
        }
        code[at] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS);
        if (!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program))
                return 1;
        return errno == ENOSYS || errno == EINVAL ? 0 : -errno; /* this kernel has no filters */
#else
        return 0;
#endif
}

/* Rights of the first version of Landlock; each later version added some. */
#define READS (LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR)
#define OF_FILES (LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE)
#define VERSION_1 ((UINT64_C(1) << 13) - 1)
#define REFER (UINT64_C(1) << 13)    /* version 2 */
#define TRUNCATE (UINT64_C(1) << 14) /* version 3 */

static int add_path(int rules, const char *path, uint64_t access)
{
        struct landlock_path_beneath_attr rule = { .allowed_access = access, .parent_fd = open(path, O_PATH | O_CLOEXEC) };
        struct stat found;
        int result;

        if (rule.parent_fd < 0)
                return 0;
        if (!fstat(rule.parent_fd, &found) && !S_ISDIR(found.st_mode))
                rule.allowed_access &= OF_FILES | TRUNCATE;
        result = syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &rule, 0u) ? -errno : 0;
        close(rule.parent_fd);
        return result;
}

static int refuse_other_paths(const struct os_box *box)
{
#ifdef SYS_landlock_create_ruleset
        long version = syscall(SYS_landlock_create_ruleset, NULL, (size_t)0, 1u /* LANDLOCK_CREATE_RULESET_VERSION */);
        uint64_t all = VERSION_1 | (version >= 2 ? REFER : 0) | (version >= 3 ? TRUNCATE : 0);
        struct landlock_ruleset_attr attributes = { .handled_access_fs = all };
        int rules, result = 0;

        if (version < 1)
                return 0;
        rules = (int)syscall(SYS_landlock_create_ruleset, &attributes, sizeof attributes.handled_access_fs, 0u);
        if (rules < 0)
                return -errno;
        for (const char *const *path = box->read; path && *path && !result; path++)
                result = add_path(rules, *path, READS);
        for (const char *const *path = box->write; path && *path && !result; path++)
                result = add_path(rules, *path, all & ~(uint64_t)LANDLOCK_ACCESS_FS_EXECUTE);
        if (!result)
                result = syscall(SYS_landlock_restrict_self, rules, 0u) ? -errno : 1;
        close(rules);
        return result;
#else
        return 0;
#endif
}

int os_box_enter(const struct os_box *box)
{
        int parts = 0, result;

        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
                return -errno;
        parts |= OS_BOX_NO_PRIVILEGES;
        if (box->read || box->write) {
                result = refuse_other_paths(box); /* its own calls are not in the list */
                if (result < 0)
                        return result;
                parts |= result ? OS_BOX_PATHS : 0;
        }
        result = refuse_other_calls();
        return result < 0 ? result : parts | (result ? OS_BOX_CALLS : 0);
}
