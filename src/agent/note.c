#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit.h"
#include "agent/log.h"
#include "agent/note.h"
#include "base/error.h"
#include "os/os.h"
#include "store/document.h"

#define NOTE_BYTES_MAX (32u << 20)

static void note_path(const struct catalogue *catalogue, uint64_t id, const char *suffix, char path[MEMORY_PATH_MAX])
{
        snprintf(path, MEMORY_PATH_MAX, "%s/%016" PRIx64 "%s", catalogue->memory.directory, id, suffix);
}

static json_t *parts_of(const struct version *version)
{
        json_t *parts = json_array();

        for (size_t i = 0; i < version->part_count; i++) {
                const struct part *part = &version->parts[i];

                json_array_append_new(parts, json_pack("{s:I, s:I, s:o, s:b, s:b, s:I, s:f, s:f}", "rank", (json_int_t)part->rank,
                                                       "pid", (json_int_t)part->pid, "nonce", document_hex(part->nonce), "closed",
                                                       part->closed, "idle", part->spoken_for, "files",
                                                       (json_int_t)part->file_count, "begun", part->begun, "captured",
                                                       part->captured));
        }
        return parts;
}

static json_t *file_json(const char *name, uint32_t rank, uint64_t size, enum ipc_format format, uint64_t generation,
                         const struct image *image)
{
        return json_pack("{s:s, s:I, s:I, s:s, s:I, s:o}", "name", name, "rank", (json_int_t)rank, "size", (json_int_t)size,
                         "format", format == IPC_FORMAT_ZIP ? "zip" : "raw", "generation", (json_int_t)generation, "image",
                         document_hex(image && image->named ? image->id : 0));
}

static json_t *files_of(const struct version *version)
{
        json_t *files = json_array();

        for (size_t i = 0; i < version->file_count; i++) {
                const struct agent_file *file = &version->files[i];

                json_array_append_new(files, file_json(file->name, file->rank, file->size, file->format, file->generation,
                                                       file->image));
        }
        return files;
}

static json_t *grants_of(const struct version *version)
{
        json_t *grants = json_array();

        for (const struct grant *grant = version->grants; grant; grant = grant->next) {
                json_t *object = file_json(grant->name, grant->rank, grant->size, grant->format, version->generation, grant->image);

                json_object_set_new(object, "nonce", document_hex(grant->nonce));
                json_array_append_new(grants, object);
        }
        return grants;
}

/* Without the storage path, an agent that takes over could not go on persisting. */
static json_t *job_of(const struct job *job)
{
        return json_pack("{s:s, s:s, s:s, s:s, s:f, s:I, s:I, s:I, s:I, s:I}", "persist_path", job->persist_path, "name", job->name,
                         "output_dir", job->output_dir, "run", job->run, "interval", job->persist_interval_s, "retention",
                         (json_int_t)job->retention_count, "keep_last", (json_int_t)job->keep_last, "keep_every",
                         (json_int_t)job->keep_every, "world", (json_int_t)job->world, "local_world", (json_int_t)job->local_world);
}

static int write_note(struct catalogue *catalogue, const struct version *version, const char *text, size_t size)
{
        char path[MEMORY_PATH_MAX], temporary[MEMORY_PATH_MAX];
        int fd, result;

        note_path(catalogue, version->id, ".version", path);
        note_path(catalogue, version->id, ".tmp", temporary);
        fd = os->open(temporary, OS_WRITE | OS_CREATE | OS_TRUNCATE | OS_NOFOLLOW);
        if (fd < 0)
                return fd;
        result = os_write_at(fd, text, size, 0);
        os->close(fd);
        if (!result)
                result = os->rename(temporary, path);
        if (result < 0)
                os->unlink(temporary);
        return result;
}

