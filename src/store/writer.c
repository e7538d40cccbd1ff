#include "store/manifest_check.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_publish.h"
#include "store/manifest_remove.h"
#include "store/record.h"
#include "store/signature.h"
#include "store/writer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/document.h"
#include "store/index.h"
#include "store/lanes.h"
#include "store/manifest_private.h"
#include "store/writer_private.h"

#define CHECK_LATE_NS (300 * SECOND_NS) /* a sweep ends the work of an entry that is 15 minutes old (sweep.c) */
#define PUT_WIDTH 8u

typedef enum nebula_status step(struct writer *writer, struct nebula_error *error);

enum nebula_status writer_init(struct writer *writer, struct store *store, const struct writer_source *source, void *argument, const char *tag,
                               struct nebula_error *error)
{
        memset(writer, 0, sizeof *writer);
        writer->store = store;
        writer->source = source;
        writer->argument = argument;
        return name_encode(tag, writer->directory, error);
}

static void share_done(struct writer_share *share)
{
        for (size_t i = 0; i < share->record.file_count && share->lends_chunks; i++)
                share->record.files[i].chunks = NULL;
        record_done(&share->record);
        free(share->text);
}

void writer_done(struct writer *writer)
{
        for (size_t i = 0; i < writer->share_count; i++)
                share_done(&writer->shares[i]);
        free(writer->shares);
        free(writer->is_carried);
        free(writer->digests);
        store_list_done(&writer->taken);
        tag_log_done(&writer->before);
        manifest_done(&writer->manifest);
}

struct writer_share *writer_add_share(struct writer *writer, struct nebula_error *error)
{
        struct writer_share *grown = realloc(writer->shares, (writer->share_count + 1) * sizeof *grown);

        if (!grown) {
                error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a record of \"%s\"", writer->manifest.tag);
                return NULL;
        }
        writer->shares = grown;
        grown += writer->share_count++;
        memset(grown, 0, sizeof *grown);
        return grown;
}

enum nebula_status writer_begin(struct writer *writer, struct nebula_error *error)
{
        enum nebula_status status = tag_log_head(writer->store, writer->manifest.tag, &writer->before, error);

        if (status == NEBULA_CORRUPT) /* a link lies at the tag's path: the version can be written after it was moved away */
                return error ? error->status = NEBULA_STORAGE : NEBULA_STORAGE;
        if (status || !writer->before.is_unsound || writer->before.unsound.status == NEBULA_CORRUPT)
                return status;
        if (error)
                *error = writer->before.unsound;
        return writer->before.unsound.status;
}

void writer_take_found(struct writer *writer)
{
        manifest_done(&writer->manifest);
        writer->manifest = writer->before.manifest;
        memset(&writer->before.manifest, 0, sizeof writer->before.manifest);
}

enum nebula_status writer_number(struct writer *writer, struct nebula_error *error)
{
        return tag_log_next(writer->store, writer->manifest.tag, writer->before.number, &writer->manifest.number, error);
}

/* One list answers for all names. Nodes that share a version ask for their own names instead: if each listed the files of all, the work would grow
 * with the square of their number. */
static enum nebula_status list_names(struct writer *writer, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = manifest_key(key, writer->directory, "", error);

        if (!status && writer->manifest.number == 1)
                status = store_list_all(writer->store, key, false, &writer->taken, error);
        writer->has_list = !status;
        return status;
}

/* Only the first entry of a log names files in place. Even if <tag>/<name> is free, a suspended agent may still put the view of an earlier
 * version there. */
enum nebula_status writer_is_apart(struct writer *writer, const char *name, bool *ret_is_apart, struct nebula_error *error)
{
        struct store_entry entry;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = NEBULA_OK;

