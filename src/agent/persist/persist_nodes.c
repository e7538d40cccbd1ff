/*
 * A version of several nodes: each writes its share. The node of rank 0 writes the manifest once all records are there. If it does not for a while,
 * any other node does. The other nodes look for the manifest.
 */
#include <string.h>

#include "agent/commit/node_documents.h"
#include "agent/commit/world.h"
#include "agent/log.h"
#include "agent/persist/persist_private.h"
#include "agent/persist/slots_private.h"
#include "base/error.h"
#include "os/os.h"
#include "store/announce.h"
#include "store/manifest_keys.h"


/* Whether this node writes the manifest. If that node is gone, another one does. */
static bool is_writer(const struct plan *plan)
{
        bool writes = world_leads(plan->version);

        for (size_t i = 0; i < plan->part_count; i++)
                writes = writes || !plan->parts[i].rank;
        return writes;
}

/* False within the time in which documents usually arrive by themselves. */
static bool has_waited(const struct version *version)
{
        return os->now_ns() - world_waiting_since_ns(version) > SECOND_NS;
}

static void forget_record(struct plan *plan)
{
        catalogue_lock(plan->catalogue);
        plan->version->persist->recorded_here = false;
        catalogue_unlock(plan->catalogue);
}

/* Call while other nodes have not written their records. A program that removed the tag may have removed the decision by which they write them, and
 * this node's record: this function writes both again. */
static void keep_others_going(struct plan *plan)
{
        struct version *version = plan->version;
        bool is_due = !(world_poll_count(version) & (world_poll_count(version) - 1)); /* less and less often */

        if (!is_due)
                return;
        world_report_again(plan->catalogue, plan->writer.store, version);
        if (plan_take_share(plan, NULL) || writer_number(&plan->writer, NULL) || persist_is_recorded(plan))
                return;
        log_event(LOG_LEVEL_WARN, "%s: another program has removed the record of this node, or is about to: the node writes its share again",
                  version->tag);
        forget_record(plan);
}

/* Storage has the decision if an earlier agent of this node adopted it. */
static enum nebula_status find_decision(const struct plan *plan, struct committed *ret_committed, struct nebula_error *error)
{
        struct announce_of of;
        enum nebula_status status;

        catalogue_lock(plan->catalogue);
        world_describe_committed(plan->version, ret_committed);
        catalogue_unlock(plan->catalogue);
        if (ret_committed->rank_count)
                return NEBULA_OK;
        of = ret_committed->of;
        status = world_read_committed(plan->writer.store, &of, ret_committed, error);
        if (status == NEBULA_NOT_FOUND)
                return error_set(error, NEBULA_BUSY, 0, "storage no longer says which ranks \"%.200s\" has", of.tag);
        if (!status && !ret_committed->rank_count)
                return error_set(error, NEBULA_CORRUPT, 0, "another node has given \"%.200s\" up", of.tag);
        return status;
}

static enum nebula_status write_manifest(struct plan *plan, const struct committed *committed, struct nebula_error *error)
{
        char prefix[WRITING_MAX];
        const struct version *version = plan->version;
        const struct writer_goal goal = {
                .prefix = prefix, .ranks = committed->ranks, .rank_count = committed->rank_count, .world = committed->of.world,
                .record_count = committed->node_count, .is_late = has_waited(version),
        };
        enum nebula_status status;

        writing_prefix(version->job->name, version->run, version->writing, prefix);
        plan->writer.goal = &goal;
        status = writer_run(&plan->writer, WRITER_GATHER, error);
        plan->writer.goal = NULL;
        if (!plan->writer.is_taken_back)
                return status;
        writer_drop_records(&plan->writer); /* so that each node writes its share again: the files were removed, or are about to be */
        forget_record(plan);
        return status;
}

/* Whether this node writes the manifest, or has to now, because the node of rank 0 did not for a while. */
static bool has_to_write(const struct plan *plan)
{
        return is_writer(plan) || os->now_ns() - world_waiting_since_ns(plan->version) > (int64_t)plan->catalogue->takeover_s * SECOND_NS;
}

static enum nebula_status not_arrived(const struct plan *plan, struct nebula_error *error)
{
        return error_set(error, NEBULA_BUSY, 0, "the manifest of \"%.200s\", which the node of rank 0 writes, has not arrived", plan->version->tag);
}

/* All records of a version are for one entry of the log, so the manifest has the number of this node's record. */
bool persist_only_waits(const struct plan *plan)
{
        const struct version *version = plan->version;
        struct store *store = plan->writer.store;
        struct store_entry entry;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status;

        if (!version->persist->recorded_here || !version->persist->log_number || has_to_write(plan) || has_waited(version) ||
            tag_log_key(plan->writer.directory, version->persist->log_number, key, NULL))
                return false;
        status = store->ops->stat(store, key, &entry, NULL);
        if (!status)
                store_entry_done(&entry);
        return status == NEBULA_NOT_FOUND;
}

/* Call when this node's record is in storage. */
static enum nebula_status await_manifest(struct plan *plan, struct nebula_error *error)
{
        struct committed committed = { 0 };
        bool writes = has_to_write(plan);
        enum nebula_status status;

        if (!writes && has_waited(plan->version))
                keep_others_going(plan);
        if (!writes)
                return not_arrived(plan, error);
        status = find_decision(plan, &committed, error);
        if (!status)
                status = write_manifest(plan, &committed, error);
        committed_done(&committed);
        if (!status)
                persist_conclude(plan, true);
        if (status == NEBULA_BUSY && has_waited(plan->version))
                keep_others_going(plan);
        return status;
}

static enum nebula_status write_share(struct plan *plan, struct nebula_error *error)
{
        struct version *version = plan->version;
        enum nebula_status status = plan_take_share(plan, error);

        if (!status)
                status = writer_number(&plan->writer, error);
        if (!status && !(version->adopted && persist_is_recorded(plan)))
                status = writer_run(&plan->writer, WRITER_SHARE, error);
        if (status)
                return status;
        catalogue_lock(plan->catalogue);
        version->persist->recorded_here = true;
        version->persist->log_number = plan->writer.manifest.number;
        for (size_t i = 0; i < plan->writer.share_count; i++)
                records_keep(version, plan->writer.shares[i].text, plan->writer.shares[i].size);
        world_await(version);
        catalogue_unlock(plan->catalogue);
        return NEBULA_OK;
}

enum nebula_status persist_for_nodes(struct plan *plan, struct nebula_error *error)
{
        bool is_there;
        enum nebula_status status = persist_only_waits(plan) ? not_arrived(plan, error) : plan_begin(plan, &is_there, error);

        if (status)
                return status;
        if (is_there && is_writer(plan))
                return persist_repeat(plan, error);
        if (is_there) {
                writer_take_found(&plan->writer);
                persist_conclude(plan, false);
                return NEBULA_OK;
        }
        if (!plan->version->persist->recorded_here)
                status = write_share(plan, error);
        return status ? status : await_manifest(plan, error);
}
