/* The driver `mem` as slow, busy, unordered or stale storage. */
#include "store/store_mem.h"
#include "tap.h"

#define URL "mem://faults"

static struct store *store;
static struct nebula_error error;

/* t/x is old. */
static void begin(void)
{
        store_mem_forget(URL);
        if (store_mem.open(URL, &store, &error) || store_put_text(store, "t/x", "old", STORE_ALWAYS, &error))
                abort();
}

static void fail(const struct mem_faults *faults)
{
        store_mem_faults(store, faults);
}

/* The text of an object without faults; "-": absent. */
static const char *look(const char *key)
{
        static char text[100];
        size_t size;
        char *data;

        fail(NULL);
        if (store->ops->get(store, key, sizeof text - 1, &data, &size, NULL, &error))
                return "-";
        memcpy(text, data, size + 1);
        free(data);
        return text;
}

static enum nebula_status replace(void)
{
        return store_put_text(store, "t/x", "new", STORE_ALWAYS, &error);
}

static enum nebula_status create(void)
{
        return store_put_text(store, "t/y", "new", STORE_IF_ABSENT, &error);
}

static enum nebula_status publish(void)
{
        struct store_object objects[] = { { "t/y", "new", 3, NULL }, { "t/z", "new", 3, NULL } };
        struct store_upload *upload;
        enum nebula_status status = store->ops->upload(store, objects, 2, &upload, &error);

        return status ? status : store->ops->publish(store, upload, &error);
}

static enum nebula_status take_away(void)
{
        struct store_victim victims[] = { { .key = "t/x" }, { .key = "t/none" } };

        return store->ops->remove(store, victims, 2, &error);
}

static enum nebula_status copy(void)
{
        return store->ops->copy(store, "t/x", "t/y", STORE_IF_ABSENT, &error);
}

static enum nebula_status look_around(void)
{
        struct store_list list = { 0 };
        struct store_entry entry = { 0 };
        enum nebula_status status = store_list_all(store, "", true, &list, &error);
        int64_t now;

        if (!status)
                status = store->ops->clock(store, &now, &error);
        if (!status)
                status = store->ops->stat(store, "t/x", &entry, &error);
        store_list_done(&list);
        store_entry_done(&entry);
        return status;
}

/* `written`: the key that equals `after` when the step succeeds; NULL: the step writes nothing. */
static const struct step {
        enum nebula_status (*run)(void);
        const char *written, *before, *after;
} steps[] = {
        { replace, "t/x", "old", "new" }, { create, "t/y", "-", "new" }, { publish, "t/z", "-", "new" },
        { take_away, "t/x", "old", "-" }, { copy, "t/y", "-", "old" }, { look_around, NULL, NULL, NULL },
};
#define STEPS (sizeof steps / sizeof *steps)

static void each_call_that_fails_is_a_failure_that_may_pass(void)
{
        for (size_t i = 0; i < 2 * STEPS; i++) {
                const struct step *step = &steps[i / 2];
                enum nebula_status status;
                uint64_t at = 0;

                do {
                        begin();
                        fail(&(struct mem_faults){ .fail_at = ++at, .goes_on = i % 2 });
                        status = step->run();
                        CHECK(!status == (store_mem_calls(store) < at));
                        CHECK(!status || (status == NEBULA_STORAGE && error.http_status == 500 && store_class(&error) == STORE_AGAIN));
                        if (step->written)
                                CHECK(!strcmp(look(step->written), step->after) || (status && !strcmp(look(step->written), step->before)));
                        store_close(store);
                } while (status && at < 100);
                CHECK(at > 1 && at < 100);
        }
}

static void a_write_whose_answer_is_lost_is_done(void)
{
        for (size_t i = 0; i < STEPS; i++) {
                const struct step *step = &steps[i];
                enum nebula_status status;
                uint64_t at = 0;

                do {
                        begin();
                        fail(&(struct mem_faults){ .lose_at = ++at });
                        status = step->run();
                        CHECK(!status == (store_mem_writes(store) < at));
                        CHECK(!status || (status == NEBULA_TIMEOUT && store_class(&error) == STORE_AGAIN));
                        if (step->written && step->run != publish)
                                CHECK(!strcmp(look(step->written), step->after));
                        store_close(store);
                } while (status && at < 100);
                CHECK(!step->written || at > 1);
        }
}

