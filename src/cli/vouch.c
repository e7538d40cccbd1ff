#include "cli/vouch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"
#include "cli/check.h"
#include "store/http/crypt.h"
#include "store/signature.h"
#include "store/verify.h"

enum nebula_status vouch_sum(struct store *store, const char *key, const struct record_file *file, uint8_t ret_digest[32], struct nebula_error *error)
{
        struct evp_md_ctx_st *sum = crypt_sum_begin();
        void *chunk = aligned_alloc(4096, ((size_t)file->chunk_bytes + 4095) & ~(size_t)4095);
        enum nebula_status status = sum && chunk ? NEBULA_OK : NEBULA_NO_MEMORY;

        for (size_t i = 0; i < file->chunk_count && !status; i++) {
                uint64_t offset = (uint64_t)i * file->chunk_bytes;
                uint64_t size = file->size - offset < file->chunk_bytes ? file->size - offset : file->chunk_bytes;

                status = verify_chunk(store, key, chunk, offset, size, file->chunks[i], error);
                if (!status && !crypt_sum_add(sum, chunk, size))
                        status = NEBULA_NO_MEMORY;
                check_read(size);
        }
        free(chunk);
        if (sum && !crypt_sum_end(sum, ret_digest) && !status)
                status = NEBULA_NO_MEMORY;
        return status == NEBULA_NO_MEMORY ? error_set(error, status, 0, "no memory for the SHA-256 of \"%s\"", file->name) : status;
}

json_t *vouch_list(struct store *store, const struct manifest *manifest)
{
        struct signature_key *keys = NULL;
        json_t *list = json_array();
        size_t count = 0;

        if (signature_list(store, manifest, &keys, &count, NULL))
                return list;
        for (size_t i = 0; i < count; i++)
                json_array_append_new(list, json_pack("{s:s, s:s, s:s}", "key", keys[i].id, "state", keys[i].is_wrong ? "wrong" :
                                                      keys[i].is_trusted ? "trusted" : "unknown", "reason", keys[i].why));
        free(keys);
        return list;
}

static char *text_or_none(struct buf *buf)
{
        size_t size;

        if (buf->size)
                return buf_take(buf, &size);
        buf_done(buf);
        return NULL;
}

char *vouch_text(const json_t *signatures)
{
        struct buf buf = { 0 };

        for (size_t i = 0; i < json_array_size(signatures); i++) {
                const json_t *one = json_array_get(signatures, i);
                const char *state = json_string_value(json_object_get(one, "state"));

                buf_add_text(&buf, i ? "; " : "signed by ");
                buf_add_text(&buf, json_string_value(json_object_get(one, "key")));
                if (!strcmp(state, "unknown"))
                        buf_add_text(&buf, ", which is not trusted here");
                if (!strcmp(state, "wrong")) {
                        buf_add_text(&buf, ", and that is WRONG: ");
                        buf_add_text(&buf, json_string_value(json_object_get(one, "reason")));
                }
        }
        return text_or_none(&buf);
}

char *vouch_short(const json_t *signatures, bool *ret_is_wrong)
{
        struct buf buf = { 0 };

        *ret_is_wrong = false;
        for (size_t i = 0; i < json_array_size(signatures); i++) {
                const json_t *one = json_array_get(signatures, i);
                const char *state = json_string_value(json_object_get(one, "state"));

                buf_add_text(&buf, i ? ", " : "");
                buf_add_text(&buf, json_string_value(json_object_get(one, "key")));
                buf_add_text(&buf, !strcmp(state, "unknown") ? " (not trusted)" : !strcmp(state, "wrong") ? " (BAD)" : "");
                *ret_is_wrong = *ret_is_wrong || !strcmp(state, "wrong");
        }
        return text_or_none(&buf);
}
