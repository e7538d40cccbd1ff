/*
 * An upload that goes on with the temporary file of an interrupted one. The service says how many first bytes of a file were flushed, and
 * nothing of other bytes. So an upload flushes from time to time (adls_upload.c). Before each flush, it writes into the file's properties
 * how many bytes it will have flushed and their CRC-64, beside those of the flush before. The service has compared each append with its
 * CRC-64, so these are the sums of the file's bytes.
 *
 * The text of an upload is "PLACE ID": the key of the temporary file, and the id of the write in its properties. The later upload renames the
 * file. Then late requests of the interrupted upload do not find it, and of two agents only one goes on with it.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/adls/adls_private.h"

#define PLACE_SIZE 64
#define HEX "0123456789abcdef"

void adls_sent_text(const struct adls_sent sent[2], char ret_text[ADLS_SENT_SIZE])
{
        snprintf(ret_text, ADLS_SENT_SIZE, "%016" PRIx64 ":%016" PRIx64 " %016" PRIx64 ":%016" PRIx64, sent[0].size, sent[0].sum, sent[1].size,
                 sent[1].sum);
}

/* False: it is no such text. */
static bool parse_sent(const char *text, struct adls_sent ret_sent[2])
{
        return strspn(text, HEX ": ") == strlen(text) &&
               sscanf(text, "%16" SCNx64 ":%16" SCNx64 " %16" SCNx64 ":%16" SCNx64, &ret_sent[0].size, &ret_sent[0].sum, &ret_sent[1].size,
                      &ret_sent[1].sum) == 4;
}

struct former {
        char place[PLACE_SIZE], id[OBJECT_ID_SIZE];
};

/* False: it is no such text. */
static bool split(const char *text, struct former *ret_former)
{
        const size_t top = strlen(STORE_TEMP_TOP);
        size_t size = strcspn(text, " ");
        const char *id = text + size + 1;

        if (strncmp(text, STORE_TEMP_TOP, top) || size >= PLACE_SIZE || top + strspn(text + top, HEX "-") != size || !text[size] ||
            strspn(id, HEX) != OBJECT_ID_SIZE - 1 || id[OBJECT_ID_SIZE - 1])
                return false;
        snprintf(ret_former->place, sizeof ret_former->place, "%.*s", (int)size, text);
        snprintf(ret_former->id, sizeof ret_former->id, "%s", id);
        return true;
}

/* Whether the upload can have a part that ends there. */
static bool is_end_of_part(const struct object_upload *object, uint64_t size)
{
        return size == object->size || (size < object->size && size % object->part_bytes == 0);
}

/* Asks the service how much of the object the renamed file has. *ret_sent: its size is 0 if another write made the file, or the file is of no use. */
static enum nebula_status look(struct object_store *store, const struct object_upload *object, const struct former *former,
                               struct adls_sent *ret_sent, struct nebula_error *error)
{
        struct object_call call = { .method = "HEAD", .key = object->place };
        struct adls_sent sent[2];
        char id[OBJECT_ID_SIZE], text[ADLS_SENT_SIZE];
        struct http_response response;
        const char *length;
        enum nebula_status status = azure_send(store, &call, &response, error);

        if (status)
                return status;
        length = http_field(&response, "content-length");
        *ret_sent = (struct adls_sent){ 0 };
        if (response.status == 200 && length && adls_property(&response, "nebula", id, sizeof id) && !strcmp(id, former->id) &&
            adls_property(&response, ADLS_SENT, text, sizeof text) && parse_sent(text, sent))
                for (size_t i = 0; i < 2; i++)
                        if (sent[i].size == strtoull(length, NULL, 10) && is_end_of_part(object, sent[i].size))
                                *ret_sent = sent[i];
        http_response_done(&response);
        return NEBULA_OK;
}

/* Makes the file young for sweeps, and drops bytes that the interrupted upload appended and did not flush. */
static enum nebula_status make_own(struct object_store *store, struct object_upload *object, const struct adls_sent *sent)
{
        const struct adls_sent both[2] = { *sent, *sent };
        char text[ADLS_SENT_SIZE];
        enum nebula_status status;

        adls_sent_text(both, text);
        status = adls_set_properties(store, object, text, NULL, NULL);
        return status ? status : adls_flush(store, object->key, object->place, sent->size, ADLS_FLUSH_DROP, NULL);
}

enum nebula_status adls_resume(struct object_store *store, struct object_upload *object, struct adls_sent *ret_sent, struct nebula_error *error)
{
        struct adls_renaming renaming = { .store = store, .key = object->place, .condition = STORE_IF_ABSENT };
        char id[OBJECT_ID_SIZE];
        struct former former;
        enum nebula_status status = NEBULA_OK;

        *ret_sent = (struct adls_sent){ 0 };
        if (!object->resume->former || !split(object->resume->former, &former))
                return NEBULA_OK;
        renaming.place = former.place;
        renaming.id = former.id;
        if (adls_rename(&renaming, NULL))
                return NEBULA_OK; /* the file is gone, or the service fails, and then so does the next request */
        status = look(store, object, &former, ret_sent, error);
        memcpy(id, object->id, sizeof id);
        memcpy(object->id, former.id, sizeof object->id);
        if (status || (ret_sent->size && !make_own(store, object, ret_sent)))
                return status;
        ret_sent->size = 0;
        memcpy(object->id, id, sizeof object->id);
        store_remove_one(&store->store, object->place, NULL);
        return NEBULA_OK;
}

enum nebula_status adls_resume_describe(const struct object_store *store, struct object_upload *object, struct nebula_error *error)
{
        struct buf buf = { 0 };

        buf_add_text(&buf, object->place);
        buf_add_text(&buf, " ");
        buf_add_text(&buf, object->id);
        object->text = object_take(&buf);
        return object->text ? NEBULA_OK : object_no_memory(store, error);
}

enum nebula_status adls_forget(struct store *base, const char *key, const char *text, struct nebula_error *error)
{
        struct former former;

        return split(text, &former) ? store_remove_one(base, former.place, error) : NEBULA_OK;
}
