/*
 * nebula store: small objects of a storage path, for a program that has no driver of its own.
 *
 * Each line of stdin is a request, a JSON object; each line of stdout answers the request of the same number. Values are UTF-8 texts.
 *
 *      {"do":"features"}                            {"puts_if_same":true, "lists_fresh":true}
 *      {"do":"get", "key":K}                        {"value":V, "stamp":S}
 *      {"do":"put", "key":K, "value":V}             {"stamp":S}; with "if":"absent", or "if":"same" and "stamp":S, by condition
 *      {"do":"list", "prefix":P}                    {"entries":[{"key":K, "time_ns":T, "stamp":S}, ...]}, deep, by ascending keys
 *      {"do":"remove", "keys":[K, ...]}             {}; with "stamps":[S, ...], each only if it is still that object
 *      {"do":"clock"}                               {"time_ns":T}, the store's time
 *      {"do":"upload", "key":K, "file":PATH}        {"size":N, "time_ns":T, "stamp":S}; PATH: a file of this machine, which becomes the object K
 *                                                   if there is none
 *      {"do":"sum", "key":K}                        {"size":N, "crc64":S}, the CRC-64 of the object's bytes, 16 hexadecimal digits
 *
 * The answer to a failed request is {"error":{"status":..., "message":..., "again":...}}; "again": it may succeed later.
 * The end of stdin ends the command.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "cli/cli.h"
#include "cli/target.h"
#include "os/os.h"
#include "sum/sum.h"

#define VALUE_MAX (16u << 20) /* bytes */
#define PIECE_BYTES (16u << 20) /* of one read */

static enum nebula_status misses(const char *name, struct nebula_error *error)
{
        return error_set(error, NEBULA_INVALID, 0, "the request has no valid \"%s\"", name);
}

static enum nebula_status no_memory(struct nebula_error *error)
{
        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the answer");
}

static enum nebula_status answer_features(struct store *store, const json_t *request, json_t *answer, struct nebula_error *error)
{
        unsigned features = store->ops->features(store);

        (void)request;
        if (json_object_set_new(answer, "puts_if_same", json_boolean(features & STORE_PUTS_IF_SAME)) ||
            json_object_set_new(answer, "lists_fresh", json_boolean(features & STORE_LISTS_FRESH)))
                return no_memory(error);
        return NEBULA_OK;
}

static enum nebula_status answer_get(struct store *store, const json_t *request, json_t *answer, struct nebula_error *error)
{
        const char *key = json_string_value(json_object_get(request, "key"));
        struct store_stamp stamp;
        enum nebula_status status;
        char *text;
        size_t size;

        if (!key)
                return misses("key", error);
        status = store->ops->get(store, key, VALUE_MAX, &text, &size, &stamp, error);
        if (status)
                return status;
        if (!text_is_utf8(text, size))
                status = error_set(error, NEBULA_CORRUPT, 0, "%s/%s is not text", store->root, key);
        else if (json_object_set_new(answer, "value", json_stringn(text, size)) ||
                 json_object_set_new(answer, "stamp", json_string(stamp.text)))
                status = no_memory(error);
        free(text);
        return status;
}

static bool read_stamp(const json_t *value, struct store_stamp *ret_stamp)
{
        const char *text = json_string_value(value);

        if (!text || !*text || strlen(text) >= sizeof ret_stamp->text)
                return false;
        memcpy(ret_stamp->text, text, strlen(text) + 1);
        return true;
}

static enum nebula_status find_condition(const json_t *request, enum store_condition *ret_condition, struct store_stamp *ret_seen,
                                         struct nebula_error *error)
{
        const json_t *condition = json_object_get(request, "if");
        const char *name = json_string_value(condition);

        if (!condition) {
                *ret_condition = STORE_ALWAYS;
        } else if (name && !strcmp(name, "absent")) {
                *ret_condition = STORE_IF_ABSENT;
        } else if (name && !strcmp(name, "same")) {
                if (!read_stamp(json_object_get(request, "stamp"), ret_seen))
                        return misses("stamp", error);
                *ret_condition = STORE_IF_SAME;
        } else {
                return misses("if", error);
        }
        return NEBULA_OK;
}

static enum nebula_status answer_put(struct store *store, const json_t *request, json_t *answer, struct nebula_error *error)
{
        const json_t *value = json_object_get(request, "value");
        const char *key = json_string_value(json_object_get(request, "key"));
        struct store_stamp seen = { "" }, stamp = { "" };
        enum store_condition condition = STORE_ALWAYS;
        enum nebula_status status;

