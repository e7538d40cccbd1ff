/*
 * index_room.h - blocks of a full file system that entries of the index give up, so that a removal can be entered into a log.
 *
 *      index_room_make        removes some entries of the index
 *      index_room_give_back   makes them again, once the removal has freed blocks
 *
 * Entries of the index are hints: a version without one is found by its log.
 */
#ifndef NB_STORE_INDEX_ROOM_H
#define NB_STORE_INDEX_ROOM_H

#include "store/manifest.h"

#define INDEX_ROOM_ROWS 4u /* each frees the block of a file, and often that of its directory; a removal takes at most four before it frees any */

struct index_room {
        size_t count;
        char tags[INDEX_ROOM_ROWS][256]; /* of the removed entries */
};

/* Whether the store is a file system, and `status` says that it is full. */
bool index_room_may_help(struct store *store, enum nebula_status status);
void index_room_make(struct store *store, struct index_room *ret_room);
void index_room_give_back(struct store *store, const struct index_room *room);

#endif
