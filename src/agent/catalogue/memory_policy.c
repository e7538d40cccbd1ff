#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/catalogue.h"
#include "agent/catalogue/memory_policy.h"
#include "agent/catalogue/retention.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "image/image.h"
#include "os/os.h"

/* A load that finds the checkpoint takes so long, or less: to make pages meanwhile would slow it down. */
#define LOAD_NS SECOND_NS
#define LOAD_NS_PER_BYTE 4
#define LATE_SAVES 8 /* so many saves in a row must be in time before memory for a late one goes */
#define RESTORED_KEPT 2 /* ranks of one job, or two readers, may be one version apart */

/* Collects the job's versions that hold memory, with the facts for retention. leaves_leased: versions that readers lease are busy. The caller
 * frees the arrays. */
static size_t collect(struct job *job, bool leaves_leased, struct version ***ret_versions, struct retain_entry **ret_entries, bool **ret_drop)
{
        size_t count = 0, used = 0;

        for (struct version *version = job->live; version; version = version->next_live)
                count += version->in_memory;
        *ret_versions = calloc(count + 1, sizeof **ret_versions);
        *ret_entries = calloc(count + 1, sizeof **ret_entries);
        *ret_drop = calloc(count + 1, sizeof **ret_drop);
        if (!*ret_versions || !*ret_entries || !*ret_drop)
                return 0;
        for (struct version *version = job->live; version; version = version->next_live) {
                if (!version->in_memory)
                        continue;
                (*ret_versions)[used] = version;
                (*ret_entries)[used] = (struct retain_entry){
                        .order = order_entry(version->tag, version->sequence, &version->line),
                        .durable = version_is_safe(version),
                        .unsaved = version_unsaved(version),
                        .busy = version->pins > 0 || (leaves_leased && (version->leases > 0 || version->is_awaited)),
                };
                (*ret_entries)[used++].order.counts = lifecycle_complete(version->life.state) || version->failed_by_storage;
        }
        return used;
}

/* Whether a save of the job can use it again. A reader gives back what it has; a trainer keeps it. */
static bool serves_again(struct image *image)
{
        return !image->restored && !image->spilled && !image->exposed && !(image->kept && image_is_in_use(image));
}

static uint64_t job_bytes(const struct catalogue *catalogue, const struct job *job)
{
        uint64_t bytes = 0;

        for (struct image *image = catalogue->memory->images; image; image = image->next)
                if (image->job == job && serves_again(image))
                        bytes += image->capacity;
        return bytes;
}

/* Bytes of one version of this job: the newest, complete or not. */
static uint64_t version_bytes(const struct job *job)
{
        for (const struct version *version = job->versions; version; version = version->next) {
                uint64_t bytes = 0;

                for (size_t i = 0; i < version->file_count; i++)
                        if (version->files[i].image)
                                bytes += version->files[i].image->capacity;
                if (bytes && lifecycle_reached(version->life.state, NEBULA_STATE_COMMITTED))
                        return bytes;
        }
        return 0;
}

/* How many versions of a hinted file get memory ahead. Two, if the second save comes before the first version may leave memory. */
static unsigned hinted_versions(const struct job *job)
{
        return job->settings.retention_count == 1 && job->persist_path[0] ? 1 : 2;
}

static bool is_saving(const struct job *job)
{
        for (const struct version *version = job->live; version; version = version->next_live)
                if (version_open(version) && !version->is_remote)
                        return true;
        return false;
}

/* Bytes that versions leave to the next save. If the saves have not been late, storage will have the versions by then. */
static uint64_t leaving_bytes(struct job *job)
{
        struct version **versions;
        struct retain_entry *entries;
        bool *drop;
        size_t count = collect(job, true, &versions, &entries, &drop);
        uint64_t bytes = 0;

        for (size_t i = 0; i < count && job->persist_path[0] && !job->late_saves; i++) {
                entries[i].durable = true;
                entries[i].unsaved = false;
                entries[i].busy = versions[i]->leases > 0 || versions[i]->is_awaited;
        }
        if (count)
                retain_memory(entries, count, job->settings.retention_count - 1, drop);
        for (size_t i = 0; i < count; i++)
                for (size_t k = 0; drop[i] && k < versions[i]->file_count; k++)
                        if (versions[i]->files[k].image && serves_again(versions[i]->files[k].image))
                                bytes += versions[i]->files[k].image->capacity;
        free(versions);
        free(entries);
        free(drop);
        return bytes;
}

