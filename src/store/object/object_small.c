/* The operations on small objects, and removal. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/lanes.h"
#include "store/object/object.h"

#define PUT_TRIES 8           /* of a write whose condition failed although there is no object: others make and remove it */
#define REMOVE_WIDTH 16u
#define CLOCK_KEY ".nebula-clock"

static bool is_object(const struct object_store *store, const struct http_response *response)
{
        return !store->service->is_object || store->service->is_object(response);
}

static enum nebula_status no_object(const struct object_store *store, const char *key, struct nebula_error *error)
{
        return error_set(error, NEBULA_NOT_FOUND, 0, "%s/%s: there is no such object", store->store.root, key);
}

static void read_writer(const struct object_service *service, const struct http_response *response, char ret_id[OBJECT_ID_SIZE])
{
        const char *id;

        if (service->writer) {
                service->writer(response, ret_id);
                return;
        }
        id = http_field(response, service->metadata);
        snprintf(ret_id, OBJECT_ID_SIZE, "%s", id ? id : "");
}

enum nebula_status object_look(struct object_store *store, const char *key, struct store_entry *ret_entry, char ret_id[OBJECT_ID_SIZE],
                               struct nebula_error *error)
{
        struct object_call call = { .method = "HEAD", .key = key };
        struct store_entry entry = { 0 };
        struct http_response response;
        enum nebula_status status = store->service->send(store, &call, &response, error);
        const char *length, *modified;
        int64_t seconds = 0;

        if (status)
                return status;
        length = http_field(&response, "content-length");
        modified = http_field(&response, "last-modified");
        if (response.status != 200)
                status = store->service->fail(store, OBJECT_READ, key, &response, error);
        else if (!is_object(store, &response))
                status = no_object(store, key, error);
        else if (!length || !modified || !http_date_parse(modified, &seconds))
                status = error_set(error, NEBULA_STORAGE, 0, "%s/%s: the answer does not say its size and time", store->store.root, key);
        if (!status) {
                entry.size = strtoull(length, NULL, 10);
                entry.time_ns = seconds * SECOND_NS;
                store->service->stamp(&response, &entry.stamp);
                if (ret_id)
                        read_writer(store->service, &response, ret_id);
                *ret_entry = entry;
        }
        http_response_done(&response);
        return status;
}

enum nebula_status object_stat(struct store *base, const char *key, struct store_entry *ret_entry, struct nebula_error *error)
{
        struct object_store *store = (struct object_store *)base;
        struct store_entry entry;
        enum nebula_status status = object_check_key(store, key, error);

        if (!status)
                status = object_look(store, key, &entry, NULL, error);
        if (status)
                return status;
        entry.key = strdup(key);
        if (!entry.key)
                return object_no_memory(store, error);
        *ret_entry = entry;
        return NEBULA_OK;
}

/* Some stores keep no metadata. If an answer was lost there, an object of the same bytes is the one that was written: each document that
 * is written where there was none names its writer. */
static bool has_bytes(struct object_store *store, const char *key, const void *data, uint64_t size)
{
        char *text = NULL;
        size_t found;
        bool is_same = !object_get(&store->store, key, (size_t)size, &text, &found, NULL, NULL) && found == size && !memcmp(text, data, found);

        free(text);
        return is_same;
}

/* `data`: NULL, or the bytes of a small object of which an answer was lost, by which the write knows it in a store that keeps no metadata. */
static enum nebula_status look_whose(struct object_store *store, const char *key, const char *id, enum store_condition condition,
                                     const struct store_stamp *seen, const void *data, uint64_t size, struct store_stamp *ret_stamp,
                                     struct nebula_error *error)
{
        char found[OBJECT_ID_SIZE];
        struct store_entry entry;
        enum nebula_status status = object_look(store, key, &entry, found, error);