        *ret_is_apart = true;
        if (writer->manifest.number == 1)
                status = file_key(writer->directory, NULL, name, key, error);
        if (status || writer->manifest.number != 1)
                return status;
        if (writer->has_list) {
                *ret_is_apart = store_list_find(&writer->taken, key) != NULL;
                return NEBULA_OK;
        }
        status = writer->store->ops->stat(writer->store, key, &entry, error);
        *ret_is_apart = status != NEBULA_NOT_FOUND;
        if (!status)
                store_entry_done(&entry);
        return status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT ? NEBULA_OK : status;
}

static enum nebula_status upload(struct writer *writer, struct nebula_error *error)
{
        return writer->source->upload ? writer->source->upload(writer->argument, error) : NEBULA_OK;
}

static enum nebula_status describe(struct writer *writer, struct nebula_error *error)
{
        return writer->source->describe(writer->argument, error);
}

static enum nebula_status publish(struct writer *writer, struct nebula_error *error)
{
        return writer->source->publish(writer->argument, error);
}

static enum nebula_status overtaken(struct writer *writer, const char *what, struct nebula_error *error)
{
        writer->is_overtaken = true;
        return error_set(error, NEBULA_STORAGE, 0, "\"%.200s\" was %s while it was written", writer->manifest.tag, what);
}

/* This program may have slept, or storage was slow. */
static enum nebula_status look_again(struct writer *writer, struct nebula_error *error)
{
        struct tag_log log = { 0 };
        uint64_t newest;
        enum nebula_status status = tag_log_number(writer->store, writer->manifest.tag, &newest, error);

        if (status || newest == writer->before.number)
                return status;
        status = tag_log_head(writer->store, writer->manifest.tag, &log, error);
        if (!status && writer->source->may_follow)
                status = writer->source->may_follow(writer->argument, &log.manifest, error);
        if (!status)
                status = overtaken(writer, log.manifest.sequence ? "written by another agent" : "removed", error);
        tag_log_done(&log);
        return status;
}

static enum nebula_status share_key(const struct writer *writer, const struct writer_share *share, bool is_claim, char ret_key[MANIFEST_KEY_MAX],
                                    struct nebula_error *error)
{
        return (is_claim ? claim_key : record_key)(writer->directory, share->record.writing, share->record.ranks[0].rank, ret_key, error);
}

/* With a key, the agent that writes the manifest believes the record's SHA-256 sums (writer_sign.c). */
static enum nebula_status format_share(const struct writer *writer, struct writer_share *share, struct nebula_error *error)
{
        const struct trust *trust = writer->store->trust;
        enum nebula_status status = record_format(&share->record, &share->text, &share->size, error);

        return !status && trust && trust->own.key ? signature_seal(trust, &share->text, &share->size, error) : status;
}

static enum nebula_status put_share(struct writer *writer, struct writer_share *share, bool is_claim, enum store_condition condition,
                                    struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = share->text ? NEBULA_OK : format_share(writer, share, error);

        if (!status)
                status = share_key(writer, share, is_claim, key, error);
        return status ? status : writer->store->ops->put(writer->store, key, share->text, share->size, condition, NULL, NULL, error);
}

static enum nebula_status put_shares(struct writer *writer, bool is_claim, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < writer->share_count && !status; i++)
                status = put_share(writer, &writer->shares[i], is_claim, STORE_IF_ABSENT, error);
        return status;
}

/* The record comes before the files: it shows a sweep which of them are this writer's. */
static enum nebula_status put_records(struct writer *writer, struct nebula_error *error)
{
        return put_shares(writer, false, error);
}

/* Other programs take a record as a sign that its files are in place. So it is a claim until then, which only a sweep reads. */
static enum nebula_status put_claims(struct writer *writer, struct nebula_error *error)
{
        return put_shares(writer, true, error);
}

void writer_touch(const struct writer *writer, const struct writer_share *share)
{
        char key[MANIFEST_KEY_MAX];

        if (!share_key(writer, share, true, key, NULL))
                writer->store->ops->put(writer->store, key, share->text, share->size, STORE_ALWAYS, NULL, NULL, NULL);
}

