/*
 * golden.h - documents for tests: those of tests/golden, and texts that a test seals itself.
 */
#ifndef NB_TESTS_UNIT_STORE_GOLDEN_H
#define NB_TESTS_UNIT_STORE_GOLDEN_H

#include <inttypes.h>

#include "store/document.h"
#include "sum/sum.h"
#include "tap.h"

/* The caller frees it. */
static inline char *golden(const char *name, size_t *ret_size)
{
        char path[1024];
        const char *slash = strrchr(__FILE__, '/');
        FILE *file;
        char *text;

        /* __FILE__ is relative to the build directory, where meson runs tests; by hand it may be the source's root. */
        snprintf(path, sizeof path, "%.*s/../../golden/%s", (int)(slash - __FILE__), __FILE__, name);
        file = fopen(path, "rb");
        if (!file && !strncmp(path, "../", 3))
                file = fopen(path + 3, "rb");
        text = calloc(1, 65536);
        if (!file || !text) {
                printf("Bail out! there is no %s\n", path);
                abort();
        }
        *ret_size = fread(text, 1, 65535, file);
        fclose(file);
        return text;
}

/* The text of `body`, a JSON object without its closing brace, with its seal. */
static inline char *seal(const char *body, size_t *ret_size)
{
        size_t size = strlen(body);
        char *text = malloc(size + 64);

        memcpy(text, body, size);
        *ret_size = size + (size_t)sprintf(text + size, ",\"crc64\":\"%016" PRIx64 "\"}\n", sum_crc64(0, body, size));
        return text;
}

#endif
