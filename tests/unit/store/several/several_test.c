/* One storage path in two accounts or buckets: where each object lies, and what is refused. */
#define NB_TEST_SEVERAL 1
#include "store/kinds.h"

#define EACH(name, promise) static void name(void) { each(promise); }
#define FILES 16
#define WRITING "w0123456789abcdef-1-0badcafe"

static bool has(size_t member, const char *key)
{
        struct store *one = several_member(store, member);
        struct store_entry entry;
        bool is_there = !one->ops->stat(one, key, &entry, &error);

        if (is_there)
                store_entry_done(&entry);
        return is_there;
}

static void spreads(void)
{
        struct store_object objects[FILES];
        struct store_upload *upload;
        char names[FILES][40];
        size_t counts[2] = { 0 };

        for (size_t i = 0; i < FILES; i++) {
                snprintf(names[i], sizeof names[i], "t/model-%zu.pt", i);
                objects[i] = (struct store_object){ .key = names[i], .data = "bytes", .size = 5 };
        }
        REQUIRE(store->ops->upload(store, objects, FILES, &upload, &error) == NEBULA_OK && !strcmp(keys("", true), ""));
        REQUIRE(store->ops->publish(store, upload, &error) == NEBULA_OK);
        for (size_t i = 0; i < FILES; i++) {
                size_t place = several_place(names[i], 2);

                CHECK(has(place, names[i]) && !has(1 - place, names[i]) && !strcmp(get(names[i]), "bytes"));
                counts[place]++;
        }
        CHECK(counts[0] >= FILES / 4 && counts[1] >= FILES / 4);
        CHECK(!put("t/.nebula/manifest-1.json", "m", STORE_IF_ABSENT) && !put("t/.nebula/" WRITING ".record-00000.json", "r", STORE_IF_ABSENT) &&
              !put("latest", "t", STORE_ALWAYS) && !put(".nebula/pins/model-1.pt.json", "p", STORE_ALWAYS));
        CHECK(has(0, "t/.nebula/manifest-1.json") && has(0, "t/.nebula/" WRITING ".record-00000.json") && has(0, "latest") &&
              has(0, ".nebula/pins/model-1.pt.json"));
        CHECK(!strcmp(keys("", false), ".nebula/ latest t/ ") && !strncmp(keys("t/", false), "t/.nebula/ t/model-0.pt t/model-1.pt t/model-10.pt ", 47));
}
EACH(files_are_spread_and_documents_lie_together, spreads)

/* The manifests of all versions, a published view and the bytes of an earlier version: all of one file lie beside each other. */
static void a_files_name_decides(void)
{
        for (unsigned i = 0; i < 100; i++) {
                char key[80], apart[120], other[80], private[80];

                snprintf(key, sizeof key, "global_step1/rank-%u.pt", i);
                snprintf(apart, sizeof apart, "global_step1/.nebula/" WRITING "/rank-%u.pt", i);
                snprintf(other, sizeof other, "global_step2/rank-%u.pt", i);
                snprintf(private, sizeof private, "global_step1/.nebula/rank-%u.pt", i);
                for (size_t count = 2; count <= 16; count++) {
                        CHECK(several_place(key, count) == several_place(apart, count) && several_place(key, count) == several_place(other, count));
                        CHECK(several_place(key, count) < count && several_place(private, count) == 0);
                }
        }
        CHECK(several_place("t/model.pt", 7) == 5 && several_place("t/optimizer.pt", 7) == 6); /* readers of later releases must agree */
}

/* As if the URL had had its accounts in another order. */
static void astray(void)
{
        const char *key = "t/model-0.pt";
        size_t place = several_place(key, 2);
        struct store *wrong = several_member(store, 1 - place);

        REQUIRE(wrong->ops->put(wrong, key, "astray", 6, STORE_ALWAYS, NULL, NULL, &error) == NEBULA_OK);
        CHECK(!strcmp(get(key), "-") && !strcmp(keys("", true), ""));
}
EACH(what_no_reader_finds_is_not_listed, astray)

/* In the other order no checkpoint would be found, and a job would begin from nothing. */
static void ordered(void)
{
        static const char *const documents[] = { "latest", ".nebula/index/0000000000000000001-0000000000000000001-0123456789abcdef/t" };
        struct store *first = several_member(store, 0), *second = several_member(store, 1);
        struct store_page page;

        for (size_t i = 0; i < 2; i++) {
                const char *key = documents[i], *prefix = i ? ".nebula/index/" : "";

                REQUIRE(second->ops->put(second, key, "t", 1, STORE_ALWAYS, NULL, NULL, &error) == NEBULA_OK);
                CHECK(store->ops->list(store, prefix, i, NULL, &page, &error) == NEBULA_INVALID && strstr(error.message, second->root) &&
                      strstr(error.message, "the order in which the checkpoints were written"));
                REQUIRE(first->ops->put(first, key, "t", 1, STORE_ALWAYS, NULL, NULL, &error) == NEBULA_OK);
                CHECK(!strcmp(keys(prefix, i), i ? ".nebula/index/0000000000000000001-0000000000000000001-0123456789abcdef/t " : "latest "));
                CHECK(!store_remove_one(first, key, &error) && !store_remove_one(second, key, &error));
        }
}
EACH(names_in_another_order_are_refused, ordered)

static void errors_name_the_member(void)
{
        struct store *member = several_member(store, 1);
        char *data;
        unsigned i = 0;
        char key[40];

        do
                snprintf(key, sizeof key, "t/absent-%u", i++);
        while (several_place(key, 2) != 1);
        CHECK(store->ops->get(store, key, 10, &data, NULL, NULL, &error) == NEBULA_NOT_FOUND && strstr(error.message, member->root) &&
              strstr(member->root, "nebula"));
}
EACH(an_error_names_its_account, errors_name_the_member)

static void refused(void)
{
        static const char *const bad[][2] = {
                { "gs://a1b,a2b/p", "only az:// and s3://" }, { "abfss://c@a,b.dfs.core.windows.net/p", "only az:// and s3://" },
                { "az://one,one/container/p", "twice" }, { "s3://one,,two/p", "missing" }, { "s3://one,/p", "missing" },
                { "az://one,two/container?sv=1&sig=SECRET", "SAS" }, { "s3://one,T/p", "no bucket" }, { "az://one,TWO/container", "" },
                { "s3://aa1,aa2,aa3,aa4,aa5,aa6,aa7,aa8,aa9,bb1,bb2,bb3,bb4,bb5,bb6,bb7,bb8/p", "more than 16" },
        };
        struct store *opened;

        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
                enum nebula_status status = store_open(bad[i][0], &opened, &error);

                if (!status)
                        store_close(opened);
                else
                        CHECK(status == NEBULA_INVALID && strstr(error.message, bad[i][1]) && !strstr(error.message, "SECRET"));
                CHECK(status || !*bad[i][1]);
        }
}
EACH(a_wrong_list_is_refused, refused)

TAP_MAIN(TEST(files_are_spread_and_documents_lie_together), TEST(a_files_name_decides), TEST(what_no_reader_finds_is_not_listed), TEST(names_in_another_order_are_refused),
         TEST(an_error_names_its_account), TEST(a_wrong_list_is_refused))
