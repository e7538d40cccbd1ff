/* Lists: reads directories in the order of their keys, one page at a time. A page reads the directories above its first key again, but
 * nothing before that key. Pages behind the first are large: a directory of 100,000 tags is read twice, not a hundred times. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/store_file_private.h"

#define FIRST_PAGE_ENTRIES 1000
#define LATER_PAGE_ENTRIES 100000
#define STALE_TRIES 20 /* of a list that meets a directory which another node has just removed (NFS) */

/* One directory, sorted. */
struct listed {
        char *name;
        struct os_stat found;
};
struct listing {
        struct listed *items;
        size_t count;
};

struct walk {
        const struct store *store;
        const char *from;  /* "": the beginning */
        bool is_deep;
        struct store_page page;
        char key[STORE_KEY_MAX];  /* of the directory being read; later also of the item */
        char last[STORE_KEY_MAX]; /* the place of the last entry of the page */
        char failed[STORE_KEY_MAX]; /* the last key that could not be read */
};

/* A server may map our user to another (root_squash): files of the user that owns our last written file are ours, too. */
static bool is_foreign(const struct store *store, const struct os_stat *found)
{
        uint64_t given = atomic_load(&((const struct file_store *)store)->given_uid);

        return found->uid != os->uid() && found->uid + UINT64_C(1) != given;
}

/* The order of keys: a directory stands for keys that continue with '/'. */
static int by_place(const void *a, const void *b)
{
        const struct listed *x = a, *y = b;
        size_t i = 0;
        int p, q;

        while (x->name[i] && x->name[i] == y->name[i])
                i++;
        p = x->name[i] ? (unsigned char)x->name[i] : x->found.kind == OS_KIND_DIRECTORY ? '/' : 0;
        q = y->name[i] ? (unsigned char)y->name[i] : y->found.kind == OS_KIND_DIRECTORY ? '/' : 0;
        return p - q;
}

static void listing_done(struct listing *listing)
{
        for (size_t i = 0; i < listing->count; i++)
                free(listing->items[i].name);
        free(listing->items);
        *listing = (struct listing){ 0 };
}

/* Whether `place` and all keys that begin with it come before the first key of the page. */
static bool is_before(const struct walk *walk, const char *place)
{
        return strcmp(place, walk->from) < 0 && strncmp(place, walk->from, strlen(place));
}

/* Whether an earlier page listed the item: that page ended with it, or after it. */
static bool is_listed(const struct walk *walk, const char *place)
{
        return *walk->from && strcmp(place, walk->from) <= 0;
}

static int add_item(struct listing *listing, const char *name, const struct os_stat *found)
{
        void *items = listing->items;
        char *copy = strdup(name);

        if (!copy || !store_make_room(&items, listing->count, sizeof *listing->items)) {
                free(copy);
                return -ENOMEM;
        }
        listing->items = items;
        listing->items[listing->count++] = (struct listed){ copy, *found };
        return 0;
}

/* Appends the name of an item to walk->key. False: the key would be too long. */
static bool descend(struct walk *walk, const char *name, size_t *ret_length)
{
        size_t length = strlen(walk->key), room = sizeof walk->key - length;

        *ret_length = length;
        if (strlen(name) + 2 >= room)
                return false;
        snprintf(walk->key + length, room, "%s%s", length ? "/" : "", name);
        return true;
}

static int fail_at_key(struct walk *walk, int result)
{
        memcpy(walk->failed, walk->key, sizeof walk->failed);
        return result;
}

/* Whether storage cannot read this item, but perhaps the others: its inode is damaged, or a file system that was mounted there has died. */
static bool is_item_alone(int result)
{
        return result == -EIO || result == -EUCLEAN || result == -ENOTCONN || result == -ESTALE;
}

/* Skips an entry that has gone since. Fails for a directory without search permission, which must not look empty. *unread: the failure of an
 * item of the root. It is taken for a directory: then the tag that it may be is named, and hides no other. */
static int read_one(struct walk *walk, struct os_dir *dir, const char *name, struct listing *listing, int *unread)
{
        struct os_stat found;
        size_t length;
        bool is_wanted = descend(walk, name, &length) && !is_before(walk, walk->key);
        int result = is_wanted ? os->stat_entry(dir, name, &found) : -ENOENT;

        if (result && result != -ENOENT)
                fail_at_key(walk, result);
        walk->key[length] = 0;
        if (result && !length && !walk->is_deep && is_item_alone(result)) {
                *unread = result;
                found = (struct os_stat){ .kind = OS_KIND_DIRECTORY };
                result = 0;
        }
        return result ? (result == -ENOENT ? 0 : result) : add_item(listing, name, &found);
}

/* Reads the entries of the directory walk->key whose names begin with `start`. */
static int read_directory(struct walk *walk, const char *start, struct listing *ret_listing)
{
        struct listing listing = { 0 };
        char name[256];
        struct os_dir *dir;
        int result = os->opendir_below(walk->store->root, walk->key, &dir), got, unread = 0;
        size_t unread_count = 0;

        if (result)
                return fail_at_key(walk, result);
        do {
                int failure = 0;

                got = os->readdir(dir, name, sizeof name);
                if (got < 0)
                        result = fail_at_key(walk, got);
                else if (got && !strncmp(name, start, strlen(start)))
                        result = read_one(walk, dir, name, &listing, &failure);
                unread = failure ? failure : unread;
                unread_count += failure != 0;
        } while (got > 0 && !result);
        os->closedir(dir);
        if (!result && unread_count && unread_count == listing.count) /* no item can be read: it is the storage that fails */
                result = unread;
        if (result) {
                listing_done(&listing);
                return result;
        }
        if (listing.count)
                qsort(listing.items, listing.count, sizeof *listing.items, by_place);
        *ret_listing = listing;
        return 0;
}