void note_write(struct catalogue *catalogue, struct version *version)
{
        json_t *body;
        char *text;
        size_t size;
        int result = -ENOMEM, failed = 0;

        if (!catalogue->memory.directory[0] || !version->in_memory)
                return;
        body = document_new("version");
        if (body) {
                failed |= json_object_set_new(body, "tag", json_string(version->tag));
                failed |= json_object_set_new(body, "run", json_string(version->run));
                failed |= json_object_set_new(body, "generation", json_integer((json_int_t)version->generation));
                failed |= json_object_set_new(body, "sequence", json_integer((json_int_t)version->sequence));
                failed |= json_object_set_new(body, "world", json_integer((json_int_t)version->world));
                failed |= json_object_set_new(body, "goal", json_integer((json_int_t)version->file_goal));
                failed |= json_object_set_new(body, "writing", json_integer((json_int_t)version->writing));
                failed |= json_object_set_new(body, "spread", json_boolean(version->spread));
                failed |= json_object_set_new(body, "wanted", json_boolean(version->wanted));
                failed |= json_object_set_new(body, "announced", json_integer((json_int_t)version->announce_sequence));
                failed |= json_object_set_new(body, "state", json_string(nebula_state_name(version->life.state)));
                failed |= json_object_set_new(body, "at", json_real(version->life.moves[version->life.move_count - 1].at));
                failed |= json_object_set_new(body, "job", job_of(version->job));
                failed |= json_object_set_new(body, "parts", parts_of(version));
                failed |= json_object_set_new(body, "files", files_of(version));
                failed |= json_object_set_new(body, "grants", grants_of(version));
                if (!failed && !document_format(body, &text, &size, NULL)) {
                        result = write_note(catalogue, version, text, size);
                        free(text);
                }
                json_decref(body);
        }
        if (result < 0)
                log_event(LOG_LEVEL_WARN, "%s would not survive the agent: no note in the memory directory: %s", version->tag,
                         os_error_text(result));
        else
                version->noted = true;
}

void note_remove(struct catalogue *catalogue, struct version *version)
{
        char path[MEMORY_PATH_MAX];

        if (!version->noted)
                return;
        note_path(catalogue, version->id, ".version", path);
        os->unlink(path);
        version->noted = false;
}

/* Reading back. */

static struct job *read_job(struct catalogue *catalogue, struct document_reader *reader, const json_t *object)
{
        struct job settings = { 0 }, *job;

        document_text(reader, object, "persist_path", 1, settings.persist_path, sizeof settings.persist_path);
        document_text(reader, object, "name", 1, settings.name, sizeof settings.name);
        document_text(reader, object, "output_dir", 1, settings.output_dir, sizeof settings.output_dir);
        document_text(reader, object, "run", 1, settings.run, sizeof settings.run);
        settings.persist_interval_s = document_real(reader, object, "interval");
        settings.retention_count = (uint32_t)document_u64(reader, object, "retention", UINT32_MAX);
        settings.keep_last = (uint32_t)document_u64(reader, object, "keep_last", UINT32_MAX);
        settings.keep_every = document_u64(reader, object, "keep_every", INT64_MAX);
        settings.world = (uint32_t)document_u64(reader, object, "world", WORLD_MAX);
        if (reader->status)
                return NULL;
        job = catalogue_job(catalogue, settings.persist_path, settings.name);
        if (job)
                return job;
        job = catalogue_job_get(catalogue, settings.persist_path, settings.name);
        if (!job)
                return NULL;
        memcpy(job->output_dir, settings.output_dir, sizeof job->output_dir);
        memcpy(job->run, settings.run, sizeof job->run);
        job->persist_interval_s = settings.persist_interval_s;
        job->retention_count = settings.retention_count ? settings.retention_count : 1;
        job->keep_last = settings.keep_last;
        job->keep_every = settings.keep_every;
        job->world = settings.world;
        job->local_world = (uint32_t)json_integer_value(json_object_get(object, "local_world"));
        job->scan_due = job->persist_path[0] != 0;
        return job;
}

