#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/commit.h"
#include "agent/commit/commit_end.h"
#include "agent/commit/commit_rule.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/memory/memory_directory.h"
#include "agent/memory/slots_private.h"
#include "agent/memory/survival_log.h"
#include "agent/memory/survival_record.h"
#include "os/os.h"

#define NOTE_BYTES_MAX (256u << 20)
#define LOG_GROWS_TO (64u << 10) /* a log that is larger, by more than twice its first record, is replaced by a new one */

static void lose_log(struct version *version, int result)
{
        log_event(LOG_LEVEL_WARN, "%s would not survive the agent, because its survival log cannot be written to the "
                  "memory directory: %s", version->tag, os_error_text(result));
        version->survival->bytes = 0;
}

static void remove_log(struct catalogue *catalogue, struct version *version)
{
        if (!version->survival->is_logged)
                return;
        memory_files_remove(catalogue->memory, version->survival->file, version->id, ".version");
        memory_file_drop(version->survival->file);
        version->survival->file = NULL;
        version->survival->is_logged = false;
        version->survival->bytes = 0;
}

void survival_log_write(struct catalogue *catalogue, struct version *version)
{
        struct memory_file_task task = { .id = version->id, .suffix = ".version", .is_looked_for = !version_open(version) };
        size_t size;
        bool appends;

        if (!catalogue->memory->directory[0] || version->survival->is_forgotten)
                return;
        /* The next agent must not take a version that gave way for the newest writing of its tag. */
        if (!version->in_memory || (version->gives_way && version->life.state == NEBULA_STATE_FAILED)) {
                remove_log(catalogue, version);
                return;
        }
        if (version->files_changed)
                version->survival->file_count = 0;
        version->files_changed = false;
        appends = version->survival->bytes && version->survival->bytes < LOG_GROWS_TO + 2 * version->survival->begun_bytes;
        if (!version->survival->file)
                version->survival->file = memory_file_new();
        task.kind = appends ? MEMORY_FILE_APPEND : MEMORY_FILE_REPLACE;
        task.file = version->survival->file;
        task.offset = appends ? version->survival->bytes : 0;
        task.data = version->survival->file ? survival_record_format(version, appends ? version->survival->file_count : 0, &size) : NULL;
        task.size = task.data ? size : 0;
        if (!task.data || !memory_files_add(catalogue->memory, &task)) {
                lose_log(version, -ENOMEM);
                return;
        }
        version->survival->begun_bytes = appends ? version->survival->begun_bytes : size;
        version->survival->bytes = task.offset + size;
        version->survival->file_count = version->file_count;
        version->survival->is_logged = true;
}

void survival_log_forget(struct catalogue *catalogue)
{
        for (struct job *job = catalogue->jobs; job; job = job->next)
                for (struct version *version = job->versions; version; version = version->next) {
                        remove_log(catalogue, version);
                        version->survival->is_forgotten = true;
                }
}

void survival_log_mend(struct catalogue *catalogue, const struct memory_file_task *failed)
{
        struct version *version = failed->file ? catalogue_version(catalogue, failed->id) : NULL;

        if (!version || version->survival->file != failed->file)
                return;
        if (failed->kind == MEMORY_FILE_REPLACE) {
                lose_log(version, failed->result);
        } else if (version->survival->bytes) {
                version->survival->bytes = 0;
                survival_log_write(catalogue, version);
        }
}

/* False: the log may be good, but cannot be read at the moment. */
static bool adopt_log(struct catalogue *catalogue, const char *path, uint64_t id)
{
        struct nebula_error error = { 0 };
        enum nebula_status status;
        struct os_stat stat;
        char *data;
        size_t size;
        int result = os->stat(path, false, &stat);

        if (!result && (stat.kind != OS_KIND_FILE || stat.uid != os->uid()))
                return true;
        if (!result)
                result = os_read_file(path, NOTE_BYTES_MAX, &data, &size);
        if (result < 0)
                return result == -ENOENT || result == -EFBIG;
        status = survival_record_read(catalogue, id, data, size, &error);
        free(data);
        if (status)
                log_event(LOG_LEVEL_WARN, "a version in memory could not be adopted: %s: %s", path, error.message);
        if (status == NEBULA_CORRUPT)
                os->unlink(path);
        return !status || status == NEBULA_CORRUPT;
}

/* The job's list must be in the order of creation, newest first. */
static void sort_versions(struct job *job)
{
        struct version *sorted = NULL;

        while (job->versions) {
                struct version *version = job->versions, **link = &sorted;

                job->versions = version->next;
                /* Open versions have no sequence yet and are the newest. */
                while (*link && ((*link)->sequence ? (*link)->sequence : UINT64_MAX) >
                                        (version->sequence ? version->sequence : UINT64_MAX))
                        link = &(*link)->next;
                version->next = *link;
                *link = version;
        }
        job->versions = job->live = sorted;
        for (struct version *version = sorted; version; version = version->next)
                version->next_live = version->next;
}

