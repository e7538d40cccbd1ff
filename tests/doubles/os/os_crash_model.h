/*
 * os_crash_model.h - the log of changes behind os_crash.h, and the states that
 * a power loss makes of it. An inode is a number; 0 is the root.
 */
#ifndef NB_OS_OS_CRASH_MODEL_H
#define NB_OS_OS_CRASH_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CRASH_NONE UINT32_MAX

enum crash_op_kind {
        CRASH_ADD,    /* directory, name -> inode */
        CRASH_REMOVE, /* directory, name */
        CRASH_RENAME, /* directory, name -> to_directory, to_name; inode */
        CRASH_EXCHANGE, /* as CRASH_RENAME, and to_inode gets the first name */
        CRASH_WRITE,  /* inode, offset, size, data */
        CRASH_RESIZE, /* inode, size */
        CRASH_SYNC,   /* inode: a file or a directory */
};

struct crash_op {
        enum crash_op_kind kind;
        uint32_t inode, to_inode, directory, to_directory;
        char *name, *to_name; /* freed with the operation */
        uint64_t offset, size;
        char *data;           /* freed with the operation */
};

struct crash_entry {
        char *name;
        uint32_t inode;
};
struct crash_inode {
        bool is_directory;
        struct crash_entry *entries;
        size_t entry_count;
        char *data;
        uint64_t size;
};
/* A file system: the current names, or a state that survived. */
struct crash_model {
        struct crash_inode *inodes;
        size_t count;
};

/* The fate of one operation in a power loss. */
enum crash_fate { CRASH_KEPT, CRASH_LOST, CRASH_HALF /* a rename of which both names stay */ };

uint32_t crash_model_new_inode(struct crash_model *model, bool is_directory);
/* `path` is relative to the root. CRASH_NONE if it does not exist. */
uint32_t crash_model_find(const struct crash_model *model, const char *path);
uint32_t crash_model_entry(const struct crash_model *model, uint32_t directory, const char *name);
/* Applies an operation. Without `with_data` only names change. Each sector of a write is kept or lost at random; if
 * sector_bytes is 0, all are kept. */
void crash_model_apply(struct crash_model *model, const struct crash_op *op, enum crash_fate fate, bool with_data,
                       uint32_t sector_bytes, uint64_t *random);
int crash_model_write_out(const struct crash_model *model, uint32_t directory, const char *path);
void crash_model_done(struct crash_model *model);
uint64_t crash_random(uint64_t *state);

#endif
