#include "store/s3/fake_s3.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/http/crypt.h"
#include "sum/sum.h"

struct answer {
        int status;
        char fields[512];
        char text[600];
        const char *body; /* NULL: the text */
        size_t size;
};

void fake_init(struct fake_s3 *fake)
{
        memset(fake, 0, sizeof *fake);
        pthread_mutex_init(&fake->lock, NULL);
}

static void drop_upload(struct fake_upload *upload)
{
        for (size_t i = 0; i < FAKE_PARTS; i++)
                free(upload->parts[i].data);
        memset(upload, 0, sizeof *upload);
}

void fake_done(struct fake_s3 *fake)
{
        for (size_t i = 0; i < FAKE_OBJECTS; i++)
                free(fake->objects[i].data);
        for (size_t i = 0; i < FAKE_UPLOADS; i++)
                drop_upload(&fake->uploads[i]);
        pthread_mutex_destroy(&fake->lock);
}

unsigned fake_uploads_open(const struct fake_s3 *fake)
{
        unsigned count = 0;

        for (size_t i = 0; i < FAKE_UPLOADS; i++)
                count += *fake->uploads[i].path != 0;
        return count;
}

unsigned fake_uploads_drop(struct fake_s3 *fake)
{
        unsigned count;

        pthread_mutex_lock(&fake->lock);
        count = fake_uploads_open(fake);
        for (size_t i = 0; i < FAKE_UPLOADS; i++)
                drop_upload(&fake->uploads[i]);
        pthread_mutex_unlock(&fake->lock);
        return count;
}

static struct fake_object *find(struct fake_s3 *fake, const char *path, bool make)
{
        struct fake_object *free_one = NULL;

        for (size_t i = 0; i < FAKE_OBJECTS; i++) {
                if (!strcmp(fake->objects[i].path, path))
                        return &fake->objects[i];
                if (!*fake->objects[i].path && !free_one)
                        free_one = &fake->objects[i];
        }
        if (!make || !free_one)
                return NULL;
        snprintf(free_one->path, sizeof free_one->path, "%s", path);
        return free_one;
}

struct fake_object *fake_find(struct fake_s3 *fake, const char *path)
{
        struct fake_object *object = find(fake, path, false);

        return object && object->data ? object : NULL;
}

