/* The page maker joins pages of images into huge ones, a little at a time, while other threads use the images. */
#include <errno.h>
#include <sys/stat.h>

#include "agent/agent_catalogue.h"
#include "agent/memory/page_maker.h"
#include "os/bulk.h"
#include "tap.h"
#include "test_dir.h"

#define MIB (1u << 20)
#define IMAGE_BYTES (10 * MIB) /* 2.5 steps of the page maker */
#define LARGE_BYTES (5 * MIB + 333) /* two of its pages can be huge */
#define FILE_BYTES (9 * MIB) /* the size of a file in such an image */

static struct os_table table;
static struct bench bench;
static struct image *image;
static unsigned joined_count; /* calls */
static bool lends, dooms, was_buried, can_join;

/* Lets the rest of the program continue while pages are joined. */
static int advise_meanwhile(void *data, uint64_t size, enum os_advice advice)
{
        if (advice != OS_ADVISE_COLLAPSE)
                return os_linux.advise(data, size, advice);
        joined_count++;
        catalogue_lock(&bench.catalogue);
        if (lends && !image->users)
                memory_hold(image);
        if (dooms && joined_count == 1)
                memory_doom(bench.catalogue.memory, image);
        was_buried |= dooms && memory_next_doomed(bench.catalogue.memory);
        catalogue_unlock(&bench.catalogue);
        return os_linux.advise(data, size, advice);
}

static void serve_often(struct image *taken)
{
        taken->served = MEMORY_SERVED;
        taken->taken_ns = os->now_ns();
        taken->pause_ns = INT64_C(60000000000);
}

static int join_nothing(void *data, uint64_t size, enum os_advice advice)
{
        if (advice != OS_ADVISE_COLLAPSE)
                return os_linux.advise(data, size, advice);
        joined_count++;
        return -EINVAL;
}

static unsigned char *begin(int (*advise)(void *data, uint64_t size, enum os_advice advice))
{
        void *data;

        joined_count = 0;
        lends = dooms = was_buried = false;
        table = os_linux;
        table.advise = advise;
        os = &table;
        bench_init(&bench, NULL, "");
        if (memory_create(bench.catalogue.memory, IMAGE_BYTES, false, &image, &bench.error) || image_map(image, &data, &bench.error))
                return NULL;
        for (size_t i = 0; i < IMAGE_BYTES; i++)
                ((unsigned char *)data)[i] = bench_byte(7, i);
        bench.catalogue.memory->used = IMAGE_BYTES;
        image->job = bench.job;
        serve_often(image);
        memory_add(bench.catalogue.memory, image);
        return data;
}

static void end(void)
{
        os = &os_linux;
        bench_done(&bench, true);
}

static bool join(int64_t *join_at_ns)
{
        bool result;

        catalogue_lock(&bench.catalogue);
        result = page_maker_join(&bench.catalogue, join_at_ns);
        catalogue_unlock(&bench.catalogue);
        return result;
}

static size_t count_huge(const unsigned char *data)
{
        int fd = os->open("/proc/self/pagemap", OS_READ);
        size_t count = 0;

        for (size_t at = 0; at < IMAGE_BYTES; at += 2 * MIB)
                count += os->huge_page(fd, (uintptr_t)data + at) == 1;
        os->close(fd);
        return count;
}

static bool holds(const unsigned char *data)
{
        size_t i = 0;

        while (i < IMAGE_BYTES && data[i] == bench_byte(7, i))
                i++;
        return i == IMAGE_BYTES;
}

static void pages_of_an_image_are_joined_with_pauses(void)
{
        const unsigned char *data = begin(advise_meanwhile);
        int64_t join_at_ns = 0, begun_ns = os->now_ns(), took_ns;
        size_t huge;

        REQUIRE(data);
        CHECK((uintptr_t)data % (2 * MIB) == 0);
        CHECK(join(&join_at_ns) && joined_count == 2);
        took_ns = os->now_ns() - begun_ns;
        CHECK(join_at_ns > begun_ns && join_at_ns <= begun_ns + 200 * took_ns);
        CHECK(bench.catalogue.memory->joining);
        join_at_ns = os->now_ns() + INT64_C(60000000000);
        CHECK(!join(&join_at_ns) && joined_count == 2 && bench.catalogue.memory->joining);
        for (unsigned i = 2; i < 4; i++) {
                join_at_ns = 0;
                CHECK(join(&join_at_ns) && joined_count == (i == 2 ? 4 : 5));
        }
        join_at_ns = 0;
        CHECK(!join(&join_at_ns) && joined_count == 5 && !bench.catalogue.memory->joining);
        CHECK(holds(data));
        huge = count_huge(data);
        if (huge == 0)
                printf("# this kernel can't join pages, or has none to join them into\n");
        else
                CHECK(huge == 5);
        can_join = huge > 0;
        end();
}

