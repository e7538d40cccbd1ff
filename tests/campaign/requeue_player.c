/*
 * Plays stories of a job that moves between nodes, thousands a minute: requeue.py writes them and judges the answers.
 *
 * Each node is an agent's catalogue without threads, with a memory directory of its own; all share one storage. A command is a line, and so is
 * its answer:
 *
 *      node N                  the next commands are of node N
 *      run NAME KEEP           a run of the job begins here; KEEP: keep_last
 *      scan                    the worker's scan: ok or fails
 *      newest / load TAG       TAG PASSED name=value ..., none, or error REASON
 *      save TAG name=value ... commits: ok, or error REASON
 *      persist                 the worker makes what is due durable and lets retention act: the tags in storage
 *      kill / forget           the agent is killed; forget: its memory is lost, too
 *      fault N                 the next N listings of all nodes fail (-1: all)
 *      prune TAG               removes the version from storage by hand: ok or none
 *      end                     removes everything
 *
 * A value is a number from 1 to 255, the seed of the file's bytes.
 */
#include <errno.h>
#include <limits.h>

#include "agent/agent_catalogue.h"
#include "agent/agent_storage.h"
#include "agent/commit/ancestry.h"
#include "agent/commit/lineage.h"
#include "agent/log.h"
#include "agent/persist/worker.h"
#include "agent/restore/restore.h"
#include "store/manifest.h"

#define NODES 4
#define FILE_BYTES 96u

struct node {
        struct bench bench;
        bool is_up;
        char memory[256];
        char run[64];
        uint32_t keep;
};

static struct node nodes[NODES], *node = nodes;
static char storage[256];
static _Atomic int failures;

static int opendir_that_fails(const char *root, const char *key, struct os_dir **ret_dir)
{
        return failures > 0 && failures-- ? -EIO : os_linux.opendir_below(root, key, ret_dir);
}

/* The agent of the present node, which starts if there is none. */
static struct bench *agent_of(void)
{
        if (!*node->memory)
                test_dir_make_quick(node->memory);
        if (!node->is_up)
                bench_init(&node->bench, node->memory, storage);
        node->is_up = true;
        return &node->bench;
}

static void begin_run(const char *name, uint32_t keep)
{
        struct bench *bench = agent_of();
        struct session *session = &bench->session;
        static uint64_t nonce = 100;

        *session = (struct session){ .job = bench->job, .nonce = ++nonce, .pid = os->pid(), .seen_pid = os->pid(), .world = 1, .connection_count = 1,
                                     .role = IPC_ROLE_TRAINER };
        snprintf(session->run, sizeof session->run, "%s", name);
        snprintf(bench->job->run, sizeof bench->job->run, "%s", name);
        catalogue_lock(&bench->catalogue);
        bench_keep(bench->job, keep);
        bench->job->settings.world = bench->job->settings.local_world = 1;
        ancestry_begin(bench->job, name);
        catalogue_unlock(&bench->catalogue);
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
        if (version) { /* as the agent does for a trainer that has read a file */
                lineage_read(&bench->session, version, IPC_SOURCE_MEMORY);
                if (strcmp(version->run, bench->session.run))
                        ancestry_follow(&bench->session, version->run, version->sequence);
        }
        catalogue_unlock(&bench->catalogue);
}

/* `files`: name=value ... */
static enum nebula_status save(struct bench *bench, const char *tag, char *files)
{
        struct version *version;
        uint64_t id;
        char *rest = NULL;
        enum nebula_status status = NEBULA_OK;

        catalogue_lock(&bench->catalogue);
        version = commit_begin(&bench->catalogue, &bench->session, tag, NEBULA_FILES_ALL_RANKS, &bench->error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench->catalogue);
        if (!id)
                return NEBULA_INVALID;
        for (char *one = strtok_r(files, " ", &rest); one && !status; one = strtok_r(NULL, " ", &rest)) {
                char *value = strchr(one, '=');

                *value++ = 0;
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
        if (*storage)
                storage_remove(storage);
        *storage = 0;
}

static void list_storage(void)
{
        struct manifest_scan scan = { 0 };
        struct store *store = storage_look(storage);
        int held = failures;

        failures = 0; /* the answer is the truth */
        if (!manifest_scan(store, &scan, NULL))
                for (size_t i = 0; i < scan.count; i++)
                        printf("%s%s", i ? " " : "", scan.manifests[i].tag);
        printf("\n");
        failures = held;
        manifest_scan_done(&scan);
        store_close(store);
}

static void prune(const char *tag)
{
        struct manifest manifest = { 0 };
        struct store *store = storage_look(storage);
        bool is_removed = !manifest_load(store, tag, &manifest, NULL) && !manifest_remove(store, &manifest, NULL);

        printf(is_removed ? "ok\n" : "none\n");
        manifest_done(&manifest);
        store_close(store);
}

static void play(char *line)
{
        static struct os_table table;
        char *rest = NULL, *word = strtok_r(line, " ", &rest), *first = strtok_r(NULL, " ", &rest);

        if (!*storage) {
                storage_make(storage);
                table = os_linux;
                table.opendir_below = opendir_that_fails;
                os = &table;
        }
        if (!strcmp(word, "node")) {
                node = &nodes[atoi(first) % NODES];
                printf("ok\n");
        } else if (!strcmp(word, "run")) {
                begin_run(first, (uint32_t)atoi(rest));
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
                worker_want_all(&node->bench.catalogue, NULL); /* no attempt waits for its pause */
                catalogue_unlock(&node->bench.catalogue);
                worker_run(&node->bench.catalogue, node->bench.job);
                list_storage();
        } else if (!strcmp(word, "kill") || !strcmp(word, "forget")) {
                if (node->is_up)
                        bench_done(&node->bench, !strcmp(word, "forget"));
                node->is_up = false;
                printf("ok\n");
        } else if (!strcmp(word, "fault")) {
                failures = atoi(first) < 0 ? INT_MAX : atoi(first);
                printf("ok\n");
        } else if (!strcmp(word, "prune")) {
                prune(first);
        } else if (!strcmp(word, "end")) {
                end();
                printf("ok\n");
        } else {
                printf("error no command %s\n", word);
        }
        fflush(stdout);
}

int main(void)
{
        char line[1024];

        while (fgets(line, sizeof line, stdin)) {
                line[strcspn(line, "\n")] = 0;
                if (*line)
                        play(line);
        }
        end();
        return 0;
}
