#include "image/torch_pickle_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
        const char *name, *storage;
        uint8_t size;
} dtypes[TORCH_DTYPE_COUNT] = {
        [TORCH_F64] = { "float64", "DoubleStorage", 8 },
        [TORCH_F32] = { "float32", "FloatStorage", 4 },
        [TORCH_F16] = { "float16", "HalfStorage", 2 },
        [TORCH_BF16] = { "bfloat16", "BFloat16Storage", 2 },
        [TORCH_F8_E4M3] = { "float8_e4m3fn", "", 1 },
        [TORCH_F8_E5M2] = { "float8_e5m2", "", 1 },
        [TORCH_I64] = { "int64", "LongStorage", 8 },
        [TORCH_I32] = { "int32", "IntStorage", 4 },
        [TORCH_I16] = { "int16", "ShortStorage", 2 },
        [TORCH_I8] = { "int8", "CharStorage", 1 },
        [TORCH_U64] = { "uint64", "", 8 },
        [TORCH_U32] = { "uint32", "", 4 },
        [TORCH_U16] = { "uint16", "", 2 },
        [TORCH_U8] = { "uint8", "ByteStorage", 1 },
        [TORCH_BOOL] = { "bool", "BoolStorage", 1 },
        [TORCH_C64] = { "complex64", "ComplexFloatStorage", 8 },
        [TORCH_C128] = { "complex128", "ComplexDoubleStorage", 16 },
};

const char *torch_dtype_name(enum torch_dtype dtype)
{
        return dtypes[dtype].name;
}

size_t torch_dtype_size(enum torch_dtype dtype)
{
        return dtypes[dtype].size;
}

static int8_t dtype_of(const struct machine *machine, const struct value *value, bool is_storage)
{
        for (int8_t i = 0; i < TORCH_DTYPE_COUNT; i++)
                if (machine_is_global(machine, value, "torch", is_storage ? dtypes[i].storage : dtypes[i].name))
                        return i;
        return -1;
}

/* ('storage', type, key, location, elements) */
void machine_load_storage(struct machine *machine)
{
        const struct value *id = machine_value(machine, machine_pop(machine)), *key = machine_child(machine, id, 2), *count = machine_child(machine, id, 4);
        struct value *made, copy = { 0 };

        if (machine->status)
                return;
        if (!id || id->kind != TUPLE || !machine_is_text(machine_child(machine, id, 0), "storage") || !key || key->kind != TEXT || !count || count->kind != NUMBER ||
            count->number < 0) {
                machine_fail(machine, NEBULA_INVALID, "a reference to something that is no storage of torch");
                return;
        }
        copy.storage.key = key->text.bytes;
        copy.storage.key_size = key->text.size;
        copy.storage.dtype = dtype_of(machine, machine_child(machine, id, 1), true);
        copy.storage.elements = (uint64_t)count->number;
        made = machine_push_new(machine, STORAGE);
        if (made)
                made->storage = copy.storage;
}

static int by_name(const void *a, const void *b)
{
        return strcmp((*(const struct zip_entry *const *)a)->name, (*(const struct zip_entry *const *)b)->name);
}

static void sort_entries(struct machine *machine)
{
        machine->by_name = malloc(machine->entry_count * sizeof *machine->by_name);
        if (!machine->by_name) {
                machine_fail(machine, NEBULA_NO_MEMORY, "no memory for its records");
                return;
        }
        for (size_t i = 0; i < machine->entry_count; i++)
                machine->by_name[i] = &machine->entries[i];
        qsort(machine->by_name, machine->entry_count, sizeof *machine->by_name, by_name);
}

/* A pickler numbers the storages in the order of the file, so most are the next entry. */
static const struct zip_entry *find_entry(struct machine *machine, const char *key, size_t key_size)
{
        struct zip_entry wanted;
        const struct zip_entry *name = &wanted, **found;
        size_t size = machine->prefix_size + strlen("data/") + key_size;

        if (size >= sizeof wanted.name)
                return NULL;
        memcpy(wanted.name, machine->prefix, machine->prefix_size);
        memcpy(wanted.name + machine->prefix_size, "data/", strlen("data/"));
        memcpy(wanted.name + size - key_size, key, key_size);
        wanted.name[size] = '\0';
        if (machine->next_entry < machine->entry_count && !strcmp(machine->entries[machine->next_entry].name, wanted.name))
                return &machine->entries[machine->next_entry++];
        if (!machine->by_name)
                sort_entries(machine);
        found = machine->by_name ? bsearch(&name, machine->by_name, machine->entry_count, sizeof *found, by_name) : NULL;
        if (!found)
                return NULL;
        machine->next_entry = (size_t)(*found - machine->entries) + 1;
        return *found;
}

