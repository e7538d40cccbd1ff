#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/lineage.h"
#include "agent/commit/node_documents.h"
#include "agent/commit/slots_private.h"
#include "agent/commit/world_private.h"
#include "agent/log.h"
#include "base/error.h"
#include "os/os.h"
#include "store/document.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/tag_log.h"

static enum nebula_status key_of(const char *tag, const char *path, char key[MANIFEST_KEY_MAX], struct nebula_error *error)
{
        char directory[256];
        enum nebula_status status = name_encode(tag, directory, error);

        if (!status)
                snprintf(key, MANIFEST_KEY_MAX, "%s/%s", directory, path);
        return status;
}

/* Another agent's document of that name says the same. */
static enum nebula_status put_once(struct store *store, const char *tag, const char *path, const char *text, size_t size, bool *ret_is_new,
                                   struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = key_of(tag, path, key, error);

        if (!status)
                status = store->ops->put(store, key, text, size, STORE_IF_ABSENT, NULL, NULL, error);
        *ret_is_new = !status;
        return status == NEBULA_BUSY ? NEBULA_OK : status;
}

enum nebula_status world_write_captured(struct store *store, struct captured *captured, char ret_path[ANNOUNCE_PATH_MAX],
                                        struct nebula_error *error)
{
        char *text;
        size_t size;
        bool is_new;
        enum nebula_status status;

        if (os->host_name(captured->host, sizeof captured->host) < 0)
                captured->host[0] = 0;
        status = captured_format(captured, &text, &size, error);
        if (status)
                return status;
        captured_path(captured, text, size, ret_path);
        status = put_once(store, captured->of.tag, ret_path, text, size, &is_new, error);
        free(text);
        return status;
}

static enum nebula_status read_committed(struct store *store, const char *key, struct committed *ret_committed, struct nebula_error *error)
{
        char *text;
        size_t size;
        enum nebula_status status = document_get(store, key, &text, &size, NULL, error);

        if (status)
                return status;
        status = committed_parse(text, size, ret_committed, error);
        free(text);
        return status;
}

enum nebula_status world_read_committed(struct store *store, const struct announce_of *of, struct committed *ret_committed,
                                        struct nebula_error *error)
{
        struct committed committed;
        char path[ANNOUNCE_PATH_MAX], key[MANIFEST_KEY_MAX];
        enum nebula_status status;

        committed_path(of, path);
        status = key_of(of->tag, path, key, error);
        if (!status)
                status = read_committed(store, key, &committed, error);
        if (status)
                return status;
        if (!announce_same(of, &committed.of)) {
                committed_done(&committed);
                return error_set(error, NEBULA_CORRUPT, 0, "%s/%s is of another version", store->root, key);
        }
        *ret_committed = committed;
        return NEBULA_OK;
}

static bool lists_any(const struct committed *committed, const struct captured *own)
{
        for (size_t i = 0, j = 0; i < committed->rank_count && j < own->rank_count;) {
                if (committed->ranks[i] == own->ranks[j].rank)
                        return true;
                if (committed->ranks[i] < own->ranks[j].rank)
                        i++;
                else
                        j++;
        }
        return false;
}

/* The tag was removed, and its documents with it: the removal has left their number. */
static enum nebula_status count_removed(struct store *store, const struct captured *own, uint64_t *ret_count, struct nebula_error *error)
{
        char directory[256], run[WRITING_MAX];
        enum nebula_status status = name_encode(own->of.tag, directory, error);

        writing_prefix(own->of.job, own->of.run, own->of.writing, run);
        if (!status)
                status = tag_log_writings(store, directory, run, ret_count, error);
        return status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT ? NEBULA_OK : status;
}

/* The later writings come last, but for the length of their numbers. One that was given up may be the present one, and does not count. */
enum nebula_status world_count_writings(struct store *store, const struct captured *own, bool counts_removed, uint64_t *ret_count,
                                        uint64_t *ret_without, struct nebula_error *error)
{
        char prefix[ANNOUNCE_PATH_MAX], key[MANIFEST_KEY_MAX];
        struct store_list list;
        enum nebula_status status;

        committed_prefix(&own->of, prefix);
        status = key_of(own->of.tag, prefix, key, error);
        if (!status)
                status = store_list_all(store, key, false, &list, error);
        if (status)
                return status;
        *ret_count = *ret_without = 0;
        for (size_t i = 0; i < list.count && !status; i++) {
                struct announce_name name;
                struct committed committed;
                bool is_of_run;

                if (!announce_name_parse(strrchr(list.entries[i].key, '/') + 1, &name) || name.number <= *ret_count)
                        continue;
                status = read_committed(store, list.entries[i].key, &committed, error);
                if (status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT) { /* no node adopts it any more */
                        status = NEBULA_OK;
                        continue;
                }
                if (status)
                        break;
                is_of_run = !strcmp(committed.of.job, own->of.job) && !strcmp(committed.of.run, own->of.run);
                if (is_of_run && lists_any(&committed, own))
                        *ret_count = name.number;
                else if (is_of_run && !*committed.given_up && name.number > *ret_without)
                        *ret_without = name.number;
                committed_done(&committed);
        }
        store_list_done(&list);
        if (!status && counts_removed && !*ret_count && !*ret_without)
                status = count_removed(store, own, ret_count, error);
        return status;
}

