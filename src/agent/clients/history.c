#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/clients/history.h"
#include "agent/log.h"
#include "agent/persist/progress.h"
#include "base/text.h"
#include "os/os.h"

#define LINE_BYTES 2048

static const char header[] = "tag,step,sequence,world,files,size_bytes,result,blocked_ms,copy_ms,capture_cpu_ms,faults,begun,"
                             "captured,committed,durable,persist_seconds,persist_mib_per_s,error,stopped,stepped,read,read_step,written_bytes,read_tier\n";

struct capture_sums {
        int64_t blocked_ns, copy_ns, cpu_ns; /* blocked and copy: those of the slowest rank */
        uint64_t fault_count;
};

static struct capture_sums sum_parts(const struct version *version)
{
        struct capture_sums sums = { 0 };

        for (size_t i = 0; i < version->part_count; i++) {
                const struct part *part = &version->parts[i];

                if (part->blocked_ns > sums.blocked_ns)
                        sums.blocked_ns = part->blocked_ns;
                if (part->copy_ns > sums.copy_ns)
                        sums.copy_ns = part->copy_ns;
                sums.cpu_ns += part->cpu_ns;
                sums.fault_count += part->fault_count;
        }
        return sums;
}

static double mib_per_s(const struct version *version)
{
        struct version_progress progress = version_progress(version);

        return progress.seconds > 0 ? (double)progress.bytes / 1048576.0 / progress.seconds : 0;
}

/* When its ranks had loaded the version that they went on from; 0: they had loaded none. Sequences are times. */
static double read_time(const struct version *version)
{
        return (double)version->base.read_at / 1e9;
}

static int64_t read_step(const struct version *version)
{
        return version->base.read_at ? version->base.step : -1;
}

static const char *read_tier(const struct version *version)
{
        static const char *const names[] = { [IPC_SOURCE_MEMORY] = "memory", [IPC_SOURCE_PEER] = "peer", [IPC_SOURCE_STORAGE] = "storage" };

        return version->base.read_at && version->base.has_source ? names[version->base.source] : "";
}

json_t *history_json(const struct version *version)
{
        struct capture_sums sums = sum_parts(version);
        const char *result = version_result(version);
        json_t *row = json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:s, s:f, s:f, s:f, s:I}", "tag", version->tag, "step",
                                (json_int_t)version->step, "sequence", (json_int_t)version->sequence, "world",
                                (json_int_t)version->world, "files", (json_int_t)version->file_count, "size_bytes",
                                (json_int_t)version_size(version), "result", result ? result : nebula_state_name(version->life.state),
                                "blocked_ms", (double)sums.blocked_ns / 1e6, "copy_ms", (double)sums.copy_ns / 1e6,
                                "capture_cpu_ms", (double)sums.cpu_ns / 1e6, "faults", (json_int_t)sums.fault_count);
        json_t *times = json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:s, s:f, s:f, s:f, s:I, s:I, s:s}", "begun",
                                  lifecycle_at(&version->life, NEBULA_STATE_CAPTURING), "captured",
                                  lifecycle_at(&version->life, NEBULA_STATE_CAPTURED), "committed",
                                  lifecycle_at(&version->life, NEBULA_STATE_COMMITTED), "durable",
                                  lifecycle_at(&version->life, NEBULA_STATE_DURABLE), "persist_seconds", version_progress(version).seconds,
                                  "persist_mib_per_s", mib_per_s(version), "error", version->error.message, "stopped", version->stopped, "stepped", version->stepped, "read", read_time(version),
                                  "read_step", (json_int_t)read_step(version), "written_bytes", (json_int_t)version_progress(version).written_bytes, "read_tier",
                                  read_tier(version));

        if (row && times)
                json_object_update(row, times);
        json_decref(times);
        return row;
}

/* Puts a field in quotes, doubles its quotes, and replaces newlines and other hidden characters by spaces: one version is one line.
 * A spreadsheet takes no field for a formula. */
static void quote(const char *field, char *ret_text, size_t size)
{
        char shown[LINE_BYTES];
        size_t used = 0;

        snprintf(shown, sizeof shown, "%s", field);
        text_replace_hidden(shown, ' ');
        ret_text[used++] = '"';
        if (text_is_formula(shown))
                ret_text[used++] = '\'';
        for (const char *text = shown; *text && used + 4 < size; text++) {
                if (*text == '"')
                        ret_text[used++] = '"';
                ret_text[used++] = *text;
        }
        ret_text[used++] = '"';
        ret_text[used] = 0;
}