/* Takes the places of the files from the claim or record of an earlier call. */
static enum nebula_status adopt(const struct writer *writer, struct writer_share *share, bool is_claim, struct nebula_error *error)
{
        struct record found = { 0 }, *own = &share->record;
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;
        enum nebula_status status = share_key(writer, share, is_claim, key, error);

        if (!status)
                status = document_get(writer->store, key, &text, &size, NULL, error);
        if (status)
                return status;
        status = record_parse(text, size, &found, error);
        free(text);
        for (size_t i = 0; i < own->file_count && !status; i++)
                if (found.number != own->number || found.file_count != own->file_count || strcmp(found.files[i].name, own->files[i].name))
                        status = error_set(error, NEBULA_CORRUPT, 0, "%s/%s is of another version", writer->store->root, key);
                else
                        own->files[i].is_apart = found.files[i].is_apart;
        share->is_found = !status;
        record_done(&found);
        return status;
}

static enum nebula_status claim_or_adopt(struct writer *writer, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < writer->share_count && !status; i++) {
                struct writer_share *share = &writer->shares[i];

                status = adopt(writer, share, false, error);
                if (status == NEBULA_CORRUPT) /* it stays for a sweep */
                        return overtaken(writer, "written by another program", error);
                if (status == NEBULA_NOT_FOUND)
                        status = adopt(writer, share, true, error);
                if (status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT)
                        status = put_share(writer, share, true, STORE_ALWAYS, error);
                else if (!status)
                        status = format_share(writer, share, error);
        }
        return status;
}

/* Of a tag of which the caller knows no version. If there is one, its names are taken, or the last look at the tag finds its log. So a list of
 * names can come as late as with the record. */
static enum nebula_status first_number(struct writer *writer, struct nebula_error *error)
{
        (void)error;
        writer->manifest.number = 1;
        writer->has_list = true;
        return NEBULA_OK;
}

static enum nebula_status put_one(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *error)
{
        struct writer *writer = argument;

        (void)stop;
        return index < writer->share_count ? put_share(writer, &writer->shares[index], false, STORE_IF_ABSENT, error) : list_names(writer, error);
}

static uint32_t width(const struct writer *writer)
{
        return writer->store->ops->features(writer->store) & STORE_FAR ? PUT_WIDTH : 1;
}

static enum nebula_status put_records_and_list(struct writer *writer, struct nebula_error *error)
{
        return lanes_run(writer->share_count + 1, width(writer), put_one, writer, error);
}

/* No file is there yet, so the record goes, too: a sweep would take the files of another program for those of the record. */
static enum nebula_status forget_first(struct writer *writer, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX];

        for (size_t i = 0; i < writer->share_count; i++)
                if (!share_key(writer, &writer->shares[i], false, key, NULL))
                        store_drop(writer->store, key);
        return overtaken(writer, "written by another program", error);
}

static enum nebula_status check_names(struct writer *writer, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < writer->share_count; i++)
                for (size_t k = 0; k < writer->shares[i].record.file_count && !status; k++) {
                        status = file_key(writer->directory, NULL, writer->shares[i].record.files[k].name, key, error);
                        if (!status && store_list_find(&writer->taken, key))
                                return forget_first(writer, error);
                }
        return status;
}

/* Whether the record is there, byte by byte: the manifest will have its checksum. */
static bool is_shown(const struct writer *writer, const struct writer_share *share)
{
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;
        bool is_same;

        if (share_key(writer, share, false, key, NULL) || document_get(writer->store, key, &text, &size, NULL, NULL))
                return false;
        is_same = size == share->size && !memcmp(text, share->text, size);
        free(text);
        return is_same;
}

/* The files are in place: records take the place of the claims. */
static enum nebula_status show(struct writer *writer, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < writer->share_count && !status; i++) {
                struct writer_share *share = &writer->shares[i];

