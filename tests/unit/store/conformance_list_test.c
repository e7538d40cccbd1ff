/* The promises of store.h about lists, on every kind of store whose lists are fresh. */
#include <pthread.h>
#include <stdatomic.h>

#include "base/error.h"
#include "kinds.h"
#include "store/lister.h"

#define KEYS_MAX 200

static void each_fresh(void (*promise)(void));
#define EACH(name, promise) static void name(void) { each_fresh(promise); }

static void (*current)(void);

static void if_fresh(void)
{
        if (features & STORE_LISTS_FRESH)
                current();
}

static void each_fresh(void (*promise)(void))
{
        current = promise;
        each(if_fresh);
}

/* The keys of the objects that were put, sorted. */
static char *made[KEYS_MAX];
static size_t made_count;

static int by_text(const void *a, const void *b)
{
        return strcmp(*(char *const *)a, *(char *const *)b);
}

static void make(const char *key)
{
        if (put(key, key, STORE_IF_ABSENT))
                abort();
        made[made_count++] = strdup(key);
        qsort(made, made_count, sizeof *made, by_text);
}

static void forget_made(void)
{
        while (made_count)
                free(made[--made_count]);
}

/* The expected result of `keys`. */
static const char *expected(const char *prefix, bool deep)
{
        static char text[65536], last[256];
        size_t used = 0;

        text[0] = last[0] = 0;
        for (size_t i = 0; i < made_count; i++) {
                const char *slash;
                char key[256];

                if (strncmp(made[i], prefix, strlen(prefix)))
                        continue;
                slash = deep ? NULL : strchr(made[i] + strlen(prefix), '/');
                snprintf(key, sizeof key, "%.*s", slash ? (int)(slash + 1 - made[i]) : (int)strlen(made[i]), made[i]);
                if (strcmp(key, last))
                        used += (size_t)snprintf(text + used, sizeof text - used, "%s ", key);
                strcpy(last, key);
        }
        return text;
}

static void check_prefix(const char *prefix)
{
        for (int deep = 0; deep < 2; deep++) {
                const char *found = keys(prefix, deep);

                if (strcmp(found, expected(prefix, deep)))
                        printf("# \"%s\"%s: %s\n#   and not %s\n", prefix, deep ? ", deep" : "", found, expected(prefix, deep));
                CHECK(!strcmp(found, expected(prefix, deep)));
        }
}

static void order(void)
{
        static const char *const names[] = { "a/x", "a-b", "a.b/c", "a0", "a/b/c/d", "a/b-c", "a/b.c", "b", "latest", "t/.nebula/manifest-1.json",
                                             "t/.nebula/manifest-12.json", "t/.nebula/manifest-2.json", "t/.nebula/w1/x", "t/model.pt", "t2/model.pt",
                                             "\xc3\xa4/\xff", "Z/z", "t/.nebula.x", "e.!a", "e.&a", "e.&b", "e.&c", "e./x", "e./y", "s/Y", "s/Z", "s/\\b",
                                             "s/\\c", "s/\\d" };
        static const char *const prefixes[] = { "", "a", "a/", "a/b", "a/b/", "a/b/c/d", "a/b/c/d/", "a.", "b", "b/", "t", "t/", "t/.nebula/",
                                                "t/.nebula/manifest-", "t/.nebula/manifest-1", "t/.nebula/w", "\xc3", "\xff", "none", "none/", "none/x", ".", "e.", "e", "s/", "s" };

        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
                make(names[i]);
        for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
                check_prefix(prefixes[i]);
        forget_made();
}
EACH(a_list_has_every_key_that_begins_so_in_order, order)

static unsigned dice(unsigned sides)
{
        static uint64_t state = 1;

        state = state * 6364136223846793005u + 1442695040888963407u;
        return (unsigned)(state >> 33) % sides;
}

/* No name is both an object's and a directory's: the last component of a key begins with another letter. */
static void random_key(char *key)
{
        static const char letters[] = "ab-.0~";
        size_t used = 0;

        for (unsigned depth = dice(4); depth--;) {
                key[used++] = 'd';
                for (unsigned i = dice(2); i--;)
                        key[used++] = letters[dice(6)];
                key[used++] = '/';
        }
        key[used++] = 'o';
        for (unsigned i = dice(3); i--;)
                key[used++] = letters[dice(6)];
        key[used] = 0;
}

static void random_lists(void)
{
        char key[64];

        for (int i = 0; i < repeats(60); i++) {
                size_t known = 0;

                random_key(key);
                while (known < made_count && strcmp(made[known], key))
                        known++;
                if (known == made_count)
                        make(key);
        }
        check_prefix("");
        for (int i = 0; i < repeats(40); i++) {
                random_key(key);
                key[dice((unsigned)strlen(key))] = 0;
                check_prefix(key);
        }
        forget_made();
}
EACH(a_list_is_as_a_sorted_array_would_give_it, random_lists)