        if (status && (status != NEBULA_NOT_FOUND || condition != STORE_IF_SAME))
                return status;
        if (!status && (!strcmp(found, id) || (!*found && data && condition != STORE_IF_SAME && entry.size == size && has_bytes(store, key, data, size)))) {
                *ret_stamp = entry.stamp;
                return NEBULA_OK;
        }
        if (!status && condition == STORE_IF_SAME && !strcmp(entry.stamp.text, seen->text))
                return NEBULA_NOT_FOUND;
        if (!status && condition == STORE_IF_SAME && !*found && data)
                return error_set(error, NEBULA_STORAGE, 0, "%s/%s: the answer to a write was lost, and the store keeps no metadata that would say whether "
                                 "it was done", store->store.root, key);
        return error_set(error, NEBULA_BUSY, 0, condition == STORE_IF_SAME ? "%s/%s has been replaced" : "%s/%s is there already",
                         store->store.root, key);
}

enum nebula_status object_look_who_wrote(struct object_store *store, const char *key, const char *id, enum store_condition condition,
                                         const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error)
{
        return look_whose(store, key, id, condition, seen, NULL, 0, ret_stamp, error);
}

enum nebula_status object_try_again(struct object_store *store, const char *key, object_try *once, void *argument, struct nebula_error *error)
{
        int64_t pause_ms = http_settings_now().pause_ms / 8;

        /* The object that failed the condition has gone: the next try may succeed. */
        for (int tries = 0; tries < PUT_TRIES; tries++) {
                enum nebula_status status = once(argument, error);

                if (status != NEBULA_NOT_FOUND)
                        return status;
                os->sleep_ms(pause_ms << tries);
        }
        return error_set(error, NEBULA_STORAGE, 0, "%s/%s: the store answers that another write is going on, but the object does not exist", store->store.root, key);
}

struct putting {
        struct object_store *store;
        const char *key;
        const void *data;
        uint64_t size;
        enum store_condition condition;
        const struct store_stamp *seen;
        struct store_stamp stamp;
        char id[OBJECT_ID_SIZE]; /* of all tries: the first may succeed after the second was refused */
        bool was_lost;           /* an answer: an earlier try may have been done */
};

/* Two conditional writes of a key that no other program uses. *ret_is_kept: the second was refused. */
static enum nebula_status try_twice(struct object_store *store, bool *ret_is_kept, struct nebula_error *error)
{
        struct object_call call = { .method = "PUT", .body = "p", .body_size = 1 };
        char id[OBJECT_ID_SIZE], key[64], sum[OBJECT_SUM_SIZE], text[OBJECT_QUOTED_SIZE];
        enum nebula_status status = NEBULA_OK;

        object_new_id(id);
        snprintf(key, sizeof key, STORE_TEMP_TOP "%s-0", id);
        call.key = key;
        store->service->add_object(store, &call, sum);
        store->service->condition(&call, STORE_IF_ABSENT, NULL, text);
        *ret_is_kept = false;
        for (int tries = 0; tries < 2 && !status && !*ret_is_kept; tries++) {
                struct http_response response;

                status = store->service->send(store, &call, &response, error);
                if (status)
                        break;
                *ret_is_kept = store->service->condition_failed(&response); /* also if the answer to the first one was lost */
                if (!*ret_is_kept && !object_is_done(&response))
                        status = store->service->fail(store, OBJECT_WRITE, key, &response, error);
                http_response_done(&response);
        }
        store_drop(&store->store, key);
        return status;
}

/* Whether the store honours the condition of a write: the same write, once more, must be refused. Its bytes are the same, so it does no harm.
 * If it is not refused, another program may have removed the object in between. */
static enum nebula_status doubt_put(struct object_store *store, const struct object_call *call, struct nebula_error *error)
{
        struct http_response response;
        enum nebula_status status = store->service->send(store, call, &response, error);
        bool is_kept;

