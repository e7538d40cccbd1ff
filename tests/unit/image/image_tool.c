/*
 * image_tool.c - writes and looks at images for tests/python/test_image.py.
 *
 *      image_tool write FILE NAME:DTYPE:DIMxDIM... ...   tensors; byte k of each payload is k * 7 mod 251
 *      image_tool sparse FILE NAME:DTYPE:DIMxDIM... ...  the same, payloads left as holes, not sealed
 *      image_tool verify FILE
 *      image_tool find FILE NAME                         prints dtype, shape and the CRC-32 of the payload
 *      image_tool sum FILE                               CRC-32 and CRC-64 of the whole file
 *      image_tool chunks FILE CHUNK_BYTES                seals FILE in place as it was, prints a CRC-64 per chunk
 *
 * DTYPE is the number in enum nebula_dtype; a scalar has nothing behind its second colon.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "image/torch_pickle.h"
#include "sum/sum.h"

static void die(const char *what, const struct nebula_error *error)
{
        fprintf(stderr, "%s: %s\n", what, error ? error->message : "failed");
        exit(1);
}

static void parse_tensor(char *text, struct nebula_tensor *tensor)
{
        char *dtype = strchr(text, ':'), *at = dtype ? strchr(dtype + 1, ':') : NULL;

        if (!at)
                die(text, NULL);
        *dtype++ = '\0';
        tensor->name = text;
        tensor->dtype = (enum nebula_dtype)atoi(dtype);
        for (at++; *at && tensor->dim_count < NEBULA_DIM_MAX; at += *at == 'x')
                tensor->shape[tensor->dim_count++] = strtoull(at, &at, 10);
}

static uint8_t *map_file(const char *path, uint64_t create_size, uint64_t *ret_size)
{
        int fd = open(path, create_size ? O_RDWR | O_CREAT | O_TRUNC : O_RDWR, 0644);
        struct stat stat;
        uint8_t *data;

        if (fd < 0 || (create_size && ftruncate(fd, (off_t)create_size)) || fstat(fd, &stat)) {
                perror(path);
                exit(1);
        }
        data = mmap(NULL, (size_t)stat.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (data == MAP_FAILED) {
                perror(path);
                exit(1);
        }
        *ret_size = (uint64_t)stat.st_size;
        return data;
}

static void fill(uint8_t *payload, uint64_t size, enum nebula_dtype dtype)
{
        for (uint64_t k = 0; k < size; k++)
                payload[k] = (uint8_t)(k * 7 % 251 & (dtype == NEBULA_DTYPE_BOOL ? 1 : 255));
}

static void write_image(const char *path, char **texts, size_t count, bool sparse)
{
        struct nebula_tensor *tensors = calloc(count + 1, sizeof *tensors);
        uint64_t *sizes = calloc(count + 1, sizeof *sizes), *chunks, size;
        struct nebula_error error;
        struct zip_layout layout;
        size_t pickle_size, chunk_count;
        char *pickle;
        uint8_t *image;

        if (!tensors || !sizes)
                die("memory", NULL);
        for (size_t k = 0; k < count; k++) {
                parse_tensor(texts[k], &tensors[k]);
                sizes[k] = pickle_tensor_size(&tensors[k]);
        }
        if (pickle_flat_dict(tensors, count, &pickle, &pickle_size, &error) ||
            zip_layout_init(&layout, pickle_size, sizes, count, &error))
                die(path, &error);
        image = map_file(path, layout.size, &size);
        zip_layout_write(&layout, pickle, image);
        for (size_t k = 0; k < count && !sparse; k++)
                fill(image + layout.storage_offsets[k], sizes[k], tensors[k].dtype);
        if (!sparse) {
                if (image_seal(image, size, true, IMAGE_CHUNK_BYTES, &chunks, &chunk_count, &error))
                        die(path, &error);
                free(chunks);
        }
        munmap(image, (size_t)size);
        zip_layout_done(&layout);
        free(pickle);
        free(sizes);
        free(tensors);
}

static void print_tensor(const uint8_t *image, uint64_t size, const char *name)
{
        struct torch_tensors tensors;
        struct nebula_tensor tensor;
        struct nebula_error error;

        if (torch_tensors_find(image, size, &tensors, &error) || torch_tensors_pick(&tensors, image, name, &tensor, &error))
                die(name, &error);
        printf("%d", (int)tensor.dtype);
        for (uint32_t k = 0; k < tensor.dim_count; k++)
                printf(" %" PRIu64, tensor.shape[k]);
        printf(" : %08" PRIx32 "\n", sum_crc32(0, tensor.data, (size_t)pickle_tensor_size(&tensor)));
        torch_tensors_done(&tensors);
}

static void print_chunks(uint8_t *image, uint64_t size, uint32_t chunk_bytes)
{
        struct nebula_error error;
        uint64_t *chunks;
        size_t count;

        if (image_seal(image, size, true, chunk_bytes, &chunks, &count, &error))
                die("seal", &error);
        for (size_t k = 0; k < count; k++)
                printf("%016" PRIx64 "\n", chunks[k]);
        free(chunks);
}

int main(int argc, char **argv)
{
        struct nebula_error error;
        uint64_t size;
        uint8_t *image;

        if (argc < 3)
                return 2;
        if (strcmp(argv[1], "write") == 0 || strcmp(argv[1], "sparse") == 0) {
                write_image(argv[2], argv + 3, (size_t)argc - 3, strcmp(argv[1], "sparse") == 0);
                return 0;
        }
        image = map_file(argv[2], 0, &size);
        if (strcmp(argv[1], "verify") == 0) {
                if (zip_verify(image, size, &error))
                        die(argv[2], &error);
        } else if (strcmp(argv[1], "find") == 0 && argc == 4) {
                print_tensor(image, size, argv[3]);
        } else if (strcmp(argv[1], "sum") == 0) {
                printf("%08" PRIx32 " %016" PRIx64 "\n", sum_crc32(0, image, (size_t)size), sum_crc64(0, image, (size_t)size));
        } else if (strcmp(argv[1], "chunks") == 0 && argc == 4) {
                print_chunks(image, size, (uint32_t)strtoul(argv[3], NULL, 10));
        } else {
                return 2;
        }
        munmap(image, (size_t)size);
        return 0;
}
