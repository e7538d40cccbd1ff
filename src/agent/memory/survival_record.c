#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/clients/location.h"
#include "agent/commit/ancestry.h"
#include "agent/commit/commit.h"
#include "agent/commit/world.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/memory/slots_private.h"
#include "agent/memory/survival_record.h"
#include "agent/persist/progress.h"
#include "agent/persist/storage.h"
#include "base/error.h"
#include "os/os.h"
#include "store/document.h"
#include "store/line_document.h"
#include "store/place.h"
#include "sum/sum.h"

#define RECORD_MAGIC 0x544f4e4eu /* "NNOT" */
#define RECORD_VERSION 8u
#define CRC_BYTES 8u
/* Upper bounds of the written sizes, so that one allocation is enough. */
#define FIXED_BYTES (512u + 2 * sizeof(struct line))
#define PART_BYTES 64u
#define FILE_BYTES 64u

enum { SPREAD = 1, WANTED = 2 };    /* flags of a version; above them is the tier that its ranks have loaded from, as tier_flags says */
enum { CLOSED = 1, SPOKEN_FOR = 2 }; /* of a part */
enum { STORED = 128 };               /* of a file, with its format */

struct record_head {
        uint32_t magic, version;
        uint64_t size;       /* of the whole record, with head and checksum */
        uint64_t first_file; /* how many files the records before this one hold; 0: this record stands alone */
        uint64_t files_at;   /* offset of its files */
};

static void put(char **at, const void *data, size_t size)
{
        memcpy(*at, data, size);
        *at += size;
}

static void put_u8(char **at, uint8_t value)
{
        put(at, &value, sizeof value);
}

static void put_u32(char **at, uint32_t value)
{
        put(at, &value, sizeof value);
}

static void put_u64(char **at, uint64_t value)
{
        put(at, &value, sizeof value);
}

static void put_real(char **at, double value)
{
        put(at, &value, sizeof value);
}

static void put_text(char **at, const char *text)
{
        size_t length = strlen(text);

        put_u32(at, (uint32_t)length);
        put(at, text, length);
}

static void put_file(char **at, const char *name, uint32_t rank, enum ipc_format format, bool stored, uint64_t size,
                     uint64_t origin, const struct image *image)
{
        put_text(at, name);
        put_u32(at, rank);
        put_u8(at, (uint8_t)((uint32_t)format | (stored ? STORED : 0)));
        put_u64(at, size);
        put_u64(at, origin);
        put_u64(at, image && image->named ? image->id : 0);
}

static void put_line(char **at, const struct line *line)
{
        put_u32(at, line->count);
        put(at, line->forks, line->count * sizeof line->forks[0]);
}

/* Of several rules only their number: the next agent removes nothing before the sessions that had them are back. */
static void put_rule(char **at, const struct job_settings *settings)
{
        static const struct keep_rule none;
        const struct keep_rule *rule = settings->rule_count == 1 ? &settings->rules[0] : &none;

        put_u32(at, settings->rule_count > settings->awaited_rules ? settings->rule_count : settings->awaited_rules);
        put_u32(at, rule->last);
        put_u64(at, rule->every);
        put_u32(at, rule->best);
        put_u8(at, rule->best_is_largest);
        put_text(at, rule->metric);
        put_u32(at, rule->hourly);
        put_u32(at, rule->daily);
        put_u32(at, rule->weekly);
        put_u32(at, rule->within_s);
}

/* The storage path is written too, with its signature, so that the next agent can go on persisting. The log is this user's alone. */
static void put_job(char **at, const struct job *job)
{
        char *path = place_signed(job->persist_path);

        put_text(at, path ? path : job->persist_path);
        place_forget(path);
        put_text(at, job->name);
        put_text(at, job->output_dir);
        put_text(at, job->run);
        put_real(at, job->settings.persist_interval_s);
        put_u32(at, job->settings.retention_count);
        put_rule(at, &job->settings);
        put_u32(at, job->settings.world);
        put_u32(at, job->settings.local_world);
        put_text(at, job->spelling);
        put_text(at, ancestry_newest(job));
        put_u64(at, ancestry_begun(job));
        put_u32(at, job->settings.umask);
        put_u32(at, job->settings.group);
        put_u32(at, storage_mount_length(job));
}

/* 0: not known. Records that say nothing of it have 0 there, too. */
#define TIER_SHIFT 2u
#define TIER_MASK (3u << TIER_SHIFT)

