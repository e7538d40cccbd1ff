/* "latest": a hint for programs that know no manifests, one line with the directory of the newest version. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "agent/persist/persist_private.h"

#define LATEST "latest"
#define LATEST_BYTES_MAX 256 /* an encoded tag and a newline */

/* Whether a directory of this name is there. True also if storage does not tell. */
static bool has_directory(struct store *store, const char *directory)
{
        const struct store_entry *entry;
        struct store_list list;
        bool result;

        if (store_list_all(store, directory, false, &list, NULL))
                return true;
        entry = store_list_find(&list, directory);
        result = entry && entry->is_prefix;
        store_list_done(&list);
        return result;
}

/* A hint names a directory that is there, or a step: the user may have moved that version away. Ends the text before its newline. */
static bool is_hint(struct store *store, char *text, size_t size)
{
        char tag[256];

        if (strlen(text) != size)
                return false;
        if (size && text[size - 1] == '\n')
                text[size - 1] = 0;
        return !name_decode(text, tag, NULL) && (name_step(tag) >= 0 || has_directory(store, text));
}

/* The name is not Nebula's alone: a user's file, directory or link stays. */
static bool may_write(struct store *store)
{
        struct nebula_error failure = { 0 };
        size_t size;
        char *text;
        bool result;
        enum nebula_status status = store->ops->get(store, LATEST, LATEST_BYTES_MAX, &text, &size, NULL, &failure);

        if (status == NEBULA_NOT_FOUND)
                return !has_directory(store, LATEST);
        if (status)
                return false;
        result = is_hint(store, text, size);
        free(text);
        return result;
}

static enum nebula_status put(struct store *store, const char *directory, struct nebula_error *error)
{
        char text[IPC_NAME_MAX + 2];

        snprintf(text, sizeof text, "%s\n", directory);
        return store_put_text(store, LATEST, text, STORE_ALWAYS, error);
}

void latest_write(struct store *store, struct job *job, const char *directory)
{
        struct nebula_error error = { 0 };

        if (!may_write(store)) {
                if (!job->latest_told)
                        log_event(LOG_LEVEL_WARN, "%s/" LATEST " was not written by Nebula, and is left alone: it does not name the newest checkpoint. "
                                  "Move it away to have it written", store->root);
                job->latest_told = true;
                return;
        }
        if (put(store, directory, &error))
                log_event(LOG_LEVEL_WARN, "the hint \"latest\" could not be written: %s", error.message);
}

/* The hint, if it names a step that is gone; "": it does not. Another name may be the user's own text. */
static void find_dead_hint(struct store *store, char ret_directory[LATEST_BYTES_MAX + 1])
{
        struct manifest there = { 0 };
        char *hint, tag[256];
        size_t size;

        ret_directory[0] = 0;
        if (store->ops->get(store, LATEST, LATEST_BYTES_MAX, &hint, &size, NULL, NULL))
                return;
        if (size && strlen(hint) == size && hint[size - 1] == '\n') {
                hint[size - 1] = 0;
                if (!name_decode(hint, tag, NULL) && name_follows_step(tag) && !has_directory(store, hint) &&
                    manifest_load(store, tag, &there, NULL) == NEBULA_NOT_FOUND)
                        snprintf(ret_directory, LATEST_BYTES_MAX + 1, "%s", hint);
        }
        manifest_done(&there);
        free(hint);
}

void latest_mend(struct catalogue *catalogue, struct job *job, struct store *store)
{
        char newest_directory[256] = "", dead[LATEST_BYTES_MAX + 1];
        int64_t newest;

        catalogue_lock(catalogue);
        newest = manifest_scan_newest(&job->stored, job->name);
        if (newest >= 0 && name_encode(job->stored.manifests[newest].tag, newest_directory, NULL))
                newest_directory[0] = 0;
        catalogue_unlock(catalogue);
        if (!*newest_directory)
                return;
        find_dead_hint(store, dead);
        if (*dead && !put(store, newest_directory, NULL))
                log_event(LOG_LEVEL_WARN, "the hint \"latest\" in %s named %s, which is gone: it names %s now", job->persist_path, dead, newest_directory);
}
