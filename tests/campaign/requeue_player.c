/*
 * Plays stories of a job that moves between nodes, thousands a minute: requeue.py writes them and judges the answers.
 *
 * Each node is an agent's catalogue without threads, with a memory directory of its own; all share two storage paths. A command is a line, and
 * so is its answer:
 *
 *      node N                  the next commands are of node N
 *      run NAME KEEP PATH WORLD  a run of the job begins here; KEEP: keep_last; PATH: A or B; WORLD: the number of its ranks, 1 or 2
 *      scan                    the worker's scan: ok or fails
 *      newest / load TAG       TAG PASSED name=value ..., none, or error REASON
 *      save TAG name=value ... commits: ok, or error REASON. Rank 1 saves the files whose names are in upper case
 *      persist                 the worker makes what is due durable and lets retention act: the tags in storage
 *      kill / forget           the agent is killed; forget: its memory is lost, too
 *      fault N                 files: the next N listings of all nodes fail; objects: the next request. 0: the fault before ends
 *      fault all               files: all listings fail; objects: all requests
 *      fault read-only         files: storage can be read, and not written
 *      fault stale-N           objects, if the player has the argument "late": lists do not show the last N changes
 *      prune TAG               removes the version from storage by hand: ok or none
 *      pin TAG / unpin TAG     ok
 *      end                     removes everything
 *
 * A value is a number from 1 to 255, the seed of the file's bytes.
 */
#include <ctype.h>
#include <errno.h>
#include <limits.h>

#include "agent/agent_catalogue.h"
#include "agent/agent_storage.h"
#include "agent/commit/ancestry.h"
#include "agent/commit/lineage.h"
#include "agent/log.h"
#include "agent/persist/due.h"
#include "agent/persist/worker.h"
#include "agent/restore/restore.h"
#include "store/manifest.h"
#include "store/manifest_load.h"
#include "store/manifest_remove.h"
#include "store/pins.h"
#include "store/scan.h"

#define NODES 4
#define PATHS 2
#define FILE_BYTES 96u

struct node {
        struct bench bench; /* its session is the one of rank 0 */
        struct session second; /* of rank 1 */
        bool is_up;
        char memory[256];
};

static struct node nodes[NODES], *node = nodes;
static char storages[PATHS][256];
static const char *storage = storages[0]; /* of the present run */
static _Atomic int failures;
static bool is_read_only, lists_late;
static char present[32] = "0"; /* fault */

static int opendir_that_fails(const char *root, const char *key, struct os_dir **ret_dir)
{
        return failures > 0 && failures-- ? -EIO : os_linux.opendir_below(root, key, ret_dir);
}

static int open_unless_read_only(const char *root, const char *key, int flags)
{
        return is_read_only && flags & OS_WRITE ? -EROFS : os_linux.open_below(root, key, flags);
}

static int mkdir_unless_read_only(const char *root, const char *key, uint32_t mode)
{
        return is_read_only ? -EROFS : os_linux.mkdir_below(root, key, mode);
}

static int rename_unless_read_only(const char *root, const char *from, const char *to)
{
        return is_read_only ? -EROFS : os_linux.rename_below(root, from, to);
}

static int rename_new_unless_read_only(const char *root, const char *from, const char *to)
{
        return is_read_only ? -EROFS : os_linux.rename_new_below(root, from, to);
}

static int link_unless_read_only(const char *root, const char *key, const char *to_root, const char *to)
{
        return is_read_only ? -EROFS : os_linux.link_below(root, key, to_root, to);
}

static int unlink_unless_read_only(const char *root, const char *key)
{
        return is_read_only ? -EROFS : os_linux.unlink_below(root, key);
}

static void fault_objects(const char *kind)
{
        struct mem_faults faults = { .lists_late = lists_late };

        if (!strncmp(kind, "stale-", 6)) {
                faults.stale_writes = strtoul(kind + 6, NULL, 10);
        } else if (strcmp(kind, "0")) {
                faults.fail_at = 1;
                faults.goes_on = !strcmp(kind, "all");
        }
        for (int i = 0; i < PATHS; i++) {
                struct store *store = storage_look(storages[i]);

                store_mem_faults(store, &faults);
                store_close(store);
        }
}

static void make_fault(const char *kind)
{
        if (storage_is_mem()) {
                fault_objects(kind);
                return;
        }
        failures = strcmp(kind, "all") ? atoi(kind) : INT_MAX;
        is_read_only = !strcmp(kind, "read-only");
}

/* The agent of the present node, which starts if there is none. */
static struct bench *agent_of(void)
{
        if (!*node->memory)
                test_dir_make_quick(node->memory);
        if (!node->is_up)
                bench_init(&node->bench, node->memory, storage);
        node->bench.catalogue.give_up_s = 600;
        node->is_up = true;
        return &node->bench;
}

static struct session session_of(struct job *job, const char *run, uint32_t rank, uint32_t world)
{
        static uint64_t nonce = 100;
        struct session session = { .job = job, .nonce = ++nonce, .pid = os->pid(), .seen_pid = os->pid(), .rank = rank, .world = world,
                                   .connection_count = 1, .role = IPC_ROLE_TRAINER };

