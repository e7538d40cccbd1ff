/*
 * writer.h - writes one version of a tag to a store, in the order of docs/formats.md. Nothing else makes the entry of a version.
 *
 *      writer_init     for one tag of a store
 *      writer_begin    reads the newest entry of the tag's log, which the new version follows
 *      writer_run      takes one of the lists of steps in writer.c. It ends at the first step that fails
 *      writer_done
 *
 * Between writer_begin and writer_run the caller fills in the head of `manifest`: tag, job, run, host, writing, sequence, step, world, line.
 * Where the bytes come from is the caller's matter (struct writer_source): images in an agent's memory, or another store.
 *
 * A version that is not visible yet fails without a trace that readers see; a sweep removes the rest. Once the entry exists, a failure leaves the
 * version in storage, or takes the entry back.
 *
 * Threads: one at a time for each writer.
 */
#ifndef NB_STORE_WRITER_H
#define NB_STORE_WRITER_H

#include "store/record.h"
#include "store/tag_log.h"

struct writer;

/* What a writer asks its caller for. `argument` is that of writer_init. NULL: the caller has nothing to do there. */
struct writer_source {
        /* Whether a new version may follow the entry `before`. Called when another program has made that entry meanwhile. */
        enum nebula_status (*may_follow)(void *argument, const struct manifest *before, struct nebula_error *error);
        /* Sends the files, so that no program sees them yet. */
        enum nebula_status (*upload)(void *argument, struct nebula_error *error);
        /* Fills in `shares`, and `is_carried`. */
        enum nebula_status (*describe)(void *argument, struct nebula_error *error);
        /* Shows the files at their keys. Returns when they are durable. */
        enum nebula_status (*publish)(void *argument, struct nebula_error *error);
        /* The version is durable, or about to be, and something else has failed. */
        void (*complain)(void *argument, const struct nebula_error *error);
        /* Brings what vouches for the version. NULL: the store's own key signs it, if there is one. */
        enum nebula_status (*attest)(void *argument, struct nebula_error *error);
        /* The manifest will name the record with this text. */
        void (*keep)(void *argument, const char *text, size_t size);
};

/* The SHA-256 of a file, from the record of an agent that has the store's own key. */
struct writer_digest {
        uint8_t sha256[32];
        bool is_known;
};

/* A part of the version that one record describes. */
struct writer_share {
        struct record record;
        bool lends_chunks; /* the checksums are the source's, and valid in `describe` and the next step */
        char *text;        /* of the record */
        size_t size;
        bool is_found;     /* WRITER_COPY: an earlier call made its claim or record */
};

/* The records that make a version of several nodes. */
struct writer_goal {
        const char *prefix;    /* of the names of their writings */
        const uint32_t *ranks; /* that the records must cover, ascending and below `world` */
        size_t rank_count;
        uint32_t world;
        size_t record_count;   /* no record is read before there are so many, unless `is_late` */
        bool is_late;
        bool is_earlier;       /* records that were meant for an earlier entry count, too */
};

struct writer {
        struct store *store;
        const struct writer_source *source;
        void *argument;
        char directory[256];       /* the tag, encoded */
        struct tag_log before;     /* the entry that the new one follows */
        struct manifest manifest;  /* the new version */
        struct writer_digest *digests; /* of the first `noted_count` files of `manifest`, those that this writing has made */
        size_t noted_count;
        struct writer_share *shares;
        size_t share_count;
        bool *is_carried;          /* per file of `before`: it carries over, with its record. NULL: none does */
        struct store_list taken;   /* the names in the tag's directory, once they are listed */
        bool has_list;
        const struct writer_goal *goal; /* of WRITER_GATHER */
        bool is_overtaken;         /* another program has changed the tag meanwhile: a new writer may succeed. A source's `publish` sets it
                                    * if a name is taken */
        int64_t entered_ns;        /* when it asked for its entry */
        bool is_taken_back;        /* the entry was made, but some objects that it names were missing */
        bool keeps_index;          /* the store has refused to remove the entry of the version before from the index */
        bool is_followed;          /* the version was written, and another program has made the next entry since */
        bool has_shared_names;     /* the records of two nodes have a file of the same name: no manifest can name both */
};

enum writer_way {
        WRITER_ALONE,  /* the source has all of the version */
        WRITER_FIRST,  /* the same without writer_begin, and without a look at the log before the entry: the caller knows of no version of the tag, and storage
                        * lists what was written (STORE_LISTS_FRESH). is_overtaken: there is one */
        WRITER_SHARE,  /* one node's part of a version; writer_number comes before */
        WRITER_GATHER, /* the manifest of a version whose parts are written */
        WRITER_REPEAT, /* the version is in storage, and was perhaps not concluded */
        WRITER_REBUILD, /* the entry of a version whose own one is damaged or missing (rebuild.h): as WRITER_THIN, and `describe` compares it */
        WRITER_THIN,   /* the entry of a version that keeps only the files in is_carried */
        WRITER_COPY,   /* as WRITER_ALONE, but goes on where an earlier call with the same names of writings was interrupted */
};

enum nebula_status writer_init(struct writer *writer, struct store *store, const struct writer_source *source, void *argument, const char *tag,
                               struct nebula_error *error);
void writer_done(struct writer *writer);
/* An unsound entry is no failure unless it cannot be read at present. */
enum nebula_status writer_begin(struct writer *writer, struct nebula_error *error);
/* NEBULA_STORAGE with is_overtaken: make a new writer. NEBULA_INVALID: may_follow said no. NEBULA_BUSY: WRITER_GATHER waits for records. */
enum nebula_status writer_run(struct writer *writer, enum writer_way way, struct nebula_error *error);
/* The version in storage is the one to write: a WRITER_REPEAT concludes it. */
void writer_take_found(struct writer *writer);
/* Sets the number of the new entry: after `before` and after the last removal. */
enum nebula_status writer_number(struct writer *writer, struct nebula_error *error);
/* Whether a new file must be stored below its writing: <tag>/<name> is taken, or may be a view. */
enum nebula_status writer_is_apart(struct writer *writer, const char *name, bool *ret_is_apart, struct nebula_error *error);
/* Adds an empty share. NULL: no memory. */
struct writer_share *writer_add_share(struct writer *writer, struct nebula_error *error);
/* Writes the claim of a share again, so that a sweep takes the share for a running one. */
void writer_touch(const struct writer *writer, const struct writer_share *share);
/* Removes this writer's objects: storage keeps another version of the tag. */
void writer_forsake(const struct writer *writer);
/* Removes the records that the manifest names and that this version wrote, so that each node writes its share again. */
void writer_drop_records(const struct writer *writer);

#endif
