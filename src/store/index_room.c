#include "store/index_room.h"

#include <string.h>

#include "base/log.h"
#include "store/document.h"
#include "store/index.h"
#include "store/manifest_private.h"

bool index_room_may_help(struct store *store, enum nebula_status status)
{
        return status == NEBULA_NO_SPACE && store->ops->features(store) & STORE_PATHS;
}

/* The tag is the part before the last one. */
static bool tag_of(const char *key, char ret_tag[256])
{
        const char *end = strrchr(key, '/'), *begin = end;
        char directory[256];

        while (begin && begin > key && begin[-1] != '/')
                begin--;
        if (!begin || (size_t)(end - begin) >= sizeof directory)
                return false;
        memcpy(directory, begin, (size_t)(end - begin));
        directory[end - begin] = 0;
        return !name_decode(directory, ret_tag, NULL);
}

void index_room_make(struct store *store, struct index_room *ret_room)
{
        struct store_list rows;

        ret_room->count = 0;
        if (store_list_all(store, INDEX_PREFIX, true, &rows, NULL))
                return;
        for (size_t i = rows.count; i-- && ret_room->count < INDEX_ROOM_ROWS;) {
                const struct store_entry *row = &rows.entries[i];

                if (!row->is_prefix && !row->is_foreign && tag_of(row->key, ret_room->tags[ret_room->count]))
                        ret_room->count += !store_remove_one(store, row->key, NULL);
        }
        store_list_done(&rows);
        log_event(LOG_LEVEL_INFO, "%s is full: %zu entries of its index make room for a removal", store->root, ret_room->count);
}

/* A version that is being written again gets its entry from its writer. If this one comes first, the tag has two, and is read. */
void index_room_give_back(struct store *store, const struct index_room *room)
{
        for (size_t i = 0; i < room->count; i++)
                index_mend(store, room->tags[i]);
}