/* Reads shape and strides; false: they are not sound, or elements lie outside the storage. */
static bool place(const struct machine *machine, struct torch_tensor *tensor, const struct value *size, const struct value *stride, uint64_t first)
{
        uint64_t last = first, expected = 1, room = tensor->storage_size / torch_dtype_size(tensor->dtype);
        uint32_t s = size->first, t = stride->first;

        tensor->elements = 1;
        tensor->is_contiguous = true;
        for (uint32_t i = 0; i < tensor->dim_count; i++, s = machine->cells[s].next, t = machine->cells[t].next) {
                const struct value *extent = &machine->values[machine->cells[s].value], *step = &machine->values[machine->cells[t].value];

                if (extent->kind != NUMBER || step->kind != NUMBER || extent->number < 0 || step->number < 0 ||
                    __builtin_mul_overflow(tensor->elements, (uint64_t)extent->number, &tensor->elements))
                        return false;
                tensor->shape[i] = (uint64_t)extent->number;
                tensor->strides[i] = step->number;
        }
        for (uint32_t i = tensor->dim_count; i-- && tensor->elements;) {
                uint64_t reach;

                if (__builtin_mul_overflow(tensor->shape[i] - 1, (uint64_t)tensor->strides[i], &reach) || __builtin_add_overflow(last, reach, &last))
                        return false;
                tensor->is_contiguous = tensor->is_contiguous && (tensor->shape[i] == 1 || (uint64_t)tensor->strides[i] == expected);
                expected *= tensor->shape[i];
        }
        /* Expanded tensors repeat elements: a few bytes may claim a huge number. */
        if (tensor->elements > room && !tensor->is_contiguous && tensor->elements > (UINT64_C(1) << 32))
                return false;
        return !tensor->elements || last < room;
}

/* (storage, offset, size, stride, ...); the dtype is that of the storage, or argument 6. */
static void load_tensor(struct machine *machine, const struct value *arguments, bool has_dtype)
{
        const struct value *storage = machine_child(machine, arguments, 0), *offset = machine_child(machine, arguments, 1);
        const struct value *size = machine_child(machine, arguments, 2), *stride = machine_child(machine, arguments, 3);
        int8_t dtype = has_dtype ? dtype_of(machine, machine_child(machine, arguments, 6), false) : storage && storage->kind == STORAGE ? storage->storage.dtype : -1;
        const struct zip_entry *entry;
        struct torch_tensor *tensor;
        struct value *made;

        if (!storage || storage->kind != STORAGE || !offset || offset->kind != NUMBER || offset->number < 0 || !size || size->kind != TUPLE ||
            !stride || stride->kind != TUPLE || size->count != stride->count || size->count > TORCH_DIM_MAX) {
                machine_fail(machine, NEBULA_CORRUPT, "a tensor without a sound shape");
                return;
        }
        if (dtype < 0) {
                machine_push_new(machine, OTHER); /* of a kind that only torch can read: quantized, or newer */
                return;
        }
        entry = find_entry(machine, storage->storage.key, storage->storage.key_size);
        if (!entry) {
                machine_fail(machine, NEBULA_CORRUPT, "a tensor whose record is missing");
                return;
        }
        if (!machine_grow(machine, (void **)&machine->found, machine->found_count, &machine->found_room, sizeof *machine->found))
                return;
        tensor = &machine->found[machine->found_count];
        *tensor = (struct torch_tensor){ .dtype = (enum torch_dtype)dtype, .dim_count = size->count, .storage_offset = entry->payload_offset,
                                         .storage_size = entry->size };
        tensor->shape = calloc(2 * (size_t)size->count + 1, sizeof *tensor->shape);
        if (!tensor->shape) {
                machine_fail(machine, NEBULA_NO_MEMORY, "no memory for a tensor");
                return;
        }
        machine->found_count++;
        tensor->strides = (int64_t *)(tensor->shape + size->count);
        if (!place(machine, tensor, size, stride, (uint64_t)offset->number)) {
                machine_fail(machine, NEBULA_CORRUPT, "a tensor that reaches outside of its storage");
                return;
        }
        tensor->offset = entry->payload_offset + (tensor->elements ? (uint64_t)offset->number * torch_dtype_size(tensor->dtype) : 0);
        made = machine_push_new(machine, TENSOR);
        if (made)
                made->tensor = machine->found_count - 1;
}

static bool is_rebuild(const struct machine *machine, const struct value *function, bool *ret_has_dtype)
{
        *ret_has_dtype = machine_is_global(machine, function, "torch._utils", "_rebuild_tensor_v3");
        return *ret_has_dtype || machine_is_global(machine, function, "torch._utils", "_rebuild_tensor_v2") ||
               machine_is_global(machine, function, "torch._utils", "_rebuild_tensor");
}

/* function(*arguments) */
void machine_reduce(struct machine *machine)
{
        uint32_t arguments_at = machine_pop(machine), function_at = machine_pop(machine), object;
        const struct value *arguments = machine_value(machine, arguments_at), *function = machine_value(machine, function_at);
        bool has_dtype;

        if (machine->status)
                return;
        if (arguments->kind == TUPLE && is_rebuild(machine, function, &has_dtype)) {
                load_tensor(machine, arguments, has_dtype);
                return;
        }
        /* (function, type, arguments, state): a subclass of Tensor */
        if (machine_is_global(machine, function, "torch._tensor", "_rebuild_from_type_v2") && is_rebuild(machine, machine_child(machine, arguments, 0), &has_dtype) &&
            machine_child(machine, arguments, 2) && machine_child(machine, arguments, 2)->kind == TUPLE) {
                load_tensor(machine, machine_child(machine, arguments, 2), has_dtype);
                return;
        }
        if ((machine_is_global(machine, function, "torch._utils", "_rebuild_parameter") ||
             machine_is_global(machine, function, "torch._utils", "_rebuild_parameter_with_state")) && arguments->first != NONE) {
                machine_push(machine, machine->cells[arguments->first].value);
                return;
        }
        if (!machine_push_new(machine, machine_is_global(machine, function, "collections", "OrderedDict") ? DICT : OTHER))
                return;
        object = machine_top(machine);
        if (machine->values[object].kind == OTHER)
                machine_append(machine, object, arguments_at);
}
