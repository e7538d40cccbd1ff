/*
 * publish.h - versions that also appear at paths that a framework chose.
 *
 * A job has one list of requests, in the order in which they were made:
 *
 *     file        one file of a version is to appear at a path
 *     directory   all files of a version are to appear below a path, together
 *                 with the files of a staging directory
 *     removal     a path is to be removed
 *
 * * A publish happens when its version is in storage, and always by one rename.
 * * The file shares blocks with the stored one if the file system can do that;
 *   otherwise it is a verified copy.
 * * A publish that fails is tried again, and does not hold up other paths.
 * * A removal happens after all earlier publishes in the list. So if a framework
 *   saves the new file and then removes the old one, one of the two is always there.
 * * A removal cancels earlier publishes of its own path that have not happened.
 * * If a publish was cancelled or failed, removals wait until a later one has
 *   happened.
 *
 * Removing a directory that was published, or was to be, also removes its version
 * from memory and storage as soon as no thread reads it. <directory>/.nebula.json
 * names the version. If the directory never appeared, the removal request itself
 * names it.
 *
 * The list is in the memory directory as <id>.publish, and outlives the agent
 * together with the images. Requests that happened stay in the list, so that a path
 * can be looked up. A power loss may leave temporary names beside the path
 * (docs/formats.md); a later publish there removes them.
 *
 * Call all functions with the catalogue's lock held, except where a comment says
 * otherwise.
 */
#ifndef NB_AGENT_PUBLISH_PUBLISH_H
#define NB_AGENT_PUBLISH_PUBLISH_H

#include "agent/catalogue/catalogue.h"
#include "os/os.h"

enum publish_kind { PUBLISH_FILE, PUBLISH_DIRECTORY, PUBLISH_REMOVAL };
enum publish_state { PUBLISH_PENDING, PUBLISH_DONE, PUBLISH_FAILED };

struct publish {
        struct publish *next;
        uint64_t id; /* part of the names of its temporary files */
        enum publish_kind kind;
        enum publish_state state;
        bool cancelled, is_reported;
        bool replaces; /* this directory replaces one that was to be removed */
        bool taken;    /* of a removal: the path is gone, and only the version is left to remove */
        uint64_t version_id, sequence; /* of a removal: those of the last directory that was to appear at its path */
        char tag[IPC_NAME_MAX], name[IPC_NAME_MAX];
        char *path, *staging; /* of a removal: staging of the directory that it cancelled; equal to path: only staged files are removed */
        uint64_t inode, size; /* of the published file: a different file there is not ours */
        int64_t mtime_ns;
        int64_t done_ns; /* when this agent published it; 0: an earlier agent did */
        int64_t retry_at_ns, failed_ns;
        uint32_t attempt;
        struct nebula_error error;
};

/* The state of a path. Its file system may hang, so the caller looks without the lock. */
struct publish_look {
        struct os_stat stat; /* all zero: the path does not exist */
        size_t there;        /* length of the longest part of the path that exists */
        int64_t at_ns;
};
/* Without the lock. */
void publish_look(const char *path, struct publish_look *ret_look);

enum nebula_status publish_request(struct catalogue *catalogue, struct version *version, const struct ipc_publish *request,
                                   struct nebula_error *error);
/* NEBULA_INVALID also if the path is, or contains, a job's storage path. */
enum nebula_status publish_remove(struct catalogue *catalogue, struct job *job, const char *path, struct nebula_error *error);
/* The loadable version that is, or will be, at `path`; NULL: none. *ret_open: an incomplete version may appear there. */
struct version *publish_find(struct catalogue *catalogue, struct job *job, const char *path, const struct publish_look *look,
                             char ret_name[IPC_NAME_MAX], bool *ret_open);
/* Whether a publish of this version is still to happen. */
bool publish_waits(const struct version *version);
/* Why this version could not be published. With version NULL: the job's failures that were not reported yet. NEBULA_OK: there are none. */
enum nebula_status publish_failure(struct job *job, const struct version *version, struct nebula_error *error);
/* Whether some publish can happen now or will be tried again, and has not failed since `since_ns`. INT64_MAX: counts failed ones too. */
bool publish_pending(struct catalogue *catalogue, struct job *job, int64_t since_ns);
/* Whether a removal that waits for no publish is still to happen, also one whose version a thread reads or writes. */
bool publish_removes(const struct job *job);
/* For the job's worker only: does one request, and drops the lock meanwhile. False: nothing can be done now; *due is lowered. */
bool publish_work(struct catalogue *catalogue, struct job *job, int64_t now_ns, int64_t *due);

#endif
