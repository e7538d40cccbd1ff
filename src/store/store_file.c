/* Storage in a directory: local disks and mounted file systems, NFS included. This driver does not need O_DIRECT, fallocate or fresh
 * listings. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "store/store_file_private.h"

enum nebula_status file_path(const struct store *store, const char *key, char ret_path[STORE_PATH_MAX],
                             struct nebula_error *error)
{
        if (*key && !store_key_sound(key))
                return error_set(error, NEBULA_INVALID, 0, "\"%.300s\" is not a key of a stored object", key);
        if (snprintf(ret_path, STORE_PATH_MAX, "%s%s%s", store->root, *key ? "/" : "", key) >= STORE_PATH_MAX)
                return error_set(error, NEBULA_INVALID, 0, "the path of \"%.200s\" in %.200s is too long", key, store->root);
        return NEBULA_OK;
}

enum nebula_status file_error(const struct store *store, const char *what, const char *path, int result,
                              struct nebula_error *error)
{
        char text[400];

        if (result == -ENOENT) {
                int root = file_dirs_look(((const struct file_store *)store)->dirs, store->root);

                result = root == -ENODEV || root == -ENOTDIR ? root : result;
        }
        /* A link's target is not part of the store, so it is not read. A write can succeed after the user has moved the link away. */
        if (result == -ELOOP && (!strcmp(what, "read") || !strcmp(what, "find")))
                return error_set(error, NEBULA_CORRUPT, ELOOP,
                                 "can't %s %.300s: a part of it is a symbolic link, and Nebula follows none below %.300s: replace the link by its target",
                                 what, path, store->root);
        if (result == -ELOOP && !strcmp(what, "list") && file_obstacle(path, result, text, sizeof text))
                return error_set(error, NEBULA_CORRUPT, ELOOP, "can't list %.200s: %s", path, text);
        if (result == -ENODEV)
                return error_set(error, NEBULA_STORAGE, ENODEV, "can't %s %s: %s is gone, and with it its file system",
                                 what, path, store->root);
        /* A missing object is explained only for a write: absence is a normal answer to the other operations. */
        if (error && (result != -ENOENT || !strcmp(what, "write")) && file_obstacle(path, result, text, sizeof text))
                return error_set(error, error_status_of_errno(-result), -result, "can't %s %.200s: %s", what, path, text);
        return error_set(error, error_status_of_errno(-result), -result, "can't %s %s", what, path);
}

void file_parent(const char *key, char ret_directory[STORE_KEY_MAX])
{
        const char *slash = strrchr(key, '/');
        size_t length = slash ? (size_t)(slash - key) : 0;

        memcpy(ret_directory, key, length);
        ret_directory[length] = 0;
}

bool file_same_parent(const char *one, const char *other)
{
        char first[STORE_KEY_MAX], second[STORE_KEY_MAX];

        file_parent(one, first);
        file_parent(other, second);
        return !strcmp(first, second);
}

static enum nebula_status file_open(const char *url, struct store **ret_store, struct nebula_error *error)
{
        const char *path = text_local_path(url);
        size_t length = strlen(path);
        struct file_store *file;
        uint32_t first = 0;

        if (path[0] != '/')
                return error_set(error, NEBULA_INVALID, 0, "the storage path \"%.400s\" is not absolute", url);
        while (length > 1 && path[length - 1] == '/')
                length--;
        if (length >= STORE_PATH_MAX - STORE_KEY_MAX)
                return error_set(error, NEBULA_INVALID, 0, "the storage path \"%.200s...\" is too long", url);
        file = calloc(1, sizeof *file);
        if (!file)
                goto no_memory;
        os_offer_ring();
        file->store.ops = &store_file;
        file->store.root = strndup(path, length);
        file->dirs = file_dirs_new(&file->store.mount_length);
        if (!file->store.root || !file->dirs)
                goto no_memory;
        /* Another node may have our pid and share this directory, so the first number is random. */
        os->random(&first, sizeof first);
        atomic_init(&file->temp_count, first);
        lock_init(&file->clock.lock, LOCK_STORE_CLOCK);
        *ret_store = &file->store;
        return NEBULA_OK;
no_memory:
        if (file) {
                file_dirs_free(file->dirs);
                free(file->store.root);
                free(file);
        }
        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open %.400s", url);
}

