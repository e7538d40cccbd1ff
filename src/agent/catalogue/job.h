/*
 * job.h - a job: a storage path without links (location.h) and a name, with its settings and its versions. The catalogue's lock guards it.
 */
#ifndef NB_AGENT_CATALOGUE_JOB_H
#define NB_AGENT_CATALOGUE_JOB_H

#include <pthread.h>

#include "agent/catalogue/findings.h"
#include "agent/catalogue/known.h"
#include "ipc/ipc.h"

struct catalogue;
struct version;

#define TAG_SLOTS 2048    /* many more than tombstones, so that few tags share a slot */

/* The jobs of one storage path ("" is one too) share a worker, so that a storage that hangs holds up no other path (worker.h). */
struct lane {
        struct lane *next;
        struct catalogue *catalogue;
        struct job *jobs; /* NULL: the next storage path may have it; it is freed with the catalogue, so that a thread may signal it without the lock */
        pthread_cond_t work, event; /* catalogue.h */
        bool is_running;
        bool is_mending;     /* a thread compares versions with storage (persist/mend.h) */
        bool waited_in_vain; /* a save of its jobs waited for memory until its time limit, and no version has become durable there since */
};
/* A rule for the versions that stay in storage (store/order.h). */
struct keep_rule {
        uint32_t last;    /* 0: no rule */
        uint32_t best;    /* so many with the best `metric`; 0: none */
        bool best_is_largest;
        uint64_t every;   /* 0: none */
        uint32_t hourly, daily, weekly, within_s; /* store/order.h; 0: none */
        char metric[IPC_NAME_MAX];
        char items[IPC_NAME_MAX]; /* the rules of store/thin.h; "": none */
};
#define KEEP_RULES_MAX 8 /* of one job: sessions of one process may have different ones */

/* The settings that the job's trainers sent. */
struct job_settings {
        uint32_t umask, group; /* those of its trainers (os_create.h) */
        double persist_interval_s;
        uint32_t retention_count, on_full, world, local_world;
        uint32_t replica_count; /* copies in other nodes' memory */
        bool has_spares;        /* spare nodes may come, and are the first choice for them */
        struct keep_rule rules[KEEP_RULES_MAX]; /* a version stays in storage if one of them keeps it */
        uint32_t rule_count;                    /* 0: all stay */
        char items[IPC_NAME_MAX]; /* "": versions keep all files, also if the sessions have different rules for them */
        uint32_t awaited_rules; /* the agent before had so many rules of this run: all versions stay until its sessions are back */
};
struct job {
        struct job *next, *next_in_lane;
        struct lane *lane;
        struct session *sessions; /* newest first; also those whose connection broke just now */
        uint32_t trainer_count, trainer_session_count; /* trainers that are connected; all trainers among `sessions` (catalogue_session_set) */
        struct version *versions; /* newest first */
        struct version *live; /* the same without tombstones: work at every request must not grow with the past */
        size_t tombstone_count;
        uint64_t last_sequence; /* the largest of its versions' sequences, in memory and storage. Other jobs have sequences of their own */
        bool may_have_idle; /* some version may have idle_parts */
        bool is_scanned;             /* since this run began. The run before may have been on another node */
        int64_t scanned_ns;          /* when `known` was listed */
        uint64_t scans_asked;        /* by catalogue_job_ask_storage: a list of storage that began before the last of them is too old */
        bool scan_due;               /* the worker is to list storage */
        bool is_remover;             /* this agent has written the manifest of the newest version: it applies the rules */
        bool retain_due;             /* a version has become durable since the rules were applied, or they could not be applied to all */
        bool is_served;              /* the replica thread uses the job, so it stays */
        uint64_t given_way_count;    /* versions that another run's replaced */
        double rival_seen_at;        /* when another agent was seen to have versions of this job in memory; 0: never */
        /* A slot for each room: only the files of that room see the struct (room.h). */
        struct job_verdict *verdict;
        struct job_location *location;
        struct job_storage *storage;
        struct job_persist *persist;
        struct job_runs *runs;
        struct job_copies *copies;
        struct job_pulse *pulse;
        struct job_answers *answers;
        bool history_broken, latest_reported;
        bool spare_due;
        uint32_t late_saves; /* > 0: not long ago, a save began while more versions had to stay in memory than the settings say (memory_policy.c) */
        struct publish *publishes; /* oldest request first (publish.h) */
        uint32_t publish_attempt; /* failed attempts since the last success */
        int64_t idle_since_ns; /* when the last session left */
        uint32_t pins;         /* threads that use the job without the lock or while they wait, and hold no other part of it */
        int64_t left_ns;       /* since when catalogue_forget_job knows that the job is not needed; 0: it is needed */
        uint64_t last_guest;   /* sessions of other jobs up to this number may hold handles of its versions */
        /* Large ones last: passes over all jobs read few cache lines of each. */
        char persist_path[IPC_PATH_MAX], name[IPC_NAME_MAX];
        char spelling[IPC_PATH_MAX]; /* the storage path as the last trainer spelled it: other nodes may mount it elsewhere */
        char output_dir[IPC_PATH_MAX], run[IPC_NAME_MAX];
        struct job_settings settings;
        uint32_t tag_counts[TAG_SLOTS]; /* versions, including tombstones, by the hash of their tag: see job_may_have */
        struct known_versions known; /* what storage has; the worker and FIND write it (persist/storage.h) */
        struct finding findings[FINDING_KINDS];
};

