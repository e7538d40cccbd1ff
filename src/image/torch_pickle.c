#include "image/torch_pickle.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"

#define DEPTH_MAX 200           /* of dicts in dicts */
#define TENSORS_MAX (1u << 22)
#define STEPS_MAX (1u << 24)    /* of the walk: a pickle may refer to one dict from many */
#define NONE UINT32_MAX

enum kind { OTHER, MARK, TEXT, NUMBER, GLOBAL, TUPLE, LIST, DICT, STORAGE, TENSOR };

/* A value of the pickle. */
struct value {
        uint8_t kind;
        bool is_walked; /* the walk is below it just now */
        uint32_t first, last; /* cells of TUPLE, LIST, OTHER (its arguments and state), and DICT (key, value, key, value, ...) */
        uint32_t count;
        union {
                struct {
                        const char *bytes; /* of TEXT; of GLOBAL: the module, its newline and the name */
                        uint32_t size;
                        uint32_t name_at; /* of GLOBAL: index of the name's value, if the module is one of its own */
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
struct machine {
        const uint8_t *at, *end;
        struct value *values;
        struct cell *cells;
        uint32_t *stack, *memo;
        uint32_t value_count, value_room, cell_count, cell_room, stack_count, stack_room, memo_room, memo_next;
        struct torch_tensor *found; /* without names */
        uint32_t found_count, found_room;
        const struct zip_entry *entries; /* by name */
        size_t entry_count;
        size_t prefix_size; /* of "archive/" */
        enum nebula_status status;
        struct nebula_error *error;
};

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

static void fail(struct machine *machine, enum nebula_status status, const char *what)
{
        if (!machine->status)
                machine->status = error_set(machine->error, status, 0, "data.pkl: %s", what);
}

static bool grow(struct machine *machine, void **list, uint32_t count, uint32_t *room, size_t size)
{
        uint32_t wanted = *room ? *room * 2 : 256;
        void *grown;

        if (count < *room)
                return true;
        grown = *room < UINT32_MAX / 4 ? realloc(*list, wanted * size) : NULL;
        if (!grown) {
                fail(machine, NEBULA_NO_MEMORY, "no memory for its values");
                return false;
        }
        *list = grown;
        *room = wanted;
        return true;
}

/* The new value on the stack; NULL: it failed. It moves when another is added. */
static struct value *push_new(struct machine *machine, enum kind kind)
{
        if (!grow(machine, (void **)&machine->values, machine->value_count, &machine->value_room, sizeof *machine->values) ||
            !grow(machine, (void **)&machine->stack, machine->stack_count, &machine->stack_room, sizeof *machine->stack))
                return NULL;
        machine->stack[machine->stack_count++] = machine->value_count;
        machine->values[machine->value_count] = (struct value){ .kind = (uint8_t)kind, .first = NONE, .last = NONE };
        return &machine->values[machine->value_count++];
}

static void push(struct machine *machine, uint32_t index)
{
        if (index != NONE && grow(machine, (void **)&machine->stack, machine->stack_count, &machine->stack_room, sizeof *machine->stack))
                machine->stack[machine->stack_count++] = index;
}

static uint32_t pop(struct machine *machine)
{
        if (!machine->stack_count) {
                fail(machine, NEBULA_CORRUPT, "an operation without its values");
                return NONE;
        }
        return machine->stack[--machine->stack_count];
}

static uint32_t top(struct machine *machine)
{
        uint32_t index = pop(machine);

        machine->stack_count += index != NONE;
        return index;
}

static void append(struct machine *machine, uint32_t to, uint32_t index)
{
        struct value *list;

        if (to == NONE || index == NONE || !grow(machine, (void **)&machine->cells, machine->cell_count, &machine->cell_room, sizeof *machine->cells))
                return;
        list = &machine->values[to];
        machine->cells[machine->cell_count] = (struct cell){ index, NONE };
        if (list->first == NONE)
                list->first = machine->cell_count;
        else
                machine->cells[list->last].next = machine->cell_count;
        list->last = machine->cell_count++;
        list->count++;
}

/* The place of the topmost mark; the values above it are what the operation takes. */
static uint32_t find_mark(struct machine *machine)
{
        uint32_t at = machine->stack_count;

        while (at && machine->values[machine->stack[at - 1]].kind != MARK)
                at--;
        if (!at) {
                fail(machine, NEBULA_CORRUPT, "an operation without its mark");
                return NONE;
        }
        return at - 1;
}

/* Moves what is above the mark to the end of `to`, and the mark away. */
static void take_marked(struct machine *machine, uint32_t mark, uint32_t to)
{
        for (uint32_t i = mark + 1; i < machine->stack_count && !machine->status; i++)
                append(machine, to, machine->stack[i]);
        machine->stack_count = mark;
}

static const struct value *value_of(const struct machine *machine, uint32_t index)
{
        return index == NONE ? NULL : &machine->values[index];
}

/* Child `n` of a tuple, or NULL. */
static const struct value *child(const struct machine *machine, const struct value *value, uint32_t n)
{
        uint32_t cell = value ? value->first : NONE;

        while (cell != NONE && n--)
                cell = machine->cells[cell].next;
        return cell == NONE ? NULL : &machine->values[machine->cells[cell].value];
}

static bool is_text(const struct value *value, const char *text)
{
        return value && value->kind == TEXT && value->text.size == strlen(text) && !memcmp(value->text.bytes, text, value->text.size);
}

/* `name`: "module\nname". */
static bool is_global(const struct machine *machine, const struct value *value, const char *name)
{
        const struct value *second;
        size_t size;

        if (!value || value->kind != GLOBAL)
                return false;
        if (value->text.name_at == NONE)
                return value->text.size == strlen(name) && !memcmp(value->text.bytes, name, value->text.size);
        second = &machine->values[value->text.name_at];
        size = strcspn(name, "\n");
        return value->text.size == size && !memcmp(value->text.bytes, name, size) && is_text(second, name + size + 1);
}

static int8_t dtype_of(const struct machine *machine, const struct value *value, bool is_storage)
{
        char name[64];

        for (int8_t i = 0; i < TORCH_DTYPE_COUNT; i++) {
                snprintf(name, sizeof name, "torch\n%s", is_storage ? dtypes[i].storage : dtypes[i].name);
                if ((!is_storage || *dtypes[i].storage) && is_global(machine, value, name))
                        return i;
        }
        return -1;
}

/* ('storage', type, key, location, elements) */
static void load_storage(struct machine *machine)
{
        const struct value *id = value_of(machine, pop(machine)), *key = child(machine, id, 2), *count = child(machine, id, 4);
        struct value *made, copy = { 0 };

        if (machine->status)
                return;
        if (!id || id->kind != TUPLE || !is_text(child(machine, id, 0), "storage") || !key || key->kind != TEXT || !count || count->kind != NUMBER ||
            count->number < 0) {
                fail(machine, NEBULA_INVALID, "a reference to something that is no storage of torch");
                return;
        }
        copy.storage.key = key->text.bytes;
        copy.storage.key_size = key->text.size;
        copy.storage.dtype = dtype_of(machine, child(machine, id, 1), true);
        copy.storage.elements = (uint64_t)count->number;
        made = push_new(machine, STORAGE);
        if (made)
                made->storage = copy.storage;
}

static int compare_names(const void *a, const void *b)
{
        return strcmp(((const struct zip_entry *)a)->name, ((const struct zip_entry *)b)->name);
}

static const struct zip_entry *find_entry(const struct machine *machine, const char *key, size_t key_size)
{
        struct zip_entry wanted;

        if (key_size > 100)
                return NULL;
        snprintf(wanted.name, sizeof wanted.name, "%.*sdata/%.*s", (int)machine->prefix_size, machine->entries[0].name, (int)key_size, key);
        return bsearch(&wanted, machine->entries, machine->entry_count, sizeof wanted, compare_names);
}

/* Shape and strides; false: they are not sound, or elements lie outside of the storage. */
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
        /* Expanded tensors repeat elements: a few bytes may claim to be many. */
        if (tensor->elements > room && !tensor->is_contiguous && tensor->elements > (UINT64_C(1) << 32))
                return false;
        return !tensor->elements || last < room;
}

/* (storage, offset, size, stride, ...) with the dtype of the storage, or of argument 6. */
static void load_tensor(struct machine *machine, const struct value *arguments, bool has_dtype)
{
        const struct value *storage = child(machine, arguments, 0), *offset = child(machine, arguments, 1);
        const struct value *size = child(machine, arguments, 2), *stride = child(machine, arguments, 3);
        int8_t dtype = has_dtype ? dtype_of(machine, child(machine, arguments, 6), false) : storage && storage->kind == STORAGE ? storage->storage.dtype : -1;
        const struct zip_entry *entry;
        struct torch_tensor *tensor;
        struct value *made;

        if (!storage || storage->kind != STORAGE || !offset || offset->kind != NUMBER || offset->number < 0 || !size || size->kind != TUPLE ||
            !stride || stride->kind != TUPLE || size->count != stride->count || size->count > TORCH_DIM_MAX) {
                fail(machine, NEBULA_CORRUPT, "a tensor without a sound shape");
                return;
        }
        if (dtype < 0) {
                push_new(machine, OTHER); /* of a kind that only torch knows: quantized, or newer */
                return;
        }
        entry = find_entry(machine, storage->storage.key, storage->storage.key_size);
        if (!entry) {
                fail(machine, NEBULA_CORRUPT, "a tensor whose record is missing");
                return;
        }
        if (!grow(machine, (void **)&machine->found, machine->found_count, &machine->found_room, sizeof *machine->found))
                return;
        tensor = &machine->found[machine->found_count];
        *tensor = (struct torch_tensor){ .dtype = (enum torch_dtype)dtype, .dim_count = size->count, .storage_offset = entry->payload_offset,
                                         .storage_size = entry->size };
        tensor->shape = calloc(2 * (size_t)size->count + 1, sizeof *tensor->shape);
        if (!tensor->shape) {
                fail(machine, NEBULA_NO_MEMORY, "no memory for a tensor");
                return;
        }
        machine->found_count++;
        tensor->strides = (int64_t *)(tensor->shape + size->count);
        if (!place(machine, tensor, size, stride, (uint64_t)offset->number)) {
                fail(machine, NEBULA_CORRUPT, "a tensor that reaches outside of its storage");
                return;
        }
        tensor->offset = entry->payload_offset + (tensor->elements ? (uint64_t)offset->number * torch_dtype_size(tensor->dtype) : 0);
        made = push_new(machine, TENSOR);
        if (made)
                made->tensor = machine->found_count - 1;
}

static bool is_rebuild(const struct machine *machine, const struct value *function, bool *ret_has_dtype)
{
        *ret_has_dtype = is_global(machine, function, "torch._utils\n_rebuild_tensor_v3");
        return *ret_has_dtype || is_global(machine, function, "torch._utils\n_rebuild_tensor_v2") ||
               is_global(machine, function, "torch._utils\n_rebuild_tensor");
}

/* function(*arguments) */
static void reduce(struct machine *machine)
{
        uint32_t arguments_at = pop(machine), function_at = pop(machine), object;
        const struct value *arguments = value_of(machine, arguments_at), *function = value_of(machine, function_at);
        bool has_dtype;

        if (machine->status)
                return;
        if (arguments->kind == TUPLE && is_rebuild(machine, function, &has_dtype)) {
                load_tensor(machine, arguments, has_dtype);
                return;
        }
        /* (function, type, arguments, state): a subclass of Tensor */
        if (is_global(machine, function, "torch._tensor\n_rebuild_from_type_v2") && is_rebuild(machine, child(machine, arguments, 0), &has_dtype) &&
            child(machine, arguments, 2) && child(machine, arguments, 2)->kind == TUPLE) {
                load_tensor(machine, child(machine, arguments, 2), has_dtype);
                return;
        }
        if ((is_global(machine, function, "torch._utils\n_rebuild_parameter") ||
             is_global(machine, function, "torch._utils\n_rebuild_parameter_with_state")) && arguments->first != NONE) {
                push(machine, machine->cells[arguments->first].value);
                return;
        }
        if (!push_new(machine, is_global(machine, function, "collections\nOrderedDict") ? DICT : OTHER))
                return;
        object = top(machine);
        if (machine->values[object].kind == OTHER)
                append(machine, object, arguments_at);
}

/* The state of an object, or what comes into a dict besides. */
static void build(struct machine *machine)
{
        uint32_t state = pop(machine), object = top(machine);

        if (!machine->status && machine->values[object].kind == OTHER)
                append(machine, object, state);
}

static uint64_t take_le(struct machine *machine, size_t size)
{
        uint64_t value = 0;

        if ((size_t)(machine->end - machine->at) < size) {
                fail(machine, NEBULA_CORRUPT, "it is cut off");
                return 0;
        }
        for (size_t i = size; i--;)
                value = value << 8 | machine->at[i];
        machine->at += size;
        return value;
}

static const char *take_bytes(struct machine *machine, uint64_t size)
{
        const char *bytes = (const char *)machine->at;

        if (machine->status || (uint64_t)(machine->end - machine->at) < size || size > UINT32_MAX) {
                fail(machine, NEBULA_CORRUPT, "it is cut off");
                return NULL;
        }
        machine->at += size;
        return bytes;
}

static void push_text(struct machine *machine, uint64_t size, bool is_text)
{
        const char *bytes = take_bytes(machine, size);
        struct value *value = bytes ? push_new(machine, is_text ? TEXT : OTHER) : NULL;

        if (value && is_text) {
                value->text.bytes = bytes;
                value->text.size = (uint32_t)size;
        }
}

static void push_number(struct machine *machine, int64_t number)
{
        struct value *value = push_new(machine, NUMBER);

        if (value)
                value->number = number;
}

/* LONG1: little-endian, two's complement. Numbers that no shape has are values of another kind. */
static void push_long(struct machine *machine, uint64_t size)
{
        const uint8_t *bytes = (const uint8_t *)take_bytes(machine, size);
        uint64_t number = 0;

        if (!bytes)
                return;
        if (size > 8) {
                push_new(machine, OTHER);
                return;
        }
        for (size_t i = size; i--;)
                number = number << 8 | bytes[i];
        if (size && size < 8 && bytes[size - 1] & 0x80)
                number |= ~UINT64_C(0) << (8 * size);
        push_number(machine, (int64_t)number);
}

static void push_global(struct machine *machine)
{
        const char *begin = (const char *)machine->at, *line, *second;
        struct value *value;

        line = memchr(begin, '\n', (size_t)(machine->end - machine->at));
        second = line ? memchr(line + 1, '\n', (size_t)((const char *)machine->end - line - 1)) : NULL;
        if (!second) {
                fail(machine, NEBULA_CORRUPT, "it is cut off");
                return;
        }
        machine->at = (const uint8_t *)second + 1;
        value = push_new(machine, GLOBAL);
        if (value) {
                value->text.bytes = begin;
                value->text.size = (uint32_t)(second - begin);
                value->text.name_at = NONE;
        }
}

static void push_stack_global(struct machine *machine)
{
        uint32_t name = pop(machine), module = pop(machine);
        struct value *value;
        const char *bytes;
        uint32_t size;

        if (machine->status)
                return;
        if (machine->values[name].kind != TEXT || machine->values[module].kind != TEXT) {
                fail(machine, NEBULA_CORRUPT, "a class without a name");
                return;
        }
        bytes = machine->values[module].text.bytes;
        size = machine->values[module].text.size;
        value = push_new(machine, GLOBAL);
        if (value) {
                value->text.bytes = bytes;
                value->text.size = size;
                value->text.name_at = name;
        }
}

static void memoize(struct machine *machine, uint64_t place)
{
        uint32_t index = top(machine);

        if (machine->status)
                return;
        if (place > (uint64_t)machine->value_count + 65536) { /* a pickler counts up */
                fail(machine, NEBULA_INVALID, "it remembers values in places that no pickler takes");
                return;
        }
        while (place >= machine->memo_room) {
                uint32_t before = machine->memo_room;

                if (!grow(machine, (void **)&machine->memo, machine->memo_room, &machine->memo_room, sizeof *machine->memo))
                        return;
                for (uint32_t i = before; i < machine->memo_room; i++)
                        machine->memo[i] = NONE;
        }
        machine->memo[place] = index;
}

static void recall(struct machine *machine, uint64_t place)
{
        if (place >= machine->memo_room || machine->memo[place] == NONE)
                fail(machine, NEBULA_CORRUPT, "it recalls what it has not remembered");
        else
                push(machine, machine->memo[place]);
}

/* The last `count` values become one tuple. */
static void push_tuple(struct machine *machine, uint32_t count)
{
        uint32_t first = machine->stack_count - count, tuple;

        if (machine->stack_count < count) {
                fail(machine, NEBULA_CORRUPT, "an operation without its values");
                return;
        }
        if (!push_new(machine, TUPLE))
                return;
        tuple = pop(machine);
        for (uint32_t i = 0; i < count; i++)
                append(machine, tuple, machine->stack[first + i]);
        machine->stack_count = first;
        push(machine, tuple);
}

static void push_marked(struct machine *machine, enum kind kind)
{
        uint32_t mark = find_mark(machine), made;

        if (mark == NONE || !push_new(machine, kind))
                return;
        made = pop(machine);
        take_marked(machine, mark, made);
        push(machine, made);
}

/* Items come into an object of a class that is a dict or a list: its names are theirs from now on. */
static void become(struct machine *machine, uint32_t index, enum kind kind)
{
        struct value *value = &machine->values[index];

        if (value->kind != OTHER)
                return;
        value->kind = (uint8_t)kind;
        value->first = value->last = NONE;
        value->count = 0;
}

static void add_marked(struct machine *machine, enum kind kind)
{
        uint32_t mark = find_mark(machine);

        if (mark == NONE)
                return;
        if (!mark) {
                fail(machine, NEBULA_CORRUPT, "an operation without its values");
                return;
        }
        become(machine, machine->stack[mark - 1], kind);
        take_marked(machine, mark, machine->stack[mark - 1]);
}

static void add_item(struct machine *machine, bool has_key)
{
        uint32_t value = pop(machine), key = has_key ? pop(machine) : NONE, to = top(machine);

        if (machine->status)
                return;
        become(machine, to, has_key ? DICT : LIST);
        if (has_key)
                append(machine, to, key);
        append(machine, to, value);
}

/* NEWOBJ: class.__new__(*arguments); NEWOBJ_EX: also with names. */
static void new_object(struct machine *machine, uint32_t arguments)
{
        uint32_t taken[2] = { NONE, NONE }, object;

        for (uint32_t i = 0; i < arguments; i++)
                taken[i] = pop(machine);
        pop(machine);
        if (machine->status || !push_new(machine, OTHER))
                return;
        object = top(machine);
        for (uint32_t i = arguments; i--;)
                append(machine, object, taken[i]);
}

static void drop_marked(struct machine *machine)
{
        uint32_t mark = find_mark(machine);

        if (mark != NONE)
                machine->stack_count = mark;
}

/* One operation. False: it was the last one. */
static bool step(struct machine *machine)
{
        uint8_t code = (uint8_t)take_le(machine, 1);

        if (machine->status)
                return false;
        switch (code) {
        case 0x80: take_le(machine, 1); break;                         /* PROTO */
        case 0x95: take_le(machine, 8); break;                         /* FRAME */
        case '.': return false;                                        /* STOP */
        case '(': push_new(machine, MARK); break;
        case '0': pop(machine); break;
        case '1': drop_marked(machine); break;
        case '2': push(machine, top(machine)); break;
        case 'N': case 0x88: case 0x89: push_new(machine, OTHER); break; /* None, True, False */
        case 'K': push_number(machine, (int64_t)take_le(machine, 1)); break;
        case 'M': push_number(machine, (int64_t)take_le(machine, 2)); break;
        case 'J': push_number(machine, (int32_t)take_le(machine, 4)); break;
        case 0x8a: push_long(machine, take_le(machine, 1)); break;
        case 0x8b: push_long(machine, take_le(machine, 4)); break;
        case 'G': take_le(machine, 8); push_new(machine, OTHER); break;
        case 'X': push_text(machine, take_le(machine, 4), true); break;
        case 0x8c: push_text(machine, take_le(machine, 1), true); break;
        case 0x8d: push_text(machine, take_le(machine, 8), true); break;
        case 'U': case 'C': push_text(machine, take_le(machine, 1), code == 'U'); break;
        case 'T': case 'B': push_text(machine, take_le(machine, 4), code == 'T'); break;
        case 0x8e: case 0x96: push_text(machine, take_le(machine, 8), false); break;
        case ')': push_new(machine, TUPLE); break;
        case 0x85: push_tuple(machine, 1); break;
        case 0x86: push_tuple(machine, 2); break;
        case 0x87: push_tuple(machine, 3); break;
        case 't': push_marked(machine, TUPLE); break;
        case ']': push_new(machine, LIST); break;
        case 'l': push_marked(machine, LIST); break;
        case '}': push_new(machine, DICT); break;
        case 'd': push_marked(machine, DICT); break;
        case 0x8f: push_new(machine, LIST); break;                     /* EMPTY_SET */
        case 0x91: push_marked(machine, LIST); break;                  /* FROZENSET */
        case 'a': add_item(machine, false); break;
        case 's': add_item(machine, true); break;
        case 'e': case 0x90: add_marked(machine, LIST); break;
        case 'u': add_marked(machine, DICT); break;
        case 'c': push_global(machine); break;
        case 0x93: push_stack_global(machine); break;
        case 'R': reduce(machine); break;
        case 'b': build(machine); break;
        case 0x81: new_object(machine, 1); break;
        case 0x92: new_object(machine, 2); break;
        case 'Q': load_storage(machine); break;
        case 'q': memoize(machine, take_le(machine, 1)); break;
        case 'r': memoize(machine, take_le(machine, 4)); break;
        case 0x94: memoize(machine, machine->memo_next); machine->memo_next++; break;
        case 'h': recall(machine, take_le(machine, 1)); break;
        case 'j': recall(machine, take_le(machine, 4)); break;
        default: fail(machine, NEBULA_INVALID, "it has an operation that torch.save does not write"); break;
        }
        return !machine->status;
}

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
                        fail(walk->machine, NEBULA_INVALID, "more tensors than can be listed");
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
                fail(walk->machine, NEBULA_NO_MEMORY, "no memory for its tensors");
                return;
        }
        memcpy(tensor->shape, found->shape, 2 * (size_t)found->dim_count * sizeof *tensor->shape);
        tensor->strides = (int64_t *)(tensor->shape + found->dim_count);
}

