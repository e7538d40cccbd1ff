#include "cli/target.h"

#include <stdio.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "base/text.h"
#include "cli/cli.h"
#include "os/os.h"
#include "store/manifest_load.h"
#include "store/place.h"
#include "store/scan.h"

/* Removes "", "." and ".." from the text of the path without looking at links, as Python's abspath does: that is the
 * name under which the agent knows the path. */
static void normalise(char *path)
{
        char *from = path, *to = path;

        while (*from) {
                size_t length = strcspn(++from, "/"); /* skips the slash */

                if (length == 2 && from[0] == '.' && from[1] == '.') {
                        while (to > path && *--to != '/')
                                ;
                } else if (length && !(length == 1 && from[0] == '.')) {
                        *to++ = '/';
                        memmove(to, from, length);
                        to += length;
                }
                from += length;
        }
        if (to == path)
                *to++ = '/';
        *to = '\0';
}

enum nebula_status target_absolute(const char *path, char ret_path[TARGET_PATH_MAX], struct nebula_error *error)
{
        char here[TARGET_PATH_MAX] = "";
        bool is_url = strstr(path, "://") != NULL;
        int length;

        if (*path != '/' && !is_url) {
                int result = os->readlink("/proc/self/cwd", here, sizeof here - 1);

                if (result < 0)
                        return error_set(error, NEBULA_STORAGE, -result, "the current directory cannot be found");
                here[result] = '\0';
        }
        length = snprintf(ret_path, TARGET_PATH_MAX, "%s%s%s", here, *here ? "/" : "", path);
        if (length < 0 || length >= TARGET_PATH_MAX)
                return error_set(error, NEBULA_INVALID, 0, "the path \"%.80s...\" is too long", path);
        if (!text_is_utf8(ret_path, (size_t)length)) /* it may come from the current directory */
                return error_set(error, NEBULA_INVALID, 0, "the path \"%.200s\" is not valid UTF-8", ret_path);
        if (is_url) {
                place_keep(ret_path); /* store_open finds the signature; nothing prints it */
                place_normalize(ret_path);
        } else {
                normalise(ret_path);
        }
        return NEBULA_OK;
}

enum nebula_status target_below(const char *parent, const char *key, char ret_path[TARGET_PATH_MAX], struct nebula_error *error)
{
        char *query = strstr(parent, "://") ? place_query(parent) : NULL;
        size_t key_length = strlen(key), length = strlen(parent);
        char url[2 * TARGET_PATH_MAX];
        enum nebula_status status = NEBULA_OK;

        while (key_length && key[key_length - 1] == '/')
                key_length--;
        while (length > 1 && parent[length - 1] == '/')
                length--;
        if (snprintf(url, sizeof url, "%.*s/%.*s%s%s", (int)length, parent, (int)key_length, key, query && *query != '?' ? "?" : "", query ? query : "") >=
            (int)sizeof url)
                status = error_set(error, NEBULA_INVALID, 0, "the path of %s is too long", key);
        place_forget(query);
        return status ? status : target_absolute(url, ret_path, error);
}

static bool holds_checkpoints(const char *path)
{
        struct manifest_scan scan = { 0 };
        struct store *store;
        bool holds;

        if (store_open(path, &store, NULL))
                return false;
        holds = !manifest_scan_index(store, &scan, NULL) && scan.count + scan.broken_count > 0;
        manifest_scan_done(&scan);
        store_close(store);
        return holds;
}

enum nebula_status target_path(const char *given, char ret_path[TARGET_PATH_MAX], struct nebula_error *error)
{
        const char *set = conf_env("NEBULA_PERSISTENT_STORAGE_PATH");

        if (given)
                return target_absolute(given, ret_path, error);
        if (set)
                return target_absolute(set, ret_path, error);
        if (target_absolute(".", ret_path, NULL) || !holds_checkpoints(ret_path))
                ret_path[0] = '\0';
        return NEBULA_OK;
}

enum nebula_status target_open(const char *given, struct store **ret_store, struct nebula_error *error)
{
        char path[TARGET_PATH_MAX];
        enum nebula_status status = target_path(given, path, error);

        if (status)
                return status;
        if (!*path)
                return error_set(error, NEBULA_INVALID, 0,
                                 "no storage path is known: give --path DIR, set NEBULA_PERSISTENT_STORAGE_PATH, or go to a "
                                 "directory with checkpoints");
        return store_open(path, ret_store, error);
}

enum nebula_status target_load(struct store *store, const char *tag, struct manifest *ret_manifest, size_t *ret_passed_over,
                               struct nebula_error *error)
{
        struct manifest_scan scan;
        struct nebula_error failure;
        int64_t newest;
        enum nebula_status status;

        if (tag && strcmp(tag, "latest")) {
                status = manifest_load(store, tag, ret_manifest, &failure);
                if (status == NEBULA_NOT_FOUND)
                        return error_set(error, status, 0, "no complete checkpoint \"%s\" in %s; see `nebula list --path %s`",
                                         tag, store->root, store->root);
                if (status && error)
                        *error = failure;
                return status;
        }
        status = manifest_scan_index(store, &scan, error);
        if (status)
                return status;
        status = manifest_scan_load_newest(store, &scan, NULL, ret_manifest, &newest, error);
        if (status == NEBULA_NOT_FOUND) {
                if (scan.broken_count)
                        status = error_set(error, NEBULA_CORRUPT, 0, "%s", scan.broken);
                else
                        status = error_set(error, NEBULA_NOT_FOUND, 0, "no complete checkpoint in %s", store->root);
        } else if (!status) {
                if (ret_passed_over)
                        *ret_passed_over = scan.broken_count;
                text_make_printable(scan.broken);
                if (scan.broken_count == 1)
                        cli_complain("skipped a checkpoint that cannot be read: %s", scan.broken);
                else if (scan.broken_count)
                        cli_complain("skipped %zu checkpoints that cannot be read; the first: %s", scan.broken_count, scan.broken);
        }
        manifest_scan_done(&scan);
        return status;
}
