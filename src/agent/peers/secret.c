#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "agent/peers/secret.h"
#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"

#define SECRET_BYTES 32
#define SECRET_FILE_MAX 4096
#define PATH_SIZE 4700
#define PRIVATE ".nebula" /* below a storage path that others may write to, so no link in it is followed */
#define SECRET_KEY PRIVATE "/secret"

/* Whether files of this owner are this user's. A server may give root's files to another user (root_squash). A file that is made for
 * the purpose shows which. */
static bool is_own(const char *root, uint32_t uid)
{
        struct os_stat found = { 0 };
        char key[64];
        uint64_t id;
        int fd, result;

        if (uid == os->uid())
                return true;
        if (os->uid() || os->random(&id, sizeof id) < 0)
                return false;
        snprintf(key, sizeof key, PRIVATE "/owner.tmp-%016" PRIx64, id);
        fd = os->open_below(root, key, OS_WRITE | OS_CREATE | OS_EXCLUSIVE);
        if (fd < 0)
                return false;
        result = os->fstat(fd, &found);
        os->close(fd);
        os->unlink_below(root, key);
        return !result && found.uid == uid;
}

/* Creates the secret once, whole or not at all: a link gives it its name and fails if the name exists. */
static int create_secret(const char *root)
{
        char temporary[64], text[2 * SECRET_BYTES + 2];
        uint8_t bytes[SECRET_BYTES];
        uint64_t id;
        int fd, result = os->random(bytes, sizeof bytes);

        if (result >= 0)
                result = os->random(&id, sizeof id);
        if (result < 0)
                return result;
        for (size_t i = 0; i < SECRET_BYTES; i++)
                snprintf(text + 2 * i, 3, "%02x", bytes[i]);
        text[2 * SECRET_BYTES] = '\n';
        snprintf(temporary, sizeof temporary, SECRET_KEY ".tmp-%016" PRIx64, id);
        fd = os->open_below(root, temporary, OS_WRITE | OS_CREATE | OS_EXCLUSIVE); /* 0600 */
        if (fd < 0)
                return fd;
        result = os_write_at(fd, text, 2 * SECRET_BYTES + 1, 0);
        if (!result)
                result = os_sync(fd);
        os->close(fd);
        if (result >= 0)
                result = os->link_below(root, temporary, root, SECRET_KEY);
        os->unlink_below(root, temporary);
        if (result == -EEXIST)
                return 0;
        return result < 0 ? result : os_sync_dir_below(root, PRIVATE);
}

/* Removes the temporary name. The agent that made the secret is about to do so, or has died before it could. */
static void drop_first_name(const char *root, const struct os_stat *secret)
{
        static const char prefix[] = "secret.tmp-";
        char name[300], key[400];
        struct os_stat found;
        struct os_dir *dir;

        if (os->opendir_below(root, PRIVATE, &dir) < 0)
                return;
        while (os->readdir(dir, name, sizeof name) > 0) {
                snprintf(key, sizeof key, PRIVATE "/%s", name);
                if (!strncmp(name, prefix, sizeof prefix - 1) && !os->stat_entry(dir, name, &found) && found.inode == secret->inode &&
                    found.device == secret->device)
                        os->unlink_below(root, key);
        }
        os->closedir(dir);
}

/* `root`: the storage path; NULL: the user has named the file. */
static enum nebula_status check_secret(const char *path, const char *root, int fd, struct nebula_error *error)
{
        struct os_stat found;
        int result = os->fstat(fd, &found);

        if (!result && root && found.link_count == 2) {
                drop_first_name(root, &found);
                result = os->fstat(fd, &found);
        }
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "the secret %.300s cannot be read", path);
        if (found.kind != OS_KIND_FILE)
                return error_set(error, NEBULA_INVALID, 0, "the secret %.300s is not a regular file: remove it", path);
        if (root ? !is_own(root, found.uid) : found.uid != os->uid())
                return error_set(error, NEBULA_INVALID, 0,
                                 "the secret %.300s belongs to user %u, who could read what is sent with it, and not to user %u: remove it, or "
                                 "set NEBULA_SECRET_FILE to a file of your own", path, found.uid, os->uid());
        if (found.mode & 077)
                return error_set(error, NEBULA_INVALID, 0, "the secret %.300s is open to other users (mode %03o): run chmod 600 on it",
                                 path, found.mode & 0777u);
        if (found.link_count != 1)
                return error_set(error, NEBULA_INVALID, 0, "the secret %.300s has %u names (hard links), of which others may hold one: remove it",
                                 path, found.link_count);
        return NEBULA_OK;
}

/* Checks and reads the secret through one descriptor, which this function closes. */
static enum nebula_status read_secret(const char *path, const char *root, int fd, struct tls_key *ret_key, struct nebula_error *error)
{
        char text[SECRET_FILE_MAX];
        int64_t size = 0;
        enum nebula_status status;

        if (fd < 0)
                return error_set(error, error_status_of_errno(-fd), -fd, "the secret %.300s cannot be read", path);
        status = check_secret(path, root, fd, error);
        if (!status) {
                do
                        size = os->pread(fd, text, sizeof text, 0);
                while (size == -EINTR);
        }
        os->close(fd);
        if (status)
                return status;
        if (size < 0)
                return error_set(error, error_status_of_errno((int)-size), (int)-size, "the secret %.300s cannot be read", path);
        while (size && (text[size - 1] == '\n' || text[size - 1] == '\r'))
                size--;
        status = peer_tls_key_init(ret_key, text, (size_t)size, error);
        if (status)
                error_prefix(error, "%.200s", path);
        explicit_bzero(text, sizeof text);
        return status;
}

enum nebula_status secret_take(struct store *store, bool makes, struct tls_key *ret_key, struct nebula_error *error)
{
        const char *file = conf_env("NEBULA_SECRET_FILE");
        char path[PATH_SIZE];
        int fd, result = 0;

        if (file)
                return read_secret(file, NULL, os->open(file, OS_READ), ret_key, error);
        if (!store || !(store->ops->features(store) & STORE_PATHS))
                return error_set(error, NEBULA_INVALID, 0, "agents of several nodes need a secret, and %s cannot hold one: set NEBULA_SECRET_FILE to a file that all nodes have",
                                 store ? "an object store" : "memory alone");
        snprintf(path, sizeof path, "%s/" SECRET_KEY, store->root);
        fd = os->open_below(store->root, SECRET_KEY, OS_READ);
        if (fd == -ENOENT && makes) {
                result = os_make_dirs(store->root, 0777); /* it may not be there yet */
                if (result >= 0)
                        result = os_make_dirs_below(store->root, PRIVATE, 0755);
                if (result >= 0)
                        result = create_secret(store->root);
                if (result < 0)
                        return error_set(error, error_status_of_errno(-result), -result, "the secret %.300s cannot be made", path);
                fd = os->open_below(store->root, SECRET_KEY, OS_READ);
        }
        return read_secret(path, store->root, fd, ret_key, error);
}
