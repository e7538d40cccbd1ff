/* test_dir.h - a directory for one test, below $TMPDIR or /tmp. */
#ifndef NB_TESTS_TEST_DIR_H
#define NB_TESTS_TEST_DIR_H

#include <stdio.h>
#include <stdlib.h>

#include "os/os.h"

/* Made anew; remove it with test_dir_remove. */
static inline void test_dir_make(char ret_path[256])
{
        const char *base = getenv("TMPDIR");

        snprintf(ret_path, 256, "%s/nebula-test-XXXXXX", base && *base == '/' ? base : "/tmp");
        if (!mkdtemp(ret_path))
                abort();
}

/* The same in memory where that is possible: for thousands of small states, which no disk has to see. */
static inline void test_dir_make_quick(char ret_path[256])
{
        snprintf(ret_path, 256, "/dev/shm/nebula-test-XXXXXX");
        if (!mkdtemp(ret_path))
                test_dir_make(ret_path);
}

static inline void test_dir_remove(const char *path)
{
        os_remove_tree(path);
}

#endif
