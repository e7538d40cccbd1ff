#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "agent/clients/history.h"
#include "agent/clients/report.h"
#include "agent/clients/verdict.h"
#include "agent/commit/node_documents.h"
#include "agent/commit/world.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/peers/copy_finder.h"
#include "agent/peers/replica.h"
#include "agent/persist/progress.h"
#include "agent/persist/settings.h"
#include "agent/persist/storage.h"
#include "agent/pulse/pulse.h"
#include "agent/restore/answers.h"
#include "agent/restore/passed_over.h"
#include "agent/restore/restore.h"
#include "base/error.h"
#include "os/os.h"
#include "store/counts.h"
#include "store/line_document.h"
#include "store/manifest_load.h"
#include "store/manifest_read.h"
#include "store/order.h"
#include "store/pins.h"
#include "store/scan.h"

static enum nebula_status to_text(json_t *body, char **ret_text, struct nebula_error *error)
{
        char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;

        json_decref(body);
        if (!text)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a report");
        *ret_text = text;
        return NEBULA_OK;
}

static void add_source(json_t *sources, bool holds, const char *name)
{
        if (holds)
                json_array_append_new(sources, json_string(name));
}

static json_t *ranks_json(const struct version *version)
{
        json_t *ranks = json_array();

        for (size_t i = 0; i < version->part_count; i++)
                json_array_append_new(ranks, json_integer(version->parts[i].rank));
        return ranks;
}

static void add_file(json_t *files, const struct version *version, const struct agent_file *file, uint64_t *size)
{
        json_array_append_new(files, json_pack("{s:s, s:I, s:I, s:I}", "name", file->name, "size", (json_int_t)file->size, "rank",
                                               (json_int_t)file->rank, "sequence", (json_int_t)version_file_sequence(version, file)));
        *size += file->size;
}

static int by_name(const void *a, const void *b)
{
        return strcmp(json_string_value(json_object_get(*(json_t *const *)a, "name")), json_string_value(json_object_get(*(json_t *const *)b, "name")));
}

/* The files came in the order in which ranks saved them. If there is no memory, that order stays. */
static void sort_files(json_t *files)
{
        size_t count = json_array_size(files);
        json_t **list = count > 1 ? calloc(count, sizeof *list) : NULL;

        if (!list)
                return;
        for (size_t i = 0; i < count; i++)
                list[i] = json_incref(json_array_get(files, i));
        qsort(list, count, sizeof *list, by_name);
        json_array_clear(files);
        for (size_t i = 0; i < count; i++)
                json_array_append_new(files, list[i]);
        free(list);
}

static json_t *version_json(const struct version *version)
{
        json_t *files = json_array(), *sources = json_array(), *moves = json_array(), *body;
        const struct version *rest = replica_rest(version);
        uint64_t size = 0;
        char missing[160];

        world_missing(version, missing, sizeof missing);
        if (version->is_gone)
                snprintf(missing, sizeof missing, "its directory was removed from storage, or moved");
        add_source(sources, version->in_memory, "memory");
        add_source(sources, version->is_remote, "peer");
        add_source(sources, version_is_safe(version), "storage");
        for (size_t i = 0; i < version->file_count; i++)
                add_file(files, version, &version->files[i], &size);
        for (size_t i = 0; rest && i < rest->file_count; i++)
                if (!version_file((struct version *)version, rest->files[i].name))
                        add_file(files, rest, &rest->files[i], &size);
        sort_files(files);
        for (uint32_t i = 0; i < version->life.move_count; i++)
                json_array_append_new(moves, json_pack("{s:s, s:f}", "state", nebula_state_name(version->life.moves[i].state),
                                                       "at", version->life.moves[i].at));
        body = json_pack("{s:s, s:I, s:I, s:s, s:o, s:I, s:o, s:f, s:f, s:s, s:o, s:s, s:s}", "tag", version->tag, "step",
                         (json_int_t)version->step, "sequence", (json_int_t)version->sequence, "state",
                         nebula_state_name(version->is_gone ? NEBULA_STATE_FAILED : version->life.state), "source", sources, "size", (json_int_t)size,
                         "files", files, "committed_at", lifecycle_at(&version->life, NEBULA_STATE_COMMITTED), "durable_at",
                         lifecycle_at(&version->life, NEBULA_STATE_DURABLE), "error", version->error.message, "moves", moves,
                         "job", version->job->name, "persist_path", version->job->persist_path);
        if (body) {
                json_object_set_new(body, "world", json_integer(version->world));
                json_object_set_new(body, "run", json_string(version->run));
                json_object_set_new(body, "writing", json_integer((json_int_t)version->writing));
                if (version->stored)
                        json_object_set_new(body, "written", json_integer((json_int_t)version_progress(version).written_bytes));
                if (version->is_spread && !version->stored) /* each node has only a share of it */
                        json_object_set_new(body, "spread", json_true());
                if (replica_gathered_all(version)) /* and peers have listed theirs as well */
                        json_object_set_new(body, "gathered", json_true());
                if (version->is_spread && !version->stored && version->file_goal == NEBULA_FILES_ALL_RANKS)
                        json_object_set_new(body, "ranks", ranks_json(version));
                if (missing[0] && !version->error.message[0])
                        json_object_set_new(body, "error", json_string(missing));
                line_format(&version->line, body);
        }
        return body;
}