/* Bytes that the job needs until its next save has begun: those in use, and those of a version unless others leave as much to it. */
static uint64_t steady_bytes(const struct catalogue *catalogue, struct job *job)
{
        uint64_t used = job_bytes(catalogue, job) - memory_free_bytes(catalogue->memory, job), bytes = version_bytes(job);

        return is_saving(job) || leaving_bytes(job) >= bytes ? used : used + bytes;
}

/* Capacities that the job's sessions have hinted, each once for each of its versions, to `ret_list` if that is not NULL. */
static size_t hinted(const struct job *job, uint64_t *ret_list, uint64_t *ret_bytes)
{
        size_t count = 0;

        *ret_bytes = 0;
        for (const struct session *session = job->sessions; session; session = session->next)
                for (uint32_t i = 0; session->connection_count && !session->foreseen_ns && i < session->hint_count; i++)
                        for (unsigned k = 0; k < hinted_versions(job); k++, count++) {
                                *ret_bytes += session->hinted[i];
                                if (ret_list)
                                        ret_list[count] = session->hinted[i];
                        }
        return count;
}

void policy_want_spares(struct catalogue *catalogue, struct job *job)
{
        job->spare_due = catalogue->memory->spares_due = true;
}

static void hint(struct catalogue *catalogue, struct session *session, uint64_t size)
{
        uint64_t capacity = memory_capacity(size);

        if (session->hint_count == SESSION_HINTS_MAX || capacity < MEMORY_SPARE_LEAST ||
            capacity > catalogue->memory->budget / hinted_versions(session->job))
                return;
        session->hinted[session->hint_count++] = capacity;
        policy_want_spares(catalogue, session->job);
        pthread_cond_signal(&catalogue->pages);
}

void policy_hint(struct catalogue *catalogue, struct session *session, uint64_t size)
{
        if (session->are_foreseen)
                session->hint_count = 0;
        session->are_foreseen = false;
        session->foreseen_ns = 0;
        hint(catalogue, session, size);
}

void policy_foresee(struct catalogue *catalogue, struct session *session, uint64_t version_id)
{
        const struct version *version = catalogue_version(catalogue, version_id);
        uint64_t bytes = 0;

        if (!version || version->job != session->job || version->world != session->world || !version->stored || version->in_memory)
                return;
        if (session->role != IPC_ROLE_TRAINER || session->has_begun || (session->hint_count && !session->are_foreseen))
                return;
        session->hint_count = 0;
        session->are_foreseen = true;
        for (size_t i = 0; i < version->file_count; i++)
                if (version->files[i].rank == session->rank) {
                        hint(catalogue, session, version->files[i].size);
                        bytes += version->files[i].size;
                }
        session->foreseen_ns = os->now_ns() + LOAD_NS + (int64_t)(bytes * LOAD_NS_PER_BYTE);
        catalogue_signal_job_work(catalogue, session->job);
}

int64_t policy_foreseen_due(struct catalogue *catalogue, struct job *job, int64_t now_ns)
{
        int64_t due = INT64_MAX;

        for (struct session *session = job->sessions; session; session = session->next) {
                if (!session->foreseen_ns)
                        continue;
                if (now_ns < session->foreseen_ns) {
                        due = session->foreseen_ns < due ? session->foreseen_ns : due;
                        continue;
                }
                session->foreseen_ns = 0;
                policy_want_spares(catalogue, job);
                pthread_cond_signal(&catalogue->pages);
        }
        return due;
}

void policy_forget_hints(struct job *job)
{
        for (struct session *session = job->sessions; session; session = session->next)
                session->hint_count = 0;
}

static void trim_free(struct catalogue *catalogue, struct job *job)
{
        struct image *image = memory_next_free(catalogue->memory, NULL, job), *next;
        uint64_t bytes = image ? job_bytes(catalogue, job) : 0, limit = image ? steady_bytes(catalogue, job) : 0, soon;

        hinted(job, NULL, &soon);
        limit += soon;

        for (; image && bytes > limit; image = next) {
                next = memory_next_free(catalogue->memory, image, job);
                bytes -= image->capacity;
                memory_doom(catalogue->memory, image);
        }
}

static bool holds_image(const struct version *version)
{
        for (size_t i = 0; i < version->file_count; i++)
                if (version->files[i].image || version->files[i].sparse)
                        return true;
        return false;
}

