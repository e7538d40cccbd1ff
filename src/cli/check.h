/*
 * check.h - the work of `nebula verify`: checks every byte of a version or of a file. The result
 * is JSON, from which the text for people is printed too.
 *
 *     file:    {"name", "path", "size", "ok", "damage": [damage...]}
 *     damage:  {"offset", "size", "message"} and, in a zip image, "records": the names of the damaged records
 *     version: {"tag", "sequence", "ok", "size", "documents": [file...], "files": [file...]}
 *
 * The caller owns every returned object. NULL: an allocation failed.
 */
#ifndef NB_CLI_CHECK_H
#define NB_CLI_CHECK_H

#include <jansson.h>

#include "cli/target.h"

/* A check of some files of a version: of those behind the first `skip`, until `ends` says so after a file of so many bytes. */
struct check_part {
        size_t skip;
        bool (*ends)(void *argument, uint64_t bytes);
        void *argument;
        size_t done;  /* set: files that are checked, the skipped ones included */
        bool has_damage; /* set: one of them was not sound */
        bool is_over; /* set: `ends` has said so */
};
/* Reads no more than that many bytes a second from here on; 0: as fast as it can. */
void check_set_rate(double bytes_per_s);
/* So many bytes were read: shows it, and keeps the rate. One thread at a time; verify_file's others wait for it before they take another chunk. */
void check_read(uint64_t bytes);
/* `part` NULL: all files. `only_name`: checks that file alone; NULL: all. Calls progress_add with every byte that was read. If the store does not answer, that is no
 * damage: the check ends, *ret_outage is the failure, and the result says nothing about the version. */
json_t *check_version(struct store *store, const struct manifest *manifest, const char *only_name, struct check_part *part,
                      struct nebula_error *ret_outage);
/* Adds to each damaged file of a checked version the tags of other versions that have the same bytes there: files can share blocks. */
void check_name_sharers(struct store *store, const struct manifest *manifest, json_t *version);
/* Adds "signatures" (vouch.h) to a checked version. If a trusted key has signed it, compares the bytes of each sound file with that signature, too. */
void check_signatures(struct store *store, const struct manifest *manifest, json_t *version);
/* The result for a version whose manifest cannot be loaded. */
json_t *check_broken(struct store *store, const char *tag, const struct nebula_error *error);
/* Checks a zip file that no manifest lists, by its own CRC-32s. */
json_t *check_lone_file(const char *path);
bool check_ok(const json_t *object);

#endif
