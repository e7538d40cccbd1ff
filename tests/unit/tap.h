/*
 * tap.h - the test harness: CHECK, REQUIRE, SKIP, SKIP_ALL and a main that runs named tests. A
 * test program prints TAP. The name of each test function is the promise that it
 * tests.
 */
#ifndef NB_TESTS_TAP_H
#define NB_TESTS_TAP_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int tap_failed_checks;
static const char *tap_skipped; /* why this test does not run here */

#define CHECK(condition) \
        do { \
                if (!(condition)) { \
                        printf("# %s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
                        tap_failed_checks++; \
                } \
        } while (0)
/* Stops this test at once: the rest would crash without it. */
#define REQUIRE(condition) \
        do { \
                if (!(condition)) { \
                        printf("# %s:%d: REQUIRE(%s)\n", __FILE__, __LINE__, #condition); \
                        tap_failed_checks++; \
                        return; \
                } \
        } while (0)

/* Ends this test: it makes no sense here. TAP tells why. */
#define SKIP(why) \
        do { \
                tap_skipped = (why); \
                return; \
        } while (0)

struct tap_test {
        const char *name;
        void (*run)(void);
};
#define TEST(function) { #function, function }

static inline int tap_run(const struct tap_test *tests, size_t count)
{
        size_t failed = 0;

        setvbuf(stdout, NULL, _IOLBF, 0);
        printf("1..%zu\n", count);
        for (size_t i = 0; i < count; i++) {
                tap_failed_checks = 0;
                tap_skipped = NULL;
                tests[i].run();
                if (tap_failed_checks)
                        failed++;
                printf("%s %zu - %s%s%s\n", tap_failed_checks ? "not ok" : "ok", i + 1, tests[i].name, tap_skipped ? " # SKIP " : "",
                       tap_skipped ? tap_skipped : "");
        }
        return failed ? 1 : 0;
}
#define TAP_MAIN(...) \
        int main(void) \
        { \
                static const struct tap_test tests[] = { __VA_ARGS__ }; \
                return tap_run(tests, sizeof tests / sizeof tests[0]); \
        }

#endif
