/*
 * os_create.h - whose rights new files and directories have.
 *
 * The agent works for programs that may each have another umask and group. A process has one umask, which all of its threads share,
 * so the agent gives it up (os_umask_take) and each of its threads says for whom it works (os_create_as). What is shared with others
 * (OS_SHARED, and directories) is then made as that program would make it: by its umask, unless the directory above has default ACLs,
 * which take the umask's place; and in its group, where the agent is a member, unless that directory hands down its own.
 * In a process that has not given its umask up nothing changes.
 *
 * Not part of `os`: a failing test has nothing to learn here.
 */
#ifndef NB_OS_OS_CREATE_H
#define NB_OS_OS_CREATE_H

#include <stdint.h>

#define OS_CREATE_UNKNOWN UINT32_MAX

/* Before any thread starts. */
void os_umask_take(void);
/* The calling thread, from now on. OS_CREATE_UNKNOWN: as the process would have without all this. */
void os_create_as(uint32_t umask, uint32_t group);
/* What this process would give to os_create_as. Reads /proc: asking for the umask by a system call would change it for a moment. */
void os_create_self(uint32_t *ret_umask, uint32_t *ret_group);

/* openat with O_CREAT, and mkdirat. `directory`: AT_FDCWD, or the one that holds the name `path`. errno is set on failure. */
int os_create_file(int directory, const char *path, int flags);
int os_create_directory(int directory, const char *path, uint32_t mode);

#endif