/* Adds the entry walk->key. 1: the page was full already. */
static int add_entry(struct walk *walk, const struct os_stat *found)
{
        struct store_entry entry = { .key = walk->key };

        if (walk->page.count == (*walk->from ? LATER_PAGE_ENTRIES : FIRST_PAGE_ENTRIES)) {
                walk->page.next = strdup(walk->last);
                return walk->page.next ? 1 : -ENOMEM;
        }
        strcpy(walk->last, walk->key);
        if (found->kind == OS_KIND_DIRECTORY) {
                walk->key[strlen(walk->key) - 1] = 0;
                entry.is_prefix = true;
        } else {
                entry.size = found->size;
                entry.time_ns = found->mtime_ns;
                entry.stamp = file_stamp(found);
        }
        entry.is_link = found->kind == OS_KIND_LINK;
        entry.is_foreign = is_foreign(walk->store, found);
        return store_page_add(&walk->page, &entry) ? -ENOMEM : 0;
}

static int walk_directory(struct walk *walk, const char *start);

static int walk_item(struct walk *walk, const struct listed *item)
{
        bool is_directory = item->found.kind == OS_KIND_DIRECTORY;
        size_t length;
        int result;

        if (!descend(walk, item->name, &length))
                return 0;
        if (is_directory && walk->is_deep) {
                result = walk_directory(walk, "");
                if (result == -ENOENT || result == -ENOTDIR) /* it has gone since */
                        result = 0;
        } else {
                if (is_directory)
                        strcat(walk->key, "/");
                result = is_listed(walk, walk->key) ? 0 : add_entry(walk, &item->found);
        }
        walk->key[length] = 0;
        return result;
}

/* 1: the page is full. */
static int walk_directory(struct walk *walk, const char *start)
{
        struct listing listing;
        int result = read_directory(walk, start, &listing);

        if (result)
                return result;
        for (size_t i = 0; i < listing.count && !result; i++)
                result = walk_item(walk, &listing.items[i]);
        listing_done(&listing);
        return result;
}

/* A directory that does not exist gives an empty list. A root that is not a directory is an error. */
static int walk_from(struct walk *walk, const char *prefix)
{
        const char *slash = strrchr(prefix, '/');
        int result;

        snprintf(walk->key, sizeof walk->key, "%.*s", slash ? (int)(slash - prefix) : 0, prefix);
        walk->last[0] = walk->failed[0] = 0;
        result = walk_directory(walk, slash ? slash + 1 : prefix);
        return result == -ENOENT || (result == -ENOTDIR && slash) ? 0 : result;
}

enum nebula_status file_list(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                             struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;
        char path[STORE_PATH_MAX];
        struct walk *walk;
        int result, tries = 0;

        if (!store_prefix_sound(prefix))
                return error_set(error, NEBULA_INVALID, 0, "\"%.300s\" is not a prefix of keys of %s", prefix, store->root);
        walk = calloc(1, sizeof *walk);
        if (!walk)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to list %.400s", store->root);
        walk->store = store;
        walk->from = from ? from : "";
        walk->is_deep = deep;
        while ((result = walk_from(walk, prefix)) == -ESTALE && ++tries < STALE_TRIES)
                store_page_done(&walk->page);
        if (result >= 0 && (!*prefix || !walk->page.count)) {
                int root = file_dirs_look(((struct file_store *)store)->dirs, store->root);

                result = root == -ENODEV || root == -ENOTDIR ? root : result;
        }
        if (result < 0) {
                snprintf(path, sizeof path, "%s%s%s", store->root, *walk->failed ? "/" : "", walk->failed);
                status = file_error(store, "list", path, result, error);
                store_page_done(&walk->page);
        } else {
                *ret_page = walk->page;
        }
        free(walk);
        return status;
}

enum nebula_status file_stat(struct store *store, const char *key, struct store_entry *ret_entry, struct nebula_error *error)
{
        char path[STORE_PATH_MAX];
        struct os_stat found;
        enum nebula_status status = file_path(store, key, path, error);
        char *copy;
        int result;

        if (status)
                return status;
        result = os->stat_below(store->root, key, &found);
        if (!result && found.kind == OS_KIND_LINK)
                result = -ELOOP;
        if (result == -ENOTDIR || (!result && found.kind == OS_KIND_DIRECTORY))
                result = -ENOENT;
        if (result)
                return file_error(store, "find", path, result, error);
        copy = strdup(key);
        if (!copy)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to look at %s", path);
        *ret_entry = (struct store_entry){ .key = copy, .size = found.size, .time_ns = found.mtime_ns, .stamp = file_stamp(&found),
                                           .is_foreign = is_foreign(store, &found) };
        return NEBULA_OK;
}
