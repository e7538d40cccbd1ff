/*
 * tag_log.h - the log of one tag: <tag>/.nebula/manifest-<n>.json for n = 1, 2, ...
 *
 *      tag_log_head       the newest entry: a version, a removal, or none
 *      tag_log_entry      any other one
 *      tag_log_next       the number of the next entry
 *      tag_log_create     makes that entry, if its number is free
 *      tag_log_take_back  removes the caller's own entry
 *
 * An entry is created and never replaced: compare-and-swap by name. A finished removal with number n leaves the object
 * <root>/.nebula/removed/<tag>/<n>, and the numbers of later entries follow n. An entry is dead if its number is not above
 * the largest such n.
 * tests/model/storage_model.py shows that each of these rules is needed.
 *
 * Threads: no shared state. Errors are the store's.
 */
#ifndef NB_STORE_TAG_LOG_H
#define NB_STORE_TAG_LOG_H

#include "store/lister.h"
#include "store/manifest.h"

/* The newest entry of a log, as a list shows it. */
struct tag_head {
        uint64_t number; /* 0: the log is empty */
        uint64_t stamp;  /* the checksum of the entry's stamp */
};
struct tag_log {
        uint64_t number;     /* of the entry; 0: there is none */
        bool is_removal;     /* the entry is a removal: the tag has no version */
        bool is_unsound;     /* the entry cannot be read: `unsound` says why */
        struct nebula_error unsound;
        struct manifest manifest; /* else: the version */
};

/* Reads the newest entry of a tag's log. An unsound entry is no failure. NEBULA_STORAGE: the listing is older than the log; try again
 * later. */
enum nebula_status tag_log_head(struct store *store, const char *tag, struct tag_log *ret_log, struct nebula_error *error);
void tag_log_done(struct tag_log *log);
/* Reads any entry of the log. NEBULA_NOT_FOUND: it has none with that number. */
enum nebula_status tag_log_entry(struct store *store, const char *tag, uint64_t number, struct tag_log *ret_log, struct nebula_error *error);
/* Finds the newest entry without reading it. `lister`: of the store, for callers that look at many tags in ascending order; NULL: the tag is
 * listed by itself. */
enum nebula_status tag_log_look(struct store *store, struct lister *lister, const char *directory, struct tag_head *ret_head,
                                struct nebula_error *error);
/* The newest number, without reading that entry; 0: the log is empty. */
enum nebula_status tag_log_number(struct store *store, const char *tag, uint64_t *ret_number, struct nebula_error *error);
/* The next number: above `newest` and above the last removal. */
enum nebula_status tag_log_next(struct store *store, const char *tag, uint64_t newest, uint64_t *ret_number, struct nebula_error *error);
/* NEBULA_BUSY: the number is taken. */
enum nebula_status tag_log_create(struct store *store, const char *tag, uint64_t number, const char *text, size_t size,
                                  struct nebula_error *error);
enum nebula_status tag_log_take_back(struct store *store, const char *tag, uint64_t number, struct nebula_error *error);
enum nebula_status tag_log_key(const char *directory, uint64_t number, char ret_key[MANIFEST_KEY_MAX], struct nebula_error *error);

/* The number of the last finished removal of an encoded tag; 0: none. */
enum nebula_status tag_log_removed(struct store *store, const char *directory, uint64_t *ret_number, struct nebula_error *error);
enum nebula_status tag_log_set_removed(struct store *store, const char *directory, uint64_t number, struct nebula_error *error);
/* How often a run has written the tag, for nodes that count the writings of a tag that was removed. `run`: the first WRITING_RUN_CHARS of
 * writing_prefix. The object <root>/.nebula/removed/<tag>/<run> has the number. NEBULA_NOT_FOUND: no removal has left one. */
enum nebula_status tag_log_set_writings(struct store *store, const char *directory, const char *run, uint64_t count, struct nebula_error *error);
enum nebula_status tag_log_writings(struct store *store, const char *directory, const char *run, uint64_t *ret_count, struct nebula_error *error);
/* Removes the numbers of removals that ended so long ago. A writer or a removal that pauses for longer can take the number of such an entry again. */
#define TAG_LOG_REST_NS (7 * 86400 * SECOND_NS)
enum nebula_status tag_log_sweep(struct store *store, int64_t age_ns, struct nebula_error *error);
/* The same with a time of the store's clock. */
enum nebula_status tag_log_sweep_before(struct store *store, int64_t before_ns, struct nebula_error *error);

/* A removal, as an entry of the log. */
struct removal {
        char tag[256];
        uint64_t number;
};
enum nebula_status removal_format(const struct removal *removal, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status removal_parse(const char *text, size_t size, struct removal *ret_removal, struct nebula_error *error);

#endif
