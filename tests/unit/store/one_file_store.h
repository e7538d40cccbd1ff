/* one_file_store.h - for tests of the file driver alone: a store below a directory in which a test acts as another program. */
#ifndef NB_TESTS_UNIT_STORE_ONE_FILE_STORE_H
#define NB_TESTS_UNIT_STORE_ONE_FILE_STORE_H

#include "kinds.h"
#include "os/os.h"

static char dir[256]; /* the root is dir/root */

/* The root does not exist yet. */
static inline void open_file(void)
{
        test_dir_make(dir);
        snprintf(kind_root, sizeof kind_root, "%s/root", dir);
        store = again_file();
        features = STORE_PATHS; /* only for keys; not probed, because tests do that themselves */
}

static inline void close_file(void)
{
        store_close(store);
        test_dir_remove(dir);
}

static inline enum nebula_status set(const char *key, const char *text)
{
        return put(key, text, STORE_ALWAYS);
}

static inline enum nebula_status create(const char *key, const char *text)
{
        return put(key, text, STORE_IF_ABSENT);
}

/* In `dir`. */
static inline void run_shell(const char *command)
{
        char text[1000];

        snprintf(text, sizeof text, "cd %s && %s", dir, command);
        if (system(text))
                printf("# failed: %s\n", text);
}

#endif
