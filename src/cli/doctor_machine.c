/* Checks of the machine and its kernel. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/doctor.h"
#include "cli/human.h"
#include "os/os.h"
#include "sum/sum.h"

#define SYSFS_LIMIT 65536
#define TMPFS_TYPE 0x01021994u
#define RAMFS_TYPE 0x858458f6u
#define MEMORY_LEAST ((uint64_t)256 << 20)

static bool check_versions(const char *path, struct doctor_finding *finding)
{
        static const char *const sums[] = { "portable, slow", "pclmul", "vpclmul-256", "vpclmul-512", "pmull" };
        char *kernel = NULL;
        size_t size;

        (void)path;
        if (!os_read_file("/proc/sys/kernel/osrelease", SYSFS_LIMIT, &kernel, &size))
                kernel[strcspn(kernel, "\n")] = '\0';
        FOUND(finding, "nebula %s, Linux %.40s, %u CPUs, checksums %s", NEBULA_VERSION, kernel ? kernel : "?",
              os->cpu_count(), sums[sum_isa_used()]);
        if (sum_isa_used() == SUM_ISA_PORTABLE) {
                finding->verdict = DOCTOR_SLOWER;
                ADVICE(finding, "checksums cost more CPU time than on a CPU with PCLMULQDQ or PMULL");
        }
        free(kernel);
        return true;
}

static bool check_agent(const char *path, struct doctor_finding *finding)
{
        struct nebula_error error;
        struct ipc_place place;
        struct cli_agent *agent = NULL;

        (void)path;
        if (ipc_place_find(&place, &error)) {
                finding->verdict = DOCTOR_BAD;
                FOUND(finding, "%.190s", error.message);
                ADVICE(finding, "set NEBULA_RUNTIME_DIR to a short path of your own");
                return true;
        }
        if (!cli_agent_open("", &agent, &error)) {
                FOUND(finding, "running, pid %u", cli_agent_pid(agent));
                cli_agent_close(agent);
        } else if (cli_agent_is_absent(&error)) {
                FOUND(finding, "not running; the first init() starts it");
        } else {
                finding->verdict = DOCTOR_BAD;
                FOUND(finding, "%.190s", error.message);
                ADVICE(finding, "see the log: %.200s", place.log);
        }
        return true;
}

static bool check_userfaultfd(const char *path, struct doctor_finding *finding)
{
        uint64_t level = 0;
        int result = os->probe(OS_PROBE_USERFAULTFD, &level);

        (void)path;
        if (!result && level == 2) {
                FOUND(finding, "yes: a write to a protected page was caught");
                return true;
        }
        finding->verdict = DOCTOR_SLOWER;
        FOUND(finding, "%s: save() copies in full before it returns",
              result ? os_error_text(result) : "only for faults of user mode: save() copies in full before it returns");
        ADVICE(finding, "sysctl vm.unprivileged_userfaultfd=1, or read-write access to /dev/userfaultfd, or CAP_SYS_PTRACE");
        return true;
}

static bool check_io_uring(const char *path, struct doctor_finding *finding)
{
        uint64_t value;
        int result = os->probe(OS_PROBE_IO_URING, &value);

        (void)path;
        if (!result) {
                FOUND(finding, "yes");
                return true;
        }
        finding->verdict = DOCTOR_SLOWER;
        FOUND(finding, "%s: bulk I/O uses threads, at about the same speed", os_error_text(result));
        ADVICE(finding, "no action is needed; to allow it: sysctl kernel.io_uring_disabled=0 and a seccomp profile that permits it");
        return true;
}

static bool check_memlock(const char *path, struct doctor_finding *finding)
{
        char text[HUMAN_MAX];
        uint64_t bytes;
        int result = os->probe(OS_PROBE_MEMLOCK, &bytes);

        (void)path;
        if (result) {
                finding->verdict = DOCTOR_SLOWER;
                FOUND(finding, "%s", os_error_text(result));
        } else if (bytes == UINT64_MAX) {
                FOUND(finding, "unlimited");
        } else {
                FOUND(finding, "%s", human_size(bytes, text));
                if (bytes < (uint64_t)1 << 30)
                        ADVICE(finding, "copies from GPUs need more, and so do disk writes that save CPU time: ulimit -l unlimited");
        }
        return true;
}

bool doctor_memory(const char *path, struct doctor_finding *finding)
{
        uint64_t bytes = os->memory_free();
        const char *set = getenv("NEBULA_MEMORY_BUFFER_SIZE");
        char text[HUMAN_MAX];

        (void)path;
        FOUND(finding, "%s free for this process (machine and cgroup)%s%.40s", human_size(bytes, text),
              set ? "; NEBULA_MEMORY_BUFFER_SIZE=" : "", set ? set : "");
        if (bytes < MEMORY_LEAST) {
                finding->verdict = DOCTOR_BAD;
                ADVICE(finding, "each version in memory needs as many bytes as its files: free memory or raise the container's limit");
        }
        return true;
}

/* Whether a cgroup limits the memory, under both versions of the interface. */
static bool check_cgroup(const char *path, struct doctor_finding *finding)
{
        static const char *const files[] = { "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes" };
        char *text = NULL, human[HUMAN_MAX];
        size_t size;

        (void)path;
        FOUND(finding, "no limit");
        for (size_t i = 0; i < CLI_COUNT(files); i++) {
                uint64_t bytes;

                if (os_read_file(files[i], SYSFS_LIMIT, &text, &size))
                        continue;
                bytes = strtoull(text, NULL, 10);
                if (bytes && bytes < (uint64_t)1 << 60)
                        FOUND(finding, "%s", human_size(bytes, human));
                free(text);
                return true;
        }
        return true;
}

