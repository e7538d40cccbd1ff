/*
 * pickle.h - the few opcodes of a flat dict's pickle, for its writer and its reader.
 */
#ifndef NB_IMAGE_PICKLE_H
#define NB_IMAGE_PICKLE_H

#include "image/image.h"

enum pickle_opcode {
        PICKLE_MARK = '(',
        PICKLE_TUPLE = 't',
        PICKLE_EMPTY_TUPLE = ')',
        PICKLE_BINUNICODE = 'X',
        PICKLE_BININT1 = 'K',
        PICKLE_BININT2 = 'M',
        PICKLE_BININT = 'J',
        PICKLE_LONG1 = 0x8a,
        PICKLE_NEWFALSE = 0x89,
        PICKLE_BINPERSID = 'Q',
        PICKLE_REDUCE = 'R',
};

#define PICKLE_BEGIN "\x80\x02}("  /* protocol 2, an empty dict, and a mark; the items follow */
#define PICKLE_FINISH "u."         /* puts the items into the dict, and stops */
#define PICKLE_REBUILD "ctorch._utils\n_rebuild_tensor_v2\n"
#define PICKLE_TORCH "ctorch\n"
#define PICKLE_HOOKS "ccollections\nOrderedDict\n)R" /* OrderedDict() */

struct pickle_dtype {
        const char *storage; /* the name of torch's class */
        uint32_t item_bytes;
};
#define PICKLE_DTYPE_COUNT (NEBULA_DTYPE_BOOL + 1u)
extern const struct pickle_dtype pickle_dtypes[PICKLE_DTYPE_COUNT];

/* Strides of a dense array in row-major order, as torch counts them: in items; an extent of 0 counts as 1. */
void pickle_strides(const struct nebula_tensor *tensor, uint64_t ret_strides[NEBULA_DIM_MAX]);

#endif
