/*
 * fake_driver.c - the functions of NVIDIA's driver that the package calls, for machines without one: libcuda.so.1 of a test.
 *
 * Device addresses are addresses of this process. Copies are done at once. The stream is the way to count calls and to ask for errors:
 * struct fake_stream.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define NOT_SUPPORTED 801

struct fake_stream {
        uint64_t lists, singles; /* calls that succeeded */
        uint64_t refuses_lists;  /* 1: the driver knows no lists of copies */
        uint64_t error;          /* of each call; 0: none */
};
struct attributes {
        int order, source_type, source_id, target_type, target_id;
        unsigned flags;
};

static int copy(uint64_t to, uint64_t from, size_t size, struct fake_stream *stream)
{
        if (stream->error)
                return (int)stream->error;
        memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, size);
        return 0;
}

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, struct fake_stream *stream);
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, struct fake_stream *stream)
{
        stream->singles++;
        return copy((uint64_t)(uintptr_t)to, from, size, stream);
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, struct fake_stream *stream);
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, struct fake_stream *stream)
{
        stream->singles++;
        return copy(to, (uint64_t)(uintptr_t)from, size, stream);
}

int cuMemcpyBatchAsync_v2(uint64_t *to, uint64_t *from, size_t *sizes, size_t count, struct attributes *attributes, size_t *starts,
                          size_t attribute_count, struct fake_stream *stream);
int cuMemcpyBatchAsync_v2(uint64_t *to, uint64_t *from, size_t *sizes, size_t count, struct attributes *attributes, size_t *starts,
                          size_t attribute_count, struct fake_stream *stream)
{
        int error = stream->refuses_lists ? NOT_SUPPORTED : 0;

        if (!error && (attribute_count != 1 || starts[0] != 0 || attributes->order != 1))
                error = 1;
        for (size_t i = 0; !error && i < count; i++)
                error = copy(to[i], from[i], sizes[i], stream);
        stream->lists += !error;
        return error;
}

int cuGetErrorString(int error, const char **ret_text);
int cuGetErrorString(int error, const char **ret_text)
{
        *ret_text = error == 2 ? "out of memory" : "some error";
        return 0;
}
