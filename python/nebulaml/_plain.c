/*
 * _plain.c - the pickle of plain state, written without a pickler.
 *
 * Nearly all that is saved is dicts, lists and tuples of strings, numbers and ordinary
 * tensors. CPython's pickler spends three microseconds on a tensor: calls of
 * hooks, tuples made to be taken apart, a memo of objects that nobody else can refer to.
 * Here each object is written as it is met, and only what the program holds
 * is remembered. The bytes are those of CPython's pickler, memo numbers included.
 *
 * Whatever is not plain (any other type, a subclass, a tensor that
 * is_ordinary in _reduce.c would refuse, a tuple that holds itself, memory under two
 * dtypes) ends this attempt, and TorchPickler begins from nothing: it knows
 * everything, and says what is wrong where something is.
 *
 * Threads: the GIL is held, but torch may let go of it for a moment inside its methods: what is
 * being written is held, and a container that changed meanwhile is left to TorchPickler.
 */
#include "_pickling.h"

#include <stdint.h>
#include <string.h>

#define BATCH_COUNT 1000
#define DTYPE_COUNT_MAX 16

/* Opcodes of protocol 2. */
enum {
        OP_MARK = '(', OP_STOP = '.', OP_NONE = 'N', OP_TRUE = 0x88, OP_FALSE = 0x89, OP_INT1 = 'K', OP_INT2 = 'M',
        OP_INT4 = 'J', OP_LONG1 = 0x8a, OP_FLOAT = 'G', OP_TEXT = 'X', OP_PUT1 = 'q', OP_PUT4 = 'r', OP_GET1 = 'h',
        OP_GET4 = 'j', OP_DICT = '}', OP_LIST = ']', OP_TUPLE0 = ')', OP_TUPLE1 = 0x85, OP_TUPLE = 't', OP_SETITEM = 's',
        OP_SETITEMS = 'u', OP_APPEND = 'a', OP_APPENDS = 'e', OP_REDUCE = 'R', OP_BUILD = 'b', OP_PERSID = 'Q',
        OP_GLOBAL = 'c', OP_PROTO = 0x80,
};

/* A property of tensors, read without a search for it. */
struct property {
        PyObject *name;
        PyGetSetDef *definition; /* NULL: it is not C's own in this torch */
};

struct dtype_row {
        PyObject *dtype, *storage_type;
        Py_ssize_t item_size;
        bool is_complex;
};

/* What is needed of torch beyond `torch`, fetched once. */
static struct {
        bool is_ready;
        struct property is_cpu, layout, is_nested, backward_hooks, dtype, requires_grad, shape;
        struct property cdata;
        PyObject *is_neg, *is_conj, *untyped_storage, *storage_offset, *stride, *nbytes, *data_ptr; /* methods */
        struct dtype_row dtypes[DTYPE_COUNT_MAX];
        size_t dtype_count;
} known;

/* A hash table of numbers; 0 is no key. */
struct table {
        struct pair {
                uint64_t key, value;
        } *pairs;
        size_t count, capacity; /* a power of two */
};

struct stored {
        uint64_t key_memo; /* where the pickle keeps this storage's key */
        size_t row;
        Py_ssize_t element_count;
};

struct writer {
        PyObject *bytes; /* the pickle, with room behind its end */
        char *at, *end;
        uint64_t memo_count;
        struct table memo;      /* address of an object -> its memo number */
        struct table by_cdata;  /* a storage -> its index in `stored` */
        struct table dtype_at;  /* address of memory -> 1 + its row of known.dtypes */
        struct stored *stored;
        size_t stored_capacity;
        PyObject *storages;     /* as TorchPickler.storages */
};

/* How writing one object ended. */
enum outcome {
        WRITTEN,
        NOT_PLAIN,
        FAILED, /* with a Python error */
};

static enum outcome write_object(struct writer *writer, PyObject *object);

static uint64_t hash(uint64_t key)
{
        key *= 0x9e3779b97f4a7c15u;
        return key ^ key >> 32;
}

