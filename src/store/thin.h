/*
 * thin.h - versions that keep some of their files: old checkpoints without the state of the optimizer.
 *
 * Thinning makes a new entry in the log of the tag. It is the same version, with its sequence, without some files; then it removes those files
 * from storage. Loads of the other files work as before. A load of a removed file fails with the reason.
 *
 * A rule is text, as the settings have it: "PATTERN=COUNT", several with commas between them. The newest COUNT versions keep the files that the
 * pattern names; `*`, `?` and `[...]` match as in a shell, and `*` also matches `/`.
 */
#ifndef NB_STORE_THIN_H
#define NB_STORE_THIN_H

#include "store/manifest.h"

#define THIN_RULES_MAX 8

struct thin_rule {
        char pattern[THIN_TEXT_MAX];
        uint32_t last; /* 1 or more */
};
struct thin_rules {
        struct thin_rule list[THIN_RULES_MAX];
        size_t count;
};

/* Reads a rule. NEBULA_INVALID: the error names the part that is wrong. "" has no rules. */
enum nebula_status thin_parse(const char *text, struct thin_rules *ret_rules, struct nebula_error *error);
/* Whether the version has lost its files of that pattern already. */
bool thin_has(const struct manifest *manifest, const char *pattern);
/* Notes that it has. Without room for the pattern it notes nothing: then the reason for a missing file is less exact. */
void thin_note(struct manifest *manifest, const char *pattern);
/* Thins a version. *ret_manifest: the version as it is now. *ret_bytes: the bytes that were removed; 0: no file matches.
 * NEBULA_BUSY: the tag was written again or removed meanwhile. NEBULA_INVALID: nothing would be left. */
enum nebula_status thin_version(struct store *store, const struct manifest *manifest, const char *pattern, struct manifest *ret_manifest,
                                uint64_t *ret_bytes, struct nebula_error *error);

#endif
