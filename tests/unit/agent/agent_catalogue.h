/*
 * agent_catalogue.h - an agent without threads, for sweeps that must be the same each time: the catalogue, a
 * memory directory, one job with one session, and versions whose bytes are known.
 */
#ifndef NB_TESTS_AGENT_CATALOGUE_H
#define NB_TESTS_AGENT_CATALOGUE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/catalogue.h"
#include "agent/catalogue/memory_policy.h"
#include "agent/commit/commit.h"
#include "agent/commit/slots_private.h"
#include "agent/memory/image_loan.h"
#include "agent/memory/memory.h"
#include "agent/memory/slots_private.h"
#include "agent/memory/survival_log.h"
#include "agent/peers/slots_private.h"
#include "agent/persist/persist.h"
#include "agent/persist/slots_private.h"
#include "agent/persist/storage.h"
#include "agent/publish/publish.h"
#include "agent/publish/publish_list.h"
#include "agent/rooms.h"
#include "os/os.h"
#include "store/manifest_load.h"
#include "store/manifest_read.h"
#include "store/record.h"

#define BENCH_FILE_BYTES 20011u

struct bench {
        struct catalogue catalogue;
        struct memory memory;
        struct session session;
        struct job *job;
        struct nebula_error error;
};

static inline unsigned char bench_byte(unsigned seed, size_t i)
{
        return (unsigned char)(seed * 77u + i * 3u + i / 512u);
}

/* memory NULL: images are memfds. */
static inline void bench_init(struct bench *bench, const char *memory, const char *storage)
{
        char why[600];

        memset(bench, 0, sizeof *bench);
        catalogue_init(&bench->catalogue, agent_rooms, &bench->memory);
        bench->catalogue.in_process = true;
        memory_init(bench->catalogue.memory, memory, 1 << 30, why, sizeof why);
        if (memory)
                survival_log_adopt_all(&bench->catalogue);
        bench->job = catalogue_job_get(&bench->catalogue, storage, "");
        bench->session = (struct session){ .job = bench->job, .nonce = 1, .pid = os->pid(), .seen_pid = os->pid(), .world = 1,
                                            .connection_count = 1 };
}

/* The job has the bench's session; bench_leave, before bench_done: it has none, and so does not free it. */
static inline void bench_join(struct bench *bench)
{
        bench->session.job = NULL;
        catalogue_session_set(&bench->session, bench->job, bench->session.role, bench->session.connection_count);
}

static inline void bench_leave(struct bench *bench)
{
        catalogue_session_set(&bench->session, NULL, bench->session.role, bench->session.connection_count);
        bench->session.job = bench->job;
}

/* From now on, `last` versions stay in storage; 0: all. */
static inline void bench_keep(struct job *job, uint32_t last)
{
        job->settings.rules[0] = (struct keep_rule){ .last = last };
        job->settings.rule_count = last != 0;
        job->is_remover = true; /* as the agent that has written the last manifest */
}

/* Applies the rules once. */
static inline enum nebula_status bench_retain(struct bench *bench)
{
        bool has_more;

        return storage_retain(&bench->catalogue, bench->job, &has_more, &bench->error);
}

/* forget: true ends as an agent does; false as if the agent had been killed. */
static inline void bench_done(struct bench *bench, bool forget)
{
        memory_stop_removing(bench->catalogue.memory, forget);
        publish_done(&bench->catalogue);
        catalogue_done(&bench->catalogue);
        memory_done(bench->catalogue.memory, forget);
}

static inline bool never(void *argument)
{
        (void)argument;
        return false;
}

static inline enum nebula_status bench_save_bytes(struct bench *bench, uint64_t *version_id, const char *name, unsigned seed, size_t size)
{
        struct ipc_image request = { .version_id = *version_id, .size = size, .format = IPC_FORMAT_RAW };
        struct ipc_captured done = { 0 };
        struct version *version = NULL;
        struct image_loan *loan = NULL;
        enum nebula_status status;
        void *data;

        strcpy(request.name, name);
        catalogue_lock(&bench->catalogue);
        status = image_loan_open(&bench->catalogue, &bench->session, &request, never, NULL, &version, &loan, &bench->error);
        catalogue_unlock(&bench->catalogue);
        if (!status)
                status = image_map(loan->image, &data, &bench->error);
        if (status)
                return status;
        for (size_t i = 0; i < size; i++)
                ((unsigned char *)data)[i] = bench_byte(seed, i);
        *version_id = version->id;
        image_loan_record(&bench->catalogue, *version_id);
        catalogue_lock(&bench->catalogue);
        status = commit_captured(&bench->catalogue, version, loan, &done, &bench->error);
        catalogue_unlock(&bench->catalogue);
        return status;
}

static inline enum nebula_status bench_save(struct bench *bench, uint64_t *version_id, const char *name, unsigned seed)
{
        return bench_save_bytes(bench, version_id, name, seed, BENCH_FILE_BYTES);
}

/* Begins, saves files a (and b), commits: a version in memory, or NULL. */
static inline struct version *bench_version(struct bench *bench, const char *tag, unsigned seed_a, unsigned seed_b)
{
        struct version *version;
        uint64_t id;

        catalogue_lock(&bench->catalogue);
        version = commit_begin(&bench->catalogue, &bench->session, tag, NEBULA_FILES_ALL_RANKS, &bench->error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench->catalogue);
        if (!id || (seed_a && bench_save(bench, &id, "a", seed_a)) || (seed_b && bench_save(bench, &id, "b", seed_b)))
                return NULL;
        catalogue_lock(&bench->catalogue);
        version = catalogue_version(&bench->catalogue, id);
        if (version && commit_part(&bench->catalogue, &bench->session, version, &bench->error))
                version = NULL;
        catalogue_unlock(&bench->catalogue);
        return version;
}

/* Writes the version to storage, as the worker does. */
static inline enum nebula_status bench_persist(struct bench *bench, struct version *version)
{
        enum nebula_status status;

        catalogue_lock(&bench->catalogue);
        version->pins++;
        catalogue_unlock(&bench->catalogue);
        status = storage_persist(&bench->catalogue, bench->job, version, &bench->error);
        catalogue_lock(&bench->catalogue);
        version->pins--;
        if (!status) {
                version->stored = true;
                version_move(&bench->catalogue, version, NEBULA_STATE_DURABLE);
        }
        catalogue_unlock(&bench->catalogue);
        return status;
}

/* Whether file `name` of the stored tag holds the bytes of `seed`, checksums and all. */
static inline bool stored_holds(struct store *store, const struct manifest *manifest, const char *name, unsigned seed)
{
        unsigned char *data = aligned_alloc(4096, 32768);
        struct record_file recorded = { 0 };
        bool same = data && !manifest_load_file(store, manifest, name, &recorded, NULL) && recorded.size == BENCH_FILE_BYTES &&
                    !manifest_read_file(store, manifest, &recorded, data, NULL);

        for (size_t i = 0; same && i < BENCH_FILE_BYTES; i++)
                same = data[i] == bench_byte(seed, i);
        record_file_done(&recorded);
        free(data);
        return same;
}

#endif