static json_t *manifest_json(const struct manifest *manifest, const char *path)
{
        json_t *files = json_array();
        uint64_t size = manifest_size(manifest);
        double at = (double)manifest->sequence / 1e9;
        json_t *body;

        for (size_t i = 0; i < manifest->file_count; i++)
                json_array_append_new(files, json_pack("{s:s, s:I, s:I, s:I}", "name", manifest->files[i].name, "size",
                                                       (json_int_t)manifest->files[i].size, "rank",
                                                       (json_int_t)manifest->files[i].rank, "sequence",
                                                       (json_int_t)manifest_file_sequence(manifest, &manifest->files[i])));
        sort_files(files);
        body = json_pack("{s:s, s:I, s:I, s:s, s:[s], s:I, s:o, s:f, s:f, s:s, s:s, s:s}", "tag", manifest->tag, "step",
                         (json_int_t)manifest->step, "sequence", (json_int_t)manifest->sequence, "state", "durable", "source",
                         "storage", "size", (json_int_t)size, "files", files, "committed_at", at, "durable_at", at, "error", "",
                         "job", manifest->job, "persist_path", path);
        if (body) {
                json_object_set_new(body, "world", json_integer(manifest->world));
                json_object_set_new(body, "written", json_integer((json_int_t)manifest_written(manifest)));
                line_format(&manifest->line, body);
        }
        return body;
}

/* Only the first `count` rows can be of the version: a scan has each version once. */
static json_t *find_row(json_t *versions, size_t count, const struct manifest *manifest)
{
        json_t *row;

        for (size_t index = 0; index < count; index++) {
                row = json_array_get(versions, index);
                if (!strcmp(json_string_value(json_object_get(row, "tag")), manifest->tag) &&
                    !strcmp(json_string_value(json_object_get(row, "job")), manifest->job) &&
                    json_integer_value(json_object_get(row, "sequence")) == (json_int_t)manifest->sequence)
                        return row;
        }
        return NULL;
}

static void merge_stored(json_t *versions, size_t count, const struct manifest *manifest, const char *path)
{
        json_t *row = find_row(versions, count, manifest), *sources;

        if (!row) {
                json_array_append_new(versions, manifest_json(manifest, path));
                return;
        }
        sources = json_object_get(row, "source");
        for (size_t i = 0; i < json_array_size(sources); i++)
                if (!strcmp(json_string_value(json_array_get(sources, i)), "storage"))
                        return;
        json_array_append_new(sources, json_string("storage"));
}

static bool scan_has(const struct manifest_scan *scan, const json_t *row)
{
        for (size_t i = 0; i < scan->count; i++)
                if (!strcmp(scan->manifests[i].tag, json_string_value(json_object_get(row, "tag"))) &&
                    json_integer_value(json_object_get(row, "sequence")) == (json_int_t)scan->manifests[i].sequence)
                        return true;
        return false;
}

/* A version in memory may have been removed from storage by another node's agent or another program. A listing may be stale, so it is looked
 * up by its tag. Only the first `count` rows are of versions in memory. */
