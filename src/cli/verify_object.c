/* See verify_object.h. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "cli/verify_object.h"
#include "os/os.h"
#include "store/manifest_load.h"
#include "store/place.h"
#include "store/rebuild.h"
#include "store/tag_log.h"

static bool is_kind(const char *path, enum os_kind kind)
{
        struct os_stat stat;

        return !os->stat(path, true, &stat) && stat.kind == kind;
}

static bool is_url(const char *path)
{
        return strstr(path, "://") != NULL;
}

/* Cuts the last component off the path and copies it to ret_last; false at the root. */
static bool cut_last(char *path, char ret_last[256])
{
        char *slash = strrchr(path, '/');
        char *url = is_url(path) ? place_signed(path) : NULL, *query = url ? strchr(url, '?') : NULL;
        bool can_cut = slash && slash != path && slash[-1] != '/' && strlen(slash + 1) <= 255;

        if (can_cut) {
                strcpy(ret_last, slash + 1);
                *slash = '\0';
        }
        if (can_cut && query) { /* a signature holds for what is above, too, or the store refuses it */
                memmove(url + strlen(path), query, strlen(query) + 1);
                place_keep(url);
        }
        place_forget(url);
        return can_cut;
}

/* Whether the directory of that path is that of a tag. */
static bool holds_manifest(const char *directory)
{
        char parent[TARGET_PATH_MAX], encoded[256], tag[256];
        struct store *store;
        uint64_t number = 0;

        strcpy(parent, directory);
        if (!cut_last(parent, encoded) || name_decode(encoded, tag, NULL) || store_open(parent, &store, NULL))
                return false;
        if (tag_log_number(store, tag, &number, NULL))
                number = 0;
        store_close(store);
        return number > 0;
}

static enum nebula_status name_of_path(struct verify_object *object, const char *inside, struct nebula_error *error)
{
        struct manifest manifest;
        enum nebula_status status = manifest_load(object->store, object->tag, &manifest, error);

        if (status)
                return status;
        status = NEBULA_NOT_FOUND;
        for (size_t i = 0; i < manifest.file_count && status; i++) {
                char encoded[256];

                if (name_encode(manifest.files[i].name, encoded, NULL) || strcmp(encoded, inside))
                        continue;
                strcpy(object->name, manifest.files[i].name);
                status = NEBULA_OK;
        }
        manifest_done(&manifest);
        return status ? error_set(error, status, 0, "\"%s\" has no file \"%s\"", object->tag, inside) : NEBULA_OK;
}

/* Finds out what the path is: a version's directory, a file in one, a directory of versions, or a file on its own. */
static enum nebula_status resolve_path(struct verify_object *object, struct nebula_error *error)
{
        char directory[TARGET_PATH_MAX], file[256] = "", encoded[256];
        enum nebula_status status;

        strcpy(directory, object->path);
        if (is_url(directory) && !holds_manifest(directory)) { /* TAG/FILE, or a storage path */
                if (!cut_last(directory, file) || !holds_manifest(directory)) {
                        strcpy(directory, object->path);
                        file[0] = '\0';
                }
        } else if (is_kind(directory, OS_KIND_FILE) && !cut_last(directory, file))
                return error_set(error, NEBULA_INVALID, 0, "cannot verify %s", object->path);
        if (!strncmp(file, "manifest-", 9) || strstr(file, ".record-")) {
                if (strlen(directory) > 8 && !strcmp(directory + strlen(directory) - 8, "/" MANIFEST_DIRECTORY)) {
                        cut_last(directory, encoded);
                        file[0] = '\0'; /* a manifest or record covers its version: check the whole version */
                }
        }
        if (!holds_manifest(directory)) {
                if (*file)
                        return NEBULA_OK; /* a file on its own */
                return store_open(directory, &object->store, error);
        }
        if (!cut_last(directory, encoded) || name_decode(encoded, object->tag, error))
                return error_set(error, NEBULA_INVALID, 0, "%s is not the directory of a checkpoint", object->path);
        status = store_open(directory, &object->store, error);
        if (!status && *file && name_of_path(object, file, error))
                status = error ? error->status : NEBULA_NOT_FOUND;
        return status;
}

enum nebula_status verify_resolve(const char *given_path, const char *word, bool all, bool can_be_lost, struct verify_object *object,
                                  struct nebula_error *error)
{
        struct nebula_error absent;
        struct manifest manifest;
        enum nebula_status status;

        if (word && !*word) /* an empty path is not the current directory */
                return error_set(error, NEBULA_INVALID, 0, "a tag or path is empty");
        if (word && is_url(word) && !given_path) {
                status = target_absolute(word, object->path, error);
                return status ? status : resolve_path(object, error);
        }
        status = target_open(given_path, &object->store, &absent);
        if (!status && all)
                return NEBULA_OK;
        if (!status) {
                status = target_load(object->store, word, &manifest, &object->passed_over, &absent);
                if (!status) {
                        strcpy(object->tag, manifest.tag);
                        object->is_newest = !word || !strcmp(word, "latest");
                        manifest_done(&manifest);
                        return NEBULA_OK;
                }
                if (word && strcmp(word, "latest") && (status == NEBULA_CORRUPT || (can_be_lost && rebuild_is_lost(object->store, word)))) {
                        snprintf(object->tag, sizeof object->tag, "%s", word);
                        return NEBULA_OK; /* the check reports what is wrong with it */
                }
                store_close(object->store);
                object->store = NULL;
        }
        if (word && !target_absolute(word, object->path, error) &&
            (is_kind(object->path, OS_KIND_FILE) || is_kind(object->path, OS_KIND_DIRECTORY)))
                return resolve_path(object, error);
        if (word && given_path == NULL && status == NEBULA_INVALID)
                return error_set(error, NEBULA_NOT_FOUND, 0, "\"%s\" is neither a tag nor a path", word);
        *error = absent;
        return status;
}