/* Where `key` is, or would be. */
static struct pair *table_place(const struct table *table, uint64_t key)
{
        size_t i = (size_t)hash(key) & (table->capacity - 1);

        while (table->pairs[i].key && table->pairs[i].key != key)
                i = (i + 1) & (table->capacity - 1);
        return &table->pairs[i];
}

static bool table_grow(struct table *table)
{
        struct table larger = { .count = table->count, .capacity = table->capacity ? 4 * table->capacity : 256 };

        larger.pairs = PyMem_Calloc(larger.capacity, sizeof *larger.pairs);
        if (!larger.pairs) {
                PyErr_NoMemory();
                return false;
        }
        for (size_t i = 0; i < table->capacity; i++)
                if (table->pairs[i].key)
                        *table_place(&larger, table->pairs[i].key) = table->pairs[i];
        PyMem_Free(table->pairs);
        *table = larger;
        return true;
}

/* The pair of `key`, a new one with value 0 when *ret_is_new; NULL with a Python error. */
static struct pair *table_at(struct table *table, uint64_t key, bool *ret_is_new)
{
        struct pair *pair;

        if (2 * table->count >= table->capacity && !table_grow(table))
                return NULL;
        pair = table_place(table, key);
        *ret_is_new = pair->key == 0;
        if (*ret_is_new) {
                *pair = (struct pair){ key, 0 };
                table->count++;
        }
        return pair;
}

static bool grow_bytes(struct writer *writer, size_t size)
{
        Py_ssize_t used = writer->at - PyBytes_AS_STRING(writer->bytes);
        Py_ssize_t capacity = 2 * PyBytes_GET_SIZE(writer->bytes) + (Py_ssize_t)size;

        if (_PyBytes_Resize(&writer->bytes, capacity) < 0)
                return false;
        writer->at = PyBytes_AS_STRING(writer->bytes) + used;
        writer->end = PyBytes_AS_STRING(writer->bytes) + capacity;
        return true;
}

/* Room for `size` more bytes, which the caller then writes without asking. */
static bool room(struct writer *writer, size_t size)
{
        return (size_t)(writer->end - writer->at) >= size || grow_bytes(writer, size);
}

static void put(struct writer *writer, int op)
{
        *writer->at++ = (char)op;
}

static void put_little(struct writer *writer, uint64_t value, int byte_count)
{
        for (int i = 0; i < byte_count; i++)
                put(writer, (int)(value >> 8 * i & 0xff));
}

/* Needs room for 11 bytes. */
static void put_int(struct writer *writer, int64_t value)
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
                /* The shortest that keeps the sign. */
                while (value >> (8 * byte_count - 9) == 0 || value >> (8 * byte_count - 9) == -1)
                        byte_count--;
                put(writer, OP_LONG1);
                put(writer, byte_count);
                put_little(writer, (uint64_t)value, byte_count);
        }
}

/* Gives what was written last the next memo number. Needs room for 5 bytes. */
static uint64_t put_memo(struct writer *writer)
{
        uint64_t number = writer->memo_count++;

        put(writer, number < 256 ? OP_PUT1 : OP_PUT4);
        put_little(writer, number, number < 256 ? 1 : 4);
        return number;
}

static void put_get(struct writer *writer, uint64_t number)
{
        put(writer, number < 256 ? OP_GET1 : OP_GET4);
        put_little(writer, number, number < 256 ? 1 : 4);
}

/* true: `object` was written before, and is referred to. Else the caller writes it; its number is the next. */
static bool write_known(struct writer *writer, const PyObject *object)
{
        const struct pair *pair = writer->memo.capacity ? table_place(&writer->memo, (uint64_t)(uintptr_t)object) : NULL;

        if (!pair || !pair->key)
                return false;
        put_get(writer, pair->value);
        return true;
}

/* Holds the object: were it freed, another could come to lie at its address. */
static enum outcome memoize(struct writer *writer, PyObject *object)
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