void world_describe_committed(const struct version *version, struct committed *ret_committed)
{
        const struct version_nodes *nodes = version->nodes;

        memset(ret_committed, 0, sizeof *ret_committed);
        world_fill_of(version, &ret_committed->of);
        ret_committed->sequence = version->sequence;
        ret_committed->line = version->line;
        ret_committed->persist = version->wanted;
        ret_committed->node_count = nodes->decided_nodes;
        ret_committed->ranks = nodes->decided ? calloc(nodes->decided_count, sizeof *nodes->decided) : NULL;
        if (!ret_committed->ranks)
                return;
        memcpy(ret_committed->ranks, nodes->decided, nodes->decided_count * sizeof *nodes->decided);
        ret_committed->rank_count = nodes->decided_count;
}

static enum nebula_status put_committed(struct store *store, const struct committed *committed, bool *ret_is_new, struct nebula_error *error)
{
        char path[ANNOUNCE_PATH_MAX], *text;
        size_t size;
        enum nebula_status status = committed_format(committed, &text, &size, error);

        if (status)
                return status;
        committed_path(&committed->of, path);
        status = put_once(store, committed->of.tag, path, text, size, ret_is_new, error);
        free(text);
        return status;
}

enum nebula_status world_write_given_up(struct store *store, const struct committed *given_up, struct nebula_error *error)
{
        bool is_new;

        return put_committed(store, given_up, &is_new, error);
}

enum nebula_status world_report_wanted(struct store *store, const struct announce_of *of, struct nebula_error *error)
{
        char path[ANNOUNCE_PATH_MAX];
        bool is_new;

        wanted_path(of, path);
        return put_once(store, of->tag, path, "\n", 1, &is_new, error);
}

enum nebula_status world_is_wanted(struct store *store, const struct announce_of *of, bool *ret_is_wanted, struct nebula_error *error)
{
        char path[ANNOUNCE_PATH_MAX], key[MANIFEST_KEY_MAX];
        struct store_entry entry;
        enum nebula_status status;

        wanted_path(of, path);
        status = key_of(of->tag, path, key, error);
        if (!status)
                status = store->ops->stat(store, key, &entry, error);
        *ret_is_wanted = !status;
        if (!status)
                store_entry_done(&entry);
        return status == NEBULA_NOT_FOUND ? NEBULA_OK : status;
}

void world_report_again(struct catalogue *catalogue, struct store *store, struct version *version)
{
        struct nebula_error error = { 0 };
        struct committed own;
        bool is_new;
        enum nebula_status status = NEBULA_OK;

        catalogue_lock(catalogue);
        world_describe_committed(version, &own);
        catalogue_unlock(catalogue);
        if (own.rank_count)
                status = put_committed(store, &own, &is_new, &error);
        if (!status && own.persist)
                status = world_report_wanted(store, &own.of, &error);
        if (status)
                log_event(LOG_LEVEL_WARN, "%s: the agent could not check whether storage still has the decision to persist it: %s", own.of.tag, error.message);
        committed_done(&own);
}

enum nebula_status world_commit_document(struct store *store, const struct captured *own, const struct coverage *coverage,
                                          const struct line *line, bool persist, struct committed *ret_committed, struct nebula_error *error)
{
        struct committed committed = { .of = own->of, .sequence = coverage->sequence,
                                       .line = *line, .persist = persist, .node_count = coverage->nodes };
        struct manifest before = { 0 };
        struct nebula_error failure = { 0 };
        bool is_new = false;
        enum nebula_status status = manifest_load(store, own->of.tag, &before, &failure);

        if (!status) {
                if (committed.sequence <= before.sequence)
                        committed.sequence = before.sequence + 1;
                manifest_done(&before);
        } else if (status != NEBULA_NOT_FOUND && status != NEBULA_CORRUPT) {
                if (error)
                        *error = failure;
                return status;
        }
        committed.ranks = calloc(coverage->count, sizeof *committed.ranks);
        if (!committed.ranks)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for %" PRIu32 " ranks", coverage->count);
        for (uint32_t rank = 0; rank < own->of.world; rank++)
                if (coverage->ranks[rank])
                        committed.ranks[committed.rank_count++] = rank;
        status = put_committed(store, &committed, &is_new, error);
        if (!status && is_new) {
                *ret_committed = committed;
                return NEBULA_OK;
        }
        committed_done(&committed);
        return status ? status : world_read_committed(store, &own->of, ret_committed, error); /* another node has decided */
}

