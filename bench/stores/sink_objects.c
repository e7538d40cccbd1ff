/* The answers of S3 and Azure Blob to transfers and to requests for Nebula's documents. */
#include "sink_objects.h"

#include <stdlib.h>
#include <string.h>

#define KEPT_MAX (1u << 20) /* bytes of a body that is kept in any case */
#define PAGE_MAX 1000       /* entries of a listing */

pthread_mutex_t objects_lock = PTHREAD_MUTEX_INITIALIZER;
static struct object *heads[OBJECT_LEVELS]; /* of the lists in which each object is, sparser with each level: a skip list */
static unsigned last_etag;
static bool keeps_all;

void objects_init(bool keeps)
{
        keeps_all = keeps;
}

/* Lock held. NULL is fine. */
void objects_drop(struct bytes *bytes)
{
        if (!bytes || --bytes->owners)
                return;
        for (size_t i = 0; i < bytes->part_count; i++)
                objects_drop(bytes->parts[i]);
        free(bytes->parts);
        free(bytes->data);
        free(bytes);
}

/* Lock held. *ret_at[level]: the link that leads to the first object of the level with `key` or a later key. */
static struct object *find_from(const char *key, struct object **ret_at[OBJECT_LEVELS])
{
        struct object **at = heads;

        for (int level = OBJECT_LEVELS; level--;) {
                while (at[level] && strcmp(at[level]->key, key) < 0)
                        at = at[level]->next;
                ret_at[level] = &at[level];
        }
        return at[0];
}

struct object *objects_find(const char *key)
{
        struct object **at[OBJECT_LEVELS], *object = find_from(key, at);

        return object && !strcmp(object->key, key) ? object : NULL;
}

static struct object *add(const char *key, struct object **at[OBJECT_LEVELS])
{
        struct object *object = calloc(1, sizeof *object);

        object->key = strdup(key);
        object->levels = 1;
        while (object->levels < OBJECT_LEVELS && random() % 4 == 0)
                object->levels++;
        for (int level = 0; level < object->levels; level++) {
                object->next[level] = *at[level];
                *at[level] = object;
        }
        return object;
}

static struct object *set(const char *key, const char *writer, struct bytes *bytes)
{
        struct object **at[OBJECT_LEVELS], *object = find_from(key, at);

        if (!object || strcmp(object->key, key))
                object = add(key, at);
        objects_drop(object->bytes);
        object->bytes = bytes;
        object->etag = ++last_etag;
        object->time = time(NULL);
        snprintf(object->writer, sizeof object->writer, "%s", writer);
        return object;
}

static void forget(const char *key)
{
        struct object **at[OBJECT_LEVELS], *object = find_from(key, at);

        if (!object || strcmp(object->key, key))
                return;
        for (int level = 0; level < object->levels; level++)
                *at[level] = object->next[level];
        objects_drop(object->bytes);
        free(object->key);
        free(object);
}

/* The body of a request. NULL: the connection has ended. */
struct bytes *objects_receive(struct call *call)
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

void objects_say(struct call *call, int status, const char *fields, const char *text)
{
        sink_answer(call, status, fields, text, strlen(text));
}

