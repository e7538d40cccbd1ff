/* nebula restore: copies a version's files out of storage, verified, or out of the agent's memory. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/mapped.h"
#include "cli/output_file.h"
#include "cli/table.h"
#include "cli/target.h"
#include "os/lock.h"
#include "os/os.h"
#include "os/process.h"
#include "store/http/crypt.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/record.h"
#include "store/verify.h"

#define PIECE_BYTES (8u << 20)
#define LOOKS_MAX 20 /* attempts, if the checkpoint is removed or written again while it is read */

/* A complete file that does not have its final name yet. */
struct waiting {
        struct output_file output;
        char name[256];
        uint64_t size;
};

struct restore {
        const struct cli_common *common;
        const char *tag; /* the TAG argument */
        char path[TARGET_PATH_MAX], to[TARGET_PATH_MAX];
        const char *const *names; /* only these files; none: all */
        size_t name_count;
        bool force;
        bool is_gone; /* the checkpoint was removed or written again while it was read: search for it again */
        struct lock lock; /* guards the two below, which the signal handling uses */
        struct waiting *waiting;
        size_t waiting_count;
        json_t *files; /* restored files: {"name", "path", "size"} */
        uint64_t bytes;
};

static bool wants(const struct restore *restore, const char *name)
{
        for (size_t i = 0; i < restore->name_count; i++)
                if (!strcmp(restore->names[i], name))
                        return true;
        return !restore->name_count;
}

/* Checked before anything is written, so that a failure leaves no directory half overwritten. A file can replace no directory. */
static enum nebula_status check_free(const struct restore *restore, const char *path, struct nebula_error *error)
{
        char target[2 * TARGET_PATH_MAX];
        struct os_stat stat;

        snprintf(target, sizeof target, "%s/%s", restore->to, path);
        if (os->stat(target, false, &stat))
                return NEBULA_OK;
        if (stat.kind == OS_KIND_DIRECTORY)
                return error_set(error, NEBULA_BUSY, 0, "%s is a directory: move it away, or restore to another directory", target);
        if (restore->force)
                return NEBULA_OK;
        return error_set(error, NEBULA_BUSY, 0, "%s exists already; --force overwrites it", target);
}

static enum nebula_status check_names(const struct restore *restore, const char *const *found, size_t count,
                                      struct nebula_error *error)
{
        for (size_t i = 0; i < restore->name_count; i++) {
                size_t k = 0;

                while (k < count && strcmp(found[k], restore->names[i]))
                        k++;
                if (k == count)
                        return error_set(error, NEBULA_NOT_FOUND, 0, "\"%s\" has no file \"%s\"; see `nebula inspect %s`",
                                         restore->tag, restore->names[i], restore->tag);
        }
        return NEBULA_OK;
}

/* Begins the next file and adds it to the list. If the file does not become complete, abandon_last removes it. */
static enum nebula_status add_file(struct restore *restore, const char *name, const char *path, uint64_t size, struct output_file **ret_output,
                                   struct nebula_error *error)
{
        struct waiting *grown = realloc(restore->waiting, (restore->waiting_count + 1) * sizeof *grown), *one;
        enum nebula_status status;

        if (!grown)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a list of files");
        restore->waiting = grown;
        one = &grown[restore->waiting_count];
        status = output_file_begin(&one->output, restore->to, path, size, error);
        if (status)
                return status;
        snprintf(one->name, sizeof one->name, "%s", name);
        one->size = size;
        restore->waiting_count++;
        *ret_output = &one->output;
        return NEBULA_OK;
}

static enum nebula_status begin_file(struct restore *restore, const char *name, const char *path, uint64_t size, struct output_file **ret_output,
                                     struct nebula_error *error)
{
        enum nebula_status status;

        lock_take(&restore->lock);
        status = add_file(restore, name, path, size, ret_output, error);
        lock_give(&restore->lock);
        return status;
}

/* A signal ends the command. Removes incomplete files; a file that is getting its name gets it first. Keeps the lock
 * until the process ends. */
static void abandon_all(void *argument)
{
        struct restore *restore = argument;

        lock_take(&restore->lock);
        for (size_t i = 0; i < restore->waiting_count; i++)
                os->unlink(restore->waiting[i].output.temporary);
}

