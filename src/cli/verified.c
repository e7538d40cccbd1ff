#include "cli/verified.h"

#include <stdlib.h>

#include "os/os.h"
#include "store/document.h"

#define KEY MANIFEST_DIRECTORY "/verified.json"
#define KIND "verified"
#define SKEW_S 3600 /* by which the clocks of nodes may differ */

json_t *verified_load(struct store *store)
{
        json_t *body = NULL, *versions;
        char *text;
        size_t size;

        if (document_get(store, KEY, &text, &size, NULL, NULL))
                return json_object();
        if (document_parse(text, size, KIND, &body, NULL))
                body = NULL;
        free(text);
        versions = json_object_get(body, "versions");
        versions = json_is_object(versions) ? json_incref(versions) : json_object();
        json_decref(body);
        return versions;
}

/* A check in the future was noted by a clock that was wrong. Otherwise the version would count as verified until that time. It counts as verified
 * when it was committed, the earliest possible time. */
static double past(double at, uint64_t sequence)
{
        double latest = (double)os->wall_ns() / 1e9 + SKEW_S, committed = (double)sequence / 1e9;

        return at <= latest ? at : committed <= latest ? committed : 1;
}

/* An entry is [sequence, at, ok, files]. */
static bool parse(const json_t *entry, uint64_t *ret_sequence, struct verified *ret_one)
{
        json_int_t sequence, done;
        double at;
        int ok;

        if (json_unpack((json_t *)(uintptr_t)entry, "[I, F, b, I]", &sequence, &at, &ok, &done) || sequence <= 0 || done < 0 || !(at > 0 && at < DOCUMENT_TIME_MAX))
                return false;
        *ret_sequence = (uint64_t)sequence;
        *ret_one = (struct verified){ .at = past(at, (uint64_t)sequence), .ok = ok, .done = (uint64_t)done };
        return true;
}

bool verified_find(const json_t *verified, const char *tag, uint64_t sequence, struct verified *ret_one)
{
        uint64_t of;

        return parse(json_object_get(verified, tag), &of, ret_one) && of == sequence;
}

void verified_note(json_t *notes, const char *tag, uint64_t sequence, const struct verified *one)
{
        json_object_set_new(notes, tag, json_pack("[I, f, b, I]", (json_int_t)sequence, one->at, one->ok, (json_int_t)one->done));
}

static void forget_others(json_t *verified, const struct manifest_scan *known)
{
        json_t *tags = json_object(), *entry;
        const char *tag;
        void *next;

        for (size_t i = 0; i < known->count; i++)
                json_object_set_new(tags, known->manifests[i].tag, json_true());
        json_object_foreach_safe(verified, next, tag, entry)
                if (!json_object_get(tags, tag))
                        json_object_del(verified, tag);
        json_decref(tags);
}

enum nebula_status verified_store(struct store *store, const json_t *notes, const struct manifest_scan *known, struct nebula_error *error)
{
        json_t *body, *verified;
        enum nebula_status status;
        char *text;
        size_t size;

        if (!json_object_size(notes))
                return NEBULA_OK;
        verified = verified_load(store);
        json_object_update(verified, (json_t *)(uintptr_t)notes);
        if (known)
                forget_others(verified, known);
        body = document_new(KIND);
        json_object_set_new(body, "versions", verified);
        status = document_format(body, &text, &size, error);
        json_decref(body);
        if (status)
                return status;
        status = store->ops->put(store, KEY, text, size, STORE_ALWAYS, NULL, NULL, error);
        free(text);
        return status;
}

void verified_sum(const json_t *verified, size_t *ret_damaged, double *ret_latest)
{
        const char *tag;
        json_t *entry;

        *ret_damaged = 0;
        *ret_latest = 0;
        json_object_foreach((json_t *)(uintptr_t)verified, tag, entry) {
                struct verified one;
                uint64_t sequence;

                if (!parse(entry, &sequence, &one))
                        continue;
                *ret_damaged += !one.ok;
                *ret_latest = one.at > *ret_latest ? one.at : *ret_latest;
        }
}
