#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "agent/commit/world_private.h"
#include "base/error.h"
#include "os/os.h"
#include "store/document.h"

static enum nebula_status key_of(const char *tag, const char *path, char key[MANIFEST_KEY_MAX], struct nebula_error *error)
{
        char directory[256];
        enum nebula_status status = name_encode(tag, directory, error);

        if (!status)
                snprintf(key, MANIFEST_KEY_MAX, "%s/%s", directory, path);
        return status;
}

enum nebula_status world_write_captured(struct store *store, struct captured *captured, struct nebula_error *error)
{
        char path[64], key[MANIFEST_KEY_MAX], *text;
        size_t size;
        enum nebula_status status;

        if (os->host_name(captured->host, sizeof captured->host) < 0)
                captured->host[0] = 0;
        status = captured_format(captured, &text, &size, error);
        if (status)
                return status;
        captured_path(captured->ranks[0].rank, captured->of.writing, path);
        status = key_of(captured->of.tag, path, key, error);
        if (!status)
                status = store->ops->put(store, key, text, size, STORE_ALWAYS, NULL, NULL, error);
        free(text);
        return status;
}

enum nebula_status world_read_committed(struct store *store, const char *tag, struct committed *ret_committed,
                                         struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;
        enum nebula_status status = key_of(tag, MANIFEST_DIRECTORY "/committed.json", key, error);

        if (!status)
                status = document_get(store, key, &text, &size, NULL, error);
        if (status)
                return status;
        status = committed_parse(text, size, ret_committed, error);
        free(text);
        return status;
}

static enum nebula_status put_committed(struct store *store, const struct committed *committed, bool is_first, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;
        enum nebula_status status = key_of(committed->of.tag, MANIFEST_DIRECTORY "/committed.json", key, error);

        if (!status)
                status = committed_format(committed, &text, &size, error);
        if (status)
                return status;
        status = store->ops->put(store, key, text, size, is_first ? STORE_IF_ABSENT : STORE_ALWAYS, NULL, NULL, error);
        free(text);
        return status;
}

static enum nebula_status write_committed(struct store *store, const struct committed *committed, struct nebula_error *error)
{
        return put_committed(store, committed, false, error);
}

void world_describe_committed(const struct version *version, struct committed *ret_committed)
{
        memset(ret_committed, 0, sizeof *ret_committed);
        world_fill_of(version, &ret_committed->of);
        ret_committed->generation = version->generation;
        ret_committed->sequence = version->sequence;
        ret_committed->line = version->line;
        ret_committed->persist = version->persist.wanted;
        ret_committed->ranks = version->nodes.decided ? calloc(version->nodes.decided_count, sizeof *version->nodes.decided) : NULL;
        if (!ret_committed->ranks)
                return;
        memcpy(ret_committed->ranks, version->nodes.decided, version->nodes.decided_count * sizeof *version->nodes.decided);
        ret_committed->rank_count = version->nodes.decided_count;
}

/* Writings of one run are counted; of two runs the later sequence decides. */
static bool is_later(const struct committed *found, const struct committed *own)
{
        if (strcmp(found->of.job, own->of.job))
                return true; /* not ours to replace */
        if (!strcmp(found->of.run, own->of.run))
                return found->of.writing > own->of.writing;
        return found->sequence > own->sequence;
}

enum nebula_status world_repair_committed(struct store *store, const struct committed *own, bool *ret_told, struct nebula_error *error)
{
        struct committed found = { 0 };
        enum nebula_status status = world_read_committed(store, own->of.tag, &found, error);

        *ret_told = false;
        if (status)
                return status;
        if (announce_same(&own->of, &found.of)) {
                *ret_told = found.persist;
                if (own->persist && !found.persist) {
                        found.persist = true;
                        status = write_committed(store, &found, error);
                        *ret_told = !status;
                }
        } else if (own->rank_count && !is_later(&found, own)) {
                status = write_committed(store, own, error);
                *ret_told = !status && own->persist;
        } else {
                *ret_told = own->persist; /* a later writing has replaced it */
        }
        committed_done(&found);
        return status;
}

void world_keep_committed(struct catalogue *catalogue, struct store *store, struct version *version)
{
        struct nebula_error error = { 0 };
        struct committed own;
        bool told;
        enum nebula_status status;

        catalogue_lock(catalogue);
        world_describe_committed(version, &own);
        catalogue_unlock(catalogue);
        status = world_repair_committed(store, &own, &told, &error);
        if (own.rank_count && (status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT)) /* a program that removed the tag has removed it */
                status = put_committed(store, &own, status == NEBULA_NOT_FOUND, &error);
        if (status && status != NEBULA_NOT_FOUND && status != NEBULA_CORRUPT && status != NEBULA_BUSY)
                log_event(LOG_LEVEL_WARN, "%s: the agent could not check whether storage still tells other nodes to persist it: %s", own.of.tag, error.message);
        committed_done(&own);
}

/* If another node has decided meanwhile, its decision stays: others may have read it. */
static enum nebula_status write_first(struct store *store, struct committed *committed, struct committed *ret_committed, struct nebula_error *error)
{
        struct committed found = { 0 };
        enum nebula_status status = world_read_committed(store, committed->of.tag, &found, error);

        if (status && status != NEBULA_NOT_FOUND && status != NEBULA_CORRUPT)
                return status; /* another node's decision may be there */
        if (!status && announce_same(&found.of, &committed->of)) {
                committed_done(committed);
                *ret_committed = found;
                return NEBULA_OK;
        }
        if (!status)
                committed_done(&found);
        status = put_committed(store, committed, status == NEBULA_NOT_FOUND, error);
        if (!status)
                *ret_committed = *committed;
        return status;
}

enum nebula_status world_commit_document(struct store *store, const struct captured *own, const struct coverage *coverage,
                                          const struct line *line, bool persist, struct committed *ret_committed, struct nebula_error *error)
{
        struct committed committed = { .of = own->of, .generation = coverage->generation, .sequence = coverage->sequence,
                                       .line = *line, .persist = persist, .node_count = coverage->documents };
        struct manifest before = { 0 };
        struct nebula_error failure = { 0 };
        enum nebula_status status = manifest_load(store, own->of.tag, &before, &failure);

        if (!status) {
                if (committed.generation <= before.generation)
                        committed.generation = before.generation + 1;
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
        status = write_first(store, &committed, ret_committed, error);
        if (status)
                committed_done(&committed);
        return status;
}

void world_remove_captured(struct store *store, const struct captured *own, uint32_t rank)
{
        struct captured captured;
        char path[64], key[MANIFEST_KEY_MAX], *text;
        size_t size;

        captured_path(rank, own->of.writing, path);
        if (key_of(own->of.tag, path, key, NULL) || document_get(store, key, &text, &size, NULL, NULL))
                return;
        if (!captured_parse(text, size, &captured, NULL)) {
                if (announce_same(&own->of, &captured.of))
                        store_remove_one(store, key, NULL);
                captured_done(&captured);
        }
        free(text);
}
