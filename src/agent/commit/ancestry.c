#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/commit/carry_over.h"
#include "agent/commit/slots_private.h"
#include "agent/log.h"
#include "base/error.h"
#include "os/os.h"

/* If storage answers later than this, a run that began after this one may have written there. The clock then distinguishes the two. */
#define PROMPT_NS (30 * SECOND_NS)

static struct ancestor *find(const struct job *job, const char *run)
{
        for (size_t i = 0; i < job->runs->ancestor_count; i++)
                if (!strcmp(job->runs->ancestors[i].run, run))
                        return &job->runs->ancestors[i];
        return NULL;
}

static struct ancestor *find_or_add(struct job *job, const char *run)
{
        struct ancestor *found = find(job, run), *grown;

        if (found)
                return found;
        grown = realloc(job->runs->ancestors, (job->runs->ancestor_count + 1) * sizeof *grown);
        if (!grown)
                return NULL;
        job->runs->ancestors = grown;
        found = &grown[job->runs->ancestor_count++];
        memset(found, 0, sizeof *found);
        strcpy(found->run, run);
        return found;
}

/* Records that the newest run came after all that `run` had committed up to sequence `until`. */
static void add(struct job *job, const char *run, uint64_t until)
{
        struct ancestor *ancestor = find_or_add(job, run);

        if (ancestor && until > ancestor->until)
                ancestor->until = until;
}

void ancestry_set_rival(struct job *job, const char *run)
{
        struct ancestor *ancestor = find_or_add(job, run);

        if (ancestor)
                ancestor->is_rival = true;
}

bool ancestry_is_rival(const struct job *job, const char *run)
{
        const struct ancestor *ancestor = find(job, run);

        return ancestor && ancestor->is_rival;
}

void ancestry_done(struct job *job)
{
        free(job->runs->ancestors);
        job->runs->ancestors = NULL;
        job->runs->ancestor_count = 0;
}

const char *ancestry_newest(const struct job *job)
{
        return job->runs->newest;
}

uint64_t ancestry_begun(const struct job *job)
{
        return job->runs->has_newest ? job->runs->begun_sequence : 0;
}

uint64_t ancestry_number(const struct job *job)
{
        return job->runs->beginning;
}

void ancestry_set_unseen(struct job *job, uint64_t sequence)
{
        job->runs->unseen_after = sequence;
}

void ancestry_stored(struct version *version, uint64_t sequence)
{
        for (struct version *later = version->job->versions; later; later = later->next)
                if (later != version && version_follows(later, sequence) && !strcmp(later->tag, version->tag))
                        later->ancestry->base_sequence = sequence;
        if (version->ancestry->beginning != version->job->runs->beginning)
                add(version->job, version->run, sequence);
}

uint64_t ancestry_carries_from(const struct version *version)
{
        return version->ancestry->carries_from;
}

void ancestry_restore(struct version *version, uint64_t base_sequence, uint64_t carries_from)
{
        version->ancestry->base_sequence = base_sequence;
        version->ancestry->carries_from = carries_from;
}

struct rival *ancestry_rivals(const struct job *job, size_t *ret_count)
{
        struct rival *rivals = calloc(job->runs->ancestor_count + 1, sizeof *rivals);

        *ret_count = 0;
        for (size_t i = 0; rivals && i < job->runs->ancestor_count; i++)
                if (job->runs->ancestors[i].is_rival)
                        memcpy(rivals[(*ret_count)++].run, job->runs->ancestors[i].run, IPC_NAME_MAX);
        return rivals;
}

/* A sequence later than all that this agent knows of the job, even if the clock is behind. */
static uint64_t moment(const struct job *job)
{
        uint64_t now = (uint64_t)os->wall_ns();

        return now > job->last_sequence ? now : job->last_sequence;
}

