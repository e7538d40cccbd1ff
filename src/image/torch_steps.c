#include "image/torch_pickle_private.h"

#include <string.h>

/* Adds the state of an object. The state of a dict is ignored. */
static void build(struct machine *machine)
{
        uint32_t state = machine_pop(machine), object = machine_top(machine);

        if (!machine->status && machine->values[object].kind == OTHER)
                machine_append(machine, object, state);
}

static uint64_t take_le(struct machine *machine, size_t size)
{
        uint64_t value = 0;

        if ((size_t)(machine->end - machine->at) < size) {
                machine_fail(machine, NEBULA_CORRUPT, "it is cut off");
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
                machine_fail(machine, NEBULA_CORRUPT, "it is cut off");
                return NULL;
        }
        machine->at += size;
        return bytes;
}

static void push_text(struct machine *machine, uint64_t size, bool is_text)
{
        const char *bytes = take_bytes(machine, size);
        struct value *value = bytes ? machine_push_new(machine, is_text ? TEXT : OTHER) : NULL;

        if (value && is_text) {
                value->text.bytes = bytes;
                value->text.size = (uint32_t)size;
        }
}

static void push_number(struct machine *machine, int64_t number)
{
        struct value *value = machine_push_new(machine, NUMBER);

        if (value)
                value->number = number;
}

/* LONG1: little-endian, two's complement. A number too large for a shape becomes a value of kind OTHER. */
static void push_long(struct machine *machine, uint64_t size)
{
        const uint8_t *bytes = (const uint8_t *)take_bytes(machine, size);
        uint64_t number = 0;

        if (!bytes)
                return;
        if (size > 8) {
                machine_push_new(machine, OTHER);
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
                machine_fail(machine, NEBULA_CORRUPT, "it is cut off");
                return;
        }
        machine->at = (const uint8_t *)second + 1;
        value = machine_push_new(machine, GLOBAL);
        if (value) {
                value->text.bytes = begin;
                value->text.size = (uint32_t)(second - begin);
                value->text.name_at = NONE;
        }
}

static void push_stack_global(struct machine *machine)
{
        uint32_t name = machine_pop(machine), module = machine_pop(machine);
        struct value *value;
        const char *bytes;
        uint32_t size;

        if (machine->status)
                return;
        if (machine->values[name].kind != TEXT || machine->values[module].kind != TEXT) {
                machine_fail(machine, NEBULA_CORRUPT, "a class without a name");
                return;
        }
        bytes = machine->values[module].text.bytes;
        size = machine->values[module].text.size;
        value = machine_push_new(machine, GLOBAL);
        if (value) {
                value->text.bytes = bytes;
                value->text.size = size;
                value->text.name_at = name;
        }
}

static void memoize(struct machine *machine, uint64_t place)
{
        uint32_t index = machine_top(machine);

        if (machine->status)
                return;
        if (place > (uint64_t)machine->value_count + 65536) { /* a pickler counts up */
                machine_fail(machine, NEBULA_INVALID, "it remembers values in places that no pickler takes");
                return;
        }
        while (place >= machine->memo_room) {
                uint32_t before = machine->memo_room;

                if (!machine_grow(machine, (void **)&machine->memo, machine->memo_room, &machine->memo_room, sizeof *machine->memo))
                        return;
                for (uint32_t i = before; i < machine->memo_room; i++)
                        machine->memo[i] = NONE;
        }
        machine->memo[place] = index;
}

static void recall(struct machine *machine, uint64_t place)
{
        if (place >= machine->memo_room || machine->memo[place] == NONE)
                machine_fail(machine, NEBULA_CORRUPT, "it recalls what it has not remembered");
        else
                machine_push(machine, machine->memo[place]);
}

/* Joins the last `count` values to one tuple. */
static void push_tuple(struct machine *machine, uint32_t count)
{
        uint32_t first = machine->stack_count - count, tuple;

        if (machine->stack_count < count) {
                machine_fail(machine, NEBULA_CORRUPT, "an operation without its values");
                return;
        }
        if (!machine_push_new(machine, TUPLE))
                return;
        tuple = machine_pop(machine);
        for (uint32_t i = 0; i < count; i++)
                machine_append(machine, tuple, machine->stack[first + i]);
        machine->stack_count = first;
        machine_push(machine, tuple);
}

static void push_marked(struct machine *machine, enum kind kind)
{
        uint32_t mark = machine_find_mark(machine), made;

        if (mark == NONE || !machine_push_new(machine, kind))
                return;
        made = machine_pop(machine);
        machine_take_marked(machine, mark, made);
        machine_push(machine, made);
}

