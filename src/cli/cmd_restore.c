/* nebula restore: verified copies of a version's files, from storage or from the agent's memory. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/human.h"
#include "cli/link.h"
#include "cli/sink.h"
#include "cli/table.h"
#include "cli/target.h"
#include "cli/view.h"
#include "os/os.h"
#include "store/verify.h"

#define PIECE_BYTES (8u << 20)

struct restore {
        const struct cli_common *common;
        const char *tag; /* as asked */
        char path[TARGET_PATH_MAX], to[TARGET_PATH_MAX];
        const char *const *names; /* only these; none: all */
        size_t name_count;
        bool force;
        json_t *files; /* what was restored: {"name", "path", "size"} */
        uint64_t bytes;
};

static bool wants(const struct restore *restore, const char *name)
{
        for (size_t i = 0; i < restore->name_count; i++)
                if (!strcmp(restore->names[i], name))
                        return true;
        return !restore->name_count;
}

/* Looks before anything is written: a half overwritten directory helps nobody. */
static enum nebula_status check_free(const struct restore *restore, const char *path, struct nebula_error *error)
{
        char target[2 * TARGET_PATH_MAX];
        struct os_stat stat;

        snprintf(target, sizeof target, "%s/%s", restore->to, path);
        if (restore->force || os->stat(target, false, &stat))
                return NEBULA_OK;
        return error_set(error, NEBULA_BUSY, 0, "%s is there already; --force overwrites", target);
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

static void note_restored(struct restore *restore, const char *name, const char *path, uint64_t size)
{
        char *target;

        restore->bytes += size;
        if (asprintf(&target, "%s/%s", restore->to, path) < 0)
                return;
        json_array_append_new(restore->files, json_pack("{s:s, s:s, s:I}", "name", name, "path", target, "size", (json_int_t)size));
        free(target);
}

static void on_progress(void *argument, uint64_t bytes)
{
        (void)argument;
        progress_add(bytes);
}

static void on_chunk(void *argument, const void *data, uint64_t offset, uint64_t size)
{
        sink_write(argument, data, offset, size);
}

/* Once it is known that there is something to restore. */
static enum nebula_status make_directory(const struct restore *restore, struct nebula_error *error)
{
        int result = os_make_dirs(restore->to, 0755);

        return result ? error_set(error, NEBULA_STORAGE, -result, "cannot make the directory %s", restore->to) : NEBULA_OK;
}

static enum nebula_status restore_stored_file(struct restore *restore, struct store *store, const struct manifest *manifest,
                                              const struct manifest_file *file, struct nebula_error *error)
{
        struct record_file recorded = { 0 };
        struct sink sink;
        const struct verify_watch watch = { .argument = &sink, .progress = on_progress, .chunk = on_chunk };
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = manifest_load_file(store, manifest, file->name, &recorded, error);

        if (!status)
                status = manifest_file_key(store, manifest, file, key, error);
        if (!status)
                status = sink_begin(&sink, restore->to, file->path, file->size, error);
        if (!status) {
                status = verify_file(store, key, &recorded, &watch, error);
                if (status)
                        sink_abandon(&sink);
                else
                        status = sink_finish(&sink, restore->force, error);
        }
        if (!status)
                note_restored(restore, file->name, file->path, file->size);
        record_file_done(&recorded);
        return status;
}

static enum nebula_status restore_stored(struct restore *restore, struct store *store, const struct manifest *manifest,
                                         struct nebula_error *error)
{
        const char **found = calloc(manifest->file_count + 1, sizeof *found);
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
                status = check_free(restore, manifest->files[i].path, error);
        }
        if (!status)
                status = make_directory(restore, error);
        progress_begin("restoring", total);
        for (size_t i = 0; i < manifest->file_count && !status; i++)
                if (wants(restore, manifest->files[i].name))
                        status = restore_stored_file(restore, store, manifest, &manifest->files[i], error);
        progress_end();
        return status;
}

static enum nebula_status restore_memory_file(struct restore *restore, struct link *link, uint64_t version_id,
                                              const char *name, struct nebula_error *error)
{
        struct sink sink;
        struct view view;
        char path[256];
        enum nebula_status status = name_encode(name, path, error);

        if (!status)
                status = view_open_memory(link, version_id, name, &view, error);
        if (status)
                return status;
        status = sink_begin(&sink, restore->to, path, view.size, error);
        if (!status) {
                for (uint64_t offset = 0; offset < view.size; offset += PIECE_BYTES) {
                        uint64_t piece = view.size - offset < PIECE_BYTES ? view.size - offset : PIECE_BYTES;

                        sink_write(&sink, (const char *)view.data + offset, offset, piece);
                        progress_add(piece);
                }
                status = sink_finish(&sink, restore->force, error);
        }
        if (!status)
                note_restored(restore, name, path, view.size);
        view_close(&view);
        return status;
}