static void add_stored(struct job *job, uint64_t until)
{
        const char *last = NULL; /* a run has many versions in a row */

        for (size_t i = 0; i < job->known.count; i++) {
                const struct manifest *manifest = job->known.list[i];

                if (strcmp(manifest->job, job->name) || (last && !strcmp(last, manifest->run)))
                        continue;
                add(job, manifest->run, until);
                last = manifest->run;
        }
}

static void add_versions(struct job *job, uint64_t until)
{
        for (const struct version *version = job->versions; version; version = version->next)
                add(job, version->run, until);
}

void ancestry_begin(struct job *job, const char *run)
{
        for (struct version *version = job->versions; version; version = version->next)
                version->ancestry->base_sequence = ancestry_base(version); /* the run that made this list is no longer the newest */
        ancestry_done(job);
        strcpy(job->runs->newest, run);
        job->runs->has_newest = true;
        job->runs->has_looked = false;
        job->runs->beginning++;
        job->runs->begun_sequence = moment(job);
        job->runs->begun_ns = os->now_ns();
        job->runs->unseen_after = 0;
        add_stored(job, job->runs->begun_sequence);
        add_versions(job, job->runs->begun_sequence);
        catalogue_job_ask_storage(job);
}

/* True for a process that is older than the agent or than its broken connection: its run has begun before. */
static bool has_worked_here(const struct job *job, const struct ipc_hello *hello)
{
        for (const struct version *version = job->versions; version; version = version->next)
                for (size_t i = 0; i < version->part_count; i++)
                        if (IPC_NONCE_FAMILY(version->parts[i].nonce) == IPC_NONCE_FAMILY(hello->session_nonce))
                                return true;
        return false;
}

bool ancestry_begins(const struct catalogue *catalogue, const struct job *job, const struct ipc_hello *hello, bool known)
{
        if (!job->runs->has_newest || strcmp(job->runs->newest, hello->run))
                return true;
        /* Two runs in a row may have one name: some launchers give no new one. */
        return !known && !job->trainer_count && !has_worked_here(job, hello);
}

void ancestry_adopt(struct job *job, const char *run, uint64_t begun)
{
        if (job->runs->has_newest && job->runs->begun_sequence >= begun)
                return;
        strcpy(job->runs->newest, run);
        job->runs->has_newest = true;
        job->runs->begun_sequence = begun;
        job->runs->begun_ns = INT64_MIN / 2; /* it looked at storage long ago */
}

void ancestry_looked(struct job *job)
{
        if (!job->runs->has_newest || job->runs->has_looked)
                return; /* another run may have gone on since the first look */
        job->runs->has_looked = true;
        add_versions(job, job->runs->begun_sequence);
        if (os->now_ns() - job->runs->begun_ns < PROMPT_NS)
                job->runs->begun_sequence = moment(job);
        add_stored(job, job->runs->begun_sequence);
}

void ancestry_follow(const struct session *session, const char *run, uint64_t sequence)
{
        uint64_t until = moment(session->job);

        struct ancestor *ancestor;

        if (session->role != IPC_ROLE_TRAINER || strcmp(session->run, session->job->runs->newest))
                return;
        add(session->job, run, sequence > until ? sequence : until);
        ancestor = find(session->job, run);
        if (ancestor)
                ancestor->is_rival = false;
}

bool ancestry_run_covers(const struct job *job, const char *run, uint64_t sequence)
{
        const struct ancestor *ancestor = find(job, run);

        return !strcmp(job->runs->newest, run) || (ancestor && sequence <= ancestor->until);
}

bool ancestry_covers(const struct version *version, const char *run, uint64_t sequence)
{
        const struct job *job = version->job;

        if (!strcmp(version->run, run) || (version->ancestry->base_sequence && version->ancestry->base_sequence == sequence))
                return true;
        return job->runs->has_newest && version->ancestry->beginning == job->runs->beginning && !strcmp(version->run, job->runs->newest) &&
               ancestry_run_covers(job, run, sequence);
}

