/* Requests to storage are counted by kind, operation and outcome; requests to other stores are not. */
#include <string.h>

#include "store/counts.h"
#include "store/store_mem.h"
#include "tap.h"

#define URL "mem://counts"

static struct store *store;
static struct nebula_error error;

static struct store_counts counts(void)
{
        struct store_counts found = { 0 };

        for (size_t index = 0; store_counts_next(&index, &found);)
                if (!strcmp(found.scheme, "mem"))
                        return found;
        return (struct store_counts){ 0 };
}

static void each_outcome_is_counted_where_it_belongs(void)
{
        struct store_object objects[] = { { "t/y", "four", 4, NULL } };
        struct mem_faults broken = { .fail_at = 1 };
        struct store_upload *upload;
        struct store_entry entry;
        struct store_counts now;
        char text[8], *data;
        size_t size;

        store_mem_forget(URL);
        REQUIRE(!store_mem.open(URL, &store, &error));
        REQUIRE(!store_put_text(store, "t/x", "before it was counted", STORE_ALWAYS, &error));
        store_count(store);
        store_count(store); /* once */
        CHECK(store_put_text(store, "t/x", "new", STORE_IF_ABSENT, &error) == NEBULA_BUSY);
        CHECK(!store_put_text(store, "t/x", "new", STORE_ALWAYS, &error));
        CHECK(!store->ops->get(store, "t/x", 100, &data, &size, NULL, &error) && size == 3);
        free(data);
        CHECK(!store->ops->get(store, "t/x", 100, &data, NULL, NULL, &error));
        free(data);
        CHECK(store->ops->stat(store, "t/none", &entry, &error) == NEBULA_NOT_FOUND);
        REQUIRE(!store->ops->upload(store, objects, 1, &upload, &error) && !store->ops->publish(store, upload, &error));
        CHECK(!store->ops->read(store, "t/y", text, 1, 2, &error));
        store_mem_faults(store, &broken);
        CHECK(store->ops->read(store, "t/y", text, 0, 2, &error) == NEBULA_STORAGE);
        now = counts();
        CHECK(now.requests[STORE_OP_PUT][STORE_OUTCOME_REFUSED] == 1 && now.requests[STORE_OP_PUT][STORE_OUTCOME_SUCCESS] == 1);
        CHECK(now.requests[STORE_OP_GET][STORE_OUTCOME_SUCCESS] == 2 && now.requests[STORE_OP_STAT][STORE_OUTCOME_ABSENT] == 1);
        CHECK(now.requests[STORE_OP_UPLOAD][STORE_OUTCOME_SUCCESS] == 1 && now.requests[STORE_OP_PUBLISH][STORE_OUTCOME_SUCCESS] == 1);
        CHECK(now.requests[STORE_OP_READ][STORE_OUTCOME_SUCCESS] == 1 && now.requests[STORE_OP_READ][STORE_OUTCOME_FAILURE] == 1);
        CHECK(now.written_bytes == 3 + 4 && now.read_bytes == 3 + 3 + 2 && !now.retries);
        CHECK(store_counts_retries(store) != NULL);
        store_close(store);
}

static void another_store_of_the_kind_is_counted_only_when_asked_for(void)
{
        uint64_t before = counts().requests[STORE_OP_PUT][STORE_OUTCOME_SUCCESS];

        REQUIRE(!store_mem.open(URL, &store, &error) && !store_put_text(store, "t/z", "new", STORE_ALWAYS, &error));
        CHECK(counts().requests[STORE_OP_PUT][STORE_OUTCOME_SUCCESS] == before);
        store_count(store);
        CHECK(!store_put_text(store, "t/z", "new", STORE_ALWAYS, &error) && counts().requests[STORE_OP_PUT][STORE_OUTCOME_SUCCESS] == before + 1);
        store_close(store);
}

TAP_MAIN(TEST(each_outcome_is_counted_where_it_belongs), TEST(another_store_of_the_kind_is_counted_only_when_asked_for))