struct job *catalogue_job(struct catalogue *catalogue, const char *persist_path, const char *name);
/* Makes it if needed; NULL: an allocation failed. */
struct job *catalogue_job_get(struct catalogue *catalogue, const char *persist_path, const char *name);
/* Applies a trainer's settings to the job. Settings that come from a survival log have zeros where the log has no value. */
void catalogue_job_configure(struct catalogue *catalogue, struct job *job, const struct ipc_hello *settings, const char *spelling);
/* Others may have changed storage since the agent listed it for the job: the worker lists it again. */
void catalogue_job_ask_storage(struct job *job);
/* A spare node waits for the job: its agent keeps copies. The job's other settings stay. */
void catalogue_job_await(struct catalogue *catalogue, struct job *job, const struct ipc_hello *settings, const char *spelling);
/* The rule that a trainer's settings give. */
struct keep_rule catalogue_rule(const struct ipc_hello *settings);
/* Whether old versions are removed, or some of their files. */
bool catalogue_has_rules(const struct job *job);
/* The job's versions stay by the rules of its newest run's connected sessions. Call it when one has got another rule. */
void catalogue_gather_rules(struct job *job);
/* Files and directories that the calling thread makes from now on get the permissions that the job's trainers would give. Lock held. */
void catalogue_create_as(const struct job *job);
/* Whether a session, a thread or memory needs the job, other than for copies on other nodes. */
bool catalogue_job_is_needed(const struct catalogue *catalogue, const struct job *job);
/* Forgets the job if no client has used it for as long as an idle agent stays, and its versions are only in storage. Without this an agent that
 * is never idle would collect jobs. `link`: of the catalogue's list. *due becomes earlier if the job may be forgotten later. */
bool catalogue_forget_job(struct catalogue *catalogue, struct job **link, int64_t now_ns, int64_t *due);
/* All jobs and lanes: the catalogue ends. */
void catalogue_free_jobs(struct catalogue *catalogue);
/* False: no version has this tag, so the caller need not walk over hundreds of tombstones. Most saves begin a new tag. */
bool job_may_have(const struct job *job, const char *tag);
/* The slot of a tag in tag_counts. */
size_t job_tag_slot(const char *tag);
/* The newest manifest of the tag that this agent knows in storage; NULL: none. */
const struct manifest *job_stored(const struct job *job, const char *tag);
/*
 * The sequence of the next version of this job: the time, or the last sequence plus one if the clock is behind that. A sequence from
 * storage or from a peer moves only this job's sequences, and never beyond the largest number of a document (store/document.h).
 */
uint64_t job_next_sequence(struct job *job);
void job_saw_sequence(struct job *job, uint64_t sequence);

#endif