static uint32_t tier_flags(const struct lineage_base *base)
{
        return base->has_source ? ((uint32_t)base->source + 1) << TIER_SHIFT : 0;
}

static void set_tier(struct lineage_base *base, uint32_t flags)
{
        uint32_t tier = (flags & TIER_MASK) >> TIER_SHIFT;

        base->has_source = tier != 0;
        base->source = tier ? (enum ipc_source)(tier - 1) : IPC_SOURCE_MEMORY;
}

/* A version that only storage failed is complete, and the next agent tries to persist it again. */
static void put_version(char **at, const struct version *version)
{
        bool given_up = version->failed_by_storage;

        put_text(at, version->tag);
        put_text(at, version->run);
        put_u64(at, version->sequence);
        put_u64(at, version->first_sequence);
        put_u64(at, (uint64_t)version->file_goal);
        put_u64(at, version->writing);
        put_u64(at, world_announce_sequence(version));
        put_line(at, &version->line);
        put_u64(at, version->base.read_at);
        put_u64(at, (uint64_t)version->base.step);
        put_line(at, &version->base.line);
        put_u64(at, ancestry_base(version));
        put_u64(at, ancestry_carries_from(version));
        put_real(at, given_up ? lifecycle_at(&version->life, NEBULA_STATE_COMMITTED) : version->life.moves[version->life.move_count - 1].at);
        put_u32(at, version->world);
        put_u8(at, (uint8_t)(given_up ? NEBULA_STATE_COMMITTED : version->life.state));
        put_u8(at, (uint8_t)((version->is_spread ? SPREAD : 0) | (version->wanted ? WANTED : 0) | tier_flags(&version->base)));
}

/* The id of the pid namespace of this agent; 0: /proc does not have it. */
static uint64_t pid_namespace(void)
{
        char text[64];
        unsigned long long inode = 0;

        if (os->readlink("/proc/self/ns/pid", text, sizeof text) > 0)
                sscanf(text, "pid:[%llu]", &inode);
        return inode;
}

static void put_parts(char **at, const struct version *version)
{
        put_u64(at, pid_namespace());
        put_u32(at, (uint32_t)version->part_count);
        for (size_t i = 0; i < version->part_count; i++) {
                const struct part *part = &version->parts[i];

                put_u32(at, part->rank);
                put_u32(at, part->pid);
                put_u32(at, part->seen_pid);
                put_u32(at, part->file_count);
                put_u64(at, part->nonce);
                put_u8(at, (uint8_t)((part->closed ? CLOSED : 0) | (part->spoken_for ? SPOKEN_FOR : 0)));
                put_real(at, part->begun);
                put_real(at, part->captured);
        }
}

static void put_files(char **at, const struct version *version, size_t first)
{
        put_u32(at, (uint32_t)(version->file_count - first));
        for (size_t i = first; i < version->file_count; i++) {
                const struct agent_file *file = &version->files[i];

                put_file(at, file->name, file->rank, file->format, file->stored, file->size, file->origin, file->image);
        }
}

static void put_loans(char **at, const struct version *version, uint32_t loan_count)
{
        put_u32(at, loan_count);
        for (const struct image_loan *loan = version->loans; loan; loan = loan->next) {
                put_file(at, loan->name, loan->rank, loan->format, false, loan->size, 0, loan->image);
                put_u64(at, loan->nonce);
        }
}

/* Absent if there are none. */
static void put_unfinished(char **at, const struct unfinished *list)
{
        if (!list->count)
                return;
        put_u32(at, list->attempt);
        put_u32(at, (uint32_t)list->count);
        for (size_t i = 0; i < list->count; i++) {
                put_text(at, list->uploads[i].key);
                put_text(at, list->uploads[i].text);
        }
}

/* An upper bound of the record's size. */
static size_t bound(const struct version *version, size_t first_file, uint32_t *ret_loan_count)
{
        const struct unfinished *uploads = progress_uploads(version);
        size_t size = sizeof(struct record_head) + FIXED_BYTES + CRC_BYTES + 3 * IPC_PATH_MAX + 5 * IPC_NAME_MAX;

        *ret_loan_count = 0;
        for (const struct image_loan *loan = version->loans; loan; loan = loan->next)
                ++*ret_loan_count;
        for (size_t i = 0; i < uploads->count; i++)
                size += FILE_BYTES + strlen(uploads->uploads[i].key) + strlen(uploads->uploads[i].text);
        return size + version->part_count * PART_BYTES + (version->file_count - first_file + *ret_loan_count) * (FILE_BYTES + IPC_NAME_MAX);
}