        if (!key)
                return misses("key", error);
        if (!json_is_string(value) || json_string_length(value) > VALUE_MAX)
                return misses("value", error);
        status = find_condition(request, &condition, &seen, error);
        if (!status)
                status = store->ops->put(store, key, json_string_value(value), json_string_length(value), condition,
                                         condition == STORE_IF_SAME ? &seen : NULL, &stamp, error);
        if (!status && json_object_set_new(answer, "stamp", json_string(stamp.text)))
                status = no_memory(error);
        return status;
}

static enum nebula_status answer_list(struct store *store, const json_t *request, json_t *answer, struct nebula_error *error)
{
        const char *prefix = json_string_value(json_object_get(request, "prefix"));
        json_t *entries = json_array();
        struct store_list list = { 0 };
        enum nebula_status status = NEBULA_OK;

        if (!prefix)
                status = misses("prefix", error);
        else if (!entries || json_object_set(answer, "entries", entries))
                status = no_memory(error);
        if (!status)
                status = store_list_all(store, prefix, true, &list, error);
        for (size_t i = 0; i < list.count && !status; i++) {
                const struct store_entry *entry = &list.entries[i];

                /* Skips keys that are not UTF-8: a request cannot name them. */
                if (entry->is_prefix || entry->is_link || store_is_temporary(entry->key) || !text_is_utf8(entry->key, strlen(entry->key)))
                        continue;
                if (json_array_append_new(entries, json_pack("{s:s, s:I, s:s}", "key", entry->key, "time_ns", (json_int_t)entry->time_ns, "stamp",
                                                             entry->stamp.text)))
                        status = no_memory(error);
        }
        store_list_done(&list);
        json_decref(entries);
        return status;
}

static enum nebula_status answer_remove(struct store *store, const json_t *request, json_t *answer, struct nebula_error *error)
{
        const json_t *keys = json_object_get(request, "keys"), *stamps = json_object_get(request, "stamps");
        size_t count = json_array_size(keys);
        struct store_victim *victims = calloc(count + 1, sizeof *victims);
        enum nebula_status status = NEBULA_OK;

        (void)answer;
        if (!victims)
                return no_memory(error);
        if (!json_is_array(keys))
                status = misses("keys", error);
        for (size_t i = 0; i < count && !status; i++) {
                victims[i].key = json_string_value(json_array_get(keys, i));
                if (stamps && !read_stamp(json_array_get(stamps, i), &victims[i].stamp))
                        status = misses("stamps", error);
                if (!victims[i].key)
                        status = misses("keys", error);
        }
        if (!status && count)
                status = store->ops->remove(store, victims, count, error);
        free(victims);
        return status;
}

static enum nebula_status answer_clock(struct store *store, const json_t *request, json_t *answer, struct nebula_error *error)
{
        int64_t time_ns;
        enum nebula_status status = store->ops->clock(store, &time_ns, error);

        (void)request;
        if (!status && json_object_set_new(answer, "time_ns", json_integer((json_int_t)time_ns)))
                status = no_memory(error);
        return status;
}

static enum nebula_status upload_mapped(struct store *store, const char *key, const void *data, uint64_t size, struct nebula_error *error)
{
        struct store_object object = { .key = key, .data = data, .size = size };
        struct store_upload *upload = NULL;
        int watch = os->watch_map(data, size);
        enum nebula_status status = store->ops->upload(store, &object, 1, &upload, error);
        bool is_torn = os->unwatch_map(watch);

        if (!status && is_torn)
                store->ops->abort(store, upload);
        if (is_torn)
                return error_set(error, NEBULA_STORAGE, 0, "a part of the file could not be read while it was sent: it was cut off, or its disk fails");
        return status ? status : store->ops->publish(store, upload, error);
}

static enum nebula_status answer_upload(struct store *store, const json_t *request, json_t *answer, struct nebula_error *error)
{
        const char *key = json_string_value(json_object_get(request, "key"));
        const char *path = json_string_value(json_object_get(request, "file"));
        struct store_entry made = { 0 };
        struct os_stat stat = { 0 };
        enum nebula_status status;
        void *data = NULL;
        int fd, result;

