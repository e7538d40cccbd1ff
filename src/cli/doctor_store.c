/* Checks of the rights that a store gives this user. They run in the order of the table: one check writes an object, and later ones
 * read, replace and remove it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/doctor.h"
#include "cli/human.h"
#include "os/os.h"
#include "store/manifest.h"
#include "store/scan.h"
#include "store/several/several.h"

#define SPEED_BYTES (16u << 20)
#define CLOCK_NOTE_NS (60 * SECOND_NS)
#define CLOCK_BAD_NS (240 * SECOND_NS) /* S3 refuses a clock that is 5 minutes off, Azure one that is 15 minutes off */

static struct {
        struct store *store; /* NULL: the store cannot be opened, or the directory does not exist yet */
        bool is_out;         /* the store does not answer, or accepts no credential: each further check would wait for the same failure */
        bool is_written;     /* the object `key` exists */
        char key[100];
} tried;

/* The rights that each operation needs, by the service's names. */
static const struct {
        const char *scheme, *list, *read, *write, *remove;
} rights[] = {
        { "az", "l in the SAS, or the role Storage Blob Data Reader", "r in the SAS, or the role Storage Blob Data Reader",
          "c and w in the SAS, or the role Storage Blob Data Contributor", "d in the SAS, or the role Storage Blob Data Contributor" },
        { "abfss", "l in the SAS, or the role Storage Blob Data Reader", "r in the SAS, or the role Storage Blob Data Reader",
          "c and w in the SAS, or the role Storage Blob Data Contributor", "d in the SAS, or the role Storage Blob Data Contributor" },
        { "s3", "s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject" },
        { "gs", "storage.objects.list", "storage.objects.get", "storage.objects.create", "storage.objects.delete" },
        { "", "the right to read the directory", "the right to read the files", "the right to write to the directory",
          "the right to write to the directory" },
};

static size_t right_of_scheme(void)
{
        struct store *member = several_member(tried.store, 0);
        const char *scheme = (member ? member : tried.store)->ops->scheme;
        size_t i = 0;

        while (*rights[i].scheme && strcmp(rights[i].scheme, scheme))
                i++;
        return i;
}

/* Whether a check can run. */
static bool is_open(struct doctor_finding *finding, bool needs_object)
{
        if (tried.is_out || (needs_object && !tried.is_written)) {
                finding->verdict = DOCTOR_SLOWER;
                FOUND(finding, "not tried: %s", tried.is_out ? "the storage did not answer, or refused the credential" : "nothing could be written");
                return false;
        }
        return true;
}

static void failed(struct doctor_finding *finding, const struct nebula_error *error, const char *right)
{
        bool is_refused = error->http_status == 401 || error->http_status == 403 || error->sys_errno == 13;

        finding->verdict = DOCTOR_BAD;
        FOUND(finding, "%.390s", error->message);
        tried.is_out = tried.is_out || store_class(error) == STORE_AGAIN;
        if (is_refused && right)
                ADVICE(finding, "this takes %s", right);
        else if (store_class(error) == STORE_AGAIN)
                ADVICE(finding, "check the name of the host, the network and the proxy (https_proxy, no_proxy)");
}

static bool open_store(const char *path)
{
        struct os_stat stat;

        if (!tried.store && *path && (*path != '/' || !os->stat(path, true, &stat)))
                store_open(path, &tried.store, NULL);
        return tried.store;
}

static bool check_credentials(const char *path, struct doctor_finding *finding)
{
        struct store_reach reach;
        struct nebula_error error = { 0 };

        if (*path && *path != '/' && store_open(path, &tried.store, &error)) {
                finding->verdict = DOCTOR_BAD;
                FOUND(finding, "%.390s", error.message);
                return true;
        }
        if (!open_store(path) || !tried.store->ops->reach)
                return false;
        if (tried.store->ops->reach(tried.store, &reach, &error)) {
                failed(finding, &error, NULL);
                tried.is_out = true;
                return true;
        }
        FOUND(finding, "%.300s", reach.credential);
        if (reach.is_expired) {
                finding->verdict = DOCTOR_BAD;
                ADVICE(finding, "it has expired: make a new one");
        }
        return true;
}

static bool check_transport(const char *path, struct doctor_finding *finding)
{
        struct store_reach reach;

        if (tried.is_out || !open_store(path) || !tried.store->ops->reach || tried.store->ops->reach(tried.store, &reach, NULL))
                return false;
        FOUND(finding, "%.300s", reach.transport);
        if (!strncmp(reach.transport, "http:", 5)) {
                finding->verdict = DOCTOR_SLOWER;
                ADVICE(finding, "use https");
        }
        return true;
}