/* Whether no thread uses it and it holds no image. A tombstone holds images only while storage is read. */
static bool at_rest(const struct version *version)
{
        return !version->pins && !version->leases && !holds_image(version);
}

static void find_tombstones(struct job *job)
{
        for (struct version **link = &job->live, *version; (version = *link);) {
                if (version->in_memory || !version->recorded || version->life.state < NEBULA_STATE_COMMITTED || !at_rest(version)) {
                        link = &version->next_live;
                        continue;
                }
                *link = version->next_live;
                version->is_tombstone = true;
                job->tombstone_count++;
        }
}

static void trim_tombstones(struct catalogue *catalogue, struct job *job)
{
        struct version *version = job->tombstone_count > TOMBSTONE_MAX ? job->versions : NULL, *next;
        size_t count = 0;

        for (; version; version = next) {
                next = version->next;
                if (version->is_tombstone && at_rest(version) && ++count > TOMBSTONE_MAX)
                        version_free(catalogue, version);
        }
}

/* `keep`: complete versions to keep. */
static void retain(struct catalogue *catalogue, struct job *job, size_t keep)
{
        struct version **versions;
        struct retain_entry *entries;
        bool *drop;
        size_t count = collect(job, true, &versions, &entries, &drop);

        if (count && !catalogue_resumes(job))
                retain_memory(entries, count, keep, drop);
        for (size_t i = 0; i < count; i++)
                if (drop[i])
                        version_forget_memory(catalogue, versions[i]);
        if (!is_saving(job)) /* else the save will need the free images */
                trim_free(catalogue, job);
        find_tombstones(job);
        trim_tombstones(catalogue, job);
        free(versions);
        free(entries);
        free(drop);
}

/* If saves are late, memory for two versions stays in any case. The older one stays there, too: other nodes may lose the newest before
 * their peers have copies of it. */
void policy_retain(struct catalogue *catalogue, struct job *job)
{
        retain(catalogue, job, job->settings.retention_count == 1 && job->late_saves ? 2 : job->settings.retention_count);
}

/* If storage is sometimes slower than the saves, the memory of a late save stays for the next ones that are late. */
void policy_make_way(struct catalogue *catalogue, const struct version *version)
{
        struct job *job = version->job;
        uint32_t older = job->settings.retention_count - 1, held = 0;

        retain(catalogue, job, older);
        if (version->file_count || version->loans)
                return;
        for (const struct version *other = job->live; other; other = other->next_live)
                held += other->in_memory && (lifecycle_complete(other->life.state) || other->failed_by_storage);
        if (held > older)
                job->late_saves = LATE_SAVES;
        else if (job->late_saves)
                job->late_saves--;
}

bool policy_release(struct catalogue *catalogue, struct job *job, bool keeps_newest, const char *why)
{
        struct version **versions;
        struct retain_entry *entries;
        bool *drop, is_any = false;
        size_t count = collect(job, false, &versions, &entries, &drop);
        int64_t newest = count ? retain_newest(entries, count) : -1;

        for (size_t i = 0; i < count; i++) {
                if (!entries[i].order.counts || !entries[i].durable || entries[i].busy || (keeps_newest && (int64_t)i == newest))
                        continue;
                if (why)
                        finding_note(catalogue, job, FINDING_LEFT_MEMORY, versions[i]->tag, "it is durable, and left memory: %s", why);
                version_forget_memory(catalogue, versions[i]);
                is_any = true;
        }
        free(versions);
        free(entries);
        free(drop);
        return is_any;
}

/* Drops what was read from storage of a file of a version without pins. False: there is nothing. */
static bool drop_restored(struct catalogue *catalogue, struct agent_file *file)
{
        struct image **image = file->sparse ? &file->sparse : &file->image;

        if (file->reading || !*image || !(*image)->restored)
                return false;
        memory_drop(catalogue->memory, *image);
        *image = NULL;
        return true;
}

/* Images that were read from storage serve later readers of the same version. When newer versions exist, there are
 * hardly any such readers. */
static void trim_restored(struct catalogue *catalogue, struct job *job)
{
        size_t count = 0;

        for (struct version *version = job->versions; version; version = version->next) {
                bool has_any = false, is_old = count >= RESTORED_KEPT;

                for (size_t i = 0; i < version->file_count; i++) {
                        struct agent_file *file = &version->files[i];

                        has_any = has_any || file->sparse || (file->image && file->image->restored);
                        if (is_old && !version->pins && drop_restored(catalogue, file))
                                pthread_cond_signal(&catalogue->pages);
                }
                count += has_any;
        }
}

