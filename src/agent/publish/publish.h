/*
 * publish.h - versions that also appear where a framework wants them.
 *
 * A job has one list of requests, in the order in which they were made:
 *
 *      file        one file of a version is to appear at a path
 *      directory   all files of a version are to appear below a path, together
 *                  with what lies in a staging directory
 *      removal     a path is to go
 *
 * A publish happens when its version is in storage, and always by one rename. The
 * file shares blocks with the stored one where the file system can do that, and
 * else is a verified copy; a hard link only with NEBULA_PUBLISH=link. One that
 * fails is tried again by itself, and holds up no other path. A removal
 * happens when every publish before it in the list has: so a framework that
 * saves the new file and removes the old one never has neither. It cancels
 * publishes of its own path that have not happened. A publish that was
 * cancelled, or failed, holds removals up until a later one has happened.
 *
 * Removing a directory that was published, or was to be, also removes its version
 * from memory and storage, as soon as nobody reads it. <directory>/.nebula.json
 * says which version that is; the removal itself knows it of one that never appeared.
 *
 * The list lies in the memory directory as <id>.publish and outlives the agent
 * with the images. Requests that happened stay listed, so that a path can be
 * looked up. What a power loss leaves half done lies beside its path under a
 * name of ours (docs/formats.md), and goes with a later publish there.
 *
 * All functions need the catalogue's lock but where it says otherwise.
 */
#ifndef NB_AGENT_PUBLISH_PUBLISH_H
#define NB_AGENT_PUBLISH_PUBLISH_H

#include "agent/catalogue/catalogue.h"
#include "os/os.h"

enum publish_kind { PUBLISH_FILE, PUBLISH_DIRECTORY, PUBLISH_REMOVAL };
enum publish_state { PUBLISH_PENDING, PUBLISH_DONE, PUBLISH_FAILED };

struct publish {
        struct publish *next;
        uint64_t id; /* names its temporary files */
        enum publish_kind kind;
        enum publish_state state;
        bool cancelled, told;
        bool replaces; /* a directory that takes the place of one that was to be removed */
        bool taken;    /* a removal whose path is gone: only the version is left */
        uint64_t version_id, generation; /* of a removal: of the directory that was asked for last at its path */
        char tag[IPC_NAME_MAX], name[IPC_NAME_MAX];
        char *path, *staging; /* of a removal: of the directory that it cancelled; the same: nothing but what was staged goes */
        uint64_t inode, size; /* of the file as published: another one there now is not ours */
        int64_t mtime_ns;
        int64_t done_ns; /* when this agent did it; 0: one before it */
        int64_t retry_at_ns, failed_ns;
        uint32_t attempt;
        struct nebula_error error;
};

/* What lies at a path: its file system may hang, so it is asked without the lock. */
struct publish_look {
        struct os_stat stat; /* zeroes: nothing */
        size_t there;        /* bytes of the path's longest part that exists */
        int64_t at_ns;
};
/* Whether it can be a path that is published: absolute, and written in the plain way. */
enum nebula_status publish_check_path(const char *path, struct nebula_error *error);
/* Without the lock. */
void publish_look(const char *path, struct publish_look *ret_look);

enum nebula_status publish_request(struct catalogue *catalogue, struct version *version, const struct ipc_publish *request,
                                   struct nebula_error *error);
/* NEBULA_INVALID, too, for what is, or holds, the storage path of a job. */
enum nebula_status publish_remove(struct catalogue *catalogue, struct job *job, const char *path, struct nebula_error *error);
/* The loadable version that is, or will be, at `path`; NULL: none. *ret_open: one that is not whole yet may become it. */
struct version *publish_find(struct catalogue *catalogue, struct job *job, const char *path, const struct publish_look *look,
                             char ret_name[IPC_NAME_MAX], bool *ret_open);
/* Something of this version is still to appear. */
bool publish_waits(const struct version *version);
/* What could not be published of this version, or of the job (version NULL) and was not told yet; NEBULA_OK: all could. */
enum nebula_status publish_failure(struct job *job, const struct version *version, struct nebula_error *error);
/* There is something that can happen now, or will be tried again, and has not failed since then. INT64_MAX: or has. */
bool publish_pending(struct catalogue *catalogue, struct job *job, int64_t since_ns);
/* The job's worker only: does one thing, without the lock meanwhile. False: nothing can be done now; *due is lowered. */
bool publish_work(struct catalogue *catalogue, struct job *job, int64_t now_ns, int64_t *due);

/* At start, after the survival logs, before any thread. */
void publish_adopt_all(struct catalogue *catalogue);
/* At the end: the lists go from the memory directory. */
void publish_forget(struct catalogue *catalogue);
/* What memory holds of them, before catalogue_done. */
void publish_done(struct catalogue *catalogue);

#endif