static void drop_removed(json_t *versions, size_t count, struct store *store, const struct manifest_scan *scan, const char *path)
{
        for (size_t i = 0; i < count; i++) {
                json_t *row = json_array_get(versions, i), *sources = json_object_get(row, "source");
                struct manifest there = { 0 };

                for (size_t j = json_array_size(sources); j--;) {
                        if (strcmp(json_string_value(json_array_get(sources, j)), "storage") || scan_has(scan, row) ||
                            strcmp(json_string_value(json_object_get(row, "persist_path")), path))
                                continue;
                        if (manifest_load(store, json_string_value(json_object_get(row, "tag")), &there, NULL) == NEBULA_NOT_FOUND)
                                json_array_remove(sources, j);
                        manifest_done(&there);
                }
        }
}

static bool in_scope(const struct job *job, const struct session *session, const char *path)
{
        if (*path)
                return !strcmp(job->persist_path, path);
        if (session && session->role == IPC_ROLE_READER)
                return !strcmp(job->persist_path, session->job->persist_path);
        return !session || session->role == IPC_ROLE_TOOL || job == session->job;
}

/* Whether the row of this node's share already shows the copies of peers. */
static bool is_in_another_row(const struct version *version)
{
        for (const struct version *other = version->is_remote ? version->job->versions : NULL; other; other = other->next)
                if (other->in_memory && !strcmp(other->tag, version->tag) && version_is(other, version->sequence))
                        return true;
        return false;
}

static json_t *memory_rows(struct catalogue *catalogue, const struct session *session, const char *path, bool takes_copies)
{
        json_t *versions = json_array();

        for (const struct job *job = catalogue->jobs; job; job = job->next)
                for (const struct version *version = in_scope(job, session, path) ? job->versions : NULL; version;
                     version = version->next)
                        if (version->in_memory || version->life.state < NEBULA_STATE_COMMITTED || (version->life.state == NEBULA_STATE_FAILED && !version->superseded) ||
                            (takes_copies && replica_serves(session, version) && !is_in_another_row(version)))
                                json_array_append_new(versions, version_json(version));
        return versions;
}

static bool is_row_of(const json_t *row, const struct job *job, const struct peer_copy *copy)
{
        return !strcmp(json_string_value(json_object_get(row, "job")), job->name) &&
               !strcmp(json_string_value(json_object_get(row, "tag")), copy->tag) &&
               json_integer_value(json_object_get(row, "sequence")) == (json_int_t)copy->sequence;
}

/* Adds the ranks of which this node keeps copies for other nodes. If such a node is lost, the ranks that are left can agree on the version
 * if they hold the shares of all ranks together. */
static void add_kept_ranks(json_t *versions, const struct job *job, const struct peer_listing *kept)
{
        for (size_t i = 0; i < json_array_size(versions); i++) {
                json_t *row = json_array_get(versions, i), *ranks = json_object_get(row, "ranks");

                for (size_t j = 0; ranks && j < kept->count; j++)
                        for (size_t k = 0; is_row_of(row, job, &kept->copies[j]) && k < kept->copies[j].rank_count; k++)
                                json_array_append_new(ranks, json_integer(kept->copies[j].ranks[k]));
        }
}

/* The jobs whose storage the report covers, pinned. One job per path, because a scan shows the versions of every job. */
static size_t paths_in_scope(struct catalogue *catalogue, const struct session *session, const char *path, struct job ***ret_jobs)
{
        size_t count = 0, used = 0;
        struct job **jobs;

        for (struct job *job = catalogue->jobs; job; job = job->next)
                count++;
        jobs = calloc(count + 1, sizeof(struct job *));
        for (struct job *job = jobs ? catalogue->jobs : NULL; job; job = job->next) {
                bool seen = !job->persist_path[0] || !in_scope(job, session, path);

                for (size_t i = 0; i < used; i++)
                        seen = seen || !strcmp(jobs[i]->persist_path, job->persist_path);
                if (!seen) {
                        job->pins++;
                        jobs[used++] = job;
                }
        }
        *ret_jobs = jobs;
        return used;
}

/* The row as an entry of the order. The caller provides *ret_line and *ret_job. */
static struct order_entry entry_of(const json_t *row, struct line *ret_line, char **ret_job)
{
        struct document_reader reader = { .kind = "report" };
        const char *job = json_string_value(json_object_get(row, "job")), *path = json_string_value(json_object_get(row, "persist_path"));
        size_t size = strlen(job) + strlen(path) + 2;
        struct order_entry entry;

