/* The rules remove no version that is in use, that another user owns, or whose metrics cannot be read. */
#include <errno.h>

#include "agent/agent_catalogue.h"
#include "agent/agent_storage.h"
#include "agent/persist/retain.h"
#include "base/error.h"
#include "store/metrics.h"
#include "tap.h"

static char path[256];
static struct bench bench;
static struct store *store; /* the agent's */

static void begin(void)
{
        storage_make(path);
        bench_init(&bench, NULL, path);
}

static void end(void)
{
        bench_done(&bench, true);
        storage_remove(path);
}

/* Makes a version durable that has this score. */
static bool save_scored(const char *tag, double score)
{
        struct ipc_image request = { .format = IPC_FORMAT_RAW, .name = METRICS_FILE };
        struct ipc_captured done = { 0 };
        struct version *version;
        struct image_loan *loan;
        char text[64];
        void *data;

        request.size = (uint64_t)snprintf(text, sizeof text, "{\"metrics\": {\"score\": %g}}", score);
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, tag, 1, &bench.error);
        request.version_id = version ? version->id : 0;
        if (!version || image_loan_open(&bench.catalogue, &bench.session, &request, never, NULL, &version, &loan, &bench.error) ||
            image_map(loan->image, &data, &bench.error))
                abort();
        memcpy(data, text, request.size);
        if (commit_captured(&bench.catalogue, version, loan, &done, &bench.error))
                abort();
        catalogue_unlock(&bench.catalogue);
        return !bench_persist(&bench, version) && !storage_open(&bench.catalogue, bench.job, &store, &bench.error);
}

static bool has(const char *tag)
{
        return known_find(&bench.job->known, tag) && storage_count(path, tag, "/.nebula/manifest-", NULL) == 1;
}

/* Versions x, y and z. x is the best one, and z the newest. */
static void begin_scored(void)
{
        begin();
        bench_keep(bench.job, 1);
        bench.job->settings.rules[0] = (struct keep_rule){ .last = 1, .best = 1, .best_is_largest = true, .metric = "score" };
        if (!save_scored("x", 9) || !save_scored("y", 5) || !save_scored("z", 7))
                abort();
}

static const struct store_ops *sound;
static struct store_ops faulty;

static enum nebula_status list_but_x(struct store *self, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                                     struct nebula_error *error)
{
        if (prefix[0] == 'x')
                return error_set(error, NEBULA_STORAGE, EIO, "\"%s\" cannot be listed", prefix);
        return sound->list(self, prefix, deep, from, ret_page, error);
}

static enum nebula_status get_but_x(struct store *self, const char *key, size_t limit, char **ret_text, size_t *ret_size, struct store_stamp *ret_stamp,
                                    struct nebula_error *error)
{
        if (key[0] == 'x')
                return error_set(error, NEBULA_STORAGE, EIO, "\"%s\" cannot be read", key);
        return sound->get(self, key, limit, ret_text, ret_size, ret_stamp, error);
}

/* It may be the best one. */
static void no_version_is_removed_while_the_metrics_of_one_cannot_be_read(void)
{
        begin_scored();
        sound = store->ops;
        faulty = *sound;
        faulty.list = list_but_x;
        faulty.get = get_but_x;
        store->ops = &faulty;
        CHECK(bench_retain(&bench) == NEBULA_STORAGE);
        store->ops = sound;
        CHECK(bench.job->known.count == 3 && has("x") && has("y") && has("z"));
        CHECK(!bench_retain(&bench));
        CHECK(bench.job->known.count == 2 && has("x") && !has("y") && has("z"));
        end();
}

static void without_a_value_of_the_metric_all_versions_stay_and_the_log_says_so(void)
{
        begin_scored();
        strcpy(bench.job->settings.rules[0].metric, "loss");
        CHECK(!bench_retain(&bench) && bench.job->known.count == 3 && bench.job->storage->metric_reported);
        bench.job->storage->metric_reported = false;
        strcpy(bench.job->settings.rules[0].metric, "score");
        CHECK(!bench_retain(&bench) && bench.job->known.count == 2 && !bench.job->storage->metric_reported);
        end();
}

/* Another program has removed its manifest, or storage has damaged it. */
static void a_version_without_a_manifest_stops_no_rule(void)
{
        for (unsigned is_damaged = 0; is_damaged < 2; is_damaged++) {
                char key[512];

                begin_scored();
                REQUIRE(storage_count(path, "x", "/.nebula/manifest-", key) == 1);
                if (is_damaged)
                        storage_damage(path, key, 40);
                else
                        storage_take_away(path, key);
                CHECK(!bench_retain(&bench) && !has("y") && has("z"));
                end();
        }
}

static enum nebula_status stat_as_anothers(struct store *self, const char *key, struct store_entry *ret_entry, struct nebula_error *error)
{
        enum nebula_status status = sound->stat(self, key, ret_entry, error);

        if (!status)
                ret_entry->is_foreign = key[0] == 'x';
        return status;
}

static enum nebula_status list_as_anothers(struct store *self, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                                           struct nebula_error *error)
{
        enum nebula_status status = sound->list(self, prefix, deep, from, ret_page, error);

        for (size_t i = 0; !status && i < ret_page->count; i++)
                ret_page->entries[i].is_foreign = ret_page->entries[i].key[0] == 'x';
        return status;
}

/* Both users write to one directory under one name of a job. */
static void a_version_of_another_user_stays_and_none_says_that_it_was_removed(void)
{
        size_t objects;

        begin_scored();
        bench_keep(bench.job, 1);
        objects = storage_count(path, "x", "", NULL);
        sound = store->ops;
        faulty = *sound;
        faulty.stat = stat_as_anothers;
        faulty.list = list_as_anothers;
        store->ops = &faulty;
        CHECK(!bench_retain(&bench));
        store->ops = sound;
        CHECK(bench.job->known.count == 1 && storage_count(path, "x", "", NULL) == objects && !storage_count(path, "y/", "", NULL));
        CHECK(!storage_count(path, ".nebula/removed/x", "", NULL));
        CHECK(bench.job->storage->removed_count == 1 && !strcmp(retain_removed(bench.job, 0)->tag, "y"));
        end();
}

/* Each version has files a and b, and only the newest keeps b. */
static void a_version_that_is_in_use_loses_no_files(void)
{
        struct version *versions[2];

        begin();
        bench_keep(bench.job, 0);
        strcpy(bench.job->settings.items, "b=1");
        for (unsigned i = 0; i < 2; i++) {
                versions[i] = bench_version(&bench, i ? "y" : "x", 2 * i + 1, 2 * i + 2);
                REQUIRE(versions[i] && !bench_persist(&bench, versions[i]));
        }
        versions[0]->leases++;
        CHECK(!bench_retain(&bench) && storage_has(path, "x/b"));
        versions[0]->leases--;
        CHECK(!bench_retain(&bench) && !storage_has(path, "x/b") && storage_has(path, "x/a") && storage_has(path, "y/b"));
        end();
}

TAP_MAIN(TEST(no_version_is_removed_while_the_metrics_of_one_cannot_be_read), TEST(without_a_value_of_the_metric_all_versions_stay_and_the_log_says_so), TEST(a_version_without_a_manifest_stops_no_rule),
         TEST(a_version_of_another_user_stays_and_none_says_that_it_was_removed), TEST(a_version_that_is_in_use_loses_no_files))