static void remove_debris(struct catalogue *catalogue, const char *name)
{
        char path[MEMORY_PATH_MAX];
        struct os_stat stat;
        uint64_t id;

        if (memory_image_name(name, ".img", &id)) {
                if (memory_find(catalogue->memory, id))
                        return;
        } else if (!memory_image_name(name, ".tmp", &id)) {
                return;
        }
        if ((size_t)snprintf(path, sizeof path, "%s/%s", catalogue->memory->directory, name) >= sizeof path)
                return;
        if (!os->stat(path, false, &stat) && stat.kind == OS_KIND_FILE && stat.uid == os->uid() && !os->unlink(path))
                log_event(LOG_LEVEL_INFO, "removed %s, the rest of an interrupted save", name);
}

/* False: some names could not be read. */
static bool each_name(struct catalogue *catalogue, bool notes)
{
        char name[300], path[MEMORY_PATH_MAX];
        struct os_dir *dir;
        bool all = true;
        uint64_t id;
        int result;

        if (os->opendir(catalogue->memory->directory, &dir) < 0)
                return false;
        while ((result = os->readdir(dir, name, sizeof name)) > 0) {
                if (!notes) {
                        remove_debris(catalogue, name);
                } else if (memory_image_name(name, ".version", &id)) {
                        memory_path(catalogue->memory, id, ".version", path);
                        all = adopt_log(catalogue, path, id) && all;
                }
        }
        os->closedir(dir);
        return all && !result;
}

bool survival_log_rival_has(const struct catalogue *catalogue, const char *persist_path)
{
        const char *directory = catalogue->memory->rival_directory;
        char name[300], path[MEMORY_PATH_MAX + 300], *data;
        struct os_dir *dir;
        bool found = false;
        size_t size;
        uint64_t id;

        if (!*directory || !*persist_path || os->opendir(directory, &dir) < 0)
                return false;
        while (!found && os->readdir(dir, name, sizeof name) > 0) {
                snprintf(path, sizeof path, "%s/%s", directory, name);
                if (!memory_image_name(name, ".version", &id) || os_read_file(path, NOTE_BYTES_MAX, &data, &size))
                        continue;
                found = memmem(data, size, persist_path, strlen(persist_path)) != NULL;
                free(data);
        }
        os->closedir(dir);
        return found;
}

void survival_log_adopt_all(struct catalogue *catalogue)
{
        bool all;

        if (!catalogue->memory->directory[0])
                return;
        all = each_name(catalogue, true);
        if (!all)
                log_event(LOG_LEVEL_WARN, "not all of %s could be read: files that were not adopted stay there", catalogue->memory->directory);
        /* Images of refused logs are still listed and have no users. */
        for (struct image *image = catalogue->memory->images, *next; image; image = next) {
                next = image->next;
                image->exposed = true; /* an earlier agent may have handed it to a loader */
                if (!image->users && all)
                        memory_doom(catalogue->memory, image);
                else if (!image->users)
                        memory_leave(catalogue->memory, image);
        }
        if (all)
                each_name(catalogue, false);
        memory_directory_measure(catalogue->memory); /* the adopted images take space that was not free before */
        catalogue_lock(catalogue);
        for (struct job *job = catalogue->jobs; job; job = job->next) {
                sort_versions(job);
                survival_log_check_owners(catalogue, job);
        }
        catalogue_unlock(catalogue);
}

/* False: the version is gone. */
static bool check_owners(struct catalogue *catalogue, struct version *version, bool *waiting)
{
        /* The agent cannot see this trainer's process; its next request shows that it lives. */
        int64_t unseen_ns = (int64_t)catalogue->give_up_s * SECOND_NS;

        for (size_t i = 0; i < version->part_count && version_open(version); i++) {
                const struct part *part = &version->parts[i];
                size_t before = version->part_count;

                if (part->spoken_for || catalogue_session(catalogue, part->nonce))
                        continue;
                if (part->seen_pid ? os->alive(part->seen_pid) : os->now_ns() < version->adopted_ns + unseen_ns) {
                        *waiting = true;
                        continue;
                }
                if (!commit_rank_ended(catalogue, version, part->rank))
                        return false;
                if (version->part_count < before)
                        i--;
        }
        if (version_open(version))
                commit_check(catalogue, version);
        if (version_open(version) && !version->is_spread && !*waiting && !version->job->trainer_count)
                version_fail(catalogue, version, NEBULA_FAILED, "all trainers ended before checkpoint \"%s\" was complete",
                             version->tag);
        return true;
}

bool survival_log_check_owners(struct catalogue *catalogue, struct job *job)
{
        bool any = false;

        for (struct version *version = job->live, *next; version; version = next) {
                bool waiting = false;

                next = version->next_live;
                if (!version->adopted || !version_open(version) || !check_owners(catalogue, version, &waiting))
                        continue;
                any = any || waiting;
                next = version->next_live; /* completing this version may have forgotten the next one */
        }
        return any;
}
