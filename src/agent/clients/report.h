/*
 * report.h - the agent's knowledge as JSON text, for people and programs. Call
 * without the lock. The caller frees *ret_text.
 */
#ifndef NB_AGENT_CLIENTS_REPORT_H
#define NB_AGENT_CLIENTS_REPORT_H

#include "agent/catalogue/catalogue.h"

/* Versions in memory and storage. If session is NULL, or a tool's with path "": those of all jobs. persist_path is as jobs spell it; the
 * status repeats it. */
enum nebula_status report_text(struct catalogue *catalogue, const struct session *session, enum nebula_report report,
                               const char *persist_path, char **ret_text, struct nebula_error *error);
enum nebula_status report_version(struct catalogue *catalogue, uint64_t version_id, char **ret_text, struct nebula_error *error);

#endif