/* The object turns out to be a dict or list, because it gets items. They replace its arguments. */
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
        uint32_t mark = machine_find_mark(machine);

        if (mark == NONE)
                return;
        if (!mark) {
                machine_fail(machine, NEBULA_CORRUPT, "an operation without its values");
                return;
        }
        become(machine, machine->stack[mark - 1], kind);
        machine_take_marked(machine, mark, machine->stack[mark - 1]);
}

static void add_item(struct machine *machine, bool has_key)
{
        uint32_t value = machine_pop(machine), key = has_key ? machine_pop(machine) : NONE, to = machine_top(machine);

        if (machine->status)
                return;
        become(machine, to, has_key ? DICT : LIST);
        if (has_key)
                machine_append(machine, to, key);
        machine_append(machine, to, value);
}

/* NEWOBJ: class.__new__(*arguments); NEWOBJ_EX: also with keyword arguments. */
static void new_object(struct machine *machine, uint32_t arguments)
{
        uint32_t taken[2] = { NONE, NONE }, object;

        for (uint32_t i = 0; i < arguments; i++)
                taken[i] = machine_pop(machine);
        machine_pop(machine);
        if (machine->status || !machine_push_new(machine, OTHER))
                return;
        object = machine_top(machine);
        for (uint32_t i = arguments; i--;)
                machine_append(machine, object, taken[i]);
}

static void drop_marked(struct machine *machine)
{
        uint32_t mark = machine_find_mark(machine);

        if (mark != NONE)
                machine->stack_count = mark;
}

bool machine_step(struct machine *machine)
{
        uint8_t code = (uint8_t)take_le(machine, 1);

        if (machine->status)
                return false;
        switch (code) {
        case 0x80: take_le(machine, 1); break;                         /* PROTO */
        case 0x95: take_le(machine, 8); break;                         /* FRAME */
        case '.': return false;                                        /* STOP */
        case '(': machine_push_new(machine, MARK); break;
        case '0': machine_pop(machine); break;
        case '1': drop_marked(machine); break;
        case '2': machine_push(machine, machine_top(machine)); break;
        case 'N': case 0x88: case 0x89: machine_push_new(machine, OTHER); break; /* None, True, False */
        case 'K': push_number(machine, (int64_t)take_le(machine, 1)); break;
        case 'M': push_number(machine, (int64_t)take_le(machine, 2)); break;
        case 'J': push_number(machine, (int32_t)take_le(machine, 4)); break;
        case 0x8a: push_long(machine, take_le(machine, 1)); break;
        case 0x8b: push_long(machine, take_le(machine, 4)); break;
        case 'G': take_le(machine, 8); machine_push_new(machine, OTHER); break;
        case 'X': push_text(machine, take_le(machine, 4), true); break;
        case 0x8c: push_text(machine, take_le(machine, 1), true); break;
        case 0x8d: push_text(machine, take_le(machine, 8), true); break;
        case 'U': case 'C': push_text(machine, take_le(machine, 1), code == 'U'); break;
        case 'T': case 'B': push_text(machine, take_le(machine, 4), code == 'T'); break;
        case 0x8e: case 0x96: push_text(machine, take_le(machine, 8), false); break;
        case ')': machine_push_new(machine, TUPLE); break;
        case 0x85: push_tuple(machine, 1); break;
        case 0x86: push_tuple(machine, 2); break;
        case 0x87: push_tuple(machine, 3); break;
        case 't': push_marked(machine, TUPLE); break;
        case ']': machine_push_new(machine, LIST); break;
        case 'l': push_marked(machine, LIST); break;
        case '}': machine_push_new(machine, DICT); break;
        case 'd': push_marked(machine, DICT); break;
        case 0x8f: machine_push_new(machine, LIST); break;                     /* EMPTY_SET */
        case 0x91: push_marked(machine, LIST); break;                  /* FROZENSET */
        case 'a': add_item(machine, false); break;
        case 's': add_item(machine, true); break;
        case 'e': case 0x90: add_marked(machine, LIST); break;
        case 'u': add_marked(machine, DICT); break;
        case 'c': push_global(machine); break;
        case 0x93: push_stack_global(machine); break;
        case 'R': machine_reduce(machine); break;
        case 'b': build(machine); break;
        case 0x81: new_object(machine, 1); break;
        case 0x92: new_object(machine, 2); break;
        case 'Q': machine_load_storage(machine); break;
        case 'q': memoize(machine, take_le(machine, 1)); break;
        case 'r': memoize(machine, take_le(machine, 4)); break;
        case 0x94: memoize(machine, machine->memo_next); machine->memo_next++; break;
        case 'h': recall(machine, take_le(machine, 1)); break;
        case 'j': recall(machine, take_le(machine, 4)); break;
        default: machine_fail(machine, NEBULA_INVALID, "it has an operation that torch.save does not write"); break;
        }
        return !machine->status;
}
