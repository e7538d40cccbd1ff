/*
 * pickle_plain.h - declarations that the files that write the pickle of plain state share.
 *
 *      pickle_plain.c         containers, and the walk through an object
 *      pickle_plain_tensor.c  tensors and storages
 *      torch_abi.c            knowledge about torch (torch_abi.h)
 *      pickle_plain_leaf.c    bytes, parameters, dtypes, enums and the like
 *      pickle_plain_out.c     bytes, memo, texts and numbers
 *
 * A function that writes returns an outcome. put... functions write unchecked:
 * call room() before.
 */
#ifndef NB_PYTHON_PLAIN_H
#define NB_PYTHON_PLAIN_H

#include "pickle.h"
#include "ranges.h"

#include <stdint.h>

/* Opcodes of protocol 2. */
enum {
        OP_MARK = '(', OP_STOP = '.', OP_NONE = 'N', OP_TRUE = 0x88, OP_FALSE = 0x89, OP_INT1 = 'K', OP_INT2 = 'M',
        OP_INT4 = 'J', OP_LONG1 = 0x8a, OP_FLOAT = 'G', OP_TEXT = 'X', OP_PUT1 = 'q', OP_PUT4 = 'r', OP_GET1 = 'h',
        OP_GET4 = 'j', OP_DICT = '}', OP_LIST = ']', OP_TUPLE0 = ')', OP_TUPLE1 = 0x85, OP_TUPLE = 't',
        OP_SETITEM = 's', OP_SETITEMS = 'u', OP_APPEND = 'a', OP_APPENDS = 'e', OP_REDUCE = 'R', OP_BUILD = 'b',
        OP_PERSID = 'Q', OP_PROTO = 0x80,
};

/* A hash table from numbers to numbers. The searched part is small, so that it stays in the caches. */
struct table {
        struct pair {
                uint64_t key, value;
        } *pairs;         /* in order of insertion */
        uint32_t *places; /* by hash: 1 + the index of a pair, or 0 */
        size_t count, capacity; /* of places: a power of two, twice that of pairs */
};

struct stored {
        uint64_t key_memo; /* memo number of the storage's key */
        size_t row;        /* of known.dtypes */
};

struct writer {
        PyObject *bytes; /* the pickle, with spare room at the end */
        char *at, *end;
        uint64_t memo_count;
        struct table memo;      /* object's address -> its memo number */
        struct table by_cdata;  /* storage -> its index in `stored` */
        struct table dtype_at;  /* memory address -> its row of known.dtypes */
        struct ranges *storages; /* the result, as TorchPickler.storages */
        struct stored *stored;   /* further data of each storage */
        size_t stored_capacity;
        bool takes_cuda;        /* tensors on a GPU are plain, too: their addresses are not read here */
        int depth;              /* nesting depth of the containers at this point */
};

/* The result of writing one object. */
enum outcome {
        WRITTEN,
        NOT_PLAIN,
        FAILED, /* with a Python error */
};

/* pickle_plain_out.c */
bool plain_grow(struct writer *writer, size_t size);
/* Makes room for `size` more bytes; the caller then writes them unchecked. */
static inline bool room(struct writer *writer, size_t size)
{
        return (size_t)(writer->end - writer->at) >= size || plain_grow(writer, size);
}

static inline void put(struct writer *writer, int op)
{
        *writer->at++ = (char)op;
}

static inline void put_little(struct writer *writer, uint64_t value, int byte_count)
{
        char *at = writer->at;

        for (int i = 0; i < byte_count; i++)
                at[i] = (char)(value >> 8 * i & 0xff);
        writer->at = at + byte_count;
}

void put_int(struct writer *writer, int64_t value); /* needs room for 11 bytes */
/* Gives the last written object the next memo number. Needs room for 5 bytes. */
uint64_t put_memo(struct writer *writer);
void put_get(struct writer *writer, uint64_t number);
/* NULL: there is none. */
struct pair *table_find(const struct table *table, uint64_t key);
/* The pair of `key`. *ret_is_new: it was added, with value 0. NULL with a Python error. */
struct pair *table_at(struct table *table, uint64_t key, bool *ret_is_new);
/* Gives a new writer the empty tables of the last pickle. Returns the size of that pickle; 0: there was none. */
size_t plain_take_spare(struct writer *writer);
/* Takes back the tables of a finished writer. 0: it wrote no pickle. */
void plain_give_spare(struct writer *writer, size_t pickle_size);
/* True: `object` was written before, and a reference to it is written. False: the caller writes it. */
bool write_known(struct writer *writer, const PyObject *object);
/* Gives the object a memo number and holds it: if it were freed, another object could get its address. */
enum outcome memoize(struct writer *writer, PyObject *object);
enum outcome write_text(struct writer *writer, PyObject *text);
enum outcome write_global(struct writer *writer, PyObject *object); /* a class or function of a module */
enum outcome write_number(struct writer *writer, PyObject *number);
enum outcome write_float(struct writer *writer, PyObject *number);

/* pickle_plain.c */
enum outcome plain_write(struct writer *writer, PyObject *object);

/* pickle_plain_leaf.c: writes an object that is not a container, number, text or tensor */
enum outcome write_leaf(struct writer *writer, PyObject *object);

/* pickle_plain_tensor.c */
enum outcome write_tensor(struct writer *writer, PyObject *tensor);
/* Call it at the end: a pickle that torch.save would refuse is not plain. */
enum outcome check_dtypes(struct writer *writer);

/* torch_abi.c */
/* Fetches objects of torch, once; false with a Python error. */
bool plain_load(void);
/* Prefetch the object that an ordinary tensor points to, and later the one that this object points to. */
void tensor_fetch(PyObject *key, PyObject *value);
void tensor_fetch_storage(PyObject *key, PyObject *value);

#endif
