/*
 * os_create.h - the permissions of new files and directories.
 *
 * The agent works for programs that may have different umasks and groups. A process has one umask for all its threads. So
 * the agent sets its own umask to 0 (os_umask_take), and each of its threads names the program that it works for
 * (os_create_as). Shared files (OS_SHARED) and directories then get the permissions that the program itself would give:
 * * The program's umask applies, unless the parent directory has default ACLs, which replace it.
 * * The program's group applies if the agent is a member, unless the parent directory hands down its own group.
 * In a process that has not called os_umask_take nothing changes.
 *
 * Not part of `os`: there is no system call here whose failure a test could simulate.
 */
#ifndef NB_OS_OS_CREATE_H
#define NB_OS_OS_CREATE_H

#include <stdint.h>

#define OS_CREATE_UNKNOWN UINT32_MAX

/* Call before any thread starts. */
void os_umask_take(void);
/* Applies to the calling thread from now on. OS_CREATE_UNKNOWN: the permissions of an ordinary process. */
void os_create_as(uint32_t umask, uint32_t group);
/* The values that this process would pass to os_create_as. Reads /proc, because asking for the umask by a system
 * call would change it for a moment. */
void os_create_self(uint32_t *ret_umask, uint32_t *ret_group);

/* openat with O_CREAT, and mkdirat. `directory` is AT_FDCWD or the directory that holds the name `path`. Sets errno on failure. */
int os_create_file(int directory, const char *path, int flags);
int os_create_directory(int directory, const char *path, uint32_t mode);

#endif
