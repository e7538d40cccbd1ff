/* A file system that is full: `room` objects still fit, and each object that is removed makes room for one more. */
#ifndef NB_TEST_FULL_H
#define NB_TEST_FULL_H

#include "versions.h"

static const struct store_ops *roomy;
static struct store_ops full;
static int room;

static enum nebula_status put_into_full(struct store *at, const char *key, const void *data, uint64_t size, enum store_condition condition,
                                        const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *failure)
{
        if (room <= 0)
                return error_set(failure, NEBULA_NO_SPACE, 0, "%s is full", at->root);
        room--;
        return roomy->put(at, key, data, size, condition, seen, ret_stamp, failure);
}

static enum nebula_status remove_from_full(struct store *at, const struct store_victim *victims, size_t count, struct nebula_error *failure)
{
        for (size_t i = 0; i < count; i++)
                room += has(victims[i].key);
        return roomy->remove(at, victims, count, failure);
}

static void fill_store(int left)
{
        roomy = store->ops;
        full = *store->ops;
        full.put = put_into_full;
        full.remove = remove_from_full;
        store->ops = &full;
        room = left;
}

static void empty_store(void)
{
        store->ops = roomy;
}

#endif