static bool check_clock(const char *path, struct doctor_finding *finding)
{
        int64_t begun_ns = os->wall_ns(), clock_ns, offset_ns;
        struct nebula_error error = { 0 };
        char text[HUMAN_MAX];

        if (!open_store(path))
                return false;
        if (!is_open(finding, false))
                return true;
        if (tried.store->ops->clock(tried.store, &clock_ns, &error)) {
                failed(finding, &error, NULL);
                return true;
        }
        offset_ns = clock_ns - (begun_ns + os->wall_ns()) / 2;
        /* Object stores give times in whole seconds. */
        if (llabs(offset_ns) < 1500000000) {
                FOUND(finding, "this machine and the storage agree");
                return true;
        }
        FOUND(finding, "this machine is %s %s the storage", human_duration((double)llabs(offset_ns) / 1e9, text), offset_ns < 0 ? "ahead of" : "behind");
        if (llabs(offset_ns) >= CLOCK_NOTE_NS) {
                finding->verdict = llabs(offset_ns) >= CLOCK_BAD_NS && *path != '/' ? DOCTOR_BAD : DOCTOR_SLOWER;
                ADVICE(finding, "set the clock (NTP): object stores refuse requests that are 5 minutes (S3) or 15 minutes (Azure) off");
        }
        return true;
}

static bool check_list(const char *path, struct doctor_finding *finding)
{
        struct store_page page = { 0 };
        struct nebula_error error = { 0 };

        if (!open_store(path))
                return false;
        if (!is_open(finding, false))
                return true;
        if (tried.store->ops->list(tried.store, "", false, NULL, &page, &error))
                failed(finding, &error, rights[right_of_scheme()].list);
        else
                FOUND(finding, "yes");
        store_page_done(&page);
        return true;
}

static bool check_put(const char *path, struct doctor_finding *finding)
{
        struct nebula_error error = { 0 };
        uint64_t random = 0;

        if (!open_store(path))
                return false;
        if (!is_open(finding, false))
                return true;
        os->random(&random, sizeof random);
        snprintf(tried.key, sizeof tried.key, MANIFEST_DIRECTORY "/doctor-%016" PRIx64, random);
        tried.is_written = !tried.store->ops->put(tried.store, tried.key, "doctor\n", 7, STORE_IF_ABSENT, NULL, NULL, &error);
        if (tried.is_written)
                FOUND(finding, "yes");
        else
                failed(finding, &error, rights[right_of_scheme()].write);
        return true;
}

static bool check_condition(const char *path, struct doctor_finding *finding)
{
        struct nebula_error error = { 0 };
        enum nebula_status status;

        if (!open_store(path))
                return false;
        if (!is_open(finding, true))
                return true;
        status = tried.store->ops->put(tried.store, tried.key, "another\n", 8, STORE_IF_ABSENT, NULL, NULL, &error);
        if (status == NEBULA_BUSY) {
                FOUND(finding, "yes: what is there is not replaced");
        } else if (status) {
                failed(finding, &error, NULL);
        } else {
                finding->verdict = DOCTOR_BAD;
                FOUND(finding, "no: an object that was there was replaced");
                ADVICE(finding, "two writers could destroy each other's checkpoints: use a storage that honours If-None-Match");
        }
        return true;
}

static bool check_lacks(const char *path, struct doctor_finding *finding)
{
        struct nebula_error error = { 0 };
        char text[200];

        if (!open_store(path) || !tried.store->ops->lacks)
                return false;
        if (!is_open(finding, true))
                return true;
        if (tried.store->ops->lacks(tried.store, text, sizeof text, &error)) {
                failed(finding, &error, rights[right_of_scheme()].write);
        } else if (*text) {
                finding->verdict = DOCTOR_SLOWER;
                FOUND(finding, "it lacks %s", text);
                ADVICE(finding, "nothing is to be done: checkpoints are safe, with more requests (docs/storage.md)");
        } else {
                FOUND(finding, "it does what its protocol promises, as far as was tried");
        }
        return true;
}

static bool check_get(const char *path, struct doctor_finding *finding)
{
        struct nebula_error error = { 0 };
        char *text = NULL;
        size_t size;

        if (!open_store(path))
                return false;
        if (!is_open(finding, true))
                return true;
        if (tried.store->ops->get(tried.store, tried.key, 100, &text, &size, NULL, &error)) {
                failed(finding, &error, rights[right_of_scheme()].read);
        } else if (strcmp(text, "doctor\n")) {
                finding->verdict = DOCTOR_BAD;
                FOUND(finding, "other bytes came back than were written");
        } else {
                FOUND(finding, "yes");
        }
        free(text);
        return true;
}

/* Fills `data` with bytes that no layer can compress. */
static void fill(uint64_t *data, size_t count)
{
        uint64_t state = 0x9e3779b97f4a7c15;

        for (size_t i = 0; i < count; i++) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                data[i] = state;
        }
}

static enum nebula_status move(const char *key, void *data, double *ret_up_s, double *ret_down_s, struct nebula_error *error)
{
        struct store *store = tried.store;
        struct store_object object = { .key = key, .data = data, .size = SPEED_BYTES };
        struct store_upload *upload;
        int64_t begun_ns = os->now_ns();
        enum nebula_status status = store->ops->upload(store, &object, 1, &upload, error);

