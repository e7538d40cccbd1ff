#include "store/azure/fake_azure.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/http/crypt.h"
#include "sum/sum.h"

struct answer {
        int status;
        const char *code;
        char fields[512];
        const char *body;
        size_t size;
};

void fake_init(struct fake_azure *fake)
{
        memset(fake, 0, sizeof *fake);
        pthread_mutex_init(&fake->lock, NULL);
}

static void drop_blocks(struct fake_blob *blob)
{
        while (blob->block_count)
                free(blob->blocks[--blob->block_count].data);
}

void fake_done(struct fake_azure *fake)
{
        for (size_t i = 0; i < FAKE_BLOBS; i++) {
                drop_blocks(&fake->blobs[i]);
                free(fake->blobs[i].data);
        }
        pthread_mutex_destroy(&fake->lock);
}

static struct fake_blob *find(struct fake_azure *fake, const char *path, bool make)
{
        struct fake_blob *free_one = NULL;

        for (size_t i = 0; i < FAKE_BLOBS; i++) {
                if (!strcmp(fake->blobs[i].path, path))
                        return &fake->blobs[i];
                if (!*fake->blobs[i].path && !free_one)
                        free_one = &fake->blobs[i];
        }
        if (!make || !free_one)
                return NULL;
        snprintf(free_one->path, sizeof free_one->path, "%s", path);
        return free_one;
}

struct fake_blob *fake_find(struct fake_azure *fake, const char *path)
{
        struct fake_blob *blob = find(fake, path, false);

        return blob && blob->data ? blob : NULL;
}

static void refuse(struct answer *answer, int status, const char *code)
{
        answer->status = status;
        answer->code = code;
}

/* Whether the conditions of the request hold. */
static bool holds(const struct server_call *call, const struct fake_blob *blob, struct answer *answer)
{
        char match[64], none[64], etag[32];
        bool is_there = blob && blob->data;

        server_field(call, "if-match", match, sizeof match);
        server_field(call, "if-none-match", none, sizeof none);
        snprintf(etag, sizeof etag, "\"0x%X\"", is_there ? blob->etag : 0);
        if (*none && is_there)
                refuse(answer, 409, "BlobAlreadyExists");
        else if (*match && (!is_there || strcmp(match, etag)))
                refuse(answer, 412, "ConditionNotMet");
        else
                return true;
        return false;
}

static bool is_changed(const struct server_call *call)
{
        uint64_t crc = sum_crc64(0, call->body, call->body_size);
        char said[32], found[16];
        uint8_t bytes[8];

        for (size_t i = 0; i < 8; i++)
                bytes[i] = (uint8_t)(crc >> 8 * i);
        crypt_base64(bytes, 8, found);
        return *server_field(call, "x-ms-content-crc64", said, sizeof said) && strcmp(said, found);
}

static void set_data(struct fake_azure *fake, struct fake_blob *blob, const struct server_call *call, char *data, size_t size)
{
        free(blob->data);
        blob->data = data;
        blob->size = size;
        blob->etag = ++fake->etags;
        server_field(call, "x-ms-meta-nebula", blob->writer, sizeof blob->writer);
        drop_blocks(blob);
}

static void stamp(const struct fake_blob *blob, struct answer *answer)
{
        snprintf(answer->fields, sizeof answer->fields,
                 "ETag: \"0x%X\"\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n%s%s%s", blob->etag, *blob->writer ? "x-ms-meta-nebula: " : "",
                 blob->writer, *blob->writer ? "\r\n" : "");
}

/* NULL: it is refused. */
static char *copy_range(struct fake_azure *fake, const struct server_call *call, const char *url, size_t *ret_size, struct answer *answer)
{
        char path[300], range[64], match[64], etag[32], said[32], found[16];
        const char *slash = strchr(url + strlen("http://"), '/');
        struct fake_blob *blob;
        size_t first, last;
        uint8_t bytes[8];

        snprintf(fake->copy_head, sizeof fake->copy_head, "%s", call->head);
        snprintf(path, sizeof path, "%.*s", (int)strcspn(slash, "?"), slash);
        blob = fake_find(fake, path);
        if (fake->copy_status || !blob) {
                refuse(answer, fake->copy_status ? fake->copy_status : 404, "CannotVerifyCopySource");
                return NULL;
        }
        if (fake->replaces_source) {
                memset(blob->data, 0, blob->size);
                blob->etag = ++fake->etags;
        }
        snprintf(etag, sizeof etag, "\"0x%X\"", blob->etag);
        if (strcmp(server_field(call, "x-ms-source-if-match", match, sizeof match), etag) ||
            sscanf(server_field(call, "x-ms-source-range", range, sizeof range), "bytes=%zu-%zu", &first, &last) != 2 || last >= blob->size) {
                refuse(answer, 412, "SourceConditionNotMet");
                return NULL;
        }
        for (size_t i = 0; i < 8; i++)
                bytes[i] = (uint8_t)(sum_crc64(0, blob->data + first, last + 1 - first) >> 8 * i);
        crypt_base64(bytes, 8, found);
        if (strcmp(server_field(call, "x-ms-source-content-crc64", said, sizeof said), found)) {
                refuse(answer, 400, "Crc64Mismatch");
                return NULL;
        }
        *ret_size = last + 1 - first;
        return memcpy(malloc(*ret_size), blob->data + first, *ret_size);
}

