/* The promises of store.h about concurrent callers, on every kind of store. */
#include <pthread.h>
#include <stdatomic.h>

#include "kinds.h"

#define THREADS 16
#define ROUNDS_MAX 20
#define ROUNDS repeats(ROUNDS_MAX)
#define EACH(name, promise) static void name(void) { each(promise); }

static pthread_barrier_t barrier;
static struct store *stores[2]; /* threads share two */

static void run_threads(void *(*work)(void *number))
{
        pthread_t threads[THREADS];

        stores[0] = store;
        stores[1] = kind->again();
        pthread_barrier_init(&barrier, NULL, THREADS);
        for (uintptr_t i = 0; i < THREADS; i++)
                if (pthread_create(&threads[i], NULL, work, (void *)i))
                        abort();
        for (int i = 0; i < THREADS; i++)
                pthread_join(threads[i], NULL);
        pthread_barrier_destroy(&barrier);
        store_close(stores[1]);
}

static atomic_int winners, others, failures;
static atomic_uintptr_t winner[ROUNDS_MAX];

static void count(enum nebula_status status, int round, uintptr_t number)
{
        atomic_fetch_add(status == NEBULA_OK ? &winners : status == NEBULA_BUSY ? &others : &failures, 1);
        if (!status)
                atomic_store(&winner[round], number);
}

/* The content of t/<round> is the winner's. */
static void check_winners(void)
{
        char key[32], text[32];

        CHECK(winners == ROUNDS && others == ROUNDS * (THREADS - 1) && !failures);
        for (int round = 0; round < ROUNDS; round++) {
                snprintf(key, sizeof key, "t/%d", round);
                snprintf(text, sizeof text, "by %zu", (size_t)winner[round]);
                CHECK(!strcmp(get(key), text));
        }
        winners = others = failures = 0;
}

static void *create(void *number)
{
        struct store *mine = stores[(uintptr_t)number % 2];
        char key[32], text[32];

        snprintf(text, sizeof text, "by %zu", (size_t)(uintptr_t)number);
        for (int round = 0; round < ROUNDS; round++) {
                snprintf(key, sizeof key, "t/%d", round);
                pthread_barrier_wait(&barrier);
                count(store_put_text(mine, key, text, STORE_IF_ABSENT, NULL), round, (uintptr_t)number);
        }
        return NULL;
}

static void creation(void)
{
        run_threads(create);
        check_winners();
}
EACH(of_those_that_create_a_key_one_wins, creation)

static void *publish(void *number)
{
        struct store *mine = stores[(uintptr_t)number % 2];
        char key[32], text[32];

        snprintf(text, sizeof text, "by %zu", (size_t)(uintptr_t)number);
        for (int round = 0; round < ROUNDS; round++) {
                struct store_object object = { key, text, strlen(text), NULL };
                struct store_upload *upload = NULL;

                snprintf(key, sizeof key, "t/%d", round);
                if (mine->ops->upload(mine, &object, 1, &upload, NULL))
                        atomic_fetch_add(&failures, 1);
                pthread_barrier_wait(&barrier);
                if (upload)
                        count(mine->ops->publish(mine, upload, NULL), round, (uintptr_t)number);
        }
        return NULL;
}

static void publication(void)
{
        run_threads(publish);
        check_winners();
}
EACH(of_those_that_publish_a_key_one_wins, publication)

/* Each thread removes its own objects: if objects are files, directories vanish while other threads write in them. */
static void *come_and_go(void *number)
{
        struct store *mine = stores[(uintptr_t)number % 2];
        struct nebula_error failure;
        char key[32];

        for (int round = 0; round < ROUNDS; round++) {
                struct store_object object = { key, "x", 1, NULL };
                struct store_upload *upload;
                bool is_fine;

                snprintf(key, sizeof key, "t/deep/er/%zu", (size_t)(uintptr_t)number % 4 ? (size_t)(uintptr_t)number : 100);
                is_fine = round % 2 ? !store_put_text(mine, key, "x", STORE_ALWAYS, &failure)
                                    : !mine->ops->upload(mine, &object, 1, &upload, &failure) &&
                                      (mine->ops->publish(mine, upload, &failure) == NEBULA_OK || failure.status == NEBULA_BUSY);
                is_fine = is_fine && !store_remove_one(mine, key, &failure);
                if (!is_fine && !atomic_fetch_add(&failures, 1))
                        printf("# %s\n", failure.message);
        }
        return NULL;
}