        line_parse(&reader, row, ret_line);
        *ret_job = malloc(size);
        if (*ret_job)
                snprintf(*ret_job, size, "%s\n%s", path, job);
        entry = order_entry(json_string_value(json_object_get(row, "tag")), (uint64_t)json_integer_value(json_object_get(row, "sequence")), ret_line);
        entry.counts = entry.sequence && (json_is_string(json_object_get(row, "source")) || json_array_size(json_object_get(row, "source")));
        entry.job = *ret_job;
        return entry;
}

static void mark_abandoned(const json_t *versions)
{
        size_t count = json_array_size(versions);
        struct order_entry *entries = calloc(count + 1, sizeof *entries);
        struct line *lines = calloc(count + 1, sizeof *lines);
        char **jobs = calloc(count + 1, sizeof *jobs);

        if (entries && lines && jobs) {
                for (size_t i = 0; i < count; i++)
                        entries[i] = entry_of(json_array_get(versions, i), &lines[i], &jobs[i]);
                order_mark(entries, count);
                for (size_t i = 0; i < count; i++)
                        json_object_set_new(json_array_get(versions, i), "abandoned", json_boolean(entries[i].is_abandoned));
                for (size_t i = 0; i < count; i++)
                        free(jobs[i]);
        }
        free(entries);
        free(lines);
        free(jobs);
}

static json_t *passed_json(const struct passed *passed)
{
        json_t *list = json_array();

        for (uint32_t i = 0; i < passed->count; i++)
                json_array_append_new(list, json_pack("{s:s, s:s}", "tag", passed->list[i].tag, "reason", passed->list[i].reason));
        return list;
}

#define CHECKED_FILES_MAX 4096 /* each file needs two requests to storage; for larger versions, only a load finds missing files */

/* Leaves out versions that have lost files in storage, because ranks agree on a version that all of them can load. */
static enum nebula_status pass_over(struct store *store, const char *job, struct manifest_scan *scan, json_t **ret_passed, struct nebula_error *error)
{
        struct passed passed = { 0 };
        enum nebula_status status;
        int64_t index = 0;

        do {
                struct manifest manifest = { 0 };

                status = manifest_scan_load_newest(store, scan, job, &manifest, &index, error);
                if (!status && manifest.file_count <= CHECKED_FILES_MAX && restore_check_files(store, &manifest, error) == NEBULA_CORRUPT)
                        status = NEBULA_CORRUPT;
                manifest_done(&manifest);
                if (status == NEBULA_CORRUPT) {
                        passed_add(&passed, scan->manifests[index].tag, error->message);
                        scan->manifests[index].is_damaged = true;
                }
        } while (status == NEBULA_CORRUPT);
        if (!status)
                passed_scan(&passed, store, scan, &scan->manifests[index]);
        *ret_passed = passed_json(&passed);
        return status == NEBULA_NOT_FOUND ? NEBULA_OK : status;
}

/* Of the jobs whose trainers are connected, or that are not fine. */
static json_t *verdicts_json(struct catalogue *catalogue, const struct session *session, const char *path)
{
        json_t *verdicts = json_array(), *verdict;

        for (struct job *job = catalogue->jobs; job; job = job->next) {
                if (!in_scope(job, session, path))
                        continue;
                verdict_update(catalogue, job);
                if (!job->verdict->state && !job->trainer_count)
                        continue;
                verdict = verdict_json(job);
                if (verdict)
                        json_object_set_new(verdict, "job", json_string(job->name));
                json_array_append_new(verdicts, verdict);
        }
        return verdicts;
}

static bool is_loadable(const json_t *row)
{
        const json_t *source = json_object_get(row, "source");
        const char *state = json_string_value(json_object_get(row, "state"));

        return (json_is_string(source) || json_array_size(source)) && json_integer_value(json_object_get(row, "sequence")) &&
               strcmp(state, "capturing") != 0 && strcmp(state, "captured") != 0;
}

/* Marks the versions that were not there when the first rank of this node asked for the list, so that all its ranks choose from one (answers.h).
 * False: this list is older than that one. */
