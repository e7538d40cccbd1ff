/*
 * retain.h - removes versions from storage: by the rules of the job's sessions, and for clients that ask.
 *
 * Only the agent that has written the last manifest applies the rules. Others forget the versions that it has removed.
 */
#ifndef NB_AGENT_PERSIST_RETAIN_H
#define NB_AGENT_PERSIST_RETAIN_H

#include "agent/catalogue/catalogue.h"

/* A version that a client wants to have removed. Its thread owns it and waits. */
struct asked_removal {
        struct asked_removal *next;
        char tag[256];
        bool is_taken, is_done;
        enum nebula_status status;
        struct nebula_error error;
};
/* A version that was removed, for the clients that follow events. */
struct removed {
        double at;
        uint64_t size;
        char tag[256], rules[512];
};
#define REMOVED_MAX 256 /* a client that is slower loses the oldest events; the log has all */

/* Applies the rules, for about a second. has_more: call it again when no version waits to be written. After an error call it again later.
 * Worker only, without the lock. */
enum nebula_status storage_retain(struct catalogue *catalogue, struct job *job, bool *ret_has_more, struct nebula_error *error);
/* Whether the rules are to be applied now, not after a pause. Lock held. */
bool retain_goes_on(const struct job *job);
/* NEBULA_INVALID: the version stays; the error says why. Worker only, without the lock. */
enum nebula_status storage_remove_tag(struct catalogue *catalogue, struct job *job, const char *tag, struct nebula_error *error);
/* The removal joins the list, or leaves it. Lock held. */
void retain_ask(struct job *job, struct asked_removal *removal);
void retain_unask(struct job *job, struct asked_removal *removal);
/* Takes the first removal off the list; NULL: there is none. Lock held. */
struct asked_removal *retain_take(struct job *job);
/* The first version that was removed after `since`; NULL: none. Lock held. */
const struct removed *retain_removed(const struct job *job, double since);

#endif