static enum outcome write_text(struct writer *writer, PyObject *text)
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

/* A class or function of a module. */
static enum outcome write_global(struct writer *writer, PyObject *object)
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
                put(writer, '\n'); /* where sprintf left its zero */
                outcome = memoize(writer, object);
        }
        Py_XDECREF(module);
        Py_XDECREF(name);
        return outcome;
}

static enum outcome write_number(struct writer *writer, PyObject *number)
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

static enum outcome write_float(struct writer *writer, PyObject *number)
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

static enum outcome write_dict(struct writer *writer, PyObject *dict)
{
        Py_ssize_t position = 0, count = PyDict_GET_SIZE(dict), batch = 0;
        enum outcome outcome;
        PyObject *key, *value;

        if (!room(writer, 1))
                return FAILED;
        put(writer, OP_DICT);
        outcome = memoize(writer, dict);
        if (outcome != WRITTEN || count == 0)
                return outcome;
        if (count > 1) {
                if (!room(writer, 1))
                        return FAILED;
                put(writer, OP_MARK);
        }
        while (PyDict_Next(dict, &position, &key, &value)) {
                Py_INCREF(key);
                Py_INCREF(value);
                outcome = write_object(writer, key);
                if (outcome == WRITTEN)
                        outcome = write_object(writer, value);
                Py_DECREF(key);
                Py_DECREF(value);
                if (outcome == WRITTEN && PyDict_GET_SIZE(dict) != count)
                        outcome = NOT_PLAIN; /* torch let another thread run, which changed it */
                if (outcome != WRITTEN)
                        return outcome;
                /* A full batch is followed by another, even when nothing is left for it. */
                if (++batch == BATCH_COUNT) {
                        if (!room(writer, 2))
                                return FAILED;
                        put(writer, OP_SETITEMS);
                        put(writer, OP_MARK);
                        batch = 0;
                }
        }
        if (!room(writer, 1))
                return FAILED;
        put(writer, count > 1 ? OP_SETITEMS : OP_SETITEM);
        return WRITTEN;
}

static enum outcome write_list(struct writer *writer, PyObject *list)
{
        Py_ssize_t count = PyList_GET_SIZE(list);
        enum outcome outcome;

        if (!room(writer, 1))
                return FAILED;
        put(writer, OP_LIST);
        outcome = memoize(writer, list);
        for (Py_ssize_t i = 0; outcome == WRITTEN && i < count; i++) {
                PyObject *item = Py_NewRef(PyList_GET_ITEM(list, i));

                if (!room(writer, 1))
                        outcome = FAILED;
                else if (count > 1 && i % BATCH_COUNT == 0)
                        put(writer, OP_MARK);
                if (outcome == WRITTEN)
                        outcome = write_object(writer, item);
                Py_DECREF(item);
                if (outcome == WRITTEN && PyList_GET_SIZE(list) != count)
                        outcome = NOT_PLAIN; /* as in write_dict */
                if (outcome == WRITTEN && !room(writer, 1))
                        outcome = FAILED;
                if (outcome == WRITTEN && (count == 1 || (i + 1) % BATCH_COUNT == 0 || i + 1 == count))
                        put(writer, count == 1 ? OP_APPEND : OP_APPENDS);
        }
        return outcome;
}

static enum outcome write_tuple(struct writer *writer, PyObject *tuple)
{
        Py_ssize_t count = PyTuple_GET_SIZE(tuple);
        enum outcome outcome;

        if (!room(writer, 1))
                return FAILED;
        if (count == 0) {
                put(writer, OP_TUPLE0);
                return WRITTEN;
        }
        if (count > 3)
                put(writer, OP_MARK);
        for (Py_ssize_t i = 0; i < count; i++) {
                outcome = write_object(writer, PyTuple_GET_ITEM(tuple, i));
                if (outcome != WRITTEN)
                        return outcome;
        }
        /* Through a list or dict within, it may hold itself. */
        if (writer->memo.capacity && table_place(&writer->memo, (uint64_t)(uintptr_t)tuple)->key)
                return NOT_PLAIN;
        if (!room(writer, 1))
                return FAILED;
        put(writer, count > 3 ? OP_TUPLE : OP_TUPLE1 + (int)count - 1);
        return memoize(writer, tuple);
}

