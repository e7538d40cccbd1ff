/* Runs programs for a process that may start none. Each request has a socket of its own for the answer, and a process that waits for the program. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/os.h"
#include "os/os_linux.h"
#include "os/process.h"

#define WORDS_MAX 8
#define REQUEST_MAX (128u << 10)
#define TEXT_MAX (1u << 20)

extern char **environ;

struct request {
        int64_t timeout_ms;
        uint64_t room;
        uint32_t size; /* of the texts that follow: the path and the words, each with a NUL */
};
struct answer {
        int32_t result, code;
        uint64_t size;
};

static bool is_offered;
static int asked = -1; /* the socket of the process that runs programs */

static int receive_all(int fd, void *data, size_t size)
{
        for (size_t at = 0; at < size;) {
                ssize_t count = recv(fd, (char *)data + at, size - at, 0);

                if (count < 0 && errno == EINTR)
                        continue;
                if (count <= 0)
                        return count ? -errno : -EPIPE;
                at += (size_t)count;
        }
        return 0;
}

/* One message, so that requests of several threads do not mix. */
static int send_request(const struct request *request, const char *texts, int answer_fd)
{
        struct iovec parts[] = { { (void *)(uintptr_t)request, sizeof *request }, { (void *)(uintptr_t)texts, request->size } };
        union {
                struct cmsghdr head;
                char space[CMSG_SPACE(sizeof(int))];
        } control = { 0 };
        struct msghdr message = { .msg_iov = parts, .msg_iovlen = 2, .msg_control = &control, .msg_controllen = sizeof control };

        control.head = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS };
        memcpy(CMSG_DATA(&control.head), &answer_fd, sizeof answer_fd);
        return sendmsg(asked, &message, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static int ask(const char *path, char *const argv[], int64_t timeout_ms, char *text, size_t room, size_t *ret_size, int *ret_exit)
{
        struct request request = { .timeout_ms = timeout_ms, .room = room, .size = (uint32_t)strlen(path) + 1 };
        struct answer answer;
        char *texts;
        int fds[2], result;

        for (size_t i = 0; argv[i]; i++)
                request.size += (uint32_t)strlen(argv[i]) + 1;
        texts = request.size <= REQUEST_MAX && room <= TEXT_MAX ? malloc(request.size) : NULL;
        if (!texts)
                return -E2BIG;
        strcpy(texts, path);
        for (size_t i = 0, at = strlen(path) + 1; argv[i]; at += strlen(argv[i++]) + 1)
                strcpy(texts + at, argv[i]);
        result = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) ? -errno : 0;
        if (!result) {
                result = send_request(&request, texts, fds[1]);
                close(fds[1]);
                if (!result)
                        result = receive_all(fds[0], &answer, sizeof answer);
                if (!result)
                        result = answer.result;
                if (!result)
                        result = answer.size <= room ? receive_all(fds[0], text, answer.size) : -EPROTO;
                close(fds[0]);
        }
        if (!result) {
                *ret_size = answer.size;
                *ret_exit = answer.code;
        }
        explicit_bzero(texts, request.size);
        free(texts);
        return result;
}

void os_programs_offer(void)
{
        is_offered = true;
}

int os_programs_start(void)
{
        char number[16], *const words[] = { (char *)"nebula", (char *)"programs", number, NULL };
        posix_spawn_file_actions_t actions;
        int fds[2], result;
        pid_t pid;

        if (!is_offered)
                return 0;
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds))
                return -errno;
        snprintf(number, sizeof number, "%d", 3);
        result = posix_spawn_file_actions_init(&actions);
        if (!result) {
                result = posix_spawn_file_actions_adddup2(&actions, fds[1], 3);
                if (!result)
                        result = posix_spawn(&pid, "/proc/self/exe", &actions, NULL, words, environ);
                posix_spawn_file_actions_destroy(&actions);
        }
        close(fds[1]);
        if (result) {
                close(fds[0]);
                return -result;
        }
        asked = fds[0];
        os_runs_elsewhere = ask;
        return 0;
}

static void answer_one(int fd, const struct request *request, char *texts)
{
        char *words[WORDS_MAX + 1] = { 0 }, *text = malloc(request->room + 1);
        struct answer answer = { .result = -EINVAL };
        size_t count = 0, size = 0;
        int code = 0;

        for (char *at = texts + strlen(texts) + 1; at < texts + request->size && count < WORDS_MAX; at += strlen(at) + 1)
                words[count++] = at;
        if (text && count)
                answer.result = os_linux_run(texts, words, request->timeout_ms, text, request->room, &size, &code);
        answer.code = code;
        answer.size = answer.result ? 0 : size;
        if (send(fd, &answer, sizeof answer, MSG_NOSIGNAL) == (ssize_t)sizeof answer && answer.size)
                send(fd, text, answer.size, MSG_NOSIGNAL);
        free(text);
}

static bool receive_one(int fd, struct request *ret_request, char *texts, int *ret_answer_fd)
{
        struct iovec parts[] = { { ret_request, sizeof *ret_request }, { texts, REQUEST_MAX } };
        union {
                struct cmsghdr head;
                char space[CMSG_SPACE(sizeof(int))];
        } control = { 0 };
        struct msghdr message = { .msg_iov = parts, .msg_iovlen = 2, .msg_control = &control, .msg_controllen = sizeof control };
        ssize_t count;

        do
                count = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
        while (count < 0 && errno == EINTR);
        if (count < (ssize_t)sizeof *ret_request || message.msg_controllen < CMSG_LEN(sizeof(int)))
                return false;
        memcpy(ret_answer_fd, CMSG_DATA(&control.head), sizeof *ret_answer_fd);
        if ((size_t)count != sizeof *ret_request + ret_request->size || !ret_request->size || texts[ret_request->size - 1] || ret_request->room > TEXT_MAX)
                ret_request->size = 0;
        return true;
}

int os_programs_serve(int fd)
{
        char *texts = malloc(REQUEST_MAX);
        struct request request;
        int answer_fd;

        signal(SIGINT, SIG_IGN); /* it ends with the agent */
        signal(SIGHUP, SIG_IGN);
        signal(SIGTERM, SIG_IGN);
        signal(SIGCHLD, SIG_IGN); /* nothing waits for the processes that wait */
        while (texts && receive_one(fd, &request, texts, &answer_fd)) {
                if (request.size && !fork()) {
                        close(fd);
                        signal(SIGCHLD, SIG_DFL);
                        answer_one(answer_fd, &request, texts);
                        _exit(0);
                }
                close(answer_fd);
        }
        free(texts);
        return texts ? 0 : -ENOMEM;
}