static void refuse(struct answer *answer, int status, const char *code)
{
        answer->status = status;
        snprintf(answer->text, sizeof answer->text, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>%s</Code><Message>no</Message></Error>", code);
}

/* Whether the conditions of the request hold. */
static bool holds(const struct server_call *call, const struct fake_object *object, struct answer *answer)
{
        char match[64], none[64], etag[32];
        bool is_there = object && object->data;

        server_field(call, "if-match", match, sizeof match);
        server_field(call, "if-none-match", none, sizeof none);
        snprintf(etag, sizeof etag, "\"e%u\"", is_there ? object->etag : 0);
        if (*match && !is_there)
                refuse(answer, 404, "NoSuchKey");
        else if ((*none && is_there) || (*match && strcmp(match, etag)))
                refuse(answer, 412, "PreconditionFailed");
        else
                return true;
        return false;
}

/* Whether the sum in the header is another than that of the bytes. */
static bool is_changed(const struct server_call *call, const void *data, size_t size)
{
        uint64_t crc = sum_crc64(0, data, size);
        char said[32], found[16];
        uint8_t bytes[8];

        for (size_t i = 0; i < 8; i++)
                bytes[i] = (uint8_t)(crc >> (56 - 8 * i));
        crypt_base64(bytes, 8, found);
        return *server_field(call, "x-amz-checksum-crc64nvme", said, sizeof said) && strcmp(said, found);
}

static void stamp(const struct fake_object *object, struct answer *answer)
{
        snprintf(answer->fields, sizeof answer->fields, "ETag: \"e%u\"\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n%s%s%s", object->etag,
                 *object->writer ? "x-amz-meta-nebula: " : "", object->writer, *object->writer ? "\r\n" : "");
}

static void set_data(struct fake_s3 *fake, struct fake_object *object, const char *writer, char *data, size_t size, struct answer *answer)
{
        free(object->data);
        object->data = data;
        object->size = size;
        object->etag = ++fake->etags;
        snprintf(object->writer, sizeof object->writer, "%s", fake->lacks & FAKE_LACKS_METADATA ? "" : writer);
        stamp(object, answer);
        answer->status = 200;
}

static char *copy_of(const void *data, size_t size)
{
        return memcpy(malloc(size + 1), data, size);
}

/* The upload that the query names. */
static struct fake_upload *find_upload(struct fake_s3 *fake, const struct server_call *call, const char *path)
{
        const char *id = strstr(call->target, "uploadId=up-");

        for (size_t i = 0; id && i < FAKE_UPLOADS; i++)
                if (*fake->uploads[i].path && fake->uploads[i].id == (unsigned)atoi(id + 12) && !strcmp(fake->uploads[i].path, path))
                        return &fake->uploads[i];
        return NULL;
}

static void begin_upload(struct fake_s3 *fake, const struct server_call *call, const char *path, struct answer *answer)
{
        size_t i = 0;

        while (*fake->uploads[i].path)
                if (++i == FAKE_UPLOADS)
                        abort();
        snprintf(fake->uploads[i].path, sizeof fake->uploads[i].path, "%s", path);
        server_field(call, "x-amz-meta-nebula", fake->uploads[i].writer, sizeof fake->uploads[i].writer);
        fake->uploads[i].id = ++fake->uploads_begun;
        answer->status = 200;
        snprintf(answer->text, sizeof answer->text,
                 "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<InitiateMultipartUploadResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">"
                 "<Bucket>b</Bucket><Key>k</Key><UploadId>up-%u</UploadId></InitiateMultipartUploadResult>", fake->uploads[i].id);
}

/* NULL: it is refused. The path of the source is that of a bucket's object; a real server decodes it. */
static char *copy_range(struct fake_s3 *fake, const struct server_call *call, const char *source, size_t *ret_size, struct answer *answer)
{
        struct fake_object *object = fake_find(fake, source);
        char range[64], match[64], etag[32];
        size_t first, last;

        snprintf(fake->copy_head, sizeof fake->copy_head, "%s", call->head);
        if (fake->copy_status) {
                refuse(answer, fake->copy_status, fake->copy_status == 200 ? "AccessDenied" : "Refused");
                return NULL;
        }
        if (fake->replaces_source && object) {
                memset(object->data, 0, object->size);
                object->etag = ++fake->etags;
        }
        snprintf(etag, sizeof etag, "\"e%u\"", object ? object->etag : 0);
        if (!object)
                refuse(answer, 404, "NoSuchKey");
        else if (strcmp(server_field(call, "x-amz-copy-source-if-match", match, sizeof match), etag))
                refuse(answer, 412, "PreconditionFailed");
        else if (sscanf(server_field(call, "x-amz-copy-source-range", range, sizeof range), "bytes=%zu-%zu", &first, &last) != 2 || last >= object->size)
                refuse(answer, 400, "InvalidArgument");
        else
                return copy_of(object->data + first, *ret_size = last + 1 - first);
        return NULL;
}

static const char *sum_text(const void *data, size_t size, char text[16])
{
        uint64_t sum = sum_crc64(0, data, size);
        uint8_t bytes[8];

        for (size_t i = 0; i < sizeof bytes; i++)
                bytes[i] = (uint8_t)(sum >> (56 - 8 * i));
        crypt_base64(bytes, sizeof bytes, text);
        return text;
}

/* The ETag is the MD5 on servers that compute no CRC-64. */
static void describe_copy(const struct fake_s3 *fake, struct fake_part *part, struct answer *answer)
{
        char text[16];

        if (fake->copy_sums == FAKE_COPY_MD5)
                crypt_md5(part->data, part->size, part->etag);
        snprintf(answer->text, sizeof answer->text, "<CopyPartResult><ETag>&quot;%s&quot;</ETag>%s%s%s</CopyPartResult>", part->etag,
                 fake->copy_sums ? "" : "<ChecksumCRC64NVME>", fake->copy_sums ? "" : sum_text(part->data, part->size, text),
                 fake->copy_sums ? "" : "</ChecksumCRC64NVME>");
}

static void put_part(struct fake_s3 *fake, const struct server_call *call, const char *path, struct answer *answer)
{
        struct fake_upload *upload = find_upload(fake, call, path);
        int number = atoi(strstr(call->target, "partNumber=") + 11);

        if (!upload) {
                refuse(answer, 404, "NoSuchUpload");
        } else if (number < 1 || number > FAKE_PARTS) {
                refuse(answer, 400, "InvalidArgument");
        } else {
                char source[300], *data;
                size_t size = call->body_size;

                data = *server_field(call, "x-amz-copy-source", source, sizeof source) ? copy_range(fake, call, source, &size, answer)
                                                                                      : copy_of(call->body, size);
                if (!data)
                        return;
                fake->body_bytes += call->body_size;
                free(upload->parts[number - 1].data);
                upload->parts[number - 1] = (struct fake_part){ .data = data, .size = size };
                snprintf(upload->parts[number - 1].etag, sizeof upload->parts[number - 1].etag, "p%d", number);
                answer->status = 200;
                if (*source)
                        describe_copy(fake, &upload->parts[number - 1], answer);
                snprintf(answer->fields, sizeof answer->fields, "ETag: \"%s\"\r\n", upload->parts[number - 1].etag);
        }
}

/* Two parts on a page. */
static void list_parts(struct fake_s3 *fake, const struct server_call *call, const char *path, struct answer *answer)
{
        struct fake_upload *upload = find_upload(fake, call, path);
        const char *marker = strstr(call->target, "part-number-marker=");
        int number = marker ? atoi(marker + 19) : 0, last = number + 2;
        size_t used;

        if (!upload) {
                refuse(answer, 404, "NoSuchUpload");
                return;
        }
        answer->status = 200;
        used = (size_t)snprintf(answer->text, sizeof answer->text, "<ListPartsResult><IsTruncated>%s</IsTruncated><NextPartNumberMarker>%d</NextPartNumberMarker>",
                                last < FAKE_PARTS ? "true" : "false", last);
        for (; number < last; number++) {
                const struct fake_part *part = &upload->parts[number];
                char text[16];

                if (!part->data)
                        continue;
                sum_text(part->data, part->size, text);
                used += (size_t)snprintf(answer->text + used, sizeof answer->text - used, "<Part><PartNumber>%d</PartNumber><ETag>&quot;%s&quot;</ETag>"
                                         "<Size>%zu</Size>%s%s%s</Part>", number + 1, part->etag, part->size, fake->lists_no_sums ? "" : "<ChecksumCRC64NVME>",
                                         fake->lists_no_sums ? "" : text, fake->lists_no_sums ? "" : "</ChecksumCRC64NVME>");
        }
        snprintf(answer->text + used, sizeof answer->text - used, "</ListPartsResult>");
}

static void complete_now(struct fake_s3 *fake, const struct server_call *call, const char *path, struct answer *answer)
{
        struct fake_upload *upload = find_upload(fake, call, path);
        struct fake_object *object = find(fake, path, true);
        char *data, wanted[128];
        size_t size = 0;

        if (*fake->error_in_200) {
                refuse(answer, 200, fake->error_in_200);
                if (!strcmp(fake->error_in_200, "cut")) /* S3 sends blanks while it works */
                        snprintf(answer->text, sizeof answer->text, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n  ");
                fake->error_in_200[0] = 0;
                return;
        }
        if (!upload) {
                refuse(answer, 404, "NoSuchUpload");
                return;
        }
        if (!(fake->lacks & FAKE_LACKS_COMPLETE_CONDITION) && !holds(call, object, answer))
                return;
        data = malloc(64u << 20);
        for (int i = 0; i < FAKE_PARTS && upload->parts[i].data; i++) {
                snprintf(wanted, sizeof wanted, "<PartNumber>%d</PartNumber><ETag>&quot;%s&quot;</ETag>", i + 1, upload->parts[i].etag);
                if (!strstr(call->body, wanted)) {
                        free(data);
                        refuse(answer, 400, "InvalidPart");
                        return;
                }
                memcpy(data + size, upload->parts[i].data, upload->parts[i].size);
                size += upload->parts[i].size;
        }
        if (is_changed(call, data, size)) {
                free(data);
                refuse(answer, 400, "BadDigest");
                return;
        }
        set_data(fake, object, upload->writer, realloc(data, size + 1), size, answer);
        snprintf(answer->text, sizeof answer->text, "<CompleteMultipartUploadResult><ETag>&quot;e%u&quot;</ETag></CompleteMultipartUploadResult>", object->etag);
        drop_upload(upload);
}

static void complete(struct fake_s3 *fake, const struct server_call *call, const char *path, struct answer *answer)
{
        struct answer lost = { .status = 400 };

        if (!fake->conflicts) {
                complete_now(fake, call, path, answer);
                return;
        }
        if (!--fake->conflicts)
                complete_now(fake, call, path, &lost);
        refuse(answer, 409, "ConditionalRequestConflict");
}

static void copy_whole(struct fake_s3 *fake, struct fake_object *object, const char *source, struct answer *answer)
{
        struct fake_object *from = fake_find(fake, source);

        if (from)
                set_data(fake, object, "", copy_of(from->data, from->size), from->size, answer);
        else
                refuse(answer, 404, "NoSuchKey");
}

static void put(struct fake_s3 *fake, const struct server_call *call, const char *path, struct answer *answer)
{
        struct fake_object *object = find(fake, path, true);
        char writer[64], source[300];

        if (is_changed(call, call->body, call->body_size))
                refuse(answer, 400, "BadDigest");
        else if (strstr(call->target, "partNumber="))
                put_part(fake, call, path, answer);
        else if (*server_field(call, "x-amz-copy-source", source, sizeof source))
                copy_whole(fake, object, source, answer);
        else if (fake->lacks & FAKE_LACKS_PUT_CONDITION || holds(call, object, answer))
                set_data(fake, object, server_field(call, "x-amz-meta-nebula", writer, sizeof writer), copy_of(call->body, call->body_size), call->body_size, answer);
}

static void get(struct fake_s3 *fake, const struct server_call *call, const char *path, struct answer *answer)
{
        struct fake_object *object = fake_find(fake, path);
        char range[64];
        size_t first = 0, last, used;

        if (strstr(call->target, "uploadId=")) {
                list_parts(fake, call, path, answer);
                return;
        }
        if (!object) {
                refuse(answer, 404, "NoSuchKey");
                return;
        }
        if (!(fake->lacks & FAKE_LACKS_GET_CONDITION) && !holds(call, object, answer))
                return;
        stamp(object, answer);
        if (fake->lacks & FAKE_REPLACES_WHILE_READ)
                object->etag = ++fake->etags;
        answer->status = 200;
        answer->body = object->data;
        answer->size = object->size;
        if (sscanf(server_field(call, "range", range, sizeof range), "bytes=%zu-%zu", &first, &last) != 2)
                return;
        used = strlen(answer->fields);
        if (first >= object->size) {
                answer->body = NULL;
                refuse(answer, 416, "InvalidRange");
                snprintf(answer->fields, sizeof answer->fields, "Content-Range: bytes */%zu\r\n", object->size);
                return;
        }
        last = last < object->size ? last : object->size - 1;
        snprintf(answer->fields + used, sizeof answer->fields - used, "Content-Range: bytes %zu-%zu/%zu\r\n", first, last, object->size);
        answer->status = 206;
        answer->body += first;
        answer->size = last + 1 - first;
}

static void forget(struct fake_s3 *fake, const struct server_call *call, const char *path, struct answer *answer)
{
        struct fake_upload *upload = find_upload(fake, call, path);
        struct fake_object *object = fake_find(fake, path);
        char match[64];

        answer->status = 204;
        if (upload) {
                drop_upload(upload);
        } else if (fake->refuses_conditional_removal && *server_field(call, "if-match", match, sizeof match)) {
                refuse(answer, 501, "NotImplemented");
        } else if (!object && *server_field(call, "if-match", match, sizeof match)) {
                refuse(answer, 404, "NoSuchKey");
        } else if (object && (fake->lacks & FAKE_LACKS_REMOVAL_CONDITION || holds(call, object, answer))) {
                free(object->data);
                object->data = NULL;
        }
}

static void answer_with(struct server_call *call, bool is_marked, enum fake_fault fault, struct answer *answer)
{
        char fields[1024], id[64];

        if (!answer->body) {
                answer->body = answer->text;
                answer->size = strlen(answer->text);
        }
        snprintf(id, sizeof id, is_marked ? "x-amz-request-id: %u\r\n" : "Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n", call->number);
        snprintf(fields, sizeof fields, "%s%s", id, answer->fields);
        fault_answer(call, fault, answer->status, fields, answer->body, answer->size);
}

/* Whether the signature is by a key and for a region that are not taken. */
static bool is_refused(const struct fake_s3 *fake, const struct server_call *call, struct answer *answer)
{
        char signature[600], wanted[128];

        server_field(call, "authorization", signature, sizeof signature);
        snprintf(wanted, sizeof wanted, "Credential=%s/", fake->access);
        if (*fake->access && !strstr(signature, wanted)) {
                refuse(answer, 400, "ExpiredToken");
                return true;
        }
        snprintf(wanted, sizeof wanted, "/%s/s3/aws4_request", fake->region);
        if (*fake->region && !strstr(signature, wanted)) {
                refuse(answer, 400, "AuthorizationHeaderMalformed");
                snprintf(answer->fields, sizeof answer->fields, "x-amz-bucket-region: %s\r\n", fake->region);
                return true;
        }
        return false;
}

void fake_serve(struct server_call *call, void *argument)
{
        struct fake_s3 *fake = argument;
        struct answer answer = { .status = 400 };
        char path[300];
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
        if (is_refused(fake, call, &answer))
                ;
        else if (fake->lacks & FAKE_LACKS_SUMS && strstr(call->head, "x-amz-checksum"))
                refuse(&answer, 501, "NotImplemented");
        else if (fake->lacks & FAKE_LACKS_MARKS && strstr(call->target, "list-type=2"))
                answer = (struct answer){ .status = 200, .text = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>" };
        else if (!strcmp(call->method, "POST") && strstr(call->target, "?uploads"))
                begin_upload(fake, call, path, &answer);
        else if (!strcmp(call->method, "POST"))
                complete(fake, call, path, &answer);
        else if (!strcmp(call->method, "PUT"))
                put(fake, call, path, &answer);
        else if (!strcmp(call->method, "DELETE"))
                forget(fake, call, path, &answer);
        else
                get(fake, call, path, &answer);
        answer_with(call, !(fake->lacks & FAKE_LACKS_MARKS), fault, &answer);
        pthread_mutex_unlock(&fake->lock);
}
