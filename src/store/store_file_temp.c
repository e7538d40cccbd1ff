/* Temporary files: an object is written to one before it gets its key. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "store/store_file_private.h"

#define TEMP_DIRECTORY ".nebula" /* as in STORE_TEMP_BELOW */
#define NAME_TRIES 100

void file_temp_parent(const char *key, char ret_directory[STORE_KEY_MAX])
{
        size_t tag_length = strcspn(key, "/");

        ret_directory[0] = 0;
        if (key[tag_length])
                snprintf(ret_directory, STORE_KEY_MAX, "%.*s/" TEMP_DIRECTORY, (int)tag_length, key);
}

void file_temp_name(struct store *store, const char *parent, char ret_temp[FILE_TEMP_MAX])
{
        struct file_store *file = (struct file_store *)store;

        snprintf(ret_temp, FILE_TEMP_MAX, "%s%s%u-%u", parent, *parent ? "/tmp-" : STORE_TEMP_TOP, os->pid(), atomic_fetch_add(&file->temp_count, 1));
}

/* `source`: the key of the file to link; NULL: makes a new file. */
static int make_new(struct store *store, const char *parent, const char *source, int flags, char ret_temp[FILE_TEMP_MAX])
{
        int result = -EEXIST;

        for (int i = 0; i < NAME_TRIES && (result == -EEXIST || result == -EINTR); i++) {
                file_temp_name(store, parent, ret_temp);
                result = source ? os->link_below(store->root, source, store->root, ret_temp)
                                : os->open_below(store->root, ret_temp, flags | OS_WRITE | OS_CREATE | OS_EXCLUSIVE | OS_NOFOLLOW | OS_SHARED);
        }
        return result;
}

/* Retries: a removal, here or on another node, may remove empty directories that this store remembers. */
static int make_with_parents(struct store *store, const char *key, const char *source, int flags, char ret_temp[FILE_TEMP_MAX])
{
        struct file_dirs *dirs = ((struct file_store *)store)->dirs;
        char parent[STORE_KEY_MAX], temp_parent[STORE_KEY_MAX];
        int result = -ENOENT;

        file_parent(key, parent);
        file_temp_parent(key, temp_parent);
        for (int i = 0; i < FILE_TRIES && result == -ENOENT; i++) {
                if (i)
                        file_dirs_forget(dirs);
                result = file_dirs_ensure(dirs, store->root, temp_parent);
                if (!result)
                        result = file_dirs_ensure(dirs, store->root, parent);
                if (!result)
                        result = make_new(store, temp_parent, source, flags, ret_temp);
        }
        return result;
}

int file_temp_open(struct store *store, const char *key, int flags, char ret_temp[FILE_TEMP_MAX])
{
        return make_with_parents(store, key, NULL, flags, ret_temp);
}

int file_temp_link(struct store *store, const char *key, const char *source, char ret_temp[FILE_TEMP_MAX])
{
        return make_with_parents(store, key, source, 0, ret_temp);
}

int file_temp_close(struct store *store, int fd, struct os_stat *ret_made)
{
        int result = os_sync(fd), closed;

        if (!result)
                result = os->fstat(fd, ret_made);
        if (!result)
                atomic_store(&((struct file_store *)store)->given_uid, ret_made->uid + UINT64_C(1));
        closed = os->close(fd);
        return result ? result : closed;
}