void *survival_record_format(const struct version *version, size_t first_file, size_t *ret_size)
{
        struct record_head head = { .magic = RECORD_MAGIC, .version = RECORD_VERSION, .first_file = first_file };
        uint32_t loan_count;
        char *data = malloc(bound(version, first_file, &loan_count)), *at = data;

        if (!data)
                return NULL;
        at += sizeof head;
        put_job(&at, version->job);
        put_version(&at, version);
        put_parts(&at, version);
        head.files_at = (uint64_t)(at - data);
        put_files(&at, version, first_file);
        put_loans(&at, version, loan_count);
        put_unfinished(&at, progress_uploads(version));
        head.size = (size_t)(at - data) + CRC_BYTES;
        memcpy(data, &head, sizeof head);
        put_u64(&at, sum_crc64(0, data, (size_t)(at - data)));
        *ret_size = (size_t)(at - data);
        return data;
}

/* After the first error, which `wrong` keeps, all further reads return zeros. */
struct reader {
        const char *at, *end, *wrong;
};

/* Errors of this agent or machine, not of the log. */
static const char no_memory[] = "was not read: there is no memory", no_image[] = "names an image that cannot be opened now";

static enum nebula_status blame(const struct reader *reader)
{
        return reader->wrong == no_memory || reader->wrong == no_image ? NEBULA_NO_MEMORY : NEBULA_CORRUPT;
}

static void get(struct reader *reader, void *ret_data, size_t size)
{
        memset(ret_data, 0, size);
        if (reader->wrong)
                return;
        if ((size_t)(reader->end - reader->at) < size) {
                reader->wrong = "ends too early";
                return;
        }
        memcpy(ret_data, reader->at, size);
        reader->at += size;
}

static uint64_t bounded(struct reader *reader, uint64_t value, uint64_t most)
{
        if (value > most && !reader->wrong)
                reader->wrong = "holds an impossible number";
        return reader->wrong ? 0 : value;
}

static uint64_t get_u64(struct reader *reader, uint64_t most)
{
        uint64_t value;

        get(reader, &value, sizeof value);
        return bounded(reader, value, most);
}

static uint32_t get_u32(struct reader *reader, uint32_t most)
{
        uint32_t value;

        get(reader, &value, sizeof value);
        return (uint32_t)bounded(reader, value, most);
}

static uint8_t get_u8(struct reader *reader, uint8_t most)
{
        uint8_t value;

        get(reader, &value, sizeof value);
        return (uint8_t)bounded(reader, value, most);
}

static double get_real(struct reader *reader)
{
        double value;

        get(reader, &value, sizeof value);
        if (!isfinite(value) && !reader->wrong)
                reader->wrong = "holds an impossible number";
        return reader->wrong ? 0 : value;
}

static void get_text(struct reader *reader, bool may_be_empty, char *ret_text, size_t size)
{
        uint32_t length = get_u32(reader, (uint32_t)size - 1);

        get(reader, ret_text, length);
        ret_text[length] = 0;
        if (!reader->wrong && (strlen(ret_text) != length || (!length && !may_be_empty)))
                reader->wrong = "holds an impossible text";
}

static void get_line(struct reader *reader, struct line *line)
{
        line->count = get_u32(reader, LINE_FORKS_MAX);
        get(reader, line->forks, line->count * sizeof line->forks[0]);
        if (!reader->wrong && !line_is_sound(line))
                reader->wrong = "holds an impossible line of history";
        if (reader->wrong)
                memset(line, 0, sizeof *line);
}

static struct job *get_job(struct catalogue *catalogue, struct reader *reader)
{
        struct ipc_hello *settings = calloc(1, sizeof *settings); /* too large for a thread's stack */
        char *spelling = calloc(1, IPC_PATH_MAX);
        char newest_run[IPC_NAME_MAX];
        struct job *job = NULL;
        uint64_t begun;
        uint32_t rule_count, mount_length;