static void format_row(const struct version *version, char line[LINE_BYTES])
{
        struct capture_sums sums = sum_parts(version);
        char tag[2 * IPC_NAME_MAX + 4], error[1100] = "";

        quote(version->tag, tag, sizeof tag);
        if (version->error.message[0])
                quote(version->error.message, error, sizeof error);
        snprintf(line, LINE_BYTES,
                 "%s,%" PRId64 ",%" PRIu64 ",%" PRIu32 ",%zu,%" PRIu64 ",%s,%.3f,%.3f,%.3f,%" PRIu64
                 ",%.6f,%.6f,%.6f,%.6f,%.3f,%.1f,%s,%.6f,%.6f,%.6f,%" PRId64 ",%" PRIu64 ",%s\n",
                 tag, version->step, version->sequence, version->world, version->file_count, version_size(version),
                 version_result(version), (double)sums.blocked_ns / 1e6, (double)sums.copy_ns / 1e6, (double)sums.cpu_ns / 1e6,
                 sums.fault_count, lifecycle_at(&version->life, NEBULA_STATE_CAPTURING),
                 lifecycle_at(&version->life, NEBULA_STATE_CAPTURED), lifecycle_at(&version->life, NEBULA_STATE_COMMITTED),
                 lifecycle_at(&version->life, NEBULA_STATE_DURABLE), version_progress(version).seconds, mib_per_s(version), error, version->stopped, version->stepped,
                 read_time(version), read_step(version), version_progress(version).written_bytes, read_tier(version));
}

/* Whether the file ends in the middle of a line: a full disk or a loss of power has cut it. */
static bool is_cut(int fd, const struct os_stat *stat)
{
        char last;

        return stat->size && os->pread(fd, &last, 1, stat->size - 1) == 1 && last != '\n';
}

static int append(const char *directory, const char *line)
{
        char path[IPC_PATH_MAX + 32], text[sizeof header + LINE_BYTES];
        struct os_stat stat;
        int fd, result, size;

        result = os_make_dirs(directory, 0777);
        if (result < 0)
                return result;
        snprintf(path, sizeof path, "%s/checkpointHistories.csv", directory);
        fd = os->open(path, OS_READ | OS_WRITE | OS_CREATE | OS_APPEND | OS_NOFOLLOW | OS_SHARED);
        if (fd < 0)
                return fd;
        result = os->fstat(fd, &stat);
        /* The file's name is well known and its directory may be shared. So another user could put a link there, and
         * the agent would append to any of this user's files. */
        if (result >= 0 && (stat.kind != OS_KIND_FILE || stat.link_count != 1))
                result = -EMLINK;
        if (result >= 0) {
                /* One write per line, so that lines of two agents do not mix. */
                size = snprintf(text, sizeof text, "%s%s", !stat.size ? header : is_cut(fd, &stat) ? "\n" : "", line);
                result = (int)os->write(fd, text, (size_t)size);
                if (result >= 0 && result < size) {
                        result = -ENOSPC;
                        if (!stat.size) /* no line can be read below a part of the header */
                                os->truncate(fd, 0);
                }
        }
        os->close(fd);
        return result < 0 ? result : 0;
}

static struct version *oldest_ended(const struct job *job)
{
        struct version *oldest = NULL;

        for (struct version *version = job->live; version; version = version->next_live)
                if (!version->recorded && version_result(version))
                        oldest = version;
        return oldest;
}

/* Whether the directory is <storage path>/.nebula, the default. */
static bool is_beside_storage(const char *directory)
{
        const char *name = strrchr(directory, '/');

        return name && !strcmp(name, "/.nebula");
}

/* A storage path without `latest` either has no checkpoint yet or is a mount point whose file system is gone. In
 * both cases nothing is made there only for the history. */
static bool storage_is_there(const char *directory)
{
        char path[IPC_PATH_MAX + 32];
        struct os_stat stat;

        snprintf(path, sizeof path, "%.*s/latest", (int)(strrchr(directory, '/') - directory), directory);
        return os->stat(path, false, &stat) >= 0;
}

/* A history that could not be written is tried again only if it lies in the storage path, because a failing storage
 * may have been the cause. */
static bool wants_line(const struct job *job)
{
        return job->output_dir[0] && (!job->history_broken || is_beside_storage(job->output_dir));
}

static void note_result(struct job *job, const char *directory, int result)
{
        if (result < 0 && !job->history_broken)
                log_event(LOG_LEVEL_WARN, "no history is written: %s cannot be written: %s", directory, os_error_text(result));
        job->history_broken = result < 0;
}

bool history_pending(const struct job *job)
{
        return oldest_ended(job) != NULL;
}

static struct version *next_ended(const struct lane *lane)
{
        struct version *oldest = NULL;

        for (const struct job *job = lane->jobs; job && !oldest; job = job->next_in_lane)
                oldest = oldest_ended(job);
        return oldest;
}

void history_flush(struct catalogue *catalogue, const struct lane *lane)
{
        struct version *version;

        catalogue_lock(catalogue);
        while ((version = next_ended(lane))) {
                struct job *job = version->job;
                char line[LINE_BYTES], directory[IPC_PATH_MAX];
                bool write = wants_line(job);
                int result = 0;

                version->recorded = true;
                format_row(version, line);
                memcpy(directory, job->output_dir, sizeof directory);
                if (!write)
                        continue;
                job->pins++;
                catalogue_create_as(job);
                catalogue_unlock(catalogue);
                if (!is_beside_storage(directory) || storage_is_there(directory))
                        result = append(directory, line);
                catalogue_lock(catalogue);
                job->pins--;
                note_result(job, directory, result);
        }
        catalogue_unlock(catalogue);
}