static bool mark_late(struct catalogue *catalogue, const struct session *session, const char *path, json_t *versions)
{
        size_t count = json_array_size(versions), missing = 0;
        uint64_t *hashes = calloc(count + 1, sizeof *hashes); /* by row; 0: not loadable */
        struct listed own = { .tags = calloc(count + 1, sizeof *own.tags) };
        struct listed listed = { 0 };
        bool is_shared;

        for (size_t i = 0; hashes && own.tags && i < count; i++)
                if (is_loadable(json_array_get(versions, i)))
                        hashes[i] = own.tags[own.count++] = listed_hash(json_string_value(json_object_get(json_array_get(versions, i), "tag")));
        listed_sort(&own);
        catalogue_lock(catalogue);
        is_shared = hashes && own.tags && answers_are_shared(session, path) && answers_listed(session, path, &own, &listed);
        catalogue_unlock(catalogue);
        for (size_t i = 0; is_shared && i < listed.count; i++)
                missing += !listed_has(&own, listed.tags[i]);
        for (size_t i = 0; is_shared && i < count; i++)
                if (hashes[i] && !listed_has(&listed, hashes[i]))
                        json_object_set_new(json_array_get(versions, i), "late", json_true());
        free(hashes);
        free(own.tags);
        free(listed.tags);
        return !missing;
}

/* *ret_is_old: it lacks versions that the list of another rank of this node has. */
static enum nebula_status versions_once(struct catalogue *catalogue, const struct session *session, const char *path, bool reads_storage,
                                        bool *ret_is_old, char **ret_text, struct nebula_error *error)
{
        bool own_only = session && session->role == IPC_ROLE_TRAINER && !*path, takes_copies = true;
        json_t *versions, *problems = json_array(), *passed = NULL, *verdicts;
        struct peer_listing kept = { 0 };
        struct job **jobs = NULL, *own = NULL;
        char unread[sizeof(struct nebula_error)] = ""; /* why storage could not be listed */
        size_t count;

        catalogue_lock(catalogue);
        if (session && session->role != IPC_ROLE_TOOL && (!*path || !strcmp(path, session->job->persist_path))) {
                own = session->job;
                own->pins++;
                catalogue_unlock(catalogue);
                takes_copies = storage_policy(catalogue, own) != TRUST_REQUIRE;
                if (takes_copies)
                        replica_learn(catalogue, own, session->role == IPC_ROLE_READER); /* ranks can agree on copies at peers, too */
                if (takes_copies && session->role == IPC_ROLE_TRAINER)
                        replica_kept(catalogue, own, &kept);
                catalogue_lock(catalogue);
        }
        if (*path && (!session || session->role == IPC_ROLE_TRAINER))
                catalogue_job_get(catalogue, path, session ? session->job->name : "");
        versions = memory_rows(catalogue, session, path, takes_copies);
        if (own) {
                add_kept_ranks(versions, own, &kept);
                own->pins--;
        }
        peer_listing_done(&kept);
        verdicts = verdicts_json(catalogue, session, path);
        count = reads_storage ? paths_in_scope(catalogue, session, path, &jobs) : 0;
        catalogue_unlock(catalogue);
        for (size_t i = 0; i < count; i++) {
                struct nebula_error failure = { 0 };
                struct manifest_scan scan = { 0 };
                size_t row_count = json_array_size(versions);
                struct store *store;
                enum nebula_status status = storage_open(catalogue, jobs[i], &store, &failure);

                if (!status)
                        status = session && session->role == IPC_ROLE_TRAINER ? restore_scan(catalogue, store, &scan, &failure) :
                                                                               manifest_scan_index(store, &scan, &failure);
                if (!status && session && session->role == IPC_ROLE_TRAINER && !passed &&
                    (status = pass_over(store, session->job->name, &scan, &passed, &failure)))
                        manifest_scan_done(&scan);
                if (status && status != NEBULA_NOT_FOUND) {
                        json_array_append_new(problems, json_string(failure.message));
                        snprintf(unread, sizeof unread, "%s", failure.message);
                }
                if (!status && scan.broken_count) /* the search for the newest finds more of them */
                        json_array_append_new(problems, json_string(scan.broken));
                catalogue_lock(catalogue);
                for (size_t j = 0; !status && j < scan.count; j++)
                        scan.manifests[j].is_damaged |= catalogue_doubts(catalogue, jobs[i]->persist_path, &scan.manifests[j]);
                catalogue_unlock(catalogue);
                for (size_t j = 0; !status && j < scan.count; j++)
                        if (!scan.manifests[j].is_damaged && (!own_only || !strcmp(scan.manifests[j].job, session->job->name)))
                                merge_stored(versions, row_count, &scan.manifests[j], jobs[i]->persist_path);
                if (!status)
                        drop_removed(versions, row_count, store, &scan, jobs[i]->persist_path);
                if (!status)
                        manifest_scan_done(&scan);
        }
        catalogue_lock(catalogue);
        for (size_t i = 0; i < count; i++)
                jobs[i]->pins--;
        catalogue_unlock(catalogue);
        free(jobs);
        mark_abandoned(versions);
        *ret_is_old = reads_storage && !unread[0] && session && session->role == IPC_ROLE_TRAINER && !mark_late(catalogue, session, path, versions);
        return to_text(json_pack("{s:o, s:o, s:o, s:o, s:s}", "versions", versions, "verdicts", verdicts, "problems", problems, "passed", passed ? passed : json_array(), "unread", unread), ret_text, error);
}

