/* Reads hostile bytes as the signature of a version: as they come, and with a correct checksum and a trusted key's signature behind them. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/document.h"
#include "store/http/crypt.h"
#include "store/manifest.h"
#include "store/signature.h"
#include "store/store_mem.h"
#include "sum/sum.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct manifest manifest = { .tag = "t", .job = "j", .run = "r", .writing = 1, .sequence = 1, .step = 1, .world = 1 };
static struct manifest_file file = { .name = "x", .size = 5 };
static char key[100];

static struct store *open_store(void)
{
        static struct store *store;
        struct trust *trust = calloc(1, sizeof *trust);

        if (store || !trust) {
                free(trust);
                return store;
        }
        store_mem_allow();
        trust->policy = TRUST_REQUIRE;
        trust->own.key = crypt_key_new(CRYPT_ED25519);
        lock_init(&trust->lock, LOCK_TRUST);
        if (!trust->own.key || !trust_key_id(trust->own.key, trust->own.id) || store_open("mem://signature", &store, NULL))
                abort();
        store->trust = trust;
        manifest.files = &file;
        manifest.file_count = 1;
        snprintf(key, sizeof key, "t/.nebula/signature-1-%s.json", trust->own.id);
        return store;
}

/* Returns whether readers take the version as signed. */
static bool is_taken(struct store *store, const void *text, size_t size)
{
        struct signature_key *keys = NULL;
        size_t count = 0;
        bool is_sound;

        if (store->ops->put(store, key, text, size, STORE_ALWAYS, NULL, NULL, NULL))
                abort();
        signature_free(store->trust->last);
        store->trust->last = NULL;
        is_sound = !signature_check(store, &manifest, NULL);
        if (!signature_list(store, &manifest, &keys, &count, NULL) && (count != 1 || keys[0].is_trusted != is_sound || keys[0].is_wrong == is_sound))
                abort();
        free(keys);
        return is_sound;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
        struct store *store = open_store();
        size_t sealed_size = size + DOCUMENT_SEAL_BYTES;
        char *sealed = malloc(sealed_size + 1);
        struct record_file taken;

        if (!store || !sealed)
                abort();
        if (is_taken(store, data, size)) /* only the owner of the key can make such bytes */
                abort();
        if (size)
                memcpy(sealed, data, size);
        snprintf(sealed + size, DOCUMENT_SEAL_BYTES + 1, ",\"crc64\":\"%016" PRIx64 "\"}\n", sum_crc64(0, sealed, size));
        if (signature_seal(store->trust, &sealed, &sealed_size, NULL))
                abort();
        if (is_taken(store, sealed, sealed_size)) {
                memset(&taken, 0, sizeof taken);
                strcpy(taken.name, file.name);
                if (signature_take(store, &manifest, &taken, NULL) || !taken.is_signed)
                        abort();
        }
        free(sealed);
        return 0;
}
