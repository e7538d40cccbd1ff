/* Transfers to a server that simulates faults (NEBULA_TEST_FAULTS, tests/servers/http_server.py): each is right, or fails. */
#include "kinds.h"
#include "store/http/http.h"
#include "store/http/transfers.h"
#include "store/object/object.h"

#define SIZE ((70u << 10) + 777)

static void be_quick(void)
{
        struct http_settings settings = http_settings_now();

        settings.pause_ms = 2;
        settings.pause_max_ms = 20;
        settings.halve_ms = 20;
        settings.quiet_ms = settings.answer_ms = 10000; /* the server sums in Python, on a machine that may be busy */
        settings.hedge_ms = 60000;
        http_settings_set(&settings);
        kind_limits->read_bytes = 4 * TRANSFER_CHUNK;
        if (!kind_parts_min)
                kind_limits->part_bytes = kind_limits->part_bytes_good = 32u << 10;
}

/* fault: as one_changed_answer_is_no_damage */
static void no_fault_makes_wrong_bytes(void)
{
        unsigned count = fault_transfers(), good = 0;
        char *data = malloc(SIZE + 50), *back = malloc(SIZE), key[32];

        for (size_t i = 0; i < SIZE + 50; i++)
                data[i] = (char)(i * 2654435761u >> 13);
        store = kinds[0].begin();
        be_quick();
        for (unsigned i = 0; i < count; i++) {
                snprintf(key, sizeof key, "t%u/m.pt", i);
                good += transfer(store, key, data + i % 50, SIZE, back, NULL);
                if (i % 100 == 99)
                        printf("# %u of %u transfers\n", good, i + 1);
        }
        CHECK(good > count * 9 / 10);
        store_close(store);
        kinds[0].end();
        free(data);
        free(back);
}

TAP_MAIN(TEST(no_fault_makes_wrong_bytes))
