/*
 * doctor_save.h - `nebula doctor --save`: a whole life of a checkpoint, through the parts that a job uses. A process saves 16 MiB and dies; they are
 * loaded from the agent's memory, become durable, are loaded from storage, and are removed.
 *
 * All of it happens in a storage path of its own below <path>/.nebula, so that no job and no reader sees the checkpoint.
 */
#ifndef NB_CLI_DOCTOR_SAVE_H
#define NB_CLI_DOCTOR_SAVE_H

#include <jansson.h>
#include <stdbool.h>

/* The steps up to the first one that fails: [{"step", "ok", "seconds", "found"}]. False: one has failed. */
bool doctor_save(const char *path, json_t **ret_steps);
void doctor_save_print(const json_t *steps);
/* The process that saves and dies; it returns only if it cannot. */
int doctor_save_and_die(void);

#endif
