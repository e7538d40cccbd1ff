/*
 * view.h - the bytes of a stored object as memory, read-only: mapped where the
 * store is a directory, read into memory elsewhere; or those of a file that the agent holds.
 */
#ifndef NB_CLI_VIEW_H
#define NB_CLI_VIEW_H

#include "store/store.h"

struct link;

struct view {
        void *data; /* NULL when the object is empty */
        uint64_t size;
};

enum nebula_status view_open(struct store *store, const char *key, struct view *ret_view, struct nebula_error *error);
enum nebula_status view_open_path(const char *path, struct view *ret_view, struct nebula_error *error);
/* Checked, and with the CRC-32s that the agent has not filled in yet, all of them or some. */
enum nebula_status view_open_memory(struct link *link, uint64_t version_id, const char *name, struct view *ret_view,
                                    struct nebula_error *error);
void view_close(struct view *view);

#endif
