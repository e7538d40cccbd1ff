/*
 * Uploads that were begun and neither completed nor aborted: an agent died. No list of objects shows them, and their parts cost storage. A
 * service says when an upload was begun, and when each of its parts came.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "os/os.h"
#include "store/s3/s3_private.h"

#define PAGE_TEXT_MAX (16u << 20)

struct upload {
        char *key, *id;
        int64_t time_ns, limit_ns; /* time: begun */
};
struct uploads {
        struct upload *list;
        size_t count;
};

static void upload_done(struct upload *upload)
{
        free(upload->key);
        free(upload->id);
        *upload = (struct upload){ 0 };
}

static void uploads_done(struct uploads *uploads)
{
        for (size_t i = 0; i < uploads->count; i++)
                upload_done(&uploads->list[i]);
        free(uploads->list);
}

/* A page of a listing while it is read. `next`: where the page after it begins; NULL: there is none. */
struct page {
        struct object_store *store;
        struct uploads *uploads; /* NULL: the page is of parts */
        struct upload open;
        int64_t newest_ns;       /* of the parts */
        char *next, *next_id;
        bool is_truncated, is_unsound, no_memory;
};

static void take_text(struct page *page, char **text, const char *value)
{
        free(*text);
        *text = strdup(value);
        page->no_memory = page->no_memory || !*text;
}

static void take_time(struct page *page, int64_t *ret_ns, const char *text)
{
        int64_t seconds = 0;

        page->is_unsound = page->is_unsound || !http_date_parse_iso(text, &seconds);
        *ret_ns = seconds * SECOND_NS;
}

/* One that these drivers cannot have begun has no key, and is left out. */
static void take_upload(struct page *page)
{
        struct upload *upload = &page->open;
        struct uploads *uploads = page->uploads;
        void *list = uploads->list;

        if (upload->key && upload->id && store_key_sound(upload->key)) {
                page->no_memory = page->no_memory || !store_make_room(&list, uploads->count, sizeof *upload);
                uploads->list = list;
                if (!page->no_memory) {
                        uploads->list[uploads->count++] = *upload;
                        *upload = (struct upload){ 0 };
                }
        }
        upload_done(upload);
}

static void take_item(struct page *page, const struct xml_item *item)
{
        const char *name = item->name;
        int64_t time_ns;

        if (item->kind != XML_END)
                return;
        if (item->depth == 2 && !strcmp(name, "IsTruncated"))
                page->is_truncated = !strcmp(item->text, "true");
        else if (item->depth == 2 && (!strcmp(name, "NextKeyMarker") || !strcmp(name, "NextPartNumberMarker")))
                take_text(page, &page->next, item->text);
        else if (item->depth == 2 && !strcmp(name, "NextUploadIdMarker"))
                take_text(page, &page->next_id, item->text);
        else if (item->depth == 2 && !strcmp(name, "Upload") && page->uploads)
                take_upload(page);
        else if (item->depth == 3 && !strcmp(name, "Key"))
                page->no_memory = !object_key_of(page->store, item->text, &page->open.key) || page->no_memory;
        else if (item->depth == 3 && !strcmp(name, "UploadId"))
                take_text(page, &page->open.id, item->text);
        else if (item->depth == 3 && !strcmp(name, "Initiated"))
                take_time(page, &page->open.time_ns, item->text);
        else if (item->depth == 3 && !strcmp(name, "LastModified")) {
                take_time(page, &time_ns, item->text);
                page->newest_ns = time_ns > page->newest_ns ? time_ns : page->newest_ns;
        }
}

static void page_done(struct page *page)
{
        upload_done(&page->open);
        free(page->next);
        free(page->next_id);
}

static enum nebula_status read_page(struct page *page, const struct http_response *response, const char *root, struct nebula_error *error)
{
        struct xml_item item;
        struct xml xml;

        xml_init(&xml, response->text, response->text_size);
        while (!page->is_unsound && xml_next(&xml, &item)) {
                page->is_unsound = item.depth == 1 && strncmp(item.name, root, strlen(root)); /* "...Result"; an emulator says "...Response" */
                take_item(page, &item);
        }
        page->is_unsound = page->is_unsound || xml.is_broken || (page->is_truncated && !page->next);
        page->no_memory = page->no_memory || xml.no_memory;
        xml_done(&xml);
        if (page->no_memory)
                return object_no_memory(page->store, error);
        return page->is_unsound ? error_set(error, NEBULA_STORAGE, 0, "cannot list the uploads of %s: the answer is not a listing", page->store->store.root)
                                : NEBULA_OK;
}

/* If the service does not list uploads, or not to this user, rules of the bucket must end them. */
static enum nebula_status not_listed(struct object_store *store, const struct http_response *response, struct nebula_error *error)
{
        if (response->status != 403 && response->status != 404 && response->status != 405 && response->status != 501)
                return store->service->fail(store, OBJECT_LIST, "", response, error);
        if (response->status != 404)
                log_event(LOG_LEVEL_INFO, "%s does not list interrupted uploads (%d): a rule of the bucket has to end them", store->store.root,
                          response->status);
        return NEBULA_OK;
}