#define LIST_LOOKS_MAX 3 /* a version that is missing may have been removed */

static enum nebula_status versions_text(struct catalogue *catalogue, const struct session *session, const char *path, bool reads_storage,
                                        char **ret_text, struct nebula_error *error)
{
        enum nebula_status status;
        bool is_old;

        for (int looks = 1;; looks++) {
                status = versions_once(catalogue, session, path, reads_storage, &is_old, ret_text, error);
                if (status || !is_old || looks == LIST_LOOKS_MAX)
                        return status;
                free(*ret_text);
        }
}

static json_t *findings_json(const struct job *job)
{
        static const char *const names[] = { [FINDING_ROTTEN] = "rotten", [FINDING_STALE] = "stale", [FINDING_NOT_FINITE] = "not_finite",
                                             [FINDING_LEFT_MEMORY] = "left_memory" };
        json_t *counts = json_object();

        for (int i = 0; i < FINDING_KINDS; i++)
                json_object_set_new(counts, names[i], json_integer((json_int_t)job->findings[i].count));
        return counts;
}

static json_t *job_json(struct catalogue *catalogue, struct job *job)
{
        const struct finding *left = &job->findings[FINDING_LEFT_MEMORY];
        uint64_t in_memory = 0, unsaved = 0, unsaved_bytes = 0;
        json_t *body, *pulse = pulse_json(catalogue, job);

        for (const struct version *version = job->versions; version; version = version->next) {
                in_memory += version->in_memory;
                if (!version->in_memory || version->stored)
                        continue;
                unsaved++;
                unsaved_bytes += version_size(version);
        }
        body = json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:b, s:s, s:I, s:o, s:o}", "job", job->name, "path", job->persist_path,
                         "trainer_count", (json_int_t)job->trainer_count, "memory_count",
                         (json_int_t)in_memory, "unsaved_count", (json_int_t)unsaved, "unsaved_bytes", (json_int_t)unsaved_bytes, "storage_count", (json_int_t)job->known.count, "persisting",
                         job_progress(job).is_busy, "storage_error", job_progress(job).error->message, "storage_failure_count",
                         (json_int_t)job_progress(job).failure_count, "verdict", verdict_json(job), "settings", settings_json(&job->settings));
        json_object_set_new(body, "spare", json_boolean(catalogue_is_spare(job)));
        json_object_set_new(body, "findings", findings_json(job));
        if (left->at > 0)
                json_object_set_new(body, "left_memory", json_pack("{s:s, s:f, s:s}", "tag", left->tag, "left_at", left->at, "reason", left->text));
        if (pulse)
                json_object_set_new(body, "steps", pulse);
        return body;
}

/* The bytes of the copies that this node keeps for each other node. */
static json_t *kept_json(const struct peer_listing *kept)
{
        json_t *nodes = json_object();

        for (size_t i = 0; i < kept->count; i++) {
                const struct peer_copy *copy = &kept->copies[i];
                json_int_t bytes = json_integer_value(json_object_get(nodes, copy->owner));

                for (size_t j = 0; j < copy->file_count; j++)
                        bytes += copy->files[j].held ? (json_int_t)copy->files[j].size : 0;
                json_object_set_new(nodes, copy->owner, json_integer(bytes));
        }
        return nodes;
}

/* Whether this agent has trainers, versions or a trouble of the job, or had them. A path that a command or a reader has only looked at makes a
 * job, too, but the agent knows nothing of the trainers elsewhere, and has no verdict on them. */