        if (!key || !path)
                return misses(key ? "file" : "key", error);
        fd = os->open(path, OS_READ | OS_NOFOLLOW);
        result = fd < 0 ? fd : os->fstat(fd, &stat);
        if (!result && stat.size)
                result = os->map(fd, 0, stat.size, OS_MAP_READ, &data);
        if (fd >= 0)
                os->close(fd);
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "cannot read %s", path);
        status = upload_mapped(store, key, data ? data : "", stat.size, error);
        if (data)
                os->unmap(data, stat.size);
        if (!status)
                status = store->ops->stat(store, key, &made, error);
        if (!status && (json_object_set_new(answer, "size", json_integer((json_int_t)stat.size)) ||
                        json_object_set_new(answer, "time_ns", json_integer((json_int_t)made.time_ns)) ||
                        json_object_set_new(answer, "stamp", json_string(made.stamp.text))))
                status = no_memory(error);
        store_entry_done(&made);
        return status;
}

static enum nebula_status sum_object(struct store *store, const struct store_entry *entry, uint64_t *ret_sum, struct nebula_error *error)
{
        char *piece = malloc(PIECE_BYTES);
        enum nebula_status status = piece ? NEBULA_OK : no_memory(error);
        uint64_t sum = 0;

        for (uint64_t offset = 0; offset < entry->size && !status; offset += PIECE_BYTES) {
                uint64_t left = entry->size - offset, size = left < PIECE_BYTES ? left : PIECE_BYTES;

                status = store->ops->read(store, entry->key, piece, offset, size, error);
                if (!status)
                        sum = sum_crc64(sum, piece, size);
        }
        free(piece);
        *ret_sum = sum;
        return status;
}

static enum nebula_status answer_sum(struct store *store, const json_t *request, json_t *answer, struct nebula_error *error)
{
        const char *key = json_string_value(json_object_get(request, "key"));
        struct store_entry entry = { 0 };
        enum nebula_status status;
        char text[17] = "";
        uint64_t sum = 0;

        if (!key)
                return misses("key", error);
        status = store->ops->stat(store, key, &entry, error);
        if (status)
                return status;
        status = sum_object(store, &entry, &sum, error);
        snprintf(text, sizeof text, "%016" PRIx64, sum);
        if (!status && (json_object_set_new(answer, "size", json_integer((json_int_t)entry.size)) ||
                        json_object_set_new(answer, "crc64", json_string(text))))
                status = no_memory(error);
        store_entry_done(&entry);
        return status;
}

static const struct {
        const char *name;
        enum nebula_status (*answer)(struct store *store, const json_t *request, json_t *answer, struct nebula_error *error);
} requests[] = {
        { "features", answer_features }, { "get", answer_get },       { "put", answer_put },
        { "list", answer_list },         { "remove", answer_remove }, { "clock", answer_clock },
        { "upload", answer_upload },     { "sum", answer_sum },
};

static enum nebula_status answer_line(struct store *store, const char *line, size_t size, json_t *answer, struct nebula_error *error)
{
        json_t *request = json_loadb(line, size, 0, NULL);
        const char *name = json_string_value(json_object_get(request, "do"));
        enum nebula_status status = misses("do", error);

        for (size_t i = 0; name && i < CLI_COUNT(requests); i++)
                if (!strcmp(name, requests[i].name))
                        status = requests[i].answer(store, request, answer, error);
        json_decref(request);
        return status;
}

/* Prints one answer. Returns false if stdout or memory fails. */
static bool serve_line(struct store *store, const char *line, size_t size)
{
        struct nebula_error error = { 0 };
        json_t *answer = json_object();
        bool printed;

        if (answer && answer_line(store, line, size, answer, &error)) {
                json_decref(answer);
                text_make_printable(error.message);
                answer = json_pack("{s:{s:s, s:s, s:b}}", "error", "status", nebula_status_name(error.status), "message", error.message,
                                   "again", store_class(&error) != STORE_NEVER);
        }
        printed = answer && !json_dumpf(answer, stdout, JSON_COMPACT) && fputc('\n', stdout) != EOF && !fflush(stdout);
        json_decref(answer);
        return printed;
}

int command_store(int argc, char **argv)
{
        struct cli_common common = { 0 };
        const struct args_option options[] = { { "path", ARGS_TEXT, &common.path } };
        struct nebula_error error;
        struct store *store;
        struct args args;
        char *line = NULL;
        size_t room = 0;
        ssize_t length;
        bool printed = true;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 0))
                return CLI_USAGE;
        if (target_open(common.path, &store, &error))
                return cli_fail(false, &error);
        while (printed && (length = getline(&line, &room, stdin)) > 0)
                printed = serve_line(store, line, (size_t)length);
        free(line);
        store_close(store);
        if (!printed)
                cli_complain("cannot print the answer");
        return printed ? CLI_OK : CLI_UNREACHABLE;
}