static void vanishing(void)
{
        run_threads(come_and_go);
        CHECK(!failures);
        failures = 0;
        if (features & STORE_LISTS_FRESH)
                CHECK(!strcmp(keys("", true), "") && !strcmp(keys("", false), ""));
}
EACH(a_writer_loses_nothing_to_removals_beside_it, vanishing)

static void *add_one(void *number)
{
        struct store *mine = stores[(uintptr_t)number % 2];

        for (int round = 0; round < ROUNDS;) {
                struct store_stamp seen;
                enum nebula_status status;
                char *text, next[32];

                if (mine->ops->get(mine, "sum", 100, &text, NULL, &seen, NULL))
                        abort();
                snprintf(next, sizeof next, "%d", atoi(text) + 1);
                free(text);
                status = mine->ops->put(mine, "sum", next, strlen(next), STORE_IF_SAME, &seen, NULL, NULL);
                round += status == NEBULA_OK;
                if (status && status != NEBULA_BUSY)
                        abort();
        }
        return NULL;
}

static void sum(void)
{
        if (!(features & STORE_PUTS_IF_SAME))
                return;
        CHECK(put("sum", "0", STORE_ALWAYS) == NEBULA_OK);
        run_threads(add_one);
        CHECK(atoi(get("sum")) == THREADS * ROUNDS);
}
EACH(no_sum_is_lost_that_is_put_where_it_was_seen, sum)

/* libfuse knows files by their names: one that is renamed between the kernel's lookup and its open is not found, where NFS says ESTALE and
 * the kernel looks again. */
#ifdef NB_TEST_NFS
#define LOSES_NAMES true
#else
#define LOSES_NAMES false
#endif

/* Even threads replace the object, odd ones read it. */
static void *replace_or_read(void *number)
{
        struct store *mine = stores[(uintptr_t)number / 2 % 2];

        for (int round = 0; round < ROUNDS; round++) {
                struct nebula_error failure;
                char text[3000], *back;
                size_t size;

                memset(text, 'a' + round, sizeof text);
                if ((uintptr_t)number % 2 == 0) {
                        if (mine->ops->put(mine, "t/x", text, sizeof text - (size_t)round, STORE_ALWAYS, NULL, NULL, NULL))
                                atomic_fetch_add(&failures, 1);
                } else if (mine->ops->get(mine, "t/x", sizeof text, &back, &size, NULL, &failure)) {
                        atomic_fetch_add(&failures, !LOSES_NAMES || failure.status != NEBULA_NOT_FOUND);
                } else {
                        if (sizeof text - size != (size_t)(back[0] - 'a') || back[size - 1] != back[0])
                                atomic_fetch_add(&others, 1);
                        free(back);
                }
        }
        return NULL;
}

static void replacing(void)
{
        char text[3000];

        memset(text, 'a', sizeof text);
        CHECK(store->ops->put(store, "t/x", text, sizeof text, STORE_ALWAYS, NULL, NULL, &error) == NEBULA_OK);
        run_threads(replace_or_read);
        CHECK(!failures && !others);
        failures = others = 0;
}
EACH(an_object_that_is_replaced_is_read_as_the_old_or_the_new_one, replacing)

static void *remove_seen(void *number)
{
        struct store *mine = stores[(uintptr_t)number % 2];

        for (int round = 0; round < ROUNDS; round++) {
                struct store_victim victim = { "t/x", { "" } };
                struct nebula_error failure;
                struct store_entry entry;

                if (mine->ops->stat(mine, "t/x", &entry, NULL)) {
                        store_put_text(mine, "t/x", "next", STORE_IF_ABSENT, NULL);
                        continue;
                }
                victim.stamp = entry.stamp;
                store_entry_done(&entry);
                if (mine->ops->remove(mine, &victim, 1, &failure) && !atomic_fetch_add(&failures, 1))
                        printf("# %s\n", failure.message);
        }
        return NULL;
}

static void conditional_removal(void)
{
        CHECK(put("t/x", "first", STORE_ALWAYS) == NEBULA_OK);
        run_threads(remove_seen);
        CHECK(!failures);
        failures = 0;
}
EACH(removals_of_one_object_do_not_fail, conditional_removal)

TAP_MAIN(TEST(of_those_that_create_a_key_one_wins), TEST(of_those_that_publish_a_key_one_wins), TEST(a_writer_loses_nothing_to_removals_beside_it),
         TEST(no_sum_is_lost_that_is_put_where_it_was_seen), TEST(an_object_that_is_replaced_is_read_as_the_old_or_the_new_one),
         TEST(removals_of_one_object_do_not_fail))
