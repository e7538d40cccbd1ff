/* Reads hostile bytes as records, manifests and node documents: once as they come, and once with a correct checksum,
 * so that mutations reach the code behind the check. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/announce.h"
#include "store/manifest.h"
#include "sum/sum.h"

#define SEAL_BYTES 29 /* ,"crc64":"0123456789abcdef"} and a newline */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void demand(int condition, const char *what)
{
        if (condition)
                return;
        fprintf(stderr, "fuzz_manifest: %s\n", what);
        abort();
}

/* What was accepted can be written and is accepted again. */
static void parse(const char *text, size_t size)
{
        struct manifest manifest = { 0 }, manifest_again = { 0 };
        struct record record = { 0 }, record_again = { 0 };
        struct captured captured = { 0 }, captured_again = { 0 };
        struct committed committed = { 0 }, committed_again = { 0 };
        struct nebula_error error;
        char *again;
        size_t again_size;

        if (!record_parse(text, size, &record, &error)) {
                demand(!record_format(&record, &again, &again_size, &error), "cannot format a record that was read");
                demand(!record_parse(again, again_size, &record_again, &error), "cannot read a record that was written");
                demand(record_again.file_count == record.file_count, "files were lost");
                free(again);
        }
        if (!manifest_parse(text, size, &manifest, &error)) {
                demand(!manifest_format(&manifest, &again, &again_size, &error), "cannot format a manifest that was read");
                demand(!manifest_parse(again, again_size, &manifest_again, &error), "cannot read a manifest that was written");
                demand(manifest_again.file_count == manifest.file_count, "files were lost");
                free(again);
        }
        if (!captured_parse(text, size, &captured, &error)) {
                demand(!captured_format(&captured, &again, &again_size, &error), "cannot format a captured document that was read");
                demand(!captured_parse(again, again_size, &captured_again, &error), "cannot read a captured document that was written");
                demand(captured_again.rank_count == captured.rank_count, "ranks were lost");
                free(again);
        }
        if (!committed_parse(text, size, &committed, &error)) {
                demand(!committed_format(&committed, &again, &again_size, &error), "cannot format a committed document that was read");
                demand(!committed_parse(again, again_size, &committed_again, &error), "cannot read a committed document that was written");
                demand(committed_again.rank_count == committed.rank_count, "ranks were lost");
                free(again);
        }
        captured_done(&captured);
        captured_done(&captured_again);
        committed_done(&committed);
        committed_done(&committed_again);
        record_done(&record);
        record_done(&record_again);
        manifest_done(&manifest);
        manifest_done(&manifest_again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
        size_t body = size > SEAL_BYTES ? size - SEAL_BYTES : size;
        char *text = malloc(size + SEAL_BYTES + 1);

        demand(text != NULL, "no memory");
        memcpy(text, data, size);
        parse(text, size);
        sprintf(text + body, ",\"crc64\":\"%016" PRIx64 "\"}\n", sum_crc64(0, data, body));
        parse(text, body + SEAL_BYTES);
        free(text);
        return 0;
}
