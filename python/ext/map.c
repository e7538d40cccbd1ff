/*
 * map.c - Map: the verified bytes of one file.
 *
 * memoryview(map) is writable: the memory is this process's own, and no checkpoint changes with it.
 */
#include "module.h"

#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "image/image.h"
#include "sum/sum.h"

struct map {
        PyObject_HEAD
        PyObject *checkpoint;
        nebula_map *handle;
};

static PyTypeObject *map_type;

PyObject *map_object(PyObject *checkpoint, nebula_map *handle)
{
        struct map *self = (struct map *)map_type->tp_alloc(map_type, 0);

        if (!self) {
                nebula_map_free(handle);
                return NULL;
        }
        self->checkpoint = Py_NewRef(checkpoint);
        self->handle = handle;
        return (PyObject *)self;
}

static void map_dealloc(PyObject *object)
{
        struct map *self = (struct map *)object;
        PyTypeObject *type = Py_TYPE(object);

        nebula_map_free(self->handle);
        Py_XDECREF(self->checkpoint);
        type->tp_free(object);
        Py_DECREF(type);
}

static int map_buffer(PyObject *self, Py_buffer *view, int flags)
{
        nebula_map *handle = ((struct map *)self)->handle;

        return PyBuffer_FillInfo(view, self, (void *)(uintptr_t)nebula_map_data(handle),
                                 (Py_ssize_t)nebula_map_size(handle), 0, flags);
}

static PyObject *map_fetch(PyObject *self, PyObject *args)
{
        struct nebula_error error = { 0 };
        unsigned long long offset, size;
        enum nebula_status status;

        if (!PyArg_ParseTuple(args, "KK", &offset, &size))
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_map_fetch(((struct map *)self)->handle, offset, size, &error);
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

static PyObject *map_own(PyObject *self, PyObject *unused)
{
        (void)unused;
        nebula_map_own(((struct map *)self)->handle);
        Py_RETURN_NONE;
}

static PyObject *map_fetch_headers(PyObject *self, PyObject *unused)
{
        struct nebula_error error = { 0 };
        enum nebula_status status;
        int has_headers;

        (void)unused;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_map_fetch_directory(((struct map *)self)->handle, &has_headers, &error);
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

/* Tuples of `fields` numbers: offset, size, and the address if there are three. NULL: an exception is set. */
static struct nebula_part *take_parts(PyObject *list, int fields, size_t *ret_count)
{
        Py_ssize_t count = PyList_Check(list) ? PyList_GET_SIZE(list) : -1;
        struct nebula_part *parts;

        if (count < 0) {
                PyErr_SetString(PyExc_TypeError, "a list of ranges is needed");
                return NULL;
        }
        parts = PyMem_Calloc((size_t)count + 1, sizeof *parts);
        if (!parts)
                return (struct nebula_part *)PyErr_NoMemory();
        for (Py_ssize_t i = 0; i < count; i++) {
                unsigned long long offset, size, address = 0;

                if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), fields == 3 ? "KKK" : "KK", &offset, &size, &address)) {
                        PyMem_Free(parts);
                        return NULL;
                }
                parts[i] = (struct nebula_part){ .offset = offset, .size = size, .data = (void *)(uintptr_t)address };
        }
        *ret_count = (size_t)count;
        return parts;
}