        if (status)
                return status;
        is_kept = store->service->condition_failed(&response);
        if (!is_kept && object_is_done(&response))
                status = try_twice(store, &is_kept, error);
        if (status)
                ;
        else if (is_kept)
                atomic_store(&store->doubts_puts, false);
        else if (object_is_done(&response))
                status = error_set(error, NEBULA_STORAGE, EOPNOTSUPP, "%s replaces objects although a write says If-None-Match: *. Two writers could replace each "
                                   "other's checkpoints, so Nebula writes none there: use a store that honours this condition", store->store.root);
        else
                status = store->service->fail(store, OBJECT_WRITE, call->key, &response, error);
        http_response_done(&response);
        return status;
}

static enum nebula_status put_once(void *argument, struct nebula_error *error)
{
        struct putting *putting = argument;
        struct object_store *store = putting->store;
        const struct object_service *service = store->service;
        struct object_call call = { .method = "PUT", .key = putting->key, .body = putting->data, .body_size = putting->size };
        char sum[OBJECT_SUM_SIZE], text[OBJECT_QUOTED_SIZE];
        struct http_response response;
        enum nebula_status status;

        service->add_object(store, &call, sum);
        object_header(&call, service->metadata, putting->id);
        service->condition(&call, putting->condition, putting->seen, text);
        status = service->send(store, &call, &response, error);
        if (status)
                return status;
        putting->was_lost = putting->was_lost || response.tries > 1;
        if (object_is_done(&response)) {
                service->stamp(&response, &putting->stamp);
                if (putting->condition == STORE_IF_ABSENT && atomic_load(&store->doubts_puts))
                        status = doubt_put(store, &call, error);
        } else if (putting->condition != STORE_ALWAYS &&
                 (service->condition_failed(&response) || (putting->condition == STORE_IF_SAME && response.status == 404)))
                status = look_whose(store, putting->key, putting->id, putting->condition, putting->seen, putting->was_lost ? putting->data : NULL,
                                    putting->size, &putting->stamp, error);
        else
                status = service->fail(store, OBJECT_WRITE, putting->key, &response, error);
        http_response_done(&response);
        return status;
}

enum nebula_status object_put_as(struct object_store *store, const char *key, const void *data, uint64_t size, const char *id, struct nebula_error *error)
{
        struct putting putting = { store, key, data, size, STORE_IF_ABSENT, NULL, { "" }, "" };

        snprintf(putting.id, sizeof putting.id, "%s", id);
        return object_try_again(store, key, put_once, &putting, error);
}

enum nebula_status object_put(struct store *base, const char *key, const void *data, uint64_t size, enum store_condition condition,
                              const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct object_store *store = (struct object_store *)base;
        struct putting putting = { store, key, data, size, condition, seen, { "" }, "" };
        enum nebula_status status = object_check_key(store, key, error);

        object_new_id(putting.id);
        if (!status && condition == STORE_IF_SAME && !seen)
                status = error_set(error, NEBULA_INVALID, 0, "%s/%s: the condition STORE_IF_SAME needs a stamp", base->root, key);
        if (!status)
                status = object_try_again(store, key, put_once, &putting, error);
        if (!status && ret_stamp)
                *ret_stamp = putting.stamp;
        return status;
}

static enum nebula_status get_once(struct store *base, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                   struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct object_store *store = (struct object_store *)base;
        struct object_call call = { .method = "GET", .key = key, .text_max = limit ? limit : 1 };
        struct http_response response = { 0 };
        enum nebula_status status = object_check_key(store, key, error);

        if (!status)
                status = store->service->send(store, &call, &response, error);
        if (!status && response.status != 200)
                status = store->service->fail(store, OBJECT_READ, key, &response, error);
        if (!status && !is_object(store, &response))
                status = no_object(store, key, error);
        if (status == NEBULA_CORRUPT || (!status && response.text_size > limit))
                status = error_set(error, NEBULA_CORRUPT, 0, "%s/%s: has more than the %zu bytes that are allowed", base->root, key, limit);
        if (!status) {
                *ret_text = response.text;
                response.text = NULL;
                if (ret_size)
                        *ret_size = response.text_size;
                if (ret_stamp)
                        store->service->stamp(&response, ret_stamp);
        }
        http_response_done(&response);
        return status;
}

