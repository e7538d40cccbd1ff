/*
 * pins.h - versions that no rule removes: <root>/.nebula/pins/<tag>.json, one small document each. The name of the object pins the tag.
 * The document holds the reason and the time. A pin counts even if its document cannot be read.
 *
 * A pin belongs to a tag, and stays when the tag is written again. Retention and `nebula prune` keep pinned versions. They load the pins
 * before they remove, so a pin that is made during a removal may come too late.
 *
 * Threads: no shared state. Errors are the store's.
 */
#ifndef NB_STORE_PINS_H
#define NB_STORE_PINS_H

#include "store/store.h"

struct pin {
        char tag[256];
        char *reason; /* never NULL */
        double time;  /* seconds since 1970; 0: not known */
        bool is_lease; /* a reader has the version (leases.h) */
};
struct pins {
        struct pin *list; /* by the bytes of their keys */
        size_t count;
};

#define PIN_REASON_MAX 1000 /* bytes */

/* Pins a tag, or replaces the reason of its pin. */
enum nebula_status pin_put(struct store *store, const char *tag, const char *reason, struct nebula_error *error);
/* Succeeds also if there was no pin. *ret_was_there may be NULL. */
enum nebula_status pin_remove(struct store *store, const char *tag, bool *ret_was_there, struct nebula_error *error);
/* `reads`: also loads the reasons and times, with one request each. */
enum nebula_status pins_load(struct store *store, bool reads, struct pins *ret_pins, struct nebula_error *error);
/* The pin of the tag; NULL: it is not pinned. */
const struct pin *pins_find(const struct pins *pins, const char *tag);
void pins_done(struct pins *pins);

#endif
