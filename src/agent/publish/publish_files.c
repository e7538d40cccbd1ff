/* Puts the files of a version at the paths that a framework chose. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/persist/storage.h"
#include "agent/publish/publish_private.h"
#include "base/error.h"
#include "os/os.h"
#include "store/manifest_load.h"

/* Puts one file of the version at `to`, by one rename. It is durable except for its directory's entry. */
static enum nebula_status put(struct catalogue *catalogue, struct job *job, const struct publish *publish, const char *name,
                              const char *to, struct nebula_error *error)
{
        char own[PUBLISH_PATH_MAX], parent[PUBLISH_PATH_MAX];
        enum nebula_status status;
        int result;

        publish_parent_of(to, parent);
        result = os_make_dirs(parent, PUBLISH_DIRECTORY_MODE);
        if (result < 0)
                return publish_fail(error, "make", parent, result);
        publish_unfinished_name(to, publish, own);
        os->unlink(own);
        status = publish_make_file(catalogue, job, publish, name, own, error);
        if (status)
                return status;
        result = os->rename(own, to);
        os->unlink(own); /* if both names are of the same file, rename does nothing and leaves both */
        return result < 0 ? publish_fail(error, "rename to", to, result) : NEBULA_OK;
}

enum nebula_status publish_put_file(struct catalogue *catalogue, struct job *job, const struct publish *publish,
                                    struct nebula_error *error)
{
        enum nebula_status status = put(catalogue, job, publish, publish->name, publish->path, error);
        int result;

        if (status)
                return status;
        result = publish_sync_way(publish->path);
        return result < 0 ? publish_fail(error, "sync the directory of", publish->path, result) : NEBULA_OK;
}

/* Whether a name stays below its directory. */
static bool stays_below(const char *name)
{
        for (const char *part = name;; part++) {
                size_t length = strcspn(part, "/");

                if (!length || (length == 1 && part[0] == '.') || (length == 2 && part[0] == '.' && part[1] == '.'))
                        return false;
                part += length;
                if (!*part)
                        return true;
        }
}

struct names {
        char (*names)[IPC_NAME_MAX];
        size_t count;
};

/* Lists the version's files: from the catalogue, or else from its manifest. */
static enum nebula_status list_files(struct catalogue *catalogue, struct job *job, const struct publish *publish,
                                     struct names *ret_names, struct nebula_error *error)
{
        struct manifest manifest = { 0 };
        struct version *version;
        struct names names = { 0 };
        struct store *store;
        enum nebula_status status;

        catalogue_lock(catalogue);
        version = catalogue_version(catalogue, publish->version_id);
        if (version) {
                names.names = calloc(version->file_count + 1, sizeof *names.names);
                for (size_t i = 0; names.names && i < version->file_count; i++)
                        strcpy(names.names[names.count++], version->files[i].name);
        }
        catalogue_unlock(catalogue);
        if (!version) {
                status = storage_open(catalogue, job, &store, error);
                if (!status)
                        status = manifest_load(store, publish->tag, &manifest, error);
                if (!status && (strcmp(manifest.job, job->name) || manifest.sequence != publish->sequence))
                        status = error_set(error, NEBULA_NOT_FOUND, 0, "checkpoint \"%.200s\" was lost or written again", publish->tag);
                if (status) {
                        manifest_done(&manifest);
                        return status;
                }
                names.names = calloc(manifest.file_count + 1, sizeof *names.names);
                for (size_t i = 0; names.names && i < manifest.file_count; i++)
                        strcpy(names.names[names.count++], manifest.files[i].name);
                manifest_done(&manifest);
        }
        if (!names.names)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to list the files of \"%.200s\"", publish->tag);
        *ret_names = names;
        return NEBULA_OK;
}

/* Puts all files into the staging directory, except those that the framework staged itself. */
static enum nebula_status fill_staging(struct catalogue *catalogue, struct job *job, const struct publish *publish,
                                       struct nebula_error *error)
{
        struct names names = { 0 };
        char to[PUBLISH_PATH_MAX];
        enum nebula_status status = list_files(catalogue, job, publish, &names, error);
        int result;

        if (status)
                return status;
        result = os_make_dirs(publish->staging, PUBLISH_DIRECTORY_MODE);
        if (result < 0)
                status = publish_fail(error, "make", publish->staging, result);
        for (size_t i = 0; !status && i < names.count; i++) {
                if (!stays_below(names.names[i])) {
                        status = error_set(error, NEBULA_INVALID, 0, "the file name \"%.200s\" leads out of its directory",
                                           names.names[i]);
                        break;
                }
                snprintf(to, sizeof to, "%.4200s/%s", publish->staging, names.names[i]);
                status = put(catalogue, job, publish, names.names[i], to, error);
        }
        free(names.names);
        return status;
}

enum nebula_status publish_put_directory(struct catalogue *catalogue, struct job *job, const struct publish *publish,
                                         struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        /* The staged files exist only once: a second attempt must not replace the files that the first one has moved to the path. */
        if (!publish_is_there(publish)) {
                status = fill_staging(catalogue, job, publish, error);
                if (!status)
                        status = publish_move_directory(job, publish, error);
        }
        return status ? status : publish_finish_directory(publish, error);
}