static bool is_ours(const struct catalogue *catalogue, const struct job *job)
{
        if (job->trainer_session_count || job->run[0] || job->is_served || job->verdict->state != VERDICT_FINE || catalogue_is_spare(job))
                return true;
        for (const struct version *version = job->versions; version; version = version->next)
                if (version->in_memory || version->part_count)
                        return true;
        return false;
}

/* Lock held; dropped meanwhile. `jobs` has a row for each job that is ours, in their order. */
static void add_kept(struct catalogue *catalogue, json_t *jobs)
{
        struct job **list = calloc(json_array_size(jobs) + 1, sizeof *list);
        size_t count = 0;

        for (struct job *job = list ? catalogue->jobs : NULL; job && count < json_array_size(jobs); job = job->next) {
                if (!is_ours(catalogue, job))
                        continue;
                job->pins++;
                list[count++] = job;
        }
        catalogue_unlock(catalogue);
        for (size_t i = 0; i < count; i++) {
                struct peer_listing kept;

                replica_kept(catalogue, list[i], &kept);
                json_object_set_new(json_array_get(jobs, i), "copies_kept", kept_json(&kept));
                peer_listing_done(&kept);
        }
        catalogue_lock(catalogue);
        for (size_t i = 0; i < count; i++)
                list[i]->pins--;
        if (count)
                catalogue_signal(catalogue);
        free(list);
}

static json_t *requests_json(const struct store_counts *counts)
{
        json_t *requests = json_object();

        for (int operation = 0; operation < STORE_OPERATIONS; operation++) {
                json_t *outcomes = json_object();
                uint64_t all = 0;

                for (int outcome = 0; outcome < STORE_OUTCOMES; outcome++) {
                        all += counts->requests[operation][outcome];
                        json_object_set_new(outcomes, store_outcome_names[outcome], json_integer((json_int_t)counts->requests[operation][outcome]));
                }
                if (all)
                        json_object_set(requests, store_operation_names[operation], outcomes);
                json_decref(outcomes);
        }
        return requests;
}

/* The requests of this agent to storage, by kind of store. */
static json_t *storage_json(void)
{
        json_t *list = json_array();
        struct store_counts counts;

        for (size_t index = 0; store_counts_next(&index, &counts);)
                json_array_append_new(list, json_pack("{s:s, s:o, s:I, s:I, s:I}", "store", counts.scheme, "requests", requests_json(&counts),
                                                      "retries", (json_int_t)counts.retries, "read_bytes", (json_int_t)counts.read_bytes,
                                                      "written_bytes", (json_int_t)counts.written_bytes));
        return list;
}

static enum nebula_status status_text(struct catalogue *catalogue, const char *path, char **ret_text, struct nebula_error *error)
{
        json_t *jobs = json_array(), *sessions = json_array(), *queue = json_array(), *agent;
        const struct memory *memory = catalogue->memory;

        catalogue_lock(catalogue);
        for (struct job *job = catalogue->jobs; job; job = job->next) {
                verdict_update(catalogue, job);
                if (!is_ours(catalogue, job))
                        continue;
                json_array_append_new(jobs, job_json(catalogue, job));
                for (const struct version *version = job->versions; version; version = version->next)
                        if (version_unsaved(version))
                                json_array_append_new(queue, json_pack("{s:s, s:s, s:s, s:I, s:I, s:b, s:s}", "tag", version->tag, "job",
                                                                       job->name, "path", job->persist_path, "size",
                                                                       (json_int_t)version_size(version), "moved",
                                                                       (json_int_t)version_progress(version).moved_bytes, "writing",
                                                                       version->pins > 0 && job_progress(job).is_busy, "reason",
                                                                       version->error.message));
                for (const struct session *session = job->sessions; session; session = session->next)
                        if (session->connection_count && session->role == IPC_ROLE_TRAINER)
                                json_array_append_new(sessions, json_pack("{s:I, s:I, s:I, s:s, s:s, s:f}", "pid", (json_int_t)session->pid, "rank",
                                                                          (json_int_t)session->rank, "world", (json_int_t)session->world, "job",
                                                                          job->name, "path", job->persist_path, "since", session->since));
        }
        agent = json_pack("{s:I, s:s, s:f, s:f, s:I, s:I, s:I, s:s, s:b, s:I}", "pid", (json_int_t)os->pid(), "version", NEBULA_VERSION,
                          "uptime_seconds", (double)(os->now_ns() - catalogue->started_ns) / 1e9, "started_at", catalogue->started,
                          "memory_used", (json_int_t)memory->used, "memory_budget", (json_int_t)memory->budget, "memory_named",
                          (json_int_t)memory->named_used, "memory_directory", memory->directory, "stopping", catalogue->draining > 0,
                          "fetched_bytes", (json_int_t)manifest_read_bytes());
        add_kept(catalogue, jobs);
        catalogue_unlock(catalogue);
        return to_text(json_pack("{s:o, s:s, s:o, s:o, s:o, s:o}", "agent", agent, "path", path, "jobs", jobs, "sessions", sessions, "queue",
                                 queue, "storage", storage_json()),
                       ret_text, error);
}