uint64_t ancestry_base(const struct version *version)
{
        const struct manifest *stored = job_stored(version->job, version->tag);

        return stored && ancestry_covers(version, stored->run, stored->sequence) ? stored->sequence : version->ancestry->base_sequence;
}

enum ancestry_order ancestry_compare(const struct version *version, const struct manifest *manifest)
{
        bool is_same_run = !strcmp(version->run, manifest->run);

        if (is_same_run && version->sequence == manifest->sequence)
                return ANCESTRY_SAME;
        if (is_same_run || version->stored)
                return version->sequence > manifest->sequence ? ANCESTRY_LATER : ANCESTRY_EARLIER;
        return ancestry_covers(version, manifest->run, manifest->sequence) ? ANCESTRY_LATER : ANCESTRY_EARLIER;
}

bool ancestry_is_of_newest(const struct version *version)
{
        const struct job *job = version->job;

        return job->runs->has_newest && version->ancestry->beginning == job->runs->beginning && !strcmp(version->run, job->runs->newest);
}

void ancestry_set_compared(struct version *version)
{
        version->ancestry->compared = version->job->runs->beginning + 1;
}

bool ancestry_is_compared(const struct version *version)
{
        return ancestry_is_of_newest(version) || version->ancestry->compared == version->job->runs->beginning + 1;
}

enum ancestry_order ancestry_note(struct catalogue *catalogue, struct version *version, const struct manifest *manifest)
{
        enum ancestry_order order = ancestry_compare(version, manifest);

        if (order == ANCESTRY_EARLIER && ancestry_is_of_newest(version) && strcmp(version->run, manifest->run))
                order = ANCESTRY_LATER; /* a rival has written the tag: this run still loads its own */
        if (order == ANCESTRY_EARLIER)
                version_replaced(catalogue, version);
        else
                ancestry_set_compared(version);
        return order;
}

enum nebula_status ancestry_judge(struct version *version, const struct manifest *manifest, struct nebula_error *error)
{
        const struct job *job = version->job;

        if (!manifest->sequence || strcmp(manifest->job, job->name) || version->stored)
                return NEBULA_OK;
        if (!ancestry_covers(version, manifest->run, manifest->sequence))
                return error_set(error, NEBULA_INVALID, 0,
                                 "run \"%.60s\"%s%.60s of job \"%.60s\" has made \"%.100s\" durable in this storage path, and run \"%.60s\" did not "
                                 "come after it: that checkpoint stays. If two jobs run at once, end one, or give it a path or a `job` name of "
                                 "its own", manifest->run, *manifest->host ? " on host " : "", manifest->host, job->name, version->tag,
                                 version->run);
        if (!version->is_spread && !strcmp(manifest->run, version->run) && manifest->sequence > version->sequence &&
            manifest->writing >= version->writing)
                return error_set(error, NEBULA_INVALID, 0, "a later writing of \"%.200s\" by the same run is durable in this storage path%s%.60s",
                                 version->tag, *manifest->host ? ", from host " : "", manifest->host);
        return NEBULA_OK;
}

enum nebula_status ancestry_check(struct catalogue *catalogue, struct version *version, const struct manifest *manifest,
                                 struct nebula_error *error)
{
        enum nebula_status status;

        catalogue_lock(catalogue);
        status = ancestry_judge(version, manifest, error);
        version->gives_way = status != NEBULA_OK;
        if (status && strcmp(manifest->run, version->run))
                ancestry_set_rival(version->job, manifest->run);
        catalogue_unlock(catalogue);
        return status;
}

void ancestry_give_way(struct catalogue *catalogue, struct version *version, const struct manifest *manifest, const char *why)
{
        if (strcmp(manifest->run, version->run))
                ancestry_set_rival(version->job, manifest->run);
        version->gives_way = true;
        version_fail(catalogue, version, NEBULA_INVALID, "%s", why);
}
