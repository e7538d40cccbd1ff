/*
 * version.h - a version: one writing of one tag, its parts and its loans.
 *
 * It collects files from the ranks (parts) and becomes complete once. Its state changes by version_move alone. The catalogue's lock
 * guards it; slow work is done without the lock, on a pinned version, which is not freed and keeps its images.
 */
#ifndef NB_AGENT_CATALOGUE_VERSION_H
#define NB_AGENT_CATALOGUE_VERSION_H

#include "agent/catalogue/files.h"
#include "agent/catalogue/lifecycle.h"
#include "ipc/ipc.h"
#include "store/line.h"
#include "store/manifest.h"

struct catalogue;
struct image;
struct job;

/* The version that a rank has loaded from. */
struct lineage_base {
        uint64_t read_at; /* a sequence, later than that of all versions committed before; 0: the rank loaded none */
        int64_t step;
        struct line line;
        enum ipc_source source; /* the slowest tier that a file came from */
        bool has_source;        /* false: the agent does not know the tier: a survival log without it described the version */
};
/* An image that a trainer copies into. */
struct image_loan {
        struct image_loan *next;
        struct image *image;
        char name[IPC_NAME_MAX];
        uint64_t size, nonce;
        enum ipc_format format;
        uint32_t rank;
        bool commits; /* the rank's part closes when this image is complete */
};
/* One rank's share of a version. */
struct part {
        uint32_t rank, pid, seen_pid, file_count; /* seen_pid: as in struct session */
        uint64_t nonce;
        bool closed;       /* no more files come from this rank */
        bool spoken_for;   /* closed before this writing began, without a file */
        bool begun_again;  /* the rank has begun the tag again after this writing was complete */
        double begun, captured;
        int64_t blocked_ns, copy_ns, cpu_ns;
        uint64_t fault_count;
};
/* Whether the agent trusts the files of a version in storage. */
enum version_copy {
        COPY_TRUSTED, /* they were written, and no reader has found damage */
        COPY_DOUBTED, /* a reader has found damage: the worker compares them with memory, and writes them again (persist/mend.h) */
        COPY_DAMAGED, /* the agent could not write them again */
};
/* One writing of one tag. */
struct version {
        struct version *next, *next_live, *next_marked;
        char tag[IPC_NAME_MAX], run[IPC_NAME_MAX]; /* kept here because loops over all versions compare them */
        struct job *job;
        uint64_t id, sequence;    /* sequence: 0 until the version is committed */
        uint64_t first_sequence;  /* that of its commit, if it got another since; 0: it did not */
        uint64_t writing;         /* this is the n-th writing of its tag in this run (world.h) */
        struct line line;         /* its line of history, from its commit on (lineage.h) */
        struct lineage_base base; /* the version that its ranks had loaded */
        double stopped;           /* when the trainers of the run before had ended, as its ranks began to save it; 0: not known */
        double stepped;           /* when they had made their last step; 0: not known */
        int64_t step, file_goal;  /* file_goal: > 0, NEBULA_FILES_OPEN or NEBULA_FILES_ALL_RANKS */
        int64_t next_goal;        /* file_goal of a request that begins this complete tag again; 0: there is none */
        uint32_t world;
        struct lifecycle life;
        bool is_deserted; /* failed because another rank than rank 0 had ended: rank 0, which writes the log, learns that from an event alone */
        struct part *parts;
        size_t part_count;
        struct part *idle_parts; /* ranks that closed this complete tag again without writing (commit.c) */
        size_t idle_count;
        struct agent_file *files; /* files.c adds and finds them */
        uint32_t *slots;          /* the hash table of names */
        size_t file_count, slot_count;
        struct image_loan *loans;
        uint32_t pins;
        uint32_t leases; /* of readers: retention leaves it, in storage too, unless a save needs its memory */
        bool in_memory;    /* it holds its images */
        bool is_remote;    /* peers hold it and this node does not */
        bool is_spread;    /* it has ranks on other nodes: documents in storage are exchanged (world.h) */
        bool wanted;       /* a client asked for it to be durable */
        bool stored;       /* a manifest in storage names it */
        enum version_copy copy;
        bool is_awaited;   /* a later writing of the tag takes its files over when storage has been read; it stays in memory while there is room */
        bool is_gone;      /* was durable, and another program has removed it from storage: searches for the newest skip it */
        bool line_due;     /* its line was given before storage was read */
        bool gives_way;    /* storage keeps another run's version of the tag instead */
        bool failed_by_storage; /* failed, but complete in memory */
        bool superseded;   /* left memory before it was due to be persisted, or was replaced by a later writing of its tag */
        bool recorded;     /* the history has its line */
        bool is_marked;    /* catalogue_unlock describes it in the survival log */
        bool files_changed; /* the next description has all files again */
        bool is_tombstone; /* it is not in job->live */
        bool adopted;      /* adopted from an earlier agent's survival log */
        int64_t adopted_ns; /* when it was adopted */
        int64_t activity_ns;
        double late_at;    /* when it was found to wait long for other ranks; 0: it was not */
        struct nebula_error error;
        /* A slot for each room: only the files of that room see the struct (room.h). */
        struct version_survival *survival;
        struct version_persist *persist;
        struct version_ancestry *ancestry;
        struct version_nodes *nodes;
        struct version_copies *copies;
};

