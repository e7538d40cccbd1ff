#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "agent/peers/placement.h"
#include "sum/sum.h"

/* A CRC is linear: names that differ in one digit would lie near each other. The multiplications spread them. */
static uint64_t place_of(const char *name)
{
        uint64_t hash = sum_crc64(0, name, strlen(name));

        hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccd;
        hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53;
        return hash ^ hash >> 33;
}

struct place {
        const char *name;
        uint64_t hash;
        size_t index;
};

static int compare_places(const void *a, const void *b)
{
        const struct place *x = a, *y = b;

        if (x->hash != y->hash)
                return x->hash < y->hash ? -1 : 1;
        return strcmp(x->name, y->name);
}

size_t placement_order(const char *const *members, size_t count, const char *self, size_t *ret_order)
{
        struct place own = { self, place_of(self), 0 };
        struct place *ring = calloc(count + 1, sizeof *ring);
        size_t used = 0, first = 0, written = 0;

        if (!ring)
                return 0;
        for (size_t i = 0; i < count; i++)
                if (strcmp(members[i], self))
                        ring[used++] = (struct place){ members[i], place_of(members[i]), i };
        qsort(ring, used, sizeof *ring, compare_places);
        while (first < used && compare_places(&ring[first], &own) < 0)
                first++;
        for (size_t i = 0; i < used; i++) {
                const struct place *place = &ring[(first + i) % used];
                bool again = written && !strcmp(place->name, members[ret_order[written - 1]]);

                if (!again)
                        ret_order[written++] = place->index;
        }
        free(ring);
        return written;
}
