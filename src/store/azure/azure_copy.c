/* Copies inside the account: the service moves the bytes. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/azure/azure_private.h"

#define COPY_ANSWER_MS 60000
#define COPY_PAUSE_MS 500     /* longest pause between two checks of a running copy */
#define COPY_MS 3600000LL

/* Waits until the copy is complete. Within one account Azure shares the blocks, so it is at once. */
static enum nebula_status await_copy(struct azure_store *azure, const char *to, struct nebula_error *error)
{
        int64_t until_ns = os->now_ns() + COPY_MS * 1000000, pause_ms = 10;

        for (;;) {
                struct object_call call = { .method = "HEAD", .key = to };
                struct http_response response;
                enum nebula_status status = azure_send(&azure->object, &call, &response, error);
                const char *state = status ? NULL : http_field(&response, "x-ms-copy-status");
                bool is_pending = state && !strcmp(state, "pending");

                if (!status && response.status != 200)
                        status = azure_fail(&azure->object, OBJECT_COPY, to, &response, error);
                else if (!status && !is_pending && (!state || strcmp(state, "success")))
                        status = error_set(error, NEBULA_STORAGE, 0, "cannot copy %s/%s: the copy ended as \"%.60s\"", azure->address.root, to, state ? state : "");
                http_response_done(&response);
                if (status || !is_pending)
                        return status;
                if (os->now_ns() > until_ns)
                        return error_set(error, NEBULA_TIMEOUT, 0, "cannot copy %s/%s: the copy has not ended after an hour", azure->address.root, to);
                os->sleep_ms(pause_ms);
                pause_ms = pause_ms * 2 < COPY_PAUSE_MS ? pause_ms * 2 : COPY_PAUSE_MS;
        }
}

static enum nebula_status copy_once(struct azure_store *azure, const char *from, const char *to, enum store_condition condition,
                                    struct nebula_error *error)
{
        struct object_call call = { .method = "PUT", .key = to, .answer_ms = COPY_ANSWER_MS };
        char *source = azure_blob_url(azure, from), id[OBJECT_ID_SIZE];
        struct http_response response;
        struct store_stamp stamp;
        enum nebula_status status;
        const char *state;

        if (!source)
                return object_no_memory(&azure->object, error);
        object_new_id(id);
        call.source = (struct http_header){ "x-ms-copy-source", source };
        object_header(&call, AZURE_METADATA, id);
        object_header(&call, "If-None-Match", condition == STORE_IF_ABSENT ? "*" : NULL);
        status = azure_send(&azure->object, &call, &response, error);
        free(source);
        if (status)
                return status;
        state = http_field(&response, "x-ms-copy-status");
        if (response.status == 202 && (!state || strcmp(state, "success")))
                status = await_copy(azure, to, error);
        else if (condition == STORE_IF_ABSENT && azure->object.service->condition_failed(&response))
                status = object_look_who_wrote(&azure->object, to, id, condition, NULL, &stamp, error);
        else if (response.status != 202)
                status = azure_fail(&azure->object, OBJECT_COPY, from, &response, error);
        http_response_done(&response);
        return status;
}

enum nebula_status azure_copy(struct store *store, const char *from, const char *to, enum store_condition condition,
                              struct nebula_error *error)
{
        struct azure_store *azure = (struct azure_store *)store;
        struct store_entry entry;
        enum nebula_status status = object_check_key(&azure->object, from, error);

        if (!status)
                status = object_check_key(&azure->object, to, error);
        if (!status && condition == STORE_IF_SAME)
                status = error_set(error, NEBULA_INVALID, 0, "%s/%s: the only condition of a copy is STORE_IF_ABSENT", store->root, to);
        if (!status) /* an absent source and an absent target give the same code */
                status = object_look(&azure->object, from, &entry, NULL, error);
        return status ? status : copy_once(azure, from, to, condition, error);
}
