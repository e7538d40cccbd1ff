/*
 * torch_pickle_private.h - the machine that reads the pickle of a file of torch.save. Only the files of torch_pickle include it.
 *
 *      torch_values.c    values, the stack, and lists of values
 *      torch_steps.c     the operations of a pickle, one by one
 *      torch_rebuild.c   storages and tensors, which torch's own functions make
 *      torch_pickle.c    the walk from the root to the tensors
 *
 * A failure is kept in `status`; after it, operations do nothing.
 */
#ifndef NB_IMAGE_TORCH_PICKLE_PRIVATE_H
#define NB_IMAGE_TORCH_PICKLE_PRIVATE_H

#include "image/torch_pickle.h"

#define NONE UINT32_MAX

enum kind { OTHER, MARK, TEXT, NUMBER, GLOBAL, TUPLE, LIST, DICT, STORAGE, TENSOR };

/* A value of the pickle. */
struct value {
        uint8_t kind;
        bool is_walked; /* the walk is inside this value now */
        uint32_t first, last; /* cells of TUPLE, LIST, OTHER (its arguments and state), and DICT (key, value, key, value, ...) */
        uint32_t count;
        union {
                struct {
                        const char *bytes; /* of TEXT; of GLOBAL: module, newline, name */
                        uint32_t size;
                        uint32_t name_at; /* of GLOBAL: index of the name's value, if module and name are two values */
                } text;
                int64_t number;
                struct {
                        const char *key;
                        uint32_t key_size;
                        int8_t dtype; /* -1: none */
                        uint64_t elements;
                } storage;
                uint32_t tensor; /* index of machine.found */
        };
};
struct cell {
        uint32_t value, next;
};
/* The stack, the memo and all values of one pickle. */
struct machine {
        const uint8_t *at, *end;
        struct value *values;
        struct cell *cells;
        uint32_t *stack, *memo;
        uint32_t value_count, value_room, cell_count, cell_room, stack_count, stack_room, memo_room, memo_next;
        struct torch_tensor *found; /* without names */
        uint32_t found_count, found_room;
        const struct zip_entry *entries; /* in the order of the file */
        const struct zip_entry **by_name; /* the same; NULL until a storage was not the next entry */
        size_t entry_count, next_entry;
        const char *prefix; /* "archive/" */
        size_t prefix_size;
        enum nebula_status status;
        struct nebula_error *error;
};

/* torch_values.c */
void machine_fail(struct machine *machine, enum nebula_status status, const char *what);
/* Makes room for one more entry in a list. False: no memory, or too many. */
bool machine_grow(struct machine *machine, void **list, uint32_t count, uint32_t *room, size_t size);
/* Pushes a new value; NULL: it failed. The pointer is valid until the next value is made. */
struct value *machine_push_new(struct machine *machine, enum kind kind);
void machine_push(struct machine *machine, uint32_t index);
uint32_t machine_pop(struct machine *machine); /* NONE: it failed */
uint32_t machine_top(struct machine *machine);
/* Adds a value to a tuple, list, dict or object. */
void machine_append(struct machine *machine, uint32_t to, uint32_t index);
/* The index of the topmost mark; the values above it are the operation's operands. */
uint32_t machine_find_mark(struct machine *machine);
/* Moves the values above the mark to the end of `to`, and removes the mark. */
void machine_take_marked(struct machine *machine, uint32_t mark, uint32_t to);
const struct value *machine_value(const struct machine *machine, uint32_t index);
/* Child `n` of a tuple, or NULL. */
const struct value *machine_child(const struct machine *machine, const struct value *value, uint32_t n);
bool machine_is_text(const struct value *value, const char *text);
bool machine_is_global(const struct machine *machine, const struct value *value, const char *module, const char *name);

/* torch_rebuild.c: a reference to a storage; function(*arguments) */
void machine_load_storage(struct machine *machine);
void machine_reduce(struct machine *machine);

/* torch_steps.c: does one operation. False: it was the last one. */
bool machine_step(struct machine *machine);

#endif
