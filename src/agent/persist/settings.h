/*
 * settings.h - the settings of a job, for people: in the agent's report, and in storage.
 */
#ifndef NB_AGENT_PERSIST_SETTINGS_H
#define NB_AGENT_PERSIST_SETTINGS_H

#include <jansson.h>

#include "agent/catalogue/job.h"

#define SETTINGS_PREFIX MANIFEST_DIRECTORY "/settings-" /* and the encoded name of the job (docs/formats.md) */

/* By the names of init(). A rule without a word of it has 0. */
json_t *settings_json(const struct job_settings *settings);
#endif