/* The stamp of what is read. If the answer has none because the store sends the read elsewhere, a look before the read has it: if the object
 * was replaced in between, the stamp is the older one, and no write depends on it any more. */
enum nebula_status object_get(struct store *base, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                              struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct store_stamp stamp = { 0 };
        struct store_entry entry;
        enum nebula_status status = get_once(base, key, limit, ret_text, ret_size, ret_stamp ? &stamp : NULL, error);

        if (status || !ret_stamp)
                return status;
        if (!*stamp.text) {
                free(*ret_text);
                status = object_look((struct object_store *)base, key, &entry, NULL, error);
                if (!status)
                        status = get_once(base, key, limit, ret_text, ret_size, NULL, error);
                stamp = status ? stamp : entry.stamp;
        }
        if (!status)
                *ret_stamp = stamp;
        return status;
}

struct removal {
        struct object_store *store;
        const struct store_victim *victims;
};
static enum nebula_status remove_one(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *error);

/* For a server without conditional removal. If another write happens between the look and the removal, its object is lost. */
static enum nebula_status look_and_remove(struct object_store *store, const struct store_victim *victim, const atomic_bool *stop,
                                          struct nebula_error *error)
{
        struct object_call call = { .method = "DELETE", .key = victim->key, .stop = stop };
        struct http_response response;
        struct store_entry entry;
        enum nebula_status status = object_look(store, victim->key, &entry, NULL, error);

        if (status || strcmp(entry.stamp.text, victim->stamp.text))
                return status == NEBULA_NOT_FOUND ? NEBULA_OK : status;
        status = store->service->send(store, &call, &response, error);
        if (!status && !object_is_done(&response) && response.status != 404)
                status = store->service->fail(store, OBJECT_REMOVE, victim->key, &response, error);
        http_response_done(&response);
        return status;
}

/* Some stores ignore the condition of a removal. So the first one names a stamp that no object has: a store that removes the object
 * nevertheless is looked at before each removal, as it was before this one. */
static enum nebula_status remove_in_doubt(struct object_store *store, const struct store_victim *victim, const atomic_bool *stop,
                                          struct nebula_error *error)
{
        static const struct store_stamp none = { "nebula-no-such-stamp" };
        struct object_call call = { .method = "DELETE", .key = victim->key, .stop = stop };
        char text[OBJECT_QUOTED_SIZE];
        struct http_response response;
        struct store_entry entry;
        enum nebula_status status;
        bool is_unknown = false, is_gone;

        if (atomic_load(&store->removal_trust) == OBJECT_NO_TRUST)
                return look_and_remove(store, victim, stop, error);
        status = object_look(store, victim->key, &entry, NULL, error);
        if (status || strcmp(entry.stamp.text, victim->stamp.text))
                return status == NEBULA_NOT_FOUND ? NEBULA_OK : status;
        store->service->add_removal(&call);
        store->service->condition(&call, STORE_IF_SAME, &none, text);
        status = store->service->send(store, &call, &response, error);
        if (status)
                return status;
        is_gone = response.status == 404; /* another caller removed it after the look: the answer shows nothing */
        if (store->service->is_other(&response, &is_unknown))
                atomic_store(&store->removal_trust, OBJECT_TRUST);
        else if (is_unknown || object_is_done(&response))
                atomic_store(&store->removal_trust, OBJECT_NO_TRUST);
        else if (!is_gone)
                status = store->service->fail(store, OBJECT_REMOVE, victim->key, &response, error);
        http_response_done(&response);
        return status || is_gone ? status : remove_one(&(struct removal){ store, victim }, 0, stop, error);
}