/* Gives all files their names; after a failure, gives none. */
static enum nebula_status end_files(struct restore *restore, enum nebula_status status, struct nebula_error *error)
{
        lock_take(&restore->lock);
        for (size_t i = 0; i < restore->waiting_count; i++) {
                struct waiting *one = &restore->waiting[i];

                if (status) {
                        output_file_abandon(&one->output);
                        continue;
                }
                status = output_file_place(&one->output, restore->force, error);
                if (status)
                        continue;
                restore->bytes += one->size;
                json_array_append_new(restore->files, json_pack("{s:s, s:s, s:I}", "name", one->name, "path", one->output.path, "size",
                                                                (json_int_t)one->size));
        }
        free(restore->waiting);
        restore->waiting = NULL;
        restore->waiting_count = 0;
        lock_give(&restore->lock);
        return status;
}

static void on_progress(void *argument, uint64_t bytes)
{
        (void)argument;
        progress_add(bytes);
}

static void on_chunk(void *argument, const void *data, uint64_t offset, uint64_t size)
{
        output_file_write(argument, data, offset, size);
}

/* Called only when there is a file to restore. */
static enum nebula_status make_directory(const struct restore *restore, struct nebula_error *error)
{
        int result = os_make_dirs(restore->to, 0777);

        return result ? error_set(error, NEBULA_STORAGE, -result, "cannot make the directory %s", restore->to) : NEBULA_OK;
}

static enum nebula_status gone(struct restore *restore, struct nebula_error *error)
{
        restore->is_gone = true;
        return error_set(error, NEBULA_NOT_FOUND, 0, "\"%s\" could not be restored: it was removed or written again during each "
                                                     "of the attempts to read it", restore->tag);
}

/* Compares the copy with the signature of the version. */
static enum nebula_status match_output(const struct output_file *output, const struct record_file *recorded, struct nebula_error *error)
{
        uint8_t *piece = malloc(PIECE_BYTES), digest[CRYPT_SHA256_BYTES];
        struct evp_md_ctx_st *sum = crypt_sum_begin();
        int fd = os->open(output->temporary, OS_READ), result = sum && piece ? 0 : -ENOMEM;

        if (fd < 0)
                result = fd;
        for (uint64_t offset = 0; !result && offset < recorded->size; offset += PIECE_BYTES) {
                size_t size = recorded->size - offset < PIECE_BYTES ? (size_t)(recorded->size - offset) : PIECE_BYTES;

                result = os_read_at(fd, piece, size, offset);
                if (!result && !crypt_sum_add(sum, piece, size))
                        result = -ENOMEM;
        }
        if (fd >= 0)
                os->close(fd);
        free(piece);
        if (sum && !crypt_sum_end(sum, digest) && !result)
                result = -ENOMEM;
        if (result)
                return error_set(error, error_status_of_errno(-result), -result, "the copy %.300s cannot be compared with the signature", output->temporary);
        if (!memcmp(digest, recorded->sha256, sizeof digest))
                return NEBULA_OK;
        return error_set(error, NEBULA_CORRUPT, 0, "\"%.200s\" is not what was signed: its SHA-256 differs. Something has replaced it", recorded->name);
}

static enum nebula_status restore_stored_file(struct restore *restore, struct store *store, const struct manifest *manifest,
                                              const struct manifest_file *file, struct nebula_error *error)
{
        struct record_file recorded = { 0 };
        struct verify_watch watch = { .progress = on_progress, .chunk = on_chunk };
        struct output_file *output = NULL;
        char key[MANIFEST_KEY_MAX], encoded[256];
        enum nebula_status status = manifest_load_file(store, manifest, file->name, &recorded, error);

        if (!status)
                status = name_encode(file->name, encoded, error);
        if (!status)
                status = manifest_file_key(manifest, file, key, error);
        if (!status)
                status = begin_file(restore, file->name, encoded, file->size, &output, error);
        if (!status) {
                watch.argument = output;
                status = verify_file(store, key, &recorded, &watch, error);
        }
        if (!status)
                status = output_file_sync(output, error);
        if (!status && recorded.is_signed)
                status = match_output(output, &recorded, error);
        record_file_done(&recorded);
        if ((status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT) && manifest_is_gone(store, manifest))
                status = gone(restore, error);
        return status;
}

static enum nebula_status restore_stored(struct restore *restore, struct store *store, const struct manifest *manifest,
                                         struct nebula_error *error)
{
        const char **found = calloc(manifest->file_count + 1, sizeof *found);
        char encoded[256];
        uint64_t total = 0;
        enum nebula_status status;