static enum nebula_status history_text(struct catalogue *catalogue, const struct session *session, const char *path,
                                       char **ret_text, struct nebula_error *error)
{
        json_t *rows = json_array();

        catalogue_lock(catalogue);
        for (const struct job *job = catalogue->jobs; job; job = job->next)
                for (const struct version *version = in_scope(job, session, path) ? job->versions : NULL; version;
                     version = version->next)
                        /* Versions that were only found in storage are left out: their history is an earlier agent's. */
                        if (version->part_count)
                                json_array_insert_new(rows, 0, history_json(version));
        catalogue_unlock(catalogue);
        return to_text(json_pack("{s:o}", "history", rows), ret_text, error);
}

static enum nebula_status pins_text(struct catalogue *catalogue, const struct session *session, const char *path, char **ret_text,
                                    struct nebula_error *error)
{
        json_t *rows = json_array();
        struct pins pins = { 0 };
        struct store *store;
        struct job *job;
        enum nebula_status status;

        catalogue_lock(catalogue);
        job = *path || !session ? catalogue_job_get(catalogue, path, session ? session->job->name : "") : session->job;
        if (job)
                job->pins++;
        catalogue_unlock(catalogue);
        status = job ? storage_open(catalogue, job, &store, error) : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a report");
        if (!status)
                status = pins_load(store, true, &pins, error);
        for (size_t i = 0; i < pins.count; i++)
                json_array_append_new(rows, json_pack("{s:s, s:s, s:f}", "tag", pins.list[i].tag, "reason", pins.list[i].reason, "time", pins.list[i].time));
        pins_done(&pins);
        catalogue_lock(catalogue);
        if (job)
                job->pins--;
        catalogue_unlock(catalogue);
        if (!status)
                return to_text(json_pack("{s:o}", "pins", rows), ret_text, error);
        json_decref(rows);
        return status;
}

enum nebula_status report_text(struct catalogue *catalogue, const struct session *session, enum nebula_report report,
                               const char *persist_path, char **ret_text, struct nebula_error *error)
{
        switch (report) {
        case NEBULA_REPORT_VERSIONS:
        case NEBULA_REPORT_MEMORY:
                return versions_text(catalogue, session, persist_path, report == NEBULA_REPORT_VERSIONS, ret_text, error);
        case NEBULA_REPORT_STATUS:
                return status_text(catalogue, persist_path, ret_text, error);
        case NEBULA_REPORT_HISTORY:
                return history_text(catalogue, session, persist_path, ret_text, error);
        case NEBULA_REPORT_PINS:
                return pins_text(catalogue, session, persist_path, ret_text, error);
        default:
                return error_set(error, NEBULA_INVALID, 0, "there is no report %u", (unsigned)report);
        }
}

enum nebula_status report_version(struct catalogue *catalogue, uint64_t version_id, char **ret_text, struct nebula_error *error)
{
        struct version *version;
        json_t *body = NULL;

        catalogue_lock(catalogue);
        version = catalogue_version(catalogue, version_id);
        /* Learning asks peers for all files, so it is done only while trainers resume; a trainer in its loop waits for no other node. */
        if (version && catalogue_resumes(version->job))
                replica_gather(catalogue, version);
        if (version)
                body = version_json(version);
        catalogue_unlock(catalogue);
        if (!version)
                return error_set(error, NEBULA_NOT_FOUND, 0, "the agent does not know this checkpoint any more: look it up again");
        return to_text(body, ret_text, error);
}
