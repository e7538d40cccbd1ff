/*
 * Removes the debris of interrupted writings: objects that only Nebula can have made, and that no entry of a log names. All entries back
 * to the last removal count: the writer of the newest may still find its version incomplete, and take that entry back.
 *
 * A writer may pause for long between its files and its manifest. So a sweep lists the tag, makes <tag>/.nebula/sweep-<hex>.json, and then
 * checks that the log has not changed. A writer makes its entry, and then looks for such an object (manifest_check_all). The second of the
 * two sees the first.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/index.h"
#include "store/manifest_check.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"
#include "store/manifest_publish.h"
#include "store/scan.h"
#include "store/sweep.h"
#include "store/tag_log.h"

#define FINISH_NS (900 * SECOND_NS)
#define UPLOAD_REST_NS (7 * 86400 * SECOND_NS) /* of one that another program may have begun */

struct sweeping {
        struct store *store;
        char tag[256], directory[256];
        int64_t before_ns; /* by the store's clock; if an object is younger, nothing of the tag is removed */
        struct store_list objects;
        uint64_t number;        /* of the newest entry */
        struct manifest *named; /* the newest version of the log, and the older ones that may become the newest again */
        size_t named_count;
        struct victims victims;
        bool is_removed; /* the newest entry is a removal, which may have been interrupted */
        bool is_young, is_foreign;
};

static bool is_named(const struct sweeping *sweeping, const struct manifest_entry *entry, const char *key)
{
        if (entry->kind == ENTRY_MANIFEST)
                return !sweeping->is_removed; /* the writer of the newest entry removes the older ones, once its version is durable */
        for (size_t i = 0; i < sweeping->named_count; i++)
                if (manifest_names(&sweeping->named[i], entry, key))
                        return true;
        return false;
}

static enum nebula_status look_at(struct sweeping *sweeping, const struct store_entry *object, struct nebula_error *error)
{
        const char *name = manifest_behind_private(object->key, sweeping->directory);
        struct manifest_entry entry;
        enum nebula_status status = NEBULA_OK;

        if (!name || object->is_prefix)
                return NEBULA_OK;
        entry = manifest_entry(name);
        if (entry.kind == ENTRY_FOREIGN || is_named(sweeping, &entry, object->key))
                return NEBULA_OK;
        sweeping->is_young = sweeping->is_young || object->time_ns > sweeping->before_ns;
        sweeping->is_foreign = sweeping->is_foreign || object->is_foreign;
        if (entry.kind == ENTRY_RECORD || entry.kind == ENTRY_CLAIM)
                status = victims_add_recorded(&sweeping->victims, sweeping->store, sweeping->tag, object->key, sweeping->named,
                                              sweeping->named_count, &sweeping->objects, error);
        return status ? status : victims_add(&sweeping->victims, object, error);
}

static enum nebula_status remove_debris(struct sweeping *sweeping, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX], path[64];
        struct store *store = sweeping->store;
        uint64_t now, nonce = 0;
        enum nebula_status status;

        os->random(&nonce, sizeof nonce);
        snprintf(path, sizeof path, MANIFEST_DIRECTORY "/sweep-%016" PRIx64 ".json", nonce);
        status = manifest_key(key, sweeping->directory, path, error);
        if (!status)
                status = store_put_text(store, key, "{}\n", STORE_ALWAYS, error);
        if (status)
                return status;
        status = tag_log_number(store, sweeping->tag, &now, error);
        if (!status && now == sweeping->number)
                status = victims_remove(&sweeping->victims, store, error);
        store_remove_one(store, key, NULL);
        return status;
}

static enum nebula_status sweep_objects(struct sweeping *sweeping, size_t *removed, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < sweeping->objects.count && !status; i++)
                status = look_at(sweeping, &sweeping->objects.entries[i], error);
        if (status || !sweeping->victims.count || sweeping->is_young || sweeping->is_foreign)
                return status;
        status = sweeping->is_removed ? manifest_remove_tag(sweeping->store, sweeping->tag, NULL, error) : remove_debris(sweeping, error);
        *removed += !status;
        return status == NEBULA_BUSY ? NEBULA_OK : status;
}

static bool is_older(const struct sweeping *sweeping, int64_t before_ns)
{
        for (size_t i = 0; i < sweeping->objects.count; i++) {
                const struct store_entry *object = &sweeping->objects.entries[i];
                const char *name = manifest_behind_private(object->key, sweeping->directory);
                struct manifest_entry entry;

                if (!name)
                        continue;
                entry = manifest_entry(name);
                if (entry.kind == ENTRY_MANIFEST && entry.number == sweeping->number)
                        return object->time_ns <= before_ns && !object->is_foreign;
        }
        return false;
}

