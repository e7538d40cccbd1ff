/* Whichever system call fails, a store's promises hold. */
/* fault: as fault/agent_fault_test.c */
#include <errno.h>

#include "os/os.h"
#include "os/os_fault.h"
#include "store/store.h"
#include "tap.h"
#include "test_dir.h"

#define BIG_BYTES ((2u << 20) + 333)

static char dir[256], root[300];
static struct store *store;
static struct nebula_error error;
static char *old_data, *new_data, *back;

static void begin(void)
{
        test_dir_make_quick(dir);
        snprintf(root, sizeof root, "%s/root", dir);
        old_data = aligned_alloc(4096, 4u << 20);
        new_data = aligned_alloc(4096, 4u << 20);
        back = aligned_alloc(4096, 4u << 20);
        memset(old_data, 'o', 4u << 20);
        memset(new_data, 'n', 4u << 20);
}

static void end(void)
{
        free(old_data);
        free(new_data);
        free(back);
        test_dir_remove(dir);
}

static enum nebula_status put_always(const char *key, const char *data, uint64_t size, struct nebula_error *told)
{
        return store->ops->put(store, key, data, size, STORE_ALWAYS, NULL, NULL, told);
}

/* A fresh store that holds t/x, old. */
static void fresh(uint64_t size)
{
        os_remove_tree(root);
        if (store_open(root, &store, &error) || put_always("t/x", old_data, size, &error))
                abort();
}

/* 'o' or 'n': the object is complete and of that kind; '-': absent; '!': anything else. */
static char look(const char *key, uint64_t size)
{
        struct store_entry entry;
        enum nebula_status status = store->ops->stat(store, key, &entry, &error);
        uint64_t found;

        if (status)
                return status == NEBULA_NOT_FOUND ? '-' : '!';
        found = entry.size;
        store_entry_done(&entry);
        if (found != size || store->ops->read(store, key, back, 0, size, &error))
                return '!';
        return !memcmp(back, old_data, size) ? 'o' : !memcmp(back, new_data, size) ? 'n' : '!';
}

static size_t temp_count(void)
{
        struct store_list list;
        size_t count = 0;

        if (store_list_all(store, "", true, &list, &error))
                return SIZE_MAX;
        for (size_t i = 0; i < list.count; i++)
                count += store_is_temporary(list.entries[i].key);
        store_list_done(&list);
        return count;
}

static bool takes_space(int number)
{
        return number == ENOSPC || number == EDQUOT;
}

/* Real errors must be reported. A transfer that is only cut short must not. */
static void check_status(enum nebula_status status, const struct nebula_error *told, const struct os_fault *fault)
{
        if (!status)
                return;
        CHECK(fault->error != EINTR && fault->error != OS_FAULT_SHORT);
        CHECK(told->status == status && told->sys_errno == fault->error);
        CHECK(strstr(told->message, root));
        CHECK(takes_space(fault->error) == (status == NEBULA_NO_SPACE));
}

static const int errors[] = { EIO, ENOSPC, EDQUOT, ENOMEM, EINTR, OS_FAULT_SHORT };

static const struct { uint64_t size; enum bulk_engine engine; } ways[] = {
        { 100, BULK_ENGINE_THREADS }, { BIG_BYTES, BULK_ENGINE_THREADS }, { BIG_BYTES, BULK_ENGINE_URING },
};

/* Runs `step` with each call failing in turn, once or from then on. */
static void sweep_ways(void (*step)(struct os_fault *fault, uint64_t size, bool *ret_was_hit), size_t way_count)
{

        begin();
        for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
                for (size_t j = 0; j < 2 * way_count; j++) {
                        struct os_fault fault = { .error = errors[i], .goes_on = j & 1 };
                        bool was_hit;

                        if (fault.goes_on && errors[i] == EINTR)
                                continue; /* retried forever, as it should be */
                        bulk_engine_force(ways[j / 2].engine); /* the real table may have no ring; those of the tests have */
                        do {
                                fault.at++;
                                fresh(ways[j / 2].size);
                                step(&fault, ways[j / 2].size, &was_hit);
                                store_close(store);
                        } while (was_hit && fault.at < 1000);
                        CHECK(fault.at < 1000);
                }
        end();
}

static void sweep(void (*step)(struct os_fault *fault, uint64_t size, bool *ret_was_hit))
{
        sweep_ways(step, 3);
}

/* For steps without large objects, or with put's way of writing. */
static void sweep_small(void (*step)(struct os_fault *fault, uint64_t size, bool *ret_was_hit))
{
        sweep_ways(step, 1);
}

static void replace_step(struct os_fault *fault, uint64_t size, bool *ret_was_hit)
{
        struct nebula_error told = { 0 };
        enum nebula_status status;
        char kind;

        os_fault_begin(fault);
        status = put_always("t/x", new_data, size, &told);
        *ret_was_hit = os_fault_end();
        check_status(status, &told, fault);
        kind = look("t/x", size);
        CHECK(status ? kind == 'o' || kind == 'n' : kind == 'n');
        if (kind == 'o' && status && strcmp(os_fault_where(), "unlink") && !fault->goes_on)
                CHECK(temp_count() == 0);
        if (status == NEBULA_NO_SPACE && !fault->goes_on)
                CHECK(strstr(told.message, "needs") && strstr(told.message, "are free"));
        CHECK(put_always("t/x", new_data, size, &told) == NEBULA_OK);
        CHECK(look("t/x", size) == 'n');
}