        if (!settings || !spelling) {
                reader->wrong = no_memory;
                goto done;
        }
        get_text(reader, true, settings->persist_path, sizeof settings->persist_path);
        get_text(reader, true, settings->job, sizeof settings->job);
        get_text(reader, true, settings->output_dir, sizeof settings->output_dir);
        get_text(reader, true, settings->run, sizeof settings->run);
        settings->persist_interval_s = get_real(reader);
        settings->retention_count = get_u32(reader, UINT32_MAX);
        rule_count = get_u32(reader, KEEP_RULES_MAX);
        settings->keep_last = get_u32(reader, UINT32_MAX);
        settings->keep_every = get_u64(reader, INT64_MAX);
        settings->keep_best_count = get_u32(reader, UINT32_MAX);
        settings->keep_best_is_largest = get_u8(reader, 1);
        get_text(reader, true, settings->keep_best, sizeof settings->keep_best);
        settings->keep_hourly = get_u32(reader, UINT32_MAX);
        settings->keep_daily = get_u32(reader, UINT32_MAX);
        settings->keep_weekly = get_u32(reader, UINT32_MAX);
        settings->keep_within_s = get_u32(reader, UINT32_MAX);
        settings->world = get_u32(reader, WORLD_MAX);
        settings->local_world = get_u32(reader, WORLD_MAX);
        get_text(reader, true, spelling, IPC_PATH_MAX);
        get_text(reader, true, newest_run, sizeof newest_run);
        begun = get_u64(reader, DOCUMENT_SEQUENCE_MAX);
        settings->umask = get_u32(reader, UINT32_MAX);
        settings->group = get_u32(reader, UINT32_MAX);
        mount_length = get_u32(reader, IPC_PATH_MAX);
        if (!reader->wrong)
                job = catalogue_job(catalogue, settings->persist_path, settings->job);
        if (!reader->wrong && !job) {
                place_keep(settings->persist_path);
                location_resolve(catalogue, settings->persist_path); /* an earlier agent may have known it by another spelling */
                job = catalogue_job(catalogue, settings->persist_path, settings->job);
        }
        if (!reader->wrong && !job) {
                job = catalogue_job_get(catalogue, settings->persist_path, settings->job);
                if (job)
                        catalogue_job_configure(catalogue, job, settings, spelling);
                else
                        reader->wrong = no_memory;
                if (job)
                        job->is_remover = true; /* the agent before may have been, and may not have ended its removals */
        }
        if (job && rule_count > 1 && rule_count > job->settings.awaited_rules) {
                job->settings.awaited_rules = rule_count;
                job->settings.rule_count = 0;
        }
        if (job && !strcmp(job->persist_path, settings->persist_path))
                storage_adopt_mount(job, mount_length);
        if (job && begun)
                ancestry_adopt(job, newest_run, begun);
done:
        free(settings);
        free(spelling);
        return job;
}

static void get_parts(struct reader *reader, struct version *version)
{
        bool is_same_namespace = get_u64(reader, UINT64_MAX) == pid_namespace();

        for (uint32_t left = get_u32(reader, WORLD_MAX); left && !reader->wrong; left--) {
                struct part *part = version_part_get(version, get_u32(reader, WORLD_MAX));
                uint8_t flags;

                if (!part) {
                        reader->wrong = no_memory;
                        return;
                }
                part->pid = get_u32(reader, UINT32_MAX);
                part->seen_pid = get_u32(reader, UINT32_MAX);
                if (!is_same_namespace)
                        part->seen_pid = 0;
                part->file_count = get_u32(reader, UINT32_MAX);
                part->nonce = get_u64(reader, UINT64_MAX);
                flags = get_u8(reader, CLOSED | SPOKEN_FOR);
                part->closed = flags & CLOSED;
                part->spoken_for = flags & SPOKEN_FOR;
                part->begun = get_real(reader);
                part->captured = get_real(reader);
        }
}

/* Reads the fields that a file and a loan share. If there is an image: finds it, if another version has adopted
 * it already, or adopts it. */
static struct image *get_file(struct catalogue *catalogue, struct reader *reader, const struct job *job, struct agent_file *file)
{
        struct nebula_error error;
        struct image *image;
        uint8_t format;
        uint64_t id;

        get_text(reader, false, file->name, sizeof file->name);
        file->rank = get_u32(reader, WORLD_MAX);
        format = get_u8(reader, UINT8_MAX);
        file->stored = format & STORED;
        file->format = (enum ipc_format)bounded(reader, format & ~STORED, IPC_FORMAT_RAW);
        file->size = get_u64(reader, DOCUMENT_SIZE_MAX);
        file->origin = get_u64(reader, DOCUMENT_SEQUENCE_MAX);
        id = get_u64(reader, UINT64_MAX);
        if (reader->wrong || !id)
                return NULL;
        image = memory_find(catalogue->memory, id);
        if (!image && memory_adopt(catalogue->memory, id, &image, &error)) {
                reader->wrong = error.status == NEBULA_CORRUPT ? "names an image that is not there" : no_image;
                return NULL;
        }
        if (image->capacity < file->size) {
                reader->wrong = "names an image that is too small";
                return NULL;
        }
        image->job = job;
        memory_hold(image);
        return image;
}