void objects_refuse(struct call *call, int status, const char *code)
{
        char text[300], fields[100];

        snprintf(fields, sizeof fields, "x-ms-error-code: %s\r\nContent-Type: application/xml\r\n", code);
        snprintf(text, sizeof text, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>%s</Code><Message>no</Message></Error>", code);
        objects_say(call, status, fields, text);
}

/* Lock held. */
bool objects_holds(const struct call *call, const struct object *object)
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

const char *objects_writer(const struct call *call, char writer[64])
{
        if (!*sink_field(call, "x-amz-meta-nebula", writer, 64))
                sink_field(call, "x-ms-meta-nebula", writer, 64);
        return writer;
}

/* Makes the object, if the condition holds, and takes `bytes`. */
void objects_make(struct call *call, const char *writer, struct bytes *bytes, int status, const char *text)
{
        struct object *object;
        char fields[512];

        pthread_mutex_lock(&objects_lock);
        object = objects_find(call->path);
        if (!objects_holds(call, object)) {
                objects_drop(bytes);
                pthread_mutex_unlock(&objects_lock);
                objects_refuse(call, 412, "PreconditionFailed");
                return;
        }
        describe(set(call->path, writer, bytes), fields, sizeof fields);
        pthread_mutex_unlock(&objects_lock);
        objects_say(call, status, fields, text);
}

static void copy(struct call *call, const char *source)
{
        struct bytes *bytes = NULL;
        struct object *from;
        char writer[64];

        pthread_mutex_lock(&objects_lock);
        from = objects_find(source);
        if (from)
                (bytes = from->bytes)->owners++;
        pthread_mutex_unlock(&objects_lock);
        if (bytes)
                objects_make(call, objects_writer(call, writer), bytes, 200, "<CopyObjectResult><ETag>&quot;copy&quot;</ETag></CopyObjectResult>");
        else
                objects_refuse(call, 404, "NoSuchKey");
}

static void put(struct call *call)
{
        char id[32], number[16], comp[16], source[1100], writer[64], version[32];
        struct bytes *bytes;

        if (sink_param(call, "uploadId", id, sizeof id) && sink_param(call, "partNumber", number, sizeof number)) {
                uploads_put_part(call, (unsigned)atoi(id), (unsigned)atoi(number));
        } else if (sink_param(call, "comp", comp, sizeof comp)) {
                uploads_put_block(call, !strcmp(comp, "blocklist"));
        } else if (*sink_field(call, "x-amz-copy-source", source, sizeof source)) {
                copy(call, source);
        } else if ((bytes = objects_receive(call)) != NULL) {
                sink_field(call, "x-ms-version", version, sizeof version);
                objects_make(call, objects_writer(call, writer), bytes, *version ? 201 : 200, "");
        }
}

struct iovec *objects_pieces(const struct bytes *bytes, uint64_t first, uint64_t size, size_t *ret_count)
{
        const struct bytes *const *parts = bytes->part_count ? (const struct bytes *const *)bytes->parts : &bytes;
        size_t all = bytes->part_count ? bytes->part_count : 1, count = 0;
        struct iovec *pieces = calloc(all, sizeof *pieces);

        for (size_t i = 0; i < all && size; i++) {
                uint64_t left = first < parts[i]->size ? parts[i]->size - first : 0, piece = left < size ? left : size;

                if (piece)
                        pieces[count++] = (struct iovec){ .iov_base = parts[i]->data + first, .iov_len = piece };
                first -= left ? first : parts[i]->size;
                size -= piece;
        }
        *ret_count = count;
        return pieces;
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
                objects_refuse(call, 416, "InvalidRange");
                return;
        }
        if (last >= bytes->size)
                last = bytes->size ? bytes->size - 1 : 0;
        if (is_range)
                snprintf(fields + used, room - used, "Content-Range: bytes %llu-%llu/%llu\r\n", first, last, (unsigned long long)bytes->size);
        if (bytes->data || bytes->part_count || !bytes->size) {
                size_t count;
                struct iovec *pieces = objects_pieces(bytes, first, bytes->size ? last + 1 - first : 0, &count);

                sink_answer_pieces(call, is_range ? 206 : 200, fields, pieces, count);
                free(pieces);
        } else {
                sink_answer_pattern(call, is_range ? 206 : 200, fields, first, last + 1 - first);
        }
}

static void get(struct call *call)
{
        struct bytes none = { .owners = 1 }, *bytes = NULL;
        struct object *object, pattern = { .etag = 1, .bytes = &none };
        char fields[1024];
        bool is_met = true;

        pthread_mutex_lock(&objects_lock);
        object = objects_find(call->path);
        if (!object && strstr(call->path, "/pattern-") && sscanf(strstr(call->path, "/pattern-"), "/pattern-%lu", &none.size) == 1)
                object = &pattern;
        if (object && (is_met = objects_holds(call, object))) {
                bytes = object->bytes;
                bytes->owners++;
                describe(object, fields, sizeof fields);
        }
        pthread_mutex_unlock(&objects_lock);
        if (bytes)
                get_range(call, bytes, fields, sizeof fields);
        else
                objects_refuse(call, is_met ? 404 : 412, is_met ? (strstr(call->head, "x-ms-version") ? "BlobNotFound" : "NoSuchKey") : "PreconditionFailed");
        pthread_mutex_lock(&objects_lock);
        if (bytes && bytes != &none)
                objects_drop(bytes);
        pthread_mutex_unlock(&objects_lock);
}

/* A listing that is being made. */
struct page {
        FILE *file;
        size_t most, count; /* entries */
        const char *prefix, *delimiter;
        char last[1100]; /* the name or folded prefix of the newest entry */
};

/* Lock held. One object of a listing, or the prefix that it is folded into. */
static void list_one(struct page *page, const struct object *object, const char *name)
{
        const char *rest = name + strlen(page->prefix), *cut = *page->delimiter ? strstr(rest, page->delimiter) : NULL;
        char date[64];
        struct tm when;

        page->count++;
        snprintf(page->last, sizeof page->last, "%.*s", cut ? (int)(cut + 1 - name) : (int)strlen(name), name);
        if (cut) {
                fprintf(page->file, "<CommonPrefixes><Prefix>%s</Prefix></CommonPrefixes>", page->last);
                return;
        }
        strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S.000Z", gmtime_r(&object->time, &when));
        fprintf(page->file, "<Contents><Key>%s</Key><LastModified>%s</LastModified><ETag>&quot;e%u&quot;</ETag><Size>%llu</Size></Contents>", name, date,
                object->etag, (unsigned long long)object->bytes->size);
}