static enum nebula_status restore_memory(struct restore *restore, struct link *link, uint64_t version_id,
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
                        status = restore_memory_file(restore, link, version_id, found[i], error);
        progress_end();
        free(found);
        return status;
}

static int finish(const struct restore *restore, const char *tag, uint64_t generation, const char *source, double seconds)
{
        char size[HUMAN_MAX], duration[HUMAN_MAX], speed[HUMAN_MAX];
        size_t count = json_array_size(restore->files);

        if (restore->common->json)
                return cli_print_json(json_pack("{s:s, s:I, s:s, s:I, s:f, s:O}", "tag", tag, "generation",
                                                (json_int_t)generation, "source", source, "bytes",
                                                (json_int_t)restore->bytes, "seconds", seconds, "files", restore->files),
                                      CLI_OK);
        for (size_t i = 0; i < count; i++)
                term_print(STYLE_PLAIN, "%s\n", json_string_value(json_object_get(json_array_get(restore->files, i), "path")));
        term_print(STYLE_PLAIN, "%s: ", tag);
        term_print(STYLE_GOOD, "%s in %zu file%s from %s", human_size(restore->bytes, size), count, count == 1 ? "" : "s", source);
        printf(", verified, %s, %s\n", human_duration(seconds, duration), human_speed(restore->bytes, seconds, speed));
        return CLI_OK;
}

/* Both places are asked; memory is used when it alone has the version, or has a younger one. */
static int restore_from_best(struct restore *restore)
{
        int64_t begun_ns = os->now_ns();
        struct nebula_error error;
        struct manifest manifest = { 0 };
        json_t *remembered = NULL;
        struct store *store = NULL;
        struct link *link = NULL;
        uint64_t version_id;
        enum nebula_status status;
        int code;

        if (*restore->path)
                status = store_open(restore->path, &store, &error);
        else
                status = error_set(&error, NEBULA_NOT_FOUND, 0, "no checkpoint \"%s\": no storage was named and no agent has it",
                                   restore->tag);
        if (!status)
                status = target_load(store, restore->tag, &manifest, &error);
        if (link_open_if_any(restore->path, &link))
                link_find_younger(link, restore->path, restore->tag, manifest.sequence, &version_id, &remembered, NULL);
        if (remembered)
                status = restore_memory(restore, link, version_id, remembered, &error);
        else if (!status)
                status = restore_stored(restore, store, &manifest, &error);
        if (!status && os_sync_dir(restore->to))
                status = error_set(&error, NEBULA_STORAGE, 0, "cannot sync %s", restore->to);
        if (status)
                code = cli_fail(restore->common->json, &error);
        else if (remembered)
                code = finish(restore, text_of(remembered, "tag"), (uint64_t)number_of(remembered, "generation"), "memory",
                              (double)(os->now_ns() - begun_ns) / 1e9);
        else
                code = finish(restore, manifest.tag, manifest.generation, "storage", (double)(os->now_ns() - begun_ns) / 1e9);
        if (status == NEBULA_BUSY)
                code = CLI_REFUSED;
        json_decref(remembered);
        manifest_done(&manifest);
        if (store)
                store_close(store);
        link_close(link);
        return code;
}

int command_restore(int argc, char **argv)
{
        struct cli_common common = { 0 };
        const char *to = NULL;
        struct restore restore = { .common = &common };
        const struct args_option options[] = {
                CLI_COMMON(common), { "to", ARGS_TEXT, &to }, { "force", ARGS_FLAG, &restore.force },
        };
        struct nebula_error error;
        struct args args;
        int code;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 1, ARGS_POSITIONAL_MAX))
                return CLI_USAGE;
        if (!to)
                return cli_usage_error("restore", "--to DIR is missing");
        if (target_path(common.path, restore.path, &error) || target_absolute(to, restore.to, &error))
                return cli_fail(common.json, &error);
        restore.tag = args.positionals[0];
        restore.names = args.positionals + 1;
        restore.name_count = args.count - 1;
        restore.files = json_array();
        code = restore_from_best(&restore);
        json_decref(restore.files);
        return code;
}
