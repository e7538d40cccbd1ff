/*
 * lifecycle.h - the states of a version and the allowed moves between them.
 *
 *      capturing ──► captured ──► committed ──► replicated ──► durable
 *          │             │            │    └────────────────────► ▲
 *          └─────────────┴────────────┴──────────┴──► failed
 *
 * Each state is a promise (docs/durability.md), so a version never moves back:
 * a tag that is written again is a new version. The time of every move is
 * recorded. A move that the table does not allow is a broken invariant: the
 * caller then ends the agent, because its data about memory cannot be trusted.
 */
#ifndef NB_AGENT_CATALOGUE_LIFECYCLE_H
#define NB_AGENT_CATALOGUE_LIFECYCLE_H

#include <stdbool.h>

#include "nebula.h"

#define LIFECYCLE_MOVE_MAX 8 /* more than enough: a version enters each of the six states at most once */

struct lifecycle_move {
        enum nebula_state state;
        double at; /* seconds since 1970 */
};
struct lifecycle {
        enum nebula_state state;
        struct lifecycle_move moves[LIFECYCLE_MOVE_MAX];
        uint32_t move_count;
};

/* Begins in any state: the past of a version that was found again is unknown. */
void lifecycle_init(struct lifecycle *life, enum nebula_state state, double at);
bool lifecycle_allowed(enum nebula_state from, enum nebula_state to);
/* False if the table forbids the move; nothing changes then. */
bool lifecycle_move(struct lifecycle *life, enum nebula_state to, double at);
/* When `state` was entered; 0: never. */
double lifecycle_at(const struct lifecycle *life, enum nebula_state state);
/* Whether a version in `state` can be loaded. */
bool lifecycle_complete(enum nebula_state state);
/* Whether the promise `wanted` holds in `state`. */
bool lifecycle_reached(enum nebula_state state, enum nebula_state wanted);
/* Whether the recorded moves agree with the table and with the state. */
bool lifecycle_sound(const struct lifecycle *life);

#endif
