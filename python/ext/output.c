/*
 * output.c - directories of files that appear under their name by one rename: the C side of nebulaml/export.
 *
 *      staging_make(parent)                 makes a directory with a name of its own, and a file beside it, which it locks
 *      Output(path, size), write, sync      a new file in it
 *      read_sums(path, ranges)              the checksums of what arrived, read from the disk
 *      staging_place(staging, path, swaps)  gives the directory, or a file in it, its name
 *      staging_end(staging, lock)           removes the file, after the directory
 *      staging_left(parent)                 directories that a process left which ended before that
 *
 * The lock ends with the process. So a directory whose file is not locked belongs to no process. (NFS locks no directories.)
 */
#include "module.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "sum/sum.h"

#define STAGING_PREFIX ".nebula-export-"
#define LOCK_SUFFIX ".lock"
#define STAGING_TRIES 20
#define PIECE_BYTES (4u << 20)
#define PAGE_BYTES 4096u /* O_DIRECT needs no more on the file systems that we know */
#define PATH_BYTES 4352

struct output {
        PyObject_HEAD
        int fd; /* -1: synced */
        char path[PATH_BYTES];
};

static PyObject *fail(int result, const char *what, const char *path)
{
        enum nebula_status status = result == -EFBIG ? NEBULA_NO_SPACE : error_status_of_errno(-result);
        struct nebula_error error;

        error_set(&error, status, -result, "cannot %s %s", what, path);
        return nebula_raise(&error);
}

/* Reserves the space, so that a full disk shows before minutes of work. Some file systems cannot reserve: then a write fails. */
static int open_new(struct output *self, uint64_t size)
{
        int result;

        self->fd = os->open(self->path, OS_READ | OS_WRITE | OS_CREATE | OS_EXCLUSIVE | OS_NOFOLLOW | OS_SHARED);
        if (self->fd < 0)
                return self->fd;
        result = size ? os->allocate(self->fd, 0, size) : 0;
        return result == -ENOSPC || result == -EDQUOT || result == -EFBIG ? result : 0;
}

static PyObject *output_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
        unsigned long long size;
        struct output *self;
        const char *path;
        int result;

        (void)keywords;
        if (!PyArg_ParseTuple(arguments, "sK", &path, &size))
                return NULL;
        self = (struct output *)type->tp_alloc(type, 0);
        if (!self)
                return NULL;
        self->fd = -1;
        result = snprintf(self->path, sizeof self->path, "%s", path) < (int)sizeof self->path ? 0 : -ENAMETOOLONG;
        if (!result) {
                Py_BEGIN_ALLOW_THREADS
                result = open_new(self, size);
                Py_END_ALLOW_THREADS
        }
        if (result) {
                Py_DECREF(self);
                return fail(result, "write", path);
        }
        return (PyObject *)self;
}

static void output_dealloc(PyObject *object)
{
        struct output *self = (struct output *)object;
        PyTypeObject *type = Py_TYPE(object);

        if (self->fd >= 0)
                os->close(self->fd);
        type->tp_free(object);
        Py_DECREF(type);
}

static PyObject *output_write(PyObject *object, PyObject *arguments)
{
        struct output *self = (struct output *)object;
        unsigned long long offset, sum;
        Py_buffer data;
        int result;

        if (!PyArg_ParseTuple(arguments, "Ky*K", &offset, &data, &sum))
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        result = os_write_at(self->fd, data.buf, (size_t)data.len, offset);
        sum = sum_crc64(sum, data.buf, (size_t)data.len);
        Py_END_ALLOW_THREADS
        PyBuffer_Release(&data);
        return result ? fail(result, "write", self->path) : PyLong_FromUnsignedLongLong(sum);
}

PyObject *output_sum_bytes(PyObject *module, PyObject *arguments)
{
        unsigned long long sum;
        Py_buffer data;

        (void)module;
        if (!PyArg_ParseTuple(arguments, "y*K", &data, &sum))
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        sum = sum_crc64(sum, data.buf, (size_t)data.len);
        Py_END_ALLOW_THREADS
        PyBuffer_Release(&data);
        return PyLong_FromUnsignedLongLong(sum);
}

static PyObject *output_sync(PyObject *object, PyObject *unused)
{
        struct output *self = (struct output *)object;
        int result, closed;

        (void)unused;
        Py_BEGIN_ALLOW_THREADS
        result = os_sync(self->fd);
        closed = os->close(self->fd);
        Py_END_ALLOW_THREADS
        self->fd = -1;
        if (result || closed)
                return fail(result ? result : closed, "write", self->path);
        Py_RETURN_NONE;
}

