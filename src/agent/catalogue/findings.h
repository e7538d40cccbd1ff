/*
 * findings.h - what the agent has found out about versions. Each is an event, a metric and a line of the log. The catalogue's lock
 * guards them.
 */
#ifndef NB_AGENT_CATALOGUE_FINDINGS_H
#define NB_AGENT_CATALOGUE_FINDINGS_H

#include "ipc/ipc.h"

enum finding_kind {
        FINDING_ROTTEN,     /* bytes of a version in memory have changed */
        FINDING_STALE,      /* a version has the values of the one before it, though its step is larger */
        FINDING_NOT_FINITE, /* a tensor has a NaN or an infinite value */
        FINDING_LEFT_MEMORY, /* a durable version left memory, because the machine was short of it */
        FINDING_KINDS
};
struct finding {
        double at;      /* of the last one, since 1970; 0: there was none */
        uint64_t count; /* since this agent began */
        char tag[IPC_NAME_MAX];
        char text[400];
};

struct catalogue;
struct job;
void finding_note(struct catalogue *catalogue, struct job *job, enum finding_kind kind, const char *tag, const char *format, ...)
        __attribute__((format(printf, 5, 6)));

#endif