/* If the writer of the newest entry ended after its commit, views may show the version before, and the objects of that one are there. Until a
 * while after its entry, the writer may take it back (CHECK_LATE_NS), whatever the age of debris. */
static enum nebula_status finish_newest(struct sweeping *sweeping, size_t *removed, struct nebula_error *error)
{
        const struct manifest *newest = NULL, *before = NULL;
        enum nebula_status status;
        int64_t now_ns;
        bool was_left;

        for (size_t i = 0; i < sweeping->named_count; i++) {
                const struct manifest *named = &sweeping->named[i];

                if (named->number == sweeping->number)
                        newest = named;
                else if (!before || named->number > before->number)
                        before = named;
        }
        if (!newest || !before || !is_older(sweeping, sweeping->before_ns))
                return NEBULA_OK;
        status = sweeping->store->ops->clock(sweeping->store, &now_ns, error);
        if (status)
                return status;
        if (!is_older(sweeping, now_ns - FINISH_NS) || manifest_check_present(sweeping->store, newest, NULL))
                return NEBULA_OK;
        status = manifest_publish_rest(sweeping->store, newest, before, &was_left, error);
        *removed += was_left && !status;
        return status == NEBULA_BUSY ? NEBULA_OK : status;
}

/* Adds the version of an entry to `named`, which takes it over. */
static void add_named(struct sweeping *sweeping, struct tag_log *log, uint64_t *removed_until)
{
        if (log->is_removal && log->number > *removed_until)
                *removed_until = log->number;
        if (log->number && !log->is_removal && !log->is_unsound)
                sweeping->named[sweeping->named_count++] = log->manifest;
}

/* Loads the older entries. If an entry is gone by now, its writer took it back or a later version became durable. */
static enum nebula_status load_older(struct sweeping *sweeping, const struct store_list *entries, uint64_t *removed_until, bool *ret_is_sound,
                                     struct nebula_error *error)
{
        struct tag_log log;
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < entries->count && *ret_is_sound && !status; i++) {
                struct manifest_entry entry = manifest_entry(manifest_behind_private(entries->entries[i].key, sweeping->directory));

                if (entry.kind != ENTRY_MANIFEST || entry.number >= sweeping->number)
                        continue;
                status = tag_log_entry(sweeping->store, sweeping->tag, entry.number, &log, error);
                if (status == NEBULA_NOT_FOUND) {
                        status = NEBULA_OK;
                } else if (!status) {
                        *ret_is_sound = !log.is_unsound;
                        add_named(sweeping, &log, removed_until);
                }
        }
        return status;
}

/* Drops the versions before a removal: they are removed, or will be. */
static void drop_removed(struct sweeping *sweeping, uint64_t removed_until)
{
        size_t kept = 0;

        for (size_t i = 0; i < sweeping->named_count; i++) {
                if (sweeping->named[i].number > removed_until)
                        sweeping->named[kept++] = sweeping->named[i];
                else
                        manifest_done(&sweeping->named[i]);
        }
        sweeping->named_count = kept;
}

/* Loads the newest entry first and lists the others afterwards: an entry is made only after those before it. */
static enum nebula_status load_log(struct sweeping *sweeping, bool *ret_is_sound, struct nebula_error *error)
{
        struct tag_log log = { 0 };
        struct nebula_error failure;
        struct store_list entries;
        char prefix[MANIFEST_KEY_MAX];
        uint64_t removed_until = 0;
        enum nebula_status status;

        *ret_is_sound = !tag_log_head(sweeping->store, sweeping->tag, &log, &failure) && !log.is_unsound;
        if (!*ret_is_sound)
                return NEBULA_OK;
        sweeping->number = log.number;
        sweeping->is_removed = log.is_removal;
        snprintf(prefix, sizeof prefix, "%s/" MANIFEST_DIRECTORY "/manifest-", sweeping->directory);
        status = store_list_all(sweeping->store, prefix, false, &entries, error);
        if (status) {
                tag_log_done(&log);
                return status;
        }
        sweeping->named = calloc(entries.count + 1, sizeof *sweeping->named);
        if (sweeping->named) {
                add_named(sweeping, &log, &removed_until);
                status = load_older(sweeping, &entries, &removed_until, ret_is_sound, error);
                drop_removed(sweeping, removed_until);
        } else {
                tag_log_done(&log);
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to sweep \"%s\"", sweeping->tag);
        }
        store_list_done(&entries);
        return status;
}

/* Recognizes the two common cases in one listing: no objects of Nebula's; or one entry, one record that is not younger, files apart
 * of that record's writing, and signatures of one version. If the record is younger, the entry may be a removal. */
