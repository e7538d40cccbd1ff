#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/catalogue.h"
#include "agent/log.h"
#include "agent/peers/member.h"
#include "base/conf.h"
#include "base/error.h"
#include "image/image.h"
#include "os/os.h"
#include "store/document.h"

#define KIND "node"
#define SECRET_BYTES 32
#define SECRET_FILE_MAX 4096
#define RECORD_MAX 65536
#define PATH_SIZE (IPC_PATH_MAX + 600)
#define KEY_SIZE 300
#define ADDRESS_CHARACTERS "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.:-_%"
#define PRIVATE ".nebula" /* below a storage path, to which others may write: no link is followed in it */
#define SECRET_KEY PRIVATE "/secret"
#define NODES_KEY PRIVATE "/nodes"

/* The directory of a storage path that is one. */
static enum nebula_status root_of(const char *persist_path, const char **ret_root, struct nebula_error *error)
{
        if (!strncmp(persist_path, "file://", 7))
                persist_path += 7;
        if (persist_path[0] != '/')
                return error_set(error, NEBULA_INVALID, 0,
                                 "peers cannot be found through the storage path \"%.200s\": set NEBULA_PEERS and NEBULA_SECRET_FILE",
                                 persist_path);
        *ret_root = persist_path;
        return NEBULA_OK;
}

/* The root may not be there yet. */
static int make_private(const char *root, const char *key)
{
        int result = os_make_dirs(root, 0777);

        return result < 0 ? result : os_make_dirs_below(root, key, 0755);
}

enum nebula_status member_own_name(char ret_node[IPC_NAME_MAX], struct nebula_error *error)
{
        const char *id = conf_env("NEBULA_NODE_ID");
        int result = 0;

        if (id)
                snprintf(ret_node, IPC_NAME_MAX, "%s", id);
        else
                result = os->host_name(ret_node, IPC_NAME_MAX);
        if (result < 0 || !ret_node[0])
                return error_set(error, NEBULA_INVALID, -result, "this node has no name: set NEBULA_NODE_ID");
        return NEBULA_OK;
}

/*
 * Whether files of this owner are this user's. A server may give root's files to another user (root_squash): what it gives is found
 * out by a file that is made for that.
 */
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

/* Whole or absent, and only once: the name is given by a link, which fails where one is. */
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

/* The agent that made the secret is about to remove the name that it had before, or has died of that. */
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

/* `root`: of storage; NULL: it is the file that the user has named. */
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
                return error_set(error, NEBULA_INVALID, 0, "the secret %.300s is no file: remove it", path);
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

/* What was checked is what is read: both of one descriptor, which becomes this function's. */
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
        status = tls_key_init(ret_key, text, (size_t)size, error);
        if (status)
                error_prefix(error, "%.200s", path);
        explicit_bzero(text, sizeof text);
        return status;
}

enum nebula_status member_key(const char *persist_path, struct tls_key *ret_key, struct nebula_error *error)
{
        const char *file = conf_env("NEBULA_SECRET_FILE"), *root = NULL;
        char path[PATH_SIZE];
        int fd, result = 0;
        enum nebula_status status;

        if (file)
                return read_secret(file, NULL, os->open(file, OS_READ), ret_key, error);
        status = root_of(persist_path, &root, error);
        if (status)
                return status;
        snprintf(path, sizeof path, "%s/" SECRET_KEY, root);
        fd = os->open_below(root, SECRET_KEY, OS_READ);
        if (fd == -ENOENT) {
                result = make_private(root, PRIVATE);
                if (result >= 0)
                        result = create_secret(root);
                if (result < 0)
                        return error_set(error, error_status_of_errno(-result), -result, "the secret %.300s cannot be made", path);
                fd = os->open_below(root, SECRET_KEY, OS_READ);
        }
        return read_secret(path, root, fd, ret_key, error);
}

enum nebula_status member_format(const struct member *member, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        json_t *body = document_new(KIND);
        enum nebula_status status;

        if (!body || json_object_set_new(body, "node", json_string(member->node)) ||
            json_object_set_new(body, "address", json_string(member->address)) ||
            json_object_set_new(body, "port", json_integer(member->port)) || json_object_set_new(body, "nonce", document_hex(member->nonce)) ||
            json_object_set_new(body, "time", json_real(catalogue_now())))
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the record of a node");
        else
                status = document_format(body, ret_text, ret_size, error);
        json_decref(body);
        return status;
}

enum nebula_status member_read(const char *text, size_t size, struct member *ret_member, struct nebula_error *error)
{
        struct document_reader reader = { .kind = KIND, .error = error };
        struct member member = { 0 };
        json_t *body;
        enum nebula_status status = document_parse(text, size, KIND, &body, error);

