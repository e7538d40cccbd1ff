/*
 * lifecycle.h - the states of a version, and which moves there are.
 *
 *      capturing ──► captured ──► committed ──► replicated ──► durable
 *          │             │            │    └────────────────────► ▲
 *          └─────────────┴────────────┴──────────┴──► failed
 *
 * Each state is a promise (docs/durability.md), so a version never moves back:
 * a tag that is written again is a new version. Every move is kept with its
 * time. A move that the table does not hold is a broken invariant; the caller
 * ends the agent, since what it believes about its memory is wrong.
 */
#ifndef NB_AGENT_CATALOGUE_LIFECYCLE_H
#define NB_AGENT_CATALOGUE_LIFECYCLE_H

#include <stdbool.h>

#include "nebula.h"

#define LIFECYCLE_MOVE_MAX 8 /* there are six states, and none comes twice */

struct lifecycle_move {
        enum nebula_state state;
        double at; /* seconds since 1970 */
};
struct lifecycle {
        enum nebula_state state;
        struct lifecycle_move moves[LIFECYCLE_MOVE_MAX];
        uint32_t move_count;
};

/* Begins in any state: a version that was found again has a past that is not known. */
void lifecycle_init(struct lifecycle *life, enum nebula_state state, double at);
bool lifecycle_allowed(enum nebula_state from, enum nebula_state to);
/* False, and nothing changed, when the table forbids it. */
bool lifecycle_move(struct lifecycle *life, enum nebula_state to, double at);
/* When `state` was entered; 0: never. */
double lifecycle_at(const struct lifecycle *life, enum nebula_state state);
/* Whether a version in `state` can be loaded. */
bool lifecycle_complete(enum nebula_state state);
/* Whether the promise `wanted` holds in `state`. */
bool lifecycle_reached(enum nebula_state state, enum nebula_state wanted);
/* The moves that were kept agree with the table and with the state. */
bool lifecycle_sound(const struct lifecycle *life);

#endif