static void a_put_leaves_the_old_or_the_new_object(void)
{
        sweep(replace_step);
}

static void create_step(struct os_fault *fault, uint64_t size, bool *ret_was_hit)
{
        struct nebula_error told = { 0 };
        enum nebula_status status;
        char kind;

        os_fault_begin(fault);
        status = store->ops->put(store, "other/deep/x", new_data, size, STORE_IF_ABSENT, NULL, NULL, &told);
        *ret_was_hit = os_fault_end();
        check_status(status, &told, fault);
        kind = look("other/deep/x", size);
        CHECK(status ? kind == '-' || kind == 'n' : kind == 'n');
        CHECK(look("t/x", size) == 'o');
        status = store->ops->put(store, "other/deep/x", old_data, size, STORE_IF_ABSENT, NULL, NULL, &told);
        CHECK(kind == 'n' ? status == NEBULA_BUSY : !status);
        CHECK(look("other/deep/x", size) == (kind == 'n' ? 'n' : 'o'));
}

static void a_creation_is_whole_or_absent(void)
{
        sweep(create_step);
}

/* Two new objects, and one whose key is taken. */
static void publish_step(struct os_fault *fault, uint64_t size, bool *ret_was_hit)
{
        struct store_object objects[] = { { "t/a", new_data, size, NULL }, { "u/b", new_data, size, NULL }, { "t/x", new_data, size, NULL } };
        struct store_upload *upload = NULL;
        struct nebula_error told = { 0 };
        enum nebula_status status;
        bool is_uploaded;

        os_fault_begin(fault);
        status = store->ops->upload(store, objects, fault->at % 2 ? 2 : 3, &upload, &told);
        is_uploaded = !status;
        if (is_uploaded)
                status = store->ops->publish(store, upload, &told);
        *ret_was_hit = os_fault_end();
        if (status == NEBULA_BUSY)
                CHECK(!(fault->at % 2) && is_uploaded);
        else
                check_status(status, &told, fault);
        CHECK(look("t/a", size) == 'n' || (look("t/a", size) == '-' && status));
        CHECK(look("u/b", size) == 'n' || (look("u/b", size) == '-' && status));
        CHECK(look("t/x", size) == 'o' && (status || fault->at % 2));
        if (!is_uploaded && strcmp(os_fault_where(), "unlink") && !fault->goes_on)
                CHECK(temp_count() == 0 && look("t/a", size) == '-' && look("u/b", size) == '-');
}

static void a_published_object_is_whole_or_absent_and_replaces_nothing(void)
{
        sweep_small(publish_step);
}

static void read_step(struct os_fault *fault, uint64_t size, bool *ret_was_hit)
{
        struct nebula_error told = { 0 };
        enum nebula_status status;
        struct store_stamp stamp;
        size_t found;
        char *text;

        memset(back, 'x', size);
        os_fault_begin(fault);
        status = store->ops->read_bulk(store, "t/x", back, size, 64u << 10, NULL, NULL, &told);
        if (!status) {
                CHECK(!memcmp(back, old_data, size));
                status = store->ops->read(store, "t/x", back, 0, size, &told);
        }
        if (!status) {
                status = store->ops->get(store, "t/x", size, &text, &found, &stamp, &told);
                CHECK(status || (found == size && !memcmp(text, old_data, size)));
                free(status ? NULL : text);
        }
        *ret_was_hit = os_fault_end();
        check_status(status, &told, fault);
        CHECK(status || !memcmp(back, old_data, size));
        CHECK(look("t/x", size) == 'o');
}

static void a_read_is_exact_or_an_error(void)
{
        sweep(read_step);
}

/* First without a stamp, then with the stamp of the object. */
static void remove_step(struct os_fault *fault, uint64_t size, bool *ret_was_hit)
{
        struct store_victim victims[] = { { .key = "t/x" }, { .key = "t/none" } };
        struct nebula_error told = { 0 };
        struct store_entry entry;
        enum nebula_status status;
        char kind;

        if (fault->at % 2 && !store->ops->stat(store, "t/x", &entry, &told)) {
                victims[0].stamp = entry.stamp;
                store_entry_done(&entry);
        }
        os_fault_begin(fault);
        status = store->ops->remove(store, victims, 2, &told);
        *ret_was_hit = os_fault_end();
        check_status(status, &told, fault);
        kind = look("t/x", size);
        CHECK(status ? kind == 'o' || kind == '-' : kind == '-');
        CHECK(store->ops->remove(store, victims, 2, &told) == NEBULA_OK && look("t/x", size) == '-');
}

static void a_removal_is_done_or_an_error(void)
{
        sweep_small(remove_step);
}

