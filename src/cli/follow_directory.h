/*
 * follow_directory.h - the directories in memory into which `nebula follow --exec` puts checkpoints.
 *
 *      follow_directory_sweep      when the command starts
 *      follow_directory_take       before each use of the own directory
 *
 * A directory is in use while a process holds its lock: `nebula follow`, the `nebula restore` that fills the directory, or the shell of the
 * user's command. Each inherits the lock. So the directory of a killed `nebula follow` stays while its shell still reads.
 */
#ifndef NB_CLI_FOLLOW_DIRECTORY_H
#define NB_CLI_FOLLOW_DIRECTORY_H

#define FOLLOW_SHM "/dev/shm"
#define FOLLOW_NAME "nebula-follow-" /* and the process id */
#define FOLLOW_DIRECTORY FOLLOW_SHM "/" FOLLOW_NAME

/* Makes and locks the directory, unless *lock is the lock of it already. *lock: -1, or what the last call has set. Returns 0 or a negative
 * errno. -EAGAIN: another process uses it. */
int follow_directory_take(const char *path, int *lock);
/* Removes this user's directories that no process uses. */
void follow_directory_sweep(void);

#endif
