#include "agent/persist/memory_scrub.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/findings.h"
#include "agent/memory/memory.h"
#include "agent/persist/due.h"
#include "agent/persist/persist_seal.h"
#include "image/image.h"
#include "os/os.h"
#include "os/thread.h"
#include "sum/sum.h"

#define REST_MS 16 /* after a chunk of 4 MiB: at most 250 MiB/s */
#define PIN_WAIT_MS 100

/* One file of a version, which is pinned. */
struct target {
        struct version *version;
        char name[IPC_NAME_MAX];
        uint64_t size, first; /* first: the chunk with which it goes on */
};

/* Nothing is being saved, written, or waiting for memory. */
static bool is_idle(const struct catalogue *catalogue)
{
        if (catalogue->stopping || catalogue->memory->wanting || due_any(catalogue))
                return false;
        for (const struct job *job = catalogue->jobs; job; job = job->next)
                for (const struct version *version = job->live; version; version = version->next_live)
                        if (version->loans)
                                return false;
        return true;
}

static int64_t due_at(const struct catalogue *catalogue, const struct version *version, const struct agent_file *file)
{
        if (!version->in_memory || !lifecycle_complete(version->life.state) || !file->image || file->image->restored || !file->chunks || !file->size)
                return INT64_MAX;
        return file->image->scrubbed_ns + (int64_t)catalogue->check_memory_s * SECOND_NS;
}

/* The file that is due first; its time, or INT64_MAX. */
static int64_t find(const struct catalogue *catalogue, struct version **ret_version, struct agent_file **ret_file)
{
        int64_t first = INT64_MAX;

        for (const struct job *job = catalogue->jobs; job; job = job->next)
                for (struct version *version = job->live; version; version = version->next_live)
                        for (size_t i = 0; i < version->file_count; i++)
                                if (due_at(catalogue, version, &version->files[i]) < first) {
                                        first = due_at(catalogue, version, &version->files[i]);
                                        *ret_version = version;
                                        *ret_file = &version->files[i];
                                }
        return first;
}

/* Lock held. Other threads may be handing the version's files out: they end first. */
static void condemn(struct catalogue *catalogue, const struct target *target, const struct image *image, uint64_t chunk)
{
        struct version *version = target->version;
        const struct agent_file *file;

        while (version->pins > 1 && !catalogue->stopping)
                catalogue_wait(catalogue, &catalogue->moved, PIN_WAIT_MS);
        file = version_file(version, target->name);
        if (!file || file->image != image || version->pins > 1)
                return;
        finding_note(catalogue, version->job, FINDING_ROTTEN, version->tag,
                     "bytes of \"%.120s\" in memory have changed between byte %" PRIu64 " and %" PRIu64 ": %s. Test this node's memory", target->name,
                     chunk * IMAGE_CHUNK_BYTES, (chunk + 1) * IMAGE_CHUNK_BYTES,
                     version_is_safe(version) ? "the version leaves memory, and storage has it" :
                     version->stored ? "the version leaves memory, and storage has a damaged copy" : "the version is lost, because only memory had it");
        if (version->stored)
                version_forget_memory(catalogue, version);
        else
                version_fail(catalogue, version, NEBULA_CORRUPT, "bytes of \"%.120s\" in memory have changed", target->name);
        catalogue_signal(catalogue);
}

/* Returns the chunk that is wrong, or the number of chunks; *ret_next: the chunk with which a later call goes on. Without the lock. */
static uint64_t compare(struct catalogue *catalogue, const struct target *target, const struct image *image, const uint64_t *chunks, uint64_t *ret_next)
{
        uint64_t count = (target->size + IMAGE_CHUNK_BYTES - 1) / IMAGE_CHUNK_BYTES, i = target->first;
        bool is_idle_still = true;

        for (; i < count && is_idle_still; i++) {
                const char *at = (const char *)image->data + i * IMAGE_CHUNK_BYTES;
                uint64_t size = target->size - i * IMAGE_CHUNK_BYTES < IMAGE_CHUNK_BYTES ? target->size - i * IMAGE_CHUNK_BYTES : IMAGE_CHUNK_BYTES;

                if (sum_crc64(0, at, size) != chunks[i] && sum_crc64(0, at, size) != chunks[i])
                        return i;
                catalogue_lock(catalogue);
                if (i + 1 < count)
                        catalogue_wait(catalogue, &catalogue->moved, REST_MS);
                is_idle_still = is_idle(catalogue);
                catalogue_unlock(catalogue);
        }
        *ret_next = i;
        return count;
}

/* Lock held on entry and return, released meanwhile. */
static void scrub(struct catalogue *catalogue, struct version *version, struct agent_file *file)
{
        struct target target = { .version = version, .size = file->size, .first = file->image->scrub_next };
        uint64_t count = (file->size + IMAGE_CHUNK_BYTES - 1) / IMAGE_CHUNK_BYTES, wrong = count, next = 0, *chunks = NULL;
        struct image *image = NULL;

        memcpy(target.name, file->name, sizeof target.name);
        file->image->scrubbed_ns = os->now_ns(); /* also if it cannot be mapped: not again at once */
        version->pins++;
        version->job->pins++;
        catalogue_unlock(catalogue);
        if (!storage_seal(catalogue, version, target.name, &image, &chunks, NULL))
                wrong = compare(catalogue, &target, image, chunks, &next);
        catalogue_lock(catalogue);
        if (image && wrong < count)
                condemn(catalogue, &target, image, wrong);
        else if (image) {
                image->scrub_next = next < count ? next : 0;
                image->scrubbed_ns = next < count ? 0 : os->now_ns();
        }
        version->pins--;
        version->job->pins--;
        catalogue_unlock(catalogue);
        if (image)
                storage_unseal(catalogue, image);
        free(chunks);
        catalogue_lock(catalogue);
}

static void *scrub_main(void *argument)
{
        struct catalogue *catalogue = argument;
        struct version *version;
        struct agent_file *file;

        catalogue_lock(catalogue);
        while (is_idle(catalogue) && find(catalogue, &version, &file) <= os->now_ns())
                scrub(catalogue, version, file);
        catalogue->is_scrubbing = false;
        catalogue->lane_count--;
        catalogue_signal(catalogue);
        catalogue_unlock_last(catalogue);
        return NULL;
}

int64_t memory_scrub_look(struct catalogue *catalogue, int64_t now_ns)
{
        struct version *version;
        struct agent_file *file;
        int64_t due;

        if (catalogue->is_scrubbing || !catalogue->check_memory_s)
                return INT64_MAX;
        if (now_ns < catalogue->scrub_look_ns)
                return catalogue->scrub_look_ns;
        due = find(catalogue, &version, &file);
        if (due > now_ns) {
                catalogue->scrub_look_ns = now_ns + (int64_t)catalogue->check_memory_s * SECOND_NS; /* none that comes meanwhile is due before */
                if (due < catalogue->scrub_look_ns)
                        catalogue->scrub_look_ns = due;
                return catalogue->scrub_look_ns;
        }
        if (!is_idle(catalogue) || os_thread_start(NULL, scrub_main, catalogue, true))
                return now_ns + SECOND_NS;
        catalogue->is_scrubbing = true;
        catalogue->lane_count++;
        return INT64_MAX;
}

void memory_scrub_soon(struct catalogue *catalogue, struct image *image)
{
        image->scrubbed_ns = 0;
        image->scrub_next = 0;
        catalogue->scrub_look_ns = 0;
        catalogue_signal(catalogue);
}
