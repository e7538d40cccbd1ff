/* golden.h - documents for tests: those of tests/golden, and texts that a test seals. */
#ifndef NB_TESTS_UNIT_STORE_GOLDEN_H
#define NB_TESTS_UNIT_STORE_GOLDEN_H

#include <inttypes.h>

#include "store/document.h"
#include "sum/sum.h"
#include "tap.h"

#define WRITING "w0123456789abcdef-1-0badcafe"

/* Names of writings that no document may contain. */
static const char *const unsound_writings[] = {
                "", "w", "../w", "w0123456789abcdef-1-0badcafe/..", "w0123456789abcdef-1-0badcafe/x", "w0123456789abcdef/1-0badcafe",
                "w0123456789ABCDEF-1-0badcafe", "w0123456789abcde-1-0badcafe", "w0123456789abcdef--0badcafe", "w0123456789abcdef-1-0badcaf",
                "w0123456789abcdef-1-0badcafe0", "w0123456789abcdef-99999999999999999999-0badcafe", "x0123456789abcdef-1-0badcafe",
                "w0123456789abcdef-+1-0badcafe", " w0123456789abcdef-1-0badcafe",
        };

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

typedef enum nebula_status parser(const char *text, size_t size, struct nebula_error *error);

/* The status of reading `body` after it was sealed. */
static inline enum nebula_status parse_sealed(parser *parse, const char *body)
{
        size_t size;
        char *text = seal(body, &size);
        enum nebula_status status = parse(text, size, NULL);

        free(text);
        return status;
}

/* Checks that every flipped bit and every cut of a golden document is found. */
static inline void check_damage(parser *parse, const char *name)
{
        size_t size;
        char *text = golden(name, &size);

        for (size_t bit = 0; bit < size * 8; bit++) {
                text[bit / 8] = (char)(text[bit / 8] ^ 1 << bit % 8);
                CHECK(parse(text, size, NULL) == NEBULA_CORRUPT);
                text[bit / 8] = (char)(text[bit / 8] ^ 1 << bit % 8);
        }
        for (size_t cut = 0; cut < size; cut++)
                CHECK(parse(text, cut, NULL) == NEBULA_CORRUPT);
        CHECK(parse(text, size, NULL) == NEBULA_OK);
        free(text);
}

#endif