static void an_image_in_use_is_not_joined(void)
{
        const unsigned char *data = begin(advise_meanwhile);
        int64_t join_at_ns = 0;

        REQUIRE(data);
        memory_hold(image);
        CHECK(!join(&join_at_ns) && !joined_count && !bench.catalogue.memory->joining);
        memory_drop(bench.catalogue.memory, image);
        lends = true;
        CHECK(join(&join_at_ns) && joined_count == 2); /* lent during the first step, which ends */
        join_at_ns = 0;
        CHECK(!join(&join_at_ns) && joined_count == 2);
        CHECK(holds(data));
        lends = false;
        memory_drop(bench.catalogue.memory, image);
        CHECK(join(&join_at_ns) && joined_count == 4);
        end();
}

static void an_image_must_have_served_often_first(void)
{
        int64_t join_at_ns = 0;

        REQUIRE(begin(advise_meanwhile));
        image->served = 0;
        for (unsigned i = 0; i < MEMORY_SERVED; i++) {
                CHECK(!join(&join_at_ns) && !joined_count);
                CHECK(memory_take(bench.catalogue.memory, FILE_BYTES, 1, bench.job) == image);
        }
        image->pause_ns = INT64_C(60000000000); /* as if a minute lay between two saves */
        CHECK(join(&join_at_ns) && joined_count == 2);
        end();
}

/* An agent without saves uses no processor time. */
static void an_image_that_serves_no_more_is_left_alone(void)
{
        int64_t join_at_ns = 0;

        REQUIRE(begin(advise_meanwhile));
        image->pause_ns = INT64_C(3600000000000);
        image->taken_ns = os->now_ns();
        CHECK(join(&join_at_ns) && joined_count == 2);
        image->taken_ns -= image->pause_ns;
        join_at_ns = 0;
        CHECK(!join(&join_at_ns) && joined_count == 2 && !bench.catalogue.memory->joining);
        CHECK(memory_take(bench.catalogue.memory, FILE_BYTES, 1, bench.job) == image);
        CHECK(join(&join_at_ns) && joined_count == 4);
        end();
}

static void an_image_that_is_dropped_meanwhile_is_buried_afterwards(void)
{
        int64_t join_at_ns = 0;

        REQUIRE(begin(advise_meanwhile));
        dooms = true;
        CHECK(join(&join_at_ns) && joined_count == 2 && !was_buried);
        catalogue_lock(&bench.catalogue);
        CHECK(page_maker_discard(&bench.catalogue) && bench.catalogue.memory->used == 0);
        catalogue_unlock(&bench.catalogue);
        join_at_ns = 0;
        CHECK(!join(&join_at_ns));
        end();
}

static void a_machine_that_joins_no_pages_is_asked_once_per_image(void)
{
        int64_t join_at_ns = 0;

        REQUIRE(begin(join_nothing));
        CHECK(join(&join_at_ns) && joined_count == 1);
        join_at_ns = 0;
        CHECK(!join(&join_at_ns) && joined_count == 1 && !bench.catalogue.memory->joining);
        end();
}

static uint64_t joined_of(const struct version *version)
{
        uint64_t joined;

        catalogue_lock(&bench.catalogue);
        joined = version->files[0].image->joined;
        catalogue_unlock(&bench.catalogue);
        return joined;
}

static struct version *large_version(void)
{
        struct version *version;
        uint64_t id;

        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "step1", NEBULA_FILES_ALL_RANKS, &bench.error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench.catalogue);
        if (!id || bench_save_bytes(&bench, &id, "a", 3, LARGE_BYTES))
                return NULL;
        catalogue_lock(&bench.catalogue);
        if (commit_part(&bench.catalogue, &bench.session, version, &bench.error))
                version = NULL;
        catalogue_unlock(&bench.catalogue);
        return version;
}

/* Uses the page maker's own thread. Only the worker that makes a version durable wakes it: before that the page maker leaves the image
 * alone, because storage is written from it. */
static void the_page_maker_joins_what_has_become_durable(void)
{
        const uint64_t capacity = memory_capacity(LARGE_BYTES) / MEMORY_ROUND * MEMORY_ROUND;
        int64_t until_ns = os->now_ns() + INT64_C(20000000000);
        struct version *version;
        char directory[256];
        pthread_t thread;

        test_dir_make(directory);
        bench_init(&bench, NULL, directory);
        REQUIRE(!pthread_create(&thread, NULL, page_maker_main, &bench.catalogue));
        version = large_version();
        REQUIRE(version);
        catalogue_lock(&bench.catalogue);
        serve_often(version->files[0].image);
        catalogue_signal(&bench.catalogue);
        catalogue_unlock(&bench.catalogue);
        os->sleep_ms(20);
        CHECK(joined_of(version) == 0);
        REQUIRE(!bench_persist(&bench, version));
        while (joined_of(version) < capacity && os->now_ns() < until_ns)
                os->sleep_ms(2);
        CHECK(joined_of(version) == capacity);
        catalogue_lock(&bench.catalogue);
        for (size_t i = 0; i < LARGE_BYTES; i++)
                if (((unsigned char *)version->files[0].image->data)[i] != bench_byte(3, i))
                        version->files[0].image->joined = 0;
        CHECK(version->files[0].image->joined == capacity);
        bench.catalogue.stopping = true;
        catalogue_signal(&bench.catalogue);
        catalogue_unlock(&bench.catalogue);
        pthread_join(thread, NULL);
        bench_done(&bench, true);
        test_dir_remove(directory);
}

