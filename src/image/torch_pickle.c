#include "image/torch_pickle.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/text.h"
#include "image/torch_pickle_private.h"

#define DEPTH_MAX 200           /* of dicts in dicts */
#define TENSORS_MAX (1u << 22)
#define STEPS_MAX (1u << 24)    /* of the walk: a pickle may refer to one dict many times */

/* The walk from the root to the tensors. */
struct walk {
        struct machine *machine;
        struct torch_tensors *tensors;
        size_t room;
        struct buf name;
        uint32_t steps;
        int depth;
};

static void add_found(struct walk *walk, const struct torch_tensor *found)
{
        struct torch_tensor *tensor, *grown;

        if (walk->tensors->count == walk->room) {
                walk->room = walk->room ? walk->room * 2 : 64;
                grown = realloc(walk->tensors->list, walk->room * sizeof *grown);
                if (!grown || walk->room > TENSORS_MAX) {
                        walk->tensors->list = grown ? grown : walk->tensors->list;
                        machine_fail(walk->machine, NEBULA_INVALID, "more tensors than can be listed");
                        return;
                }
                walk->tensors->list = grown;
        }
        tensor = &walk->tensors->list[walk->tensors->count];
        *tensor = *found;
        tensor->name = walk->name.size ? strndup(walk->name.data, walk->name.size) : strdup("(tensor)");
        tensor->shape = calloc(2 * (size_t)found->dim_count + 1, sizeof *tensor->shape);
        walk->tensors->count++;
        if (!tensor->name || !tensor->shape) {
                machine_fail(walk->machine, NEBULA_NO_MEMORY, "no memory for its tensors");
                return;
        }
        text_make_utf8(tensor->name); /* a Python key may contain surrogates, and a long one is cut */
        memcpy(tensor->shape, found->shape, 2 * (size_t)found->dim_count * sizeof *tensor->shape);
        tensor->strides = (int64_t *)(tensor->shape + found->dim_count);
}

static void add_key(struct buf *name, const struct value *key, uint32_t index)
{
        char number[32];

        if (name->size)
                buf_add_byte(name, '.');
        if (key && key->kind == TEXT) {
                buf_add(name, key->text.bytes, key->text.size < TORCH_KEY_MAX ? key->text.size : TORCH_KEY_MAX);
        } else {
                snprintf(number, sizeof number, "%" PRId64, key && key->kind == NUMBER ? key->number : (int64_t)index);
                buf_add_text(name, number);
        }
}

static void visit(struct walk *walk, uint32_t index)
{
        struct machine *machine = walk->machine;
        const struct value *value = &machine->values[index], *key = NULL;
        size_t name_size = walk->name.size;
        uint32_t at = 0;

        if (walk->steps++ > STEPS_MAX)
                machine_fail(machine, NEBULA_INVALID, "it refers to its values too often to be listed");
        if (machine->status || value->is_walked)
                return;
        if (value->kind == TENSOR) {
                add_found(walk, &machine->found[value->tensor]);
                return;
        }
        if (value->kind != DICT && value->kind != LIST && value->kind != TUPLE && value->kind != OTHER)
                return;
        if (walk->depth == DEPTH_MAX) {
                machine_fail(machine, NEBULA_INVALID, "it is nested too deeply to be listed");
                return;
        }
        walk->depth++;
        machine->values[index].is_walked = true;
        for (uint32_t cell = value->first; cell != NONE && !machine->status; cell = machine->cells[cell].next, at++) {
                if (value->kind == DICT && at % 2 == 0) {
                        key = &machine->values[machine->cells[cell].value];
                        continue;
                }
                if (value->kind != OTHER) /* the arguments and the state of an object add no key to the name */
                        add_key(&walk->name, key, at);
                visit(walk, machine->cells[cell].value);
                walk->name.size = name_size;
        }
        machine->values[index].is_walked = false;
        walk->depth--;
}

static enum nebula_status run(struct machine *machine, struct torch_tensors *tensors)
{
        struct walk walk = { .machine = machine, .tensors = tensors };
        uint32_t root;

        while (machine_step(machine))
                ;
        root = machine->status ? NONE : machine_pop(machine);
        if (root != NONE)
                visit(&walk, root);
        if (walk.name.failed)
                machine_fail(machine, NEBULA_NO_MEMORY, "no memory for its names");
        buf_done(&walk.name);
        return machine->status;
}

static void machine_done(struct machine *machine)
{
        for (uint32_t i = 0; i < machine->found_count; i++)
                free(machine->found[i].shape);
        free(machine->found);
        free(machine->by_name);
        free(machine->values);
        free(machine->cells);
        free(machine->stack);
        free(machine->memo);
}

static enum nebula_status find_pickle(const struct zip_entry *entries, size_t count, size_t *ret_at, size_t *ret_prefix_size, struct nebula_error *error)
{
        for (size_t i = 0; i < count; i++) {
                const char *slash = strchr(entries[i].name, '/');

                if (slash && !strcmp(slash + 1, "data.pkl")) {
                        *ret_at = i;
                        *ret_prefix_size = (size_t)(slash + 1 - entries[i].name);
                        return NEBULA_OK;
                }
        }
        return error_set(error, NEBULA_INVALID, 0, "it is not a file of torch.save: there is no data.pkl");
}