static void a_store_that_throttles_lets_the_others_through(void)
{
        unsigned refused = 0;

        begin();
        fail(&(struct mem_faults){ .throttle_every = 3 });
        for (int i = 0; i < 9; i++)
                if (replace()) {
                        CHECK(error.http_status == 503 && store_class(&error) == STORE_AGAIN);
                        refused++;
                }
        CHECK(refused == 3 && !strcmp(look("t/x"), "new"));
        store_close(store);
}

static size_t count(void)
{
        struct store_list list;
        size_t found;

        if (store_list_all(store, "", true, &list, &error))
                abort();
        found = list.count;
        store_list_done(&list);
        return found;
}

static void a_stale_list_shows_the_state_before_the_last_writes(void)
{
        begin();
        fail(&(struct mem_faults){ .stale_writes = 2 });
        CHECK(!(store->ops->features(store) & STORE_LISTS_FRESH) && count() == 0);
        CHECK(create() == NEBULA_OK && count() == 0);
        CHECK(store_put_text(store, "t/z", "1", STORE_ALWAYS, &error) == NEBULA_OK && count() == 1);
        CHECK(take_away() == NEBULA_OK && count() == 2);
        CHECK(replace() == NEBULA_OK && count() == 3); /* the list still shows the removed object */
        CHECK(store_put_text(store, "t/z", "2", STORE_ALWAYS, &error) == NEBULA_OK && count() == 2);
        fail(NULL);
        CHECK(store->ops->features(store) & STORE_LISTS_FRESH && count() == 3);
        store_close(store);
}

static void its_objects_outlive_the_store_and_are_forgotten_by_url(void)
{
        struct store *other;

        begin();
        store_close(store);
        REQUIRE(!store_mem.open(URL, &store, &error) && !store_mem.open("mem://another", &other, &error));
        CHECK(!strcmp(look("t/x"), "old") && count() == 1);
        CHECK(store_put_text(other, "t/x", "its own", STORE_IF_ABSENT, &error) == NEBULA_OK && !strcmp(look("t/x"), "old"));
        store_mem_forget(URL);
        CHECK(count() == 0);
        store_close(store);
        store_close(other);
        store_mem_forget("mem://another");
}

static void a_memory_store_is_no_url_for_users(void)
{
        CHECK(store_open(URL, &store, &error) == NEBULA_INVALID && store_class(&error) == STORE_NEVER);
        store_mem_allow();
        REQUIRE(store_open(URL, &store, &error) == NEBULA_OK);
        store_close(store);
}

static enum store_class class_of(enum nebula_status status, int number, int http_status)
{
        return store_class(&(struct nebula_error){ .status = status, .sys_errno = number, .http_status = http_status });
}

static void a_failure_is_tried_again_at_once_or_later_or_never(void)
{
        CHECK(class_of(NEBULA_TIMEOUT, 0, 0) == STORE_AGAIN && class_of(NEBULA_UNAVAILABLE, 111, 0) == STORE_AGAIN);
        CHECK(class_of(NEBULA_STORAGE, 0, 503) == STORE_AGAIN && class_of(NEBULA_STORAGE, 0, 429) == STORE_AGAIN);
        CHECK(class_of(NEBULA_STORAGE, 0, 403) == STORE_NEVER && class_of(NEBULA_STORAGE, 0, 501) == STORE_NEVER);
        CHECK(class_of(NEBULA_STORAGE, 5, 0) == STORE_LATER && class_of(NEBULA_STORAGE, 13, 0) == STORE_NEVER);
        CHECK(class_of(NEBULA_NO_SPACE, 28, 0) == STORE_LATER && class_of(NEBULA_BUSY, 0, 412) == STORE_LATER);
        CHECK(class_of(NEBULA_NOT_FOUND, 2, 404) == STORE_NEVER && class_of(NEBULA_CORRUPT, 0, 0) == STORE_NEVER);
        CHECK(class_of(NEBULA_INVALID, 0, 400) == STORE_NEVER);
}

TAP_MAIN(TEST(a_memory_store_is_no_url_for_users), TEST(each_call_that_fails_is_a_failure_that_may_pass), TEST(a_write_whose_answer_is_lost_is_done),
         TEST(a_store_that_throttles_lets_the_others_through), TEST(a_stale_list_shows_the_state_before_the_last_writes),
         TEST(its_objects_outlive_the_store_and_are_forgotten_by_url), TEST(a_failure_is_tried_again_at_once_or_later_or_never))
