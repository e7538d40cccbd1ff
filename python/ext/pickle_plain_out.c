/* Output of the pickle of plain state: bytes, memo, texts and numbers. See pickle_plain.h. */
#include "pickle_plain.h"

#include <string.h>

#define SPARE_COUNT_MAX (1u << 16)  /* 768 KiB for each table */
#define SPARE_PICKLE_MAX (4u << 20)

static uint64_t hash(uint64_t key)
{
        key *= 0x9e3779b97f4a7c15u;
        return key ^ key >> 32;
}

/* The slot with the number of the pair of `key`, or the empty slot for it. */
static uint32_t *table_place(const struct table *table, uint64_t key)
{
        size_t i = (size_t)hash(key) & (table->capacity - 1);

        while (table->places[i] && table->pairs[table->places[i] - 1].key != key)
                i = (i + 1) & (table->capacity - 1);
        return &table->places[i];
}

struct pair *table_find(const struct table *table, uint64_t key)
{
        uint32_t place = table->count > 0 ? *table_place(table, key) : 0;

        return place ? &table->pairs[place - 1] : NULL;
}

static void table_done(struct table *table)
{
        PyMem_Free(table->pairs);
        PyMem_Free(table->places);
}

static bool table_grow(struct table *table)
{
        struct table larger = { .count = table->count, .capacity = table->capacity ? 2 * table->capacity : 256 };

        if (larger.capacity <= UINT32_MAX) {
                larger.pairs = PyMem_Malloc(larger.capacity / 2 * sizeof *larger.pairs);
                larger.places = PyMem_Calloc(larger.capacity, sizeof *larger.places);
        }
        if (!larger.pairs || !larger.places) {
                table_done(&larger);
                PyErr_NoMemory();
                return false;
        }
        for (size_t i = 0; i < table->count; i++) {
                larger.pairs[i] = table->pairs[i];
                *table_place(&larger, larger.pairs[i].key) = (uint32_t)i + 1;
        }
        table_done(table);
        *table = larger;
        return true;
}

struct pair *table_at(struct table *table, uint64_t key, bool *ret_is_new)
{
        uint32_t *place;

        if (2 * table->count >= table->capacity && !table_grow(table))
                return NULL;
        place = table_place(table, key);
        *ret_is_new = *place == 0;
        if (*ret_is_new) {
                table->pairs[table->count] = (struct pair){ key, 0 };
                *place = (uint32_t)++table->count;
        }
        return &table->pairs[*place - 1];
}

/* The empty tables of the last pickle: making new ones, page by page, costs as much as filling them. Guarded by the GIL. A thread that
 * finds them taken makes new ones. */
static struct {
        struct table memo, by_cdata, dtype_at;
        struct stored *stored;
        size_t stored_capacity, pickle_size;
} spare;

/* Empties the table when it is taken, not when it was given: that brings it into the caches. */
static struct table table_take(struct table *spare_table)
{
        struct table table = *spare_table;

        *spare_table = (struct table){ 0 };
        table.count = 0;
        if (table.capacity > 0)
                memset(table.places, 0, table.capacity * sizeof *table.places);
        return table;
}

size_t plain_take_spare(struct writer *writer)
{
        writer->memo = table_take(&spare.memo);
        writer->by_cdata = table_take(&spare.by_cdata);
        writer->dtype_at = table_take(&spare.dtype_at);
        writer->stored = spare.stored;
        writer->stored_capacity = spare.stored_capacity;
        spare.stored = NULL;
        spare.stored_capacity = 0;
        return spare.pickle_size;
}

/* Keeps the larger of the two tables in `to`, and frees the other. */
static void table_give(struct table *to, struct table *table)
{
        struct table smaller = *table;

        if (table->capacity > to->capacity && table->capacity <= SPARE_COUNT_MAX) {
                smaller = *to;
                *to = *table;
        }
        table_done(&smaller);
}

void plain_give_spare(struct writer *writer, size_t pickle_size)
{
        struct stored *smaller = writer->stored;

        table_give(&spare.memo, &writer->memo);
        table_give(&spare.by_cdata, &writer->by_cdata);
        table_give(&spare.dtype_at, &writer->dtype_at);
        if (writer->stored_capacity > spare.stored_capacity && writer->stored_capacity <= SPARE_COUNT_MAX) {
                smaller = spare.stored;
                spare.stored = writer->stored;
                spare.stored_capacity = writer->stored_capacity;
        }
        PyMem_Free(smaller);
        if (pickle_size)
                spare.pickle_size = pickle_size < SPARE_PICKLE_MAX ? pickle_size : SPARE_PICKLE_MAX;
}

