/* Removals. The service keeps empty directories; the driver removes them up to the root of the store. */
#include <string.h>

#include "base/error.h"
#include "store/adls/adls_private.h"
#include "store/lanes.h"

#define REMOVE_WIDTH 16u

struct removal {
        struct object_store *store;
        const struct store_victim *victims;
};

/* Sends one request. *ret_status: of the answer. A directory that is not empty stays. */
static enum nebula_status remove_path(struct object_store *store, const char *key, const struct store_stamp *stamp, const atomic_bool *stop,
                                      int *ret_status, struct nebula_error *error)
{
        struct object_call call = { .method = "DELETE", .key = key, .stop = stop };
        char text[OBJECT_QUOTED_SIZE];
        struct http_response response;
        enum nebula_status status;

        object_param(&call, "recursive", "false");
        if (*stamp->text)
                object_etag_condition(&call, STORE_IF_SAME, stamp, text);
        status = azure_send(store, &call, &response, error);
        if (status)
                return status;
        *ret_status = response.status;
        if (!object_is_done(&response) && response.status != 404 && response.status != 412 && strcmp(azure_code(&response), "DirectoryNotEmpty"))
                status = adls_fail(store, OBJECT_REMOVE, key, &response, error);
        http_response_done(&response);
        return status;
}

/* Whether the path is gone. "Not found" counts: the answer to an earlier removal may have been lost. */
static bool is_gone(int answer)
{
        return answer / 100 == 2 || answer == 404;
}

/* A concurrent writer is safe: its directory is not empty, or is made again with its file. */
static void remove_empty_parents(struct object_store *store, const char *key, const atomic_bool *stop)
{
        char parent[STORE_KEY_MAX], *slash;
        int answer = 0;

        memcpy(parent, key, strlen(key) + 1);
        while ((slash = strrchr(parent, '/'))) {
                *slash = 0;
                if (remove_path(store, parent, &(struct store_stamp){ "" }, stop, &answer, NULL) || !is_gone(answer))
                        break;
        }
}

static enum nebula_status remove_one(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *error)
{
        const struct removal *removal = argument;
        const struct store_victim *victim = &removal->victims[index];
        enum nebula_status status = object_check_key(removal->store, victim->key, error);
        int answer = 0;

        if (!status)
                status = remove_path(removal->store, victim->key, &victim->stamp, stop, &answer, error);
        if (!status && is_gone(answer))
                remove_empty_parents(removal->store, victim->key, stop);
        return status;
}

enum nebula_status adls_remove(struct store *base, const struct store_victim *victims, size_t count, struct nebula_error *error)
{
        struct removal removal = { (struct object_store *)base, victims };

        return lanes_run(count, REMOVE_WIDTH, remove_one, &removal, error);
}
