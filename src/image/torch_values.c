#include "image/torch_pickle_private.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"

void machine_fail(struct machine *machine, enum nebula_status status, const char *what)
{
        if (!machine->status)
                machine->status = error_set(machine->error, status, 0, "data.pkl: %s", what);
}

bool machine_grow(struct machine *machine, void **list, uint32_t count, uint32_t *room, size_t size)
{
        uint32_t wanted = *room ? *room * 2 : 256;
        void *grown;

        if (count < *room)
                return true;
        grown = *room < UINT32_MAX / 4 ? realloc(*list, wanted * size) : NULL;
        if (!grown) {
                machine_fail(machine, NEBULA_NO_MEMORY, "no memory for its values");
                return false;
        }
        *list = grown;
        *room = wanted;
        return true;
}

struct value *machine_push_new(struct machine *machine, enum kind kind)
{
        if (!machine_grow(machine, (void **)&machine->values, machine->value_count, &machine->value_room, sizeof *machine->values) ||
            !machine_grow(machine, (void **)&machine->stack, machine->stack_count, &machine->stack_room, sizeof *machine->stack))
                return NULL;
        machine->stack[machine->stack_count++] = machine->value_count;
        machine->values[machine->value_count] = (struct value){ .kind = (uint8_t)kind, .first = NONE, .last = NONE };
        return &machine->values[machine->value_count++];
}

void machine_push(struct machine *machine, uint32_t index)
{
        if (index != NONE && machine_grow(machine, (void **)&machine->stack, machine->stack_count, &machine->stack_room, sizeof *machine->stack))
                machine->stack[machine->stack_count++] = index;
}

uint32_t machine_pop(struct machine *machine)
{
        if (!machine->stack_count) {
                machine_fail(machine, NEBULA_CORRUPT, "an operation without its values");
                return NONE;
        }
        return machine->stack[--machine->stack_count];
}

uint32_t machine_top(struct machine *machine)
{
        uint32_t index = machine_pop(machine);

        machine->stack_count += index != NONE;
        return index;
}

void machine_append(struct machine *machine, uint32_t to, uint32_t index)
{
        struct value *list;

        if (to == NONE || index == NONE || !machine_grow(machine, (void **)&machine->cells, machine->cell_count, &machine->cell_room, sizeof *machine->cells))
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

uint32_t machine_find_mark(struct machine *machine)
{
        uint32_t at = machine->stack_count;

        while (at && machine->values[machine->stack[at - 1]].kind != MARK)
                at--;
        if (!at) {
                machine_fail(machine, NEBULA_CORRUPT, "an operation without its mark");
                return NONE;
        }
        return at - 1;
}

void machine_take_marked(struct machine *machine, uint32_t mark, uint32_t to)
{
        for (uint32_t i = mark + 1; i < machine->stack_count && !machine->status; i++)
                machine_append(machine, to, machine->stack[i]);
        machine->stack_count = mark;
}

const struct value *machine_value(const struct machine *machine, uint32_t index)
{
        return index == NONE ? NULL : &machine->values[index];
}

const struct value *machine_child(const struct machine *machine, const struct value *value, uint32_t n)
{
        uint32_t cell = value ? value->first : NONE;

        while (cell != NONE && n--)
                cell = machine->cells[cell].next;
        return cell == NONE ? NULL : &machine->values[machine->cells[cell].value];
}

bool machine_is_text(const struct value *value, const char *text)
{
        return value && value->kind == TEXT && value->text.size == strlen(text) && !memcmp(value->text.bytes, text, value->text.size);
}

bool machine_is_global(const struct machine *machine, const struct value *value, const char *module, const char *name)
{
        size_t size = strlen(module), name_size = strlen(name);

        if (!value || value->kind != GLOBAL || value->text.size < size || memcmp(value->text.bytes, module, size) || !name_size)
                return false;
        if (value->text.name_at != NONE)
                return value->text.size == size && machine_is_text(&machine->values[value->text.name_at], name);
        return value->text.size == size + 1 + name_size && value->text.bytes[size] == '\n' && !memcmp(value->text.bytes + size + 1, name, name_size);
}
