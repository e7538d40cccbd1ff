#include "store/thin.h"

#include <errno.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/manifest_publish.h"
#include "store/index_room.h"
#include "store/writer.h"

static enum nebula_status wrong(const char *part, size_t length, struct nebula_error *error)
{
        return error_set(error, NEBULA_INVALID, 0, "\"%.*s\" is not PATTERN=COUNT with a count of 1 or more", (int)(length < 200 ? length : 200), part);
}

static enum nebula_status parse_one(const char *part, size_t length, struct thin_rule *ret_rule, struct nebula_error *error)
{
        const char *sign = memchr(part, '=', length);
        size_t size = sign ? (size_t)(sign - part) : 0;
        unsigned long last;
        char *end;

        if (!size || size >= sizeof ret_rule->pattern || sign[1] < '0' || sign[1] > '9')
                return wrong(part, length, error);
        errno = 0;
        last = strtoul(sign + 1, &end, 10);
        if (errno || end != part + length || !last || last > UINT32_MAX)
                return wrong(part, length, error);
        *ret_rule = (struct thin_rule){ .last = (uint32_t)last };
        memcpy(ret_rule->pattern, part, size);
        return NEBULA_OK;
}

enum nebula_status thin_parse(const char *text, struct thin_rules *ret_rules, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        ret_rules->count = 0;
        while (*text && !status) {
                size_t length = strcspn(text, ",");

                if (ret_rules->count == THIN_RULES_MAX)
                        return error_set(error, NEBULA_INVALID, 0, "more than %d patterns", THIN_RULES_MAX);
                status = parse_one(text, length, &ret_rules->list[ret_rules->count++], error);
                text += length + (text[length] == ',');
        }
        return status;
}

bool thin_has(const struct manifest *manifest, const char *pattern)
{
        size_t length = strlen(pattern);

        for (const char *at = manifest->thinned; *at; at += strcspn(at, ","), at += *at == ',')
                if (!strncmp(at, pattern, length) && (!at[length] || at[length] == ','))
                        return true;
        return false;
}

void thin_note(struct manifest *manifest, const char *pattern)
{
        size_t used = strlen(manifest->thinned), size = sizeof manifest->thinned;

        if (!thin_has(manifest, pattern) && used + strlen(pattern) + 2 <= size)
                snprintf(manifest->thinned + used, size - used, "%s%s", used ? "," : "", pattern);
}

static uint64_t mark_staying(struct writer *writer, const char *pattern, size_t *ret_staying)
{
        const struct manifest *before = &writer->before.manifest;
        uint64_t bytes = 0;

        *ret_staying = 0;
        for (size_t i = 0; i < before->file_count; i++) {
                writer->is_carried[i] = fnmatch(pattern, before->files[i].name, 0) != 0;
                *ret_staying += writer->is_carried[i];
                bytes += writer->is_carried[i] ? 0 : before->files[i].size;
        }
        return bytes;
}

/* The same version: only its entry is a new one. */
static void copy_head(struct writer *writer, const char *pattern)
{
        const struct manifest *before = &writer->before.manifest;
        struct manifest *manifest = &writer->manifest;

        strcpy(manifest->job, before->job);
        strcpy(manifest->run, before->run);
        strcpy(manifest->host, before->host);
        strcpy(manifest->thinned, before->thinned);
        manifest->writing = before->writing;
        manifest->sequence = before->sequence;
        manifest->step = before->step;
        manifest->world = before->world;
        manifest->line = before->line;
        thin_note(manifest, pattern);
}

/* A program that died after it had made the entry may have left the files behind. */
static void end_earlier(struct store *store, const struct manifest *now)
{
        struct tag_log earlier = { 0 };

        if (now->number > 1 && !tag_log_entry(store, now->tag, now->number - 1, &earlier, NULL) && earlier.manifest.sequence == now->sequence)
                manifest_publish(store, now, &earlier.manifest, NULL);
        tag_log_done(&earlier);
}

static enum nebula_status thin_once(struct store *store, const struct manifest *manifest, const char *pattern, struct manifest *ret_manifest,
                                    uint64_t *ret_bytes, struct nebula_error *error)
{
        static const struct writer_source nothing;
        struct writer writer;
        size_t staying;
        enum nebula_status status = writer_init(&writer, store, &nothing, NULL, manifest->tag, error);

        *ret_bytes = 0;
        strcpy(writer.manifest.tag, manifest->tag);
        if (!status)
                status = writer_begin(&writer, error);
        if (!status && writer.before.manifest.sequence != manifest->sequence)
                status = error_set(error, NEBULA_BUSY, 0, "\"%.200s\" was written again or removed meanwhile", manifest->tag);
        if (!status && !(writer.is_carried = calloc(writer.before.manifest.file_count + 1, sizeof *writer.is_carried)))
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", manifest->tag);
        if (status)
                goto done;
        *ret_bytes = mark_staying(&writer, pattern, &staying);
        if (staying == writer.before.manifest.file_count) {
                writer_take_found(&writer);
                end_earlier(store, &writer.manifest);
        } else if (!staying) {
                status = error_set(error, NEBULA_INVALID, 0, "\"%.200s\" stays as it is: all its files match \"%s\"", manifest->tag, pattern);
        } else {
                copy_head(&writer, pattern);
                status = writer_run(&writer, WRITER_THIN, error);
        }
        if (!status) {
                *ret_manifest = writer.manifest;
                memset(&writer.manifest, 0, sizeof writer.manifest);
        }
done:
        if (status)
                *ret_bytes = 0;
        writer_done(&writer);
        return status;
}

enum nebula_status thin_version(struct store *store, const struct manifest *manifest, const char *pattern, struct manifest *ret_manifest,
                                uint64_t *ret_bytes, struct nebula_error *error)
{
        struct index_room room = { 0 };
        enum nebula_status status = thin_once(store, manifest, pattern, ret_manifest, ret_bytes, error);

        if (index_room_may_help(store, status)) {
                index_room_make(store, &room);
                status = thin_once(store, manifest, pattern, ret_manifest, ret_bytes, error);
                index_room_give_back(store, &room);
        }
        return status;
}
