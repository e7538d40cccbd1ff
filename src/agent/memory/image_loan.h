/*
 * image_loan.h - memory for one file of a version: a free image that fits, a new one,
 * or one that is gained by letting older versions go.
 */
#ifndef NB_AGENT_MEMORY_IMAGE_LOAN_H
#define NB_AGENT_MEMORY_IMAGE_LOAN_H

#include "agent/catalogue/catalogue.h"

/*
 * Lends an image for the file; *ret_version is where the file belongs (the next generation, perhaps), also when the file is
 * refused, if a version was begun or found. Called with the lock held; lets it go while it makes pages or waits for room. `given_up` is
 * asked now and then during a long wait; NULL: not to wait, and *ret_loan is NULL where that would be needed.
 */
enum nebula_status image_loan_open(struct catalogue *catalogue, struct session *session, const struct ipc_image *request,
                                   bool (*given_up)(void *argument), void *argument, struct version **ret_version,
                                   struct image_loan **ret_loan, struct nebula_error *error);

/*
 * Notes what was lent, after the answer: the trainer stands still until it has that. The agent may be killed in between; then the next one
 * does not know the image, and the trainer copies the file from its mapping into another. Takes the lock.
 */
void image_loan_record(struct catalogue *catalogue, uint64_t version_id);

#endif