/* Reads whole pages, as O_DIRECT needs them. The last ones of a file are short. */
static int sum_range(int fd, char *buffer, uint64_t offset, uint64_t size, uint64_t *ret_sum)
{
        uint64_t sum = 0;

        while (size) {
                uint64_t start = offset / PAGE_BYTES * PAGE_BYTES, skip = offset - start, count = 0;
                int64_t got = os->pread(fd, buffer, PIECE_BYTES, start);

                if (got == -EINTR)
                        continue;
                if (got < 0)
                        return (int)got;
                if ((uint64_t)got <= skip)
                        return -ENODATA;
                count = (uint64_t)got - skip < size ? (uint64_t)got - skip : size;
                sum = sum_crc64(sum, buffer + skip, count);
                offset += count;
                size -= count;
        }
        *ret_sum = sum;
        return 0;
}

/* The bytes come from the disk where that is possible, and not from the page cache. */
static int sum_ranges(const char *path, const uint64_t (*ranges)[2], uint64_t *sums, size_t count)
{
        char *buffer = aligned_alloc(PAGE_BYTES, PIECE_BYTES);
        bool is_direct = true;
        int fd, result = 0;

        if (!buffer)
                return -ENOMEM;
        fd = os->open(path, OS_READ | OS_DIRECT | OS_NOFOLLOW);
        for (size_t i = 0; i < count && !result; i++) {
                result = fd < 0 ? fd : sum_range(fd, buffer, ranges[i][0], ranges[i][1], &sums[i]);
                if (result == -EINVAL && is_direct) {
                        if (fd >= 0)
                                os->close(fd);
                        fd = os->open(path, OS_READ | OS_NOFOLLOW);
                        is_direct = false;
                        result = fd < 0 ? fd : sum_range(fd, buffer, ranges[i][0], ranges[i][1], &sums[i]);
                }
        }
        if (fd >= 0)
                os->close(fd);
        free(buffer);
        return result;
}

static PyObject *list_of(const uint64_t *sums, size_t count)
{
        PyObject *list = PyList_New((Py_ssize_t)count);

        for (size_t i = 0; list && i < count; i++) {
                PyObject *sum = PyLong_FromUnsignedLongLong(sums[i]);

                if (!sum)
                        Py_CLEAR(list);
                else
                        PyList_SET_ITEM(list, (Py_ssize_t)i, sum);
        }
        return list;
}

PyObject *output_read_sums(PyObject *module, PyObject *arguments)
{
        PyObject *list, *found = NULL;
        uint64_t (*ranges)[2], *sums;
        const char *path;
        size_t count;
        int result = 0;

        (void)module;
        if (!PyArg_ParseTuple(arguments, "sO!", &path, &PyList_Type, &list))
                return NULL;
        count = (size_t)PyList_GET_SIZE(list);
        ranges = PyMem_Calloc(count + 1, sizeof *ranges);
        sums = PyMem_Calloc(count + 1, sizeof *sums);
        if (!ranges || !sums) {
                PyErr_NoMemory();
                goto free_lists;
        }
        for (size_t i = 0; i < count; i++) {
                unsigned long long offset, size;

                if (!PyArg_ParseTuple(PyList_GET_ITEM(list, (Py_ssize_t)i), "KK", &offset, &size))
                        goto free_lists;
                ranges[i][0] = offset;
                ranges[i][1] = size;
        }
        Py_BEGIN_ALLOW_THREADS
        result = sum_ranges(path, (const uint64_t (*)[2])ranges, sums, count);
        Py_END_ALLOW_THREADS
        found = result ? fail(result, "read", path) : list_of(sums, count);
free_lists:
        PyMem_Free(ranges);
        PyMem_Free(sums);
        return found;
}

/* Locks the file beside a directory. Returns its descriptor, -EWOULDBLOCK if a process holds the lock, or another negative errno. */
static int lock_beside(const char *directory, int flags)
{
        struct os_stat here, there;
        char path[PATH_BYTES];
        int fd, result;

        if (snprintf(path, sizeof path, "%s" LOCK_SUFFIX, directory) >= (int)sizeof path)
                return -ENAMETOOLONG;
        fd = os->open(path, OS_READ | OS_WRITE | OS_NOFOLLOW | flags);
        if (fd < 0)
                return fd;
        result = os->lock(fd, false);
        if ((flags & OS_CREATE) && (result == -ENOSYS || result == -EOPNOTSUPP || result == -ENOLCK))
                return fd; /* the file system has no locks, so no process removes this directory but its own */
        /* Another process may have taken it for one without an owner, and removed it. */
        if (!result)
                result = os->fstat(fd, &here);
        if (!result)
                result = os->stat(path, false, &there);
        if (!result && here.inode == there.inode)
                return fd;
        os->close(fd);
        return result ? result : -ENOENT;
}

