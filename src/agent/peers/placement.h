/*
 * placement.h - chooses the nodes that hold a node's copies: a pure function of the members.
 *
 * The members are on a ring, in the order of a hash of their names, so that
 * neighbours on it are seldom neighbours in a rack. The copies of a node go to
 * the members that follow it. So each node holds exactly as many copies as it
 * makes, never its own. When a member comes or goes, the copies of one node
 * move (with k copies: those of k nodes).
 */
#ifndef NB_AGENT_PEERS_PLACEMENT_H
#define NB_AGENT_PEERS_PLACEMENT_H

#include <stddef.h>

/*
 * Orders all other members for the copies of `self`, best first: in the order of the ring. `members` may have any order; equal names
 * count once; `self` need not be among them. Writes at most `count` indices of `members` into ret_order, and returns their number.
 */
size_t placement_order(const char *const *members, size_t count, const char *self, size_t *ret_order);

#endif
