/* Removes files of old versions, by the rules of keep_items. Worker only. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/log.h"
#include "agent/persist/persist_private.h"
#include "agent/persist/slots_private.h"
#include "base/error.h"
#include "os/os.h"
#include "store/pins.h"
#include "store/thin.h"

/* A brief copy of the manifest of a version that is to lose its files of that pattern. False: it has none left, or it is in use. */
static bool copy_thick(struct catalogue *catalogue, struct job *job, const char *tag, const char *pattern, struct manifest *ret_manifest)
{
        const struct manifest *manifest;
        bool is_due;

        catalogue_lock(catalogue);
        manifest = known_find(&job->known, tag);
        is_due = manifest && !thin_has(manifest, pattern) && !retain_in_use(job, manifest) && !ancestry_is_rival(job, manifest->run);
        if (is_due)
                manifest_copy_brief(manifest, ret_manifest);
        catalogue_unlock(catalogue);
        return is_due;
}

/* The list names a pattern also if no file of the version matches it, or no other file would be left: so the version is not read again. Lock held. */
static void mark(struct job *job, const char *tag, uint64_t sequence, const char *pattern)
{
        struct manifest *one = (struct manifest *)known_find(&job->known, tag); /* the list is the worker's */

        if (one && one->sequence == sequence)
                thin_note(one, pattern);
}

/* A version that cannot be thinned now is tried again after the next version. */
static void thin_one(struct catalogue *catalogue, struct job *job, struct store *store, const char *tag, const struct thin_rule *rule)
{
        struct manifest before = { 0 }, now = { 0 };
        struct nebula_error error;
        uint64_t bytes;
        enum nebula_status status;

        if (!copy_thick(catalogue, job, tag, rule->pattern, &before))
                return;
        status = thin_version(store, &before, rule->pattern, &now, &bytes, &error);
        if (status && status != NEBULA_INVALID)
                log_event(LOG_LEVEL_WARN, "%s of %s keeps its files \"%s\": %s", tag, job->persist_path, rule->pattern, error.message);
        else if (!status && bytes)
                log_event(LOG_LEVEL_INFO, "removed %" PRIu64 " MiB, the files \"%s\" of %s in %s, by keep_items", bytes >> 20, rule->pattern, tag,
                          job->persist_path);
        catalogue_lock(catalogue);
        if (!status)
                known_put(&job->known, job->name, &now);
        if (!status || status == NEBULA_INVALID)
                mark(job, tag, before.sequence, rule->pattern);
        catalogue_unlock(catalogue);
        manifest_done(&now);
        manifest_done(&before);
}

static enum nebula_status apply(struct catalogue *catalogue, struct job *job, struct store *store, const struct thin_rule *rule,
                                const struct pins *pins, int64_t until, bool *ret_has_more, struct nebula_error *error)
{
        struct dropped old;
        size_t next;
        enum nebula_status status = retain_decide_items(catalogue, job, rule->last, &old, error);

        for (next = 0; !status && next < old.count && (!next || os->now_ns() < until); next++)
                if (!pins_find(pins, old.tags[next]))
                        thin_one(catalogue, job, store, old.tags[next], rule);
        *ret_has_more |= !status && next < old.count;
        free(old.tags);
        return status;
}

enum nebula_status retain_items(struct catalogue *catalogue, struct job *job, struct store *store, bool *ret_has_more, struct nebula_error *error)
{
        int64_t until = os->now_ns() + RETAIN_TURN_NS;
        struct thin_rules rules;
        char text[IPC_NAME_MAX];
        struct pins pins;
        enum nebula_status status;

        catalogue_lock(catalogue);
        memcpy(text, job->settings.items, sizeof text);
        catalogue_unlock(catalogue);
        if (!*text || thin_parse(text, &rules, NULL))
                return NEBULA_OK;
        status = retain_load_kept(store, &pins, error);
        if (status)
                return status;
        for (size_t i = 0; i < rules.count && !status; i++)
                status = apply(catalogue, job, store, &rules.list[i], &pins, until, ret_has_more, error);
        pins_done(&pins);
        return status;
}