static void put_block(struct fake_azure *fake, struct fake_blob *blob, const struct server_call *call, struct answer *answer)
{
        const char *id = strstr(call->target, "blockid=") + strlen("blockid=");
        size_t length = strcspn(id, "&"), size = call->body_size, i;
        char source[500], *data;

        if (*server_field(call, "x-ms-copy-source", source, sizeof source))
                data = copy_range(fake, call, source, &size, answer);
        else
                data = memcpy(malloc(size + 1), call->body, size);
        if (!data)
                return;
        fake->body_bytes += call->body_size;
        for (i = 0; i < blob->block_count && strncmp(blob->blocks[i].id, id, length); i++)
                ;
        if (i == FAKE_BLOCKS)
                abort();
        if (i < blob->block_count)
                free(blob->blocks[i].data);
        else
                blob->block_count++;
        snprintf(blob->blocks[i].id, sizeof blob->blocks[i].id, "%.*s", (int)length, id);
        blob->blocks[i].data = data;
        blob->blocks[i].size = size;
        answer->status = 201;
}

static void put_list(struct fake_azure *fake, struct fake_blob *blob, const struct server_call *call, struct answer *answer)
{
        char *data = malloc(64u << 20);
        size_t size = 0;

        for (const char *id = call->body; (id = strstr(id, "<Uncommitted>"));) {
                size_t i = 0, length = strcspn(id += strlen("<Uncommitted>"), "<");

                while (i < blob->block_count && (strlen(blob->blocks[i].id) != length || strncmp(blob->blocks[i].id, id, length)))
                        i++;
                if (i == blob->block_count) {
                        free(data);
                        refuse(answer, 400, "InvalidBlockList");
                        return;
                }
                memcpy(data + size, blob->blocks[i].data, blob->blocks[i].size);
                size += blob->blocks[i].size;
        }
        set_data(fake, blob, call, realloc(data, size + 1), size);
        stamp(blob, answer);
        answer->status = 201;
}

static void put(struct fake_azure *fake, const struct server_call *call, const char *path, struct answer *answer)
{
        struct fake_blob *blob = find(fake, path, true);
        char *data;

        if (is_changed(call)) {
                refuse(answer, 400, "Crc64Mismatch");
        } else if (strstr(call->target, "comp=block&")) {
                put_block(fake, blob, call, answer);
        } else if (!holds(call, blob, answer)) {
                return;
        } else if (strstr(call->target, "comp=blocklist")) {
                put_list(fake, blob, call, answer);
        } else {
                data = malloc(call->body_size + 1);
                memcpy(data, call->body, call->body_size);
                set_data(fake, blob, call, data, call->body_size);
                stamp(blob, answer);
                answer->status = 201;
        }
}

static void get(struct fake_azure *fake, const struct server_call *call, const char *path, struct answer *answer)
{
        struct fake_blob *blob = fake_find(fake, path);
        char range[64];
        size_t first = 0, last, used;

        if (!blob) {
                refuse(answer, 404, "BlobNotFound");
                return;
        }
        if (!holds(call, blob, answer))
                return;
        stamp(blob, answer);
        answer->status = 200;
        answer->body = blob->data;
        answer->size = blob->size;
        if (sscanf(server_field(call, "x-ms-range", range, sizeof range), "bytes=%zu-%zu", &first, &last) != 2)
                return;
        used = strlen(answer->fields);
        if (first >= blob->size) {
                refuse(answer, 416, "InvalidRange");
                answer->size = 0;
                snprintf(answer->fields, sizeof answer->fields, "Content-Range: bytes */%zu\r\n", blob->size);
                return;
        }
        last = last < blob->size ? last : blob->size - 1;
        snprintf(answer->fields + used, sizeof answer->fields - used, "Content-Range: bytes %zu-%zu/%zu\r\n", first, last, blob->size);
        answer->status = 206;
        answer->body += first;
        answer->size = last + 1 - first;
}

static void forget(struct fake_azure *fake, const struct server_call *call, const char *path, struct answer *answer)
{
        struct fake_blob *blob = fake_find(fake, path);

        if (!blob) {
                refuse(answer, 404, "BlobNotFound");
        } else if (holds(call, blob, answer)) {
                free(blob->data);
                blob->data = NULL;
                answer->status = 202;
        }
}

static void answer_with(struct server_call *call, enum fake_fault fault, const struct answer *answer)
{
        char fields[1024];

        snprintf(fields, sizeof fields, "x-ms-request-id: %u\r\n%s%s%s%s", call->number, answer->code ? "x-ms-error-code: " : "", answer->code ? answer->code : "",
                 answer->code ? "\r\n" : "", answer->fields);
        fault_answer(call, fault, answer->status, fields, answer->body, answer->size);
}

void fake_serve(struct server_call *call, void *argument)
{
        struct fake_azure *fake = argument;
        struct answer answer = { .status = 400 };
        char path[300], token[80];
        enum fake_fault fault;

        pthread_mutex_lock(&fake->lock);
        snprintf(path, sizeof path, "%.*s", (int)strcspn(call->target, "?"), call->target);
        snprintf(fake->last_head, sizeof fake->last_head, "%s", call->head);
        snprintf(fake->last_body, sizeof fake->last_body, "%s", call->body);
        fault = fake->fault ? fake->fault(call, fake->argument) : FAKE_NONE;
        pthread_mutex_unlock(&fake->lock);
        if (fault_before(call, fault))
                return;
        pthread_mutex_lock(&fake->lock);
        if (*fake->token && strcmp(server_field(call, "authorization", token, sizeof token), fake->token))
                refuse(&answer, 401, "InvalidAuthenticationInfo");
        else if (!strcmp(call->method, "PUT"))
                put(fake, call, path, &answer);
        else if (!strcmp(call->method, "DELETE"))
                forget(fake, call, path, &answer);
        else
                get(fake, call, path, &answer);
        answer_with(call, fault, &answer);
        pthread_mutex_unlock(&fake->lock);
}