static bool looks_clean(const struct store_list *list, const char *directory)
{
        struct manifest_entry first = { 0 };
        size_t manifest_count = 0, record_count = 0;
        uint64_t signed_sequence = 0;
        int64_t manifest_ns = 0, record_ns = 0;

        for (size_t i = 0; i < list->count; i++) {
                const struct store_entry *object = &list->entries[i];
                struct manifest_entry entry = manifest_entry(manifest_behind_private(object->key, directory));

                if (entry.kind == ENTRY_FOREIGN)
                        continue;
                if (entry.kind == ENTRY_SIGNATURE && (!signed_sequence || signed_sequence == entry.number)) {
                        signed_sequence = entry.number;
                        continue;
                }
                if (entry.kind != ENTRY_MANIFEST && entry.kind != ENTRY_RECORD && entry.kind != ENTRY_APART)
                        return false;
                manifest_count += entry.kind == ENTRY_MANIFEST;
                record_count += entry.kind == ENTRY_RECORD;
                if (entry.kind == ENTRY_MANIFEST)
                        manifest_ns = object->time_ns;
                if (entry.kind == ENTRY_RECORD)
                        record_ns = object->time_ns;
                if (*entry.writing && !*first.writing)
                        first = entry;
                if (*entry.writing && strcmp(first.writing, entry.writing))
                        return false;
        }
        return !list->count || (manifest_count == 1 && record_count == 1 && record_ns <= manifest_ns);
}

/* *ret_entered_ns: when the newest own entry of the log was made; 0: there is none. */
static bool has_debris(struct lister *lister, const char *directory, int64_t *ret_entered_ns)
{
        char prefix[MANIFEST_KEY_MAX];
        struct store_list list;
        bool result;

        snprintf(prefix, sizeof prefix, "%s/" MANIFEST_DIRECTORY "/", directory);
        if (lister_list(lister, prefix, &list, NULL))
                return false;
        result = !looks_clean(&list, directory);
        for (size_t i = 0; i < list.count; i++)
                if (manifest_entry(manifest_behind_private(list.entries[i].key, directory)).kind == ENTRY_MANIFEST && !list.entries[i].is_foreign &&
                    list.entries[i].time_ns > *ret_entered_ns)
                        *ret_entered_ns = list.entries[i].time_ns;
        store_list_done(&list);
        return result;
}

/* Skips a tag whose log cannot be read, because a person may still want its files, and directories of other programs. */
static enum nebula_status sweep_tag(struct lister *lister, const char *tag, int64_t before_ns, size_t *removed, int64_t *ret_entered_ns,
                                    struct nebula_error *error)
{
        struct store *store = lister->store;
        struct sweeping sweeping = { .store = store, .before_ns = before_ns };
        char prefix[MANIFEST_KEY_MAX];
        bool is_sound = false;
        enum nebula_status status = name_encode(tag, sweeping.directory, error);

        *ret_entered_ns = 0;
        if (status || !has_debris(lister, sweeping.directory, ret_entered_ns))
                return status;
        snprintf(sweeping.tag, sizeof sweeping.tag, "%s", tag);
        snprintf(prefix, sizeof prefix, "%s/", sweeping.directory);
        status = store_list_all(store, prefix, true, &sweeping.objects, error);
        if (!status) /* the objects must be listed before the log is read */
                status = load_log(&sweeping, &is_sound, error);
        if (!status && is_sound)
                status = sweep_objects(&sweeping, removed, error);
        if (!status && is_sound)
                status = finish_newest(&sweeping, removed, error);
        for (size_t i = 0; i < sweeping.named_count; i++)
                manifest_done(&sweeping.named[i]);
        free(sweeping.named);
        victims_done(&sweeping.victims);
        store_list_done(&sweeping.objects);
        return status;
}

/* An upload whose last touch was before these times counts as abandoned. */
struct upload_limits {
        int64_t before_ns, rested_ns;
        bool numbers; /* those of removals are swept as well */
        bool (*goes_on)(void *argument, const char *key); /* NULL: of no key */
        void *argument;
};

/* A key in place can be of another program's upload, which may rest for long. */
static int64_t upload_limit(void *argument, const char *key)
{
        const struct upload_limits *limits = argument;
        const char *slash = strchr(key, '/'), *private = slash && !strncmp(slash + 1, MANIFEST_DIRECTORY "/", strlen(MANIFEST_DIRECTORY) + 1)
                                                                 ? slash + strlen(MANIFEST_DIRECTORY) + 2 : NULL;

        if (limits->goes_on && limits->goes_on(limits->argument, key))
                return INT64_MIN;
        if (store_is_temporary(key) || (private && manifest_entry(private).kind == ENTRY_APART))
                return limits->before_ns;
        return slash && !strchr(slash + 1, '/') && *key != '.' ? limits->rested_ns : INT64_MIN;
}

