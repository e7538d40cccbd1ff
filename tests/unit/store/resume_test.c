/* An upload goes on where an earlier one stopped: parts that the service has are not sent again, and the object is exact. */
#include <string.h>

#include "kinds.h"
#include "store/object/object.h"

#define EACH(name, promise) static void name(void) { each(promise); }
#define PARTS 3
#ifdef NB_TEST_ADLS
static const bool kind_resumes_file = true; /* the parts are a temporary file */
#else
static const bool kind_resumes_file = false;
#endif

static char told[STORE_RESUME_MAX];
static unsigned told_count;

static void tell(void *argument, const char *key, const char *text, bool is_last)
{
        CHECK(is_last && !strcmp(key, argument));
        told_count++;
        snprintf(told, sizeof told, "%s", text);
}

static struct object_store *driver(void)
{
        return (struct object_store *)store;
}

static bool goes_on(void)
{
        return driver()->service->steps->can_resume;
}

static uint64_t part_bytes(void)
{
        return driver()->service->limits->part_bytes;
}

/* The last part is smaller. */
static uint64_t size_of(unsigned parts)
{
        return (parts - 1) * part_bytes() + 777;
}

static char *make_data(void)
{
        char *data = malloc(size_of(PARTS));

        for (uint64_t i = 0; data && i < size_of(PARTS); i++)
                data[i] = (char)(i * 2654435761u >> 13);
        return data;
}

static struct store_written written;

static struct store_upload *upload(const char *key, const char *data, uint64_t size, const char *former)
{
        struct store_resume resume = { former, tell, (void *)(uintptr_t)key };
        struct store_object object = { .key = key, .data = data, .size = size, .ret_written = &written, .resume = &resume };
        struct store_upload *begun = NULL;

        told_count = 0;
        CHECK(store->ops->upload(store, &object, 1, &begun, &error) == NEBULA_OK);
        CHECK(told_count == goes_on() && !written.referred);
        return begun;
}

static void check_object(const char *key, const char *data, uint64_t size)
{
        char *back = malloc(size + 1);

        CHECK(back && store->ops->read(store, key, back, 0, size, &error) == NEBULA_OK && !memcmp(back, data, size));
        free(back);
        CHECK(store_remove_one(store, key, &error) == NEBULA_OK);
}

static void continued(void)
{
        char *data = make_data(), former[STORE_RESUME_MAX];
        uint64_t size = size_of(PARTS);

        REQUIRE(data);
        store->ops->abort(store, upload("t/m.pt", data, size, NULL));
        CHECK(written.resumed == 0 && !strcmp(keys("t/", true), ""));
        strcpy(former, told);
        CHECK(store->ops->publish(store, upload("t/m.pt", data, size, former), &error) == NEBULA_OK);
        CHECK(written.resumed == (goes_on() ? size : 0));
        check_object("t/m.pt", data, size);
        CHECK(!strcmp(keys("", true), ""));
        free(data);
}
EACH(an_upload_goes_on_with_the_parts_that_have_its_bytes, continued)

/* If the parts make a file, it cannot be changed: the try fails, and the next one sends all. */
static void changed(void)
{
        char *data = make_data(), former[STORE_RESUME_MAX];
        uint64_t size = size_of(PARTS);

        REQUIRE(data);
        store->ops->abort(store, upload("t/m.pt", data, size, NULL));
        strcpy(former, told);
        data[part_bytes() + 5] ^= 1;
        if (kind_resumes_file) {
                struct store_resume resume = { former, tell, (void *)(uintptr_t)"t/m.pt" };
                struct store_object object = { .key = "t/m.pt", .data = data, .size = size, .ret_written = &written, .resume = &resume };
                struct store_upload *begun;

                CHECK(store->ops->upload(store, &object, 1, &begun, &error) == NEBULA_STORAGE && store_class(&error) == STORE_LATER);
                CHECK(!strcmp(keys("", true), "")); /* no later upload can go on with the file */
                strcpy(former, told);
        }
        store->ops->abort(store, upload("t/m.pt", data, size, former)); /* one part has other bytes */
        CHECK(written.resumed == (goes_on() && !kind_resumes_file ? size - part_bytes() : 0));
        strcpy(former, told);
        CHECK(store->ops->publish(store, upload("t/m.pt", data, size, former), &error) == NEBULA_OK);
        CHECK(written.resumed == (goes_on() ? size : 0));
        check_object("t/m.pt", data, size);
        free(data);
}
EACH(parts_with_other_bytes_are_sent, changed)

static void shorter(void)
{
        char *data = make_data(), former[STORE_RESUME_MAX];

        REQUIRE(data);
        store->ops->abort(store, upload("t/m.pt", data, size_of(PARTS), NULL));
        strcpy(former, told);
        CHECK(store->ops->publish(store, upload("t/m.pt", data, size_of(PARTS - 1), former), &error) == NEBULA_OK);
        /* Its last part is shorter than that of before. A file cannot be made shorter. */
        CHECK(written.resumed == (goes_on() && !kind_resumes_file ? (PARTS - 2) * part_bytes() : 0));
        check_object("t/m.pt", data, size_of(PARTS - 1));
        free(data);
}
EACH(parts_of_another_size_are_sent, shorter)

static void forgotten(void)
{
        char *data = make_data(), former[STORE_RESUME_MAX];
        uint64_t size = size_of(PARTS);

        REQUIRE(data);
        store->ops->abort(store, upload("t/m.pt", data, size, NULL));
        strcpy(former, told);
        CHECK(!store->ops->forget || store->ops->forget(store, "t/m.pt", former, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload("t/m.pt", data, size, former), &error) == NEBULA_OK);
        CHECK(written.resumed == (store->ops->forget || !goes_on() ? 0 : size));
        check_object("t/m.pt", data, size);
        CHECK(store->ops->publish(store, upload("t/o.pt", data, size, "no such text"), &error) == NEBULA_OK && written.resumed == 0);
        check_object("t/o.pt", data, size);
        free(data);
}
EACH(an_upload_that_is_gone_begins_anew, forgotten)

/* Each object has the same number in storage whichever upload sent its parts: an upload of an earlier version can be a source. */
static void marked(void)
{
        char *data = make_data(), former[STORE_RESUME_MAX], id[OBJECT_ID_SIZE];
        uint64_t size = size_of(PARTS);
        struct store_entry entry = { 0 };

        REQUIRE(data);
        store->ops->abort(store, upload("t/m.pt", data, size, NULL));
        strcpy(former, told);
        CHECK(store->ops->publish(store, upload("t/m.pt", data, size, former), &error) == NEBULA_OK);
        CHECK(object_look(driver(), "t/m.pt", &entry, id, &error) == NEBULA_OK && !strcmp(id, written.mark.text) && entry.size == size);
        store_entry_done(&entry);
        check_object("t/m.pt", data, size);
        free(data);
}
EACH(the_mark_is_that_of_the_object, marked)

TAP_MAIN(TEST(an_upload_goes_on_with_the_parts_that_have_its_bytes), TEST(parts_with_other_bytes_are_sent),
         TEST(parts_of_another_size_are_sent), TEST(an_upload_that_is_gone_begins_anew), TEST(the_mark_is_that_of_the_object))