/* The result of a lister, in the form of `keys`. */
static const char *listed(struct lister *lister, const char *prefix)
{
        static char text[65536];
        struct store_list list;
        size_t used = 0;

        if (lister_list(lister, prefix, &list, &error))
                return "!";
        text[0] = 0;
        for (size_t i = 0; i < list.count; i++)
                if (!is_empty_directory(&list.entries[i]))
                        used += (size_t)snprintf(text + used, sizeof text - used, "%s ", list.entries[i].key);
        store_list_done(&list);
        return text;
}

static void check_lister(char *const *prefixes, size_t count)
{
        struct lister lister = { .store = store };

        for (size_t i = 0; i < count; i++) {
                const char *found = listed(&lister, prefixes[i]);

                if (strcmp(found, expected(prefixes[i], true)))
                        printf("# \"%s\": %s\n#   and not %s\n", prefixes[i], found, expected(prefixes[i], true));
                CHECK(!strcmp(found, expected(prefixes[i], true)));
        }
        lister_done(&lister);
}

/* Keys that drivers write in another way stand elsewhere in the lists of their services. */
static void ascending(void)
{
        static const char *const odd[] = { "a./x", "a.&/x", "a%2Fb/x", "\xc3\xa4/x", "b\\/x", "a\x01/x" };
        char *prefixes[40] = { 0 }, key[64];
        size_t count = 0;

        for (int tag = 0; tag < 10; tag++)
                for (int i = 0; i < (tag == 7 ? 9 : 1 + tag % 3); i++) {
                        snprintf(key, sizeof key, "t%02d/.nebula/%s%d", tag, i % 2 ? "manifest-" : "w", i);
                        make(key);
                }
        for (int round = 0; round < 2; round++) {
                for (int tag = 0; tag < 12; tag++) { /* the last two have no object */
                        snprintf(key, sizeof key, "t%02d/.nebula/manifest-", tag);
                        prefixes[count++] = strdup(key);
                }
                if (round)
                        for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
                                snprintf(key, sizeof key, "%.*s/", (int)strcspn(odd[i], "/"), odd[i]);
                                prefixes[count++] = strdup(key);
                        }
                qsort(prefixes, count, sizeof *prefixes, by_text);
                check_lister(prefixes, count);
                while (count)
                        free(prefixes[--count]);
                for (size_t i = 0; !round && i < sizeof odd / sizeof *odd; i++)
                        make(odd[i]);
        }
        forget_made();
}
EACH(a_lister_gives_for_ascending_prefixes_what_lists_give, ascending)

/* 40 tags of `size` objects each. Returns the number of requests for their manifests. */
static uint64_t requests_for(size_t size, size_t page_entries)
{
        struct lister lister = { 0 };
        uint64_t before, after;
        char key[64];

        lister.store = store = begin_mem_with(&(struct mem_faults){ .page_entries = page_entries });
        for (int tag = 0; tag < 40; tag++)
                for (size_t i = 0; i < size; i++) {
                        snprintf(key, sizeof key, i ? "t%02d/x%02zu" : "t%02d/.nebula/manifest-1.json", tag, i);
                        CHECK(!put(key, "x", STORE_ALWAYS));
                }
        before = store_mem_calls(store);
        for (int tag = 0; tag < 40; tag++) {
                char wanted[80];

                snprintf(key, sizeof key, "t%02d/.nebula/manifest-", tag);
                snprintf(wanted, sizeof wanted, "%s1.json ", key);
                CHECK(!strcmp(listed(&lister, key), wanted));
        }
        after = store_mem_calls(store);
        lister_done(&lister);
        store_close(store);
        end_mem();
        return after - before;
}

static void a_lister_asks_once_for_many_small_tags_and_no_more_than_lists_for_large_ones(void)
{
        CHECK(requests_for(3, 60) <= 3);
        CHECK(requests_for(30, 60) <= 2 + 2 * 40); /* a list of mem has an empty first page */
}

static enum nebula_status begins_at_the_first(struct store *from, const char *key, struct store_page *ret_page, struct nebula_error *ret_error)
{
        (void)key;
        return error_set(ret_error, NEBULA_INVALID, 0, "%s begins no list at a key", from->root);
}

