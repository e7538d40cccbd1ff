/* The answers of S3 and Azure Blob to transfers and to requests for Nebula's documents. One lock guards all objects; no body is sent or received under it. */
#include "sink.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define KEPT_MAX (1u << 20) /* bytes of a body that is kept in any case */
#define UPLOADS_MAX 256u
#define PARTS_MAX 10000u

struct bytes { /* an object's body; the last owner frees it */
        unsigned owners;
        uint64_t size;
        char *data; /* NULL: the pattern */
};
struct object {
        struct object *next; /* by key */
        char *key;           /* "/bucket/name" */
        struct bytes *bytes;
        unsigned etag;
        time_t time;
        char writer[64];
};
struct upload {
        unsigned id;
        char writer[64];
        struct bytes *parts[PARTS_MAX]; /* of Azure: in the order in which they came */
        char path[1100];
        unsigned count;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct object *objects;
static struct upload *uploads[UPLOADS_MAX];
static unsigned last_etag, last_upload;
static bool keeps_all;

void objects_init(bool keeps)
{
        keeps_all = keeps;
}

/* Lock held. NULL is fine. */
static void drop(struct bytes *bytes)
{
        if (!bytes || --bytes->owners)
                return;
        free(bytes->data);
        free(bytes);
}

static struct object *find(const char *key)
{
        struct object *object = objects;

        while (object && strcmp(object->key, key) < 0)
                object = object->next;
        return object && !strcmp(object->key, key) ? object : NULL;
}

static struct object *set(const char *key, const char *writer, struct bytes *bytes)
{
        struct object **at = &objects, *object;

        while (*at && strcmp((*at)->key, key) < 0)
                at = &(*at)->next;
        object = *at;
        if (!object || strcmp(object->key, key)) {
                object = calloc(1, sizeof *object);
                object->key = strdup(key);
                object->next = *at;
                *at = object;
        }
        drop(object->bytes);
        object->bytes = bytes;
        object->etag = ++last_etag;
        object->time = time(NULL);
        snprintf(object->writer, sizeof object->writer, "%s", writer);
        return object;
}

static void forget(const char *key)
{
        struct object **at = &objects, *object;

        while (*at && strcmp((*at)->key, key) < 0)
                at = &(*at)->next;
        object = *at;
        if (!object || strcmp(object->key, key))
                return;
        *at = object->next;
        drop(object->bytes);
        free(object->key);
        free(object);
}

/* The body of a request. NULL: the connection has ended. */
static struct bytes *receive(struct call *call)
{
        struct bytes *bytes = calloc(1, sizeof *bytes);

        bytes->owners = 1;
        bytes->size = call->body_bytes;
        if (keeps_all || bytes->size <= KEPT_MAX)
                bytes->data = sink_take(call);
        if (bytes->data || (!keeps_all && bytes->size > KEPT_MAX && sink_drop(call)))
                return bytes;
        free(bytes);
        return NULL;
}

static struct bytes *join(struct upload *upload)
{
        struct bytes *whole = calloc(1, sizeof *whole);
        bool has_all = true;
        uint64_t at = 0;