/* The items of an OrderedDict, in batches as they come. */
static enum outcome write_items(struct writer *writer, PyObject *items)
{
        PyObject *item = PyIter_Next(items), *next;
        enum outcome outcome = WRITTEN;
        int batch = 0;
        bool is_alone = false;

        while (item && outcome == WRITTEN) {
                next = PyIter_Next(items);
                if (batch == 0) {
                        is_alone = !next;
                        if (!room(writer, 1))
                                outcome = FAILED;
                        else if (!is_alone)
                                put(writer, OP_MARK);
                }
                if (outcome == WRITTEN && (!PyTuple_CheckExact(item) || PyTuple_GET_SIZE(item) != 2))
                        outcome = NOT_PLAIN;
                if (outcome == WRITTEN)
                        outcome = write_object(writer, PyTuple_GET_ITEM(item, 0));
                if (outcome == WRITTEN)
                        outcome = write_object(writer, PyTuple_GET_ITEM(item, 1));
                if (outcome == WRITTEN && !room(writer, 1))
                        outcome = FAILED;
                if (outcome == WRITTEN && (++batch == BATCH_COUNT || !next)) {
                        put(writer, is_alone ? OP_SETITEM : OP_SETITEMS);
                        batch = 0;
                }
                Py_DECREF(item);
                item = next;
        }
        Py_XDECREF(item);
        return PyErr_Occurred() ? FAILED : outcome;
}

/* As its own reduction says: class, no arguments, attributes, items. */
static enum outcome write_ordered_dict(struct writer *writer, PyObject *dict)
{
        PyObject *reduction = PyObject_CallMethod(dict, "__reduce__", NULL), *attributes;
        enum outcome outcome;

        if (!reduction)
                return FAILED;
        if (!PyTuple_CheckExact(reduction) || PyTuple_GET_SIZE(reduction) != 5 ||
            PyTuple_GET_ITEM(reduction, 0) != torch.ordered_dict ||
            !PyTuple_CheckExact(PyTuple_GET_ITEM(reduction, 1)) || PyTuple_GET_SIZE(PyTuple_GET_ITEM(reduction, 1)) > 0 ||
            PyTuple_GET_ITEM(reduction, 3) != Py_None || !PyIter_Check(PyTuple_GET_ITEM(reduction, 4))) {
                Py_DECREF(reduction);
                return NOT_PLAIN;
        }
        attributes = PyTuple_GET_ITEM(reduction, 2);
        outcome = write_global(writer, torch.ordered_dict);
        if (outcome == WRITTEN && !room(writer, 2))
                outcome = FAILED;
        if (outcome == WRITTEN) {
                put(writer, OP_TUPLE0);
                put(writer, OP_REDUCE);
                outcome = memoize(writer, dict);
        }
        if (outcome == WRITTEN)
                outcome = write_items(writer, PyTuple_GET_ITEM(reduction, 4));
        if (outcome == WRITTEN && attributes != Py_None) {
                outcome = write_object(writer, attributes);
                if (outcome == WRITTEN && !room(writer, 1))
                        outcome = FAILED;
                if (outcome == WRITTEN)
                        put(writer, OP_BUILD);
        }
        Py_DECREF(reduction);
        return outcome;
}

static PyObject *read_property(const struct property *property, PyObject *object)
{
        if (property->definition)
                return property->definition->get(object, property->definition->closure);
        return PyObject_GetAttr(object, property->name);
}

/* Whether it is `wanted`; on an error of Python's it is not, and PyErr_Occurred(). */
static bool property_is(const struct property *property, PyObject *object, const PyObject *wanted)
{
        PyObject *value = read_property(property, object);

        Py_XDECREF(value); /* what it is compared with lives on */
        return value && value == wanted;
}