/* One page, which begins after `page->next`; *ret_is_last. */
static enum nebula_status list_page(struct object_store *store, struct uploads *uploads, struct page *before, bool *ret_is_last,
                                    struct nebula_error *error)
{
        struct object_call call = { .method = "GET", .text_max = PAGE_TEXT_MAX };
        struct page page = { .store = store, .uploads = uploads };
        struct http_response response;
        enum nebula_status status;
        char entries[16];

        object_param(&call, "uploads", NULL);
        if (*store->prefix)
                object_param(&call, "prefix", store->prefix);
        snprintf(entries, sizeof entries, "%u", store->service->limits->page_entries);
        if (store->service->limits->page_entries)
                object_param(&call, "max-uploads", entries);
        if (before->next)
                object_param(&call, "key-marker", before->next);
        if (before->next && before->next_id)
                object_param(&call, "upload-id-marker", before->next_id);
        status = store->service->send(store, &call, &response, error);
        if (status)
                return status;
        status = response.status == 200 ? read_page(&page, &response, "ListMultipartUploads", error) : not_listed(store, &response, error);
        *ret_is_last = response.status != 200 || !page.is_truncated;
        http_response_done(&response);
        if (!status && !*ret_is_last && (!page.next_id || !before->next_id || !strcmp(page.next_id, before->next_id)))
                status = object_check_next(store, before->next, page.next, error);
        page_done(before);
        *before = page;
        return status;
}

static enum nebula_status list_all(struct object_store *store, struct uploads *uploads, struct nebula_error *error)
{
        struct page page = { .store = store };
        enum nebula_status status = NEBULA_OK;
        bool is_last = false;

        while (!status && !is_last)
                status = list_page(store, uploads, &page, &is_last, error);
        page_done(&page);
        return status;
}

/* When the newest part came. An upload that has ended meanwhile counts as young: nothing is to be done about it. */
static enum nebula_status find_newest(struct object_store *store, const struct upload *upload, int64_t *ret_ns, struct nebula_error *error)
{
        struct page page = { .store = store };
        enum nebula_status status = NEBULA_OK;

        do {
                struct object_call call = { .method = "GET", .key = upload->key, .text_max = PAGE_TEXT_MAX };
                struct http_response response;
                char *from = page.next;

                page.next = NULL;
                page.is_truncated = false;
                object_param(&call, "uploadId", upload->id);
                if (from)
                        object_param(&call, "part-number-marker", from);
                status = store->service->send(store, &call, &response, error);
                if (status) {
                        free(from);
                        break;
                }
                if (response.status == 200)
                        status = read_page(&page, &response, "ListParts", error);
                else if (response.status == 404)
                        page.newest_ns = INT64_MAX;
                else
                        status = store->service->fail(store, OBJECT_LIST, upload->key, &response, error);
                if (!status)
                        status = object_check_next(store, from, page.next, error);
                free(from);
                http_response_done(&response);
        } while (!status && page.is_truncated);
        *ret_ns = page.newest_ns > upload->time_ns ? page.newest_ns : upload->time_ns;
        page_done(&page);
        return status;
}

static int by_key(const void *a, const void *b)
{
        return strcmp(((const struct upload *)a)->key, ((const struct upload *)b)->key);
}

/* Uploads of one tag, or of one write to temporary objects, whose names begin alike. */
static size_t group_size(const char *key)
{
        const char *end = store_is_temporary(key) ? strrchr(key, '-') : strchr(key, '/');

        return end ? (size_t)(end - key) + 1 : strlen(key) + 1;
}

/* Files of a version wait for the last one: while that one gets parts, none of them is abandoned. */
static enum nebula_status sweep_group(struct object_store *store, const struct upload *list, size_t count, size_t *ended, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < count; i++)
                if (list[i].limit_ns != INT64_MIN && list[i].time_ns > list[i].limit_ns)
                        return NEBULA_OK;
        for (size_t i = 0; i < count && !status; i++) {
                int64_t newest_ns = 0;

                if (list[i].limit_ns == INT64_MIN)
                        continue;
                status = find_newest(store, &list[i], &newest_ns, error);
                if (status || newest_ns > list[i].limit_ns)
                        return status;
        }
        for (size_t i = 0; i < count && !status; i++) {
                if (list[i].limit_ns == INT64_MIN)
                        continue;
                s3_multipart_abort(store, list[i].key, list[i].id, NULL);
                ++*ended;
        }
        return status;
}

enum nebula_status s3_sweep(struct store *base, store_sweep_limit *limit, void *argument, size_t *ret_count, struct nebula_error *error)
{
        struct object_store *store = (struct object_store *)base;
        struct uploads uploads = { 0 };
        enum nebula_status status = list_all(store, &uploads, error);
        size_t ended = 0;

        for (size_t i = 0; i < uploads.count; i++)
                uploads.list[i].limit_ns = limit(argument, uploads.list[i].key);
        if (uploads.count)
                qsort(uploads.list, uploads.count, sizeof *uploads.list, by_key);
        for (size_t first = 0, next; first < uploads.count && !status; first = next) {
                size_t size = group_size(uploads.list[first].key);

                for (next = first + 1; next < uploads.count && !strncmp(uploads.list[next].key, uploads.list[first].key, size); next++)
                        ;
                status = sweep_group(store, &uploads.list[first], next - first, &ended, error);
        }
        uploads_done(&uploads);
        if (!status)
                *ret_count = ended;
        return status;
}
