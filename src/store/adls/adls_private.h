/*
 * adls_private.h - declarations that the files of the ADLS driver share.
 *
 *      adls.c        opening, and the table of the service
 *      adls_list.c   listings in JSON
 *      adls_write.c  temporary files, and the rename that makes one the object
 *      adls_remove.c removals of files and of directories that become empty
 */
#ifndef NB_STORE_ADLS_ADLS_PRIVATE_H
#define NB_STORE_ADLS_ADLS_PRIVATE_H

#include "store/adls/adls.h"
#include "store/azure/azure_private.h"

extern struct object_limits adls_limits;

/* adls.c */
enum nebula_status adls_fail(const struct object_store *store, enum object_deed deed, const char *key, const struct http_response *response,
                             struct nebula_error *error);

/* adls_list.c, adls_write.c, adls_remove.c: operations */
enum nebula_status adls_list(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                             struct nebula_error *error);
enum nebula_status adls_put(struct store *store, const char *key, const void *data, uint64_t size, enum store_condition condition,
                            const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error);
extern const struct object_steps adls_steps;
enum nebula_status adls_remove(struct store *store, const struct store_victim *victims, size_t count, struct nebula_error *error);

#endif
