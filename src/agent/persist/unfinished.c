#include "agent/persist/unfinished.h"

#include <stdlib.h>
#include <string.h>

static struct unfinished_upload *look_up(const struct unfinished *list, const char *key)
{
        for (size_t i = 0; i < list->count; i++)
                if (!strcmp(list->uploads[i].key, key))
                        return &list->uploads[i];
        return NULL;
}

const char *unfinished_find(const struct unfinished *list, const char *key)
{
        const struct unfinished_upload *found = look_up(list, key);

        return found ? found->text : NULL;
}

bool unfinished_has_place(const struct unfinished *list, const char *key)
{
        size_t size = strlen(key);

        for (size_t i = 0; i < list->count; i++)
                if (!strncmp(list->uploads[i].text, key, size) && list->uploads[i].text[size] == ' ')
                        return true;
        return false;
}

static void free_upload(struct unfinished_upload *upload)
{
        free(upload->key);
        free(upload->text);
}

static bool add(struct unfinished *list, struct unfinished_upload upload)
{
        struct unfinished_upload *grown = realloc(list->uploads, (list->count + 1) * sizeof *grown);

        if (grown)
                list->uploads = grown;
        if (!grown || !upload.key || !upload.text) {
                free_upload(&upload);
                return false;
        }
        list->uploads[list->count++] = upload;
        return true;
}

bool unfinished_set(struct unfinished *list, const char *key, const char *text)
{
        struct unfinished_upload *known = look_up(list, key);
        char *copy;

        if (!known)
                return add(list, (struct unfinished_upload){ strdup(key), strdup(text), true });
        copy = strdup(text);
        if (!copy)
                return false;
        free(known->text);
        known->text = copy;
        known->is_used = true;
        return true;
}

void unfinished_move(struct unfinished *from, struct unfinished *to)
{
        for (size_t i = 0; i < from->count; i++)
                add(to, from->uploads[i]);
        free(from->uploads);
        *from = (struct unfinished){ 0 };
}

void unfinished_done(struct unfinished *list)
{
        for (size_t i = 0; i < list->count; i++)
                free_upload(&list->uploads[i]);
        free(list->uploads);
        *list = (struct unfinished){ 0 };
}