static void read_parts(struct document_reader *reader, const json_t *parts, struct version *version)
{
        for (size_t i = 0; !reader->status && i < json_array_size(parts); i++) {
                const json_t *object = json_array_get(parts, i);
                struct part *part = version_part_get(version, (uint32_t)document_u64(reader, object, "rank", WORLD_MAX));

                if (!part) {
                        reader->status = NEBULA_NO_MEMORY;
                        return;
                }
                part->pid = (uint32_t)document_u64(reader, object, "pid", UINT32_MAX);
                part->nonce = document_crc64(reader, json_object_get(object, "nonce"), "nonce");
                part->closed = json_is_true(json_object_get(object, "closed"));
                part->spoken_for = json_is_true(json_object_get(object, "idle"));
                part->file_count = (uint32_t)document_u64(reader, object, "files", UINT32_MAX);
                part->begun = document_real(reader, object, "begun");
                part->captured = document_real(reader, object, "captured");
        }
}

/* The image that a note names: already taken over for another generation, or taken over now. */
static struct image *read_image(struct catalogue *catalogue, struct document_reader *reader, const json_t *object,
                                const struct job *job, uint64_t size)
{
        uint64_t id = document_crc64(reader, json_object_get(object, "image"), "image");
        struct image *image = reader->status || !id ? NULL : memory_find(&catalogue->memory, id);

        if (reader->status || !id)
                return NULL;
        if (!image && memory_adopt(&catalogue->memory, id, &image, reader->error)) {
                reader->status = NEBULA_CORRUPT;
                return NULL;
        }
        if (image->capacity < size) {
                document_wrong(reader, "size", "is more than its image holds");
                return NULL;
        }
        image->job = job;
        memory_hold(image);
        return image;
}

static enum ipc_format read_format(const json_t *object)
{
        const char *format = json_string_value(json_object_get(object, "format"));

        return format && !strcmp(format, "raw") ? IPC_FORMAT_RAW : IPC_FORMAT_ZIP;
}

static void read_files(struct catalogue *catalogue, struct document_reader *reader, const json_t *files, struct version *version)
{
        for (size_t i = 0; !reader->status && i < json_array_size(files); i++) {
                const json_t *object = json_array_get(files, i);
                struct agent_file *file = version_file_add(version);

                if (!file) {
                        reader->status = NEBULA_NO_MEMORY;
                        return;
                }
                document_text(reader, object, "name", 0, file->name, sizeof file->name);
                file->rank = (uint32_t)document_u64(reader, object, "rank", WORLD_MAX);
                file->size = document_u64(reader, object, "size", INT64_MAX);
                file->generation = document_u64(reader, object, "generation", INT64_MAX);
                file->format = read_format(object);
                file->image = read_image(catalogue, reader, object, version->job, file->size);
                if (!reader->status && !file->image && file->generation == version->generation)
                        document_wrong(reader, "image", "was no named one and ended with its agent");
        }
}

static void read_grants(struct catalogue *catalogue, struct document_reader *reader, const json_t *grants, struct version *version)
{
        for (size_t i = 0; !reader->status && i < json_array_size(grants); i++) {
                const json_t *object = json_array_get(grants, i);
                struct grant *grant = calloc(1, sizeof *grant);

                if (!grant) {
                        reader->status = NEBULA_NO_MEMORY;
                        return;
                }
                document_text(reader, object, "name", 0, grant->name, sizeof grant->name);
                grant->rank = (uint32_t)document_u64(reader, object, "rank", WORLD_MAX);
                grant->size = document_u64(reader, object, "size", INT64_MAX);
                grant->nonce = document_crc64(reader, json_object_get(object, "nonce"), "nonce");
                grant->format = read_format(object);
                grant->image = read_image(catalogue, reader, object, version->job, grant->size);
                if (!grant->image) {
                        free(grant);
                        if (!reader->status)
                                document_wrong(reader, "image", "was no named one and ended with its agent");
                        return;
                }
                grant->image->owner_nonce = grant->nonce;
                grant->next = version->grants;
                version->grants = grant;
        }
}