static void add_key(struct buf *name, const struct value *key, uint32_t index)
{
        char number[32];

        if (name->size)
                buf_add_byte(name, '.');
        if (key && key->kind == TEXT) {
                buf_add(name, key->text.bytes, key->text.size < 1000 ? key->text.size : 1000);
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
                fail(machine, NEBULA_INVALID, "it refers to its values too often to be listed");
        if (machine->status || value->is_walked)
                return;
        if (value->kind == TENSOR) {
                add_found(walk, &machine->found[value->tensor]);
                return;
        }
        if (value->kind != DICT && value->kind != LIST && value->kind != TUPLE && value->kind != OTHER)
                return;
        if (walk->depth == DEPTH_MAX) {
                fail(machine, NEBULA_INVALID, "it is nested too deeply to be listed");
                return;
        }
        walk->depth++;
        machine->values[index].is_walked = true;
        for (uint32_t cell = value->first; cell != NONE && !machine->status; cell = machine->cells[cell].next, at++) {
                if (value->kind == DICT && at % 2 == 0) {
                        key = &machine->values[machine->cells[cell].value];
                        continue;
                }
                if (value->kind != OTHER) /* the arguments and the state of an object have its name */
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

        while (step(machine))
                ;
        root = machine->status ? NONE : pop(machine);
        if (root != NONE)
                visit(&walk, root);
        if (walk.name.failed)
                fail(machine, NEBULA_NO_MEMORY, "no memory for its names");
        buf_done(&walk.name);
        return machine->status;
}

static void machine_done(struct machine *machine)
{
        for (uint32_t i = 0; i < machine->found_count; i++)
                free(machine->found[i].shape);
        free(machine->found);
        free(machine->values);
        free(machine->cells);
        free(machine->stack);
        free(machine->memo);
}

static enum nebula_status find_pickle(const struct zip_entry *entries, size_t count, const struct zip_entry **ret_pickle, size_t *ret_prefix_size,
                                      struct nebula_error *error)
{
        for (size_t i = 0; i < count; i++) {
                const char *slash = strchr(entries[i].name, '/');

                if (slash && !strcmp(slash + 1, "data.pkl")) {
                        *ret_pickle = &entries[i];
                        *ret_prefix_size = (size_t)(slash + 1 - entries[i].name);
                        return NEBULA_OK;
                }
        }
        return error_set(error, NEBULA_INVALID, 0, "it is no file of torch.save: there is no data.pkl");
}

enum nebula_status torch_tensors_find(const void *data, uint64_t size, struct torch_tensors *ret_tensors, struct nebula_error *error)
{
        struct torch_tensors tensors = { 0 };
        struct machine machine = { .error = error };
        const struct zip_entry *pickle = NULL;
        struct zip_entry *entries;
        size_t count;
        enum nebula_status status = zip_read(data, size, &entries, &count, error);

        if (status)
                return status;
        status = find_pickle(entries, count, &pickle, &machine.prefix_size, error);
        if (!status) {
                machine.at = (const uint8_t *)data + pickle->payload_offset;
                machine.end = machine.at + pickle->size;
                tensors.pickle_offset = pickle->payload_offset;
                tensors.pickle_size = pickle->size;
                qsort(entries, count, sizeof *entries, compare_names);
                machine.entries = entries;
                machine.entry_count = count;
                status = run(&machine, &tensors);
        }
        machine_done(&machine);
        free(entries);
        if (status)
                torch_tensors_done(&tensors);
        else
                *ret_tensors = tensors;
        return status;
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
