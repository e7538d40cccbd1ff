/* Running out of memory ends the test: a test need not recover. */
#include "os/os_crash_model.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "os/os.h"

static void *need(void *memory)
{
        if (!memory)
                abort();
        return memory;
}

/* splitmix64 */
uint64_t crash_random(uint64_t *state)
{
        uint64_t x = *state += 0x9e3779b97f4a7c15u;

        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return x ^ x >> 31;
}

uint32_t crash_model_new_inode(struct crash_model *model, bool is_directory)
{
        model->inodes = need(realloc(model->inodes, (model->count + 1) * sizeof *model->inodes));
        model->inodes[model->count] = (struct crash_inode){ .is_directory = is_directory };
        return (uint32_t)model->count++;
}

static struct crash_entry *find_entry(const struct crash_model *model, uint32_t directory, const char *name)
{
        struct crash_inode *inode = &model->inodes[directory];

        for (size_t i = 0; i < inode->entry_count; i++)
                if (!strcmp(inode->entries[i].name, name))
                        return &inode->entries[i];
        return NULL;
}

uint32_t crash_model_entry(const struct crash_model *model, uint32_t directory, const char *name)
{
        const struct crash_entry *entry = find_entry(model, directory, name);

        return entry ? entry->inode : CRASH_NONE;
}

uint32_t crash_model_find(const struct crash_model *model, const char *path)
{
        uint32_t at = 0;

        while (at != CRASH_NONE) {
                char name[256];
                size_t length;

                path += strspn(path, "/");
                length = strcspn(path, "/");
                if (!length)
                        break;
                if (length >= sizeof name || !model->inodes[at].is_directory)
                        return CRASH_NONE;
                memcpy(name, path, length);
                name[length] = 0;
                at = crash_model_entry(model, at, name);
                path += length;
        }
        return at;
}

static void add_entry(struct crash_model *model, uint32_t directory, const char *name, uint32_t to)
{
        struct crash_inode *inode = &model->inodes[directory];
        struct crash_entry *entry = find_entry(model, directory, name);

        if (entry) {
                entry->inode = to;
                return;
        }
        inode->entries = need(realloc(inode->entries, (inode->entry_count + 1) * sizeof *inode->entries));
        inode->entries[inode->entry_count++] = (struct crash_entry){ need(strdup(name)), to };
}

static void remove_entry(struct crash_model *model, uint32_t directory, const char *name)
{
        struct crash_inode *inode = &model->inodes[directory];
        struct crash_entry *entry = find_entry(model, directory, name);

        if (!entry)
                return;
        free(entry->name);
        *entry = inode->entries[--inode->entry_count];
}

static void resize(struct crash_inode *inode, uint64_t size)
{
        inode->data = need(realloc(inode->data, size + 1));
        if (size > inode->size)
                memset(inode->data + inode->size, 0, size - inode->size);
        inode->size = size;
}

static void write_sectors(struct crash_inode *inode, const struct crash_op *op, uint32_t sector_bytes, uint64_t *random)
{
        uint64_t end = op->offset + op->size;

        for (uint64_t at = op->offset; at < end;) {
                uint64_t next = sector_bytes ? (at / sector_bytes + 1) * sector_bytes : end;

                next = next < end ? next : end;
                if (!sector_bytes || crash_random(random) & 1) {
                        if (next > inode->size)
                                resize(inode, next);
                        memcpy(inode->data + at, op->data + (at - op->offset), next - at);
                }
                at = next;
        }
        /* The size may reach the disk without the bytes, which then read as zeros. */
        if (sector_bytes && crash_random(random) & 1 && end > inode->size)
                resize(inode, end);
}

void crash_model_apply(struct crash_model *model, const struct crash_op *op, enum crash_fate fate, bool with_data,
                       uint32_t sector_bytes, uint64_t *random)
{
        if (fate == CRASH_LOST)
                return;
        switch (op->kind) {
        case CRASH_ADD:
                add_entry(model, op->directory, op->name, op->inode);
                break;
        case CRASH_REMOVE:
                remove_entry(model, op->directory, op->name);
                break;
        case CRASH_RENAME:
                /* Removes the old name only if it still leads to this file: if an earlier change was lost, the name
                 * leads to another file. */
                if (fate == CRASH_KEPT && crash_model_entry(model, op->directory, op->name) == op->inode)
                        remove_entry(model, op->directory, op->name);
                add_entry(model, op->to_directory, op->to_name, op->inode);
                break;
        case CRASH_EXCHANGE:
                add_entry(model, op->directory, op->name, op->to_inode);
                add_entry(model, op->to_directory, op->to_name, op->inode);
                break;
        case CRASH_WRITE:
                if (with_data)
                        write_sectors(&model->inodes[op->inode], op, sector_bytes, random);
                break;
        case CRASH_RESIZE:
                if (with_data)
                        resize(&model->inodes[op->inode], op->size);
                break;
        case CRASH_SYNC:
                break;
        }
}

static int write_file(const struct crash_inode *inode, const char *path)
{
        int fd = os_linux.open(path, OS_WRITE | OS_CREATE | OS_TRUNCATE | OS_SHARED);
        uint64_t done = 0;
        int result = 0;

        if (fd < 0)
                return fd;
        while (done < inode->size && !result) {
                int64_t count = os_linux.pwrite(fd, inode->data + done, inode->size - done, done);

                result = count < 0 ? (int)count : 0;
                done += count > 0 ? (uint64_t)count : 0;
        }
        os_linux.close(fd);
        return result;
}

int crash_model_write_out(const struct crash_model *model, uint32_t directory, const char *path)
{
        const struct crash_inode *inode = &model->inodes[directory];
        int result = os_linux.mkdir(path, 0777);

        if (result == -EEXIST)
                result = 0;
        for (size_t i = 0; i < inode->entry_count && !result; i++) {
                const struct crash_inode *child = &model->inodes[inode->entries[i].inode];
                char below[4096];

                if (snprintf(below, sizeof below, "%s/%s", path, inode->entries[i].name) >= (int)sizeof below)
                        return -ENAMETOOLONG;
                result = child->is_directory ? crash_model_write_out(model, inode->entries[i].inode, below)
                                             : write_file(child, below);
        }
        return result;
}

void crash_model_done(struct crash_model *model)
{
        for (size_t i = 0; i < model->count; i++) {
                for (size_t j = 0; j < model->inodes[i].entry_count; j++)
                        free(model->inodes[i].entries[j].name);
                free(model->inodes[i].entries);
                free(model->inodes[i].data);
        }
        free(model->inodes);
        *model = (struct crash_model){ 0 };
}
