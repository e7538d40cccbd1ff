/* Uploads of an agent that died: a sweep ends them, but no upload that is still running. */
#include "kinds.h"
#include "store/manifest.h"
#include "store/s3/s3_private.h"
#include "store/sweep.h"

#define EACH(name, promise) static void name(void) { each(promise); }
#define HOUR_NS (INT64_C(3600) * 1000000000)
#define ANY_AGE (-2 * HOUR_NS)
#define WRITING "w0123456789abcdef-1-0badcafe"

struct begun {
        const char *key;
        char *id;
};

static struct begun begin(const char *key, unsigned parts)
{
        struct begun begun = { key, NULL };
        struct object_part part;

        CHECK(s3_multipart_begin((struct object_store *)store, key, "0123456789abcdef", &begun.id, &error) == NEBULA_OK);
        for (unsigned i = 0; i < parts; i++)
                CHECK(s3_multipart_send((struct object_store *)store, key, begun.id, &(struct object_range){ .index = i, .size = 5 }, "bytes", &part, NULL, &error) == NEBULA_OK);
        return begun;
}

static bool is_open(struct begun begun)
{
        struct object_store *object = (struct object_store *)store;
        struct object_call call = { .method = "GET", .key = begun.key };
        struct http_response response;
        bool is_so;

        object_param(&call, "uploadId", begun.id);
        CHECK(object->service->send(object, &call, &response, &error) == NEBULA_OK && (response.status == 200 || response.status == 404));
        is_so = response.status == 200;
        http_response_done(&response);
        return is_so;
}

static size_t sweep(int64_t age_ns)
{
        size_t removed = 99;

        CHECK(manifest_sweep(store, age_ns, &removed, &error) == NEBULA_OK);
        return removed;
}

static int64_t always(void *argument, const char *key)
{
        return INT64_MAX;
}

static void end(struct begun begun)
{
        s3_multipart_abort((struct object_store *)store, begun.key, begun.id, NULL);
        free(begun.id);
}

static void sweeps(void)
{
        struct begun apart = begin("t/.nebula/" WRITING "/m.pt", 3), bare, temporary = begin(".nebula-tmp-0123456789abcdef-0", 1);
        struct begun in_place = begin("t/m.pt", 1), foreign = begin("t/a/b", 1), odd = begin("t/.nebula/other", 1);
        size_t count = 0;

        CHECK(sweep(HOUR_NS) == 0 && is_open(apart) && is_open(temporary));
        bare = begin("u v/.nebula/" WRITING "/&.pt", 0); /* of it alone, moto says that it was begun in 2010 */
        CHECK(sweep(ANY_AGE) == 2 && !is_open(bare) && !is_open(temporary));
        CHECK(is_open(apart) && is_open(in_place) && is_open(foreign) && is_open(odd)); /* that in place may be of this version, and is no week old */
        end(in_place);
        CHECK(sweep(ANY_AGE) == 1 && !is_open(apart) && is_open(foreign) && is_open(odd));
        in_place = begin("t/n.pt", 1);
        CHECK(store->ops->sweep(store, always, NULL, &count, &error) == NEBULA_OK && count == 3);
        CHECK(!is_open(in_place) && !is_open(foreign) && !is_open(odd));
        free(apart.id);
        free(bare.id);
        free(temporary.id);
        end(in_place);
        end(foreign);
        end(odd);
}
EACH(abandoned_uploads_end_and_others_go_on, sweeps)

static bool goes_on(void *argument, const char *key)
{
        return !strcmp(key, argument);
}

static void resumed(void)
{
        struct begun ours = begin("t/.nebula/" WRITING "/m.pt", 1), other = begin("t/.nebula/" WRITING "/n.pt", 1);
        char key[] = "t/.nebula/" WRITING "/m.pt";
        size_t removed = 99;

        CHECK(manifest_sweep_rest(store, &(struct store_list){ 0 }, ANY_AGE, true, goes_on, key, &removed, &error) == NEBULA_OK && removed == 1);
        CHECK(is_open(ours) && !is_open(other));
        end(ours);
        free(other.id);
}
EACH(an_upload_with_which_the_caller_goes_on_stays, resumed)

/* Below another prefix. */
static void neighbours(void)
{
        struct object_store *object = (struct object_store *)store;
        struct begun ours = begin("t/.nebula/" WRITING "/m.pt", 1);
        const char *prefix = object->prefix;
        char other[300];
        struct begun theirs;

        snprintf(other, sizeof other, "%.*s-2/", (int)strlen(prefix) - 1, prefix);
        object->prefix = other;
        theirs = begin("t/.nebula/" WRITING "/m.pt", 1);
        object->prefix = prefix;
        CHECK(sweep(ANY_AGE) == 1 && !is_open(ours));
        object->prefix = other;
        CHECK(is_open(theirs));
        end(theirs);
        object->prefix = prefix;
        free(ours.id);
}
EACH(uploads_of_another_storage_path_go_on, neighbours)

TAP_MAIN(TEST(abandoned_uploads_end_and_others_go_on), TEST(an_upload_with_which_the_caller_goes_on_stays),
         TEST(uploads_of_another_storage_path_go_on))