        if (status)
                return status;
        document_text(&reader, body, "node", 0, member.node, sizeof member.node);
        document_text(&reader, body, "address", 0, member.address, sizeof member.address);
        member.port = (uint16_t)document_u64(&reader, body, "port", UINT16_MAX);
        if (!reader.status && !member.port)
                document_wrong(&reader, "port", "is 0");
        if (!reader.status && member.address[strspn(member.address, ADDRESS_CHARACTERS)])
                document_wrong(&reader, "address", "is no name or number of a host");
        member.nonce = document_crc64(&reader, json_object_get(body, "nonce"), "nonce");
        json_decref(body);
        if (!reader.status)
                *ret_member = member;
        return reader.status;
}

/* <root>/.nebula/nodes/<encoded>.json */
static enum nebula_status record_key_of(const char *persist_path, const char *node, const char **ret_root, char key[KEY_SIZE],
                                        struct nebula_error *error)
{
        char encoded[256];
        enum nebula_status status = root_of(persist_path, ret_root, error);

        if (!status)
                status = name_encode(node, encoded, error);
        if (!status && snprintf(key, KEY_SIZE, NODES_KEY "/%s.json", encoded) >= KEY_SIZE)
                status = error_set(error, NEBULA_INVALID, 0, "the name of node \"%.100s\" is too long", node);
        return status;
}

enum nebula_status member_announce(const char *persist_path, const struct member *own, struct nebula_error *error)
{
        char key[KEY_SIZE], *text;
        const char *root = NULL;
        size_t size;
        int result;
        enum nebula_status status;

        if (conf_env("NEBULA_PEERS"))
                return NEBULA_OK;
        status = record_key_of(persist_path, own->node, &root, key, error);
        if (!status)
                status = member_format(own, &text, &size, error);
        if (status)
                return status;
        result = make_private(root, NODES_KEY);
        if (result >= 0)
                result = os_write_file_atomic_below(root, key, text, size);
        free(text);
        return result < 0 ? error_set(error, error_status_of_errno(-result), -result, "this node's record %.250s/%.250s cannot be written",
                                      root, key) : NEBULA_OK;
}

void member_withdraw(const char *persist_path, const struct member *own)
{
        const char *root = NULL;
        struct member there;
        char key[KEY_SIZE];

        /* Another agent of this node may have taken over the name. */
        if (conf_env("NEBULA_PEERS") || record_key_of(persist_path, own->node, &root, key, NULL) ||
            member_load(persist_path, own->node, &there, NULL) || there.nonce != own->nonce)
                return;
        os->unlink_below(root, key);
}

/* Both times are of the clock that the file system goes by, and a node that only cannot be reached from here keeps its record
 * for as long as it takes part in restarts. */
void member_bury(const char *persist_path, const char *node, const char *own_node)
{
        char own_key[KEY_SIZE], key[KEY_SIZE];
        struct os_stat own, there;
        const char *root = NULL;

        if (conf_env("NEBULA_PEERS") || record_key_of(persist_path, own_node, &root, own_key, NULL) ||
            record_key_of(persist_path, node, &root, key, NULL) || os->stat_below(root, own_key, &own) < 0 ||
            os->stat_below(root, key, &there) < 0)
                return;
        if (there.kind == OS_KIND_FILE && there.uid == own.uid && own.mtime_ns - there.mtime_ns > MEMBER_GONE_NS &&
            os->unlink_below(root, key) >= 0)
                log_event(LOG_LEVEL_INFO, "removed the record of node \"%s\", which is gone", node);
}

static int compare_names(const void *a, const void *b)
{
        return strcmp(*(char *const *)a, *(char *const *)b);
}

static enum nebula_status add_name(struct member_list *list, const char *name, struct nebula_error *error)
{
        char **names = NULL;

        if (list->count >= MEMBER_MAX)
                return error_set(error, NEBULA_INVALID, 0, "there are more than %d nodes", MEMBER_MAX);
        if (!(list->count & (list->count - 1)))
                names = realloc(list->names, (list->count ? list->count * 2 : 1) * sizeof *names);
        else
                names = list->names;
        if (!names)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of nodes");
        list->names = names;
        names[list->count] = strdup(name);
        if (!names[list->count])
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of nodes");
        list->count++;
        return NEBULA_OK;
}

static enum nebula_status names_of_setting(const char *setting, struct member_list *list, struct nebula_error *error)
{
        char *text = strdup(setting), *rest = text, *item;
        enum nebula_status status = text ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of nodes");

