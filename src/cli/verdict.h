/* verdict.h - prints the agent's verdict on a job (agent/clients/verdict.h). */
#ifndef NB_CLI_VERDICT_H
#define NB_CLI_VERDICT_H

#include <jansson.h>

/* "broken for 4 min: reason", and what to do below it. `rest` follows on the same line if the job is fine, and else on one of its own; "": none.
 * An older agent has no verdict: then only `rest` is printed. */
void verdict_print(const json_t *verdict, const char *name, const char *rest);
/* Each of an array. */
void verdict_print_all(const json_t *verdicts);
/* 0 fine, 1 at risk, 2 broken; -1: an older agent has not said. */
int verdict_number(const json_t *verdict);

#endif