/* Writes to the directory: neither its mode nor its free space shows a read-only file system. */
static int try_memory(const char *directory, bool is_there)
{
        char file[IPC_PATH_MAX + 32];
        int result;

        if (!is_there) {
                result = os->mkdir(directory, 0700);
                return result < 0 ? result : os->rmdir(directory);
        }
        snprintf(file, sizeof file, "%s/doctor-%u", directory, os->pid());
        result = os->open(file, OS_WRITE | OS_CREATE | OS_EXCLUSIVE | OS_NOFOLLOW);
        if (result < 0)
                return result;
        os->close(result);
        return os->unlink(file);
}

static bool check_memory_tier(const char *path, struct doctor_finding *finding)
{
        char memory[IPC_PATH_MAX], total[HUMAN_MAX], free_text[HUMAN_MAX], *slash;
        struct ipc_place place;
        struct os_space space;
        struct os_stat stat;
        int result, tried;

        (void)path;
        if (ipc_place_find(&place, NULL)) {
                finding->verdict = DOCTOR_BAD;
                FOUND(finding, "no directory for it is known");
                return true;
        }
        /* The directory is made by the first agent, so its parent is checked. */
        snprintf(memory, sizeof memory, "%s", place.memory);
        slash = strrchr(memory, '/');
        result = ipc_place_stat(memory, &stat);
        if (!result && (stat.kind != OS_KIND_DIRECTORY || stat.uid != os->uid() || (stat.mode & 022))) {
                finding->verdict = DOCTOR_SLOWER;
                FOUND(finding, "%.95s: not this user's, or others may write to it: memfds are used, which do not survive "
                               "the agent", memory);
                ADVICE(finding, "run chmod 700 on it, or remove it: the agent then makes its own");
                return true;
        }
        tried = try_memory(memory, !result);
        if (result && slash && slash != memory)
                *slash = '\0';
        if (tried) {
                finding->verdict = DOCTOR_SLOWER;
                FOUND(finding, "%.100s cannot be written: %s: memfds are used, which do not survive the agent", memory, os_error_text(tried));
                ADVICE(finding, "mount it read-write, or set NEBULA_MEMORY_DIR to a directory of yours in a tmpfs");
                return true;
        }
        result = os->space(memory, &space);
        if (result) {
                finding->verdict = DOCTOR_SLOWER;
                FOUND(finding, "%.100s: %s: memfds are used, which do not survive the agent", memory, os_error_text(result));
                ADVICE(finding, "mount a tmpfs there, or set NEBULA_MEMORY_DIR to one");
                return true;
        }
        FOUND(finding, "%.100s: %s free of %s: versions survive even the agent", memory, human_size(space.free_bytes, free_text),
              human_size(space.total_bytes, total));
        if (space.fs_type != TMPFS_TYPE && space.fs_type != RAMFS_TYPE) {
                finding->verdict = DOCTOR_SLOWER;
                FOUND(finding, "%.100s is not on a memory file system: saving runs at the speed of a disk", memory);
                ADVICE(finding, "set NEBULA_MEMORY_DIR to a directory under /dev/shm, or unset it");
        } else if (space.free_bytes < (uint64_t)1 << 30) {
                finding->verdict = DOCTOR_SLOWER;
                FOUND(finding, "%.100s: only %s: larger versions become memfds, which do not survive the agent", memory,
                      human_size(space.free_bytes, free_text));
                ADVICE(finding, "start the container with a larger /dev/shm (docker run --shm-size=32g), or set NEBULA_MEMORY_DIR to a larger tmpfs");
        }
        return true;
}

/* The word in brackets of a file such as "always [madvise] never". */
static void chosen_of(const char *file, char ret_word[32])
{
        char *text = NULL, *begin, *end;
        size_t size;

        snprintf(ret_word, 32, "?");
        if (os_read_file(file, SYSFS_LIMIT, &text, &size))
                return;
        begin = strchr(text, '[');
        end = begin ? strchr(begin, ']') : NULL;
        if (end)
                snprintf(ret_word, 32, "%.*s", (int)(end - begin - 1), begin + 1);
        free(text);
}

static bool check_huge_pages(const char *path, struct doctor_finding *finding)
{
        char anonymous[32], shared[32];

        (void)path;
        chosen_of("/sys/kernel/mm/transparent_hugepage/enabled", anonymous);
        chosen_of("/sys/kernel/mm/transparent_hugepage/shmem_enabled", shared);
        FOUND(finding, "program memory: %s, shared memory: %s", anonymous, shared);
        if (!strcmp(anonymous, "never")) {
                finding->verdict = DOCTOR_SLOWER;
                ADVICE(finding, "write protection costs more on small pages (docs/performance.md): echo madvise > "
                                "/sys/kernel/mm/transparent_hugepage/enabled");
        }
        return true;
}

const struct doctor_check doctor_machine_checks[] = {
        { "versions", check_versions },
        { "agent", check_agent },
        { "copy-on-write capture", check_userfaultfd },
        { "io_uring", check_io_uring },
        { "memlock limit", check_memlock },
        { "cgroup memory limit", check_cgroup },
        { "memory tier", check_memory_tier },
        { "huge pages", check_huge_pages },
};
const size_t doctor_machine_count = CLI_COUNT(doctor_machine_checks);
