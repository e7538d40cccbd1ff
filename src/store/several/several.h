/*
 * several.h - one storage path in several accounts or buckets, so that the limits of one of them do not limit a job.
 *
 *      az://ACCOUNT,ACCOUNT.../CONTAINER/PREFIX
 *      s3://BUCKET,BUCKET.../PREFIX
 *
 * Each member is a store of its own. The files of versions are spread over the members by a hash of their names; all other objects lie in the
 * first member. A file's name, and not its tag, decides: so the view of a file lies beside the file, and so do the files of earlier versions
 * from which a store can take bytes. The order of the members counts, so a reader needs the same URL as the writer.
 *
 * Times of entries are those of their members' clocks, which services keep within a second.
 */
#ifndef NB_STORE_SEVERAL_SEVERAL_H
#define NB_STORE_SEVERAL_SEVERAL_H

#include "store/store.h"

extern const struct store_ops store_several;
bool store_several_takes(const char *url);
/* NULL: the store has no such member, or is not of several. */
struct store *several_member(struct store *store, size_t index);
/* The index of the member that has the key, of `count`. */
size_t several_place(const char *key, size_t count);

#endif