void policy_tidy(struct catalogue *catalogue, struct job *job)
{
        trim_restored(catalogue, job);
        find_tombstones(job);
        trim_tombstones(catalogue, job);
}

bool policy_drop_restored(struct catalogue *catalogue)
{
        for (struct job *job = catalogue->jobs; job; job = job->next)
                for (struct version *version = job->versions; version; version = version->next)
                        for (size_t i = 0; !version->pins && i < version->file_count; i++)
                                if (drop_restored(catalogue, &version->files[i]))
                                        return true;
        return false;
}

bool policy_drop_spare(struct catalogue *catalogue)
{
        struct image *image = memory_next_free(catalogue->memory, NULL, NULL);

        if (image)
                memory_doom(catalogue->memory, image);
        return image || policy_drop_restored(catalogue);
}

bool policy_reclaim(struct catalogue *catalogue)
{
        if (policy_drop_spare(catalogue))
                return true;
        for (struct job *job = catalogue->jobs; job; job = job->next) {
                struct version **versions;
                struct retain_entry *entries;
                bool *drop;
                size_t count = collect(job, false, &versions, &entries, &drop);
                int64_t victim = count ? retain_victim(entries, count) : -1;

                if (victim >= 0) {
                        log_event(LOG_LEVEL_WARN, "%s leaves memory: the memory tier is full", versions[victim]->tag);
                        version_forget_memory(catalogue, versions[victim]);
                }
                free(versions);
                free(entries);
                free(drop);
                if (victim >= 0)
                        return true;
        }
        return false;
}

/* Whether no image of the version is being written to, or written to storage: the kernel does not join pages that a disk is reading. */
static bool is_at_rest(const struct version *version)
{
        return version->in_memory && lifecycle_complete(version->life.state) && !version_unsaved(version);
}

static int by_value(const void *a, const void *b)
{
        uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;

        return left < right ? -1 : left > right;
}

/* The sorted capacities of the job's free images that are not too small; or, if version is not NULL, of the
 * version's images. NULL: an allocation failed. */
static uint64_t *capacities(const struct catalogue *catalogue, const struct job *job, const struct version *version, size_t *ret_count)
{
        const struct memory *memory = catalogue->memory;
        size_t most = version ? version->file_count : 0, count = 0;
        uint64_t *list;

        for (const struct image *image = NULL; !version && (image = memory_next_free(memory, image, job));)
                most++;
        list = malloc((most + 1) * sizeof *list);
        for (const struct image *image = NULL; list && !version && (image = memory_next_free(memory, image, job));)
                if (image->capacity >= MEMORY_SPARE_LEAST)
                        list[count++] = image->capacity;
        for (size_t i = 0; list && version && i < version->file_count; i++)
                if (version->files[i].image && version->files[i].image->capacity >= MEMORY_SPARE_LEAST)
                        list[count++] = version->files[i].image->capacity;
        if (list)
                qsort(list, count, sizeof *list, by_value);
        *ret_count = count;
        return list;
}

/* The first of the version's capacities for which there is no free image; 0: there is one for each. */
static uint64_t first_lacking(const uint64_t *wanted, size_t wanted_count, const uint64_t *have, size_t have_count)
{
        size_t at = 0;

        for (size_t i = 0; i < wanted_count; i++) {
                while (at < have_count && have[at] < wanted[i])
                        at++;
                if (at == have_count || have[at] != wanted[i])
                        return wanted[i];
                at++;
        }
        return 0;
}

/* The first of `wanted` (sorted in place) for which the job has no free image; 0: none. */
static uint64_t lacking(const struct catalogue *catalogue, const struct job *job, uint64_t *wanted, size_t count)
{
        size_t have_count;
        uint64_t *have = capacities(catalogue, job, NULL, &have_count), result = 0;

        qsort(wanted, count, sizeof *wanted, by_value);
        if (have)
                result = first_lacking(wanted, count, have, have_count);
        free(have);
        return result;
}

static size_t remove_one(uint64_t *wanted, size_t count, const struct image *image)
{
        for (size_t i = 0; image && i < count; i++)
                if (wanted[i] == image->capacity) {
                        wanted[i] = wanted[count - 1];
                        return count - 1;
                }
        return count;
}

