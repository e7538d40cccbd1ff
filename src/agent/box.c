#include "agent/box.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "os/os_box.h"
#include "os/process.h"

#define PATHS_MAX 80
#define PATH_SIZE 4096

/* For libc, certificates, the names of hosts, and what /proc says of memory and of trainers. */
static const char *const system_paths[] = { "/etc", "/usr", "/lib", "/lib64", "/bin", "/proc", "/sys", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random",
                                            "/run/systemd/resolve", "/run/resolvconf", "/var/lib/ca-certificates" };
/* Below $HOME: where clouds' own programs keep credentials, and trusted keys. */
static const char *const home_paths[] = { ".aws", ".azure", ".config/gcloud", ".config/nebula" };
/* Files that settings name. */
static const char *const named[] = { "NEBULA_SIGN_KEY", "NEBULA_TRUSTED_KEYS", "NEBULA_SECRET_FILE", "AWS_CA_BUNDLE", "AWS_CONFIG_FILE",
                                     "AWS_SHARED_CREDENTIALS_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AZURE_FEDERATED_TOKEN_FILE",
                                     "GOOGLE_APPLICATION_CREDENTIALS", "SSL_CERT_FILE", "SSL_CERT_DIR" };

struct paths {
        char *list[PATHS_MAX + 1];
        size_t count;
};

static void add(struct paths *paths, const char *path)
{
        if (path && *path && paths->count < PATHS_MAX && (paths->list[paths->count] = strdup(path)))
                paths->count++;
}

static void paths_done(struct paths *paths)
{
        for (size_t i = 0; i < paths->count; i++)
                free(paths->list[i]);
}

static void add_read(struct paths *read)
{
        char path[PATH_SIZE];

        for (size_t i = 0; i < sizeof system_paths / sizeof *system_paths; i++)
                add(read, system_paths[i]);
        for (size_t i = 0; conf_env("HOME") && i < sizeof home_paths / sizeof *home_paths; i++) {
                snprintf(path, sizeof path, "%s/%s", conf_env("HOME"), home_paths[i]);
                add(read, path);
        }
        for (size_t i = 0; i < sizeof named / sizeof *named; i++)
                add(read, conf_env(named[i]));
}

static void add_write(struct paths *write, const struct ipc_place *place, const char *served)
{
        char path[PATH_SIZE];

        add(write, place->directory);
        add(write, place->memory);
        add(write, conf_env("NEBULA_SPILL_DIR"));
        while (*served) {
                size_t length = strcspn(served, ":");

                snprintf(path, sizeof path, "%.*s", (int)(length < sizeof path ? length : 0), served);
                add(write, path);
                served += length + (served[length] == ':');
        }
}

/* A machine that forbids the box, as some containers do, keeps no job from its agent, unless the user has asked for the box. */
static enum nebula_status refused(const char *choice, int result, const char *what, struct nebula_error *error)
{
        if (choice)
                return error_set(error, NEBULA_UNAVAILABLE, -result, "%s", what);
        log_event(LOG_LEVEL_WARN, "the agent keeps all its rights: %s: %s", what, os_error_text(result));
        return NEBULA_OK;
}

enum nebula_status agent_box_enter(const struct ipc_place *place, struct nebula_error *error)
{
        const char *choice = conf_env("NEBULA_BOX"), *served = conf_env("NEBULA_AGENT_PATHS");
        struct paths read = { 0 }, write = { 0 };
        struct os_box box = { 0 };
        int parts, result;

        if (choice && !strcmp(choice, "off"))
                return NEBULA_OK;
        if (choice && strcmp(choice, "on"))
                log_event(LOG_LEVEL_WARN, "NEBULA_BOX is \"%.60s\": it must be on or off, and on counts", choice);
        result = os_programs_start();
        if (result < 0)
                return refused(choice, result, "cannot start the process that starts programs", error);
        if (served) {
                add_read(&read);
                add_write(&write, place, served);
                box = (struct os_box){ (const char *const *)read.list, (const char *const *)write.list };
        }
        parts = os_box_enter(&box);
        paths_done(&read);
        paths_done(&write);
        if (parts < 0)
                return refused(choice, parts, "the agent cannot give up rights; NEBULA_BOX=off lets it keep them", error);
        log_event(LOG_LEVEL_INFO, "the agent gets no new privileges%s%s%s", parts & OS_BOX_CALLS ? ", starts no programs" : ", and may start programs: this kernel has no seccomp",
                  !served ? "" : parts & OS_BOX_PATHS ? ", and opens files below these paths alone: " : ", and opens all files: this kernel has no Landlock",
                  served && parts & OS_BOX_PATHS ? served : "");
        return NEBULA_OK;
}
