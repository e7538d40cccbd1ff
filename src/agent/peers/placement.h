/*
 * placement.h - which node holds whose copies: a pure function of the members.
 *
 * The members stand on a ring, in the order of a hash of their names, so that
 * neighbours there are seldom neighbours in a rack; the copies of a node go to
 * those that follow it. Each node then holds exactly as many copies as it
 * makes, never its own, and a member that comes or goes changes the place of
 * one node's copies (of `k` nodes' for k copies).
 */
#ifndef NB_AGENT_PEERS_PLACEMENT_H
#define NB_AGENT_PEERS_PLACEMENT_H

#include <stddef.h>

/*
 * Where the copies of `self` go, best first: all other members in the order of the ring. `members` in any order, equal
 * ones count once; `self` need not be among them. Writes at most `count` indices of `members` into ret_order, returns how many.
 */
size_t placement_order(const char *const *members, size_t count, const char *self, size_t *ret_order);

#endif