                status = put_share(writer, share, false, STORE_IF_ABSENT, error);
                if (status == NEBULA_BUSY)
                        status = is_shown(writer, share) ? NEBULA_OK : overtaken(writer, "written by another program", error);
                if (!status)
                        status = share_key(writer, share, true, key, error);
                if (!status)
                        store_drop(writer->store, key);
        }
        return status;
}

/* From here on the tag is not at rest (index.h). If the store refuses removals, the tag has two entries later, and is read. */
static enum nebula_status drop_index(struct writer *writer, struct nebula_error *error)
{
        const struct manifest *before = &writer->before.manifest;
        struct nebula_error failure = { 0 };
        enum nebula_status status = before->sequence ? index_remove(writer->store, before, &failure) : NEBULA_OK;

        writer->keeps_index = status && store_class(&failure) == STORE_NEVER;
        if (!status || writer->keeps_index)
                return NEBULA_OK;
        if (error)
                *error = failure;
        return status;
}

static void complain(const struct writer *writer, const struct nebula_error *error)
{
        if (writer->source->complain)
                writer->source->complain(writer->argument, error);
}

/* The version is durable without it. */
static void put_index(const struct writer *writer)
{
        struct nebula_error failure = { 0 };

        if (index_put(writer->store, &writer->manifest, &failure))
                complain(writer, &failure);
}

static enum nebula_status create_entry(struct writer *writer, struct nebula_error *error)
{
        char *text;
        size_t size;
        enum nebula_status status = manifest_format(&writer->manifest, &text, &size, error);

        if (status)
                return status;
        status = tag_log_create(writer->store, writer->manifest.tag, writer->manifest.number, text, size, error);
        free(text);
        return status;
}

/* This makes the version durable. */
static enum nebula_status enter(struct writer *writer, struct nebula_error *error)
{
        enum nebula_status status;

        writer->entered_ns = os->now_ns();
        status = create_entry(writer, error);
        if (status != NEBULA_BUSY)
                return status;
        status = look_again(writer, error);
        return status ? status : overtaken(writer, "written by another agent", error);
}

/* An earlier attempt may have seen a failure although its entry was made. The driver syncs the entry that it finds. */
static enum nebula_status enter_again(struct writer *writer, struct nebula_error *error)
{
        enum nebula_status status = create_entry(writer, error);

        return status == NEBULA_BUSY ? NEBULA_OK : status;
}

static enum nebula_status take_back(struct writer *writer, const struct nebula_error *why, struct nebula_error *error)
{
        struct store *store = writer->store;
        const struct manifest *manifest = &writer->manifest;

        writer->is_taken_back = writer->is_overtaken = true;
        if (!manifest_is_gone(store, manifest)) /* without this, the next attempt would find everything written */
                tag_log_take_back(store, manifest->tag, manifest->number, NULL);
        return error_set(error, NEBULA_STORAGE, 0, "another program has removed or replaced files of \"%.150s\" while it was written: %.250s",
                         manifest->tag, why->message);
}

/* Checks that all objects that the manifest names exist. If a sweep is running, it may remove some of them. If the check comes late, a sweep
 * has perhaps ended this writer's work, and has removed the version before. */
static enum nebula_status check(struct writer *writer, bool is_own, struct nebula_error *error)
{
        struct nebula_error failure = { 0 };
        enum nebula_status status = manifest_check_all(writer->store, &writer->manifest, &failure);
        bool is_late = os->now_ns() - writer->entered_ns > CHECK_LATE_NS;

        if (status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT || (status == NEBULA_BUSY && is_own && !is_late))
                return take_back(writer, &failure, error);
        if (status == NEBULA_BUSY)
                return error_set(error, NEBULA_STORAGE, 0, "the agent checks \"%.150s\" again later: %.250s", writer->manifest.tag, failure.message);
        if (status && error)
                *error = failure;
        return status;
}

static enum nebula_status check_own(struct writer *writer, struct nebula_error *error)
{
        return check(writer, true, error);
}

