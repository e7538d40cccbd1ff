/* Reads hostile bytes as a file of torch.save: every element of each listed tensor can be read, and of those that nebula.h describes each byte. */
#include <stdlib.h>

#include "image/torch_pickle.h"
#include "sum/sum.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define PICKED_MAX 16u /* a look at each name for each tensor takes long if there are many */

static volatile uint8_t sink;

static uint64_t last_element(const struct torch_tensor *tensor)
{
        uint64_t at = tensor->offset;

        for (uint32_t i = 0; i < tensor->dim_count; i++)
                at += (tensor->shape[i] - 1) * (uint64_t)tensor->strides[i] * torch_dtype_size(tensor->dtype);
        return at;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
        struct torch_tensors tensors;

        if (torch_tensors_find(data, size, &tensors, NULL))
                return 0;
        for (size_t i = 0; i < tensors.count; i++) {
                const struct torch_tensor *tensor = &tensors.list[i];
                struct nebula_tensor picked;

                if (!tensor->name)
                        abort();
                if (i < PICKED_MAX && !torch_tensors_pick(&tensors, data, tensor->name, &picked, NULL))
                        sink = (uint8_t)sum_crc32(0, picked.data, pickle_tensor_size(&picked));
                if (tensor->elements)
                        sink = (uint8_t)(data[tensor->offset] + data[last_element(tensor) + torch_dtype_size(tensor->dtype) - 1]);
                if (tensor->storage_size)
                        sink = (uint8_t)(data[tensor->storage_offset] + data[tensor->storage_offset + tensor->storage_size - 1]);
        }
        torch_tensors_done(&tensors);
        return 0;
}