        snprintf(session.run, sizeof session.run, "%s", run);
        return session;
}

static void begin_run(const char *name, uint32_t keep, int path, uint32_t world)
{
        struct bench *bench;
        struct job *job;

        storage = storages[path % PATHS];
        bench = agent_of();
        catalogue_lock(&bench->catalogue);
        job = bench->job = catalogue_job_get(&bench->catalogue, storage, "");
        bench->session = session_of(job, name, 0, world);
        node->second = session_of(job, name, 1, world);
        snprintf(job->run, sizeof job->run, "%s", name);
        bench_keep(job, keep);
        job->settings.world = job->settings.local_world = world;
        ancestry_begin(job, name);
        catalogue_unlock(&bench->catalogue);
}

/* Makes the other rank the one that the bench's functions act for. */
static void change_rank(void)
{
        struct session other = node->second;

        node->second = node->bench.session;
        node->bench.session = other;
}

static int value_of(struct bench *bench, uint64_t version_id, const char *name)
{
        struct ipc_opened *opened = NULL;
        struct ipc_open open = { .version_id = version_id };
        unsigned char *data;
        int fd = -1, value = -1;

        snprintf(open.name, sizeof open.name, "%s", name);
        if (restore_open(&bench->catalogue, &bench->session, &open, &opened, &fd, &bench->error))
                return -1;
        if (opened->size == FILE_BYTES && !os->map(fd, 0, opened->size, OS_MAP_READ, (void **)&data)) {
                for (unsigned seed = 1; seed < 256 && value < 0; seed++)
                        if (data[0] == bench_byte(seed, 0) && data[FILE_BYTES - 1] == bench_byte(seed, FILE_BYTES - 1))
                                value = (int)seed;
                os->unmap(data, opened->size);
        }
        os->close(fd);
        free(opened);
        return value;
}

static void answer_find(const char *tag)
{
        struct bench *bench = agent_of();
        static struct ipc_find find;
        static struct ipc_found found;
        struct version *version;
        char names[16][64];
        size_t count = 0;
        enum nebula_status status;

        memset(&find, 0, sizeof find);
        snprintf(find.tag, sizeof find.tag, "%s", tag);
        status = restore_find(&bench->catalogue, &bench->session, &find, &found, &bench->error);
        if (status == NEBULA_NOT_FOUND) {
                printf("none\n");
                return;
        }
        if (status) {
                printf("error %s\n", bench->error.message);
                return;
        }
        version = catalogue_version(&bench->catalogue, found.version_id);
        for (size_t i = 0; version && i < version->file_count && count < 16; i++)
                snprintf(names[count++], sizeof names[0], "%.60s", version->files[i].name);
        printf("%s %u", found.tag, found.passed_count);
        for (size_t i = 0; i < count; i++)
                printf(" %s=%d", names[i], value_of(bench, found.version_id, names[i]));
        printf("\n");
        catalogue_lock(&bench->catalogue);
        version = catalogue_version(&bench->catalogue, found.version_id);
        for (uint32_t rank = 0; version && rank < bench->session.world; rank++) { /* as the agent does for a trainer that has read a file */
                lineage_read(rank ? &node->second : &bench->session, version, IPC_SOURCE_MEMORY);
                if (strcmp(version->run, bench->session.run))
                        ancestry_follow(rank ? &node->second : &bench->session, version->run, version->sequence);
        }
        catalogue_unlock(&bench->catalogue);
}

/* The share of the rank that the bench acts for. `files`: name=value ..., of all ranks */
static enum nebula_status save_share(struct bench *bench, const char *tag, const char *files)
{
        struct version *version;
        uint64_t id;
        char own[256], *rest = NULL;
        enum nebula_status status = NEBULA_OK;

        catalogue_lock(&bench->catalogue);
        version = commit_begin(&bench->catalogue, &bench->session, tag, NEBULA_FILES_ALL_RANKS, &bench->error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench->catalogue);
        if (!id)
                return NEBULA_INVALID;
        snprintf(own, sizeof own, "%s", files);
        for (char *one = strtok_r(own, " ", &rest); one && !status; one = strtok_r(NULL, " ", &rest)) {
                char *value = strchr(one, '=');

                *value++ = 0;
                if (!isupper((unsigned char)*one) == !bench->session.rank)
                        status = bench_save_bytes(bench, &id, one, (unsigned)strtoul(value, NULL, 10), FILE_BYTES);
        }
        if (status)
                return status;
        catalogue_lock(&bench->catalogue);
        version = catalogue_version(&bench->catalogue, id);
        status = version ? commit_part(&bench->catalogue, &bench->session, version, &bench->error) : NEBULA_NOT_FOUND;
        catalogue_unlock(&bench->catalogue);
        return status;
}

static enum nebula_status save(struct bench *bench, const char *tag, const char *files)
{
        enum nebula_status status = save_share(bench, tag, files);