bool plain_grow(struct writer *writer, size_t size)
{
        Py_ssize_t used = writer->at - PyBytes_AS_STRING(writer->bytes);
        Py_ssize_t capacity = 2 * PyBytes_GET_SIZE(writer->bytes) + (Py_ssize_t)size;

        if (_PyBytes_Resize(&writer->bytes, capacity) < 0)
                return false;
        writer->at = PyBytes_AS_STRING(writer->bytes) + used;
        writer->end = PyBytes_AS_STRING(writer->bytes) + capacity;
        return true;
}

void put_int(struct writer *writer, int64_t value)
{
        int byte_count = 8;

        if (value >= 0 && value <= 0xff) {
                put(writer, OP_INT1);
                put_little(writer, (uint64_t)value, 1);
        } else if (value >= 0 && value <= 0xffff) {
                put(writer, OP_INT2);
                put_little(writer, (uint64_t)value, 2);
        } else if (value >= INT32_MIN && value <= INT32_MAX) {
                put(writer, OP_INT4);
                put_little(writer, (uint64_t)value, 4);
        } else {
                /* The shortest form that keeps the sign. */
                while (value >> (8 * byte_count - 9) == 0 || value >> (8 * byte_count - 9) == -1)
                        byte_count--;
                put(writer, OP_LONG1);
                put(writer, byte_count);
                put_little(writer, (uint64_t)value, byte_count);
        }
}

uint64_t put_memo(struct writer *writer)
{
        uint64_t number = writer->memo_count++;

        put(writer, number < 256 ? OP_PUT1 : OP_PUT4);
        put_little(writer, number, number < 256 ? 1 : 4);
        return number;
}

void put_get(struct writer *writer, uint64_t number)
{
        put(writer, number < 256 ? OP_GET1 : OP_GET4);
        put_little(writer, number, number < 256 ? 1 : 4);
}

bool write_known(struct writer *writer, const PyObject *object)
{
        const struct pair *pair = table_find(&writer->memo, (uint64_t)(uintptr_t)object);

        if (pair)
                put_get(writer, pair->value);
        return pair != NULL;
}

enum outcome memoize(struct writer *writer, PyObject *object)
{
        bool is_new;
        struct pair *pair = table_at(&writer->memo, (uint64_t)(uintptr_t)object, &is_new);

        if (!pair)
                return FAILED;
        if (is_new)
                Py_INCREF(object);
        if (!room(writer, 5))
                return FAILED;
        pair->value = put_memo(writer);
        return WRITTEN;
}

enum outcome write_text(struct writer *writer, PyObject *text)
{
        Py_ssize_t size;
        const char *utf8;

        if (!room(writer, 5))
                return FAILED;
        if (write_known(writer, text))
                return WRITTEN;
        utf8 = PyUnicode_AsUTF8AndSize(text, &size);
        if (!utf8) { /* lone surrogates */
                PyErr_Clear();
                return NOT_PLAIN;
        }
        if (size > INT32_MAX)
                return NOT_PLAIN;
        if (!room(writer, (size_t)size + 10))
                return FAILED;
        put(writer, OP_TEXT);
        put_little(writer, (uint64_t)size, 4);
        memcpy(writer->at, utf8, (size_t)size);
        writer->at += size;
        return memoize(writer, text);
}

enum outcome write_global(struct writer *writer, PyObject *object)
{
        PyObject *module, *name = NULL;
        enum outcome outcome = FAILED;
        const char *module_text, *name_text;

        if (!room(writer, 5))
                return FAILED;
        if (write_known(writer, object))
                return WRITTEN;
        module = PyObject_GetAttrString(object, "__module__");
        name = module ? PyObject_GetAttrString(object, "__qualname__") : NULL;
        module_text = name ? PyUnicode_AsUTF8(module) : NULL;
        name_text = module_text ? PyUnicode_AsUTF8(name) : NULL;
        if (name_text && room(writer, strlen(module_text) + strlen(name_text) + 3)) {
                writer->at += sprintf(writer->at, "c%s\n%s", module_text, name_text);
                put(writer, '\n'); /* over sprintf's NUL */
                outcome = memoize(writer, object);
        }
        Py_XDECREF(module);
        Py_XDECREF(name);
        return outcome;
}

enum outcome write_number(struct writer *writer, PyObject *number)
{
        int overflow;
        long long value = PyLong_AsLongLongAndOverflow(number, &overflow);

        if (value == -1 && PyErr_Occurred())
                return FAILED;
        if (overflow)
                return NOT_PLAIN;
        if (!room(writer, 11))
                return FAILED;
        put_int(writer, value);
        return WRITTEN;
}

enum outcome write_float(struct writer *writer, PyObject *number)
{
        double value = PyFloat_AS_DOUBLE(number);
        uint64_t bits;

        if (!room(writer, 9))
                return FAILED;
        memcpy(&bits, &value, sizeof bits);
        put(writer, OP_FLOAT);
        for (int i = 7; i >= 0; i--)
                put(writer, (int)(bits >> 8 * i & 0xff));
        return WRITTEN;
}
