/*
 * pickle_plain.h - what the files that write the pickle of plain state share.
 *
 *      pickle_plain.c         containers, and the way through an object
 *      pickle_plain_tensor.c  tensors and storages
 *      torch_abi.c            what is known of torch (torch_abi.h)
 *      pickle_plain_out.c     bytes, memo, texts and numbers
 *
 * A function that writes returns how that ended. put... functions write without
 * looking: the caller has asked for room().
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

/* Numbers by numbers. What is searched is small, so that it stays in the caches. */
struct table {
        struct pair {
                uint64_t key, value;
        } *pairs;         /* in the order in which they came */
        uint32_t *places; /* by hash: 1 + the number of a pair, or 0 */
        size_t count, capacity; /* of places: a power of two, twice that of pairs */
};

struct stored {
        uint64_t key_memo; /* where the pickle keeps this storage's key */
        size_t row;        /* of known.dtypes */
};

struct writer {
        PyObject *bytes; /* the pickle, with room behind its end */
        char *at, *end;
        uint64_t memo_count;
        struct table memo;      /* address of an object -> its memo number */
        struct table by_cdata;  /* a storage -> its index in `stored` */
        struct table dtype_at;  /* address of memory -> its row of known.dtypes */
        struct ranges *storages; /* as TorchPickler.storages */
        struct stored *stored;   /* what else is known of each */
        size_t stored_capacity;
        bool takes_cuda;        /* tensors on a GPU are plain too: nobody will read from their address */
        int depth;              /* of containers within each other, where it is */
};

/* How writing one object ended. */
enum outcome {
        WRITTEN,
        NOT_PLAIN,
        FAILED, /* with a Python error */
};

/* pickle_plain_out.c */
bool plain_grow(struct writer *writer, size_t size);
/* Room for `size` more bytes, which the caller then writes without asking. */
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
/* Gives what was written last the next memo number. Needs room for 5 bytes. */
uint64_t put_memo(struct writer *writer);
void put_get(struct writer *writer, uint64_t number);
/* NULL: there is none. */
struct pair *table_find(const struct table *table, uint64_t key);
/* The pair of `key`, a new one with value 0 when *ret_is_new; NULL with a Python error. */
struct pair *table_at(struct table *table, uint64_t key, bool *ret_is_new);
/* The tables of the pickle before, empty, into a new writer. Returns the size of that pickle, 0 when there was none. */
size_t plain_take_spare(struct writer *writer);
/* Takes the tables of a writer that is done. 0: it wrote no pickle. */
void plain_give_spare(struct writer *writer, size_t pickle_size);
/* true: `object` was written before, and is referred to. Else the caller writes it; its number is the next. */
bool write_known(struct writer *writer, const PyObject *object);
/* Holds the object: were it freed, another could come to lie at its address. */
enum outcome memoize(struct writer *writer, PyObject *object);
enum outcome write_text(struct writer *writer, PyObject *text);
enum outcome write_global(struct writer *writer, PyObject *object); /* a class or function of a module */
enum outcome write_number(struct writer *writer, PyObject *number);
enum outcome write_float(struct writer *writer, PyObject *number);

/* pickle_plain_tensor.c */
enum outcome write_tensor(struct writer *writer, PyObject *tensor);
/* To be called at the end: what torch.save would refuse is not plain. */
enum outcome check_dtypes(struct writer *writer);

/* torch_abi.c */
/* Fetches what is needed of torch, once; false with a Python error. */
bool plain_load(void);
/* Hints to the caches: what an ordinary tensor, if it is one, points to, and later what that points to. */
void tensor_fetch(PyObject *key, PyObject *value);
void tensor_fetch_storage(PyObject *key, PyObject *value);

#endif