static PyObject *map_fetch_parts(PyObject *self, PyObject *list)
{
        size_t count;
        struct nebula_part *parts = take_parts(list, 2, &count);
        struct nebula_error error = { 0 };
        enum nebula_status status;

        if (!parts)
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_map_fetch_parts(((struct map *)self)->handle, parts, count, &error);
        Py_END_ALLOW_THREADS
        PyMem_Free(parts);
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

static PyObject *map_read(PyObject *self, PyObject *list)
{
        size_t count;
        struct nebula_part *parts = take_parts(list, 3, &count);
        struct nebula_error error = { 0 };
        enum nebula_status status;

        if (!parts)
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_map_read(((struct map *)self)->handle, parts, count, &error);
        Py_END_ALLOW_THREADS
        PyMem_Free(parts);
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

static PyObject *map_where_rest(PyObject *self, PyObject *unused)
{
        static const char *const names[] = { [MAP_REST_NONE] = "", [MAP_REST_CACHED] = "page cache", [MAP_REST_ELSEWHERE] = "elsewhere" };

        (void)unused;
        return PyUnicode_FromString(names[map_rest(((struct map *)self)->handle)]);
}

static PyObject *map_read_one(PyObject *self, PyObject *args)
{
        struct nebula_error error = { 0 };
        unsigned long long offset, size, address;
        enum nebula_status status;
        struct nebula_part part;
        unsigned int crc32;

        if (!PyArg_ParseTuple(args, "KKKI", &offset, &size, &address, &crc32))
                return NULL;
        part = (struct nebula_part){ .offset = offset, .size = size, .data = (void *)(uintptr_t)address };
        Py_BEGIN_ALLOW_THREADS
        status = map_read_record(((struct map *)self)->handle, &part, crc32, &error);
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

/* Headers lie all over the file, so they are read only if the places of the records do not follow from the directory. */
static enum nebula_status read_places(const nebula_map *handle, struct zip_entry **ret_entries, size_t *ret_count, struct nebula_error *error)
{
        if (zip_read_directory(nebula_map_data(handle), nebula_map_size(handle), ret_entries, ret_count, NULL) == NEBULA_OK)
                return NEBULA_OK;
        return zip_read(nebula_map_data(handle), nebula_map_size(handle), ret_entries, ret_count, error);
}

static PyObject *map_records(PyObject *self, PyObject *unused)
{
        const nebula_map *handle = ((const struct map *)self)->handle;
        PyObject *records = PyDict_New();
        struct nebula_error error = { 0 };
        struct zip_entry *entries;
        size_t count;

        (void)unused;
        if (!records)
                return NULL;
        if (read_places(handle, &entries, &count, &error) != NEBULA_OK) {
                Py_DECREF(records);
                return nebula_raise(&error);
        }
        for (size_t i = 0; i < count; i++) {
                PyObject *name = PyUnicode_DecodeUTF8(entries[i].name, (Py_ssize_t)strlen(entries[i].name), "surrogateescape");
                PyObject *place = Py_BuildValue("KK", (unsigned long long)entries[i].payload_offset, (unsigned long long)entries[i].size);
                int status = name && place ? PyDict_SetItem(records, name, place) : -1;

                Py_XDECREF(name);
                Py_XDECREF(place);
                if (status) {
                        free(entries);
                        Py_DECREF(records);
                        return NULL;
                }
        }
        free(entries);
        if ((size_t)PyDict_GET_SIZE(records) < count) { /* readers disagree on which of two equal names counts */
                error = (struct nebula_error){ .status = NEBULA_INVALID, .message = "two records of a zip file have one name" };
                Py_DECREF(records);
                return nebula_raise(&error);
        }
        return records;
}

static PyObject *map_sums(PyObject *self, PyObject *unused)
{
        const nebula_map *handle = ((const struct map *)self)->handle;
        PyObject *sums = PyDict_New();
        struct nebula_error error = { 0 };
        struct zip_entry *entries = NULL;
        size_t count;

        (void)unused;
        if (sums && read_places(handle, &entries, &count, &error) != NEBULA_OK) {
                Py_DECREF(sums);
                return nebula_raise(&error);
        }
        for (size_t i = 0; sums && i < count; i++) {
                PyObject *offset = PyLong_FromUnsignedLongLong(entries[i].payload_offset);
                PyObject *sum = PyLong_FromUnsignedLong(entries[i].crc32);

                if (!offset || !sum || PyDict_SetItem(sums, offset, sum))
                        Py_CLEAR(sums);
                Py_XDECREF(offset);
                Py_XDECREF(sum);
        }
        free(entries);
        return sums;
}

/* The CRC-32 of a record that the agent has not summed: it does so when it writes the file to storage, which it may never do. */
static void write_sum(uint8_t *data, const struct zip_entry *entry)
{
        uint32_t crc32 = entry->crc32 || entry->header_crc32 || entry->has_descriptor ? 0 : sum_crc32(0, data + entry->payload_offset, entry->size);

        if (!crc32)
                return;
        memcpy(data + entry->header_crc_offset, &crc32, sizeof crc32);
        memcpy(data + entry->directory_crc_offset, &crc32, sizeof crc32);
}

static PyObject *map_write_sums(PyObject *self, PyObject *unused)
{
        nebula_map *handle = ((struct map *)self)->handle;
        uint8_t *data = (uint8_t *)(uintptr_t)nebula_map_data(handle); /* private memory */
        struct zip_entry *entries;
        size_t count;

        (void)unused;
        Py_BEGIN_ALLOW_THREADS
        if (zip_read(data, nebula_map_size(handle), &entries, &count, NULL) == NEBULA_OK) {
                for (size_t i = 0; i < count; i++)
                        write_sum(data, &entries[i]);
                free(entries);
        }
        Py_END_ALLOW_THREADS
        Py_RETURN_NONE;
}

static PyMethodDef map_methods[] = {
        { "fetch", map_fetch, METH_VARARGS, "fetch(offset, size): reads and verifies these bytes." },
        { "fetch_headers", map_fetch_headers, METH_NOARGS,
          "fetch_headers(): reads a zip file's directory, and the headers if the places of records do not follow from it." },
        { "fetch_parts", map_fetch_parts, METH_O, "fetch_parts([(offset, size)]): fetch() for several ranges at the same time, in any order." },
        { "own", map_own, METH_NOARGS, "own(): a thread copies the mapped pages ahead of the program's writes." },
        { "records", map_records, METH_NOARGS, "records(): {name: (offset, size)} of a zip file, in the order of the file; call fetch_headers() before." },
        { "read", map_read, METH_O, "read([(offset, size, address)]): reads bytes to their addresses; parts in the order of their offsets." },
        { "read_record", map_read_one, METH_VARARGS, "read_record(offset, size, address, CRC-32): reads the bytes of a record." },
        { "rest", map_where_rest, METH_NOARGS, "rest(): where bytes are that the map does not have yet: \"page cache\", \"elsewhere\", or \"\": nowhere." },
        { "sums", map_sums, METH_NOARGS, "sums(): {offset: CRC-32} of the records of a zip file." },
        { "write_sums", map_write_sums, METH_NOARGS, "write_sums(): the CRC-32 of records that have none yet; all bytes must be there." },
        { NULL, NULL, 0, NULL },
};

int map_add_type(PyObject *module)
{
        static PyType_Slot slots[] = {
                { Py_tp_doc, "The verified bytes of one file; see map.c." },
                { Py_tp_dealloc, map_dealloc },
                { Py_tp_methods, map_methods },
                { Py_bf_getbuffer, map_buffer },
                { 0, NULL },
        };
        static PyType_Spec spec = { "nebulaml._nebula.Map", sizeof(struct map), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots };

        map_type = (PyTypeObject *)PyType_FromSpec(&spec);
        return map_type ? PyModule_AddObjectRef(module, "Map", (PyObject *)map_type) : -1;
}
