/*
 * view.h - the read-only bytes of a stored object or of a file in the agent's memory. They
 * are mapped if the store is a directory, else read into memory.
 */
#ifndef NB_CLI_VIEW_H
#define NB_CLI_VIEW_H

#include "store/store.h"

struct link;

struct view {
        void *data; /* NULL if the object is empty */
        uint64_t size;
};

enum nebula_status view_open(struct store *store, const char *key, struct view *ret_view, struct nebula_error *error);
enum nebula_status view_open_path(const char *path, struct view *ret_view, struct nebula_error *error);
/* Checks the image and fills in the CRC-32s that the agent has not filled in yet. */
enum nebula_status view_open_memory(struct link *link, uint64_t version_id, const char *name, struct view *ret_view,
                                    struct nebula_error *error);
void view_close(struct view *view);

#endif
