/*
 * memory_files.h - small files of the memory directory, written without the catalogue's lock.
 *
 * A survival log or a publish list describes what the catalogue holds, so its bytes are made under the catalogue's
 * lock. A file that is written under that lock would hold up every client, so a task is added instead. catalogue_unlock
 * carries the tasks out after it has released the lock and before it returns:
 *
 *      memory_files_add       adds a task                                      (lock held)
 *      memory_files_added     the number of the last task                      (lock held)
 *      memory_files_write     returns when all tasks up to a number are done   (lock not held)
 *      memory_files_failed    takes the list of tasks that failed
 *
 * So a thread answers its client only after everything that it saw in the catalogue is on file, whichever thread
 * described it. Tasks are done in the order in which they were added. The first thread that releases the lock does
 * them, and the others wait for it.
 *
 * A file that grows has a struct memory_file, which its version and its tasks share. If a task of it fails, later
 * ones fail, too, until the file is replaced: what they append would follow half a record.
 */
#ifndef NB_AGENT_MEMORY_MEMORY_FILES_H
#define NB_AGENT_MEMORY_MEMORY_FILES_H

#include <stdatomic.h>

#include "os/lock.h"

struct memory;
struct memory_file;
enum memory_file_kind { MEMORY_FILE_APPEND, MEMORY_FILE_REPLACE, MEMORY_FILE_REMOVE };
struct memory_file_task {
        struct memory_file_task *next;
        struct memory_file *file; /* NULL: the file is replaced or removed as a whole */
        enum memory_file_kind kind;
        uint64_t id;              /* the file is <id><suffix> */
        const char *suffix;       /* a literal */
        void *data;               /* from malloc; the task's own */
        uint64_t size, offset;
        bool is_looked_for;       /* it fails if the file has lost its name */
        int result;               /* of a task that failed: a negative errno */
};
struct memory_file {
        _Atomic uint32_t users;
        bool is_broken; /* writer_lock guards it */
        struct memory_file_task removal; /* made with the file: a removal must not fail for want of memory */
};
struct memory_files {
        _Atomic(struct memory_file_task *) added, failed; /* the last one first */
        _Atomic uint64_t added_count, done_count;
        struct lock writer_lock;   /* guards the rest */
        struct memory_file *open;  /* the file that was written last stays open: ranks that save together write to one */
        int fd;                    /* of `open`; -1: none */
};

/* One user. NULL: no memory. */
struct memory_file *memory_file_new(void);
void memory_file_drop(struct memory_file *file); /* one user less; NULL is fine */

/* Adds a copy of the task, which takes over its data. False: no memory, and the data is freed. */
bool memory_files_add(struct memory *memory, const struct memory_file_task *task);
/* Adds the removal of a file. Call it once: a later description needs a new struct memory_file. */
void memory_files_remove(struct memory *memory, struct memory_file *file, uint64_t id, const char *suffix);
static inline uint64_t memory_files_added(const struct memory_files *files)
{
        return atomic_load(&files->added_count);
}
/* Something is not done yet. */
static inline bool memory_files_are_due(const struct memory_files *files)
{
        return atomic_load(&files->done_count) < atomic_load(&files->added_count);
}
/* True: some have failed, and memory_files_failed has them. */
bool memory_files_write(struct memory *memory, uint64_t number);
/* The caller passes each to memory_file_task_free. */
struct memory_file_task *memory_files_failed(struct memory_files *files);
void memory_file_task_free(struct memory_file_task *task);

void memory_files_init(struct memory_files *files);
/* Does the pending tasks, and closes the open file. */
void memory_files_done(struct memory *memory);

#endif
