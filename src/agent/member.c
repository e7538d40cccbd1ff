#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue.h"
#include "agent/log.h"
#include "agent/member.h"
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

/* Whole or absent, and only once: the name is given by a link, which fails where one is. */
static int create_secret(const char *path, const char *directory)
{
        char temporary[PATH_SIZE + 64], text[2 * SECRET_BYTES + 2];
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
        snprintf(temporary, sizeof temporary, "%s.tmp-%016" PRIx64, path, id);
        fd = os->open(temporary, OS_WRITE | OS_CREATE | OS_EXCLUSIVE | OS_NOFOLLOW); /* 0600 */
        if (fd < 0)
                return fd;
        result = os_write_at(fd, text, 2 * SECRET_BYTES + 1, 0);
        if (!result)
                result = os_sync(fd);
        os->close(fd);
        if (result >= 0)
                result = os->link(temporary, path);
        os->unlink(temporary);
        if (result == -EEXIST)
                return 0;
        return result < 0 ? result : os_sync_dir(directory);
}

static enum nebula_status read_secret(const char *path, struct tls_key *ret_key, struct nebula_error *error)
{
        struct os_stat stat;
        char *text;
        size_t size;
        int result = os->stat(path, true, &stat);
        enum nebula_status status;

        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "the secret %.300s cannot be read", path);
        if (stat.mode & 077)
                return error_set(error, NEBULA_INVALID, 0, "the secret %.300s is open to other users (mode %03o): run chmod 600 on it",
                                 path, stat.mode & 0777u);
        result = os_read_file(path, SECRET_FILE_MAX, &text, &size);
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "the secret %.300s cannot be read", path);
        while (size && (text[size - 1] == '\n' || text[size - 1] == '\r'))
                size--;
        status = tls_key_init(ret_key, text, size, error);
        if (status)
                error_prefix(error, "%.200s", path);
        explicit_bzero(text, size);
        free(text);
        return status;
}

enum nebula_status member_key(const char *persist_path, struct tls_key *ret_key, struct nebula_error *error)
{
        const char *file = conf_env("NEBULA_SECRET_FILE"), *root = NULL;
        char directory[PATH_SIZE], path[PATH_SIZE + 16];
        struct os_stat stat;
        int result;
        enum nebula_status status;

        if (file)
                return read_secret(file, ret_key, error);
        status = root_of(persist_path, &root, error);
        if (status)
                return status;
        snprintf(directory, sizeof directory, "%s/.nebula", root);
        snprintf(path, sizeof path, "%s/secret", directory);
        result = os->stat(path, true, &stat);
        if (result == -ENOENT) {
                result = os_make_dirs(directory, 0755);
                if (result >= 0)
                        result = create_secret(path, directory);
                if (result < 0)
                        return error_set(error, error_status_of_errno(-result), -result, "the secret %.300s cannot be made", path);
        }
        return read_secret(path, ret_key, error);
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
        member.nonce = document_crc64(&reader, json_object_get(body, "nonce"), "nonce");
        json_decref(body);
        if (!reader.status)
                *ret_member = member;
        return reader.status;
}

/* <root>/.nebula/nodes/<encoded>.json */
static enum nebula_status record_path_of(const char *persist_path, const char *node, char path[PATH_SIZE], struct nebula_error *error)
{
        const char *root = NULL;
        char encoded[256];
        enum nebula_status status = root_of(persist_path, &root, error);

        if (!status && node)
                status = name_encode(node, encoded, error);
        if (!status)
                snprintf(path, PATH_SIZE, "%s/.nebula/nodes%s%s%s", root, node ? "/" : "", node ? encoded : "", node ? ".json" : "");
        return status;
}

enum nebula_status member_announce(const char *persist_path, const struct member *own, struct nebula_error *error)
{
        char directory[PATH_SIZE], path[PATH_SIZE], *text;
        size_t size;
        int result;
        enum nebula_status status;

        if (conf_env("NEBULA_PEERS"))
                return NEBULA_OK;
        status = record_path_of(persist_path, NULL, directory, error);
        if (!status)
                status = record_path_of(persist_path, own->node, path, error);
        if (!status)
                status = member_format(own, &text, &size, error);
        if (status)
                return status;
        result = os_make_dirs(directory, 0755);
        if (result >= 0)
                result = os_write_file_atomic(path, text, size);
        free(text);
        return result < 0 ? error_set(error, error_status_of_errno(-result), -result, "this node's record %.300s cannot be written", path) :
                            NEBULA_OK;
}

void member_withdraw(const char *persist_path, const struct member *own)
{
        struct member there;
        char path[PATH_SIZE];

        /* Another agent of this node may have taken over the name. */
        if (conf_env("NEBULA_PEERS") || record_path_of(persist_path, own->node, path, NULL) ||
            member_load(persist_path, own->node, &there, NULL) || there.nonce != own->nonce)
                return;
        os->unlink(path);
}

/* Both times are of the clock that the file system goes by, and a node that only cannot be reached from here keeps its record
 * for as long as it takes part in restarts. */
void member_bury(const char *persist_path, const char *node, const char *own_node)
{
        char own_path[PATH_SIZE], path[PATH_SIZE];
        struct os_stat own, there;

        if (conf_env("NEBULA_PEERS") || record_path_of(persist_path, own_node, own_path, NULL) || record_path_of(persist_path, node, path, NULL) ||
            os->stat(own_path, false, &own) < 0 || os->stat(path, false, &there) < 0)
                return;
        if (there.kind == OS_KIND_FILE && there.uid == own.uid && own.mtime_ns - there.mtime_ns > MEMBER_GONE_NS && os->unlink(path) >= 0)
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

static enum nebula_status names_of_records(const char *directory, struct member_list *list, struct nebula_error *error)
{
        char name[300], node[256];
        struct os_dir *dir;
        int result = os->opendir(directory, &dir);
        enum nebula_status status = NEBULA_OK;

        if (result == -ENOENT)
                return NEBULA_OK;
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "%.300s cannot be listed", directory);
        while (!status && (result = os->readdir(dir, name, sizeof name)) > 0) {
                size_t length = strlen(name);

                if (length <= 5 || strcmp(name + length - 5, ".json"))
                        continue;
                name[length - 5] = 0;
                if (!name_decode(name, node, NULL))
                        status = add_name(list, node, error);
        }
        os->closedir(dir);
        if (!status && result < 0)
                status = error_set(error, error_status_of_errno(-result), -result, "%.300s cannot be listed", directory);
        return status;
}

enum nebula_status member_names(const char *persist_path, struct member_list *ret_list, struct nebula_error *error)
{
        const char *setting = conf_env("NEBULA_PEERS");
        struct member_list list = { 0 };
        char directory[PATH_SIZE];
        enum nebula_status status;

        if (setting) {
                status = names_of_setting(setting, &list, error);
        } else {
                status = record_path_of(persist_path, NULL, directory, error);
                if (!status)
                        status = names_of_records(directory, &list, error);
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
        char path[PATH_SIZE], *text;
        size_t size;
        int result;
        enum nebula_status status;

        if (conf_env("NEBULA_PEERS")) {
                status = member_parse("NEBULA_PEERS", node, ret_member, error);
                return status;
        }
        status = record_path_of(persist_path, node, path, error);
        if (status)
                return status;
        result = os_read_file(path, RECORD_MAX, &text, &size);
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "the record of node \"%.100s\" cannot be read", node);
        status = member_read(text, size, ret_member, error);
        free(text);
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