        if (!found)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for %zu names", manifest->file_count);
        for (size_t i = 0; i < manifest->file_count; i++)
                found[i] = manifest->files[i].name;
        status = check_names(restore, found, manifest->file_count, error);
        free(found);
        for (size_t i = 0; i < manifest->file_count && !status; i++) {
                if (!wants(restore, manifest->files[i].name))
                        continue;
                total += manifest->files[i].size;
                status = name_encode(manifest->files[i].name, encoded, error);
                if (!status)
                        status = check_free(restore, encoded, error);
        }
        if (!status)
                status = make_directory(restore, error);
        progress_begin("restoring", total);
        for (size_t i = 0; i < manifest->file_count && !status; i++)
                if (wants(restore, manifest->files[i].name))
                        status = restore_stored_file(restore, store, manifest, &manifest->files[i], error);
        progress_end();
        return end_files(restore, status, error);
}

static enum nebula_status restore_memory_file(struct restore *restore, struct cli_agent *agent, uint64_t version_id,
                                              const char *name, struct nebula_error *error)
{
        struct output_file *output = NULL;
        struct mapped mapped;
        char path[256];
        enum nebula_status status = name_encode(name, path, error);

        if (status)
                return status;
        status = mapped_open_memory(agent, version_id, name, &mapped, error);
        if (status)
                return status == NEBULA_NOT_FOUND ? gone(restore, error) : status; /* removed meanwhile: the version listed it */
        status = begin_file(restore, name, path, mapped.size, &output, error);
        if (!status) {
                for (uint64_t offset = 0; offset < mapped.size; offset += PIECE_BYTES) {
                        uint64_t piece = mapped.size - offset < PIECE_BYTES ? mapped.size - offset : PIECE_BYTES;

                        output_file_write(output, (const char *)mapped.data + offset, offset, piece);
                        progress_add(piece);
                }
                status = output_file_sync(output, error);
        }
        mapped_close(&mapped);
        return status;
}

static enum nebula_status restore_memory(struct restore *restore, struct cli_agent *agent, uint64_t version_id,
                                         const json_t *description, struct nebula_error *error)
{
        const json_t *files = json_object_get(description, "files");
        const char **found;
        size_t count = json_array_size(files);
        char path[256];
        uint64_t total = 0;
        enum nebula_status status;

        found = calloc(count + 1, sizeof *found);
        if (!found)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for %zu names", count);
        for (size_t i = 0; i < count; i++)
                found[i] = text_of(json_array_get(files, i), "name");
        status = check_names(restore, found, count, error);
        for (size_t i = 0; i < count && !status; i++) {
                if (!wants(restore, found[i]))
                        continue;
                total += (uint64_t)number_of(json_array_get(files, i), "size");
                status = name_encode(found[i], path, error);
                if (!status)
                        status = check_free(restore, path, error);
        }
        if (!status)
                status = make_directory(restore, error);
        progress_begin("restoring", total);
        for (size_t i = 0; i < count && !status; i++)
                if (wants(restore, found[i]))
                        status = restore_memory_file(restore, agent, version_id, found[i], error);
        progress_end();
        free(found);
        return end_files(restore, status, error);
}

/* A version in memory has no checksums over all its bytes, so it is not called verified. */
static int finish(const struct restore *restore, const char *tag, uint64_t sequence, bool is_verified, double seconds)
{
        const char *source = is_verified ? "storage" : "memory";
        char size[HUMAN_MAX], duration[HUMAN_MAX], speed[HUMAN_MAX];
        size_t count = json_array_size(restore->files);

        if (restore->common->json)
                return cli_print_json(json_pack("{s:s, s:I, s:s, s:I, s:f, s:O}", "tag", tag, "sequence",
                                                (json_int_t)sequence, "source", source, "bytes",
                                                (json_int_t)restore->bytes, "seconds", seconds, "files", restore->files),
                                      CLI_OK);
        for (size_t i = 0; i < count; i++)
                term_print(STYLE_PLAIN, "%s\n", json_string_value(json_object_get(json_array_get(restore->files, i), "path")));
        term_print(STYLE_PLAIN, "%s: ", tag);
        term_print(STYLE_GOOD, "%s in %zu file%s from %s", human_size(restore->bytes, size), count, count == 1 ? "" : "s", source);
        printf("%s, %s, %s\n", is_verified ? ", verified" : "", human_duration(seconds, duration),
               human_speed(restore->bytes, seconds, speed));
        return CLI_OK;
}

