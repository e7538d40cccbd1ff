/*
 * agent_storage.h - the storage of a test: a directory, or objects of the driver `mem` if NEBULA_TEST_STORE is "mem". The tests that
 * meson.build lists as storage tests run with both. A test that needs files declares NEEDS_FILES, and is skipped on mem.
 *
 * A mem:// URL names the same objects for every agent of the process, as long as the process lives. So agents that share a URL must
 * run in one process.
 */
#ifndef NB_TESTS_AGENT_STORAGE_H
#define NB_TESTS_AGENT_STORAGE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "os/os.h"
#include "store/store_mem.h"
#include "tap.h"
#include "test_dir.h"

static inline bool storage_is_mem(void)
{
        const char *name = getenv("NEBULA_TEST_STORE");

        return name && !strcmp(name, "mem");
}

#define NEEDS_FILES(why) \
        do { \
                if (storage_is_mem()) \
                        SKIP("needs files: " why); \
        } while (0)

/* Names the storage of a test whose other files are in the directory `root`. */
static inline void storage_beside(const char *root, char *ret_path, size_t size)
{
        store_mem_allow();
        snprintf(ret_path, size, storage_is_mem() ? "mem://%s" : "%s/storage", storage_is_mem() ? strrchr(root, '/') + 1 : root);
}

/* Makes an empty storage. Remove it with storage_remove. */
static inline void storage_make(char ret_path[256])
{
        static unsigned count;

        store_mem_allow();
        if (storage_is_mem())
                snprintf(ret_path, 256, "mem://test-%u", count++);
        else
                test_dir_make_quick(ret_path);
}

static inline void storage_remove(const char *path)
{
        if (storage_is_mem())
                store_mem_forget(path);
        else
                test_dir_remove(path);
}

static inline struct store *storage_look(const char *path)
{
        struct store *store;

        if (store_open(path, &store, NULL))
                abort();
        return store;
}

/* Lists all objects whose keys begin with `prefix`. */
static inline struct store_list storage_list(const char *path, const char *prefix)
{
        struct store *store = storage_look(path);
        struct store_list list = { 0 };

        if (store_list_all(store, prefix, true, &list, NULL))
                abort();
        store_close(store);
        return list;
}

/* Counts the objects whose keys begin with `prefix` and have `part` after it. *ret_key: the key of the last one; it may be NULL. */
static inline size_t storage_count(const char *path, const char *prefix, const char *part, char ret_key[512])
{
        struct store_list list = storage_list(path, prefix);
        size_t count = 0;

        for (size_t i = 0; i < list.count; i++) {
                if (!strstr(list.entries[i].key + strlen(prefix), part))
                        continue;
                count++;
                if (ret_key)
                        snprintf(ret_key, 512, "%s", list.entries[i].key);
        }
        store_list_done(&list);
        return count;
}

static inline bool storage_has(const char *path, const char *key)
{
        struct store *store = storage_look(path);
        struct store_entry entry = { 0 };
        bool result = !store->ops->stat(store, key, &entry, NULL);

        store_entry_done(&entry);
        store_close(store);
        return result;
}

/* NULL: the object does not exist. */
static inline char *storage_read(const char *path, const char *key, size_t *ret_size)
{
        struct store *store = storage_look(path);
        char *text = NULL;

        if (store->ops->get(store, key, 64u << 20, &text, ret_size, NULL, NULL))
                text = NULL;
        store_close(store);
        return text;
}

/* Replaces an object, as another program does. */
static inline void storage_write(const char *path, const char *key, const void *data, size_t size)
{
        struct store *store = storage_look(path);

        if (store->ops->put(store, key, data, size, STORE_ALWAYS, NULL, NULL, NULL))
                abort();
        store_close(store);
}

/* Changes bytes in the middle of an object. */
static inline void storage_damage(const char *path, const char *key, size_t offset)
{
        size_t size;
        char *data = storage_read(path, key, &size);

        if (!data || offset >= size)
                abort();
        data[offset] ^= 0x5a;
        storage_write(path, key, data, size);
        free(data);
}

static inline void storage_take_away(const char *path, const char *key)
{
        struct store *store = storage_look(path);

        if (store_remove_one(store, key, NULL))
                abort();
        store_close(store);
}

/* Makes every operation fail from now on. The path must be empty, and is empty again after storage_unblock. */
static inline void storage_block(const char *path)
{
        if (storage_is_mem()) {
                struct mem_faults faults = { .fail_at = 1, .goes_on = true };
                struct store *store = storage_look(path);

                store_mem_faults(store, &faults);
                store_close(store);
        } else {
                int fd = os->open(path, OS_WRITE | OS_CREATE | OS_SHARED); /* a file where the directory should be */

                if (fd < 0 || os->close(fd))
                        abort();
        }
}

static inline void storage_unblock(const char *path)
{
        if (storage_is_mem()) {
                struct store *store = storage_look(path);

                store_mem_faults(store, NULL);
                store_close(store);
        } else if (os->unlink(path)) {
                abort();
        }
}

#endif