static void a_lister_lists_each_prefix_if_the_store_begins_no_list_at_a_key(void)
{
        const struct store_ops *real;
        struct lister lister = { 0 };
        struct store_ops ops;

        lister.store = store = begin_mem();
        CHECK(!put("a/x", "1", STORE_ALWAYS) && !put("b/x", "1", STORE_ALWAYS));
        real = store->ops;
        ops = *real;
        ops.list_after = begins_at_the_first;
        store->ops = &ops;
        CHECK(!strcmp(listed(&lister, "a/"), "a/x ") && !strcmp(listed(&lister, "b/"), "b/x "));
        ops.list_after = NULL;
        lister = (struct lister){ .store = store };
        CHECK(!strcmp(listed(&lister, "a/"), "a/x ") && !strcmp(listed(&lister, "b/"), "b/x "));
        store->ops = real;
        store_close(store);
        end_mem();
}

static void details(void)
{
        struct store_list list;
        struct store_entry entry;

        CHECK(put("t/x", "12345", STORE_ALWAYS) == NEBULA_OK && put("t/d/y", "1", STORE_ALWAYS) == NEBULA_OK);
        REQUIRE(store->ops->stat(store, "t/x", &entry, &error) == NEBULA_OK);
        REQUIRE(store_list_all(store, "t/d", false, &list, &error) == NEBULA_OK && list.count == 1);
        CHECK(list.entries[0].is_prefix && !list.entries[0].size && !list.entries[0].stamp.text[0] && !strcmp(list.entries[0].key, "t/d"));
        store_list_done(&list);
        REQUIRE(store_list_all(store, "t/x", false, &list, &error) == NEBULA_OK && list.count == 1);
        CHECK(!list.entries[0].is_prefix && list.entries[0].size == 5 && !list.entries[0].is_link && !list.entries[0].is_foreign);
        CHECK(!strcmp(list.entries[0].stamp.text, entry.stamp.text) && list.entries[0].time_ns == entry.time_ns);
        store_list_done(&list);
        CHECK(!list.entries && !list.count);
        store_entry_done(&entry);
}
EACH(an_entry_of_a_list_says_what_stat_says, details)

/* The next page continues after the last key, even if that key was removed. */
static void changing(void)
{
        struct store_page page;
        char *from = NULL;
        size_t seen = 0;

        for (int i = 0; i < 30; i++) {
                char key[32];

                snprintf(key, sizeof key, "t/stays-%02d", i);
                CHECK(put(key, "1", STORE_ALWAYS) == NEBULA_OK);
                snprintf(key, sizeof key, "t/stays-%02d.goes", i);
                CHECK(put(key, "1", STORE_ALWAYS) == NEBULA_OK);
        }
        do {
                REQUIRE(store->ops->list(store, "t/", true, from, &page, &error) == NEBULA_OK);
                for (size_t i = 0; i < page.count; i++) {
                        if (strstr(page.entries[i].key, "goes"))
                                CHECK(store_remove_one(store, page.entries[i].key, &error) == NEBULA_OK);
                        else
                                seen++;
                }
                free(from);
                from = page.next;
                page.next = NULL;
                store_page_done(&page);
        } while (from);
        CHECK(seen == 30);
}
EACH(a_listing_goes_on_where_keys_have_gone, changing)

static void unsound(void)
{
        static const char *const bad[] = { "/", "/x", "a//", "../", "a/../", "./x" };
        struct store_page page;

        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
                CHECK(store->ops->list(store, bad[i], true, NULL, &page, &error) == NEBULA_INVALID);
}
EACH(a_prefix_leads_nowhere_out_of_the_store, unsound)

static void emptied(void)
{
        CHECK(put("a/b/c/x", "1", STORE_ALWAYS) == NEBULA_OK && put("a/y", "1", STORE_ALWAYS) == NEBULA_OK);
        CHECK(store_remove_one(store, "a/b/c/x", &error) == NEBULA_OK && !strcmp(keys("a/", false), "a/y "));
        CHECK(store_remove_one(store, "a/y", &error) == NEBULA_OK && !strcmp(keys("", false), ""));
}
EACH(a_prefix_goes_with_its_last_object, emptied)

TAP_MAIN(TEST(a_list_has_every_key_that_begins_so_in_order), TEST(a_list_is_as_a_sorted_array_would_give_it), TEST(a_lister_gives_for_ascending_prefixes_what_lists_give), TEST(a_lister_asks_once_for_many_small_tags_and_no_more_than_lists_for_large_ones),
         TEST(a_lister_lists_each_prefix_if_the_store_begins_no_list_at_a_key), TEST(an_entry_of_a_list_says_what_stat_says),
         TEST(a_listing_goes_on_where_keys_have_gone), TEST(a_prefix_leads_nowhere_out_of_the_store), TEST(a_prefix_goes_with_its_last_object))