static void file_close(struct store *store)
{
        struct file_store *file = (struct file_store *)store;

        lock_done(&file->clock.lock);
        file_dirs_free(file->dirs);
        free(store->root);
        free(file);
}

/* f_type of file systems that lack a feature of the others: some clients cache directories, some have no hard links. */
static const struct {
        uint64_t type;
        unsigned lacks;
} lacking[] = {
        { 0x6969, STORE_LISTS_FRESH },                         /* NFS */
        { 0x517b, STORE_LISTS_FRESH | STORE_VIEW_IS_FREE },    /* SMB, and the next two */
        { 0xff534d42, STORE_LISTS_FRESH | STORE_VIEW_IS_FREE },
        { 0xfe534d42, STORE_LISTS_FRESH | STORE_VIEW_IS_FREE },
        { 0x65735546, STORE_LISTS_FRESH | STORE_VIEW_IS_FREE }, /* FUSE */
        { 0x01021997, STORE_LISTS_FRESH },                     /* 9P */
        { 0x5346414f, STORE_LISTS_FRESH | STORE_VIEW_IS_FREE }, /* AFS */
        { 0x4d44, STORE_VIEW_IS_FREE },                        /* FAT */
        { 0x2011bab0, STORE_VIEW_IS_FREE },                    /* exFAT */
};

/* f_type of file systems that can share blocks of part of a file. Some volumes were formatted without this ability: store_file_refer.c
 * tries. */
static const uint64_t sharing[] = {
        0x58465342, /* XFS */
        0x9123683e, /* btrfs */
        0xca451a4e, /* bcachefs */
        0x2fc12fc1, /* ZFS */
        0x7461636f, /* OCFS2 */
        0x794c7630, /* overlayfs: as the one below it */
        0x6969,     /* NFS 4.2: as the server's */
        0xfe534d42, /* SMB 3: as the server's */
};

/* The space at the nearest directory that exists: the first write makes the missing ones. */
static int space_at_root(const struct store *store, struct os_space *ret_space)
{
        char path[STORE_PATH_MAX];
        int result;

        snprintf(path, sizeof path, "%s", store->root);
        while ((result = os->space(path, ret_space)) == -ENOENT && path[1]) {
                char *slash = strrchr(path, '/');

                slash[slash == path] = 0;
        }
        return result;
}

/* Without access to the root, the store has none of the features that depend on it. */
static unsigned probe(const struct store *store)
{
        unsigned always = STORE_PATHS | STORE_LENDS_FD | STORE_OWNERS | STORE_COPIES, depends = STORE_LISTS_FRESH | STORE_VIEW_IS_FREE;
        struct os_space space;

        if (space_at_root(store, &space))
                return always;
        for (size_t i = 0; i < sizeof lacking / sizeof *lacking; i++)
                if (lacking[i].type == space.fs_type)
                        depends &= ~lacking[i].lacks;
        for (size_t i = 0; i < sizeof sharing / sizeof *sharing; i++)
                if (sharing[i] == space.fs_type)
                        depends |= STORE_REFERS;
        return always | depends;
}

static unsigned file_features(struct store *store)
{
        struct file_store *file = (struct file_store *)store;
        unsigned none = 0, features = atomic_load(&file->features);

        if (features)
                return features;
        features = probe(store);
        return atomic_compare_exchange_strong(&file->features, &none, features) ? features : none;
}

static enum nebula_status file_free_bytes(struct store *store, uint64_t *ret_bytes, struct nebula_error *error)
{
        struct os_space space;
        int result = space_at_root(store, &space);

        if (result)
                return file_error(store, "ask for the free space of", store->root, result, error);
        *ret_bytes = space.free_bytes;
        return NEBULA_OK;
}

const struct store_ops store_file = {
        .scheme = "file",
        .open = file_open,
        .close = file_close,
        .features = file_features,
        .put = file_put,
        .get = file_get,
        .upload = file_upload,
        .publish = file_publish,
        .abort = file_abort,
        .read = file_read,
        .read_bulk = file_read_bulk,
        .open_read = file_open_read,
        .list = file_list,
        .stat = file_stat,
        .remove = file_remove,
        .clock = file_clock,
        .copy = file_copy,
        .free_bytes = file_free_bytes,
};