/* Makes a version of `tag` in state capturing. */
struct version *version_new(struct catalogue *catalogue, struct job *job, const char *tag, struct nebula_error *error);
void version_free(struct catalogue *catalogue, struct version *version);
struct version *catalogue_version(struct catalogue *catalogue, uint64_t id);
struct version *catalogue_version_of_image(struct catalogue *catalogue, uint64_t image_id, struct image_loan **ret_loan);
/* The only way to change a state: checks the table, records the time, wakes waiters. A version that fails must have version->error set. */
void version_move(struct catalogue *catalogue, struct version *version, enum nebula_state state);
void version_fail(struct catalogue *catalogue, struct version *version, enum nebula_status status, const char *format, ...)
        __attribute__((format(printf, 4, 5)));
/* Gives up the loans of the version: files that trainers are still copying do not become part of it, and the
 * trainers learn that when they report them. */
void version_drop_loans(struct catalogue *catalogue, struct version *version);
/* Gives its images back; the version then becomes a tombstone. */
void version_forget_memory(struct catalogue *catalogue, struct version *version);
/* The failure of a version for a client: that of storage if storage failed it, else NEBULA_FAILED. Returns the status. */
enum nebula_status version_failure(const struct version *version, struct nebula_error *error);
/* Call when storage has a later writing of the tag. Searches, loads and take-overs skip the version from then on. */
void version_replaced(struct catalogue *catalogue, struct version *version);
/* Call when storage holds the version of this sequence of the same tag. If it is the later one, `version` will never be written to storage. */
void version_give_way(struct catalogue *catalogue, struct version *version, uint64_t sequence);
struct part *version_part(struct version *version, uint32_t rank); /* NULL: there is none */
struct part *version_part_get(struct version *version, uint32_t rank); /* makes it if needed; NULL: an allocation failed */
/* Whether storage has it and no reader has found it damaged there. Only then may the last image of it leave memory as one that is saved. */
bool version_is_safe(const struct version *version);
void version_set_copy(struct catalogue *catalogue, struct version *version, enum version_copy copy);
/* Call when a reader has found files of the version in storage missing or damaged, or all of them whole. */
void version_judge_copy(struct catalogue *catalogue, struct version *version, bool is_whole, const char *why);
/* The same for the versions of that tag and sequence (0: any) in the jobs of a storage path. */
void catalogue_judge_copies(struct catalogue *catalogue, const char *persist_path, const char *tag, uint64_t sequence, bool is_whole, const char *why);
/* Whether a reader has found the version of a manifest in that storage path damaged. */
bool catalogue_doubts(const struct catalogue *catalogue, const char *persist_path, const struct manifest *manifest);
/* Gives it another sequence than that of its commit, which programs may know. */
void version_renumber(struct version *version, uint64_t sequence);
/* Whether it was committed after that sequence, or will be. */
bool version_follows(const struct version *version, uint64_t sequence);
/* Whether it was committed with that sequence. */
bool version_is(const struct version *version, uint64_t sequence);
/* Whether a version of that sequence is one that FIND asks for. */
bool version_wanted(const struct ipc_find *wanted, uint64_t sequence);
/* The sequence of the version that wrote a file of this one. */
uint64_t version_file_sequence(const struct version *version, const struct agent_file *file);
/* Whether it is complete and holds every file's image. */
bool version_whole_in_memory(const struct version *version);
/* The newest sequence of the job that is in storage; 0: none. */
uint64_t version_stored_sequence(const struct job *job);
/* Whether that one is later, and the job's settings do not ask for this version, too. */
bool version_is_overtaken_by(const struct version *version, uint64_t stored_sequence);
/* Whether it should become durable by the job's settings and is not durable yet. */
bool version_unsaved(const struct version *version);
uint64_t version_size(const struct version *version);
/* The result in the history; NULL: it has not ended yet. */
const char *version_result(const struct version *version);
/* The version of a manifest in storage: an existing one, or a new tombstone in state durable. NULL: an allocation failed. */
struct version *catalogue_stored(struct catalogue *catalogue, struct job *job, const struct manifest *manifest);
/* Whether it is not complete yet, and may become so. */
bool version_open(const struct version *version);
/* The loan of a file that this rank still copies; NULL: none. */
const struct image_loan *version_loan_of(const struct version *version, uint32_t rank);
/* commit.c */
bool version_rank_copies(const struct version *version, uint32_t rank);

#endif