static enum nebula_status remove_one(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *error)
{
        const struct removal *removal = argument;
        const struct store_victim *victim = &removal->victims[index];
        const struct object_service *service = removal->store->service;
        struct object_call call = { .method = "DELETE", .key = victim->key, .stop = stop };
        enum nebula_status status = object_check_key(removal->store, victim->key, error);
        bool is_other = false, is_unknown = false;
        char text[OBJECT_QUOTED_SIZE];
        struct http_response response;

        if (status)
                return status;
        if (*victim->stamp.text && atomic_load(&removal->store->removal_trust) != OBJECT_TRUST)
                return remove_in_doubt(removal->store, victim, stop, error);
        service->add_removal(&call);
        if (*victim->stamp.text)
                service->condition(&call, STORE_IF_SAME, &victim->stamp, text);
        status = service->send(removal->store, &call, &response, error);
        if (status)
                return status;
        if (*victim->stamp.text)
                is_other = service->is_other(&response, &is_unknown);
        if (is_unknown)
                atomic_store(&removal->store->removal_trust, OBJECT_NO_TRUST);
        if (is_unknown)
                status = look_and_remove(removal->store, victim, stop, error);
        else if (!object_is_done(&response) && response.status != 404 && !is_other)
                status = service->fail(removal->store, OBJECT_REMOVE, victim->key, &response, error);
        http_response_done(&response);
        return status;
}

enum nebula_status object_remove(struct store *base, const struct store_victim *victims, size_t count, struct nebula_error *error)
{
        struct removal removal = { (struct object_store *)base, victims };

        return lanes_run(count, REMOVE_WIDTH, remove_one, &removal, error);
}

static bool is_marked(const struct object_service *service, const struct http_response *response)
{
        for (size_t i = 0; i < sizeof service->marks / sizeof *service->marks; i++)
                if (service->marks[i] && http_field(response, service->marks[i]))
                        return true;
        return false;
}

static bool is_listing(const struct object_service *service, const struct http_response *response)
{
        struct xml_item item;
        struct xml xml;
        bool is_so;

        if (response->status != 200 || !response->text)
                return false;
        xml_init(&xml, response->text, response->text_size);
        is_so = xml_next(&xml, &item) && !strcmp(item.name, service->listing->root);
        xml_done(&xml);
        return is_so;
}

/* Uses the date that every answer of the service has. A proxy's answer may have another one: a service that marks none of its answers gives a
 * listing, which is its own. */
enum nebula_status object_clock(struct store *base, int64_t *ret_ns, struct nebula_error *error)
{
        struct object_store *store = (struct object_store *)base;
        const struct object_service *service = store->service;
        struct object_call look = { .method = "HEAD", .key = CLOCK_KEY }, list = { .method = "GET" };
        struct http_response response;
        enum nebula_status status = service->send(store, &look, &response, error);
        bool is_its_own;
        const char *date;
        int64_t seconds;

        if (status)
                return status;
        is_its_own = is_marked(service, &response);
        if (!is_its_own && response.status / 100 != 5 && service->listing) {
                http_response_done(&response);
                service->add_listing(&list, store->prefix, false, "1", NULL);
                status = service->send(store, &list, &response, error);
                if (status)
                        return status;
                is_its_own = is_listing(service, &response);
        }
        date = is_its_own ? http_field(&response, "date") : NULL;
        if (date && http_date_parse(date, &seconds))
                *ret_ns = seconds * SECOND_NS;
        else
                status = error_set(error, NEBULA_STORAGE, 0, "%s does not give the time: the answer is %d", base->root, response.status);
        http_response_done(&response);
        return status;
}

enum nebula_status object_free_bytes(struct store *base, uint64_t *ret_bytes, struct nebula_error *error)
{
        return error_set(error, NEBULA_NOT_FOUND, 0, "%s has no limit that is known", base->root);
}
