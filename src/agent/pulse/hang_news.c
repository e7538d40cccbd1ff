#include "agent/pulse/hang_news.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "image/image.h"
#include "os/os.h"
#include "store/document.h"

#define KIND "hang"
#define PREFIX ".nebula/hangs/"
#define KEY_SIZE 300
#define PAUSE_MS 500
#define BEATS_MAX (UINT64_C(1) << 53)
#define NS_PER_MS 1000000

static enum nebula_status key_of(const char *node, char key[KEY_SIZE], struct nebula_error *error)
{
        char encoded[256];
        enum nebula_status status = name_encode(node, encoded, error);

        if (!status && snprintf(key, KEY_SIZE, PREFIX "%s.json", encoded) >= KEY_SIZE)
                status = error_set(error, NEBULA_INVALID, 0, "the name of node \"%.100s\" is too long", node);
        return status;
}

enum nebula_status hang_news_sweep(struct store *store, int64_t age_ns, struct nebula_error *error)
{
        int64_t now_ns;
        enum nebula_status status = store->ops->clock(store, &now_ns, error);

        return status ? status : store_remove_before(store, PREFIX, now_ns - age_ns, error);
}

enum nebula_status hang_news_tell(struct store *store, const struct hang_news *own, struct nebula_error *error)
{
        char key[KEY_SIZE], *text = NULL;
        size_t size = 0;
        json_t *body = document_new(KIND);
        enum nebula_status status = key_of(own->node, key, error);

        if (!status && (!body || json_object_set_new(body, "node", json_string(own->node)) || json_object_set_new(body, "run", json_string(own->run)) ||
                        json_object_set_new(body, "file", json_string(own->file)) || json_object_set_new(body, "rank", json_integer(own->rank)) ||
                        json_object_set_new(body, "ranks", json_integer(own->ranks)) ||
                        json_object_set_new(body, "beats", json_integer((json_int_t)own->beats)) ||
                        json_object_set_new(body, "step", json_integer((json_int_t)own->step)) ||
                        json_object_set_new(body, "phase", json_string(own->phase)) ||
                        json_object_set_new(body, "seconds", json_integer((json_int_t)own->silent_s))))
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the news of a hang");
        if (!status)
                status = document_format(body, &text, &size, error);
        if (!status)
                status = store->ops->put(store, key, text, size, STORE_ALWAYS, NULL, NULL, error);
        free(text);
        json_decref(body);
        return status;
}

static enum nebula_status load(struct store *store, const char *key, struct hang_news *ret_news, struct nebula_error *error)
{
        struct document_reader reader = { .kind = KIND, .error = error };
        struct hang_news news = { 0 };
        json_t *body = NULL;
        char *text;
        size_t size;
        enum nebula_status status = document_get(store, key, &text, &size, NULL, error);

        if (status)
                return status;
        status = document_parse(text, size, KIND, &body, error);
        free(text);
        if (status)
                return status;
        document_text(&reader, body, "node", 0, news.node, sizeof news.node);
        document_text(&reader, body, "run", 1, news.run, sizeof news.run);
        document_text(&reader, body, "file", 0, news.file, sizeof news.file);
        document_text(&reader, body, "phase", 1, news.phase, sizeof news.phase);
        news.rank = (uint32_t)document_u64(&reader, body, "rank", UINT32_MAX);
        news.ranks = (uint32_t)document_u64(&reader, body, "ranks", UINT32_MAX);
        news.beats = document_u64(&reader, body, "beats", BEATS_MAX);
        news.step = document_u64(&reader, body, "step", BEATS_MAX);
        news.silent_s = (double)document_u64(&reader, body, "seconds", UINT32_MAX);
        json_decref(body);
        if (!reader.status)
                *ret_news = news;
        return reader.status;
}

static bool lags_behind(const struct hang_news *one, const struct hang_news *other)
{
        return one->beats < other->beats || (one->beats == other->beats && one->rank < other->rank);
}

/* One look at all documents. A document that cannot be read is another node's trouble. */
static enum nebula_status look(struct store *store, const struct hang_news *own, const char *own_key, int64_t fresh_ns, struct hang_news *ret_last,
                               uint32_t *ret_ranks, struct nebula_error *error)
{
        struct store_list list = { 0 };
        const struct store_entry *mine;
        enum nebula_status status = store_list_all(store, PREFIX, false, &list, error);

        *ret_last = *own;
        *ret_ranks = own->ranks;
        mine = status ? NULL : store_list_find(&list, own_key);
        for (size_t i = 0; mine && i < list.count; i++) {
                const struct store_entry *entry = &list.entries[i];
                struct hang_news news;

                if (entry == mine || entry->is_foreign || entry->is_prefix || entry->is_link || entry->time_ns < mine->time_ns - fresh_ns ||
                    entry->time_ns > mine->time_ns + fresh_ns || load(store, entry->key, &news, NULL) || strcmp(news.run, own->run))
                        continue;
                *ret_ranks += news.ranks;
                if (lags_behind(&news, ret_last))
                        *ret_last = news;
        }
        store_list_done(&list);
        return status;
}

enum nebula_status hang_news_last(struct store *store, const struct hang_news *own, uint32_t world, int64_t fresh_ns, int64_t wait_ms,
                                  struct hang_news *ret_last, uint32_t *ret_ranks, struct nebula_error *error)
{
        int64_t until_ns = os->now_ns() + wait_ms * NS_PER_MS;
        char key[KEY_SIZE];
        enum nebula_status status = key_of(own->node, key, error);

        while (!status) {
                status = look(store, own, key, fresh_ns, ret_last, ret_ranks, error);
                if (status || *ret_ranks >= world || os->now_ns() >= until_ns)
                        break;
                os->sleep_ms(PAUSE_MS);
        }
        return status;
}
