/*
 * os_linux.h - the functions of the real table that have files of their own.
 * Only os_linux.c and those files include it; all other code calls `os`.
 */
#ifndef NB_OS_OS_LINUX_H
#define NB_OS_OS_LINUX_H

#include <dirent.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#include "os/os.h"

struct os_dir {
        DIR *stream;
};

/* os_linux.c */
/* Takes what a system call returned that makes a descriptor: -errno of a failure, or the descriptor, moved above 2. A program without
 * standard input, output or error output may print to these numbers, or open them later. */
int os_linux_descriptor(int returned);
int os_linux_open_flags(int flags);
bool os_linux_is_shared(int flags); /* os_create_file must make this file */
/* For a file that was opened with O_NONBLOCK and these flags: makes it blocking again. If that fails, closes it. */
int os_linux_opened(int fd, int theirs);
void os_linux_convert_stat(const struct stat *from, struct os_stat *to);

/* os_below.c */
int os_linux_open_below(const char *root, const char *key, int flags);
int os_linux_stat_below(const char *root, const char *key, struct os_stat *ret_stat);
int os_linux_rename_below(const char *root, const char *from, const char *to);
int os_linux_rename_new_below(const char *root, const char *from, const char *to);
int os_linux_link_below(const char *root, const char *key, const char *to_root, const char *to);
int os_linux_unlink_below(const char *root, const char *key);
int os_linux_mkdir_below(const char *root, const char *key, uint32_t mode);
int os_linux_rmdir_below(const char *root, const char *key);
int os_linux_opendir_below(const char *root, const char *key, struct os_dir **ret_dir);
int os_linux_stat_entry(struct os_dir *dir, const char *name, struct os_stat *ret_stat);

/* os_socket.c */
int os_linux_listen(const char *path);
int os_linux_connect(const char *path);
int os_linux_accept(int fd);
int os_linux_socketpair(int ret_fds[2]);
int64_t os_linux_send(int fd, const void *data, size_t size, int passed_fd);
int64_t os_linux_receive(int fd, void *data, size_t size, int *ret_passed_fd);
int os_linux_peer(int fd, uint32_t *ret_uid, uint32_t *ret_pid);
int os_linux_shutdown(int fd);
int os_linux_can_send(int fd);
int os_linux_watch_open(void);
int os_linux_watch(int set, int fd, void *key, enum os_watch how);
int os_linux_watch_wait(int set, void **ret_keys, size_t count, int64_t timeout_ms);

/* os_tcp.c */
int os_linux_tcp_listen(const char *address, uint16_t port, uint16_t *ret_port);
int os_linux_tcp_connect(const char *address, uint16_t port, int64_t timeout_ms);
int os_linux_tcp_accept(int fd, char *ret_address, size_t size);
int os_linux_host_name(char *text, size_t size);
int os_linux_host_address(char *text, size_t size);

/* os_memory.c */
uint64_t os_linux_memory_free(void);
uint32_t os_linux_memory_stalled(void);

/* os_spawn.c */
int os_linux_spawn(const char *path, char *const argv[], const int stdio[3], int *ret_exit);
/* Not NULL: it runs programs in place of this process (os_programs.c). Set it before threads start. */
extern int (*os_runs_elsewhere)(const char *path, char *const argv[], int64_t timeout_ms, char *text, size_t room, size_t *ret_size, int *ret_exit);
int os_linux_run(const char *path, char *const argv[], int64_t timeout_ms, char *text, size_t room, size_t *ret_size, int *ret_exit);

#endif