        while (!status && (item = strsep(&rest, ", \n"))) {
                struct member member;

                if (!*item)
                        continue;
                status = member_parse("NEBULA_PEERS", item, &member, error);
                if (!status && !member.port)
                        status = error_set(error, NEBULA_INVALID, 0, "NEBULA_PEERS names \"%.100s\" without a port", item);
                if (!status)
                        status = add_name(list, item, error);
        }
        free(text);
        return status;
}

/* Records of other users are no nodes of this user. */
static enum nebula_status names_of_records(const char *root, struct member_list *list, struct nebula_error *error)
{
        char name[300], node[256];
        struct os_stat found;
        struct os_dir *dir;
        uint32_t foreign = os->uid(); /* one that was asked about and is not ours; none yet */
        int result = os->opendir_below(root, NODES_KEY, &dir);
        enum nebula_status status = NEBULA_OK;

        if (result == -ENOENT)
                return NEBULA_OK;
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "%.300s/" NODES_KEY " cannot be listed", root);
        while (!status && (result = os->readdir(dir, name, sizeof name)) > 0) {
                size_t length = strlen(name);

                if (length <= 5 || strcmp(name + length - 5, ".json") || os->stat_entry(dir, name, &found) || found.kind != OS_KIND_FILE)
                        continue;
                if (found.uid != os->uid() && (found.uid == foreign || !is_own(root, found.uid))) {
                        foreign = found.uid;
                        continue;
                }
                name[length - 5] = 0;
                if (!name_decode(name, node, NULL))
                        status = add_name(list, node, error);
        }
        os->closedir(dir);
        if (!status && result < 0)
                status = error_set(error, error_status_of_errno(-result), -result, "%.300s/" NODES_KEY " cannot be listed", root);
        return status;
}

enum nebula_status member_names(const char *persist_path, struct member_list *ret_list, struct nebula_error *error)
{
        const char *setting = conf_env("NEBULA_PEERS");
        struct member_list list = { 0 };
        const char *root = NULL;
        enum nebula_status status;

        if (setting) {
                status = names_of_setting(setting, &list, error);
        } else {
                status = root_of(persist_path, &root, error);
                if (!status)
                        status = names_of_records(root, &list, error);
        }
        if (status) {
                member_list_done(&list);
                return status;
        }
        if (list.count)
                qsort(list.names, list.count, sizeof *list.names, compare_names);
        *ret_list = list;
        return NEBULA_OK;
}

void member_list_done(struct member_list *list)
{
        for (size_t i = 0; i < list->count; i++)
                free(list->names[i]);
        free(list->names);
        memset(list, 0, sizeof *list);
}

enum nebula_status member_load(const char *persist_path, const char *node, struct member *ret_member, struct nebula_error *error)
{
        char key[KEY_SIZE], *text;
        const char *root = NULL;
        struct os_stat found;
        size_t size;
        int result;
        enum nebula_status status;

        if (conf_env("NEBULA_PEERS")) {
                status = member_parse("NEBULA_PEERS", node, ret_member, error);
                return status;
        }
        status = record_key_of(persist_path, node, &root, key, error);
        if (status)
                return status;
        result = os->stat_below(root, key, &found);
        if (!result && !is_own(root, found.uid))
                return error_set(error, NEBULA_INVALID, 0, "the record of node \"%.100s\" belongs to user %u: it is not believed", node, found.uid);
        if (!result)
                result = os_read_file_below(root, key, RECORD_MAX, &text, &size);
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "the record of node \"%.100s\" cannot be read", node);
        status = member_read(text, size, ret_member, error);
        free(text);
        if (!status && strcmp(ret_member->node, node))
                status = error_set(error, NEBULA_CORRUPT, 0, "it is that of node \"%.100s\"", ret_member->node);
        if (status)
                error_prefix(error, "the record of node \"%.100s\"", node);
        return status;
}

enum nebula_status member_parse(const char *what, const char *text, struct member *ret_member, struct nebula_error *error)
{
        struct member member = { 0 };
        const char *host = text, *end = strrchr(text, ':'), *bracket = strchr(text, ']');
        uint64_t port = 0;
        enum nebula_status status = NEBULA_OK;
        size_t length;

        if (text[0] == '[' && bracket) {
                host++;
                length = (size_t)(bracket - host);
                end = bracket[1] == ':' ? bracket + 1 : NULL;
        } else {
                length = end ? (size_t)(end - text) : strlen(text);
        }
        if (!length || length >= sizeof member.address || strlen(text) >= sizeof member.node)
                return error_set(error, NEBULA_INVALID, 0, "%s: \"%.100s\" is no host:port", what, text);
        if (end)
                status = conf_parse_count(what, end + 1, UINT16_MAX, &port, error);
        if (status)
                return status;
        memcpy(member.address, host, length);
        strcpy(member.node, text);
        member.port = (uint16_t)port;
        *ret_member = member;
        return NEBULA_OK;
}
