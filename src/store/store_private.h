/* store_private.h - declarations that drivers share. Only drivers include it. */
#ifndef NB_STORE_STORE_PRIVATE_H
#define NB_STORE_STORE_PRIVATE_H

#include "store/store.h"

#define STORE_KEY_MAX 2048
#define STORE_PATH_MAX 4096

/* Whether the key is a relative path without empty, "." or ".." components: it can't lead out of the store. */
bool store_key_sound(const char *key);
/* Whether such a path can begin with the text; "" begins all of them. */
bool store_prefix_sound(const char *prefix);
/* The beginnings of keys of temporary files: at the top, and below a tag. */
#define STORE_TEMP_TOP ".nebula-tmp-"
#define STORE_TEMP_BELOW ".nebula/tmp-"
/* Makes room for one more entry in an array that only this function extends. It grows at powers of two, so no caller stores its
 * capacity. False: no memory. */
bool store_make_room(void **entries, size_t count, size_t size);
/* Adds a copy of the entry and its key. NEBULA_OK or NEBULA_NO_MEMORY. */
enum nebula_status store_page_add(struct store_page *page, const struct store_entry *entry);

#endif
