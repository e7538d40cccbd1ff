/* Signs the version that a writer makes, with the store's own key, just before its entry: a version that is durable has its signature. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/manifest_load.h"
#include "store/signature.h"
#include "store/writer_private.h"

enum nebula_status writer_note_digest(struct writer *writer, const struct record_file *file, bool is_believed, struct nebula_error *error)
{
        size_t count = writer->manifest.file_count;
        struct writer_digest *grown;

        if (!writer->store->trust || !writer->store->trust->own.key)
                return NEBULA_OK;
        grown = realloc(writer->digests, count * sizeof *grown);
        if (!grown)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the signature of \"%s\"", writer->manifest.tag);
        writer->digests = grown;
        writer->noted_count = count;
        grown[count - 1] = (struct writer_digest){ .is_known = is_believed && file->has_sha256 };
        memcpy(grown[count - 1].sha256, file->sha256, sizeof grown->sha256);
        return NEBULA_OK;
}

/* A file that carries over was signed with the version before. NULL: all are known. */
static const char *fill_in(const struct writer *writer, size_t noted, uint8_t (*digests)[32])
{
        const struct manifest *manifest = &writer->manifest, *before = &writer->before.manifest;

        for (size_t i = 0; i < manifest->file_count; i++) {
                const char *name = manifest->files[i].name;

                if (i < noted && writer->digests[i].is_known)
                        memcpy(digests[i], writer->digests[i].sha256, sizeof digests[i]);
                else if (!manifest_file_origin(manifest, &manifest->files[i]) || !before->sequence ||
                         signature_known(writer->store, before, name, digests[i]))
                        return name;
        }
        return NULL;
}

static void complain(const struct writer *writer, const char *name)
{
        struct nebula_error error;

        error_set(&error, NEBULA_INVALID, 0, "\"%.150s\" is not signed: no trusted key vouches for its file \"%.150s\". Every node needs the same "
                  "NEBULA_SIGN_KEY", writer->manifest.tag, name);
        if (writer->source->complain)
                writer->source->complain(writer->argument, &error);
}

/* Files that carry over come last (writer_compile, writer_gather), so the noted ones are the first. */
enum nebula_status writer_sign(struct writer *writer, struct nebula_error *error)
{
        const struct manifest *manifest = &writer->manifest;
        uint8_t (*digests)[32];
        const char *missing;
        enum nebula_status status = NEBULA_OK;

        if (writer->source->attest)
                return writer->source->attest(writer->argument, error);
        if (!writer->store->trust || !writer->store->trust->own.key)
                return NEBULA_OK;
        digests = calloc(manifest->file_count + 1, sizeof *digests);
        if (!digests)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the signature of \"%s\"", manifest->tag);
        missing = fill_in(writer, writer->noted_count, digests);
        if (missing)
                complain(writer, missing);
        else
                status = signature_put(writer->store, manifest, (const uint8_t (*)[32])digests, error);
        free(digests);
        return status;
}
