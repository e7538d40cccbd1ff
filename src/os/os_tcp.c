/* TCP between agents, and this host's address. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "os/os_linux.h"

#define BACKLOG 1024         /* a connection that finds no place here is tried again after a second */
#define SEND_TIMEOUT_S 20   /* a peer that accepts no bytes for so long is gone */
#define KEEP_IDLE_S 15      /* then KEEP_COUNT probes, KEEP_EVERY_S apart: half-open connections end within 30 s */
#define KEEP_EVERY_S 5
#define KEEP_COUNT 3

static void set_options(int fd)
{
        struct timeval timeout = { .tv_sec = SEND_TIMEOUT_S };
        int on = 1, idle = KEEP_IDLE_S, every = KEEP_EVERY_S, count = KEEP_COUNT;

        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
}

/* The addresses of a host name or number. On failure, NULL and a negative errno. */
static int resolve(const char *address, uint16_t port, int flags, struct addrinfo **ret_list)
{
        struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = flags | AI_NUMERICSERV };
        char text[8];

        snprintf(text, sizeof text, "%u", port);
        switch (getaddrinfo(address, text, &hints, ret_list)) {
        case 0:
                return 0;
        case EAI_MEMORY:
                return -ENOMEM;
        case EAI_AGAIN:
                return -EAGAIN;
        default:
                return -EADDRNOTAVAIL;
        }
}

static uint16_t port_of(const struct sockaddr_storage *address)
{
        if (address->ss_family == AF_INET6)
                return ntohs(((const struct sockaddr_in6 *)address)->sin6_port);
        return ntohs(((const struct sockaddr_in *)address)->sin_port);
}

int os_linux_tcp_listen(const char *address, uint16_t port, uint16_t *ret_port)
{
        struct sockaddr_storage bound;
        socklen_t size = sizeof bound;
        struct addrinfo *list;
        int on = 1, fd, result = resolve(address, port, AI_PASSIVE, &list);

        if (result)
                return result;
        fd = os_linux_descriptor(socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (fd < 0) {
                result = fd;
        } else {
                setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
                if (bind(fd, list->ai_addr, list->ai_addrlen) || listen(fd, BACKLOG) ||
                    getsockname(fd, (struct sockaddr *)&bound, &size)) {
                        result = -errno;
                        close(fd);
                }
        }
        freeaddrinfo(list);
        if (result)
                return result;
        *ret_port = port_of(&bound);
        return fd;
}

/* Connects to one address. A refused connection fails at once; an unanswered one after timeout_ms. */
static int connect_one(const struct addrinfo *info, int64_t timeout_ms)
{
        struct pollfd wait = { .events = POLLOUT };
        int failure = 0, result;
        socklen_t size = sizeof failure;

        wait.fd = os_linux_descriptor(socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (wait.fd < 0)
                return wait.fd;
        result = connect(wait.fd, info->ai_addr, info->ai_addrlen) ? -errno : 0;
        if (result == -EINPROGRESS) {
                do
                        result = poll(&wait, 1, (int)timeout_ms);
                while (result < 0 && errno == EINTR);
                if (result < 0)
                        result = -errno;
                else if (!result)
                        result = -ETIMEDOUT;
                else
                        result = getsockopt(wait.fd, SOL_SOCKET, SO_ERROR, &failure, &size) ? -errno : -failure;
        }
        if (!result && fcntl(wait.fd, F_SETFL, 0))
                result = -errno;
        if (result) {
                close(wait.fd);
                return result;
        }
        set_options(wait.fd);
        return wait.fd;
}

int os_linux_tcp_connect(const char *address, uint16_t port, int64_t timeout_ms)
{
        struct addrinfo *list;
        int result = resolve(address, port, 0, &list);

        if (result)
                return result;
        result = -EADDRNOTAVAIL;
        for (const struct addrinfo *info = list; info && result < 0; info = info->ai_next)
                result = connect_one(info, timeout_ms);
        freeaddrinfo(list);
        return result;
}

int os_linux_tcp_accept(int fd, char *ret_address, size_t size)
{
        struct sockaddr_storage from;
        socklen_t length = sizeof from;
        char host[64];
        int accepted = os_linux_descriptor(accept4(fd, (struct sockaddr *)&from, &length, SOCK_CLOEXEC));

        if (accepted < 0)
                return accepted;
        set_options(accepted);
        if (getnameinfo((struct sockaddr *)&from, length, host, sizeof host, NULL, 0, NI_NUMERICHOST))
                strcpy(host, "unknown");
        snprintf(ret_address, size, "%s:%u", host, port_of(&from));
        return accepted;
}

int os_linux_host_name(char *text, size_t size)
{
        if (gethostname(text, size))
                return -errno;
        text[size - 1] = 0;
        return 0;
}

/* The first address that other hosts can reach; the loopback address if there is none. */
int os_linux_host_address(char *text, size_t size)
{
        struct ifaddrs *list;
        bool found = false;

        if (getifaddrs(&list))
                return -errno;
        for (const struct ifaddrs *at = list; at && !found; at = at->ifa_next) {
                if (!at->ifa_addr || at->ifa_addr->sa_family != AF_INET || at->ifa_flags & IFF_LOOPBACK || !(at->ifa_flags & IFF_UP))
                        continue;
                found = inet_ntop(AF_INET, &((struct sockaddr_in *)(void *)at->ifa_addr)->sin_addr, text, (socklen_t)size);
        }
        freeifaddrs(list);
        if (!found)
                snprintf(text, size, "127.0.0.1");
        return 0;
}
