/* several_private.h - declarations that the files of this driver share. */
#ifndef NB_STORE_SEVERAL_SEVERAL_PRIVATE_H
#define NB_STORE_SEVERAL_SEVERAL_PRIVATE_H

#include "store/several/several.h"

#define SEVERAL_MAX 16

struct several {
        struct store store; /* first */
        size_t count;
        struct store *members[SEVERAL_MAX];
};

/* several_upload.c, several_list.c: operations */
enum nebula_status several_upload(struct store *store, const struct store_object *objects, size_t count, struct store_upload **ret_upload,
                                  struct nebula_error *error);
enum nebula_status several_publish(struct store *store, struct store_upload *upload, struct nebula_error *error);
void several_abort(struct store *store, struct store_upload *upload);
enum nebula_status several_list(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                                struct nebula_error *error);

#endif