/* The writer has pinned the image, on a machine with io_uring. Pinned pages cannot be joined, and joined pages need no pin. */
static void an_image_is_pinned_only_while_its_pages_are_small(void)
{
        int64_t join_at_ns = 0;
        unsigned char *data;
        int result;

        os_offer_ring();
        data = begin(advise_meanwhile);
        REQUIRE(data);
        CHECK(image_wants_pin(image));
        image->served = 0; /* as if no save used it again */
        CHECK(!image_wants_pin(image));
        serve_often(image);
        os = &os_linux; /* the agent uses a ring only then */
        result = bulk_pin(data, IMAGE_BYTES);
        image->pinned = result == 0;
        os = &table;
        printf("# pinning: %d\n", result);
        CHECK(image_wants_pin(image) == !image->pinned);
        CHECK(join(&join_at_ns) && !image->pinned && image->joined && !image_wants_pin(image));
        for (join_at_ns = 0; join(&join_at_ns); join_at_ns = 0)
                ;
        CHECK(holds(data));
        CHECK(!can_join || count_huge(data) == 5); /* no page would be huge if they were still pinned */
        end();
}

static int refuse_allocate(int fd, uint64_t offset, uint64_t size)
{
        (void)fd;
        (void)offset;
        (void)size;
        return -ENOSPC;
}

static struct image *add_bare(void)
{
        struct memory *memory = bench.catalogue.memory;
        struct image *bare;
        bool named;

        if (!memory_reserve(memory, LARGE_BYTES / MEMORY_ROUND * MEMORY_ROUND, &named) ||
            memory_create_bare(memory, LARGE_BYTES / MEMORY_ROUND * MEMORY_ROUND, named, &bare, NULL))
                abort();
        bare->job = bench.job;
        memory_add(memory, bare);
        memory_hold(bare);
        return bare;
}

static bool make_rest(void)
{
        bool result;

        catalogue_lock(&bench.catalogue);
        result = page_maker_make_rest(&bench.catalogue);
        catalogue_unlock(&bench.catalogue);
        return result;
}

static uint64_t pages_bytes(const struct image *one)
{
        struct stat stat;

        return fstat(one->fd, &stat) ? 0 : (uint64_t)stat.st_blocks * 512;
}

static void an_image_that_lacks_pages_is_used_again_only_when_it_has_them(void)
{
        struct memory *memory;
        struct image *bare, *whole;

        REQUIRE(begin(join_nothing));
        memory = bench.catalogue.memory;
        memory_hold(image);
        bare = add_bare();
        whole = add_bare();
        CHECK(!pages_bytes(bare) && memory->lacking == bare->capacity + whole->capacity);
        CHECK(!make_rest()); /* their trainers write to both */
        image_set_copied(whole, IMAGE_WHOLE);
        table.allocate = refuse_allocate;
        CHECK(!make_rest() && whole->lacks_pages);
        table.allocate = os_linux.allocate;
        CHECK(make_rest() && !whole->lacks_pages && pages_bytes(whole) == whole->capacity);
        memory_drop(memory, bare);
        memory_drop(memory, whole);
        CHECK(!memory->lacking && memory_take(memory, whole->capacity / 2, 0, bench.job) == NULL);
        CHECK(memory_take(memory, whole->capacity - whole->capacity / 16, 0, bench.job) == whole && memory->doomed == bare);
        memory_drop(memory, image);
        end();
}

TAP_MAIN(TEST(pages_of_an_image_are_joined_with_pauses), TEST(an_image_is_pinned_only_while_its_pages_are_small), TEST(an_image_in_use_is_not_joined),
         TEST(an_image_must_have_served_often_first), TEST(an_image_that_serves_no_more_is_left_alone),
         TEST(an_image_that_is_dropped_meanwhile_is_buried_afterwards),
         TEST(a_machine_that_joins_no_pages_is_asked_once_per_image), TEST(the_page_maker_joins_what_has_become_durable),
         TEST(an_image_that_lacks_pages_is_used_again_only_when_it_has_them))
