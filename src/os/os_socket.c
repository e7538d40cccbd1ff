/* Unix stream sockets, and file descriptors sent through them. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "os/os_linux.h"

#define WATCH_MAX 64 /* events per call */
#define BACKLOG 128 /* ranks of one node that connect at the same moment */
#define CONNECT_S 1 /* a listener that does not accept for so long is stopped or very busy */

/* Makes a socket, and the address to bind or connect it to. */
static int make_socket(const char *path, struct sockaddr_un *ret_address)
{
        size_t length = strlen(path);

        if (length >= sizeof ret_address->sun_path)
                return -ENAMETOOLONG;
        memset(ret_address, 0, sizeof *ret_address);
        ret_address->sun_family = AF_UNIX;
        memcpy(ret_address->sun_path, path, length + 1);
        return os_linux_descriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
}

static int close_failed(int fd)
{
        int result = -errno;

        close(fd);
        return result;
}

int os_linux_listen(const char *path)
{
        struct sockaddr_un address;
        int fd = make_socket(path, &address);

        if (fd < 0)
                return fd;
        /* Before bind, so that no other user can connect in between. */
        if (fchmod(fd, 0600) || bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, BACKLOG))
                return close_failed(fd);
        return fd;
}

/* A signal of the program ends a connect that waits: it is made again, and after CONNECT_S it is EAGAIN as without signals. */
static int connect_in_time(int fd, const struct sockaddr_un *address)
{
        int64_t until = os->now_ns() + CONNECT_S * INT64_C(1000000000);
        int result;

        do
                result = connect(fd, (const struct sockaddr *)address, sizeof *address);
        while (result && errno == EINTR && os->now_ns() < until);
        if (result && errno == EINTR)
                errno = EAGAIN;
        return result;
}

int os_linux_connect(const char *path)
{
        const struct timeval limit = { .tv_sec = CONNECT_S }, none = { 0 };
        struct sockaddr_un address;
        int fd = make_socket(path, &address);

        if (fd < 0)
                return fd;
        /* connect waits while the listener's queue is full, so that a burst of connections does not fail. After CONNECT_S it is EAGAIN. */
        if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) || connect_in_time(fd, &address) ||
            setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &none, sizeof none))
                return close_failed(fd);
        return fd;
}

int os_linux_accept(int fd)
{
        return os_linux_descriptor(accept4(fd, NULL, NULL, SOCK_CLOEXEC));
}

int os_linux_socketpair(int ret_fds[2])
{
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ret_fds))
                return -errno;
        for (int i = 0; i < 2; i++) {
                int moved = os_linux_descriptor(ret_fds[i]);

                if (moved < 0) {
                        close(ret_fds[1 - i]);
                        return moved;
                }
                ret_fds[i] = moved;
        }
        return 0;
}

int64_t os_linux_send(int fd, const void *data, size_t size, int passed_fd)
{
        union {
                struct cmsghdr align;
                char bytes[CMSG_SPACE(sizeof(int))];
        } control;
        struct iovec part = { (void *)(uintptr_t)data, size };
        struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
        ssize_t result;

        if (passed_fd >= 0) {
                struct cmsghdr *header;

                memset(&control, 0, sizeof control);
                message.msg_control = control.bytes;
                message.msg_controllen = sizeof control.bytes;
                header = CMSG_FIRSTHDR(&message);
                header->cmsg_level = SOL_SOCKET;
                header->cmsg_type = SCM_RIGHTS;
                header->cmsg_len = CMSG_LEN(sizeof(int));
                memcpy(CMSG_DATA(header), &passed_fd, sizeof passed_fd);
        }
        result = sendmsg(fd, &message, MSG_NOSIGNAL);
        return result < 0 ? -errno : result;
}

/* Keeps the first descriptor and closes any others that the peer sent. */
static int take_fds(struct msghdr *message)
{
        int kept = -1;

        for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header; header = CMSG_NXTHDR(message, header)) {
                size_t count;

                if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
                        continue;
                count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
                for (size_t i = 0; i < count; i++) {
                        int passed;

                        memcpy(&passed, CMSG_DATA(header) + i * sizeof passed, sizeof passed);
                        if (kept < 0)
                                kept = passed;
                        else
                                close(passed);
                }
        }
        return kept;
}

int64_t os_linux_receive(int fd, void *data, size_t size, int *ret_passed_fd)
{
        union {
                struct cmsghdr align;
                char bytes[CMSG_SPACE(sizeof(int))];
        } control;
        struct iovec part = { data, size };
        struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1,
                                  .msg_control = control.bytes, .msg_controllen = sizeof control.bytes };
        ssize_t result = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
        int passed;

        if (result < 0)
                return -errno;
        passed = take_fds(&message);
        *ret_passed_fd = passed < 0 ? -1 : os_linux_descriptor(passed);
        if (passed < 0 && (message.msg_flags & MSG_CTRUNC))
                return -EMFILE; /* the kernel drops a descriptor for which this process has no number left */
        return passed >= 0 && *ret_passed_fd < 0 ? *ret_passed_fd : result;
}

int os_linux_peer(int fd, uint32_t *ret_uid, uint32_t *ret_pid)
{
        struct ucred peer;
        socklen_t size = sizeof peer;

        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size))
                return -errno;
        *ret_uid = peer.uid;
        *ret_pid = (uint32_t)peer.pid;
        return 0;
}

int os_linux_shutdown(int fd)
{
        return shutdown(fd, SHUT_RDWR) ? -errno : 0;
}

int os_linux_can_send(int fd)
{
        struct pollfd wait = { .fd = fd, .events = POLLOUT };
        int result = poll(&wait, 1, 0);

        return result < 0 ? -errno : result;
}

int os_linux_watch_open(void)
{
        return os_linux_descriptor(epoll_create1(EPOLL_CLOEXEC));
}

/* A socket is writable as a rule, unless its peer does not read. */
int os_linux_watch(int set, int fd, void *key, enum os_watch how)
{
        struct epoll_event event = { .events = how == OS_WATCH_ONCE ? EPOLLIN | EPOLLOUT | EPOLLONESHOT : EPOLLIN, .data.ptr = key };
        int result = epoll_ctl(set, how == OS_WATCH_END ? EPOLL_CTL_DEL : EPOLL_CTL_MOD, fd, &event);

        if (result && errno == ENOENT && how != OS_WATCH_END)
                result = epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
        return result ? -errno : 0;
}

int os_linux_watch_wait(int set, void **ret_keys, size_t count, int64_t timeout_ms)
{
        struct epoll_event events[WATCH_MAX];
        int came;

        count = count < WATCH_MAX ? count : WATCH_MAX;
        came = epoll_wait(set, events, (int)count, timeout_ms < 0 ? -1 : timeout_ms < INT_MAX ? (int)timeout_ms : INT_MAX);
        for (int i = 0; i < came; i++)
                ret_keys[i] = events[i].data.ptr;
        return came < 0 ? -errno : came;
}
