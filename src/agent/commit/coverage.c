#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/coverage.h"
#include "base/error.h"
#include "os/os.h"
#include "store/document.h"
#include "store/manifest.h"
#include "store/manifest_keys.h"

#define CLOCK_SLACK_NS (10 * (uint64_t)SECOND_NS) /* the largest accepted difference between the clocks of two nodes */

struct coverage_document {
        char name[ANNOUNCE_PATH_MAX];
};

struct coverage *coverage_new(uint32_t world)
{
        struct coverage *coverage = calloc(1, sizeof *coverage);

        if (!coverage)
                return NULL;
        coverage->world = world;
        coverage->ranks = calloc(world, sizeof *coverage->ranks);
        if (coverage->ranks)
                return coverage;
        free(coverage);
        return NULL;
}

void coverage_free(struct coverage *coverage)
{
        if (!coverage)
                return;
        free(coverage->ranks);
        free(coverage->read);
        free(coverage);
}

static void forget(struct coverage *coverage)
{
        struct coverage empty = { .ranks = coverage->ranks, .world = coverage->world };

        memset(coverage->ranks, 0, coverage->world * sizeof *coverage->ranks);
        free(coverage->read);
        *coverage = empty;
}

/* Refuses another job on this path, and a second run of the same job at the same time. The error names both. */
static enum nebula_status check_other(const struct captured *own, const struct captured *other, struct nebula_error *error)
{
        if (strcmp(own->of.job, other->of.job))
                return error_set(error, NEBULA_INVALID, 0,
                                 "\"%.150s\" in this storage path is being written by job \"%.80s\" (host %.60s) and by job \"%.80s\" "
                                 "(host %.60s): give each job its own path", own->of.tag, other->of.job, other->host, own->of.job,
                                 own->host);
        if (strcmp(own->of.run, other->of.run) && other->sequence > own->sequence + CLOCK_SLACK_NS)
                return error_set(error, NEBULA_INVALID, 0,
                                 "\"%.120s\" is being written by two runs of job \"%.60s\" at once, \"%.60s\" (process %u on %.50s) and "
                                 "\"%.60s\" (process %u on %.50s): end one, or give it a `job` name of its own", own->of.tag, own->of.job,
                                 other->of.run, other->pid, other->host, own->of.run, own->pid, own->host);
        return NEBULA_OK;
}

/* A later document of a node has the ranks of its earlier ones, too. */
static void cover(struct coverage *coverage, const struct captured *captured)
{
        bool is_known_node = false;

        for (size_t i = 0; i < captured->rank_count; i++) {
                uint64_t *seen = &coverage->ranks[captured->ranks[i].rank], now = 1 + (uint64_t)captured->ranks[i].files;

                is_known_node = is_known_node || *seen;
                coverage->count += !*seen;
                if (now <= *seen)
                        continue;
                coverage->files += now - (*seen ? *seen : 1);
                *seen = now;
        }
        coverage->nodes += !is_known_node;
        if (captured->goes_back && (!coverage->goes_back || captured->after < coverage->after))
                coverage->after = captured->after;
        coverage->goes_back = coverage->goes_back || captured->goes_back;
        coverage->sequence = captured->sequence > coverage->sequence ? captured->sequence : coverage->sequence;
}

static int by_name(const void *a, const void *b)
{
        const struct coverage_document *x = a, *y = b;

        return strcmp(x->name, y->name);
}

static const char *name_of(const struct store_entry *entry)
{
        return strrchr(entry->key, '/') + 1;
}

/* Whether it is among the first `count` documents, those that earlier looks have read. */
static bool is_read(const struct coverage *coverage, size_t count, const struct store_entry *entry)
{
        struct coverage_document wanted;

        if (!count || strlen(name_of(entry)) >= sizeof wanted.name)
                return false;
        strcpy(wanted.name, name_of(entry));
        return bsearch(&wanted, coverage->read, count, sizeof wanted, by_name) != NULL;
}

static bool shows_all_that_was_read(const struct coverage *coverage, const struct store_list *list)
{
        size_t count = 0;

        for (size_t i = 0; i < list->count; i++)
                count += is_read(coverage, coverage->read_count, &list->entries[i]);
        return count == coverage->read_count;
}

/* If there is no memory for it, the next look reads the document again. */
static void note_read(struct coverage *coverage, const struct store_entry *entry)
{
        struct coverage_document *grown = realloc(coverage->read, (coverage->read_count + 1) * sizeof *grown);

        if (!grown)
                return;
        coverage->read = grown;
        strcpy(grown[coverage->read_count++].name, name_of(entry));
}

/* Whether the document is of this writing, or of another run or job, which may write the same tag. */
static bool is_to_read(const struct captured *own, const struct store_entry *entry)
{
        struct announce_name name;
        char writing[WRITING_MAX];

        writing_prefix(own->of.job, own->of.run, own->of.writing, writing);
        return announce_name_parse(name_of(entry), &name) &&
               (!strcmp(name.writing, writing) || strncmp(name.writing, writing, WRITING_RUN_CHARS));
}

static enum nebula_status read_one(struct store *store, const struct captured *own, const struct store_entry *entry, struct coverage *coverage,
                                   struct nebula_error *error)
{
        struct captured captured;
        char *text;
        size_t size;
        enum nebula_status status = NEBULA_OK;

        if (document_get(store, entry->key, &text, &size, NULL, NULL))
                return NEBULA_OK; /* the next look reads it */
        if (!captured_parse(text, size, &captured, NULL)) {
                status = check_other(own, &captured, error);
                if (!status && announce_same(&own->of, &captured.of))
                        cover(coverage, &captured);
                if (!status)
                        note_read(coverage, entry);
                captured_done(&captured);
        }
        free(text);
        return status;
}

enum nebula_status coverage_look(struct store *store, const struct captured *own, struct coverage *coverage, struct nebula_error *error)
{
        char directory[256], prefix[MANIFEST_KEY_MAX];
        struct store_list list;
        size_t known;
        enum nebula_status status = name_encode(own->of.tag, directory, error);

        if (status)
                return status;
        snprintf(prefix, sizeof prefix, "%s/" MANIFEST_DIRECTORY "/captured-", directory);
        status = store_list_all(store, prefix, false, &list, error);
        if (status)
                return status;
        if (!shows_all_that_was_read(coverage, &list))
                forget(coverage);
        cover(coverage, own);
        known = coverage->read_count;
        for (size_t i = 0; i < list.count && !status; i++)
                if (is_to_read(own, &list.entries[i]) && !is_read(coverage, known, &list.entries[i]))
                        status = read_one(store, own, &list.entries[i], coverage, error);
        if (coverage->read_count)
                qsort(coverage->read, coverage->read_count, sizeof *coverage->read, by_name);
        store_list_done(&list);
        return status;
}