static bool method_is(PyObject *method, PyObject *object, const PyObject *wanted)
{
        PyObject *value = PyObject_CallOneArg(method, object);

        Py_XDECREF(value);
        return value && value == wanted;
}

/* The number that a call answered with; -1 and PyErr_Occurred() when there is none. Takes `value` over. */
static int64_t number_of(PyObject *value)
{
        int64_t number = value ? PyLong_AsLongLong(value) : -1;

        Py_XDECREF(value);
        return number;
}

/* The row of an ordinary CPU tensor's dtype; NULL for any other tensor, or with PyErr_Occurred(). See is_ordinary. */
static const struct dtype_row *ordinary_row(PyObject *tensor)
{
        PyObject **attributes = _PyObject_GetDictPtr(tensor), *dtype;
        const struct dtype_row *row = known.dtypes;

        if ((attributes && *attributes && PyDict_GET_SIZE(*attributes) > 0) ||
            !property_is(&known.is_cpu, tensor, Py_True) || !property_is(&known.layout, tensor, torch.strided) ||
            !property_is(&known.is_nested, tensor, Py_False) || !property_is(&known.backward_hooks, tensor, Py_None) ||
            !method_is(known.is_neg, tensor, Py_False))
                return NULL;
        dtype = read_property(&known.dtype, tensor);
        Py_XDECREF(dtype);
        while (row < known.dtypes + known.dtype_count && row->dtype != dtype)
                row++;
        if (!dtype || row == known.dtypes + known.dtype_count)
                return NULL;
        return row->is_complex && !method_is(known.is_conj, tensor, Py_False) ? NULL : row;
}

/* The key of a storage. A text of one digit is an object that Python has only once, so the program may hold it too. */
static enum outcome write_key(struct writer *writer, Py_ssize_t index, uint64_t *ret_memo)
{
        PyObject *number, *text;
        enum outcome outcome;
        char key[24];
        int length;

        if (index < 10) {
                number = PyLong_FromSsize_t(index);
                text = number ? PyObject_Str(number) : NULL;
                outcome = text ? write_text(writer, text) : FAILED;
                if (outcome == WRITTEN)
                        *ret_memo = table_place(&writer->memo, (uint64_t)(uintptr_t)text)->value;
                Py_XDECREF(number);
                Py_XDECREF(text);
                return outcome;
        }
        length = snprintf(key, sizeof key, "%zd", index);
        if (!room(writer, (size_t)length + 10))
                return FAILED;
        put(writer, OP_TEXT);
        put_little(writer, (uint64_t)length, 4);
        memcpy(writer->at, key, (size_t)length);
        writer->at += length;
        *ret_memo = put_memo(writer);
        return WRITTEN;
}

/* Numbers a storage that is seen for the first time, and writes its key. */
static enum outcome add_storage(struct writer *writer, PyObject *storage, size_t row, struct stored *ret_stored)
{
        Py_ssize_t index = PyList_GET_SIZE(writer->storages);
        int64_t size = number_of(PyObject_CallOneArg(known.nbytes, storage));
        PyObject *address = size >= 0 ? PyObject_CallOneArg(known.data_ptr, storage) : NULL, *entry;
        struct pair *dtype_at = NULL;
        enum outcome outcome = FAILED;
        bool is_new;

        if (!address)
                return FAILED;
        if (PyLong_AsVoidPtr(address)) {
                dtype_at = table_at(&writer->dtype_at, (uint64_t)(uintptr_t)PyLong_AsVoidPtr(address), &is_new);
                if (!dtype_at)
                        goto out;
                if (!is_new && dtype_at->value != row + 1) {
                        outcome = NOT_PLAIN; /* torch.save refuses it */
                        goto out;
                }
                dtype_at->value = row + 1;
        }
        entry = Py_BuildValue("(OLOO)", address, (long long)size, storage, storage);
        if (!entry || PyList_Append(writer->storages, entry) < 0) {
                Py_XDECREF(entry);
                goto out;
        }
        Py_DECREF(entry);
        outcome = write_key(writer, index, &ret_stored->key_memo);
        ret_stored->row = row;
        ret_stored->element_count = (Py_ssize_t)size / known.dtypes[row].item_size;
out:
        Py_DECREF(address);
        return outcome;
}

