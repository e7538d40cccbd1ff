/*
 * tag_log.h - the log of one tag: <tag>/.nebula/manifest-<n>.json for n = 1, 2, ...
 *
 *      tag_log_head       the newest entry: a version, a removal, or none
 *      tag_log_entry      any other one
 *      tag_log_next       the number of the next entry
 *      tag_log_create     makes that entry, if its number is free
 *      tag_log_take_back  removes the caller's own entry
 *
 * An entry is created and never replaced: compare-and-swap by name. After an empty log the numbers go on where a finished
 * removal ended: that left <root>/.nebula/removed/<tag>/<n>. An entry whose number is not above the largest such n is dead.
 * tests/model/storage_model.py shows that each of these rules is needed.
 *
 * Threads: no shared state. Errors are the store's.
 */
#ifndef NB_STORE_TAG_LOG_H
#define NB_STORE_TAG_LOG_H

#include "store/manifest.h"

struct tag_log {
        uint64_t number;     /* of the entry; 0: there is none */
        bool is_removal;     /* that entry says that the tag is gone */
        bool is_unsound;     /* that entry cannot be read: `unsound` says why */
        struct nebula_error unsound;
        struct manifest manifest; /* otherwise: the version */
};

/* Reads the newest entry of a tag's log. An entry that is not sound is no failure. NEBULA_STORAGE: the list is older than the log, try later. */
enum nebula_status tag_log_head(struct store *store, const char *tag, struct tag_log *ret_log, struct nebula_error *error);
void tag_log_done(struct tag_log *log);
/* Reads any entry of it. NEBULA_NOT_FOUND: there is none with that number. */
enum nebula_status tag_log_entry(struct store *store, const char *tag, uint64_t number, struct tag_log *ret_log, struct nebula_error *error);
/* The newest number, without reading that entry; 0: the log is empty. */
enum nebula_status tag_log_number(struct store *store, const char *tag, uint64_t *ret_number, struct nebula_error *error);
/* The number that follows `newest`, and the last removal. */
enum nebula_status tag_log_next(struct store *store, const char *tag, uint64_t newest, uint64_t *ret_number, struct nebula_error *error);
/* NEBULA_BUSY: the number is taken. */
enum nebula_status tag_log_create(struct store *store, const char *tag, uint64_t number, const char *text, size_t size,
                                  struct nebula_error *error);
enum nebula_status tag_log_take_back(struct store *store, const char *tag, uint64_t number, struct nebula_error *error);
enum nebula_status tag_log_key(const char *directory, uint64_t number, char ret_key[MANIFEST_KEY_MAX], struct nebula_error *error);

/* The number of the last finished removal of an encoded tag; 0: none is known. */
enum nebula_status tag_log_removed(struct store *store, const char *directory, uint64_t *ret_number, struct nebula_error *error);
enum nebula_status tag_log_set_removed(struct store *store, const char *directory, uint64_t number, struct nebula_error *error);

/* A removal, as an entry of the log. */
struct removal {
        char tag[256];
        uint64_t number;
};
enum nebula_status removal_format(const struct removal *removal, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status removal_parse(const char *text, size_t size, struct removal *ret_removal, struct nebula_error *error);

#endif