/* The first entry of a storage; entries of torch's own come between it and the pickle. */
static size_t skip_to_storages(const struct zip_entry *entries, size_t count, size_t at)
{
        for (; at < count; at++) {
                const char *slash = strchr(entries[at].name, '/');

                if (slash && !strncmp(slash, "/data/", strlen("/data/")))
                        break;
        }
        return at;
}

enum nebula_status torch_tensors_find(const void *data, uint64_t size, struct torch_tensors *ret_tensors, struct nebula_error *error)
{
        struct zip_entry *entries;
        size_t count;
        enum nebula_status status = zip_read(data, size, &entries, &count, error);

        if (status)
                return status;
        status = torch_tensors_find_in(data, entries, count, ret_tensors, error);
        free(entries);
        return status;
}

enum nebula_status torch_tensors_find_in(const void *data, const struct zip_entry *entries, size_t count, struct torch_tensors *ret_tensors,
                                         struct nebula_error *error)
{
        struct torch_tensors tensors = { 0 };
        struct machine machine = { .entries = entries, .entry_count = count, .error = error };
        enum nebula_status status = find_pickle(entries, count, &machine.next_entry, &machine.prefix_size, error);

        if (!status) {
                const struct zip_entry *pickle = &entries[machine.next_entry];

                machine.next_entry = skip_to_storages(entries, count, machine.next_entry);
                machine.prefix = pickle->name;
                machine.at = (const uint8_t *)data + pickle->payload_offset;
                machine.end = machine.at + pickle->size;
                tensors.pickle_offset = pickle->payload_offset;
                tensors.pickle_size = pickle->size;
                status = run(&machine, &tensors);
        }
        machine_done(&machine);
        if (status)
                torch_tensors_done(&tensors);
        else
                *ret_tensors = tensors;
        return status;
}

static const struct torch_tensor *find_named(const struct torch_tensors *tensors, const char *name, bool *ret_is_twice)
{
        const struct torch_tensor *found = NULL;

        *ret_is_twice = false;
        for (size_t i = 0; i < tensors->count; i++)
                if (!strcmp(tensors->list[i].name, name)) {
                        *ret_is_twice = found != NULL;
                        if (found)
                                break;
                        found = &tensors->list[i];
                }
        return found;
}

enum nebula_status torch_tensors_pick(const struct torch_tensors *tensors, const void *data, const char *name, struct nebula_tensor *ret_tensor,
                                      struct nebula_error *error)
{
        static const uint8_t types[TORCH_DTYPE_COUNT] = { /* 1 more than the type, as 0 is none */
                [TORCH_F64] = NEBULA_DTYPE_F64 + 1, [TORCH_F32] = NEBULA_DTYPE_F32 + 1, [TORCH_F16] = NEBULA_DTYPE_F16 + 1, [TORCH_BF16] = NEBULA_DTYPE_BF16 + 1,
                [TORCH_I64] = NEBULA_DTYPE_I64 + 1, [TORCH_I32] = NEBULA_DTYPE_I32 + 1, [TORCH_I16] = NEBULA_DTYPE_I16 + 1, [TORCH_I8] = NEBULA_DTYPE_I8 + 1,
                [TORCH_U8] = NEBULA_DTYPE_U8 + 1, [TORCH_BOOL] = NEBULA_DTYPE_BOOL + 1, [TORCH_C64] = NEBULA_DTYPE_C64 + 1, [TORCH_C128] = NEBULA_DTYPE_C128 + 1,
        };
        bool is_twice;
        const struct torch_tensor *found = find_named(tensors, name, &is_twice);

        if (!found)
                return error_set(error, NEBULA_NOT_FOUND, 0, "no tensor \"%.200s\" among the %zu of this file", name, tensors->count);
        if (is_twice)
                return error_set(error, NEBULA_INVALID, 0, "two tensors of this file have the name \"%.200s\"", name);
        if (!types[found->dtype] || found->dim_count > NEBULA_DIM_MAX || !found->is_contiguous)
                return error_set(error, NEBULA_INVALID, 0, "tensor \"%.200s\" is not contiguous, or of a type or a number of dimensions that nebula.h does not have",
                                 name);
        *ret_tensor = (struct nebula_tensor){ .name = name, .data = (const char *)data + found->offset, .dtype = (enum nebula_dtype)(types[found->dtype] - 1),
                                              .dim_count = found->dim_count };
        memcpy(ret_tensor->shape, found->shape, found->dim_count * sizeof *found->shape);
        return NEBULA_OK;
}

void torch_tensors_done(struct torch_tensors *tensors)
{
        for (size_t i = 0; i < tensors->count; i++) {
                free(tensors->list[i].name);
                free(tensors->list[i].shape);
        }
        free(tensors->list);
        *tensors = (struct torch_tensors){ 0 };
}