PyObject *output_staging_make(PyObject *module, PyObject *parent)
{
        const char *folder = PyUnicode_AsUTF8(parent);
        char path[PATH_BYTES] = "";
        int fd = -ENOENT, result = 0;

        (void)module;
        if (!folder)
                return NULL;
        result = os_make_dirs(folder, 0777);
        if (result)
                return fail(result, "make the directory", folder);
        for (int i = 0; i < STAGING_TRIES && fd == -ENOENT; i++) {
                uint64_t id = 0;

                result = os->random(&id, sizeof id);
                if (result < 0)
                        break;
                if (snprintf(path, sizeof path, "%s/" STAGING_PREFIX "%016" PRIx64, folder, id) >= (int)sizeof path)
                        return fail(-ENAMETOOLONG, "make a directory in", folder);
                fd = lock_beside(path, OS_CREATE | OS_EXCLUSIVE);
        }
        if (result >= 0)
                result = fd < 0 ? fd : os->mkdir(path, 0777);
        if (result >= 0)
                return Py_BuildValue("(si)", path, fd);
        if (fd >= 0)
                os->close(fd);
        return fail(result, "make a directory in", folder);
}

/* Adds the path of a directory whose lock no process holds. False: an exception is set. */
static bool add_left(PyObject *found, const char *folder, const char *name)
{
        size_t length = strlen(name), suffix = strlen(LOCK_SUFFIX);
        char path[PATH_BYTES];
        PyObject *text;
        int fd, failed;

        if (length <= suffix || strncmp(name, STAGING_PREFIX, strlen(STAGING_PREFIX)) || strcmp(name + length - suffix, LOCK_SUFFIX) ||
            snprintf(path, sizeof path, "%s/%.*s", folder, (int)(length - suffix), name) >= (int)sizeof path)
                return true;
        fd = lock_beside(path, 0);
        if (fd < 0)
                return true;
        text = Py_BuildValue("(si)", path, fd);
        failed = text ? PyList_Append(found, text) : -1;
        Py_XDECREF(text);
        if (failed)
                os->close(fd);
        return !failed;
}

/* Removes the lock of a directory that is gone, or has its name. */
PyObject *output_staging_end(PyObject *module, PyObject *arguments)
{
        char lock[PATH_BYTES];
        const char *path;
        int fd;

        (void)module;
        if (!PyArg_ParseTuple(arguments, "si", &path, &fd))
                return NULL;
        if (snprintf(lock, sizeof lock, "%s" LOCK_SUFFIX, path) < (int)sizeof lock)
                os->unlink(lock);
        os->close(fd);
        Py_RETURN_NONE;
}

PyObject *output_staging_left(PyObject *module, PyObject *parent)
{
        const char *folder = PyUnicode_AsUTF8(parent);
        PyObject *found = folder ? PyList_New(0) : NULL;
        struct os_dir *dir;
        char name[256];

        (void)module;
        if (!found || os->opendir(folder, &dir) < 0)
                return found; /* nothing was left in a directory that does not exist */
        while (os->readdir(dir, name, sizeof name) > 0)
                if (!add_left(found, folder, name)) {
                        Py_CLEAR(found);
                        break;
                }
        os->closedir(dir);
        return found;
}

static int place(const char *staging, const char *path, const char *parent, bool swaps)
{
        int result = os_sync_dir(staging);

        if (!result || result == -ENOTDIR) /* a file, which is synced */
                result = swaps ? os->exchange(staging, path) : os->rename(staging, path);
        return result ? result : os_sync_dir(parent);
}

PyObject *output_staging_place(PyObject *module, PyObject *arguments)
{
        const char *staging, *path, *parent;
        struct nebula_error error;
        int swaps, result;

        (void)module;
        if (!PyArg_ParseTuple(arguments, "sssp", &staging, &path, &parent, &swaps))
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        result = place(staging, path, parent, swaps);
        Py_END_ALLOW_THREADS
        if (!result)
                Py_RETURN_NONE;
        if (result == -EEXIST || result == -ENOTEMPTY || result == -ENOTDIR)
                error_set(&error, NEBULA_INVALID, 0, "%s exists already; remove it, or ask to replace it", path);
        else if (swaps && result == -EINVAL)
                error_set(&error, NEBULA_STORAGE, 0, "the file system of %s cannot replace a directory at once; remove it first", path);
        else
                return fail(result, "give its name to", path);
        return nebula_raise(&error);
}

static PyMethodDef output_methods[] = {
        { "write", output_write, METH_VARARGS, "write(offset, data, sum) -> the CRC-64 `sum` of earlier bytes, with those of `data`." },
        { "sync", output_sync, METH_NOARGS, "sync(): the file is durable, and takes no more writes." },
        { NULL, NULL, 0, NULL },
};

int output_add_type(PyObject *module)
{
        static PyType_Slot slots[] = {
                { Py_tp_doc, "Output(path, size): a new file; see output.c." },
                { Py_tp_new, output_new },
                { Py_tp_dealloc, output_dealloc },
                { Py_tp_methods, output_methods },
                { 0, NULL },
        };
        static PyType_Spec spec = { "nebulaml._nebula.Output", sizeof(struct output), 0, Py_TPFLAGS_DEFAULT, slots };
        PyObject *type = PyType_FromSpec(&spec);
        int result = type ? PyModule_AddObjectRef(module, "Output", type) : -1;

        Py_XDECREF(type);
        return result;
}
