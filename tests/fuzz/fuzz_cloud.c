/* Reads hostile listings of object stores, and texts that users write: URLs, names of blobs, connection strings. */
#include <stdlib.h>
#include <string.h>

#include "store/azure/azure_private.h"
#include "store/s3/s3_private.h"
#include "store/http/url.h"
#include "store/http/xml.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_xml(const char *text, size_t size)
{
        struct xml_item item;
        struct xml xml;

        xml_init(&xml, text, size);
        while (xml_next(&xml, &item))
                if (!item.name || !*item.name || !item.depth || !item.text || strlen(item.name) >= XML_NAME_MAX)
                        abort();
        xml_done(&xml);
}

/* A printed URL holds nothing of a query. */
static void read_url(const char *text)
{
        char printed[512];
        struct url url;

        url_print(text, printed, sizeof printed);
        if (strpbrk(printed, "?#@") && url_split(text, &url) && !memchr(url.path, '@', url.path_size))
                abort();
}

static void read_name(const char *key)
{
        struct buf name = { 0 }, back = { 0 };
        size_t size;
        char *text;

        object_name_encode(&name, key);
        text = buf_take(&name, &size);
        object_name_decode(&back, text);
        if (store_key_sound(key) && (back.size != strlen(key) || memcmp(back.data, key, back.size)))
                abort();
        free(text);
        buf_done(&back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
        struct azure_connection connection;
        struct azure_address address;
        struct s3_address bucket;
        char *text = malloc(size + 1);

        memcpy(text, data, size);
        text[size] = 0;
        read_xml(text, size);
        read_url(text);
        read_name(text);
        if (!azure_address_parse(text, &address, NULL))
                azure_address_done(&address);
        if (!s3_address_parse(text, "s3://", &bucket, NULL))
                s3_address_done(&bucket);
        if (!azure_connection_parse(text, &connection, NULL))
                azure_connection_done(&connection);
        free(text);
        return 0;
}