static bool room_for_stored(struct writer *writer, size_t count)
{
        size_t capacity = writer->stored_capacity ? 2 * writer->stored_capacity : 256;
        struct stored *larger;

        if (count <= writer->stored_capacity)
                return true;
        larger = PyMem_Realloc(writer->stored, capacity * sizeof *larger);
        if (!larger) {
                PyErr_NoMemory();
                return false;
        }
        writer->stored = larger;
        writer->stored_capacity = capacity;
        return true;
}

/* ('storage', type, key, location, count) as a persistent id. */
static enum outcome write_storage(struct writer *writer, PyObject *storage, size_t row)
{
        int64_t cdata = number_of(read_property(&known.cdata, storage));
        enum outcome outcome = FAILED;
        struct stored *stored;
        struct pair *pair;
        bool is_new;

        if (cdata == -1 && PyErr_Occurred())
                return FAILED;
        pair = table_at(&writer->by_cdata, (uint64_t)cdata, &is_new);
        if (!pair || !room(writer, 1))
                return FAILED;
        put(writer, OP_MARK);
        outcome = write_text(writer, torch.str_storage);
        if (outcome == WRITTEN)
                outcome = write_global(writer, known.dtypes[row].storage_type);
        if (outcome != WRITTEN)
                return outcome;
        if (is_new)
                pair->value = writer->by_cdata.count - 1;
        if (!room(writer, 5) || !room_for_stored(writer, (size_t)pair->value + 1))
                return FAILED;
        stored = &writer->stored[pair->value];
        if (is_new)
                outcome = add_storage(writer, storage, row, stored);
        else if (stored->row == row)
                put_get(writer, stored->key_memo);
        else
                outcome = NOT_PLAIN; /* torch.save refuses it, unless it is empty */
        if (outcome == WRITTEN)
                outcome = write_text(writer, torch.str_cpu);
        if (outcome != WRITTEN)
                return outcome;
        if (!room(writer, 18))
                return FAILED;
        put_int(writer, stored->element_count);
        put(writer, OP_TUPLE);
        put_memo(writer);
        put(writer, OP_PERSID);
        return WRITTEN;
}

/* A tuple of numbers that nothing else refers to. Takes it over. */
static enum outcome write_numbers(struct writer *writer, PyObject *numbers)
{
        enum outcome outcome = FAILED;
        Py_ssize_t count;

        if (!numbers)
                return FAILED;
        count = PyTuple_GET_SIZE(numbers);
        if (!room(writer, 11 * (size_t)count + 7))
                goto out;
        outcome = WRITTEN;
        if (count == 0) {
                put(writer, OP_TUPLE0);
                goto out;
        }
        if (count > 3)
                put(writer, OP_MARK);
        for (Py_ssize_t i = 0; outcome == WRITTEN && i < count; i++) {
                PyObject *number = PyTuple_GET_ITEM(numbers, i);

                outcome = PyLong_CheckExact(number) ? write_number(writer, number) : NOT_PLAIN;
        }
        if (outcome == WRITTEN && !room(writer, 6))
                outcome = FAILED;
        if (outcome == WRITTEN) {
                put(writer, count > 3 ? OP_TUPLE : OP_TUPLE1 + (int)count - 1);
                put_memo(writer);
        }
out:
        Py_DECREF(numbers);
        return outcome;
}

/* What Tensor.__reduce_ex__ answers: _rebuild_tensor_v2(storage, offset, shape, stride, requires_grad, OrderedDict()). */
static enum outcome write_tensor(struct writer *writer, PyObject *tensor)
{
        const struct dtype_row *row = ordinary_row(tensor);
        PyObject *storage, *requires_grad;
        enum outcome outcome;
        int64_t offset;