/* Lock held. The first object whose key is not below `key`; behind all objects of a folded prefix, which ends with '/', if `is_folded`. */
static struct object *first_from(const char *key, bool is_folded)
{
        struct object **at[OBJECT_LEVELS];
        char text[2400];

        snprintf(text, sizeof text, "%s", key);
        if (is_folded)
                text[strlen(text) - 1]++;
        return find_from(text, at);
}

/* Lock held. The objects behind `after` ("": all). True: there are more than a page holds. */
static bool list_page(struct page *page, const char *bucket, const char *after)
{
        size_t length = strlen(bucket);
        char key[2400], whole[2400];
        bool is_folded = *page->delimiter && *after && after[strlen(after) - 1] == *page->delimiter;
        struct object *object;

        snprintf(key, sizeof key, "%s%s", bucket, strcmp(after, page->prefix) > 0 ? after : page->prefix);
        snprintf(whole, sizeof whole, "%s%s", bucket, after);
        object = first_from(key, is_folded);
        while (object && !is_folded && *after && strcmp(object->key, whole) <= 0)
                object = object->next[0];
        while (object && !strncmp(object->key, bucket, length) && !strncmp(object->key + length, page->prefix, strlen(page->prefix))) {
                if (page->count == page->most)
                        return true;
                list_one(page, object, object->key + length);
                if (*page->delimiter && page->last[strlen(page->last) - 1] == *page->delimiter) {
                        snprintf(key, sizeof key, "%s%s", bucket, page->last);
                        object = first_from(key, true);
                } else {
                        object = object->next[0];
                }
        }
        return false;
}

/* A token is the last name of the page before. */
static void list(struct call *call)
{
        char bucket[1110], prefix[1100] = "", delimiter[8] = "", most[16] = "", after[1100] = "", *text = NULL;
        struct page page = { .most = PAGE_MAX, .prefix = prefix, .delimiter = delimiter };
        size_t size = 0, length;
        bool has_more;

        page.file = open_memstream(&text, &size);
        snprintf(bucket, sizeof bucket, "%s/", call->path);
        length = strlen(bucket);
        if (length > 1 && bucket[length - 2] == '/')
                bucket[--length] = 0;
        sink_param(call, "prefix", prefix, sizeof prefix);
        sink_param(call, "delimiter", delimiter, sizeof delimiter);
        if (!sink_param(call, "continuation-token", after, sizeof after))
                sink_param(call, "start-after", after, sizeof after);
        if (sink_param(call, "max-keys", most, sizeof most) && strtoul(most, NULL, 10) < PAGE_MAX)
                page.most = strtoul(most, NULL, 10);
        fprintf(page.file, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult>");
        pthread_mutex_lock(&objects_lock);
        has_more = list_page(&page, bucket, after);
        pthread_mutex_unlock(&objects_lock);
        if (has_more)
                fprintf(page.file, "<NextContinuationToken>%s</NextContinuationToken>", page.last);
        fprintf(page.file, "<IsTruncated>%s</IsTruncated></ListBucketResult>", has_more ? "true" : "false");
        fclose(page.file);
        sink_answer(call, 200, "Content-Type: application/xml\r\n", text, size);
        free(text);
}

static void forget_one(struct call *call)
{
        struct object *object;
        bool is_met;

        pthread_mutex_lock(&objects_lock);
        object = objects_find(call->path);
        is_met = !object || objects_holds(call, object);
        if (is_met)
                forget(call->path);
        pthread_mutex_unlock(&objects_lock);
        if (is_met)
                objects_say(call, 204, "", "");
        else
                objects_refuse(call, 412, "PreconditionFailed");
}

void objects_serve(struct call *call)
{
        char id[32];

        if (!strcmp(call->method, "POST") && sink_param(call, "uploads", id, sizeof id))
                uploads_begin(call);
        else if (!strcmp(call->method, "POST") && sink_param(call, "uploadId", id, sizeof id))
                uploads_complete(call, (unsigned)atoi(id));
        else if (!strcmp(call->method, "PUT"))
                put(call);
        else if (!strcmp(call->method, "DELETE") && sink_param(call, "uploadId", id, sizeof id))
                uploads_abort(call, (unsigned)atoi(id));
        else if (!strcmp(call->method, "DELETE"))
                forget_one(call);
        else if (!strcmp(call->method, "GET") && sink_param(call, "list-type", id, sizeof id))
                list(call);
        else
                get(call);
}
