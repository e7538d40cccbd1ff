/*
 * torch_pickle.h - finds the tensors in a file of torch.save, with their names.
 *
 *      torch_tensors_find    reads the pickle and the directory of an image
 *      torch_tensors_pick    gives one of them the form of nebula.h
 *      torch_tensors_done
 *
 * A machine reads the pickle. It builds only values that can lead to tensors: dicts, lists, tuples, texts and numbers. It knows how torch
 * rebuilds tensors, parameters and ordered dicts. Of any other object it follows only the state and the arguments. No code of the file
 * runs, and none of its classes is needed.
 *
 * A name joins the keys on the path to the tensor with '.' ("model.0.weight", "optimizer.state.3.exp_avg"). It is UTF-8, with '?' for
 * other bytes, so two tensors can have one name. A tensor that the file has under two names is listed twice.
 *
 * Hostile bytes: sizes, depth, the number of values and of tensors are bounded, and each tensor's elements lie inside its record.
 * NEBULA_INVALID: a pickle of another kind, or beyond these bounds. NEBULA_CORRUPT: it is cut off or contradicts itself.
 *
 * Only the directory, the headers of the records and data.pkl are read; payloads are not touched.
 *
 * Threads: no shared state.
 */
#ifndef NB_IMAGE_TORCH_PICKLE_H
#define NB_IMAGE_TORCH_PICKLE_H

#include "image/image.h"

#define TORCH_DIM_MAX 64u
#define TORCH_KEY_MAX 1000u /* bytes of a key that count in a name */

enum torch_dtype {
        TORCH_F64, TORCH_F32, TORCH_F16, TORCH_BF16, TORCH_F8_E4M3, TORCH_F8_E5M2, TORCH_I64, TORCH_I32, TORCH_I16, TORCH_I8, TORCH_U64, TORCH_U32,
        TORCH_U16, TORCH_U8, TORCH_BOOL, TORCH_C64, TORCH_C128, TORCH_DTYPE_COUNT,
};
const char *torch_dtype_name(enum torch_dtype dtype); /* "float32" */
size_t torch_dtype_size(enum torch_dtype dtype);      /* bytes of an element */

struct torch_tensor {
        char *name;
        enum torch_dtype dtype;
        uint32_t dim_count;
        uint64_t *shape;   /* dim_count of them */
        int64_t *strides;  /* elements; never below 0 */
        uint64_t elements;
        uint64_t offset;   /* of the first element, in the image; the bytes of the storage begin at `storage_offset` */
        uint64_t storage_offset, storage_size;
        bool is_contiguous; /* the elements are adjacent, in the order of their indices */
};
struct torch_tensors {
        struct torch_tensor *list; /* in the order of the pickle */
        size_t count;
        uint64_t pickle_offset, pickle_size;
};
enum nebula_status torch_tensors_find(const void *data, uint64_t size, struct torch_tensors *ret_tensors, struct nebula_error *error);
/* The same with the entries that zip_read has returned. */
enum nebula_status torch_tensors_find_in(const void *data, const struct zip_entry *entries, size_t count, struct torch_tensors *ret_tensors,
                                         struct nebula_error *error);
/* The tensor of that name, whose data lie in `data`, the image. ret_tensor->name is `name`. NEBULA_NOT_FOUND: there is none. NEBULA_INVALID: two
 * have that name, or struct nebula_tensor cannot describe it. */
enum nebula_status torch_tensors_pick(const struct torch_tensors *tensors, const void *data, const char *name, struct nebula_tensor *ret_tensor,
                                      struct nebula_error *error);
void torch_tensors_done(struct torch_tensors *tensors);

#endif