        if (!row)
                return PyErr_Occurred() ? FAILED : NOT_PLAIN;
        outcome = write_global(writer, torch.rebuild);
        if (outcome != WRITTEN)
                return outcome;
        if (!room(writer, 1))
                return FAILED;
        put(writer, OP_MARK);
        storage = PyObject_CallOneArg(known.untyped_storage, tensor);
        outcome = storage ? write_storage(writer, storage, (size_t)(row - known.dtypes)) : FAILED;
        Py_XDECREF(storage);
        if (outcome != WRITTEN)
                return outcome;
        offset = number_of(PyObject_CallOneArg(known.storage_offset, tensor));
        if (offset < 0 || !room(writer, 11))
                return PyErr_Occurred() ? FAILED : NOT_PLAIN;
        put_int(writer, offset);
        outcome = write_numbers(writer, read_property(&known.shape, tensor));
        if (outcome == WRITTEN)
                outcome = write_numbers(writer, PyObject_CallOneArg(known.stride, tensor));
        if (outcome != WRITTEN)
                return outcome;
        requires_grad = read_property(&known.requires_grad, tensor);
        Py_XDECREF(requires_grad);
        if (!requires_grad || !room(writer, 1))
                return FAILED;
        put(writer, requires_grad == Py_True ? OP_TRUE : OP_FALSE);
        outcome = write_global(writer, torch.ordered_dict);
        if (outcome != WRITTEN)
                return outcome;
        if (!room(writer, 20))
                return FAILED;
        put(writer, OP_TUPLE0);
        put(writer, OP_REDUCE);
        put_memo(writer);
        put(writer, OP_TUPLE);
        put_memo(writer);
        put(writer, OP_REDUCE);
        return memoize(writer, tensor);
}

static enum outcome write_new(struct writer *writer, PyObject *object)
{
        PyTypeObject *type = Py_TYPE(object);
        enum outcome outcome = NOT_PLAIN;

        if (type == (PyTypeObject *)torch.tensor_type)
                return write_tensor(writer, object);
        if (Py_EnterRecursiveCall(" while pickling an object"))
                return FAILED;
        if (type == &PyDict_Type)
                outcome = write_dict(writer, object);
        else if (type == &PyList_Type)
                outcome = write_list(writer, object);
        else if (type == &PyTuple_Type)
                outcome = write_tuple(writer, object);
        else if (type == (PyTypeObject *)torch.ordered_dict)
                outcome = write_ordered_dict(writer, object);
        Py_LeaveRecursiveCall();
        return outcome;
}

static enum outcome write_object(struct writer *writer, PyObject *object)
{
        if (PyUnicode_CheckExact(object))
                return write_text(writer, object);
        if (PyLong_CheckExact(object))
                return write_number(writer, object);
        if (PyFloat_CheckExact(object))
                return write_float(writer, object);
        if (!room(writer, 5))
                return FAILED;
        if (object == Py_None || object == Py_True || object == Py_False) {
                put(writer, object == Py_None ? OP_NONE : object == Py_True ? OP_TRUE : OP_FALSE);
                return WRITTEN;
        }
        return write_known(writer, object) ? WRITTEN : write_new(writer, object);
}

static bool load_property(struct property *property, PyObject *type, const char *name)
{
        PyObject *found = PyObject_GetAttrString(type, name);

        property->name = PyUnicode_InternFromString(name);
        if (found && Py_IS_TYPE(found, &PyGetSetDescr_Type))
                property->definition = ((PyGetSetDescrObject *)found)->d_getset; /* lives as long as its type */
        Py_XDECREF(found);
        return found && property->name;
}

static bool load_method(PyObject **method, PyObject *type, const char *name)
{
        *method = PyObject_GetAttrString(type, name);
        return *method != NULL;
}

