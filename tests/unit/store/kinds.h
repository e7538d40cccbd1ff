/*
 * kinds.h - opens an empty store of each kind. The including tests run each promise of store.h on every kind. A new driver needs a
 * line in `kinds`.
 */
#ifndef NB_TESTS_UNIT_STORE_KINDS_H
#define NB_TESTS_UNIT_STORE_KINDS_H

#include "store/store_mem.h"
#include "tap.h"
#include "test_dir.h"

static struct nebula_error error; /* of the call before */
static struct store *store;       /* empty when a promise begins */
static unsigned features;

/* `again`: another store of the same objects. `end`: called after all of them were closed. */
struct kind {
        const char *name;
        struct store *(*begin)(void);
        struct store *(*again)(void);
        void (*end)(void);
};

static char kind_dir[256], kind_root[300];

static inline struct store *open_kind(const char *url)
{
        struct store *opened;

        if (store_open(url, &opened, &error)) {
                printf("# %s\n", error.message);
                abort();
        }
        return opened;
}

static inline struct store *again_file(void)
{
        return open_kind(kind_root);
}

/* The root does not exist. */
static inline struct store *begin_file(void)
{
        test_dir_make_quick(kind_dir);
        snprintf(kind_root, sizeof kind_root, "%s/some/root", kind_dir);
        return again_file();
}

static inline void end_file(void)
{
        test_dir_remove(kind_dir);
}

static inline struct store *again_mem(void)
{
        return open_kind("mem://kind");
}

static inline struct store *begin_mem_with(const struct mem_faults *faults)
{
        struct store *opened;

        store_mem_allow();
        store_mem_forget("mem://kind");
        opened = again_mem();
        store_mem_faults(opened, faults);
        return opened;
}

static inline struct store *begin_mem(void)
{
        return begin_mem_with(NULL);
}

static inline struct store *begin_mem_with_pages_of_one(void)
{
        return begin_mem_with(&(struct mem_faults){ .page_entries = 1 });
}

static inline struct store *begin_slow_mem(void)
{
        return begin_mem_with(&(struct mem_faults){ .latency_ms = 1, .page_entries = 100 });
}

static inline struct store *begin_stale_mem(void)
{
        return begin_mem_with(&(struct mem_faults){ .stale_writes = 2 });
}

static inline void end_mem(void)
{
        store_mem_forget("mem://kind");
}

/* Below a mount of tests/servers/nfs_fuse.c. */
static inline struct store *begin_nfs(void)
{
        static int count;

        snprintf(kind_root, sizeof kind_root, "%s/root%d", getenv("NB_TEST_MOUNT"), count++);
        return again_file();
}

static inline void end_nfs(void)
{
}

#ifdef NB_TEST_NFS
static const struct kind kinds[] = { { "file on NFS", begin_nfs, again_file, end_nfs } };
#elif defined NB_TEST_AZURE
#include "store/azure/kinds_azure.h"
static const struct kind kinds[] = { KINDS_AZURE };
#elif defined NB_TEST_S3
#include "store/s3/kinds_s3.h"
static const struct kind kinds[] = { KINDS_S3 };
#elif defined NB_TEST_GS
#include "store/gs/kinds_gs.h"
static const struct kind kinds[] = { KINDS_GS };
#elif defined NB_TEST_ADLS
#include "store/adls/kinds_adls.h"
static const struct kind kinds[] = { KINDS_ADLS };
#elif defined NB_TEST_SEVERAL
#include "store/several/kinds_several.h"
static const struct kind kinds[] = { KINDS_SEVERAL };
#else
static const struct kind kinds[] = {
        { "file", begin_file, again_file, end_file },
        { "mem", begin_mem, again_mem, end_mem },
        { "mem with pages of one entry", begin_mem_with_pages_of_one, again_mem, end_mem },
        { "slow mem", begin_slow_mem, again_mem, end_mem },
        { "mem with stale lists", begin_stale_mem, again_mem, end_mem },
};
#endif
static const struct kind *kind;

/* A server of the tests takes a hundred times as long for a request as a driver's code does. */
static inline int repeats(int times)
{
#if defined NB_TEST_AZURE || defined NB_TEST_S3 || defined NB_TEST_GS || defined NB_TEST_ADLS || defined NB_TEST_SEVERAL
        return getenv("NEBULA_TEST_NIGHTLY") ? times : times / 4;
#else
        return times;
#endif
}

static inline void each(void (*promise)(void))
{
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
                int failed = tap_failed_checks;

                kind = &kinds[i];
                store = kind->begin();
                features = store->ops->features(store);
                promise();
                store_close(store);
                kind->end();
                if (tap_failed_checks > failed)
                        printf("# of %s: %s\n", kind->name, error.message);
        }
}

static inline enum nebula_status put(const char *key, const char *text, enum store_condition condition)
{
        return store_put_text(store, key, text, condition, &error);
}

/* The text of an object; "-": absent; "!": any other failure. */
static inline const char *get(const char *key)
{
        static char text[4096];
        enum nebula_status status;
        size_t size;
        char *data;

        status = store->ops->get(store, key, sizeof text - 1, &data, &size, NULL, &error);
        if (status)
                return status == NEBULA_NOT_FOUND ? "-" : "!";
        memcpy(text, data, size + 1);
        free(data);
        return text;
}

/* "" if the object is absent. */
static inline struct store_stamp stamp_of(const char *key)
{
        struct store_entry entry = { 0 };
        struct store_stamp stamp;

        store->ops->stat(store, key, &entry, &error);
        stamp = entry.stamp;
        store_entry_done(&entry);
        return stamp;
}

/* If objects are files, an empty directory is a folded entry. */
static inline bool is_empty_directory(const struct store_entry *entry)
{
        char prefix[300];
        struct store_list list;
        bool is_empty;

        if (!entry->is_prefix || !(features & STORE_PATHS))
                return false;
        snprintf(prefix, sizeof prefix, "%s/", entry->key);
        if (store_list_all(store, prefix, true, &list, &error))
                return false;
        is_empty = !list.count;
        store_list_done(&list);
        return is_empty;
}

/* The keys of a list, each followed by a blank; a folded one ends with '/'. "!": the list failed. */
static inline const char *keys(const char *prefix, bool deep)
{
        static char text[65536];
        struct store_list list;
        size_t used = 0;

        if (store_list_all(store, prefix, deep, &list, &error))
                return "!";
        text[0] = 0;
        for (size_t i = 0; i < list.count; i++)
                if (!is_empty_directory(&list.entries[i]))
                        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s ", list.entries[i].key, list.entries[i].is_prefix ? "/" : "");
        store_list_done(&list);
        return text;
}

#endif