/* One attempt. Searches storage and memory. Takes the version from memory only if storage has none or an older one. */
static enum nebula_status restore_once(struct restore *restore, struct cli_agent *agent, struct manifest *ret_manifest,
                                       json_t **ret_remembered, struct nebula_error *error)
{
        struct store *store = NULL;
        enum nebula_status status;
        uint64_t version_id;

        if (*restore->path)
                status = store_open(restore->path, &store, error);
        else
                status = error_set(error, NEBULA_NOT_FOUND, 0, "no checkpoint \"%s\": no storage path is known (--path DIR), "
                                   "and no agent has it in memory",
                                   restore->tag);
        if (!status)
                status = target_load(store, restore->tag, ret_manifest, NULL, error);
        if (agent)
                cli_agent_find_younger(agent, restore->path, restore->tag, ret_manifest->sequence, &version_id, ret_remembered, NULL);
        if (*ret_remembered)
                status = restore_memory(restore, agent, version_id, *ret_remembered, error);
        else if (!status)
                status = restore_stored(restore, store, ret_manifest, error);
        if (store)
                store_close(store);
        return status;
}

static int restore_from_best(struct restore *restore)
{
        int64_t begun_ns = os->now_ns();
        struct nebula_error error;
        struct manifest manifest = { 0 };
        json_t *remembered = NULL;
        struct cli_agent *agent = NULL;
        enum nebula_status status = NEBULA_OK;
        int code;

        cli_agent_open_if_any(restore->path, &agent);
        for (int look = 0; look < LOOKS_MAX && (!look || restore->is_gone); look++) {
                restore->is_gone = false;
                json_decref(remembered);
                manifest_done(&manifest);
                memset(&manifest, 0, sizeof manifest);
                remembered = NULL;
                status = restore_once(restore, agent, &manifest, &remembered, &error);
        }
        if (!status && os_sync_dir(restore->to))
                status = error_set(&error, NEBULA_STORAGE, 0, "cannot sync %s", restore->to);
        if (status)
                code = cli_fail(restore->common->json, &error);
        else if (remembered)
                code = finish(restore, text_of(remembered, "tag"), (uint64_t)json_integer_value(json_object_get(remembered, "sequence")), false,
                              (double)(os->now_ns() - begun_ns) / 1e9);
        else
                code = finish(restore, manifest.tag, manifest.sequence, true, (double)(os->now_ns() - begun_ns) / 1e9);
        if (status == NEBULA_BUSY)
                code = CLI_REFUSED;
        json_decref(remembered);
        manifest_done(&manifest);
        cli_agent_close(agent);
        return code;
}

/* --hf, also as --hf=DIR */
static bool wants_hf(int argc, char **argv)
{
        for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
                if (!strcmp(argv[i], "--hf") || !strncmp(argv[i], "--hf=", 5))
                        return true;
        return false;
}

int command_restore(int argc, char **argv)
{
        struct cli_common common = { 0 };
        const char *to = NULL;
        static struct restore restore = { .lock = LOCK_INIT(LOCK_RESTORE) }; /* static: the signal handling uses it until the process ends */
        const struct args_option options[] = {
                CLI_COMMON(common), { "to", ARGS_TEXT, &to }, { "force", ARGS_FLAG, &restore.force },
        };
        struct nebula_error error;
        struct args args;
        int code;

        if (wants_hf(argc, argv))
                return command_python(argc, argv); /* its tensors are torch's */
        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 1, ARGS_POSITIONAL_MAX))
                return CLI_USAGE;
        if (!to)
                return cli_usage_error("restore", "--to DIR, or --hf DIR, is missing");
        if (target_path(common.path, restore.path, &error) || target_absolute(to, restore.to, &error))
                return cli_fail(common.json, &error);
        os_signals_clean(abandon_all, &restore); /* if this fails, a signal leaves incomplete files behind */
        restore.common = &common;
        restore.tag = args.positionals[0];
        restore.names = args.positionals + 1;
        restore.name_count = args.count - 1;
        restore.files = json_array();
        code = restore_from_best(&restore);
        json_decref(restore.files);
        return code;
}
