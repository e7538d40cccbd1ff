/*
 * persist_resume_private.h - the uploads of an interrupted attempt, which this one continues.
 */
#ifndef NB_AGENT_PERSIST_PERSIST_RESUME_PRIVATE_H
#define NB_AGENT_PERSIST_PERSIST_RESUME_PRIVATE_H

#include "agent/persist/persist_plan_private.h"

/* The number of the try: that of an interrupted attempt, or a new one. Lock held. */
uint32_t persist_choose_try(const struct version *version);
/* Sets with which upload the file goes on, and which function gets the texts of uploads. */
void persist_set_resume(struct plan *plan, struct plan_file *file, const char *key);
/* Call before the record is written: no later attempt goes on with this try. */
void persist_end_try(struct plan *plan);
/* Ends uploads. Stops at the first failure: a sweep ends the others. */
void persist_forget(struct store *store, const struct unfinished *list, bool only_unused);

#endif