/* The stamp is that of an earlier object. */
static void keep_step(struct os_fault *fault, uint64_t size, bool *ret_was_hit)
{
        struct store_victim victim = { "t/x", { "another" } };
        struct nebula_error told = { 0 };
        enum nebula_status status;

        os_fault_begin(fault);
        status = store->ops->remove(store, &victim, 1, &told);
        *ret_was_hit = os_fault_end();
        check_status(status, &told, fault);
        CHECK(look("t/x", size) == 'o');
}

static void a_removal_leaves_what_it_does_not_mean(void)
{
        sweep_small(keep_step);
}

static void copy_step(struct os_fault *fault, uint64_t size, bool *ret_was_hit)
{
        struct nebula_error told = { 0 };
        enum nebula_status status;
        char kind;

        os_fault_begin(fault);
        status = store->ops->copy(store, "t/x", "v/y", fault->at % 2 ? STORE_ALWAYS : STORE_IF_ABSENT, &told);
        *ret_was_hit = os_fault_end();
        check_status(status, &told, fault);
        kind = look("v/y", size);
        CHECK(status ? kind == 'o' || kind == '-' : kind == 'o');
        CHECK(look("t/x", size) == 'o');
        CHECK(store->ops->copy(store, "t/x", "v/y", STORE_ALWAYS, &told) == NEBULA_OK && look("v/y", size) == 'o');
}

static void a_copy_is_whole_or_absent(void)
{
        sweep_small(copy_step);
}

static void list_step(struct os_fault *fault, uint64_t size, bool *ret_was_hit)
{
        struct nebula_error told = { 0 };
        struct store_list list;
        enum nebula_status status;

        if (put_always("t/d/y", old_data, size, &told))
                abort();
        os_fault_begin(fault);
        status = store_list_all(store, "", true, &list, &told);
        *ret_was_hit = os_fault_end();
        check_status(status, &told, fault);
        if (status)
                return;
        CHECK(list.count == 2); /* none is left out in silence */
        store_list_done(&list);
}

static void a_listing_is_whole_or_an_error(void)
{
        sweep_small(list_step);
}

static void clock_step(struct os_fault *fault, uint64_t size, bool *ret_was_hit)
{
        struct nebula_error told = { 0 };
        enum nebula_status status;
        int64_t now;

        (void)size;
        os_fault_begin(fault);
        status = store->ops->clock(store, &now, &told);
        *ret_was_hit = os_fault_end();
        check_status(status, &told, fault);
        if (status && strcmp(os_fault_where(), "unlink") && !fault->goes_on)
                CHECK(temp_count() == 0);
        CHECK(status || now > os->wall_ns() - INT64_C(60000000000));
}

static void the_time_is_told_or_an_error(void)
{
        sweep_small(clock_step);
}

static void a_failed_fsync_is_not_tried_again(void)
{
        struct os_fault fault = { .calls = "fsync", .at = 1, .error = EIO };

        begin();
        fresh(100);
        os_fault_begin(&fault);
        CHECK(put_always("t/x", new_data, 100, &error) == NEBULA_STORAGE);
        CHECK(error.sys_errno == EIO);
        CHECK(os_fault_count() == 1);
        os_fault_end();
        CHECK(look("t/x", 100) == 'o');
        store_close(store);
        end();
}

/* A file system without O_DIRECT reports that at open, or only at the first transfer. */
static void without_direct_io_it_works_the_same(void)
{
        static const char *const calls[] = { "open", "pwrite", "pread", "allocate" };

        begin();
        for (size_t j = 0; j < 8; j++) {
                size_t i = j / 2;
                struct os_fault fault = { .calls = calls[i], .at = 1, .error = i == 3 ? EOPNOTSUPP : EINVAL };

                bulk_engine_force(j % 2 ? BULK_ENGINE_URING : BULK_ENGINE_THREADS);
                fresh(BIG_BYTES);
                if (i == 0) /* the directories are known then, and the first open is the object's */
                        CHECK(put_always("t/y", new_data, BIG_BYTES, &error) == NEBULA_OK);
                os_fault_begin(&fault);
                CHECK(put_always("t/x", new_data, BIG_BYTES, &error) == NEBULA_OK);
                CHECK(store->ops->read_bulk(store, "t/x", back, BIG_BYTES, 64u << 10, NULL, NULL, &error) == NEBULA_OK);
                CHECK(os_fault_end());
                CHECK(look("t/x", BIG_BYTES) == 'n');
                CHECK(temp_count() == 0);
                store_close(store);
        }
        end();
}

TAP_MAIN(TEST(a_put_leaves_the_old_or_the_new_object), TEST(a_creation_is_whole_or_absent),
         TEST(a_published_object_is_whole_or_absent_and_replaces_nothing),
         TEST(a_read_is_exact_or_an_error), TEST(a_removal_is_done_or_an_error),
         TEST(a_removal_leaves_what_it_does_not_mean), TEST(a_copy_is_whole_or_absent), TEST(a_listing_is_whole_or_an_error),
         TEST(the_time_is_told_or_an_error), TEST(a_failed_fsync_is_not_tried_again), TEST(without_direct_io_it_works_the_same))