/* Removes the capacities of images that the job's unfinished versions have: saves have taken them. */
static size_t remove_taken(const struct job *job, uint64_t *wanted, size_t count)
{
        for (const struct version *version = job->live; version; version = version->next_live) {
                if (version->life.state == NEBULA_STATE_FAILED || lifecycle_complete(version->life.state))
                        continue;
                for (const struct image_loan *loan = version->loans; loan; loan = loan->next)
                        count = remove_one(wanted, count, loan->image);
                for (size_t i = 0; i < version->file_count; i++)
                        count = remove_one(wanted, count, version->files[i].image);
        }
        return count;
}

/* The capacities of the spare images that the session has hinted and does not know yet. The caller frees the list. NULL: none, or no memory. */
static uint64_t *unknown_spares(const struct catalogue *catalogue, const struct session *session, size_t *ret_count)
{
        unsigned versions = hinted_versions(session->job);
        size_t count = (size_t)session->hint_count * versions;
        uint64_t *wanted = count ? malloc(count * sizeof *wanted) : NULL;

        *ret_count = 0;
        if (!wanted)
                return NULL;
        for (size_t i = 0; i < count; i++)
                wanted[i] = session->hinted[i / versions];
        for (const struct image *image = catalogue->memory->images; image; image = image->next)
                if (image->owner_nonce == session->nonce)
                        count = remove_one(wanted, count, image);
        *ret_count = count;
        return wanted;
}

/* Whether a process that lives may have the image mapped. */
static bool is_known(struct catalogue *catalogue, const struct image *image)
{
        const struct session *owner = image->owner_nonce ? catalogue_session(catalogue, image->owner_nonce) : NULL;

        return owner && owner->connection_count;
}

struct image *policy_spare_image(struct catalogue *catalogue, const struct session *session, uint32_t *ret_left_count)
{
        struct image *image = NULL;
        uint64_t *wanted;
        size_t count;

        wanted = unknown_spares(catalogue, session, &count);
        *ret_left_count = (uint32_t)count;
        while (count && (image = memory_next_free(catalogue->memory, image, session->job)))
                if (!is_known(catalogue, image) && !image->faulting && remove_one(wanted, count, image) < count)
                        break;
        *ret_left_count -= image != NULL;
        free(wanted);
        return image;
}

static uint64_t hinted_lacking(const struct catalogue *catalogue, const struct job *job)
{
        uint64_t bytes, result = 0, *wanted;
        size_t count = hinted(job, NULL, &bytes);

        wanted = count ? malloc(count * sizeof *wanted) : NULL;
        if (wanted) {
                hinted(job, wanted, &bytes);
                count = remove_taken(job, wanted, count);
                result = lacking(catalogue, job, wanted, count);
        }
        free(wanted);
        return result;
}

/* Spare images are made only while the job trains, and at most up to the steady number. A small image is made as soon as it is needed. */
uint64_t policy_spare_bytes(struct catalogue *catalogue, struct job *job)
{
        uint64_t soon = hinted_lacking(catalogue, job), bytes = version_bytes(job), steady, own, need = 0;
        const struct version *newest = job->versions;
        uint64_t *wanted;
        size_t wanted_count;

        if (soon)
                return soon;
        if (!bytes || !job->trainer_count || memory_free_bytes(catalogue->memory, job) >= bytes)
                return 0;
        steady = steady_bytes(catalogue, job);
        own = job_bytes(catalogue, job);
        if (own >= steady)
                return 0;
        while (newest && !lifecycle_reached(newest->life.state, NEBULA_STATE_COMMITTED))
                newest = newest->next;
        if (!newest)
                return 0;
        wanted = capacities(catalogue, job, newest, &wanted_count);
        if (wanted)
                need = lacking(catalogue, job, wanted, wanted_count);
        free(wanted);
        return own + need <= steady ? need : 0;
}

struct image *policy_small_image(const struct catalogue *catalogue)
{
        int64_t now_ns;

        if (!catalogue->memory->large_count)
                return NULL;
        now_ns = os->now_ns();
        for (struct image *image = NULL; (image = memory_next_free(catalogue->memory, image, NULL));)
                if (image->job && image_is_small(image, now_ns))
                        return image;
        for (const struct job *job = catalogue->jobs; job; job = job->next)
                for (const struct version *version = job->live; version; version = version->next_live)
                        for (size_t i = 0; is_at_rest(version) && i < version->file_count; i++)
                                if (version->files[i].image && image_is_small(version->files[i].image, now_ns))
                                        return version->files[i].image;
        return NULL;
}