static void get_files(struct catalogue *catalogue, struct reader *reader, struct version *version)
{
        for (uint32_t left = get_u32(reader, UINT32_MAX); left && !reader->wrong; left--) {
                struct agent_file read = { 0 }, *file;

                read.image = get_file(catalogue, reader, version->job, &read);
                if (reader->wrong)
                        return;
                file = version_file_add(version, read.name);
                if (!file) {
                        version_file_done(catalogue, &read);
                        reader->wrong = no_memory;
                        return;
                }
                *file = read;
                /* A durable version may have files of other nodes, which storage has. */
                if (!file->image && !file->origin && version->life.state != NEBULA_STATE_DURABLE)
                        reader->wrong = "describes an image without a name, which ended with its agent";
        }
}

static void get_loans(struct catalogue *catalogue, struct reader *reader, struct version *version)
{
        for (uint32_t left = get_u32(reader, UINT32_MAX); left && !reader->wrong; left--) {
                struct image_loan *loan = calloc(1, sizeof *loan);
                struct agent_file file;

                if (!loan) {
                        reader->wrong = no_memory;
                        return;
                }
                loan->image = get_file(catalogue, reader, version->job, &file);
                loan->nonce = get_u64(reader, UINT64_MAX);
                if (!loan->image) {
                        free(loan);
                        if (!reader->wrong)
                                reader->wrong = "describes an image without a name, which ended with its agent";
                        return;
                }
                memcpy(loan->name, file.name, sizeof loan->name);
                loan->rank = file.rank;
                loan->format = file.format;
                loan->size = file.size;
                loan->image->owner_nonce = loan->nonce;
                loan->next = version->loans;
                version->loans = loan;
        }
}

static void get_unfinished(struct reader *reader, struct unfinished *list)
{
        char key[MANIFEST_KEY_MAX], text[STORE_RESUME_MAX];

        if (reader->wrong || reader->at == reader->end)
                return;
        list->attempt = get_u32(reader, UINT32_MAX);
        for (uint32_t left = get_u32(reader, UINT32_MAX); left && !reader->wrong; left--) {
                get_text(reader, false, key, sizeof key);
                get_text(reader, false, text, sizeof text);
                if (!reader->wrong && !unfinished_set(list, key, text))
                        reader->wrong = no_memory;
        }
}

/* The records that count: the last one that stands alone, and those after it. An incomplete record after them was
 * cut off when the agent ended. Both NULL: there is none. */
struct chain {
        const char *first, *last;
};

static struct chain find_chain(const char *data, size_t size)
{
        struct chain chain = { 0 };
        struct record_head head;
        uint64_t crc;

        while (size >= sizeof head + CRC_BYTES) {
                memcpy(&head, data, sizeof head);
                if (head.magic != RECORD_MAGIC || head.version != RECORD_VERSION || head.size > size ||
                    head.size < sizeof head + CRC_BYTES || head.files_at < sizeof head || head.files_at > head.size - CRC_BYTES ||
                    (head.first_file && !chain.first))
                        break;
                memcpy(&crc, data + head.size - CRC_BYTES, sizeof crc);
                if (crc != sum_crc64(0, data, head.size - CRC_BYTES))
                        break;
                chain.first = head.first_file ? chain.first : data;
                chain.last = data;
                data += head.size;
                size -= head.size;
        }
        return chain;
}

static struct reader read_record(const char *record, size_t offset)
{
        struct record_head head;

        memcpy(&head, record, sizeof head);
        return (struct reader){ .at = record + offset, .end = record + head.size - CRC_BYTES };
}

/* Reads the files of the records before the last one; `reader` is at the last one's own files. */
static void get_all_files(struct catalogue *catalogue, const struct chain *chain, struct reader *reader, struct version *version)
{
        struct record_head head;

        for (const char *record = chain->first; !reader->wrong; record += head.size) {
                struct reader files;

                memcpy(&head, record, sizeof head);
                if (head.first_file != version->file_count) {
                        reader->wrong = "lacks files";
                        return;
                }
                if (record == chain->last)
                        break;
                files = read_record(record, head.files_at);
                get_files(catalogue, &files, version);
                reader->wrong = files.wrong;
        }
        get_files(catalogue, reader, version);
}

