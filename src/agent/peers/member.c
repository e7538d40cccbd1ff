#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/catalogue.h"
#include "agent/log.h"
#include "agent/peers/member.h"
#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "store/document.h"

#define KIND "node"
#define RECORD_MAX 65536
#define KEY_SIZE 300
#define ADDRESS_CHARACTERS "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.:-_%"
#define NODES_PREFIX ".nebula/nodes/"

static const char *const endings[] = { [false] = ".json", [true] = ".spare" }; /* whether the node is a spare */

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

/* The job may have no storage. */
static enum nebula_status record_key_of(const struct store *store, const char *node, bool is_spare, char key[KEY_SIZE], struct nebula_error *error)
{
        char encoded[256];
        enum nebula_status status;

        if (!store)
                return error_set(error, NEBULA_INVALID, 0, "peers are found through a storage path, and this job has none: set NEBULA_PEERS");
        status = name_encode(node, encoded, error);
        if (!status && snprintf(key, KEY_SIZE, NODES_PREFIX "%s%s", encoded, endings[is_spare]) >= KEY_SIZE)
                status = error_set(error, NEBULA_INVALID, 0, "the name of node \"%.100s\" is too long", node);
        return status;
}

enum nebula_status member_announce(struct store *store, const struct member *own, bool is_spare, struct nebula_error *error)
{
        char key[KEY_SIZE], *text;
        size_t size;
        enum nebula_status status;

        if (conf_env("NEBULA_PEERS"))
                return NEBULA_OK;
        status = record_key_of(store, own->node, is_spare, key, error);
        if (!status)
                status = member_format(own, &text, &size, error);
        if (status)
                return status;
        status = store->ops->put(store, key, text, size, STORE_ALWAYS, NULL, NULL, error);
        if (status)
                error_prefix(error, "this node's record");
        free(text);
        return status;
}

/* The record, as it is there now. */
static enum nebula_status record_load(struct store *store, const char *node, const char *key, struct member *ret_member,
                                      struct store_stamp *ret_stamp, struct nebula_error *error)
{
        size_t size;
        char *text;
        enum nebula_status status = store->ops->get(store, key, RECORD_MAX, &text, &size, ret_stamp, error);

        if (status)
                return status;
        status = member_read(text, size, ret_member, error);
        free(text);
        if (!status && strcmp(ret_member->node, node))
                status = error_set(error, NEBULA_CORRUPT, 0, "it names node \"%.100s\"", ret_member->node);
        return status;
}

static void withdraw(struct store *store, const struct member *own, bool is_spare, bool is_anyones)
{
        struct store_victim victim = { 0 };
        struct member there;
        char key[KEY_SIZE];

        if (conf_env("NEBULA_PEERS") || record_key_of(store, own->node, is_spare, key, NULL) ||
            record_load(store, own->node, key, &there, &victim.stamp, NULL) || (!is_anyones && there.nonce != own->nonce))
                return;
        victim.key = key;
        store->ops->remove(store, &victim, 1, NULL);
}

void member_withdraw(struct store *store, const struct member *own, bool is_spare)
{
        withdraw(store, own, is_spare, false); /* another agent of this node may have taken over the name */
}

void member_replace(struct store *store, const struct member *own, bool is_spare)
{
        withdraw(store, own, !is_spare, true);
}

/* A node that only cannot be reached from here keeps its record for as long as it takes part in restarts. */
void member_remove_gone(struct store *store, const char *node, bool is_spare, const char *own_node)
{
        struct store_entry own = { 0 }, there = { 0 };
        char own_key[KEY_SIZE], key[KEY_SIZE];

        if (conf_env("NEBULA_PEERS") || record_key_of(store, own_node, false, own_key, NULL) ||
            record_key_of(store, node, is_spare, key, NULL))
                return;
        if (!store->ops->stat(store, own_key, &own, NULL) && !store->ops->stat(store, key, &there, NULL) && !there.is_foreign &&
            own.time_ns - there.time_ns > MEMBER_GONE_NS) {
                const struct store_victim victim = { key, there.stamp };

                if (!store->ops->remove(store, &victim, 1, NULL))
                        log_event(LOG_LEVEL_INFO, "removed the record of node \"%s\", which is gone", node);
        }
        store_entry_done(&own);
        store_entry_done(&there);
}

