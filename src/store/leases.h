/*
 * leases.h - versions that readers on other nodes hold: <root>/.nebula/leases/<tag>/<id>, one small document each. The name of the object leases
 * the tag. The agent of a reader writes the document again every LEASE_RENEW_NS. A document that was written more than LEASE_NS ago, by the
 * store's clock, counts no more: its agent has died, or does not reach the storage.
 *
 * Retention and `nebula prune` load the leases with the pins, before they remove. A lease that is made during a removal comes too late.
 *
 * Threads: no shared state. Errors are the store's.
 */
#ifndef NB_STORE_LEASES_H
#define NB_STORE_LEASES_H

#include "store/pins.h"

#define LEASE_NS (900 * SECOND_NS)
#define LEASE_RENEW_NS (240 * SECOND_NS) /* three can fail in a row */

/* `id`: of the agent; each has a lease of its own. */
enum nebula_status lease_put(struct store *store, const char *tag, uint64_t id, struct nebula_error *error);
void lease_drop(struct store *store, const char *tag, uint64_t id);
/* Adds the leased tags to the pins. Removes leases that count no more, and writes a lease again whose time lies in the future by more than LEASE_NS. */
enum nebula_status leases_add(struct store *store, struct pins *pins, struct nebula_error *error);

#endif