static enum nebula_status sweep_uploads(struct store *store, struct upload_limits limits, int64_t age_ns, size_t *removed, struct nebula_error *error)
{
        size_t ended = 0;
        enum nebula_status status;

        if (!store->ops->sweep)
                return NEBULA_OK;
        if (age_ns < UPLOAD_REST_NS)
                limits.rested_ns += age_ns - UPLOAD_REST_NS;
        status = store->ops->sweep(store, upload_limit, &limits, &ended, error);
        *removed += ended;
        return status;
}

static enum nebula_status before(struct store *store, int64_t age_ns, int64_t *ret_before_ns, struct nebula_error *error)
{
        enum nebula_status status = store->ops->clock(store, ret_before_ns, error);

        *ret_before_ns -= status ? 0 : age_ns;
        return status;
}

enum nebula_status manifest_sweep_tag(struct store *store, const char *tag, int64_t age_ns, size_t *ret_removed,
                                      struct nebula_error *error)
{
        struct lister lister = { .store = store, .is_sparse = true };
        size_t removed = 0;
        int64_t before_ns, entered_ns;
        enum nebula_status status = before(store, age_ns, &before_ns, error);

        if (!status)
                status = sweep_tag(&lister, tag, before_ns, &removed, &entered_ns, error);
        if (!status)
                *ret_removed = removed;
        return status;
}

/* Removes the entries of the index and temporary objects first: index_mend makes one of the former again. */
static enum nebula_status sweep_list(struct store *store, const struct store_list *list, const struct upload_limits *limits, bool mends, size_t *removed,
                                     struct nebula_error *error)
{
        struct lister lister = { .store = store };
        enum nebula_status status = NEBULA_OK;
        int64_t entered_ns;
        char tag[256];

        for (size_t i = 0; i < list->count && !status; i++) {
                const struct store_entry *entry = &list->entries[i];
                bool is_temporary = store_is_temporary(entry->key), is_row = !strncmp(entry->key, INDEX_PREFIX, sizeof INDEX_PREFIX - 1);

                if (entry->is_prefix || entry->is_foreign || !(is_temporary || is_row) || entry->time_ns > limits->before_ns ||
                    (limits->goes_on && limits->goes_on(limits->argument, entry->key)))
                        continue;
                status = store_remove_one(store, entry->key, error);
                *removed += is_temporary;
        }
        for (size_t i = 0; i < list->count && !status; i++) {
                if (!manifest_tag_of(&list->entries[i], tag))
                        continue;
                status = sweep_tag(&lister, tag, limits->before_ns, removed, &entered_ns, error);
                if (mends && !status && entered_ns && entered_ns <= limits->before_ns)
                        index_mend(store, tag); /* an agent died before the last step of its write */
        }
        lister_done(&lister);
        return status;
}

/* `rest` NULL: all tags. */
static enum nebula_status sweep(struct store *store, const struct store_list *rest, int64_t age_ns, struct upload_limits limits, size_t *ret_removed,
                                struct nebula_error *error)
{
        struct manifest_scan scan = { 0 };
        struct store_list all = { 0 };
        size_t removed = 0;
        enum nebula_status status = before(store, age_ns, &limits.before_ns, error);

        limits.rested_ns = limits.before_ns;
        if (!status && !rest)
                status = manifest_scan_index(store, &scan, error);
        if (!status)
                status = sweep_list(store, rest ? rest : &scan.rest, &limits, true, &removed, error);
        if (!status && !rest)
                status = store_list_all(store, "", false, &all, error);
        if (!status)
                status = sweep_list(store, &all, &limits, false, &removed, error);
        if (!status)
                status = sweep_uploads(store, limits, age_ns, &removed, error);
        if (!status && limits.numbers)
                status = tag_log_sweep_before(store, limits.before_ns - (age_ns < TAG_LOG_REST_NS ? TAG_LOG_REST_NS - age_ns : 0), error);
        store_list_done(&all);
        manifest_scan_done(&scan);
        if (!status)
                *ret_removed = removed;
        return status;
}

enum nebula_status manifest_sweep(struct store *store, int64_t age_ns, size_t *ret_removed, struct nebula_error *error)
{
        return sweep(store, NULL, age_ns, (struct upload_limits){ .numbers = true }, ret_removed, error);
}

enum nebula_status manifest_sweep_rest(struct store *store, const struct store_list *rest, int64_t age_ns, bool numbers,
                                       bool (*goes_on)(void *argument, const char *key), void *argument, size_t *ret_removed, struct nebula_error *error)
{
        return sweep(store, rest, age_ns, (struct upload_limits){ .numbers = numbers, .goes_on = goes_on, .argument = argument }, ret_removed, error);
}