static int compare_names(const void *a, const void *b)
{
        return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Spare nodes come after all others. */
static enum nebula_status add_name(struct member_list *list, const char *name, bool is_spare, struct nebula_error *error)
{
        char **names = NULL;
        size_t count = list->count + list->spare_count;

        if (count >= MEMBER_MAX)
                return error_set(error, NEBULA_INVALID, 0, "there are more than %d nodes", MEMBER_MAX);
        if (!(count & (count - 1)))
                names = realloc(list->names, (count ? count * 2 : 1) * sizeof *names);
        else
                names = list->names;
        if (!names)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of nodes");
        list->names = names;
        names[count] = strdup(name);
        if (!names[count])
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of nodes");
        *(is_spare ? &list->spare_count : &list->count) += 1;
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
                        status = add_name(list, item, false, error);
        }
        free(text);
        return status;
}

/* A server may give root's files to another user (root_squash). The driver learns to whom from a file that it writes. */
static void learn_owner(struct store *store)
{
        char key[KEY_SIZE];
        uint64_t id;

        if (os->uid() || os->random(&id, sizeof id) < 0)
                return;
        snprintf(key, sizeof key, ".nebula/owner-%016" PRIx64, id);
        if (!store_put_text(store, key, "", STORE_IF_ABSENT, NULL))
                store_remove_one(store, key, NULL);
}

static enum nebula_status list_records(struct store *store, struct store_list *ret_records, struct nebula_error *error)
{
        bool is_any_foreign = false;
        enum nebula_status status = store_list_all(store, NODES_PREFIX, false, ret_records, error);

        for (size_t i = 0; !status && i < ret_records->count; i++)
                is_any_foreign = is_any_foreign || ret_records->entries[i].is_foreign;
        if (!is_any_foreign)
                return status;
        learn_owner(store);
        store_list_done(ret_records);
        return store_list_all(store, NODES_PREFIX, false, ret_records, error);
}

/* The node of a record; false: the entry is no record of that kind. Records of other users are no nodes of this user. */
static bool node_of(const struct store_entry *entry, bool is_spare, char node[256])
{
        char name[KEY_SIZE];
        const char *ending = endings[is_spare];
        int length = snprintf(name, sizeof name, "%s", entry->key + sizeof NODES_PREFIX - 1) - (int)strlen(ending);

        if (entry->is_prefix || entry->is_link || entry->is_foreign || length <= 0 || length >= KEY_SIZE || strcmp(name + length, ending))
                return false;
        name[length] = 0;
        return !name_decode(name, node, NULL);
}

static enum nebula_status names_of_records(struct store *store, struct member_list *list, struct nebula_error *error)
{
        struct store_list records = { 0 };
        char node[256];
        enum nebula_status status = list_records(store, &records, error);

        for (int is_spare = 0; is_spare <= 1; is_spare++)
                for (size_t i = 0; !status && i < records.count; i++)
                        if (node_of(&records.entries[i], is_spare, node))
                                status = add_name(list, node, is_spare, error);
        store_list_done(&records);
        return status;
}

enum nebula_status member_names(struct store *store, struct member_list *ret_list, struct nebula_error *error)
{
        const char *setting = conf_env("NEBULA_PEERS");
        struct member_list list = { 0 };
        char key[KEY_SIZE];
        enum nebula_status status = setting ? names_of_setting(setting, &list, error) : record_key_of(store, "n", false, key, error);

        if (!setting && !status)
                status = names_of_records(store, &list, error);
        if (status) {
                member_list_done(&list);
                return status;
        }
        if (list.count)
                qsort(list.names, list.count, sizeof *list.names, compare_names);
        if (list.spare_count)
                qsort(list.names + list.count, list.spare_count, sizeof *list.names, compare_names);
        *ret_list = list;
        return NEBULA_OK;
}

void member_list_done(struct member_list *list)
{
        for (size_t i = 0; i < list->count + list->spare_count; i++)
                free(list->names[i]);
        free(list->names);
        memset(list, 0, sizeof *list);
}

enum nebula_status member_load(struct store *store, const char *node, bool is_spare, struct member *ret_member, struct nebula_error *error)
{
        struct store_entry entry = { 0 };
        char key[KEY_SIZE];
        enum nebula_status status;

        if (conf_env("NEBULA_PEERS"))
                return member_parse("NEBULA_PEERS", node, ret_member, error);
        status = record_key_of(store, node, is_spare, key, error);
        if (!status)
                status = store->ops->stat(store, key, &entry, error);
        if (!status && entry.is_foreign)
                status = error_set(error, NEBULA_INVALID, 0, "it belongs to another user, so the agent does not trust it");
        if (!status)
                status = record_load(store, node, key, ret_member, NULL, error);
        store_entry_done(&entry);
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
                return error_set(error, NEBULA_INVALID, 0, "%s: \"%.100s\" is not host:port", what, text);
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
