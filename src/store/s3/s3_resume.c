/*
 * A multipart upload that goes on where an interrupted one stopped. Its text is "ID UPLOAD": the id in the metadata of the object, which was
 * given when the upload was begun, and the service's name for the upload. If a temporary object gets the parts, its key, which holds the id,
 * stands in place of the id. The list of its parts says which of them the service has. Parts of other sizes or other
 * bytes are replaced, and the completion names only parts of this object.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/s3/s3_private.h"

#define PAGE_TEXT_MAX (16u << 20)

/* A page of the list of parts while it is read. `next`: the part after which the next page begins. */
struct page {
        struct object_upload *object;
        struct object_part part;
        uint64_t number;
        char next[24];
        bool is_truncated, no_memory;
};

static void take_item(struct page *page, const struct xml_item *item)
{
        const char *name = item->name;

        if (item->depth == 2 && item->kind == XML_BEGIN && !strcmp(name, "Part")) {
                page->part = (struct object_part){ 0 };
                page->number = 0;
        }
        if (item->kind != XML_END)
                return;
        if (item->depth == 2 && !strcmp(name, "IsTruncated"))
                page->is_truncated = !strcmp(item->text, "true");
        else if (item->depth == 2 && !strcmp(name, "NextPartNumberMarker"))
                snprintf(page->next, sizeof page->next, "%.20s", item->text);
        else if (item->depth == 2 && !strcmp(name, "Part") && page->number && *page->part.etag.text)
                page->no_memory = !object_add_found(page->object, page->number - 1, &page->part) || page->no_memory;
        else if (item->depth == 3 && !strcmp(name, "PartNumber"))
                page->number = strtoull(item->text, NULL, 10);
        else if (item->depth == 3 && !strcmp(name, "Size"))
                page->part.size = strtoull(item->text, NULL, 10);
        else if (item->depth == 3 && !strcmp(name, "ETag"))
                object_etag_text(item->text, &page->part.etag);
        else if (item->depth == 3 && !strcmp(name, "ChecksumCRC64NVME")) {
                page->part.has_sum = true;
                page->part.sum = s3_crc64_of(item->text);
        }
}

/* If the page is cut off, the parts that it lacks are sent. */
static void read_page(struct page *page, const struct http_response *response)
{
        struct xml_item item;
        struct xml xml;

        xml_init(&xml, response->text, response->text_size);
        while (xml_next(&xml, &item))
                take_item(page, &item);
        page->is_truncated = page->is_truncated && *page->next && !xml.is_broken;
        page->no_memory = page->no_memory || xml.no_memory;
        xml_done(&xml);
}

/* *ret_status: the answer's. */
static enum nebula_status list_parts(struct object_store *store, struct object_upload *object, const char *key, const char *upload_id,
                                     int *ret_status, struct nebula_error *error)
{
        struct page page = { .object = object };
        enum nebula_status status;

        do {
                struct object_call call = { .method = "GET", .key = key, .text_max = PAGE_TEXT_MAX };
                struct http_response response;
                char from[sizeof page.next], entries[16];

                memcpy(from, page.next, sizeof from);
                *page.next = 0;
                page.is_truncated = false;
                object_param(&call, "uploadId", upload_id);
                snprintf(entries, sizeof entries, "%u", store->service->limits->page_entries);
                if (store->service->limits->page_entries)
                        object_param(&call, "max-parts", entries);
                if (*from)
                        object_param(&call, "part-number-marker", from);
                status = store->service->send(store, &call, &response, error);
                if (status)
                        return status;
                *ret_status = response.status;
                if (response.status == 200)
                        read_page(&page, &response);
                page.is_truncated = page.is_truncated && strcmp(page.next, from);
                http_response_done(&response);
        } while (page.is_truncated && !page.no_memory);
        return page.no_memory ? object_no_memory(store, error) : NEBULA_OK;
}

struct former {
        char id[OBJECT_ID_SIZE], place[64]; /* place "": none was used */
        const char *upload_id;
};

/* False: it is no such text. */
static bool split(const char *text, struct former *ret_former)
{
        size_t top = !strncmp(text, STORE_TEMP_TOP, strlen(STORE_TEMP_TOP)) ? strlen(STORE_TEMP_TOP) : 0, size = strcspn(text, " ");
        const char *id = text + top;

        if (strspn(id, "0123456789abcdef") != OBJECT_ID_SIZE - 1 || id[OBJECT_ID_SIZE - 1] != (top ? '-' : ' ') || !text[size] || !text[size + 1] ||
            size >= sizeof ret_former->place)
                return false;
        snprintf(ret_former->id, sizeof ret_former->id, "%s", id);
        snprintf(ret_former->place, sizeof ret_former->place, "%.*s", top ? (int)size : 0, text);
        ret_former->upload_id = text + size + 1;
        return true;
}

static char *replace_text(char *old, const char *text)
{
        free(old);
        return strdup(text);
}

enum nebula_status s3_resume_find(struct object_store *store, struct object_upload *object, struct nebula_error *error)
{
        struct former former;
        enum nebula_status status;
        const char *key;
        int answer = 0;

        if (!object->resume || !object->resume->former || !split(object->resume->former, &former) || !object->place != !*former.place)
                return NEBULA_OK;
        key = object->place ? former.place : object->key;
        status = list_parts(store, object, key, former.upload_id, &answer, error);
        if (status)
                return status;
        if (answer != 200) {
                if (answer != 404)
                        s3_multipart_abort(store, key, former.upload_id, NULL);
                return NEBULA_OK;
        }
        object->upload_id = strdup(former.upload_id);
        if (object->place)
                object->place = replace_text(object->place, former.place);
        if (!object->upload_id || (*former.place && !object->place))
                return object_no_memory(store, error);
        memcpy(object->id, former.id, sizeof object->id);
        object->is_kept = true;
        return NEBULA_OK;
}

enum nebula_status s3_resume_describe(struct object_store *store, struct object_upload *object, struct nebula_error *error)
{
        struct buf buf = { 0 };

        if (!object_may_resume(store, object))
                return NEBULA_OK;
        buf_add_text(&buf, object->place ? object->place : object->id);
        buf_add_text(&buf, " ");
        buf_add_text(&buf, object->upload_id);
        object->text = object_take(&buf);
        return object->text ? NEBULA_OK : object_no_memory(store, error);
}

enum nebula_status s3_resume_forget(struct store *base, const char *key, const char *text, struct nebula_error *error)
{
        struct former former;

        if (!split(text, &former))
                return NEBULA_OK;
        return s3_multipart_abort((struct object_store *)base, *former.place ? former.place : key, former.upload_id, error);
}