static enum nebula_state read_state(const json_t *body)
{
        const char *name = json_string_value(json_object_get(body, "state"));

        for (int state = NEBULA_STATE_CAPTURING; name && state <= NEBULA_STATE_FAILED; state++)
                if (!strcmp(name, nebula_state_name((enum nebula_state)state)))
                        return (enum nebula_state)state;
        return NEBULA_STATE_FAILED;
}

static enum nebula_status read_version(struct catalogue *catalogue, uint64_t id, json_t *body, struct nebula_error *error)
{
        struct document_reader reader = { .kind = "version", .error = error };
        struct version *version;
        char tag[IPC_NAME_MAX];
        struct job *job = read_job(catalogue, &reader, document_object(&reader, body, "job"));

        document_text(&reader, body, "tag", 0, tag, sizeof tag);
        if (reader.status || !job)
                return reader.status ? reader.status : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a note");
        version = version_new(catalogue, job, tag, error);
        if (!version)
                return NEBULA_NO_MEMORY;
        version->id = id;
        version->adopted = version->in_memory = version->noted = true;
        document_text(&reader, body, "run", 1, version->run, sizeof version->run);
        version->generation = document_u64(&reader, body, "generation", INT64_MAX);
        version->sequence = document_u64(&reader, body, "sequence", INT64_MAX);
        version->world = (uint32_t)document_u64(&reader, body, "world", WORLD_MAX);
        version->file_goal = json_integer_value(json_object_get(body, "goal"));
        if (json_is_integer(json_object_get(body, "writing")))
                version->writing = (uint64_t)json_integer_value(json_object_get(body, "writing"));
        version->spread = version->to_announce = json_is_true(json_object_get(body, "spread"));
        version->wanted = json_is_true(json_object_get(body, "wanted"));
        version->announce_sequence = (uint64_t)json_integer_value(json_object_get(body, "announced"));
        version->waiting_since_ns = version->heard_ns = os->now_ns();
        lifecycle_init(&version->life, read_state(body), document_real(&reader, body, "at"));
        read_parts(&reader, document_array(&reader, body, "parts"), version);
        read_files(catalogue, &reader, document_array(&reader, body, "files"), version);
        read_grants(catalogue, &reader, document_array(&reader, body, "grants"), version);
        if (!reader.status && version->life.state == NEBULA_STATE_FAILED)
                document_wrong(&reader, "state", "is of a version that had failed");
        if (reader.status) {
                version->noted = false; /* the caller removes it */
                version_free(catalogue, version);
                return reader.status;
        }
        version->stored = version->recorded = version->life.state == NEBULA_STATE_DURABLE;
        if (version->sequence > catalogue->last_sequence)
                catalogue->last_sequence = version->sequence;
        log_event(LOG_LEVEL_INFO, "took over %s generation %" PRIu64 ", %s, %" PRIu64 " MiB", version->tag, version->generation,
                 nebula_state_name(version->life.state), version_size(version) >> 20);
        return NEBULA_OK;
}

static void adopt_note(struct catalogue *catalogue, const char *path, uint64_t id)
{
        struct nebula_error error = { 0 };
        struct os_stat stat;
        json_t *body;
        char *text;
        size_t size;
        enum nebula_status status;

        if (os->stat(path, false, &stat) < 0 || stat.kind != OS_KIND_FILE || stat.uid != os->uid())
                return;
        if (os_read_file(path, NOTE_BYTES_MAX, &text, &size) < 0)
                return;
        status = document_parse(text, size, "version", &body, &error);
        if (!status) {
                status = read_version(catalogue, id, body, &error);
                json_decref(body);
        }
        free(text);
        if (!status)
                return;
        log_event(LOG_LEVEL_WARN, "a version in memory could not be taken over: %s", error.message);
        os->unlink(path);
}

