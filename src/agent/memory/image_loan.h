/*
 * image_loan.h - finds memory for one file of a version: a free image that fits, a
 * new one, or one that older versions give up.
 */
#ifndef NB_AGENT_MEMORY_IMAGE_LOAN_H
#define NB_AGENT_MEMORY_IMAGE_LOAN_H

#include "agent/catalogue/catalogue.h"

/*
 * Lends an image for the file. *ret_version is the version that the file belongs to, perhaps a new one. It is set
 * even if the file is refused, if a version was begun or found. Call with the lock held; drops it while it makes pages or
 * waits for room. `given_up` is called now and then during a long wait. NULL: does not wait; if a wait would be needed,
 * *ret_loan is NULL.
 */
enum nebula_status image_loan_open(struct catalogue *catalogue, struct session *session, const struct ipc_image *request,
                                   bool (*given_up)(void *argument), void *argument, struct version **ret_version,
                                   struct image_loan **ret_loan, struct nebula_error *error);

/*
 * Records the loan in the survival log, after the answer was sent, because the trainer waits for the answer. If the agent
 * is killed in between, the next agent does not know the image; the trainer then copies the file from its mapping into
 * another image. Takes the lock.
 */
void image_loan_record(struct catalogue *catalogue, uint64_t version_id);

#endif