        whole->owners = 1;
        for (unsigned i = 0; i < upload->count; i++) {
                whole->size += upload->parts[i] ? upload->parts[i]->size : 0;
                has_all = has_all && (!upload->parts[i] || upload->parts[i]->data);
        }
        whole->data = has_all ? malloc(whole->size + 1) : NULL;
        for (unsigned i = 0; i < upload->count; i++) {
                if (has_all && upload->parts[i])
                        memcpy(whole->data + at, upload->parts[i]->data, upload->parts[i]->size);
                at += upload->parts[i] ? upload->parts[i]->size : 0;
                drop(upload->parts[i]);
        }
        return whole;
}

static void say(struct call *call, int status, const char *fields, const char *text)
{
        sink_answer(call, status, fields, text, strlen(text));
}

static void refuse(struct call *call, int status, const char *code)
{
        char text[300], fields[100];

        snprintf(fields, sizeof fields, "x-ms-error-code: %s\r\nContent-Type: application/xml\r\n", code);
        snprintf(text, sizeof text, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>%s</Code><Message>no</Message></Error>", code);
        say(call, status, fields, text);
}

/* Lock held. */
static bool holds(const struct call *call, const struct object *object)
{
        char match[64], none[64], etag[32];

        sink_field(call, "if-match", match, sizeof match);
        sink_field(call, "if-none-match", none, sizeof none);
        snprintf(etag, sizeof etag, "\"e%u\"", object ? object->etag : 0);
        return !(*none && object) && !(*match && (!object || (strcmp(match, etag) && strcmp(match, "*"))));
}

/* Lock held. */
static void describe(const struct object *object, char *fields, size_t size)
{
        char date[64];
        struct tm when;

        strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", gmtime_r(&object->time, &when));
        snprintf(fields, size, "ETag: \"e%u\"\r\nLast-Modified: %s\r\nAccept-Ranges: bytes\r\nx-ms-blob-type: BlockBlob\r\n%s%s%s", object->etag, date,
                 *object->writer ? "x-amz-meta-nebula: " : "", object->writer, *object->writer ? "\r\n" : "");
}

static const char *writer_of(const struct call *call, char writer[64])
{
        if (!*sink_field(call, "x-amz-meta-nebula", writer, 64))
                sink_field(call, "x-ms-meta-nebula", writer, 64);
        return writer;
}

/* Makes the object, if the condition holds, and takes `bytes`. */
static void make(struct call *call, const char *writer, struct bytes *bytes, int status, const char *text)
{
        struct object *object;
        char fields[512];

        pthread_mutex_lock(&lock);
        object = find(call->path);
        if (!holds(call, object)) {
                drop(bytes);
                pthread_mutex_unlock(&lock);
                refuse(call, 412, "PreconditionFailed");
                return;
        }
        describe(set(call->path, writer, bytes), fields, sizeof fields);
        pthread_mutex_unlock(&lock);
        say(call, status, fields, text);
}

/* Lock held. `id` 0: a new one. */
static struct upload *upload_of(unsigned id, const char *path)
{
        for (unsigned i = 0; id && i < UPLOADS_MAX; i++)
                if (uploads[i] && uploads[i]->id == id)
                        return uploads[i];
        for (unsigned i = 0; !id && i < UPLOADS_MAX; i++)
                if (!uploads[i]) {
                        uploads[i] = calloc(1, sizeof **uploads);
                        uploads[i]->id = ++last_upload;
                        snprintf(uploads[i]->path, sizeof uploads[i]->path, "%s", path);
                        return uploads[i];
                }
        return NULL;
}

/* Lock held. */
static void end_upload(struct upload *upload, bool drops)
{
        for (unsigned i = 0; drops && i < upload->count; i++)
                drop(upload->parts[i]);
        for (unsigned i = 0; i < UPLOADS_MAX; i++)
                if (uploads[i] == upload)
                        uploads[i] = NULL;
        free(upload);
}

static void begin_upload(struct call *call)
{
        struct upload *upload;
        unsigned id;
        char text[400];

        pthread_mutex_lock(&lock);
        upload = upload_of(0, call->path);
        if (!upload)
                abort();
        writer_of(call, upload->writer);
        id = upload->id;
        pthread_mutex_unlock(&lock);
        snprintf(text, sizeof text,
                 "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<InitiateMultipartUploadResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">"
                 "<Bucket>b</Bucket><Key>k</Key><UploadId>%u</UploadId></InitiateMultipartUploadResult>", id);
        say(call, 200, "Content-Type: application/xml\r\n", text);
}

/* NULL: there is none. */
static struct bytes *copy_range(const struct call *call, const char *source)
{
        unsigned long long first = 0, last = 0;
        struct bytes *bytes = NULL;
        struct object *from;
        char range[64];

        pthread_mutex_lock(&lock);
        from = find(source);
        if (from && sscanf(sink_field(call, "x-amz-copy-source-range", range, sizeof range), "bytes=%llu-%llu", &first, &last) == 2 &&
            last < from->bytes->size) {
                bytes = calloc(1, sizeof *bytes);
                bytes->owners = 1;
                bytes->size = last + 1 - first;
                if (from->bytes->data)
                        bytes->data = memcpy(malloc(bytes->size + 1), from->bytes->data + first, bytes->size);
        } else if (from) {
                (bytes = from->bytes)->owners++;
        }
        pthread_mutex_unlock(&lock);
        return bytes;
}

static void put_part(struct call *call, unsigned id, unsigned number)
{
        char source[1100], text[200];
        struct upload *upload;
        struct bytes *bytes;

        if (*sink_field(call, "x-amz-copy-source", source, sizeof source)) {
                bytes = copy_range(call, source);
        } else {
                bytes = receive(call);
                if (!bytes)
                        return;
        }
        pthread_mutex_lock(&lock);
        upload = upload_of(id, call->path);
        if (upload && bytes && number >= 1 && number <= PARTS_MAX) {
                drop(upload->parts[number - 1]);
                upload->parts[number - 1] = bytes;
                upload->count = number > upload->count ? number : upload->count;
        }
        pthread_mutex_unlock(&lock);
        snprintf(text, sizeof text, "<CopyPartResult><ETag>&quot;p%u&quot;</ETag></CopyPartResult>", number);
        snprintf(source, sizeof source, "ETag: \"p%u\"\r\n", number);
        if (upload && bytes)
                say(call, 200, source, text);
        else
                refuse(call, 404, upload ? "NoSuchKey" : "NoSuchUpload");
}

static void complete(struct call *call, unsigned id)
{
        struct bytes *whole = NULL;
        struct upload *upload;
        char writer[64] = "", *list = sink_take(call);

        free(list);
        pthread_mutex_lock(&lock);
        upload = upload_of(id, call->path);
        if (upload && holds(call, find(call->path))) {
                whole = join(upload);
                memcpy(writer, upload->writer, sizeof writer);
                end_upload(upload, false);
        }
        pthread_mutex_unlock(&lock);
        if (whole)
                make(call, writer, whole, 200, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<CompleteMultipartUploadResult><Bucket>b</Bucket><Key>k</Key>"
                                               "<ETag>&quot;whole&quot;</ETag></CompleteMultipartUploadResult>");
        else
                refuse(call, upload ? 412 : 404, upload ? "PreconditionFailed" : "NoSuchUpload");
}

static void copy(struct call *call, const char *source)
{
        struct bytes *bytes = NULL;
        struct object *from;
        char writer[64];

        pthread_mutex_lock(&lock);
        from = find(source);
        if (from)
                (bytes = from->bytes)->owners++;
        pthread_mutex_unlock(&lock);
        if (bytes)
                make(call, writer_of(call, writer), bytes, 200, "<CopyObjectResult><ETag>&quot;copy&quot;</ETag></CopyObjectResult>");
        else
                refuse(call, 404, "NoSuchKey");
}

/* Blocks of one blob wait under its path; the list takes all of them. */
static struct upload *waiting_blocks(const char *path)
{
        for (unsigned i = 0; i < UPLOADS_MAX; i++)
                if (uploads[i] && !strcmp(uploads[i]->path, path))
                        return uploads[i];
        return upload_of(0, path);
}

static void put_azure(struct call *call, const char *comp)
{
        bool is_list = !strcmp(comp, "blocklist");
        struct bytes *bytes = receive(call), *whole;
        struct upload *upload;
        char writer[64];

        if (!bytes)
                return;
        pthread_mutex_lock(&lock);
        upload = waiting_blocks(call->path);
        if (!is_list)
                upload->parts[upload->count++] = bytes;
        else
                drop(bytes);
        whole = is_list ? join(upload) : NULL;
        if (is_list)
                end_upload(upload, false);
        pthread_mutex_unlock(&lock);
        if (is_list)
                make(call, writer_of(call, writer), whole, 201, "");
        else
                say(call, 201, "x-ms-request-server-encrypted: true\r\n", "");
}

static void put(struct call *call)
{
        char id[32], number[16], comp[16], source[1100], writer[64], version[32];
        struct bytes *bytes;

        if (sink_param(call, "uploadId", id, sizeof id) && sink_param(call, "partNumber", number, sizeof number)) {
                put_part(call, (unsigned)atoi(id), (unsigned)atoi(number));
        } else if (sink_param(call, "comp", comp, sizeof comp)) {
                put_azure(call, comp);
        } else if (*sink_field(call, "x-amz-copy-source", source, sizeof source)) {
                copy(call, source);
        } else if ((bytes = receive(call)) != NULL) {
                sink_field(call, "x-ms-version", version, sizeof version);
                make(call, writer_of(call, writer), bytes, *version ? 201 : 200, "");
        }
}

static void get_range(struct call *call, struct bytes *bytes, char *fields, size_t room)
{
        unsigned long long first = 0, last = bytes->size ? bytes->size - 1 : 0;
        char range[64];
        size_t used = strlen(fields);
        bool is_range;

        if (!*sink_field(call, "x-ms-range", range, sizeof range))
                sink_field(call, "range", range, sizeof range);
        is_range = sscanf(range, "bytes=%llu-%llu", &first, &last) >= 1;
        if (is_range && first >= bytes->size) {
                refuse(call, 416, "InvalidRange");
                return;
        }
        if (last >= bytes->size)
                last = bytes->size ? bytes->size - 1 : 0;
        if (is_range)
                snprintf(fields + used, room - used, "Content-Range: bytes %llu-%llu/%llu\r\n", first, last, (unsigned long long)bytes->size);
        if (bytes->data || !bytes->size)
                sink_answer(call, is_range ? 206 : 200, fields, bytes->size ? bytes->data + first : "", bytes->size ? last + 1 - first : 0);
        else
                sink_answer_pattern(call, is_range ? 206 : 200, fields, first, last + 1 - first);
}

static void get(struct call *call)
{
        struct bytes none = { .owners = 1 }, *bytes = NULL;
        struct object *object, pattern = { .etag = 1, .bytes = &none };
        char fields[1024];
        bool is_met = true;

        pthread_mutex_lock(&lock);
        object = find(call->path);
        if (!object && strstr(call->path, "/pattern-") && sscanf(strstr(call->path, "/pattern-"), "/pattern-%lu", &none.size) == 1)
                object = &pattern;
        if (object && (is_met = holds(call, object))) {
                bytes = object->bytes;
                bytes->owners++;
                describe(object, fields, sizeof fields);
        }
        pthread_mutex_unlock(&lock);
        if (bytes)
                get_range(call, bytes, fields, sizeof fields);
        else
                refuse(call, is_met ? 404 : 412, is_met ? (strstr(call->head, "x-ms-version") ? "BlobNotFound" : "NoSuchKey") : "PreconditionFailed");
        pthread_mutex_lock(&lock);
        if (bytes && bytes != &none)
                drop(bytes);
        pthread_mutex_unlock(&lock);
}

/* Lock held. One object of a listing, or the prefix that it is folded into. */
static void list_one(FILE *file, const struct object *object, const char *name, const char *prefix, const char *delimiter, char *folded, size_t size)
{
        const char *rest = name + strlen(prefix), *cut = *delimiter ? strstr(rest, delimiter) : NULL;
        char date[64], found[1100];
        struct tm when;

        if (cut) {
                snprintf(found, sizeof found, "%.*s", (int)(cut + 1 - name), name);
                if (strcmp(found, folded))
                        fprintf(file, "<CommonPrefixes><Prefix>%s</Prefix></CommonPrefixes>", found);
                snprintf(folded, size, "%s", found);
                return;
        }
        strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S.000Z", gmtime_r(&object->time, &when));
        fprintf(file, "<Contents><Key>%s</Key><LastModified>%s</LastModified><ETag>&quot;e%u&quot;</ETag><Size>%llu</Size></Contents>", name, date,
                object->etag, (unsigned long long)object->bytes->size);
}

static void list(struct call *call)
{
        char bucket[1110], prefix[1100] = "", delimiter[8] = "", folded[1100] = "", *text = NULL;
        size_t size = 0, length;
        FILE *file = open_memstream(&text, &size);

        snprintf(bucket, sizeof bucket, "%s/", call->path);
        length = strlen(bucket);
        if (length > 1 && bucket[length - 2] == '/')
                bucket[--length] = 0;
        sink_param(call, "prefix", prefix, sizeof prefix);
        sink_param(call, "delimiter", delimiter, sizeof delimiter);
        fprintf(file, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult><IsTruncated>false</IsTruncated>");
        pthread_mutex_lock(&lock);
        for (struct object *object = objects; object; object = object->next)
                if (!strncmp(object->key, bucket, length) && !strncmp(object->key + length, prefix, strlen(prefix)))
                        list_one(file, object, object->key + length, prefix, delimiter, folded, sizeof folded);
        pthread_mutex_unlock(&lock);
        fprintf(file, "</ListBucketResult>");
        fclose(file);
        sink_answer(call, 200, "Content-Type: application/xml\r\n", text, size);
        free(text);
}

static void forget_one(struct call *call)
{
        char id[32];
        struct object *object;
        bool is_met;

        pthread_mutex_lock(&lock);
        object = find(call->path);
        is_met = !object || holds(call, object);
        if (sink_param(call, "uploadId", id, sizeof id)) {
                struct upload *upload = upload_of((unsigned)atoi(id), call->path);

                if (upload)
                        end_upload(upload, true);
        } else if (is_met) {
                forget(call->path);
        }
        pthread_mutex_unlock(&lock);
        if (is_met)
                say(call, 204, "", "");
        else
                refuse(call, 412, "PreconditionFailed");
}

void objects_serve(struct call *call)
{
        char id[32];

        if (!strcmp(call->method, "POST") && sink_param(call, "uploads", id, sizeof id))
                begin_upload(call);
        else if (!strcmp(call->method, "POST") && sink_param(call, "uploadId", id, sizeof id))
                complete(call, (unsigned)atoi(id));
        else if (!strcmp(call->method, "PUT"))
                put(call);
        else if (!strcmp(call->method, "DELETE"))
                forget_one(call);
        else if (!strcmp(call->method, "GET") && sink_param(call, "list-type", id, sizeof id))
                list(call);
        else
                get(call);
}