/* Another agent may have called the version durable: a sweep is no reason to take it back. */
static enum nebula_status check_common(struct writer *writer, struct nebula_error *error)
{
        return check(writer, false, error);
}

static enum nebula_status check_or_put(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *error)
{
        struct writer *writer = argument;

        (void)stop;
        if (!index)
                return check(writer, true, error);
        put_index(writer);
        return NEBULA_OK;
}

/* Both at once, because each costs the time of a request. If the check fails, the entry of the index goes again. */
static enum nebula_status check_and_index(struct writer *writer, struct nebula_error *error)
{
        enum nebula_status status = lanes_run(2, width(writer), check_or_put, writer, error);

        if (status)
                index_remove(writer->store, &writer->manifest, NULL);
        return status;
}

/* The version is durable, and readers follow its manifest: a failure here loses nothing. */
static enum nebula_status show_files(struct writer *writer, struct nebula_error *error)
{
        const struct manifest *before = &writer->before.manifest;
        struct nebula_error failure = { 0 };
        enum nebula_status status;

        (void)error;
        status = manifest_publish(writer->store, &writer->manifest, before, &failure);
        writer->is_followed = status == NEBULA_BUSY;
        if (status && status != NEBULA_BUSY)
                complain(writer, &failure);
        if (!status || writer->keeps_index)
                put_index(writer);
        return NEBULA_OK;
}

/* The number of the missing entry, else the next one. */
static enum nebula_status rebuilt_number(struct writer *writer, struct nebula_error *error)
{
        enum nebula_status status = writer_number(writer, error);
        uint64_t lost = writer->before.manifest.number;

        if (!status && writer->before.number < lost && writer->manifest.number <= lost)
                writer->manifest.number = lost;
        return status;
}

static step *const ways[][17] = {
        [WRITER_ALONE] = { writer_number, list_names, drop_index, upload, look_again, describe, put_records, look_again, publish,
                           writer_compile, look_again, writer_sign, enter, check_own, show_files },
        [WRITER_FIRST] = { first_number, upload, describe, put_records_and_list, check_names, publish, writer_compile, writer_sign, enter, check_and_index },
        [WRITER_SHARE] = { drop_index, upload, look_again, describe, put_claims, look_again, publish, show },
        [WRITER_GATHER] = { writer_number, drop_index, writer_gather, look_again, writer_sign, enter, check_common, show_files },
        [WRITER_REPEAT] = { enter_again, check_common, show_files },
        [WRITER_REBUILD] = { rebuilt_number, writer_compile, describe, look_again, enter, check_own, show_files },
        [WRITER_THIN] = { writer_number, drop_index, writer_compile, look_again, enter, check_own, show_files },
        [WRITER_COPY] = { writer_number, list_names, drop_index, describe, claim_or_adopt, publish, show,
                          writer_compile, look_again, writer_sign, enter, check_own, show_files },
};

bool writer_step(struct writer *writer, enum writer_way way, size_t at, enum nebula_status *ret_status, struct nebula_error *error)
{
        if (ways[way][at])
                *ret_status = ways[way][at](writer, error);
        return ways[way][at] != NULL;
}

enum nebula_status writer_run(struct writer *writer, enum writer_way way, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t at = 0; !status && writer_step(writer, way, at, &status, error); at++)
                ;
        return status;
}

void writer_forsake(const struct writer *writer)
{
        for (size_t i = 0; i < writer->share_count; i++)
                if (writer->shares[i].text)
                        manifest_forsake(writer->store, writer->manifest.tag, writer->shares[i].record.writing);
}

void writer_drop_records(const struct writer *writer)
{
        const struct manifest *manifest = &writer->manifest;
        char key[MANIFEST_KEY_MAX];

        for (size_t i = 0; i < manifest->record_count; i++) {
                const struct manifest_record *entry = &manifest->records[i];

                if (entry->sequence == manifest->sequence && !record_key(writer->directory, entry->writing, entry->rank, key, NULL))
                        store_remove_one(writer->store, key, NULL);
        }
}