        if (!status)
                status = store->ops->publish(store, upload, error);
        *ret_up_s = (double)(os->now_ns() - begun_ns) / 1e9;
        begun_ns = os->now_ns();
        if (!status)
                status = store->ops->read_bulk(store, key, data, SPEED_BYTES, BULK_REQUEST_BYTES, NULL, NULL, error);
        *ret_down_s = (double)(os->now_ns() - begun_ns) / 1e9;
        return status;
}

static bool check_speed(const char *path, struct doctor_finding *finding)
{
        struct nebula_error error = { 0 };
        char key[sizeof tried.key + 8], up[HUMAN_MAX], down[HUMAN_MAX];
        double up_s, down_s;
        void *data;

        if (!open_store(path))
                return false;
        if (!is_open(finding, true))
                return true;
        if (os->map(-1, 0, SPEED_BYTES, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE | OS_MAP_ANONYMOUS, &data) < 0) {
                FOUND(finding, "not tried: no memory");
                return true;
        }
        fill(data, SPEED_BYTES / sizeof(uint64_t));
        snprintf(key, sizeof key, "%s-speed", tried.key);
        if (move(key, data, &up_s, &down_s, &error))
                failed(finding, &error, NULL);
        else
                FOUND(finding, "16 MiB written with %s and read with %s", human_speed(SPEED_BYTES, up_s, up), human_speed(SPEED_BYTES, down_s, down));
        store_remove_one(tried.store, key, NULL);
        os->unmap(data, SPEED_BYTES);
        return true;
}

static bool check_remove(const char *path, struct doctor_finding *finding)
{
        struct nebula_error error = { 0 };
        struct store_entry entry;

        if (!open_store(path))
                return false;
        if (!is_open(finding, true))
                return true;
        if (store_remove_one(tried.store, tried.key, &error)) {
                failed(finding, &error, rights[right_of_scheme()].remove);
                if (!*finding->advice)
                        ADVICE(finding, "retention cannot remove old checkpoints");
        } else if (!tried.store->ops->stat(tried.store, tried.key, &entry, NULL)) {
                store_entry_done(&entry);
                finding->verdict = DOCTOR_BAD;
                FOUND(finding, "no: the object is still there");
        } else {
                FOUND(finding, "yes");
        }
        return true;
}

static bool check_content(const char *path, struct doctor_finding *finding)
{
        struct manifest_scan scan;
        struct nebula_error error;
        enum nebula_status status;

        if (!*path)
                return false;
        if (!open_store(path)) {
                FOUND(finding, "none yet");
                return true;
        }
        if (!is_open(finding, false))
                return true;
        status = manifest_scan(tried.store, &scan, &error);
        if (status == NEBULA_NOT_FOUND) {
                FOUND(finding, "none yet");
        } else if (status) {
                failed(finding, &error, NULL);
        } else {
                FOUND(finding, "%zu complete, %zu damaged or unreadable", scan.count, scan.broken_count);
                if (scan.broken_count) {
                        finding->verdict = DOCTOR_BAD;
                        ADVICE(finding, "%.390s", scan.broken);
                }
                manifest_scan_done(&scan);
        }
        return true;
}

static enum nebula_status try_member(struct store *member, struct nebula_error *error)
{
        enum nebula_status status = member->ops->put(member, tried.key, "doctor\n", 7, STORE_ALWAYS, NULL, NULL, error);
        struct store_entry entry = { 0 };

        if (!status)
                status = member->ops->stat(member, tried.key, &entry, error);
        store_entry_done(&entry);
        return status ? status : store_remove_one(member, tried.key, error);
}

/* The checks above see the first of several accounts or buckets. */
static bool check_members(const char *path, struct doctor_finding *finding)
{
        struct nebula_error error = { 0 };
        struct store *member;
        size_t count = 0;

        if (!open_store(path) || !several_member(tried.store, 0))
                return false;
        if (!is_open(finding, true))
                return true;
        for (; (member = several_member(tried.store, count)); count++)
                if (try_member(member, &error)) {
                        failed(finding, &error, rights[right_of_scheme()].write);
                        return true;
                }
        FOUND(finding, "%zu: an object was written to each, looked at and removed", count);
        return true;
}

const struct doctor_check doctor_store_checks[] = {
        { "credentials", check_credentials },
        { "transport", check_transport },
        { "clock", check_clock },
        { "may list", check_list },
        { "may write", check_put },
        { "conditional write", check_condition },
        { "may read", check_get },
        { "speed", check_speed },
        { "may remove", check_remove },
        { "protocol", check_lacks },
        { "accounts or buckets", check_members },
        { "checkpoints", check_content },
};
const size_t doctor_store_count = CLI_COUNT(doctor_store_checks);