        if (status || bench->session.world == 1)
                return status;
        change_rank();
        status = save_share(bench, tag, files);
        change_rank();
        return status;
}

static void end(void)
{
        for (int i = 0; i < NODES; i++) {
                if (nodes[i].is_up)
                        bench_done(&nodes[i].bench, true);
                if (*nodes[i].memory)
                        test_dir_remove(nodes[i].memory);
                nodes[i] = (struct node){ 0 };
        }
        node = nodes;
        failures = 0;
        is_read_only = false;
        strcpy(present, "0");
        for (int i = 0; i < PATHS; i++) {
                if (*storages[i])
                        storage_remove(storages[i]);
                *storages[i] = 0;
        }
        storage = storages[0];
}

static void list_storage(void)
{
        struct manifest_scan scan = { 0 };
        struct store *store = storage_look(storage);

        if (atoi(present))
                strcpy(present, "0");
        make_fault("0"); /* the answer is the truth */
        if (!manifest_scan(store, &scan, NULL))
                for (size_t i = 0; i < scan.count; i++)
                        printf("%s%s", i ? " " : "", scan.manifests[i].tag);
        printf("\n");
        make_fault(present);
        manifest_scan_done(&scan);
        store_close(store);
}

static void prune(const char *tag)
{
        struct manifest manifest = { 0 };
        struct store *store = storage_look(storage);
        struct pins pins = { 0 };
        bool is_removed = !pins_load(store, false, &pins, NULL) && !pins_find(&pins, tag) && !manifest_load(store, tag, &manifest, NULL) &&
                          !manifest_remove(store, &manifest, NULL);

        printf(is_removed ? "ok\n" : "none\n");
        pins_done(&pins);
        manifest_done(&manifest);
        store_close(store);
}

static void pin(const char *tag, bool wanted)
{
        struct store *store = storage_look(storage);
        bool is_done = wanted ? !pin_put(store, tag, "", NULL) : !pin_remove(store, tag, NULL, NULL);

        printf(is_done ? "ok\n" : "error\n");
        store_close(store);
}

static void play(char *line)
{
        static struct os_table table;
        char *rest = NULL, *word = strtok_r(line, " ", &rest), *first = strtok_r(NULL, " ", &rest);

        if (!*storage) {
                for (int i = 0; i < PATHS; i++)
                        storage_make(storages[i]);
                table = os_linux;
                table.opendir_below = opendir_that_fails;
                table.open_below = open_unless_read_only;
                table.mkdir_below = mkdir_unless_read_only;
                table.rename_below = rename_unless_read_only;
                table.rename_new_below = rename_new_unless_read_only;
                table.link_below = link_unless_read_only;
                table.unlink_below = unlink_unless_read_only;
                os = &table;
                make_fault("0");
        }
        if (!strcmp(word, "node")) {
                node = &nodes[atoi(first) % NODES];
                printf("ok\n");
        } else if (!strcmp(word, "run")) {
                const char *keep = strtok_r(NULL, " ", &rest), *path = strtok_r(NULL, " ", &rest);

                begin_run(first, (uint32_t)atoi(keep), *path - 'A', (uint32_t)atoi(rest));
                printf("ok\n");
        } else if (!strcmp(word, "scan")) {
                printf(storage_scan(&agent_of()->catalogue, agent_of()->job, NULL) ? "fails\n" : "ok\n");
        } else if (!strcmp(word, "newest") || !strcmp(word, "load")) {
                answer_find(first ? first : "");
        } else if (!strcmp(word, "save")) {
                struct bench *bench = agent_of();

                if (save(bench, first, rest))
                        printf("error %s\n", bench->error.message);
                else
                        printf("ok\n");
        } else if (!strcmp(word, "persist")) {
                catalogue_lock(&agent_of()->catalogue);
                due_want_all(&node->bench.catalogue, NULL); /* no attempt waits for its pause */
                catalogue_unlock(&node->bench.catalogue);
                worker_run(&node->bench.catalogue, node->bench.job);
                list_storage();
        } else if (!strcmp(word, "kill") || !strcmp(word, "forget")) {
                if (node->is_up)
                        bench_done(&node->bench, !strcmp(word, "forget"));
                node->is_up = false;
                printf("ok\n");
        } else if (!strcmp(word, "fault")) {
                snprintf(present, sizeof present, "%s", first);
                make_fault(first);
                printf("ok\n");
        } else if (!strcmp(word, "prune")) {
                prune(first);
        } else if (!strcmp(word, "pin") || !strcmp(word, "unpin")) {
                pin(first, !strcmp(word, "pin"));
        } else if (!strcmp(word, "end")) {
                end();
                printf("ok\n");
        } else {
                printf("error no command %s\n", word);
        }
        fflush(stdout);
}

int main(int argc, char **argv)
{
        char line[1024];

        lists_late = argc > 1 && !strcmp(argv[1], "late");
        while (fgets(line, sizeof line, stdin)) {
                line[strcspn(line, "\n")] = 0;
                if (*line)
                        play(line);
        }
        end();
        return 0;
}
