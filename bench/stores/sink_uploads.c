/* Objects that come in parts: multipart uploads of S3, and blocks of Azure. */
#include "sink_objects.h"

#include <endian.h>
#include <stdlib.h>
#include <string.h>

#include "store/http/crypt.h"
#include "sum/sum.h"

#define UPLOADS_MAX 256u
#define PARTS_MAX 10000u

struct upload {
        unsigned id;
        char writer[64];
        struct bytes *parts[PARTS_MAX]; /* of Azure: in the order in which they came */
        char path[1100];
        unsigned count;
};

static struct upload *uploads[UPLOADS_MAX];
static unsigned last_upload;

/* Makes one body of the parts. It has no bytes if a part of it was dropped. */
static struct bytes *join(struct upload *upload)
{
        struct bytes *whole = calloc(1, sizeof *whole);
        bool has_all = true;

        whole->owners = 1;
        whole->parts = calloc(upload->count, sizeof *whole->parts);
        for (unsigned i = 0; i < upload->count; i++) {
                if (!upload->parts[i])
                        continue;
                whole->size += upload->parts[i]->size;
                has_all = has_all && (upload->parts[i]->data || !upload->parts[i]->size);
                whole->parts[whole->part_count++] = upload->parts[i];
        }
        while (!has_all && whole->part_count)
                objects_drop(whole->parts[--whole->part_count]);
        return whole;
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
                objects_drop(upload->parts[i]);
        for (unsigned i = 0; i < UPLOADS_MAX; i++)
                if (uploads[i] == upload)
                        uploads[i] = NULL;
        free(upload);
}

void uploads_begin(struct call *call)
{
        struct upload *upload;
        unsigned id;
        char text[400];

        pthread_mutex_lock(&objects_lock);
        upload = upload_of(0, call->path);
        if (!upload)
                abort();
        objects_writer(call, upload->writer);
        id = upload->id;
        pthread_mutex_unlock(&objects_lock);
        snprintf(text, sizeof text,
                 "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<InitiateMultipartUploadResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">"
                 "<Bucket>b</Bucket><Key>k</Key><UploadId>%u</UploadId></InitiateMultipartUploadResult>", id);
        objects_say(call, 200, "Content-Type: application/xml\r\n", text);
}

static char *copy_of(const struct bytes *bytes, uint64_t first, uint64_t size)
{
        size_t count;
        struct iovec *pieces = objects_pieces(bytes, first, size, &count);
        char *data = malloc(size + 1), *at = data;

        for (size_t i = 0; i < count; i++)
                at = mempcpy(at, pieces[i].iov_base, pieces[i].iov_len);
        free(pieces);
        return data;
}

/* The range of the request, or all of the object. NULL: there is none. */
static struct bytes *copy_range(const struct call *call, const char *source)
{
        unsigned long long first = 0, last = 0;
        struct bytes *bytes = NULL;
        struct object *from;
        char range[64];
        bool has_range = sscanf(sink_field(call, "x-amz-copy-source-range", range, sizeof range), "bytes=%llu-%llu", &first, &last) == 2;

        pthread_mutex_lock(&objects_lock);
        from = objects_find(source);
        if (from && (!has_range || last < from->bytes->size)) {
                bytes = calloc(1, sizeof *bytes);
                bytes->owners = 1;
                bytes->size = has_range ? last + 1 - first : from->bytes->size;
                if (from->bytes->data || from->bytes->part_count)
                        bytes->data = copy_of(from->bytes, first, bytes->size);
        }
        pthread_mutex_unlock(&objects_lock);
        return bytes;
}

/* The checksum that S3 reports of a copied part, if its bytes are kept. Without it, a client has to send the bytes. */
static void report_sum(const struct bytes *bytes, char *ret_text, size_t size)
{
        uint64_t sum;
        char base64[CRYPT_BASE64_SIZE(sizeof sum)];

        if (!bytes->data)
                return;
        sum = htobe64(sum_crc64(0, bytes->data, bytes->size));
        crypt_base64(&sum, sizeof sum, base64);
        snprintf(ret_text, size, "<ChecksumCRC64NVME>%s</ChecksumCRC64NVME>", base64);
}

void uploads_put_part(struct call *call, unsigned id, unsigned number)
{
        char source[1100], text[300], sum[100] = "";
        struct upload *upload;
        struct bytes *bytes;

        if (*sink_field(call, "x-amz-copy-source", source, sizeof source)) {
                bytes = copy_range(call, source);
                if (bytes)
                        report_sum(bytes, sum, sizeof sum);
        } else {
                bytes = objects_receive(call);
                if (!bytes)
                        return;
        }
        pthread_mutex_lock(&objects_lock);
        upload = upload_of(id, call->path);
        if (upload && bytes && number >= 1 && number <= PARTS_MAX) {
                objects_drop(upload->parts[number - 1]);
                upload->parts[number - 1] = bytes;
                upload->count = number > upload->count ? number : upload->count;
        }
        pthread_mutex_unlock(&objects_lock);
        snprintf(text, sizeof text, "<CopyPartResult><ETag>&quot;p%u&quot;</ETag>%s</CopyPartResult>", number, sum);
        snprintf(source, sizeof source, "ETag: \"p%u\"\r\n", number);
        if (upload && bytes)
                objects_say(call, 200, source, text);
        else
                objects_refuse(call, 404, upload ? "NoSuchKey" : "NoSuchUpload");
}

void uploads_complete(struct call *call, unsigned id)
{
        struct bytes *whole = NULL;
        struct upload *upload;
        char writer[64] = "", *list = sink_take(call);

        free(list);
        pthread_mutex_lock(&objects_lock);
        upload = upload_of(id, call->path);
        if (upload && objects_holds(call, objects_find(call->path))) {
                whole = join(upload);
                memcpy(writer, upload->writer, sizeof writer);
                end_upload(upload, false);
        }
        pthread_mutex_unlock(&objects_lock);
        if (whole)
                objects_make(call, writer, whole, 200, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<CompleteMultipartUploadResult><Bucket>b</Bucket><Key>k</Key>"
                                               "<ETag>&quot;whole&quot;</ETag></CompleteMultipartUploadResult>");
        else
                objects_refuse(call, upload ? 412 : 404, upload ? "PreconditionFailed" : "NoSuchUpload");
}

/* Blocks of one blob wait under its path; the list takes all of them. */
static struct upload *waiting_blocks(const char *path)
{
        for (unsigned i = 0; i < UPLOADS_MAX; i++)
                if (uploads[i] && !strcmp(uploads[i]->path, path))
                        return uploads[i];
        return upload_of(0, path);
}

void uploads_put_block(struct call *call, bool is_list)
{
        struct bytes *bytes = objects_receive(call), *whole;
        struct upload *upload;
        char writer[64];

        if (!bytes)
                return;
        pthread_mutex_lock(&objects_lock);
        upload = waiting_blocks(call->path);
        if (!is_list)
                upload->parts[upload->count++] = bytes;
        else
                objects_drop(bytes);
        whole = is_list ? join(upload) : NULL;
        if (is_list)
                end_upload(upload, false);
        pthread_mutex_unlock(&objects_lock);
        if (is_list)
                objects_make(call, objects_writer(call, writer), whole, 201, "");
        else
                objects_say(call, 201, "x-ms-request-server-encrypted: true\r\n", "");
}

void uploads_abort(struct call *call, unsigned id)
{
        struct upload *upload;

        pthread_mutex_lock(&objects_lock);
        upload = upload_of(id, call->path);
        if (id && upload)
                end_upload(upload, true);
        pthread_mutex_unlock(&objects_lock);
        objects_say(call, 204, "", "");
}
