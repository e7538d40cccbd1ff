#include <errno.h>
#include <stdlib.h>

#include "agent/memory/memory.h"
#include "agent/memory/memory_files.h"
#include "os/os.h"

struct memory_file *memory_file_new(void)
{
        struct memory_file *file = calloc(1, sizeof *file);

        if (file)
                atomic_store(&file->users, 1);
        return file;
}

static struct memory_file *hold(struct memory_file *file)
{
        if (file)
                atomic_fetch_add(&file->users, 1);
        return file;
}

void memory_file_drop(struct memory_file *file)
{
        if (file && atomic_fetch_sub(&file->users, 1) == 1)
                free(file);
}

static void push(_Atomic(struct memory_file_task *) *list, struct memory_file_task *task)
{
        task->next = atomic_load(list);
        while (!atomic_compare_exchange_weak(list, &task->next, task))
                ;
}

static void add(struct memory *memory, struct memory_file_task *task)
{
        hold(task->file);
        push(&memory->files.added, task);
        atomic_fetch_add(&memory->files.added_count, 1);
}

bool memory_files_add(struct memory *memory, const struct memory_file_task *task)
{
        struct memory_file_task *added = malloc(sizeof *added);

        if (!added) {
                free(task->data);
                return false;
        }
        *added = *task;
        add(memory, added);
        return true;
}

void memory_files_remove(struct memory *memory, struct memory_file *file, uint64_t id, const char *suffix)
{
        file->removal = (struct memory_file_task){ .file = file, .kind = MEMORY_FILE_REMOVE, .id = id, .suffix = suffix };
        add(memory, &file->removal);
}

void memory_file_task_free(struct memory_file_task *task)
{
        struct memory_file *file = task->file;

        free(task->data);
        if (!file || task != &file->removal)
                free(task);
        memory_file_drop(file);
}

/* The rest is under writer_lock. */

static void close_open(struct memory_files *files)
{
        if (files->fd >= 0)
                os->close(files->fd);
        memory_file_drop(files->open);
        files->open = NULL;
        files->fd = -1;
}

static void keep_open(struct memory_files *files, struct memory_file *file, int fd)
{
        files->open = hold(file);
        files->fd = fd;
}

/* Anybody may have removed the file meanwhile. */
static int append(struct memory *memory, const struct memory_file_task *task)
{
        struct memory_files *files = &memory->files;
        char path[MEMORY_PATH_MAX];
        struct os_stat stat;

        if (task->file->is_broken)
                return -ESTALE;
        if (files->open != task->file) {
                int fd;

                close_open(files);
                memory_path(memory, task->id, task->suffix, path);
                fd = os->open(path, OS_WRITE | OS_NOFOLLOW);
                if (fd < 0)
                        return fd;
                keep_open(files, task->file, fd);
        } else if (task->is_looked_for && (os->fstat(files->fd, &stat) < 0 || !stat.link_count)) {
                return -ENOENT;
        }
        return os_write_at(files->fd, task->data, task->size, task->offset);
}

/* A file of another name at first, so that the file is always whole. */
static int replace(struct memory *memory, const struct memory_file_task *task)
{
        char path[MEMORY_PATH_MAX], temporary[MEMORY_PATH_MAX];
        int fd, result;

        memory_path(memory, task->id, task->suffix, path);
        memory_path(memory, task->id, ".tmp", temporary);
        fd = os->open(temporary, OS_WRITE | OS_CREATE | OS_TRUNCATE | OS_NOFOLLOW);
        if (fd < 0)
                return fd;
        result = os_write_at(fd, task->data, task->size, 0);
        if (!result)
                result = os->rename(temporary, path);
        if (result < 0)
                os->unlink(temporary);
        if (result < 0 || !task->file) {
                os->close(fd);
                return result;
        }
        close_open(&memory->files);
        keep_open(&memory->files, task->file, fd);
        return 0;
}

static int remove_file(struct memory *memory, const struct memory_file_task *task)
{
        char path[MEMORY_PATH_MAX];

        if (task->file && memory->files.open == task->file)
                close_open(&memory->files);
        memory_path(memory, task->id, task->suffix, path);
        os->unlink(path);
        return 0;
}

static void do_task(struct memory *memory, struct memory_file_task *task)
{
        task->result = task->kind == MEMORY_FILE_APPEND ? append(memory, task) :
                       task->kind == MEMORY_FILE_REPLACE ? replace(memory, task) : remove_file(memory, task);
        if (task->file)
                task->file->is_broken = task->result < 0;
        if (task->result < 0)
                push(&memory->files.failed, task);
        else
                memory_file_task_free(task);
}

static void do_all(struct memory *memory)
{
        struct memory_file_task *left = atomic_exchange(&memory->files.added, NULL), *oldest = NULL;
        uint64_t count = 0;

        while (left) {
                struct memory_file_task *next = left->next;

                left->next = oldest;
                oldest = left;
                left = next;
        }
        while (oldest) {
                struct memory_file_task *next = oldest->next;

                do_task(memory, oldest);
                oldest = next;
                count++;
        }
        atomic_fetch_add(&memory->files.done_count, count);
}

bool memory_files_write(struct memory *memory, uint64_t number)
{
        struct memory_files *files = &memory->files;

        if (atomic_load(&files->done_count) < number) {
                lock_take(&files->writer_lock);
                if (atomic_load(&files->done_count) < number)
                        do_all(memory);
                lock_give(&files->writer_lock);
        }
        return atomic_load(&files->failed) != NULL;
}

struct memory_file_task *memory_files_failed(struct memory_files *files)
{
        return atomic_exchange(&files->failed, NULL);
}

void memory_files_init(struct memory_files *files)
{
        *files = (struct memory_files){ .fd = -1 };
        lock_init(&files->writer_lock, LOCK_MEMORY_FILES);
}

void memory_files_done(struct memory *memory)
{
        struct memory_files *files = &memory->files;
        struct memory_file_task *failed, *next;

        memory_files_write(memory, memory_files_added(files));
        for (failed = memory_files_failed(files); failed; failed = next) {
                next = failed->next;
                memory_file_task_free(failed);
        }
        close_open(files);
        lock_done(&files->writer_lock);
}