static bool has_rank(const struct captured *own, uint32_t rank)
{
        for (size_t i = 0; i < own->rank_count; i++)
                if (own->ranks[i].rank == rank)
                        return true;
        return false;
}

void world_remove_captured(struct store *store, const struct captured *own, const char *path)
{
        char prefix[ANNOUNCE_PATH_MAX], key[MANIFEST_KEY_MAX];
        struct store_victim *victims;
        struct store_list list;
        size_t count = 0;

        if (*path) {
                if (!key_of(own->of.tag, path, key, NULL))
                        store_remove_one(store, key, NULL);
                return;
        }
        captured_prefix(&own->of, prefix);
        if (key_of(own->of.tag, prefix, key, NULL) || store_list_all(store, key, false, &list, NULL))
                return;
        victims = calloc(list.count + 1, sizeof *victims);
        for (size_t i = 0; victims && i < list.count; i++) {
                struct announce_name name;

                if (announce_name_parse(strrchr(list.entries[i].key, '/') + 1, &name) && has_rank(own, name.rank))
                        victims[count++].key = list.entries[i].key;
        }
        if (count)
                store->ops->remove(store, victims, count, NULL);
        free(victims);
        store_list_done(&list);
}

void world_fill_of(const struct version *version, struct announce_of *of)
{
        memset(of, 0, sizeof *of);
        snprintf(of->tag, sizeof of->tag, "%s", version->tag);
        snprintf(of->job, sizeof of->job, "%s", version->job->name);
        snprintf(of->run, sizeof of->run, "%s", version->run);
        of->writing = version->writing;
        of->world = version->world;
}

static int by_rank(const void *a, const void *b)
{
        const struct captured_rank *x = a, *y = b;

        return x->rank < y->rank ? -1 : x->rank > y->rank;
}

/* Whether the announcement may name this rank. A rank that has just begun joins with a later announcement. */
static bool has_captured(const struct version *version, const struct part *part)
{
        for (const struct image_loan *loan = version->loans; loan; loan = loan->next)
                if (loan->rank == part->rank)
                        return false;
        return version->file_goal > 0 ? part->file_count > 0 : part->closed;
}

bool world_describe(const struct version *version, struct captured *captured)
{
        memset(captured, 0, sizeof *captured);
        world_fill_of(version, &captured->of);
        captured->sequence = version->nodes->announce_sequence;
        captured->after = lineage_goes_back(version);
        captured->goes_back = captured->after != LINEAGE_GOES_ON;
        captured->ranks = calloc(version->part_count + 1, sizeof *captured->ranks);
        if (!captured->ranks)
                return false;
        for (size_t i = 0; i < version->part_count; i++) {
                if (!has_captured(version, &version->parts[i]))
                        continue;
                captured->ranks[captured->rank_count++] = (struct captured_rank){ version->parts[i].rank, version->parts[i].file_count };
                captured->pid = captured->pid ? captured->pid : version->parts[i].pid;
        }
        qsort(captured->ranks, captured->rank_count, sizeof *captured->ranks, by_rank);
        return captured->rank_count > 0;
}

void world_keep_decision(struct version *version, const struct committed *committed)
{
        struct version_nodes *nodes = version->nodes;

        free(nodes->decided);
        nodes->decided = calloc(committed->rank_count, sizeof *nodes->decided);
        if (!nodes->decided)
                return;
        memcpy(nodes->decided, committed->ranks, committed->rank_count * sizeof *nodes->decided);
        nodes->decided_count = committed->rank_count;
        nodes->decided_nodes = committed->node_count;
}

static bool has_come(const struct version *version, uint32_t rank)
{
        const struct part *part = version_part((struct version *)version, rank);

        return (part && part->closed) || (version->nodes->covered && version->nodes->covered[rank]);
}

static bool waits_for_several(const struct version *version)
{
        uint32_t missing = 0;

        for (uint32_t rank = 0; rank < version->world && missing < 2; rank++)
                missing += !has_come(version, rank);
        return missing > 1;
}

void world_missing(const struct version *version, char *text, size_t size)
{
        uint32_t missing = 0;
        size_t used;

        text[0] = 0;
        if (!version_open(version) || !version->part_count)
                return;
        if (version->file_goal > 0) {
                snprintf(text, size, "waits for %" PRId64 " files, and %zu are on this node", version->file_goal, version->file_count);
                return;
        }
        if (version->world < 2)
                return;
        used = (size_t)snprintf(text, size, "waits for rank%s", waits_for_several(version) ? "s" : "");
        for (uint32_t rank = 0; rank < version->world && used < size; rank++) {
                if (has_come(version, rank))
                        continue;
                if (++missing <= 8)
                        used += (size_t)snprintf(text + used, size - used, "%s%" PRIu32, missing > 1 ? ", " : " ", rank);
        }
        if (!missing)
                text[0] = 0;
        else if (used < size)
                snprintf(text + used, size - used, "%s of %" PRIu32, missing > 8 ? ", ..." : "", version->world);
}