/* Creation order, newest first, is what the job's list promises. */
static void sort_versions(struct job *job)
{
        struct version *sorted = NULL;

        while (job->versions) {
                struct version *version = job->versions, **link = &sorted;

                job->versions = version->next;
                /* Open ones have no sequence yet and are the newest. */
                while (*link && ((*link)->sequence ? (*link)->sequence : UINT64_MAX) >
                                        (version->sequence ? version->sequence : UINT64_MAX))
                        link = &(*link)->next;
                version->next = *link;
                *link = version;
        }
        job->versions = sorted;
}

static void remove_debris(struct catalogue *catalogue, const char *name)
{
        char path[MEMORY_PATH_MAX];
        struct os_stat stat;
        uint64_t id;

        if (memory_image_name(name, ".img", &id)) {
                if (memory_find(&catalogue->memory, id))
                        return;
        } else if (!memory_image_name(name, ".tmp", &id)) {
                return;
        }
        if ((size_t)snprintf(path, sizeof path, "%s/%s", catalogue->memory.directory, name) >= sizeof path)
                return;
        if (!os->stat(path, false, &stat) && stat.kind == OS_KIND_FILE && stat.uid == os->uid() && !os->unlink(path))
                log_event(LOG_LEVEL_INFO, "removed %s, the rest of an interrupted save", name);
}

static void each_name(struct catalogue *catalogue, bool notes)
{
        char name[300], path[MEMORY_PATH_MAX];
        struct os_dir *dir;
        uint64_t id;

        if (os->opendir(catalogue->memory.directory, &dir) < 0)
                return;
        while (os->readdir(dir, name, sizeof name) > 0) {
                if (!notes) {
                        remove_debris(catalogue, name);
                } else if (memory_image_name(name, ".version", &id)) {
                        note_path(catalogue, id, ".version", path);
                        adopt_note(catalogue, path, id);
                }
        }
        os->closedir(dir);
}

void note_adopt_all(struct catalogue *catalogue)
{
        if (!catalogue->memory.directory[0])
                return;
        each_name(catalogue, true);
        /* Images of refused notes are still listed, held by nobody. */
        for (struct image *image = catalogue->memory.images, *next; image; image = next) {
                next = image->next;
                if (!image->users)
                        memory_doom(&catalogue->memory, image);
        }
        each_name(catalogue, false);
        for (struct job *job = catalogue->jobs; job; job = job->next)
                sort_versions(job);
        note_check_owners(catalogue);
}

/* False: the version is gone. */
static bool check_owners(struct catalogue *catalogue, struct version *version, bool *waiting)
{
        for (size_t i = 0; i < version->part_count && commit_open(version); i++) {
                const struct part *part = &version->parts[i];
                size_t before = version->part_count;

                if (part->spoken_for || catalogue_session(catalogue, part->nonce))
                        continue;
                if (os->alive(part->pid)) {
                        *waiting = true;
                        continue;
                }
                if (!commit_rank_ended(catalogue, version, part->rank))
                        return false;
                if (version->part_count < before)
                        i--;
        }
        if (commit_open(version))
                commit_check(catalogue, version);
        if (commit_open(version) && !version->spread && !*waiting && !catalogue_session_count(catalogue, version->job))
                version_fail(catalogue, version, NEBULA_FAILED, "all trainers left before checkpoint \"%s\" was complete",
                             version->tag);
        return true;
}

bool note_check_owners(struct catalogue *catalogue)
{
        bool any = false;

        for (struct job *job = catalogue->jobs; job; job = job->next)
                for (struct version *version = job->versions, *next; version; version = next) {
                        bool waiting = false;

                        next = version->next;
                        if (version->adopted && commit_open(version) && check_owners(catalogue, version, &waiting))
                                any = any || waiting;
                }
        return any;
}