static bool load_dtypes(void)
{
        PyObject *dtype, *row;
        Py_ssize_t position = 0;

        known.dtype_count = 0;
        while (PyDict_Next(torch.dtypes, &position, &dtype, &row) && known.dtype_count < DTYPE_COUNT_MAX)
                known.dtypes[known.dtype_count++] = (struct dtype_row){
                        .dtype = dtype, .storage_type = PyTuple_GET_ITEM(row, 0),
                        .item_size = PyLong_AsSsize_t(PyTuple_GET_ITEM(row, 1)),
                        .is_complex = PyTuple_GET_ITEM(row, 2) == Py_True,
                };
        return !PyErr_Occurred();
}

static bool load(void)
{
        PyObject *tensor, *storage;

        if (known.is_ready)
                return true;
        if (reduce_load_torch() < 0)
                return false;
        tensor = torch.tensor_type;
        storage = torch.untyped_storage_type;
        known.is_ready = load_property(&known.is_cpu, tensor, "is_cpu") && load_property(&known.layout, tensor, "layout") &&
                         load_property(&known.is_nested, tensor, "is_nested") &&
                         load_property(&known.backward_hooks, tensor, "_backward_hooks") &&
                         load_property(&known.dtype, tensor, "dtype") &&
                         load_property(&known.requires_grad, tensor, "requires_grad") &&
                         load_property(&known.shape, tensor, "shape") && load_property(&known.cdata, storage, "_cdata") &&
                         load_method(&known.is_neg, tensor, "is_neg") && load_method(&known.is_conj, tensor, "is_conj") &&
                         load_method(&known.untyped_storage, tensor, "untyped_storage") &&
                         load_method(&known.storage_offset, tensor, "storage_offset") &&
                         load_method(&known.stride, tensor, "stride") && load_method(&known.nbytes, storage, "nbytes") &&
                         load_method(&known.data_ptr, storage, "data_ptr") && load_dtypes();
        return known.is_ready;
}

static void writer_done(struct writer *writer)
{
        for (size_t i = 0; i < writer->memo.capacity; i++)
                Py_XDECREF((PyObject *)(uintptr_t)writer->memo.pairs[i].key);
        Py_XDECREF(writer->bytes);
        Py_XDECREF(writer->storages);
        PyMem_Free(writer->memo.pairs);
        PyMem_Free(writer->by_cdata.pairs);
        PyMem_Free(writer->dtype_at.pairs);
        PyMem_Free(writer->stored);
}

static enum outcome write_all(struct writer *writer, PyObject *object)
{
        enum outcome outcome;

        put(writer, OP_PROTO);
        put(writer, 2);
        outcome = write_object(writer, object);
        if (outcome == WRITTEN && !room(writer, 1))
                outcome = FAILED;
        if (outcome != WRITTEN)
                return outcome;
        put(writer, OP_STOP);
        return _PyBytes_Resize(&writer->bytes, writer->at - PyBytes_AS_STRING(writer->bytes)) < 0 ? FAILED : WRITTEN;
}

PyObject *plain_dump(PyObject *module, PyObject *object)
{
        struct writer writer = { 0 };
        PyObject *result = NULL;
        enum outcome outcome = FAILED;
        int enabled;

        (void)module;
        if (!load())
                return NULL;
        writer.bytes = PyBytes_FromStringAndSize(NULL, 1 << 14);
        writer.storages = PyList_New(0);
        enabled = PyGC_Disable(); /* it would find nothing: all that is made here is in use */
        if (writer.bytes && writer.storages) {
                writer.at = PyBytes_AS_STRING(writer.bytes);
                writer.end = writer.at + PyBytes_GET_SIZE(writer.bytes);
                outcome = write_all(&writer, object);
        }
        if (outcome == WRITTEN)
                result = PyTuple_Pack(2, writer.bytes, writer.storages);
        else if (outcome == NOT_PLAIN)
                result = Py_NewRef(Py_None);
        writer_done(&writer);
        if (enabled)
                PyGC_Enable();
        return result;
}