static void get_version(struct reader *reader, struct version *version)
{
        uint64_t announce_sequence, base_sequence;
        enum nebula_state state;
        uint8_t flags;
        double at;

        get_text(reader, true, version->run, sizeof version->run);
        version->sequence = get_u64(reader, DOCUMENT_SEQUENCE_MAX);
        version->first_sequence = get_u64(reader, DOCUMENT_SEQUENCE_MAX);
        version->file_goal = (int64_t)get_u64(reader, UINT64_MAX);
        version->writing = get_u64(reader, DOCUMENT_NUMBER_MAX);
        announce_sequence = get_u64(reader, DOCUMENT_SEQUENCE_MAX);
        get_line(reader, &version->line);
        version->base.read_at = get_u64(reader, DOCUMENT_SEQUENCE_MAX);
        version->base.step = (int64_t)get_u64(reader, INT64_MAX);
        get_line(reader, &version->base.line);
        base_sequence = get_u64(reader, DOCUMENT_SEQUENCE_MAX);
        ancestry_restore(version, base_sequence, get_u64(reader, UINT64_MAX));
        at = get_real(reader);
        version->world = get_u32(reader, WORLD_MAX);
        state = (enum nebula_state)get_u8(reader, NEBULA_STATE_FAILED);
        flags = get_u8(reader, SPREAD | WANTED | TIER_MASK);
        set_tier(&version->base, flags);
        world_adopt(version, announce_sequence, flags & SPREAD);
        version->wanted = flags & WANTED;
        lifecycle_init(&version->life, state, at);
        if (!reader->wrong && state == NEBULA_STATE_FAILED)
                reader->wrong = "describes a version that had failed";
        if (!reader->wrong && (!version->file_goal || version->file_goal < NEBULA_FILES_ALL_RANKS))
                reader->wrong = "holds an impossible number";
}

enum nebula_status survival_record_read(struct catalogue *catalogue, uint64_t id, const void *data, size_t size,
                                        struct nebula_error *error)
{
        struct chain chain = find_chain(data, size);
        struct unfinished uploads = { 0 };
        struct reader reader;
        struct version *version;
        struct job *job;
        char tag[IPC_NAME_MAX];

        if (!chain.last)
                return error_set(error, NEBULA_CORRUPT, 0, "its survival log holds no complete record");
        reader = read_record(chain.last, sizeof(struct record_head));
        job = get_job(catalogue, &reader);
        get_text(&reader, false, tag, sizeof tag);
        if (reader.wrong)
                return error_set(error, blame(&reader), 0, "its survival log %s", reader.wrong);
        version = version_new(catalogue, job, tag, error);
        if (!version)
                return NEBULA_NO_MEMORY;
        version->id = id;
        version->survival->file = memory_file_new();
        version->adopted = version->in_memory = version->survival->is_logged = true;
        if (!version->survival->file)
                reader.wrong = no_memory;
        get_version(&reader, version);
        version->adopted_ns = os->now_ns();
        get_parts(&reader, version);
        get_all_files(catalogue, &chain, &reader, version);
        get_loans(catalogue, &reader, version);
        get_unfinished(&reader, &uploads);
        progress_adopt(version, &uploads);
        if (!reader.wrong && reader.at != reader.end)
                reader.wrong = "is longer than its contents";
        if (reader.wrong) {
                version->survival->is_logged = false; /* the caller removes the log */
                version_free(catalogue, version);
                return error_set(error, blame(&reader), 0, "the survival log of \"%s\" %s", tag, reader.wrong);
        }
        version->stored = version->recorded = version->life.state == NEBULA_STATE_DURABLE;
        for (size_t i = 0; version->stored && i < version->file_count; i++)
                if (version->files[i].image && !version->files[i].stored)
                        version_set_copy(catalogue, version, COPY_DOUBTED); /* the agent before had heard of damage */
        job_saw_sequence(job, version->sequence);
        log_event(LOG_LEVEL_INFO, "took over %s, %s, %" PRIu64 " MiB", version->tag,
                  nebula_state_name(version->life.state), version_size(version) >> 20);
        return NEBULA_OK;
}
